"""The engine's side: what each worker of a vLLM engine has under the name ``aiosync``.

Updates are received and staged by threads of their own while the engine generates. Only
``update_weights()`` changes the model, on the worker's own thread, from beginning to end: vLLM's
calls around it are the begin and the end of what can be undone. Must not import the trainer's
side.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
from collections.abc import Iterable, Iterator
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
from aiosync.integrations.vllm._info import AiosyncInitInfo, AiosyncUpdateInfo
from aiosync.sync import WeightSyncScheme

__all__ = ["AiosyncWeightTransferEngine"]

_logger = logging.getLogger(__name__)
_TEXT_NBYTES = 1024

Item = tuple[str, torch.Tensor]


class AiosyncWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # is not there
    """Receives weights in checkpoint format, and loads them through vLLM's own loaders.

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
        self._reference: Reference | None = None  # for the next trainer, too
        self._check = "none"
        self._scheme: WeightSyncScheme | None = None
        self._undo: Undo | None = None
        self._loaded = 0  # the version that the model has; 0 for none of this trainer

    # -- the trainer comes and goes ------------------------------------------------------------

    def init_transfer_engine(self, init_info: AiosyncInitInfo) -> None:
        """Reach the trainer, and stage what it sends from now on. A trainer before is left.

        Raises:
            ConnectTimeout: Nothing listened there in time; the engine goes on with what it has.
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
        except BaseException:  # raised again: init_transfer_engine() tells it
            scheme.shutdown()
            raise
        self._scheme = scheme
        self._undo = Undo(self.model, with_values=info.rollback)
        if info.check != self._check:  # else as for the trainer before
            self._check, self._reference = info.check, None
            if info.check == "checkpoint":
                self._reference = of_checkpoint(self.model_config)

    def shutdown(self) -> None:
        """Leave the trainer. The model keeps its weights. Idempotent, bounded."""
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
        """Nothing to do: the model stays as it is until :meth:`update_weights`."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the version that is named, or nothing at all.

        Raises:
            RecvTimeout: It was not staged in time.
            ConnectError: It is not staged, and the link to the trainer is lost.
            ApplyError: It was refused, and the model has what it had.
            LocalProtocolError: There is no trainer, or another version is staged.
        """
        self.receive_weights(self.parse_update_info(update_info))
        self._synchronize()

    def receive_weights(self, update_info: AiosyncUpdateInfo) -> None:
        """As :meth:`update_weights`, without waiting for an accelerator."""
        if update_info.undo:
            self._roll_back()
            self._loaded = 0
            return
        try:
            with self._ranks.together():
                has_it = self._await_staged(update_info)
            if not has_it:
                self._switch_to(update_info.version)
        except AiosyncError as exc:
            self._ranks.report(exc)

    def _switch_to(self, version: int) -> None:
        assert self._scheme is not None
        applied = self._scheme.apply_pending()
        self._loaded = version
        if applied != version:
            self._roll_back()
            self._loaded = 0
            raise LocalProtocolError(f"version {applied} was applied in between")

    def finish_weight_update(self) -> None:
        """Keep what was loaded: it cannot be undone from now on."""
        if self._undo is not None and self._undo.noted:
            self._synchronize()
            self._undo.begin()

    def _await_staged(self, info: AiosyncUpdateInfo) -> bool:
        """Wait until the version can be loaded. Returns whether the model has it already."""
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
            return True  # the trainer did not hear of it, and asks again
        if staged != info.version:
            raise LocalProtocolError(
                f"version {info.version} was asked for; staged is "
                f"{staged or 'none'}, loaded is {self._loaded or 'none'}"
            )
        return False

    # -- loading -------------------------------------------------------------------------------

    def _load(self, info: AiosyncInitInfo, weights: Iterable[Item]) -> None:
        """Load everything, on every rank, or leave every rank as it was.

        The scheme calls this inside ``apply_pending()``; what it raises, the trainer sees.
        """
        items, begun = list(weights), False
        assert self._undo is not None
        try:
            with self._ranks.together():
                if self._reference is not None:
                    self._reference.check(items)
                self._undo.note(info.timeout)
                begun = True
                self._reload(items)
                self._synchronize()
        except Exception as exc:  # the trainer gets it, once the model is as it was
            if begun:
                self._roll_back()
                if not info.rollback:
                    raise ApplyError(
                        f"{exc}; it stopped halfway, and this engine has no copy to roll back to: "
                        "restart it"
                    ) from exc
            raise
        if self._reference is None and self._check != "none":
            self._reference = of_tensors(items, also=self.model_config.dtype)

    def _reload(self, items: list[Item]) -> None:
        model = self.model
        before = {name for name, _ in model.named_parameters()}
        initialize_layerwise_reload(model)
        wanted = {name for name, each in model.named_parameters() if each.numel()} & before
        with disable_mtp_completeness_check():
            loaded = model.load_weights(iter(items))
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
        """Give parameters that a loader left in received memory some of their own."""
        received = {tensor.untyped_storage().data_ptr() for _, tensor in items if tensor.numel()}
        for tensor in _tensors(self.model):
            if tensor.numel() and tensor.untyped_storage().data_ptr() in received:
                tensor.data = tensor.data.clone()

    def _roll_back(self) -> None:
        if self._undo is not None and self._undo.noted:
            self._undo.restore()
            for module in self.model.modules():
                get_layerwise_info(module).reset()
            self._synchronize()

    def _synchronize(self) -> None:
        # Without an accelerator there is nothing to wait for, and nothing to ask.
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


# -- what an update has to look like: names, shapes and dtypes in checkpoint format -------------

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
    """Names, shapes and dtypes that updates are held against.

    Attributes:
        entries: For each name its shape, and its dtype where that is known.
        also: A floating dtype that is as good as the one expected: that of the engine.
        source: Where the entries are from, for messages.
        optional: Names that may be there or not, such as the head of a model that ties it.
    """

    entries: Entries
    also: torch.dtype | None
    source: str
    optional: tuple[str, ...] = ()

    def check(self, items: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise unless ``items`` are what is expected.

        Raises:
            ManifestMismatch: They are not; it names every difference.
        """
        given, known = dict(items), self.entries
        missing = [name for name in known if name not in given and self._counts(name)]
        unexpected = [name for name in given if name not in known and self._counts(name)]
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

    def _counts(self, name: str) -> bool:
        return name not in self.optional and not name.endswith("rotary_emb.inv_freq")

    def _difference(self, tensor: torch.Tensor, shape: Shape, dtype: torch.dtype | None) -> str:
        if tuple(tensor.shape) != shape:
            return f"shape {list(shape)} was expected, {list(tensor.shape)} came"
        fits = dtype in (None, tensor.dtype)
        if dtype is not None and dtype.is_floating_point and dtype.itemsize > 1:
            fits = fits or tensor.dtype == self.also
        return "" if fits else f"dtype {dtype} was expected, got {tensor.dtype}"


