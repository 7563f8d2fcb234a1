"""Versions of a part of the names, with ``strict=False``, and how a server puts them together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import aiosync
from aiosync.server import WeightClient, WeightServer
from tests.schemes._harness import PATIENCE
from tests.schemes._models import linear
from tests.server._tools import URL, send, trainer, worker

BOTH = {"weight": 2.0, "bias": 3.0}


def part(**values: float) -> dict[str, torch.Tensor]:
    shapes = {name: each.shape for name, each in linear().state_dict().items()}
    return {name: torch.full(shapes[name], value) for name, value in values.items()}


def held(mapping: Any) -> dict[str, float]:
    assert all((each == each.flatten()[0]).all() for each in mapping.values())
    return {name: each.flatten()[0].item() for name, each in mapping.items()}


def model_of(receiver: Any) -> dict[str, float]:
    with receiver.reading():
        return held(receiver.it.state_dict())


@pytest.mark.asyncio
@pytest.mark.one_loop
@pytest.mark.parametrize("stored", [False, True])
async def test_who_comes_later_gets_the_newest_of_each_name(tmp_path: Path, stored: bool) -> None:
    async with WeightServer(URL, store=tmp_path if stored else None) as server:
        async with (
            trainer(server, strict=False) as scheme,
            worker(server, strict=False, initial=False) as early,
        ):
            await send(scheme, 1.0)
            await scheme.send(part(weight=2.0))
            last = await scheme.send(part(bias=3.0))
            await early.wait_for_version(last.version, timeout=PATIENCE)
            assert model_of(early) == BOTH
            async with worker(server, strict=False) as late:
                assert late.version == last.version
                assert model_of(late) == BOTH
            async with worker(server, strict=False, subscribe=False) as asking:
                assert await asking.pull(timeout=PATIENCE) == last.version
                assert model_of(asking) == BOTH
            pulled = await WeightClient(server.url).pull(timeout=PATIENCE)
            assert (pulled.version, held(pulled.mapping())) == (last.version, BOTH)
        pulled = await WeightClient(server.url).pull(timeout=PATIENCE)  # without a trainer, too
        assert held(pulled.mapping()) == BOTH


# -- put together ---------------------------------------------------------------------------------


PAIR = torch.tensor([1.0, 1.0])
TIED = {"a": PAIR, "b": PAIR, "c": torch.tensor([5.0])}


def vectors(**values: list[float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in values.items()}


@pytest.mark.asyncio
@pytest.mark.one_loop
@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([TIED, vectors(b=[2.0, 2.0])], {"a": [2, 2], "b": [2, 2], "c": [5]}),
        ([TIED, vectors(c=[6.0])], {"a": [1, 1], "b": [1, 1], "c": [6]}),
        ([vectors(a=[], b=[1.0]), vectors(b=[2.0])], {"a": [], "b": [2]}),
        (
            [vectors(a=[1.0]), vectors(b=[2.0]), vectors(b=[3.0]), vectors(c=[4.0], a=[5.0])],
            {"a": [5], "b": [3], "c": [4]},
        ),
        (
            [TIED, vectors(d=[1.0]), vectors(a=[3.0, 3.0], d=[2.0])],
            {"a": [3, 3], "b": [3, 3], "c": [5], "d": [2]},
        ),
    ],
)
async def test_a_client_gets_the_newest_of_each_name(parts: list[Any], expected: Any) -> None:
    async with WeightServer("tcp://127.0.0.1:0") as server:
        trainer = aiosync.TCPWeightSyncScheme(server.url, strict=False, dial="both", timeout=30.0)
        trainer.init_on_sender("policy", weights=parts[0])
        async with trainer:
            await trainer.connect()
            for each in parts:
                await trainer.send(each)
            pulled = await WeightClient(server.url).pull(timeout=30.0)
    assert {name: tensor.tolist() for name, tensor in pulled.mapping().items()} == expected
