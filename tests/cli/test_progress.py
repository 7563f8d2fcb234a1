"""Progress of commands that may take long: on a terminal only, and not with ``--quiet``."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("typer")

import torch

import aiosync.cli
from tests.cli._serving import Terminal, command, serving
from tests.schemes._harness import PATIENCE

BENCH = ("bench", "--transport", "shm", "--workload", "4x2", "--workers", "1")


def _shown_by(*args: str) -> str:
    """Return what a command that succeeds has written to its terminal."""
    with Terminal(120) as terminal:
        process = terminal.start(*args)
        before: list[tuple[bool, str]] = []

        def is_over(shown: str) -> bool:
            # Its last lines may be readable only after its end.
            before.append((process.poll() is not None, shown))
            return before[-2:] == [(True, shown)] * 2

        terminal.read_until(is_over)
        assert process.returncode == 0, terminal.shown
        return terminal.shown


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_doctor_says_what_it_checks_and_takes_the_line_away() -> None:
    checks = re.findall(r"check (\d+) of (\d+): (\S+)", _shown_by("doctor"))
    assert sorted({int(number) for number, _, _ in checks}) == list(range(1, int(checks[0][1]) + 1))
    assert "torch" in {name for _, _, name in checks}
    assert "check " not in _shown_by("doctor", "--quiet")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_bench_is_silent_if_it_is_to_be() -> None:
    assert re.search(r" s  0 of \d cases  shm", _shown_by(*BENCH))
    quiet = _shown_by(*BENCH, "--quiet")
    assert "cases" not in quiet
    assert "shm" in quiet


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_server_says_how_much_of_its_store_it_has_read(tmp_path: Path) -> None:
    store, url = tmp_path / "store", f"unix://{tmp_path / 'socket'}"
    torch.save({"weight": torch.zeros(1000)}, tmp_path / "w.pt")
    serve = ("serve", "--listen", url, "--store", str(store))
    with serving(tmp_path, *serve[1:]) as first:
        assert first.url == url
        assert aiosync.cli.main(["push", str(tmp_path / "w.pt"), url]) == 0
    for args, reads in ((serve, True), ((*serve, "--quiet"), False)):
        with Terminal(200) as terminal:
            server = terminal.start(*args)
            terminal.read_until(lambda shown: f"{url}\r\n" in shown)
            assert ("reads the store" in terminal.shown) is reads
            server.send_signal(signal.SIGINT)
            assert server.wait(PATIENCE) == 130


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_pull_says_that_it_writes_the_file(tmp_path: Path) -> None:
    url = f"unix://{tmp_path / 'socket'}"
    torch.save({"weight": torch.zeros(1000)}, tmp_path / "w.pt")
    pull = ("pull", url, str(tmp_path / "x.pt"))
    with serving(tmp_path, "--listen", url) as server:
        assert server.url == url
        assert aiosync.cli.main(["push", str(tmp_path / "w.pt"), url]) == 0
        assert "pull policy writes 4.0 kB to x.pt" in _shown_by(*pull)
        for args in (pull, ("push", str(tmp_path / "w.pt"), url)):
            shown = _shown_by(*args, "--quiet")
            assert not re.search("waits for|reads|writes", shown)
            assert re.fullmatch(r"Pu\w+ policy: version 1 of epoch .* MB/s\r\n", shown)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_bench_without_a_terminal_is_silent(tmp_path: Path) -> None:
    done = subprocess.run(
        command(*BENCH), capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
