"""Which cases a run measures, how thoroughly, and what options leave of them.

Must not import torch, typer or rich.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from aiosync.bench._contenders import TRANSPORTS
from aiosync.bench._results import LIMIT, Case

__all__ = ["ALL_CASES", "WORKLOAD_NAMES", "Plan", "cases_of"]

WORKLOAD_NAMES = ("4x2", "1MB", "1000x4KiB", "1000-layers", "64MiB", "512MiB")
"""Models, by number and size of their tensors; built in ``_workloads``."""

# A block ends after a second, of whoever is slower than that. For a quick contender it takes some
# tenths: cores that slept a moment before need 20 to 50 ms of work until they are quick again.
_SENDS = {
    "4x2": 3000,
    "1MB": 1200,
    "1000x4KiB": 500,
    "1000-layers": 500,
    "64MiB": 8,
    "512MiB": 3,
}
_MAIN = ("aiosync", "aiosync/network", "torchrl")


@dataclass(frozen=True, slots=True)
class Plan:
    """Cases, and how thoroughly to measure each.

    Attributes:
        name: Of the profile.
        cases: In order, those of one transport together.
        blocks: Timed blocks of each contender on each case; contenders take turns.
        scale: Factor on the sends of a block.
        contenders: Names of those that take part, limits included; ``None`` for all.
        surfaces_upto: Workers up to which aiosync's other surfaces take part, besides
            ``"aiosync"`` itself; 0 leaves them out. With 512 MiB it is 1 at most: contenders are
            open together, and everybody has to fit into memory.
        figures: Measure memory, CPU, lag and the like as well.
    """

    name: str
    cases: Sequence[Case]
    blocks: int
    scale: float = 1.0
    contenders: Collection[str] | None = None
    surfaces_upto: int = 8
    figures: bool = True

    def sends(self, case: Case) -> int:
        """Return the sends of one block."""
        return max(2, round(_SENDS[case.workload] * self.scale))

    def takes(self, case: Case, contender: str) -> bool:
        """Whether a contender takes part in a case."""
        if self.contenders is not None and contender not in self.contenders:
            return False
        if contender.startswith(LIMIT):
            return not case.busy
        # torchrl/aliased is a surface, too: what the peer does by default.
        upto = min(self.surfaces_upto, 1) if case.workload == "512MiB" else self.surfaces_upto
        return contender in _MAIN or case.workers <= upto

    def only(
        self,
        *,
        transports: Collection[str] = (),
        workloads: Collection[str] = (),
        workers: Collection[int] = (),
    ) -> Plan:
        """Return a plan with what was chosen; an empty collection chooses everything."""
        return replace(
            self,
            cases=[
                case
                for case in self.cases
                if (not transports or case.transport in transports)
                and (not workloads or case.workload in workloads)
                and (not workers or case.workers in workers)
            ],
        )


def cases_of(
    transports: Sequence[str], work: Sequence[tuple[str, Sequence[int]]], busy: bool = False
) -> list[Case]:
    """Return the cases of each transport, workload and number of workers, in this order."""
    return [
        Case(transport, workload, count, busy)
        for transport in transports
        for workload, counts in work
        for count in counts
    ]


_FULL = cases_of(
    TRANSPORTS,
    (
        ("4x2", (1, 2, 4, 8)),
        ("1MB", (1, 4)),
        ("1000x4KiB", (1, 4)),
        ("64MiB", (1, 4)),
        ("512MiB", (1, 4)),
    ),
)
_LAYERS = [
    *cases_of(("shm",), (("1000-layers", (1, 4)),)),
    *cases_of(("gloo", "rpc", "ray"), (("1000-layers", (1,)),)),
]
_BUSY = cases_of(("shm", "pipe", "tcp", "gloo"), (("4x2", (1,)), ("1000x4KiB", (1,))), busy=True)

ALL_CASES: Sequence[Case] = sorted(
    [*_FULL, *_LAYERS, *_BUSY], key=lambda case: TRANSPORTS.index(case.transport)
)
"""Those of a transport together."""
