"""Updates of a part of the names, as a weight server puts them together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import aiosync
from aiosync.server import WeightClient, WeightServer

BOTH = torch.tensor([1.0, 1.0])
TIED = {"a": BOTH, "b": BOTH, "c": torch.tensor([5.0])}


def part(**values: list[float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in values.items()}


@pytest.mark.asyncio
@pytest.mark.one_loop
@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([TIED, part(b=[2.0, 2.0])], {"a": [2, 2], "b": [2, 2], "c": [5]}),
        ([TIED, part(c=[6.0])], {"a": [1, 1], "b": [1, 1], "c": [6]}),
        ([part(a=[], b=[1.0]), part(b=[2.0])], {"a": [], "b": [2]}),
        (
            [part(a=[1.0]), part(b=[2.0]), part(b=[3.0]), part(c=[4.0], a=[5.0])],
            {"a": [5], "b": [3], "c": [4]},
        ),
        (
            [TIED, part(d=[1.0]), part(a=[3.0, 3.0], d=[2.0])],
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
