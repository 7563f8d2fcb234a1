"""Code for other processes of a Ray cluster: pickled by value, so they need no aiosync.

This module has to stand alone: it must not import anything of aiosync, and torch only where an
actor gets tensors. See ``docs/topics/ray.md``.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

__all__ = ["Hub", "Weights", "flat_memory"]


class Hub:
    """An asynchronous actor that passes references to objects on from the sender to the receivers.

    A reference that is pickled by hand pins its object for ever. Ray counts the references in calls
    of actors, so the sender puts each reference into one call, and receivers get it from another.
    """

    def __init__(self) -> None:
        import asyncio

        self._refs: dict[bytes, Any] = {}
        self._changed = asyncio.Condition()

    async def put(self, ticket: bytes, refs: list[Any]) -> None:
        """Keep ``refs`` under ``ticket`` until :meth:`drop`."""
        async with self._changed:
            self._refs[ticket] = refs
            self._changed.notify_all()

    async def get(self, ticket: bytes, seconds: float) -> list[Any]:
        """Wait for the references of ``ticket``; return an empty list after ``seconds``."""
        import asyncio

        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: ticket in self._refs)
        except TimeoutError:
            return []
        return list(self._refs.get(ticket, ()))

    async def drop(self, ticket: bytes) -> None:
        """Forget the references of ``ticket``."""
        # The lock orders this after a put() that already waits for it.
        async with self._changed:
            self._refs.pop(ticket, None)


def flat_memory(arrays: Sequence[Any], nbytes: int) -> Any:
    """Return arrays as one block of memory that shares no writes with other processes.

    Every process of a node maps the object store writable. The block is a second mapping of the
    same memory, read-only: a write through it ends the process instead of changing the weights that
    other processes compute with. If the arrays do not lie in a row, or not in shared memory, no
    such mapping can be made and the block is a copy.

    Args:
        arrays: Flat arrays of bytes, as they came out of the store.
        nbytes: Bytes of all arrays together, at least 1.

    Returns:
        A buffer that is aligned to 64 bytes, and keeps the objects alive that it needs.
    """
    block = _second_mapping(arrays, nbytes)
    if block is None:
        import numpy

        own = numpy.empty(nbytes + 64, numpy.uint8)
        block = own[-own.ctypes.data % 64 :][:nbytes]
        numpy.concatenate(arrays, out=block)
    return block


def _second_mapping(arrays: Sequence[Any], nbytes: int) -> Any:
    """Map the arrays once more, read-only; return None if they have gaps or are not shared."""
    start: int = arrays[0].__array_interface__["data"][0]
    at = start
    for array in arrays:
        if array.__array_interface__["data"][0] != at:
            return None
        at += array.nbytes
    page = mmap.PAGESIZE
    first = start - start % page
    length = -(-(at - first) // page) * page
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    # With an old size of 0, mremap() makes a second mapping of shared pages, and refuses private
    # ones.
    may_move = 1
    mapped = libc.mremap(first, 0, length, may_move, None)
    if mapped is None or mapped == ctypes.c_void_p(-1).value:
        return None
    if libc.mprotect(mapped, length, mmap.PROT_READ):
        libc.munmap(mapped, length)
        return None
    block = (ctypes.c_ubyte * nbytes).from_address(mapped + start - first)
    # The block keeps the arrays alive, because the store may reuse their memory once they are gone.
    owner = weakref.finalize(block, lambda _arrays: libc.munmap(mapped, length), arrays)
    owner.atexit = False
    return block


class Weights:
    """Weights for an actor that knows nothing of aiosync. They unpickle as a dict of tensors.

    Args:
        arrays: Flat arrays of bytes, each but the last a multiple of 64 bytes long.
        nbytes: Bytes of all arrays together.
        leaves: Names, dtype, shape, offset and size of each tensor.
        values: Non-tensor leaves of the weights, by name.
    """

    def __init__(
        self,
        arrays: Sequence[Any],
        nbytes: int,
        leaves: Sequence[tuple[tuple[str, ...], str, tuple[int, ...], int, int]],
        values: dict[str, Any],
    ) -> None:
        self.parts = (arrays, nbytes, leaves, values)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, self.parts


def _unpack(
    arrays: Sequence[Any],
    nbytes: int,
    leaves: Sequence[tuple[tuple[str, ...], str, tuple[int, ...], int, int]],
    values: dict[str, Any],
) -> dict[str, Any]:
    """Return the dict that a pickled :class:`Weights` becomes in the process that unpickles it."""
    import torch

    block = flat_memory(arrays, nbytes) if nbytes else None
    weights: dict[str, Any] = {}
    for names, dtype_name, shape, offset, size in leaves:
        dtype = getattr(torch, dtype_name)
        if size:
            count = size // dtype.itemsize
            flat = torch.frombuffer(block, dtype=dtype, count=count, offset=offset)
            tensor = flat.view(shape)
        else:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
        weights.update(dict.fromkeys(names, tensor))
    weights.update(values)
    return weights
