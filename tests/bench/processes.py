"""Runs of trainers that have a process each, as TorchRL, RPC and Ray need it; with figures."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import json
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, cast

import torch

from aiosync.bench import Block, Case, Missing, Results, Rounds, Timing, maybe
from tests.bench.contenders import Contender, Plan

_PATIENCE = 300.0
_END_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that is not the latency of a send.

    Attributes:
        name: Name of the figure, such as ``"loop lag p99"``.
        transport: As in :class:`Case`.
        workload: Name of the model.
        workers: Number of worker processes.
        contender: As in :class:`Timing`.
        value: The number.
        unit: Its unit, such as ``"ms"``.
        note: More about the figure, in a few words.
    """

    name: str
    transport: str
    workload: str
    workers: int
    contender: str
    value: float
    unit: str
    note: str = ""


@dataclass
class Comparison(Results):
    """Results with figures."""

    figures: list[Figure] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """True if nothing was measured, or aiosync failed; missing packages do not count."""
        wrong = (each for each in self.missing if not each.why.startswith("not installed"))
        return not self.timings or any(", aiosync" in each.what for each in wrong)

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        """Read results that ``to_json()`` wrote."""
        found = Results.from_json(text)
        values = {each.name: getattr(found, each.name) for each in dataclasses.fields(Results)}
        return cls(**values, figures=[Figure(**raw) for raw in json.loads(text)["figures"]])


@dataclass(frozen=True)
class Lazy:
    """A factory, ``"module:name"``, that is imported in the process that calls it."""

    factory: str

    def __call__(self) -> Any:
        """Import the factory, and call it."""
        module, _, name = self.factory.partition(":")
        return getattr(importlib.import_module(module), name)()


class OneCase(Contender):
    """A contender whose trainer's process serves one case only."""


# -- the trainer's process ----------------------------------------------------------------------


async def _reply(rounds: Rounds, question: str, argument: Any) -> tuple[bool, Any]:
    try:
        match question:
            case "call":
                return True, await maybe(argument(rounds.half, rounds.handles))
            case "close":
                return True, await rounds.close()
            case _:
                return True, await getattr(rounds, question)(argument)
    except Exception:  # noqa: BLE001 - its reader shows it as the case's error
        return False, traceback.format_exc()


def _trainer_main(contender: Contender, pipe: Connection) -> None:
    """Answer questions until ``None`` or the end of the pipe."""
    # A terminal's Ctrl-C reaches every process, but the benchmark's own ends the others in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Libraries print, but stdout is for the benchmark's results, which may be JSON.
    os.dup2(2, 1)
    # Libraries warn about their own future.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rounds = Rounds(contender.make())

    def receive() -> Any:
        try:
            return pipe.recv()
        except EOFError:
            # The benchmark's process is gone.
            return None

    async def serve() -> None:
        try:
            while message := await asyncio.to_thread(receive):
                pipe.send(await _reply(rounds, *message))
        finally:
            await rounds.close()

    if contender.loop == "blocking":
        try:
            while message := receive():
                pipe.send(_without_loop(_reply(rounds, *message)))
        finally:
            _without_loop(rounds.close())
    else:
        with asyncio.Runner(loop_factory=contender.new_loop) as runner:
            runner.run(serve())


def _without_loop(coroutine: Any) -> Any:
    """Run a coroutine that awaits nothing, in a thread without a running loop."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a blocking contender has awaited something")


class Failed(RuntimeError):
    """Error of a contender that could not do what it was asked to, whose text is the cause."""


class TrainerProcess:
    """A contender's trainer, in a process of its own, which is asked over a pipe."""

    def __init__(self, contender: Contender) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "aiosync", "aiosync.sync"])
        self.contender = contender
        self._pipe, theirs = context.Pipe()
        # The process is no daemon, as daemons may not have workers of their own. close() is always
        # called.
        self._process = context.Process(target=_trainer_main, args=(contender, theirs))
        self._process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        """True if the process can be asked."""
        return self._process.is_alive()

    def block(self, sends: int) -> Block:
        """Let the trainer send so many times, or for a second, and check the workers."""
        return cast("Block", self.ask("block", sends))

    def call(self, function: Callable[..., Any]) -> Any:
        """Return the result of ``function(half, handles)`` there, awaited if it is a coroutine."""
        return self.ask("call", function)

    def ask(self, question: str, argument: Any = None) -> Any:
        """Ask one of ``"open"`` (a case), ``"block"``, ``"call"`` and ``"close"``.

        Raises:
            Failed: The process could not do that, or is gone.
        """
        self.begin(question, argument)
        return self.end()

    def begin(self, question: str, argument: Any = None) -> None:
        """Ask without waiting; :meth:`end` waits for the answer."""
        try:
            self._pipe.send((question, argument))
        except OSError as exc:
            raise self._ended() from exc

    def end(self) -> Any:
        """Wait for the answer to :meth:`begin`."""
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
        """End the process; kill it if it does not end. Idempotent."""
        # The process is gone already.
        with contextlib.suppress(OSError):
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


def run(plan: Plan, results: Comparison, progress: Progress, look: Look | None = None) -> None:
    """Do everything that a plan lists; see :func:`aiosync.bench.run`.

    Args:
        plan: Plan of the run.
        results: Results, to which the run adds as it goes.
        progress: Called before each case.
        look: Called after the blocks of a case with each trainer that is open, for more figures.
    """
    started = time.monotonic()
    # torch's RPC would write a line for every link that closes; trainers and workers inherit this.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    trainers: dict[str, TrainerProcess] = {}
    transport = ""
    with ExitStack() as stack:
        for done, case in enumerate(plan.cases):
            progress(done, len(plan.cases), str(case))
            if case.transport != transport:
                stack.pop_all().close()
                trainers.clear()
                transport = case.transport
            taking = plan.taking(case, results)
            for each in taking:
                if each.name not in trainers or not trainers[each.name].alive:
                    trainers[each.name] = TrainerProcess(each)
                    stack.callback(trainers[each.name].close)
            _measure(case, {each.name: trainers[each.name] for each in taking}, plan, results, look)
            for each in taking:
                if isinstance(each, OneCase):
                    trainers.pop(each.name).close()
            results.elapsed = time.monotonic() - started
    progress(len(plan.cases), len(plan.cases), "done")


def _measure(
    case: Case,
    trainers: Mapping[str, TrainerProcess],
    plan: Plan,
    results: Comparison,
    look: Look | None,
) -> None:
    """Measure one case: open every contender, let them take turns, and close them."""
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
        # Most of this is imports and processes that start.
        all_at_once("open")
        # The first turn warms up and does not count.
        for turn in range(plan.blocks + 1):
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
