"""Bodies and the gate: a client that uploads slowly holds no switch up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiosync.integrations.asgi import WeightsMiddleware
from tests.integrations._asgi_calls import (
    Answer,
    feed_at,
    never,
    scope_of,
    switch,
)
from tests.schemes._harness import PATIENCE, until

pytestmark = pytest.mark.one_loop


asynchronous = pytest.mark.asyncio
GONE = {"type": "http.disconnect"}


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


class Upload:
    """A request whose client sends one message after the other."""

    def __init__(self, app: Any) -> None:
        self.answer = Answer()
        self.asked = 0
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.task = asyncio.ensure_future(app(scope_of("/", "POST"), self.receive, self._send))

    async def receive(self) -> dict[str, Any]:
        self.asked += 1
        return await self._sent.get()

    async def _send(self, message: Any) -> None:
        self.answer.messages.append(dict(message))

    def send(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            self._sent.put_nowait(message)

    async def taken(self, asked: int) -> None:
        """Wait until the server was asked for so many messages."""
        await until(lambda: self.asked >= asked)

    async def end(self) -> Answer:
        async with asyncio.timeout(PATIENCE):
            await self.task
        return self.answer


class Reader:
    """An application that reads all of the body, and then what follows it."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.calls = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        while not self.messages or self.messages[-1].get("more_body"):
            self.messages.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"read"})
        self.messages.append(await receive())


@asynchronous
async def test_a_slow_upload_holds_no_switch_up() -> None:
    feed, app = feed_at(3), Reader()
    upload = Upload(WeightsMiddleware(app, feed))
    sent = [part(b"abc"), part(b"def"), {"type": "http.request"}, GONE]
    upload.send(sent[0])
    await upload.taken(2)
    assert (feed.gate.running, app.calls) == (0, 0)
    await switch(feed, 4)
    upload.send(*sent[1:])
    answer = await upload.end()
    assert (answer.headers, answer.body) == ({"x-weight-version": "4"}, b"read")
    assert len(app.messages) == 4
    assert all(got is said for got, said in zip(app.messages, sent, strict=True))  # as they were


@asynchronous
async def test_without_a_bound_a_request_is_let_in_before_its_body() -> None:
    feed, seen = feed_at(3), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(feed.gate.running)

    upload = Upload(WeightsMiddleware(app, feed, max_early_body=0))
    await upload.end()
    assert (seen, upload.asked) == ([1], 0)


@asynchronous
async def test_a_long_body_is_let_in_at_the_bound() -> None:
    feed, app = feed_at(3), Reader()
    upload = Upload(WeightsMiddleware(app, feed, max_early_body=10))
    sent = [part(b"12345"), part(b"6789"), part(b"01"), part(b"2" * 99), part(b"", False), GONE]
    upload.send(*sent[:2])
    await upload.taken(3)
    assert feed.gate.running == 0
    upload.send(sent[2])
    await upload.taken(4)
    assert (feed.gate.running, app.messages) == (1, sent[:3])  # now the application asks
    upload.send(*sent[3:])
    await upload.end()
    assert app.messages == sent


@asynchronous
@pytest.mark.parametrize("before", [[], [part(b"abc")]])
async def test_a_client_that_leaves_while_it_uploads_is_not_served(before: Any) -> None:
    feed = feed_at(3)
    upload = Upload(WeightsMiddleware(never, feed))
    upload.send(*before, GONE)
    assert (await upload.end()).messages == []
    assert (feed.gate.running, feed.gate.waiting) == (0, 0)
