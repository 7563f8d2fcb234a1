"""Weights over process groups of torch.distributed into worker processes, with real Gloo.

All workers are on this host, so shared memory is off; see ``test_same_host.py`` for that.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import aiosync
from aiosync.errors import ConfigError, ConnectTimeout, PartialSyncError
from tests.schemes import _harness as harness
from tests.schemes import _models as models

if TYPE_CHECKING:
    from pathlib import Path

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


async def value(worker: harness.Worker) -> float:
    """The one value that a worker's weights have; a mix of versions has several."""
    [found] = {float(x) for w in (await worker.call(harness.weights)).values() for x in w.unique()}
    return found


def state(worker: harness.State) -> tuple[bool, list[str]]:
    names = [thread.name for thread in threading.enumerate() if "gloo" in thread.name]
    return dist.is_initialized(), names


# -- 1 + 4 processes ---------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.one_loop
async def test_four_workers_get_every_version() -> None:
    scheme, source = sending(num_workers=4)
    async with harness.workers(scheme, models.medium, 4) as crew:
        for version in (2, 3, 4):
            models.fill(source, float(version))
            report = await scheme.send()
            assert report.version == version
            assert report.acked == {0, 1, 2, 3}
            for worker in crew:
                assert await value(worker) == version
        models.fill(source, 9.0)
        report = await scheme.send(worker_ids=[1, 3])
        assert report.acked == {1, 3}
        assert [await value(worker) for worker in crew] == [4.0, 9.0, 4.0, 9.0]
        for worker in crew:  # large updates did take the group, and no default group was made
            initialized, names = await worker.call(state)
            assert not initialized
            assert names
    assert not dist.is_initialized()


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.one_loop
async def test_small_updates_need_no_group() -> None:
    scheme, source = sending(models.linear, 1)
    async with harness.workers(scheme, models.linear, 1) as [worker]:
        models.fill(source, 2.0)
        await scheme.send()
        assert await value(worker) == 2.0
        assert await worker.call(state) == (False, [])


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.one_loop
async def test_a_newer_update_overtakes_the_older_ones() -> None:
    scheme, source = sending(num_workers=1)
    async with harness.workers(scheme, models.medium, 1) as [worker]:
        worker.stop()
        handles = []
        for number in (2.0, 3.0, 4.0):
            models.fill(source, number)
            handles.append(scheme.send_nowait())
        worker.cont()
        reports = [await handle for handle in handles]
        assert reports[-1].acked == {0}
        assert [bool(report.acked or report.skipped) for report in reports] == [True] * 3
        assert any(report.skipped for report in reports)
        assert await value(worker) == 4.0


# -- copies that go ahead of the transfer --------------------------------------------------------


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
            assert models.filled(target, float(number))
    assert models.filled(target, 7.0)


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.one_loop
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
            scheme._reset()  # as init_on_receiver() does
            gc.collect()

        process = harness.context("fork").Process(target=child)
        process.start()
        await asyncio.to_thread(process.join, PATIENCE)
        assert process.exitcode == 0
        process.close()
        models.fill(source, 2.0)
        assert (await scheme.send()).acked == {0}
        assert models.filled(target, 2.0)


# -- faults -------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.one_loop
async def test_a_worker_killed_in_mid_transfer_is_named() -> None:
    scheme, source = sending(models.big, 2)
    async with harness.workers(scheme, models.big, 2) as crew:
        models.fill(source, 2.0)
        crew[1].stop()  # so that its transfer is under way when it dies
        sent = asyncio.ensure_future(scheme.send(timeout=PATIENCE))
        await harness.until(lambda: scheme.worker_versions.get(0) == 2)
        assert not sent.done()
        crew[1].kill()
        with pytest.raises(PartialSyncError) as caught:
            await sent
        assert set(caught.value.failed) == {1}
        assert caught.value.acked == {0}
        assert await value(crew[0]) == 2.0
        models.fill(source, 3.0)
        report = await scheme.send()  # the rest goes on
        assert report.acked == {0}
        assert set(report.lost) == {1}
        again = harness.start(scheme, models.big)
        try:
            assert await again.call(harness.join, 1) == 3  # with a group of its own
            assert await value(again) == 3.0
            models.fill(source, 4.0)
            assert (await scheme.send()).acked == {0, 1}
        finally:
            again.end()


