"""``aiosync bench``: its options, what it shows of older results, and one short run."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from rich.console import Console

import aiosync.cli
from aiosync.bench._machine import machine
from aiosync.bench._plan import Plan
from aiosync.bench._profiles import PROFILES
from aiosync.bench._results import Case, Missing, Results, Timing
from aiosync.bench._trainer import BLOCK_SECONDS
from aiosync.cli import _bench
from aiosync.cli._bench import choose, progress_bar
from aiosync.errors import ConfigError

CASE = Case("shm", "4x2", 1)


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A file of results."""
    results = Results(machine(), "quick", 3.0)
    for contender, seconds in (("aiosync", 1e-4), ("torchrl", 5e-4), ("limit/round trip", 5e-5)):
        results.timings.append(Timing(CASE, contender, [seconds] * 4, 0.1, 0.1))
    path = tmp_path / "older.json"
    path.write_text(results.to_json())
    return path


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


# -- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--profile", "slow"], "--profile: there is no slow; there is: quick, targets, full"),
        (["--transport", "pigeon"], "there is no pigeon; there is: shm, pipe, tcp"),
        (["--workload", "9x9"], "there is no 9x9; there is: 4x2, 1MB"),
        (["--contender", "aiosink"], "there is no aiosink; there is: aiosync, aiosync/asyncio"),
        (["--workers", "0"], "--workers"),
        (["--workers", "3"], "select nothing in the profile quick, which contains: shm 4x2 to 1"),
        (["--transport", "ray"], "--profile full has more"),
        (["--profile", "full", "--workers", "3"], "select nothing in the profile full"),
        (["--transport", "tcp", "--contender", "limit/memcpy"], "select nothing"),
        (["--json", "/no/such/folder/x.json"], "/no/such/folder"),
        (["--json", "/"], "is a folder"),
        (["--plot", "/no/such/folder/plots"], "/no/such/folder"),
        (["--plot", __file__], "is not a folder"),
        (["--from", "/no/such/file"], "cannot be read"),
        (["--from", __file__], "holds no results"),
        (["--from", __file__, "--transport", "shm"], "cannot be combined"),
    ],
)
def test_wrong_usage_is_refused_before_anything_starts(
    args: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_bench, "_measure", lambda *_: pytest.fail("it ran"))
    assert aiosync.cli.main(["bench", *args]) == 2
    shown = capsys.readouterr()
    assert text in plain(shown.err)
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_nothing_chosen_is_the_whole_profile() -> None:
    assert choose("quick") == PROFILES["quick"]
    assert choose("full") == PROFILES["full"]


def test_choices_narrow_it() -> None:
    plan = choose("full", transports=["pipe", "shm"], workloads=["4x2"], workers=[1, 8])
    assert [str(case) for case in plan.cases] == [
        "shm 4x2 to 1",
        "shm 4x2 to 8",
        "shm 4x2 to 1, busy",
        "pipe 4x2 to 1",
        "pipe 4x2 to 8",
        "pipe 4x2 to 1, busy",
    ]
    assert plan.contenders is None


def test_contenders_are_chosen_by_name() -> None:
    plan = choose("full", contenders=["aiosync", "limit/raw socket"])
    assert plan.takes(CASE, "aiosync")
    assert not plan.takes(CASE, "torchrl")
    assert len(plan.cases) == len(PROFILES["full"].cases)
    # Cases in which none of them takes part are left out.
    plan = choose("full", contenders=["limit/raw socket"])
    assert {case.transport for case in plan.cases} == {"tcp"}
    assert not any(case.busy for case in plan.cases)


def test_limits_are_all_the_limits() -> None:
    plan = choose("quick", transports=["shm"], contenders=["limits", "torchrl"])
    assert plan.takes(CASE, "limit/memcpy") and plan.takes(CASE, "limit/round trip")
    assert plan.takes(CASE, "torchrl")
    assert not plan.takes(CASE, "aiosync")


def test_no_such_name() -> None:
    with pytest.raises(ConfigError, match="there is no slow"):
        choose("slow")


# -- older results ----------------------------------------------------------------------------


