"""The network of a simulation: sockets whose bytes take time, and get lost when a seed says so.

Bytes keep their order within a direction of a connection, and arrive in any order between
connections. Unix sockets connect at once, lose nothing, and carry descriptors. Must not import
torch.
"""

from __future__ import annotations

import array
import asyncio
import errno
import itertools
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from aiosync.testing.sim.loop import Process, SimLoop, current_process

__all__ = ["Network", "SimPoll", "SimSocket", "Weather"]

_FIRST_FD = 2**20
_FIRST_PORT = 20_000
# Bytes and connections are tried anew after this time while a partition holds them up.
_RETRY_SECONDS = 1.0
# A byte over a Unix socket takes up to this time.
_LOCAL_SECONDS = 1e-4
# Event that the peer will write no more. Linux only.
_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """How a simulated network treats the connections that are made from now on.

    Chances are numbers from 0 to 1, of each direction of a connection unless they say otherwise.

    Attributes:
        latency: Least and greatest seconds that a byte takes; each connection draws its own.
        capacity: Least and greatest number of bytes that a direction holds before its writer waits.
        fragments: Chance that one write is taken only in part, or arrives in two parts.
        cuts: Chance that the connection ends after some bytes.
        loses: Chance that nothing arrives any more after some bytes, in either direction, without
            a sign of it: only keep-alive and the time limits of calls end the connection.
        half_closes: Chance that the reader sees the end of the stream after some bytes, while the
            other direction goes on.
        corrupts: Chance that one bit of some byte flips.
        within: The bytes after which faults happen are fewer than this number.
    """

    latency: tuple[float, float] = (0.0001, 0.01)
    capacity: tuple[int, int] = (4096, 262_144)
    fragments: float = 0.05
    cuts: float = 0.0
    loses: float = 0.0
    half_closes: float = 0.0
    corrupts: float = 0.0
    within: int = 100_000


class _Direction:
    """One direction of a connection.

    Args:
        network: The network.
        source: The socket that sends.
        target: The socket at which bytes arrive.
        latency: Seconds that a byte takes.

    Attributes:
        in_flight: Number of bytes on their way.
        sent: Number of bytes that were ever written.
        is_lost: True if nothing arrives any more.
        faults: Faults that have not happened yet, each with the number of bytes after which it
            does; the next one is the last.
    """

    def __init__(
        self, network: Network, source: SimSocket, target: SimSocket, latency: float
    ) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._latency = latency
        weather, random = network.weather, network.random
        self._capacity = random.randint(*weather.capacity)
        # Bytes, the end of the stream (None) and errors on their way.
        self._queue: deque[bytes | OSError | None] = deque()
        self.in_flight: int = 0
        self.is_lost: bool = False
        self._last = 0.0  # arrival of the item that was sent last
        self.sent: int = 0
        self.faults: list[tuple[int, str]] = []
        for kind in ("cuts", "loses", "half_closes", "corrupts"):
            if random.random() < getattr(weather, kind):
                self.faults.append((random.randrange(weather.within), kind))
        self.faults.sort(reverse=True)

    @property
    def room(self) -> int:
        """Number of bytes that the direction takes now."""
        return self._capacity - self.in_flight - len(self._target.inbox)

    def write(self, data: bytes) -> None:
        """Send bytes on their way, up to the next fault."""
        while self.faults and self.faults[-1][0] < self.sent + len(data):
            at, kind = self.faults.pop()
            at -= self.sent
            link = f"{self._source.owner.name} -> {self._target.owner.name}"
            self._network.note(f"{link}: {kind} after {self.sent + at} bytes")
            if kind == "corrupts":
                bit = 1 << self._network.random.randrange(8)
                data = data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
                continue
            self._push(data[:at])
            data = data[at:]
            self.sent += at
            if kind == "cuts":
                self._network.reset(self._target)
            elif kind == "loses":
                self._network.lose(self._target)
            else:
                self._push(None)
        self._push(data)
        self.sent += len(data)

    def _push(self, item: bytes | OSError | None) -> None:
        """Have bytes, the end of the stream (``None``) or an error arrive after a while."""
        if isinstance(item, bytes):
            if not item:
                return
            self.in_flight += len(item)
        network = self._network
        if self.is_lost:
            patience = self._source.options.get(socket.TCP_USER_TIMEOUT, 0)
            network.expire(self._source, patience / 1000)
            return
        self._queue.append(item)
        arrival = network.loop.now + self._latency * network.random.uniform(1, 2)
        self._last = max(self._last, arrival)
        network.loop.at(self._last, self._arrive)

    def end(self, error: OSError | None = None) -> None:
        """Have the end of the stream arrive, or an error."""
        self._push(error)

    def _arrive(self) -> None:
        """Have the next item of the queue arrive, or try it later while there is a partition."""
        if self._network.is_parted(self._target):
            # Each of these calls takes the first item of the queue, so the order stays.
            loop = self._network.loop
            loop.at(loop.now + _RETRY_SECONDS, self._arrive)
            return
        if self.is_lost or not self._queue:
            return
        item, target = self._queue.popleft(), self._target
        if isinstance(item, bytes):
            data = self._cut(item)
            self.in_flight -= len(data)
            if target.fd < 0:
                # The kernel of a process that has closed the connection resets it.
                if self._source.fd >= 0:
                    self._source.inward.end(_reset())
                return
            if not (target.is_ended or target.error is not None):
                target.inbox += data
        elif item is None:
            target.is_ended = True
        else:
            target.fail(item)
        target.touch()

    def _cut(self, data: bytes) -> bytes:
        """Return the bytes, or by chance the first of them; the rest then arrives next."""
        network = self._network
        if len(data) < 2 or network.random.random() >= network.weather.fragments:
            return data
        at = network.random.randrange(1, len(data))
        self._queue.appendleft(data[at:])
        network.loop.at(network.loop.now, self._arrive)
        return data[:at]


