"""Updates of a part of the names, with ``strict=False``: none of them replaces another part."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from tests.schemes import _harness as harness

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]

both = pytest.mark.parametrize("make", harness.SCHEMES)
everywhere = pytest.mark.parametrize("make", [*harness.SCHEMES, aiosync.TCPWeightSyncScheme])


def build() -> nn.Module:
    return nn.ModuleDict({"base": nn.Linear(2, 2, bias=False), "adapter": nn.Linear(2, 2)})


def part(**values: float) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": torch.full((2, 2), 1.0 * each) for name, each in values.items()}


def held(scheme: Any) -> tuple[float, ...]:
    """The values of the two parts of a receiver's model."""
    with scheme.reading():
        weights = [scheme.model[name].weight for name in ("base", "adapter")]
        assert all((weight == weight[0, 0]).all() for weight in weights)
        return tuple(weight[0, 0].item() for weight in weights)


@both
@pytest.mark.parametrize(
    "bad", [{"base.weight": torch.zeros(3, 3)}, {**part(adapter=6.0), "note": "x" * 2**24}]
)
async def test_a_part_that_is_refused_or_too_large_holds_up_nobody(make: Any, bad: Any) -> None:
    scheme = make(strict=False)
    async with harness.here(scheme, build(), sender={"model": build()}) as (sender, receiver):
        async with receiver.reading():
            sender.send_nowait(part(base=5.0))
            refused = sender.send_nowait(bad)
            good = sender.send_nowait(part(adapter=9.0))
        with pytest.raises(aiosync.PartialSyncError):
            await refused
        assert (await good).acked == {0}
        assert held(receiver) == (5.0, 9.0)


LETTERS = "abc"


def letters(names: str, value: float) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": torch.full((1, 1), value) for name in names}


@everywhere
@pytest.mark.parametrize("order", ["abcb", "abcabcbbca", "bcb", "acbabccab"])
async def test_a_worker_never_has_what_the_trainer_never_had(make: Any, order: str) -> None:
    """Neither one that is slow, nor one that comes when all was sent."""
    build = lambda: nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in LETTERS})  # noqa: E731

    def content(model: Any) -> list[float]:
        return [model[name].weight.item() for name in LETTERS]

    scheme, target = make(strict=False), build()
    seen = list[tuple[int, list[float]]]()
    hooks = aiosync.SchemeHooks(applied=lambda _, version: seen.append((version, content(target))))
    scheme.init_on_sender(model_id="policy", weights=letters(LETTERS, 1.0))
    late, worker = harness.twin(scheme), harness.twin(scheme)
    had, now = {}, dict.fromkeys(LETTERS, 1.0)
    async with scheme, worker, late:
        await scheme.connect()
        worker.init_on_receiver(model_id="policy", model=target, hooks=hooks)
        await worker.connect(timeout=harness.PATIENCE)
        had[scheme.version] = [*now.values()]
        async with worker.reading():
            handles = []
            for value, name in enumerate(order, 2):
                handles.append(scheme.send_nowait(letters(name, float(value))))
                now[name] = float(value)
                had[handles[-1].version] = [*now.values()]
        for handle in handles:
            await handle
        await worker.wait_for_version(scheme.version, timeout=harness.PATIENCE)
        assert seen
        assert all(had[version] == found for version, found in seen), (had, seen)
        assert seen[-1] == (scheme.version, [*now.values()])
        target = build()
        late.init_on_receiver(model_id="policy", model=target, hooks=hooks)
        del seen[:]
        await late.connect(timeout=harness.PATIENCE)
        await late.wait_for_version(scheme.version, timeout=harness.PATIENCE)
        assert all(had[version] == found for version, found in seen), (had, seen)
        assert seen[-1] == (scheme.version, [*now.values()])


# -- who comes later -------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def again(sender: Any, gone: Any, target: nn.Module, **options: Any) -> Any:
    """Worker 1 goes, what is sent meanwhile is sent inside, and its successor comes at the end."""
    await gone.aclose()
    await harness.until(lambda: 1 not in sender.worker_versions)
    late = harness.twin(sender)
    yield late
    late.init_on_receiver(model_id="policy", model=target, worker_idx=1)
    await late.connect(timeout=harness.PATIENCE)
