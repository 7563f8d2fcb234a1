"""A stream proxy that damages connections on demand, for fault tests over real sockets.

:class:`FaultProxy` stands between dialers and the address of a listener, both TCP or Unix. It
applies the faults of a :class:`Plan` to the bytes of each connection, exact to the byte. Nothing is
random, and the proxy does not know the meaning of the bytes.

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
_KERNEL_NBYTES = 2**17  # buffer size to ask for; Linux grants twice as much, for its own overhead
_LINGER_SECONDS = 5.0  # longest wait until the peer's kernel has taken all bytes
_LINGER_0 = struct.pack("ii", 1, 0)  # with this option close() sends a reset
_TCP_CLOSE = 7  # the kernel's state number of a closed connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Faults of one direction of a connection.

    Offsets count the bytes that the source sends in this direction, from 0. A fault "after n
    bytes" happens once the first n bytes were handed to the kernel of the destination, without
    waiting for another byte; a fault after 0 bytes happens when the connection is made. At one
    offset a stall comes first, then a reset. A fault beyond the end of the stream never happens.

    Attributes:
        cut_at: After this many bytes both sides are closed in order: each peer reads the bytes
            that were delivered to it and then the end of the stream.
        reset_at: After this many bytes both sides are reset (RST). The bytes before it arrive,
            unless the destination's kernel does not take them within 5 s. A Unix socket has no
            RST; its peers see the end of the stream, or ``ECONNRESET`` if the proxy has not read
            all of their bytes.
        corrupt_at: The byte at this offset is changed.
        corrupt_mask: Bits of that byte that flip, 1 to 255.
        delay: Seconds that each block of at most 64 KiB waits, one block after the other.
        stall_at: After this many bytes this direction stalls until
            :meth:`FaultProxy.resume`. The proxy does not read it either, so the source is held up.
    """

    cut_at: int | None = None
    reset_at: int | None = None
    corrupt_at: int | None = None
    corrupt_mask: int = 0xFF
    delay: float = 0.0
    stall_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Faults of one connection.

    Attributes:
        forward: Faults of the bytes from the dialer to the upstream.
        back: Faults of the bytes from the upstream to the dialer.
    """

    forward: Faults = Faults()
    back: Faults = Faults()


PlanSource: TypeAlias = "Plan | Callable[[int], Plan | None] | None"
"""One plan for every connection, or a function of the connection's number from 0, or no plan."""


