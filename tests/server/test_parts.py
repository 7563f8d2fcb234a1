"""Versions of a part of the names, with ``strict=False``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aiosync.server import WeightClient, WeightServer
from tests.schemes._harness import PATIENCE
from tests.schemes._models import linear
from tests.server._tools import URL, send, trainer, worker

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]

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


@pytest.mark.parametrize("stored", [False, True])
async def test_who_comes_later_gets_the_newest_of_each_name(tmp_path: Path, stored: bool) -> None:
    async with WeightServer(URL, store=tmp_path if stored else None) as server:
        async with trainer(server, strict=False) as scheme, worker(server, strict=False) as early:
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


async def test_parts_without_a_whole(tmp_path: Path) -> None:
    async with WeightServer(URL, store=tmp_path) as server:
        async with trainer(server, strict=False) as scheme:
            for value in (1.0, 2.0):
                await scheme.send(part(bias=value))
                last = await scheme.send(part(weight=value + 10.0))
            async with worker(server, strict=False) as late:
                assert late.version == last.version
                assert model_of(late) == {"weight": 12.0, "bias": 2.0}
    async with WeightServer(URL, store=tmp_path) as server:
        pulled = await WeightClient(server.url).pull(timeout=PATIENCE)
        assert held(pulled.mapping()) == {"weight": 12.0, "bias": 2.0}
