"""A stream proxy that harms connections on cue: for fault tests over real sockets.

:class:`FaultProxy` stands between dialers and the address of a listener, both TCP or Unix, and
does to the bytes of each connection what its :class:`Plan` says, exact to the byte. Nothing is
random, and nothing is known of what the bytes mean.

This module must never import pytest or torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import socket
import struct
import tempfile
import termios
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from aiosync.transports.address import Address, bind

__all__ = ["FaultProxy", "Faults", "Plan", "PlanSource"]

_BLOCK_NBYTES = 2**16
_KERNEL_NBYTES = 2**17  # asked for; Linux grants twice as much, for its own overhead
_LINGER_SECONDS = 5.0  # in which the kernel of a peer has to take what it was sent
_LINGER_0 = struct.pack("ii", 1, 0)  # closing sends a reset
_TCP_CLOSE = 7  # the kernel's state number of a connection that is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What happens to one direction of a connection.

    Offsets count the bytes that the source sends in this direction, from 0, and a fault "after n
    bytes" happens once the first n were handed to the kernel of the destination, without waiting
    for another byte; after 0 bytes is when the connection is made. At one offset a stall comes
    first, then a reset. A stream that ends earlier has none of its faults.

    Attributes:
        cut_at: After this many bytes both sides are closed in order: each peer reads what was
            delivered to it and then the end of the stream.
        reset_at: After this many bytes both sides are reset (RST). The bytes before it arrive,
            unless the destination's kernel does not take them within 5 s. A Unix socket has no
            RST; its peers see the end of the stream, or ``ECONNRESET`` if bytes of theirs were not
            read.
        corrupt_at: The byte at this offset is changed.
        corrupt_mask: Its bits that flip, 1 to 255.
        delay: Seconds that each block of at most 64 KiB waits, one block after the other.
        stall_at: After this many bytes this direction stalls until
            :meth:`FaultProxy.resume`. It reads no more either, so that the source is held up.
    """

    cut_at: int | None = None
    reset_at: int | None = None
    corrupt_at: int | None = None
    corrupt_mask: int = 0xFF
    delay: float = 0.0
    stall_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What happens to one connection.

    Attributes:
        forward: Faults of the bytes from the dialer to the upstream.
        back: Faults of the bytes from the upstream to the dialer.
    """

    forward: Faults = Faults()
    back: Faults = Faults()


PlanSource: TypeAlias = "Plan | Callable[[int], Plan | None] | None"
"""A plan for every connection, or what gives one by the connection's number from 0, or no fault."""


class FaultProxy:
    """Relays connections between dialers and an upstream, and harms them as told.

    Use it with ``async with``, or with :meth:`start` and :meth:`aclose`; all of it on one loop.
    Without a plan it is transparent: a half-close, and a reset over TCP, arrive on the other side.
    A dialer whose upstream cannot be reached is reset. It holds at most 64 KiB per direction,
    beside the kernel's buffers, whose size is fixed for TCP so that backpressure comes soon.

    Args:
        upstream: ``tcp://host:port`` or ``unix:///path`` to relay to. Nobody needs to listen there
            before a dialer comes.

    Attributes:
        url: The address for dialers, of the upstream's kind: a free port of the loopback
            interface, or a socket in a new folder. Empty before :meth:`start`; stays the same
            until and after :meth:`aclose`.
        plan: What happens to connections that are accepted from now on. A function that raises
            ends its connection, and the loop reports the error.
        upstream: Where connections that are accepted from now on go.
        connections: Connections that were accepted so far.
        bytes_forward: Bytes written to upstreams so far.
        bytes_back: Bytes written to dialers so far.
    """

    def __init__(self, upstream: str) -> None:
        self.url: str = ""
        self.plan: PlanSource = None
        self.upstream: str = upstream
        self.connections: int = 0
        self.bytes_forward: int = 0
        self.bytes_back: int = 0
        self._cleanup = contextlib.ExitStack()
        self._live: dict[asyncio.Task[None], _Connection] = {}

    async def start(self) -> None:
        """Listen. Raises ``ConfigError`` if it cannot, or if ``upstream`` has another form."""
        upstream = Address.parse(self.upstream)
        if upstream.scheme == "unix":
            folder = tempfile.TemporaryDirectory(prefix="aiosync-proxy-")
            address = Address("unix", path=f"{self._cleanup.enter_context(folder)}/socket")
        else:
            address = Address("tcp", "::1" if ":" in upstream.host else "127.0.0.1")
        listener, address = bind(address)
        self._cleanup.enter_context(_prepare(listener))
        self.url = str(address)
        loop = asyncio.get_running_loop()
        loop.add_reader(listener, self._accept, listener)
        self._cleanup.callback(loop.remove_reader, listener)

    async def aclose(self) -> None:
        """Stop listening and close every connection; bytes under way are dropped. Idempotent.

        Waits for no peer.

        Cancellation:
            Everything closes all the same.
        """
        self._cleanup.close()
        for task in self._live:
            task.cancel()
        if self._live:
            await asyncio.wait(self._live)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # -- what happens to live connections now --------------------------------------------------

    def cut(self) -> None:
        """Close both sides of every live connection in order; bytes held here are dropped."""
        for each in self._live.values():
            each.end(reset=False)

    def reset(self) -> None:
        """Reset both sides of every live connection at once; bytes under way may get lost."""
        for each in self._live.values():
            each.end(reset=True)

    def stall(self) -> None:
        """Let nothing move on any live connection until :meth:`resume`; they stay open."""
        for each in self._live.values():
            each.forward.clear()
            each.back.clear()

    def resume(self) -> None:
        """Let everything that :meth:`stall` or a ``stall_at`` holds up now move again."""
        for each in self._live.values():
            each.forward.set()
            each.back.set()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the dialer has gone
            connection = _Connection(self, listener.accept()[0])
            task = asyncio.create_task(connection.serve(self.connections))
            self.connections += 1
            self._live[task] = connection
            # Also when it is cancelled before its first step.
            task.add_done_callback(lambda task: self._live.pop(task).close())


