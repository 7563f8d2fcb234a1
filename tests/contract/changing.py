"""Weights that change during a send: each update is whole, or the call raises.

This module imports neither pytest nor a private name.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import torch
from torch import nn

import aiosync
from tests.contract.bench import Bench, large, small, until

_SENDS = 8


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of which each step adds 1 to every parameter."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -1.0)
    return torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)


async def check_steps_beside_a_send(bench: Bench) -> None:
    """An optimizer may step on the loop while send() runs: no version mixes two steps."""
    model = large(0.0)
    optimizer = _optimizer(model)
    async with bench.crew(model, [large()]) as crew:
        for _ in range(_SENDS):
            sending = asyncio.create_task(crew.sender.send())
            for _ in range(15):
                await asyncio.sleep(0)
                optimizer.step()
            assert (await sending).acked == {0}
            # value() fails if the model mixes versions.
            await crew.workers[0].value()


async def check_steps_in_a_thread(bench: Bench) -> None:
    """An optimizer may step in another thread while send() runs or send_nowait() copies."""
    for build in (small, large):
        model, over = build(0.0), threading.Event()
        optimizer = _optimizer(model)

        def step_all_the_time(optimizer: Any = optimizer, over: threading.Event = over) -> None:
            while not over.is_set():
                optimizer.step()

        async with bench.crew(model, [build()]) as crew:
            stepping = asyncio.create_task(asyncio.to_thread(step_all_the_time))
            try:
                for turn in range(_SENDS):
                    sender = crew.sender
                    report = await (sender.send() if turn % 2 else sender.send_nowait())
                    assert report.acked == {0}
                    await crew.workers[0].value()
            finally:
                over.set()
                await stepping


async def check_writes_beside_a_send(bench: Bench) -> None:
    """Other writes to the weights during a copy make send() raise, and nothing is published."""
    model, told = large(0.0), 0
    async with bench.crew(model, [large()]) as crew:
        [worker] = crew.workers
        for turn in range(200):
            sending = asyncio.create_task(crew.sender.send())
            for _ in range(turn % 8):
                await asyncio.sleep(0)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            before = crew.sender.version
            try:
                await sending
            except aiosync.WeightsChanged as exc:
                told += 1
                assert "layers.0" in str(exc)
                assert "send_nowait()" in str(exc)
                assert crew.sender.version == before
            # value() fails if the model mixes versions.
            await worker.value()
            if told > 3:
                break
        assert told
        assert (await crew.send(7.0)).acked == {0}
        assert await worker.value() == 7.0


async def check_a_step_that_raised(bench: Bench) -> None:
    """A step that raised, in any thread, delays no send; nor does a step whose hook sends."""
    model = large(0.0)
    optimizer: Any = _optimizer(model)

    def fail() -> Any:
        raise ArithmeticError

    def step_and_fail() -> None:
        try:
            optimizer.step(fail)
        except ArithmeticError:
            return
        raise AssertionError("the closure was not called")

    async with bench.crew(model, [large()]) as crew, asyncio.timeout(10):
        for _ in range(2):
            step_and_fail()
            await crew.send(1.0)
            await asyncio.to_thread(step_and_fail)
            await crew.send(2.0)
        handles: list[aiosync.SendHandle] = []
        optimizer.register_step_post_hook(lambda *_: handles.append(crew.sender.send_nowait()))
        optimizer.step()
        await handles[0]
        await until(lambda: crew.sender.worker_versions[0] == crew.sender.version)
        assert await crew.workers[0].value() == 3.0


async def check_copy_at_once_beside_a_send(bench: Bench) -> None:
    """Weights that send_nowait() copies are not replaced by older ones of a send() before."""
    model = large(0.0)
    optimizer = _optimizer(model)
    async with bench.crew(model, [large()]) as crew:
        for turn in range(1, 4):
            sending = asyncio.create_task(crew.sender.send())
            # The copy begins, and the step waits for its end.
            await asyncio.sleep(0)
            optimizer.step()
            handle = crew.sender.send_nowait()
            await asyncio.gather(sending, handle)
            await until(lambda: crew.sender.worker_versions[0] == crew.sender.version)
            assert await crew.workers[0].value() == turn


CHECKS = (
    check_copy_at_once_beside_a_send,
    check_steps_beside_a_send,
    check_steps_in_a_thread,
    check_writes_beside_a_send,
    check_a_step_that_raised,
)
