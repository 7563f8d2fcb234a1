"""``aiosync bench``: choices, results, short runs, failures; and ``python -m tests.bench``."""

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

import torch
from rich.console import Console

import aiosync.cli
from aiosync.bench import (
    WORKLOADS,
    Case,
    Crew,
    Desk,
    Missing,
    Plan,
    Results,
    Timing,
    ask_all,
    choose,
    contenders_of,
    fill,
    machine,
    profiles,
    run,
    show,
)
from aiosync.testing import assert_no_leaks
from tests.bench import contenders, processes

CASE = Case("shm", "4x2", 1)


# -- choices and results ------------------------------------------------------------------------


def test_choices_narrow_a_profile() -> None:
    full = profiles()["full"]
    assert choose(full).cases == full.cases
    plan = choose(full, transports=["pipe", "shm"], workloads=["4x2"], workers=[1, 8])
    ways = ("1", "8", "1, busy")
    assert [str(case) for case in plan.cases] == [
        f"{transport} 4x2 to {way}" for transport in ("shm", "pipe") for way in ways
    ]


def older() -> Results:
    """Return results with an entry of each kind that ``show()`` shows."""
    results = Results(machine(), "quick", 3.0)
    for contender, seconds in (("aiosync", 1e-4), ("peer", 5e-3), ("limit/round trip", 5e-5)):
        results.timings.append(Timing(CASE, contender, [seconds] * 4, 0.1, 0.2))
    why = 'Traceback\n  File "x"\nRuntimeError: no [luck]'
    results.missing.append(Missing("shm 4x2 to 1, peer", why))
    return results


def test_older_results_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, copy = tmp_path / "older.json", tmp_path / "copy.json"
    path.write_text(older().to_json())
    assert aiosync.cli.main(["bench", "--from", str(path), "--json", str(copy)]) == 0
    shown = capsys.readouterr().out
    for text in ("Transport shm", "100 µs", "100 - 100", "0.50", "shm 4x2 to 1, peer", "no [luck]"):
        assert text in shown
    for text in ("4x2 is one layer", "of the limit: 1.00 is as fast"):
        assert text in shown
    assert Results.from_json(copy.read_text()) == Results.from_json(path.read_text()) == older()
    (row, *_) = json.loads(copy.read_text())["timings"]
    assert row["median"] == row["p10"] == row["p90"] == row["p99"] == 1e-4


def test_a_narrow_terminal_shows_whole_numbers() -> None:
    results, case = Results(machine(), "full"), Case("shm", "1000-layers", 4, busy=True)
    results.timings.append(Timing(case, "aiosync", [1.231] * 4, 0.1, 0.1))
    limit = Case("shm", "1000-layers", 4)
    results.timings.append(Timing(limit, "limit/memcpy all threads", [5e-5] * 4, 0.1, 0.1))
    stream = io.StringIO()
    show(results, Console(file=stream, width=60))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    row = "1000-layers +4 busy +1231 ms +1231 - 1231 +50.0 µs +0.00"
    assert any(re.fullmatch(row, line.strip()) for line in lines)


@pytest.mark.parametrize(
    ("timings", "missing", "status"),
    [
        (["aiosync"], [], 0),
        ([], [], 1),
        (["aiosync"], [Missing("shm 4x2 to 1, peer", "RuntimeError: no")], 0),
        (["peer"], [Missing("shm 4x2 to 1, busy, aiosync", "RuntimeError: no")], 1),
    ],
)
def test_the_exit_status(timings: list[str], missing: list[Missing], status: int) -> None:
    results = Results(machine(), "quick", missing=missing)
    results.timings += [Timing(CASE, name, [1e-4], 0.1, 0.1) for name in timings]
    assert results.failed is bool(status)
    stream = io.StringIO()
    show(results, Console(file=stream, width=160))
    assert all(each.what in stream.getvalue() for each in missing)


# -- runs -----------------------------------------------------------------------------------------


def measure(*cases: Case) -> Results:
    plan = Plan("test", cases, blocks=1, scale=0.002)
    results = Results(machine(), plan.name)
    run(plan, results, lambda *_: None)
    return results


def work(idx: int, pipe: Any, value: float) -> None:
    model = WORKLOADS["1MB"].build()
    fill(model, 3.0)
    with torch.no_grad():
        list(model.parameters())[-1].view(-1)[-1] = value
    Desk(model).serve(pipe)


