"""The run: who takes part in which cases; they take turns in this process, block by block."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias, cast

import torch

from aiosync._run import new_event_loop
from aiosync.bench._limits import Memcpy, Stream, wake_up
from aiosync.bench._results import LIMIT, Missing, Results, Timing
from aiosync.bench._work import WORKLOADS, AsyncTrainer, Case, FacadeTrainer, Handle, ask_all, fill
from aiosync.errors import ConfigError

__all__ = [
    "CONTENDERS",
    "Block",
    "Contender",
    "Plan",
    "Rounds",
    "cases_of",
    "choose",
    "maybe",
    "profiles",
    "register",
    "run",
]

_Runs: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Any]

_CLUSTERS = ("gloo", "rpc", "ray")
_BLOCK_SECONDS = 1.0  # a block of sends that take longer than that together has fewer of them


@dataclass(frozen=True)
class Contender:
    """One way to move weights over one transport.

    Attributes:
        name: Such as ``"aiosync/facade"``; that of a limit begins with ``"limit/"``.
        loop: What drives its trainer, and its workers if they are async.
        make: Makes its trainer's half: an object with ``open(case)``, which returns a handle for
            each worker, ``send()``, ``close()`` and ``model``. Unless the loop is ``"blocking"``,
            the methods are coroutine functions.
        needs: Packages that must be installed.
        surface: Another face of the same thing: left out where there are many contenders.
    """

    name: str
    loop: Literal["uvloop", "asyncio", "blocking"]
    make: Callable[[], Any]
    needs: tuple[str, ...] = ()
    surface: bool = False

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """A loop of its kind, unless it is blocking."""
        return new_event_loop() if self.loop == "uvloop" else asyncio.new_event_loop()

    def missing(self) -> list[str]:
        """Packages that it needs and that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


CONTENDERS: dict[str, list[Contender]] = {}
"""By transport, in the order in which they take turns."""


def register(transport: str, *contenders: Contender) -> None:
    """Let more take part. The limits stay last."""
    there = [*CONTENDERS.get(transport, ()), *contenders]
    there.sort(key=lambda each: each.name.startswith(LIMIT))
    CONTENDERS[transport] = there


def _limit(name: str, make: Callable[[], Any]) -> Contender:
    return Contender(f"{LIMIT}{name}", "blocking", make)


