"""The benchmark's own process, which lets trainers take turns, and the trainers' processes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast

import torch

from aiosync._run import new_event_loop
from aiosync.bench._contenders import CONTENDERS, Contender, Plan
from aiosync.bench._results import Case, Figure, Missing, Results, Timing
from aiosync.bench._work import Handle, ask_all, fill

__all__ = ["Failed", "TrainerProcess", "run"]

_PATIENCE = 300.0
_END_SECONDS = 30.0
_BLOCK_SECONDS = 1.0  # a block of sends that take longer than that together has fewer of them


# -- the trainer's process ----------------------------------------------------------------------


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


class _Rounds:
    """Answers what the benchmark asks a trainer; without awaiting, if its half is blocking."""

    def __init__(self, half: Any, blocking: bool) -> None:
        self.half = half
        self._blocking = blocking
        self._handles: Sequence[Handle] = ()
        self._busy = False
        self._value = 1.0

    async def reply(self, question: str, argument: Any) -> tuple[bool, Any]:
        try:
            return True, await self._answer(question, argument)
        except Exception:  # noqa: BLE001  # its reader shows it as the case's error
            return False, traceback.format_exc()

    async def _answer(self, question: str, argument: Any) -> Any:
        match question:
            case "open":
                self._handles = await self.maybe(self.half.open(argument))
                self._busy = argument.busy
                self._value = 1.0
            case "block":
                return await self._block(argument)
            case "call":
                return await self.maybe(argument(self.half, self._handles))
            case "close":
                self._handles = ()
                await self.maybe(self.half.close())
        return None

    async def maybe(self, result: Any) -> Any:
        return await result if asyncio.iscoroutine(result) else result

    async def _block(self, sends: int) -> Block:
        before = sum(ask_all(self._handles, "cpu"))
        block = Block([])
        elapsed = 0.0
        self._forwards(True)
        try:
            # Two sends there are at least.
            while len(block.seconds) < min(sends, 2) or (
                len(block.seconds) < sends and elapsed < _BLOCK_SECONDS
            ):
                self._value += 1.0
                fill(self.half.model, self._value)  # every weight changes
                started, cpu = time.perf_counter(), time.process_time()
                if self._blocking:
                    self.half.send()
                else:
                    await self.half.send()
                block.seconds.append(time.perf_counter() - started)
                elapsed += block.seconds[-1]
                block.trainer_cpu += time.process_time() - cpu
        finally:
            self._forwards(False)
        block.worker_cpu = sum(ask_all(self._handles, "cpu")) - before
        ask_all(self._handles, "check", self._value)
        return block

    def _forwards(self, busy: bool) -> None:
        """Between its own blocks a contender's workers leave the cores to those of the others."""
        if self._busy:
            ask_all(self._handles, "busy", busy)


def _trainer_main(contender: Contender, pipe: Connection) -> None:
    """Answer questions until ``None`` or the end of the pipe."""
    # A terminal's Ctrl-C reaches every process, and workers inherit this: the benchmark's own ends
    # the others in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # libraries print; stdout is for the benchmark's results, which may be JSON
    warnings.simplefilter("ignore")  # of libraries, about their own future
    torch.set_num_threads(1)
    module, _, name = contender.factory.partition(":")
    half = getattr(importlib.import_module(module), name)(*contender.args)
    rounds = _Rounds(half, contender.loop == "blocking")

    def receive() -> Any:
        try:
            return pipe.recv()
        except EOFError:  # the benchmark's process is gone
            return None

    async def serve() -> None:
        try:
            while message := await asyncio.to_thread(receive):
                pipe.send(await rounds.reply(*message))
        finally:
            await half.close()

    if contender.loop == "blocking":
        try:
            while message := receive():
                pipe.send(_without_loop(rounds.reply(*message)))
        finally:
            half.close()
    else:
        factory = new_event_loop if contender.loop == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(serve())


def _without_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run what awaits nothing, in a thread where no loop runs."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a blocking contender has awaited something")


class Failed(RuntimeError):
    """A contender could not do what it was asked to; the text is the error."""


