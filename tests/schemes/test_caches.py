"""Versions that arrive inside a block in which torch caches values made of weights."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import aiosync
import aiosync.sync
from tests.schemes import _harness as harness
from tests.sync import _tools as tools

SCHEMES = {
    "shm": lambda of, **options: of.SharedMemWeightSyncScheme(**options),
    "pipe": lambda of, **options: of.MultiProcessWeightSyncScheme(**options),
    "tcp": lambda of, **options: of.TCPWeightSyncScheme("tcp://127.0.0.1:0", **options),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "flip": {},
    "copy": {"apply_copy": True},
    "state_dict": {"strategy": "state_dict"},
    "reading": {"guard": "reading"},
}


class Same(nn.Module):
    """Parametrization whose value is that of the parameter, in memory of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


def make_model() -> nn.Module:
    """Return layers that output, for an input of one, the number that all their parameters have."""
    layer = nn.Linear(1, 1, bias=False)
    parametrize.register_parametrization(layer, "weight", Same())
    return nn.Sequential(nn.Linear(1, 1, bias=False), layer, nn.LayerNorm(1))


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def computed(model: nn.Module) -> list[float]:
    """Return the outputs of each layer and of the whole model for an input of one."""
    layers: Any = model
    return [layers[i](torch.ones(1)).item() for i in (0, 1, 2)] + [model(torch.ones(1)).item()]


@contextlib.contextmanager
def caching() -> Iterator[None]:
    """A block in which torch caches casts of weights and values computed from them."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), parametrize.cached():
        yield


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("make", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.asyncio
async def test_an_update_inside_of_a_caching_block(make: Any, options: dict[str, Any]) -> None:
    source, target = make_model(), make_model()
    async with harness.here(make(aiosync, **options), target, sender={"model": source}) as (
        sender,
        receiver,
    ):
        with caching():
            for value in (2.0, 3.0, 4.0, 5.0):
                fill(source, value)
                await sender.send()
                with receiver.reading():
                    assert computed(target) == [value] * 4


@pytest.mark.parametrize("make", SCHEMES.values(), ids=SCHEMES)
def test_the_same_in_the_blocking_api(make: Any) -> None:
    source, target = make_model(), make_model()
    with tools.pair(functools.partial(make, aiosync.sync), source, target) as (sender, receiver):
        with caching():
            for value in (2.0, 3.0, 4.0, 5.0):
                fill(source, value)
                sender.send()
                with receiver.reading():
                    assert computed(target) == [value] * 4


@pytest.mark.asyncio
async def test_what_is_applied_by_hand() -> None:
    """Forwards see weights of apply_pending(), apply_weights() and load_state_dict() at once."""
    source, target = make_model(), make_model()
    scheme = aiosync.MultiProcessWeightSyncScheme(apply="manual")
    async with harness.here(scheme, target, sender={"model": source}) as (sender, receiver):
        with caching():
            for value in (2.0, 3.0, 4.0):
                fill(source, value)
                handle = sender.send_nowait()
                await receiver.wait_staged(handle.version)
                assert receiver.apply_pending() == handle.version
                await handle
                assert computed(target) == [value] * 4
            fill(source, 5.0)
            receiver.apply_weights(source.state_dict())
            assert computed(target) == [5.0] * 4
            fill(source, 6.0)
            target.load_state_dict(source.state_dict())
            assert computed(target) == [6.0] * 4


def test_another_thread_keeps_the_block_open() -> None:
    """The caches belong to the process; a block in one thread sees updates that another sends."""
    source, target = make_model(), make_model()
    make = functools.partial(SCHEMES["tcp"], aiosync.sync)
    turn, found = threading.Barrier(2, timeout=tools.PATIENCE), []
    with tools.pair(make, source, target) as (sender, receiver):

        def act() -> None:
            with caching():
                for _ in range(3):
                    turn.wait()
                    with receiver.reading():
                        found.append(computed(target))
                    turn.wait()

        with tools.threads(act):
            for value in (2.0, 3.0, 4.0):
                fill(source, value)
                sender.send()
                turn.wait()
                turn.wait()
    assert found == [[value] * 4 for value in (2.0, 3.0, 4.0)]


FREEZING = """
import asyncio, copy, warnings, torch, aiosync

async def main(trainer):
    source, policy = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False).eval()
    trainer.init_on_sender(model=source, num_workers=1)
    worker, act = copy.copy(trainer), torch.compile(policy)
    worker.init_on_receiver(model=act)
    async with trainer, worker:
        await asyncio.gather(trainer.connect(), worker.connect())
        for _ in range(3):
            with warnings.catch_warnings(record=True) as said, torch.no_grad():
                warnings.simplefilter("always")
                await trainer.send()
                act(torch.ones(1))
            print(len([each for each in said if "FREEZING" in str(each.message)]))

asyncio.run(main(aiosync.SharedMemWeightSyncScheme()))
asyncio.run(main(aiosync.MultiProcessWeightSyncScheme()))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_weights_that_are_compiled_in_are_warned_of_once() -> None:
    """The first update after the compilation warns, in the forward that takes it or on the loop."""
    ran = subprocess.run(
        [sys.executable, "-c", FREEZING],
        env={**os.environ, "TORCHINDUCTOR_FREEZING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    assert ran.stdout.split() == ["0", "1", "0"] * 2, ran.stderr
