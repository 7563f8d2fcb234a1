"""The limits of a Gloo group and of Ray's object store: one flat array, moved once."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed import TCPStore

from aiosync.bench import PATIENCE, Case, Desk, Handle, Limit
from tests.bench.compare.cluster import ActorHandle, end_actors, join_cluster, start_actors

_HOST = "127.0.0.1"
_TIMEOUT = timedelta(seconds=PATIENCE)
_QUIET = timedelta(hours=6)
"""Time that a worker waits for the next broadcast, while others have their turns.

A worker is ended through its pipe.
"""


class GlooBroadcast(Limit):
    """Limit: a copy into one flat tensor, and a broadcast of it to N workers.

    Each worker answers with a byte through a pipe, which is cheaper than Gloo's barrier.
    """

    def __init__(self) -> None:
        super().__init__()
        self._answers: list[Connection] = []
        self._flat = torch.empty(0, dtype=torch.uint8)

    def start(self, case: Case) -> Sequence[Handle]:
        """Form a group with new processes."""
        nbytes = sum(map(len, self.sources))
        self._flat = torch.ones(nbytes, dtype=torch.uint8)
        size = 1 + case.workers
        store = TCPStore(_HOST, 0, size, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
        handles: Sequence[Handle] = []
        for rank in range(1, size):
            done, write_done = multiprocessing.Pipe(duplex=False)
            self._answers.append(done)
            handles = self.crew.start(
                _take_broadcasts, 1, write_done, rank, size, store.port, nbytes
            )
            write_done.close()
        dist.init_process_group("gloo", store=store, rank=0, world_size=size, timeout=_TIMEOUT)
        return handles

    def send(self) -> None:
        """Send the weights; return when every worker has reported that it has them."""
        np.concatenate(self.sources, out=self._flat.numpy())
        dist.broadcast(self._flat, 0)
        for done in self._answers:
            if not os.read(done.fileno(), 1):
                raise RuntimeError("a worker ended before it answered")

    def close(self) -> None:
        """End the workers and the group."""
        super().close()
        for done in self._answers:
            done.close()
        self._answers = []
        if dist.is_initialized():
            dist.destroy_process_group()
        self._flat = torch.empty(0, dtype=torch.uint8)


def _take_broadcasts(
    idx: int, pipe: Connection, done: Connection, rank: int, size: int, port: int, nbytes: int
) -> None:
    stub = Desk()
    store = TCPStore(_HOST, port, size, is_master=False, timeout=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_QUIET)
    flat = torch.ones(nbytes, dtype=torch.uint8)

    def take() -> None:
        try:
            while True:
                dist.broadcast(flat, 0)
                os.write(done.fileno(), b"x")
        except (RuntimeError, OSError):
            # The group is gone.
            # The trainer sees the end of the pipe when it waits for the answer.
            done.close()

    threading.Thread(target=take, daemon=True).start()
    while stub.serve_one(pipe):
        pass
    # A thread that waits in Gloo cannot be ended in another way.
    os._exit(0)


class _Actor:
    """Actor that takes arrays out of the object store."""

    def __init__(self, idx: int) -> None:
        self._stub = Desk()

    def take(self, refs: Sequence[Any]) -> int:
        ray: Any = importlib.import_module("ray")
        return len(ray.get(refs[0]))

    def reply(self, question: str, argument: Any) -> tuple[bool, Any]:
        return self._stub.reply(question, argument)


class RayPutGet(Limit):
    """Limit: a copy into one flat array, one put of it, and one get in each of N actors."""

    def __init__(self) -> None:
        super().__init__()
        self._actors: list[Any] = []
        self._ray: Any = None
        self._flat = np.empty(0, np.uint8)

    def start(self, case: Case) -> Sequence[Handle]:
        """Start the actors."""
        self._ray = join_cluster()
        self._flat = np.ones(sum(map(len, self.sources)), np.uint8)
        self._actors = start_actors(_Actor, case.workers)
        return [ActorHandle(actor) for actor in self._actors]

    def send(self) -> None:
        """Send the array; return when every actor has reported that it has it."""
        np.concatenate(self.sources, out=self._flat)
        ref = self._ray.put(self._flat)
        self._ray.get([actor.take.remote([ref]) for actor in self._actors], timeout=PATIENCE)

    def close(self) -> None:
        """End the actors; the cluster stays until this process ends."""
        end_actors(self._actors)
        self._flat = np.empty(0, np.uint8)
        super().close()
