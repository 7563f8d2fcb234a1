"""The run: contenders take turns in this process, block by block; their workers have their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import torch

from aiosync.bench._contenders import Contender, Plan
from aiosync.bench._results import Case, Missing, Results, Timing
from aiosync.bench._work import Handle, ask_all, fill

__all__ = ["Block", "Rounds", "maybe", "run"]

_Runs: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Any]

_BLOCK_SECONDS = 1.0  # a block of sends that take longer than that together has fewer of them


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
