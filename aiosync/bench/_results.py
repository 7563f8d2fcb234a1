"""What a run of the benchmark found, as data and as JSON."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiosync._cores import usable_cores
from aiosync._version import __version__

__all__ = ["LIMIT", "Case", "Machine", "Missing", "Results", "Timing", "machine"]

_SCHEMA = 1  # of the JSON; it changes when a name or a meaning does

LIMIT = "limit/"
"""What the names of limits begin with. A limit is a contender that only moves the bytes."""


@dataclass(frozen=True, slots=True)
class Case:
    """One piece of work that contenders do.

    Attributes:
        transport: How the weights travel: ``"shm"``, ``"pipe"``, ``"tcp"``, ``"unix"``,
            ``"gloo"``, ``"rpc"`` or ``"ray"``.
        workload: Name of the model.
        workers: Worker processes.
        busy: Workers compute forwards without pause.
    """

    transport: str
    workload: str
    workers: int
    busy: bool = False

    def __str__(self) -> str:
        busy = ", busy" if self.busy else ""
        return f"{self.transport} {self.workload} to {self.workers}{busy}"


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
        for timing in self.timings:
            if timing.case == case and timing.contender == contender:
                return timing
        return None

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
