"""Frames over a non-blocking byte stream, driven by the event loop: no thread, no polling.

:class:`FramedChannel` reads and writes the frames of one link, watches the peer's process, and
knows how the link ended; :class:`FramedTransport` is the transport over it. Payload bytes are
written straight from the sender's buffers, and read straight into those that the receiver lends.
Must not import torch, anyio, schemes, or a concrete transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, TypeAlias

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
from aiosync.transports._buffers import flat_view, take_buffers
from aiosync.transports._fork import close_in_child
from aiosync.transports._io import ByteIo, local_host
from aiosync.transports._link import LinkError, again, wake, without_frames
from aiosync.transports._processes import open_pidfd
from aiosync.transports.base import Handler, Lender, Payload, Received, Transport
from aiosync.types import Limits
from aiosync.wire import (
    DEFAULT_LIMITS,
    Failed,
    FrameDecoder,
    FrameEnd,
    FrameStart,
    Message,
    Refuse,
    encode_frame,
)

__all__ = ["Divert", "FramedChannel", "FramedTransport", "channel_of"]

Divert: TypeAlias = "Callable[[Message, Mapping[str, Any] | None], bool]"
"""Sees each message without payload as it is read; returns True to keep it from ``recv()``."""

# No message of a worker is longer, with the text of an error and all.
_SMALL_MESSAGES = Limits(max_header_nbytes=4096, max_payload_nbytes=0, max_buffer_nbytes=0)

# One loop callback moves at most this much, so that a bulk transfer never holds the loop long;
# and less if that takes longer, as it does where the memory is touched for the first time.
_WINDOW_NBYTES = 2**20
_WINDOW_SECONDS = 0.001
# One call reads at most this much, which is still in the cache when it is looked at.
_READ_NBYTES = 2**18
_IOV_MAX = 512
_NOWAIT_NBYTES = 65536
_POLL_PAYLOAD_SECONDS = 1.0
_MAX_REASON = 1000  # characters


class FramedChannel:
    """One framed link over ``io``. Belongs to the loop that runs when it is made.

    The descriptor stays registered with the loop; it is taken out only while a message waits that
    nobody asked for yet and the read-ahead is full, which is what makes the peer block.

    Args:
        io: The byte stream; owned from now on.
        limits: What the peer may announce.
        name: How errors call the peer.
        intercept: Gets each message without payload first.

    Attributes:
        io: As given.
        limits: What the peer may announce once it may send payloads.
        name: As given; may be assigned.
        closed: This side closed the link.
        ended: No operation can succeed any more.
        error: What ended the link, or ``None`` while it works. Sticky.
        says_why: Tells the peer in a Refuse what it did wrong.
        pidfd: Descriptor that is readable once the peer's process has ended, or -1.
        written_nbytes: Bytes that the stream took so far; grows while a write makes progress.
    """

    def __init__(
        self,
        io: ByteIo,
        *,
        limits: Limits | None = None,
        name: str = "peer",
        intercept: Divert | None = None,
    ) -> None:
        self.io = io
        self.limits: Limits = limits or DEFAULT_LIMITS
        self.name = name
        self.closed: bool = False
        self.ended: bool = False
        self.error: LinkError | None = None
        self.says_why: bool = False
        self.pidfd: int = -1
        self.written_nbytes: int = 0
        self._loop = asyncio.get_running_loop()
        self._on_end: list[Callable[[], None]] = []
        self._told_peer = False

        self._decoder = FrameDecoder(self.limits)
        self._intercept = intercept
        self._event: FrameStart | FrameEnd | None = None  # what waits for recv()
        self._arrival: asyncio.Future[None] | None = None
        self._landed: Callable[[], None] | None = None
        self._gone: TransportError | None = None  # ends the link once all was received
        self._receiving = self._reading = self._read_again = False

        self._out: list[memoryview] = []  # what is left of the frame being written
        self._next: list[memoryview] = []  # the frame that comes after it
        self._started = False  # some of its bytes are with the kernel
        self._queue: deque[bytes] = deque()  # control frames that go out between two others
        self._room: asyncio.Future[None] | None = None
        self._sending = self._writing = False

        self._resume()
        close_in_child(self)

    # -- how it ends -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what ended the link, if anything did."""
        if self.closed:
            raise TransportClosed(f"this end of the link to {self.name} was closed")
        if self.error is not None:
            raise again(self.error)

    def describe(self) -> str:
        """One word for a repr."""
        if self.closed:
            return "closed"
        return type(self.error).__name__ if self.error else "open"

    def call_on_end(self, callback: Callable[[], None]) -> None:
        """Have ``callback()`` called once the link has ended, however it ends."""
        self._on_end.append(callback)

    def fail(self, error: LinkError) -> None:
        """End the link with ``error``; every waiter and every later operation raises it."""
        if self.ended:
            return
        self.ended = True
        self.error = without_frames(error)
        self._stop()
        # A broken stream cannot be used again; its end tells the peer so without delay.
        if not isinstance(error, PeerClosed):
            self._tell_peer(error)
            self.io.close()
        self._call_back()

    def close(self) -> None:
        """Close the descriptors and wake every waiter. Idempotent, never waits."""
        if self.closed:
            return
        self.closed = self.ended = True
        # The loop may be gone when a destructor calls this: then nobody waits any more.
        with contextlib.suppress(RuntimeError):
            if not self._loop.is_closed():
                self._stop()
                self._call_back()
        self._tell_peer(None)
        self._intercept = None  # it knows this object
        self._close_descriptors()

    def _stop(self) -> None:
        self._pause()
        self._unwatch()
        wake(self._arrival)
        wake(self._room)
        self._forget_process()

    def _call_back(self) -> None:
        while self._on_end:
            self._on_end.pop(0)()

    def _tell_peer(self, error: LinkError | None) -> None:
        if self._told_peer:
            return
        self._told_peer = True
        # Unread bytes would turn our orderly end of the stream into a reset at the peer.
        scratch = memoryview(bytearray(65536))
        with contextlib.suppress(OSError):
            for _ in range(64):
                if not self.io.recv_into(scratch):
                    break
        mid_frame = self.io.has_unsent or (self._started and bool(self._out))
        if self.says_why and isinstance(error, RemoteProtocolError) and not mid_frame:
            # What the kernel does not take at once is left out: nobody waits for the rude.
            refuse = Refuse(type(error).__name__, str(error)[:_MAX_REASON])
            with contextlib.suppress(OSError, AiosyncError):  # or longer than a header may be
                self.io.send(encode_frame(refuse, 0, limits=self.limits))

    def _close_descriptors(self) -> None:
        self.io.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def close_after_fork(self) -> None:
        """In a forked child: close this copy; the parent's link goes on."""
        self.closed = self.ended = True
        self.io.close_copy()
        self._close_descriptors()

    # -- who is at the other end -----------------------------------------------------------------

    def set_limits(self, limits: Limits) -> None:
        """Let the peer announce other sizes from the next frame on, once it proved its identity."""
        self.limits = self._decoder.limits = limits

    def refuse_payloads(self) -> None:
        """Let the peer send small messages only, from the next frame on."""
        self._decoder.limits = _SMALL_MESSAGES

    def allow_payloads(self) -> None:
        """Let the peer send what the limits allow."""
        self._decoder.limits = self.limits

    @property
    def takes_payloads(self) -> bool:
        """Whether the peer may send payloads."""
        return self._decoder.limits is self.limits

    @property
    def local_host(self) -> str:
        """Address of this host as the peer sees it; that of the loopback for local links."""
        return local_host(self.io.read_fd)

    def watch_process(self, pid: int) -> None:
        """Notice the death of the peer's process even when somebody else holds its descriptors.

        Raises:
            ConnectError: The process is gone already.
        """
        if pid <= 0 or pid == os.getpid():
            return
        try:
            pidfd = open_pidfd(pid)
        except ProcessLookupError as exc:
            raise ConnectError(f"process {pid} of {self.name} ended during the handshake") from exc
        if pidfd >= 0:  # else the closed stream has to tell
            self.pidfd = pidfd
            self._loop.add_reader(pidfd, self._on_process_end)

    def _on_process_end(self) -> None:
        self._forget_process()
        error = PeerClosed(f"the process of {self.name} ended")
        self._read_again = False
        self._read()
        if self._event is not None:  # what it said before it died still counts
            self._gone = error
        else:
            self.fail(error)

    def _forget_process(self) -> None:
        if self.pidfd >= 0:
            self._loop.remove_reader(self.pidfd)

    # -- receiving -------------------------------------------------------------------------------

    async def recv(
        self, into: Lender | None, timeout: float | None
    ) -> tuple[Message, Mapping[str, Any] | None, list[Any], int]:
        """Wait for a message; returns it with its ext map, its buffers and its payload size."""
        if self._receiving:
            raise TransportBusy(f"another recv() is waiting on the link to {self.name}")
        self._receiving = True
        poll = timeout is not None and timeout <= 0
        try:
            if poll and self._event is None:
                self._read_again = False
                self._read()
            if poll or self._event is not None:
                await asyncio.sleep(0)  # a checkpoint; the message still waits if cancelled here
            async with asyncio.timeout(None if poll else timeout) as deadline:
                while self._event is None or self.closed:
                    if self.ended:
                        self.check()
                    if poll:
                        raise RecvTimeout(f"no message from {self.name} within {timeout:g} s")
                    await self._wait_for_event()
                start, self._event = self._event, None
                assert isinstance(start, FrameStart)
                buffers: list[Any] = []
                if start.payload_nbytes:
                    if poll:  # it found the head of a message: its payload gets a moment to follow
                        deadline.reschedule(self._loop.time() + _POLL_PAYLOAD_SECONDS)
                    buffers = await self._recv_payload(start, into)
                # The caller gets its message before the next one is looked at: an intercept
                # may take that one at once, and would overtake it.
                self._loop.call_soon(self._advance)
                return start.message, start.ext, buffers, start.payload_nbytes
        except TimeoutError as exc:
            if not deadline.expired():
                raise
            if self.error is None:
                raise RecvTimeout(f"no message from {self.name} within {timeout:g} s") from exc
            raise RecvTimeout(
                f"a payload from {self.name} did not arrive in time; the link is broken, open a "
                "new one"
            ) from exc
        finally:
            self._receiving = False

    async def _recv_payload(self, start: FrameStart, into: Lender | None) -> list[Any]:
        decoder, nbytes = self._decoder, start.payload_nbytes
        try:
            buffers = take_buffers(into, start.message, nbytes, decoder.limits)
        except BaseException:  # goes on to the caller of recv()
            # The payload that follows cannot be placed, so the stream is lost with it.
            self.fail(TransportBroken(f"no buffer was lent for a payload from {self.name}"))
            raise
        decoder.lend(buffers)
        landed = getattr(into, "landed", None)
        if landed is not None:
            self._landed = lambda: landed(nbytes - decoder.missing_nbytes)
        try:
            self._advance()
            while not isinstance(self._event, FrameEnd):
                if self.ended:
                    self.check()
                await self._wait_for_event()
        except PeerClosed as exc:
            raise TransportBroken(f"{self.name} went away in mid-message") from exc
        except BaseException:  # goes on to the caller of recv()
            self.fail(TransportBroken(f"recv() from {self.name} was cut in mid-message"))
            raise
        finally:
            self._landed = self._event = None
        return buffers

    async def _wait_for_event(self) -> None:
        self._arrival = self._loop.create_future()
        try:
            await self._arrival
        finally:
            self._arrival = None

    def _advance(self) -> None:
        """Look for the next event in what was already read, and go on reading."""
        if self.closed:
            return
        self._pull()
        if self._event is not None:
            wake(self._arrival)  # a recv() may have begun to wait before this ran
            return
        if self._gone is not None:
            self.fail(self._gone)
        self._resume()

    def _resume(self) -> None:
        if self.ended:
            return
        if not self._reading:
            self._reading = True
            self._loop.add_reader(self.io.read_fd, self._read)
        if self.io.reads_out or self.io.has_unread:
            self._read_soon()

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self.io.read_fd)

    def _read_soon(self) -> None:
        """Read in the next turn of the loop, whether or not it says that there is something."""
        if not self._read_again:
            self._read_again = True
            self._loop.call_soon(self._on_turn)

    def _on_turn(self) -> None:
        if self._read_again:
            self._read_again = False
            if self._reading:
                self._read()

    def _read(self) -> None:
        if self._read_again or self.ended:  # one window for each turn of the loop, and not two
            return
        io, decoder = self.io, self._decoder
        budget, until = _WINDOW_NBYTES, perf_counter() + _WINDOW_SECONDS
        while not self.ended:
            buffer = decoder.get_buffer()
            room = len(buffer)
            if not room:
                self._pull()
                if self._event is not None:
                    self._pause()
                break
            most = min(budget, _READ_NBYTES)
            if room > most:
                buffer, room = buffer[:most], most
            try:
                nbytes = io.recv_into(buffer)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as exc:
                self._lost(exc, cut=decoder.mid_frame or not isinstance(exc, ConnectionError))
                break
            if nbytes:
                decoder.buffer_updated(nbytes)
                if self._landed is not None:
                    self._landed()
            else:  # what was read before still counts
                decoder.feed_eof()
                self._pause()
            self._pull()
            if not nbytes or self._event is not None or (nbytes < room and not io.reads_out):
                break
            budget -= nbytes
            if budget <= 0 or perf_counter() >= until:
                self._read_soon()
                break
        if self._reading and io.has_unread:
            self._read_soon()
        if self._event is not None or self.error is not None:
            wake(self._arrival)

    def _pull(self) -> None:
        """Take events off the decoder until one has to wait for ``recv()``."""
        while self._event is None:
            event = self._decoder.next_event()
            if event is None:
                return
            if isinstance(event, FrameStart):
                if event.payload_nbytes or self._intercept is None:
                    self._event = event
                    return
                try:
                    if not self._intercept(event.message, event.ext):
                        self._event = event
                except (ProtocolError, TransportError) as exc:
                    self.fail(exc)
                    return
                except Exception as exc:  # noqa: BLE001 - a bug above, told to whoever uses the link
                    error = TransportBroken(f"a message from {self.name} could not be handled")
                    error.__cause__ = exc
                    self.fail(error)
                    return
            elif isinstance(event, FrameEnd):
                self._event = event
            elif isinstance(event, Failed):
                self.fail(event.error)
                return
            else:
                self.fail(
                    PeerClosed(f"{self.name} closed the link")
                    if event.clean
                    else TransportBroken(f"the link to {self.name} was cut in mid-message")
                )
                return

    def _lost(self, exc: OSError, *, cut: bool) -> None:
        error: TransportError = PeerClosed(f"{self.name} closed the link")
        if cut:
            error = TransportBroken(f"the link to {self.name} was lost in mid-message: {exc}")
        error.__cause__ = exc
        self.fail(error)

    # -- sending ---------------------------------------------------------------------------------

    def send_now(self, frame: bytes, payload: Sequence[memoryview] = ()) -> bool:
        """Write a small frame without waiting; False when nothing was written.

        A frame that the kernel took only in part is copied and flushed by the loop, and counts
        as sent.
        """
        if self.ended:
            self.check()
        if self._sending or self._out:
            return False
        self._started = False
        views = [memoryview(frame), *payload]
        try:
            nbytes = self.io.sendv(views) if payload else self.io.send(frame)
            if not payload and nbytes == len(frame) and not self.io.has_unsent:
                return True
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as exc:
            self._lost(exc, cut=False)
            self.check()
        rest = _after(views, nbytes)
        if rest:
            self._out, self._started = [memoryview(b"".join(rest))], True
        if rest or self.io.has_unsent:
            self._watch()
        return True

    def queue(self, frame: bytes) -> None:
        """Send a control frame as soon as the stream is between two frames; never waits.

        For frames whose number is bounded by something else, such as the steps of a set-up.
        """
        with contextlib.suppress(TransportError, ProtocolError):  # the next operation raises it
            if not self.send_now(frame):
                self._queue.append(frame)
                if not self._sending:
                    self._watch()

    async def send(
        self, frame: bytes, payload: Sequence[memoryview], timeout: float | None
    ) -> None:
        """Write a frame and its payload; the contract of ``Transport.send``."""
        if self._sending:
            raise TransportBusy(f"another send() is running on the link to {self.name}")
        self._sending = True
        self._next = [memoryview(frame), *payload]
        taken = False
        try:
            await asyncio.sleep(0)  # a checkpoint, before the first byte
            async with asyncio.timeout(timeout) as deadline:
                while self._out:  # the tail of an earlier send_now(): not ours to cut
                    await self._wait_for_room()
                self.check()
                self._out, self._next, self._started = self._next, [], False
                try:
                    self._write()
                    while self._out or self.io.has_unsent:
                        self._watch()
                        await self._wait_for_room()
                except BaseException:  # goes on to the caller of send()
                    taken = not self._out  # the kernel has all of it: sent, whatever ended the wait
                    self._abandon()
                    raise
        except TimeoutError as exc:
            if not deadline.expired():
                raise
            if not taken:
                raise SendTimeout(
                    f"{self.name} did not take the message within {timeout:g} s"
                    + ("" if self.error is None else "; the link is broken, open a new one")
                ) from exc
        finally:
            self._sending, self._next = False, []
            if self._queue:
                self._watch()

    def keep_rest(self) -> None:
        """Copy what the stream has not taken yet: its buffers are about to change."""
        self._out, self._next = (
            [memoryview(b"".join(views))] if views else [] for views in (self._out, self._next)
        )

    async def _wait_for_room(self) -> None:
        self.check()
        self._room = self._loop.create_future()
        try:
            await self._room
        finally:
            self._room = None
        self.check()

    def _abandon(self) -> None:
        # A send that ends early is harmless before its first byte and cuts the link after it.
        rest, self._out = self._out, []
        if rest and self._started:
            self.fail(TransportBroken(f"a send to {self.name} was cut in mid-message"))
        elif rest:
            self._unwatch()

    def _watch(self) -> None:
        if not self._writing and not self.ended:
            self._writing = True
            self._loop.add_writer(self.io.write_fd, self._on_writable)

    def _unwatch(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self.io.write_fd)

    def _on_writable(self) -> None:
        self._write()
        if not self._out and self._queue and not self._sending:
            self._out, self._started = [memoryview(self._queue.popleft())], False
            self._write()
        if self._out or self.io.has_unsent:
            return
        if self._room is not None and not self._room.done():
            # The next part of a large update is likely to follow at once: taking the descriptor
            # out of the loop and putting it back costs more than being called once in vain.
            wake(self._room)
        elif self._sending or not self._queue:
            self._unwatch()

    def _write(self) -> None:
        budget = _WINDOW_NBYTES
        try:
            if self.io.has_unsent and not self._out:
                self.io.flush()
            while self._out and budget > 0:
                window = _window(self._out, budget)
                nbytes = self.io.sendv(window)
                self._started = True
                self.written_nbytes += nbytes
                self._out = _after(self._out, nbytes)
                budget -= nbytes
                if self.io.is_full and nbytes < sum(map(len, window)):
                    return  # another call would only say so
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self._lost(exc, cut=self._started)


