"""What ``aiosync demo`` runs: PPO in the trainer, and the workers that collect for it.

Read :func:`train_async` and :func:`train_sync`, which differ by ``await`` only, then
:func:`work_async` and :func:`work_sync` to see what a worker needs from aiosync: a scheme
that came with the process's arguments, ``init_on_receiver``, ``connect``, and nothing else; the
policy is then kept on the newest version while the worker collects. The episodes go back over
a plain :mod:`multiprocessing` connection. Must not import typer or rich: workers start faster.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium
import numpy as np
import torch
from torch import nn

import aiosync
import aiosync.sync
from aiosync.errors import AiosyncError

if TYPE_CHECKING:
    from aiosync.cli.demo import Progress

__all__ = ["Episode", "train"]

_BATCH_STEPS = 512  # environment steps that one update of the policy learns from
_LOOK_SECONDS = 0.2

_GAMMA = 0.98
_CLIP = 0.2
_LEARNING_RATE = 3e-3
_EPOCHS = 8
_MINIBATCH = 256


@dataclass(slots=True)
class Episode:
    """One attempt of a worker, of as many steps as the pole stood: that is its return.

    Attributes:
        worker_idx: Who made it.
        obs: Observations before each step.
        actions: Actions taken.
        log_probs: Their log-probability under the policy that took them.
        versions: Version of the policy that took each step.
    """

    worker_idx: int
    obs: list[Any] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @torch.no_grad()
    def act(self, policy: Policy, obs: Any, version: int) -> int:
        """Choose an action; ``version`` is what the policy holds meanwhile."""
        log_probs = policy(torch.from_numpy(obs)).log_softmax(-1)
        action = int(torch.multinomial(log_probs.exp(), 1))
        self.obs.append(obs)
        self.actions.append(action)
        self.log_probs.append(float(log_probs[action]))
        self.versions.append(version)
        return action


Start: TypeAlias = "Callable[[], AbstractContextManager[Workers]]"

# -- training -----------------------------------------------------------------------------------


def train(progress: Progress, transport: str, num_workers: int, seed: int, sync: bool) -> None:
    """Train until it is solved or the time is up.

    Sets the number of torch's threads to one and seeds torch, both for the whole process.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    name = "SharedMemWeightSyncScheme" if transport == "shm" else "MultiProcessWeightSyncScheme"
    policy = Policy()
    scheme = getattr(aiosync.sync if sync else aiosync, name)()
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=num_workers)
    start = functools.partial(running, num_workers, seed, scheme, sync)
    if sync:
        train_sync(policy, scheme, start, progress)
    else:
        aiosync.run(train_async(policy, scheme, start, progress))


async def train_async(policy: Policy, scheme: Any, start: Start, progress: Progress) -> None:
    """Train with the async API."""
    learner = PPO(policy)
    async with scheme:
        with start() as workers:
            # Every worker has the first weights when this returns; one that dies is noticed.
            await scheme.connect(processes=workers.processes)
            progress.started = time.monotonic()
            going = True
            while going:
                batch = await asyncio.to_thread(workers.collect)
                lr_scale = progress.collected(batch, scheme.version)
                await asyncio.to_thread(learner.update, batch, lr_scale)
                going = progress.sent(await scheme.send())  # returns when all have applied it


def train_sync(policy: Policy, scheme: Any, start: Start, progress: Progress) -> None:
    """Train with the blocking facade."""
    learner = PPO(policy)
    with scheme, start() as workers:
        scheme.connect(processes=workers.processes)
        progress.started = time.monotonic()
        going = True
        while going:
            batch = workers.collect()
            lr_scale = progress.collected(batch, scheme.version)
            learner.update(batch, lr_scale)
            going = progress.sent(scheme.send())


class Workers:
    """The processes that collect. Nothing here is about weights.

    Each worker has one episode in the making and at most one waiting to be taken, so a slow
    trainer makes its workers wait and never gets old data.
    """

    def __init__(self) -> None:
        self.processes: list[SpawnProcess] = []
        self.channels: list[Connection] = []
        self.stopped = False

    def collect(self) -> list[Episode]:
        """Return what one update of the policy learns from; blocks, and ends when stopped."""
        batch: list[Episode] = []
        while sum(len(each.obs) for each in batch) < _BATCH_STEPS:
            for channel in wait(self.channels, _LOOK_SECONDS):
                assert isinstance(channel, Connection)
                try:
                    batch.append(channel.recv())
                    channel.send_bytes(b"next")
                except (EOFError, ConnectionResetError, BrokenPipeError):
                    process = self.processes[self.channels.index(channel)]
                    process.join(5.0)
                    raise AiosyncError(
                        f"{process.name} (pid {process.pid}) ended with exit code "
                        f"{process.exitcode} before it was asked to stop"
                    ) from None
            if self.stopped:
                break
        return batch


