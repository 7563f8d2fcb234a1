"""``aiosync doctor`` and ``aiosync token``: their findings and their advice."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("typer")

import torch

import aiosync.cli
from aiosync.server import WeightClient, WeightServer
from tests._certificates import certificates
from tests.cli._serving import SECRET, Terminal, refused, written
from tests.schemes._harness import PATIENCE
from tests.server._tools import URL, send, trainer, worker

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOSYNC_TOKEN", raising=False)


def rows(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, str]]:
    """Return the exit status of a doctor, and each row with the lines below it, by its check."""
    capsys.readouterr()
    status = aiosync.cli.main(["doctor", *args])
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    found: dict[str, str] = {}
    for line in out.splitlines():
        if row := re.match(r"(ok|advice|FAILED) +(\S+(?: \S+)?)  +", line):
            found[row[2]] = f"{row[1]} {line[row.end() :].strip()}"
        elif line.startswith(" "):
            last = list(found)[-1]
            found[last] = f"{found[last]} {line.strip()}"
        else:
            found["end"] = line
    return status, found


# -- this machine -------------------------------------------------------------------------------


def test_each_check_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = rows(capsys)
    assert status == 0, found
    assert found["torch"] == f"ok {torch.__version__}"
    assert "not installed:" in found["optional"]
    for name in ("tensordict", "anyio", "msgpack", "xxhash", "cores", "memfd", "unix sockets"):
        assert found[name].startswith("ok "), name
    assert {"event loop", "torch threads", "open files"} <= found.keys()
    assert found["end"] == "Everything that aiosync needs is available."
    # These checks need an address or options.
    assert {"token", "TLS", "reachable"}.isdisjoint(found)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("number", "mark"), [(1, "ok"), (4, "advice")])
@pytest.mark.usefixtures("threads")
def test_more_threads_than_cores(
    number: int, mark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(number)
    status, found = rows(capsys, "--workers", "1000")
    assert (status, found["torch threads"].partition(" ")[0]) == (0, mark)
    assert ("OMP_NUM_THREADS=1" in found["torch threads"]) is (mark == "advice")


def test_too_few_open_files(capsys: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        enough, few = rows(capsys, "--workers", "8")[1], rows(capsys, "--workers", "100")[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert enough["open files"].startswith("ok ulimit -n is 512 ")
    assert few["open files"].startswith("advice ")
    assert "run `ulimit -n 1056`" in few["open files"]


def test_a_package_that_is_missing_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "msgpack", None)
    status, found = rows(capsys)
    assert (status, found["end"]) == (1, "Failed checks: msgpack.")
    assert found["msgpack"].startswith("FAILED ")
    assert found["msgpack"].endswith("pip install msgpack")


# -- servers that it reaches ----------------------------------------------------------------------


async def asked(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, str]]:
    return await asyncio.to_thread(rows, capsys, *args)


@pytest.mark.asyncio
async def test_a_server_is_reached_with_its_token_and_not_with_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, other = written(tmp_path / "good", SECRET), written(tmp_path / "other", SECRET[::-1])
    async with WeightServer(URL, token=SECRET) as server:
        status, found = await asked(capsys, server.url, "--token-file", good)
        assert (status, found["token"]) == (0, f"ok {len(SECRET)} bytes from {good}")
        assert re.fullmatch(
            rf"ok {re.escape(server.url)} answered in \d+ ms: no models yet", found["reachable"]
        )
        for args, text in (
            (("--token-file", other), "AuthError: the listener refused the dialer"),
            ((), "give the dialer --token-file"),
        ):
            status, found = await asked(capsys, server.url, *args)
            assert (status, found["end"]) == (1, "Failed checks: reachable.")
            assert text in found["reachable"]
    status, found = await asked(capsys, server.url, "--token-file", good)
    assert (status, "cannot be reached" in found["reachable"]) == (1, True)


@pytest.mark.asyncio
async def test_a_pipe_gives_the_token_to_both_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    async with WeightServer(URL, token=SECRET) as server:
        giving = asyncio.create_task(asyncio.to_thread(pipe.write_text, SECRET))
        status, found = await asked(capsys, server.url, "--token-file", str(pipe))
        await giving
    assert (status, found["token"]) == (0, f"ok {len(SECRET)} bytes from {pipe}")
    assert found["reachable"].startswith("ok ")


@pytest.mark.asyncio
async def test_what_a_server_has_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    async with WeightServer(URL) as server, trainer(server) as source:
        await send(source, 1.0)
        # This worker has left when the doctor asks.
        await WeightClient(server.url).pull()
        async with worker(server):
            _, found = await asked(capsys, server.url)
    assert found["reachable"].endswith(" ms: policy has version 1, workers: 1")


@pytest.mark.parametrize(
    ("text", "mode", "advice"),
    [
        (SECRET, 0o644, "other users can read {path}: chmod 600 is advised."),
        ("short", 0o600, "make a new one with `aiosync token FILE`"),
    ],
)
def test_a_bad_token_file_leads_to_advice(
    text: str, mode: int, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "token", text, mode)
    status, found = rows(capsys, "--token-file", path)
    assert (status, found["token"].partition(" ")[0]) == (0, "advice")
    assert found["token"].endswith(advice.format(path=path))
    assert text not in found["token"].replace("it is short", "")


def test_certificate_files_are_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = rows(capsys, "--tls-ca", str(certificates().folder / "ca.pem"))
    assert found["TLS"] == "ok the certificate files can be used"
    status, text = refused(capsys, "doctor", "--tls-ca", str(tmp_path / "none.pem"))
    assert (status, "cannot be used" in text) == (2, True)


# -- on a terminal ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("colours", [True, False])
def test_a_narrow_terminal(colours: bool) -> None:
    """No line is longer than the 60 columns, and NO_COLOR suppresses colours."""
    with Terminal(60) as terminal:
        process = terminal.start("doctor", "unix:///none", **({} if colours else {"NO_COLOR": "1"}))
        terminal.read_until(lambda shown: "Failed checks: reachable." in shown)
        assert process.wait(PATIENCE) == 1
        assert "FAILED" in terminal.shown
        assert (b"\x1b[31m" in terminal.raw) is colours
        assert max(map(len, terminal.shown.splitlines())) <= 60


# -- a token ---------------------------------------------------------------------------------------


def test_a_new_token_is_for_this_user_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    old = os.umask(0)
    try:
        for path in (first, second):
            assert aiosync.cli.main(["token", str(path)]) == 0
    finally:
        os.umask(old)
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    token = first.read_text()
    # The token has no line end, so that token= may be the whole file.
    assert len(token) >= 32 and not token[-1].isspace()
    assert token != second.read_text()
    assert token not in capsys.readouterr().out
    status, text = refused(capsys, "token", str(first))
    assert (status, "File exists" in text) == (2, True)
    assert first.read_text() == token
