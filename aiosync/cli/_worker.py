"""The collecting half of ``aiosync demo``: one worker process, async or classic.

Read :func:`work_async` and :func:`work_sync` to see what a worker needs from aiosync: a scheme
that came with the process's arguments, ``init_on_receiver``, ``connect``, and nothing else;
the policy is then kept on the newest version while the worker collects. The trajectories go
back over a plain :mod:`multiprocessing` connection, which is not aiosync's business.

This module must never import typer, rich or matplotlib: workers start faster without.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import torch

import aiosync
import aiosync.sync
from aiosync.cli._ppo import OBS_SIZE, Fragment, Policy

__all__ = [
    "AsyncScheme",
    "Collector",
    "SyncScheme",
    "WorkerFailure",
    "WorkerSpec",
    "any_readable",
    "work_async",
    "work_sync",
    "worker_main",
]

AsyncScheme: TypeAlias = "aiosync.MultiProcessWeightSyncScheme | aiosync.SharedMemWeightSyncScheme"
"""The schemes that the demo can use, with methods to await."""

SyncScheme: TypeAlias = (
    "aiosync.sync.MultiProcessWeightSyncScheme | aiosync.sync.SharedMemWeightSyncScheme"
)
"""The same schemes with methods that block."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is told besides its scheme.

    Attributes:
        worker_idx: Index of this worker, from 0.
        seed: Seeds the environments and the sampling of actions.
        num_envs: CartPoles stepped together.
        num_steps: Steps of each in one :class:`~aiosync.cli._ppo.Fragment`.
    """

    worker_idx: int
    seed: int
    num_envs: int = 8
    num_steps: int = 32


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """Last message of a worker that raised.

    Attributes:
        worker_idx: Who it was.
        text: The traceback.
    """

    worker_idx: int
    text: str


class Collector:
    """Steps a few CartPoles with a policy and remembers what happened.

    One step is :meth:`act`, which runs the policy, then :meth:`advance`, which runs the
    environments; only the first needs the weights to hold still.

    Args:
        policy: Maps observations ``[E, 4]`` to logits ``[E, 2]``. Read only.
        spec: Number of environments, and the seed.
    """

    def __init__(self, policy: Policy, spec: WorkerSpec) -> None:
        self._policy = policy
        self._spec = spec
        seed = spec.seed + 1000 * (spec.worker_idx + 1)
        self._random = torch.Generator().manual_seed(seed)
        self._envs: list[gymnasium.Env[Any, Any]] = [
            gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in range(spec.num_envs)
        ]
        first = [env.reset(seed=seed + i)[0] for i, env in enumerate(self._envs)]
        self._obs = np.array(first, dtype=np.float32)
        self._episode_returns = np.zeros(spec.num_envs)
        self._start_fragment()

    def _start_fragment(self) -> None:
        grid = (self._spec.num_steps, self._spec.num_envs)
        self._t = 0
        self._returns: list[float] = []
        self._fragment = Fragment(
            worker_idx=self._spec.worker_idx,
            obs=np.empty((*grid, OBS_SIZE), np.float32),
            next_obs=np.empty((*grid, OBS_SIZE), np.float32),
            actions=np.empty(grid, np.int64),
            log_probs=np.empty(grid, np.float32),
            rewards=np.empty(grid, np.float32),
            terminated=np.empty(grid, np.bool_),
            done=np.empty(grid, np.bool_),
            versions=np.empty(grid[0], np.int64),
            returns=(),
        )

    @torch.no_grad()
    def act(self, version: int) -> None:
        """Choose the next actions; ``version`` is what the policy holds during the call."""
        fragment, t = self._fragment, self._t
        log_probs = self._policy(torch.from_numpy(self._obs)).log_softmax(-1)
        actions = torch.multinomial(log_probs.exp(), 1, generator=self._random)
        fragment.obs[t] = self._obs
        fragment.actions[t] = actions.squeeze(-1).numpy()
        fragment.log_probs[t] = log_probs.gather(-1, actions).squeeze(-1).numpy()
        fragment.versions[t] = version

    def advance(self) -> None:
        """Step every environment with the chosen actions; restart those that ended."""
        fragment, t = self._fragment, self._t
        for i, env in enumerate(self._envs):
            obs, reward, terminated, truncated, _ = env.step(int(fragment.actions[t, i]))
            fragment.next_obs[t, i] = obs
            fragment.rewards[t, i] = reward
            fragment.terminated[t, i] = terminated
            fragment.done[t, i] = terminated or truncated
            self._episode_returns[i] += float(reward)
            if terminated or truncated:
                self._returns.append(float(self._episode_returns[i]))
                self._episode_returns[i] = 0.0
                obs, _ = env.reset()
            self._obs[i] = obs
        self._t += 1

    def take(self) -> Fragment:
        """Return the full fragment and start the next one."""
        done = self._fragment
        fragment = Fragment(
            worker_idx=done.worker_idx,
            obs=done.obs,
            next_obs=done.next_obs,
            actions=done.actions,
            log_probs=done.log_probs,
            rewards=done.rewards,
            terminated=done.terminated,
            done=done.done,
            versions=done.versions,
            returns=tuple(self._returns),
        )
        self._start_fragment()
        return fragment


async def work_async(spec: WorkerSpec, scheme: AsyncScheme, channel: Connection) -> None:
    """Collect with the async API until the trainer closes ``channel``.

    Updates are applied on this event loop, so only where the code awaits: between ``act`` and
    the next ``await`` the policy and ``scheme.version`` cannot change.
    """
    policy = Policy()
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=spec.worker_idx)
    async with scheme:
        await scheme.connect()  # the policy holds the trainer's weights from here on
        collector = Collector(policy, spec)
        while True:
            await any_readable([channel])
            channel.recv_bytes()  # the trainer asks for one more fragment
            for _ in range(spec.num_steps):
                collector.act(scheme.version)
                collector.advance()
                await asyncio.sleep(0)  # a newer version may be applied here
            channel.send(collector.take())


def work_sync(spec: WorkerSpec, scheme: SyncScheme, channel: Connection) -> None:
    """Collect with the blocking facade until the trainer closes ``channel``.

    Updates are applied by the facade's own thread, never during a forward of the policy.
    ``reading()`` widens that protection to more than one forward: here to the forward together
    with the version that is noted beside its actions.
    """
    policy = Policy()
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=spec.worker_idx)
    with scheme:
        scheme.connect()
        collector = Collector(policy, spec)
        while True:
            channel.recv_bytes()
            for _ in range(spec.num_steps):
                with scheme.reading():
                    collector.act(scheme.version)
                collector.advance()
            channel.send(collector.take())


def worker_main(spec: WorkerSpec, scheme: Any, channel: Connection, sync: bool) -> None:
    """Run one worker; the target of the worker's process.

    Returns when the trainer closes its end of ``channel``, or has gone. Anything else that
    ends the work is reported as a :class:`WorkerFailure` and ends the process with status 1.

    Args:
        spec: Which worker this is.
        scheme: Scheme of the trainer, pickled into the process's arguments.
        channel: Duplex connection; fragments go out, requests for them come in.
        sync: The scheme is of the blocking facade.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends us
    torch.set_num_threads(1)  # two workers with two threads each on two cores: 5 times slower
    try:
        if sync:
            work_sync(spec, scheme, channel)
        else:
            aiosync.run(work_async(spec, scheme, channel))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the trainer closed the channel: done
    except Exception:  # noqa: BLE001  # the trainer sees the traceback and raises
        text = traceback.format_exc()
        try:
            channel.send(WorkerFailure(spec.worker_idx, text))
        except OSError:
            sys.stderr.write(f"worker {spec.worker_idx} (pid {os.getpid()}) failed:\n{text}")
        sys.exit(1)
    finally:
        gc.freeze()  # the interpreter need not search torch's modules for garbage: seconds less


async def any_readable(channels: Iterable[Connection]) -> list[Connection]:
    """Wait, without blocking the loop, until a connection has data or has ended.

    Cancellation:
        Class A. Nothing is read.
    """
    loop = asyncio.get_running_loop()
    ready: list[Connection] = []
    woken = asyncio.Event()

    def note(channel: Connection) -> None:
        loop.remove_reader(channel.fileno())
        ready.append(channel)
        woken.set()

    watched = list(channels)
    for channel in watched:
        loop.add_reader(channel.fileno(), note, channel)
    try:
        await woken.wait()
    finally:
        for channel in watched:
            loop.remove_reader(channel.fileno())
    return ready