@pytest.mark.asyncio
@pytest.mark.heavy  # waits for patience to run out, twice
async def test_a_frozen_worker_loses_its_link_and_comes_back() -> None:
    scheme, source = sending(models.big, 2, patience=1.0)
    async with harness.workers(scheme, models.big, 2) as crew:
        models.fill(source, 2.0)
        sent = asyncio.ensure_future(scheme.send(timeout=PATIENCE))
        await harness.until(lambda: scheme._sender.peers[1]._writing)
        crew[1].stop()
        try:
            with pytest.raises(PartialSyncError) as caught:
                await sent
        except pytest.fail.Exception:
            report = sent.result()  # the worker was quicker than the signal
            assert report.acked == {0, 1}
        else:
            assert set(caught.value.failed) == {1}
            assert caught.value.acked == {0}
        crew[1].cont()
        await crew[1].call(harness.wait_for_version, 2)
        assert await value(crew[1]) == 2.0


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.one_loop
async def test_the_trainer_dies(tmp_path: Path) -> None:
    script = """
import asyncio, pickle, sys, aiosync
from tests.schemes import _models as models
async def main():
    scheme = aiosync.DistributedWeightSyncScheme(shared_memory=False)
    scheme.init_on_sender(model=models.medium())
    with open(sys.argv[1], "wb") as file:
        pickle.dump(scheme, file)
    print("ready", flush=True)
    await scheme.connect()
    await asyncio.sleep(600)
asyncio.run(main())
"""
    file = tmp_path / "scheme"
    trainer = subprocess.Popen(
        [sys.executable, "-c", script, str(file)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert trainer.stdout is not None
        await asyncio.to_thread(trainer.stdout.readline)
        import pickle

        scheme = pickle.loads(file.read_bytes())
        scheme.reconnect = 0.0
        scheme.init_on_receiver(model=models.medium())
        await scheme.connect(timeout=PATIENCE)
        assert scheme.version == 1
        trainer.kill()
        with pytest.raises(aiosync.PeerClosed):
            await scheme.receive(timeout=PATIENCE)
        await scheme.aclose()
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()


# -- rendez-vous --------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_meeting_in_a_store() -> None:
    store = dist.HashStore()
    source, target = models.medium(), models.medium()
    models.fill(source, 5.0)
    sender = aiosync.DistributedWeightSyncScheme(store=store, timeout=PATIENCE, shared_memory=False)
    receiver = aiosync.DistributedWeightSyncScheme(
        store=store, timeout=PATIENCE, shared_memory=False
    )
    receiver.init_on_receiver(model=target)
    sender.init_on_sender(model=source, num_workers=1)
    async with sender, receiver:
        await asyncio.gather(receiver.connect(), sender.connect())
        assert models.filled(target, 5.0)


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


def test_mistakes_are_said_early() -> None:
    with pytest.raises(ConfigError, match="'gloo' or 'nccl'"):
        aiosync.DistributedWeightSyncScheme("mpi")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ConfigError, match="patience"):
        aiosync.DistributedWeightSyncScheme(patience=0)
    with pytest.raises(ConfigError, match="inline_nbytes"):
        aiosync.DistributedWeightSyncScheme(inline_nbytes=-1)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="CUDA"):
            aiosync.DistributedWeightSyncScheme("nccl")


def test_the_secret_does_not_show() -> None:
    scheme = aiosync.DistributedWeightSyncScheme(token="a secret of sixteen")
    assert "secret of" not in repr(vars(scheme))


# -- beside other groups ------------------------------------------------------------------------


def _run(name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.schemes.{name}"],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.apart
def test_a_ddp_trainer_publishes_beside_its_default_group() -> None:
    out = _run("_ddp_trainer")
    assert "worker 0 has the weights of step 3" in out
    assert "worker 1 has the weights of step 3" in out
    assert "both ranks hold the same weights" in out


@pytest.mark.heavy
def test_a_group_that_was_given_is_used() -> None:
    out = _run("_given_group")
    assert "rank 1 has version 3" in out
    assert "rank 2 has version 3" in out
    assert "the group still works" in out


# -- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.asyncio
async def test_nccl() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a device for each process")
    scheme, source = sending(num_workers=1, backend="nccl")
    async with harness.workers(scheme, models.medium, 1) as [worker]:
        models.fill(source, 2.0)
        await scheme.send()
        assert await value(worker) == 2.0
