"""Starting worker processes, and what aiosync's workers run.

Workers come from a fork server that has imported torch once, so that eight of them start as
quickly as one. Must not import torchrl, ray, typer or rich.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import nn

from aiosync.bench._contender import Desk, PipeHandle
from aiosync.bench._lag import Tick, Ticker
from aiosync.bench._workloads import WORKLOADS

__all__ = ["Crew", "LoopDesk", "answer_async", "work_async", "work_facade", "work_late"]


class Crew:
    """Worker processes and the pipes to ask them.

    Args:
        preload: Modules that the fork server imports before the first worker, besides this one.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, "aiosync", "aiosync.sync", *preload])

    def start(self, target: Callable[..., None], workers: int, *args: Any) -> list[PipeHandle]:
        """Start processes that run ``target(worker_idx, pipe, *args)``."""
        for idx in range(workers):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=target, args=(idx, theirs, *args), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        return [PipeHandle(pipe) for pipe in self._pipes]

    def stop(self, timeout: float = 5.0) -> None:
        """Ask every process to end, wait for that, and kill those that do not."""
        for pipe in self._pipes:
            try:
                pipe.send(("end", None))
            except OSError:  # it is gone already
                continue
        for process in self.processes:
            process.join(timeout)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self.processes.clear()
        self._pipes.clear()


class LoopDesk(Desk):
    """What a worker with an event loop answers; see :class:`Desk`.

    Besides: ``"lag start"`` starts a ticker on the loop on which it is asked, ``"lag stop"``
    returns its ticks.
    """

    _ticker: Ticker | None = None

    def answer(self, question: str, argument: Any) -> Any:
        """See above. On the loop."""
        match question:
            case "lag start":
                self._ticker = Ticker()
                self._ticker.start()
                return None
            case "lag stop":
                return self.leave()
        return super().answer(question, argument)

    def leave(self) -> list[Tick]:
        """Start nothing more, and end what was started: return the ticks."""
        ticker, self._ticker = self._ticker, None
        return [] if ticker is None else ticker.stop()


def work_facade(idx: int, pipe: Connection, scheme: Any, workload: str) -> None:
    """A worker of classic code: a scheme of ``aiosync.sync`` applies in the background."""
    torch.set_num_threads(1)
    model = WORKLOADS[workload].build()
    with scheme:
        scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
        scheme.connect()
        Desk(model, scheme.reading).serve(pipe)


def work_async(
    idx: int, pipe: Connection, scheme: Any, workload: str, loop: Callable[[], Any]
) -> None:
    """A worker with an event loop, on which updates arrive and forwards are computed."""
    torch.set_num_threads(1)
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(_work(idx, pipe, scheme, workload))


async def _work(idx: int, pipe: Connection, scheme: Any, workload: str) -> None:
    model = WORKLOADS[workload].build()
    async with scheme:
        scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
        await scheme.connect()
        await answer_async(LoopDesk(model), pipe)


def work_late(
    idx: int, pipe: Connection, scheme: Any, workload: str, loop: Callable[[], Any]
) -> None:
    """A worker that joins a run: waits to be told, and says how long it took to have weights."""
    torch.set_num_threads(1)
    model = WORKLOADS[workload].build()
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(_work_late(idx, pipe, scheme, model))


async def _work_late(idx: int, pipe: Connection, scheme: Any, model: nn.Module) -> None:
    question, _ = await asyncio.to_thread(pipe.recv)
    if question == "end":
        return
    async with scheme:
        started = time.perf_counter()
        scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
        await scheme.connect()
        pipe.send((True, time.perf_counter() - started))
        await answer_async(LoopDesk(model), pipe)


async def answer_async(desk: LoopDesk, pipe: Connection) -> None:
    """Answer what comes through a pipe, with forwards meanwhile if busy, until it says end."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    loop.add_reader(pipe.fileno(), asked.set)
    try:
        while True:
            while desk.busy and not asked.is_set():
                desk.forward()
                await asyncio.sleep(0)
            await asked.wait()
            asked.clear()
            if not pipe.poll():  # told twice of one question: a loop may be ahead of its tasks
                continue
            try:
                question, argument = pipe.recv()
            except EOFError:  # the trainer is gone
                return
            if question == "end":
                return
            pipe.send(desk.reply(question, argument))
    finally:
        desk.leave()
        loop.remove_reader(pipe.fileno())
