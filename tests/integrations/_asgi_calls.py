"""Calls of an ASGI application in place of a server, and feeds without a trainer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

import aiosync
from aiosync.serving import AdmissionGate, WeightFeed
from tests.schemes._harness import PATIENCE, until


def feed_at(version: int | None = None, **gate: Any) -> WeightFeed:
    """Return a feed whose gate the test switches; nothing listens at its address."""
    return WeightFeed(
        aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:9"),
        model=nn.Linear(4, 2),
        gate=AdmissionGate(initial_version=version, **gate),
        max_pause=0.1,
    )


async def switch(feed: WeightFeed, version: int, epoch: int | None = None) -> None:
    async with asyncio.timeout(PATIENCE), feed.gate.swap(version=version, epoch=epoch):
        pass


async def switched(version: int, epoch: int, **gate: Any) -> WeightFeed:
    """Return a feed whose gate has been switched to a version of an epoch."""
    feed = feed_at(**gate)
    await switch(feed, version, epoch)
    return feed


@dataclass
class Answer:
    """Messages that an application sent for one request."""

    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def raw(self) -> list[tuple[bytes, bytes]]:
        return [tuple(pair) for pair in self.messages[0]["headers"]]

    @property
    def headers(self) -> dict[str, str]:
        names = [name for name, _ in self.raw]
        assert len(names) == len(set(names)), names
        return {name.decode(): value.decode() for name, value in self.raw}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    def json(self) -> Any:
        return json.loads(self.body)


def scope_of(path: str = "/", method: str = "GET", **more: Any) -> dict[str, Any]:
    headers = [(name.encode(), value.encode()) for name, value in more.pop("headers", ())]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        **more,
    }


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


class Upload:
    """A request whose client sends one message after the other."""

    def __init__(self, app: Any, path: str = "/", method: str = "POST", **more: Any) -> None:
        self.answer = Answer()
        self.asked = 0
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope = scope_of(path, method, **more)
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        self.asked += 1
        return await self._sent.get()

    async def _send(self, message: Any) -> None:
        self.answer.messages.append(dict(message))

    def send(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            self._sent.put_nowait(message)

    async def end(self) -> Answer:
        async with asyncio.timeout(PATIENCE):
            await self.task
        return self.answer


async def call(app: Any, path: str = "/", method: str = "GET", **more: Any) -> Answer:
    upload = Upload(app, path, method, **more)
    upload.send(part(b"", more=False))
    return await upload.end()


class Life:
    """The server's side of a lifespan."""

    def __init__(self, app: Any) -> None:
        self.said: list[str] = []
        self.texts: list[str] = []
        self._asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        self.task = asyncio.ensure_future(app(scope, self._asked.get, self._send))

    async def _send(self, message: Any) -> None:
        assert message["type"].startswith("lifespan."), message
        self.said.append(message["type"])
        self.texts.append(message.get("message", ""))
        self._answers.put_nowait(message["type"])

    def tell(self, what: str) -> None:
        self._asked.put_nowait({"type": f"lifespan.{what}"})

    async def ask(self, what: str) -> str:
        """Send an event to the application, and return its answer."""
        self.tell(what)
        async with asyncio.timeout(PATIENCE):
            return await self._answers.get()

    async def end(self) -> BaseException | None:
        await asyncio.wait([self.task], timeout=PATIENCE)
        return self.task.exception()


@contextlib.asynccontextmanager
async def living(app: Any) -> AsyncIterator[Life]:
    """Run an application from its startup to its shutdown."""
    life = Life(app)
    assert await life.ask("startup") == "lifespan.startup.complete"
    try:
        yield life
    finally:
        assert await life.ask("shutdown") == "lifespan.shutdown.complete"
        assert await life.end() is None


@contextlib.asynccontextmanager
async def uvicorn_of(app: Any, **options: Any) -> AsyncIterator[str]:
    """Run the application under uvicorn on this loop; yield its URL."""
    import uvicorn

    config = uvicorn.Config(app, port=0, log_level="error", lifespan="on", **options)
    server = uvicorn.Server(config)
    # Signals are for the test's process, not for this server.
    server.capture_signals = contextlib.nullcontext
    running = asyncio.ensure_future(server.serve())
    try:
        await until(lambda: server.started or running.done())
        assert server.started
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        async with asyncio.timeout(PATIENCE):
            await running


# -- applications -----------------------------------------------------------------------------


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def never(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("the application was asked")
