"""The engine's side: the weight transfer engine in each worker of a vLLM engine.

Threads of aiosync receive and stage updates while the engine generates. Only ``update_weights()``
changes the model, on the worker's own thread, from beginning to end. vLLM's calls before and after
it begin and end the time in which the update can be undone. Must not import the trainer's side.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
from collections.abc import Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from aiosync._repr import text_of
from aiosync.errors import (
    AiosyncError,
    ApplyError,
    ConfigError,
    ConnectError,
    LocalProtocolError,
    ManifestMismatch,
    RecvTimeout,
    SyncTimeout,
)
from aiosync.integrations.vllm._info import NO_COPY, AiosyncInitInfo, AiosyncUpdateInfo
from aiosync.sync import WeightSyncScheme
from aiosync.tensors.accelerator import accelerator
from aiosync.tensors.devices import uploaded

__all__ = ["AiosyncWeightTransferEngine"]

_logger = logging.getLogger(__name__)
_TEXT_NBYTES = 1024

Item = tuple[str, torch.Tensor]


class AiosyncWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM is optional
    """Transfer engine that receives weights in checkpoint format and loads them by vLLM's loaders.

    vLLM makes one in each worker of an engine with
    ``WeightTransferConfig(backend="aiosync")``, and calls it. Each worker is one receiver and
    gets the whole checkpoint; the loaders take its shard. See ``docs/topics/vllm.md``.
    """

    init_info_cls = AiosyncInitInfo
    update_info_cls = AiosyncUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._ranks = Ranks(self.parallel_config)
        self._reference: Reference | None = None  # kept for the next trainer, too
        self._check = "none"
        self._scheme: WeightSyncScheme | None = None
        self._undo: Undo | None = None
        self._loaded = 0  # version that the model has; 0 if it has none of this trainer

    # -- the link to the trainer ---------------------------------------------------------------

    def init_transfer_engine(self, init_info: AiosyncInitInfo) -> None:
        """Connect to the trainer, and stage its updates from now on; leave a previous trainer.

        Raises:
            ConnectTimeout: Nothing listened at the address in time; the engine goes on with its
                weights.
            ConnectError: The trainer refused.
            ConfigError: The init info cannot be used.
        """
        self.shutdown()
        try:
            with self._ranks.together():
                self._connect(init_info)
        except (AiosyncError, OSError, TypeError) as exc:
            self.shutdown()
            self._ranks.report(exc)

    def _connect(self, info: AiosyncInitInfo) -> None:
        """Connect this worker to the trainer; prepare to check updates and to undo them."""
        if info.rollback and getattr(self.parallel_config, "enable_eplb", False):
            raise ConfigError(
                "expert load balancing moves weights between updates, which a copy of them cannot "
                "follow: set rollback=False"
            )
        scheme = info.receiving_scheme()
        index = info.first_worker + self._ranks.index
        load = functools.partial(self._load, info)
        scheme.init_on_receiver(model_id=info.model_id, worker_idx=index, load=load)
        try:
            # Weights are loaded in update_weights(), on the thread that runs the model.
            scheme.connect(timeout=info.timeout, initial=False)
        except BaseException:  # raised again: init_transfer_engine() reports it
            scheme.shutdown()
            raise
        self._scheme = scheme
        # The engine may sleep between two updates, and its weights have no memory then.
        sleeps = getattr(self.model_config, "enable_sleep_mode", False)
        self._undo = Undo(self.model, with_values=info.rollback, in_background=not sleeps)
        if info.check != self._check:  # otherwise the reference of the previous trainer stays
            self._check, self._reference = info.check, None
            if info.check == "checkpoint":
                self._reference = of_checkpoint(self.model_config)

    def shutdown(self) -> None:
        """Disconnect from the trainer. The model keeps its weights. Idempotent, bounded."""
        scheme, self._scheme = self._scheme, None
        undo, self._undo = self._undo, None
        self._loaded = 0
        try:
            if scheme is not None:
                scheme.shutdown()
        finally:
            if undo is not None:
                undo.close()

    # -- one update ----------------------------------------------------------------------------

    def start_weight_update(self) -> None:
        """Do nothing: the model stays as it is until :meth:`update_weights`."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the version that ``update_info`` names, as a whole or not at all.

        Raises:
            RecvTimeout: The version was not staged in time.
            ConnectError: The version is not staged, and the link to the trainer is lost.
            ApplyError: The version was refused, and the model keeps its previous weights.
            LocalProtocolError: There is no trainer, or another version is staged.
        """
        self.receive_weights(self.parse_update_info(update_info))
        self._synchronize()

    def receive_weights(self, update_info: AiosyncUpdateInfo) -> None:
        """Load a version like :meth:`update_weights`, but do not wait for the accelerator."""
        version = update_info.version
        try:
            if update_info.undo:
                self._loaded = 0
                self._roll_back(ApplyError(f"version {version} was loaded, and is to be undone"))
                return
            with self._ranks.together():
                has_it = self._await_staged(update_info)
            if not has_it:
                self._switch_to(version)
        except AiosyncError as exc:
            self._ranks.report(exc)

    def _switch_to(self, version: int) -> None:
        """Apply the staged update; undo it on every rank and raise if a rank has another one."""
        assert self._scheme is not None
        applied = self._scheme.apply_pending()
        self._loaded = version
        try:
            # A rank may have staged another version after the ranks had compared theirs.
            with self._ranks.together():
                if applied != version:
                    raise LocalProtocolError(f"version {applied} was applied in between")
        except AiosyncError as exc:
            self._loaded = 0
            self._roll_back(exc)
            raise

    def finish_weight_update(self) -> None:
        """Keep the weights that were loaded: from now on they cannot be undone."""
        if self._undo is not None and self._undo.has_record:
            self._synchronize()
            self._undo.begin()

    def _await_staged(self, info: AiosyncUpdateInfo) -> bool:
        """Wait until the version is staged; return True if the model has it already.

        Raises:
            RecvTimeout: The version was not staged in time.
            ConnectError: The version is not staged, and the link to the trainer is lost.
            LocalProtocolError: There is no trainer, or another version is staged.
        """
        scheme = self._scheme
        if scheme is None:
            raise LocalProtocolError(
                "this engine has no trainer: call init_weight_transfer_engine first"
            )
        try:
            scheme.wait_staged(info.version, timeout=info.timeout)
        except RecvTimeout as exc:
            lost = scheme.link_lost
            if lost is None:
                raise
            text = f"version {info.version} is not here, and the trainer is gone: {lost}"
            raise ConnectError(text) from exc
        staged = scheme.staged_version
        if staged == 0 and self._loaded == info.version:
            return True  # the trainer did not get the last answer, and asks once more
        if staged != info.version:
            raise LocalProtocolError(
                f"version {info.version} was asked for; staged is "
                f"{staged or 'none'}, loaded is {self._loaded or 'none'}"
            )
        return False

    # -- loading -------------------------------------------------------------------------------

    def _load(self, info: AiosyncInitInfo, weights: Iterable[Item]) -> None:
        """Load all weights on every rank, or leave every rank as it was.

        The scheme calls this inside ``apply_pending()``; the trainer gets its errors.
        """
        items, begun = list(weights), False
        assert self._undo is not None
        try:
            with self._ranks.together():
                if self._reference is not None:
                    self._reference.check(items)
                self._undo.record(info.timeout)
                begun = True
                self._reload(items)
                self._synchronize()
        except Exception as exc:  # the trainer gets the error after the model is restored
            if begun:
                self._roll_back(exc)
            raise
        if self._reference is None and self._check != "none":
            self._reference = of_tensors(items, also=self.model_config.dtype)

    def _reload(self, items: list[Item]) -> None:
        """Have vLLM's loaders load the weights; after an error the model has to be restored."""
        model = self.model
        before = {name for name, _ in model.named_parameters()}
        arriving = uploaded(items, self.device) if self._on_accelerator else iter(items)
        initialize_layerwise_reload(model)
        # A parameter that the reload itself adds or takes away need not be loaded.
        wanted = {name for name, each in model.named_parameters() if each.numel()} & before
        with disable_mtp_completeness_check():
            loaded = model.load_weights(arriving)
        # With a reference all names were compared already.
        if (
            self._reference is None
            and loaded is not None
            and self.model_config.quantization is None
        ):
            missing = sorted(wanted - set(loaded))
            if missing:
                raise ManifestMismatch(missing=missing, hint="These are vLLM's own names.")
        finalize_layerwise_reload(model, self.model_config)
        self._part_from(items)

    def _part_from(self, items: list[Item]) -> None:
        """Copy parameters that a loader left as views of received memory to memory of their own."""
        received = {tensor.untyped_storage().data_ptr() for _, tensor in items if tensor.numel()}
        for tensor in _tensors(self.model):
            if tensor.numel() and tensor.untyped_storage().data_ptr() in received:
                tensor.data = tensor.data.clone()

    def _roll_back(self, error: Exception) -> None:
        """Restore the model from before the update, if there is a record of it.

        Raises:
            ApplyError: The record has no values; the text begins with the reason, ``error``.
        """
        undo = self._undo
        if undo is not None and undo.has_record:
            undo.restore()
            for module in self.model.modules():
                get_layerwise_info(module).reset()
            self._synchronize()
            if not undo.has_values:
                reason = self._ranks.take_text(error)
                raise ApplyError(f"{reason}; it cannot be undone, as {NO_COPY}") from error

    @property
    def _on_accelerator(self) -> bool:
        """True if there is a queue of work to wait for. No parameter may be on "meta" now."""
        return any(map(accelerator().has, self.model.parameters()))

    def _synchronize(self) -> None:
        """Wait until the accelerator has done its queued work."""
        if self._on_accelerator:
            accelerator().synchronize(self.device)