class TrainerProcess:
    """A contender's trainer, in a process of its own, asked over a pipe."""

    def __init__(self, contender: Contender) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "aiosync", "aiosync.sync"])
        self.contender = contender
        self._pipe, theirs = context.Pipe()
        # Not a daemon: those may not have workers of their own. close() is always called.
        self._process = context.Process(target=_trainer_main, args=(contender, theirs))
        self._process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether the process is there to be asked."""
        return self._process.is_alive()

    def block(self, sends: int) -> Block:
        """Send so many times, or for a second, and have the workers checked."""
        return cast("Block", self.ask("block", sends))

    def call(self, function: Callable[..., Any]) -> Any:
        """Return what ``function(half, handles)`` returns there, awaited if it is a coroutine."""
        return self.ask("call", function)

    def ask(self, question: str, argument: Any = None) -> Any:
        """Ask one of ``"open"`` (a case), ``"block"``, ``"call"`` and ``"close"``.

        Raises:
            Failed: It could not do that, or is gone.
        """
        self.begin(question, argument)
        return self.end()

    def begin(self, question: str, argument: Any = None) -> None:
        """Ask without waiting; :meth:`end` does that."""
        try:
            self._pipe.send((question, argument))
        except OSError as exc:
            raise self._ended() from exc

    def end(self) -> Any:
        """Wait for what was begun."""
        try:
            if not self._pipe.poll(_PATIENCE):
                self._process.kill()
                raise Failed(f"no answer in {_PATIENCE:g} s")
            good, value = self._pipe.recv()
        except (EOFError, OSError) as exc:
            raise self._ended() from exc
        if not good:
            raise Failed(value)
        return value

    def close(self) -> None:
        """End the process; kill it if it does not. Idempotent."""
        with contextlib.suppress(OSError):  # it is gone already
            self._pipe.send(None)
        self._process.join(_END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def _ended(self) -> Failed:
        self._process.join(_END_SECONDS)
        return Failed(f"the process ended, exit code {self._process.exitcode}")


# -- the run ------------------------------------------------------------------------------------

Progress = Callable[[int, int, str], None]
Look = Callable[[Case, TrainerProcess], Iterable[Figure]]


def run(plan: Plan, results: Results, progress: Progress, look: Look | None = None) -> None:
    """Do everything that a plan lists.

    What fails becomes an entry of ``results.missing``; the rest goes on.

    Args:
        plan: What to do.
        results: Filled in as it goes: what is there is kept if the run is interrupted.
        progress: Called before each case with how many are done, of how many, and what comes next.
        look: Called after the blocks of a case with each trainer that is open, for more figures.
    """
    started = time.monotonic()
    # torch's RPC writes a line for every link that closes; trainers and workers inherit this.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    wanted: dict[str, list[Contender]] = {}
    trainers: dict[str, TrainerProcess] = {}
    with ExitStack() as stack:
        for done, case in enumerate(plan.cases):
            progress(done, len(plan.cases), str(case))
            if case.transport not in wanted:
                stack.pop_all().close()
                trainers.clear()
                wanted[case.transport] = _wanted(case.transport, plan, results)
            taking = [each for each in wanted[case.transport] if plan.takes(case, each)]
            for each in taking:
                if each.name not in trainers or not trainers[each.name].alive:
                    trainers[each.name] = TrainerProcess(each)
                    stack.callback(trainers[each.name].close)
            _measure(case, {each.name: trainers[each.name] for each in taking}, plan, results, look)
            for each in taking:
                if not each.lasting:
                    trainers.pop(each.name).close()
            results.elapsed = time.monotonic() - started
    progress(len(plan.cases), len(plan.cases), "done")


def _wanted(transport: str, plan: Plan, results: Results) -> list[Contender]:
    cases = [case for case in plan.cases if case.transport == transport]
    found = []
    for each in CONTENDERS[transport]:
        if any(plan.takes(case, each) for case in cases):
            missing = each.missing()
            if missing:
                why = f"not installed: {', '.join(missing)}"
                results.missing.append(Missing(f"{transport}, {each.name}", why))
            else:
                found.append(each)
    return found


def _measure(
    case: Case,
    trainers: Mapping[str, TrainerProcess],
    plan: Plan,
    results: Results,
    look: Look | None,
) -> None:
    """One case: every contender is opened, takes its turns, and is closed."""
    opened = dict(trainers)

    @contextmanager
    def noting(name: str, what: str = "") -> Iterator[None]:
        try:
            yield
        except Failed as exc:
            results.missing.append(Missing(f"{case}, {name}{what}", str(exc).strip()))
            if not what:
                opened.pop(name, None)

    def all_at_once(question: str) -> None:
        begun = []
        for name, trainer in trainers.items():
            with noting(name):
                if question == "open" or trainer.alive:
                    trainer.begin(question, case)
                    begun.append(name)
        for name in begun:
            with noting(name):
                trainers[name].end()

    sums: dict[str, list[Block]] = {name: [] for name in trainers}
    try:
        all_at_once("open")  # most of it is imports and processes that start
        for turn in range(plan.blocks + 1):  # the first one warms up and does not count
            for name in list(opened):
                with noting(name):
                    sums[name].append(opened[name].block(plan.sends(case) if turn else 2))
        for name in opened:
            blocks = sums[name][1:]
            seconds = [each for block in blocks for each in block.seconds]
            cpus = [sum(b.trainer_cpu for b in blocks), sum(b.worker_cpu for b in blocks)]
            results.timings.append(Timing(case, name, seconds, *cpus))
        if look is not None:
            for name in list(opened):
                with noting(name, ", figures"):
                    results.figures.extend(look(case, opened[name]))
    finally:
        all_at_once("close")
