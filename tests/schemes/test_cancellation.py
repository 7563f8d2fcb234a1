"""What is cancelled, closed meanwhile, or given up: beyond what the contract asserts."""

from __future__ import annotations

import asyncio

import pytest

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

both = pytest.mark.parametrize("make", harness.SCHEMES)
answering = pytest.mark.parametrize("make", harness.ANSWERING)
pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


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
