"""What a run of the benchmark found: as data, as JSON and as tables."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from aiosync._run import usable_cores
from aiosync._version import __version__
from aiosync.bench._work import WORKLOADS, Case

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["LIMIT", "Machine", "Missing", "Results", "Timing", "limit_of", "machine", "show"]

_SCHEMA = 1  # of the JSON; it changes when a name or a meaning does

_WIDE = 90  # columns from which there is room for a second line in each cell
_LEGEND = (
    "\nA cell: from the call of send() until every worker has applied the weights; the median, and "
    "below it, where there is room, the 10th and the 90th percentile."
    "\nwork: 4x2 is one layer of 40 bytes, 1MB a policy, 1000x4KiB a thousand tensors of 4 KiB."
    "\naiosync/facade: the blocking API, aiosync.sync. aiosync/asyncio: without uvloop."
    "\nlimit: the least that this machine needs for the same bytes. of the limit: 1.00 is as fast "
    "as that, 0.10 takes ten times as long."
)
_MIN_NBYTES_FOR_SPEED = 10**6  # below it a send is latency, and bytes per second say nothing

LIMIT = "limit/"
"""What the names of limits begin with. A limit is a contender that only moves the bytes."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One contender on one case. Every update was checked in the workers after each block.

    Attributes:
        case: The work.
        contender: Who did it, such as ``"aiosync"``, ``"torchrl"`` or ``"limit/memcpy"``.
        seconds: From the call of send until every worker has applied, one for each send.
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
        """Seconds of the send in the middle."""
        return statistics.median(self.seconds)

    def percentile(self, percent: int) -> float:
        """Seconds that ``percent`` of the sends (1 to 99) did not exceed."""
        if len(self.seconds) == 1:
            return self.seconds[0]
        return statistics.quantiles(self.seconds, n=100, method="inclusive")[percent - 1]


@dataclass(frozen=True, slots=True)
class Missing:
    """What could not be measured, and why.

    Attributes:
        what: The case and contender, or the figure.
        why: The error, or what is not installed.
    """

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a run took place. No names: cores and memory say enough.

    Attributes:
        cores: Cores that this process may use.
        memory_gib: Memory of the machine, in GiB.
        system: Kernel and its release.
        versions: Packages and their versions.
    """

    cores: int
    memory_gib: float
    system: str
    versions: dict[str, str]


def machine() -> Machine:
    """Look at this machine. What is not installed has no version."""
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
    """Everything that a run found, in the order in which it was found."""

    machine: Machine
    profile: str
    elapsed: float = 0.0
    timings: list[Timing] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    def timing(self, case: Case, contender: str) -> Timing | None:
        """Find what a contender did on a case; ``None`` if it was not measured."""
        both = case, contender
        return next((each for each in self.timings if (each.case, each.contender) == both), None)

    @property
    def failed(self) -> bool:
        """Whether nothing was measured, or aiosync failed at something; others may."""
        return not self.timings or any(
            ", aiosync" in missing.what and not missing.why.startswith("not installed")
            for missing in self.missing
        )

    def to_json(self) -> str:
        """Return everything as JSON, with medians and percentiles beside the raw seconds."""
        values = {"schema": _SCHEMA, **dataclasses.asdict(self)}
        for raw, timing in zip(values["timings"], self.timings, strict=True):
            raw["median"] = timing.median
            raw.update({f"p{percent}": timing.percentile(percent) for percent in (10, 90, 99)})
        return json.dumps(values, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: It is not that, or of another schema.
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


# -- tables ----------------------------------------------------------------------------------------


def limit_of(results: Results, case: Case) -> Timing | None:
    """Find the limit that a case is compared with: the one that takes longest.

    Each of them is work that cannot be left out; none is measured with busy workers.
    """
    quiet = Case(case.transport, case.workload, case.workers)
    limits = [
        timing
        for timing in results.timings
        if timing.case == quiet and timing.contender.startswith(LIMIT)
    ]
    return max(limits, key=lambda limit: limit.median, default=None)


def show(results: Results, console: Console) -> None:
    """Print a table for each transport, and what is missing."""
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
        console.print(_transport_table(results, transport, console.width < _WIDE))
    console.print(_LEGEND if results.timings else "Nothing was measured.")
    for missing in results.missing:
        # The error of a traceback; lines of it that go on are of no use without the rest.
        lines = missing.why.splitlines()
        errors = [each for each in lines if re.match(r"[\w.]+(Error|Exception|Exit)\b", each)]
        text = (errors or lines or [""])[-1].strip()
        console.print(f"Not measured: {missing.what}: {text}", markup=False)


def _transport_table(results: Results, transport: str, narrow: bool) -> Table:
    """A row for each case; where it is narrow, with the first line of each cell."""
    timings = [timing for timing in results.timings if timing.case.transport == transport]
    names = dict.fromkeys(each.contender for each in timings if LIMIT not in each.contender)
    table = Table(title=f"Transport {transport}: send to applied", title_justify="left")
    if narrow:
        table.box, table.padding, table.pad_edge = None, (0, 1, 0, 0), False
    for heading in ("work", "workers", *names, "limit", "of the limit"):
        # Broken a heading is as narrow as the numbers below it.
        words = heading in ("work", "workers")
        table.add_column(
            heading.replace("/", "/\n").replace("the ", "the\n"),
            justify="left" if words else "right",
        )
    for case in dict.fromkeys(timing.case for timing in timings):
        limit = limit_of(results, case)
        ours = results.timing(case, "aiosync")
        cells = [_range(results.timing(case, name)) for name in names]
        cells.append(Text("-") if limit is None else _limit(limit))
        cells.append(Text("-") if limit is None or ours is None else _share(case, ours, limit))
        if narrow:
            cells = [Text(cell.plain.partition("\n")[0]) for cell in cells]
        busy = " busy" if case.busy else ""
        table.add_row(case.workload, f"{case.workers}{busy}", *cells)
    return table


def _range(timing: Timing | None) -> Text:
    """The median, and below it the 10th and the 90th percentile in the same unit."""
    if timing is None:
        return Text("-")
    unit, factor = ("µs", 1e6) if timing.median < 1e-3 else ("ms", 1e3)
    low, high = (_digits(timing.percentile(percent) * factor) for percent in (10, 90))
    return _cell(f"{_digits(timing.median * factor)} {unit}", f"{low} - {high}")


def _limit(limit: Timing) -> Text:
    return _cell(_range(limit).plain.partition("\n")[0], limit.contender.removeprefix(LIMIT))


def _share(case: Case, ours: Timing, limit: Timing) -> Text:
    nbytes = WORKLOADS[case.workload].nbytes if case.workload in WORKLOADS else 0
    speed = f"{nbytes / ours.median / 1e9:.2f} GB/s" if nbytes >= _MIN_NBYTES_FOR_SPEED else ""
    return _cell(f"{limit.median / ours.median:.2f}", speed)


def _digits(value: float) -> str:
    """Three digits at least, and never an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _cell(text: str, below: str) -> Text:
    return Text(text).append(f"\n{below}", style="dim")
