"""The run: who takes part in which cases; they take turns in this process, block by block."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from aiosync._run import new_event_loop
from aiosync.bench._limits import Limit, Memcpy, Stream, wake_up
from aiosync.bench._results import LIMIT, Missing, Results, Timing
from aiosync.bench._work import SCHEMES, WORKLOADS, AsyncTrainer, Case, Handle, ask_all, fill
from aiosync.errors import ConfigError

__all__ = [
    "Block",
    "Plan",
    "Rounds",
    "cases_of",
    "choose",
    "contenders_of",
    "maybe",
    "profiles",
    "run",
]

_BLOCK_SECONDS = 1.0  # a block of sends that take longer than that together has fewer of them

_LIMITS: dict[str, tuple[str, Callable[[], Limit]]] = {
    "shm": ("memcpy all threads", Memcpy),
    "pipe": ("raw unix socket", Stream),
    "tcp": ("raw socket", partial(Stream, "tcp")),
    "unix": ("raw unix socket", Stream),
    "gloo": ("memcpy all threads", Memcpy),
}


def contenders_of(case: Case) -> dict[str, Callable[[], Any]]:
    """What makes the trainer's halves that take turns on a case, by name: aiosync and limits.

    A half has ``open(case)``, which returns a handle for each worker, ``send()``, ``close()`` and
    ``model``; the methods may be coroutine functions. No limit is measured with busy workers.
    """
    found: dict[str, Callable[[], Any]] = {"aiosync": partial(AsyncTrainer, case.transport)}
    if not case.busy:
        name, make = _LIMITS[case.transport]
        found |= {f"{LIMIT}round trip": wake_up, f"{LIMIT}{name}": make}
    return found


@dataclass(frozen=True, slots=True)
class Plan:
    """Cases, and how thoroughly to measure each.

    Attributes:
        name: Of the profile.
        cases: In order, those of one transport together.
        blocks: Timed blocks of each contender on each case; contenders take turns.
        scale: Factor on the sends of a block.
    """

    name: str
    cases: Sequence[Case]
    blocks: int
    scale: float = 1.0

    def sends(self, case: Case) -> int:
        """Return the sends of one block."""
        return max(2, round(WORKLOADS[case.workload].sends * self.scale))


def cases_of(
    transports: Sequence[str], work: Mapping[str, Sequence[int]], busy: bool = False
) -> list[Case]:
    """Return the cases of each transport, workload and number of workers, in this order."""
    return [
        Case(transport, workload, count, busy)
        for transport in transports
        for workload, counts in work.items()
        for count in counts
    ]


def profiles(more: Sequence[str] = ()) -> dict[str, Plan]:
    """By name: what a run measures unless options say otherwise; ``more`` transports, too."""
    few = [
        *cases_of(("shm",), {"4x2": (1, 4), "1000x4KiB": (1,), "64MiB": (1,)}),
        *cases_of(("pipe",), {"4x2": (1,), "1000x4KiB": (1,)}),
        *cases_of(("tcp",), {"4x2": (1,), "64MiB": (1,)}),
    ]
    pair = (1, 4)
    work = {"4x2": (1, 2, 4, 8), "1MB": pair, "1000x4KiB": pair, "64MiB": pair, "512MiB": pair}
    names = [*SCHEMES, *more]
    every = [
        *cases_of(names, work),
        *cases_of(("shm",), {"1000-layers": pair}),
        *cases_of(("gloo", *more), {"1000-layers": (1,)}),
        *cases_of(("shm", "pipe", "tcp", "gloo"), {"4x2": (1,), "1000x4KiB": (1,)}, busy=True),
    ]
    every.sort(key=lambda case: names.index(case.transport))
    return {"quick": Plan("quick", few, blocks=2, scale=0.5), "full": Plan("full", every, blocks=5)}


def choose(
    plan: Plan,
    transports: Collection[str] = (),
    workloads: Collection[str] = (),
    workers: Collection[int] = (),
) -> Plan:
    """Return what is left of a plan; an empty collection chooses everything.

    Raises:
        ConfigError: There is no such name, or no case is left.
    """
    known = dict.fromkeys([*SCHEMES, *(case.transport for case in plan.cases)])
    for option, given, names in (
        ("--transport", transports, known),
        ("--workload", workloads, WORKLOADS),
    ):
        for name in given:
            if name not in names:
                raise ConfigError(f"{option}: there is no {name}; there is: {', '.join(names)}")
    cases = [
        case
        for case in plan.cases
        if (not transports or case.transport in transports)
        and (not workloads or case.workload in workloads)
        and (not workers or case.workers in workers)
    ]
    if not cases:
        there = "; ".join(map(str, plan.cases))
        raise ConfigError(
            f"these options select nothing in the profile {plan.name}, which contains: {there}"
        )
    return replace(plan, cases=cases)


# -- the turns -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Block:
    """What a block of sends found.

    Attributes:
        seconds: One for each send.
        trainer_cpu: CPU seconds of the trainer's process, in the sends alone.
        worker_cpu: CPU seconds of all workers, over the block.
    """

    seconds: list[float]
    trainer_cpu: float = 0.0
    worker_cpu: float = 0.0


class Rounds:
    """A contender's trainer. Awaits nothing if the methods of its half are plain ones.

    Args:
        half: The trainer's half of the contender; see :func:`contenders_of`.

    Attributes:
        handles: Its workers, once it is open.
    """

    def __init__(self, half: Any) -> None:
        self.half: Any = half
        self.handles: Sequence[Handle] = ()
        self._busy = False
        self._value = 1.0

    async def open(self, case: Case) -> None:
        """Start the workers of a case."""
        self.handles = await maybe(self.half.open(case))
        self._busy, self._value = case.busy, 1.0

    async def block(self, sends: int) -> Block:
        """Send so many times, or for a second, and have the workers checked."""
        before = sum(ask_all(self.handles, "cpu"))
        block = Block([])
        self._forwards(True)
        try:
            # Two sends there are at least.
            while len(block.seconds) < min(sends, 2) or (
                len(block.seconds) < sends and sum(block.seconds) < _BLOCK_SECONDS
            ):
                self._value += 1.0
                fill(self.half.model, self._value)  # every weight changes
                started, cpu = time.perf_counter(), time.process_time()
                sent = self.half.send()
                if sent is not None:
                    await sent
                block.seconds.append(time.perf_counter() - started)
                block.trainer_cpu += time.process_time() - cpu
        finally:
            self._forwards(False)
        block.worker_cpu = sum(ask_all(self.handles, "cpu")) - before
        ask_all(self.handles, "check", self._value)
        return block

    def _forwards(self, busy: bool) -> None:
        """Between its own blocks a contender's workers leave the cores to those of the others."""
        if self._busy:
            ask_all(self.handles, "busy", busy)

    async def close(self) -> None:
        """End the workers."""
        self.handles = ()
        await maybe(self.half.close())


