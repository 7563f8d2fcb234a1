"""``aiosync demo``: a trainer that collects, learns and sends, as async and as classic code.

Read :func:`train_async` and :func:`train_sync`; they differ by ``await`` only. The algorithm and
the workers are in ``_demo_ppo.py``. The rest starts processes, and shows what is measured.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

import aiosync
import aiosync.sync
from aiosync.cli._demo_ppo import PPO, Fragment, Policy, work
from aiosync.cli._options import errors_to, failing
from aiosync.errors import AiosyncError, ConfigError

__all__ = ["DemoOptions", "run_demo"]

_BATCH_STEPS = 512  # environment steps that one update of the policy learns from
_SOLVED_RETURN = 475.0  # mean return at which CartPole-v1 counts as solved, here over 40 episodes
_WINDOW = 20  # episodes in the means that are shown and compared
_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to run, and where the results go; as on the command line."""

    transport: str
    num_workers: int
    sync: bool
    seconds: float
    seed: int
    plot: Path | None
    json_to: str | None

    def make_scheme(self, package: Any) -> Any:
        """The scheme of ``aiosync`` or of ``aiosync.sync``."""
        shm = self.transport == "shm"
        name = "SharedMemWeightSyncScheme" if shm else "MultiProcessWeightSyncScheme"
        return getattr(package, name)()


@dataclass(slots=True)
class Progress:
    """Everything measured in one run. Times are seconds since :attr:`started`.

    Attributes:
        options: What is run.
        show: Called after every update of the policy.
        returns: (time, return) of every episode, in the order in which they arrived.
        lags: (time, worker, mean lag of the steps) of every fragment, in versions.
        latencies: Seconds from the call of ``send`` to the last APPLIED ack, for each send.
        workers: Newest version, its lag, steps and episodes of each worker.
        version: Newest version that was sent.
        started: When the workers had the first weights.
        elapsed: Training time at the last send.
    """

    options: DemoOptions
    show: Callable[[Progress], None]
    workers: list[dict[str, int]] = field(init=False)
    returns: list[tuple[float, float]] = field(default_factory=list)
    lags: list[tuple[float, int, float]] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    version: int = 0
    started: float = 0.0
    elapsed: float = 0.0

    def __post_init__(self) -> None:
        names = ("worker_idx", "version", "lag", "steps", "episodes")
        self.workers = [
            dict(zip(names, (idx, 0, 0, 0, 0), strict=True))
            for idx in range(self.options.num_workers)
        ]

    def collected(self, batch: list[Fragment], version: int) -> float:
        """Note a batch; return the factor on the learning rate, which falls to 0.1 with time."""
        now = time.monotonic() - self.started
        for fragment in batch:
            worker = self.workers[fragment.worker_idx]
            worker["version"] = int(fragment.versions[-1])
            worker["lag"] = version - worker["version"]
            worker["steps"] += fragment.actions.size
            worker["episodes"] += len(fragment.returns)
            self.returns += [(now, value) for value in fragment.returns]
            lag = version - float(fragment.versions.mean())
            self.lags.append((now, fragment.worker_idx, lag))
        return max(0.1, 1.0 - now / self.options.seconds)

    def sent(self, report: aiosync.SendReport) -> bool:
        """Note a send that every worker has applied; whether to go on."""
        self.version = report.version
        self.latencies.append(report.elapsed)
        self.elapsed = time.monotonic() - self.started
        self.show(self)
        return not self.solved and self.elapsed < self.options.seconds

    def mean_return(self, first: bool = False) -> float:
        """Mean return of the first or the last 20 episodes; NaN when there is none."""
        values = [value for _, value in self.returns]
        return _mean(values[:_WINDOW] if first else values[-_WINDOW:])

    @property
    def solved(self) -> bool:
        """Whether the last 40 episodes are good enough to stop early."""
        last = [value for _, value in self.returns[-2 * _WINDOW :]]
        return len(last) == 2 * _WINDOW and _mean(last) >= _SOLVED_RETURN

    def summary(self) -> dict[str, Any]:
        """Return the run in a few numbers that JSON can hold; times in seconds."""
        start, final = self.mean_return(first=True), self.mean_return()
        p50, p95 = (_percentile(self.latencies, percent) for percent in (50, 95))
        return {
            "transport": self.options.transport,
            "sync": self.options.sync,
            "num_workers": self.options.num_workers,
            "start_return": start,
            "final_return": final,
            "risen": len(self.returns) >= 2 * _WINDOW and final >= 2 * start,
            "solved": self.solved,
            "seconds": round(self.elapsed, 3),
            "steps": sum(worker["steps"] for worker in self.workers),
            "episodes": len(self.returns),
            "versions": self.version,
            "send_latency_p50": p50,
            "send_latency_p95": p95,
            "mean_lag": _mean([lag for _, _, lag in self.lags]),
            "workers": self.workers,
        }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else math.nan


