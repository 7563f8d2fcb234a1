"""The sending half of payloads over RPC: calls under way, and the memory that they read.

Drives torch; must not import schemes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed import rpc

from aiosync.errors import ConfigError, TransportBroken
from aiosync.transports._rpc_landing import deliver
from aiosync.transports.rpc import rpc_name

__all__ = ["LINGER_SECONDS", "Flight", "call", "from_thread"]

_PIECE_NBYTES = 2**20  # a smaller piece is copied together with its neighbours
LINGER_SECONDS = 2.0
"""How long a cut transfer waits for a peer that stands still."""


def call(
    loop: asyncio.AbstractEventLoop,
    name: str,
    function: Callable[..., str | None],
    args: tuple[Any, ...],
    timeout: float,
    on_answer: Callable[[Exception | None], None],
) -> None:
    """Call a function of this package at another RPC worker.

    Args:
        loop: Where ``on_answer`` runs.
        name: Of the worker.
        function: Returns why it refuses, or ``None``.
        args: Its arguments.
        timeout: Seconds.
        on_answer: Told once, later, what went wrong; ``None`` if nothing did.
    """

    def on_done(future: Any) -> None:
        error: Exception | None = None
        try:
            refused = future.value()
        except Exception as exc:  # noqa: BLE001 - of any type; on_answer() is told
            error = exc
        else:
            error = None if refused is None else RuntimeError(str(refused))
        from_thread(loop, on_answer, error)

    try:
        future: Any = rpc.rpc_async(name, function, args=args, timeout=timeout)
        future.add_done_callback(on_done)
    except (RuntimeError, ValueError) as exc:  # no RPC any more, or no such worker
        loop.call_soon(on_answer, exc.with_traceback(None))  # its frames keep the arguments


def from_thread(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any
) -> None:
    """Have the loop call ``callback``, unless it is closed and nobody waits any more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)


class Flight:
    """The calls of one payload, and its memory until RPC has let go of it.

    The future of a call that timed out says nothing about the memory: RPC goes on reading it
    when the peer goes on. But RPC drops its tensor once it was written, or never will be.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, patience: float) -> None:
        self._loop = loop
        self._name = name
        self._patience = patience
        self.calls = 0
        self.memory = 0
        self.error: Exception | None = None
        self._cut = False
        self._kept: dict[int, list[torch.Tensor]] = {}  # by chunk
        self._changed = asyncio.Event()

    def launch(self, key: bytes, index: int, pieces: list[memoryview]) -> None:
        """Start the call that delivers one chunk."""
        tensors = []
        for array in _joined(pieces):
            self.memory += 1
            tensors.append(torch.from_numpy(np.asarray(_Lent(array, self._on_let_go))))
        args = (key, index, *tensors)
        self.calls += 1
        # Kept until the answer is here: what Python does on a thread of RPC, which lets go of
        # them else, maps and unmaps memory, and the GIL waits with it for who reads this process.
        self._kept[index] = tensors
        answered = functools.partial(self._answered, index)
        call(self._loop, self._name, deliver, args, self._patience, answered)

    def _on_let_go(self) -> None:
        from_thread(self._loop, self._let_go)

    def _answered(self, index: int, error: Exception | None) -> None:
        self._kept.pop(index, None)
        self.calls -= 1
        if error is not None and self.error is None:
            self.error = error
        self._changed.set()

    def _let_go(self) -> None:
        self.memory -= 1
        self._changed.set()

    def cut(self) -> None:
        """The link has ended."""
        self._cut = True
        self._changed.set()

    def _broken(self, error: Exception) -> TransportBroken:
        text = str(error).partition("\n")[0]
        try:
            rpc_name()
        except ConfigError:  # every link fails, each for another reason
            text += ". RPC was shut down in this process: call aclose() before rpc.shutdown()"
        return TransportBroken(f"the transfer to the RPC worker {self._name!r} failed: {text}")

    async def until(self, calls: int) -> None:
        """Wait until at most so many calls are under way. Each has a deadline of its own.

        Raises:
            TransportBroken: A call failed, or the link has ended.
        """
        while True:
            if self.error is not None:
                raise self._broken(self.error) from self.error
            if self._cut:
                raise TransportBroken("the link has ended")
            if self.calls <= calls:
                return
            self._changed.clear()
            await self._changed.wait()

    async def let_go(self) -> None:
        """Wait for a while until RPC has let go of the memory, whoever cancels meanwhile.

        It always has where the peer lives or is dead; one that stalls may keep it for
        longer. Nobody takes what it reads then.
        """
        self._kept.clear()  # an answer may never come: RPC alone decides
        give_up = self._loop.time() + LINGER_SECONDS
        cancelled: asyncio.CancelledError | None = None
        while self.memory and (left := give_up - self._loop.time()) > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                break
            except asyncio.CancelledError as exc:
                cancelled = exc
        if cancelled is not None:
            raise cancelled


class _Lent:
    """Memory that RPC reads. Passes it off as writable; tells when nothing refers to it."""

    def __init__(
        self, array: np.ndarray[Any, np.dtype[np.uint8]], on_let_go: Callable[[], None]
    ) -> None:
        self._array = array
        self._on_let_go = on_let_go
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)  # torch warns of read-only memory
        self.__array_interface__ = interface

    def __del__(self) -> None:
        self._on_let_go()


def _joined(pieces: list[memoryview]) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    """The bytes of a chunk: large pieces as they are, runs of small ones copied together."""
    small: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    for piece in pieces:
        array = np.frombuffer(piece, np.uint8)
        if len(pieces) > 1 and array.size < _PIECE_NBYTES:
            small.append(array)
            continue
        if small:
            yield np.concatenate(small)
            small = []
        yield array
    if small:
        yield np.concatenate(small)
