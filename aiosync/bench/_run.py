"""One run of the benchmark: its plan, the turns of the contenders, and its results.

The contenders take turns in this process, block by block. Results are data, JSON and tables.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from aiosync._run import new_event_loop, usable_cores
from aiosync._version import __version__
from aiosync.bench._contenders import (
    LIMIT,
    SCHEMES,
    WORKLOADS,
    Case,
    Handle,
    ask_all,
    contenders_of,
    fill,
)
from aiosync.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Block",
    "Machine",
    "Missing",
    "Plan",
    "Results",
    "Rounds",
    "Timing",
    "cases_of",
    "choose",
    "limit_of",
    "machine",
    "maybe",
    "profiles",
    "run",
    "show",
]

# A block ends early once its sends have taken this long together.
_BLOCK_SECONDS = 1.0
# Number of the JSON format; it changes when a name or a meaning in it changes.
_SCHEMA = 1

_LEGEND = (
    "\naiosync: from the call of send() until every worker has applied the weights; the median."
    "\nwork: 4x2 is one layer of 40 bytes, 1MB a policy, 1000x4KiB a thousand tensors of 4 KiB."
    "\nlimit: the least that this machine needs for the same bytes. of the limit: 1.00 is as fast "
    "as that, 0.10 takes ten times as long."
)


# -- plans -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """The cases of a run, and the number of blocks and sends that measure each.

    Attributes:
        name: Name of the profile.
        cases: The cases in the order of the run; those of one transport are together.
        blocks: Timed blocks of each contender on each case; contenders take turns.
        scale: Factor on the number of sends of a block.
    """

    name: str
    cases: Sequence[Case]
    blocks: int
    scale: float = 1.0

    def sends(self, case: Case) -> int:
        """Return the number of sends of one block, at least 2."""
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
    """Return the plans by name; the plan ``"full"`` includes the transports in ``more``."""
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
    """Return the plan with the chosen cases only; an empty collection chooses everything.

    Raises:
        ConfigError: A transport or workload does not exist, or no case is left.
    """
    known = dict.fromkeys([*SCHEMES, *(case.transport for case in plan.cases)])
    for option, given, names in (
        ("--transport", transports, known),
        ("--workload", workloads, WORKLOADS),
    ):
        _refuse_unknown(option, given, names)
    cases = [case for case in plan.cases if _is_chosen(case, transports, workloads, workers)]
    if not cases:
        there = "; ".join(map(str, plan.cases))
        raise ConfigError(
            f"these options select nothing in the profile {plan.name}, which contains: {there}"
        )
    return dataclasses.replace(plan, cases=cases)


def _is_chosen(
    case: Case, transports: Collection[str], workloads: Collection[str], workers: Collection[int]
) -> bool:
    """Return True if a case is in each of the collections that is not empty."""
    return (
        (not transports or case.transport in transports)
        and (not workloads or case.workload in workloads)
        and (not workers or case.workers in workers)
    )


def _refuse_unknown(option: str, given: Iterable[str], names: Collection[str]) -> None:
    """Raise if an option names a transport or workload that does not exist."""
    for name in given:
        if name not in names:
            raise ConfigError(f"{option}: there is no {name}; there is: {', '.join(names)}")


# -- results --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timing:
    """Measurements of one contender on one case.

    The weights were checked in every worker after each block.

    Attributes:
        case: The work.
        contender: Name of the contender, such as ``"aiosync"``, ``"torchrl"`` or
            ``"limit/memcpy"``.
        seconds: Seconds from the call of send until every worker has applied, for each send.
        trainer_cpu: CPU seconds of the trainer's process in all these sends.
        worker_cpu: CPU seconds of all workers in the same blocks.
    """

    case: Case
    contender: str
    seconds: Sequence[float]
    trainer_cpu: float
    worker_cpu: float

    @property
    def median(self) -> float:
        """Median of :attr:`seconds`."""
        return statistics.median(self.seconds)

    def percentile(self, percent: int) -> float:
        """Return the seconds that ``percent`` % of the sends (1 to 99) did not exceed."""
        if len(self.seconds) == 1:
            return self.seconds[0]
        return statistics.quantiles(self.seconds, n=100, method="inclusive")[percent - 1]


@dataclass(frozen=True, slots=True)
class Missing:
    """A measurement that could not be made, and the reason.

    Attributes:
        what: The case and contender, or the figure.
        why: The error, or the package that is not installed.
    """

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a run, by its cores, memory and software; it holds no host name.

    Attributes:
        cores: Number of cores that this process may use.
        memory_gib: Memory of the machine, in GiB.
        system: Name, release and architecture of the kernel.
        versions: Versions of the packages that matter, by name.
    """

    cores: int
    memory_gib: float
    system: str
    versions: dict[str, str]


