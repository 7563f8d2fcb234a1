"""Receivers of LoRA adapters: each version becomes an adapter of its own, with a name of its own.

Only the adapter travels. The weights behind a name never change: a version that arrives gets a new
name, and is loaded whole before anything uses it.
:class:`VLLMAdapterReceiver` is for vLLM's ``AsyncLLM``, :class:`PeftAdapterReceiver` for a
``PeftModel``. The trainer sends ``peft.get_peft_model_state_dict(model)`` with any scheme. See
``docs/topics/lora-adapters.md``. Must not import vLLM or PEFT before it is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import itertools
import json
import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Final

import torch

from aiosync._log import log
from aiosync.errors import ConfigError, LocalProtocolError
from aiosync.protocol import finite_or_none, validate_seconds
from aiosync.receiver.scheme_hooks import SchemeHooks
from aiosync.schemes.options import refuse
from aiosync.spans import epoch_text

__all__ = ["Adapter", "PeftAdapterReceiver", "VLLMAdapterReceiver"]

# vLLM tells adapters apart by these numbers alone, so they must not be those of a user's own.
_numbers: Final = itertools.count(1_000_001)

_LABEL: Final = "aiosync.adapter"


@dataclasses.dataclass(frozen=True)
class Adapter:
    """One version of an adapter. The weights behind its name never change.

    Attributes:
        name: Its name in the engine or the model: the receiver's, the trainer's epoch and the
            version, as in ``"policy-3f2a90c41b7de805-12"``.
        epoch: The run of the trainer that sent it, as ``scheme.epoch``.
        version: Version of the weights, from 1.
        request: For vLLM, the ``LoRARequest`` to generate with; else ``None``.
    """

    name: str
    epoch: int
    version: int
    request: Any = None


class _Versions:
    """The adapters that are loaded, oldest first. Thread-safe.

    Args:
        keep: Number of newest versions that are kept.
        name: Beginning of the names of the adapters.

    Attributes:
        newest: The adapter that :meth:`use` gives; ``None`` before the first.
    """

    def __init__(self, keep: int, name: str) -> None:
        refuse(
            (not isinstance(keep, int) or keep < 1, f"keep must be at least 1, got {keep!r}"),
            (not isinstance(name, str) or not name, f"name must be a text, got {name!r}"),
        )
        self.newest: Adapter | None = None
        self._keep, self._name = keep, name
        self._lock = threading.Lock()
        self._loaded: list[Adapter] = []
        # Number of use() blocks of each adapter, by its name.
        self._uses: Counter[str] = Counter()
        self._next = (0, 0)

    def note_next(self, epoch: int, version: int) -> None:
        """Note the version that is transformed next."""
        self._next = epoch, version

    def make(self) -> Adapter:
        """Return the adapter of the version that is being transformed."""
        epoch, version = self._next
        return Adapter(f"{self._name}-{epoch_text(epoch)}-{version}", epoch, version)

    def add(self, adapter: Adapter) -> None:
        """Note that an adapter is loaded; also again, after an interrupt."""
        with self._lock:
            if adapter not in self._loaded:
                self._loaded.append(adapter)

    def activate(self, epoch: int, version: int) -> None:
        """Make a loaded version the newest; a later one may be loaded already."""
        with self._lock:
            wanted = epoch, version
            self.newest = next(a for a in self._loaded if (a.epoch, a.version) == wanted)

    def old(self) -> list[Adapter]:
        """Return the adapters to remove: neither among those to keep nor in use."""
        with self._lock:
            end = 0 if self.newest is None else self._loaded.index(self.newest) + 1
            # use() gives the newest only, so these do not get into use again.
            older = self._loaded[: max(0, end - self._keep)]
            return [each for each in older if not self._uses[each.name]]

    def remove(self, adapter: Adapter) -> None:
        """Note that an adapter is not loaded any more."""
        with self._lock:
            self._loaded.remove(adapter)

    @contextlib.contextmanager
    def use(self) -> Iterator[Adapter]:
        """Give the newest adapter, which stays loaded until the block ends."""
        with self._lock:
            adapter = self.newest
            if adapter is None:
                raise LocalProtocolError(
                    "no adapter has arrived yet: wait with scheme.wait_for_version(1) first"
                )
            self._uses[adapter.name] += 1
        try:
            yield adapter
        finally:
            with self._lock:
                self._uses[adapter.name] -= 1
                self._uses = +self._uses  # without those that nothing uses


# -- vLLM --------------------------------------------------------------------------------------


class VLLMAdapterReceiver:
    """Receiver that gives each version of an adapter to a vLLM engine while it generates.

    ::

        scheme = aiosync.TCPWeightSyncScheme("tcp://trainer:5555", guard="reading")
        adapters = VLLMAdapterReceiver(scheme, engine, lora_config)
        async with scheme:
            await scheme.connect()
            await scheme.wait_for_version(1)
            with adapters.use() as adapter:
                outputs = engine.generate(prompt, params, "1", lora_request=adapter.request)
                async for output in outputs:
                    ...  # made by adapter.version, to the last token

    A version is written to a folder in memory and loaded with ``engine.add_lora()``. The engine is
    not paused: requests go on with the adapter that they began with, and :meth:`use` gives the new
    one once it is loaded. If the engine refuses it, nothing changes and the trainer's ``send()``
    raises the engine's error. The prefix cache cannot mix versions, as vLLM keeps it by the
    adapter's name.

    Construct it in the event loop that the engine runs in.

    Args:
        scheme: A scheme without a role, with ``guard="reading"``; it becomes the receiver.
        engine: An ``AsyncLLM`` with ``enable_lora=True``, or an object with its ``add_lora()`` and
            ``remove_lora()``. ``max_loras`` of two or more, so that requests of the old and of the
            new version run side by side.
        config: The adapter's configuration: a ``peft.LoraConfig``, a mapping, or the folder of a
            saved adapter.
        name: What the names of the adapters begin with.
        keep: Number of newest versions that stay loaded until one more is, beside those in use.
        folder: Where the files are: ``/dev/shm`` if it exists, else the directory for temporary
            files.
        load_timeout: Seconds that the engine has to load a version.
        model_id: Name of the model, as the sender calls it.
        worker_idx: Index of this worker; ``None`` lets the sender choose.

    Raises:
        ConfigError: An argument has an illegal value.
        LocalProtocolError: The scheme already has a role, or no event loop runs.
    """

    def __init__(
        self,
        scheme: Any,
        engine: Any,
        config: Any,
        *,
        name: str = "policy",
        keep: int = 2,
        folder: str | Path | None = None,
        load_timeout: float = 60.0,
        model_id: str | None = None,
        worker_idx: int | None = None,
    ) -> None:
        self._versions = _Versions(keep, name)
        validate_seconds("load_timeout", load_timeout, endless=True)
        self._config = _config_text(config)
        loads = getattr(engine, "add_lora", None), getattr(engine, "remove_lora", None)
        if not all(map(asyncio.iscoroutinefunction, loads)):
            raise ConfigError(
                f"a {type(engine).__name__} has no async add_lora() and remove_lora(): pass an "
                "AsyncLLM with enable_lora=True"
            )
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise LocalProtocolError(
                "construct a VLLMAdapterReceiver in the event loop of the engine"
            ) from None
        self._engine, self._load_timeout = engine, load_timeout
        # True from a removal that failed until one that succeeds.
        self._fails_to_remove = False
        if folder is None and Path("/dev/shm").is_dir():
            folder = "/dev/shm"
        self._folder = Path(tempfile.mkdtemp(prefix="aiosync-lora-", dir=folder))
        self._finalizer = weakref.finalize(self, _delete_folder, self._folder, os.getpid())
        scheme.init_on_receiver(
            model_id,
            worker_idx=worker_idx,
            load=_load_nothing,
            transform=self._stage,
            hooks=SchemeHooks(
                before_apply=self._versions.note_next, applied=self._versions.activate
            ),
        )

    @property
    def newest(self) -> Adapter | None:
        """The adapter that :meth:`use` gives; ``None`` before the first."""
        return self._versions.newest

    def use(self) -> contextlib.AbstractContextManager[Adapter]:
        """Return a context manager that gives the newest adapter, which stays loaded inside.

        Raises:
            LocalProtocolError: Entered before a version has arrived.
        """
        return self._versions.use()

    def close(self) -> None:
        """Delete the files, when no request uses an adapter any more. Idempotent.

        Without this call they are deleted with this object, or at the end of the process.
        """
        self._finalizer()

    def _stage(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[Any]:
        """Load the version that arrived into the engine. Runs in a thread of the scheme."""
        from safetensors.torch import save_file
        from vllm.lora.request import LoRARequest

        for old in self._versions.old():
            self._remove(old)
        adapter, number = self._versions.make(), next(_numbers)
        path = self._folder / str(number)
        path.mkdir()
        try:
            (path / "adapter_config.json").write_text(self._config)
            save_file(
                {name: tensor.contiguous() for name, tensor in weights},
                path / "adapter_model.safetensors",
            )
            request = LoRARequest(adapter.name, number, str(path))
            if not self._wait(self._engine.add_lora(request)):
                raise RuntimeError("vLLM did not add the adapter")
        except BaseException:  # raised again
            shutil.rmtree(path, ignore_errors=True)  # close() may have deleted it
            raise
        self._versions.add(dataclasses.replace(adapter, request=request))
        return []  # The scheme itself has nothing to apply.

    def _remove(self, old: Adapter) -> None:
        """Have the engine remove an adapter; raise if it fails, and did not fail before."""
        try:
            self._wait(self._engine.remove_lora(old.request.lora_int_id))
            self._fails_to_remove = False
        except Exception as exc:  # the trainer gets the first one in a NACK, the log later ones
            # The first failure refuses the update, and the next one tries it again. But an engine
            # that was restarted knows no old adapter, and must get new ones all the same.
            if not isinstance(exc, LookupError) and not self._fails_to_remove:
                self._fails_to_remove = True
                raise
            text = f"the engine did not remove the adapter {old.name!r}, which is given up"
            log(logging.WARNING, "adapter", text, model=None, error=exc)
        self._versions.remove(old)
        shutil.rmtree(old.request.lora_path, ignore_errors=True)

    def _wait(self, loading: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the engine's loop; return its result, or raise after the timeout."""
        waiting = asyncio.run_coroutine_threadsafe(loading, self._loop)
        try:
            return waiting.result(finite_or_none(self._load_timeout))
        finally:
            waiting.cancel()


