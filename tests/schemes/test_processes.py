"""Round trips into real worker processes, however they were started."""

from __future__ import annotations

import pytest
import torch

from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = pytest.mark.one_loop


async def _round_trips(make, method, count) -> None:
    scheme = make()
    model = models.linear()
    models.fill(model, 1.0)
    scheme.init_on_sender(model_id="policy", model=model, num_workers=count)
    async with harness.workers(scheme, models.linear, count, method=method) as crew:
        for worker in crew:
            got = await worker.call(harness.weights)
            assert all(torch.equal(got[name], value) for name, value in model.state_dict().items())
        for value in (2.0, 3.0, 4.0):
            models.fill(model, value)
            report = await scheme.send()
            assert report.acked == set(range(count))
            for worker in crew:
                assert await worker.call(harness.version) == report.version
                got = await worker.call(harness.weights)
                assert torch.equal(got["weight"], model.weight)
        assert scheme.worker_versions == dict.fromkeys(range(count), report.version)
        assert scheme.lag == 0


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("make", harness.SCHEMES)
@pytest.mark.parametrize("method", ["forkserver", "fork"])
async def test_weights_reach_forked_workers(make, method) -> None:
    await _round_trips(make, method, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "method", "loop"),
    [
        (harness.SCHEMES[0], "spawn", "uvloop"),
        (harness.SCHEMES[1], "spawn", "asyncio"),
        (harness.SCHEMES[1], "subprocess", "uvloop"),
    ],
)
def test_weights_reach_fresh_interpreters(make, method, loop) -> None:
    harness.run(loop, _round_trips(make, method, 1))
