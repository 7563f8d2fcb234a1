"""Calls that wait, and what was sent and not applied: given up, cancelled, skipped."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]

# -- nothing is applied on behalf of a call that has ended ----------------------------------------


both = pytest.mark.parametrize("make", harness.SCHEMES)


@contextlib.asynccontextmanager
async def staged(make) -> AsyncIterator[aiosync.WeightSyncScheme]:
    """A receiver with a staged version 2, which it has applied at the end."""
    scheme, options = make(apply="manual"), {"model": models.linear()}
    async with harness.here(scheme, models.linear(), sender=options) as (sender, receiver):
        handle = await harness.stage(sender, receiver)
        yield receiver
        assert (await handle).acked == {0}
        assert receiver.version == 2


async def cancelled(receiver: aiosync.WeightSyncScheme) -> None:
    task = asyncio.create_task(receiver.receive())
    await asyncio.sleep(0.02)
    task.cancel()
    await task


@both
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda receiver: receiver.receive(timeout=0.05), None),
        (lambda receiver: receiver.receive(timeout=0), None),
        (cancelled, asyncio.CancelledError),
        (lambda receiver: receiver.wait_for_version(2, timeout=0.05), aiosync.RecvTimeout),
        (lambda receiver: receiver.pull(min_version=2, timeout=0.05), aiosync.RecvTimeout),
    ],
    ids=["receive in time", "receive at once", "cancelled receive", "wait_for_version", "pull"],
)
async def test_a_call_that_gave_up_applies_nothing(make, call, error) -> None:
    async with staged(make) as receiver:
        with harness.read_elsewhere(receiver):
            with pytest.raises(error) if error else contextlib.nullcontext():
                assert await call(receiver) is None
        for _ in range(5):
            await asyncio.sleep(0.01)
            assert (receiver.version, receiver.staged_version) == (1, 2)
        assert receiver.apply_pending() == 2


# -- cancelled, or closed meanwhile ---------------------------------------------------------------


answering = pytest.mark.parametrize("make", harness.ANSWERING)


@answering
async def test_a_worker_lost_after_a_cancelled_send_is_named_by_the_next(make) -> None:
    targets, options = [models.linear(), models.linear()], {"model": models.linear()}
    async with harness.crowd(make(), targets, sender=options) as (sender, receivers):
        with receivers[0].reading():  # cannot apply meanwhile
            sending = asyncio.create_task(sender.send())
            await receivers[0].wait_staged(2, timeout=harness.PATIENCE)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            receivers[0].abort()
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await sender.send()
        assert set(caught.value.failed) == {0}
        assert set((await sender.send()).lost) == {0}


@both
@pytest.mark.parametrize("first", ["cancelled", "closed"])
@pytest.mark.parametrize("role", ["sender", "receiver"])
async def test_a_connect_that_is_cancelled_and_closed(make, role, first) -> None:
    """Who cancelled it sees that it was; ``TransportClosed`` is for who did not."""
    scheme = make()
    options = {"num_workers": 1} if role == "sender" else {}
    getattr(scheme, f"init_on_{role}")(model=models.linear(), **options)
    connecting = asyncio.ensure_future(scheme.connect())
    await asyncio.sleep(0.01)
    if first == "cancelled":
        connecting.cancel()
        await scheme.aclose()
    else:
        closing = asyncio.ensure_future(scheme.aclose())
        await asyncio.sleep(0)
        connecting.cancel()
        await closing
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert connecting.cancelled()


# -- nobody waits for ever when somebody cancels the background tasks -----------------------------


everywhere = pytest.mark.parametrize(
    "make", [*harness.SCHEMES, aiosync.TCPWeightSyncScheme], ids=["mp", "shm", "tcp"]
)


@everywhere
async def test_who_cancels_every_task_leaves_nobody_waiting(make: Any) -> None:
    before = asyncio.all_tasks()
    options = {"model": models.linear()}
    async with harness.here(make(), models.linear(), sender=options) as (sender, receiver):
        await receiver.receive(timeout=0)
        waiting = asyncio.ensure_future(receiver.receive(timeout=harness.PATIENCE))
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - before - {waiting}:
            task.cancel()
        with pytest.raises(aiosync.TransportClosed):
            await waiting
        for call in (receiver.receive, sender.send):
            with pytest.raises(aiosync.TransportClosed):
                await call(timeout=harness.PATIENCE)
        with pytest.raises(aiosync.TransportClosed):
            await sender.wait_for_version(99, timeout=harness.PATIENCE)
        late = harness.twin(sender)
        late.init_on_receiver(model_id="policy", model=models.linear(), worker_idx=0)
        with pytest.raises((aiosync.ConnectError, aiosync.ConnectTimeout)):
            await late.connect(timeout=1.0)  # nobody new waits for updates from it
        await late.aclose()


async def read(scheme: Any) -> None:
    async with scheme.reading():
        pass


CALLS: dict[str, Any] = {
    "wait_for_version": lambda scheme: scheme.wait_for_version(1),
    "wait_staged": lambda scheme: scheme.wait_staged(1),
    "ready": lambda scheme: scheme.ready.wait(),
    "reading": read,
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_loop_of_calls_lets_others_run(call: str) -> None:
    scheme, options = aiosync.SharedMemWeightSyncScheme(), {"model": models.linear()}
    async with harness.here(scheme, models.linear(), sender=options) as (sender, receiver):
        for mine in (receiver,) if call == "reading" else (sender, receiver):
            turned = asyncio.Event()
            asyncio.get_running_loop().call_soon(turned.set)
            for _ in range(3):
                await CALLS[call](mine)
            assert turned.is_set()

        async def poll() -> None:
            while receiver.version < 2:
                await CALLS[call](receiver)

        async with asyncio.timeout(harness.PATIENCE):
            await asyncio.gather(poll(), sender.send())
