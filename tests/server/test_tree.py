"""Trees of servers: a server with a bound on its links sends workers on to those that follow it."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import aiosync
import aiosync.sync
from aiosync.errors import ConfigError
from aiosync.server import WeightClient, WeightServer
from aiosync.transports import Credentials, TCPTransport
from aiosync.wire import Hello, Refuse, Welcome, encode_frame
from tests._certificates import certificates
from tests.schemes._harness import PATIENCE, until
from tests.schemes._models import fill, holds, linear
from tests.server._tools import URL, described, refused, send, trainer, worker
from tests.support.waiting import free_address

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


def relay(upstream: WeightServer | str, url: str = URL, **options: Any) -> WeightServer:
    """Return a server of the model ``"policy"`` that follows another one."""
    followed = upstream if isinstance(upstream, str) else upstream.url
    return WeightServer(url, model_ids=["policy"], upstream=followed, **options)


def links(server: WeightServer) -> int:
    return len(described(server)["workers"])


FOLLOWING = Hello("receiver", "policy", 1, session=b"s" * 16, follows=True)


@contextlib.asynccontextmanager
async def served(
    fanout: int | None, url: str = URL, tls: Any = (None, None), **options: Any
) -> AsyncIterator[tuple[WeightServer, Any]]:
    """A server with this fan-out, and a trainer that has pushed a version to it.

    ``tls`` is that of the server and that of the trainer.
    """
    given = {"token": options.get("token"), "tls": tls[1]}
    async with WeightServer(url, fanout=fanout, tls=tls[0], **options) as root:
        async with trainer(root.url.replace("0.0.0.0", "127.0.0.1"), **given) as source:
            await send(source, 1.0)
            yield root, source


async def joined(root: WeightServer, count: int) -> None:
    """Wait until so many workers and relays have a link to a server."""
    await until(lambda: links(root) == count)


@contextlib.asynccontextmanager
async def claimed(
    root: WeightServer, serves: str, *, has: bool = True, **options: Any
) -> AsyncIterator[None]:
    """A link of a relay that says that it serves at an address, and has the version there is."""
    link = await TCPTransport.connect(root.url, **options)
    try:
        hello = Hello("receiver", "policy", os.getpid(), strategy="any", serves=serves)
        if has:
            there = described(root)
            hello = replace(hello, epoch=there["epoch"], version=there["version"])
        await link.send(hello)
        assert isinstance((await link.recv()).message, Welcome)
        yield
    finally:
        await link.aclose()


# -- the tree ------------------------------------------------------------------------------------


async def test_workers_are_sent_on_to_relays() -> None:
    async with contextlib.AsyncExitStack() as stack:
        root, source = await stack.enter_async_context(served(2))
        relays = [await stack.enter_async_context(relay(root)) for _ in range(2)]
        await joined(root, 2)
        workers = [await stack.enter_async_context(worker(root)) for _ in range(8)]
        before = root.stats()["policy"].wire_nbytes
        report = await send(source, 2.0)
        for each in workers:
            await each.wait_for_version(report.version, timeout=PATIENCE)
            assert holds(each, 2.0)
        nbytes = root.stats()["policy"].nbytes // 2
        assert root.stats()["policy"].wire_nbytes - before <= 2 * nbytes
        assert links(root) == 2
        assert [links(each) for each in relays] == [4, 4]


async def test_workers_that_come_at_once_are_sent_on() -> None:
    async with contextlib.AsyncExitStack() as stack:
        root, source = await stack.enter_async_context(served(2))
        relays = [await stack.enter_async_context(relay(root)) for _ in range(2)]
        await joined(root, 2)
        workers = [worker(root) for _ in range(12)]
        found = await asyncio.gather(*map(stack.enter_async_context, workers))
        report = await send(source, 2.0)
        for each in found:
            await each.wait_for_version(report.version, timeout=PATIENCE)
        assert links(root) == 2
        assert [links(each) for each in relays] == [6, 6]


async def test_servers_form_a_tree_of_several_levels() -> None:
    async with contextlib.AsyncExitStack() as stack:
        root, source = await stack.enter_async_context(served(2))
        relays = []
        for number in range(6):
            relays.append(await stack.enter_async_context(relay(root, fanout=2)))
            await until(lambda number=number: links(root) + sum(map(links, relays)) == number + 1)
        assert links(root) == 2
        assert [links(each) for each in relays] == [2, 2, 0, 0, 0, 0]
        workers = [await stack.enter_async_context(worker(root)) for _ in range(8)]
        assert [links(each) for each in relays[:2]] == [2, 2]
        assert sum(links(each) for each in relays[2:]) == 8
        report = await send(source, 2.0)
        for each in workers:
            await each.wait_for_version(report.version, timeout=PATIENCE)


async def test_a_server_without_relays_admits_everybody() -> None:
    async with contextlib.AsyncExitStack() as stack:
        root, _ = await stack.enter_async_context(served(1))
        for _ in range(3):
            await stack.enter_async_context(worker(root))
        assert links(root) == 3


async def test_a_relay_has_a_place_although_workers_came_first() -> None:
    async with contextlib.AsyncExitStack() as stack:
        root, _ = await stack.enter_async_context(served(1))
        for _ in range(2):
            await stack.enter_async_context(worker(root))
        below = await stack.enter_async_context(relay(root))
        await joined(root, 3)
        late = await stack.enter_async_context(worker(root))
        assert holds(late, 1.0)
        assert (links(root), links(below)) == (3, 1)


async def test_only_subscribers_are_sent_on() -> None:
    async with contextlib.AsyncExitStack() as stack:
        root, source = await stack.enter_async_context(served(1))
        below = await stack.enter_async_context(relay(root))
        await joined(root, 1)
        asking = await stack.enter_async_context(worker(root, subscribe=False, initial=False))
        assert await asking.pull() == source.version
        assert (await WeightClient(root.url).pull("policy")).version == source.version
        assert "models" in await WeightClient(root.url).status()
        assert links(below) == 0


@pytest.mark.parametrize("hidden", ["unix", "wildcard", "advertised elsewhere"])
async def test_a_relay_that_others_cannot_reach_is_not_named(hidden: str, tmp_path: Path) -> None:
    token = "a" * 32
    url = {"unix": f"unix://{tmp_path / 'relay'}", "wildcard": "tcp://0.0.0.0:0"}.get(hidden, URL)
    async with contextlib.AsyncExitStack() as stack:
        root, _ = await stack.enter_async_context(served(1))
        options: dict[str, Any] = {"token": token} if hidden == "wildcard" else {}
        if hidden == "advertised elsewhere":
            options["advertise"] = free_address()
        below = await stack.enter_async_context(relay(root, url, **options))
        await joined(root, 1)
        last = await stack.enter_async_context(worker(root))
        assert holds(last, 1.0)
        assert links(below) == 0


async def test_an_advertised_address_is_named() -> None:
    async with contextlib.AsyncExitStack() as stack:
        root, _ = await stack.enter_async_context(served(1, token="a" * 32))
        address = free_address()
        port = address.rpartition(":")[2]
        options = {"token": "a" * 32, "upstream_token": "a" * 32, "advertise": address}
        below = await stack.enter_async_context(relay(root, f"tcp://0.0.0.0:{port}", **options))
        await joined(root, 1)
        await stack.enter_async_context(worker(root, token="a" * 32))
        assert (links(root), links(below)) == (1, 1)


async def test_a_server_for_other_hosts_names_no_loopback_address() -> None:
    token = "a" * 32
    async with contextlib.AsyncExitStack() as stack:
        root, _ = await stack.enter_async_context(served(1, "tcp://0.0.0.0:0", token=token))
        near = root.url.replace("0.0.0.0", "127.0.0.1")
        below = await stack.enter_async_context(relay(near, token=token, upstream_token=token))
        await joined(root, 1)
        await stack.enter_async_context(worker(near, token=token))
        assert (links(root), links(below)) == (2, 0)


async def test_a_worker_over_a_unix_socket_stays_there(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        root, _ = await stack.enter_async_context(served(1, f"unix://{tmp_path / 'root'}"))
        below = await stack.enter_async_context(relay(root))
        await joined(root, 1)
        last = await stack.enter_async_context(worker(root))
        assert holds(last, 1.0)
        assert (links(root), links(below)) == (2, 0)


async def test_workers_are_sent_on_with_tls_and_a_token() -> None:
    server, client = certificates().listening, certificates().dialling
    token = "a" * 32
    async with contextlib.AsyncExitStack() as stack:
        tls = server, client
        root, _ = await stack.enter_async_context(served(1, tls=tls, token=token))
        below = relay(root, token=token, tls=server, upstream_token=token, upstream_tls=client)
        await stack.enter_async_context(below)
        await joined(root, 1)
        last = await stack.enter_async_context(worker(root, token=token, tls=client))
        assert holds(last, 1.0)
        assert (links(root), links(below)) == (1, 1)


async def test_who_may_only_pull_is_not_named() -> None:
    """It could give others whatever it likes."""
    token, pull_token = "a" * 32, "b" * 32
    async with contextlib.AsyncExitStack() as stack:
        serving = served(1, token=token, pull_token=pull_token)
        root, _ = await stack.enter_async_context(serving)
        credentials = Credentials(token=pull_token)
        claim = claimed(root, free_address(), credentials=credentials)
        await stack.enter_async_context(claim)
        last = await stack.enter_async_context(worker(root, token=pull_token))
        assert last.reconnects == 0
        assert root.status()["ended"] == {}


# -- relays that are gone, or lie ------------------------------------------------------------------


async def test_a_worker_that_no_relay_admits_is_admitted_by_the_root() -> None:
    async with contextlib.AsyncExitStack() as stack:
        root, _ = await stack.enter_async_context(served(2))
        for _ in range(2):
            await stack.enter_async_context(claimed(root, free_address()))
        began = asyncio.get_running_loop().time()
        last = await stack.enter_async_context(worker(root, timeout=5.0))
        assert holds(last, 1.0)
        assert links(root) == 3
        assert asyncio.get_running_loop().time() - began < 3.5


@pytest.mark.slow
async def test_a_relay_that_hangs_leaves_time_for_the_root() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        async with contextlib.AsyncExitStack() as stack:
            root, _ = await stack.enter_async_context(served(1))
            await stack.enter_async_context(claimed(root, address))
            last = await stack.enter_async_context(worker(root, timeout=4.0))
            assert holds(last, 1.0)
            assert links(root) == 2


async def test_relays_that_send_on_in_a_circle_end_the_attempt() -> None:
    tries = []

    async def send_on(link: TCPTransport, to: str) -> None:
        hello = (await link.recv()).message
        assert isinstance(hello, Hello)
        tries.append(hello.follows)
        await link.send(Refuse("ConnectError", "full", (to,)))
        await link.aclose()

    async with contextlib.AsyncExitStack() as stack:
        root, _ = await stack.enter_async_context(served(1))
        addresses = [free_address() for _ in range(2)]
        for here, there in zip(addresses, reversed(addresses), strict=True):
            listening = await _listen(here, lambda link, there=there: send_on(link, there))
            stack.push_async_callback(_stop, listening)
        await stack.enter_async_context(claimed(root, addresses[0]))
        last = await stack.enter_async_context(worker(root, timeout=5.0))
        assert holds(last, 1.0)
        assert tries == [True, True]
        assert links(root) == 2


async def _listen(url: str, serve: Any) -> Any:
    host, port = url.removeprefix("tcp://").split(":")
    sock = socket.create_server((host, int(port)))
    sock.setblocking(False)
    loop = asyncio.get_running_loop()

    async def run() -> None:
        while True:
            peer, _ = await loop.sock_accept(sock)
            await serve(await TCPTransport.accept(peer))

    return sock, asyncio.ensure_future(run())


async def _stop(listening: Any) -> None:
    sock, task = listening
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    sock.close()


# In small letters this letter has a byte more, and so has the address that is passed on.
GROWING = "\u0130" * 120


@pytest.mark.parametrize("address", ["tcp://[nowhere:1", f"tcp://{GROWING}:1"])
async def test_illegal_addresses_of_relays_are_refused(address: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        root, _ = await stack.enter_async_context(served(1))
        link = await TCPTransport.connect(root.url)
        hello = Hello("receiver", "policy", 1, strategy="any", serves=address)
        await link.send(hello)
        answer = (await link.recv()).message
        assert isinstance(answer, Refuse)
        assert (answer.error_type, answer.elsewhere) == ("ConfigError", ())
        await link.aclose()
        await stack.enter_async_context(worker(root))
        await stack.enter_async_context(worker(root))


async def test_a_server_that_names_an_illegal_address_is_not_followed() -> None:
    async def send_on(link: TCPTransport) -> None:
        await link.recv()
        await link.send(Refuse("ConnectError", "full", ("tcp://nowhere:70000",)))
        await link.aclose()

    url = free_address()
    listening = await _listen(url, send_on)
    try:
        await refused(worker(url, timeout=0.5), Exception, "illegal address")
    finally:
        await _stop(listening)


async def test_who_has_not_proved_the_token_sends_nobody_on() -> None:
    dialled = []

    async def answer_plainly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_frame(Refuse("SentOn", "full", (url,))))
        await reader.read()
        writer.close()

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.append(True)
        writer.close()

    async with await asyncio.start_server(note, "127.0.0.1", 0) as lure:
        url = f"tcp://127.0.0.1:{lure.sockets[0].getsockname()[1]}"
        async with await asyncio.start_server(answer_plainly, "127.0.0.1", 0) as stranger:
            address = f"tcp://127.0.0.1:{stranger.sockets[0].getsockname()[1]}"
            joining = worker(address, token="a" * 32, timeout=0.5)
            await refused(joining, aiosync.ConnectTimeout, "full")
    assert dialled == []


# -- healing ---------------------------------------------------------------------------------------


def run_relay(upstream: str, conn: Connection) -> None:
    """Run a relay in a process of its own, until it is killed."""

    async def main() -> None:
        async with relay(upstream) as server:
            conn.send(server.url)
            await server.wait_closed()

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_workers_of_a_relay_that_is_killed_go_on_at_another_one() -> None:
    context = multiprocessing.get_context("spawn")
    async with contextlib.AsyncExitStack() as stack:
        root, source = await stack.enter_async_context(served(2))
        ours, theirs = context.Pipe()
        process = context.Process(target=run_relay, args=(root.url, theirs), daemon=True)
        process.start()
        theirs.close()
        stack.callback(process.join)
        stack.callback(process.kill)
        assert await asyncio.to_thread(ours.poll, 60), "the relay did not start"
        ours.recv()
        await joined(root, 1)
        other = await stack.enter_async_context(relay(root))
        await joined(root, 2)
        workers = [await stack.enter_async_context(worker(root)) for _ in range(6)]
        assert links(other) == 3
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        loop = asyncio.get_running_loop()
        killed = loop.time()
        report = await send(source, 2.0)
        for each in workers:
            await each.wait_for_version(report.version, timeout=PATIENCE)
            assert holds(each, 2.0)
        assert loop.time() - killed < 3.0
        assert links(root) <= 2
        assert links(root) + links(other) == 1 + 6
        assert sum(each.reconnects for each in workers) == 3


async def test_a_server_below_a_relay_that_ends_goes_on_elsewhere() -> None:
    async with contextlib.AsyncExitStack() as stack:
        root, source = await stack.enter_async_context(served(1))
        middle = relay(root, fanout=1)
        await stack.enter_async_context(middle)
        await joined(root, 1)
        leaf = await stack.enter_async_context(relay(root, fanout=1))
        await joined(middle, 1)
        below = await stack.enter_async_context(worker(root))
        assert (links(root), links(middle), links(leaf)) == (1, 1, 1)
        await middle.aclose()
        report = await send(source, 2.0)
        await below.wait_for_version(report.version, timeout=PATIENCE)
        assert (links(root), links(leaf)) == (1, 1)
        assert below.reconnects == 0


async def test_a_relay_that_comes_again_keeps_its_place() -> None:
    """The root still has its old link, which has ended unseen."""
    async with contextlib.AsyncExitStack() as stack:
        root, _ = await stack.enter_async_context(served(1))
        session = os.urandom(16)
        for _ in range(2):
            link = await TCPTransport.connect(root.url)
            stack.push_async_callback(link.aclose)
            serves, there = "tcp://127.0.0.1:9", described(root)
            hello = Hello("receiver", "policy", 1, strategy="any", session=session, serves=serves)
            hello = replace(hello, epoch=there["epoch"], version=there["version"])
            await link.send(hello)
            assert isinstance((await link.recv()).message, Welcome)
        link = await TCPTransport.connect(root.url)
        stack.push_async_callback(link.aclose)
        await link.send(FOLLOWING)
        answer = (await link.recv()).message
        assert isinstance(answer, Refuse)
        assert answer.elsewhere == ("tcp://127.0.0.1:9",)


async def test_who_does_not_say_that_it_follows_is_admitted() -> None:
    """Workers of older releases, and other implementations."""
    async with contextlib.AsyncExitStack() as stack:
        root, _ = await stack.enter_async_context(served(1))
        await stack.enter_async_context(claimed(root, free_address()))
        for follows, answer in ((False, Welcome), (True, Refuse)):
            link = await TCPTransport.connect(root.url)
            stack.push_async_callback(link.aclose)
            await link.send(replace(FOLLOWING, follows=follows, session=os.urandom(16)))
            assert isinstance((await link.recv()).message, answer)


# -- circles ---------------------------------------------------------------------------------------


async def test_servers_never_stand_in_a_circle() -> None:
    """A relay may go on at a standby that follows it. When the root is back, all are there."""
    urls = [free_address() for _ in range(3)]
    root, standby = urls[0], urls[1]
    first = WeightServer(root, fanout=1)
    async with contextlib.AsyncExitStack() as stack:
        await first.start()
        below: Any = [root, standby]
        middle = WeightServer(urls[2], model_ids=["policy"], upstream=below)
        await stack.enter_async_context(middle)
        source = await stack.enter_async_context(trainer(root, reconnect=None))
        await send(source, 1.0)
        await until(lambda: described(middle)["version"] == 1)
        second = await stack.enter_async_context(relay(root, standby, fanout=1))
        await until(lambda: described(second)["version"] == 1)
        assert links(middle) == 1  # the root has sent the standby on
        last = await stack.enter_async_context(worker(below, reconnect=None))
        await first.aclose()
        await asyncio.sleep(1.0)
        await stack.enter_async_context(WeightServer(root, fanout=1))
        report = await _send_until_reached(source, 2.0)
        await last.wait_for_version(report.version, timeout=PATIENCE)
        for each in (middle, second):
            await until(lambda each=each: described(each)["version"] == report.version)


async def _send_until_reached(source: Any, value: float) -> Any:
    """Send until the server, to which the link was lost, has the version."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(aiosync.PartialSyncError):
                return await send(source, value)
            await asyncio.sleep(0.1)


