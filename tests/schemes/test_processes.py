"""Worker processes, however they were started: round trips, torn reads, indices, idle loops."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import aiosync
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


# -- torn reads -----------------------------------------------------------------------------------


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


# -- who may have an index: one that started again takes over at once, a second one does not ------


both = pytest.mark.parametrize("make", harness.SCHEMES)
TAKEN = r"worker_idx 0 is taken: process {} has it"


@pytest.mark.asyncio
@pytest.mark.one_loop
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


@pytest.mark.asyncio
@pytest.mark.one_loop
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


# -- what a receiver costs: nothing while idle, and no long pause of its loop ---------------------


IDLE_SECONDS = 3.0
MAX_LATE_SECONDS = 0.02


def _wake_ups(pid: int) -> dict[str, int]:
    """Voluntary context switches of every thread of a process."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        switches = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", path.read_text(), re.M)
        found[path.parent.name] = int(switches[1])
    return found


@pytest.mark.slow
def test_idle_receivers_never_wake_up() -> None:
    """Each scheme on each loop, at the same time."""
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
        await asyncio.sleep(0.5)  # the last acknowledgements and releases
        before = {name: _wake_ups(worker.pid) for name, worker in crew.items()}
        await asyncio.sleep(IDLE_SECONDS)
        for name, worker in crew.items():
            after = _wake_ups(worker.pid)
            assert after.keys() == before[name].keys(), name
            woken = {thread: after[thread] - count for thread, count in before[name].items()}
            assert sum(woken.values()) <= 1, f"{name}: {woken}"


def _huge() -> torch.nn.Module:
    """256 MiB, in tensors of several sizes."""
    sizes = [2**22] * 15 + [2**14] * 256
    return torch.nn.ParameterList(torch.zeros(size) for size in sizes).requires_grad_(False)


async def _tick(state, until: int) -> tuple[float, int]:
    """The longest that a 1 ms ticker of the worker's loop is late, in seconds, and its ticks."""
    worst, ticks = 0.0, 0
    while state.scheme.version < until:
        due = time.perf_counter() + 0.001
        await asyncio.sleep(0.001)
        worst = max(worst, time.perf_counter() - due)
        ticks += 1
    return worst, ticks


@pytest.mark.asyncio
@pytest.mark.one_loop
@pytest.mark.slow
@pytest.mark.parametrize("make", harness.SCHEMES)
async def test_the_loop_goes_on_while_a_big_model_arrives(make) -> None:
    source, scheme = _huge(), make()
    scheme.init_on_sender(model=source, num_workers=1)
    async with harness.workers(scheme, _huge, 1) as crew:
        found = []
        while min(found, default=(1.0, 0))[0] > MAX_LATE_SECONDS:
            assert len(found) < 4, found  # a busy machine may spoil some of them
            crew[0].post(_tick, scheme.version + 1)
            await scheme.send()
            found.append(await crew[0].answer())
