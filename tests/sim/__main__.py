"""Command line of the simulation: replay a seed, or run many."""

from __future__ import annotations

import argparse
import logging
import time
import traceback
from collections import Counter
from typing import ClassVar

from aiosync.testing.sim import SimulationError, World
from tests.sim.plans import Plan, plan_for
from tests.sim.programs import run


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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--seeds", type=int, default=200, help="run so many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of --seeds")
    parser.add_argument("--kind", help="what the programs do, instead of the seed's choice")
    parser.add_argument("--shrink", action="store_true", help="make the plan of --seed smaller")
    parser.add_argument("--until-failed", action="store_true", help="stop at the first failure")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds)
    if given.seed is not None:
        seeds = range(given.seed, given.seed + 1)
    if given.trace:
        logging.getLogger("aiosync").setLevel(logging.DEBUG)
        logging.getLogger("aiosync").addHandler(_IntoTrace())
    failed, kinds, steps, began = 0, Counter[str](), 0, time.perf_counter()
    for seed in seeds:
        worlds = _IntoTrace.worlds = list[World]()
        plan = plan_for(seed, given.kind)
        kinds[plan.kind] += 1
        if given.shrink and fails(plan):
            plan = shrink(plan)
            print(plan)
        if given.trace:
            print(plan)
        try:
            run(plan, worlds)
        except SimulationError as exc:
            failed += 1
            print(str(exc).splitlines()[0], f"({plan.kind})", flush=True)
            if given.trace:
                traceback.print_exc()
        steps += worlds[0].steps if worlds else 0
        if failed and given.until_failed:
            break
        if given.trace:
            print("\n".join(worlds[0].trace), f"\ndigest {worlds[0].digest}")
    took = time.perf_counter() - began
    print(f"{len(seeds)} seeds, {failed} failed, {took:.1f} s, {steps} steps, {dict(kinds)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
