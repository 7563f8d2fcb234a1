"""The training of ``aiosync demo``: PPO in the trainer, and the workers that collect for it.

Read :func:`train_async` and :func:`train_sync`, which differ by ``await`` only, then
:func:`work_async` and :func:`work_sync`. A worker needs only three things from aiosync: a scheme
that came with the process's arguments, ``init_on_receiver`` and ``connect``. From then on aiosync
keeps the policy on the newest version while the worker collects. The episodes go back over a plain
:mod:`multiprocessing` connection. Must not import typer or rich: workers start faster.
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
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import torch
from torch import nn

import aiosync
import aiosync.sync
from aiosync.cli.progress import Episode, Progress, Step
from aiosync.errors import AiosyncError

__all__ = ["Learn", "train"]

_BATCH_STEPS = 512  # least number of environment steps that one update of the policy learns from
_POLL_SECONDS = 0.2
# Seconds until the workers are killed: a worker that still imports modules does not see the end
# of its pipe.
_END_SECONDS = 2.0

_GAMMA = 0.98
_CLIP = 0.2
_LEARNING_RATE = 3e-3
_EPOCHS = 8
_MINIBATCH = 256


Learn: TypeAlias = Callable[[list[Episode], float], None]
"""Function that improves the policy on a batch, with a factor on the learning rate."""

# -- training -----------------------------------------------------------------------------------


def train(progress: Progress, transport: str, num_workers: int, seed: int, sync: bool) -> None:
    """Train until CartPole is solved or the time is up.

    Sets the number of torch's threads to one and seeds torch, both for the whole process.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    name = "SharedMemWeightSyncScheme" if transport == "shm" else "MultiProcessWeightSyncScheme"
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), eps=1e-5, foreach=True)
    learn = functools.partial(improve, policy, optimizer)
    scheme = getattr(aiosync.sync if sync else aiosync, name)()
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=num_workers)
    start = running(num_workers, seed, scheme, sync)
    if sync:
        train_sync(learn, scheme, start, progress)
    else:
        aiosync.run(train_async(learn, scheme, start, progress))


async def train_async(
    learn: Learn, scheme: Any, start: AbstractContextManager[Workers], progress: Progress
) -> None:
    """Train with the async API."""
    async with scheme:
        with start as workers:
            # connect() returns when every worker has the first weights. It is given the processes
            # so that it notices a worker that dies.
            await scheme.connect(processes=workers.processes)
            progress.started = time.monotonic()
            while progress.going:
                batch = await asyncio.to_thread(workers.collect)
                lr_scale = progress.collected(batch, scheme.version)
                await asyncio.to_thread(learn, batch, lr_scale)
                # send() returns when every worker has applied the version.
                progress.sent(await scheme.send())


def train_sync(
    learn: Learn, scheme: Any, start: AbstractContextManager[Workers], progress: Progress
) -> None:
    """Train with the blocking facade."""
    with scheme, start as workers:
        scheme.connect(processes=workers.processes)
        progress.started = time.monotonic()
        while progress.going:
            batch = workers.collect()
            lr_scale = progress.collected(batch, scheme.version)
            learn(batch, lr_scale)
            progress.sent(scheme.send())


class Workers:
    """The worker processes that collect episodes; weights do not pass through here.

    Each worker plays one episode and has at most one finished episode waiting for the trainer, so
    a slow trainer makes its workers wait and never gets old data.
    """

    def __init__(self) -> None:
        self.processes: list[SpawnProcess] = []
        self.channels: list[Connection] = []
        self.stopped = False

    def collect(self) -> list[Episode]:
        """Return the episodes that one update of the policy learns from.

        Blocks until there are enough steps, and returns early when the workers are stopped.

        Raises:
            AiosyncError: A worker process ended before it was asked to stop.
        """
        batch: list[Episode] = []
        while sum(len(steps) for _, steps in batch) < _BATCH_STEPS:
            for channel in wait(self.channels, _POLL_SECONDS):
                assert isinstance(channel, Connection)
                try:
                    batch.append(channel.recv())
                    channel.send_bytes(b"next")
                except (EOFError, ConnectionResetError, BrokenPipeError):
                    raise self._ended_early(self.channels.index(channel)) from None
            if self.stopped:
                break
        return batch

    def _ended_early(self, index: int) -> AiosyncError:
        """Return the error for a worker process that ended before it was asked to stop."""
        process = self.processes[index]
        process.join(5.0)
        return AiosyncError(
            f"{process.name} (pid {process.pid}) ended with exit code "
            f"{process.exitcode} before it was asked to stop"
        )