# -- references for updates: names, shapes and dtypes in checkpoint format ----------------------

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

Shape = tuple[int, ...]
Entries = dict[str, tuple[Shape, torch.dtype | None]]


@dataclass(frozen=True)
class Reference:
    """Names, shapes and dtypes that updates are compared with.

    Attributes:
        entries: The shape of each name, and its dtype if that is known.
        also: The engine's dtype, which is accepted in place of an expected floating dtype.
        source: Origin of the entries, for error texts.
        optional: Names that an update may have or not, such as the head of a model that ties it.
    """

    entries: Entries
    also: torch.dtype | None
    source: str
    optional: tuple[str, ...] = ()

    def check(self, items: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise unless ``items`` match this reference.

        Raises:
            ManifestMismatch: The items differ; the error names every difference.
        """
        given, known = dict(items), self.entries
        missing, unexpected = self._lacking(given, known), self._lacking(known, given)
        both = [name for name in given if name in known]
        differences = {name: self._difference(given[name], *known[name]) for name in both}
        mismatched = {name: text for name, text in differences.items() if text}
        if missing or unexpected or mismatched:
            cast = any("dtype" in text for text in mismatched.values())
            raise ManifestMismatch(
                missing=missing,
                unexpected=unexpected,
                mismatched=mismatched,
                hint=f"Expected is {self.source}."
                + (" wire_dtype= of the trainer casts." if cast else ""),
            )

    def _lacking(self, there: Container[str], wanted: Iterable[str]) -> list[str]:
        """Return the wanted names that are not there, without those that either side may lack."""
        return [
            name
            for name in wanted
            if name not in there
            and name not in self.optional
            and not name.endswith("rotary_emb.inv_freq")
        ]

    def _difference(self, tensor: torch.Tensor, shape: Shape, dtype: torch.dtype | None) -> str:
        """Return in words how a tensor differs from what is expected; empty if it does not."""
        if tuple(tensor.shape) != shape:
            return f"shape {list(shape)} was expected, {list(tensor.shape)} came"
        fits = dtype in (None, tensor.dtype)
        # A floating dtype of one byte is that of quantized weights, which the engine's dtype cannot
        # stand for.
        if dtype is not None and dtype.is_floating_point and dtype.itemsize > 1:
            fits = fits or tensor.dtype == self.also
        return "" if fits else f"dtype {dtype} was expected, got {tensor.dtype}"


def of_tensors(items: Iterable[tuple[str, torch.Tensor]], *, also: torch.dtype | None) -> Reference:
    """Make a reference of an update that was loaded."""
    entries: Entries = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in items}
    return Reference(entries, also, "what the first update had")


def of_checkpoint(config: Any) -> Reference | None:
    """Make a reference of the safetensors files of the checkpoint that the engine started from.

    Args:
        config: vLLM's configuration of the model. The model lies in a directory, or in the local
            cache of the hub. Nothing is downloaded.

    Returns:
        The reference; ``None`` if this host has no such files: then the first update is the
        reference.
    """
    folder, entries = Path(config.model), Entries()
    try:
        if not folder.is_dir():
            patterns = ["*.safetensors", "*.safetensors.index.json"]
            local = {"local_files_only": True, "allow_patterns": patterns}
            folder = Path(snapshot_download(config.model, revision=config.revision, **local))
        for file in _files(folder):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():
                    each = opened.get_slice(name)
                    entries[name] = (tuple(each.get_shape()), _DTYPES.get(each.get_dtype()))
    except (OSError, ValueError, SafetensorError):  # vLLM was not started from safetensors files
        entries = {}
    if not entries:
        _logger.warning("no checkpoint files to check updates against: the first update counts")
        return None
    optional = ("lm_head.weight",) if getattr(config.hf_config, "tie_word_embeddings", 0) else ()
    return Reference(entries, config.dtype, f"the checkpoint in {folder}", optional)


def _files(folder: Path) -> list[Path]:
    """Return the files that a loader would read: those in the index, if there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted(
            {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
        )
    found = sorted(folder.glob("*.safetensors"))
    return [file for file in found if not file.name.startswith("consolidated")] or found


# -- agreement between the workers of one engine ------------------------------------------------


class Ranks:
    """Rank of this worker in its engine, and the exchange of errors with the other ranks.

    Args:
        parallel: vLLM's parallel configuration.
    """

    def __init__(self, parallel: Any) -> None:
        self._rank: int = parallel.rank
        self._size: int = parallel.world_size
        # Errors of all ranks in the last exchange.
        self._texts: list[str] = []
        self.index: int = parallel.data_parallel_index * parallel.world_size + parallel.rank
        """Index of this worker over all data parallel replicas."""

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a block in every worker; raise in all workers if the block raises in one.

        Every worker of the engine has to enter it, because the workers exchange their errors at its
        end.

        Raises:
            Exception: The error of this worker's block.
            ApplyError: The block raised in another worker only.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - raised again after the exchange with the others
            error = exc
        text = "" if error is None else f"{type(error).__name__}: {text_of(error)}"
        self._texts = self._exchange(text)
        if error is not None:
            raise error
        if self._texts:
            raise ApplyError("another worker of this engine could not load it")

    def _exchange(self, text: str) -> list[str]:
        """Gather the error texts of all workers; every worker has to call it.

        Args:
            text: Error of this worker; empty for none.

        Returns:
            The errors, each with its rank; empty if no worker failed.
        """
        group = get_world_group()
        if group.world_size == 1:
            return []
        data = text.encode(errors="replace")[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b"\0")
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(group.world_size)]
        dist.all_gather(every, mine, group=group.cpu_group)
        texts = [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in every]
        return [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]

    def take_text(self, error: Exception) -> str:
        """Return the errors of the last exchange, or else the text of ``error``; forget them."""
        texts, self._texts = self._texts, []
        return "; ".join(texts) or text_of(error)

    def report(self, error: Exception) -> None:
        """Raise the errors on the engine's last worker; log them on the others.

        Only the last worker may raise. vLLM's executor stops at the first worker that fails, and
        would take the answers of the workers after it for answers to its next question.
        """
        text = "; ".join(self._texts)
        if self._rank < self._size - 1:
            _logger.warning("not loaded: %s", text or error)
        elif text:
            raise ApplyError(text) from error
        else:  # there was no exchange: the error is this worker's own
            raise error


# -- undoing an update, bit for bit --------------------------------------------------------------
#
# vLLM's layerwise reload replaces parameters as it proceeds, and a reload that fails leaves a model
# that cannot be used. So the values are copied to host memory beforehand, in the background while
# the engine generates, and the contents of the modules are recorded when an update begins. In an
# engine that may sleep the values are copied then, too.


class Undo:
    """Record of a model's contents and values, which :meth:`restore` puts back.

    Args:
        model: The model, in the format of the kernels.
        with_values: Keep a copy of its tensors' values. Without it only the modules, parameters and
            buffers can be restored, and not their values.
        in_background: Copy the values in a thread before an update, and not when it begins.
    """

    def __init__(self, model: nn.Module, *, with_values: bool, in_background: bool) -> None:
        self._model, self._with_values = model, with_values
        threaded = with_values and in_background
        self._pool = ThreadPoolExecutor(1, "aiosync-backup") if threaded else None
        self._copied: Future[None] | None = None  # is done once the values are copied
        # Each tensor with the copy of its values, by the tensor's id.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.begin()

    def begin(self) -> None:
        """Drop the record, and copy the values for the next update if a thread does that.

        Then the model must not change until :meth:`record` has returned.
        """
        self._record: tuple[list[Any], list[Any]] | None = None
        if self._pool is not None:
            self._copied = self._pool.submit(self._copy)

    @property
    def has_record(self) -> bool:
        """True if there is a record to restore."""
        return self._record is not None

    @property
    def has_values(self) -> bool:
        """True if a record has the values of the tensors, too."""
        return self._with_values

    @torch.no_grad()
    def _copy(self) -> None:
        """Copy the values of all tensors to host memory; reuse the memory of earlier copies."""
        old, self._copies = self._copies, {}
        for tensor in _tensors(self._model):
            _, kept = old.pop(id(tensor), (None, None))
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                pin = tensor.device.type == "cuda"
                kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
            kept.copy_(tensor.data)
            self._copies[id(tensor)] = (tensor, kept)

    def record(self, timeout: float) -> None:
        """Record the contents of the model at the begin of an update, after its values are copied.

        Raises:
            SyncTimeout: The copy takes longer than ``timeout`` seconds.
        """
        try:
            if self._copied is not None:
                self._copied.result(timeout)
            elif self._with_values:
                self._copy()
        except TimeoutError as exc:
            late = f"the weights could not be copied within {timeout:g} s"
            raise SyncTimeout(late) from exc
        except Exception:  # raised again: this update fails, and the next one has a copy of its own
            self.begin()
            raise
        values = [(tensor, tensor.data, kept) for tensor, kept in self._copies.values()]
        # The attributes of tensors are recorded, because a reload wraps the loaders of parameters
        # that stay the same objects.
        holders: list[Any] = [*_tensors(self._model)]
        for module in self._model.modules():
            # The attributes of modules are recorded, because some kernels keep packed weights in
            # closures.
            holders += [module, module._parameters, module._buffers]
            holders.append(module._non_persistent_buffers_set)
        self._record = values, [(each, copy.copy(_content_of(each))) for each in holders]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the recorded state back: modules, their attributes, parameters, buffers, values."""
        assert self._record is not None
        (values, holders), self._record = self._record, None
        for each, content in holders:
            held = _content_of(each)
            held.clear()
            held.update(content)
        for tensor, data, kept in values:
            if tensor.data_ptr() != data.data_ptr() or tensor.dtype != data.dtype:
                tensor.data = data
            tensor.data.copy_(kept)

    def close(self) -> None:
        """Make no more copies; wait for the copy that is under way."""
        if self._pool is not None:
            self._pool.shutdown()


def _content_of(holder: Any) -> Any:
    """Return a dictionary or a set itself; of a tensor or a module return its attributes."""
    return holder if isinstance(holder, dict | set) else holder.__dict__


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return every parameter and buffer once, even if several modules share it."""
    return [*model.parameters(), *model.buffers()]
