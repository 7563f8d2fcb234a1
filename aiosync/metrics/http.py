"""``/metrics``, ``/healthz`` and ``/readyz`` on a socket of their own: GET, one request a link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

from aiosync.metrics.collector import Metrics
from aiosync.metrics.table import optional
from aiosync.sync._portal import Lease, lease, refuse_inside_loop
from aiosync.transports.address import Address, bind

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["serve"]

_MAX_NBYTES = 8192  # of a request
_MAX_LINKS = 32
_SECONDS = 10.0  # that a link may be open


class serve:
    """``async with aiosync.metrics.serve(metrics) as url:`` answers what an orchestrator asks.

    In blocking code ``with``: it then runs on the thread of :mod:`aiosync.sync`.

    - ``GET /metrics``: all metrics, in the text format of Prometheus or as OpenMetrics.
    - ``GET /healthz``: 200, as long as the event loop runs.
    - ``GET /readyz``: 200, or 503 with a line for each of :meth:`Metrics.unready`.

    Nobody has to prove anything. Nothing that is said is a secret, but it names models and
    versions, so it listens on this host only unless told otherwise. Takes 32 connections at a time,
    of one request each, at most 8 KiB and 10 seconds long.

    Args:
        metrics: What to show.
        listen: ``HOST:PORT``; port 0 for any free one.

    Raises:
        ConfigError: On entering: the address cannot be bound, or ``prometheus_client`` is not
            installed.
        LocalProtocolError: On entering with ``with``: an event loop runs in this thread.
    """

    def __init__(self, metrics: Metrics, listen: str = "127.0.0.1:9464") -> None:
        self._metrics, self._listen = metrics, listen
        self._links: set[asyncio.Transport] = set()

    async def __aenter__(self) -> str:
        self._exposition = optional("prometheus_client.exposition")
        sock, address = bind(Address.parse(f"tcp://{self._listen}"))
        loop = asyncio.get_running_loop()
        # Nothing suspends this before it is known what to close.
        self._server = await loop.create_server(
            lambda: _Link(self._answer, self._links), sock=sock, start_serving=False
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

    def abort(self) -> None:
        """Close every socket now. On the loop that it runs on."""
        self._server.close()
        for link in self._links:
            link.abort()

    def _answer(self, request: bytes) -> bytes:
        head, ended, _ = request.decode("latin-1").partition("\r\n\r\n")
        line, *fields = head.split("\r\n")
        words, status, body = line.split(" "), HTTPStatus.OK, b""
        kind = "text/plain; charset=utf-8"
        path = words[1].partition("?")[0] if len(words) == 3 else ""
        if not (ended and path and words[2].startswith("HTTP/1.")):
            status = HTTPStatus.BAD_REQUEST
        elif words[0] != "GET":
            status = HTTPStatus.METHOD_NOT_ALLOWED
        elif path == "/metrics":
            try:
                accepts = [each[7:] for each in fields if each.lower().startswith("accept:")]
                encode, kind = self._exposition.choose_encoder(",".join(accepts))
                body = encode(self._metrics)
            except Exception as exc:  # noqa: BLE001 - who asks is told, and asks again
                status, kind = HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8"
                body = f"{type(exc).__name__}: {exc}\n".encode()
        elif path == "/readyz":
            unready = self._metrics.unready()
            if unready:
                status = HTTPStatus.SERVICE_UNAVAILABLE
                body = "".join(f"not ready: {each!r}\n" for each in unready).encode()
        elif path != "/healthz":
            status = HTTPStatus.NOT_FOUND
        body = body or f"{status.phrase}\n".encode()
        return (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\nAllow: GET\r\nConnection: close\r\n\r\n"
        ).encode() + body


class _Link(asyncio.Protocol):
    """One request, and its answer."""

    def __init__(self, answer: Callable[[bytes], bytes], links: set[asyncio.Transport]) -> None:
        self._answer, self._links, self._request = answer, links, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = link = cast("asyncio.Transport", transport)
        self._timer = asyncio.get_running_loop().call_later(_SECONDS, link.abort)
        self._links.add(link)
        if len(self._links) > _MAX_LINKS:
            link.abort()

    def data_received(self, data: bytes) -> None:
        self._request += data
        if b"\r\n\r\n" in self._request or len(self._request) > _MAX_NBYTES:
            self._transport.write(self._answer(self._request[:_MAX_NBYTES]))
            self._transport.close()  # once that has been taken; nothing more is read

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._links.discard(self._transport)