async def test_a_server_that_dials_itself_goes_on_at_the_next_address() -> None:
    root = free_address()
    own = free_address()
    options: Any = {"token": "a" * 32, "upstream_token": "a" * 32}
    everywhere = own.replace("127.0.0.1", "0.0.0.0")
    async with WeightServer(
        everywhere, model_ids=["policy"], upstream=[root, own], **options
    ) as below:
        await asyncio.sleep(0.5)
        async with served(1, root, token="a" * 32):
            await until(lambda: described(below)["version"] == 1)


@pytest.mark.parametrize("fanout", [None, 99])
async def test_a_link_that_joins_is_compared_with_no_other_one(
    fanout: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    def is_same(one: TCPTransport, other: object) -> bool:
        compared.append(other)
        return one is other

    monkeypatch.setattr(TCPTransport, "__eq__", is_same)
    async with contextlib.AsyncExitStack() as stack:
        root, _ = await stack.enter_async_context(served(fanout))
        for _ in range(9):
            await stack.enter_async_context(claimed(root, free_address()))
        assert not compared


async def test_a_list_with_the_own_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="would follow itself"):
        WeightServer(
            URL, model_ids=["policy"], upstream=["tcp://a:1", "tcp://b:2"], advertise="tcp://b:2"
        )


async def test_workers_are_not_sent_to_a_relay_without_weights() -> None:
    """A server at the named address would admit the worker, and have nothing for it."""
    async with served(1) as (root, _), WeightServer(URL) as empty:
        async with claimed(root, empty.url, has=False), worker(root, timeout=PATIENCE) as each:
            assert holds(each, 1.0)
            assert links(root) == 2


