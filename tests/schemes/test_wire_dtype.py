"""``wire_dtype``: a float32 trainer, bfloat16 on the way and in the workers."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import aiosync
import aiosync.sync
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.sync import _tools as tools

BF16 = torch.bfloat16
SCHEMES = [*harness.SCHEMES, aiosync.TCPWeightSyncScheme]
every = pytest.mark.parametrize("make", SCHEMES)


def noisy(model: nn.Module) -> nn.Module:
    """Values that bfloat16 does not have."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    return model


@contextlib.asynccontextmanager
async def joined(scheme: Any, *targets: Any, **sender: Any) -> AsyncIterator[Any]:
    """A connected sender and one receiver for each target in this process."""
    scheme.init_on_sender(model_id="policy", num_workers=len(targets), **sender)
    others = [harness.twin(scheme) for _ in targets]
    try:
        for idx, (other, target) in enumerate(zip(others, targets, strict=True)):
            other.init_on_receiver(model_id="policy", worker_idx=idx, model=target)
        async with asyncio.timeout(harness.PATIENCE):
            await asyncio.gather(scheme.connect(), *(other.connect() for other in others))
        yield scheme
    finally:
        for each in (*others, scheme):
            await each.aclose()


def equal(target: nn.Module, source: nn.Module) -> bool:
    """Whether every tensor of the target is the source's, cast."""
    expected = source.state_dict()
    return all(
        torch.equal(tensor, expected[name].to(tensor.dtype))
        for name, tensor in target.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    )


@pytest.mark.asyncio
@every
@pytest.mark.parametrize("build", [models.linear, models.medium])
async def test_a_float32_trainer_and_a_bfloat16_worker(make: Any, build: Any) -> None:
    source, target = noisy(build()), build().bfloat16()
    parameters = list(source.parameters())
    before = [(id(p), p.data_ptr()) for p in parameters]
    async with joined(make(wire_dtype=BF16), target, model=source) as tx:
        assert equal(target, source)
        for send in (tx.send, tx.send_nowait, tx.send):
            kept = [p.detach().clone() for p in noisy(source).parameters()]
            report = await send()
            assert report.acked == {0}
            assert equal(target, source)
            assert all(map(torch.equal, parameters, kept))
        assert [(id(p), p.data_ptr()) for p in source.parameters()] == before
        nbytes = sum(2 * p.numel() for p in parameters)
        assert nbytes <= report.nbytes < nbytes + 64 * (len(parameters) + 1)
        assert tx.worker_versions == {0: tx.version}
    assert {p.dtype for p in source.parameters()} == {torch.float32}
    assert {p.dtype for p in target.parameters()} == {BF16}


@pytest.mark.asyncio
@every
async def test_a_float32_worker_refuses_it_unless_it_is_not_strict(make: Any) -> None:
    source, target = noisy(models.linear()), models.linear()
    with pytest.raises(aiosync.AiosyncError, match="expected dtype float32, got bfloat16"):
        async with joined(make(wire_dtype=BF16), target, model=source):
            pass
    assert models.filled(target, -1.0)
    scheme = make(wire_dtype=BF16, strict=False)
    async with joined(scheme, target, model=source) as tx:
        await tx.send()
        expected = source.weight.bfloat16().float()
        assert torch.equal(target.weight, expected)
        assert target.weight.dtype is torch.float32


@pytest.mark.asyncio
@every
async def test_weights_of_every_kind(make: Any) -> None:
    target = models.linear().bfloat16()
    async with joined(make(wire_dtype=BF16), target) as tx:
        for kind in (dict, lambda items: TensorDict(items, batch_size=[])):
            source = noisy(models.linear())
            await tx.send(kind(source.state_dict()))
            assert equal(target, source)
        source = noisy(models.linear())
        await tx.send(source)
        assert equal(target, source)


@pytest.mark.asyncio
@every
async def test_weights_of_single_workers(make: Any) -> None:
    targets = [models.linear().bfloat16(), models.linear().bfloat16()]
    scheme = make(wire_dtype=BF16, per_worker_weights=True)
    async with joined(scheme, *targets) as tx:
        sources = [noisy(models.linear()) for _ in targets]
        report = await tx.send(dict(enumerate(sources)))
        assert report.acked == {0, 1}
        assert all(map(equal, targets, sources))


class Mixed(nn.Module):
    """Tied parameters, an integer buffer, and an extra state with a tensor."""

    def __init__(self, dtype: torch.dtype, extra: Any) -> None:
        super().__init__()
        self.tied = models.Tied().to(dtype)
        self.norm = nn.BatchNorm1d(3, dtype=dtype)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.asyncio
@every
async def test_what_is_no_weight_is_not_touched(make: Any) -> None:
    source = Mixed(torch.float32, {"scale": torch.full((2,), 0.1), "text": "x"})
    noisy(source)
    source.norm.num_batches_tracked.fill_(70_001)
    target = Mixed(BF16, None)
    async with joined(make(wire_dtype=BF16), target, model=source) as tx:
        await tx.send()
        assert equal(target, source)
        assert target.tied.first.weight is target.tied.second.weight
        assert int(target.norm.num_batches_tracked) == 70_001
        assert target.extra["text"] == "x"
        assert torch.equal(target.extra["scale"], torch.full((2,), 0.1))


