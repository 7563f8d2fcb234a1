"""Contenders by transport, with the needs of each; aiosync by its other surfaces, too."""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

import aiosync
import aiosync.sync
from aiosync import bench
from aiosync.bench import (
    LIMIT,
    PATIENCE,
    SCHEMES,
    WORKLOADS,
    AsyncTrainer,
    Case,
    Crew,
    Desk,
    Handle,
    Missing,
    Results,
    contenders_of,
    fill,
)
from aiosync.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Contender:
    """One way to move weights over one transport.

    Attributes:
        name: Such as ``"aiosync/facade"``; that of a limit begins with ``"limit/"``.
        loop: Kind of loop of its trainer, and of its workers if they are async.
        make: Makes its trainer's half; see :func:`aiosync.bench.contenders_of`. Unless the loop is
            ``"blocking"``, the methods are coroutine functions.
        needs: Packages that must be installed.
        surface: True for another surface of the same thing, which is left out with many workers.
    """

    name: str
    loop: Literal["uvloop", "asyncio", "blocking"]
    make: Callable[[], Any]
    needs: tuple[str, ...] = ()
    surface: bool = False

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """Return a new loop of the contender's kind, which must not be blocking."""
        if self.loop == "asyncio":
            return asyncio.new_event_loop()
        import uvloop

        return uvloop.new_event_loop()

    def missing(self) -> list[str]:
        """Return the packages that the contender needs and that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


CONTENDERS: dict[str, list[Contender]] = {}
"""Contenders by transport, in the order in which they take turns."""


def register(transport: str, *contenders: Contender) -> None:
    """Add contenders to a transport. The limits stay last."""
    there = [*CONTENDERS.get(transport, ()), *contenders]
    there.sort(key=lambda each: each.name.startswith(LIMIT))
    CONTENDERS[transport] = there


@dataclass(frozen=True, slots=True)
class Plan(bench.Plan):
    """Cases, and the contenders that take part in them.

    Attributes:
        contenders: Names of the contenders that take part, limits included; ``None`` for all.
        surfaces_upto: Number of workers up to which other surfaces take part; 0 leaves them out.
            With 512 MiB it is 1 at most: contenders are open together, and all have to fit into
            memory.
    """

    contenders: Collection[str] | None = None
    surfaces_upto: int = 8

    def takes(self, case: Case, contender: Contender) -> bool:
        """Return True if a contender takes part in a case."""
        if self.contenders is not None and contender.name not in self.contenders:
            return False
        if contender.name.startswith(LIMIT):
            return not case.busy
        upto = min(self.surfaces_upto, 1) if case.workload == "512MiB" else self.surfaces_upto
        return not contender.surface or case.workers <= upto

    def taking(self, case: Case, results: Results) -> list[Contender]:
        """Return the contenders of a case; note a missing package once for each transport."""
        found = []
        for each in CONTENDERS[case.transport]:
            if self.takes(case, each) and (missing := each.missing()):
                why = f"not installed: {', '.join(missing)}"
                absent = Missing(f"{case.transport}, {each.name}", why)
                results.missing += [absent] if absent not in results.missing else []
            elif self.takes(case, each):
                found.append(each)
        return found


def choose(plan: Plan, contenders: Collection[str] = (), **chosen: Any) -> Plan:
    """Choose as :func:`aiosync.bench.choose`, and by contenders; ``"limits"`` is all limits.

    Raises:
        ConfigError: There is no such name, or no case is left.
    """
    names = dict.fromkeys(each.name for all_ in CONTENDERS.values() for each in all_)
    for name in contenders:
        if name not in (*names, "limits"):
            raise ConfigError(f"--contender: there is no {name}; there is: {', '.join(names)}")
    if contenders:
        limits = [name for name in names if name.startswith(LIMIT) and "limits" in contenders]
        plan = replace(plan, contenders=frozenset((*contenders, *limits)))
    cases = [
        case
        for case in plan.cases
        if any(plan.takes(case, each) for each in CONTENDERS[case.transport])
    ]
    found = bench.choose(replace(plan, cases=cases), **chosen)
    assert isinstance(found, Plan)
    return found


# -- aiosync's other surfaces ----------------------------------------------------------------------


class NetworkTrainer(AsyncTrainer):
    """Trainer over Gloo, with workers as if they were on other hosts."""

    def __init__(self) -> None:
        super().__init__("gloo")

    def new_scheme(self, folder: str) -> Any:
        """Make the scheme."""
        return aiosync.DistributedWeightSyncScheme(shared_memory=False)


def work_facade(idx: int, pipe: Connection, scheme: Any, workload: str) -> None:
    """Run a worker of classic code: a scheme of ``aiosync.sync`` applies in the background."""
    model = WORKLOADS[workload].build()
    with scheme:
        scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
        scheme.connect()
        Desk(model, scheme.reading).serve(pipe)


class FacadeTrainer:
    """Trainer with ``aiosync.sync``, also in the workers.

    Args:
        transport: Name of the transport.
    """

    model: nn.Module

    def __init__(self, transport: str) -> None:
        self.crew = Crew([__name__])
        self.scheme: Any = None
        self._transport = transport

    def open(self, case: Case) -> Sequence[Handle]:
        """Start the workers and join them."""
        self.model = WORKLOADS[case.workload].build()
        fill(self.model, 1.0)
        self._folder = tempfile.TemporaryDirectory(prefix="aiosync-bench-")
        self.scheme = SCHEMES[self._transport](aiosync.sync, self._folder.name)
        self.scheme.init_on_sender(model_id="policy", model=self.model, num_workers=case.workers)
        handles = self.crew.start(work_facade, case.workers, self.scheme, case.workload)
        self.scheme.connect(processes=self.crew.processes, timeout=PATIENCE)
        return handles

    def send(self) -> None:
        """Send the weights; return when every worker has applied them."""
        self.scheme.send()

    def close(self) -> None:
        """End the workers and the scheme."""
        if self.scheme is not None:
            self.crew.stop()
            self.scheme.shutdown()
            self.scheme = None
            self._folder.cleanup()


for _name in SCHEMES:
    _async = partial(AsyncTrainer, _name)
    register(
        _name,
        Contender("aiosync", "uvloop", _async, ("uvloop",)),
        Contender("aiosync/asyncio", "asyncio", _async, surface=True),
        Contender("aiosync/facade", "blocking", partial(FacadeTrainer, _name), surface=True),
        *(
            Contender(limit, "blocking", make)
            for limit, make in contenders_of(Case(_name, "4x2", 1)).items()
            if limit.startswith(LIMIT)
        ),
    )