async def test_an_error_elsewhere_does_not_keep_a_worker_from_a_root_that_sent_it_on() -> None:
    async with served(1) as (root, _), claimed(root, free_address()):
        async with WeightServer(URL, model_ids=["value"]) as other:
            for urls in ([root.url, other.url], [other.url, root.url]):
                async with worker(urls, timeout=PATIENCE) as each:
                    assert holds(each, 1.0)


@pytest.mark.parametrize("host", ["0", "0.0", "0.0.0.0", "[::]", "[::0]", "[::ffff:0.0.0.0]"])
async def test_a_wildcard_is_advertised_in_no_notation(host: str) -> None:
    with pytest.raises(ConfigError, match="advertise="):
        WeightServer(
            URL, model_ids=["policy"], upstream="tcp://a:1", advertise=f"tcp://{host}:7000"
        )


# -- the workers behind a server -------------------------------------------------------------------


async def test_a_trainer_sees_the_workers_behind_its_server() -> None:
    async with WeightServer(URL) as root, trainer(root) as source:
        relay = WeightServer(URL, model_ids=["policy"], upstream=root.url)
        await send(source, 1.0)

        def seen() -> tuple[int, int]:
            (server,) = source.stats().workers
            return server.behind, server.oldest

        async with relay, worker(root) as first, worker(relay):
            await until(lambda: seen() == (2, 1))
            report = await send(source, 2.0)
            await until(lambda: seen() == (2, report.version))
            await first.aclose()
            await until(lambda: seen() == (1, report.version))
        await until(lambda: seen() == (0, 0))


