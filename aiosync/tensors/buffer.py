"""Flat buffers: one block of bytes with the weights of one version, and their places in it.

A transport or a snapshot fills a flat buffer, and models are flipped to views of it. This module
must never import asyncio or a transport.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aiosync._interrupts import is_interrupt
from aiosync.errors import ConfigError
from aiosync.tensors.dtypes import DTYPES, torch_dtype
from aiosync.wire import (
    ALIGNMENT,
    DEFAULT_LIMITS,
    Manifest,
    plan_manifest,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from aiosync.tensors.walk import Leaf
    from aiosync.types import Limits

__all__ = [
    "FlatBuffer",
    "Layout",
    "in_flat_memory",
    "use_count",
]

# Bytes from which memory is mapped, not allocated by malloc.
_MAPPED_NBYTES = 2**20
# Layouts of which a buffer keeps the views.
_MOST_LAYOUTS = 4

use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
"""Returns the number of tensors that refer to a storage. Private API of torch since 2.1."""

_blocks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The memory of every flat buffer that is alive, or that has a living view."""


class Layout:
    """The place of each leaf in a flat buffer.

    Attributes:
        manifest: The manifest, checked when it was planned or decoded.
        dtypes: The torch dtype of each leaf.
        nbytes: Bytes of the payload, a multiple of 64.
        digest: 16 bytes that identify the layout.
        index: The leaf of each name, also of the names of tied tensors.
    """

    __slots__ = ("digest", "dtypes", "index", "manifest", "nbytes")

    def __init__(self, manifest: Manifest) -> None:
        """Prepare the layout of a manifest.

        Args:
            manifest: The manifest.

        Raises:
            ConfigError: This version of torch lacks one of its dtypes.
        """
        self.manifest: Manifest = manifest
        named = [leaf.dtype for leaf in manifest.leaves]
        known = {name: torch_dtype(name) for name in set(named)}
        self.dtypes: tuple[torch.dtype, ...] = tuple(map(known.__getitem__, named))
        self.nbytes: int = manifest.nbytes
        self.digest: bytes = manifest.digest
        self.index: Mapping[str, int] = manifest.index

    @classmethod
    def plan(cls, leaves: Iterable[Leaf], limits: Limits = DEFAULT_LIMITS) -> Layout:
        """Lay the leaves out one after the other, each on a multiple of 64 bytes.

        Args:
            leaves: The leaves to lay out.
            limits: Bounds that the receivers are expected to have.

        Raises:
            ConfigError: A dtype or a name cannot travel, or something is beyond the limits.
        """
        facts = (
            (
                each.name,
                DTYPES.get(each.tensor.dtype, str(each.tensor.dtype)),
                each.tensor.shape,
                each.kind,
                each.aliases,
            )
            for each in leaves
        )
        return cls(plan_manifest(facts, limits))

    def padding(self) -> list[tuple[int, int]]:
        """Return the (start, end) byte ranges that belong to no leaf."""
        starts = [leaf.offset for leaf in self.manifest.leaves] + [self.nbytes]
        ends = [0] + [leaf.offset + leaf.nbytes for leaf in self.manifest.leaves]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def _allocate(nbytes: int) -> NDArray[np.uint8]:
    """Allocate memory that starts on a multiple of 64 bytes.

    Raises:
        MemoryError: There is no memory.
    """
    if nbytes >= _MAPPED_NBYTES:
        return np.frombuffer(_map_pages(nbytes), np.uint8)
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def _map_pages(nbytes: int) -> mmap.mmap:
    """Allocate pages that go back to the system with their last view.

    ``malloc`` may keep freed memory for the process: tens of megabytes for each buffer that was in
    use at the same time.

    Raises:
        MemoryError: There is no memory.
    """
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as exc:
        raise MemoryError(f"no memory for {nbytes} bytes") from exc
    # NumPy asks for huge pages, too; not every kernel has them.
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class FlatBuffer:
    """A block of bytes on the CPU, aligned to 64 bytes, reused from version to version.

    The memory is not zeroed. Views stay valid for as long as other code holds them, even when the
    buffer itself is gone: each keeps the memory alive.

    Attributes:
        nbytes: Size in bytes.
        array: The bytes as a 1-D uint8 array; read-only if the memory is.
        address: Address of the first byte.
        padded_for: Digest of the layout whose padding was zeroed here.
        block: The object that keeps the memory alive; ``None`` if there is no memory.
        pinnable: True if an accelerator may be told to reach the memory directly.
        read_only: True if nothing may write to the memory.
        is_shareable: True if :meth:`shared` may return a buffer, as the memory can be mapped again.
        was_transferred: True if the buffer was copied from or to an accelerator before.
        pinned: Undoes the pinning of the memory for an accelerator.
    """

    def __init__(
        self,
        memory: int | Buffer,
        *,
        pinnable: bool = False,
        share: Callable[[], memoryview] | None = None,
    ) -> None:
        """Allocate so many bytes, or use memory that other code allocated.

        Memory of other code is kept alive (an ``mmap`` cannot be closed) until the buffer and all
        views are gone; see :meth:`release`. It may be read-only: then nothing may write through the
        views either, as a write ends the process.

        Args:
            memory: A number of bytes, at least 0. Or C-contiguous memory that starts on a multiple
                of 64 bytes, for example a mapping of a shared segment.
            pinnable: For memory of other code: it is this process's own or mapped shared, and
                :meth:`unpin` is called before pages are taken from it. A private mapping would get
                a copy of each page, and not see what others write.
            share: Maps the same memory once more, shared with its owners, to be read by an
                accelerator. Raises :class:`OSError` if that is impossible.

        Raises:
            ConfigError: The memory is not aligned.
            MemoryError: There is no memory.
        """
        if isinstance(memory, int):
            array = _allocate(memory)
        else:
            array = np.frombuffer(memoryview(memory).cast("B"), np.uint8)
        self.array: NDArray[np.uint8] = array
        self.nbytes: int = array.size
        self.address: int = array.ctypes.data
        self.padded_for: bytes | None = None
        self._bytes = memoryview(array.data)
        self.block: Any = None
        self.pinnable: bool = pinnable or isinstance(memory, int)
        self.was_transferred: bool = False
        self.read_only: bool = not array.flags.writeable
        self.is_shareable: bool = share is not None
        self._share = share
        self._shared: FlatBuffer | None = None
        self.pinned: weakref.finalize[[int, torch.device, int], Any] | None = None
        if array.size:
            if self.address % ALIGNMENT:
                raise ConfigError(f"the memory does not start on a multiple of {ALIGNMENT} bytes")
            # torch warns about read-only memory that it is given, so it gets a ctypes array, which
            # has no such mark. Nothing is written here.
            self.block = (ctypes.c_ubyte * array.size).from_address(self.address)
            # The array has to live as long as any view.
            self.block._owner = array
            _blocks[self.address] = self.block
        self._lock = threading.Lock()
        # Views and their addresses, by the digest of their layout.
        self._views: dict[bytes, tuple[list[torch.Tensor], list[int]]] = {}
        # This sets the attributes with which exclusive() counts references.
        self.release()

    def memoryview(self) -> memoryview:
        """Return the bytes as a 1-D memoryview of format ``B``. Always the same object."""
        return self._bytes

    def tensor(self) -> torch.Tensor:
        """Return the bytes as a 1-D uint8 tensor, of which :meth:`exclusive` does not know."""
        if not self.nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self.block, dtype=torch.uint8)

    def shared(self) -> FlatBuffer | None:
        """Return the same memory, mapped once more so that it can be pinned.

        Always the same object; ``None`` if ``share`` was not given or has failed.
        """
        if self._shared is None and self._share is not None:
            try:
                self._shared = FlatBuffer(self._share(), pinnable=True)
            except OSError as exc:
                if is_interrupt(exc):
                    raise
                self.is_shareable, self._share = False, None
        return self._shared

    def unshare(self) -> None:
        """Have accelerators read this memory, as :meth:`shared` may soon have other bytes."""
        self.is_shareable, self._share, self._shared = False, None, None

    def unpin(self) -> None:
        """End the direct access of accelerators to the memory."""
        if self.pinned is not None:
            self.pinned()
            # The next transfer counts as the first one again.
            self.pinned, self.was_transferred = None, False

    def views(self, layout: Layout) -> list[torch.Tensor]:
        """Return one typed tensor for each leaf of a layout; the list is kept and reused.

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
        self._check_size(layout)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            # Another thread may have made them while this one waited for the lock.
            cached = self._views.get(layout.digest)
            if cached is not None:
                return cached[0]
            # Updates of ever new layouts must not make this object grow.
            if len(self._views) >= _MOST_LAYOUTS and self.exclusive():
                self.release()
            views = [
                self._make(dtype, leaf.shape, leaf.offset)
                for leaf, dtype in zip(layout.manifest.leaves, layout.dtypes, strict=True)
            ]
            self._views[layout.digest] = (views, list(map(torch.Tensor.data_ptr, views)))
        return views

    def zero_padding(self, layout: Layout) -> None:
        """Zero the bytes that belong to no leaf of a layout.

        Args:
            layout: A layout of at most ``nbytes`` bytes.

        Raises:
            ConfigError: The buffer is smaller than the layout.
        """
        self._check_size(layout)
        for start, end in layout.padding():
            self.array[start:end] = 0
        self.padded_for = layout.digest

    def _check_size(self, layout: Layout) -> None:
        """Raise if the buffer is smaller than a layout."""
        if layout.nbytes > self.nbytes:
            raise ConfigError(
                f"the buffer has {self.nbytes} bytes, the layout needs {layout.nbytes}"
            )

    def named_views(self, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors in the order of a layout; a tied one under each of its names."""
        for leaf, view in zip(layout.manifest.leaves, self.views(layout), strict=True):
            # The view itself stays here. If other code keeps a detached one, exclusive() sees that.
            tensor = view.detach()
            for name in (leaf.name, *leaf.aliases):
                yield name, tensor

    def _make(self, dtype: torch.dtype, shape: Sequence[int], offset: int) -> torch.Tensor:
        """Make a view, and add the references that its storage has now to the baseline."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        tensor = torch.frombuffer(self.block, dtype=dtype, count=count, offset=offset).view(shape)
        if use_count is not None:
            storage = tensor.untyped_storage()._cdata
            self._storages[storage] = uses = use_count(storage)
            self._baseline += uses
        return tensor

    def exclusive(self) -> bool:
        """Return True if no tensor outside this object refers to the memory.

        Parameters that were flipped to a view, a ``state_dict()`` or a ``.data`` that other code
        kept, and autograd graphs that hold views all count as references; they stop counting when
        they die. Only if there are none may the memory be given new content. Memoryviews, arrays
        made by :attr:`array` and storage objects are not counted.

        Without the counter in torch (private API since torch 2.1), a buffer that gave out views is
        never exclusive, and callers use new memory instead.
        """
        if not self._views:
            return True
        if use_count is None or sum(map(use_count, self._storages)) != self._baseline:
            return False
        for views, addresses in self._views.values():
            if list(map(torch.Tensor.data_ptr, views)) != addresses:
                # share_memory() has moved a storage elsewhere: these views are not on this memory
                # any more.
                self.release()
                break
        return True

    def renew_moved(self) -> None:
        """Make those views anew that share_memory() has moved to other memory.

        Whatever else is in that other memory stays there, and :meth:`exclusive` counts it no more.
        """
        with torch.inference_mode(False), torch.no_grad():
            for views, addresses in self._views.values():
                for at, (view, address) in enumerate(zip(views, addresses, strict=True)):
                    if view.data_ptr() != address:
                        self._baseline -= self._storages.pop(view.untyped_storage()._cdata, 0)
                        views[at] = self._make(view.dtype, view.shape, address - self.address)

    def release(self) -> None:
        """Forget all views, as they have an old layout or were moved; :meth:`views` makes new ones.

        Views in use stay valid, but :meth:`exclusive` no longer sees them: call this only while it
        returns True.
        """
        self._views.clear()
        self._storages: dict[int, int] = {}
        self._baseline = 0


def in_flat_memory(tensor: torch.Tensor) -> bool:
    """Return True if a CPU tensor is a view of some flat buffer: it must not be written to."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return False
    address = tensor.data_ptr()
    # Another thread may make a buffer meanwhile: this list is made in one step.
    blocks = [block for ref in _blocks.valuerefs() if (block := ref()) is not None]
    starts = map(ctypes.addressof, blocks)
    return any(
        start <= address < start + ctypes.sizeof(block)
        for start, block in zip(starts, blocks, strict=True)
    )
