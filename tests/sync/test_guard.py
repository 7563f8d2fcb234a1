"""The guard under threads, interrupts and copies."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from aiosync.schemes import Guard, Reading
from tests.sync import _tools as tools


class Probe(torch.nn.Module):
    """A module that calls ``inside`` in its forward."""

    def __init__(self, inside: Any = lambda: None) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Any = None) -> Any:
        self.inside()
        return x


class Count:
    """An apply that keeps the numbers of the threads in which it ran."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    @property
    def runs(self) -> int:
        return len(self.threads)

    def __call__(self) -> None:
        self.threads.append(threading.get_ident())


def _guarded(module: torch.nn.Module) -> Guard:
    guard = Guard()
    guard.install(module)
    return guard


def _blocks_nothing(guard: Guard) -> None:
    apply = Count()
    assert guard.submit(apply)
    assert apply.runs == 1
    assert guard.exclusively(lambda: None, timeout=0.0)


# -- forwards ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_an_update_waits_for_the_outermost_forward_whose_thread_applies_it(fails: bool) -> None:
    """A nested forward does not end the read of the outer one, whether or not it raises."""
    depth = 0
    module = Probe(lambda: inside())
    guard, apply = _guarded(module), Count()

    def inside() -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            tools.in_thread(lambda: guard.submit(apply)).join()
        if depth == 4 and fails:
            raise ZeroDivisionError
        if depth < 4:
            with pytest.raises(ZeroDivisionError) if fails and depth == 3 else no_error:
                # The forward calls itself.
                module()
        assert apply.runs == 0
        assert guard.reading_here

    no_error = contextlib.nullcontext()
    module()
    assert (depth, apply.threads) == (4, [threading.get_ident()])
    assert not guard.reading_here


def test_a_forward_inside_an_update_does_not_wait_for_it() -> None:
    """A model's ``set_extra_state()``, which runs inside an update, may call the model."""
    module = Probe()
    guard = _guarded(module)
    ran = []
    assert guard.submit(lambda: ran.append(module(1)))
    assert ran == [1]
    _blocks_nothing(guard)


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_signal_leaves_no_block_open(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler raises as a block begins or ends, in one of the calls that this makes."""
    guard, usual, calls = Guard(), threading.get_ident, [0]

    def ring() -> int:
        calls[0] += 1
        if calls[0] == call:
            raise TimeoutError
        return usual()

    with Reading(guard):
        monkeypatch.setattr(threading, "get_ident", ring)
        with pytest.raises(TimeoutError), Reading(guard):
            pass
        monkeypatch.undo()
        # The block around that one goes on.
        assert guard.reading_here
    _blocks_nothing(guard)


def test_a_signal_that_comes_once_a_block_is_open_closes_it() -> None:
    guard = Guard()

    def ring() -> None:
        raise TimeoutError

    guard.on_compute = ring
    with pytest.raises(TimeoutError), Reading(guard):
        pass
    _blocks_nothing(guard)


# -- waiting for one another ------------------------------------------------------------------


@pytest.mark.slow
def test_threads_neither_deadlock_nor_tear() -> None:
    values = [0, 0]
    module = Probe(lambda: check())
    guard = _guarded(module)

    def check() -> None:
        first = values[0]
        for _ in range(random.randrange(20)):
            pass
        assert values[1] == first, "torn"

    def apply() -> None:
        values[0] += 1
        for _ in range(50):
            pass
        values[1] += 1

    def reads() -> None:
        with Reading(guard):
            check()
            module()

    def withdraws() -> None:
        guard.withdraw()

    async def one() -> None:
        async with Reading(guard):
            first = values[0]
            await asyncio.sleep(0)
            assert values[1] == first, "torn"

    async def several() -> None:
        await asyncio.gather(*(one() for _ in range(5)))

    def again(call: Any) -> Any:
        def calls() -> None:
            # On a busy machine an update may take that long to come.
            while (now := time.monotonic()) < deadline or (
                not values[0] and now < deadline + tools.PATIENCE / 2
            ):
                call()

        return calls

    def submits() -> None:
        guard.submit(apply)

    def acts() -> None:
        guard.exclusively(apply, timeout=1.0)

    deadline = time.monotonic() + 1.0
    calls = [module, module, reads, reads, submits, acts, withdraws, lambda: asyncio.run(several())]
    with tools.threads(*map(again, calls)):
        pass
    assert values[0] > 0
    _blocks_nothing(guard)


# -- reading() in coroutines ------------------------------------------------------------------


@pytest.mark.asyncio
async def test_nested_reads_of_one_task_do_not_wait_for_themselves() -> None:
    guard, apply = Guard(), Count()

    async def helper() -> None:
        async with Reading(guard):
            assert apply.runs == 0

    async with asyncio.timeout(tools.PATIENCE):
        async with Reading(guard):
            guard.submit(apply)
            await helper()
            # A task that the reading task has started is inside its read.
            await asyncio.create_task(helper())
            with Reading(guard):
                pass
        assert apply.runs == 1


@pytest.mark.asyncio
async def test_a_cancelled_reader_leaves_nothing() -> None:
    guard, apply = Guard(), Count()
    guard.enter()
    guard.submit(apply)
    task = asyncio.ensure_future(Reading(guard).__aenter__())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    guard.leave()
    assert apply.runs == 1


@pytest.mark.asyncio
async def test_generators_that_are_given_up_inside_of_blocks_add_up_to_nothing() -> None:
    """The context of the task that gave them up does not grow."""
    guard = Guard()

    async def stream() -> AsyncIterator[None]:
        async with Reading(guard):
            yield

    def num_noted() -> int:
        noted = contextvars.copy_context().values()
        return sum(len(each) for each in noted if isinstance(each, tuple))

    before = num_noted()
    for _ in range(5):
        async for _ in stream():
            break
        # The loop closes the generator.
        await asyncio.sleep(0.001)
    assert num_noted() <= before + 1
    async with Reading(guard), Reading(guard):
        pass
    assert num_noted() == before
    _blocks_nothing(guard)
