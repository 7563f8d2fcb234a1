"""Who sees whose writes: nobody but the writer, until the next update."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]
both = pytest.mark.parametrize("make", harness.SCHEMES)
modes = pytest.mark.parametrize("apply_copy", [False, True], ids=["flip", "copy"])


async def test_a_write_that_ends_after_its_version_was_left_is_gone_with_the_next() -> None:
    """As an optimizer's step does that runs in another thread while updates come."""
    scheme, target = aiosync.SharedMemWeightSyncScheme(), models.linear()
    async with harness.here(scheme, target, sender={"model": models.linear()}) as ends:
        seen = set()
        for version in range(2, 12):
            stale = (ctypes.c_float * target.weight.numel()).from_address(target.weight.data_ptr())
            seen.add(target.weight.data_ptr())
            await harness.deliver(*ends, version)
            stale[:] = [-1.0] * len(stale)
            assert models.holds(ends[1], version)
        assert len(seen) < 9  # slots were used again


@both
async def test_what_a_worker_keeps_of_a_version_stays_as_it_was(make) -> None:
    target, kept = models.linear(), []
    async with harness.here(make(), target, sender={"model": models.linear()}) as ends:
        for value in range(30):
            await harness.deliver(*ends, float(value))
            if value in (3, 4, 11):
                twin, state = models.linear(), target.state_dict()
                twin.load_state_dict(state, assign=True)
                copies = [*copy.deepcopy(target).parameters(), *twin.parameters()]
                kept.append((value, [*copies, *state.values(), target.weight.data[1:]]))
        for value, tensors in kept:
            assert all((tensor == value).all() for tensor in tensors)


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
        await harness.deliver(sender, receiver, 2.0)
        x = torch.ones(4, requires_grad=True)
        loss = target(x).sum()
        await harness.deliver(sender, receiver, 5.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        async with receiver.reading():
            loss = target(x).sum()
            handle = await harness.stage(sender, receiver)
            loss.backward()
        await handle
        assert (x.grad == (10.0 if build is models.linear else 5.0)).all()


@contextlib.contextmanager
def child(look: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """A fork of this process; gives what asks it for what it sees."""
    mine, its = multiprocessing.Pipe()
    pid = os.fork()
    if not pid:
        try:
            its.recv_bytes()
            its.send(look())
        finally:
            os._exit(0)

    def ask() -> Any:
        mine.send_bytes(b"look")
        assert mine.poll(harness.PATIENCE)
        return mine.recv()

    try:
        yield ask
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        mine.close()
        its.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@both
@modes
async def test_a_sibling_sees_updates_of_a_shared_module_only_in_copies(make, apply_copy) -> None:
    target, options = models.linear(0.0), {"model": models.linear(1.0)}
    target.share_memory()
    with child(lambda: target.weight[0, 0].item()) as ask:  # it has no receiver
        async with harness.here(make(apply_copy=apply_copy), target, sender=options) as ends:
            await harness.deliver(*ends, 3.0)
            assert target.weight.is_shared() is apply_copy
            assert ask() == (3.0 if apply_copy else 0.0)
