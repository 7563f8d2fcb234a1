"""What a receiver makes of its model: manual apply, copies, changes of the model, no model at all.

What every receiver does (waiting, versions, late models) is in the contract suite.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

both = pytest.mark.parametrize("make", harness.SCHEMES)
pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


@both
async def test_apply_copy_keeps_the_addresses(make: Any) -> None:
    target, options = models.batch_norm(), {"model": models.batch_norm()}
    addresses = [parameter.data_ptr() for parameter in target.parameters()]
    async with harness.here(make(apply_copy=True), target, sender=options) as (sender, receiver):
        for value in range(5):
            await harness.deliver(sender, receiver, float(value))
            assert [parameter.data_ptr() for parameter in target.parameters()] == addresses


@both
async def test_the_model_may_change_in_every_way_between_updates(make: Any) -> None:
    """Also where slots and layouts have been used before, and only the version is new."""
    source, target = models.batch_norm(), models.batch_norm()

    def another_parameter() -> None:
        target[0].weight = nn.Parameter(torch.zeros(3, 4))
        target[1] = nn.BatchNorm1d(3)

    ends = harness.here(make(strict=False), target, sender={"model": source})
    async with ends as (sender, receiver):
        for _ in range(6):
            await sender.send()
        for change in (another_parameter, target.double, target.share_memory, target.float):
            change()
            dtype = target[0].weight.dtype
            await harness.deliver(sender, receiver, 2.0)
            assert target[0].weight.dtype == dtype


@both
async def test_a_meta_model_gets_memory(make: Any) -> None:
    target, options = models.meta(), {"model": models.linear()}
    async with harness.here(make(), target, sender=options) as (sender, receiver):
        for value in (2.0, 3.0):
            await harness.deliver(sender, receiver, value)
        assert all(parameter.requires_grad for parameter in target.parameters())


@both
async def test_apply_weights_by_hand(make: Any) -> None:
    options = {"model": models.linear()}
    async with harness.here(make(), models.linear(), sender=options) as (sender, receiver):
        given = models.linear(9.0).state_dict()
        receiver.apply_weights(given)
        given["weight"].zero_()
        assert models.holds(receiver, 9.0)
        receiver.apply_weights(models.linear(8.0).state_dict(), inplace=False)
        assert models.holds(receiver, 8.0)
        with pytest.raises(aiosync.ManifestMismatch):
            receiver.apply_weights({"weight": torch.zeros(1)})
        with pytest.raises(aiosync.LocalProtocolError, match="sender side"):
            sender.apply_weights(given)
        await harness.deliver(sender, receiver, 3.0)


async def test_no_synchronisation_at_all() -> None:
    scheme = aiosync.NoWeightSyncScheme()
    other = harness.twin(scheme)
    scheme.init_on_sender(model=models.linear(), num_workers=3)
    other.init_on_receiver(model=models.linear())
    async with scheme, other:
        await scheme.connect()
        with pytest.raises(aiosync.ConfigError, match="worker_idx"):
            await other.connect(worker_idx=-3)
        await other.connect(worker_idx=2)
        report = await scheme.send()
        assert (report.version, report.acked) == (0, frozenset())
        assert (await scheme.send_nowait()) == report
        assert await other.receive(timeout=0) is None
        assert (other.worker_idx, other.version) == (2, 0)
        assert models.holds(other, -1.0)
    async with aiosync.NoWeightSyncScheme() as scheme:
        scheme.init_on_receiver(model=models.meta())
        with pytest.raises(aiosync.ConfigError, match="meta"):
            await scheme.connect()


async def test_what_no_longer_fits_raises_where_it_is_read_and_is_told_afterwards() -> None:
    target, options = models.linear(), {"model": models.linear()}
    make = aiosync.SharedMemWeightSyncScheme
    async with harness.here(make(), target, sender=options) as (sender, receiver):
        await harness.deliver(sender, receiver, 2.0)
        weight = target.weight
        target.weight = nn.Parameter(torch.full((3, 3), 7.0))
        assert (await sender.send()).acked == {0}  # nobody looked yet
        with pytest.raises(aiosync.ApplyError, match="weight"):
            target(torch.zeros(1, 4))
        assert torch.equal(target.weight, torch.full((3, 3), 7.0))
        with pytest.raises(aiosync.PartialSyncError, match="weight"):
            while await sender.wait_for_version(3, timeout=harness.PATIENCE):
                await asyncio.sleep(0.001)  # until the worker has said so
        with pytest.raises(aiosync.PartialSyncError, match="weight"):  # from now on it answers
            await sender.send()
        target.weight = weight
        await harness.deliver(sender, receiver, 4.0)
