"""The ASGI middleware: its requests and responses, its admission, its start and its end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

import aiosync
import aiosync.integrations.asgi
from aiosync import VersionSpan
from aiosync.integrations.asgi import WeightsMiddleware, lifespan, span_of
from aiosync.serving import WeightFeed
from tests.integrations._asgi_calls import (
    Life,
    Upload,
    call,
    feed_at,
    hello,
    living,
    never,
    part,
    scope_of,
    switch,
    switched,
)
from tests.schemes import _models as models
from tests.schemes._harness import PATIENCE, until

pytestmark = pytest.mark.one_loop

asynchronous = pytest.mark.asyncio
EPOCH = 0xABC


# -- responses --------------------------------------------------------------------------------


@asynchronous
async def test_a_response_names_its_version_and_epoch() -> None:
    feed = await switched(3, EPOCH)
    app = WeightsMiddleware(hello, feed)
    answer = await call(app)
    assert answer.raw == [
        (b"a", b"b"),
        (b"x-weight-version", b"3"),
        (b"x-weight-epoch", b"0000000000000abc"),
    ]
    assert answer.body == b"hello"
    await switch(feed, 4)
    assert (await call(app)).headers["x-weight-version"] == "4"
    # The trainer was restarted.
    await switch(feed, 1, EPOCH + 1)
    headers = (await call(app, method="HEAD")).headers
    assert (headers["x-weight-version"], headers["x-weight-epoch"][-3:]) == ("1", "abd")
    assert (await call(WeightsMiddleware(hello, feed_at(3)))).raw[1:] == [
        (b"x-weight-version", b"3")
    ]


@asynchronous
@pytest.mark.parametrize("name", [b"X-Weight-Version", b"x-weight-epoch", b"x-weight-versions"])
async def test_what_the_application_says_itself_stands(name: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        # Any iterable of pairs is allowed.
        headers = (pair for pair in [[name, b"17"]])
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body"})

    answer = await call(WeightsMiddleware(app, await switched(3, EPOCH)))
    assert answer.raw == [(name, b"17")]


@asynchronous
async def test_several_versions_are_named_where_there_may_be_several() -> None:
    feed = await switched(3, EPOCH, mode="immediate")
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async with feed.batch():
            pass
        await switch(feed, 4)
        if scope["path"] == "/restart":
            await switch(feed, 5, EPOCH + 1)
        async with feed.batch():
            pass
        seen.append(scope["aiosync.admission"].versions)
        await hello(scope, receive, send)

    headers = (await call(WeightsMiddleware(app, feed))).headers
    assert headers == {
        "a": "b",
        "x-weight-version": "3",
        "x-weight-versions": "3-4",
        "x-weight-epoch": f"{EPOCH:016x}",
    }
    assert span_of(headers) == VersionSpan(3, 4, f"{EPOCH:016x}")
    headers = (await call(WeightsMiddleware(app, feed), "/restart")).headers
    assert headers == {"a": "b", "x-weight-version": "4", "x-weight-versions": "4-5"}
    # The versions are of two trainers, so there is no epoch to compare.
    assert span_of(headers) == VersionSpan(0, 5)
    assert seen == [(3, 4), (4, 5)]


@asynchronous
async def test_a_client_reads_the_span_of_a_response() -> None:
    httpx = pytest.importorskip("httpx")
    transport = httpx.ASGITransport(WeightsMiddleware(hello, await switched(3, EPOCH)))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        assert span_of((await client.get("/")).headers) == VersionSpan(3, 3, f"{EPOCH:016x}")
        assert span_of((await client.get("/healthz")).headers) is None
    # A response has no epoch either if its versions are of a trainer before the present one.
    assert span_of({"x-weight-version": "3"}) == VersionSpan(0, 3)
    with pytest.raises(ValueError, match="latest"):
        span_of({"x-weight-version": "latest"})
    assert aiosync.staleness(5, span_of({"x-weight-version": "3"}), epoch=f"{EPOCH:016x}") is None


# -- requests ---------------------------------------------------------------------------------


def ask(min_version: str | None = None, epoch: str | None = None) -> dict[str, Any]:
    pairs = (("x-min-weight-version", min_version), ("x-weight-epoch", epoch))
    return {"headers": [(name, value) for name, value in pairs if value is not None]}


@asynchronous
async def test_a_request_waits_for_the_version_that_it_asks_for() -> None:
    feed = feed_at(3)
    app = WeightsMiddleware(hello, feed)
    assert (await call(app, **ask("3"))).status == 200
    waiting = asyncio.ensure_future(call(app, **ask(" 05 ")))
    await until(lambda: feed.gate.waiting == 1)
    await switch(feed, 4)
    # Other requests are let in meanwhile.
    assert (await call(app)).status == 200
    assert not waiting.done()
    await switch(feed, 6)
    assert (await waiting).headers["x-weight-version"] == "6"


@asynchronous
async def test_too_old_is_a_503_that_may_be_tried_again() -> None:
    app = WeightsMiddleware(never, await switched(3, EPOCH), timeout=0.01)
    answer = await call(app, **ask("9"))
    assert answer.status == 503
    assert answer.headers == {
        "content-type": "application/json",
        "content-length": str(len(answer.body)),
        "cache-control": "no-store",
        "retry-after": "1",
        "x-weight-version": "3",
        "x-weight-epoch": "0000000000000abc",
    }
    body = answer.json()
    detail = body.pop("detail")
    assert "version 9 was requested" in detail
    assert "start it with `async with feed`, lifespan(feed), or a server" in detail
    # The body has no reason, as that may name the trainer's address.
    assert body == {
        "error": "weight_version",
        "version": 3,
        "epoch": "0000000000000abc",
        "min_version": 9,
        "waits_for": 0,
        "state": "closed",
    }


@asynchronous
async def test_the_epoch_that_is_asked_for() -> None:
    app = WeightsMiddleware(hello, await switched(3, EPOCH), timeout=0.01)
    assert (await call(app, **ask(epoch="abc"))).status == 200
    assert (await call(app, **ask("3", epoch="0000000000000ABC"))).status == 200
    assert (await call(app, **ask("3", epoch="abd"))).status == 503


@asynchronous
@pytest.mark.parametrize(
    ("name", "header", "values"),
    [
        (
            "min_version",
            "x-min-weight-version",
            ["", "-1", "+1", "1.0", "1_0", "0x1", "abc", "1 2", "\xb2", "9" * 5000],
        ),
        ("min_version", "x-min-weight-version", [str(2**63), "9" * 19]),
        ("epoch", "x-weight-epoch", ["", "xyz", "0x1", "-1", "f" * 17]),
    ],
)
async def test_a_malformed_header_is_a_400(name: str, header: str, values: list[str]) -> None:
    app = WeightsMiddleware(never, feed_at(3), timeout=0.01)
    for value in values:
        answer = await call(app, **ask(**{name: value}))
        assert (answer.status, answer.json()["error"]) == (400, "bad_header")
        assert f"{header} must be" in answer.json()["detail"]
        # The detail does not repeat the header's value.
        assert len(answer.json()["detail"]) < 100
    # This version is well formed, but not here.
    assert (await call(app, **ask(str(2**63 - 1)))).status == 503


# -- admission --------------------------------------------------------------------------------


@asynchronous
@pytest.mark.parametrize(
    ("path", "method", "root_path"),
    [
        ("/", "OPTIONS", ""),
        ("/healthz", "GET", ""),
        ("/static/a/b", "GET", ""),
        ("/api/healthz", "GET", "/api"),
        # This server leaves the root path out of the path.
        ("/healthz", "GET", "/api"),
    ],
)
async def test_some_requests_have_nothing_to_do_with_weights(
    path: str, method: str, root_path: str
) -> None:
    app = WeightsMiddleware(hello, feed_at(), exempt=iter(["/healthz", "/static/"]), timeout=0.01)
    answer = await call(app, path, method, root_path=root_path)
    assert (answer.status, answer.headers) == (200, {"a": "b"})


@asynchronous
async def test_a_socket_is_not_let_in_as_a_whole() -> None:
    feed = feed_at()
    running = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        running.append((scope["type"], feed.gate.running, "aiosync.admission" in scope))

    await WeightsMiddleware(app, feed)({"type": "websocket", "path": "/"}, None, None)
    assert running == [("websocket", 0, False)]


@asynchronous
async def test_a_client_that_reads_slowly_holds_no_switch_up() -> None:
    feed = feed_at(3)
    taken = asyncio.Event()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await taken.wait()

    app = WeightsMiddleware(hello, feed, max_early_body=0)
    calling = asyncio.ensure_future(app(scope_of(), None, send))
    await switch(feed, 4)
    assert not calling.done()
    taken.set()
    await calling
    assert feed.gate.running == 0


@asynchronous
async def test_what_a_server_is_asked_for_early_ends_no_request() -> None:
    """Such as ``http.response.push``, of which the application computes the rest afterwards."""
    feed, running = feed_at(3), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.push", "path": "/style.css", "headers": []})
        await send({"type": "http.response.early_hint", "links": []})
        running.append(feed.gate.running)
        await hello(scope, receive, send)
        running.append(feed.gate.running)

    await call(WeightsMiddleware(app, feed))
    assert running == [1, 0]


# -- bodies: a client that uploads slowly delays no switch ---------------------------------------

GONE = {"type": "http.disconnect"}


class Reader:
    """Application that reads the whole body, and then the message that follows it."""

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
    await until(lambda: upload.asked == 2)
    assert (feed.gate.running, app.calls) == (0, 0)
    await switch(feed, 4)
    upload.send(*sent[1:])
    answer = await upload.end()
    assert (answer.headers, answer.body) == ({"x-weight-version": "4"}, b"read")
    assert len(app.messages) == 4
    # The application gets the client's own messages.
    assert all(got is said for got, said in zip(app.messages, sent, strict=True))


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
    await until(lambda: upload.asked == 3)
    assert feed.gate.running == 0
    upload.send(sent[2])
    await until(lambda: upload.asked == 4)
    # From here on the application itself asks for messages.
    assert (feed.gate.running, app.messages) == (1, sent[:3])
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


# -- the probe --------------------------------------------------------------------------------


@asynchronous
async def test_the_probe_follows_the_feed() -> None:
    source, target = models.linear(), models.linear()
    scheme = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0")
    scheme.init_on_sender(model=source)
    feed = WeightFeed(aiosync.TCPWeightSyncScheme(scheme.address), model=target, max_pause=0.05)
    strict = WeightsMiddleware(never, feed, max_staleness=0.05)
    lax = WeightsMiddleware(never, feed)
    answer = await call(lax, "/readyz")
    assert (answer.status, answer.json()["state"]) == (503, "closed")
    async with feed:
        answer = await call(lax, "/readyz")
        assert (answer.status, answer.json()["state"]) == (503, "starting")
        assert (answer.json()["version"], answer.json()["waits_for"]) == (0, 1)
        assert answer.headers["cache-control"] == "no-store"
        assert int(answer.headers["retry-after"]) > 0
        async with scheme:
            await scheme.connect()
            await feed.ready.wait(timeout=PATIENCE)
            answer = await call(strict, "/readyz")
            assert answer.status == 200
            body = answer.json()
            assert (body["ready"], body["version"], body["connected"]) == (True, 1, True)
            assert body["waits_for"] == 0 and "retry-after" not in answer.headers
            assert body["epoch"] == answer.headers["x-weight-epoch"]
            head = await call(strict, "/readyz", "HEAD")
            assert (head.status, head.body) == (200, b"")
            assert int(head.headers["content-length"]) > 10
            assert (await call(strict, "/api/readyz", root_path="/api")).status == 200
            posted = await call(strict, "/readyz", "POST")
            assert (posted.status, posted.headers["allow"]) == (405, "GET, HEAD")
        await until(lambda: feed.status.stale_for > 0.05)
        body = (await call(strict, "/readyz")).json()
        assert (body["ready"], body["state"], body["connected"]) == (False, "stale", False)
        assert body["reason"]
        answer = await call(lax, "/readyz")
        assert (answer.status, answer.json()["state"]) == (200, "stale")
        feed.gate.close()
        assert (await call(lax, "/readyz")).status == 503


# -- start and end: the feed lives for a little longer than the application ---------------------


@asynchronous
@pytest.mark.parametrize("how", ["around it", "added", "lifespan"])
async def test_the_feed_lives_for_longer_than_the_application(how: str) -> None:
    applications = pytest.importorskip("starlette.applications")
    feed, events = feed_at(), []

    @contextlib.asynccontextmanager
    async def live(app: Any) -> Any:
        events.append(f"start: {feed.status.state}")
        yield
        events.append(f"end: {feed.status.state}")

    own = lifespan(feed) if how == "lifespan" else live
    app = inner = applications.Starlette(lifespan=own)
    if how == "around it":
        app = WeightsMiddleware(inner, feed)
    else:
        inner.add_middleware(WeightsMiddleware, feed=feed)
    # A feed may be started again.
    for _ in range(2):
        async with living(app):
            assert feed.status.state == "starting"
        assert feed.status.state == "closed"
    assert events == ["start: starting", "end: starting"] * 2 or how == "lifespan"


async def raising(scope: Any, receive: Any, send: Any) -> None:
    raise ValueError("only HTTP")


async def returning(scope: Any, receive: Any, send: Any) -> None:
    """Do nothing, like an application that serves only HTTP."""


async def answering(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def only_starting(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await starting_unasked(scope, receive, send)


async def starting_unasked(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "lifespan.startup.complete"})


@asynchronous
@pytest.mark.parametrize("app", [raising, returning, answering, only_starting, starting_unasked])
async def test_an_application_that_knows_no_lifespan(app: Any) -> None:
    feed = feed_at()
    async with living(WeightsMiddleware(app, feed)):
        await asyncio.sleep(0)
        assert feed.status.state == "starting"
    assert feed.status.state == "closed"


async def failing(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    raise ValueError("no database")


async def saying_that_it_failed(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "lifespan.startup.failed", "message": "no database"})


@asynchronous
@pytest.mark.parametrize("app", [failing, saying_that_it_failed])
async def test_a_start_that_fails_closes_the_feed(app: Any) -> None:
    feed = feed_at()
    life = Life(WeightsMiddleware(app, feed))
    life.tell("startup")
    assert isinstance(await life.end(), ValueError if app is failing else type(None))
    assert life.said == ([] if app is failing else ["lifespan.startup.failed"])
    assert feed.status.state == "closed"


@asynchronous
async def test_a_feed_that_cannot_start_says_why_to_the_server() -> None:
    first = feed_at()
    second = WeightFeed(
        aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:9"), model=models.linear(), gate=first.gate
    )
    async with first:
        life = Life(WeightsMiddleware(hello, second))
        life.tell("startup")
        assert isinstance(await life.end(), aiosync.ConfigError)
    assert life.said == ["lifespan.startup.failed"]
    assert "the gate has another feed" in life.texts[0]


# -- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"exempt": "/healthz"},
        {"exempt": [b"/healthz"]},
        {"readyz": 1},
        {"timeout": -1},
        {"timeout": "2"},
        {"max_staleness": float("nan")},
        {"max_staleness": "60"},
        {"max_early_body": -1},
        {"max_early_body": 1.5},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(aiosync.ConfigError, match=f"{name} must be|a path must be"):
        WeightsMiddleware(hello, feed_at(1), **options)
