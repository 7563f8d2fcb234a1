"""aiosync as a contender: the trainer's halves, over transports to processes of this host."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import aiosync
import aiosync.sync
from aiosync._run import new_event_loop
from aiosync.bench._results import Case
from aiosync.bench._work import PATIENCE, WORKLOADS, Crew, Handle, fill, work_async, work_facade

if TYPE_CHECKING:
    from torch import nn

__all__ = ["AsyncTrainer", "FacadeTrainer"]

_MAKERS: dict[str, Callable[[Any, str], Any]] = {
    "shm": lambda package, _: package.SharedMemWeightSyncScheme(),
    "pipe": lambda package, _: package.MultiProcessWeightSyncScheme(),
    "tcp": lambda package, _: package.TCPWeightSyncScheme("tcp://127.0.0.1:0"),
    "unix": lambda package, folder: package.TCPWeightSyncScheme(f"unix://{folder}/socket"),
    "gloo": lambda package, _: package.DistributedWeightSyncScheme(),
    "gloo_network": lambda package, _: package.DistributedWeightSyncScheme(shared_memory=False),
}


class _Trainer:
    """What both surfaces need: a model, processes and a folder for sockets.

    Attributes:
        model: What it sends.
        scheme: The scheme, from :meth:`open` on.
        crew: The worker processes.
    """

    model: nn.Module

    def __init__(self, transport: str) -> None:
        self.crew: Crew = Crew()
        self.scheme: Any = None
        self._transport = transport
        self._folder = ""

    def _prepare(self, case: Case, package: Any) -> None:
        self.model = WORKLOADS[case.workload].build()
        fill(self.model, 1.0)
        self._folder = tempfile.mkdtemp(prefix="aiosync-bench-")
        self.scheme = _MAKERS[self._transport](package, self._folder)
        self.scheme.init_on_sender(model_id="policy", model=self.model, num_workers=case.workers)

    def _tidy(self) -> None:
        self.scheme = None
        shutil.rmtree(self._folder, ignore_errors=True)


class AsyncTrainer(_Trainer):
    """The async API in trainer and workers.

    Args:
        transport: Name of the transport.
    """

    async def open(self, case: Case) -> Sequence[Handle]:
        """Start the workers, on loops of the same kind as this one, and join them."""
        self._prepare(case, aiosync)
        plain = isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop)
        loop = asyncio.new_event_loop if plain else new_event_loop
        handles = self.crew.start(work_async, case.workers, self.scheme, case.workload, loop)
        await self.scheme.connect(processes=self.crew.processes, timeout=PATIENCE)
        return handles

    async def send(self) -> None:
        """Return when every worker has applied."""
        await self.scheme.send()

    async def close(self) -> None:
        """End workers and scheme."""
        if self.scheme is not None:
            await asyncio.to_thread(self.crew.stop)
            await self.scheme.aclose()
            self._tidy()


class FacadeTrainer(_Trainer):
    """``aiosync.sync`` in trainer and workers.

    Args:
        transport: Name of the transport.
    """

    def open(self, case: Case) -> Sequence[Handle]:
        """Start the workers and join them."""
        self._prepare(case, aiosync.sync)
        handles = self.crew.start(work_facade, case.workers, self.scheme, case.workload)
        self.scheme.connect(processes=self.crew.processes, timeout=PATIENCE)
        return handles

    def send(self) -> None:
        """Return when every worker has applied."""
        self.scheme.send()

    def close(self) -> None:
        """End workers and scheme."""
        if self.scheme is not None:
            self.crew.stop()
            self.scheme.shutdown()
            self._tidy()
