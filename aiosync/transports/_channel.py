"""Frames over a non-blocking byte stream, driven by the event loop: no thread, no polling.

Joins the two directions, watches the peer's process and closes everything. Must not import
torch, anyio or anything above ``transports``.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiosync.errors import AiosyncError, ConnectError, PeerClosed, RemoteProtocolError
from aiosync.transports._fork import close_in_child
from aiosync.transports._io import ByteIo
from aiosync.transports._link import LinkError, LinkState
from aiosync.transports._processes import open_pidfd
from aiosync.transports._reader import FrameReader
from aiosync.transports._source import Intercept
from aiosync.transports._writer import FrameWriter
from aiosync.transports.base import Lender
from aiosync.types import Limits
from aiosync.wire import DEFAULT_LIMITS, Message, Refuse, encode_frame

__all__ = ["FramedChannel", "channel_of"]

# No message of a worker is longer, with the text of an error and all.
_SMALL_MESSAGES = Limits(max_header_nbytes=4096, max_payload_nbytes=0, max_buffer_nbytes=0)
_MAX_REASON = 1000  # characters


class FramedChannel:
    """One framed link over ``io``. Belongs to the loop that runs when it is made."""

    def __init__(
        self,
        io: ByteIo,
        *,
        limits: Limits | None = None,
        name: str = "peer",
        intercept: Intercept | None = None,
    ) -> None:
        """Start reading.

        Args:
            io: The byte stream; owned from now on.
            limits: What the peer may announce.
            name: How errors call the peer.
            intercept: Called with each message without payload as it is read; returns True to
                keep it from ``recv()``.
        """
        self.io = io
        self.limits: Limits = limits or DEFAULT_LIMITS
        self._state = LinkState(name)
        self._pidfd = -1
        self._reader = FrameReader(io, self._state, limits=self.limits, intercept=intercept)
        self._writer = FrameWriter(io, self._state)
        self._state.on_end.append(self._forget_process)
        self._state.on_end.append(self._tell_peer)
        self._told_peer = False
        self.says_why: bool = False  # tells the peer in a Refuse what it did wrong
        close_in_child(self)

    @property
    def name(self) -> str:
        """How errors call the peer."""
        return self._state.name

    @name.setter
    def name(self, name: str) -> None:
        self._state.name = name

    @property
    def closed(self) -> bool:
        """Whether this side closed the link."""
        return self._state.closed

    @property
    def error(self) -> LinkError | None:
        """What ended the link, or ``None`` while it works."""
        return self._state.error

    @property
    def ended(self) -> bool:
        """Whether no operation can succeed any more."""
        return self._state.ended

    def set_limits(self, limits: Limits) -> None:
        """Let the peer announce other sizes from the next frame on, once it proved its identity."""
        self.limits = limits
        self._reader.set_limits(limits)

    def refuse_payloads(self) -> None:
        """Let the peer send small messages only, from the next frame on."""
        self._reader.set_limits(_SMALL_MESSAGES)

    def allow_payloads(self) -> None:
        """Let the peer send what the limits allow."""
        self._reader.set_limits(self.limits)

    @property
    def local_host(self) -> str:
        """Address of this host as the peer sees it; that of the loopback for local links."""
        with contextlib.suppress(OSError):
            with socket.socket(fileno=os.dup(self.io.read_fd)) as sock:
                name = sock.getsockname()
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    return str(name[0])
        return "127.0.0.1"

    @property
    def takes_payloads(self) -> bool:
        """Whether the peer may send payloads."""
        return self._reader.limits is self.limits

    @property
    def written_nbytes(self) -> int:
        """Bytes of large writes that the stream took so far; grows while a write makes progress."""
        return self._writer.written

    def call_on_end(self, callback: Callable[[], None]) -> None:
        """Have ``callback()`` called once the link has ended, however it ends."""
        self._state.on_end.append(callback)

    def describe(self) -> str:
        """One word for a repr."""
        return self._state.describe()

    def fail(self, error: LinkError) -> None:
        """End the link with ``error``; every waiter and every later operation raises it."""
        self._state.fail(error)

    def check(self) -> None:
        """Raise what ended the link, if anything did."""
        self._state.check()

    async def recv(
        self, into: Lender | None, timeout: float | None
    ) -> tuple[Message, Mapping[str, Any] | None, list[Any], int]:
        """Wait for a message; returns it with its ext map, its buffers and its payload size."""
        return await self._reader.recv(into, timeout)

    def send_now(self, frame: bytes, payload: Sequence[memoryview] = ()) -> bool:
        """Write a small frame without waiting; False when nothing was written."""
        return self._writer.send_now(frame, payload)

    def queue(self, frame: bytes) -> None:
        """Send a control frame as soon as the stream is between two frames; never waits."""
        self._writer.queue(frame)

    async def send(
        self, frame: bytes, payload: Sequence[memoryview], timeout: float | None
    ) -> None:
        """Write a frame and its payload; the contract of ``Transport.send``."""
        await self._writer.send(frame, payload, timeout)

    def keep_rest(self) -> None:
        """Copy what the stream has not taken yet: its buffers are about to change."""
        self._writer.keep_rest()

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
            self._pidfd = pidfd
            self._state.loop.add_reader(pidfd, self._on_process_end)

    @property
    def pidfd(self) -> int:
        """Descriptor that is readable once the peer's process has ended, or -1."""
        return self._pidfd

    def _on_process_end(self) -> None:
        self._forget_process()
        # What it said before it died still counts.
        self._reader.peer_gone(PeerClosed(f"the process of {self.name} ended"))

    def _forget_process(self) -> None:
        if self._pidfd >= 0:
            self._state.loop.remove_reader(self._pidfd)

    def close(self) -> None:
        """Close the descriptors and wake every waiter. Idempotent, never waits."""
        if self._state.closed:
            return
        self._state.closed = True
        # The loop may be gone when a destructor calls this: then nobody waits any more.
        with contextlib.suppress(RuntimeError):
            if not self._state.loop.is_closed():
                for callback in self._state.on_end:
                    callback()
        if not self._told_peer:
            self._told_peer = True
            self._drain()
        self._close_descriptors()

    def _tell_peer(self) -> None:
        # A broken stream cannot be used again; its end tells the peer so without delay.
        error = self._state.error
        if error is not None and not isinstance(error, PeerClosed) and not self._told_peer:
            self._told_peer = True
            self._drain()
            if self.says_why and isinstance(error, RemoteProtocolError):
                self._refuse(error)
            self.io.close()

    def _refuse(self, error: RemoteProtocolError) -> None:
        # What the kernel does not take at once is left out: nobody waits for the rude.
        if self._writer.mid_frame:
            return
        refuse = Refuse(type(error).__name__, str(error)[:_MAX_REASON])
        with contextlib.suppress(OSError, AiosyncError):  # or longer than a header may be
            self.io.sendv([memoryview(encode_frame(refuse, 0, limits=self.limits))])

    def _drain(self) -> None:
        # Unread bytes would turn our orderly end of the stream into a reset at the peer.
        scratch = memoryview(bytearray(65536))
        with contextlib.suppress(OSError):
            for _ in range(64):
                if not self.io.recv_into(scratch):
                    break

    def _close_descriptors(self) -> None:
        self.io.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def close_after_fork(self) -> None:
        """In a forked child: close this copy; the parent's link goes on."""
        self._state.closed = True
        self.io.close_copy()
        self._close_descriptors()


def channel_of(link: object) -> FramedChannel | None:
    """The framed stream below a link, if it has one."""
    channel: FramedChannel | None = getattr(link, "channel", None)
    return channel
