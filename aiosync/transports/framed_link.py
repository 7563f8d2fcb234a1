"""Frames over a non-blocking byte stream, driven by the event loop: no thread, no polling.

:class:`FramedTransport` is the link over such a stream: it writes frames, receives those that its
``frame_reader`` takes, watches the peer's process, and keeps the error that ended the link. Payload
bytes are written straight from the sender's buffers, and read straight into those that the receiver
lends. :class:`MPTransport` is such a link over a pipe. Must not import torch, anyio, schemes, or
another transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import ClassVar, Self

from aiosync._repr import in_every_state
from aiosync._tasks import Notifier
from aiosync.errors import (
    AiosyncError,
    ConnectError,
    PeerClosed,
    ProtocolError,
    RecvTimeout,
    RemoteProtocolError,
    SendTimeout,
    TransportBroken,
    TransportBusy,
    TransportClosed,
    TransportError,
)
from aiosync.protocol import seconds_text
from aiosync.transports._forks import OPENING, close_in_child
from aiosync.transports._process_end import open_pidfd
from aiosync.transports.base import (
    Handler,
    Lender,
    LinkError,
    Payload,
    Received,
    Transport,
    again,
    flat_view,
    is_no_room,
    take_buffers,
    without_frames,
)
from aiosync.transports.byte_stream import ByteStream, first_bytes
from aiosync.transports.frame_reader import WINDOW_NBYTES, FrameReader
from aiosync.types import Cancellation, Capabilities, Limits
from aiosync.wire import (
    DEFAULT_LIMITS,
    ExtValue,
    FrameEnd,
    FrameStart,
    Message,
    Refuse,
    encode_frame,
)

__all__ = ["LEAST_SECONDS", "FramedTransport", "MPTransport", "MemoryTransport"]

LEAST_SECONDS = 0.01
"""Shortest time in which a ``recv()`` looks for a message; a ``timeout`` of 0 takes this one."""

# Every message of a stranger or of a worker fits into these limits, with the text of an error.
_SMALL_MESSAGES = Limits(max_header_nbytes=4096, max_payload_nbytes=0, max_buffer_nbytes=0)

_NOWAIT_NBYTES = 65536
# The kernel takes 1024 buffers in one call, with that of the header.
_NOWAIT_BUFFERS = 1000
# Most characters of the reason that the peer is told.
_MAX_REASON = 1000


class FramedTransport(Transport):
    """A link of frames of :mod:`aiosync.wire` over ``io``, with payloads in the stream.

    The link belongs to the loop that runs when it is made. The descriptor stays registered with the
    loop. It is taken out while a manifest is decoded, and while a message waits for ``recv()`` and
    the read-ahead is full; the peer then blocks.

    Args:
        io: A connected socket, a two-way ``multiprocessing`` connection, or the stream over one.
            Owned from now on: no other code may read from or write to it.
        limits: Bounds on what the peer may announce.
        name: Name of the peer in errors.

    Raises:
        ConfigError: ``io`` is one-way or closed, or this process has no descriptor left.

    Attributes:
        io: The stream.
        limits: Bounds on what the peer may announce while it may send payloads.
        name: Name of the peer in errors; may be assigned.
        closed: True if this side closed the link.
        ended: True if no operation can succeed any more.
        error: The error that ended the link; ``None`` while it works, or if this side closed it.
            Sticky.
        says_why: True to send the peer a Refuse with the reason if it breaks the protocol.
        read_only: True if the peer proved its identity with the ``pull_token``, so that it must not
            push.
        pidfd: Descriptor that is readable once the peer's process has ended, or -1.
        written_nbytes: Number of bytes written so far, without those of writes that did not wait;
            it grows while a waiting send makes progress.
    """

    _default_limits: ClassVar[Limits] = DEFAULT_LIMITS

    def __init__(
        self,
        io: Connection | socket.socket | ByteStream,
        *,
        limits: Limits | None = None,
        name: str = "the peer",
    ) -> None:
        self.io: ByteStream = io if isinstance(io, ByteStream) else ByteStream(io)
        self.limits: Limits = limits or self._default_limits
        self.name = name
        self.closed: bool = False
        self.ended: bool = False
        self.error: LinkError | None = None
        self.says_why: bool = False
        self.read_only: bool = False
        self.pidfd: int = -1
        self.written_nbytes: int = 0
        self._loop = asyncio.get_running_loop()
        self._on_end: list[Callable[[], None]] = []

        self._handler: Handler | None = None
        self._reader = FrameReader(self, self.io, self.limits)

        # The rest of the frame that is being written.
        self._out: list[memoryview] = []
        # True if the kernel has some bytes of that frame.
        self._started = False
        # Control frames that are sent as soon as the stream is between two other frames.
        self._queue: deque[bytes] = deque()
        self._room = Notifier()
        # True while a send() runs; true while the loop calls _on_writable().
        self._sending = self._writing = False

        self._reader.resume()
        close_in_child(self)

    @staticmethod
    def _connected_sockets() -> tuple[socket.socket, socket.socket]:
        """Return the two sockets of a connection, for :meth:`pair`."""
        return socket.socketpair()

    @classmethod
    @contextlib.asynccontextmanager
    async def pair(cls, *, limits: Limits | None = None) -> AsyncIterator[tuple[Self, Self]]:
        """Make two connected ends in this process, which are closed when the context ends."""
        left, right = cls._connected_sockets()
        async with (
            cls(left, limits=limits, name="the right end") as one,
            cls(right, limits=limits, name="the left end") as two,
        ):
            yield one, two

    @property
    def channel(self) -> FramedTransport:
        """See :attr:`Transport.channel`: this link itself."""
        return self

    # -- the end of the link ---------------------------------------------------------------------

    def check(self) -> None:
        """Raise the error that ended the link, if it has ended."""
        if self.closed:
            raise TransportClosed(f"this end of the link to {self.name} was closed")
        if self.error is not None:
            raise again(self.error)

    def call_on_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` once when the link ends, for any reason; now if it has ended."""
        if self.ended:
            callback()
        else:
            self._on_end.append(callback)

    def fail(self, error: LinkError) -> None:
        """End the link with ``error``; every waiter and every later operation raises it."""
        if not self.ended:
            self.error = without_frames(error)
            self._end(error)

    def abort(self) -> None:
        """Close the link at once, and wake every waiter. Idempotent, never waits."""
        self.closed = True
        # The handler may refer to this object, which would be a cycle.
        self._handler = None
        if not self.ended:
            self._end(None)

    async def aclose(self) -> None:
        """Close both directions at once; waiters get ``TransportClosed``."""
        self.abort()

    def _end(self, error: LinkError | None) -> None:
        """Wake every waiter and close the stream. ``error`` is ``None`` if this side closed it."""
        self.ended = True
        # A destructor may call this after the loop was closed. Then no task waits any more.
        with contextlib.suppress(RuntimeError):
            if not self._loop.is_closed():
                self._reader.stop()
                self._unwatch()
                self._room.notify()
                if self.pidfd >= 0:
                    self._loop.remove_reader(self.pidfd)
        self._take_leave(error)
        while self._on_end:
            self._on_end.pop(0)()
        self._close_descriptors(farewell=True)

    def _take_leave(self, error: LinkError | None) -> None:
        """Drop unread bytes; tell the peer if it broke the protocol, or if no room is left here."""
        self.io.drop_unread()
        mid_frame = self.io.has_unsent or (self._started and bool(self._out))
        why = self._reason_for_peer(error)
        if why is not None and not mid_frame:
            # Bytes that the kernel does not take at once are dropped: no task waits for a peer that
            # breaks the protocol. Encoding fails if the text is longer than a header may be.
            refuse = Refuse(type(error).__name__, str(why)[:_MAX_REASON])
            with contextlib.suppress(OSError, AiosyncError):
                self.io.writev([memoryview(encode_frame(refuse, 0, limits=self.limits))])

    def _reason_for_peer(self, error: LinkError | None) -> BaseException | None:
        """Return the error to tell the peer, if it cannot see the reason from its side."""
        if error is not None and is_no_room(error.__cause__):
            return error.__cause__
        return error if self.says_why and isinstance(error, RemoteProtocolError) else None

    def _close_descriptors(self, *, farewell: bool) -> None:
        """Close the stream and the pidfd; with ``farewell`` the stream may tell the peer before."""
        self.io.close(farewell=farewell)
        # Another thread may fork meanwhile, and the child closes what this object has.
        fd, self.pidfd = self.pidfd, -1
        if fd >= 0:
            os.close(fd)

    def release_stream(self) -> ByteStream:
        """End this link between two messages, and return its stream, which goes on.

        Raises:
            TransportError: The link has ended.
        """
        self.check()
        self._reader.stop()
        self._unwatch()
        self._on_end.clear()
        self.closed = self.ended = True
        return self.io

    def close_after_fork(self) -> None:
        """Close this copy of the link in a forked child; the parent's link goes on."""
        self.closed = self.ended = True
        self._close_descriptors(farewell=False)

    # -- the peer --------------------------------------------------------------------------------

    def refuse_payloads(self) -> None:
        """Allow the peer only small messages without payload, from the next frame on.

        This is for a peer that has not proved its identity, and for a worker, which sends no more.
        """
        self._reader.decoder.limits = _SMALL_MESSAGES

    def allow_payloads(self) -> None:
        """Allow the peer all messages within ``limits``, from the next frame on."""
        self._reader.decoder.limits = self.limits

    @property
    def takes_payloads(self) -> bool:
        """True if the peer may send payloads."""
        return self._reader.decoder.limits is self.limits

    def watch_process(self, pid: int) -> None:
        """Notice the end of the peer's process, even if another process holds its descriptors.

        Raises:
            ConnectError: The process has ended already.
        """
        if pid <= 0 or pid == os.getpid() or self.ended:
            return
        try:
            with OPENING:
                self.pidfd = open_pidfd(pid)
        except ProcessLookupError as exc:
            raise ConnectError(f"process {pid} of {self.name} ended during the handshake") from exc
        # Without a pidfd, only the end of the stream shows the end of the process.
        if self.pidfd >= 0:
            self._loop.add_reader(self.pidfd, self._on_process_end)
            self._reader.rely_on_process()

    def _on_process_end(self) -> None:
        """End the link, as the pidfd shows that the peer's process has ended."""
        self._loop.remove_reader(self.pidfd)
        # Messages that the peer sent before it died still count.
        self._reader.finish(PeerClosed(f"the process of {self.name} ended"))

    # -- receiving -------------------------------------------------------------------------------

    def subscribe(self, handler: Handler) -> bool:
        """See :meth:`Transport.subscribe`. The handler gets messages without payload.

        A message that waits for ``recv()`` already goes to the handler at once.
        """
        self._handler = handler
        self._reader.hand_over()
        return True

    def deliver(self, received: Received) -> bool:
        """Hand a message without payload to the handler. Return False to leave it to recv()."""
        return self._handler is not None and self._handler(received) is not False

    async def recv(self, *, into: Lender | None = None, timeout: float | None = None) -> Received:
        """See :meth:`Transport.recv`. Cancellation: class B."""
        reader = self._reader
        if reader.in_recv:
            raise TransportBusy(f"another recv() is waiting on the link to {self.name}")
        reader.in_recv = True
        # The loop needs this time to read: with a timeout of 0, no message would ever be found.
        if timeout is not None:
            timeout = max(timeout, LEAST_SECONDS)
        # A lender may offer arrived(message) and landed(nbytes).
        arrived = getattr(into, "arrived", None)
        if arrived is not None and into is not None:
            reader.deliver_whole = functools.partial(self._deliver_whole, into, arrived)
        try:
            if reader.event is not None:
                # This is a checkpoint: the message goes on to wait if this call is cancelled here.
                await asyncio.sleep(0)
            async with asyncio.timeout(timeout) as deadline:
                return await self._next_message(into)
        except TimeoutError as exc:
            if not deadline.expired():
                raise
            raise RecvTimeout(
                f"no whole message from {self.name} within {seconds_text(timeout)}{self._advice()}"
            ) from exc
        finally:
            reader.in_recv, reader.deliver_whole = False, None

    def _deliver_whole(self, into: Lender, arrived: Handler, start: FrameStart) -> None:
        """Hand a message whose payload was read whole to the lender of recv(), which waits on."""
        decoder, nbytes = self._reader.decoder, start.payload_nbytes
        payload = take_buffers(into, start.message, nbytes, decoder.limits)
        decoder.lend(payload)
        # This event is the end of the payload.
        decoder.next_event()
        arrived(Received(start.message, payload, nbytes, ext=start.ext))

    async def _next_message(self, into: Lender | None) -> Received:
        """Wait for the next message, and read its payload."""
        reader = self._reader
        while reader.event is None or self.closed:
            if self.closed or not (self.ended and reader.take_rest(self.deliver)):
                self.check()
                await reader.arrival.wait()
        start, reader.event = reader.event, None
        assert isinstance(start, FrameStart)
        received = Received(start.message, (), start.payload_nbytes, ext=start.ext)
        if start.payload_nbytes:
            received.payload = await self._recv_payload(start, into)
        # The next message is decoded only after the caller got this one. Otherwise a handler could
        # get the next one first.
        self._loop.call_soon(reader.resume)
        return received

    def _advice(self) -> str:
        """Return the end of the text of a timeout; empty if the link can go on."""
        return "" if self.error is None else "; the link is broken, open a new one"

    async def _recv_payload(self, start: FrameStart, into: Lender | None) -> list[memoryview]:
        """Read the payload of a message into lent or new buffers; the link ends if that is cut."""
        reader, nbytes = self._reader, start.payload_nbytes
        decoder = reader.decoder
        try:
            buffers = take_buffers(into, start.message, nbytes, decoder.limits)
        except BaseException:
            # The error goes on to the caller of recv().
            # There is no place for the payload that follows, so the stream cannot go on.
            self.fail(TransportBroken(f"no buffer was lent for a payload from {self.name}"))
            raise
        decoder.lend(buffers)
        landed = getattr(into, "landed", None)
        if landed is not None:
            reader.landed = lambda: landed(nbytes - decoder.missing_nbytes)
        try:
            reader.resume()
            if self.error is not None:
                # The reader has stopped, but may have read the whole payload before.
                reader.event = decoder.next_event()
            while not isinstance(reader.event, FrameEnd):
                self.check()
                await reader.arrival.wait()
        except BaseException:  # The error goes on to the caller of recv().
            self.fail(TransportBroken(f"recv() from {self.name} was cut in mid-message"))
            raise
        finally:
            reader.landed = reader.event = None
        return buffers

    # -- sending ---------------------------------------------------------------------------------

    def _frame(
        self, message: Message, payload: Payload, ext: Mapping[str, ExtValue] | None
    ) -> tuple[bytes, list[memoryview], int]:
        """Return the encoded message, the byte views of its payload, and their total size."""
        views = [*map(flat_view, payload)]
        nbytes = sum(map(len, views))
        return encode_frame(message, nbytes, ext=ext, limits=self.limits), views, nbytes

    def send_nowait(
        self,
        message: Message,
        payload: Payload = (),
        *,
        ext: Mapping[str, ExtValue] | None = None,
    ) -> bool:
        """See :meth:`Transport.send_nowait`; payloads above 64 KiB are always refused.

        So are those of more than 1000 buffers.

        If the kernel takes only a part of the frame, the rest is copied and the loop writes it
        later; the frame counts as sent.
        """
        frame, views, nbytes = self._frame(message, payload, ext)
        if nbytes > _NOWAIT_NBYTES or len(views) > _NOWAIT_BUFFERS:
            self.check()
            return False
        return self.write_nowait(frame, views)

    def send_batch_nowait(self, messages: Sequence[Message]) -> bool:
        """See :meth:`Transport.send_batch_nowait`."""
        encode = functools.partial(encode_frame, limits=self.limits)
        return self.write_nowait(b"".join(map(encode, messages)))

    def write_nowait(self, frame: bytes, payload: Sequence[memoryview] = ()) -> bool:
        """Write a small frame, a part of it perhaps later; return False if nothing was written."""
        if self.ended:
            self.check()
        if self._sending or self._out or self._reader.is_last:
            return False
        buffers = [memoryview(frame), *payload]
        try:
            nbytes = self.io.writev(buffers)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as exc:
            self._reader.read_last()
            self._reader.lose(exc, cut=False)
            self.check()
        if nbytes < sum(map(len, buffers)):
            self._out = [memoryview(b"".join(_after(buffers, nbytes)))]
            self._started = True
        if self._out or self.io.has_unsent:
            self._watch()
        return True

    def queue(self, frame: bytes) -> None:
        """Send a control frame as soon as the stream is between two frames. Never waits.

        The queue has no bound. Use it only for frames whose number has one, such as the steps of a
        set-up.
        """
        # The next operation raises the error of a link that has ended.
        with contextlib.suppress(TransportError, ProtocolError):
            if not self.write_nowait(frame):
                self._queue.append(frame)
                if not self._sending:
                    self._watch()

    async def send(
        self,
        message: Message,
        payload: Payload = (),
        *,
        timeout: float | None = None,
        ext: Mapping[str, ExtValue] | None = None,
    ) -> None:
        """See :meth:`Transport.send`. Cancellation: class B.

        Args:
            message: The message to send.
            payload: The payload of the message.
            timeout: Seconds for the whole call; ``None`` waits for ever.
            ext: Entries for the transport at the other end.
        """
        frame, views, _ = self._frame(message, payload, ext)
        if self._sending:
            raise TransportBusy(f"another send() is running on the link to {self.name}")
        self._sending = True
        taken = False
        try:
            # This is a checkpoint before the first byte, so cancelling here leaves the link intact.
            await asyncio.sleep(0)
            async with asyncio.timeout(timeout) as deadline:
                # The rest of an earlier send_nowait() counts as sent. Waiting for it must not cut
                # it.
                while self._out:
                    await self._wait_for_room()
                self.check()
                self._out, self._started = [memoryview(frame), *views], False
                try:
                    await self._write_all()
                except BaseException:
                    # The error goes on to the caller of send().
                    # A message that the stream has taken as a whole counts as sent after a timeout.
                    taken = not self._out
                    self._abandon()
                    raise
        except TimeoutError as exc:
            if not deadline.expired():
                raise
            if not taken:
                raise SendTimeout(
                    f"{self.name} did not take the message within {seconds_text(timeout)}"
                    f"{self._advice()}"
                ) from exc
        finally:
            self._sending = False
            # Control frames that queue() held back meanwhile go out now.
            if self._queue:
                self._watch()

    async def _wait_for_room(self) -> None:
        """Wait until the frame under way is written, or raise the error that ended the link."""
        self.check()
        await self._room.wait()
        self.check()

    def _abandon(self) -> None:
        """Drop the frame of a send() that ends early; the link breaks if it was written in part."""
        rest, self._out = self._out, []
        if rest and self._started:
            self.fail(TransportBroken(f"a send to {self.name} was cut in mid-message"))
        elif rest and not self.io.has_unsent:
            self._unwatch()

    def _watch(self) -> None:
        """Have the loop call :meth:`_on_writable` while the stream can take bytes."""
        if not self._writing and not self.ended:
            self._writing = True
            self.io.watch_writes(self._loop, self._on_writable)

    def _unwatch(self) -> None:
        """Have the loop call :meth:`_on_writable` no more."""
        if self._writing:
            self._writing = False
            self.io.watch_writes(self._loop, None)

    async def _write_all(self) -> None:
        """Write until the stream has taken all of the message."""
        self._write()
        while self._out or self.io.has_unsent:
            self._watch()
            await self._wait_for_room()

    def _on_writable(self) -> None:
        """Write more of the frame under way, then a queued one; wake send() if all is written."""
        self._write()
        if not self._out and self._queue and not self._sending:
            self._out, self._started = [memoryview(self._queue.popleft())], False
            self._write()
        if self._out or self.io.has_unsent:
            return
        if self._room.waiting:
            # The descriptor stays in the loop, as the next part of a large update is likely to
            # follow at once: taking it out and putting it back costs more than one call in vain.
            self._room.notify()
        elif self._sending or not self._queue:
            self._unwatch()

    def _write(self) -> None:
        """Write the rest of the frame, or a window of it; the next call writes what is left."""
        budget = WINDOW_NBYTES
        try:
            while self._out and budget > 0:
                nbytes = self.io.writev(first_bytes(self._out, budget))
                self._started = True
                self.written_nbytes += nbytes
                self._out = _after(self._out, nbytes)
                budget -= nbytes
            if not self._out:
                self.io.flush()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self._reader.read_last()
            self._reader.lose(exc, cut=self._started)

    @in_every_state
    def __repr__(self) -> str:
        state = "closed" if self.closed else type(self.error).__name__ if self.error else "open"
        return f"<{type(self).__name__} to {self.name}: {state}>"


class MPTransport(FramedTransport):
    """A link over a two-way pipe: ``multiprocessing.Pipe()``, or one socket of a Unix socket pair.

    The link takes ownership of the pipe, as :class:`FramedTransport` does. Nothing is pickled.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        name="pipe",
        send_cancellation=Cancellation.BREAKS_LINK,
        recv_cancellation=Cancellation.BREAKS_LINK,
    )


class MemoryTransport(MPTransport):
    """A link inside one process, over a pipe. Make both ends with ``pair()``."""

    capabilities: ClassVar[Capabilities] = replace(
        MPTransport.capabilities, name="memory", cross_process=False
    )


def _after(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return the rest of ``views`` after ``nbytes`` bytes of them were written."""
    for index, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= view.nbytes
    return []
