"""Another model for a connected receiver: it has the guard and the weights at once, or an error."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from collections.abc import AsyncIterator

import pytest
import torch
from torch import nn

import aiosync
import aiosync.sync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

both = pytest.mark.parametrize("make", harness.SCHEMES)
copies = pytest.mark.parametrize("apply_copy", [False, True])
pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


def _hooks(model: nn.Module) -> int:
    return len(model._forward_pre_hooks) + len(model._forward_hooks)


@contextlib.asynccontextmanager
async def _read_elsewhere(receiver: aiosync.WeightSyncScheme) -> AsyncIterator[None]:
    """Another thread is inside of a read meanwhile."""
    entered, leave = threading.Event(), threading.Event()

    def read() -> None:
        with receiver.reading():
            entered.set()
            assert leave.wait(harness.PATIENCE)

    reading = asyncio.ensure_future(asyncio.to_thread(read))
    assert await asyncio.to_thread(entered.wait, harness.PATIENCE)
    try:
        yield
    finally:
        leave.set()
        await reading


class _Owner:
    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy


@both
@copies
@pytest.mark.parametrize("apply", ["auto", "manual"])
async def test_it_has_the_guard_and_the_weights_at_once(make, apply_copy, apply) -> None:
    source, old, new = models.batch_norm(), models.batch_norm(), models.batch_norm()
    models.fill(source, 2.0)
    source[1].running_mean.fill_(7.0)
    scheme = make(apply=apply, apply_copy=apply_copy)
    async with harness.here(scheme, old, sender={"model": source}) as (sender, receiver):
        assert _hooks(old) == 2
        receiver.model = new
        assert receiver.model is new
        assert models.filled(new, 2.0)
        assert (new[1].running_mean == 7.0).all()
        assert (receiver.version, _hooks(new), _hooks(old)) == (1, 2, 0)
        models.fill(source, 3.0)
        handle = sender.send_nowait()
        assert (await receiver.receive()).version == 2
        assert (await handle).acked == {0}
        assert models.filled(new, 3.0)
        assert models.filled(old, 2.0)
        for _ in range(3):  # no memory is kept for the old model
            handle = sender.send_nowait()
            await receiver.receive()
            await handle
        arena = getattr(sender, "_arena", None)
        assert arena is None or arena.num_slots <= 3
        receiver.model = new  # the same again
        assert _hooks(new) == 2
    assert _hooks(new) == 0
    assert models.filled(new, 3.0)


@both
@copies
async def test_it_does_not_fit(make, apply_copy) -> None:
    source, old = models.linear(), models.linear()
    models.fill(source, 2.0)
    async with harness.here(make(apply_copy=apply_copy), old, sender={"model": source}) as (
        sender,
        receiver,
    ):
        new = models.wide()
        with pytest.raises(aiosync.ApplyError, match="version 1 does not fit.*weight") as caught:
            receiver.model = new
        assert (caught.value.version, caught.value.remote_type) == (1, "ManifestMismatch")
        assert receiver.model is old
        assert (_hooks(old), _hooks(new)) == (2, 0)
        assert models.filled(new, -1.0)
        models.fill(source, 3.0)
        assert (await sender.send()).acked == {0}
        assert models.filled(old, 3.0)


@both
@copies
async def test_it_refuses_its_extra_state(make, apply_copy) -> None:
    class Refuses(models.Extra):
        def set_extra_state(self, state) -> None:
            raise KeyError("not here")

    source, old, new = models.extra(), models.extra(), Refuses()
    models.fill(source, 2.0)
    before = new.layer.weight.clone()
    async with harness.here(make(apply_copy=apply_copy), old, sender={"model": source}) as (
        sender,
        receiver,
    ):
        with pytest.raises(aiosync.ApplyError, match="not here"):
            receiver.model = new
        assert receiver.model is old
        assert torch.equal(new.layer.weight, before)
        assert models.filled(old, 2.0)
        models.fill(source, 3.0)
        assert (await sender.send()).acked == {0}
        assert models.filled(old, 3.0)


@both
@copies
async def test_another_shape_after_none(make, apply_copy) -> None:
    source, old, new = models.linear(), models.linear(), models.wide()
    models.fill(source, 2.0)
    async with harness.here(make(apply_copy=apply_copy), old, sender={"model": source}) as (
        sender,
        receiver,
    ):
        receiver.model = None
        assert (receiver.version, _hooks(old)) == (0, 0)
        assert models.filled(old, 2.0)
        assert await receiver.receive(timeout=0) is None
        receiver.model = new
        assert (receiver.version, _hooks(new)) == (0, 2)
        assert models.filled(new, -1.0)
        other = models.wide()
        models.fill(other, 3.0)
        assert (await sender.send(other)).acked == {0}
        assert models.filled(new, 3.0)
        assert (await receiver.receive()).version == receiver.version == 2


@both
async def test_a_model_given_late_that_does_not_fit(make) -> None:
    source, good, bad = models.linear(), models.linear(), models.wide()
    models.fill(source, 2.0)
    async with harness.here(make(), None, sender={"model": source}) as (_, receiver):
        with pytest.raises(aiosync.ApplyError, match="version 1 does not fit.*weight"):
            receiver.model = bad
        assert receiver.model is None
        assert (receiver.version, _hooks(bad)) == (0, 0)
        receiver.model = good
        assert (receiver.version, _hooks(good)) == (1, 2)
        assert models.filled(good, 2.0)


@both
@copies
async def test_another_context(make, apply_copy) -> None:
    source = models.linear()
    models.fill(source, 2.0)
    first, second, third = (_Owner(models.linear()) for _ in range(3))
    bad = _Owner(models.wide())
    async with harness.here(
        make(apply_copy=apply_copy), None, sender={"model": source}, receiver={"context": first}
    ) as (sender, receiver):
        assert models.filled(first.policy, 2.0)
        receiver.context = second
        assert models.filled(second.policy, 2.0)
        assert (_hooks(first.policy), _hooks(second.policy)) == (0, 2)
        with pytest.raises(aiosync.ApplyError, match="does not fit"):
            receiver.context = bad
        assert receiver.context is second
        # Replaced without a word: the next update goes there.
        second.policy, old = third.policy, second.policy
        models.fill(source, 3.0)
        await sender.send()
        assert models.filled(third.policy, 3.0)
        assert models.filled(old, 2.0)
        assert (_hooks(old), _hooks(third.policy)) == (0, 2)
        second.policy = bad.policy
        with pytest.raises(aiosync.PartialSyncError, match="weight"):
            await sender.send()
        assert receiver.version == 0  # the model that it has now has none
        assert (await sender.send(bad.policy)).acked == {0}
        receiver.context = None
        assert (receiver.version, _hooks(bad.policy)) == (0, 0)


@both
@copies
async def test_other_weights(make, apply_copy) -> None:
    def weights() -> dict[str, torch.Tensor]:
        return {"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}

    source, old, new = models.linear(), weights(), weights()
    models.fill(source, 2.0)
    scheme = make(guard="reading", apply_copy=apply_copy)
    init = {"weights": old, "model": None}
    async with harness.here(scheme, None, sender={"model": source}, receiver=init) as (
        sender,
        receiver,
    ):
        receiver.weights = new
        assert all((value == 2.0).all() for value in new.values())
        models.fill(source, 3.0)
        await sender.send()
        assert all((value == 3.0).all() for value in new.values())
        assert all((value == 2.0).all() for value in old.values())


@both
async def test_a_wrapper_around_the_same_parameters(make) -> None:
    source, target = models.linear(), models.linear()
    models.fill(source, 2.0)
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        views = [parameter.data_ptr() for parameter in target.parameters()]
        receiver.model = nn.DataParallel(target)
        assert [parameter.data_ptr() for parameter in target.parameters()] == views
        for value in (3.0, 4.0, 5.0):
            models.fill(source, value)
            await sender.send()
            assert models.filled(target, value)


@both
@pytest.mark.parametrize("apply", ["auto", "manual"])
async def test_while_a_forward_runs_in_another_thread(make, apply) -> None:
    source, old, new = models.linear(), models.linear(), models.linear()
    models.fill(source, 2.0)
    async with harness.here(make(apply=apply), old, sender={"model": source}) as (
        sender,
        receiver,
    ):
        inside, go_on = threading.Event(), threading.Event()

        def slow(module, args) -> None:
            inside.set()
            assert go_on.wait(harness.PATIENCE)

        hook = old.register_forward_pre_hook(slow)
        forward = asyncio.ensure_future(asyncio.to_thread(old, torch.zeros(4)))
        try:
            await asyncio.to_thread(inside.wait, harness.PATIENCE)
            with pytest.raises(aiosync.ApplyError, match="does not fit"):
                receiver.model = models.wide()
            assert receiver.model is old
            receiver.model = new
            assert _hooks(new) == 2
            assert models.filled(new, -1.0)
            handles = [sender.send_nowait()]  # comes while it waits
            await harness.until(lambda: receiver._receiver.has_staged)
            handles.append(sender.send_nowait())
            await harness.until(lambda: receiver._receiver.inbox.newest == 3)
        finally:
            go_on.set()
            assert (await forward).tolist() == [2.0, 2.0]
            hook.remove()
        await harness.until(lambda: models.filled(new, 2.0))
        if apply == "manual":
            assert receiver.version == 1
            assert receiver.apply_pending() == 3
        for handle in handles:
            await handle
        assert (await receiver.receive()).version == receiver.version == 3
        assert (_hooks(old), _hooks(new)) == (0, 2)
        models.fill(source, 3.0)
        handle = sender.send_nowait()
        await receiver.receive()
        await handle
        assert models.filled(new, 3.0)
        assert models.filled(old, 2.0)


@both
@pytest.mark.slow
async def test_closed_before_the_forward_ended(make) -> None:
    source, old, new = models.linear(), models.linear(), models.linear()
    models.fill(source, 2.0)
    async with harness.here(make(), old, sender={"model": source}) as (_, receiver):
        async with _read_elsewhere(receiver):
            receiver.model = new
            receiver.abort()
        assert (_hooks(old), _hooks(new)) == (0, 0)
        assert models.filled(old, 2.0)


@both
async def test_from_another_thread(make) -> None:
    source, old, new = models.linear(), models.linear(), models.linear()
    models.fill(source, 2.0)
    async with harness.here(make(), old, sender={"model": source}) as (_, receiver):

        def replace(model: nn.Module) -> bool:
            receiver.model = model
            return models.filled(model, 2.0)

        assert await asyncio.to_thread(replace, new)
        with pytest.raises(aiosync.ApplyError, match="does not fit"):
            await asyncio.to_thread(replace, models.wide())
        assert receiver.model is new


def _between_two_runs(make) -> None:
    source, old, new = models.linear(), models.linear(), models.linear()
    models.fill(source, 2.0)
    with asyncio.Runner() as runner:
        ends = harness.here(make(), old, sender={"model": source})
        _, receiver = runner.run(ends.__aenter__())
        receiver.model = new
        assert models.filled(new, 2.0)
        with pytest.raises(aiosync.ApplyError, match="does not fit"):
            receiver.model = models.wide()
        runner.run(ends.__aexit__(None, None, None))


@both
async def test_while_the_loop_does_not_run(make) -> None:
    await asyncio.to_thread(_between_two_runs, make)


def _blocking() -> None:
    source, old, new = models.linear(), models.linear(), models.linear()
    models.fill(source, 2.0)
    with aiosync.sync.SharedMemWeightSyncScheme(timeout=harness.PATIENCE) as sender:
        sender.init_on_sender(model=source)
        sender.connect()
        with copy.copy(sender) as receiver:
            receiver.init_on_receiver(model=old)
            receiver.connect()
            receiver.model = new
            assert models.filled(new, 2.0)
            with pytest.raises(aiosync.ApplyError, match="does not fit"):
                receiver.model = models.wide()
            assert receiver.model is new
            with receiver.reading():
                receiver.model = old
                assert _hooks(old) == 2
            assert (_hooks(old), _hooks(new)) == (2, 0)
            models.fill(source, 3.0)
            sender.send()
            assert models.filled(old, 3.0)
            assert models.filled(new, 2.0)


async def test_the_facade() -> None:
    await asyncio.to_thread(_blocking)


@both
@pytest.mark.parametrize("apply", ["auto", "manual"])
async def test_what_waits_for_a_model_is_not_lost(make, apply) -> None:
    """Also where it waited for a forward pass of the old one, and by hand."""
    source, old, new = models.linear(), models.linear(), models.linear()
    models.fill(source, 1.0)
    scheme = make(apply=apply)
    async with harness.here(scheme, old, sender={"model": source}) as (sender, receiver):
        models.fill(source, 2.0)
        async with _read_elsewhere(receiver):
            handle = sender.send_nowait()
            await receiver.wait_staged(2, timeout=harness.PATIENCE)
            receiver.model = None
        await harness.until(lambda: receiver.version == 0)
        if apply == "manual":
            assert receiver.apply_pending() is None
        assert receiver.staged_version == 2
        receiver.model = new
        if apply == "manual":
            assert receiver.apply_pending() == 2
        assert models.filled(new, 2.0)
        assert (await handle).acked == {0}


@both
async def test_a_model_that_is_refused_is_nobodys_target(make) -> None:
    """While updates come and forwards run in threads."""
    source, ends = models.linear(), asyncio.get_running_loop().time() + 1.5
    models.fill(source, 1.0)
    async with harness.here(make(), models.linear(), sender={"model": source}) as (
        sender,
        receiver,
    ):
        goes_on = lambda: asyncio.get_running_loop().time() < ends  # noqa: E731 - short
        inputs = torch.ones(source.in_features)

        async def compute() -> None:
            while goes_on():
                await asyncio.to_thread(receiver.model, inputs)

        async def assign() -> None:
            while goes_on():
                receiver.model = fitting = models.linear()
                with pytest.raises(aiosync.ApplyError):
                    receiver.model = models.wide()
                assert receiver.model is fitting
                await asyncio.sleep(0.001)

        async def send() -> None:
            while goes_on():
                assert (await sender.send(timeout=harness.PATIENCE)).acked == {0}

        await asyncio.gather(compute(), compute(), assign(), send())
        await harness.until(lambda: models.filled(receiver.model, 1.0))


@both
async def test_back_to_the_old_model_before_it_was_replaced(make) -> None:
    source, old, new = models.linear(), models.linear(), models.linear()
    models.fill(source, 1.0)
    async with harness.here(make(), old, sender={"model": source}) as (sender, receiver):
        async with _read_elsewhere(receiver):
            receiver.model = new
            receiver.model = old
        models.fill(source, 2.0)
        assert (await sender.send()).acked == {0}
        assert (models.filled(old, 2.0), models.filled(new, -1.0)) == (True, True)
        assert (_hooks(old), _hooks(new)) == (2, 0)
