"""What a receiver makes of its model: copies, changes, refusals, another model, none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
import aiosync.sync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]

both = pytest.mark.parametrize("make", harness.SCHEMES)


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
        for wrong in (0, True, "2", None):
            with pytest.raises(aiosync.ConfigError, match="a lag must be"):
                await scheme.wait_lag_below(wrong)
        with pytest.raises(aiosync.ConfigError, match="a lag must be"):
            await scheme.send(max_lag=0)
        assert await scheme.send(max_lag=2) == report
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


# -- updates that a model cannot take -------------------------------------------------------------


answering = pytest.mark.parametrize("make", harness.ANSWERING)


@answering
async def test_a_refusal_that_no_send_waited_for_is_in_the_next_report_of_its_worker(
    make: Any,
) -> None:
    targets = [models.linear(), models.linear()]
    options = {"model": models.linear()}
    async with harness.crowd(make(require=1), targets, sender=options) as (sender, others):
        targets[1].double()
        async with others[1].reading():
            refused = await sender.send()
        assert (refused.acked, refused.failed) == ({0}, {})
        with pytest.raises(aiosync.PartialSyncError):
            await sender.wait_for_version(refused.version, timeout=harness.PATIENCE)
        assert not (await sender.send(worker_ids=0)).failed  # which is about another one
        targets[1].float()
        async with others[1].reading():  # of who has answered already, nothing older is told
            report = await sender.send()
        assert isinstance(report.failed[1], aiosync.ApplyError)
        await sender.wait_for_version(sender.version, timeout=harness.PATIENCE)
        assert not (await sender.send()).failed  # told once


@answering
async def test_a_refusal_is_one_line_in_the_log_of_the_worker(make: Any, caplog: Any) -> None:
    caplog.set_level("INFO", "aiosync")
    target = models.linear(2.0)
    async with harness.here(make(), target, sender={"model": models.linear()}) as (sender, worker):
        target.double()
        with pytest.raises(aiosync.PartialSyncError):
            await sender.send()
        with pytest.raises(aiosync.ApplyError) as caught:
            await worker.wait_for_version(2, timeout=harness.PATIENCE)
        assert type(caught.value.__cause__) is aiosync.ManifestMismatch
        assert caught.value.__cause__.__cause__ is None
    texts = [each.getMessage() for each in caplog.records if each.phase == "refused"]
    [text] = [each for each in texts if each.startswith("policy: version 2 was refused: ")]
    assert "refused: ManifestMismatch: the weights do not" in text
    assert not any("\n" in each for each in texts)


@answering
async def test_waiting_for_a_version_that_was_refused_names_the_worker(make: Any) -> None:
    targets = [models.linear(), models.linear()]
    async with harness.crowd(make(), targets, sender={"model": models.linear()}) as (sender, _):
        targets[1].double()
        handle = sender.send_nowait()
        for waiting in (sender.wait_for_version(2), handle, sender.wait_for_version(2)):
            with pytest.raises(aiosync.PartialSyncError) as caught:
                await waiting
            assert (caught.value.failed.keys(), caught.value.acked) == ({1}, {0})
        assert await sender.wait_for_version(1, timeout=harness.PATIENCE)  # which both have
        targets[1].float()
        newer = sender.send_nowait()
        # What is on its way may be what is waited for: the older refusal does not count.
        assert await sender.wait_for_version(2, timeout=harness.PATIENCE) > 2
        await newer


# -- another model has the guard and the weights at once, or there is an error --------------------


applies = pytest.mark.parametrize("apply", ["auto", "manual"])


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
async def test_a_worker_that_joins_before_there_are_weights_says_so(make: Any, caplog: Any) -> None:
    with caplog.at_level("INFO", logger="aiosync"):
        async with harness.here(make(), models.linear(), sender={"model": None}) as (_, receiver):
            assert (receiver.version, receiver.epoch) == (0, 0)
    assert "joined the trainer, which has no weights yet" in caplog.text