def _window(views: list[memoryview], budget: int) -> list[memoryview]:
    """The first buffers of ``views``, no more than ``budget`` bytes of them."""
    window = []
    for view in views[:_IOV_MAX]:
        window.append(view[:budget])
        budget -= view.nbytes
        if budget <= 0:
            break
    return window


def _after(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of ``views`` after ``nbytes`` of them were written."""
    for index, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= view.nbytes
    return []


def channel_of(link: object) -> FramedChannel | None:
    """The framed stream below a link, if it has one."""
    stream: FramedChannel | None = getattr(link, "channel", None)
    return stream


class FramedTransport(Transport):
    """Frames of :mod:`aiosync.wire` over ``io``, payloads in the stream."""

    def __init__(self, io: ByteIo, *, limits: Limits | None, name: str) -> None:
        self._handler: Handler | None = None
        self._divert: Divert | None = None
        self._channel = FramedChannel(io, limits=limits, name=name, intercept=self._intercept)

    @property
    def channel(self) -> FramedChannel:
        """The framed byte stream below, for schemes that watch the peer's process."""
        return self._channel

    async def send(
        self, message: Message, payload: Payload = (), *, timeout: float | None = None
    ) -> None:
        """See :meth:`Transport.send`. Cancellation: class B."""
        views = [view for view in map(flat_view, payload) if view.nbytes]
        nbytes = sum(view.nbytes for view in views)
        frame = encode_frame(message, nbytes, limits=self._channel.limits)
        await self._channel.send(frame, views, timeout)

    def send_nowait(self, message: Message, payload: Payload = ()) -> bool:
        """See :meth:`Transport.send_nowait`; payloads above 64 KiB are always refused."""
        stream = self._channel
        views = [view for view in map(flat_view, payload) if view.nbytes] if payload else ()
        nbytes = sum([view.nbytes for view in views])
        if nbytes > _NOWAIT_NBYTES:
            stream.check()
            return False
        return stream.send_now(encode_frame(message, nbytes, limits=stream.limits), views)

    def send_batch_nowait(self, messages: Sequence[Message]) -> bool:
        """See :meth:`Transport.send_batch_nowait`."""
        limits = self._channel.limits
        return self._channel.send_now(
            b"".join([encode_frame(message, 0, limits=limits) for message in messages])
        )

    async def recv(self, *, into: Lender | None = None, timeout: float | None = None) -> Received:
        """See :meth:`Transport.recv`. Cancellation: class B."""
        message, _ext, buffers, nbytes = await self._channel.recv(into, timeout)
        return Received(message, [flat_view(buffer) for buffer in buffers], nbytes)

    def subscribe(self, handler: Handler) -> bool:
        """See :meth:`Transport.subscribe`; for messages without payload."""
        self._handler = handler
        return True

    def divert(self, take: Divert) -> None:
        """Show each message without payload to ``take`` first, as it is read.

        ``take`` gets the message and its extension map, and returns True for those that it keeps
        from everybody else. What it raises ends the link, as for :meth:`subscribe`.
        """
        self._divert = take

    def _intercept(self, message: Message, ext: Mapping[str, Any] | None) -> bool:
        if self._divert is not None and self._divert(message, ext):
            return True
        if self._handler is None or ext:
            return False  # only recv() looks at extensions
        self._handler(Received(message))
        return True

    async def aclose(self) -> None:
        """Close both directions at once; waiters see ``TransportClosed``."""
        self.abort()

    def abort(self) -> None:
        """The same as :meth:`aclose`, from synchronous code."""
        self._channel.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self._channel.name}: {self._channel.describe()}>"