# -- the workers behind a relay --------------------------------------------------------------------


async def test_a_server_shows_the_workers_behind_its_relays() -> None:
    async with contextlib.AsyncExitStack() as stack:
        root, source = await stack.enter_async_context(served(1))
        middle = await stack.enter_async_context(relay(root, fanout=1))
        await joined(root, 1)
        await stack.enter_async_context(relay(root))
        await joined(middle, 1)
        workers = [await stack.enter_async_context(worker(root)) for _ in range(3)]
        slow = await stack.enter_async_context(worker(root, apply="manual"))

        def behind(server: WeightServer) -> list[Any]:
            return [each["behind"] for each in described(server)["workers"]]

        await until(lambda: behind(root) == [[4, 1]])
        assert described(root)["workers"][0]["serves"] == middle.url
        (shown,) = root.stats()["policy"].workers
        assert (shown.behind, shown.oldest) == (4, 1)
        # One of the workers applies nothing yet.
        report = await send(source, 2.0)
        for each in workers:
            await each.wait_for_version(report.version, timeout=PATIENCE)
        assert behind(root) == behind(middle) == [[4, 1]]
        slow.apply_pending()
        await until(lambda: behind(root) == [[4, report.version]])
        await workers.pop().aclose()
        await until(lambda: behind(root) == [[3, report.version]])