@contextmanager
def running(num_workers: int, seed: int, scheme: Any, sync: bool) -> Iterator[Workers]:
    """Start the workers, and end them: ask, then kill."""
    workers = Workers()
    context = multiprocessing.get_context("spawn")
    patience = 0.5  # a worker that still starts hears nothing
    # Ctrl-C reaches the whole process group. Workers inherit that it is blocked; one that comes
    # meanwhile is not lost here.
    resource_tracker.ensure_running()  # first, because it unblocks SIGINT when it starts
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for idx in range(num_workers):
            ours, theirs = context.Pipe()
            workers.channels.append(ours)
            args = (idx, seed, scheme, theirs, sync)
            process = context.Process(target=work, args=args, name=f"worker {idx}", daemon=True)
            process.start()
            workers.processes.append(process)
            theirs.close()  # so that its end is the worker's end
            ours.send_bytes(b"next")
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield workers
        patience = 5.0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        workers.stopped = True
        for channel in workers.channels:
            channel.close()
        deadline = time.monotonic() + patience
        for process in workers.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
            process.close()


# -- learning -----------------------------------------------------------------------------------


class Policy(nn.Module):
    """The network that workers run: observations ``[..., 4]`` to action logits ``[..., 2]``."""

    def __init__(self) -> None:
        super().__init__()
        self.body: nn.Sequential = nn.Sequential(
            nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
        )

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[..., 2]`` for observations ``[..., 4]``."""
        logits: torch.Tensor = self.body(obs)
        return logits


class PPO:
    """Proximal policy optimisation of one policy, without a critic.

    The batches come from workers whose policy may be a few versions old; the importance ratio
    corrects for that, because every step carries the log-probability under the policy that took it.

    Args:
        policy: Trained in place.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy: Policy = policy
        self._optimizer = torch.optim.Adam(policy.parameters(), eps=1e-5, foreach=True)

    def update(self, episodes: Sequence[Episode], lr_scale: float) -> None:
        """Improve the policy on one batch, of any workers and versions."""
        self._optimizer.param_groups[0]["lr"] = _LEARNING_RATE * lr_scale
        obs = torch.from_numpy(np.array([row for each in episodes for row in each.obs]))
        actions = torch.tensor([action for each in episodes for action in each.actions])
        old_log_probs = torch.tensor([value for each in episodes for value in each.log_probs])
        left = torch.cat([torch.arange(len(each.obs), 0, -1) for each in episodes])
        returns = (1 - _GAMMA**left) / (1 - _GAMMA)  # each step that is left earns 1, discounted
        advantages = (returns - returns.mean()) / (returns.std() + 1e-8)
        for _ in range(_EPOCHS):
            for rows in torch.randperm(len(obs)).chunk(-(-len(obs) // _MINIBATCH)):
                log_probs = self.policy(obs[rows]).log_softmax(-1)
                log_prob = log_probs.gather(-1, actions[rows, None]).squeeze(-1)
                ratio = (log_prob - old_log_probs[rows]).exp()
                clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
                loss = -torch.minimum(ratio * advantages[rows], clipped * advantages[rows]).mean()
                self._optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch says no types
                nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
                self._optimizer.step()


# -- collecting ---------------------------------------------------------------------------------


async def work_async(worker_idx: int, env: Any, scheme: Any, channel: Connection) -> None:
    """Collect with the async API until the trainer closes ``channel``.

    Updates are applied on this event loop, so only where the code awaits: between ``act`` and
    the next ``await`` the policy and ``scheme.version`` cannot change.
    """
    policy = Policy()
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker_idx)
    async with scheme:
        await scheme.connect()  # the policy holds the trainer's weights from here on
        while True:
            await asyncio.to_thread(channel.recv_bytes)  # the trainer asks for one more episode
            episode, ended = Episode(worker_idx), False
            obs, _ = env.reset()
            while not ended:
                action = episode.act(policy, obs, scheme.version)
                obs, _, terminated, truncated, _ = env.step(action)
                ended = terminated or truncated
                await asyncio.sleep(0)  # a newer version may be applied here
            channel.send(episode)


def work_sync(worker_idx: int, env: Any, scheme: Any, channel: Connection) -> None:
    """Collect with the blocking facade until the trainer closes ``channel``.

    Updates are applied by the facade's own thread, never during a forward of the policy.
    ``reading()`` widens that protection to more than one forward: here to the forward together
    with the version that is noted beside its action.
    """
    policy = Policy()
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker_idx)
    with scheme:
        scheme.connect()
        while True:
            channel.recv_bytes()
            episode, ended = Episode(worker_idx), False
            obs, _ = env.reset()
            while not ended:
                with scheme.reading():
                    action = episode.act(policy, obs, scheme.version)
                obs, _, terminated, truncated, _ = env.step(action)
                ended = terminated or truncated
            channel.send(episode)


def work(worker_idx: int, seed: int, scheme: Any, channel: Connection, sync: bool) -> None:
    """Run one worker until the trainer closes its end of ``channel``, or has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends us
    torch.set_num_threads(1)  # two workers with two threads each on two cores: 5 times slower
    torch.manual_seed(seed + 1000 * (worker_idx + 1))
    env = gymnasium.make("CartPole-v1", disable_env_checker=True)
    env.reset(seed=seed + 1000 * (worker_idx + 1))
    try:
        if sync:
            work_sync(worker_idx, env, scheme, channel)
        else:
            aiosync.run(work_async(worker_idx, env, scheme, channel))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    finally:
        gc.freeze()  # the interpreter need not search torch's modules for garbage: seconds less