_COPIES = [_limit("memcpy all threads", Memcpy)]
_UNIX = [_limit("raw unix socket", Stream)]
_LIMITS = {
    "shm": _COPIES,
    "pipe": _UNIX,
    "tcp": [_limit("raw socket", partial(Stream, "tcp"))],
    "unix": _UNIX,
    "gloo": _COPIES,
}
for _name, _its in _LIMITS.items():
    _async, _blocking = partial(AsyncTrainer, _name), partial(FacadeTrainer, _name)
    register(
        _name,
        Contender("aiosync", "uvloop", _async, ("uvloop",)),
        Contender("aiosync/asyncio", "asyncio", _async, surface=True),
        Contender("aiosync/facade", "blocking", _blocking, surface=True),
        _limit("round trip", wake_up),
        *_its,
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """Cases, and how thoroughly to measure each.

    Attributes:
        name: Of the profile.
        cases: In order, those of one transport together.
        blocks: Timed blocks of each contender on each case; contenders take turns.
        scale: Factor on the sends of a block.
        contenders: Names of those that take part, limits included; ``None`` for all.
        surfaces_upto: Workers up to which other surfaces take part; 0 leaves them out. With 512 MiB
            it is 1 at most: contenders are open together, and everybody has to fit into memory.
    """

    name: str
    cases: Sequence[Case]
    blocks: int
    scale: float = 1.0
    contenders: Collection[str] | None = None
    surfaces_upto: int = 8

    def sends(self, case: Case) -> int:
        """Return the sends of one block."""
        return max(2, round(WORKLOADS[case.workload].sends * self.scale))

    def takes(self, case: Case, contender: Contender) -> bool:
        """Whether a contender takes part in a case."""
        if self.contenders is not None and contender.name not in self.contenders:
            return False
        if contender.name.startswith(LIMIT):
            return not case.busy
        upto = min(self.surfaces_upto, 1) if case.workload == "512MiB" else self.surfaces_upto
        return not contender.surface or case.workers <= upto

    def taking(self, case: Case, results: Results) -> list[Contender]:
        """Who takes part in a case; what is not installed is noted once for each transport."""
        found = []
        for each in CONTENDERS[case.transport]:
            if self.takes(case, each) and (missing := each.missing()):
                why = f"not installed: {', '.join(missing)}"
                absent = Missing(f"{case.transport}, {each.name}", why)
                results.missing += [absent] if absent not in results.missing else []
            elif self.takes(case, each):
                found.append(each)
        return found


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


def profiles() -> dict[str, Plan]:
    """By name: what a run measures unless options say otherwise."""
    few = [
        *cases_of(("shm",), {"4x2": (1, 4), "1000x4KiB": (1,), "64MiB": (1,)}),
        *cases_of(("pipe",), {"4x2": (1,), "1000x4KiB": (1,)}),
        *cases_of(("tcp",), {"4x2": (1,), "64MiB": (1,)}),
    ]
    pair = (1, 4)
    work = {"4x2": (1, 2, 4, 8), "1MB": pair, "1000x4KiB": pair, "64MiB": pair, "512MiB": pair}
    names = list(CONTENDERS)
    every = [
        *cases_of(names, work),
        *cases_of(("shm",), {"1000-layers": pair}),
        *cases_of([name for name in names if name in _CLUSTERS], {"1000-layers": (1,)}),
        *cases_of(("shm", "pipe", "tcp", "gloo"), {"4x2": (1,), "1000x4KiB": (1,)}, busy=True),
    ]
    every.sort(key=lambda case: names.index(case.transport))
    return {
        "quick": Plan("quick", few, blocks=2, scale=0.5, surfaces_upto=1),
        "full": Plan("full", every, blocks=5),
    }


def choose(
    plan: Plan,
    *,
    transports: Collection[str] = (),
    workloads: Collection[str] = (),
    workers: Collection[int] = (),
    contenders: Collection[str] = (),
) -> Plan:
    """Return what is left of a plan; an empty collection chooses everything.

    Raises:
        ConfigError: There is no such name, or no case is left.
    """
    names = dict.fromkeys(each.name for all_ in CONTENDERS.values() for each in all_)
    _known("--transport", transports, CONTENDERS)
    _known("--workload", workloads, WORKLOADS)
    _known("--contender", contenders, [*names, "limits"])
    if contenders:
        limits = [name for name in names if name.startswith(LIMIT) and "limits" in contenders]
        plan = replace(plan, contenders=frozenset((*contenders, *limits)))
    cases = [
        case
        for case in plan.cases
        if (not transports or case.transport in transports)
        and (not workloads or case.workload in workloads)
        and (not workers or case.workers in workers)
        and any(plan.takes(case, each) for each in CONTENDERS[case.transport])
    ]
    if not cases:
        there = "; ".join(map(str, plan.cases))
        raise ConfigError(
            f"these options select nothing in the profile {plan.name}, which contains: {there}"
        )
    return replace(plan, cases=cases)


def _known(option: str, given: Collection[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(f"{option}: there is no {name}; there is: {', '.join(known)}")


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
    """A contender's trainer. Awaits nothing if the contender is blocking.

    Args:
        contender: The contender.

    Attributes:
        half: What its factory made.
        handles: Its workers, once it is open.
    """

    def __init__(self, contender: Contender) -> None:
        self.half: Any = contender.make()
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
    """What a method of a contender returns, async or not."""
    return await result if asyncio.iscoroutine(result) else result


def _without_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run what awaits nothing, in a thread where no loop runs."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a blocking contender has awaited something")


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
            _measure(case, plan, results)
            results.elapsed = time.monotonic() - started
        progress(len(plan.cases), len(plan.cases), "done")
    finally:
        torch.set_num_threads(threads)


def _measure(case: Case, plan: Plan, results: Results) -> None:
    """One case: every contender is opened, takes its turns, and is closed."""
    blocks: dict[str, list[Block]] = {}
    turns: dict[str, Callable[[int], Block]] = {}

    def attempt(name: str, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as exc:  # noqa: BLE001 - told at the end
            turns.pop(name, None)
            results.missing.append(Missing(f"{case}, {name}", f"{type(exc).__name__}: {exc}"))
            return None

    with ExitStack() as stack:
        for each in plan.taking(case, results):
            rounds, runs = Rounds(each), cast("_Runs", _without_loop)
            if each.loop != "blocking":
                runs = stack.enter_context(asyncio.Runner(loop_factory=each.new_loop)).run
            stack.callback(attempt, each.name, _call, runs, rounds.close)
            turns[each.name] = partial(_call, runs, rounds.block)
            attempt(each.name, _call, runs, rounds.open, case)
        for turn in range(plan.blocks + 1):  # the first one warms up and does not count
            for name, take in list(turns.items()):
                block = attempt(name, take, plan.sends(case) if turn else 2)
                blocks.setdefault(name, []).extend([block] if turn and block else [])
        for name in turns:
            seconds = [each for block in blocks[name] for each in block.seconds]
            trainer = sum(block.trainer_cpu for block in blocks[name])
            worker = sum(block.worker_cpu for block in blocks[name])
            results.timings.append(Timing(case, name, seconds, trainer, worker))


def _call(runs: _Runs, method: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
    return runs(method(*args))
