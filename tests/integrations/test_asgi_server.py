"""The ASGI middleware under a real server, with Starlette inside and a trainer."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

import aiosync
from aiosync.integrations.asgi import WeightsMiddleware
from aiosync.serving import WeightFeed
from tests.bench import asgi_under_load
from tests.integrations._asgi_calls import uvicorn_of
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.schemes._harness import until

if TYPE_CHECKING:
    from torch import nn

asynchronous = pytest.mark.asyncio


def starlette_app(policy: nn.Module, feed: WeightFeed) -> Any:
    import torch
    from starlette.applications import Starlette
    from starlette.background import BackgroundTask
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Mount, Route

    background = asyncio.Event()

    def value() -> float:
        with torch.no_grad():
            return policy(torch.ones(1, 4))[0, 0].item()

    async def act(request: Any) -> Any:
        return JSONResponse(value())

    def act_in_a_thread(request: Any) -> Any:
        return JSONResponse(value())

    async def later(request: Any) -> Any:
        return JSONResponse(value(), background=BackgroundTask(background.wait))

    async def stream(request: Any) -> Any:
        async def chunks() -> Any:
            while True:
                yield f"{value()}\n"
                await asyncio.sleep(0.01)

        return StreamingResponse(chunks())

    def fail(request: Any) -> Any:
        raise ValueError("of the application")

    app = Starlette(
        routes=[
            Route("/act", act),
            Route("/thread", act_in_a_thread),
            Route("/later", later),
            Route("/stream", stream),
            Route("/fail", fail),
            Mount("/sub", app=WeightsMiddleware(Starlette(routes=[Route("/act", act)]), feed)),
        ]
    )
    app.state.background = background
    return app


@asynchronous
@pytest.mark.slow
async def test_under_uvicorn_with_a_trainer() -> None:
    pytest.importorskip("uvicorn")
    httpx = pytest.importorskip("httpx")
    source, policy = models.linear(), models.linear()
    scheme = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0")
    models.fill(source, 1.0)
    scheme.init_on_sender(model=source)
    feed = WeightFeed(aiosync.TCPWeightSyncScheme(scheme.address), model=policy, max_pause=0.1)
    inner = starlette_app(policy, feed)
    app = WeightsMiddleware(inner, feed)

    async def send() -> int:
        models.fill(source, float(scheme.version + 1))
        return (await scheme.send()).version

    async with scheme, uvicorn_of(app) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/readyz")).status_code == 503
        asking = asyncio.ensure_future(client.get("/act"))
        await until(lambda: feed.gate.waiting == 1)
        await scheme.connect()
        response = await asking
        assert (response.json(), response.headers["x-weight-version"]) == (5.0, "1")
        assert (await client.get("/readyz")).status_code == 200

        # The client asks for a version before it is sent: on the loop, in a thread, in a mounted
        # app.
        for path in ("/act", "/thread", "/sub/act"):
            newer = {"x-min-weight-version": str(scheme.version + 1)}
            asking = asyncio.ensure_future(client.get(path, headers=newer))
            await until(lambda: feed.gate.waiting == 1)
            version = await send()
            response = await asking
            assert response.json() == 5.0 * version
            assert response.headers.get_list("x-weight-version") == [str(version)]
        assert (await client.get("/sub/readyz")).json()["version"] == version
        assert (await client.get("/nothing")).headers["x-weight-version"] == str(version)
        assert (await client.get("/fail")).status_code == 500
        assert feed.gate.running == 0

        # A background task does not keep the next version out.
        response = await client.get("/later")
        version = await send()
        assert (await client.get("/act")).headers["x-weight-version"] == str(version)
        inner.state.background.set()

        # A stream has one version until its client leaves.
        async with (
            client.stream("GET", "/stream") as response,
            contextlib.aclosing(response.aiter_lines()) as lines,
        ):
            first = await anext(lines)
            sending = asyncio.ensure_future(send())
            for _ in range(5):
                assert await anext(lines) == first
            assert not sending.done()
        assert await sending == version + 1
        assert feed.gate.running == 0


# -- under load -----------------------------------------------------------------------------------


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_requests_while_updates_arrive_back_to_back() -> None:
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    options = ["--mib", "64", "--tensors", "16", "--rate", "100", "--seconds", "2"]
    args = asgi_under_load.parse([*options, "--loop", "asyncio", "--blame"])
    found = aiosync.run(asgi_under_load.measure(args, harness.context("forkserver")))
    for name in ("without", "with"):
        part = found[name]
        assert part["requests"] == 200
        # The examples are those of failed and of mixed requests.
        assert part["examples"] == []
        assert part["failed"] == 0
    assert found["with"]["mixed"] == 0
    assert found["with"]["versions"] >= 2
    held = found["with"]["server"]["callbacks_ms"]
    assert held["count"] > 100
    # The time is processor time of all callbacks, with aiosync's, as the tests share the machine.
    assert held["busy"]["p99"] < 10.0
