"""Start and end of an ASGI application: the feed lives for a little longer than it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from aiosync.integrations.asgi import WeightsMiddleware, lifespan
from aiosync.serving import WeightFeed
from tests.integrations._asgi_calls import (
    Life,
    feed_at,
    hello,
    living,
    never,
)

asynchronous = pytest.mark.asyncio


def events_of(feed: WeightFeed, events: list[str]) -> Any:
    """A Starlette application that notes whether the feed runs."""
    applications = pytest.importorskip("starlette.applications")

    @contextlib.asynccontextmanager
    async def live(app: Any) -> Any:
        events.append(f"start: {feed.status.state}")
        yield
        events.append(f"end: {feed.status.state}")

    return applications.Starlette(lifespan=live)


@asynchronous
@pytest.mark.parametrize("outermost", [True, False])
async def test_the_feed_lives_for_longer_than_the_application(outermost: bool) -> None:
    feed, events = feed_at(), []
    app = inner = events_of(feed, events)
    if outermost:
        app = WeightsMiddleware(inner, feed)
    else:
        inner.add_middleware(WeightsMiddleware, feed=feed)
    for _ in range(2):  # a feed may be started again
        async with living(app):
            assert feed.status.state == "starting"
        assert feed.status.state == "closed"
    assert events == ["start: starting", "end: starting"] * 2


@asynchronous
async def test_lifespan_alone_and_with_the_middleware() -> None:
    applications = pytest.importorskip("starlette.applications")
    feed = feed_at()
    app = applications.Starlette(lifespan=lifespan(feed))
    for each in (app, WeightsMiddleware(app, feed)):
        async with living(each):
            assert feed.status.state == "starting"
        assert feed.status.state == "closed"


async def asserting(scope: Any, receive: Any, send: Any) -> None:
    assert scope["type"] == "http"


async def returning(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return


async def mistaking(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await hello(scope, receive, send)


async def starting_only(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})


async def not_saying_goodbye(scope: Any, receive: Any, send: Any) -> None:
    await starting_only(scope, receive, send)
    await receive()


@asynchronous
@pytest.mark.parametrize(
    "app", [asserting, returning, mistaking, starting_only, not_saying_goodbye]
)
async def test_applications_that_know_little_of_lifespans(app: Any) -> None:
    feed = feed_at()
    async with living(WeightsMiddleware(app, feed)) as life:
        assert feed.status.state == "starting"
    assert feed.status.state == "closed"
    assert life.said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def failing(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    raise ValueError("no database")


async def saying_that_it_failed(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "lifespan.startup.failed", "message": "no database"})


@asynchronous
@pytest.mark.parametrize("app", [failing, saying_that_it_failed])
async def test_a_start_that_fails_is_reported(app: Any) -> None:
    feed = feed_at()
    life = Life(WeightsMiddleware(app, feed))
    assert await life.ask("startup") == "lifespan.startup.failed"
    assert "no database" in life.texts[0]
    assert isinstance(await life.end(), ValueError if app is failing else type(None))
    assert life.said == ["lifespan.startup.failed"]
    assert feed.status.state == "closed"


@asynchronous
async def test_a_feed_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start() -> None:
        raise RuntimeError("no memory")

    feed = feed_at()
    monkeypatch.setattr(feed, "start", start)
    life = Life(WeightsMiddleware(never, feed))
    assert await life.ask("startup") == "lifespan.startup.failed"
    assert life.texts == ["RuntimeError: no memory"]
    assert isinstance(await life.end(), RuntimeError)


@asynchronous
async def test_an_application_that_dies_takes_its_feed_along() -> None:
    feed, die = feed_at(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await starting_only(scope, receive, send)
        await die.wait()
        raise ValueError("died")

    life = Life(WeightsMiddleware(app, feed))
    assert await life.ask("startup") == "lifespan.startup.complete"
    die.set()
    assert isinstance(await life.end(), ValueError)
    assert feed.status.state == "closed"


@asynchronous
async def test_a_cancelled_lifespan_closes_the_feed() -> None:
    feed = feed_at()
    life = Life(WeightsMiddleware(not_saying_goodbye, feed))
    assert await life.ask("startup") == "lifespan.startup.complete"
    life.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await life.task
    assert feed.status.state == "closed"
