"""A stream proxy that harms connections on cue: for fault tests over real sockets.

:class:`FaultProxy` stands between dialers and the address of a listener, both TCP or Unix, and
does to the bytes of each connection what its :class:`Plan` says, exact to the byte. Nothing is
random, and nothing is known of what the bytes mean.

This module must never import pytest, torch or the rest of aiosync but its errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

from aiosync.errors import ConfigError
from aiosync.testing._relay import Connection, End
from aiosync.testing._sockets import new_socket, parse, readable, resolve, unlink

__all__ = ["FaultProxy", "Faults", "Plan", "PlanSource"]

_MAX_DUPLICATE_NBYTES: Final = 2**17
_Coro: TypeAlias = Coroutine[Any, Any, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What happens to one direction of a connection.

    Offsets count the bytes that the source sends in this direction, from 0, and a fault "after n
    bytes" happens once the first n were handed to the kernel of the destination, without waiting
    for another byte; after 0 bytes is when the connection is made. Of ``cut_at``, ``reset_at`` and
    ``half_close_at`` the one that comes first happens. At one offset a stall comes first and a
    duplicate before any of them. A stream that ends earlier has none of its faults.

    Attributes:
        cut_at: After this many bytes both sides are closed in order: each peer reads what was
            delivered to it and then the end of the stream. What it still sends is refused, over
            TCP from the time when its kernel has all of that.
        reset_at: After this many bytes both sides are reset (RST). The bytes before it arrive,
            unless the destination's kernel takes none of them for 5 s (only Linux waits for
            it). A Unix socket has no RST; its peers see the end of the stream, or
            ``ECONNRESET`` if bytes of theirs were not read.
        half_close_at: After this many bytes the destination reads the end of the stream. What the
            source still sends is thrown away, and the other direction goes on.
        corrupt_at: The byte at this offset is changed.
        corrupt_mask: Its bits that flip, 1 to 255.
        duplicate: The bytes ``[start, stop)``, 128 KiB at most, are delivered twice, the second
            time right after the first. With a corrupt byte among them, both copies have it.
        delay: Seconds of latency. Blocks do not wait for one another, but only 128 KiB can be
            under way.
        rate: Bytes per second at most, ``None`` for no limit. After a pause, 20 ms worth of bytes
            may be caught up at once.
        stall_at: After this many bytes this direction stalls until
            :meth:`FaultProxy.resume`. It reads no more either, so that the source is held up.

    Raises:
        ConfigError: If a value makes no sense.
    """

    cut_at: int | None = None
    reset_at: int | None = None
    half_close_at: int | None = None
    corrupt_at: int | None = None
    corrupt_mask: int = 0xFF
    duplicate: tuple[int, int] | None = None
    delay: float = 0.0
    rate: float | None = None
    stall_at: int | None = None

    def __post_init__(self) -> None:
        for name in ("cut_at", "reset_at", "half_close_at", "corrupt_at", "stall_at"):
            offset = getattr(self, name)
            if offset is not None and offset < 0:
                raise ConfigError(f"{name} must not be negative: {offset}")
        if not 0 < self.corrupt_mask < 256:
            raise ConfigError(f"corrupt_mask must be 1 to 255: {self.corrupt_mask}")
        if self.duplicate is not None:
            start, stop = self.duplicate
            if not 0 <= start < stop <= start + _MAX_DUPLICATE_NBYTES:
                raise ConfigError(f"duplicate must be 1 byte to 128 KiB: {self.duplicate}")
        if not 0 <= self.delay < math.inf:
            raise ConfigError(f"delay must be seconds: {self.delay}")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ConfigError(f"rate must be bytes per second: {self.rate}")


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
    A dialer whose upstream cannot be reached is reset. It holds at most 256 KiB per direction,
    beside the kernel's buffers, whose size is fixed for TCP so that backpressure comes soon.

    Args:
        upstream: ``tcp://host:port`` or ``unix:///path`` to relay to. Nobody needs to listen there
            before a dialer comes.
        listen: An address to listen on, of the same two forms, with port 0 for a free one. By
            default of the upstream's kind: a free port of the loopback interface, or a socket in a
            new folder.

    Attributes:
        plan: What happens to connections that are accepted from now on. An exception that a
            callable raises resets its connection and is raised by :meth:`aclose`.
        upstream: Where connections that are accepted from now on go.
        connections: Connections that were accepted so far.
        bytes_forward: Bytes written to upstreams so far, duplicates included.
        bytes_back: Bytes written to dialers so far, duplicates included.

    Raises:
        ConfigError: If an address has another form.
    """

    def __init__(self, upstream: str, *, listen: str | None = None) -> None:
        self.plan: PlanSource = None
        self.upstream: str = upstream
        self.connections: int = 0
        self.bytes_forward: int = 0
        self.bytes_back: int = 0
        parse(upstream)
        self._listen = listen if listen is None else parse(listen)
        self._listener: socket.socket | None = None
        self._url: str | None = None
        self._cleanup = contextlib.ExitStack()
        self._tasks: dict[asyncio.Task[None], Connection | None] = {}
        self._errors: list[Exception] = []
        self._closed = False

    @property
    def url(self) -> str:
        """The address for dialers; stays the same until and after :meth:`aclose`."""
        if self._url is None:
            raise ConfigError("the proxy was not started")
        return self._url

    @property
    def live(self) -> int:
        """Connections that have not ended; one that waits in a stall counts."""
        return len(self._live())

    async def start(self) -> None:
        """Listen. Raises ``OSError`` if the address cannot be had, ``ConfigError`` if started."""
        if self._url is not None or self._closed:
            raise ConfigError("the proxy was started before")
        address = self._listen
        if address is None:
            address = parse(self.upstream)
            if isinstance(address, str):
                folder = tempfile.mkdtemp(prefix="aiosync-proxy-")
                self._cleanup.callback(shutil.rmtree, folder)
                address = os.path.join(folder, "socket")
            else:
                families = [family for family, _ in await resolve(address)]
                address = ("::1" if families[0] == socket.AF_INET6 else "127.0.0.1", 0)
        with contextlib.ExitStack() as undo:
            undo.callback(self._cleanup.close)
            family, target = (await resolve(address))[0]
            listener = self._cleanup.enter_context(new_socket(family))
            if family != socket.AF_UNIX:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(target)
            if isinstance(address, str):
                self._cleanup.callback(unlink, address)
            listener.listen(256)
            undo.pop_all()
        self._listener = listener
        if isinstance(address, str):
            self._url = f"unix://{address}"
        else:
            host, port = listener.getsockname()[:2]
            self._url = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self._spawn(self._accept(listener), None)

    async def aclose(self) -> None:
        """Stop listening and close every connection; bytes under way are dropped. Idempotent.

        Waits for no peer. The first call raises what went wrong inside the proxy or in a plan, as
        it was raised or as an ``ExceptionGroup`` of several; errors of relayed sockets are not
        reported.

        Cancellation:
            Everything closes all the same; call again to see the errors.
        """
        if not self._closed:
            self._closed = True
            for task in self._tasks:
                task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._cleanup.close()  # last, as the task that accepts looks at the listener
        errors, self._errors = self._errors, []
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ExceptionGroup("several connections of the proxy failed", errors)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.aclose()
        except Exception as error:  # the caller sees it
            # Raised, or noted on the cancellation of the block, which it must not replace.
            if exc is None or isinstance(exc, Exception):
                raise
            exc.add_note(f"the proxy failed as well: {error!r}")

    # -- what happens to live connections now --------------------------------------------------

    def cut(self) -> None:
        """Close both sides of every live connection in order; bytes held here are dropped."""
        for connection in self._live():
            connection.end(End.CUT)

    def reset(self) -> None:
        """Reset both sides of every live connection at once; bytes under way may get lost."""
        for connection in self._live():
            connection.end(End.RESET)

    def stall(self) -> None:
        """Let nothing move on any live connection until :meth:`resume`; they stay open."""
        for connection in self._live():
            connection.running.clear()

    def resume(self) -> None:
        """Let everything that :meth:`stall` or a ``stall_at`` holds up now move again."""
        for connection in self._live():
            connection.running.set()
            for lifted in connection.stalls:
                lifted.set()

    def _live(self) -> list[Connection]:
        return [one for one in self._tasks.values() if one is not None and not one.ended.done()]

    # -- accepting -----------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                dialer, _ = listener.accept()
            except BlockingIOError:
                await readable(listener)
                continue
            except ConnectionAbortedError:  # that dialer is gone already
                continue
            connection = Connection(self, dialer)
            choose = partial(_choose, self.plan, self.connections)
            self._spawn(connection.serve(choose, self.upstream), connection)
            self.connections += 1

    def _spawn(self, coro: _Coro, connection: Connection | None) -> None:
        task = asyncio.get_running_loop().create_task(coro)
        self._tasks[task] = connection
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        connection = self._tasks.pop(task)
        if connection is not None:
            # Also when the task was cancelled before its first step.
            connection.close()
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if isinstance(error, Exception):
            self._errors.append(error)

    def __repr__(self) -> str:
        return f"<FaultProxy {self._url} to {self.upstream}, {self.live} live>"


def _choose(source: PlanSource, number: int) -> Plan:
    plan = source(number) if callable(source) else source
    return Plan() if plan is None else plan
