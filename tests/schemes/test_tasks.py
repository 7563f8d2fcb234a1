"""The background tasks of a scheme: nobody waits for ever when somebody else cancels them."""

from __future__ import annotations

import asyncio
import copy
import tempfile

import pytest

import aiosync
from aiosync.schemes._tasks import TaskOwner
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = pytest.mark.asyncio


def _tcp() -> aiosync.TCPWeightSyncScheme:
    return aiosync.TCPWeightSyncScheme(f"unix://{tempfile.mkdtemp()}/socket")


_KINDS = [*harness.SCHEMES, _tcp]
everywhere = pytest.mark.parametrize("make", _KINDS, ids=["mp", "shm", "tcp"])


@everywhere
async def test_who_cancels_every_task_leaves_nobody_waiting(make) -> None:
    source, target = models.linear(), models.linear()
    before = asyncio.all_tasks()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        await receiver.receive(timeout=0)
        waiting = asyncio.ensure_future(receiver.receive(timeout=harness.PATIENCE))
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - before - {waiting}:
            task.cancel()
        with pytest.raises(aiosync.TransportClosed, match="was cancelled"):
            await waiting
        for call in (receiver.receive, sender.send):
            with pytest.raises(aiosync.TransportClosed, match="was cancelled"):
                await call(timeout=harness.PATIENCE)
        with pytest.raises(aiosync.TransportClosed, match="was cancelled"):
            await sender.wait_for_version(99, timeout=harness.PATIENCE)


@everywhere
async def test_the_other_side_sees_a_cancelled_receiver(make) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as (sender, _receiver):
        (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "aiosync receiver"]
        task.cancel()
        await harness.until(lambda: not sender.sender_transports)
        with pytest.raises(aiosync.PartialSyncError):
            await sender.send()


@pytest.mark.parametrize("make", harness.SCHEMES)
async def test_the_workers_see_a_cancelled_sender(make) -> None:
    scheme = make()
    source, target = models.linear(), models.linear()
    async with harness.here(scheme, target, sender={"model": source}) as (_sender, receiver):
        await receiver.receive(timeout=0)
        for task in asyncio.all_tasks():
            if task.get_name().startswith("aiosync acks"):
                task.cancel()
        with pytest.raises(aiosync.PeerClosed):
            await receiver.receive(timeout=harness.PATIENCE)
        late = copy.copy(scheme)
        late.init_on_receiver(model_id="policy", model=models.linear(), worker_idx=0)
        with pytest.raises(aiosync.ConnectError):  # and nobody new waits for updates from it
            await late.connect(timeout=harness.PATIENCE)
        await late.aclose()


@pytest.mark.parametrize("make", [_KINDS[0], _KINDS[2]], ids=["mp", "tcp"])
async def test_a_load_function_that_raises_cancelled_error_ends_the_link(make) -> None:
    scheme = make()
    scheme.strategy, scheme.guard = "state_dict", "reading"
    cancel = False

    def load(weights: object) -> None:
        if cancel:
            raise asyncio.CancelledError

    source = models.linear()
    worker = {"load": load, "model": None}
    async with harness.here(scheme, None, sender={"model": source}, receiver=worker) as pair:
        sender, receiver = pair
        await receiver.receive(timeout=0)
        cancel = True
        with pytest.raises(aiosync.PartialSyncError):
            await sender.send(timeout=harness.PATIENCE)
        await harness.until(lambda: not sender.sender_transports)
        with pytest.raises(aiosync.TransportClosed, match="was cancelled"):
            await receiver.receive(timeout=harness.PATIENCE)


async def test_the_owner_tells_its_own_cancellations_from_those_of_others() -> None:
    crashes: list[BaseException] = []
    owner = TaskOwner(crashes.append)
    dropped, stolen, kept = (owner.start(asyncio.sleep(3600), name) for name in "abc")
    owner.cancel(dropped)
    stolen.cancel()
    await asyncio.wait({dropped, stolen})
    assert [type(error) for error in crashes] == [aiosync.TransportClosed]
    assert "'b'" in str(crashes[0])
    await owner.aclose()
    assert kept.cancelled()
    assert len(crashes) == 1