# -- training -----------------------------------------------------------------------------------


async def train_async(options: DemoOptions, progress: Progress) -> None:
    """Train with the async API."""
    policy = Policy()
    learner = PPO(policy)
    scheme = options.make_scheme(aiosync)
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=options.num_workers)
    async with scheme:
        with running(options, scheme) as workers:
            # Every worker has the first weights when this returns; one that dies is noticed.
            await scheme.connect(processes=workers.processes)
            progress.started = time.monotonic()
            going = True
            while going:
                batch = await asyncio.to_thread(workers.collect)
                lr_scale = progress.collected(batch, scheme.version)
                await asyncio.to_thread(learner.update, batch, lr_scale)
                going = progress.sent(await scheme.send())  # returns when all have applied it


def train_sync(options: DemoOptions, progress: Progress) -> None:
    """Train with the blocking facade."""
    policy = Policy()
    learner = PPO(policy)
    scheme = options.make_scheme(aiosync.sync)
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=options.num_workers)
    with scheme, running(options, scheme) as workers:
        scheme.connect(processes=workers.processes)
        progress.started = time.monotonic()
        going = True
        while going:
            batch = workers.collect()
            lr_scale = progress.collected(batch, scheme.version)
            learner.update(batch, lr_scale)
            going = progress.sent(scheme.send())


class Workers:
    """The processes that collect. Nothing here is about weights.

    Each worker has one fragment in the making and at most one waiting to be taken, so a slow
    trainer makes its workers wait and never gets old data.
    """

    def __init__(self) -> None:
        self.processes: list[SpawnProcess] = []
        self.channels: list[Connection] = []
        self.stopped = False

    def collect(self) -> list[Fragment]:
        """Return what one update of the policy learns from; blocks, and ends when stopped."""
        batch: list[Fragment] = []
        while sum(fragment.actions.size for fragment in batch) < _BATCH_STEPS:
            for channel in wait(self.channels, _LOOK_SECONDS):
                assert isinstance(channel, Connection)
                try:
                    batch.append(channel.recv())
                    channel.send_bytes(b"next")
                except (EOFError, ConnectionResetError, BrokenPipeError):
                    process = self.processes[self.channels.index(channel)]
                    process.join(5.0)
                    raise AiosyncError(
                        f"{process.name} (pid {process.pid}) ended with exit code "
                        f"{process.exitcode} before it was asked to stop"
                    ) from None
            if self.stopped:
                break
        return batch


@contextmanager
def running(options: DemoOptions, scheme: Any) -> Iterator[Workers]:
    """Start the workers, and end them: ask, then kill."""
    workers = Workers()
    context = multiprocessing.get_context("spawn")
    patience = 0.5  # a worker that still starts hears nothing
    # Ctrl-C reaches the whole process group. Workers inherit that it is blocked; one that comes
    # meanwhile is not lost here.
    resource_tracker.ensure_running()  # first, because it unblocks SIGINT when it starts
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for idx in range(options.num_workers):
            ours, theirs = context.Pipe()
            workers.channels.append(ours)
            process = context.Process(
                target=work,
                args=(idx, options.seed, scheme, theirs, options.sync),
                name=f"worker {idx}",
                daemon=True,
            )
            process.start()
            workers.processes.append(process)
            theirs.close()  # so that its end is the worker's end
            ours.send_bytes(b"next")
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield workers
        patience = 5.0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        workers.stopped = True
        for channel in workers.channels:
            channel.close()
        deadline = time.monotonic() + patience
        for process in workers.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
            process.close()


# -- showing ------------------------------------------------------------------------------------