def of_tensors(items: Iterable[tuple[str, torch.Tensor]], *, also: torch.dtype | None) -> Reference:
    """What an update looked like that was loaded."""
    entries: Entries = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in items}
    return Reference(entries, also, "what the first update had")


def of_checkpoint(config: Any) -> Reference | None:
    """What the checkpoint has that the engine was started from, from its safetensors files.

    Args:
        config: vLLM's configuration of the model, which is in a directory, or in the local cache
            of the hub. Nothing is downloaded.

    Returns:
        ``None`` if there are no such files here: the first update counts.
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
    except (OSError, ValueError, SafetensorError):  # what vLLM was started from is something else
        entries = {}
    if not entries:
        _logger.warning("no checkpoint files to check updates against: the first update counts")
        return None
    optional = ("lm_head.weight",) if getattr(config.hf_config, "tie_word_embeddings", 0) else ()
    return Reference(entries, config.dtype, f"the checkpoint in {folder}", optional)


def _files(folder: Path) -> list[Path]:
    """The files that a loader would read: those of the index, if there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted(
            {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
        )
    found = sorted(folder.glob("*.safetensors"))
    return [file for file in found if not file.name.startswith("consolidated")] or found


# -- the workers of one engine do the same ------------------------------------------------------


class Ranks:
    """This worker among those of its engine.

    Args:
        parallel: vLLM's parallel configuration.
    """

    def __init__(self, parallel: Any) -> None:
        self._rank: int = parallel.rank
        self._size: int = parallel.world_size
        self._texts: list[str] = []
        self.index: int = parallel.data_parallel_index * parallel.world_size + parallel.rank
        """Over all data parallel replicas."""

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around what each worker does: it is done where all can do it, or raises in all of them.

        Raises:
            Exception: What the block raised.
            ApplyError: It did not, but that of another worker did.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - raised again once the others know
            error = exc
        self._texts = self._exchange("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if self._texts:
            raise ApplyError("another worker of this engine could not load it")

    def _exchange(self, text: str) -> list[str]:
        """What went wrong in which worker; every worker has to call it."""
        group = get_world_group()
        if group.world_size == 1:
            return []
        said = text.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b"\0")
        mine = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(group.world_size)]
        dist.all_gather(every, mine, group=group.cpu_group)
        texts = [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in every]
        return [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]

    def report(self, error: Exception) -> None:
        """Raise what went wrong, on one worker of the engine.

        On the last one: an executor that asks several workers stops at the first that fails, and
        would take the answers of those after it for answers to its next question.
        """
        text = "; ".join(self._texts)
        if self._rank < self._size - 1:
            _logger.warning("not loaded: %s", text or error)
        elif text:
            raise ApplyError(text) from error
        else:  # the only worker
            raise error


