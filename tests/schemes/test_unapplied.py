"""Workers that receive and do not apply: the trainer hears what is replaced, and keeps nothing."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

links = pytest.mark.parametrize(
    "make", [*harness.ANSWERING, aiosync.TCPWeightSyncScheme], ids=["pipe", "shared", "tcp"]
)
pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


@links
async def test_a_send_that_timed_out_or_was_refused_had_replaced_the_others(make: Any) -> None:
    scheme, options = make(apply="manual"), {"model": models.linear()}
    async with harness.here(scheme, models.linear(), sender=options) as (sender, receiver):
        handles = [await harness.stage(sender, receiver) for _ in range(20)]
        handles.append(await harness.stage(sender, receiver, timeout=0.1))
        for handle in handles[:-1]:
            assert (await handle).skipped == {0: handle.version + 1}
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await handles[-1]
        assert isinstance(caught.value.failed[0], aiosync.AckTimeout)
        assert receiver.apply_pending() == handles[-1].version  # it may still be applied
        await harness.until(lambda: sender.worker_versions == {0: handles[-1].version})
        good = await harness.stage(sender, receiver)
        bad = await harness.stage(sender, receiver, models.wide())
        with pytest.raises(aiosync.ApplyError):
            receiver.apply_pending()
        with pytest.raises(aiosync.PartialSyncError):
            await bad
        assert (await good).skipped == {0: bad.version}


@links
async def test_what_is_being_applied_is_not_skipped(make: Any) -> None:
    begun, go, loads = threading.Event(), threading.Event(), []

    def load(_: Any) -> None:
        loads.append(1)
        if len(loads) > 1:  # the initial weights are taken at once
            begun.set()
            assert go.wait(harness.PATIENCE)

    scheme, options = make(apply="manual", guard="reading"), {"model": models.linear()}
    ends = harness.here(scheme, None, sender=options, receiver={"load": load})
    async with ends as (sender, receiver):
        first = await harness.stage(sender, receiver)
        applying = asyncio.create_task(asyncio.to_thread(receiver.apply_pending))
        try:
            await harness.until(begun.is_set)
            second, third = sender.send_nowait(), sender.send_nowait()
            assert (await second).skipped == {0: third.version}
            assert not first.done() and not third.done()
        finally:
            go.set()
        assert await applying == first.version
        assert (await first).acked == {0}
        await receiver.wait_staged(third.version, timeout=harness.PATIENCE)
        assert receiver.apply_pending() == third.version
        assert (await third).acked == {0}


async def test_a_lost_link_in_between() -> None:
    scheme, options = aiosync.TCPWeightSyncScheme(apply="manual"), {"model": models.linear()}
    async with harness.here(scheme, models.linear(), sender=options) as (sender, receiver):
        first = await harness.stage(sender, receiver)
        second = await harness.stage(sender, receiver)
        assert (await first).skipped == {0: second.version}
        receiver.receiver_transport.abort()
        with pytest.raises(aiosync.PartialSyncError):
            await second  # as far as the trainer knows
        await harness.until(lambda: 0 in sender.worker_versions)
        # It has it already: the trainer offers it again, and hears that it waits.
        third = await harness.stage(sender, receiver)
        fourth = await harness.stage(sender, receiver)
        assert (await third).skipped == {0: fourth.version}
        assert receiver.apply_pending() == fourth.version
        assert (await fourth).acked == {0}
