"""Forwards in worker processes during continuous sends: not one mixes two versions.

Every parameter of version v holds the number v, so a forward that returns the means of its first
and of its last layer shows at once whether they belong together.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.schemes import _harness as harness
from tests.schemes import _models as models

FORWARDS = 20_000
WORKERS = 2


def _forwards(scheme: Any, model: Any) -> int:
    """Compute; each forward has one version, and none an older one than the one before."""
    newest, num_versions = 0.0, 0
    for number in range(FORWARDS // WORKERS):
        if number % 4:
            first, last = model()
        else:
            with scheme.reading():
                first, last = model()
                assert first == scheme.version
        assert first == last >= newest
        num_versions += first > newest
        newest = first
    return num_versions


async def _hammer(state: harness.State) -> int:
    return await asyncio.to_thread(_forwards, state.scheme, state.model)


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.one_loop
@pytest.mark.parametrize("make", harness.SCHEMES)
async def test_forwards_of_worker_processes(make: Any) -> None:
    source, scheme = models.stack(), make()
    models.fill(source, 1.0)
    scheme.init_on_sender(model=source, num_workers=WORKERS)
    async with harness.workers(scheme, models.stack, WORKERS) as crew:
        hammering = [asyncio.ensure_future(worker.call(_hammer)) for worker in crew]
        while not all(task.done() for task in hammering):
            models.fill(source, float(scheme.version + 1))
            assert (await scheme.send()).acked == set(range(WORKERS))
        assert min(task.result() for task in hammering) > 20, "hardly anything was sent meanwhile"
