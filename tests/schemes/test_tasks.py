"""The background tasks of a scheme: nobody waits for ever when somebody else cancels them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]

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


# -- calls that need not wait leave the loop its turns all the same: updates come on it ------------


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
