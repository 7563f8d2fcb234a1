"""Copies of large blocks that release the GIL, on a few plain threads.

torch's own thread pool is not used: on a machine that computes all the time its barrier costs
milliseconds. This module must never import asyncio or a transport.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import nn

from aiosync.errors import ConfigError, LocalProtocolError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from numpy.typing import NDArray

__all__ = [
    "LARGE_NBYTES",
    "PIECE",
    "CopyPool",
    "TensorPair",
    "as_bytes",
    "copy_blocks",
    "copy_bytes",
    "copy_pairs",
    "copy_plain",
    "cut",
    "is_plain_cpu",
]

_Pair: TypeAlias = "tuple[NDArray[np.uint8], NDArray[np.uint8]]"
TensorPair: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"

# Elements of a piece. From 32,768 on torch shares a copy out to its own threads, whose barrier
# costs milliseconds on a machine that computes all the time.
PIECE = 32_704
# Elements of a batch, of which each thread takes one after the other.
_BATCH = 64 * PIECE

LARGE_NBYTES = 256 * 2**10
"""Tensors from here on are copied one by one without the GIL; smaller ones in one go, with it."""

_PLAIN = (torch.Tensor, nn.Parameter)

_MIN_CHUNK_NBYTES = 4 * 2**20
_MAX_CHUNK_NBYTES = 64 * 2**20


class CopyPool:
    """A few threads that copy large blocks. Threads start with the first large copy.

    The thread that asks for a copy takes part in it, so that ``num_threads - 1`` threads named
    ``aiosync-copy-<n>`` are started. One copy runs at a time; a second caller copies alone.

    Attributes:
        num_threads: Threads that copy at the same time, the caller's included.
    """

    def __init__(self, num_threads: int = 2) -> None:
        """Prepare a pool; nothing is started.

        Args:
            num_threads: At least 1.

        Raises:
            ConfigError: ``num_threads`` is below 1.
        """
        if num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1, got {num_threads}")
        self.num_threads = num_threads
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._threads: list[threading.Thread] = []
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<CopyPool num_threads={self.num_threads} closed={self._closed}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def copy(self, pairs: Sequence[_Pair]) -> None:
        """Copy every (destination, source) pair of 1-D uint8 arrays; returns when all is done.

        Raises:
            LocalProtocolError: The pool is closed.
        """
        total = sum(target.size for target, _ in pairs)
        if total < 2 * _MIN_CHUNK_NBYTES:
            self.run(copy_blocks, [pairs])
        else:
            self.run(_copy_block, _chunks(pairs, total, self.num_threads))

    def run(self, function: Callable[[Any], object], items: Sequence[Any]) -> None:
        """Call a function for each item; returns when all is done.

        Raises:
            LocalProtocolError: The pool is closed.
        """
        if self._closed:
            raise LocalProtocolError("the copy pool is closed")
        if os.getpid() != self._pid:  # threads do not survive a fork
            self._reset()
        job = _Job(function, items)
        if self.num_threads == 1 or len(items) < 2 or not self._lock.acquire(blocking=False):
            job.run()
            return
        try:
            self._start()
            for _ in self._threads:
                self._jobs.put(job)
            try:
                job.run()
            finally:
                job.join()
        finally:
            self._lock.release()

    def _start(self) -> None:
        while len(self._threads) < self.num_threads - 1:
            thread = threading.Thread(
                target=_work,
                args=(self._jobs,),
                name=f"aiosync-copy-{len(self._threads)}",
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """End the threads and join them. Idempotent. Waits for a copy that is running."""
        self._closed = True
        if os.getpid() != self._pid:
            return
        with self._lock:
            for _ in self._threads:
                self._jobs.put(None)
            for thread in self._threads:
                thread.join()
            self._threads.clear()


class _Job:
    """Items that several threads take one after the other."""

    def __init__(self, function: Callable[[Any], object], items: Sequence[Any]) -> None:
        self._function = function
        self._items = iter(items)  # next() of a list iterator is atomic
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._active = 0
        self._closed = False
        self._error: BaseException | None = None

    def run(self) -> None:
        for item in self._items:
            self._function(item)

    def help(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._active += 1
        try:
            self.run()
        except BaseException as exc:  # noqa: BLE001 - join() raises it in the thread that asked
            self._error = exc
        finally:
            with self._lock:
                self._active -= 1
                self._idle.notify()

    def join(self) -> None:
        """Wait for helpers that are in the middle of a chunk; late ones find nothing to do."""
        with self._lock:
            self._closed = True
            while self._active:
                self._idle.wait()
        if self._error is not None:
            raise self._error


def _work(jobs: SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        job.help()
        del job


def _chunks(pairs: Sequence[_Pair], total: int, num_threads: int) -> list[_Pair]:
    size = min(max(total // (4 * num_threads), _MIN_CHUNK_NBYTES), _MAX_CHUNK_NBYTES)
    return [
        (target[start : start + size], source[start : start + size])
        for target, source in pairs
        for start in range(0, target.size, size)
    ]


def copy_blocks(pairs: Sequence[_Pair]) -> None:
    """Copy every (destination, source) pair in this thread; each copy releases the GIL."""
    for target, source in pairs:
        np.copyto(target, source)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy one block in this thread, without the GIL."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _copy_block(pair: _Pair) -> None:
    np.copyto(*pair)


def is_plain_cpu(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor are one block of bytes on the CPU, in C order."""
    return (
        type(tensor) in _PLAIN
        and tensor.device.type == "cpu"
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


def copy_plain(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor into another one, casting if need be, without torch's thread pool.

    Tensors that are not contiguous, or not on the CPU, are left to torch.

    Args:
        target: Of the shape of ``source``; needs no gradient.
        source: Is only read.
    """
    with torch.no_grad():
        if target.is_contiguous() and target.device.type == "cpu" and is_plain_cpu(source):
            copy_pairs(cut(target, source))
        else:
            target.copy_(source)


def cut(target: torch.Tensor, source: torch.Tensor) -> list[TensorPair]:
    """A pair of contiguous tensors as pairs of at most a batch."""
    to, of = target.view(-1), source.view(-1)
    if to.numel() <= _BATCH:
        return [(to, of)]
    # The "unsafe" one knows nothing of autograd, and takes a third of the time.
    return list(zip(torch.unsafe_split(to, _BATCH), torch.unsafe_split(of, _BATCH), strict=True))


def copy_pairs(pairs: Sequence[TensorPair], pool: CopyPool | None = None) -> None:
    """Copy pairs of at most a batch, casting if need be."""
    batches: list[list[TensorPair]] = []
    filled = _BATCH + 1
    for pair in pairs:
        filled += pair[0].numel()
        if filled > _BATCH:
            batches.append([])
            filled = pair[0].numel()
        batches[-1].append(pair)
    if pool is None or len(batches) < 2:
        for batch in batches:
            _copy_batch(batch)
    else:
        pool.run(_copy_batch, batches)


@torch.no_grad()
def _copy_batch(batch: Sequence[TensorPair]) -> None:
    """Copy some milliseconds' worth in one call: it releases the GIL once for all of it."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for target, source in batch:
        if target.numel() <= PIECE:
            targets.append(target)
            sources.append(source)
        else:
            targets += torch.unsafe_split(target, PIECE)
            sources += torch.unsafe_split(source, PIECE)
    torch._foreach_copy_(targets, sources)
