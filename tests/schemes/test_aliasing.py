"""Who sees whose writes: nobody but the writer, until the next update."""

from __future__ import annotations

import asyncio
import copy
import ctypes
import io
import multiprocessing
import os

import pytest
import torch
from torch import nn

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]
both = pytest.mark.parametrize("make", harness.SCHEMES)
modes = pytest.mark.parametrize("apply_copy", [False, True], ids=["flip", "copy"])


def _first(model) -> float:
    return next(model.parameters()).detach().flatten()[0].item()


@both
@modes
async def test_optimizer_steps_stay_in_the_trainer(make, apply_copy) -> None:
    source, targets = models.linear(), [models.linear() for _ in range(2)]
    optimizer = torch.optim.SGD(source.parameters(), lr=0.5)
    scheme = make(apply_copy=apply_copy)
    async with harness.crowd(scheme, targets, sender={"model": source}) as (sender, _):
        sent = copy.deepcopy(source.state_dict())
        for step in range(20):
            optimizer.zero_grad()
            source(torch.ones(4)).sum().backward()
            optimizer.step()
            assert not torch.equal(source.weight, sent["weight"])
            for target in targets:
                assert torch.equal(target.weight, sent["weight"])
            if step % 3 == 2:
                await sender.send()
                sent = copy.deepcopy(source.state_dict())
        handle = sender.send_nowait()
        sent = copy.deepcopy(source.state_dict())
        models.fill(source, 1234.0)  # right behind the snapshot
        await handle
        for target in targets:
            assert torch.equal(target.weight, sent["weight"])


@both
@modes
async def test_writes_of_a_worker_stay_there_until_the_next_update(make, apply_copy) -> None:
    source, targets = models.linear(), [models.linear() for _ in range(2)]
    scheme = make(apply_copy=apply_copy)
    async with harness.crowd(scheme, targets, sender={"model": source}) as (sender, _):
        for value in range(1, 13):  # slots are used again and again
            models.fill(source, float(value))
            await sender.send()
            for target in targets:
                assert models.filled(target, float(value))
            models.fill(targets[0], -500.0 - value)
            with torch.no_grad():
                targets[0].weight.data[0] += 1.0
            assert models.filled(targets[1], float(value))
            assert models.filled(source, float(value))


async def test_a_write_that_ends_after_its_version_was_left_is_gone_with_the_next() -> None:
    """As an optimizer's step does that runs in another thread while updates come."""
    source, target = models.linear(), models.linear()
    make = aiosync.SharedMemWeightSyncScheme
    async with harness.here(make(), target, sender={"model": source}) as (sender, _):
        seen = set()
        for version in range(2, 12):
            stale = (ctypes.c_float * target.weight.numel()).from_address(target.weight.data_ptr())
            seen.add(target.weight.data_ptr())
            with torch.no_grad():
                source.weight.fill_(version)
            await sender.send()
            stale[:] = [-1.0] * len(stale)
            assert torch.equal(target.weight, source.weight), version
        assert len(seen) < 9  # slots were used again


@both
@modes
async def test_a_worker_may_train_its_copy(make, apply_copy) -> None:
    source, target = models.linear(), models.linear()
    scheme = make(apply_copy=apply_copy)
    async with harness.here(scheme, target, sender={"model": source}) as (sender, _):
        optimizer = torch.optim.Adam(target.parameters(), lr=0.1)
        for value in range(8):
            models.fill(source, float(value))
            await sender.send()
            assert models.filled(target, float(value))
            target(torch.ones(4)).sum().backward()
            optimizer.step()
            assert not models.filled(target, float(value))
            assert models.filled(source, float(value))


@both
async def test_what_a_worker_keeps_of_a_version_stays_as_it_was(make) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as (sender, _):
        kept = {}
        for value in range(30):
            models.fill(source, float(value))
            await sender.send()
            if value in (3, 4, 11):
                twin = models.linear()
                twin.load_state_dict(target.state_dict(), assign=True)
                kept[value] = (
                    target.state_dict(),
                    copy.deepcopy(target),
                    twin,
                    target.weight.data[1:],
                )
        for value, (state, deep, twin, part) in kept.items():
            assert (state["weight"] == value).all()
            assert (state["bias"] == value).all()
            assert models.filled(deep, float(value))
            assert models.filled(twin, float(value))
            assert (part == value).all()
        assert models.filled(target, 29.0)
        del kept, state, deep, twin, part
        for value in range(10):
            models.fill(source, float(value))
            await sender.send()
            assert models.filled(target, float(value))
        arena = getattr(sender, "_arena", None)
        assert arena is None or arena.num_slots <= 6


