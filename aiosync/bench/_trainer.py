"""The trainer's process of one contender: does what the benchmark's process asks, block by block.

Must not import typer or rich; torchrl and ray only come with a contender that needs them.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast

import torch

from aiosync.bench._contender import (
    Awaited,
    Blocking,
    Handle,
    Usage,
    ask_all,
    reset_peak,
    usage,
)
from aiosync.bench._contenders import Contender
from aiosync.bench._results import Case
from aiosync.bench._workloads import fill

__all__ = ["BLOCK_SECONDS", "Block", "trainer_main"]

BLOCK_SECONDS = 1.0
"""A block of sends that take longer than that together has fewer of them."""


@dataclass(frozen=True, slots=True)
class Block:
    """What a block of sends found.

    Attributes:
        seconds: One for each send.
        trainer_cpu: CPU seconds of this process, in the sends alone.
        worker_cpu: CPU seconds of all workers, over the block.
    """

    seconds: list[float]
    trainer_cpu: float
    worker_cpu: float


def trainer_main(contender: Contender, pipe: Connection) -> None:
    """Answer questions until ``None`` or the end of the pipe.

    ``("open", case)``, ``("block", sends)`` -> :class:`Block` of so many or fewer, ``("usage",
    None)`` -> this process's :class:`Usage` and a list of the workers', ``("reset peak", None)``,
    ``("call", name)`` -> what that method of the contender returns, ``("close", None)``. Each is
    answered by ``(True, value)`` or by ``(False, text of the error)``.
    """
    # A terminal's Ctrl-C reaches every process, and workers inherit this: the benchmark's own ends
    # the others in order. Not done to the fork server, which other code of a process may use.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # libraries print; stdout is for the benchmark's results, which may be JSON
    # TorchRL and torch.distributed warn about their own future; the table has no room for it.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    module, _, name = contender.factory.partition(":")
    half = getattr(importlib.import_module(module), name)()
    if contender.loop == "blocking":
        _serve_blocking(_BlockingRounds(half), pipe)
        return
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if contender.loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(_AwaitedRounds(half), pipe))


class _Rounds:
    """What both kinds of contender share: the model's values, and asking the workers."""

    def __init__(self) -> None:
        self.handles: Sequence[Handle] = ()
        self.busy = False
        self.value = 1.0
        self.seconds: list[float] = []
        self.elapsed = 0.0  # all of them together
        self.cpu = 0.0

    def usages(self) -> tuple[Usage, list[Usage]]:
        return usage(), cast("list[Usage]", ask_all(self.handles, "usage"))

    def reset(self) -> None:
        reset_peak()
        ask_all(self.handles, "reset peak")

    def workers_cpu(self) -> float:
        return sum(cast("float", each) for each in ask_all(self.handles, "cpu"))

    def ended(self, model: torch.nn.Module, before: float) -> Block:
        """Make sure that the workers have the newest weights, and sum the block up."""
        block = Block(self.seconds, self.cpu, self.workers_cpu() - before)
        ask_all(self.handles, "check", self.value)
        return block

    def note(self, started: tuple[float, float]) -> None:
        seconds = time.perf_counter() - started[0]
        self.seconds.append(seconds)
        self.elapsed += seconds
        self.cpu += time.process_time() - started[1]

    def step(self, model: torch.nn.Module) -> tuple[float, float]:
        """Change every weight, as an optimizer does, and take the time."""
        self.value += 1.0
        fill(model, self.value)
        return time.perf_counter(), time.process_time()

    def begin(self) -> float:
        self.seconds, self.elapsed, self.cpu = [], 0.0, 0.0
        before = self.workers_cpu()
        self.keep_busy(True)
        return before

    def keep_busy(self, busy: bool) -> None:
        """Between its own blocks a contender's workers leave the cores to those of the others."""
        if self.busy:
            ask_all(self.handles, "busy", busy)

    def goes_on(self, sends: int) -> bool:
        """Whether a block of at most ``sends`` has another one: two there are at least."""
        return len(self.seconds) < min(sends, 2) or (
            len(self.seconds) < sends and self.elapsed < BLOCK_SECONDS
        )


class _BlockingRounds(_Rounds):
    def __init__(self, half: Blocking) -> None:
        super().__init__()
        self.half = half

    def answer(self, question: str, argument: Any) -> Any:
        match question:
            case "open":
                case = cast("Case", argument)
                self.handles, self.busy = self.half.open(case), case.busy
            case "block":
                before = self.begin()
                try:
                    while self.goes_on(argument):
                        started = self.step(self.half.model)
                        self.half.send()
                        self.note(started)
                finally:
                    self.keep_busy(False)
                return self.ended(self.half.model, before)
            case "usage":
                return self.usages()
            case "reset peak":
                self.reset()
            case "call":
                return getattr(self.half, argument)()
            case "close":
                self.handles = ()
                self.half.close()
        return None


class _AwaitedRounds(_Rounds):
    def __init__(self, half: Awaited) -> None:
        super().__init__()
        self.half = half

    async def answer(self, question: str, argument: Any) -> Any:
        match question:
            case "open":
                case = cast("Case", argument)
                self.handles, self.busy = await self.half.open(case), case.busy
            case "block":
                before = await asyncio.to_thread(self.begin)
                try:
                    while self.goes_on(argument):
                        started = self.step(self.half.model)
                        await self.half.send()
                        self.note(started)
                finally:
                    await asyncio.to_thread(self.keep_busy, False)
                return await asyncio.to_thread(self.ended, self.half.model, before)
            case "usage":
                return await asyncio.to_thread(self.usages)
            case "reset peak":
                await asyncio.to_thread(self.reset)
            case "call":
                return await cast("Coroutine[Any, Any, Any]", getattr(self.half, argument)())
            case "close":
                self.handles = ()
                await self.half.close()
        return None


def _serve_blocking(rounds: _BlockingRounds, pipe: Connection) -> None:
    try:
        while (message := _next(pipe)) is not None:
            try:
                pipe.send((True, rounds.answer(*message)))
            except Exception:  # noqa: BLE001  # its reader shows it as the case's error
                pipe.send((False, traceback.format_exc()))
    finally:
        rounds.half.close()


async def _serve(rounds: _AwaitedRounds, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    loop.add_reader(pipe.fileno(), asked.set)
    try:
        while True:
            await asked.wait()
            asked.clear()
            if not pipe.poll():  # one question may wake up asyncio's own loop twice
                continue
            if (message := _next(pipe)) is None:
                return
            try:
                pipe.send((True, await rounds.answer(*message)))
            except Exception:  # noqa: BLE001  # its reader shows it as the case's error
                pipe.send((False, traceback.format_exc()))
    finally:
        loop.remove_reader(pipe.fileno())
        await rounds.half.close()


def _next(pipe: Connection) -> tuple[str, Any] | None:
    try:
        return cast("tuple[str, Any] | None", pipe.recv())
    except EOFError:  # the benchmark's process is gone
        return None
