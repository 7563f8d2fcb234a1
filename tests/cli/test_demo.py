"""The ``aiosync`` command, run as a user runs it, and the parts of the demo on their own."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("gymnasium")

import torch
from rich.console import Console

import aiosync.cli
from aiosync.cli._pool import WorkerDied, Workers
from aiosync.cli._ppo import PPO, Fragment, Policy
from aiosync.cli._progress import Progress
from aiosync.cli._view import final_line, render, showing
from aiosync.cli._worker import Collector, WorkerSpec
from aiosync.types import SendReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "aiosync", *args]


def run(*args: str, timeout: float = 50.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args), capture_output=True, text=True, timeout=timeout, check=False
    )


def demo_args(transport: str, sync: bool) -> list[str]:
    return ["demo", "--transport", transport, *(["--sync"] if sync else [])]


# -- the parts --------------------------------------------------------------------------------


def fragment(
    *, worker_idx: int = 0, versions: tuple[int, ...] = (1,), returns: tuple[float, ...] = ()
) -> Fragment:
    num_steps = len(versions)
    return Fragment(
        worker_idx=worker_idx,
        obs=np.zeros((num_steps, 2, 4), np.float32),
        next_obs=np.zeros((num_steps, 2, 4), np.float32),
        actions=np.zeros((num_steps, 2), np.int64),
        log_probs=np.full((num_steps, 2), math.log(0.5), np.float32),
        rewards=np.ones((num_steps, 2), np.float32),
        terminated=np.zeros((num_steps, 2), np.bool_),
        done=np.zeros((num_steps, 2), np.bool_),
        versions=np.array(versions, np.int64),
        returns=returns,
    )


def test_a_collected_fragment_says_what_happened() -> None:
    torch.manual_seed(0)
    policy = Policy()
    collector = Collector(policy, WorkerSpec(worker_idx=1, seed=3, num_envs=2, num_steps=64))
    for version in range(64):
        collector.act(version)
        collector.advance()
    got = collector.take()
    assert got.worker_idx == 1
    assert got.num_steps == 128
    assert got.obs.shape == (64, 2, 4)
    assert got.versions.tolist() == list(range(64))
    assert len(got.returns) == got.done.sum() > 0  # an untrained policy falls within 64 steps
    assert np.array_equal(got.done, got.terminated)  # and far from the time limit
    goes_on = ~got.done[:-1]
    assert np.array_equal(got.obs[1:][goes_on], got.next_obs[:-1][goes_on])
    assert not np.array_equal(got.obs[1:][~goes_on], got.next_obs[:-1][~goes_on])
    with torch.no_grad():
        logits = policy(torch.from_numpy(got.obs))
    expected = logits.log_softmax(-1).gather(-1, torch.from_numpy(got.actions)[..., None])
    np.testing.assert_allclose(got.log_probs, expected.squeeze(-1).numpy(), atol=1e-5)


def test_the_next_fragment_goes_on_where_the_last_one_ended() -> None:
    collector = Collector(Policy(), WorkerSpec(worker_idx=0, seed=0, num_envs=1, num_steps=3))
    parts = []
    for _ in range(2):
        for _ in range(3):
            collector.act(1)
            collector.advance()
        parts.append(collector.take())
    assert np.array_equal(parts[0].next_obs[-1], parts[1].obs[0])


def test_ppo_learns_which_action_is_rewarded() -> None:
    torch.manual_seed(0)
    policy = Policy(hidden=16)
    learner = PPO(policy, lr=1e-2, num_epochs=4)
    generator = np.random.default_rng(0)
    obs = torch.zeros(4)
    before = policy(obs).softmax(-1)[1].item()
    for _ in range(3):
        batch = fragment(versions=(1,) * 64)
        batch.actions[:] = generator.integers(2, size=(64, 2))
        batch.rewards[:] = batch.actions
        batch.terminated[:] = batch.done[:] = True  # every step is an episode
        with torch.no_grad():
            log_probs = policy(torch.from_numpy(batch.obs)).log_softmax(-1)
        chosen = log_probs.gather(-1, torch.from_numpy(batch.actions)[..., None])
        batch.log_probs[:] = chosen.squeeze(-1).numpy()
        assert math.isfinite(learner.update([batch]))
    assert policy(obs).softmax(-1)[1].item() > before + 0.1


def progress_with(returns: list[float]) -> Progress:
    progress = Progress(num_workers=2, seconds=60.0)
    progress.start()
    progress.collected([fragment(versions=(3, 4), returns=tuple(returns))], version=5)
    return progress


def test_progress_counts_steps_versions_and_lag() -> None:
    progress = progress_with([10.0, 20.0])
    progress.collected([fragment(worker_idx=1, versions=(5, 5))], version=5)
    for elapsed in (0.001, 0.002, 0.003):
        progress.sent(SendReport(epoch=1, version=6, acked=frozenset({0, 1}), elapsed=elapsed))
    summary = progress.summary()
    assert summary["steps"] == 8
    assert summary["episodes"] == 2
    assert summary["versions"] == 6
    assert [worker["version"] for worker in summary["workers"]] == [4, 5]
    assert [worker["lag"] for worker in summary["workers"]] == [1, 0]
    assert summary["mean_lag"] == pytest.approx(0.75)  # (1.5 + 0) / 2
    assert summary["send_latency_p50"] == pytest.approx(0.002)
    assert not progress.finished


@pytest.mark.parametrize(
    ("returns", "risen", "solved"),
    [
        ([], False, False),
        ([20.0] * 60, False, False),
        ([20.0] * 39, False, False),
        ([20.0] * 20 + [39.0] * 20, False, False),
        ([20.0] * 20 + [41.0] * 20, True, False),
        ([20.0] * 20 + [500.0] * 37, True, False),
        ([20.0] * 20 + [500.0] * 40, True, True),
    ],
)
def test_risen_and_solved(returns: list[float], risen: bool, solved: bool) -> None:
    progress = progress_with(returns)
    assert (progress.risen, progress.solved) == (risen, solved)
    assert progress.finished is solved
    assert ("did not rise" in final_line(progress)) is not risen


def test_a_summary_of_nothing_is_valid_json() -> None:
    progress = Progress(num_workers=1, seconds=1.0)
    assert json.loads(json.dumps(progress.summary(), allow_nan=False))["final_return"] is None


def test_the_table_shows_every_worker() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(progress_with([20.0] * 30), "the title"))
    lines = console.export_text().splitlines()
    assert lines[0].startswith("the title")
    assert any(
        line.split() == ["│", "0", "│", "4", "│", "1", "│", "4", "│", "30", "│"] for line in lines
    )
    assert any(line.split()[:3] == ["│", "trainer", "│"] for line in lines)
    assert any("20.0" in line and "▁" in line for line in lines)


def test_without_a_terminal_it_prints_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with showing(Console(soft_wrap=True), "the title") as show:
        show(progress_with([7.0]))
        show(progress_with([8.0]))  # too soon for another line
    first, second = capsys.readouterr().out.splitlines()
    assert first == "the title"
    assert "return    7.0" in second
    assert "worker 0: version 4 lag 1" in second
    assert "\x1b" not in second


@pytest.mark.slow
def test_a_worker_that_raises_sends_its_traceback() -> None:
    with Workers(None, num_workers=1, seed=0, sync=True) as workers:  # None is no scheme
        (process,) = workers.processes
        pid = process.pid
        assert pid is not None
        with pytest.raises(WorkerDied, match=r"(?s)worker 0 raised:.*work_sync.*AttributeError"):
            workers.receive()
    assert not alive(pid)


# -- the command ------------------------------------------------------------------------------


LACKING = """
import os, sys
import torch  # once for all; nothing of aiosync, whose imports are under test
for package in sys.argv[1:]:
    if os.fork() == 0:
        sys.modules[package] = None
        from aiosync.cli import main
        sys.exit(main(["demo"]))
    _, status = os.wait()
    print(f"status {os.waitstatus_to_exitcode(status)}", file=sys.stderr, flush=True)
