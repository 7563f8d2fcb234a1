"""Copies of large blocks that release the GIL, on a few plain threads.

torch's own thread pool is not used: on a machine that computes all the time its barrier costs
milliseconds. This module must never import asyncio or a transport.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import nn

from aiosync.tensors.accelerator import accelerator

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "LARGE_NBYTES",
    "CopyPool",
    "TensorPair",
    "as_bytes",
    "copy_blocks",
    "copy_bytes",
    "copy_pieces",
    "copy_tensors",
    "is_plain_cpu",
]

_Pair: TypeAlias = "tuple[NDArray[np.uint8], NDArray[np.uint8]]"
TensorPair: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
_Tensors: TypeAlias = "list[torch.Tensor] | tuple[torch.Tensor, ...]"
_Batch: TypeAlias = "tuple[_Tensors, _Tensors]"

# Elements of a piece. From 32,768 on torch shares a copy out to its own threads, whose barrier
# costs milliseconds on a machine that computes all the time.
_PIECE = 32_704
# Pieces of a batch. Each thread copies one batch after the other.
_PIECES = 64

LARGE_NBYTES = 256 * 2**10
"""Bytes from which a tensor is copied alone, without the GIL; smaller ones in batches, with it."""

_MIN_CHUNK_NBYTES = 4 * 2**20
_MAX_CHUNK_NBYTES = 64 * 2**20


class CopyPool:
    """A few threads that copy large blocks. Threads start with the first large copy.

    The thread that asks for a copy takes part in it, so that ``num_threads - 1`` threads named
    ``aiosync-copy_<n>`` are started. If they are busy with the copy of another thread, or did not
    survive a fork, the caller copies alone.

    Args:
        num_threads: Number of threads that copy at the same time, the caller's included; at least
            1.

    Attributes:
        num_threads: As given.
    """

    def __init__(self, num_threads: int = 2) -> None:
        self.num_threads = num_threads
        self._executor = ThreadPoolExecutor(max(1, num_threads - 1), "aiosync-copy")

    def copy(self, pairs: Sequence[_Pair]) -> None:
        """Copy every (destination, source) pair of 1-D uint8 arrays; return when all are copied."""
        total = sum(target.size for target, _ in pairs)
        if total < 2 * _MIN_CHUNK_NBYTES:
            self.run(copy_blocks, [pairs])
            return
        size = max(total // (4 * self.num_threads), _MIN_CHUNK_NBYTES)
        size = min(size, _MAX_CHUNK_NBYTES)
        self.run(
            copy_blocks,
            [
                [(target[start : start + size], source[start : start + size])]
                for target, source in pairs
                for start in range(0, target.size, size)
            ],
        )

    def run(self, function: Callable[[Any], object], items: Sequence[Any]) -> None:
        """Call a function for each item; return when all calls have returned."""
        # The threads share one iterator, as next() of a list iterator is atomic.
        left = iter(items)
        helpers: list[Future[None]] = []
        try:
            # If a thread cannot start, this one copies with those that there are.
            with contextlib.suppress(RuntimeError):
                while len(helpers) < min(self.num_threads, len(items)) - 1:
                    helpers.append(self._executor.submit(_take, function, left))
            _take(function, left)
        finally:
            # The executor keeps a helper that could not start: it must find no item later.
            deque(left, maxlen=0)
            for helper in helpers:
                # A helper that has not begun is not needed any more.
                if not helper.cancel():
                    helper.result()

    def close(self) -> None:
        """End the threads and join them. Idempotent. Waits for a copy that is running."""
        self._executor.shutdown()


def _take(function: Callable[[Any], object], left: Iterator[Any]) -> None:
    """Call a function for each item that no other thread takes from the iterator first."""
    for item in left:
        function(item)


def copy_blocks(pairs: Sequence[_Pair]) -> None:
    """Copy every (destination, source) pair in this thread; each copy releases the GIL."""
    for target, source in pairs:
        np.copyto(target, source)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy one block in this thread, without the GIL."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def copy_pieces(target: memoryview, pieces: Iterable[memoryview], at: int = 0) -> int:
    """Copy pieces one after the other, from offset ``at`` on; return the offset after the last."""
    for piece in pieces:
        copy_bytes(target[at : at + piece.nbytes], piece)
        at += piece.nbytes
    return at


def is_plain_cpu(tensor: torch.Tensor) -> bool:
    """Return True if the elements of a tensor are one block of bytes on the CPU, in C order."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.is_cpu
        # The accelerator of the tests has its tensors on the CPU.
        and not accelerator().has(tensor)
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def as_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the memory of a plain CPU tensor as a 1-D uint8 array. Not for empty tensors."""
    with torch.no_grad():
        array: NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array


@torch.no_grad()
def copy_tensors(pairs: Iterable[TensorPair], pool: CopyPool | None = None) -> None:
    """Copy tensors into others, casting if need be, without torch's thread pool.

    Large ones that are not contiguous, or not on the CPU, are left to torch. Autograd is not told.
    Work that another device still has to do with the tensors, on any stream, ends before the copies
    begin, and the copies end before this returns.

    Args:
        pairs: Targets, and sources of the same shapes, which are only read.
        pool: Threads that share the copies.
    """
    pairs = list(pairs)
    api = accelerator()
    devices = {each.device for pair in pairs for each in pair if api.has(each)}
    for device in devices:
        api.synchronize(device)
    try:
        _copy(_copy_there(pairs) if devices else pairs, pool)
    finally:
        # Nothing reads the sources after this, even if an interrupt cut the copies short.
        for device in devices:
            api.synchronize(device)


def _copy(pairs: list[TensorPair], pool: CopyPool | None) -> None:
    """Copy each pair as its size and kind allow, on this thread or on those of the pool, too."""
    blocks, batches, small = list[_Pair](), list[_Batch](), list[TensorPair]()
    for target, source in pairs:
        if target.numel() <= _PIECE:
            small.append((target, source))
        elif not is_plain_cpu(target) or not is_plain_cpu(source):
            target.copy_(source)
        elif target.dtype is source.dtype:
            blocks.append((as_bytes(target), as_bytes(source)))
        else:
            batches += _batches_of_large(target, source)
    batches += _batches_of_small(small)
    if pool is not None:
        pool.copy(blocks)
        pool.run(_copy_batch, batches)
    else:
        copy_blocks(blocks)
        _take(_copy_batch, iter(batches))


def _batches_of_large(target: torch.Tensor, source: torch.Tensor) -> Iterator[_Batch]:
    """Cut a large tensor, and the source that is cast into it, into batches of pieces."""
    # unsafe_split() tells autograd nothing, and takes a third of the time of split().
    to = torch.unsafe_split(target.view(-1), _PIECE)
    of = torch.unsafe_split(source.view(-1), _PIECE)
    for at in range(0, len(to), _PIECES):
        yield to[at : at + _PIECES], of[at : at + _PIECES]


def _batches_of_small(pairs: Iterable[TensorPair]) -> Iterator[_Batch]:
    """Put small tensors together into batches of about the same number of elements."""
    targets, sources, filled = list[torch.Tensor](), list[torch.Tensor](), 0
    for target, source in pairs:
        targets.append(target)
        sources.append(source)
        filled += target.numel()
        if filled > _PIECES * _PIECE:
            yield targets, sources
            targets, sources, filled = [], [], 0
    if targets:
        yield targets, sources


def _copy_there(pairs: list[TensorPair]) -> list[TensorPair]:
    """Begin the copies from an accelerator to itself, all at once; return the other pairs."""
    api, rest = accelerator(), list[TensorPair]()
    there: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for pair in pairs:
        target, source = pair
        if _are_on_one_accelerator(target, source):
            key = target.device, target.dtype, source.dtype
            targets, sources = there.setdefault(key, ([], []))
            targets.append(target)
            sources.append(source)
        else:
            rest.append(pair)
    for targets, sources in there.values():
        api.copy(targets, sources)
    return rest


def _are_on_one_accelerator(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return True if one accelerator has both tensors, and none is a conjugate or negative view."""
    has = accelerator().has
    if not (has(target) and has(source) and target.device == source.device):
        return False
    return not (source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg())


@torch.no_grad()
def _copy_batch(batch: _Batch) -> None:
    """Copy some milliseconds' worth in one call, which releases the GIL once for all of it."""
    torch._foreach_copy_(*batch)