def machine() -> Machine:
    """Describe this machine; a package that is not installed has no entry in the versions."""
    versions = {"python": platform.python_version(), "aiosync": __version__}
    for package in ("torch", "uvloop", "torchrl", "ray"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return Machine(usable_cores(), round(nbytes / 2**30, 1), system, versions)


@dataclass(slots=True)
class Results:
    """The results of a run, in the order in which they were measured; ``elapsed`` is in seconds."""

    machine: Machine
    profile: str
    elapsed: float = 0.0
    timings: list[Timing] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    def timing(self, case: Case, contender: str) -> Timing | None:
        """Return the timing of a contender on a case; ``None`` if it was not measured."""
        both = case, contender
        return next((each for each in self.timings if (each.case, each.contender) == both), None)

    @property
    def failed(self) -> bool:
        """True if nothing was measured, or aiosync failed; other contenders may fail."""
        return not self.timings or any(", aiosync" in missing.what for missing in self.missing)

    def to_json(self) -> str:
        """Return all results as JSON, with medians and percentiles beside the raw seconds."""
        values = {"schema": _SCHEMA, **dataclasses.asdict(self)}
        for raw, timing in zip(values["timings"], self.timings, strict=True):
            raw["median"] = timing.median
            raw.update({f"p{percent}": timing.percentile(percent) for percent in (10, 90, 99)})
        return json.dumps(values, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Return the results in a JSON text of :meth:`to_json`.

        Raises:
            ValueError: The text is no JSON, or has another schema.
        """
        values: dict[str, Any] = json.loads(text)
        if values.get("schema") != _SCHEMA:
            raise ValueError(f"results of schema {values.get('schema')!r}; this reads {_SCHEMA}")
        return cls(
            machine=Machine(**values["machine"]),
            profile=values["profile"],
            elapsed=values["elapsed"],
            timings=[
                Timing(
                    case=Case(**raw["case"]),
                    **{name: raw[name] for name in Timing.__slots__ if name != "case"},
                )
                for raw in values["timings"]
            ],
            missing=[Missing(**raw) for raw in values["missing"]],
        )


# -- the turns -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Block:
    """Measurements of one block of sends.

    Attributes:
        seconds: Seconds of each send.
        trainer_cpu: CPU seconds of the trainer's process, in the sends alone.
        worker_cpu: CPU seconds of all workers, over the whole block.
    """

    seconds: list[float]
    trainer_cpu: float = 0.0
    worker_cpu: float = 0.0


class Rounds:
    """One contender on one case, measured in blocks of sends.

    It awaits nothing if the methods of the contender's half are plain functions.

    Args:
        half: The trainer's half of the contender; see :func:`contenders_of`.

    Attributes:
        handles: Handles of the contender's workers while it is open.
    """

    def __init__(self, half: Any) -> None:
        self.half: Any = half
        self.handles: Sequence[Handle] = ()
        self._busy = False
        self._value = 1.0  # of every weight in the last send

    async def open(self, case: Case) -> None:
        """Start the contender's workers for a case."""
        self.handles = await maybe(self.half.open(case))
        self._busy, self._value = case.busy, 1.0

    async def block(self, sends: int) -> Block:
        """Send ``sends`` times or for a second, at least twice; then check every worker's weights.

        Raises:
            RuntimeError: A worker holds other weights, or gave no answer.
        """
        before = sum(ask_all(self.handles, "cpu"))
        block = Block([])
        self._forwards(True)
        try:
            while len(block.seconds) < min(sends, 2) or (
                len(block.seconds) < sends and sum(block.seconds) < _BLOCK_SECONDS
            ):
                self._value += 1.0
                fill(self.half.model, self._value)  # so that a worker with old weights is found
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

    def _forwards(self, on: bool) -> None:
        """Turn the workers' forwards on or off.

        They are off between the contender's own blocks, which leaves the cores to the workers of
        the other contenders.
        """
        ask_all(self.handles, "busy" if self._busy else "calm", on)

    async def close(self) -> None:
        """End the contender's workers."""
        self.handles = ()
        await maybe(self.half.close())


async def maybe(result: Any) -> Any:
    """Return the result of a half's method; await it if the method is a coroutine function."""
    return await result if asyncio.iscoroutine(result) else result


def run(plan: Plan, results: Results, progress: Callable[[int, int, str], None]) -> None:
    """Measure every case of a plan.

    A contender that fails becomes an entry of ``results.missing``; the run goes on without it.

    Args:
        plan: The cases.
        results: Filled in after each case, so that an interrupted run keeps the earlier cases.
        progress: Called before each case with the number of finished cases, the number of all
            cases and the next case as text; at the end with ``"done"``.
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
    """Measure one case: open every contender, let them take turns, and close them."""
    blocks: dict[str, list[Block]] = {}
    turns: dict[str, Rounds] = {}

    async def attempt(name: str, call: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Return the result of a contender's call; after an error leave the contender out."""
        try:
            return await call(*args)
        except Exception as exc:  # noqa: BLE001 - listed with the results, which the user sees
            turns.pop(name, None)
            results.missing.append(Missing(f"{case}, {name}", f"{type(exc).__name__}: {exc}"))
            return None

    async with AsyncExitStack() as stack:
        for name, make in contenders_of(case).items():
            turns[name] = rounds = Rounds(make())
            stack.push_async_callback(attempt, name, rounds.close)
            await attempt(name, rounds.open, case)
        for turn in range(plan.blocks + 1):  # the first turn warms up and does not count
            for name, rounds in list(turns.items()):
                # Limits await nothing: without this pause Ctrl-C could not cancel the task.
                await asyncio.sleep(0)
                block = await attempt(name, rounds.block, plan.sends(case) if turn else 2)
                blocks.setdefault(name, []).extend([block] if turn and block else [])
        results.timings.extend(_timing_of(case, name, blocks[name]) for name in turns)


def _timing_of(case: Case, name: str, blocks: Sequence[Block]) -> Timing:
    """Return the timing of a contender: that of all its blocks."""
    seconds = [each for block in blocks for each in block.seconds]
    trainer = sum(block.trainer_cpu for block in blocks)
    worker = sum(block.worker_cpu for block in blocks)
    return Timing(case, name, seconds, trainer, worker)


# -- tables ----------------------------------------------------------------------------------------


def limit_of(results: Results, case: Case) -> Timing | None:
    """Return the lower limit of a case's time: the longest of its limits by median, or ``None``.

    Each limit is the time of work that no contender can leave out. Limits are not measured with
    busy workers, so a busy case has the limit of the same case without busy workers.
    """
    quiet = Case(case.transport, case.workload, case.workers)
    limits = [
        timing
        for timing in results.timings
        if timing.case == quiet and timing.contender.startswith(LIMIT)
    ]
    return max(limits, key=lambda limit: limit.median, default=None)


def show(results: Results, console: Console) -> None:
    """Print the machine, a table for each transport, and the measurements that are missing."""
    machine = results.machine
    console.print(
        f"Profile {results.profile}, {results.elapsed:.0f} s, on {machine.cores} cores with "
        f"{machine.memory_gib:g} GiB, {machine.system}",
        ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        sep="\n",
        markup=False,
    )
    for transport in dict.fromkeys(timing.case.transport for timing in results.timings):
        console.print()
        console.print(_transport_table(results, transport))
    console.print(_LEGEND if results.timings else "Nothing was measured.")
    for missing in results.missing:
        text = missing.why.strip().rpartition("\n")[2]  # a traceback ends with the error
        console.print(f"Not measured: {missing.what}: {text}", markup=False)


def _empty_table(title: str) -> Table:
    """Return a table with the columns of every transport.

    A heading with a line break is as narrow as the numbers below it.
    """
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("work", "workers", "aiosync", "10 % - 90 %", "limit", "of the\nlimit"):
        words = heading in ("work", "workers")
        table.add_column(heading, justify="left" if words else "right", no_wrap=True)
    return table


def _transport_table(results: Results, transport: str) -> Table:
    """Return the table of a transport, with a row for each case."""
    table = _empty_table(f"Transport {transport}: send to applied")
    timings = [timing for timing in results.timings if timing.case.transport == transport]
    for case in dict.fromkeys(timing.case for timing in timings):
        limit, ours = limit_of(results, case), results.timing(case, "aiosync")
        share = "-" if limit is None or ours is None else f"{limit.median / ours.median:.2f}"
        workers = f"{case.workers}{' busy' if case.busy else ''}"
        table.add_row(case.workload, workers, *_shown(ours), _shown(limit)[0], share)
    return table


def _shown(timing: Timing | None) -> tuple[str, str]:
    """Return the median, and the 10th and the 90th percentile in the same unit, as texts."""
    if timing is None:
        return "-", "-"
    unit, factor = ("µs", 1e6) if timing.median < 1e-3 else ("ms", 1e3)
    low, high = (_digits(timing.percentile(percent) * factor) for percent in (10, 90))
    return f"{_digits(timing.median * factor)} {unit}", f"{low} - {high}"


def _digits(value: float) -> str:
    """Return the value with at least three digits and without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
