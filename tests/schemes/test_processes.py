"""Worker processes of each start method: round trips, torn reads, idle loops."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import Any

import pytest

from tests.contract.bench import small
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.support.waiting import wake_ups

PIPE, SHM = harness.SCHEMES


async def round_trips(make: Any, method: str, count: int) -> None:
    scheme, source = make(), models.linear(1.0)
    scheme.init_on_sender(model_id="policy", model=source, num_workers=count)
    async with harness.workers(scheme, models.linear, count, method=method) as crew:
        for version in range(1, 4):
            if version > 1:
                models.fill(source, float(version))
                assert (await scheme.send()).acked == set(range(count))
            for worker in crew:
                assert await worker.call(harness.version) == version == await worker.value()
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
        (SHM, "spawn", "uvloop"),
    ],
)
def test_weights_reach_workers(make: Any, method: str, loop: str) -> None:
    count = 2 if method.startswith("fork") else 1
    harness.run(loop, round_trips(make, method, count))


# -- torn reads -----------------------------------------------------------------------------------


FORWARDS = 20_000
WORKERS = 2


def _forwards(scheme: Any, model: Any) -> int:
    """Check that forwards neither mix versions nor go back; return the number of versions seen."""
    newest, num_versions, late = 0.0, 0, time.monotonic() + harness.PATIENCE / 2
    for number in itertools.count():
        # On a busy machine hardly anything may be sent during the first forwards.
        if number >= FORWARDS // WORKERS and (num_versions > 20 or time.monotonic() > late):
            break
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
    source, scheme = small(), make()
    models.fill(source, 1.0)
    scheme.init_on_sender(model=source, num_workers=WORKERS)
    async with harness.workers(scheme, small, WORKERS) as crew:
        hammering = [asyncio.ensure_future(worker.call(_hammer)) for worker in crew]
        while not all(task.done() for task in hammering):
            models.fill(source, float(scheme.version + 1))
            assert (await scheme.send()).acked == set(range(WORKERS))
        assert min(task.result() for task in hammering) > 20, "hardly anything was sent meanwhile"


# -- receivers that are idle, which must cost nothing ----------------------------------------------


IDLE_SECONDS = 1.5


@pytest.mark.slow
def test_idle_receivers_never_wake_up() -> None:
    """Workers of each scheme on each loop are idle at the same time."""
    harness.run("asyncio", _count_wake_ups())


async def _count_wake_ups() -> None:
    async with contextlib.AsyncExitStack() as stack:
        crew = dict[str, harness.Worker]()
        for make, loop in itertools.product(harness.SCHEMES, ("asyncio", "uvloop")):
            scheme = make()
            scheme.init_on_sender(model=models.linear(), num_workers=1)
            worker = crew[f"{make.__name__} on {loop}"] = harness.start(
                scheme, models.linear, loop=loop
            )
            stack.callback(worker.end)
            await stack.enter_async_context(scheme)
            worker.post(harness.join)
            await scheme.connect()
            await worker.answer()
            await scheme.send()
        # The last acknowledgements and releases happen now.
        await asyncio.sleep(0.5)
        # They may come late on a busy machine. A worker that polls is busy whenever one looks.
        for _ in range(5):
            before = {name: wake_ups(worker.pid) for name, worker in crew.items()}
            await asyncio.sleep(IDLE_SECONDS)
            after = {name: wake_ups(worker.pid) for name, worker in crew.items()}
            busy = {
                name: (before[name], after[name])
                for name in crew
                if before[name].keys() != after[name].keys()
                or sum(after[name].values()) - sum(before[name].values()) > 1
            }
            if not busy:
                break
        assert not busy