class FaultProxy:
    """Proxy that relays connections between dialers and an upstream, with planned faults.

    Use it with ``async with``, or with :meth:`start` and :meth:`aclose`; all calls on one loop.
    Without a plan the proxy is transparent: a half-close, and a reset over TCP, arrive on the other
    side. A dialer whose upstream cannot be reached is reset. The proxy holds at most 64 KiB per
    direction, beside the kernel's buffers, whose size is fixed for TCP so that backpressure comes
    soon.

    Args:
        upstream: ``tcp://host:port`` or ``unix:///path`` to relay to. The upstream need not listen
            before a dialer connects.

    Attributes:
        url: The address for dialers, of the upstream's kind: a free port of the loopback
            interface, or a socket in a new directory. Empty before :meth:`start`; stays the same
            until and after :meth:`aclose`.
        plan: Plan of the connections that are accepted from now on. A function that raises ends
            its connection, and the loop reports the error.
        upstream: Upstream of the connections that are accepted from now on.
        connections: Number of connections accepted so far.
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
        """Listen for dialers.

        Raises:
            ConfigError: The proxy cannot listen, or ``upstream`` is no address.
        """
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

        The call waits for no peer.

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

    # -- faults of live connections ------------------------------------------------------------

    def cut(self) -> None:
        """Close both sides of every live connection in order; bytes in the proxy are dropped."""
        for each in self._live.values():
            each.end(reset=False)

    def reset(self) -> None:
        """Reset both sides of every live connection at once; bytes under way may get lost."""
        for each in self._live.values():
            each.end(reset=True)

    def stall(self) -> None:
        """Relay no byte of any live connection until :meth:`resume`; the connections stay open."""
        for each in self._live.values():
            each.forward.clear()
            each.back.clear()

    def resume(self) -> None:
        """Resume every direction that :meth:`stall` or a ``stall_at`` holds up now."""
        for each in self._live.values():
            each.forward.set()
            each.back.set()

    def _accept(self, listener: socket.socket) -> None:
        """Take the connection of a dialer, and relay it in a task."""
        with contextlib.suppress(OSError):  # the dialer has closed its socket already
            connection = _Connection(self, listener.accept()[0])
            task = asyncio.create_task(connection.serve(self.connections))
            self.connections += 1
            self._live[task] = connection
            # A callback closes the sockets even if the task is cancelled before its first step.
            task.add_done_callback(lambda task: self._live.pop(task).close())


class _Connection:
    """Two sockets and the streams between them.

    It ends by a fault, by a call of :meth:`end`, or when both streams have ended.
    """

    def __init__(self, proxy: FaultProxy, dialer: socket.socket) -> None:
        # A direction is stalled while its event is not set.
        self.forward, self.back = asyncio.Event(), asyncio.Event()
        self.forward.set()
        self.back.set()
        # Is done once the connection ends: True if both sides are to be reset.
        self._ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._proxy = proxy
        self._socks = [_prepare(dialer)]

    def end(self, *, reset: bool) -> None:
        """End the connection: let both sides be closed, in order or by a reset."""
        if not self._ended.done():
            self._ended.set_result(reset)

    async def serve(self, number: int) -> None:
        """Relay until the connection ends; close it in order unless it has to be reset."""
        relaying = asyncio.ensure_future(self._relay(number))
        both: set[asyncio.Future[Any]] = {relaying, self._ended}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            relaying.cancel()
            await asyncio.wait({relaying})  # afterwards the loop no longer watches the sockets
        self.end(reset=True)  # has no effect if the connection has ended in another way
        if not self._ended.result():
            await asyncio.gather(*map(_close_in_order, self._socks))

    async def _relay(self, number: int) -> None:
        """Dial the upstream, and relay both directions by the plan of connection ``number``."""
        proxy, dialer = self._proxy, self._socks[0]
        plan = (proxy.plan(number) if callable(proxy.plan) else proxy.plan) or Plan()
        address = Address.parse(proxy.upstream)
        server = _prepare(socket.socket(_family_of(address)))
        self._socks.append(server)
        target = address.path or (address.host, address.port)

        def count_forward(nbytes: int) -> None:
            proxy.bytes_forward += nbytes

        def count_back(nbytes: int) -> None:
            proxy.bytes_back += nbytes

        with contextlib.suppress(OSError):  # the upstream cannot be reached
            await asyncio.get_running_loop().sock_connect(server, target)
            both = await asyncio.gather(
                self._stream(plan.forward, self.forward, dialer, server, count_forward),
                self._stream(plan.back, self.back, server, dialer, count_back),
            )
            self.end(reset=not all(both))

    async def _stream(
        self,
        faults: Faults,
        running: asyncio.Event,
        source: socket.socket,
        destination: socket.socket,
        count: Callable[[int], None],
    ) -> bool:
        """Relay one direction; return True at the end of the stream, False at a fault or error."""
        loop = asyncio.get_running_loop()
        at = 0
        for fault_at, fault in _by_offset(faults):
            while at < fault_at:
                await running.wait()
                try:
                    block = await loop.sock_recv(source, int(min(_BLOCK_NBYTES, fault_at - at)))
                except OSError:
                    await _delivered(destination)
                    self.end(reset=True)
                    return False
                await asyncio.sleep(faults.delay)
                await running.wait()
                block = _corrupted(block, at, faults)
                try:
                    if not block:
                        destination.shutdown(socket.SHUT_WR)
                        return True
                    await _write(destination, block, running)
                except OSError:
                    # The other direction still has to relay the bytes that the destination sent
                    # before it broke, so the connection is not reset here.
                    return False
                at += len(block)
                count(len(block))
            if fault == "stall":
                running.clear()
                continue
            await running.wait()
            if fault == "reset":
                await _delivered(destination)
            self.end(reset=fault == "reset")
            break
        return False

    def close(self) -> None:
        """Close both sockets now, with a reset if the connection ended by one."""
        self.end(reset=False)
        for sock in self._socks:
            if self._ended.result() and sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
            sock.close()


async def _write(sock: socket.socket, block: bytes, running: asyncio.Event) -> None:
    """Write a block, but none of its bytes while the direction is stalled."""
    loop = asyncio.get_running_loop()
    while block:
        await running.wait()
        try:
            block = block[sock.send(block) :]
        except BlockingIOError:
            writable = asyncio.Event()
            loop.add_writer(sock, writable.set)
            try:
                await writable.wait()
            finally:
                loop.remove_writer(sock)


def _by_offset(faults: Faults) -> list[tuple[float, str]]:
    """Return the offset and the kind of each planned fault, in order; the last never happens."""
    # The sort keeps this order of the faults at one offset.
    kinds = (
        (faults.stall_at, "stall"),
        (faults.reset_at, "reset"),
        (faults.cut_at, "cut"),
        (math.inf, "none"),
    )
    planned = [(offset, kind) for offset, kind in kinds if offset is not None]
    return sorted(planned, key=lambda fault: fault[0])


def _corrupted(block: bytes, at: int, faults: Faults) -> bytes:
    """Return a block that begins at an offset, with its planned byte changed."""
    if faults.corrupt_at is None or not at <= faults.corrupt_at < at + len(block):
        return block
    changed = bytearray(block)
    changed[faults.corrupt_at - at] ^= faults.corrupt_mask
    return bytes(changed)


def _prepare(sock: socket.socket) -> socket.socket:
    """Set the options of a socket of the proxy, and return the socket."""
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Without a fixed size the kernel lets the buffers of a stalled connection grow to many MiB.
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _KERNEL_NBYTES)
    return sock


async def _close_in_order(sock: socket.socket) -> None:
    """Close a socket so that its peer reads all bytes and the end of the stream.

    The peer may send bytes meanwhile. If a socket is closed with unread bytes the kernel reports a
    reset to the peer, which may come before the end of the stream. Over TCP this function therefore
    waits until the peer's kernel has the end. Over Unix no more bytes arrive after the shutdown, so
    the socket can be emptied.
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
    """Wait until the peer's kernel has all bytes or the connection is closed, for 5 s at most."""
    if sock.family == socket.AF_UNIX:
        return  # the bytes lie in the peer's buffer already
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _TCP_CLOSE:
                if fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)) == bytes(4):
                    break
                await asyncio.sleep(0.001)  # the kernel has no notification for this, so poll


def _family_of(address: Address) -> socket.AddressFamily:
    """Return the family of the sockets that can dial an address."""
    if address.path:
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in address.host else socket.AF_INET
