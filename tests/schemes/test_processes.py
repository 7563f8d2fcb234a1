"""Round trips into real worker processes, however they were started."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.schemes import _harness as harness
from tests.schemes import _models as models

PIPE, SHM = harness.SCHEMES


async def round_trips(make: Any, method: str, count: int) -> None:
    scheme, source = make(), models.linear()
    models.fill(source, 1.0)
    scheme.init_on_sender(model_id="policy", model=source, num_workers=count)
    async with harness.workers(scheme, models.linear, count, method=method) as crew:
        for version in range(1, 4):
            if version > 1:
                models.fill(source, float(version))
                assert (await scheme.send()).acked == set(range(count))
            for worker in crew:
                assert await worker.call(harness.version) == version
                got = await worker.call(harness.weights)
                assert all(torch.equal(got[name], each) for name, each in source.named_parameters())
        assert scheme.worker_versions == dict.fromkeys(range(count), 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "method", "loop"),
    [
        (PIPE, "forkserver", "asyncio"),
        (SHM, "forkserver", "uvloop"),
        (PIPE, "fork", "uvloop"),
        (SHM, "fork", "asyncio"),
        (PIPE, "spawn", "uvloop"),
        (SHM, "subprocess", "uvloop"),
    ],
)
def test_weights_reach_workers(make: Any, method: str, loop: str) -> None:
    count = 2 if method.startswith("fork") else 1
    harness.run(loop, round_trips(make, method, count))
