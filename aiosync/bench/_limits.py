"""What the machine needs for the same bytes: the contenders whose names begin with ``limit/``.

Each does the least that could move a model's bytes in its way; nothing is named, checked or
applied. Here are the copies and the wake-up; streams are in ``_limits_sockets``, process groups
and Ray in ``_limits_groups``. Must not import aiosync's schemes, torchrl, typer or rich, nor ray
before :func:`ray_put_get` is called.
"""

from __future__ import annotations

import itertools
import os
import select
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from aiosync._cores import usable_cores
from aiosync.bench._contender import Handle
from aiosync.bench._limits_base import Answers, Copy, Limit, Stub, simplex
from aiosync.bench._results import Case

__all__ = [
    "gloo_broadcast",
    "memcpy",
    "memcpy_all_threads",
    "raw_socket",
    "raw_unix_socket",
    "ray_put_get",
    "round_trip",
]

_WORTH_THREADS = 2**20  # handing less than this to another thread costs more than copying it


class _Memcpy(Limit):
    """One copy into memory that has been written before; however many workers would look at it."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self._threads = threads
        self._shares: list[Copy] = []
        self._pool: ThreadPoolExecutor | None = None

    def start(self, case: Case) -> Sequence[Handle]:
        nbytes = sum(map(len, self.sources))
        block = np.zeros(nbytes, np.uint8)
        block.fill(1)  # zeros alone would be memory that is not there yet
        threads = self._threads if nbytes >= _WORTH_THREADS else 1
        bounds = [nbytes * thread // threads for thread in range(threads + 1)]
        self._shares = [
            Copy(self.sources, block, low, high) for low, high in itertools.pairwise(bounds)
        ]
        if threads > 1:
            self._pool = ThreadPoolExecutor(threads - 1)
        return []

    def send(self) -> None:
        first, *others = self._shares
        if self._pool is None:
            first.run()
            return
        running = [self._pool.submit(share.run) for share in others]
        first.run()
        for share in running:
            share.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._shares = []
        super().close()


class _RoundTrip(Limit):
    """One byte to each of N sleeping processes, and one back."""

    def __init__(self) -> None:
        super().__init__()
        self._wake: list[Connection] = []
        self._answers = Answers()

    def start(self, case: Case) -> Sequence[Handle]:
        handles: Sequence[Handle] = []
        for _ in range(case.workers):
            read_wake, wake = simplex()
            done, write_done = simplex()
            self._wake.append(wake)
            self._answers.add(done)
            handles = self.crew.start(_answer_wake_ups, 1, read_wake, write_done)
            read_wake.close()
            write_done.close()
        return handles

    def send(self) -> None:
        for wake in self._wake:
            os.write(wake.fileno(), b"x")
        self._answers.wait()

    def close(self) -> None:
        super().close()
        for wake in self._wake:
            wake.close()
        self._wake = []
        self._answers.close()


def _answer_wake_ups(idx: int, pipe: Connection, wake: Connection, done: Connection) -> None:
    stub = Stub()
    asked, woken, answer = pipe.fileno(), wake.fileno(), done.fileno()
    poller = select.poll()  # as quick as epoll for two, and everywhere
    poller.register(asked, select.POLLIN)
    poller.register(woken, select.POLLIN)
    while True:  # without a deadline: it ends with the trainer, whose pipe then says so
        for fd, _ in poller.poll():
            if fd == asked:
                if not stub.serve_one(pipe):
                    return
            elif os.read(woken, 1):
                os.write(answer, b"x")
            else:
                return


def memcpy() -> Limit:
    """One copy by one thread."""
    return _Memcpy(1)


def memcpy_all_threads() -> Limit:
    """One copy by as many threads as there are cores to use."""
    return _Memcpy(usable_cores())


def round_trip() -> Limit:
    """One wake-up there and back, without any weights."""
    return _RoundTrip()


def raw_socket() -> Limit:
    """A blocking TCP socket to each worker."""
    from aiosync.bench._limits_sockets import RawSocket

    return RawSocket("tcp")


def raw_unix_socket() -> Limit:
    """A blocking Unix-domain socket to each worker."""
    from aiosync.bench._limits_sockets import RawSocket

    return RawSocket("unix")


def gloo_broadcast() -> Limit:
    """One broadcast of one flat tensor."""
    from aiosync.bench._limits_groups import GlooBroadcast

    return GlooBroadcast()


def ray_put_get() -> Any:
    """One put into Ray's object store, and one get in each actor."""
    from aiosync.bench._limits_groups import RayPutGet

    return RayPutGet()