# -- undoing an update, bit for bit --------------------------------------------------------------
#
# vLLM's layerwise reload replaces parameters while it goes on, and what it leaves when it breaks
# off is no model. So values are copied to host memory beforehand, in the background while the
# engine generates, and what the modules consist of is noted when an update begins.


class Undo:
    """What a model was when it was noted; :meth:`restore` makes it so again.

    Args:
        model: The model, in the format of the kernels.
        with_values: Keep a copy of its tensors' values. Without it only what the model consists of
            can be restored.
    """

    def __init__(self, model: nn.Module, *, with_values: bool) -> None:
        self._model = model
        self._pool = ThreadPoolExecutor(1, "aiosync-backup") if with_values else None
        self._copied: Future[None] | None = None
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.begin()

    def begin(self) -> None:
        """Copy values in a thread, for the next update. The model must not change meanwhile."""
        self._noted: tuple[list[Any], list[Any]] | None = None
        if self._pool is not None:
            self._copied = self._pool.submit(self._copy)

    @property
    def noted(self) -> bool:
        """Whether there is something to restore."""
        return self._noted is not None

    @torch.no_grad()
    def _copy(self) -> None:
        old, self._copies = self._copies, {}
        for tensor in _tensors(self._model):
            _, kept = old.pop(id(tensor), (None, None))
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                pin = tensor.device.type == "cuda"
                kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
            kept.copy_(tensor.data)
            self._copies[id(tensor)] = (tensor, kept)

    def note(self, timeout: float) -> None:
        """Note what the model consists of, once its values are copied: an update begins.

        Raises:
            SyncTimeout: Copying takes longer than ``timeout`` seconds.
        """
        try:
            if self._copied is not None:
                self._copied.result(timeout)
        except TimeoutError as exc:
            late = f"the weights could not be copied within {timeout:g} s"
            raise SyncTimeout(late) from exc
        values = [(tensor, tensor.data, kept) for tensor, kept in self._copies.values()]
        # Loaders of parameters that stay the same objects are wrapped during a reload.
        holders: list[Any] = [*_tensors(self._model)]
        for module in self._model.modules():
            # Attributes, too: some kernels keep packed weights in closures.
            holders += [module, module._parameters, module._buffers]
            holders.append(module._non_persistent_buffers_set)
        self._noted = values, [(each, copy.copy(_content_of(each))) for each in holders]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back: modules, their attributes, parameters, buffers, values."""
        assert self._noted is not None
        (values, holders), self._noted = self._noted, None
        for each, content in holders:
            held = _content_of(each)
            held.clear()
            held.update(content)
        for tensor, data, kept in values:
            if tensor.data_ptr() != data.data_ptr() or tensor.dtype != data.dtype:
                tensor.data = data
            tensor.data.copy_(kept)

    def close(self) -> None:
        """Let the copies go. Waits for the copy that is under way."""
        if self._pool is not None:
            self._pool.shutdown()


def _content_of(holder: Any) -> Any:
    """A dictionary or a set itself; of a tensor or a module its attributes, now."""
    return holder if isinstance(holder, dict | set) else holder.__dict__


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    """Every parameter and buffer once, whichever modules share it."""
    return [*model.parameters(), *model.buffers()]
