"""Updates that a model cannot take: the sender learns why, and the model stays as it was."""

from __future__ import annotations

from typing import Any

import pytest

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

answering = pytest.mark.parametrize("make", harness.ANSWERING)
pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


def extra(counter: Any) -> models.Extra:
    model = models.Extra()
    model.counter = counter
    return model


@answering
async def test_a_refusal_that_no_send_waited_for_is_in_the_next_report_of_its_worker(
    make: Any,
) -> None:
    targets = [models.linear(), models.linear()]
    options = {"model": models.linear()}
    async with harness.crowd(make(require=1), targets, sender=options) as (sender, others):
        targets[1].double()
        async with others[1].reading():
            refused = await sender.send()
        assert (refused.acked, refused.failed) == ({0}, {})
        with pytest.raises(aiosync.PartialSyncError):
            await sender.wait_for_version(refused.version, timeout=harness.PATIENCE)
        assert not (await sender.send(worker_ids=0)).failed  # which is about another one
        targets[1].float()
        report = await sender.send()
        assert isinstance(report.failed[1], aiosync.ApplyError)
        await sender.wait_for_version(sender.version, timeout=harness.PATIENCE)
        assert not (await sender.send()).failed  # told once


@answering
async def test_waiting_for_a_version_that_was_refused_names_the_worker(make: Any) -> None:
    targets = [models.linear(), models.linear()]
    async with harness.crowd(make(), targets, sender={"model": models.linear()}) as (sender, _):
        targets[1].double()
        handle = sender.send_nowait()
        for waiting in (sender.wait_for_version(2), handle, sender.wait_for_version(2)):
            with pytest.raises(aiosync.PartialSyncError) as caught:
                await waiting
            assert (caught.value.failed.keys(), caught.value.acked) == ({1}, {0})
        assert await sender.wait_for_version(1, timeout=harness.PATIENCE)  # which both have
        targets[1].float()
        newer = sender.send_nowait()
        # What is on its way may be what is waited for: the older refusal does not count.
        assert await sender.wait_for_version(2, timeout=harness.PATIENCE) > 2
        await newer
