"""Weights over process groups of torch.distributed into worker processes, with real Gloo."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
from torch import distributed as dist
from torch import nn

import aiosync
from aiosync.errors import ConfigError, ConnectTimeout, PartialSyncError
from aiosync.transports import DistributedTransport, SharedMemTransport
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = pytest.mark.one_loop


PATIENCE = harness.PATIENCE


def sending(
    build: Any = models.medium, num_workers: int | None = None, **options: Any
) -> tuple[aiosync.DistributedWeightSyncScheme, nn.Module]:
    """A sender that is not connected, and its model, filled with 1."""
    source = build()
    models.fill(source, 1.0)
    scheme = aiosync.DistributedWeightSyncScheme(
        **{"timeout": PATIENCE, "shared_memory": False, **options}
    )
    scheme.init_on_sender(model_id="policy", model=source, num_workers=num_workers)
    return scheme, source


def state(worker: harness.State) -> tuple[bool, list[str]]:
    names = [thread.name for thread in threading.enumerate() if "gloo" in thread.name]
    return dist.is_initialized(), names


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("build", [models.medium, models.linear])
async def test_only_large_updates_take_a_group(build: Any) -> None:
    """And nobody ever makes a default group."""
    scheme, source = sending(build, 2)
    async with harness.workers(scheme, build, 2) as crew:
        models.fill(source, 2.0)
        assert (await scheme.send()).acked == {0, 1}
        for worker in crew:
            assert await worker.value() == 2.0
            initialized, names = await worker.call(state)
            assert not initialized
            assert bool(names) is (build is models.medium)
    assert not dist.is_initialized()


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("inline_nbytes", [2**20, 2**30], ids=["group", "stream"])
async def test_what_changes_after_send_does_not_travel(inline_nbytes: int) -> None:
    source, target = models.big(), models.big()
    scheme = aiosync.DistributedWeightSyncScheme(
        timeout=PATIENCE, inline_nbytes=inline_nbytes, shared_memory=False
    )
    scheme.init_on_sender(model_id="policy", model=source, num_workers=1)
    receiver = harness.twin(scheme)
    receiver.init_on_receiver(model_id="policy", model=target)
    async with scheme as sender, receiver:
        await asyncio.gather(sender.connect(), receiver.connect())
        for number in range(2, 8):
            models.fill(source, float(number))
            sent = asyncio.ensure_future(sender.send())
            if number % 2:  # cut it somewhere: the transfer goes on, from the copy
                await asyncio.sleep(0.004 * number)
                sent.cancel()
                await asyncio.wait({sent})
            else:
                assert (await sent).acked == {0}
            models.fill(source, -9.0)
            await receiver.wait_for_version(number, timeout=PATIENCE)
            assert models.holds(receiver, float(number))
    assert models.holds(receiver, 7.0)


@pytest.mark.asyncio
@pytest.mark.slow
async def test_a_forked_child_leaves_the_group_alone() -> None:
    source, target = models.medium(), models.medium()
    scheme = aiosync.DistributedWeightSyncScheme(timeout=PATIENCE, shared_memory=False)
    scheme.init_on_sender(model_id="policy", model=source, num_workers=1)
    receiver = harness.twin(scheme)
    receiver.init_on_receiver(model_id="policy", model=target)
    async with scheme, receiver:
        await asyncio.gather(scheme.connect(), receiver.connect())

        def child() -> None:
            scheme.abort()
            scheme.init_on_receiver(model_id="policy")
            gc.collect()

        process = harness.context("fork").Process(target=child)
        process.start()
        await asyncio.to_thread(process.join, PATIENCE)
        assert process.exitcode == 0
        process.close()
        models.fill(source, 2.0)
        assert (await scheme.send()).acked == {0}
        assert models.holds(receiver, 2.0)


def halt_in_mid_transfer(_worker: harness.State, how: int) -> None:
    """Once some chunks of the next payload have come, and more were asked for."""
    recv, left = dist.ProcessGroupGloo.recv, 12

    def counted(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), how)
        return recv(*args)

    dist.ProcessGroupGloo.recv = counted


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_worker_that_halts_in_mid_transfer_is_lost_after_one_patience(how: int) -> None:
    """It gets what it missed when it goes on, or another in its place."""
    scheme, source = sending(models.big, 1, patience=1.0)
    async with harness.workers(scheme, models.big, 1) as crew:
        await crew[0].call(halt_in_mid_transfer, how)
        models.fill(source, 2.0)
        started = asyncio.get_running_loop().time()
        with pytest.raises(PartialSyncError) as caught:
            await scheme.send()
        assert asyncio.get_running_loop().time() - started < 8.0
        assert isinstance(caught.value.failed[0], (aiosync.TransportBroken, aiosync.PeerClosed))
        if how == signal.SIGSTOP:
            crew[0].cont()
            await crew[0].call(harness.wait_for_version, 2)
        else:
            crew.append(harness.start(scheme, models.big))
            assert await crew[1].call(harness.join, 0) == 2
        assert await crew[-1].value() == 2.0


@pytest.mark.asyncio
@pytest.mark.parametrize("shared_memory", [True, False])
async def test_meeting_in_a_store(shared_memory: bool) -> None:
    options = {"store": dist.HashStore(), "timeout": PATIENCE, "shared_memory": shared_memory}
    sender, receiver = (aiosync.DistributedWeightSyncScheme(**options) for _ in range(2))
    receiver.init_on_receiver(model=models.medium())
    source = models.medium()
    models.fill(source, 5.0)
    sender.init_on_sender(model=source, num_workers=1)
    async with sender, receiver:
        await asyncio.gather(receiver.connect(), sender.connect())
        assert models.holds(receiver, 5.0)
        kind = SharedMemTransport if shared_memory else DistributedTransport
        assert isinstance(receiver.receiver_transport, kind)


@pytest.mark.asyncio
async def test_nobody_in_the_store() -> None:
    scheme = aiosync.DistributedWeightSyncScheme(store=dist.HashStore())
    scheme.init_on_receiver(model=models.linear())
    with pytest.raises(ConnectTimeout, match="store"):
        await scheme.connect(timeout=0.2)


class BrokenStore(dist.Store):
    """As one is whose server has gone."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("connection reset by peer")