def test_older_results_are_shown(older: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert aiosync.cli.main(["bench", "--from", str(older)]) == 0
    shown = capsys.readouterr()
    assert "Transport shm" in shown.out
    assert "100 µs" in shown.out
    assert "5x" in shown.out
    assert shown.err == ""


def test_json_on_stdout_leaves_it_alone(older: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert aiosync.cli.main(["bench", "--from", str(older), "--json", "-"]) == 0
    shown = capsys.readouterr()
    assert Results.from_json(shown.out) == Results.from_json(older.read_text())
    assert "Transport shm" in shown.err


@pytest.mark.parametrize("text", ["[]", "{}", '{"schema": 1}', '{"schema": 99}', "\x00"])
def test_what_holds_no_results(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    assert aiosync.cli.main(["bench", "--from", str(path)]) == 2
    assert "holds no results" in plain(capsys.readouterr().err)


# -- the run, without measuring ---------------------------------------------------------------


def running(monkeypatch: pytest.MonkeyPatch, *, fill: Any) -> None:
    """Replace what measures."""
    monkeypatch.setattr("aiosync.bench._run.run", fill)
    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", lambda: None)


def test_ctrl_c_shows_what_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(plan: Plan, results: Results, progress: Any) -> None:
        progress(0, 1, str(CASE))
        results.timings.append(Timing(CASE, "aiosync", [1e-4, 1e-4], 0.1, 0.1))
        raise KeyboardInterrupt

    running(monkeypatch, fill=fill)
    handler = signal.getsignal(signal.SIGINT)
    path = tmp_path / "x.json"
    assert aiosync.cli.main(["bench", "--json", str(path)]) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    shown = capsys.readouterr()
    assert "Stopped by Ctrl-C" in shown.err
    assert "100 µs" in shown.out
    assert "the rest of the run: stopped by Ctrl-C" in shown.out
    assert len(Results.from_json(path.read_text()).timings) == 1


@pytest.mark.parametrize(
    ("timings", "missing", "status"),
    [
        ([CASE], [], 0),
        ([], [], 1),
        ([CASE], [Missing("shm 4x2 to 1, torchrl", "RuntimeError: no")], 0),
        ([CASE], [Missing("tcp, torchrl", "not installed: torchrl")], 0),
        ([CASE], [Missing("shm, aiosync", "not installed: uvloop")], 0),
        ([CASE], [Missing("shm 4x2 to 1, busy, aiosync/facade", "RuntimeError: no")], 1),
    ],
)
def test_the_exit_status(
    timings: list[Case],
    missing: list[Missing],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fill(plan: Plan, results: Results, progress: Any) -> None:
        results.timings += [Timing(case, "torchrl", [1e-4], 0.1, 0.1) for case in timings]
        results.missing += missing

    running(monkeypatch, fill=fill)
    assert aiosync.cli.main(["bench"]) == status
    shown = capsys.readouterr().out
    for each in missing:
        assert each.what in shown
    assert ("pip install" in shown) is any("not installed" in each.why for each in missing)


def test_without_a_terminal_there_is_a_line_for_each_case() -> None:
    stream = io.StringIO()
    with progress_bar(Console(file=stream, soft_wrap=True)) as show:
        show(0, 2, "shm 4x2 to 1")
        show(1, 2, "shm 4x2 to 4")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("0 of 2 cases  shm 4x2 to 1")
    assert second.endswith("1 of 2 cases  shm 4x2 to 4")


def test_on_a_terminal_there_is_a_bar() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    with progress_bar(console) as show:
        show(1, 2, "shm 4x2 to [4]")
    assert "1/2" in stream.getvalue()
    assert "shm 4x2 to [4]" in stream.getvalue()


# -- the run ----------------------------------------------------------------------------------


def command(*args: str) -> list[str]:
    chosen = ("--transport", "shm", "--workload", "4x2", "--contender", "aiosync")
    return [sys.executable, "-m", "aiosync", "bench", *chosen, *args]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_short_run(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    done = subprocess.run(
        command("--workers", "1", "--json", str(path)),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = Results.from_json(path.read_text())
    assert [(each.case, each.contender) for each in results.timings] == [(CASE, "aiosync")]
    # Timings of a block are handed over only after its check in every worker.
    (found,) = results.timings
    plan = PROFILES["quick"]
    most = plan.blocks * plan.sends(CASE)
    # A block ends after a second of sends, which a busy machine may need for fewer of them.
    assert len(found.seconds) == most or (
        2 * plan.blocks <= len(found.seconds) < most and sum(found.seconds) >= BLOCK_SECONDS
    )
    assert 0 < found.percentile(10) <= found.median <= found.percentile(99) < 1
    assert results.missing == []
    assert json.loads(path.read_text())["timings"][0]["median"] == found.median
    assert "Transport shm" in done.stdout
    assert "0 of 1 cases  shm 4x2 to 1" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ctrl_c_as_a_terminal_sends_it() -> None:
    process = subprocess.Popen(
        command(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "1 of 2 cases" in line:  # the first one is measured
                    break
            else:
                pytest.fail(f"it ended early: {process.communicate()[0]}")
            os.killpg(process.pid, signal.SIGINT)  # every process of the run gets it
            out, err = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, out + err
    assert "Stopped by Ctrl-C" in err
    assert "Traceback" not in out + err
    assert "shm" in out
