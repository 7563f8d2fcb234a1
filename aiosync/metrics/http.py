"""Pages on a socket of their own, such as ``/metrics``, ``/healthz`` and ``/readyz``: GET only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeAlias, cast

from aiosync.errors import ConfigError
from aiosync.metrics.collector import Metrics
from aiosync.metrics.table import optional
from aiosync.sync._portal import Lease, lease, refuse_inside_loop
from aiosync.transports.address import Address, bind

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["TEXT", "HttpServer", "Page", "serve"]

Page: TypeAlias = Callable[[Sequence[str]], tuple[HTTPStatus, str, bytes] | AsyncGenerator[bytes]]
"""Called with the header lines of a request. Returns status, content type and body (without one,
the status as a line); or the events of a ``text/event-stream``, which ends with its reader."""

TEXT = "text/plain; charset=utf-8"
"""A content type."""

_MAX_NBYTES = 8192  # of a request
_MAX_LINKS = 32
_SECONDS = 10.0  # that a link may be open, if nothing is streamed
_MAX_UNTAKEN = 2**20  # bytes of events; who takes no more of them is not there
_EVENTS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n"
    b"Connection: close\r\n\r\n"
)


class HttpServer:
    """``async with HttpServer(...) as url:`` shows pages to whoever asks.

    Takes 32 connections at a time, of one request each, at most 8 KiB and 10 seconds long; events
    are streamed for longer, to those who take them. Another one ends the oldest, one that has not
    asked if there is any.

    Args:
        listen: ``HOST:PORT``; port 0 for any free one.
        pages: What there is, by path.

    Raises:
        ConfigError: On entering: the address is none, or cannot be bound.
    """

    def __init__(self, listen: str, pages: Mapping[str, Page]) -> None:
        self._listen, self._pages = listen, pages
        self._links: dict[asyncio.Transport, bool] = {}  # oldest first, and whether it has asked

    async def __aenter__(self) -> str:
        try:
            address = Address.parse(f"tcp://{self._listen}")
        except ConfigError as exc:
            raise ConfigError(  # without credentials
                f"{self._listen.rpartition('@')[2]!r} is not HOST:PORT, such as 127.0.0.1:9464"
            ) from exc
        sock, address = bind(address)
        loop = asyncio.get_running_loop()
        # Nothing suspends this before it is known what to close.
        self._server: asyncio.Server = await loop.create_server(
            lambda: _Link(self._answer, self._links, self._server), sock=sock, start_serving=False
        )
        try:
            await self._server.start_serving()
        except BaseException:  # raised again: the caller sees it
            self.abort()
            raise
        return f"http://{str(address).removeprefix('tcp://')}"

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()
        while self._links:  # noqa: ASYNC110 - they end in the next turns of the loop
            await asyncio.sleep(0)

    def abort(self) -> None:
        """Close every socket now. On the loop that it runs on."""
        self._server.close()
        for link in [*self._links]:
            link.abort()

    def _answer(self, request: bytes) -> bytes | AsyncGenerator[bytes]:
        head, ended, _ = request.decode("latin-1").partition("\r\n\r\n")
        line, *fields = head.split("\r\n")
        words, status, kind, body = line.split(" "), HTTPStatus.NOT_FOUND, TEXT, b""
        path = words[1].partition("?")[0] if len(words) == 3 else ""
        if not (ended and path and words[2].startswith("HTTP/1.")):
            status = HTTPStatus.BAD_REQUEST
        elif words[0] != "GET":
            status = HTTPStatus.METHOD_NOT_ALLOWED
        elif path in self._pages:
            found = self._pages[path](fields)
            if not isinstance(found, tuple):
                return found
            status, kind, body = found
        body = body or f"{status.phrase}\n".encode()
        return (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\nAllow: GET\r\nConnection: close\r\n\r\n"
        ).encode() + body


class serve(HttpServer):
    """``async with aiosync.metrics.serve(metrics) as url:`` answers what an orchestrator asks.

    In blocking code ``with``: it then runs on the thread of :mod:`aiosync.sync`.

    - ``GET /metrics``: all metrics, in the text format of Prometheus or as OpenMetrics.
    - ``GET /healthz``: 200, as long as the event loop runs.
    - ``GET /readyz``: 200, or 503 with a line for each of :meth:`Metrics.unready`.

    Nobody has to prove anything. Nothing that is said is a secret, but it names models and
    versions, so it listens on this host only unless told otherwise. Takes 32 connections at a time,
    of one request each, at most 8 KiB and 10 seconds long; another one ends the oldest, one that
    has not asked if there is any.

    Args:
        metrics: What to show.
        listen: ``HOST:PORT``; port 0 for any free one.

    Raises:
        ConfigError: On entering: the address is none or cannot be bound, or ``prometheus_client``
            is not installed.
        LocalProtocolError: On entering with ``with``: an event loop runs in this thread.
    """

    def __init__(self, metrics: Metrics, listen: str = "127.0.0.1:9464") -> None:
        self._metrics = metrics
        super().__init__(
            listen,
            {
                "/metrics": self._exposed,
                "/healthz": lambda _: (HTTPStatus.OK, TEXT, b""),
                "/readyz": self._ready,
            },
        )

    async def __aenter__(self) -> str:
        self._exposition = optional("prometheus_client.exposition")
        return await super().__aenter__()

    def __enter__(self) -> str:
        refuse_inside_loop("serve", "async with aiosync.metrics.serve(...)")
        self._lease: Lease = lease(self)
        try:
            return self._lease.call(self.__aenter__())
        except BaseException:  # raised again: the caller sees it
            self._lease.release()
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._lease.valid:
            try:
                self._lease.call(self.__aexit__(exc_type, exc, traceback))
            finally:
                self._lease.release()

    def forgotten(self) -> None:
        """The program ends inside of ``with``: no mistake."""

    def _exposed(self, fields: Sequence[str]) -> tuple[HTTPStatus, str, bytes]:
        accepts = [each[7:] for each in fields if each.lower().startswith("accept:")]
        try:
            encode, kind = self._exposition.choose_encoder(",".join(accepts))
            return HTTPStatus.OK, kind, encode(self._metrics)
        except Exception as exc:  # noqa: BLE001 - who asks is told, and asks again
            text = f"{type(exc).__name__}: {exc}\n".encode()
            return HTTPStatus.INTERNAL_SERVER_ERROR, TEXT, text

    def _ready(self, _: Sequence[str]) -> tuple[HTTPStatus, str, bytes]:
        unready = "".join(f"not ready: {each!r}\n" for each in self._metrics.unready())
        status = HTTPStatus.SERVICE_UNAVAILABLE if unready else HTTPStatus.OK
        return status, TEXT, unready.encode()


class _Link(asyncio.Protocol):
    """One request, and its answer."""

    def __init__(
        self,
        answer: Callable[[bytes], bytes | AsyncGenerator[bytes]],
        links: dict[asyncio.Transport, bool],
        server: asyncio.Server,
    ) -> None:
        self._answer, self._links, self._server, self._request = answer, links, server, b""
        self._streaming: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = link = cast("asyncio.Transport", transport)
        self._timer = asyncio.get_running_loop().call_later(_SECONDS, link.abort)
        if len(self._links) == _MAX_LINKS:  # a probe asks at once: whoever did not goes first
            oldest = min(self._links, key=self._links.__getitem__)
            del self._links[oldest]
            oldest.abort()
        self._links[link] = False
        if not self._server.is_serving():  # it was closed since this link was accepted
            link.abort()

    def data_received(self, data: bytes) -> None:
        if self._streaming is not None or self._transport not in self._links:
            return
        self._request += data
        if b"\r\n\r\n" in self._request or len(self._request) > _MAX_NBYTES:
            self._links[self._transport] = True
            answer = self._answer(self._request[:_MAX_NBYTES])
            if isinstance(answer, bytes):
                self._transport.write(answer)
                self._transport.close()  # once that has been taken; nothing more is read
            else:
                self._timer.cancel()
                self._streaming = asyncio.ensure_future(self._stream(answer))
                self._streaming.add_done_callback(self._streamed)  # also where it never ran

    async def _stream(self, events: AsyncGenerator[bytes]) -> None:
        self._transport.write(_EVENTS)
        async with contextlib.aclosing(events):
            async for event in events:
                if self._transport.get_write_buffer_size() > _MAX_UNTAKEN:
                    return
                self._transport.write(event)

    def _streamed(self, _: asyncio.Task[None]) -> None:
        self._transport.abort()
        self._links.pop(self._transport, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        if self._streaming is not None:
            self._streaming.cancel()
        else:
            self._links.pop(self._transport, None)
