"""The benchmark's own process: starts trainers and lets them take turns.

Must not import torch, torchrl, ray, typer or rich.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from aiosync.bench._contenders import CONTENDERS, Contender
from aiosync.bench._figures import figures_of
from aiosync.bench._plan import Plan
from aiosync.bench._results import Case, Missing, Results, Timing

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from aiosync.bench._contender import Usage
    from aiosync.bench._trainer import Block

__all__ = ["Failed", "TrainerProcess", "run"]

_PATIENCE = 300.0
_END_SECONDS = 30.0


class Failed(RuntimeError):
    """A contender could not do what it was asked to; the text is the error."""


class TrainerProcess:
    """A contender's trainer, in a process of its own, asked over a pipe."""

    def __init__(self, contender: Contender) -> None:
        from aiosync.bench._trainer import trainer_main

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["aiosync.bench._trainer", "aiosync", "aiosync.sync"])
        self.contender = contender
        self._pipe, theirs = context.Pipe()
        # Not a daemon: those may not have workers of their own. close() is always called.
        self._process: BaseProcess = context.Process(target=trainer_main, args=(contender, theirs))
        self._process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether the process is there to be asked."""
        return self._process.is_alive()

    def open(self, case: Case) -> None:
        """Start workers and join them."""
        self._ask("open", case)

    def begin_open(self, case: Case) -> None:
        """Start what :meth:`open` does, without waiting for it; :meth:`end` does that."""
        self._put("open", case)

    def begin_close(self) -> None:
        """Start what :meth:`close_case` does, without waiting for it; :meth:`end` does that."""
        self._put("close", None)

    def end(self) -> None:
        """Wait for what was begun."""
        self._take()

    def block(self, sends: int) -> Block:
        """Send so many times, or for a second, and have the workers checked."""
        return cast("Block", self._ask("block", sends))

    def usage(self) -> tuple[Usage, list[Usage]]:
        """Return what the trainer's process and each worker have used so far."""
        return cast("tuple[Usage, list[Usage]]", self._ask("usage"))

    def reset_peak(self) -> None:
        """Let the peaks of resident memory start again, everywhere."""
        self._ask("reset peak")

    def call(self, name: str) -> Any:
        """Call a method of the contender that is not part of what all have."""
        return self._ask("call", name)

    def close_case(self) -> None:
        """End the workers."""
        self._ask("close")

    def close(self) -> None:
        """End the process; kill it if it does not. Idempotent."""
        with contextlib.suppress(OSError):  # it is gone already
            self._pipe.send(None)
        self._process.join(_END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def _ask(self, question: str, argument: Any = None) -> Any:
        self._put(question, argument)
        return self._take()

    def _put(self, question: str, argument: Any) -> None:
        try:
            self._pipe.send((question, argument))
        except OSError as exc:
            raise self._ended() from exc

    def _take(self) -> Any:
        try:
            if not self._pipe.poll(_PATIENCE):
                self._process.kill()
                raise Failed(f"no answer in {_PATIENCE:g} s")
            good, value = self._pipe.recv()
        except (EOFError, OSError) as exc:
            raise self._ended() from exc
        if not good:
            raise Failed(value)
        return value

    def _ended(self) -> Failed:
        self._process.join(_END_SECONDS)
        return Failed(f"the process ended, exit code {self._process.exitcode}")


@dataclass(slots=True)
class _Sum:
    """The blocks of one contender on one case."""

    seconds: list[float] = field(default_factory=list)
    trainer_cpu: float = 0.0
    worker_cpu: float = 0.0

    def add(self, block: Block) -> None:
        self.seconds += block.seconds
        self.trainer_cpu += block.trainer_cpu
        self.worker_cpu += block.worker_cpu


Progress = Callable[[int, int, str], None]
"""Told how many steps are done, of how many, and what comes next."""


def run(plan: Plan, results: Results, progress: Progress) -> None:
    """Do everything that a plan lists.

    What fails becomes an entry of ``results.missing``; the rest goes on.

    Args:
        plan: What to do.
        results: Filled in as it goes: what is there is kept if the run is interrupted.
        progress: Called before each step.
    """
    started = time.monotonic()
    # torch's RPC writes a line for every link that closes; trainers and workers inherit this.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    by_transport: dict[str, list[Case]] = {}
    for case in plan.cases:
        by_transport.setdefault(case.transport, []).append(case)
    total, done = len(plan.cases), 0
    try:
        for transport, cases in by_transport.items():
            contenders = [
                each for each in CONTENDERS[transport] if _wanted(each, transport, plan, results)
            ]
            with ExitStack() as stack:
                trainers: dict[str, TrainerProcess] = {}
                for case in cases:
                    results.elapsed = time.monotonic() - started
                    progress(done, total, str(case))
                    for each in contenders:
                        there = trainers.get(each.name)
                        if plan.takes(case, each.name) and (there is None or not there.alive):
                            trainers[each.name] = TrainerProcess(each)
                            stack.callback(trainers[each.name].close)
                    chosen = {
                        name: trainer
                        for name, trainer in trainers.items()
                        if plan.takes(case, name)
                    }
                    _measure(case, chosen, plan, results)
                    for each in contenders:
                        if not each.lasting and each.name in trainers:
                            trainers.pop(each.name).close()
                    done += 1
    finally:
        results.elapsed = time.monotonic() - started
    progress(done, total, "done")


def _wanted(contender: Contender, transport: str, plan: Plan, results: Results) -> bool:
    if not any(
        case.transport == transport and plan.takes(case, contender.name) for case in plan.cases
    ):
        return False
    missing = contender.missing()
    if missing:
        what = f"{transport}, {contender.name}"
        results.missing.append(Missing(what, f"not installed: {', '.join(missing)}"))
    return not missing


def _measure(
    case: Case, trainers: Mapping[str, TrainerProcess], plan: Plan, results: Results
) -> None:
    """One case: every contender is opened, takes its turns, and is closed."""

    def failed(name: str, error: Failed) -> None:
        results.missing.append(Missing(f"{case}, {name}", str(error).strip()))

    sums: dict[str, _Sum] = {}
    with _opened(case, trainers, failed) as opened:
        for turn in range(plan.blocks + 1):  # the first one warms up and does not count
            for name in list(opened):
                try:
                    block = opened[name].block(plan.sends(case) if turn else 2)
                except Failed as exc:
                    failed(name, exc)
                    del opened[name]
                    sums.pop(name, None)
                    continue
                if turn:
                    sums.setdefault(name, _Sum()).add(block)
        for name, total in sums.items():
            results.timings.append(
                Timing(case, name, total.seconds, total.trainer_cpu, total.worker_cpu)
            )
        if plan.figures:
            for name, trainer in opened.items():
                try:
                    results.figures.extend(figures_of(case, name, trainer))
                except Failed as exc:
                    failed(f"{name}, figures", exc)


@contextmanager
def _opened(
    case: Case, trainers: Mapping[str, TrainerProcess], failed: Callable[[str, Failed], None]
) -> Iterator[dict[str, TrainerProcess]]:
    opened: dict[str, TrainerProcess] = {}
    try:
        # All at the same time: most of it is imports and processes that start.
        _together(trainers, lambda trainer: trainer.begin_open(case), opened, failed)
        yield opened
    finally:
        _together(trainers, TrainerProcess.begin_close, {}, failed)


def _together(
    trainers: Mapping[str, TrainerProcess],
    begin: Callable[[TrainerProcess], None],
    good: dict[str, TrainerProcess],
    failed: Callable[[str, Failed], None],
) -> None:
    begun = {}
    for name, trainer in trainers.items():
        try:
            begin(trainer)
            begun[name] = trainer
        except Failed as exc:
            failed(name, exc)
    for name, trainer in begun.items():
        try:
            trainer.end()
            good[name] = trainer
        except Failed as exc:
            failed(name, exc)
