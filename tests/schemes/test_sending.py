"""What ``connect()`` and ``send()`` do for several workers, in one process.

What holds for every scheme (reports, require, lost workers, late ones) is in the contract suite.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

both = pytest.mark.parametrize("make", harness.SCHEMES)
pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


def values(receivers: list[Any]) -> list[float]:
    """The one value that the model of each receiver has."""
    found = []
    for receiver in receivers:
        with receiver.reading():
            found.append(next(receiver.model.parameters()).flatten()[0].item())
        assert models.holds(receiver, found[-1])
    return found


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 4), value), "bias": torch.full((2,), value)}


# -- connecting -------------------------------------------------------------------------------


@both
async def test_a_worker_without_weights_of_its_own_connects_all_the_same(make: Any) -> None:
    init = {"params_map": {0: weights(1.0), 2: weights(3.0)}, "num_workers": None}
    async with harness.crowd(make(), [models.linear() for _ in range(3)], sender=init) as (
        sender,
        others,
    ):
        assert values(others) == [1.0, -1.0, 3.0]
        assert [other.version for other in others] == [1, 0, 1]
        assert sender.prepare_weights(None).keys() == {0, 2}
        assert (await sender.send()).acked == {0, 2}
        for name, value in (("model", models.linear()), ("weights", weights(3.0))):
            with pytest.raises(aiosync.ConfigError, match="worker_idx"):  # one is not for all
                setattr(sender, name, value)


# -- sending ----------------------------------------------------------------------------------


@both
async def test_a_device_map_gives_each_worker_its_own(make: Any) -> None:
    """It gets tensors and no model, which ``.to()`` would change in place."""
    source, kinds = models.linear(1.0), set()

    def scaled(idx: int, given: Any) -> Any:
        kinds.add(type(given))
        return given.to(torch.float64).apply(lambda x: x * (idx + 1)).to(torch.float32)

    options = {"model": source, "device_map_fn": scaled}
    targets = [models.linear() for _ in range(3)]
    async with harness.crowd(make(require=1), targets, sender=options) as (sender, others):
        assert values(others) == [1.0, 2.0, 3.0]
        await sender.send(weights(2.0))
        await sender.wait_for_version(sender.version)
        assert values(others) == [2.0, 4.0, 6.0]
        await others[1].aclose()
        await harness.until(lambda: 1 not in sender.worker_versions)
        models.fill(source, 4.0)
        assert (await sender.send()).left == {1}
        async with await harness.came_again(sender, 1) as late:
            assert values([late]) == [8.0]
    assert kinds == {TensorDict}
    assert source.weight.dtype is torch.float32
    assert models.filled(source, 4.0)


@both
async def test_sends_at_the_same_time_come_in_order(make: Any) -> None:
    options = {"model": models.medium()}
    async with harness.here(make(), models.medium(), sender=options) as (sender, receiver):
        sources = [models.medium() for _ in range(4)]
        for value, each in enumerate(sources):
            models.fill(each, float(value))
        reports = await asyncio.gather(*(sender.send(each) for each in sources))
        assert [report.version for report in reports] == [2, 3, 4, 5]
        assert models.holds(receiver, 3.0)


class Fallback:
    """As a TorchRL collector."""

    policy = None
    _fallback_policy = models.linear(3.0)


async def test_the_fallback_policy_of_a_context_is_sent() -> None:
    context = Fallback()
    scheme, options = aiosync.SharedMemWeightSyncScheme("state_dict"), {"context": context}
    async with harness.here(scheme, models.linear(), sender=options) as (sender, receiver):
        assert models.holds(receiver, 3.0)
        assert (sender.prepare_weights(None)["weight"] == 3.0).all()
        assert sender.prepare_weights(None, "other") is None