@pytest.mark.asyncio
async def test_a_store_that_has_gone() -> None:
    scheme = aiosync.DistributedWeightSyncScheme(store=BrokenStore())
    scheme.init_on_receiver(model=models.linear())
    with pytest.raises(aiosync.ConnectError, match="reset by peer"):
        await scheme.connect(timeout=5)


@pytest.mark.asyncio
async def test_a_copy_made_too_early_says_so() -> None:
    scheme = aiosync.DistributedWeightSyncScheme()
    scheme.init_on_receiver(model=models.linear())
    with pytest.raises(ConfigError, match="after init_on_sender"):
        await scheme.connect(timeout=1)


RUNS: dict[str, tuple[str, ...]] = {
    "_group_trainer": (
        "rank 1 has version 3",
        "rank 2 has version 3",
        "the group still works",
    ),
    "_fsdp_trainer": (  # a model that is sharded over two ranks
        "the worker has the values of the whole model",
        "the root was not sharded after a forward",
        "rank 0 has seen every form",
        "rank 1 has seen every form",
        "alone: SyncTimeout: not all 2 ranks",
        "alone: TransportBroken: the ranks of the mesh could not meet",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        pytest.param("_group_trainer", marks=pytest.mark.apart),
        "_fsdp_trainer",
    ],
)
def test_beside_other_groups(program: str) -> None:
    name, *args = program.split()
    command = [sys.executable, "-m", f"tests.schemes.{name}", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert [text for text in RUNS[program] if text not in done.stdout] == []


def test_mistakes_are_said_early() -> None:
    with pytest.raises(ConfigError, match="must be 'gloo'"):
        aiosync.DistributedWeightSyncScheme("mpi")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ConfigError, match="patience"):
        aiosync.DistributedWeightSyncScheme(patience=0)
    with pytest.raises(ConfigError, match="inline_nbytes"):
        aiosync.DistributedWeightSyncScheme(inline_nbytes=-1)
    with pytest.raises(ConfigError, match="not supported"):
        aiosync.DistributedWeightSyncScheme("nccl")
