"""Figures that are not latencies: memory, CPU, wake-ups, lag.

They are taken after the timed blocks of a case, from one contender at a time while the others are
quiet.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import uvloop

from aiosync.bench import (
    LIMIT,
    WORKLOADS,
    Case,
    Desk,
    Handle,
    ask_all,
    fill,
    work_async,
)
from tests.bench.compare.lag import Tick, Ticker
from tests.bench.processes import Figure, TrainerProcess

_NBYTES = {"64MiB": 64 * 2**20, "512MiB": 512 * 2**20}
"""Sizes of the models that are large enough for figures of memory and bandwidth."""

_LAG_NBYTES = 2**30
_LARGE_NBYTES = 2**28
_DELIVERIES = 9
# The number of sends in a block is odd, as workers may look at one of two memories at each.
_SENDS = 3
_SMALLEST = "4x2"
_IDLE_SECONDS = 2.0
_ASKED = 3

# Another surface has the same figures as these, so they are measured once.
_SAME_AS_OTHERS = ("aiosync/asyncio",)


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources that a process has used so far.

    Attributes:
        cpu: CPU seconds of all its threads.
        switches: Voluntary context switches of all its threads. Each ended a time awake.
        peak_rss: Most resident memory since the last reset, in bytes.
        pss: Share of resident memory now, in bytes. Memory that several processes map is divided.
        rss: Resident memory now, in bytes.
    """

    cpu: float
    switches: int
    peak_rss: int
    pss: int
    rss: int


def usage(desk: Desk | None = None) -> Usage:
    """Return the usage of this process so far."""
    status = _fields("/proc/self/status")
    return Usage(
        cpu=time.process_time(),
        # Involuntary switches only say that another process had the core.
        switches=resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw,
        peak_rss=status.get("VmHWM", 0),
        pss=_fields("/proc/self/smaps_rollup").get("Pss", 0),
        rss=status.get("VmRSS", 0),
    )


def reset_peak(desk: Desk | None = None) -> None:
    """Reset the peak of resident memory to its present value. Linux only."""
    if os.path.exists("/proc/self/clear_refs"):
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")


def _fields(path: str) -> dict[str, int]:
    """Return the fields in kB of a file of /proc, in bytes; none if there is no such file."""
    found = {}
    if os.path.exists(path):
        with open(path, encoding="ascii") as file:
            for line in file:
                name, _, rest = line.partition(":")
                words = rest.split()
                if words[1:] == ["kB"]:
                    found[name] = int(words[0]) * 1024
    return found


# -- questions to a trainer's process -------------------------------------------------------------


def usages(half: Any, handles: Sequence[Handle]) -> tuple[Usage, list[Usage]]:
    """Return the usage of the trainer's process and of each worker so far."""
    return usage(), ask_all(handles, "call", usage)


def reset_peaks(half: Any, handles: Sequence[Handle]) -> None:
    """Reset the peaks of resident memory in all processes."""
    reset_peak()
    ask_all(handles, "call", reset_peak)


async def critical_section(half: Any, handles: Sequence[Handle]) -> list[float]:
    """Return the seconds in which the trainer must not touch its parameters, a few times."""
    seconds = []
    for _ in range(5 if _nbytes(half.model) < _LARGE_NBYTES else 3):
        started = time.perf_counter()
        handle = half.scheme.send_nowait()
        seconds.append(time.perf_counter() - started)
        await handle
    return seconds


async def delivery(half: Any, handles: Sequence[Handle]) -> list[float]:
    """Return the seconds of updates until every worker reported that it has them.

    A send over a stream returns later: it then copies, for workers to come.
    """
    seconds = []
    for number in range(_DELIVERIES):
        fill(half.model, -1.0 - number)
        seconds.append((await half.scheme.send()).elapsed)
    return seconds


