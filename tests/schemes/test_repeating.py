"""Updates through slots that were used before, of which only the version is new."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import torch
from torch import nn

import aiosync
from aiosync.tensors import _changes
from tests.schemes import _harness as harness
from tests.schemes import _models as models


@contextlib.asynccontextmanager
async def repeating(
    source: nn.Module, target: nn.Module
) -> AsyncIterator[tuple[aiosync.SharedMemWeightSyncScheme, aiosync.WeightSyncScheme]]:
    """A pair whose slots were all used before."""
    scheme = aiosync.SharedMemWeightSyncScheme()
    async with harness.here(scheme, target, sender={"model": source}) as (sender, receiver):
        for _ in range(6):
            await sender.send()
        yield sender, receiver


@pytest.mark.asyncio
async def test_every_one_is_applied() -> None:
    source, target = models.linear(), models.linear()
    async with repeating(source, target) as (sender, receiver):
        for value in range(20):
            models.fill(source, float(value))
            report = await sender.send()
            assert models.filled(target, float(value))
            assert receiver.version == report.version
            assert (await receiver.receive(timeout=0)).version == report.version


@pytest.mark.asyncio
async def test_behind_a_reader_it_waits() -> None:
    source, target = models.linear(), models.linear()
    async with repeating(source, target) as (sender, receiver):
        models.fill(source, 1.0)
        await sender.send()
        with receiver.reading():
            models.fill(source, 2.0)
            handle = sender.send_nowait()
            async with asyncio.timeout(harness.PATIENCE):
                while not receiver._receiver.has_staged:
                    await asyncio.sleep(0)
            assert models.filled(target, 1.0)
        assert models.filled(target, 2.0)
        await handle


@pytest.mark.asyncio
async def test_another_model_gets_it() -> None:
    source, target, other = models.linear(), models.linear(), models.linear()
    async with repeating(source, target) as (sender, receiver):
        models.fill(source, 1.0)
        await sender.send()
        receiver.model = other
        models.fill(source, 2.0)
        await sender.send()
        assert models.filled(other, 2.0)
        assert models.filled(target, 1.0)


@pytest.mark.asyncio
async def test_a_parameter_that_was_replaced_gets_it() -> None:
    source, target = models.linear(), models.linear()
    async with repeating(source, target) as (sender, _):
        target.weight = nn.Parameter(torch.zeros_like(target.weight))
        models.fill(source, 3.0)
        await sender.send()
        assert models.filled(target, 3.0)


@pytest.mark.asyncio
async def test_a_model_of_another_shape_refuses_it_and_keeps_what_it_has() -> None:
    source, target = models.linear(), models.linear()
    async with repeating(source, target) as (sender, receiver):
        weight = target.weight
        target.weight = nn.Parameter(torch.full((3, 3), 7.0))
        with pytest.raises(aiosync.PartialSyncError, match="weight"):
            await sender.send()
        assert torch.equal(target.weight, torch.full((3, 3), 7.0))
        target.weight = weight
        models.fill(source, 4.0)
        report = await sender.send()
        assert models.filled(target, 4.0)
        assert receiver.version == report.version


@pytest.mark.asyncio
async def test_a_model_that_cannot_be_looked_at_is_told_to_the_trainer() -> None:
    source, target = models.linear(), models.linear()
    async with repeating(source, target) as (sender, _):
        tables = target._parameters
        del target.__dict__["_parameters"]
        with pytest.raises(aiosync.PartialSyncError, match="_parameters"):
            await sender.send()
        target.__dict__["_parameters"] = tables
        models.fill(source, 9.0)
        await sender.send()
        assert models.filled(target, 9.0)


@pytest.mark.asyncio
async def test_a_kept_view_keeps_its_values() -> None:
    source, target = models.linear(), models.linear()
    async with repeating(source, target) as (sender, _):
        models.fill(source, 5.0)
        await sender.send()
        kept = target.weight.data
        for value in (6.0, 7.0, 8.0):
            models.fill(source, value)
            await sender.send()
            assert models.filled(target, value)
        assert torch.equal(kept, torch.full_like(kept, 5.0))


@pytest.mark.asyncio
async def test_what_ctrl_c_left_in_the_model_is_not_written_to(monkeypatch) -> None:
    source, target = models.linear(), models.linear()
    async with repeating(source, target) as (sender, receiver):
        flip = _changes.flip

        def interrupted(*args) -> None:
            flip(*args)
            raise KeyboardInterrupt  # as a signal that came meanwhile is raised

        models.fill(source, 1.0)
        with pytest.raises(KeyboardInterrupt), receiver.reading():
            handle = sender.send_nowait()
            async with asyncio.timeout(harness.PATIENCE):
                while not receiver._receiver.has_staged:
                    await asyncio.sleep(0)
            monkeypatch.setattr(_changes, "flip", interrupted)
        monkeypatch.setattr(_changes, "flip", flip)
        with pytest.raises(aiosync.PartialSyncError, match="KeyboardInterrupt"):
            await handle
        with receiver.reading():
            assert models.filled(target, 1.0)
            for value in range(2, 8):
                models.fill(source, float(value))
                handle = sender.send_nowait()
                await asyncio.sleep(0.01)
                assert models.filled(target, 1.0)
        await handle
        assert models.filled(target, 7.0)
