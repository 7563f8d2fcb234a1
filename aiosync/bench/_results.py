"""What a run of the benchmark found: as data, as JSON and as tables."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table

from aiosync._run import usable_cores
from aiosync._version import __version__
from aiosync.bench._work import Case

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["LIMIT", "Machine", "Missing", "Results", "Timing", "limit_of", "machine", "show"]

_SCHEMA = 1  # of the JSON; it changes when a name or a meaning does

_LEGEND = (
    "\naiosync: from the call of send() until every worker has applied the weights; the median."
    "\nwork: 4x2 is one layer of 40 bytes, 1MB a policy, 1000x4KiB a thousand tensors of 4 KiB."
    "\nlimit: the least that this machine needs for the same bytes. of the limit: 1.00 is as fast "
    "as that, 0.10 takes ten times as long."
)

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
        return not self.timings or any(", aiosync" in missing.what for missing in self.missing)

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
        console.print(_transport_table(results, transport))
    console.print(_LEGEND if results.timings else "Nothing was measured.")
    for missing in results.missing:
        text = missing.why.strip().rpartition("\n")[2]  # of a traceback the error
        console.print(f"Not measured: {missing.what}: {text}", markup=False)


def _transport_table(results: Results, transport: str) -> Table:
    """A row for each case. Broken, a heading is as narrow as the numbers below it."""
    title = f"Transport {transport}: send to applied"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("work", "workers", "aiosync", "10 % - 90 %", "limit", "of the\nlimit"):
        words = heading in ("work", "workers")
        table.add_column(heading, justify="left" if words else "right", no_wrap=True)
    timings = [timing for timing in results.timings if timing.case.transport == transport]
    for case in dict.fromkeys(timing.case for timing in timings):
        limit, ours = limit_of(results, case), results.timing(case, "aiosync")
        cells = [
            *("-" if ours is None else _time(ours), "-" if ours is None else _range(ours)),
            "-" if limit is None else _time(limit),
            "-" if limit is None or ours is None else f"{limit.median / ours.median:.2f}",
        ]
        table.add_row(case.workload, f"{case.workers}{' busy' if case.busy else ''}", *cells)
    return table


def _unit(timing: Timing) -> tuple[str, float]:
    return ("µs", 1e6) if timing.median < 1e-3 else ("ms", 1e3)


def _time(timing: Timing) -> str:
    unit, factor = _unit(timing)
    return f"{_digits(timing.median * factor)} {unit}"


def _range(timing: Timing) -> str:
    """The 10th and the 90th percentile, in the unit of the median."""
    _, factor = _unit(timing)
    return " - ".join(_digits(timing.percentile(percent) * factor) for percent in (10, 90))


def _digits(value: float) -> str:
    """Three digits at least, and never an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
