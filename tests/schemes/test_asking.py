"""``apply="manual"``: nothing is applied on behalf of a call that has ended."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]
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
