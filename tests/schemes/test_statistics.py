"""Statistics and calls of a worker, in each step of which a thread may apply a version."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest
import torch

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.support.waiting import PATIENCE

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]
FOLDER = str(Path(aiosync.__file__).parent)
X = torch.ones(4)


class Step:
    """Block that calls a function before one bytecode of the package, which this task runs."""

    def __init__(self, number: int, function: Callable[[], object]) -> None:
        self._left = number
        self._function = function
        self._task = asyncio.current_task()

    @property
    def has_come(self) -> bool:
        return self._left < 0

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        is_own = frame.f_code.co_filename.startswith(FOLDER)
        if not is_own or asyncio.current_task() is not self._task:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if self._left == -1:
                self._function()
        return self._trace


async def promised(sender: Any, receiver: Any) -> None:
    """Wait until the worker has promised that its reads take each version."""
    await harness.deliver(sender, receiver, 1.0)
    await asyncio.sleep(0.05)


@pytest.mark.parametrize("by_word", [True, False])
async def test_statistics_are_of_one_moment(by_word: bool) -> None:
    target, scheme = models.linear(), aiosync.SharedMemWeightSyncScheme()
    if not by_word:
        scheme = aiosync.MultiProcessWeightSyncScheme(apply="manual")
    pair = harness.here(scheme, target, sender={"model": models.linear()})
    with ThreadPoolExecutor(1) as pool:
        async with pair as (sender, receiver):
            if by_word:
                await promised(sender, receiver)

            def apply() -> None:
                pool.submit(target if by_word else receiver.apply_pending, *[X][:by_word]).result(9)

            for number in itertools.count():
                handle = sender.send_nowait() if by_word else await harness.stage(sender, receiver)
                with Step(number, apply) as step:
                    found, lag, staged = receiver.stats(), receiver.lag, receiver.staged_version
                assert found.newest_version == found.version + found.lag == sender.version
                assert lag in (0, 1) and staged in (0, sender.version)
                apply()
                assert receiver.version == sender.version
                await asyncio.wait_for(handle, PATIENCE)
                if not step.has_come:
                    break


async def test_no_version_is_received_twice() -> None:
    target, scheme = models.linear(), aiosync.SharedMemWeightSyncScheme()
    pair = harness.here(scheme, target, sender={"model": models.linear()})
    with ThreadPoolExecutor(1) as pool:
        async with pair as (sender, receiver):
            await promised(sender, receiver)
            handles: list[aiosync.SendHandle] = []

            def apply() -> None:
                handles.append(sender.send_nowait())
                pool.submit(target, X).result(9)

            for number in itertools.count():
                apply()
                with Step(number, apply) as step:
                    found = await receiver.receive(0)
                versions = [each.version for each in (found, await receiver.receive(0)) if each]
                assert versions == sorted({*versions}) and versions[-1] == sender.version
                while handles:
                    await asyncio.wait_for(handles.pop(), PATIENCE)
                if not step.has_come:
                    break


@pytest.mark.parametrize("side", [0, 1], ids=["sender", "receiver"])
async def test_the_state_can_be_read_while_a_thread_closes_the_scheme(side: int) -> None:
    for number in itertools.count():
        scheme = aiosync.SharedMemWeightSyncScheme()
        pair = harness.here(scheme, models.linear(), sender={"model": models.linear()})
        async with pair as both:
            both[0].send_nowait()
            with Step(number, both[side].abort) as step:
                # stats() reads these, too, in many more steps.
                found = [both[side].lag, *both[0].worker_versions.values(), both[1].staged_version]
            assert min(found) >= 0
        if not step.has_come:
            break
