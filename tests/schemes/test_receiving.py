"""What a receiver offers: waiting, versions, manual apply, guards, late and changing models."""

from __future__ import annotations

import asyncio
import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

both = pytest.mark.parametrize("make", harness.SCHEMES)
pytestmark = pytest.mark.asyncio


@both
async def test_receive(make) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        assert await receiver.receive(timeout=0) is None  # the initial weights are not news
        assert await receiver.receive(timeout=0.01) is None
        waiting = asyncio.ensure_future(receiver.receive())
        models.fill(source, 2.0)
        report = await sender.send()
        update = await waiting
        assert (update.epoch, update.version) == (report.epoch, report.version)
        assert update.model_id == "policy"
        assert (update.weights["weight"] == 2.0).all()
        assert await receiver.receive(timeout=0) is None
        await sender.send()
        last = await sender.send()
        assert (await receiver.receive()).version == last.version  # the newest, once
        assert await receiver.receive(timeout=0) is None


@both
async def test_a_closed_trainer_ends_receive(make) -> None:
    source, target = models.linear(), models.linear()
    models.fill(source, 2.0)
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        waiting = asyncio.ensure_future(receiver.receive())
        await asyncio.sleep(0)
        await sender.aclose()
        with pytest.raises(aiosync.PeerClosed, match="trainer"):
            await waiting
        with pytest.raises(aiosync.PeerClosed):
            await receiver.receive(timeout=0)
        assert models.filled(target, 2.0)
        assert target(torch.zeros(4)).tolist() == [2.0, 2.0]


@both
async def test_wait_for_version(make) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        assert await receiver.wait_for_version(1) == 1
        waiting = asyncio.ensure_future(receiver.wait_for_version(3))
        await sender.send()
        assert not waiting.done()
        await sender.send()
        assert await waiting == 3
        with pytest.raises(aiosync.RecvTimeout, match="version 9 was not applied"):
            await receiver.wait_for_version(9, timeout=0.01)
        assert receiver.lag == 0


@both
async def test_manual_apply_takes_the_newest_when_it_is_asked_for(make) -> None:
    source, target = models.linear(), models.linear()
    models.fill(source, 1.0)
    scheme = make(apply="manual")
    async with harness.here(scheme, target, sender={"model": source}) as (sender, receiver):
        assert models.filled(target, 1.0)  # connect() is such a boundary
        assert receiver.apply_pending() is None
        handles = []
        for value in (2.0, 3.0, 4.0):
            models.fill(source, value)
            handles.append(sender.send_nowait())
        await harness.until(lambda: receiver._receiver.inbox.newest == 4)
        assert models.filled(target, 1.0)
        assert (receiver.version, receiver.lag) == (1, 3)
        with receiver.reading(), pytest.raises(aiosync.LocalProtocolError, match="between two"):
            receiver.apply_pending()
        assert receiver.apply_pending() == 4
        assert models.filled(target, 4.0)
        assert (receiver.version, receiver.lag) == (4, 0)
        reports = [await handle for handle in handles]
        assert [report.acked for report in reports[:2]] == [frozenset(), frozenset()]
        assert [set(report.skipped) for report in reports] == [{0}, {0}, set()]
        assert reports[2].acked == {0}
        assert (await receiver.receive()).version == 4  # the same, as news
        models.fill(source, 5.0)
        sending = asyncio.ensure_future(sender.send())
        assert (await receiver.receive()).version == 5
        assert (await sending).acked == {0}
        assert models.filled(target, 5.0)


@both
async def test_manual_apply_that_fails(make) -> None:
    source, target = models.linear(), models.linear()
    scheme = make(apply="manual")
    async with harness.here(scheme, target, sender={"model": source}) as (sender, receiver):
        handle = sender.send_nowait(models.wide())
        await harness.until(lambda: receiver._receiver.has_staged)
        with pytest.raises(aiosync.ApplyError, match="weight"):
            receiver.apply_pending()
        with pytest.raises(aiosync.PartialSyncError):
            await handle
        handle = sender.send_nowait(models.wide())
        with pytest.raises(aiosync.ApplyError, match="weight"):
            await receiver.receive()
        with pytest.raises(aiosync.PartialSyncError):
            await handle
        sending = asyncio.ensure_future(sender.send())
        assert (await receiver.receive()).version == 4
        await sending


