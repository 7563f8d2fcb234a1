"""Runs of seeds: one, or many in several processes."""

from __future__ import annotations

import functools
import multiprocessing
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from aiosync.testing.sim import SimulationError, World
from tests.sim.plans import Plan, plan_for
from tests.sim.programs import run


@dataclass(frozen=True)
class Outcome:
    """Kind and steps of one run, and the text of the fault that it found, if any."""

    kind: str
    steps: int
    fault: str


def outcome(kind: str | None, seed: int) -> Outcome:
    """Run one seed."""
    return outcome_of(plan_for(seed, kind), [])


def outcome_of(plan: Plan, worlds: list[World]) -> Outcome:
    """Run a plan, whose world is added to the list."""
    fault = ""
    try:
        run(plan, worlds)
    except SimulationError as exc:
        fault = f"{str(exc).splitlines()[0]} ({plan.kind})\n{traceback.format_exc()}"
    return Outcome(plan.kind, worlds[0].steps if worlds else 0, fault)


def run_all(seeds: range, kind: str | None, jobs: int, *, until_failed: bool) -> bool:
    """Run many seeds in so many processes; return True if none found a fault."""
    failed, kinds, steps, began = 0, Counter[str](), 0, time.perf_counter()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for found in pool.map(functools.partial(outcome, kind), seeds, chunksize=4):
            kinds[found.kind] += 1
            steps += found.steps
            if found.fault:
                failed += 1
                print(found.fault.splitlines()[0], flush=True)
            if failed and until_failed:
                pool.shutdown(cancel_futures=True)
                break
    took, num = time.perf_counter() - began, kinds.total()
    print(
        f"{num} seeds, {failed} failed, {took:.1f} s, {num / took:.1f} a second in {jobs} "
        f"processes, {steps} steps, {dict(kinds)}"
    )
    return not failed
