"""Payloads over ``torch.distributed.rpc``: a few large calls, copied where the receiver lends.

The receiver calls the sender and says where a payload may land, under a random number that is
valid for that payload only; the sender then calls :func:`deliver` there, chunk by chunk, and says
in the stream when all of it was taken. What lets a payload go is no word in the stream: there it
would wait behind messages that no process reads yet. A receiver completes nothing before the last
word, so what is left of a transfer that was cut can never be taken for an update. Must not import
torch or schemes. See ``docs/topics/clusters.md``.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from aiosync.errors import RemoteProtocolError, TransportBroken
from aiosync.transports._buffers import chunks_of
from aiosync.transports._carrier import Carrier, Fetched
from aiosync.transports._rpc_flight import LINGER_SECONDS, Flight, call, from_thread
from aiosync.transports._rpc_landing import ID_NBYTES, Landing, landings
from aiosync.wire import ExtValue, Setup

__all__ = ["RPCCarrier"]

# A call costs about a millisecond, whatever it carries. The memory that RPC makes for a chunk is
# used again for the next one as long as it is below glibc's largest threshold of 32 MiB.
_CHUNK_NBYTES = 16 * 2**20
_WINDOW = 3  # chunks on their way at a time; with more, they take turns on the same cores
_PATIENCE_SECONDS = 30.0
_CHUNK, _NAME, _OFFER = "chunk", "name", "offer"

_offers: dict[bytes, Callable[[bytes, str], None]] = {}
"""What this process offers to send; empty while nothing is under way."""


def accept(offer: bytes, key: bytes, name: str) -> str | None:
    """The receiver waits for a payload. Called by RPC, on one of its threads.

    Args:
        offer: Names the payload, as the sender said it.
        key: What the receiver calls it.
        name: RPC worker of the receiver.

    Returns:
        Why not; ``None`` when the payload will come.
    """
    if type(key) is not bytes or len(key) != ID_NBYTES or type(name) is not str:
        return "this is no answer to an offer"
    go = _offers.pop(offer, None)
    if go is None:
        return "the sender does not offer this payload, or not any more"
    go(key, name)
    return None


class RPCCarrier(Carrier):
    """Moves payloads by calls between two RPC workers.

    Args:
        name: Name of this process's RPC worker.
        patience: Seconds without any progress after which a transfer is given up.
    """

    kind = "rpc"

    def __init__(self, name: str, *, patience: float = _PATIENCE_SECONDS) -> None:
        self._loop = asyncio.get_running_loop()
        self._name = name
        self._patience = patience
        self._go: asyncio.Future[tuple[bytes, str] | None] | None = None
        self._offer = b""
        self._flight: Flight | None = None
        self._landing: Landing | None = None
        self._landed = asyncio.Event()
        self._all_sent = False
        self.ended: bool = False
        self._still = (asyncio.Event(), asyncio.Event())  # nothing is sent; nothing is received
        for still in self._still:
            still.set()

    def hear(self, message: Setup) -> None:
        """See :class:`Carrier`."""
        landing = self._landing
        if message.key != "sent" or landing is None or message.value != landing.key or landing.left:
            raise RemoteProtocolError("the peer says that it sent a payload that did not arrive")
        self._all_sent = True
        self._landed.set()

    # -- sending -------------------------------------------------------------------------------

    async def offer(
        self, payload: list[memoryview], nbytes: int, memo: dict[Any, Any]
    ) -> Mapping[str, ExtValue]:
        """See :class:`Carrier`."""
        loop, go = self._loop, self._loop.create_future()
        self._forget_offer()
        self._go, self._offer = go, secrets.token_bytes(ID_NBYTES)

        def accepted(key: bytes, name: str) -> None:
            if not go.done():
                go.set_result((key, name))

        _offers[self._offer] = lambda key, name: from_thread(loop, accepted, key, name)
        return {_CHUNK: _CHUNK_NBYTES, _NAME: self._name, _OFFER: self._offer}

    def _forget_offer(self) -> None:
        _offers.pop(self._offer, None)

    async def push(self, payload: list[memoryview], nbytes: int) -> None:
        """See :class:`Carrier`. Waits until the peer says where the payload may land."""
        assert self._go is not None
        if self.ended:
            raise TransportBroken("the link has ended")
        try:
            went = await self._go
        finally:
            self._forget_offer()
        if went is None:
            raise TransportBroken("the link has ended")
        key, name = went
        flight = self._flight = Flight(self._loop, name, self._patience)
        self._still[0].clear()
        try:
            for index, chunk in enumerate(chunks_of(payload, _CHUNK_NBYTES)):
                await flight.until(_WINDOW - 1)
                flight.launch(key, index, chunk)
            await flight.until(0)
        finally:
            try:
                await flight.let_go()
            finally:
                self._flight = None
                self._still[0].set()
        self.say("sent", key)

    # -- receiving -----------------------------------------------------------------------------

    async def fetch(
        self, ext: Mapping[str, ExtValue], nbytes: int, lend: Callable[[], list[memoryview]] | None
    ) -> Fetched:
        """See :class:`Carrier`."""
        chunk_nbytes = ext.get(_CHUNK)
        if type(chunk_nbytes) is not int or not 2**16 <= chunk_nbytes <= 2**40:
            raise RemoteProtocolError("a payload over RPC has no valid chunk size")
        name, offer = ext.get(_NAME), ext.get(_OFFER)
        if not isinstance(name, str) or not isinstance(offer, bytes) or not 0 < len(name) <= 128:
            raise RemoteProtocolError("a payload over RPC does not identify its sender")
        assert lend is not None
        buffers = lend()
        landing = self._landing = Landing(buffers, nbytes, chunk_nbytes, self._tell)
        self._all_sent = False
        landings[landing.key] = landing
        self._still[1].clear()
        try:
            args = (offer, landing.key, self._name)
            call(self._loop, name, accept, args, self._patience, landing.refused)
            await self._wait(landing, name)
        finally:
            del landings[landing.key]
            await self._leave(landing)
        return Fetched(buffers)

    def _tell(self) -> None:
        from_thread(self._loop, self._landed.set)  # called by threads of RPC, too

    async def _wait(self, landing: Landing, name: str) -> None:
        left = -1
        while not self._all_sent:
            if landing.fault is not None:
                raise RemoteProtocolError(landing.fault)
            if self.ended:
                raise TransportBroken("the link has ended")
            if landing.refusal is not None:
                text = str(landing.refusal).partition("\n")[0]
                error = f"the RPC worker {name!r} was not told where to send: {text}"
                raise TransportBroken(error) from landing.refusal
            if landing.left == left:
                raise TransportBroken(f"none of it arrived for {self._patience:g} s")
            left = landing.left
            self._landed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience):
                    await self._landed.wait()
                    left = -1

    async def _leave(self, landing: Landing) -> None:
        """Wait until no thread writes to the lent memory: as long as copying one chunk takes."""
        landing.close()
        cancelled: asyncio.CancelledError | None = None
        while landing.writing:
            self._landed.clear()
            if not landing.writing:  # it may have told before
                break
            try:
                await self._landed.wait()
            except asyncio.CancelledError as exc:
                cancelled = exc
        self._landing = None
        self._still[1].set()
        if cancelled is not None:
            raise cancelled

    # -- closing -------------------------------------------------------------------------------

    def end(self) -> None:
        """See :class:`Carrier`."""
        if self.ended:
            return
        self.ended = True
        if self._loop.is_closed():
            return
        self._forget_offer()
        if self._go is not None and not self._go.done():
            self._go.set_result(None)
        if self._flight is not None:
            self._flight.cut()
        self._landed.set()

    async def aclose(self) -> None:
        """See :class:`Carrier`. What is under way notices the end, and lets go by itself."""
        self.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await self._still[0].wait()
                await self._still[1].wait()
