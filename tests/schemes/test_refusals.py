"""Updates that a model cannot take: the sender learns why, and the model stays as it was."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import torch

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

both = pytest.mark.parametrize("make", harness.SCHEMES)
pytestmark = pytest.mark.asyncio


def _bits(model) -> dict[str, bytes]:
    return {
        name: value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


@both
@pytest.mark.parametrize("apply_copy", [False, True])
async def test_wrong_shape(make, apply_copy) -> None:
    source, target = models.linear(), models.linear()
    models.fill(source, 1.0)
    scheme = make(apply_copy=apply_copy)
    async with harness.here(scheme, target, sender={"model": source}) as (sender, receiver):
        before, kept = _bits(target), target.weight
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await sender.send(models.wide())
        error = caught.value.failed[0]
        assert isinstance(error, aiosync.ApplyError)
        assert (error.worker_idx, error.version, error.remote_type) == (0, 2, "ManifestMismatch")
        for name in ("weight", "bias"):
            assert name in str(error)
        assert "[2, 4]" in str(error) or "(2, 4)" in str(error)
        assert _bits(target) == before
        assert target.weight is kept
        assert (receiver.version, receiver.lag) == (1, 1)
        with pytest.raises(aiosync.ApplyError, match="ManifestMismatch"):
            await receiver.wait_for_version(2)
        models.fill(source, 3.0)
        assert (await sender.send()).acked == {0}
        assert models.filled(target, 3.0)
        assert (receiver.version, receiver.lag) == (3, 0)


@both
@pytest.mark.parametrize("apply_copy", [False, True])
async def test_set_extra_state_raises(make, apply_copy) -> None:
    source, target = models.extra(), models.extra()
    scheme = make(apply_copy=apply_copy)
    models.fill(source, 1.0)
    async with harness.here(scheme, target, sender={"model": source}) as (sender, receiver):
        source.counter = 4
        await sender.send()
        assert target.counter == 4
        before = _bits(target)
        models.fill(source, 2.0)
        source.counter = -7
        with pytest.raises(aiosync.PartialSyncError, match="counter -7 is no good here") as caught:
            await sender.send()
        assert caught.value.failed[0].remote_type == "RuntimeError"
        assert _bits(target) == before
        assert target.counter == 4
        assert receiver.version == 2
        source.counter = 8
        assert (await sender.send()).acked == {0}
        assert target.counter == 8
        assert models.filled(target, 2.0)


@both
async def test_an_extra_state_that_no_header_can_carry(make) -> None:
    source, target = models.extra(), models.extra()
    models.fill(source, 1.0)
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        models.fill(source, 2.0)
        source.counter = "x" * (17 * 2**20)
        with pytest.raises(aiosync.PartialSyncError, match="header") as caught:
            await sender.send()
        assert isinstance(caught.value.failed[0], aiosync.LocalProtocolError)
        assert models.filled(target, 1.0)
        source.counter = 3  # the link is as it was
        assert (await sender.send()).acked == {0}
        assert models.filled(target, 2.0)
        assert (target.counter, receiver.version) == (3, 3)


@both
@pytest.mark.slow
async def test_the_refusal_of_a_worker_process(make) -> None:
    scheme, source = make(), models.extra()
    models.fill(source, 1.0)
    scheme.init_on_sender(model=source, num_workers=2)
    async with harness.workers(scheme, models.extra, 2) as crew:
        before = await crew[0].call(harness.weights)
        models.fill(source, 2.0)
        source.counter = -1
        with pytest.raises(aiosync.PartialSyncError, match="counter -1 is no good here") as caught:
            await scheme.send()
        assert set(caught.value.failed) == {0, 1}
        after = await crew[0].call(harness.weights)
        assert torch.equal(before["layer.weight"], after["layer.weight"])
        source.counter = 1
        assert (await scheme.send()).acked == {0, 1}
        assert ((await crew[1].call(harness.weights))["layer.weight"] == 2.0).all()


@both
async def test_initial_weights_that_do_not_fit(make) -> None:
    scheme = make()
    with pytest.raises((aiosync.ApplyError, aiosync.PartialSyncError), match="weight"):
        async with harness.here(scheme, models.linear(), sender={"model": models.wide()}):
            pass


@both
async def test_a_dtype_that_differs(make) -> None:
    source, target = models.linear().double(), models.linear()
    async with harness.here(make(), target, sender={}) as (sender, _):
        with pytest.raises(aiosync.PartialSyncError, match="float64"):
            await sender.send(source)
    target = models.linear()
    async with harness.here(make(strict=False), target, sender={}) as (sender, _):
        models.fill(source, 2.5)
        await sender.send(source)
        assert models.filled(target, 2.5)
        assert target.weight.dtype == torch.float32


@both
async def test_missing_and_unexpected_names(make) -> None:
    source = {"weight": torch.ones(2, 4), "scale": torch.ones(1)}
    async with harness.here(make(), models.linear(), sender={}) as (sender, _):
        with pytest.raises(aiosync.PartialSyncError, match="missing: bias.*unexpected: scale"):
            await sender.send(source)
    target = models.linear()
    async with harness.here(make(strict=False), target, sender={}) as (sender, _):
        await sender.send(source)
        assert (target.weight == 1.0).all()
        assert (target.bias == -1.0).all()


@both
async def test_a_refusal_that_no_send_waited_for_is_in_the_next_report(make) -> None:
    targets, source = [models.linear(), models.linear()], models.linear()
    async with harness.crowd(make(require=1), targets, sender={"model": source}) as (sender, _):
        targets[1].double()
        told = 0
        for _ in range(10):
            report = await sender.send()
            assert 0 in report.acked
            if error := report.failed.get(1):
                assert isinstance(error, aiosync.ApplyError)
                assert "ManifestMismatch" in str(error)
                told += 1
            await asyncio.sleep(0.02)  # its answer arrives after the send has returned
        assert told >= 9
        targets[1].float()
        await sender.send()
        await sender.wait_for_version(sender.version, timeout=harness.PATIENCE)
        report = await sender.send()
        assert not report.failed


@both
@pytest.mark.parametrize("early", [True, False])
async def test_waiting_for_a_version_that_was_refused_names_the_worker(make, early) -> None:
    targets = [models.linear(), models.linear()]
    async with harness.crowd(make(), targets, sender={"model": models.linear()}) as (sender, _):
        targets[1].double()
        handle = sender.send_nowait()
        if not early:
            with pytest.raises(aiosync.PartialSyncError):
                await handle
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await sender.wait_for_version(handle.version, timeout=harness.PATIENCE)
        assert caught.value.failed.keys() == {1}
        assert caught.value.acked == {0}
        with pytest.raises(aiosync.PartialSyncError):
            await handle
        targets[1].float()
        newer = sender.send_nowait()
        # What is on its way may be what is waited for: the older refusal does not count.
        assert await sender.wait_for_version(handle.version, timeout=harness.PATIENCE) > 2
        await newer


@both
async def test_a_version_that_everybody_has_is_there_whatever_came_after_it(make) -> None:
    async with harness.here(make(), models.linear(), sender={"model": models.linear()}) as pair:
        sender, _ = pair
        with pytest.raises(aiosync.PartialSyncError):
            await sender.send(models.wide())
        assert await sender.wait_for_version(1, timeout=harness.PATIENCE) == 1


@both
@pytest.mark.parametrize("wait", ["wait_for_version", "wait_staged"])
async def test_the_last_worker_leaves_while_somebody_waits(make, wait) -> None:
    for turns in range(4):
        source = models.linear()
        async with harness.here(make(), models.linear(), sender={"model": source}) as pair:
            sender, receiver = pair
            receiver.abort()
            for _ in range(turns):
                await asyncio.sleep(0)
            with contextlib.suppress(aiosync.RecvTimeout):  # it has gone already
                assert await getattr(sender, wait)(1, timeout=0.05) == 1


@both
async def test_a_late_refusal_waits_for_a_report_of_its_worker_and_goes_with_it(make) -> None:
    targets = [models.linear(), models.linear()]
    sender = {"model": models.linear()}
    async with harness.crowd(make(require=1), targets, sender=sender) as (sender, others):
        untold = sender._sender._untold

        async def refuse() -> None:
            targets[1].double()
            async with others[1].reading():
                await sender.send()
            await harness.until(lambda: 1 in untold)

        await refuse()
        assert not (await sender.send(worker_ids=0)).failed
        assert 1 in untold  # nobody has heard of it yet
        targets[1].float()
        handle = sender.send_nowait()
        await sender.wait_for_version(handle.version, timeout=harness.PATIENCE)
        await handle
        await harness.until(lambda: not untold)  # it is past that
        await refuse()
        await others[1].aclose()
        await harness.until(lambda: 1 not in sender.worker_versions)
        late = harness.twin(sender)
        late.init_on_receiver(model_id="policy", model=models.linear(), worker_idx=1)
        try:
            await late.connect(timeout=harness.PATIENCE)
            assert not (await sender.send()).failed  # another worker is 1 now
        finally:
            await late.aclose()