def _delete_folder(folder: Path, pid: int) -> None:
    """Delete the folder of a receiver, unless this is a fork of the process that has it."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def _load_nothing(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Do nothing, in place of a load: the transform has loaded the version into the engine."""


def _config_text(config: Any) -> str:
    """Return the configuration of an adapter as PEFT saves it.

    Raises:
        ConfigError: A field is missing that each configuration of an adapter has.
    """
    if isinstance(config, str | Path):
        return (Path(config) / "adapter_config.json").read_text()
    values = config if isinstance(config, Mapping) else getattr(config, "to_dict", dict)()
    lacks = {"r", "lora_alpha", "target_modules"} - set(values)
    if lacks:
        raise ConfigError(
            f"the configuration of the adapter has no {', '.join(sorted(lacks))}: pass the "
            "peft.LoraConfig that the trainer uses, its to_dict(), or the folder of a saved adapter"
        )
    return json.dumps({"peft_type": "LORA", **values}, default=_as_json)


def _as_json(value: Any) -> Any:
    """Return a value that JSON has no type for as a list, as an enum's value, or as text."""
    return (
        sorted(value) if isinstance(value, set | frozenset) else getattr(value, "value", str(value))
    )


# -- PEFT --------------------------------------------------------------------------------------


class PeftAdapterReceiver:
    """Receiver that adds each version of an adapter to a ``PeftModel`` and makes it the active one.

    ::

        scheme = aiosync.sync.TCPWeightSyncScheme("tcp://trainer:5555", guard="reading")
        adapters = PeftAdapterReceiver(scheme, model)
        with scheme:
            scheme.connect()
            with scheme.reading():
                model.generate(**inputs)  # by adapters.newest, to the last token

    The model changes between reads only. Older versions stay under their names: inside of
    ``scheme.reading()``, ``adapter_names=[name] * len(batch)`` computes with one of them. An update
    that does not fit changes nothing, but that reads have version 0 until the next one, and the
    trainer's ``send()`` raises the reason.

    Args:
        scheme: A scheme of :mod:`aiosync` or :mod:`aiosync.sync` without a role, with
            ``guard="reading"``; it becomes the receiver.
        model: A ``PeftModel`` with one LoRA adapter, whose configuration, dtypes and devices those
            of all versions are.
        adapter: Name of that adapter.
        name: What the names of the adapters begin with.
        keep: Number of newest versions that stay in the model until one more is added.
        model_id: Name of the model, as the sender calls it.
        worker_idx: Index of this worker; ``None`` lets the sender choose.

    Raises:
        ConfigError: An argument has an illegal value.
        LocalProtocolError: The scheme already has a role.
    """

    def __init__(
        self,
        scheme: Any,
        model: Any,
        *,
        adapter: str = "default",
        name: str = "policy",
        keep: int = 2,
        model_id: str | None = None,
        worker_idx: int | None = None,
    ) -> None:
        self._versions = _Versions(keep, name)
        refuse(("." in name, f"name must have no dot, as PEFT takes none, got {name!r}"))
        configs = getattr(model, "peft_config", {})
        if adapter not in configs:
            raise ConfigError(
                f"the model has no LoRA adapter {adapter!r}: pass a PeftModel that "
                "peft.get_peft_model() made"
            )
        self._model, self._adapter = model, adapter
        # The adapter that was loaded last, and those that are labelled and not loaded yet, by the
        # number in their label.
        self._labels: dict[int, Adapter] = {}
        # Names of adapters of which an interrupt has left a part in the model.
        self._partial: set[str] = set()
        scheme.init_on_receiver(
            model_id,
            worker_idx=worker_idx,
            load=self._load,
            transform=self._label,
            hooks=SchemeHooks(
                before_apply=self._versions.note_next, applied=self._versions.activate
            ),
        )

    @property
    def newest(self) -> Adapter | None:
        """The active adapter; ``None`` before the first that arrived."""
        return self._versions.newest

    def _label(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Add a tensor that says which adapter this is: a newer one may come before _load()."""
        number = next(_numbers)
        self._labels[number] = self._versions.make()
        yield from weights
        yield _LABEL, torch.tensor(number, device="cpu")

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Delete the versions that are not kept, add the new one and make it the active one.

        Ctrl-C may end this anywhere. Then it runs again with the same weights and the same label.
        """
        from peft import set_peft_model_state_dict

        model, given = self._model, dict(weights)
        number = int(given.pop(_LABEL))
        new = self._labels[number]
        for each in list(self._labels):  # a newer one may be added in another thread meanwhile
            if each < number:
                del self._labels[each]
        if new.name in model.peft_config:
            self._partial.add(new.name)
        for part in list(self._partial):
            self._delete(part)
        pattern = self._pattern_of(given.keys())
        if pattern.keys() != given.keys():
            other = sorted(pattern.keys() ^ given.keys())
            raise ConfigError(
                f"the names are not those of the adapter {self._adapter!r}, as {other[0]!r}: send "
                "peft.get_peft_model_state_dict(model)"
            )
        own = {
            name: given[name].to(like.device, like.dtype, copy=True)
            for name, like in pattern.items()
        }
        for old in self._versions.old():
            self._delete(old.name)
            self._versions.remove(old)
        # Otherwise "pissa" and others compute an SVD of each layer, and change its own weights. It
        # is a copy, because dataclasses.replace() would check the fields again, with warnings.
        config = copy.copy(model.peft_config[self._adapter])
        config.init_lora_weights = False
        try:
            # Without memory at first: PEFT would draw random numbers to fill it. For an embedding
            # layer it draws them before it makes a parameter of them.
            with torch.device("meta"):
                model.add_adapter(new.name, config, low_cpu_mem_usage=True)
            set_peft_model_state_dict(model, own, adapter_name=new.name, low_cpu_mem_usage=True)
            model.set_adapter(new.name)
        except BaseException:  # raised again
            self._delete(new.name)
            raise
        self._versions.add(new)

    def _pattern_of(self, names: Set[str]) -> dict[str, torch.Tensor]:
        """Return the weights of the adapter to copy, with embedding layers only if any was sent."""
        from peft import get_peft_model_state_dict

        def saved(has_embeddings: bool) -> dict[str, torch.Tensor]:
            # By default PEFT asks the Hugging Face Hub about them, and all reads would wait for it.
            how: dict[str, Any] = {"save_embedding_layers": has_embeddings}
            return dict(get_peft_model_state_dict(self._model, adapter_name=self._adapter, **how))

        plain = saved(False)
        if names <= plain.keys() or not hasattr(self._model, "get_input_embeddings"):
            return plain
        full = saved(True)
        return plain if names.isdisjoint(full.keys() - plain.keys()) else full

    def _delete(self, name: str) -> None:
        """Delete an adapter, also one of which an interrupt has left a part."""
        model, configs = self._model, self._model.peft_config
        self._partial.add(name)
        if model.active_adapter == name:
            # PEFT would choose another one, with a warning.
            model.set_adapter(self._adapter if self.newest is None else self.newest.name)
        # PEFT deletes the configuration first, and then only adapters that have one.
        configs.setdefault(name, configs[self._adapter])
        model.delete_adapter(name)
        self._partial.discard(name)