class Rotary(nn.Module):
    """What language models do: bfloat16 weights, and float32 angles that no state dict has."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=dtype)
        inv_freq = 1 / 10_000 ** (torch.arange(4) / 4)
        self.register_buffer("inv_freq", inv_freq, persistent=False)


@pytest.mark.asyncio
@every
async def test_angles_that_a_bfloat16_model_has_in_float32_are_not_rounded(make: Any) -> None:
    source, target, cast = Rotary(torch.float32), Rotary(BF16), Rotary(BF16).bfloat16()
    async with joined(make(wire_dtype=BF16), target, cast, model=source) as tx:
        source.inv_freq.mul_(1.1)
        report = await tx.send()
        assert report.acked == {0, 1}
        assert target.inv_freq.dtype is torch.float32
        assert torch.equal(target.inv_freq, source.inv_freq)
        assert torch.equal(cast.inv_freq, source.inv_freq.bfloat16())
        assert equal(target, source)
        assert equal(cast, source)
    scheme = make(wire_dtype=BF16, strict=False)
    async with joined(scheme, target, model=source) as tx:
        await tx.send()
        assert torch.equal(target.inv_freq, source.inv_freq)


@pytest.mark.asyncio
@every
async def test_patterns_and_a_pattern_that_fits_nothing(make: Any) -> None:
    source, target = noisy(models.linear()), models.linear()
    target.weight.data = target.weight.data.bfloat16()
    scheme = make(wire_dtype={"weight": BF16})
    async with joined(scheme, target, model=source) as tx:
        await tx.send()
        assert equal(target, source)
        with pytest.raises(aiosync.ConfigError, match="match no weight: weight"):
            await tx.send({"other": torch.ones(1)})
        await tx.send()


@pytest.mark.asyncio
async def test_slots_are_used_again() -> None:
    source, target = noisy(models.medium()), models.medium().bfloat16()
    scheme = aiosync.SharedMemWeightSyncScheme(wire_dtype=BF16)
    async with joined(scheme, target, model=source) as tx:
        for _ in range(6):
            noisy(source)
            await tx.send()
            assert equal(target, source)
        assert tx._arena is not None
        assert tx._arena.num_slots <= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "build"),
    [
        *((make, models.medium) for make in SCHEMES),
        (aiosync.DistributedWeightSyncScheme, models.big),
        # Large enough for its process group.
        (functools.partial(aiosync.DistributedWeightSyncScheme, shared_memory=False), models.big),
    ],
)
def test_worker_processes_and_late_ones(make: Any, build: Any) -> None:
    async def main() -> None:
        source = noisy(build())
        scheme = make(wire_dtype=BF16)
        scheme.init_on_sender(model_id="policy", model=source)
        half = functools.partial(halved, build)
        async with harness.workers(scheme, half, 1, method="fork") as [worker]:
            await scheme.send()
            noisy(source)
            await scheme.send()
            late = harness.start(harness.twin(scheme), half, method="fork")
            try:
                await late.call(harness.join, 1)
                for each in (worker, late):
                    found = await each.call(harness.weights)
                    assert torch.equal(found["block"], source.block.bfloat16())
            finally:
                late.end()

    harness.run("asyncio", main())


def halved(build: Any) -> nn.Module:
    return build().bfloat16()


@pytest.mark.asyncio
async def test_the_loop_turns_while_a_large_model_is_cast() -> None:
    source, target = noisy(models.big()), models.big().bfloat16()
    scheme = aiosync.TCPWeightSyncScheme(wire_dtype=BF16)
    async with joined(scheme, target, model=source) as tx:
        turns = 0
        sending = asyncio.ensure_future(tx.send())
        while not sending.done():
            await asyncio.sleep(0)
            turns += 1
        assert (await sending).acked == {0}
        assert turns > 10
        assert equal(target, source)


# -- the option ---------------------------------------------------------------------------------

CLASSES = [
    getattr(aiosync, name) for name in ("RPCWeightSyncScheme", "DistributedWeightSyncScheme")
]


@pytest.mark.parametrize("make", [*SCHEMES, *CLASSES, aiosync.NoWeightSyncScheme])
@pytest.mark.parametrize("dtype", [BF16, {"*.weight": BF16, "*": torch.float16}, None])
def test_it_is_kept_by_pickles_copies_and_twins(make: Any, dtype: Any) -> None:
    scheme = make(wire_dtype=dtype)
    assert scheme.wire_dtype == dtype
    assert pickle.loads(pickle.dumps(scheme)).wire_dtype == dtype
    assert copy.copy(scheme).wire_dtype == dtype
    twin = getattr(aiosync.sync, make.__name__)(wire_dtype=dtype)
    assert twin.wire_dtype == dtype
    assert pickle.loads(pickle.dumps(twin)).wire_dtype == dtype


@pytest.mark.parametrize("make", [*SCHEMES, *CLASSES])
@pytest.mark.parametrize("dtype", [torch.int8, "bfloat16", {"a": None}])
def test_illegal_dtypes(make: Any, dtype: Any) -> None:
    with pytest.raises(aiosync.ConfigError, match="wire_dtype"):
        make(wire_dtype=dtype)
    with pytest.raises(aiosync.ConfigError, match="wire_dtype"):
        getattr(aiosync.sync, make.__name__)(wire_dtype=dtype)


def test_the_blocking_twin() -> None:
    source, target = tools.filled(0.1), tools.filled(0.0).bfloat16()
    with tools.pair(tools.SHM, source, target, wire_dtype=BF16) as (sender, _):
        tools.fill(source, 0.7)
        assert sender.send().acked == {0}
        assert equal(target, source)
        sender.send_async()
        assert sender.wait_async().acked == {0}