def run_demo(options: DemoOptions) -> int:
    """Run the whole demo, show it, and return the exit status.

    Sets the number of torch's threads to one and seeds torch, both for the whole process.
    """
    errors = errors_to()
    console = errors if options.json_to == "-" else Console(highlight=False, soft_wrap=True)
    title = (
        f"aiosync demo: CartPole-v1, {options.num_workers} workers, {options.transport}, "
        f"{'aiosync.sync' if options.sync else 'aiosync'}"
    )
    with failing("demo", errors) as status:
        for name, path in (("--plot", options.plot), ("--json", options.json_to)):
            if path not in (None, "-") and not Path(path).absolute().parent.is_dir():
                raise ConfigError(f"{name}: there is no folder {Path(path).absolute().parent}")
        if options.plot is not None:
            from matplotlib.figure import Figure

            known = Figure().canvas.get_supported_filetypes()
            if options.plot.suffix.lstrip(".").lower() not in known:
                ends = ", ".join(sorted(known))
                raise ConfigError(f"--plot: {options.plot.name} must end in one of: {ends}")
        status[0] = 1
        torch.set_num_threads(1)
        torch.manual_seed(options.seed)
        with showing(console, title) as show:
            progress = Progress(options, show)
            if options.sync:
                train_sync(options, progress)
            else:
                aiosync.run(train_async(options, progress))
    summary = progress.summary()
    rose = "rose" if summary["risen"] else "did not rise"
    console.print(
        f"{'Solved' if progress.solved else f'The return {rose}'}: mean return "
        f"{summary['start_return']:.1f} -> {summary['final_return']:.1f} in "
        f"{progress.elapsed:.1f} s, {summary['steps']} steps and {progress.version} versions."
    )
    if options.plot is not None:
        save_plot(progress, options.plot, title)
        console.print(f"Picture: {options.plot}", markup=False)
    numbers = {name: None if value != value else value for name, value in summary.items()}
    text = json.dumps(numbers, indent=2) + "\n"
    if options.json_to == "-":
        sys.stdout.write(text)
    elif options.json_to is not None:
        Path(options.json_to).write_text(text, encoding="utf-8")
    return 0 if summary["risen"] else 1


@contextmanager
def showing(console: Console, title: str) -> Iterator[Callable[[Progress], None]]:
    """Show progress: a table on a terminal, and a line every two seconds elsewhere."""
    console.print(title, markup=False)
    next_at = 0.0

    def show(progress: Progress) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at:
            next_at = time.monotonic() + (0.5 if live.is_started else 2.0)
            if live.is_started:
                live.update(render(progress), refresh=True)
            else:
                console.print(line(progress), markup=False)

    live = Live(console=console, auto_refresh=False)
    if console.is_terminal:
        with live:
            yield show
    else:
        yield show


def line(progress: Progress) -> str:
    """The run so far in one line."""
    workers = ", ".join(
        f"worker {idx}: version {worker['version']} lag {worker['lag']}"
        for idx, worker in enumerate(progress.workers)
    )
    p50, p95 = (_percentile(progress.latencies, percent) * 1e3 for percent in (50, 95))
    return (
        f"{progress.elapsed:5.1f} s  return {progress.mean_return():6.1f}  "
        f"version {progress.version}  {workers}  send p50 {p50:.2f} ms p95 {p95:.2f} ms"
    )


def render(progress: Progress) -> Table:
    """The run so far as a table."""
    table = Table(caption=line(progress).partition("  worker")[0], caption_justify="left")
    for name in progress.workers[0]:
        table.add_column(name, justify="right", min_width=9)
    for worker in progress.workers:
        table.add_row(*(f"{value:,}" for value in worker.values()))
    return table


def save_plot(progress: Progress, path: Path, title: str) -> None:
    """Save return and lag over time as a picture; the ending of ``path`` says which format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    figure.suptitle(title)
    times = [at for at, _ in progress.returns]
    values = [value for _, value in progress.returns]
    means = [_mean(values[max(0, i - _WINDOW) : i]) for i in range(1, len(values) + 1)]
    upper.plot(times, values, ".", markersize=3, alpha=0.35, label="episode")
    upper.plot(times, means, label=f"mean of the last {_WINDOW}")
    upper.set_ylabel("return")
    for idx in range(len(progress.workers)):
        points = [(at, lag) for at, worker, lag in progress.lags if worker == idx]
        lower.plot(*zip(*points, strict=True), ".", markersize=3, label=f"worker {idx}")
    lower.set(ylabel="lag (versions)", xlabel="time (s)", ylim=(0, None))
    for axes in (upper, lower):
        axes.legend(loc="upper left")
    figure.savefig(path, dpi=120)