# -- without await, and options --------------------------------------------------------------------


async def test_blocking_workers_are_sent_on() -> None:
    async with contextlib.AsyncExitStack() as stack:
        root, source = await stack.enter_async_context(served(1))
        below = await stack.enter_async_context(relay(root))
        await joined(root, 1)
        go = threading.Event()

        def work() -> bool:
            model = linear()
            fill(model, 0.0)
            with aiosync.sync.TCPWeightSyncScheme(root.url, dial="both") as scheme:
                scheme.init_on_receiver("policy", model=model)
                scheme.connect()
                go.set()
                scheme.wait_for_version(source.version + 1, timeout=PATIENCE)
                with scheme.reading():
                    return bool((model.weight == 2.0).all())

        working = asyncio.ensure_future(asyncio.to_thread(work))
        await until(go.is_set)
        assert (links(root), links(below)) == (1, 1)
        await send(source, 2.0)
        assert await working


async def test_options_that_make_no_tree_are_refused() -> None:
    with pytest.raises(ConfigError, match="fanout must be"):
        WeightServer(URL, fanout=0)
    with pytest.raises(ConfigError, match="need an upstream="):
        WeightServer(URL, advertise="tcp://127.0.0.1:1")
    for wrong in (
        "unix:///tmp/relay",
        "tcp://0.0.0.0:7000",
        "tcp://[::]:7",
        f"tcp://{'a' * 300}:1",
        f"tcp://{GROWING}:1",
    ):
        with pytest.raises(ConfigError, match="advertise="):
            relay("tcp://127.0.0.1:1", advertise=wrong)
    with pytest.raises(ConfigError, match="no port"):
        relay("tcp://127.0.0.1:1", advertise="tcp://127.0.0.1:0")
