"""The training half of ``aiosync demo``: collect, learn, send, as async and as classic code.

Read :func:`train_async` and :func:`train_sync`; they differ by ``await`` only. The algorithm is
in ``_ppo.py``, the workers in ``_worker.py``, their processes in ``_pool.py``, and what is
measured and shown in ``_progress.py`` and ``_view.py``. This module must never import typer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

import aiosync
import aiosync.sync
from aiosync.cli._pool import Workers
from aiosync.cli._ppo import PPO, Fragment, Policy
from aiosync.cli._progress import Progress
from aiosync.cli._worker import AsyncScheme, SyncScheme

__all__ = ["DemoOptions", "Transport", "run_demo", "train_async", "train_sync"]

Transport: TypeAlias = Literal["pipe", "shm"]
"""How weights travel: through pipes, or through one shared-memory segment."""

_BATCH_STEPS = 512
"""Environment steps that one update of the policy learns from."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to run.

    Attributes:
        transport: ``"pipe"`` or ``"shm"``.
        num_workers: Worker processes.
        sync: Use the blocking facade in trainer and workers.
        seconds: Longest training time, in seconds, without the start of the workers.
        seed: Seeds networks, environments and the sampling of actions. Runs still differ,
            because it is not fixed which worker is how fast.
    """

    transport: Transport = "shm"
    num_workers: int = 2
    sync: bool = False
    seconds: float = 50.0
    seed: int = 0


async def train_async(
    options: DemoOptions, progress: Progress, show: Callable[[Progress], None]
) -> None:
    """Train with the async API.

    Args:
        options: What to run.
        progress: Filled in as the training goes; says when to stop.
        show: Called after every update of the policy; must not block.

    Raises:
        WorkerDied: A worker ended or raised.
        AiosyncError: The weights could not be sent.
    """
    policy = Policy()
    learner = PPO(policy)
    scheme: AsyncScheme = (
        aiosync.SharedMemWeightSyncScheme()
        if options.transport == "shm"
        else aiosync.MultiProcessWeightSyncScheme()
    )
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=options.num_workers)
    pool = Workers(scheme, num_workers=options.num_workers, seed=options.seed, sync=False)
    async with scheme, pool as workers:
        # Every worker has the first weights when this returns; one that dies is noticed at once.
        await scheme.connect(processes=workers.processes)
        progress.start()
        while not progress.finished:
            batch: list[Fragment] = []
            while sum(fragment.num_steps for fragment in batch) < _BATCH_STEPS:
                batch.append(await workers.receive_async())
            progress.collected(batch, scheme.version)
            await asyncio.to_thread(learner.update, batch, lr_scale=progress.lr_scale)
            progress.sent(await scheme.send())  # returns when every worker has applied it
            show(progress)
        progress.stop()


def train_sync(options: DemoOptions, progress: Progress, show: Callable[[Progress], None]) -> None:
    """Train with the blocking facade; arguments and errors as in :func:`train_async`."""
    policy = Policy()
    learner = PPO(policy)
    scheme: SyncScheme = (
        aiosync.sync.SharedMemWeightSyncScheme()
        if options.transport == "shm"
        else aiosync.sync.MultiProcessWeightSyncScheme()
    )
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=options.num_workers)
    pool = Workers(scheme, num_workers=options.num_workers, seed=options.seed, sync=True)
    with scheme, pool as workers:
        scheme.connect(processes=workers.processes)
        progress.start()
        while not progress.finished:
            batch: list[Fragment] = []
            while sum(fragment.num_steps for fragment in batch) < _BATCH_STEPS:
                batch.append(workers.receive())
            progress.collected(batch, scheme.version)
            learner.update(batch, lr_scale=progress.lr_scale)
            progress.sent(scheme.send())
            show(progress)
        progress.stop()


def run_demo(options: DemoOptions, show: Callable[[Progress], None]) -> Progress:
    """Run the whole demo and return what was measured.

    Sets the number of torch's threads to one and seeds torch, both for the whole process.

    Args:
        options: What to run.
        show: Called after every update of the policy.

    Raises:
        WorkerDied: A worker ended or raised.
        AiosyncError: The weights could not be sent.
    """
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    progress = Progress(num_workers=options.num_workers, seconds=options.seconds)
    if options.sync:
        train_sync(options, progress, show)
    else:
        aiosync.run(train_async(options, progress, show))
    return progress