@contextmanager
def running(num_workers: int, seed: int, scheme: Any, sync: bool) -> Iterator[Workers]:
    """Start the workers; at the end ask them to stop, and kill those that still run after 2 s."""
    workers = Workers()
    context = multiprocessing.get_context("spawn")
    # Ctrl-C reaches the whole process group, so SIGINT is blocked while the workers start: they
    # inherit that. A Ctrl-C in the meantime is delivered to this process afterwards.
    # The resource tracker has to start first, because its start unblocks SIGINT.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for idx in range(num_workers):
            ours, theirs = context.Pipe()
            workers.channels.append(ours)
            args = (idx, seed, scheme, theirs, sync)
            process = context.Process(target=work, args=args, name=f"worker {idx}", daemon=True)
            process.start()
            workers.processes.append(process)
            theirs.close()  # so that the pipe ends when the worker's process ends
            ours.send_bytes(b"next")
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield workers
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        workers.stopped = True
        for channel in workers.channels:
            channel.close()
        deadline = time.monotonic() + _END_SECONDS
        for process in workers.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
            process.close()


# -- learning -----------------------------------------------------------------------------------


def make_policy() -> nn.Module:
    """Make the policy network: observations ``[..., 4]`` to action logits ``[..., 2]``."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )


def _advantages(episodes: Sequence[Episode]) -> torch.Tensor:
    """Return how much better than the mean each step of the episodes is, by its return."""
    left = torch.cat([torch.arange(len(episode), 0, -1) for _, episode in episodes])
    # Each step until the end of the episode has the reward 1, discounted.
    returns = (1 - _GAMMA**left) / (1 - _GAMMA)
    return (returns - returns.mean()) / (returns.std() + 1e-8)


def improve(
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    episodes: Sequence[Episode],
    lr_scale: float,
) -> None:
    """Improve the policy in place on one batch: proximal policy optimisation, without a critic.

    The episodes come from workers whose policy may be a few versions old; the importance ratio
    corrects for that, because every step carries the log-probability under the policy that took it.
    """
    optimizer.param_groups[0]["lr"] = _LEARNING_RATE * lr_scale
    steps = [step for _, episode in episodes for step in episode]
    obs = torch.from_numpy(np.array([step.obs for step in steps]))
    actions = torch.tensor([step.action for step in steps])
    old_log_probs = torch.tensor([step.log_prob for step in steps])
    advantages = _advantages(episodes)
    for _ in range(_EPOCHS):
        for rows in torch.randperm(len(obs)).chunk(-(-len(obs) // _MINIBATCH)):
            log_probs = policy(obs[rows]).log_softmax(-1)
            log_prob = log_probs.gather(-1, actions[rows, None]).squeeze(-1)
            ratio = (log_prob - old_log_probs[rows]).exp()
            clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
            loss = -torch.minimum(ratio * advantages[rows], clipped * advantages[rows]).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch says no types
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()


# -- collecting ---------------------------------------------------------------------------------


def play(env: Any, policy: nn.Module, scheme: Any) -> Iterator[Step]:
    """Play one episode and yield its steps.

    aiosync applies no update during a forward. ``reading()`` extends that to a whole block: here
    to the forward together with the read of the version that is recorded beside its action.
    """
    obs, _ = env.reset()
    ended = False
    while not ended:
        with scheme.reading(), torch.no_grad():
            log_probs, version = policy(torch.from_numpy(obs)).log_softmax(-1), scheme.version
        action = int(torch.multinomial(log_probs.exp(), 1))
        step = Step(obs, action, float(log_probs[action]), version)
        obs, _, terminated, truncated, _ = env.step(action)
        ended = terminated or truncated
        yield step


async def work_async(worker_idx: int, env: Any, scheme: Any, channel: Connection) -> None:
    """Collect with the async API until the trainer closes ``channel``.

    Updates arrive on this event loop, so they arrive only while the code awaits.
    """
    policy = make_policy()
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker_idx)
    async with scheme:
        await scheme.connect()  # from here on the policy has the trainer's weights
        while True:
            await asyncio.to_thread(channel.recv_bytes)  # the trainer asks for one more episode
            steps = []
            for step in play(env, policy, scheme):
                steps.append(step)
                await asyncio.sleep(0)  # a newer version may arrive here
            channel.send((worker_idx, steps))


def work_sync(worker_idx: int, env: Any, scheme: Any, channel: Connection) -> None:
    """Collect with the blocking facade until the trainer closes ``channel``.

    Updates are applied by the facade's own thread.
    """
    policy = make_policy()
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker_idx)
    with scheme:
        scheme.connect()
        while True:
            channel.recv_bytes()
            channel.send((worker_idx, list(play(env, policy, scheme))))


def work(worker_idx: int, seed: int, scheme: Any, channel: Connection, sync: bool) -> None:
    """Run one worker until the trainer closes its end of ``channel``, or its process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C and ends the workers
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
        # At its exit the interpreter would search torch's modules for garbage, for seconds.
        gc.freeze()
