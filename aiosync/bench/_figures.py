"""Figures that are not latencies: memory, CPU, wake-ups, lag.

They are taken after the timed blocks of a case, from one contender at a time while the others are
quiet. Must not import torch, torchrl, ray, typer or rich.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from aiosync.bench._results import LIMIT, Case, Figure

if TYPE_CHECKING:
    from aiosync.bench._contender import Usage
    from aiosync.bench._lag import Tick
    from aiosync.bench._run import TrainerProcess

__all__ = ["figures_of"]

_NBYTES = {"64MiB": 64 * 2**20, "512MiB": 512 * 2**20}
"""Of the models that are large enough for figures of memory and bandwidth."""

_SENDS = 3  # in a block here; odd, as workers may look at one of two memories at each
_SMALLEST = "4x2"
_IDLE_SECONDS = 2.0
_ASKED = 3

# Of one surface as good as of the other, so measured once.
_SAME_AS_OTHERS = ("aiosync/asyncio",)


def figures_of(case: Case, contender: str, trainer: TrainerProcess) -> Iterator[Figure]:
    """Measure what a contender that is open on a case costs besides time.

    The contender may be opened anew meanwhile, and nothing more can be asked of it afterwards but
    to be closed. What was found before something failed has been yielded.

    Args:
        case: What it is open on.
        contender: Its name.
        trainer: Its trainer's process.

    Yields:
        Nothing for limits and for busy workers.

    Raises:
        Failed: The contender failed at something that it was asked.
    """
    if contender.startswith(LIMIT) or case.busy:
        return
    measure = _Measure(case, contender, trainer)
    if case.workload in _NBYTES and contender not in _SAME_AS_OTHERS:
        yield from measure.memory_and_cpu(_NBYTES[case.workload])
    if case.workers != 1:
        return
    ours_async = contender.startswith("aiosync") and trainer.contender.loop != "blocking"
    if case.workload == _SMALLEST:
        yield from measure.idle()
    if case.workload in (_SMALLEST, "1000x4KiB", "512MiB"):
        yield measure.critical_section(ours_async)
    if not ours_async:
        return
    if case.workload == "512MiB" and case.transport in ("tcp", "unix"):
        yield measure.delivery()
    if case.workload == "512MiB" and case.transport in ("shm", "pipe", "tcp", "unix"):
        yield from measure.loop_lag()
    if case.workload == "64MiB" and case.transport in ("tcp", "unix"):
        yield measure.late_joiner()  # last: it ends the worker that all the others ask


class _Measure:
    """One contender on one case."""

    def __init__(self, case: Case, contender: str, trainer: TrainerProcess) -> None:
        self._case = case
        self._contender = contender
        self._trainer = trainer

    def _figure(self, name: str, value: float, unit: str, note: str = "") -> Figure:
        case = self._case
        place = (case.transport, case.workload, case.workers, self._contender)
        return Figure(name, *place, value, unit, note)

    def memory_and_cpu(self, nbytes: int) -> Iterator[Figure]:
        """Compare with the same scheme for the smallest model, in the same processes.

        That leaves out what interpreter, libraries and the scheme itself need at any size, and
        what a process kept from the cases before.
        """
        trainer = self._trainer
        trainer.close_case()
        trainer.open(dataclasses.replace(self._case, workload=_SMALLEST))
        trainer.block(_SENDS)
        small, small_workers = trainer.usage()
        trainer.close_case()
        trainer.open(self._case)
        trainer.block(2)  # all memory is there, and has been written once
        trainer.reset_peak()
        block = trainer.block(_SENDS)
        large, large_workers = trainer.usage()
        delivered = nbytes * self._case.workers * len(block.seconds)
        yield self._figure(
            "CPU per GB",
            (block.trainer_cpu + block.worker_cpu) / delivered * 1e9,
            "s",
            "all processes; a GB counts once for each worker that gets it",
        )
        counted = (
            "most resident, above the same with 4x2, without its own model; shared memory counts "
            "in full"
        )
        yield self._figure(
            "peak extra memory, trainer",
            _copies(large.peak_rss - small.rss, nbytes),
            "copies",
            counted,
        )
        yield self._figure(
            "peak extra memory, worker",
            max(
                _copies(each.peak_rss - before.rss, nbytes)
                for each, before in zip(large_workers, small_workers, strict=True)
            ),
            "copies",
            counted,
        )
        if self._case.transport != "ray":  # the object store is a process that nobody asks
            extra = _pss(large, large_workers) - _pss(small, small_workers)
            yield self._figure(
                "extra memory on the host",
                _copies(extra, nbytes),
                "copies",
                "between sends, trainer and workers together, above the same with 4x2, without "
                "the trainer's model; shared memory counts once, workers' models count",
            )

    def idle(self) -> Iterator[Figure]:
        """Watch a worker that nothing is sent to; subtract what asking it costs."""
        before = self._worker()
        time.sleep(_IDLE_SECONDS)
        asked = [self._worker() for _ in range(1 + _ASKED)]
        pairs = list(itertools.pairwise(asked))
        switches = statistics.median(new.switches - old.switches for old, new in pairs)
        cpu = statistics.median(new.cpu - old.cpu for old, new in pairs)
        note = f"a worker's process, all threads, over {_IDLE_SECONDS:g} s"
        yield self._figure(
            "idle wake-ups",
            max(0.0, asked[0].switches - before.switches - switches) / _IDLE_SECONDS,
            "1/s",
            note,
        )
        yield self._figure(
            "idle CPU",
            max(0.0, asked[0].cpu - before.cpu - cpu) * 1e3 / _IDLE_SECONDS,
            "ms/s",
            note,
        )

    def _worker(self) -> Usage:
        return self._trainer.usage()[1][0]

    def critical_section(self, ours_async: bool) -> Figure:
        """How long the trainer may not touch its parameters."""
        if ours_async:
            seconds = cast("list[float]", self._trainer.call("critical_section"))
            note = "send_nowait()"
        else:
            seconds = self._trainer.block(_SENDS if self._case.workload in _NBYTES else 5).seconds
            note = "the whole send()"
        return self._figure("critical section", statistics.median(seconds) * 1e3, "ms", note)

    def delivery(self) -> Figure:
        """How long an update takes to the workers, without the copy for those to come."""
        seconds = cast("list[float]", self._trainer.call("delivery"))
        note = "median, from the call of send() to the worker's word; send() then copies"
        return self._figure("delivery", statistics.median(seconds) * 1e3, "ms", note)

    def loop_lag(self) -> Iterator[Figure]:
        """How late timers of a worker's loop come while 1 GiB arrives."""
        ticks = cast("list[Tick]", self._trainer.call("loop_lag"))
        late = [tick.late * 1e3 for tick in ticks]
        held = [tick.held * 1e3 for tick in ticks]
        yield self._figure(
            "loop lag p99",
            _p99(late),
            "ms",
            f"{len(ticks)} timers of 2 ms while 1 GiB arrived, worst {max(late):.1f} ms",
        )
        yield self._figure(
            "loop lag p99, computing",
            _p99(held),
            "ms",
            "the part of it in which the loop's thread computed rather than waited for a core",
        )

    def late_joiner(self) -> Figure:
        """How long a worker that joins a run waits for its weights."""
        seconds = cast("float", self._trainer.call("first_version"))
        note = "from its connect() to the weights in its model"
        return self._figure("first version for a late joiner", seconds * 1e3, "ms", note)


def _pss(trainer: Usage, workers: list[Usage]) -> int:
    return trainer.pss + sum(worker.pss for worker in workers)


def _copies(used: int, nbytes: int) -> float:
    """Copies of the model besides one; what is a little less than none is noise."""
    return max(0.0, used / nbytes - 1)


def _p99(values: list[float]) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[98]