"""


@pytest.mark.heavy
def test_a_missing_package_ends_in_advice() -> None:
    packages = ["typer", "rich", "gymnasium"]
    done = subprocess.run(
        [sys.executable, "-c", LACKING, *packages],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    *shown, rest = done.stderr.split("status 1\n")
    assert rest == ""
    for package, text in zip(packages, shown, strict=True):
        assert "pip install 'aiosync[demo]'" in text
        assert package in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert aiosync.cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"aiosync {aiosync.__version__}\n"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["demo", "--transport", "pigeon"], "pigeon"),
        (["demo", "--workers", "0"], "--workers"),
        (["demo", "--plot", "/no/such/folder/plot.png"], "/no/such/folder"),
        (["demo", "--plot", "plot.nothing"], "plot.nothing"),
        (["demo", "--json", "/no/such/folder/x.json"], "/no/such/folder"),
        (["dance"], "dance"),
    ],
)
def test_wrong_usage_is_refused_before_anything_starts(
    args: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert aiosync.cli.main(args) == 2
    shown = capsys.readouterr()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.err)  # some terminals and CI get styles
    assert text in plain
    assert "Traceback" not in plain
    assert shown.out == ""


@pytest.mark.slow
def test_doctor_finds_this_machine_fit() -> None:
    done = run("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("aiosync", "torch", "event loop", "memfd", "cores", "unix sockets"):
        assert name in done.stdout
    assert aiosync.__version__ in done.stdout
    assert "FAILED" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("transport", "sync"),
    [
        pytest.param("shm", False, id="shm-async"),
        pytest.param("pipe", True, id="pipe-sync", marks=pytest.mark.heavy),
    ],
)
def test_the_return_rises(transport: str, sync: bool, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    args = [*demo_args(transport, sync), "--seconds", "8", "--json", "-", "--plot", str(plot)]
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
        assert worker["version"] > 10  # the worker was kept fresh while it collected
    assert plot.read_bytes().startswith(b"\x89PNG")


@contextlib.contextmanager
def running(*args: str, until: str) -> Iterator[tuple[subprocess.Popen[str], set[int]]]:
    """Run the demo in a session of its own; give it and its workers once it wrote ``until``."""
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


def workers_of(pid: int) -> set[int]:
    children: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        children.update(map(int, path.read_text().split()))
    return {child for child in children if b"spawn_main" in read_cmdline(child)}


def read_cmdline(pid: int) -> bytes:
    with contextlib.suppress(OSError):  # it has just ended
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def interrupt(process: subprocess.Popen[str], workers: set[int]) -> None:
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does: workers get it as well


def kill_one_worker(process: subprocess.Popen[str], workers: set[int]) -> None:
    os.kill(min(workers), signal.SIGKILL)


INTERRUPTED = (interrupt, 130, "Stopped by Ctrl-C")
KILLED = (kill_one_worker, 1, "was killed by SIGKILL")
SHM, PIPE_SYNC = ("shm", False), ("pipe", True)
heavy = [pytest.mark.heavy]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("transport", "sync", "act", "status", "text"),
    [
        pytest.param(
            *variant,
            *ending,
            id=f"{'-'.join(map(str, variant))}-{ending[0].__name__}",
            # Each start is three interpreters with torch: a transport, an API and an ending each.
            marks=[] if (variant, ending) in ((SHM, INTERRUPTED), (PIPE_SYNC, KILLED)) else heavy,
        )
        for variant, endings in (
            (SHM, (INTERRUPTED, KILLED)),
            (("shm", True), (INTERRUPTED,)),
            (("pipe", False), (KILLED,)),
            (PIPE_SYNC, (INTERRUPTED, KILLED)),
        )
        for ending in endings
    ],
)
def test_it_ends_cleanly(
    transport: str,
    sync: bool,
    act: Callable[[subprocess.Popen[str], set[int]], Any],
    status: int,
    text: str,
) -> None:
    args = [*demo_args(transport, sync), "--seconds", "60"]
    with running(*args, until="version") as (process, workers):
        assert len(workers) == 2
        act(process, workers)
        _, err = process.communicate(timeout=20)
        assert process.returncode == status, err
        assert text in err
        assert "Traceback" not in err
        assert not [pid for pid in workers if alive(pid)]


def session_of(pid: int) -> int | None:
    with contextlib.suppress(OSError):  # it has just ended
        return os.getsid(pid)
    return None


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "sync", [pytest.param(False, id="async", marks=heavy), pytest.param(True, id="sync")]
)
def test_ctrl_c_while_the_workers_start(sync: bool) -> None:
    with running(*demo_args("shm", sync), until="aiosync demo") as (process, workers):
        interrupt(process, workers)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 130, err
        assert "Stopped by Ctrl-C" in err
        assert "Traceback" not in err
        session = [
            int(path.name)
            for path in Path("/proc").glob("[0-9]*")
            if session_of(int(path.name)) == process.pid
        ]
        assert not [pid for pid in session if b"spawn_main" in read_cmdline(pid)]