class _Connection:
    """Two sockets and the streams between them. Ends by a fault, by order, or by itself."""

    def __init__(self, proxy: FaultProxy, dialer: socket.socket) -> None:
        self.forward, self.back = asyncio.Event(), asyncio.Event()  # not set: that way is stalled
        self.forward.set()
        self.back.set()
        self._ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._proxy = proxy
        self._socks = [_prepare(dialer)]

    def end(self, *, reset: bool) -> None:
        """Close both sides, in order or by a reset."""
        if not self._ended.done():
            self._ended.set_result(reset)

    async def serve(self, number: int) -> None:
        """Relay until something ends the connection."""
        relaying = asyncio.ensure_future(self._relay(number))
        both: set[asyncio.Future[Any]] = {relaying, self._ended}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            relaying.cancel()
            await asyncio.wait({relaying})  # nothing watches the sockets after this
        self.end(reset=True)  # unless it has ended in another way
        if not self._ended.result():
            await asyncio.gather(*map(_close_in_order, self._socks))

    async def _relay(self, number: int) -> None:
        proxy, dialer = self._proxy, self._socks[0]
        plan = (proxy.plan(number) if callable(proxy.plan) else proxy.plan) or Plan()
        address = Address.parse(proxy.upstream)
        tcp = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        server = _prepare(socket.socket(socket.AF_UNIX if address.path else tcp))
        self._socks.append(server)
        target = address.path or (address.host, address.port)
        with contextlib.suppress(OSError):  # the upstream is not there
            await asyncio.get_running_loop().sock_connect(server, target)
            both = await asyncio.gather(
                self._stream(plan.forward, self.forward, dialer, server, "bytes_forward"),
                self._stream(plan.back, self.back, server, dialer, "bytes_back"),
            )
            self.end(reset=not all(both))

    async def _stream(
        self,
        faults: Faults,
        running: asyncio.Event,
        source: socket.socket,
        destination: socket.socket,
        counter: str,
    ) -> bool:
        """Relay one direction; whether it came to its end rather than broke."""
        loop = asyncio.get_running_loop()
        offsets = ((faults.stall_at, 0), (faults.reset_at, 1), (faults.cut_at, 2), (math.inf, 3))
        at = 0
        for mark, kind in sorted((mark, kind) for mark, kind in offsets if mark is not None):
            while at < mark:
                await running.wait()
                try:
                    block = await loop.sock_recv(source, int(min(_BLOCK_NBYTES, mark - at)))
                except OSError:
                    await _delivered(destination)
                    self.end(reset=True)
                    return False
                await asyncio.sleep(faults.delay)
                await running.wait()
                if faults.corrupt_at is not None and at <= faults.corrupt_at < at + len(block):
                    changed = bytearray(block)
                    changed[faults.corrupt_at - at] ^= faults.corrupt_mask
                    block = bytes(changed)
                try:
                    if not block:
                        destination.shutdown(socket.SHUT_WR)
                        return True
                    await loop.sock_sendall(destination, block)
                except OSError:
                    # What the destination sent before it broke is for the other direction to relay.
                    return False
                at += len(block)
                setattr(self._proxy, counter, getattr(self._proxy, counter) + len(block))
            if kind == 0:
                running.clear()
                continue
            await running.wait()
            if kind == 1:
                await _delivered(destination)
            self.end(reset=kind == 1)
            break
        return False

    def close(self) -> None:
        """Close both sockets now."""
        self.end(reset=False)
        for sock in self._socks:
            if self._ended.result() and sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
            sock.close()


def _prepare(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Fixed: the kernel would let the buffers of a stalled connection grow to many MiB.
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _KERNEL_NBYTES)
    return sock


async def _close_in_order(sock: socket.socket) -> None:
    """Have the peer read all that it was sent and the end, whatever it has sent meanwhile.

    Closing a socket with unread bytes makes the kernel report a reset to the peer, which may come
    before the end of the stream. Over TCP the end is therefore waited for until the peer's kernel
    has it; over Unix nothing more arrives after the shutdown, so that it can be emptied.
    """
    with contextlib.suppress(OSError):
        if sock.family == socket.AF_UNIX:
            sock.shutdown(socket.SHUT_RDWR)
            while sock.recv(_BLOCK_NBYTES):
                pass
        else:
            sock.shutdown(socket.SHUT_WR)
            await _delivered(sock)
    sock.close()


async def _delivered(sock: socket.socket) -> None:
    """Wait until the peer's kernel has all that was sent, for 5 s at most, or is gone."""
    if sock.family == socket.AF_UNIX:
        return  # what was sent lies with the peer already
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _TCP_CLOSE:
                if fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)) == bytes(4):
                    break
                await asyncio.sleep(0.001)  # the kernel tells nobody