def _reset() -> OSError:
    """Make the error of a connection that was reset."""
    return ConnectionResetError(errno.ECONNRESET, "the simulated connection was reset")


class SimSocket(socket.socket):
    """A simulated socket, which takes the place of ``socket.socket`` during a simulation."""

    network: Network
    # The base class looks at this at the end of a "with" block.
    _closed = False

    def __init__(
        self,
        family: int = socket.AF_INET,
        type: int = socket.SOCK_STREAM,
        proto: int = 0,
        fileno: int | None = None,
        *,
        owner: Process | None = None,
    ) -> None:
        if fileno is not None:
            raise OSError(errno.EBADF, "a simulated socket has no descriptor of the system")
        self._family = socket.AddressFamily(family)
        self.owner: Process = owner or current_process()
        self.fd: int = self.network.open(self)
        self.options: dict[int, int] = {}
        self.peer: SimSocket | None = None
        # The direction in which bytes arrive here.
        self.inward: _Direction
        # Bytes that have arrived and were not read.
        self.inbox: bytearray = bytearray()
        # True once the end of the stream has arrived.
        self.is_ended: bool = False
        # Connections that wait to be accepted; None if the socket does not listen.
        self.backlog: deque[SimSocket] | None = None
        self.error: OSError | None = None
        self.address: tuple[str, int] = ("127.0.0.1", 0)
        # Descriptors that have come, or are on their way, each with the number of its byte.
        self.rights: deque[tuple[int, int]] = deque()
        self._num_read = 0

    # -- what the loop asks ----------------------------------------------------------------------

    @property
    def is_readable(self) -> bool:
        """True if reading would not wait."""
        return bool(self.inbox or self.is_ended or self.error or self.backlog)

    @property
    def is_writable(self) -> bool:
        """True if writing would not wait."""
        if self.error is not None:
            return True
        return self.peer is not None and self.peer.inward.room > 0

    def touch(self) -> None:
        """Have the owner look at this socket, if it watches it: it may be ready now."""
        owner = self.owner
        owner.is_due |= self.fd in owner.readers or self.fd in owner.writers

    def fail(self, error: OSError) -> None:
        """End the connection at this side."""
        self.error = self.error or error
        self.touch()

    # -- bytes -----------------------------------------------------------------------------------

    def read(self, buffers: Iterable[memoryview]) -> int:
        """Read as ``os.readv`` does."""
        if not self.inbox:
            if self.error is not None:
                raise self.error
            if self.is_ended:
                return 0
            if self.peer is None:
                raise OSError(errno.ENOTCONN, "the simulated socket is not connected")
            raise BlockingIOError(errno.EAGAIN, "nothing has arrived")
        total = 0
        for buffer in buffers:
            nbytes = min(len(buffer), len(self.inbox))
            buffer[:nbytes] = self.inbox[:nbytes]
            del self.inbox[:nbytes]
            total += nbytes
            if not self.inbox:
                break
        self._num_read += total
        if self.peer is not None:
            self.peer.touch()
        return total

    def write(self, buffers: Iterable[memoryview]) -> int:
        """Write as ``os.writev`` does."""
        if self.error is not None:
            raise self.error
        if self.peer is None:
            raise OSError(errno.ENOTCONN, "the simulated socket is not connected")
        outward = self.peer.inward
        room = outward.room
        if room <= 0:
            raise BlockingIOError(errno.EAGAIN, "the simulated direction is full")
        data = b"".join(buffers)[:room]
        random = self.network.random
        if len(data) > 1 and random.random() < self.network.weather.fragments:
            data = data[: random.randrange(1, len(data))]
        if data:
            outward.write(data)
        return len(data)

    def send(self, data: Any, flags: int = 0) -> int:
        """See :meth:`socket.socket.send`."""
        return self.write([memoryview(data).cast("B")])

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """See :meth:`socket.socket.recv`."""
        if flags & socket.MSG_PEEK and self.inbox:
            return bytes(self.inbox[:bufsize])
        data = bytearray(bufsize)
        return bytes(data[: self.read([memoryview(data)])])

    def sendmsg(self, buffers: Any, ancdata: Any = (), flags: int = 0, address: Any = None) -> int:
        """See :meth:`socket.socket.sendmsg`. Only descriptors are simulated beside the bytes."""
        at = 0 if self.peer is None else self.peer.inward.sent
        nbytes = self.write(memoryview(each) for each in buffers)
        assert self.peer is not None
        fds = itertools.chain.from_iterable(data for _, _, data in ancdata)
        for fd in fds if self.peer.fd >= 0 else ():
            copied = os.dup(fd)
            self.network.loop.files[copied] = self.peer.owner
            self.peer.rights.append((at, copied))
        return nbytes

    def recvmsg_into(
        self, buffers: Any, ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[tuple[int, int, bytes]], int, Any]:
        """See :meth:`socket.socket.recvmsg_into`."""
        nbytes, fds = self.read(memoryview(each) for each in buffers), array.array("i")
        while self.rights and self.rights[0][0] < self._num_read:
            fds.append(self.rights.popleft()[1])
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())
        return nbytes, [rights] if fds else [], 0, None

    # -- connections -----------------------------------------------------------------------------

    def bind(self, address: Any) -> None:
        """See :meth:`socket.socket.bind`. A Unix socket makes no file."""
        self.address = self.network.bind(self, address)

    def connect(self, address: Any) -> None:
        """See :meth:`socket.socket.connect`: for Unix sockets, which do not wait."""
        latency = self.network.random.random() * _LOCAL_SECONDS
        self.network.join(self, self.network.listening(address), latency)

    def listen(self, backlog: int = 128) -> None:
        """See :meth:`socket.socket.listen`."""
        self.backlog = deque()

    def accept(self) -> tuple[socket.socket, Any]:
        """See :meth:`socket.socket.accept`."""
        if not self.backlog:
            raise BlockingIOError(errno.EAGAIN, "nobody has connected")
        sock = self.backlog.popleft()
        return sock, sock.getpeername()

    async def connect_to(self, address: Any) -> None:
        """Connect, as :meth:`asyncio.loop.sock_connect` does."""
        await self.network.connect(self, address)

    def close(self) -> None:
        """See :meth:`socket.socket.close`. What was written still arrives."""
        if self.fd < 0:
            return
        self.network.close(self)
        self.fd = -1
        for _, fd in self.rights:
            os.close(fd)
        for waiting in self.backlog or ():
            waiting.close()
        if self.peer is not None and self.error is None:
            self.peer.inward.end(_reset() if self.inbox else None)

    # -- the rest of the interface ---------------------------------------------------------------

    @property
    def family(self) -> Any:
        """See :attr:`socket.socket.family`."""
        return self._family

    def fileno(self) -> int:
        """See :meth:`socket.socket.fileno`."""
        return self.fd

    def getsockname(self) -> Any:
        """See :meth:`socket.socket.getsockname`."""
        return self.address

    def getpeername(self) -> Any:
        """See :meth:`socket.socket.getpeername`."""
        if self.peer is None:
            raise OSError(errno.ENOTCONN, "the simulated socket is not connected")
        return self.peer.address

    def getsockopt(self, level: int, option: int, buflen: int = 0) -> Any:
        """Return process, user and group of the peer; nothing else is simulated."""
        assert self.peer is not None
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("3i", self.peer.owner.number, os.geteuid(), os.getegid())

    def setblocking(self, flag: bool) -> None:
        """Do nothing: no simulated call blocks."""

    def setsockopt(self, level: int, option: int, value: Any, optlen: Any = None) -> None:
        """Note an option; those of keep-alive have an effect."""
        if isinstance(value, int) and level != socket.SOL_SOCKET:
            self.options[option] = value

    def __repr__(self) -> str:
        return f"<SimSocket {self.fd} of {self.owner.name}>"


