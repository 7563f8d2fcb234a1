"""cancel_at_every_await(): each suspension is cancelled in both moments, and outcomes are seen."""

from __future__ import annotations

import asyncio
import sys

import pytest

from aiosync.testing import CancelOutcome, cancel_at_every_await

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


async def test_every_point_is_cancelled_once_in_each_moment() -> None:
    steps: list[int] = []

    async def three_steps() -> str:
        steps.append(0)
        for _ in range(3):
            await asyncio.sleep(0)
            steps[-1] += 1
        return "done"

    seen: list[CancelOutcome[str]] = []

    async def note(outcome: CancelOutcome[str]) -> None:
        seen.append(outcome)

    assert await cancel_at_every_await(three_steps, note) == 3
    assert [(outcome.late, outcome.point) for outcome in seen] == [
        (late, point) for late in (False, True) for point in (1, 2, 3, 4)
    ]
    assert steps == [0, 1, 2, 3] * 2
    for outcome in seen:
        assert outcome.delivered == outcome.cancelled == (outcome.point < 4)
        assert outcome.finished == (outcome.point == 4)
        assert outcome.result == ("done" if outcome.finished else None)


async def test_what_an_operation_returns_that_cancels_its_task_again_is_seen() -> None:
    async def put_off() -> str:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            # The next await of this task raises the cancellation.
            task.cancel()
        return "done"

    async def look(outcome: CancelOutcome[str]) -> None:
        assert outcome.result == "done"

    assert await cancel_at_every_await(put_off, look) == 1


async def test_only_late_cancellation_finds_a_result_that_nobody_takes() -> None:
    """This is the reason for two moments: a cancelled task may wait for a future that is done."""
    outcomes: dict[bool, bool] = {}
    futures: list[asyncio.Future[str]] = []

    async def wait_for_it() -> str:
        future = asyncio.get_running_loop().create_future()
        futures.append(future)
        asyncio.get_running_loop().call_soon(lambda: future.done() or future.set_result("it"))
        return await future

    async def look(outcome: CancelOutcome[str]) -> None:
        if outcome.delivered:
            assert outcome.cancelled
            outcomes[outcome.late] = futures[-1].cancelled()

    await cancel_at_every_await(wait_for_it, look)
    assert outcomes == {False: True, True: False}
    assert futures[2].result() == "it"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="no eager tasks before 3.12")
async def test_eager_tasks_are_cancelled_at_each_await_too() -> None:
    async def two_steps() -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)

    loop = asyncio.get_running_loop()
    # On Python 3.13 uvloop gives factories an option that asyncio's own one may not know.
    loop.set_task_factory(lambda loop, coro, **_: asyncio.Task(coro, loop=loop, eager_start=True))
    try:
        assert await cancel_at_every_await(two_steps) == 2
    finally:
        loop.set_task_factory(None)


async def test_an_operation_that_never_waits_is_an_error() -> None:
    async def at_once() -> int:
        return 1

    with pytest.raises(RuntimeError, match="never waits"):
        await cancel_at_every_await(at_once)
    assert await cancel_at_every_await(at_once, may_not_wait=True) == 0