def test_the_check_finds_old_and_mixed_weights() -> None:
    crew = Crew()
    try:
        handles = crew.start(work, 1, 3.0)
        ask_all(handles, "check", 3.0)
        for value in (4.0, 2.0):
            with pytest.raises(RuntimeError, match=f"the trainer sent {value}"):
                ask_all(handles, "check", value)
        mixed = crew.start(work, 1, 2.0)[1:]
        with pytest.raises(RuntimeError, match=r"from 2.0 to 3.0"):
            ask_all(mixed, "check", 3.0)
    finally:
        crew.stop()


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_say_their_size(name: str) -> None:
    with torch.device("meta"):
        assert sum(each.nbytes for each in WORKLOADS[name].build().parameters()) == (
            WORKLOADS[name].nbytes
        )


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "transport", ["shm", *(pytest.param(each, marks=pytest.mark.apart) for each in ("tcp", "gloo"))]
)
def test_aiosync_and_limits(transport: str) -> None:
    """The same trainers run one case, then one with more workers, then one with busy workers."""
    cases = [Case(transport, "4x2", 1), Case(transport, "1MB", 2), Case(transport, "4x2", 1, True)]
    results = measure(*cases)
    assert results.missing == []
    assert {(timing.case, timing.contender) for timing in results.timings} == {
        (case, name) for case in cases for name in contenders_of(case)
    }
    assert all(2 <= len(timing.seconds) <= 6 for timing in results.timings)
    assert all(0 < second < 60 for timing in results.timings for second in timing.seconds)


@pytest.mark.slow
def test_a_failure_is_told_and_the_rest_goes_on() -> None:
    cases = [CASE, Case("shm", "no such work", 1), Case("shm", "1MB", 1)]
    results = measure(*cases)
    names = list(contenders_of(CASE))
    assert [each.what for each in results.missing] == [f"{cases[1]}, {name}" for name in names]
    assert all(each.why == "KeyError: 'no such work'" for each in results.missing)
    assert [(each.case, each.contender) for each in results.timings] == [
        (case, name) for case in cases[::2] for name in names
    ]
    assert results.failed


class Broken:
    """A peer that does not send what it says it sent, or that dies."""

    def open(self, case: Case) -> Any:
        if case.workload == "1MB":
            os.kill(os.getpid(), signal.SIGKILL)
        self.model = WORKLOADS["1MB"].build()
        self.crew = Crew()
        return self.crew.start(work, 1, 2.0)

    def send(self) -> None: ...

    def close(self) -> None:
        if hasattr(self, "crew"):
            self.crew.stop()


@pytest.mark.slow
def test_failures_of_trainers_with_a_process_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights do not arrive, a trainer dies, and a package is missing."""
    monkeypatch.setitem(contenders.CONTENDERS, "shm", contenders.CONTENDERS["shm"][:1])
    contenders.register(
        "shm",
        contenders.Contender("broken", "blocking", Broken),
        contenders.Contender("absent", "blocking", Broken, needs=("no_such_package",)),
    )
    cases = [CASE, Case("shm", "1MB", 1), Case("shm", "1000x4KiB", 1)]
    results = processes.Comparison(machine(), "test")
    plan = contenders.Plan("test", cases, blocks=1, scale=0.002)
    processes.run(plan, results, lambda *_: None)
    missing = {entry.what: entry.why for entry in results.missing}
    assert "no_such_package" in missing["shm, absent"]
    assert "exit code -9" in missing["shm 1MB to 1, broken"]
    # The trainer was started again after it had died.
    for case in (CASE, cases[2]):
        assert "the trainer sent 3.0" in missing[f"{case}, broken"]
    assert [(each.contender, each.case) for each in results.timings] == [
        ("aiosync", case) for case in cases
    ]


@pytest.mark.slow
def test_nothing_is_left_behind_when_it_is_interrupted() -> None:
    plan = Plan("test", [CASE, Case("shm", "1MB", 1)], 1, 0.002)

    def interrupt(done: int, total: int, what: str) -> None:
        if done:
            raise KeyboardInterrupt

    results = Results(machine(), plan.name)
    with assert_no_leaks(grace=5.0), pytest.raises(KeyboardInterrupt):
        run(plan, results, interrupt)
    assert {each.case for each in results.timings} == {CASE}


@pytest.mark.parametrize("is_back", [True, False])
def test_a_file_that_cannot_be_written_for_a_while_ends_no_run(
    is_back: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The table is shown in any case, and the last write tells of a file that is still bad."""
    path = tmp_path / "results.json"

    def measured(plan: Plan, results: Results, note: Any) -> None:
        path.unlink()
        path.mkdir()
        results.timings += older().timings
        note(1, 1, "aiosync")
        if is_back:
            path.rmdir()

    monkeypatch.setattr("aiosync.bench.run", measured)
    assert aiosync.cli.main(["bench", "--json", str(path)]) == int(not is_back)
    shown = capsys.readouterr()
    assert "100 µs" in shown.out
    assert ("cannot be written" in shown.err) is not is_back
    if is_back:
        assert Results.from_json(path.read_text()).timings == older().timings


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("transport", ["shm", "rpc"])
def test_the_comparison_beside_the_package(transport: str, tmp_path: Path) -> None:
    pytest.importorskip("torchrl")
    path = tmp_path / "results.json"
    chosen = f"--profile=full --transport={transport} --workload=4x2 --workers=1".split()
    contenders = ["--contender=aiosync", "--contender=torchrl", f"--json={path}"]
    command = [sys.executable, "-m", "tests.bench", "--no-figures", *chosen, *contenders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {timing.contender for timing in Results.from_json(path.read_text()).timings}
    assert found == {"aiosync", "torchrl"}