async def maybe(result: Any) -> Any:
    """What a method of a half returns, async or not."""
    return await result if asyncio.iscoroutine(result) else result


def run(plan: Plan, results: Results, progress: Callable[[int, int, str], None]) -> None:
    """Do everything that a plan lists.

    What fails becomes an entry of ``results.missing``; the rest goes on.

    Args:
        plan: What to do.
        results: Filled in as it goes: what is there is kept if the run is interrupted.
        progress: Called before each case with how many are done, of how many, and what comes next.
    """
    started, threads = time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for done, case in enumerate(plan.cases):
            progress(done, len(plan.cases), str(case))
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(_measure(case, plan, results))
            results.elapsed = time.monotonic() - started
        progress(len(plan.cases), len(plan.cases), "done")
    finally:
        torch.set_num_threads(threads)


async def _measure(case: Case, plan: Plan, results: Results) -> None:
    """One case: every contender is opened, takes its turns, and is closed."""
    blocks: dict[str, list[Block]] = {}
    turns: dict[str, Rounds] = {}

    async def attempt(name: str, call: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        try:
            return await call(*args)
        except Exception as exc:  # noqa: BLE001 - told at the end
            turns.pop(name, None)
            results.missing.append(Missing(f"{case}, {name}", f"{type(exc).__name__}: {exc}"))
            return None

    async with AsyncExitStack() as stack:
        for name, make in contenders_of(case).items():
            turns[name] = rounds = Rounds(make())
            stack.push_async_callback(attempt, name, rounds.close)
            await attempt(name, rounds.open, case)
        for turn in range(plan.blocks + 1):  # the first one warms up and does not count
            for name, rounds in list(turns.items()):
                await asyncio.sleep(0)  # limits wait for nothing, and Ctrl-C would not be heard
                block = await attempt(name, rounds.block, plan.sends(case) if turn else 2)
                blocks.setdefault(name, []).extend([block] if turn and block else [])
        for name in turns:
            seconds = [each for block in blocks[name] for each in block.seconds]
            trainer = sum(block.trainer_cpu for block in blocks[name])
            worker = sum(block.worker_cpu for block in blocks[name])
            results.timings.append(Timing(case, name, seconds, trainer, worker))
