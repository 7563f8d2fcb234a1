"""The benchmark does what it says: real processes, checked updates, failures told, no leftovers."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

import aiosync.bench._run as bench_run
from aiosync.bench._contender import Desk
from aiosync.bench._contenders import CONTENDERS, Contender
from aiosync.bench._machine import machine
from aiosync.bench._plan import Plan
from aiosync.bench._results import LIMIT, Case, Results
from aiosync.bench._workloads import WORKLOADS, check, fill
from aiosync.testing import assert_no_leaks


def _measure(*cases: Case, contenders: list[str] | None = None, figures: bool = False) -> Results:
    plan = Plan("test", cases, blocks=1, scale=0.002, contenders=contenders, figures=figures)
    results = Results(machine(), plan.name)
    bench_run.run(plan, results, lambda *_: None)
    return results


def _names(transport: str, kind: str) -> list[str]:
    return [each.name for each in CONTENDERS[transport] if each.name.startswith(kind)]


# -- the check --------------------------------------------------------------------------------


def test_the_check_finds_old_and_mixed_weights() -> None:
    model = WORKLOADS["1MB"].build()
    fill(model, 3.0)
    check(model, 3.0)
    with pytest.raises(AssertionError, match="the trainer sent 4"):
        check(model, 4.0)
    with torch.no_grad():
        list(model.parameters())[-1].view(-1)[-1] = 2.0
    with pytest.raises(AssertionError, match="from 2.0 to 3.0"):
        check(model, 3.0)
    good, text = Desk(model).reply("check", 3.0)
    assert not good
    assert "AssertionError" in text


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_what_their_names_say(name: str) -> None:
    expected = {
        "4x2": (40, 2),
        "1MB": (1_000_000, 6),
        "1000x4KiB": (1000 * 4096, 1000),
        "1000-layers": (1000 * 4096, 1000),
        "64MiB": (64 * 2**20, 16),
        "512MiB": (512 * 2**20, 16),
    }
    workload = WORKLOADS[name]
    assert workload.num_tensors == expected[name][1]
    assert workload.nbytes == pytest.approx(expected[name][0], rel=0.05)


# -- every contender --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "transport",
    [
        "shm",
        *(
            pytest.param(each, marks=pytest.mark.apart)
            for each in ("pipe", "tcp", "unix", "gloo", "rpc", "ray")
        ),
    ],
)
def test_aiosync_and_limits(transport: str) -> None:
    """Twice in the same trainers, the second time with more workers."""
    names = [*_names(transport, "aiosync"), *_names(transport, LIMIT)]
    cases = [Case(transport, "4x2", 1), Case(transport, "1000x4KiB", 2)]
    results = _measure(*cases, contenders=names)
    assert results.missing == []
    assert {(timing.case, timing.contender) for timing in results.timings} == {
        (case, name) for case in cases for name in names
    }
    assert all(2 <= len(timing.seconds) <= 6 for timing in results.timings)
    assert all(0 < second < 60 for timing in results.timings for second in timing.seconds)


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("transport", ["shm", "pipe", "gloo", "rpc", "ray"])
def test_torchrl(transport: str) -> None:
    pytest.importorskip("torchrl")
    names = _names(transport, "torchrl")
    cases = [Case(transport, "4x2", 1), Case(transport, "1MB", 2)]
    results = _measure(*cases, contenders=names)
    assert results.missing == []
    assert len(results.timings) == len(names) * 2


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_busy_workers_and_figures(transport: str) -> None:
    results = _measure(
        Case(transport, "4x2", 1),
        Case(transport, "1MB", 1, busy=True),
        contenders=["aiosync", "aiosync/facade"],
        figures=True,
    )
    assert results.missing == []
    assert len(results.timings) == 4
    found = {(figure.name, figure.contender): figure.value for figure in results.figures}
    assert found["idle wake-ups", "aiosync"] <= 2
    assert 0 < found["critical section", "aiosync"] < 1000


# -- what goes wrong --------------------------------------------------------------------------


class _Broken:
    """A peer that says it sent, and did not; or that dies."""

    model: torch.nn.Module

    def __init__(self) -> None:
        self._desk: Desk | None = None

    def open(self, case: Case) -> list[Any]:
        if case.workload == "1MB":
            os.kill(os.getpid(), signal.SIGKILL)
        self.model = WORKLOADS[case.workload].build()
        fill(self.model, 1.0)
        worker = WORKLOADS[case.workload].build()
        fill(worker, 1.0)
        self._desk = Desk(worker)
        return [_Near(self._desk)]

    def send(self) -> None: ...

    def close(self) -> None: ...


class _Near:
    """A handle of a worker in the same process."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._asked: tuple[str, Any] = ("usage", None)

    def ask(self, question: str, argument: Any = None) -> None:
        self._asked = (question, argument)

    def answer(self) -> Any:
        good, value = self._desk.reply(*self._asked)
        if not good:
            raise RuntimeError(f"a worker: {value}")
        return value


def broken() -> _Broken:
    """Named in :data:`BROKEN`, made in the trainer's process."""
    return _Broken()


BROKEN = Contender("broken", "blocking", f"{__name__}:broken")
ABSENT = Contender("absent", "blocking", "no.such:thing", ("no_such_package",))


@pytest.fixture
def with_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [BROKEN, ABSENT, *CONTENDERS["shm"][:1]]
    monkeypatch.setitem(CONTENDERS, "shm", chosen)


@pytest.mark.slow
@pytest.mark.usefixtures("with_broken")
def test_failures_are_told_and_the_rest_goes_on() -> None:
    """Weights that did not arrive, a trainer that dies, a package that is not there."""
    cases = [Case("shm", "4x2", 1), Case("shm", "1MB", 1), Case("shm", "1000x4KiB", 1)]
    results = _measure(*cases)
    missing = {entry.what: entry.why for entry in results.missing}
    assert "no_such_package" in missing["shm, absent"]
    assert "the trainer sent 3.0" in missing["shm 4x2 to 1, broken"]
    assert "exit code -9" in missing["shm 1MB to 1, broken"]
    # It was started again.
    assert "the trainer sent 3.0" in missing["shm 1000x4KiB to 1, broken"]
    assert {timing.contender for timing in results.timings} == {"aiosync"}
    assert [timing.case for timing in results.timings] == cases


@pytest.mark.slow
def test_nothing_is_left_behind_when_it_is_interrupted() -> None:
    steps: list[str] = []

    def interrupt(done: int, total: int, what: str) -> None:
        steps.append(what)
        if done == 1:
            raise KeyboardInterrupt

    plan = Plan(
        "test",
        [Case("shm", "4x2", 1), Case("shm", "1MB", 1)],
        blocks=1,
        scale=0.002,
        contenders=["aiosync"],
        figures=False,
    )
    bench_run.run(plan, Results(machine(), "test"), lambda *_: None)  # starts the fork server
    results = Results(machine(), "test")
    with assert_no_leaks():
        with pytest.raises(KeyboardInterrupt):
            bench_run.run(plan, results, interrupt)
        deadline = time.monotonic() + 10
        while threading.active_count() > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [timing.case.workload for timing in results.timings] == ["4x2"]
    assert results.elapsed > 0
