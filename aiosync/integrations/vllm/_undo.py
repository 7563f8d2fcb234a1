"""Putting an engine's model back to where it was before an update, bit for bit.

vLLM's layerwise reload replaces parameters while it goes on, and what it leaves when it breaks off
is no model. So values are copied to host memory beforehand, in the background while the engine
generates, and what the modules consist of is noted when an update begins. Must not import the
trainer's side.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from aiosync.errors import SyncTimeout

__all__ = ["Backup", "Undo"]


class Backup:
    """The values of a model's tensors, in host memory.

    Args:
        model: The model, in the format of the kernels.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it takes."""
        return sum(copy.nbytes for _, copy in self._values.values())

    def begin(self) -> None:
        """Copy in a thread. The model must not change until :meth:`wait` returned."""
        self._thread = threading.Thread(target=self._run, name="aiosync-backup", daemon=True)
        self._thread.start()

    def wait(self, timeout: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors and their values, once they are copied.

        Raises:
            SyncTimeout: Copying takes longer than ``timeout`` seconds.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise SyncTimeout(f"the weights could not be copied within {timeout:g} s")
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return list(self._values.values())

    def close(self) -> None:
        """Let the copies go. Waits for the copy that is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._values = {}

    def _run(self) -> None:
        try:
            self._copy()
        except BaseException as exc:  # noqa: BLE001 - raised again by wait()
            self._error = exc

    @torch.no_grad()
    def _copy(self) -> None:
        old, self._values = self._values, {}
        for tensor in _tensors(self._model):
            _, copy = old.pop(id(tensor), (None, None))
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                pin = tensor.device.type == "cuda"
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
            copy.copy_(tensor.data)
            self._values[id(tensor)] = (tensor, copy)


class Undo:
    """What a model consisted of when this was made; :meth:`restore` makes it so again.

    Args:
        model: The model, in the format of the kernels.
        values: Its tensors and their values, from :meth:`Backup.wait`.
    """

    def __init__(self, model: nn.Module, values: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._values = [(tensor, tensor.data, copy) for tensor, copy in values]
        # Attributes, too: some kernels keep packed weights in closures.
        self._modules = [
            (
                module,
                dict(module.__dict__),
                dict(module._parameters),
                dict(module._buffers),
                set(module._non_persistent_buffers_set),
            )
            for module in model.modules()
        ]
        # Loaders of parameters that stay the same objects are wrapped during a reload.
        self._attributes = [(tensor, dict(tensor.__dict__)) for tensor in _tensors(model)]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back: modules, their attributes, parameters, buffers, values."""
        for module, attributes, parameters, buffers, passing in self._modules:
            _refill(module.__dict__, attributes)
            _refill(module._parameters, parameters)
            _refill(module._buffers, buffers)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(passing)
        for tensor, given in self._attributes:
            _refill(tensor.__dict__, given)
        for tensor, data, copy in self._values:
            if tensor.data_ptr() != data.data_ptr() or tensor.dtype != data.dtype:
                tensor.data = data
            tensor.data.copy_(copy)


def _refill(target: dict[str, Any], values: dict[str, Any]) -> None:
    target.clear()
    target.update(values)


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    """Every parameter and buffer once, whichever modules share it."""
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for group in (module._parameters, module._buffers):
            for tensor in group.values():
                if tensor is not None:
                    found[id(tensor)] = tensor
    return list(found.values())
