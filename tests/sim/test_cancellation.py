"""Every call of a scheme, cancelled at each of its awaits: programs go on as the page says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from aiosync.testing.sim import World, simulate
from tests.sim.cancelling import Cancelled, CancelledAt

URL = "tcp://127.0.0.1:7000"
CALLS = (
    "trainer: connect",
    "trainer: send",
    "trainer: wait_for_version",
    "trainer: wait_staged",
    "trainer: aclose",
    "worker: connect",
    "worker: receive",
    "worker: wait_for_version",
    "worker: pull",
    "worker: aclose",
)


class Run:
    """A trainer and a worker, of which one call is cancelled at one await."""

    def __init__(self, what: str, at: int) -> None:
        self.what = what
        self.left = at
        self.trained = nn.Linear(4, 2)
        self.model = nn.Linear(4, 2)
        self.sent = 0
        # The call was cancelled.
        self.cancelled = False
        self.over = asyncio.Event()

    def is_due(self) -> bool:
        self.left -= 1
        return self.left == 0

    async def call(self, what: str, call: Callable[[], Awaitable[Any]]) -> bool:
        """Make a call; return False if it was cancelled, or the other side's connect() was."""
        is_due = self.is_due if what == self.what else lambda: False
        try:
            await CancelledAt(call(), is_due)
        except Cancelled:
            self.cancelled = True
            return False
        except aiosync.PartialSyncError:
            assert self.what == "worker: connect"
            return False
        if what == self.what:
            self.left = 0
        return True

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for tensor in self.trained.parameters():
                tensor.fill_(value)

    async def train(self) -> None:
        while True:
            scheme = aiosync.TCPWeightSyncScheme(URL, timeout=30.0)
            scheme.init_on_sender(model_id="policy", model=self.trained, num_workers=1)
            if await self.call("trainer: connect", scheme.connect):
                break
            await scheme.aclose()
        for value in (1.0, 2.0):
            self.fill(value)
            before = scheme.version
            if not await self.call("trainer: send", scheme.send):
                # A call that did not happen took no number; one that did is overtaken.
                assert scheme.version in (before, before + 1)
            await self.call(
                "trainer: wait_staged", lambda: scheme.wait_staged(scheme.version, timeout=30)
            )
            await self.call(
                "trainer: wait_for_version",
                lambda: scheme.wait_for_version(scheme.version, timeout=30),
            )
        self.fill(3.0)
        while not self.over.is_set():
            # A worker that gives up connecting is lost, and the update does not reach it.
            with contextlib.suppress(aiosync.PartialSyncError):
                self.sent = (await scheme.send()).version
            await asyncio.sleep(1.0)
        await self.call("trainer: aclose", scheme.aclose)
        await scheme.aclose()

    async def work(self) -> None:
        while True:
            scheme = aiosync.TCPWeightSyncScheme(URL, timeout=30.0, reconnect=None)
            scheme.init_on_receiver(model_id="policy", model=self.model, worker_idx=0)
            if await self.call("worker: connect", scheme.connect):
                break
            await scheme.aclose()
        await self.call("worker: receive", lambda: scheme.receive(10))
        await self.call("worker: pull", scheme.pull)
        if not self.sent:
            await self.call(
                "worker: wait_for_version", lambda: scheme.wait_for_version(scheme.version + 1)
            )
        while self.model.bias[0] != 3.0:
            await scheme.receive(1)
        assert all(bool((each == 3.0).all()) for each in self.model.parameters())
        self.over.set()
        await self.call("worker: aclose", scheme.aclose)
        await scheme.aclose()

    async def main(self, world: World) -> None:
        processes = [world.start("trainer", self.train()), world.start("worker", self.work())]
        for process in processes:
            await world.ended(process)


@pytest.mark.parametrize("what", CALLS)
def test_a_call_is_cancelled_at_each_await(what: str) -> None:
    cancelled = 0
    while True:
        run = Run(what, cancelled + 1)
        simulate(run.main, seed=1, max_seconds=600)
        if not run.cancelled:
            break
        cancelled += 1
    assert cancelled
