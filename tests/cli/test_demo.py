"""``aiosync demo``, run as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import termios
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("typer")
pytest.importorskip("gymnasium")

from tests.cli._serving import command, refused, run

if TYPE_CHECKING:
    from collections.abc import Iterator


def demo_args(transport: str, sync: bool) -> list[str]:
    return ["demo", "--transport", transport, *(["--sync"] if sync else [])]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("transport", "sync"),
    [
        pytest.param("shm", False, id="shm-async"),
        pytest.param("pipe", True, id="pipe-sync", marks=pytest.mark.heavy),
    ],
)
def test_the_return_rises(transport: str, sync: bool) -> None:
    args = [*demo_args(transport, sync), "--seconds", "8", "--json", "-"]
    done = run(*args, timeout=100)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["risen"]
    assert summary["final_return"] > 2 * summary["start_return"]
    assert (summary["transport"], summary["sync"]) == (transport, sync)
    assert summary["versions"] > 10
    assert 0 < summary["send_latency_p50"] <= summary["send_latency_p95"]
    assert len(summary["workers"]) == 2
    for worker in summary["workers"]:
        assert worker["steps"] > 0
        assert worker["lag"] >= 0
        # The worker got updates while it collected.
        assert worker["version"] > 10
    assert re.search(
        r"return +[0-9.]+  version \d+  workers have \d+, \d+  send [0-9.]+ ms", done.stderr
    )
    assert "Solved" in done.stderr or "The return rose" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.heavy)])
def test_a_terminal_shows_the_run_live(columns: int, tmp_path: Path) -> None:
    """The frames of the view fit the terminal, and the last one is also the picture."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (40, columns))
    plot = tmp_path / "plot.svg"
    args = command("demo", "--seconds", "3", "--plot", str(plot))
    written = b""
    with subprocess.Popen(
        args, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    ) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # EIO, once the demo has closed the terminal
            while data := os.read(ours, 65536):
                written += data
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.decode())
    # Three seconds may be too short for the return to rise.
    assert process.returncode in (0, 1), text
    frame = text.rpartition("╭")[2].replace("\r", "").splitlines()
    assert {len(line) for line in frame[1:-1] if line.startswith("│")} == {columns}
    last = "\n".join(frame)
    assert "worker 0" in last and "worker 1" in last
    assert re.search(r"version \d+ +\d+ +\d+", last)
    assert re.search(r"[0-9.]+ sends a second", last) and "newest version" in last
    assert set(last) & set("▁▂▃▄▅▆▇█")
    assert "mean return" in frame[-1]
    picture = plot.read_text()
    assert picture.startswith("<svg") and "worker&#160;1" in picture


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "option", [pytest.param("--json"), pytest.param("--plot", marks=pytest.mark.heavy)]
)
def test_a_document_on_stdout_is_alone_there(option: str, tmp_path: Path) -> None:
    """The terminal on stderr shows the run live, and has the report."""
    out = tmp_path / "out"
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (40, 80))
    written = b""
    with (
        out.open("wb") as stdout,
        subprocess.Popen(
            command("demo", "--seconds", "1", option, "-"),
            stdout=stdout,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "1"},
        ) as process,
    ):
        os.close(theirs)
        with contextlib.suppress(OSError):  # EIO, once the demo has closed the terminal
            while data := os.read(ours, 65536):
                written += data
    os.close(ours)
    document, shown = out.read_text(), written.decode()
    assert process.returncode in (0, 1), shown
    if option == "--json":
        assert json.loads(document)["num_workers"] == 2
    else:
        assert document.startswith("<svg") and document.rstrip().endswith("</svg>")
    assert "worker 0" in shown
    assert "mean return" in shown.splitlines()[-1]


def test_two_documents_on_stdout_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = refused(capsys, "demo", "--json", "-", "--plot", "-")
    assert (status, "cannot both" in text) == (2, True)


@contextlib.contextmanager
def running(*args: str, until: str) -> Iterator[tuple[subprocess.Popen[str], set[int]]]:
    """Run the demo in a session of its own; yield it and its workers once it wrote ``until``."""
    process = subprocess.Popen(
        command(*args),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if until in line:
                    break
            else:
                pytest.fail(f"the demo ended early: {process.communicate()[1]}")
            yield process, workers_of(process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def workers_of(session: int) -> set[int]:
    """Return the processes of a session that are workers."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        # The process may just have ended.
        with contextlib.suppress(OSError):
            pid, command_line = int(path.name), (path / "cmdline").read_bytes()
            if os.getsid(pid) == session and b"spawn_main" in command_line:
                found.add(pid)
    return found


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("transport", "sync", "ending"),
    # Each start is three interpreters with torch, so each transport, API and ending is tried once.
    [
        ("shm", False, "Ctrl-C"),
        ("pipe", True, "killed"),
        pytest.param("shm", False, "killed", marks=pytest.mark.heavy),
        pytest.param("shm", True, "Ctrl-C", marks=pytest.mark.heavy),
        pytest.param("pipe", False, "killed", marks=pytest.mark.heavy),
        pytest.param("pipe", True, "Ctrl-C", marks=pytest.mark.heavy),
    ],
)
def test_it_ends_cleanly(transport: str, sync: bool, ending: str) -> None:
    args = [*demo_args(transport, sync), "--seconds", "60"]
    with running(*args, until="version") as (process, workers):
        assert len(workers) == 2
        if ending == "Ctrl-C":
            # A terminal also sends the signal to the workers.
            os.killpg(process.pid, signal.SIGINT)
        else:
            os.kill(min(workers), signal.SIGKILL)
        _, err = process.communicate(timeout=20)
        status, text = (130, "Stopped by Ctrl-C") if ending == "Ctrl-C" else (1, "worker")
        assert process.returncode == status, err
        assert text in err
        assert "Traceback" not in err
        assert not workers_of(process.pid)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "sync",
    [pytest.param(False, id="async", marks=pytest.mark.heavy), pytest.param(True, id="sync")],
)
def test_ctrl_c_while_the_workers_start(sync: bool) -> None:
    with running(*demo_args("shm", sync), until="aiosync demo") as (process, _):
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=20)
        # Python itself ends by the signal if Ctrl-C interrupts an import that runs a text of code.
        assert process.returncode in (130, -signal.SIGINT), err
        assert "Stopped by Ctrl-C" in err
        assert "Traceback" not in err
        assert not workers_of(process.pid)
