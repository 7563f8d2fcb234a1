"""aiosync over the transports whose workers are processes of the trainer.

Must not import torchrl, ray, typer or rich.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import aiosync
import aiosync.sync
from aiosync._run import new_event_loop
from aiosync.bench._contender import PATIENCE, Handle, ask_all
from aiosync.bench._lag import Tick
from aiosync.bench._results import Case
from aiosync.bench._worker import Crew, work_async, work_facade, work_late
from aiosync.bench._workloads import WORKLOADS, fill

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "AsyncTrainer",
    "FacadeTrainer",
    "gloo",
    "gloo_facade",
    "gloo_network",
    "pipe",
    "pipe_facade",
    "shm",
    "shm_facade",
    "tcp",
    "tcp_facade",
    "unix",
    "unix_facade",
]

_LAG_NBYTES = 2**30
_LARGE_NBYTES = 2**28
_DELIVERIES = 9


def _scheme(package: Any, transport: str, folder: str) -> Any:
    """A scheme of ``aiosync`` or of ``aiosync.sync``, for workers that are there from the start."""
    match transport:
        case "shm":
            return package.SharedMemWeightSyncScheme()
        case "pipe":
            return package.MultiProcessWeightSyncScheme()
        case "tcp":
            return package.TCPWeightSyncScheme("tcp://127.0.0.1:0")
        case "unix":
            return package.TCPWeightSyncScheme(f"unix://{folder}/socket")
        case _:
            shared = transport != "gloo_network"
            return package.DistributedWeightSyncScheme(shared_memory=shared)


class _Local:
    """What both surfaces need: a model, processes and a folder for sockets."""

    model: nn.Module

    def __init__(self, package: Any, transport: str) -> None:
        self._package = package
        self._transport = transport
        self._crew = Crew()
        self._folder = ""
        self.scheme: Any = None

    def _prepare(self, case: Case) -> None:
        self.model = WORKLOADS[case.workload].build()
        fill(self.model, 1.0)
        self._folder = tempfile.mkdtemp(prefix="aiosync-bench-")
        self.scheme = _scheme(self._package, self._transport, self._folder)
        self.scheme.init_on_sender(model_id="policy", model=self.model, num_workers=case.workers)

    def _tidy(self) -> None:
        self._crew.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


class AsyncTrainer(_Local):
    """The async API in trainer and workers."""

    _handles: Sequence[Handle] = ()
    _workload = ""

    async def open(self, case: Case) -> Sequence[Handle]:
        """Start the workers, on loops of the same kind as this one, and join them."""
        self._prepare(case)
        handles = self._crew.start(
            work_async, case.workers, self.scheme, case.workload, _workers_loop()
        )
        await self.scheme.connect(processes=self._crew.processes, timeout=PATIENCE)
        self._handles, self._workload = handles, case.workload
        return handles

    async def send(self) -> None:
        """Return when every worker has applied."""
        await self.scheme.send()

    async def critical_section(self) -> list[float]:
        """Measure how long the trainer may not touch its parameters, in seconds, a few times."""
        seconds = []
        for _ in range(5 if _nbytes(self.model) < _LARGE_NBYTES else 3):
            started = time.perf_counter()
            handle = self.scheme.send_nowait()
            seconds.append(time.perf_counter() - started)
            await handle
        return seconds

    async def delivery(self) -> list[float]:
        """Measure how long updates take until every worker said that it has them, in seconds.

        A send over a stream returns later: it then copies, for workers to come.
        """
        seconds = []
        for number in range(_DELIVERIES):
            fill(self.model, -1.0 - number)
            seconds.append((await self.scheme.send()).elapsed)
        return seconds

    async def loop_lag(self) -> list[Tick]:
        """Send until 1 GiB has arrived, and return what a ticker of a worker's loop found.

        Only while updates are under way: an optimizer's step is none of that.
        """
        ticks: list[Tick] = []
        for send in range(-(-_LAG_NBYTES // _nbytes(self.model))):
            fill(self.model, -1.0 - send)
            await asyncio.to_thread(ask_all, self._handles, "lag start")
            await self.send()
            for each in await asyncio.to_thread(ask_all, self._handles, "lag stop"):
                ticks += each
        return ticks

    async def first_version(self) -> float:
        """Let another worker take the place of all there are, and ask how long its weights took.

        In seconds, from its call of connect() to its having the current version. A TCP scheme
        takes workers at any time, but no more at once than it was told to expect. Nothing can be
        measured on this case afterwards.
        """
        await self.send()
        await asyncio.to_thread(self._crew.stop)
        late = self._crew.start(work_late, 1, self.scheme, self._workload, _workers_loop())
        took = (await asyncio.to_thread(ask_all, late, "join"))[0]
        value = float(next(self.model.parameters()).flatten()[0])
        await asyncio.to_thread(ask_all, late, "check", value)
        return cast("float", took)

    async def close(self) -> None:
        """End workers and scheme."""
        if self.scheme is not None:
            await asyncio.to_thread(self._crew.stop)
            await self.scheme.aclose()
            self._tidy()
            self.scheme = None


def _nbytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _workers_loop() -> Callable[[], Any]:
    """Return what makes loops of the same kind as the running one."""
    if isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop):
        return asyncio.new_event_loop
    return new_event_loop  # uvloop's, where a trainer runs on it


class FacadeTrainer(_Local):
    """``aiosync.sync`` in trainer and workers."""

    def open(self, case: Case) -> Sequence[Handle]:
        """Start the workers and join them."""
        self._prepare(case)
        handles = self._crew.start(work_facade, case.workers, self.scheme, case.workload)
        self.scheme.connect(processes=self._crew.processes, timeout=PATIENCE)
        return handles

    def send(self) -> None:
        """Return when every worker has applied."""
        self.scheme.send()

    def close(self) -> None:
        """End workers and scheme."""
        if self.scheme is not None:
            self._crew.stop()
            self.scheme.shutdown()
            self._tidy()
            self.scheme = None


def shm() -> AsyncTrainer:
    """Shared memory."""
    return AsyncTrainer(aiosync, "shm")


def shm_facade() -> FacadeTrainer:
    """Shared memory, blocking."""
    return FacadeTrainer(aiosync.sync, "shm")


def pipe() -> AsyncTrainer:
    """Pipes."""
    return AsyncTrainer(aiosync, "pipe")


def pipe_facade() -> FacadeTrainer:
    """Pipes, blocking."""
    return FacadeTrainer(aiosync.sync, "pipe")


def tcp() -> AsyncTrainer:
    """TCP over loopback, checksums on."""
    return AsyncTrainer(aiosync, "tcp")


def tcp_facade() -> FacadeTrainer:
    """TCP over loopback, blocking."""
    return FacadeTrainer(aiosync.sync, "tcp")


def unix() -> AsyncTrainer:
    """Unix-domain sockets, checksums on."""
    return AsyncTrainer(aiosync, "unix")


def unix_facade() -> FacadeTrainer:
    """Unix-domain sockets, blocking."""
    return FacadeTrainer(aiosync.sync, "unix")


def gloo() -> AsyncTrainer:
    """torch.distributed over Gloo."""
    return AsyncTrainer(aiosync, "gloo")


def gloo_network() -> AsyncTrainer:
    """torch.distributed over Gloo, with workers as if on other hosts."""
    return AsyncTrainer(aiosync, "gloo_network")


def gloo_facade() -> FacadeTrainer:
    """torch.distributed over Gloo, blocking."""
    return FacadeTrainer(aiosync.sync, "gloo")