class ProcessEnd(SimSocket):
    """A simulated pidfd: it is readable once a process has ended."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self.process = process

    @property
    def is_readable(self) -> bool:
        """True if the process has ended."""
        return not self.process.is_alive


class SimPoll:
    """Takes the place of ``select.poll`` during a simulation. It never waits."""

    network: Network

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}

    def register(self, fd: int, eventmask: int = select.POLLIN | select.POLLOUT) -> None:
        """Watch a simulated socket."""
        self._masks[fd] = eventmask

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        """Return the sockets with their events of this moment."""
        found = []
        for fd, mask in self._masks.items():
            sock = self.network.find(fd)
            if sock is None:
                found.append((fd, select.POLLNVAL))
                continue
            events = (mask & select.POLLIN) * sock.is_readable
            events |= (mask & select.POLLOUT) * sock.is_writable
            events |= (mask & _PEER_CLOSED) * (sock.is_ended or sock.error is not None)
            events |= (select.POLLERR | select.POLLHUP) * (sock.error is not None)
            if events:
                found.append((fd, events))
        return found


class Network:
    """The network of a simulation.

    Args:
        loop: The loop.
        random: Decides delays and faults.
        note: Writes a line of the trace.

    Attributes:
        weather: How connections fare that are made from now on; may be assigned.
        loop: As given.
        random: As given.
        note: As given.
    """

    def __init__(self, loop: SimLoop, random: Random, note: Callable[[str], None]) -> None:
        self.weather: Weather = Weather()
        self.loop = loop
        self.random = random
        self.note = note
        self._ports = itertools.count(_FIRST_PORT)
        self._sockets: dict[int, SimSocket] = loop.descriptors
        self._bound: dict[tuple[str, int], SimSocket] = {}
        self._parted: set[frozenset[str]] = set()

    # -- faults ----------------------------------------------------------------------------------

    def part(self, one: Process | str, other: Process | str) -> None:
        """Hold up everything between two processes, by name, until :meth:`heal`."""
        names = frozenset(each if isinstance(each, str) else each.name for each in (one, other))
        self.note(f"partition between {' and '.join(sorted(names))}")
        self._parted.add(names)
        for sock in list(self._sockets.values()):
            if sock.peer is not None and self.is_parted(sock):
                self._keep_alive(sock)

    def heal(self) -> None:
        """End all partitions; what they held up arrives."""
        if self._parted:
            self.note("partitions end")
        self._parted.clear()

    def connections(self) -> list[SimSocket]:
        """Return one end of each open connection."""
        return [
            sock
            for sock in self._sockets.values()
            if sock.peer is not None and (sock.peer.fd < 0 or sock.fd < sock.peer.fd)
        ]

    def reset(self, sock: SimSocket) -> None:
        """End a connection: what is under way still arrives, then both ends get an error."""
        for end in (sock, sock.peer):
            if end is not None:
                end.inward.end(_reset())

    def calm(self) -> None:
        """Cancel all faults that have not happened yet, and make no more; connections may end.

        Keep-alive then takes seconds, not minutes, to end the connections that are lost.
        """
        self.weather = Weather(latency=self.weather.latency, capacity=self.weather.capacity)
        for sock in self._sockets.values():
            if sock.peer is not None:
                sock.inward.faults.clear()
                if socket.TCP_KEEPIDLE in sock.options:
                    self.expire(sock, self.random.uniform(1, 10))
        self.heal()

    def lose(self, sock: SimSocket) -> None:
        """Let nothing arrive any more on a connection, without telling its ends."""
        for end in (sock, sock.peer):
            if end is not None:
                end.inward.is_lost = True
                self._keep_alive(end)

    def is_parted(self, sock: SimSocket) -> bool:
        """Return True if a partition is between the ends of a connection."""
        assert sock.peer is not None
        return frozenset((sock.owner.name, sock.peer.owner.name)) in self._parted

    def _keep_alive(self, sock: SimSocket) -> None:
        """End this side of a silent connection after some time, if its keep-alive is on."""
        if socket.TCP_KEEPIDLE in sock.options:
            self.expire(sock, 2 * sock.options[socket.TCP_KEEPIDLE])

    def expire(self, sock: SimSocket, seconds: float) -> None:
        """End one side of a connection after so long, unless it works again; 0 for never."""

        def check() -> None:
            if sock.fd >= 0 and (sock.inward.is_lost or self.is_parted(sock)):
                sock.fail(TimeoutError(errno.ETIMEDOUT, "the simulated peer is silent"))

        if seconds:
            self.loop.at(self.loop.now + seconds, check)

    # -- sockets ---------------------------------------------------------------------------------

    def open(self, sock: SimSocket) -> int:
        """Return a descriptor for a new socket."""
        fd = _FIRST_FD + next(self.loop.numbers)
        self._sockets[fd] = sock
        count = len(self.sockets_of(sock.owner))
        self.loop.limit(sock.owner, "sockets", count, sock.owner.most_sockets)
        return fd

    def find(self, fd: int) -> SimSocket | None:
        """Return the open socket with a descriptor; ``None`` if it is not simulated."""
        return self._sockets.get(fd)

    def close(self, sock: SimSocket) -> None:
        """Forget a socket."""
        del self._sockets[sock.fd]
        for handles in (sock.owner.readers, sock.owner.writers):
            handles.pop(sock.fd, None)
        if self._bound.get(sock.address) is sock:
            del self._bound[sock.address]

    def sockets_of(self, process: Process) -> list[SimSocket]:
        """Return the open sockets of a process."""
        return [sock for sock in self._sockets.values() if sock.owner is process]

    def ends_of(self, process: Process) -> list[ProcessEnd]:
        """Return the pidfds of a process that others have open."""
        ends = (sock for sock in self._sockets.values() if isinstance(sock, ProcessEnd))
        return [sock for sock in ends if sock.process is process]

    def bind(self, sock: SimSocket, address: Any) -> tuple[str, int]:
        """Give an address to a socket, and return it with its port."""
        host, port = _place(address)
        if not port and not isinstance(address, str):
            port = next(self._ports)
        if (host, port) in self._bound:
            raise OSError(errno.EADDRINUSE, "the simulated address is in use")
        self._bound[host, port] = sock
        return host, port

    def listening(self, address: Any) -> SimSocket:
        """Return the socket that listens at an address."""
        place = _place(address)
        found = self._bound.get(place) or self._bound.get(("0.0.0.0", place[1]))
        if found is None or found.backlog is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
        return found

    async def connect(self, sock: SimSocket, address: Any) -> None:
        """Connect a socket, once the address can be reached."""
        low, high = self.weather.latency
        latency = self.random.uniform(low, high)
        connected: asyncio.Future[None] = self.loop.create_future()
        self.loop.at(
            self.loop.now + 2 * latency,
            partial(self._try, sock, address, latency, connected),
        )
        await connected

    def _try(self, sock: SimSocket, to: Any, latency: float, ended: asyncio.Future[None]) -> None:
        """Connect a socket now, and end the future; during a partition try it again later."""
        if ended.done() or sock.fd < 0:
            return
        try:
            listening = self.listening(to)
        except OSError as exc:
            ended.set_exception(exc)
            return
        if frozenset((sock.owner.name, listening.owner.name)) in self._parted:
            when = self.loop.now + _RETRY_SECONDS
            self.loop.at(when, partial(self._try, sock, to, latency, ended))
            return
        self.join(sock, listening, latency)
        ended.set_result(None)

    def join(self, sock: SimSocket, listening: SimSocket, latency: float) -> None:
        """Connect a socket with one that listens, whose owner has to accept the connection."""
        there = type(listening)(listening.family, owner=listening.owner)
        there.address = listening.address
        sock.address = (sock.address[0], sock.address[1] or next(self._ports))
        sock.peer, there.peer = there, sock
        sock.inward = _Direction(self, there, sock, latency)
        there.inward = _Direction(self, sock, there, latency)
        if sock.family == socket.AF_UNIX:
            for end in (sock, there):
                end.inward.faults.clear()
        self.note(f"{sock.owner.name} connects to {listening.owner.name}")
        assert listening.backlog is not None
        listening.backlog.append(there)
        listening.touch()


def _place(address: Any) -> tuple[str, int]:
    """Return host and port of an address; of a Unix socket its name and 0."""
    return (address, 0) if isinstance(address, str) else (str(address[0]), int(address[1]))
