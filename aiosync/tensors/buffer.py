"""Flat buffers: one block of bytes that holds the weights of one version.

A flat buffer is filled by a transport or by a snapshot, and models are flipped to views of it.
This module must never import asyncio or a transport.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aiosync.errors import ConfigError
from aiosync.wire import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from aiosync.tensors.layout import Layout

__all__ = ["FlatBuffer", "in_flat_memory"]

_use_count = getattr(torch._C, "_storage_Use_Count", None)
"""How many tensors refer to a storage. Private API of torch since 2.1."""

_blocks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The memory of every flat buffer that is alive, or of which a view is."""


class FlatBuffer:
    """A block of bytes on the CPU, aligned to 64 bytes, reused from version to version.

    The memory is not zeroed. Views stay valid for as long as somebody holds them, even when the
    buffer itself is gone: each keeps the memory alive.

    Attributes:
        nbytes: Size in bytes.
        array: The bytes as a 1-D uint8 array; read-only if the memory is.
        address: Address of the first byte.
        padded_for: Digest of the layout whose padding was zeroed here.
    """

    def __init__(self, nbytes: int) -> None:
        """Allocate so many bytes, at least 0."""
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self._adopt(raw[start : start + nbytes])

    @classmethod
    def wrap(cls, buffer: Buffer) -> Self:
        """Use memory that somebody else allocated, for example a mapping of a shared segment.

        The memory is kept alive (an ``mmap`` cannot be closed) until the buffer and all views
        are gone; see :meth:`release`. It may be read-only: then nothing may write through the
        views either, a write ends the process.

        Args:
            buffer: C-contiguous memory that starts on a multiple of 64 bytes.

        Raises:
            ConfigError: The memory is not aligned.
        """
        array = np.frombuffer(memoryview(buffer).cast("B"), np.uint8)
        if array.size and array.ctypes.data % ALIGNMENT:
            raise ConfigError(f"the memory does not start on a multiple of {ALIGNMENT} bytes")
        flat = cls.__new__(cls)
        flat._adopt(array)
        return flat

    def _adopt(self, array: NDArray[np.uint8]) -> None:
        self.array: NDArray[np.uint8] = array
        self.nbytes: int = array.size
        self.address: int = array.ctypes.data
        self.padded_for: bytes | None = None
        self._bytes = memoryview(array.data)
        self._block: Any = None
        if array.size:
            # torch warns about read-only memory that it is given; nothing is written here.
            self._block = (ctypes.c_ubyte * array.size).from_address(self.address)
            self._block._owner = array  # lives as long as any view
            _blocks[self.address] = self._block
        self._lock = threading.Lock()
        self._views: dict[bytes, tuple[list[torch.Tensor], list[int]]] = {}
        self.release()

    def memoryview(self) -> memoryview:
        """Return the bytes as a 1-D memoryview of format ``B``. Always the same object."""
        return self._bytes

    def views(self, layout: Layout) -> list[torch.Tensor]:
        """Return one typed tensor for each leaf of a layout; the list is made once and reused.

        Each has a storage of its own of exactly its bytes, on the memory of this buffer, so that
        pickling or saving a single one does not drag the rest along. Do not change the list.

        Args:
            layout: A layout of at most ``nbytes`` bytes.

        Raises:
            ConfigError: The buffer is smaller than the layout.
        """
        cached = self._views.get(layout.digest)
        if cached is not None:
            return cached[0]
        if layout.nbytes > self.nbytes:
            raise ConfigError(
                f"the buffer has {self.nbytes} bytes, the layout needs {layout.nbytes}"
            )
        with self._lock, torch.inference_mode(False), torch.no_grad():
            views = [
                self._make(dtype, leaf.shape, leaf.offset)
                for leaf, dtype in zip(layout.manifest.leaves, layout.dtypes, strict=True)
            ]
            self._views[layout.digest] = (views, list(map(torch.Tensor.data_ptr, views)))
        return views

    def _make(self, dtype: torch.dtype, shape: Sequence[int], offset: int) -> torch.Tensor:
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        tensor = torch.frombuffer(self._block, dtype=dtype, count=count, offset=offset).view(shape)
        if _use_count is not None:
            storage = tensor.untyped_storage()._cdata
            self._storages.append(storage)
            self._baseline += _use_count(storage)
        return tensor

    def exclusive(self) -> bool:
        """Whether no tensor outside this object refers to the memory.

        Parameters that were flipped to a view, a ``state_dict()`` or a ``.data`` that somebody
        kept, and autograd graphs that hold views all count as references; they stop counting
        when they die. Only then may the memory be given new content. Memoryviews, arrays made
        by :attr:`array` and storage objects are not counted.

        Without the counter in torch (private API since torch 2.1), a buffer that gave out views
        is never exclusive, and callers use new memory instead.
        """
        if not self._views:
            return True
        if _use_count is None or sum(map(_use_count, self._storages)) != self._baseline:
            return False
        for views, addresses in self._views.values():
            if list(map(torch.Tensor.data_ptr, views)) != addresses:
                # share_memory() moved a storage elsewhere: these views are not ours any more.
                self.release()
                break
        return True

    def release(self) -> None:
        """Forget all views; the next call of :meth:`views` makes new ones.

        Views that are in use stay valid, and are no longer seen by :meth:`exclusive`. After
        this, and once all views are gone, wrapped memory can be closed by its owner as soon as
        the buffer itself is dropped.
        """
        self._views.clear()
        self._storages: list[int] = []
        self._baseline = 0


def in_flat_memory(tensor: torch.Tensor) -> bool:
    """Whether a CPU tensor is a view of some flat buffer: then it must not be written to."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return False
    address = tensor.data_ptr()
    return any(
        start <= address < start + ctypes.sizeof(block) for start, block in list(_blocks.items())
    )
