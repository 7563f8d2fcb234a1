"""``/metrics``, ``/healthz`` and ``/readyz``: the answers to clients, and refused requests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import urllib.request
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

import aiosync
import aiosync.sync
from aiosync.metrics import Metrics, serve
from aiosync.server import WeightServer
from aiosync.serving import AdmissionGate, WeightFeed
from tests.metrics._tools import ask, get, total
from tests.schemes._harness import PATIENCE, twin, until
from tests.schemes._models import linear
from tests.server._tools import URL, send, trainer

ANY = "127.0.0.1:0"
asynchronous = pytest.mark.asyncio


@asynchronous
@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("GET /healthz HTTP/1.1\r\n\r\n", 200),
        ("GET /healthz?verbose HTTP/1.0\r\nHost: x\r\n\r\n", 200),
        ("GET /metrics HTTP/1.1\r\naccept: text/html\r\nAccept: */*\r\n\r\n", 200),
        ("GET /readyz HTTP/1.1\r\n\r\n", 200),
        ("GET / HTTP/1.1\r\n\r\n", 404),
        ("GET /metrics/ HTTP/1.1\r\n\r\n", 404),
        ("HEAD /metrics HTTP/1.1\r\n\r\n", 405),
        ("POST /metrics HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 405),
        ("GET /metrics\r\n\r\n", 400),
        ("GET  /metrics HTTP/1.1\r\n\r\n", 400),
        ("GET /metrics HTTP/2\r\n\r\n", 400),
        ("\r\n\r\n", 400),
        ("\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        ("GET /metrics HTTP/1.1\r\nX: " + "x" * 9000, 400),
        (
            "GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=x\r\n\r\n",
            500,
        ),
    ],
)
async def test_who_asks_is_answered(request_: str, status: int) -> None:
    async with serve(Metrics(), ANY) as url:
        answer = await ask(url, request_)
        assert answer.status == status
        assert answer.body
        assert answer.headers["connection"] == "close"
        assert (await get(url, "/healthz")).status == 200


@asynchronous
@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz", "/nothing"])
async def test_a_name_that_somebody_else_may_have_chosen_is_refused(path: str) -> None:
    """A page of another site could point its own name here, and read the answers with a script."""
    async with serve(Metrics(), ANY) as url:
        for host in (
            "evil.example",
            "evil.example:9464",
            "EVIL.example.",
            "127.0.0.1.evil.example",
        ):
            answer = await ask(url, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n")
            assert answer.status == 421
            assert "allow_hosts=, or --allow-host" in answer.body
            target = f"http://{host}{path}"
            asked = f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n"
            assert (await ask(url, asked)).status == 421


@asynchronous
@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.1:9464", "10.1.2.3", "[::1]", "[::1]:9464", "", "localhost"),
        *("LocalHost:80", "x.localhost", "aiosync-metrics:80", "given.example", "Given.Example.:1"),
        *(socket.gethostname(), f"{socket.getfqdn()}:9464"),
    ],
)
async def test_an_address_and_a_name_of_this_host_are_answered(host: str) -> None:
    async with serve(Metrics(), ANY, allow_hosts=["given.example"]) as url:
        asked = f"GET /healthz HTTP/1.1\r\nHOST:{host}\r\n\r\n"
        assert (await ask(url, asked)).status == 200


@asynchronous
async def test_a_slow_look_up_of_the_full_name_is_awaited_by_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def look_up() -> str:
        begun.set()
        go_on.wait(PATIENCE)
        return "node7.cluster.example"

    monkeypatch.setattr(socket, "getfqdn", look_up)
    asked = "GET /healthz HTTP/1.1\r\nHost: node7.cluster.example:9464\r\n\r\n"
    async with serve(Metrics(), ANY) as url:
        asking = [asyncio.ensure_future(ask(url, asked)) for _ in range(32)]
        await until(begun.is_set)
        await asyncio.sleep(0.3)
        # With one connection more the oldest has to end, while it waits for the look-up.
        asking.append(asyncio.ensure_future(ask(url, asked)))
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        go_on.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert [getattr(each, "status", None) for each in answers].count(200) == 32
        assert (await ask(url, asked)).status == 200


@asynchronous
@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://127.0.0.1:9464/healthz", 200),
        ("HTTP://localhost/healthz?verbose", 200),
        ("http://[::1]:80/metrics", 200),
        ("http://localhost", 404),
        ("http://localhost?x", 404),
        ("https://localhost/nothing", 404),
        ("http:///healthz", 400),
        ("ftp://localhost/healthz", 400),
        ("http://localhost@evil.example/healthz", 421),
    ],
)
async def test_an_absolute_target_is_understood(target: str, status: int) -> None:
    async with serve(Metrics(), ANY) as url:
        asked = f"GET {target} HTTP/1.1\r\nHost: evil.example\r\n\r\n"
        if not target.lower().startswith("http:/"):
            asked = asked.replace("evil.example", "localhost")
        assert (await ask(url, asked)).status == status


@asynchronous
async def test_two_names_are_none() -> None:
    async with serve(Metrics(), ANY) as url:
        asked = "GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n"
        assert (await ask(url, asked)).status == 400
    with pytest.raises(aiosync.ConfigError, match="allow_hosts must be a list of names"):
        serve(Metrics(), ANY, allow_hosts="localhost")


@asynchronous
async def test_strangers_are_bounded_and_end_with_the_server() -> None:
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        began = loop.time()
        async with serve(Metrics(), ANY) as url:
            host, _, port = url.removeprefix("http://").rpartition(":")
            links = []
            for _ in range(40):
                sock = stack.enter_context(socket.create_connection((host, int(port))))
                sock.setblocking(False)
                links.append(sock)
            ends = [asyncio.ensure_future(_end(loop, sock)) for sock in links]
            async with asyncio.timeout(30):
                while sum(each.done() for each in ends) < 8:
                    await asyncio.sleep(0.001)
            assert sum(each.done() for each in ends) == 8
            # Connections that send nothing do not keep others out.
            assert (await get(url, "/healthz")).status == 200
        async with asyncio.timeout(30):
            await asyncio.gather(*ends)
        assert loop.time() < began + 9, "it takes ten seconds until links are ended anyway"
        with pytest.raises(OSError, match="Connect"):
            await asyncio.open_connection(host, int(port))


async def _end(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        assert await loop.sock_recv(sock, 10) == b""


@asynchronous
async def test_ready_is_who_has_weights_and_every_worker() -> None:
    scheme = aiosync.SharedMemWeightSyncScheme(timeout=30)
    other = twin(scheme)
    scheme.init_on_sender(model=linear(), num_workers=1)
    gate, metrics = AdmissionGate(), Metrics(scheme)
    metrics.add(gate)
    async with scheme, serve(metrics, ANY) as url:
        answer = await get(url, "/readyz")
        assert answer.status == 503
        assert answer.body == f"not ready: {scheme!r}\nnot ready: {gate!r}\n"
        other = twin(scheme)
        other.init_on_receiver(model=linear())
        metrics.add(other)
        assert len((await get(url, "/readyz")).body.splitlines()) == 3
        async with other:
            await asyncio.gather(scheme.connect(), other.connect())
            assert (await get(url, "/readyz")).body == f"not ready: {gate!r}\n"
            async with gate.swap():
                pass
            assert (await get(url, "/readyz")).status == 200
        assert (await get(url, "/healthz")).status == 200


@asynchronous
@pytest.mark.parametrize("package", [aiosync, aiosync.sync], ids=["async", "blocking"])
async def test_of_a_closed_scheme_only_counters_are_shown(package: Any) -> None:
    scheme = package.SharedMemWeightSyncScheme(timeout=30)
    await asyncio.to_thread(scheme.init_on_sender, model=linear())
    async with serve(Metrics(scheme), ANY) as url:
        assert "aiosync_publish_lag_versions{" in (await get(url, "/metrics")).body
        assert (await get(url, "/readyz")).status == 503
        ended = await asyncio.to_thread(scheme.abort if package is aiosync else scheme.shutdown)
        assert ended is None
        text = (await get(url, "/metrics")).body
        assert (
            "aiosync_syncs_started_total{" in text and "aiosync_publish_lag_versions{" not in text
        )
        assert (await get(url, "/readyz")).status == 200


@asynchronous
@pytest.mark.parametrize("package", [aiosync, aiosync.sync], ids=["async", "blocking"])
async def test_a_scheme_that_was_closed_before_it_had_a_role_shows_nothing(package: Any) -> None:
    scheme, gate = package.TCPWeightSyncScheme(), AdmissionGate()
    metrics = Metrics(scheme, gate)
    async with serve(metrics, ANY) as url:
        shown = (await get(url, "/metrics")).body
        await asyncio.to_thread(scheme.abort if package is aiosync else scheme.shutdown)
        assert (await get(url, "/metrics")).body == shown
        assert (await get(url, "/readyz")).body == f"not ready: {gate!r}\n"


@asynchronous
async def test_a_feed_is_a_source_and_its_counters_outlive_its_runs() -> None:
    """A feed receives with copies of its scheme, so the feed itself is the source."""
    source = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0")
    source.init_on_sender(model=linear())
    feed = WeightFeed(aiosync.TCPWeightSyncScheme(source.address), model=linear(), max_pause=0.1)
    metrics = Metrics(feed, feed.gate)
    async with source, serve(metrics, ANY) as url:
        answer = await get(url, "/readyz")
        assert (answer.status, len(answer.body.splitlines())) == (503, 2)
        await source.connect()
        async with feed:
            await feed.ready.wait(timeout=PATIENCE)
            await source.send()
            await until(lambda: feed.version == source.version)
            await until(lambda: metrics.as_log().get("perf/weight_sync_s", 0.0) > 0)
            assert (await get(url, "/readyz")).status == 200
            text = (await get(url, "/metrics")).body
            version = f'aiosync_version{{model="policy",role="receiver"}} {source.version:.1f}'
            assert version in text
            assert "aiosync_publish_lag_versions{" in text and 'direction="received"' in text
            assert feed.stats().seconds["apply"] > 0
        counted = feed.stats().finished["ok"]
        assert counted >= 1
        async with feed:
            await source.send()
            await until(lambda: feed.stats().finished["ok"] > counted)
            await until(lambda: metrics.as_log().get("perf/weight_sync_s", 0.0) > 0)
    assert total(metrics, "aiosync_syncs_finished_total", role="receiver", outcome="ok") > counted


@asynchronous
async def test_a_weight_server_is_ready_for_whoever_brings_weights() -> None:
    async with WeightServer(URL) as server, serve(Metrics(server), ANY) as url:
        assert (await get(url, "/readyz")).status == 200
        assert 'aiosync_version{model="policy"' not in (await get(url, "/metrics")).body
        async with trainer(server) as source:
            await send(source, 1.0)
            text = (await get(url, "/metrics")).body
            assert f'aiosync_version{{model="policy",role="server"}} {source.version:.1f}' in text
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(server.url.rpartition(":")[2])
        )
        writer.write(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        writer.close()
        assert 'aiosync_refused_total{reason="' in (await get(url, "/metrics")).body


@asynchronous
async def test_an_address_that_is_taken_or_none_is_refused() -> None:
    async with serve(Metrics(), ANY) as url:
        for listen, text in (
            (url.removeprefix("http://"), "listens there"),
            ("9464", "^'9464' is not HOST:PORT"),
            ("tcp://127.0.0.1:0", "^'tcp://127.0.0.1:0' is not HOST:PORT"),
            ("nobody@127.0.0.1:0", "^'127.0.0.1:0' is not HOST:PORT"),
            ("", "^'' is not HOST:PORT"),
        ):
            with pytest.raises(aiosync.ConfigError, match=text):
                async with serve(Metrics(), listen):
                    pytest.fail("it listens")


@asynchronous
# After 2 turns asyncio drops the connection, which the garbage collector then ends.
@pytest.mark.parametrize("turns", [1, 3])
async def test_a_connection_that_comes_as_it_closes_ends_with_it(turns: int) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        async with serve(Metrics(), ANY) as url:
            host, _, port = url.removeprefix("http://").rpartition(":")
            sock = stack.enter_context(socket.create_connection((host, int(port))))
            sock.setblocking(False)
            for _ in range(turns):
                await asyncio.sleep(0)
        # This is half of the time after which links are ended anyway.
        async with asyncio.timeout(5):
            await _end(loop, sock)


def test_blocking_code_serves_on_the_thread_of_its_schemes() -> None:
    scheme = aiosync.sync.SharedMemWeightSyncScheme(timeout=30)
    scheme.init_on_sender(model=linear())
    with scheme, serve(Metrics(scheme), ANY) as url:
        scheme.connect()
        scheme.send()
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            assert b'aiosync_version{model="policy",role="sender"} ' in answer.read()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/metrics", timeout=30)


@asynchronous
async def test_blocking_use_on_a_loop_says_what_to_write() -> None:
    with pytest.raises(aiosync.LocalProtocolError, match="async with aiosync.metrics.serve"):
        with serve(Metrics(), ANY):
            pytest.fail("it serves")


@asynchronous
async def test_a_scheme_is_shown_once_it_has_a_role() -> None:
    scheme = aiosync.SharedMemWeightSyncScheme()
    async with scheme, serve(Metrics(scheme), ANY) as url:
        assert "aiosync_version{" not in (await get(url, "/metrics")).body
        assert (await get(url, "/readyz")).status == 503
        scheme.init_on_sender(model=linear())
        assert "aiosync_version{" in (await get(url, "/metrics")).body
