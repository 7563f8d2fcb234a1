"""Who may have an index: a worker that started again takes over at once, a second one does not."""

from __future__ import annotations

import asyncio

import pytest

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

both = pytest.mark.parametrize("make", harness.SCHEMES)
pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]

TAKEN = r"worker_idx 0 is taken: process {} has it"


@both
@pytest.mark.slow
async def test_a_second_process_is_refused_until_the_first_has_ended(make) -> None:
    scheme, model = make(), models.linear()
    scheme.init_on_sender(model=model, num_workers=1)

    async def gets(worker: harness.Worker, value: float) -> None:
        models.fill(model, value)
        assert (await scheme.send()).acked == {0}
        assert ((await worker.call(harness.weights))["weight"] == value).all()

    async with harness.workers(scheme, models.linear, 1) as crew:
        crew += [harness.start(scheme, models.linear) for _ in range(2)]
        with pytest.raises(aiosync.ConnectTimeout, match=TAKEN.format(crew[0].pid)):
            await crew[1].call(harness.join, 0, 0.2)
        await gets(crew[0], 2.0)
        crew[0].stop()  # it is alive, and may go on
        crew[2].post(harness.join, 0)
        await asyncio.sleep(0.2)
        crew[0].kill()  # while the trainer makes sure that it is not about to end
        assert await crew[2].answer() == 2
        await gets(crew[2], 3.0)


@both
@pytest.mark.slow
async def test_one_that_ended_is_noticed_whatever_index_the_others_have(make) -> None:
    scheme = make()
    scheme.init_on_sender(model=models.linear(), num_workers=2)
    async with harness.workers(scheme, models.linear, 2, connect=False) as (first, second):
        pids = [first.pid, second.pid]
        joining = scheme.connect(timeout=harness.PATIENCE, processes=pids)
        connecting = asyncio.create_task(joining)
        await second.call(harness.join, 0)  # the index of the first, which never comes
        assert not connecting.done()
        first.kill()
        with pytest.raises(aiosync.PartialSyncError, match=rf"process {first.pid}.* end") as found:
            await asyncio.wait_for(connecting, harness.PATIENCE / 4)
        assert found.value.failed.keys() == {1}
