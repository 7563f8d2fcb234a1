"""``apply="manual"``: nothing is applied on behalf of a call that has ended."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

import pytest
import torch

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]
both = pytest.mark.parametrize("make", harness.SCHEMES)


@contextlib.contextmanager
def read_elsewhere(scheme: aiosync.WeightSyncScheme) -> Iterator[None]:
    """Hold ``reading()`` in another thread."""
    inside, leave = threading.Event(), threading.Event()

    def read() -> None:
        with scheme.reading():
            inside.set()
            leave.wait(harness.PATIENCE)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert inside.wait(harness.PATIENCE)
        yield
    finally:
        leave.set()
        thread.join()


async def _give_up(receiver: aiosync.WeightSyncScheme, call: str) -> None:
    match call:
        case "receive in time":
            assert await receiver.receive(timeout=0.05) is None
        case "receive at once":
            assert await receiver.receive(timeout=0) is None
        case "cancelled receive":
            task = asyncio.create_task(receiver.receive())
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        case "wait_for_version":
            with pytest.raises(aiosync.RecvTimeout):
                await receiver.wait_for_version(2, timeout=0.05)
        case "pull":
            with pytest.raises(aiosync.RecvTimeout):
                await receiver.pull(min_version=2, timeout=0.05)


CALLS = ["receive in time", "receive at once", "cancelled receive", "wait_for_version", "pull"]


@both
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_that_gave_up_applies_nothing(make, call) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(make(apply="manual"), target, sender={"model": source}) as (
        sender,
        receiver,
    ):
        with torch.no_grad():
            source.weight.fill_(2.0)
        handle = sender.send_nowait()
        await receiver.wait_staged(2, timeout=harness.PATIENCE)
        with read_elsewhere(receiver):
            await _give_up(receiver, call)
        await asyncio.sleep(0.1)
        assert receiver.version == 1
        assert receiver.staged_version == 2
        assert not torch.equal(target.weight, source.weight)
        assert not handle.done()
        assert receiver.apply_pending() == 2
        assert torch.equal(target.weight, source.weight)
        assert (await handle).acked == {0}


@both
async def test_another_call_goes_on_when_one_gives_up(make) -> None:
    source = models.linear()
    async with harness.here(make(apply="manual"), models.linear(), sender={"model": source}) as (
        sender,
        receiver,
    ):
        handle = sender.send_nowait()
        await receiver.wait_staged(2, timeout=harness.PATIENCE)
        with read_elsewhere(receiver):
            waiting = asyncio.create_task(receiver.wait_for_version(2, timeout=harness.PATIENCE))
            assert await receiver.receive(timeout=0.05) is None
        assert await waiting == 2
        assert (await handle).acked == {0}


@both
async def test_a_model_that_was_given_meanwhile_is_taken_all_the_same(make) -> None:
    source, late = models.linear(), models.linear()
    async with harness.here(make(apply="manual"), models.linear(), sender={"model": source}) as (
        sender,
        receiver,
    ):
        handle = sender.send_nowait()
        await receiver.wait_staged(2, timeout=harness.PATIENCE)
        with read_elsewhere(receiver):
            receiver.model = late
            assert await receiver.receive(timeout=0.05) is None
        await asyncio.sleep(0.1)
        assert receiver.version == 1
        assert torch.equal(late.weight, source.weight)
        assert receiver.apply_pending() == 2
        assert (await handle).acked == {0}


@both
async def test_a_subscriber_asks_while_two_versions_are_on_their_way(make) -> None:
    async with harness.here(make(), models.linear(), sender={"model": models.linear()}) as pair:
        sender, receiver = pair
        for _ in range(5):
            pulling = asyncio.create_task(receiver.pull(timeout=harness.PATIENCE))
            await asyncio.sleep(0)  # it has asked
            handles = [sender.send_nowait(), sender.send_nowait()]
            assert await pulling >= handles[0].version
            await handles[1]
