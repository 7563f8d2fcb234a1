"""The guard between forwards and updates, and what depends on the thread that applies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from aiosync.schemes import Guard, Reading
from tests.schemes import _harness as harness
from tests.schemes import _models as models


def test_a_read_ends_on_whatever_thread_its_block_ends() -> None:
    """A thread pool steps a generator wherever there is room."""
    guard = Guard()
    applied: list[int] = []

    def stream():
        with Reading(guard):
            yield

    steps = stream()
    with ThreadPoolExecutor(1) as beginning, ThreadPoolExecutor(1) as ending:
        beginning.submit(next, steps).result()
        assert not guard.submit(lambda: applied.append(1))
        ending.submit(next, steps, None).result()
    assert applied == [1]
    assert not guard.reading_here
    assert guard.is_free()


class _Model(nn.Module):
    """Calls itself, and a part before it, as models with a ``generate()`` do."""

    config = SimpleNamespace(is_encoder_decoder=True)

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.guard = guard
        self.encoder = nn.Identity()
        self.guarded: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.guarded.append(not self.guard.submit(lambda: None))
        return x

    def get_encoder(self) -> nn.Module:
        return self.encoder

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(self.get_encoder()(x))


class _Around(nn.Module):
    """As an adapter around a model: what generates is the model inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base = nn.ModuleDict({"model": model})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base["model"](x)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.base["model"].generate(x)


@pytest.mark.parametrize("kind", ["plain", "around", "compiled"])
def test_what_generates_inside_of_a_wrapper_is_guarded(kind: str) -> None:
    guard = Guard()
    module: Any
    module = model = _Model(guard)
    if kind != "plain":
        module = _Around(model) if kind == "around" else torch.compile(model, backend="eager")
    guard.install(module)
    module.generate(torch.zeros(4))
    guard.uninstall()
    module.generate(torch.zeros(4))
    assert (model.guarded[0], model.guarded[-1]) == (True, False)


# -- the guard of a receiver -------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("close", [False, True], ids=["read on", "closed"])
@pytest.mark.parametrize("make", harness.SCHEMES)
async def test_what_another_threads_read_applied_counts_at_once(make, close) -> None:
    source, target = models.linear(2.0), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        with harness.read_elsewhere(receiver):
            handle = await harness.stage(sender, receiver)
            assert (receiver.version, receiver.lag) == (1, 1)
        if close:  # the loop has not run since
            receiver.abort()
        else:
            assert (receiver.version, receiver.lag) == (2, 0)
        assert models.filled(target, 2.0)
        assert (await handle).acked == {0}  # it says so before it goes


@pytest.mark.parametrize("kind", ["reading", "forward"])
@pytest.mark.asyncio
async def test_weights_are_not_changed_by_hand_inside_a_read(kind) -> None:
    scheme, target = aiosync.SharedMemWeightSyncScheme(), models.linear()
    async with harness.here(scheme, target, sender={"model": models.linear()}) as (_, receiver):

        def change(*_: Any) -> None:
            for inplace in (True, False):
                with pytest.raises(aiosync.LocalProtocolError, match="between two of them"):
                    receiver.apply_weights(models.linear(7.0).state_dict(), inplace=inplace)
            assert models.filled(target, -1.0)

        if kind == "forward":
            with target.register_forward_pre_hook(change):
                target(torch.zeros(4))
        else:
            with receiver.reading():
                change()
        receiver.apply_weights(models.linear(7.0).state_dict())
        assert models.filled(target, 7.0)
