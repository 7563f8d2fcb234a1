"""``aiosync top`` and its page: questions, output, and the treatment of hostile names."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import importlib.resources
import io
import json
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("typer")

from rich.console import Console

import aiosync
import aiosync.cli
from aiosync.cli.status import STATES, Look, draw, facts, look_again, make_table, serve_page
from aiosync.events import SyncStats, WorkerStats
from aiosync.server import WeightClient, WeightServer
from aiosync.transports.tcp import TCPTransport
from aiosync.wire import Hello, Refuse, Status
from tests.cli._serving import (
    SECRET,
    Command,
    Terminal,
    refused,
    serving,
    write_weights,
)
from tests.schemes import _harness as harness
from tests.schemes._harness import PATIENCE, until
from tests.schemes._models import linear
from tests.server._tools import URL, send, trainer, worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.one_loop

HOSTILE = "<img src=x onerror=alert(1)>[red]\x1b[2J&amp;"
SIXTEEN = SyncStats(
    *("sender", "policy", "tcp", 5, 1234, 1234, 134, 0.25, 1234, {"ok": 1234}),
    wire_nbytes=10**9,
    seconds={"wire": 0.5, "pause": 0.0003},
    workers=tuple(
        WorkerStats(idx, 4_000_000 + idx, 1234 - lag, lag, state, float(lag))
        for idx in range(16)
        for lag, state in [
            (134, "lagging") if idx == 5 else (3, "lost") if idx == 11 else (0, "ready")
        ]
    ),
)


def drawn(look: Look, width: int = 120, height: int | None = None, **options: Any) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, **options).print(draw("tcp://host:1", look, height))
    return stream.getvalue()


def main(*args: str) -> asyncio.Task[int]:
    return asyncio.ensure_future(asyncio.to_thread(aiosync.cli.main, args))


# -- questions and answers --------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("cls", "transport"),
    [
        (aiosync.TCPWeightSyncScheme, "tcp"),
        (aiosync.DistributedWeightSyncScheme, "distributed"),
    ],
)
async def test_a_trainer_that_listens_is_asked(cls: Any, transport: str) -> None:
    scheme = cls(address=URL, timeout=PATIENCE, token=SECRET)
    async with harness.here(scheme, linear(), sender={"model": linear()}) as (source, _):
        client = WeightClient(source.address, token=SECRET)
        assert (await source.send()).acked == {0}
        # Through shared memory the worker may take the version only after send() has returned.
        await until(lambda: source.worker_versions == {0: 2})
        (told,) = await client.stats()
        assert (told.role, told.model, told.transport) == ("sender", "policy", transport)
        assert (told.epoch, told.version, told.newest_version) == (source.epoch, 2, 2)
        (row,) = told.workers
        assert (row.index, row.pid, row.version, row.state) == (0, os.getpid(), 2, "ready")
        with pytest.raises(aiosync.AuthError):
            await WeightClient(source.address, token="wrong").stats()
        with pytest.raises(aiosync.ConnectError, match="`aiosync top` shows it"):
            await client.status()
        # A client that only asked is no worker.
        assert (await source.send()).acked == {0}
        (told,) = await client.stats()
        assert (told.version, len(told.workers), told.reconnects) == (3, 1, 0)


@pytest.mark.asyncio
async def test_whoever_may_pull_from_a_server_may_look() -> None:
    pull_token = "another secret, for the workers"
    async with (
        WeightServer(URL, token=SECRET, pull_token=pull_token) as server,
        trainer(server, token=SECRET) as source,
        trainer(server, HOSTILE, token=SECRET),
        worker(server, token=pull_token, initial=False) as scheme,
    ):
        await send(source, 1.0)
        await scheme.wait_for_version(1)
        await until(lambda: server.status()["models"][1]["workers"][0]["version"] == 1)
        told = {
            each.model: each for each in await WeightClient(server.url, token=pull_token).stats()
        }
        assert set(told) == {HOSTILE, "policy"}
        assert {each.role for each in told.values()} == {"server"}
        assert (told["policy"].version, told[HOSTILE].version) == (1, 0)
        (row,) = told["policy"].workers
        assert (row.version, row.lag, row.state) == (1, 0, "ready")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Status({"aiosync": "0.0.9", "models": []}), "RemoteProtocolError: illegal statistics"),
        (Refuse("RemoteProtocolError", "expected the Hello of"), "request: expected the Hello of"),
        (Status({"stats": [{"role": "sender"}]}), "RemoteProtocolError: illegal statistics"),
        (Status({"stats": 1}), "RemoteProtocolError: illegal statistics"),
    ],
)
async def test_other_releases_are_one_line(
    answer: Any, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        port = listening.getsockname()[1]
        asked = asyncio.ensure_future(
            asyncio.to_thread(refused, capsys, "top", f"tcp://127.0.0.1:{port}")
        )
        sock, _ = await asyncio.get_running_loop().sock_accept(listening)
        async with await TCPTransport.accept(sock) as link:
            hello = (await link.recv()).message
            assert isinstance(hello, Hello) and hello.role == "status"
            await link.send(answer)
            status, shown = await asked
    assert (status, text in shown) == (1, True), shown


@pytest.mark.asyncio
async def test_who_has_pulled_has_left_and_is_not_lost() -> None:
    async with WeightServer(URL) as server, trainer(server) as source:
        await send(source, 1.0)
        client = WeightClient(server.url)
        for _ in range(2):
            await client.pull()
            await until(lambda: not server.status()["models"][0]["workers"])
            assert [each.state for each in (await client.stats())[0].workers] == ["left"]


# -- output -----------------------------------------------------------------------------------


def test_a_stuck_and_a_lost_worker_are_seen_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    lines = drawn(Look(0.0, [SIXTEEN])).splitlines()
    assert lines[0] == "tcp://host:1: 16 workers, 14 ready, 1 lagging, 1 lost"
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]
    assert rows[0] == ["policy", "1234", "134", "-", "-", "0 s", "0.3 ms"]
    assert rows[1] == ["11", "LOST", "1231", "3", "3 s", "4000011"]
    assert rows[2] == ["5", "LAGGING", "1100", "134", "2 min", "4000005"]
    assert [row[:2] for row in rows[3:]] == [
        [str(idx), "ready"] for idx in range(16) if idx not in (5, 11)
    ]
    colours = drawn(Look(0.0, [SIXTEEN]), force_terminal=True, color_system="standard")
    for style, text in (("1;31", "LOST"), ("1;33", "LAGGING"), ("32", "ready")):
        assert re.search(rf"\x1b\[{style}m *{text}", colours), colours


@pytest.mark.parametrize("width", [60, 120])
def test_a_narrow_terminal_cuts_no_number(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    other = SyncStats(
        "server", "a-model-with-a-name-that-is-long", "tcp", 5, 12, workers=SIXTEEN.workers
    )
    before = Look(0.0, [SyncStats("sender", "policy", "tcp", 5, 34)])
    look = Look(10.0, [SIXTEEN, other], before)
    shown = drawn(look, width)
    assert max(map(len, shown.splitlines())) <= width
    assert not re.search("…|\\.\\.\\.", shown)
    table = make_table([{"model": "policy", "strategy": "any"}], narrow_without=("strategy",))
    assert (len(table.columns) == 2) is (width >= 80)
    for number in ("1234", "120.0/s", "100.0 MB/s", "0.3 ms", "4000011", "LAGGING"):
        assert re.search(rf"(^|[│ ]){re.escape(number)} *(│|$)", shown, re.M), (number, shown)


def test_a_low_terminal_shows_the_worst_and_counts_the_rest() -> None:
    lines = drawn(Look(0.0, [SIXTEEN]), height=20).splitlines()
    assert len(lines) <= 20
    assert [re.search("LOST|LAGGING|$", line)[0] for line in lines if "5" in line or "11" in line]
    assert "LOST" in "".join(lines) and "LAGGING" in "".join(lines)
    assert lines[-1] == "and 9 ready"


def test_who_has_left_is_no_worker_any_more() -> None:
    two = tuple(WorkerStats(idx, 1, 1, 0, state) for idx, state in enumerate(("ready", "left")))
    lines = drawn(Look(0.0, [SyncStats("server", "policy", "tcp", 5, 1, workers=two)])).splitlines()
    assert lines[0] == "tcp://host:1: 1 worker, 1 ready, 1 left"


def test_workers_behind_a_server_are_shown_beside_it() -> None:
    found = (WorkerStats(0, 1, 13, 0, "ready"), WorkerStats(1, 2, 13, 0, "ready", 0.0, 64, 12))
    shown = drawn(Look(0.0, [SyncStats("server", "policy", "tcp", 5, 13, workers=found)]))
    assert "64 workers, oldest version 12" in shown
    assert "behind" in shown
    assert "behind" not in drawn(Look(0.0, [SIXTEEN]))


def test_names_are_text() -> None:
    hostile = SyncStats("sender", HOSTILE, HOSTILE, workers=SIXTEEN.workers)
    for number in (1, 2):
        shown = drawn(Look(0.0, [hostile] * number), force_terminal=True)
        assert "[red]" in shown
        assert "\x1b[2J" not in shown


def test_rates_are_of_two_answers_of_one_epoch() -> None:
    old = SyncStats("sender", "policy", "tcp", 5, 1214, wire_nbytes=10**9 - 10**6)
    look = Look(12.0, [SIXTEEN], Look(2.0, [old]))
    assert (facts(look, SIXTEEN)["rate"], facts(look, SIXTEEN)["bytes/s"]) == (
        "2.0/s",
        "100.0 kB/s",
    )
    for other in (
        SyncStats("sender", "policy", "tcp", 6, 1214),
        SyncStats("sender", "other", "tcp", 5, 1214),
        SyncStats("receiver", "policy", "tcp", 5, 1214),
    ):
        look = Look(12.0, [SIXTEEN], Look(2.0, [other]))
        assert facts(look, SIXTEEN)["rate"] == "-"


@pytest.mark.asyncio
async def test_who_does_not_answer_is_asked_again() -> None:
    answers = iter([aiosync.ConnectError("refused"), [SIXTEEN], aiosync.ConnectError("gone"), []])

    async def ask() -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    seen = [Look(time.monotonic())]
    for _ in range(4):
        seen.append(await look_again(ask, seen[-1]))
    _, first, second, third, fourth = seen
    assert (first.models, "asking again: refused" in first.trouble) == ((), True)
    assert (second.models, second.trouble) == ([SIXTEEN], "")
    assert (third.models, "asking again: gone" in third.trouble) == ([SIXTEEN], True)
    assert (fourth.models, fourth.trouble) == ([], "")
    assert fourth.before is not None
    # A look keeps only one earlier look, not a chain of them.
    assert (fourth.before.models, fourth.before.before) == ([SIXTEEN], None)
    assert "No answer for 0 s" in drawn(third)
    assert "No models yet." in drawn(fourth)


# -- the command ------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_without_a_terminal_it_shows_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    async with (
        WeightServer(URL) as server,
        trainer(server) as source,
        worker(server, initial=False) as scheme,
    ):
        await send(source, 1.0)
        await scheme.wait_for_version(1)
        await until(lambda: server.status()["models"][0]["workers"][0]["version"] == 1)
        capsys.readouterr()
        assert await main("top", server.url, "--interval", "0.1") == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        assert shown.out.startswith(f"{server.url}: 1 worker, 1 ready\n")
        assert re.search(r"policy *│ *1 *│ *0 *│ *0\.0/s", shown.out), shown.out
        assert await main("top", server.url, "--json") == 0
        (model,) = json.loads(capsys.readouterr().out)
        assert (model["model"], model["version"], model["role"]) == ("policy", 1, "server")
        assert model["workers"][0]["state"] == "ready"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_on_a_terminal_it_goes_on_until_ctrl_c(tmp_path: Path) -> None:
    empty, args = "0 workers\r\nNo models yet.", ("--listen", f"unix://{tmp_path / 'socket'}")
    with Terminal(60) as terminal:
        with serving(tmp_path / "first", *args) as server:
            process = terminal.start("top", server.url, "--interval", "0.1")
            terminal.read_until(lambda shown: empty in shown)
        terminal.read_until(lambda shown: "asking again: " in shown)
        with serving(tmp_path / "second", *args):
            terminal.read_until(lambda shown: empty in shown.rpartition("asking again: ")[2])
            process.send_signal(signal.SIGINT)
            terminal.read_until(lambda shown: "Stopped by Ctrl-C." in shown)
            assert process.wait(PATIENCE) == 130
        # The command has shown the cursor again.
        assert b"\x1b[?25h" in terminal.raw


# -- the page ---------------------------------------------------------------------------------


def scripts_of(page: str) -> list[str]:
    return re.findall(r"<script>(.*?)</script>", page, re.S)


def test_the_page_is_whole_and_takes_nothing_for_markup() -> None:
    text = (importlib.resources.files("aiosync.cli") / "dashboard.html").read_text()
    (script,) = scripts_of(text)
    markup = text.replace(script, "")
    # The only address is that of an empty icon.
    assert re.findall(r"\b(?:src|href|action)=(\S+)>", markup) == ['"data:,"']
    assert not re.search(r"<[^>]*\son\w+=", markup), "a handler in the markup"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'; connect-src 'self'; " in text
    assert f"script-src 'sha256-{digest}'" in text, digest
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "write(", "eval", "Function("):
        assert sink not in script
    for state in STATES:
        assert f".{state} " in text and f'"{state}"' in script
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text


@contextlib.asynccontextmanager
async def requested(url: str, path: str) -> AsyncIterator[tuple[str, asyncio.StreamReader]]:
    """Request a path; yield the head of the answer and a reader of the rest."""
    host, _, port = url.removeprefix("http://").rstrip("/").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: it\r\n\r\n".encode())
        yield (await reader.readuntil(b"\r\n\r\n")).decode(), reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def event(reader: asyncio.StreamReader) -> Any:
    text = (await reader.readuntil(b"\n\n")).decode()
    assert text.startswith("data: ") and text.isascii()
    return json.loads(text.removeprefix("data: "))


@pytest.mark.asyncio
async def test_the_stream_of_the_page_is_read_by_a_client() -> None:
    answer = [dataclasses.replace(SIXTEEN, model=HOSTILE)]

    async def ask() -> Any:
        if not answer:
            raise aiosync.ConnectError(HOSTILE)
        return list(answer)

    # The page gets the name as text, with its escapes written out.
    shown = HOSTILE.replace("\x1b", "\\x1b")
    async with asyncio.timeout(PATIENCE), contextlib.AsyncExitStack() as stack:
        async with serve_page("127.0.0.1:0", HOSTILE, ask, 0.01) as url:
            assert url.startswith("http://127.0.0.1:")
            async with requested(url, "/") as (head, reader):
                assert "Content-Type: text/html; charset=utf-8\r\n" in head
                assert scripts_of((await reader.read()).decode())
            head, reader = await stack.enter_async_context(requested(url, "/events"))
            assert head.startswith("HTTP/1.1 200 ")
            assert "Content-Type: text/event-stream\r\n" in head
            said = await event(reader)
            (model,) = said["models"]
            assert (said["about"], said["trouble"], model["name"]) == (shown, "", shown)
            assert model["counts"] == [["ready", 14], ["lagging", 1], ["lost", 1]]
            assert [(each["name"], each["state"]) for each in model["workers"]][:3] == [
                ("worker 11", "lost"),
                ("worker 5", "lagging"),
                ("worker 0", "ready"),
            ]
            assert ["lag", "134"] in model["workers"][1]["facts"]
            del answer[:]
            while not said["trouble"]:
                said = await event(reader)
            assert shown in said["trouble"]
            # The page still has the models of the last answer.
            assert len(said["models"]) == 1
            answer.append(SIXTEEN)
            while said["trouble"]:
                said = await event(reader)
            assert said["models"][0]["name"] == "policy"
        # The server ends the connection, and waits for that.
        with contextlib.suppress(ConnectionError):
            await reader.read()


class Source:
    """Source that gives the same answer to every question, and counts the questions."""

    def __init__(self, *answer: SyncStats) -> None:
        self.answer, self.asked = answer, 0

    async def __call__(self) -> Any:
        self.asked += 1
        await asyncio.sleep(0)
        return self.answer


@pytest.mark.asyncio
async def test_a_reader_that_hung_up_is_asked_for_no_more() -> None:
    ask = Source(SIXTEEN)
    async with asyncio.timeout(PATIENCE), serve_page("127.0.0.1:0", "it", ask, 1.0) as url:
        async with requested(url, "/events") as (_, reader):
            assert (await event(reader))["models"]
        await asyncio.sleep(1.5)
        assert ask.asked == 1


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_reader_that_takes_nothing_for_ten_seconds_is_let_go() -> None:
    ask = Source(*[dataclasses.replace(SIXTEEN, workers=SIXTEEN.workers * 200)] * 4)
    async with asyncio.timeout(PATIENCE), serve_page("127.0.0.1:0", "it", ask, 0.01) as url:
        async with requested(url, "/events") as (_, reader):
            # The server waits meanwhile with the second or third event.
            await asyncio.sleep(16)
            with contextlib.suppress(ConnectionError):
                while await reader.read(2**20):
                    pass


@pytest.mark.asyncio
async def test_one_answer_is_for_all_readers_and_the_newest_is_let_in() -> None:
    ask = Source(SIXTEEN)
    async with asyncio.timeout(PATIENCE), contextlib.AsyncExitStack() as readers:
        async with serve_page("127.0.0.1:0", "it", ask, 1000.0) as url:
            for _ in range(40):
                _, reader = await readers.enter_async_context(requested(url, "/events"))
                assert (await event(reader))["models"]
            assert ask.asked == 1
            async with requested(url, "/") as (head, _):
                assert head.startswith("HTTP/1.1 200 ")


def fetched(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=PATIENCE) as page:
        return bytes(page.read())


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_server_has_the_page_and_metrics_and_top_the_page(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    args = ("--listen", "tcp://127.0.0.1:0", "--metrics", "127.0.0.1:0")
    with serving(tmp_path / "server", *args, "--dashboard", "127.0.0.1:0") as server:
        assert server.url
        metrics, *pages = re.findall(r"^\w+ at (http://\S+)$", server.log.read_text(), re.M)
        top = Command(tmp_path / "top", "top", server.url, "--html", "127.0.0.1:0")
        with contextlib.closing(top):
            pages.append(top.url)
            for url in pages:
                assert scripts_of(fetched(url).decode())
                with urllib.request.urlopen(f"{url}events", timeout=PATIENCE) as stream:
                    said = json.loads(stream.readline().removeprefix(b"data: "))
                    assert said == {"about": server.url, "trouble": "", "models": []}
            top.send_signal(signal.SIGINT)
            assert top.wait() == 130
            assert top.log.read_text() == "Stopped by Ctrl-C.\n"
        assert aiosync.cli.main(["push", write_weights(tmp_path)[0], server.url]) == 0
        assert b'aiosync_version{model="policy",role="server"} 1.0' in fetched(metrics)
        for path in ("healthz", "readyz"):
            assert fetched(metrics.replace("metrics", path))
        assert server.end() == (0, "")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_pages_are_shown_under_the_names_that_are_allowed(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    pages = ("--metrics", "127.0.0.1:0", "--dashboard", "127.0.0.1:0")
    allowed = ("--allow-host", "one.example", "--allow-host", "two.example")
    with serving(tmp_path / "server", "--listen", URL, *pages, *allowed) as server:
        assert server.url
        urls = re.findall(r"^\w+ at (http://\S+)$", server.log.read_text(), re.M)
        top = Command(
            tmp_path / "top",
            "top",
            server.url,
            "--html",
            "127.0.0.1:0",
            "--allow-host",
            "one.example",
        )
        with contextlib.closing(top):
            urls.append(top.url)
            for url in urls:
                for name in ("one.example", "evil.example"):
                    asked = urllib.request.Request(url, headers={"Host": name})
                    if name == "one.example":
                        with urllib.request.urlopen(asked, timeout=PATIENCE) as page:
                            assert page.read()
                    else:
                        with pytest.raises(urllib.error.HTTPError, match="421"):
                            urllib.request.urlopen(asked, timeout=PATIENCE)


@pytest.mark.parametrize("option", ["--dashboard", "--metrics"])
def test_where_pages_cannot_be_is_one_line(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        there = f"127.0.0.1:{busy.getsockname()[1]}"
        for listen, text in ((there, "listens there"), ("nonsense", "'nonsense' is not HOST:PORT")):
            status, shown = refused(capsys, "serve", "--listen", URL, option, listen)
            assert (status, text in shown) == (2, True), shown
