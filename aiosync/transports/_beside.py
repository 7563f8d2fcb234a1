"""Links whose large payloads travel beside the stream: over a process group, RPC or Ray.

The control stream is a framed link that the event loop watches: messages, acknowledgements and
the end of the peer arrive there, awaited without polling. A :class:`DataPlane` moves the bytes of
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
from aiosync.transports._kept_errors import LinkError, again, without_frames
from aiosync.transports.base import Handler, Lender, Payload, Received, Transport
from aiosync.transports.data_plane import DataPlane, SharedPayload
from aiosync.transports.stream import FramedTransport
from aiosync.wire import ExtValue, Message, Setup, encode_frame

__all__ = ["INLINE_NBYTES", "BesideTransport"]

INLINE_NBYTES = 128 * 2**10
"""Payloads up to this size travel in the control stream."""

_POLL_SECONDS = 1.0

_NBYTES = "beside"
"""Entry of an extension map: bytes of the payload that travels beside the stream."""

_T = TypeVar("_T")


class BesideTransport(Transport):
    """A link over ``control`` whose large payloads ``plane`` moves. Owns both.

    Args:
        control: A connected framed link.
        plane: The way beside it.
        inline_nbytes: Payloads up to this size travel in the control stream.
    """

    def __init__(
        self,
        control: FramedTransport,
        plane: DataPlane,
        *,
        inline_nbytes: int = INLINE_NBYTES,
    ) -> None:
        self._control = control
        self._plane = plane
        self._inline_nbytes = inline_nbytes
        self._sending = self._receiving = self._told = False
        # Sticky, and before what the control stream may still have in hand.
        self._broken: LinkError | None = None
        self._handler: Handler | None = None
        plane.control = control
        control.subscribe(self._deliver)
        control.call_on_end(plane.end)

    @property
    def channel(self) -> FramedTransport:
        """See :attr:`Transport.channel`: the control stream."""
        return self._control

    @property
    def follows_copies_above(self) -> int | None:
        """See :attr:`Transport.follows_copies_above`."""
        return self._inline_nbytes if self._plane.follows_copies else None

    def _check(self) -> None:
        if self._broken is not None and not self._control.closed:
            raise again(self._broken)
        self._control.check()

    # -- sending -------------------------------------------------------------------------------

    def send_nowait(self, message: Message, payload: Payload = ()) -> bool:
        """See :meth:`Transport.send_nowait`; payloads beside the stream are always refused."""
        if self._sending or sum([flat_view(each).nbytes for each in payload]) > self._inline_nbytes:
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
            raise TransportBusy(f"another send() is running on the link to {self._control.name}")
        if self._broken is not None:
            self._check()
        views = [view for view in map(flat_view, payload) if view.nbytes]
        nbytes = sum(view.nbytes for view in views)
        self._sending = True
        try:
            if nbytes <= self._inline_nbytes:
                await self._control.send(message, views, timeout=timeout)
                return
            encode_frame(message, nbytes, limits=self._control.limits)  # the checks of a stream
            what = f"the payload of a {type(message).__name__} to {self._control.name}"
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
        ext = {**await self._plane.offer(views, nbytes, memo), _NBYTES: nbytes}
        self._told = True
        if not self._control.send_nowait(message, ext=ext):
            await self._control.send(message, ext=ext)
        await self._plane.push(views, nbytes)
        self._control.check()

    async def _within(
        self,
        timeout: float | None,
        late: AiosyncError,
        what: str,
        transfer: Callable[[], Awaitable[_T]],
        begun: Callable[[], bool] = lambda: True,
    ) -> _T:
        """Run a transfer that ends the link when it is cut after it has begun, or fails."""
        try:
            async with asyncio.timeout(timeout) as deadline:
                return await transfer()
        except BaseException as exc:  # raised again, or what it comes from
            ours = isinstance(exc, AiosyncError)
            if begun() or (ours and not isinstance(exc, LocalProtocolError)):
                self._fail(exc, what)
            if deadline.expired() and not ours and isinstance(exc, TimeoutError):
                raise late from exc
            if ours and not isinstance(exc, ProtocolError):
                self._check()
            raise

    def _fail(self, error: BaseException, what: str) -> None:
        if self._control.closed:
            return
        lost = self._control.error
        if lost is None and isinstance(error, LinkError):
            lost = error
        if lost is None or isinstance(lost, PeerClosed | LocalProtocolError):
            # The end of a stream between two messages may be one within this payload.
            broken = TransportBroken(f"the link was lost in the middle of {what}: {error}")
            broken.__cause__ = lost or (error if isinstance(error, AiosyncError) else None)
            lost = broken
        self._broken = self._broken or without_frames(lost)
        self._control.fail(lost)

    # -- receiving -----------------------------------------------------------------------------

    def subscribe(self, handler: Handler) -> bool:
        """See :meth:`Transport.subscribe`; for messages without payload."""
        self._handler = handler
        return True

    def _deliver(self, received: Received) -> bool:
        message = received.message
        if isinstance(message, Setup):
            if message.kind != self._plane.kind:
                raise RemoteProtocolError(
                    f"the peer moves payloads by {message.kind[:40]!a}, this side by "
                    f"{self._plane.kind!r}: construct both schemes with the same back-end"
                )
            self._plane.hear(message)
            return True
        if self._handler is None or (received.ext and _NBYTES in received.ext):
            return False  # its payload is fetched by recv()
        return self._handler(received) is not False

    async def recv(self, *, into: Lender | None = None, timeout: float | None = None) -> Received:
        """See :meth:`Transport.recv`. Cancellation: class B; idle it is safe.

        Cut while a payload is on its way beside the stream, it returns once nothing writes to
        the lent buffers any more.
        """
        if self._receiving:
            raise TransportBusy(f"another recv() is waiting on the link to {self._control.name}")
        if self._broken is not None:
            self._check()
        self._receiving = True
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            while True:
                left = None if timeout is None else max(0.0, timeout + started - loop.time())
                received = await self._next(into, left)
                if isinstance(received.message, Setup):  # came before this object was made
                    try:
                        self._deliver(received)
                    except RemoteProtocolError as exc:
                        self._control.fail(exc)
                        raise
                    continue
                if not received.ext or _NBYTES not in received.ext:
                    return received
                # A payload that is announced takes its time, also where recv() only looks.
                least = _POLL_SECONDS if timeout is not None and timeout <= 0 else 0.0
                left = None if timeout is None else max(least, timeout + started - loop.time())
                message, ext = received.message, received.ext
                what = f"the payload of a {type(message).__name__} from {self._control.name}"
                late = RecvTimeout(f"{what} was not complete within {timeout or 0:g} s")
                fetch = functools.partial(self._fetch, message, ext, into)
                return await self._within(left, late, what, fetch)
        finally:
            self._receiving = False

    async def _next(self, into: Lender | None, timeout: float | None) -> Received:
        try:
            return await self._control.recv(into=into, timeout=timeout)
        except PeerClosed as exc:
            hint = self._plane.hint()
            if not hint:
                raise
            raise PeerClosed(f"{exc}; {hint}") from exc

    async def _fetch(
        self, message: Message, ext: Mapping[str, ExtValue], into: Lender | None
    ) -> Received:
        limits, nbytes = self._control.limits, ext[_NBYTES]
        if type(nbytes) is not int or nbytes < 1:
            raise RemoteProtocolError("a payload beside the stream has no valid size")
        if not self._control.takes_payloads:
            raise RemoteProtocolError("the peer sent a payload before it was allowed to")
        if nbytes > limits.max_payload_nbytes:
            raise RemoteProtocolError(
                f"a payload of {nbytes} bytes is over the limit of {limits.max_payload_nbytes} "
                "(Limits.max_payload_nbytes)"
            )

        def lend() -> list[memoryview]:
            try:
                return [flat_view(each) for each in take_buffers(into, message, nbytes, limits)]
            except BaseException:  # raised again, to the caller of recv()
                self._control.fail(TransportBroken("no buffer was lent for a payload"))
                raise

        own = into is None and self.capabilities.zero_copy_recv
        payload, key = await self._plane.fetch(ext, nbytes, None if own else lend)
        return Received(message, payload, nbytes, key=key)

    # -- closing -------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close the link and what carries its payloads; waiters see ``TransportClosed``."""
        try:
            await self._plane.settle()
        finally:
            self.abort()
        await self._plane.aclose()

    def abort(self) -> None:
        """Close at once; what carries payloads follows as soon as it can."""
        self._control.abort()
        self._plane.end()

    def __repr__(self) -> str:
        return repr(self._control).replace(type(self._control).__name__, type(self).__name__, 1)
