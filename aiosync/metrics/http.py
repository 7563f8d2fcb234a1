"""A small HTTP server for pages such as ``/metrics``, ``/healthz`` and ``/readyz``: GET only."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import TypeAlias

from aiosync.errors import ConfigError
from aiosync.metrics.collector import Metrics, optional
from aiosync.sync._portal import Lease, lease, refuse_inside_loop
from aiosync.transports.address import Address, bind

__all__ = ["TEXT", "HttpServer", "Page", "serve"]

Page: TypeAlias = Callable[[Sequence[str]], tuple[HTTPStatus, str, bytes] | AsyncGenerator[bytes]]
"""Function called with the header lines of a request. Returns status, content type and body (an
empty body becomes a line with the status); or the events of a ``text/event-stream``, which is
closed when its reader ends."""

TEXT = "text/plain; charset=utf-8"
"""Content type of plain text."""

_MAX_NBYTES = 8192  # longest request
_MAX_LINKS = 32
_SECONDS = 10.0  # longest time of a link, and of a reader of a stream to take one event
_TARGET = re.compile(r"(?:https?://([^/?]+))?(/[^?]*)?(?:\?.*)?", re.IGNORECASE)
_EVENTS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n"
    b"Connection: close\r\n\r\n"
)


class HttpServer:
    """HTTP server for a few pages: ``async with HttpServer(...) as url:``.

    Any client may ask. The server takes 32 connections at a time. Each has one request, of at most
    8 KiB, and ends within 10 seconds. Events are streamed for longer, as long as the reader takes
    each event within 10 seconds. One connection too many ends the oldest one that has not sent its
    request, or else the oldest one.

    Args:
        listen: ``HOST:PORT``; port 0 for any free one.
        pages: The pages, by path.
        allow_hosts: Host names under which clients may ask, beside those of this host, names
            without a dot, and addresses. Other names are refused, because a page of another site
            could let its own name lead to this host.

    Raises:
        ConfigError: ``allow_hosts`` is no list. On entering: ``listen`` is no address, or cannot
            be bound.
    """

    def __init__(
        self, listen: str, pages: Mapping[str, Page], allow_hosts: Iterable[str] = ()
    ) -> None:
        if isinstance(allow_hosts, str):
            raise ConfigError(f"allow_hosts must be a list of names: pass [{allow_hosts!r}]")
        self._listen, self._pages = listen, pages
        self._names = {_host_of(each) for each in (*allow_hosts, socket.gethostname())}
        # The task of each connection, oldest first, and True if its request has arrived.
        self._links: dict[asyncio.Task[None], bool] = {}

    async def __aenter__(self) -> str:
        try:
            address = Address.parse(f"tcp://{self._listen}")
        except ConfigError as exc:
            raise ConfigError(  # the text leaves out credentials before an @
                f"{self._listen.rpartition('@')[2]!r} is not HOST:PORT, such as 127.0.0.1:9464"
            ) from exc
        self._names.add(_host_of(address.host))
        # The look-up of the host's full name, which may take seconds; None until it is needed.
        self._full_name: asyncio.Future[str] | None = None
        sock, address = bind(address)
        # With start_serving=False this call does not suspend, so no cancellation can come between
        # the bind and the assignment of the server that has to be closed.
        self._server: asyncio.Server = await asyncio.start_server(
            self._serve, sock=sock, limit=_MAX_NBYTES, start_serving=False
        )
        try:
            await self._server.start_serving()
        except BaseException:  # raised again: the caller sees it
            self.abort()
            raise
        return f"http://{str(address).removeprefix('tcp://')}"

    async def __aexit__(self, *_: object) -> None:
        self.abort()
        while self._links:  # noqa: ASYNC110 - they end in the next turns of the loop
            await asyncio.sleep(0)

    def abort(self) -> None:
        """Close the listening socket and cancel every connection. Call it on the server's loop."""
        self._server.close()
        for link in self._links:
            link.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the one request of a connection."""
        link = asyncio.current_task()
        assert link is not None
        loop, hanging_up = asyncio.get_running_loop(), None
        try:
            if not self._server.is_serving():  # the server was closed after it accepted this link
                return
            self._make_room()
            # False until the request is here: such links make room first.
            self._links[link] = False
            async with asyncio.timeout(_SECONDS) as deadline:
                try:
                    request = await reader.readuntil(b"\r\n\r\n")
                except asyncio.LimitOverrunError:
                    # The answer to a request that is too long is that to a malformed one.
                    request = b""
                self._links[link] = True
                answer = await self._answer(request)
                if isinstance(answer, bytes):
                    writer.write(answer)
                    writer.close()
                    await writer.wait_closed()  # returns when the client has taken the answer
                    return
                deadline.reschedule(None)
                # Between two events only a read shows that the client has gone.
                hanging_up = loop.create_task(_end_with(reader, link))
                await _write_events(writer, answer, deadline)
        except (asyncio.CancelledError, EOFError, OSError):  # the client has gone or is too slow
            return
        finally:
            writer.transport.abort()
            self._links.pop(link, None)
            if hanging_up is not None:
                hanging_up.cancel()

    def _make_room(self) -> None:
        """Cancel the oldest link without a request, or else the oldest, if there are too many."""
        # A probe asks at once, so a link without a request is closed before the others.
        if len(self._links) == _MAX_LINKS:
            oldest = min(self._links, key=self._links.__getitem__)
            del self._links[oldest]
            oldest.cancel()

    async def _is_name_of_this(self, host: str) -> bool:
        """Return True if no other site can have chosen the name for its own pages."""
        if "." not in host or host in self._names or host.endswith(".localhost"):
            return True
        with contextlib.suppress(ValueError):
            return bool(ipaddress.ip_address(host))
        # Most clients use an address, so that the look-up is seldom needed.
        if self._full_name is None:
            loop = asyncio.get_running_loop()
            self._full_name = loop.run_in_executor(None, socket.getfqdn)
        # The end of one connection must not end the look-up for the others.
        return host == _host_of(await asyncio.shield(self._full_name))

    async def _answer(self, request: bytes) -> bytes | AsyncGenerator[bytes]:
        """Return the whole answer to a request, or the events of a page that streams them."""
        parsed = _parse(request)
        if parsed is None:
            return _reply(HTTPStatus.BAD_REQUEST)
        method, path, host, fields = parsed
        if not await self._is_name_of_this(host):
            return _reply(
                HTTPStatus.MISDIRECTED_REQUEST,
                TEXT,
                (
                    f"{host!r} is no name of this host: ask by address, or allow the name with "
                    "allow_hosts=, or --allow-host\n"
                ).encode(),
            )
        if method != "GET":
            return _reply(HTTPStatus.METHOD_NOT_ALLOWED)
        if path not in self._pages:
            return _reply(HTTPStatus.NOT_FOUND)
        found = self._pages[path](fields)
        return _reply(*found) if isinstance(found, tuple) else found


def _parse(request: bytes) -> tuple[str, str, str, list[str]] | None:
    """Return method, path, host and header lines of a request; ``None`` if it is none of HTTP/1.

    The host is empty if the client names none.
    """
    head, ended, _ = request.decode("latin-1").partition("\r\n\r\n")
    line, *fields = head.split("\r\n")
    words = line.split(" ")
    target = _TARGET.fullmatch(words[1]) if len(words) == 3 and words[1] else None
    if target is None or not (ended and words[2].startswith("HTTP/1.")):
        return None
    # The host of an absolute URL counts instead of the Host field.
    hosts = [target[1]] if target[1] else _named_hosts(fields)
    host = "".join(map(_host_of, hosts))
    return (words[0], target[2] or "/", host, fields) if len(hosts) < 2 else None


def _named_hosts(fields: Iterable[str]) -> list[str]:
    """Return the value of each Host field among the header lines."""
    return [each[5:] for each in fields if each.lower().startswith("host:")]


def _reply(status: HTTPStatus, kind: str = TEXT, body: bytes = b"") -> bytes:
    """Return the bytes of an answer; an empty body becomes a line with the status."""
    body = body or f"{status.phrase}\n".encode()
    return (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nAllow: GET\r\nConnection: close\r\n\r\n"
    ).encode() + body


def _host_of(authority: str) -> str:
    """Return the host of ``host:port`` without brackets, in small letters."""
    host = authority.strip().lower()
    return host[1:].partition("]")[0] if host[:1] == "[" else host.partition(":")[0].rstrip(".")


async def _write_events(
    writer: asyncio.StreamWriter, events: AsyncGenerator[bytes], deadline: asyncio.Timeout
) -> None:
    """Write each event as it comes; the deadline runs while the client takes one."""
    loop = asyncio.get_running_loop()
    writer.write(_EVENTS)
    async with contextlib.aclosing(events):
        async for event in events:
            writer.write(event)
            deadline.reschedule(loop.time() + _SECONDS)
            await writer.drain()
            deadline.reschedule(None)


async def _end_with(reader: asyncio.StreamReader, link: asyncio.Task[None]) -> None:
    """Cancel a link when its other end is closed; drop everything that the client sends."""
    with contextlib.suppress(OSError):
        while await reader.read(_MAX_NBYTES):
            pass
    link.cancel()


class serve(HttpServer):
    """HTTP server for metrics and probes: ``async with aiosync.metrics.serve(metrics) as url:``.

    Blocking code uses ``with``: the server then runs on the thread of :mod:`aiosync.sync`.

    - ``GET /metrics``: all metrics, in the text format of Prometheus or as OpenMetrics.
    - ``GET /healthz``: 200, as long as the event loop runs.
    - ``GET /readyz``: 200, or 503 with a line for each of :meth:`Metrics.unready`.

    Clients need no token. The answers hold no secret, but they name models and versions, so the
    server listens on this host only unless told otherwise. It takes 32 connections at a time, of
    one request each, at most 8 KiB and 10 seconds long. One connection too many ends the oldest one
    that has not sent its request, or else the oldest one.

    Args:
        metrics: The metrics to show.
        listen: ``HOST:PORT``; port 0 for any free one.
        allow_hosts: Host names under which clients may ask, beside those of this host, names
            without a dot, and addresses. Other names are refused, because a page of another site
            could let its own name lead to this host.

    Raises:
        ConfigError: ``prometheus_client`` is not installed, or ``allow_hosts`` is no list. On
            entering: ``listen`` is no address, or cannot be bound.
        LocalProtocolError: On entering with ``with``: an event loop runs in this thread.
    """

    def __init__(
        self,
        metrics: Metrics,
        listen: str = "127.0.0.1:9464",
        *,
        allow_hosts: Iterable[str] = (),
    ) -> None:
        self._metrics = metrics
        self._exposition = optional("prometheus_client.exposition")
        super().__init__(
            listen,
            {
                "/metrics": self._exposed,
                "/healthz": lambda _: (HTTPStatus.OK, TEXT, b""),
                "/readyz": self._ready,
            },
            allow_hosts,
        )

    def __enter__(self) -> str:
        refuse_inside_loop("serve", "async with aiosync.metrics.serve(...)")
        self._lease: Lease = lease(self)
        try:
            return self._lease.call(self.__aenter__())
        except BaseException:  # raised again: the caller sees it
            self._lease.release()
            raise

    def __exit__(self, *_: object) -> None:
        # The server ended with its thread if that has ended, and does not run in a forked child.
        if self._lease.valid:
            try:
                self._lease.call(self.__aexit__())
            finally:
                self._lease.release()

    def forgotten(self) -> None:
        """Do nothing: a program may end inside the ``with`` block, which is no mistake."""

    def _exposed(self, fields: Sequence[str]) -> tuple[HTTPStatus, str, bytes]:
        """Return the page ``/metrics``, in the text format that the client accepts."""
        accepts = [each[7:] for each in fields if each.lower().startswith("accept:")]
        try:
            encode, kind = self._exposition.choose_encoder(",".join(accepts))
            return HTTPStatus.OK, kind, encode(self._metrics)
        except Exception as exc:  # noqa: BLE001 - the client gets the error, and asks later
            text = f"{type(exc).__name__}: {exc}\n".encode()
            return HTTPStatus.INTERNAL_SERVER_ERROR, TEXT, text

    def _ready(self, _: Sequence[str]) -> tuple[HTTPStatus, str, bytes]:
        """Return the page ``/readyz``: a line for each source that is not ready."""
        unready = "".join(f"not ready: {each!r}\n" for each in self._metrics.unready())
        status = HTTPStatus.SERVICE_UNAVAILABLE if unready else HTTPStatus.OK
        return status, TEXT, unready.encode()