async def loop_lag(half: Any, handles: Sequence[Handle]) -> list[Tick]:
    """Send until 1 GiB has arrived; return the ticks of a worker's loop.

    The ticker runs only while updates are under way, without the optimizer's step.
    """
    ticks: list[Tick] = []
    for send in range(-(-_LAG_NBYTES // _nbytes(half.model))):
        fill(half.model, -1.0 - send)
        await asyncio.to_thread(ask_all, handles, "call", start_ticking)
        await half.send()
        for each in await asyncio.to_thread(ask_all, handles, "call", stop_ticking):
            ticks += each
    return ticks


async def first_version(half: Any, handles: Sequence[Handle]) -> float:
    """Replace all workers by another one; return the seconds until it had its weights.

    They count from its call of connect() until it has the current version. Nothing can be measured
    on this case afterwards.
    """
    await half.send()
    await asyncio.to_thread(half.crew.stop)
    nbytes = _nbytes(half.model)
    (workload,) = (name for name, each in WORKLOADS.items() if each.nbytes == nbytes)
    loop = asyncio.new_event_loop
    if isinstance(asyncio.get_running_loop(), uvloop.Loop):
        loop = uvloop.new_event_loop
    late = half.crew.start(work_late, 1, half.scheme, workload, loop)
    # The worker answers when its imports are done.
    await asyncio.to_thread(late[0].answer)
    await asyncio.to_thread(ask_all, late, "join")
    value = float(next(half.model.parameters()).flatten()[0])
    took = (await asyncio.to_thread(ask_all, late, "call", joined))[0]
    await asyncio.to_thread(ask_all, late, "check", value)
    return took


class _Late:
    """A scheme that records how long it took to connect."""

    seconds = 0.0

    def __init__(self, scheme: Any) -> None:
        self._scheme = scheme

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheme, name)

    async def __aenter__(self) -> None:
        await self._scheme.__aenter__()

    async def __aexit__(self, *exc: Any) -> None:
        await self._scheme.__aexit__(*exc)

    async def connect(self) -> None:
        started = time.perf_counter()
        await self._scheme.connect()
        _Late.seconds = time.perf_counter() - started


def work_late(idx: int, pipe: Connection, scheme: Any, workload: str, loop: Any) -> None:
    """Run a worker that joins a run when it is told to."""
    torch.set_num_threads(1)
    pipe.send((True, None))
    question, _ = pipe.recv()
    if question != "end":
        pipe.send((True, None))
        work_async(idx, pipe, _Late(scheme), workload, loop)


def joined(desk: Desk) -> float:
    """Return the seconds that this worker needed to get its weights."""
    return _Late.seconds


def start_ticking(desk: Any) -> None:
    """Start a ticker on a worker's loop."""
    desk.ticker = Ticker()
    desk.ticker.start()


def stop_ticking(desk: Any) -> list[Tick]:
    """Return the ticks since the start."""
    return desk.ticker.stop()


def _nbytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


# -- figures --------------------------------------------------------------------------------------


def figures_of(case: Case, trainer: TrainerProcess) -> Iterator[Figure]:
    """Measure what a contender that is open on a case costs besides time.

    The contender may be opened anew meanwhile, and afterwards it can only be closed. All figures
    that were found before a failure have been yielded.

    Args:
        case: The case on which the contender is open.
        trainer: The process of its trainer.

    Yields:
        The figures; none for limits and for busy workers.

    Raises:
        Failed: The contender failed at a question.
    """
    contender = trainer.contender.name
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
        # This comes last, as it ends the worker that all other figures ask.
        yield measure.late_joiner()


class _Measure:
    """Figures of one contender on one case."""

    def __init__(self, case: Case, contender: str, trainer: TrainerProcess) -> None:
        self._case = case
        self._contender = contender
        self._trainer = trainer

    def _figure(self, name: str, value: float, unit: str, note: str = "") -> Figure:
        case = self._case
        place = (case.transport, case.workload, case.workers, self._contender)
        return Figure(name, *place, value, unit, note)

    def memory_and_cpu(self, nbytes: int) -> Iterator[Figure]:
        """Measure memory and CPU, above those of the smallest model in the same processes.

        That leaves out what interpreter, libraries and the scheme itself need at any size, and what
        a process kept from the cases before.
        """
        trainer = self._trainer
        trainer.ask("close")
        trainer.ask("open", dataclasses.replace(self._case, workload=_SMALLEST))
        trainer.block(_SENDS)
        small, small_workers = trainer.call(usages)
        trainer.ask("close")
        trainer.ask("open", self._case)
        # After these sends all memory exists, and has been written once.
        trainer.block(2)
        trainer.call(reset_peaks)
        block = trainer.block(_SENDS)
        large, large_workers = trainer.call(usages)
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
        # The object store is a process that is not asked.
        if self._case.transport != "ray":
            extra = _pss(large, large_workers) - _pss(small, small_workers)
            yield self._figure(
                "extra memory on the host",
                _copies(extra, nbytes),
                "copies",
                "between sends, trainer and workers together, above the same with 4x2, without "
                "the trainer's model; shared memory counts once, workers' models count",
            )

    def idle(self) -> Iterator[Figure]:
        """Measure a worker that gets no updates; subtract the cost of the questions."""
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
        return self._trainer.call(usages)[1][0]

    def critical_section(self, ours_async: bool) -> Figure:
        """Measure how long the trainer must not touch its parameters."""
        if ours_async:
            seconds = self._trainer.call(critical_section)
            note = "send_nowait()"
        else:
            seconds = self._trainer.block(_SENDS if self._case.workload in _NBYTES else 5).seconds
            note = "the whole send()"
        return self._figure("critical section", statistics.median(seconds) * 1e3, "ms", note)

    def delivery(self) -> Figure:
        """Measure how long an update takes to the workers, without the copy for workers to come."""
        seconds = self._trainer.call(delivery)
        note = "median, from the call of send() to the worker's word; send() then copies"
        return self._figure("delivery", statistics.median(seconds) * 1e3, "ms", note)

    def loop_lag(self) -> Iterator[Figure]:
        """Measure how late timers of a worker's loop fire while 1 GiB arrives."""
        ticks = self._trainer.call(loop_lag)
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
        """Measure how long a worker that joins a run waits for its weights."""
        seconds = self._trainer.call(first_version)
        note = "from its connect() to the weights in its model"
        return self._figure("first version for a late joiner", seconds * 1e3, "ms", note)


def _pss(trainer: Usage, workers: list[Usage]) -> int:
    return trainer.pss + sum(worker.pss for worker in workers)


def _copies(used: int, nbytes: int) -> float:
    """Return the copies of the model besides one; a little less than none is noise."""
    return max(0.0, used / nbytes - 1)


def _p99(values: list[float]) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[98]