@both
async def test_apply_copy_keeps_the_addresses(make) -> None:
    source, target = models.batch_norm(), models.batch_norm()
    scheme = make(apply_copy=True)
    addresses = [parameter.data_ptr() for parameter in target.parameters()]
    async with harness.here(scheme, target, sender={"model": source}) as (sender, _):
        for value in range(5):
            models.fill(source, float(value))
            await sender.send()
            assert models.filled(target, float(value))
            assert [parameter.data_ptr() for parameter in target.parameters()] == addresses


@both
async def test_a_dict_of_weights_is_kept_up_to_date(make) -> None:
    source = models.linear()
    target = {"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}
    scheme = make(guard="reading")
    init = {"weights": target, "model": None}
    async with harness.here(scheme, None, sender={"model": source}, receiver=init) as (
        sender,
        receiver,
    ):
        models.fill(source, 2.0)
        async with receiver.reading():
            handle = sender.send_nowait()
            await harness.until(lambda: receiver._receiver.has_staged)
            assert (target["weight"] == -1.0).all()
        assert (target["weight"] == 2.0).all()
        assert (target["bias"] == 2.0).all()
        await handle


@both
async def test_a_model_given_late(make) -> None:
    source, target = models.linear(), models.linear()
    models.fill(source, 2.0)
    async with harness.here(make(), None, sender={"model": source}) as (sender, receiver):
        assert receiver.version == 0
        receiver.model = target
        assert await receiver.wait_for_version(1) == 1
        assert models.filled(target, 2.0)
        models.fill(source, 3.0)
        assert (await sender.send()).acked == {0}
        assert models.filled(target, 3.0)


@both
async def test_the_model_may_be_replaced_and_changed(make) -> None:
    source, target = models.batch_norm(), models.batch_norm()
    scheme = make(strict=False)
    async with harness.here(scheme, target, sender={"model": source}) as (sender, receiver):
        old = target
        receiver.model = target = models.batch_norm()
        models.fill(source, 2.0)
        await sender.send()
        assert models.filled(target, 2.0)
        assert not models.filled(old, 2.0)
        target[0].weight = nn.Parameter(torch.zeros(3, 4))  # re-created
        target[1] = nn.BatchNorm1d(3)
        models.fill(source, 3.0)
        await sender.send()
        assert models.filled(target, 3.0)
        target.double()  # cast
        models.fill(source, 4.0)
        await sender.send()
        assert models.filled(target, 4.0)
        assert target[0].weight.dtype == torch.float64
        target.to("cpu")
        target.share_memory()
        models.fill(source, 5.0)
        await sender.send()
        assert models.filled(target, 5.0)


@both
async def test_a_meta_model_gets_memory(make) -> None:
    source, target = models.linear(), models.meta()
    models.fill(source, 2.0)
    async with harness.here(make(), target, sender={"model": source}) as (sender, _):
        assert models.filled(target, 2.0)
        models.fill(source, 3.0)
        assert models.filled(target, 2.0)
        await sender.send()
        assert models.filled(target, 3.0)
        assert all(parameter.requires_grad for parameter in target.parameters())


@both
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
async def test_tied_parameters_stay_tied(make, strategy) -> None:
    source, target = models.Tied(), models.Tied()
    async with harness.here(make(strategy), target, sender={"model": source}) as (sender, _):
        for value in (2.0, 3.0):
            models.fill(source, value)
            await sender.send()
            assert target.first.weight is target.second.weight
            assert models.filled(target, value)


@both
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
async def test_buffers_and_extra_state_travel(make, strategy) -> None:
    source = nn.Sequential(models.batch_norm(), models.extra())
    target = nn.Sequential(models.batch_norm(), models.extra())
    async with harness.here(make(strategy), target, sender={"model": source}) as (sender, _):
        source[0](torch.randn(8, 4))
        source[1].counter = 12
        await sender.send()
        assert torch.equal(target[0][1].running_mean, source[0][1].running_mean)
        assert target[0][1].num_batches_tracked == 1
        assert target[1].counter == 12
        target[0](torch.randn(8, 4))  # the worker's statistics are its own
        assert source[0][1].num_batches_tracked == 1
        await sender.send()
        assert target[0][1].num_batches_tracked == 1


@both
async def test_several_schemes_side_by_side(make) -> None:
    sources = {"policy": models.linear(), "critic": models.wide()}
    targets = {"policy": models.linear(), "critic": models.wide()}
    init = {"model_id": "critic", "model": sources["critic"]}
    async with (
        harness.here(make(), targets["policy"], sender={"model": sources["policy"]}) as one,
        harness.here(
            make(), targets["critic"], sender=init, receiver={"model_id": "critic"}
        ) as two,
    ):
        for name, (sender, receiver) in {"policy": one, "critic": two}.items():
            models.fill(sources[name], 2.0)
            await sender.send()
            assert models.filled(targets[name], 2.0)
            assert receiver.model_id == name


@both
async def test_many_more_versions_than_slots(make) -> None:
    source, target = models.linear(), models.linear()
    scheme = make()
    async with harness.here(scheme, target, sender={"model": source}) as (sender, receiver):
        for value in range(200):
            models.fill(source, float(value))
            report = await sender.send()
            assert models.filled(target, float(value))
        assert receiver.version == report.version == 201
        arena = getattr(sender, "_arena", None)
        assert arena is None or arena.num_slots <= 3


@both
async def test_apply_weights_by_hand(make) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        given = {"weight": torch.full((2, 4), 9.0), "bias": torch.full((2,), 9.0)}
        receiver.apply_weights(given)
        assert models.filled(target, 9.0)
        given["weight"].zero_()
        assert models.filled(target, 9.0)
        receiver.apply_weights(dict(source.state_dict()), inplace=False)
        with pytest.raises(aiosync.ManifestMismatch):
            receiver.apply_weights({"weight": torch.zeros(1)})
        with pytest.raises(aiosync.LocalProtocolError, match="sender side"):
            sender.apply_weights(given)
        models.fill(source, 3.0)
        await sender.send()
        assert models.filled(target, 3.0)


@both
async def test_the_model_keeps_its_weights_after_closing(make) -> None:
    source, target = models.linear(), models.linear()
    models.fill(source, 2.0)
    async with harness.here(make(), target, sender={"model": source}) as (_sender, receiver):
        await receiver.aclose()
        await receiver.aclose()
        assert models.filled(target, 2.0)
        models.fill(target, 3.0)
        assert target(torch.zeros(4)).tolist() == [3.0, 3.0]
        assert not target._forward_pre_hooks
        assert not target._forward_hooks
        copy.deepcopy(target)
        with pytest.raises(aiosync.TransportClosed, match="copy"):
            await receiver.receive()


@both
async def test_the_context_is_not_kept_alive(make) -> None:
    class Owner:
        policy = models.linear()

    owner = Owner()
    gone = weakref.ref(owner)
    scheme = make()
    scheme.init_on_receiver(context=owner)
    assert scheme.context is owner
    assert scheme.model is owner.policy
    del owner
    gc.collect()
    assert gone() is None
    assert scheme.context is None
    await scheme.aclose()


async def test_no_synchronisation_at_all() -> None:
    scheme = aiosync.NoWeightSyncScheme()
    other = harness.twin(scheme)
    target = models.linear()
    scheme.init_on_sender(model=models.linear(), num_workers=3)
    other.init_on_receiver(model=target)
    async with scheme, other:
        await scheme.connect()
        await other.connect(worker_idx=2)
        report = await scheme.send()
        assert (report.version, report.acked) == (0, frozenset())
        assert (await scheme.send_nowait()) == report
        assert await other.receive(timeout=5) is None
        assert other.worker_idx == 2
        assert other.version == 0
        with other.reading():
            assert models.filled(target, -1.0)


async def test_no_synchronisation_of_a_meta_model() -> None:
    async with aiosync.NoWeightSyncScheme() as scheme:
        scheme.init_on_receiver(model=models.meta())
        with pytest.raises(aiosync.ConfigError, match="meta"):
            await scheme.connect()
