"""``aiosync serve`` serves, and ends, although nobody reads what it says."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("typer")

from rich.console import Console

import aiosync.cli
from aiosync.cli import _reporting
from aiosync.cli._reporting import Reporter
from tests.cli._serving import command, environment, wait_for, write_weights
from tests.schemes._harness import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """A pipe that takes no more byte."""
    mine, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(theirs, bytes(65536))
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(theirs, bytes(1))
    os.set_blocking(theirs, True)
    with open(mine, "rb"), open(theirs, "wb"):
        yield mine, theirs


@contextlib.contextmanager
def server(url: str, **streams: int) -> Iterator[subprocess.Popen[bytes]]:
    """A fresh interpreter, as its end counts."""
    variables = environment(TERM="xterm", COLUMNS="160")
    started = subprocess.Popen(command("serve", "--listen", url), env=variables, **streams)
    try:
        wait_for(Path(url.removeprefix("unix://")).exists)
        yield started
    finally:
        started.kill()
        started.wait()


def serves_and_ends(url: str, running: subprocess.Popen[bytes], weights: str) -> None:
    for _ in range(3):
        assert aiosync.cli.main(["push", weights, url, "--timeout", "10"]) == 0
        time.sleep(0.3)  # it looks four times a second
    assert aiosync.cli.main(["status", url, "--timeout", "10"]) == 0
    running.terminate()
    assert running.wait(PATIENCE) == 0


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_pipe_that_nobody_reads_is_no_harm(tmp_path: Path) -> None:
    url = f"unix://{tmp_path / 'socket'}"
    weights, _ = write_weights(tmp_path)
    with (
        full_pipe() as (_, stderr),
        server(url, stdout=subprocess.DEVNULL, stderr=stderr) as running,
    ):
        serves_and_ends(url, running, weights)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_paused_terminal_is_no_harm(tmp_path: Path) -> None:
    url = f"unix://{tmp_path / 'socket'}"
    weights, _ = write_weights(tmp_path)
    mine, theirs = pty.openpty()
    with open(mine, "rb+", buffering=0), open(theirs, "rb+", buffering=0):
        with server(url, stdin=theirs, stdout=theirs, stderr=theirs) as running:
            shown = b""
            while b"no models yet" not in shown:
                shown += os.read(mine, 65536)
            os.write(mine, b"\x13")  # Ctrl-S
            serves_and_ends(url, running, weights)


def test_lines_that_nobody_reads_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_reporting, "_KEPT_LINES", 3)
    monkeypatch.setattr(_reporting, "_END_SECONDS", PATIENCE)
    with full_pipe() as (mine, theirs), open(theirs, "w", closefd=False) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        shown = bytearray()

        def read() -> None:
            while not shown.endswith(b"end\n"):
                shown.extend(os.read(mine, 65536))

        reader = threading.Thread(target=read)
        with Reporter(Console()) as reporter:
            reporter.say("taken")
            wait_for(lambda: not reporter._oldest)
            for number in range(10):
                reporter.say(f"line {number}")
            sys.stderr.write("a log")
            sys.stderr.write("'s line\n")
            reader.start()
            wait_for(lambda: b"log's line" in shown)
            reporter.say("end")
        reader.join(PATIENCE)
    assert shown.lstrip(b"\0").decode().splitlines() == [
        "taken",
        *(f"line {number}" for number in range(3)),
        "(5 lines were left out here: nobody read them)",
        *("line 8", "line 9", "a log's line", "end"),
    ]


def test_what_ends_it_is_written_before_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(Console()) as reporter:
        reporter.say("one")
        sys.stderr.write("two\nthree\n")
    assert capsys.readouterr().err == "one\ntwo\nthree\n"
