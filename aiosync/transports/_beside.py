"""Links whose large payloads travel beside the stream: over a process group, RPC or Ray.

The control stream is a framed link that the event loop watches: messages, acknowledgements and
the end of the peer arrive there, awaited without polling. A :class:`Carrier` moves the bytes of
payloads that are too large to travel in the stream. Must not import torch, ray or schemes.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from aiosync.errors import (
    AiosyncError,
    LocalProtocolError,
    PeerClosed,
    ProtocolError,
    RecvTimeout,
    RemoteProtocolError,
    SendTimeout,
    TransportBroken,
    TransportBusy,
)
from aiosync.transports._buffers import flat_view, take_buffers
from aiosync.transports._carrier import Carrier, SharedPayload
from aiosync.transports._link import LinkError, again, without_frames
from aiosync.transports.base import Handler, Lender, Payload, Received, Transport
from aiosync.transports.stream import FramedChannel, FramedTransport
from aiosync.wire import ExtValue, Message, Setup, encode_frame

__all__ = ["INLINE_NBYTES", "BesideTransport"]

INLINE_NBYTES = 128 * 2**10
"""Payloads up to this size travel in the control stream."""

_POLL_SECONDS = 1.0

_NBYTES = "beside"
"""Entry of an extension map: bytes of the payload that travels beside the stream."""

_T = TypeVar("_T")


class BesideTransport(Transport):
    """A link over ``control`` whose large payloads ``carrier`` moves. Owns both.

    Args:
        control: A connected framed link.
        carrier: The way beside it.
        inline_nbytes: Payloads up to this size travel in the control stream.
    """

    def __init__(
        self,
        control: FramedTransport,
        carrier: Carrier,
        *,
        inline_nbytes: int = INLINE_NBYTES,
    ) -> None:
        self._control = control
        self._carrier = carrier
        self._inline_nbytes = inline_nbytes
        self._sending = self._receiving = self._told = False
        # Sticky, and before what the control stream may still have in hand.
        self._broken: LinkError | None = None
        carrier.control = control.channel
        control.divert(self._hear)
        control.channel.call_on_end(carrier.end)

    @property
    def channel(self) -> FramedChannel:
        """The framed control stream, for schemes that watch the peer's process."""
        return self._control.channel

    @property
    def follows_copies_above(self) -> int | None:
        """See :attr:`Transport.follows_copies_above`."""
        return self._inline_nbytes if self._carrier.follows_copies else None

    def _check(self) -> None:
        if self._broken is not None and not self.channel.closed:
            raise again(self._broken)
        self.channel.check()

    def _hear(self, message: Message, ext: Mapping[str, ExtValue] | None = None) -> bool:
        if not isinstance(message, Setup):
            return False
        if message.kind != self._carrier.kind:
            raise RemoteProtocolError(
                f"the peer moves payloads by {message.kind[:40]!a}, this side by "
                f"{self._carrier.kind!r}: construct both schemes with the same back-end"
            )
        self._carrier.hear(message)
        return True

    # -- sending -------------------------------------------------------------------------------

    def send_nowait(self, message: Message, payload: Payload = ()) -> bool:
        """See :meth:`Transport.send_nowait`; payloads beside the stream are always refused."""
        if self._sending or sum(map(_nbytes, payload)) > self._inline_nbytes:
            self._check()
            return False
        return self._control.send_nowait(message, payload)

    def send_batch_nowait(self, messages: Sequence[Message]) -> bool:
        """See :meth:`Transport.send_batch_nowait`."""
        return not self._sending and self._control.send_batch_nowait(messages)

    async def send(
        self, message: Message, payload: Payload = (), *, timeout: float | None = None
    ) -> None:
        """See :meth:`Transport.send`. Cancellation: class B.

        A send that is cut while its payload is on its way returns once nothing reads the payload
        any more.
        """
        if self._sending:
            raise TransportBusy(f"another send() is running on the link to {self.channel.name}")
        if self._broken is not None:
            self._check()
        views = [view for view in map(flat_view, payload) if view.nbytes]
        nbytes = sum(view.nbytes for view in views)
        self._sending = True
        try:
            if nbytes <= self._inline_nbytes:
                await self._control.send(message, views, timeout=timeout)
                return
            limits = self.channel.limits
            encode_frame(message, nbytes, limits=limits)  # the same checks as in the stream
            what = f"the payload of a {type(message).__name__} to {self.channel.name}"
            late = SendTimeout(f"{what} was not taken within {timeout or 0:g} s")
            memo = payload.memo if isinstance(payload, SharedPayload) else {}
            send = functools.partial(self._send_beside, message, views, nbytes, memo)
            await self._within(timeout, late, what, send, lambda: self._told)
        finally:
            self._sending = False

    async def _send_beside(
        self, message: Message, views: list[memoryview], nbytes: int, memo: dict[Any, Any]
    ) -> None:
        self._told = False  # until then a cut harms nothing
        await asyncio.sleep(0)  # a checkpoint, before the first byte
        self._check()
        ext = dict(await self._carrier.offer(views, nbytes, memo))
        ext[_NBYTES] = nbytes
        frame = encode_frame(message, 0, ext=ext, limits=self.channel.limits)
        self._told = True
        if not self.channel.send_now(frame):
            await self.channel.send(frame, [], None)
        await self._carrier.push(views, nbytes)
        self.channel.check()

    async def _within(
        self,
        timeout: float | None,
        late: AiosyncError,
        what: str,
        transfer: Callable[[], Awaitable[_T]],
        begun: Callable[[], bool] = lambda: True,
    ) -> _T:
        """Run a transfer that ends the link when it is cut after it has begun."""
        try:
            async with asyncio.timeout(timeout):
                return await transfer()
        except TimeoutError as exc:
            if isinstance(exc, AiosyncError):
                self._fail(exc, what)
                raise
            if begun():
                self._fail(TransportBroken(f"{what} was cut by a deadline"), what)
            raise late from exc
        except ProtocolError as exc:
            if begun() or not isinstance(exc, LocalProtocolError):
                self._fail(exc, what)
            raise
        except AiosyncError as exc:
            self._fail(exc, what)
            self._check()
            raise
        except BaseException:  # cancelled, or a bug: raised again
            if begun():
                self._fail(TransportBroken(f"{what} was cut in the middle"), what)
            raise

    def _fail(self, error: AiosyncError, what: str) -> None:
        if self.channel.closed:
            return
        lost = self.channel.error
        if isinstance(lost, PeerClosed):
            # Its end came between two messages, as the stream sees it, but within this payload.
            error = TransportBroken(f"the link was lost in the middle of {what}")
            error.__cause__ = lost
        elif lost is not None:
            error = lost
        elif not isinstance(error, LinkError) or isinstance(error, LocalProtocolError):
            broken = TransportBroken(f"{what} failed: {error}")
            broken.__cause__ = error
            error = broken
        self._broken = self._broken or without_frames(error)
        self.channel.fail(error)

    # -- receiving -----------------------------------------------------------------------------

    def subscribe(self, handler: Handler) -> bool:
        """See :meth:`Transport.subscribe`; for messages without payload."""
        return self._control.subscribe(handler)

    async def recv(self, *, into: Lender | None = None, timeout: float | None = None) -> Received:
        """See :meth:`Transport.recv`. Cancellation: class B; idle it is safe.

        Cut while a payload is on its way beside the stream, it returns once nothing writes to
        the lent buffers any more.
        """
        if self._receiving:
            raise TransportBusy(f"another recv() is waiting on the link to {self.channel.name}")
        if self._broken is not None:
            self._check()
        self._receiving = True
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            while True:
                left = None if timeout is None else max(0.0, timeout + started - loop.time())
                message, ext, buffers, nbytes = await self._next(into, left)
                if isinstance(message, Setup):  # came before divert()
                    try:
                        self._hear(message)
                    except RemoteProtocolError as exc:
                        self.channel.fail(exc)
                        raise
                    continue
                if not ext or _NBYTES not in ext:
                    return Received(message, [flat_view(each) for each in buffers], nbytes)
                # A payload that is announced takes its time, also where recv() only looks.
                least = _POLL_SECONDS if timeout is not None and timeout <= 0 else 0.0
                left = None if timeout is None else max(least, timeout + started - loop.time())
                what = f"the payload of a {type(message).__name__} from {self.channel.name}"
                late = RecvTimeout(f"{what} was not complete within {timeout or 0:g} s")
                fetch = functools.partial(self._fetch, message, ext, into)
                return await self._within(left, late, what, fetch)
        finally:
            self._receiving = False

    async def _next(
        self, into: Lender | None, timeout: float | None
    ) -> tuple[Message, Mapping[str, ExtValue] | None, list[Any], int]:
        try:
            return await self.channel.recv(into, timeout)
        except PeerClosed as exc:
            hint = self._carrier.hint()
            if not hint:
                raise
            raise PeerClosed(f"{exc}; {hint}") from exc

    async def _fetch(
        self, message: Message, ext: Mapping[str, ExtValue], into: Lender | None
    ) -> Received:
        limits = self.channel.limits
        nbytes = ext[_NBYTES]
        if type(nbytes) is not int or nbytes < 1:
            raise RemoteProtocolError("a payload beside the stream has no valid size")
        if not self.channel.takes_payloads:
            raise RemoteProtocolError("the peer sent a payload before it was allowed to")
        if nbytes > limits.max_payload_nbytes:
            raise RemoteProtocolError(
                f"a payload of {nbytes} bytes is over the limit of {limits.max_payload_nbytes} "
                "(Limits.max_payload_nbytes)"
            )

        def lend() -> list[memoryview]:
            try:
                lent = take_buffers(into, message, nbytes, limits)
                buffers = [flat_view(buffer) for buffer in lent]
            except BaseException:  # raised again, to the caller of recv()
                self.channel.fail(TransportBroken("no buffer was lent for a payload"))
                raise
            return buffers

        own = into is None and self.capabilities.zero_copy_recv
        fetched = await self._carrier.fetch(ext, nbytes, None if own else lend)
        received = Received(message, fetched.payload, nbytes, key=fetched.key)
        if fetched.release is not None:
            received.release = fetched.release
        return received

    # -- closing -------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close the link and what carries its payloads; waiters see ``TransportClosed``."""
        try:
            await self._carrier.settle()
        finally:
            self.abort()
        await self._carrier.aclose()

    def abort(self) -> None:
        """Close at once; what carries payloads follows as soon as it can."""
        self._control.abort()
        self._carrier.end()

    def __repr__(self) -> str:
        state = self.channel.describe()
        return f"<{type(self).__name__} to {self.channel.name}: {state}>"


def _nbytes(buffer: object) -> int:
    return flat_view(buffer).nbytes
