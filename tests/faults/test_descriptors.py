"""Errors on both sides when a process has no file descriptors left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

import aiosync
import aiosync.sync
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.sync import _tools as tools

pytestmark = pytest.mark.slow
BLOCKING = [
    aiosync.sync.SharedMemWeightSyncScheme,
    aiosync.sync.MultiProcessWeightSyncScheme,
    aiosync.sync.TCPWeightSyncScheme,
]


@contextlib.contextmanager
def _starved(left: int) -> Iterator[None]:
    """Let this process open only ``left`` more descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(left):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _cluster() -> aiosync.sync.DistributedWeightSyncScheme:
    return aiosync.sync.DistributedWeightSyncScheme(address="tcp://127.0.0.1:0")


@pytest.mark.parametrize("make", [*BLOCKING, _cluster])
def test_init_on_sender_raises_a_config_error(make: Any) -> None:
    for left in range(4):
        scheme = make()
        with _starved(left), contextlib.suppress(aiosync.ConfigError):
            scheme.init_on_sender(model=models.linear(1.0))
        scheme.shutdown()


def test_a_cluster_goes_on_without_a_socket_for_workers_of_its_host() -> None:
    with _cluster() as trainer:
        # The listener takes two.
        with _starved(2):
            trainer.init_on_sender(model=models.linear(1.0), num_workers=1)
        worker = harness.twin(trainer)
        worker.init_on_receiver(model=models.linear())
        with worker, tools.threads(worker.connect):
            trainer.connect()
            assert trainer.send().acked == {0}


@pytest.mark.parametrize("scheme", harness.SCHEMES)
def test_a_link_over_a_pipe_raises_a_config_error(scheme: Any) -> None:
    async def link() -> None:
        with _starved(0), pytest.raises(aiosync.ConfigError, match="Too many open files"):
            scheme().create_transport(ours)

    ours, theirs = harness.context("forkserver").Pipe()
    asyncio.run(link())
    ours.close()
    theirs.close()


def _follow(scheme: Any, conn: Connection) -> None:
    """A worker that runs out of descriptors once it is connected."""
    scheme.init_on_receiver(model=models.linear())
    with scheme:
        scheme.connect()
        with _starved(0):
            conn.send("connected")
            with pytest.raises(aiosync.AiosyncError) as caught:
                scheme.wait_for_version(1, timeout=tools.PATIENCE)
        conn.send(f"{type(caught.value).__name__}: {caught.value}")
        conn.recv()


def test_a_worker_that_runs_out_says_so_on_both_sides() -> None:
    trainer = BLOCKING[0]()
    trainer.init_on_sender(model_id="policy", num_workers=1)
    ours, theirs = harness.context("forkserver").Pipe()
    worker = harness.twin(trainer)
    process = harness.context("forkserver").Process(target=_follow, args=(worker, theirs))
    process.start()
    theirs.close()
    try:
        with trainer:
            trainer.connect()
            assert tools.recv(ours) == "connected"
            with pytest.raises(aiosync.PartialSyncError) as caught:
                trainer.send(models.linear(1.0), timeout=tools.PATIENCE)
            assert "no file descriptor left" in tools.recv(ours)
            assert "no file descriptor left" in str(caught.value)
    finally:
        ours.send("end")
        harness.end(process)


@pytest.mark.parametrize("make", BLOCKING)
@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_a_blocking_connect_raises_an_error_of_aiosync(make: Any, role: str) -> None:
    trainer = make()
    trainer.init_on_sender(model=models.linear(1.0), num_workers=1)
    for left in range(0, 16, 3):
        scheme = make() if role == "sender" else harness.twin(trainer)
        if role == "sender":
            scheme.init_on_sender(model=models.linear(1.0), num_workers=1)
        else:
            scheme.init_on_receiver(model=models.linear())
        with _starved(left), pytest.raises(aiosync.AiosyncError):
            scheme.connect(timeout=0.2)
        scheme.shutdown()
    trainer.shutdown()


def _train(make: Any, left: int, conn: Connection) -> None:
    """A trainer that runs out of descriptors once it listens."""
    trainer = make()
    trainer.init_on_sender(model=models.linear(1.0), num_workers=1)
    # This scheme starts the event loop of the facade before the descriptors run out.
    lease = make()
    lease.init_on_sender(model=models.linear(1.0))
    lease.connect()
    conn.send(trainer)
    with contextlib.suppress(aiosync.AiosyncError), _starved(left):
        trainer.connect(timeout=4)
    conn.recv()
    trainer.shutdown()
    lease.shutdown()


CASES = [(make, 0) for make in BLOCKING[1:]] + [(BLOCKING[0], left) for left in (4, 5, 6)]


@pytest.mark.parametrize(("make", "left"), CASES)
def test_a_worker_is_told_that_its_trainer_ran_out(make: Any, left: int) -> None:
    ours, theirs = harness.context("forkserver").Pipe()
    process = harness.context("forkserver").Process(target=_train, args=(make, left, theirs))
    process.start()
    theirs.close()
    worker = ours.recv()
    worker.init_on_receiver(model=models.linear())
    try:
        with worker, pytest.raises(aiosync.AiosyncError) as caught:
            worker.connect(timeout=2)
        assert "descriptor" in str(caught.value)
        assert "closed the link" not in str(caught.value)
    finally:
        ours.send("end")
        harness.end(process)
