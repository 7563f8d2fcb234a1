"""Command line of the simulation: replay a seed, or run many."""

from __future__ import annotations

import argparse
import logging
import os
from typing import ClassVar

from aiosync.testing.sim import SimulationError, World
from tests.sim.plans import Plan, plan_for
from tests.sim.programs import run
from tests.sim.runs import outcome_of, run_all


class _IntoTrace(logging.Handler):
    """Writes log records into the trace of the running world."""

    worlds: ClassVar[list[World]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if self.worlds:
            self.worlds[-1].note(f"log: {record.getMessage()}")


def fails(plan: Plan) -> bool:
    """Return True if a plan finds a fault."""
    try:
        run(plan)
    except SimulationError:
        return True
    return False


def shrink(plan: Plan) -> Plan:
    """Return a plan that finds a fault as well, and of which no smaller one does."""
    while (found := next(filter(fails, plan.smaller()), None)) is not None:
        plan = found
    return plan


def replay(seed: int, kind: str | None, *, shrinks: bool, traces: bool) -> bool:
    """Run one seed, and print what is asked for; return True if it found no fault."""
    worlds = _IntoTrace.worlds = list[World]()
    if traces:
        logging.getLogger("aiosync").setLevel(logging.DEBUG)
        logging.getLogger("aiosync").addHandler(_IntoTrace())
    plan = plan_for(seed, kind)
    if shrinks and fails(plan):
        plan = shrink(plan)
    if shrinks or traces:
        print(plan)
    found = outcome_of(plan, worlds)
    if not found.fault:
        print(f"no fault in {found.steps} steps")
    else:
        print(found.fault if traces else found.fault.splitlines()[0])
    if traces:
        print("\n".join(worlds[0].trace), f"\ndigest {worlds[0].digest}")
    return not found.fault


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--seeds", type=int, default=200, help="run so many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of --seeds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes for --seeds")
    parser.add_argument("--kind", help="what the programs do, instead of the seed's choice")
    parser.add_argument("--shrink", action="store_true", help="make the plan of --seed smaller")
    parser.add_argument("--until-failed", action="store_true", help="stop at the first failure")
    parser.add_argument("--trace", action="store_true", help="print what --seed does")
    given = parser.parse_args()
    if given.seed is not None:
        good = replay(given.seed, given.kind, shrinks=given.shrink, traces=given.trace)
    else:
        seeds = range(given.first, given.first + given.seeds)
        good = run_all(seeds, given.kind, given.jobs or 1, until_failed=given.until_failed)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