class Scale(nn.Module):
    """Autograd keeps its parameter itself, where it keeps a view of a linear layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@both
@pytest.mark.parametrize("build", [models.linear, Scale])
@pytest.mark.parametrize("frozen", [False, True])
async def test_a_graph_of_an_old_version_is_not_differentiated_with_a_new_one(
    make, build, frozen
) -> None:
    source, target = build(), build().requires_grad_(not frozen)
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        models.fill(source, 2.0)
        await sender.send()
        x = torch.ones(4, requires_grad=True)
        loss = target(x).sum()
        models.fill(source, 5.0)
        await sender.send()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        async with receiver.reading():
            loss = target(x).sum()
            sending = asyncio.ensure_future(sender.send())
            await asyncio.sleep(0.01)
            loss.backward()
        await sending
        assert (x.grad == (10.0 if build is models.linear else 5.0)).all()


@both
async def test_a_flipped_module_can_be_saved(make) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as (sender, _):
        models.fill(source, 2.0)
        await sender.send()
        file = io.BytesIO()
        torch.save(target.state_dict(), file)
        models.fill(source, 3.0)
        await sender.send()
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert (loaded["weight"] == 2.0).all()


# -- across processes -------------------------------------------------------------------------


def _write(state, value: float) -> None:
    models.fill(state.model, value)


def _keep(state) -> None:
    state.kept["state"] = state.model.state_dict()
    state.kept["deep"] = copy.deepcopy(state.model)


def _kept(state) -> tuple[float, float]:
    return (state.kept["state"]["block"].max().item(), _first(state.kept["deep"]))


def _value(state) -> float:
    value = _first(state.model)
    assert models.filled(state.model, value)
    return value


@both
@modes
@pytest.mark.slow
async def test_across_processes(make, apply_copy) -> None:
    source, scheme = models.medium(), make(apply_copy=apply_copy)
    models.fill(source, 1.0)
    scheme.init_on_sender(model=source, num_workers=2)
    async with harness.workers(scheme, models.medium, 2) as crew:
        for value in range(2, 8):
            models.fill(source, float(value))
            await scheme.send()
            models.fill(source, 1000.0)
            assert [await worker.call(_value) for worker in crew] == [value, value]
            await crew[0].call(_write, -1.0)
            assert await crew[1].call(_value) == value
            assert models.filled(source, 1000.0)
            if value == 3:
                await crew[1].call(_keep)
        state, deep = await crew[1].call(_kept)
        assert deep == 3.0
        assert state == (7.0 if apply_copy else 3.0)  # in copy mode it is the parameter itself


@both
@modes
async def test_a_forked_child_keeps_the_version_of_the_fork(make, apply_copy) -> None:
    source, target = models.medium(), models.medium()
    mine, its = multiprocessing.Pipe()
    async with harness.here(make(apply_copy=apply_copy), target, sender={"model": source}) as (
        sender,
        _,
    ):
        for value in range(3):
            models.fill(source, float(value))
            await sender.send()
        pid = os.fork()
        if not pid:
            its.recv_bytes()
            its.send({value for p in target.parameters() for value in p.flatten().tolist()})
            os._exit(0)
        try:
            for value in range(3, 10):
                models.fill(source, float(value))
                await sender.send()
            mine.send_bytes(b"look")
            assert mine.poll(harness.PATIENCE)
            assert mine.recv() == {2.0}
            assert models.filled(target, 9.0)
        finally:
            os.waitpid(pid, 0)  # noqa: ASYNC222 - it ends at once
            mine.close()
            its.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@both
@modes
async def test_a_sibling_sees_updates_of_a_shared_module_only_in_copies(make, apply_copy) -> None:
    source, target = models.linear(), models.linear()
    models.fill(source, 1.0)
    models.fill(target, 0.0)
    target.share_memory()
    begin, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:  # a process that uses the module and has no receiver
        try:
            os.close(begin[1])
            os.read(begin[0], 1)
            os.write(done[1], str(_first(target)).encode())
        finally:
            os._exit(0)
    try:
        scheme = make(apply_copy=apply_copy)
        async with harness.here(scheme, target, sender={"model": source}) as (sender, _):
            models.fill(source, 3.0)
            await sender.send()
            assert target.weight.is_shared() is apply_copy
            os.write(begin[1], b"x")
            seen = await asyncio.to_thread(os.read, done[0], 99)
    finally:
        for end in (*begin, *done):
            os.close(end)
        await asyncio.to_thread(os.waitpid, pid, 0)
    assert float(seen) == (3.0 if apply_copy else 0.0)
