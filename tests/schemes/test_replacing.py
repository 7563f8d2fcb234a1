"""Another model for a connected receiver: it has the guard and the weights at once, or an error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import aiosync
import aiosync.sync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

both = pytest.mark.parametrize("make", harness.SCHEMES)
copies = pytest.mark.parametrize("apply_copy", [False, True])
applies = pytest.mark.parametrize("apply", ["auto", "manual"])
pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


class Owner:
    def __init__(self, policy: Any) -> None:
        self.policy = policy


@both
@copies
async def test_another_context(make: Any, apply_copy: bool) -> None:
    options = {"model": models.linear(2.0)}
    owners = [Owner(models.linear()) for _ in range(3)]
    init = {"context": owners[0]}
    ends = harness.here(make(apply_copy=apply_copy), None, sender=options, receiver=init)
    async with ends as (sender, receiver):
        receiver.context = owners[1]
        assert receiver.model is owners[1].policy
        assert models.holds(receiver, 2.0)
        with pytest.raises(aiosync.ApplyError):
            receiver.context = Owner(models.wide())
        assert receiver.context is owners[1]
        # Replaced without a word: the next update goes there.
        old, owners[1].policy = owners[1].policy, owners[2].policy
        await harness.deliver(sender, receiver, 3.0)
        assert models.filled(old, 2.0)


@both
@applies
async def test_while_a_forward_runs_in_another_thread(make: Any, apply: Any) -> None:
    source, old, new = models.linear(2.0), models.linear(), models.linear()
    ends = harness.here(make(apply=apply), old, sender={"model": source})
    async with ends as (sender, receiver):
        seen = []

        def forward(wait: Any) -> None:
            with old.register_forward_pre_hook(wait):
                seen.append(old(torch.zeros(4)).tolist())

        with harness.read_elsewhere(receiver, forward):
            with pytest.raises(aiosync.ApplyError):
                await asyncio.to_thread(setattr, receiver, "model", models.wide())
            assert receiver.model is old
            receiver.model = new
            handles = [await harness.stage(sender, receiver)]  # comes while it waits
            models.fill(source, 3.0)
            handles.append(sender.send_nowait())
            await sender.wait_staged(3, timeout=harness.PATIENCE)
        assert seen == [[2.0, 2.0]]
        if apply == "manual":
            await harness.until(lambda: receiver.version == 1)
            assert receiver.apply_pending() == 3
        for handle in handles:
            await handle
        assert receiver.version == 3
        assert models.holds(receiver, 3.0)
        assert models.filled(old, 2.0)


@both
async def test_closed_or_taken_back_before_the_forward_ended(make: Any) -> None:
    source, old, new = models.linear(), models.linear(), models.linear()
    async with harness.here(make(), old, sender={"model": source}) as (sender, receiver):
        with harness.read_elsewhere(receiver):
            receiver.model = new
            receiver.model = old
        await harness.deliver(sender, receiver, 2.0)
        with harness.read_elsewhere(receiver):
            receiver.model = new
            receiver.abort()
        assert (models.filled(old, 2.0), models.filled(new, -1.0)) == (True, True)


@both
@applies
async def test_what_waits_for_a_model_is_not_lost(make: Any, apply: Any) -> None:
    ends = harness.here(make(apply=apply), models.linear(), sender={"model": models.linear(2.0)})
    async with ends as (sender, receiver):
        with harness.read_elsewhere(receiver):
            handle = await harness.stage(sender, receiver)
            receiver.model = None
        await harness.until(lambda: receiver.version == 0)
        if apply == "manual":
            assert receiver.apply_pending() is None
        assert receiver.staged_version == 2
        receiver.model = models.linear()
        if apply == "manual":
            assert receiver.apply_pending() == 2
        assert models.holds(receiver, 2.0)
        assert (await handle).acked == {0}


@both
async def test_a_model_that_is_refused_is_nobodys_target(make: Any) -> None:
    """While updates come and forwards run in threads."""
    ends = harness.here(make(), models.linear(), sender={"model": models.linear(1.0)})
    async with ends as (sender, receiver):
        done = False

        async def compute() -> None:
            while not done:
                await asyncio.to_thread(receiver.model, torch.ones(4))

        async def send() -> None:
            while not done:
                assert (await sender.send(timeout=harness.PATIENCE)).acked == {0}

        working = asyncio.gather(compute(), compute(), send())
        for _ in range(50):
            receiver.model = fitting = models.linear()
            with pytest.raises(aiosync.ApplyError):
                receiver.model = models.wide()
            assert receiver.model is fitting
            await asyncio.sleep(0)
        done = True
        await working
        assert models.holds(receiver, 1.0)
