"""A slot in a device's memory, as the tensors of a layout.

This module must never import asyncio or a transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

from aiosync.tensors.accelerator import accelerator
from aiosync.tensors.buffer import FlatBuffer

if TYPE_CHECKING:
    import torch

    from aiosync.device_memory import DeviceMemory

__all__ = ["DeviceBuffer"]


class DeviceBuffer(FlatBuffer):
    """A flat buffer whose bytes are on a device, and not on the CPU.

    A writer or reader waits for the device before and after, as no other process knows of the work
    that is queued.

    Args:
        nbytes: Size in bytes.
        find: Returns the block of device memory; called once, when the first views are made. What
            it raises, :meth:`views` raises.
    """

    def __init__(self, nbytes: int, find: Callable[[], DeviceMemory]) -> None:
        # There is no memory of the host.
        super().__init__(0)
        self.nbytes = nbytes
        self._find = find
        self._all: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        """Return the bytes as a 1-D uint8 tensor on the device. Always the same object."""
        if self._all is None:
            self._all = accelerator().tensor(self._find())
        return self._all

    @property
    def device(self) -> torch.device:
        """The device that has the bytes."""
        return self.tensor().device

    def memoryview(self) -> memoryview:
        """Return a copy of the bytes in memory of the host; waits for the device."""
        host, api = FlatBuffer(self.nbytes), accelerator()
        api.transfer(host.tensor(), self.tensor()[: self.nbytes])
        api.synchronize(self.device)
        return host.memoryview()

    def forget(self) -> None:
        """Forget the device memory, which then goes with its last view."""
        self.release()
        self._all = None

    def exclusive(self) -> bool:
        """Return True: kept views do not count, as they are valid only while the slot is in use."""
        return True

    def _make(self, dtype: torch.dtype, shape: Sequence[int], offset: int) -> torch.Tensor:
        """Make a view of the device memory; :meth:`exclusive` needs no count of its references."""
        nbytes = prod(shape) * dtype.itemsize
        return self.tensor()[offset : offset + nbytes].view(dtype).view(tuple(shape))
