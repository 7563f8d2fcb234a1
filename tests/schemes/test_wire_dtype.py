"""``wire_dtype``: a float32 trainer, bfloat16 on the way and in the workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = pytest.mark.one_loop


BF16 = torch.bfloat16
SCHEMES = [*harness.SCHEMES, aiosync.TCPWeightSyncScheme]
every = pytest.mark.parametrize("make", SCHEMES)


def noisy(model: nn.Module) -> nn.Module:
    """Values that bfloat16 does not have."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    return model


def joined(scheme: Any, *targets: Any, **sender: Any) -> Any:
    """A connected sender and one receiver for each target in this process."""
    return harness.crowd(scheme, targets, sender=sender)


def equal(receiver: Any, source: nn.Module) -> bool:
    """Whether every tensor of the receiver's model is the source's, cast."""
    expected = source.state_dict()
    with receiver.reading():
        return all(
            torch.equal(tensor, expected[name].to(tensor.dtype))
            for name, tensor in receiver.model.state_dict().items()
            if isinstance(tensor, torch.Tensor)
        )


@pytest.mark.asyncio
@every
@pytest.mark.parametrize("build", [models.linear, models.medium])
async def test_a_float32_trainer_and_a_bfloat16_worker(make: Any, build: Any) -> None:
    source, target = noisy(build()), build().bfloat16()
    parameters = list(source.parameters())
    before = [(id(p), p.data_ptr()) for p in parameters]
    async with joined(make(wire_dtype=BF16), target, model=source) as (tx, [rx]):
        assert equal(rx, source)
        for send in (tx.send, tx.send_nowait, tx.send):
            kept = [p.detach().clone() for p in noisy(source).parameters()]
            report = await send()
            assert report.acked == {0}
            assert equal(rx, source)
            assert all(map(torch.equal, parameters, kept))
        assert [(id(p), p.data_ptr()) for p in source.parameters()] == before
        nbytes = sum(2 * p.numel() for p in parameters)
        assert nbytes <= report.nbytes < nbytes + 64 * (len(parameters) + 1)
        assert tx.worker_versions == {0: tx.version}
    assert {p.dtype for p in source.parameters()} == {torch.float32}
    assert {p.dtype for p in target.parameters()} == {BF16}


class Mixed(nn.Module):
    """Tied parameters, an integer buffer, an extra state with a tensor, and, as language models
    have, float32 angles that no state dict has."""

    def __init__(self, dtype: torch.dtype, extra: Any) -> None:
        super().__init__()
        self.tied = models.Tied().to(dtype)
        self.norm = nn.BatchNorm1d(3, dtype=dtype)
        self.register_buffer("angles", 1 / 10_000 ** (torch.arange(4) / 4), persistent=False)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.asyncio
@every
@pytest.mark.parametrize("strict", [True, False])
async def test_what_is_no_weight_is_not_touched(make: Any, strict: bool) -> None:
    source = noisy(Mixed(torch.float32, {"scale": torch.full((2,), 0.1), "text": "x"}))
    source.norm.num_batches_tracked.fill_(70_001)
    target, cast = Mixed(BF16, None), Mixed(BF16, None).bfloat16()
    scheme = make(wire_dtype=BF16, strict=strict)
    async with joined(scheme, target, cast, model=source) as (tx, others):
        source.angles.mul_(1.1)
        assert (await tx.send()).acked == {0, 1}
        assert all(equal(each, source) for each in others)
        assert target.tied.first.weight is target.tied.second.weight
        with others[0].reading(), others[1].reading():
            assert torch.equal(target.angles, source.angles)  # which has float32
            assert torch.equal(cast.angles, source.angles.bfloat16())
            assert int(target.norm.num_batches_tracked) == 70_001
        assert target.extra["text"] == "x"
        assert torch.equal(target.extra["scale"], torch.full((2,), 0.1))
