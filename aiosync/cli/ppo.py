"""What ``aiosync demo`` runs: PPO in the trainer, and the workers that collect for it.

Read :func:`train_async` and :func:`train_sync`, which differ by ``await`` only, then
:func:`work_async` and :func:`work_sync` to see what a worker needs from aiosync: a scheme
that came with the process's arguments, ``init_on_receiver``, ``connect``, and nothing else; the
policy is then kept on the newest version while the worker collects. The trajectories go back over
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
from dataclasses import dataclass
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
    import numpy.typing as npt

    from aiosync.cli.demo import Progress

__all__ = ["Fragment", "train"]

_BATCH_STEPS = 512  # environment steps that one update of the policy learns from
_LOOK_SECONDS = 0.2

_OBS_SIZE = 4
_NUM_ENVS = 8
_NUM_STEPS = 32  # of each environment in one fragment
_GAMMA = 0.98
_GAE_LAMBDA = 0.9
_CLIP = 0.2
_LEARNING_RATE = 1e-3
_EPOCHS = 8
_MINIBATCH = 256


@dataclass(slots=True)
class Fragment:
    """What one worker saw during ``T`` steps of its ``E`` environments.

    Attributes:
        worker_idx: Who collected it.
        obs: Observations before each step, float32 ``[T, E, 4]``.
        next_obs: Observations after each step and before any reset, float32 ``[T, E, 4]``.
        actions: Actions taken, int64 ``[T, E]``.
        log_probs: Their log-probability under the policy that took them, float32 ``[T, E]``.
        rewards: float32 ``[T, E]``.
        terminated: The pole fell, bool ``[T, E]``.
        done: The episode ended, by a fall or by the time limit, bool ``[T, E]``.
        versions: Version of the policy that took each step, int64 ``[T]``.
        returns: Return of every episode that ended in this fragment, oldest first.
    """

    worker_idx: int
    obs: npt.NDArray[np.float32]
    next_obs: npt.NDArray[np.float32]
    actions: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float32]
    rewards: npt.NDArray[np.float32]
    terminated: npt.NDArray[np.bool_]
    done: npt.NDArray[np.bool_]
    versions: npt.NDArray[np.int64]
    returns: list[float]


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

    Each worker has one fragment in the making and at most one waiting to be taken, so a slow
    trainer makes its workers wait and never gets old data.
    """

    def __init__(self) -> None:
        self.processes: list[SpawnProcess] = []
        self.channels: list[Connection] = []
        self.stopped = False

    def collect(self) -> list[Fragment]:
        """Return what one update of the policy learns from; blocks, and ends when stopped."""
        batch: list[Fragment] = []
        while sum(fragment.actions.size for fragment in batch) < _BATCH_STEPS:
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
        self.body: nn.Sequential = _mlp(2, out_gain=0.01)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[..., 2]`` for observations ``[..., 4]``."""
        logits: torch.Tensor = self.body(obs)
        return logits


def _mlp(num_out: int, *, out_gain: float) -> nn.Sequential:
    layers = [nn.Linear(_OBS_SIZE, 64), nn.Linear(64, 64), nn.Linear(64, num_out)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, out_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class PPO:
    """Proximal policy optimisation of one policy; the critic stays in the trainer.

    The batches come from workers whose policy may be a few versions old; the importance ratio
    corrects for that, because every step carries the log-probability under the policy that took it.

    Args:
        policy: Trained in place. Only this module is sent to workers.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy: Policy = policy
        self.critic: nn.Sequential = _mlp(1, out_gain=1.0)
        self._parameters = [*policy.parameters(), *self.critic.parameters()]
        self._optimizer = torch.optim.Adam(self._parameters, eps=1e-5, foreach=True)

    def update(self, fragments: Sequence[Fragment], lr_scale: float) -> None:
        """Improve the policy on one batch, of any workers and versions."""
        self._optimizer.param_groups[0]["lr"] = _LEARNING_RATE * lr_scale
        parts = [self._prepare(fragment) for fragment in fragments]
        obs, actions, old_log_probs, advantages, targets = map(torch.cat, zip(*parts, strict=True))
        for _ in range(_EPOCHS):
            for rows in torch.randperm(len(obs)).chunk(-(-len(obs) // _MINIBATCH)):
                advantage = advantages[rows]
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                log_probs = self.policy(obs[rows]).log_softmax(-1)
                log_prob = log_probs.gather(-1, actions[rows, None]).squeeze(-1)
                ratio = (log_prob - old_log_probs[rows]).exp()
                clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
                policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
                values = self.critic(obs[rows]).squeeze(-1)
                loss = policy_loss + 0.5 * (values - targets[rows]).square().mean()
                self._optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self._parameters, 0.5)
                self._optimizer.step()

    @torch.no_grad()
    def _prepare(self, fragment: Fragment) -> tuple[torch.Tensor, ...]:
        """Flatten one fragment to rows and add advantages and value targets (GAE)."""
        obs = torch.from_numpy(fragment.obs)
        values = self.critic(obs).squeeze(-1)
        next_values = self.critic(torch.from_numpy(fragment.next_obs)).squeeze(-1)
        alive = torch.from_numpy(~fragment.terminated).float()
        goes_on = torch.from_numpy(~fragment.done).float()
        deltas = torch.from_numpy(fragment.rewards) + _GAMMA * next_values * alive - values
        advantages = torch.empty_like(deltas)
        running = torch.zeros(deltas.shape[1])
        for t in reversed(range(len(deltas))):
            running = deltas[t] + _GAMMA * _GAE_LAMBDA * goes_on[t] * running
            advantages[t] = running
        log_probs = torch.from_numpy(fragment.log_probs)
        actions = torch.from_numpy(fragment.actions)
        rows = (actions, log_probs, advantages, advantages + values)
        return obs.flatten(0, 1), *(each.flatten() for each in rows)


# -- collecting ---------------------------------------------------------------------------------


class Collector:
    """Steps a few CartPoles with a policy and remembers what happened.

    One step is :meth:`act`, which runs the policy, then :meth:`advance`, which runs the
    environments; only the first needs the weights to hold still.

    Args:
        policy: Maps observations ``[E, 4]`` to logits ``[E, 2]``. Read only.
        worker_idx: Of this worker.
        seed: Seeds the environments and the sampling of actions.
    """

    def __init__(self, policy: Policy, worker_idx: int, seed: int) -> None:
        self._policy = policy
        self._worker_idx = worker_idx
        seed += 1000 * (worker_idx + 1)
        self._random = torch.Generator().manual_seed(seed)
        self._envs = [
            gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in range(_NUM_ENVS)
        ]
        first = [env.reset(seed=seed + i)[0] for i, env in enumerate(self._envs)]
        self._obs = np.array(first, dtype=np.float32)
        self._episode_returns = np.zeros(_NUM_ENVS)

    def start(self) -> None:
        """Begin a fragment."""
        grid = (_NUM_STEPS, _NUM_ENVS)
        self.fragment: Fragment = Fragment(
            worker_idx=self._worker_idx,
            obs=np.empty((*grid, _OBS_SIZE), np.float32),
            next_obs=np.empty((*grid, _OBS_SIZE), np.float32),
            actions=np.empty(grid, np.int64),
            log_probs=np.empty(grid, np.float32),
            rewards=np.empty(grid, np.float32),
            terminated=np.empty(grid, np.bool_),
            done=np.empty(grid, np.bool_),
            versions=np.empty(_NUM_STEPS, np.int64),
            returns=[],
        )

    @torch.no_grad()
    def act(self, t: int, version: int) -> None:
        """Choose the actions of step ``t``; ``version`` is what the policy holds meanwhile."""
        fragment = self.fragment
        log_probs = self._policy(torch.from_numpy(self._obs)).log_softmax(-1)
        actions = torch.multinomial(log_probs.exp(), 1, generator=self._random)
        fragment.obs[t] = self._obs
        fragment.actions[t] = actions.squeeze(-1).numpy()
        fragment.log_probs[t] = log_probs.gather(-1, actions).squeeze(-1).numpy()
        fragment.versions[t] = version

    def advance(self, t: int) -> None:
        """Step every environment with the chosen actions; restart those that ended."""
        fragment = self.fragment
        for i, env in enumerate(self._envs):
            obs, reward, terminated, truncated, _ = env.step(int(fragment.actions[t, i]))
            fragment.next_obs[t, i] = obs
            fragment.rewards[t, i] = reward
            fragment.terminated[t, i] = terminated
            fragment.done[t, i] = terminated or truncated
            self._episode_returns[i] += float(reward)
            if terminated or truncated:
                fragment.returns.append(float(self._episode_returns[i]))
                self._episode_returns[i] = 0.0
                obs, _ = env.reset()
            self._obs[i] = obs


async def work_async(worker_idx: int, seed: int, scheme: Any, channel: Connection) -> None:
    """Collect with the async API until the trainer closes ``channel``.

    Updates are applied on this event loop, so only where the code awaits: between ``act`` and
    the next ``await`` the policy and ``scheme.version`` cannot change.
    """
    policy = Policy()
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker_idx)
    async with scheme:
        await scheme.connect()  # the policy holds the trainer's weights from here on
        collector = Collector(policy, worker_idx, seed)
        while True:
            await asyncio.to_thread(channel.recv_bytes)  # the trainer asks for one more fragment
            collector.start()
            for t in range(_NUM_STEPS):
                collector.act(t, scheme.version)
                collector.advance(t)
                await asyncio.sleep(0)  # a newer version may be applied here
            channel.send(collector.fragment)


def work_sync(worker_idx: int, seed: int, scheme: Any, channel: Connection) -> None:
    """Collect with the blocking facade until the trainer closes ``channel``.

    Updates are applied by the facade's own thread, never during a forward of the policy.
    ``reading()`` widens that protection to more than one forward: here to the forward together
    with the version that is noted beside its actions.
    """
    policy = Policy()
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker_idx)
    with scheme:
        scheme.connect()
        collector = Collector(policy, worker_idx, seed)
        while True:
            channel.recv_bytes()
            collector.start()
            for t in range(_NUM_STEPS):
                with scheme.reading():
                    collector.act(t, scheme.version)
                collector.advance(t)
            channel.send(collector.fragment)


def work(worker_idx: int, seed: int, scheme: Any, channel: Connection, sync: bool) -> None:
    """Run one worker until the trainer closes its end of ``channel``, or has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends us
    torch.set_num_threads(1)  # two workers with two threads each on two cores: 5 times slower
    try:
        if sync:
            work_sync(worker_idx, seed, scheme, channel)
        else:
            aiosync.run(work_async(worker_idx, seed, scheme, channel))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    finally:
        gc.freeze()  # the interpreter need not search torch's modules for garbage: seconds less
