"""A server that goes on and catches up if trainer, weight server or network die in mid-update.

The trainer and the weight server are processes. The tested server runs on the test's loop, under
uvicorn, and gets requests all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

import httpx
import torch
from torch import nn

import aiosync
from aiosync.integrations.asgi import WeightsMiddleware
from aiosync.serving import WeightFeed
from aiosync.testing import FaultProxy, Faults, Plan
from tests.integrations._asgi_calls import uvicorn_of
from tests.schemes import _harness as harness
from tests.schemes._harness import PATIENCE, until
from tests.schemes._models import fill

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.one_loop]

NBYTES = 2**24
"""More than the kernel keeps: what a dead process has written to its sockets still arrives."""
SLOW = Plan(back=Faults(delay=0.0025))
"""With these delays an update takes most of a second, so that a fault can hit its middle."""
STALE = 0.2


def build() -> nn.Module:
    """Make a model of several tensors, so that weights could be mixed."""
    return nn.ParameterList(torch.zeros(NBYTES // 4 // 4) for _ in range(4))


# -- the trainer's process --------------------------------------------------------------------


async def begin(state: harness.State, value: float) -> None:
    fill(state.model, value)
    state.scheme.init_on_sender(model=state.model)
    await state.scheme.connect(timeout=PATIENCE)


def send(state: harness.State, value: float) -> None:
    fill(state.model, value)
    state.scheme.send_nowait()


@contextlib.contextmanager
def trainer(address: str, value: float, **options: Any) -> Iterator[harness.Worker]:
    """Run a trainer as a process, which has its first version once it is up."""
    process = harness.start(aiosync.TCPWeightSyncScheme(address, **options), build)
    process.post(begin, value)
    try:
        yield process
    finally:
        process.end()


# -- the server -------------------------------------------------------------------------------


class Server:
    """A server under test, and the client that asks it."""

    def __init__(self, feed: WeightFeed, client: Any) -> None:
        self.feed = feed
        self.client = client
        # Each answer has a value, an epoch and a version.
        self.seen: list[tuple[float, str, int]] = []
        self.errors: list[str] = []

    async def ask_forever(self) -> None:
        while True:
            response = await self.client.get("/")
            values = set(response.json() if response.status_code == 200 else ())
            if len(values) != 1:
                self.errors.append(f"{response.status_code}: {response.text}")
                continue
            headers = response.headers
            label = (headers["x-weight-epoch"], int(headers["x-weight-version"]))
            self.seen.append((values.pop(), *label))
            await asyncio.sleep(0.01)

    async def probe(self) -> tuple[int, dict[str, Any]]:
        response = await self.client.get("/readyz")
        return response.status_code, response.json()

    async def until_answered_with(self, value: float) -> tuple[float, str, int]:
        await until(lambda: self.seen and self.seen[-1][0] == value)
        return self.seen[-1]

    async def until_ready(self, ready: bool) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE):
            while True:
                status, body = await self.probe()
                if body["ready"] == ready:
                    assert status == (200 if ready else 503)
                    return body
                await asyncio.sleep(0.02)

    async def goes_on_with(self, value: float) -> None:
        """Check that several more answers have this value."""
        count = len(self.seen)
        await until(lambda: len(self.seen) >= count + 5)
        assert {each[0] for each in self.seen[count:]} == {value}


@contextlib.asynccontextmanager
async def served(address: str, **options: Any) -> AsyncIterator[Server]:
    model = build()
    scheme = aiosync.TCPWeightSyncScheme(address, **options)
    feed = WeightFeed(scheme, model=model, max_pause=0.2)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        text = [tensor[at].item() for tensor in model for at in (0, -1)]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(text).encode()})

    middleware = WeightsMiddleware(app, feed, max_staleness=STALE)
    async with (
        uvicorn_of(middleware) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client,
    ):
        server = Server(feed, client)
        asking = asyncio.ensure_future(server.ask_forever())
        try:
            yield server
        finally:
            asking.cancel()
            await asyncio.wait([asking])
        assert server.errors == []


async def in_the_middle(proxy: FaultProxy) -> None:
    """Wait until a part of the next update has gone through the proxy, but not the rest."""
    before = proxy.bytes_back
    await until(lambda: proxy.bytes_back > before + NBYTES // 8)
    assert proxy.bytes_back < before + NBYTES // 2, "too late: the machine is too slow"


# -- the tests --------------------------------------------------------------------------------


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix://{tmp_path / 'trainer'}"


async def test_a_trainer_is_killed_in_mid_update_and_started_again(address: str) -> None:
    async with FaultProxy(address) as proxy:
        proxy.plan = SLOW
        with trainer(address, 1.0) as first:
            async with served(proxy.url) as server:
                _, epoch, version = await server.until_answered_with(1.0)
                await server.until_ready(True)
                first.post(send, 2.0)
                await in_the_middle(proxy)
                first.kill()
                status = await server.until_ready(False)
                assert (status["state"], status["version"]) == ("stale", version)
                # The status rounds this time.
                assert status["stale_for"] >= STALE
                assert "lost" in status["reason"]
                assert not status["connected"]
                await server.goes_on_with(1.0)
                with trainer(address, 3.0) as second:
                    _, other, _ = await server.until_answered_with(3.0)
                    assert other != epoch
                    status = await server.until_ready(True)
                    assert (status["state"], status["reason"]) == ("live", "")
                    second.post(send, 4.0)
                    await server.until_answered_with(4.0)
                    assert {value for value, *_ in server.seen} == {1.0, 3.0, 4.0}


@pytest.mark.timeout(120)
async def test_a_weight_server_is_killed_in_mid_update(address: str, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    pytest.importorskip("safetensors")
    from tests.cli._serving import serving

    async with FaultProxy(address) as proxy, contextlib.AsyncExitStack() as stack:
        proxy.plan = SLOW
        process = stack.enter_context(trainer(address, 1.0, dial="both"))
        server = await stack.enter_async_context(served(proxy.url, dial="both"))
        with serving(tmp_path / "one", "--listen", address) as first:
            _, epoch, version = await server.until_answered_with(1.0)
            await server.until_ready(True)
            process.post(send, 2.0)
            await in_the_middle(proxy)
            first.close()
            status = await server.until_ready(False)
            assert (status["state"], status["version"]) == ("stale", version)
            await server.goes_on_with(1.0)
        with serving(tmp_path / "two", "--listen", address):
            # The trainer has found the new weight server by itself, which has the trainer's last
            # version.
            assert await server.until_answered_with(2.0) == (2.0, epoch, version + 1)
            status = await server.until_ready(True)
            assert status["state"] == "live"
