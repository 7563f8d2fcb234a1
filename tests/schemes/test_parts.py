"""Updates of a part of the names, with ``strict=False``: none of them replaces another part."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from tests.schemes import _harness as harness

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]

both = pytest.mark.parametrize("make", harness.SCHEMES)


def build() -> nn.Module:
    return nn.ModuleDict({"base": nn.Linear(2, 2, bias=False), "adapter": nn.Linear(2, 2)})


def part(*values: tuple[str, float]) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": torch.full((2, 2), float(value)) for name, value in values}


def held(model: nn.Module) -> tuple[float, float]:
    base, adapter = model["base"].weight, model["adapter"].weight  # type: ignore[index]
    assert (base == base[0, 0]).all()
    assert (adapter == adapter[0, 0]).all()
    return base[0, 0].item(), adapter[0, 0].item()


@both
async def test_two_parts_while_a_worker_reads(make: Any) -> None:
    target = build()
    async with harness.here(make(strict=False), target, sender={"model": build()}) as pair:
        sender, receiver = pair
        async with receiver.reading():
            handles = [sender.send_nowait(part(("base", 5.0)))]
            await harness.until(lambda: receiver.staged_version == handles[0].version)
            handles.append(sender.send_nowait(part(("adapter", 7.0))))
            await asyncio.sleep(0.05)  # it must not take the other's place meanwhile
            assert receiver.staged_version == handles[0].version
        for handle in handles:
            assert (await handle).acked == {0}
        assert held(target) == (5.0, 7.0)
        assert receiver.version == handles[-1].version


@both
async def test_parts_that_wait_are_replaced_by_what_holds_them(make: Any) -> None:
    target = build()
    async with harness.here(make(strict=False), target, sender={"model": build()}) as pair:
        sender, receiver = pair
        skipped = sender._sender.peers[0].outbox.skipped
        async with receiver.reading():
            sender.send_nowait(part(("base", 1.0)))
            for value in range(1000):
                sender.send_nowait(part(("adapter", value)))
                last = sender.send_nowait(part(("base", value)))
            peer = sender._sender.peers[0]
            assert len(peer._snapshots) <= 2  # one for each part
        await last
        assert held(target) == (999.0, 999.0)
        assert sender._sender.peers[0].outbox.skipped - skipped == 2001 - 3
        async with receiver.reading():
            sender.send_nowait(part(("base", 2.0)))
            sender.send_nowait(part(("adapter", 3.0)))
            last = sender.send_nowait(part(("base", 4.0), ("adapter", 5.0)))
            assert len(peer._snapshots) <= 1
        await last
        assert held(target) == (4.0, 5.0)


@both
async def test_a_part_that_is_refused_does_not_hold_up_the_next(make: Any) -> None:
    target: Any = build()
    async with harness.here(make(strict=False), target, sender={"model": build()}) as pair:
        sender, receiver = pair
        async with receiver.reading():
            bad = sender.send_nowait({"base.weight": torch.zeros(3, 3)})
            good = sender.send_nowait(part(("adapter", 7.0)))
        with pytest.raises(Exception, match="base.weight"):
            await bad
        await good
        assert (target["adapter"].weight == 7.0).all()


@both
async def test_with_manual_apply_the_parts_come_one_after_the_other(make: Any) -> None:
    target = build()
    scheme = make(strict=False, apply="manual")
    async with harness.here(scheme, target, sender={"model": build()}) as pair:
        sender, receiver = pair
        first = sender.send_nowait(part(("base", 5.0)))
        await receiver.wait_staged(first.version)
        second = sender.send_nowait(part(("adapter", 7.0)))
        await asyncio.sleep(0.05)
        await receiver.wait_for_version(second.version, timeout=harness.PATIENCE)
        assert (await first).acked == (await second).acked == {0}
        assert held(target) == (5.0, 7.0)


@both
async def test_no_more_wait_than_there_are_names(make: Any) -> None:
    names = [f"{idx}.weight" for idx in range(8)]
    target = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in names)
    choose = random.Random(0)
    newest: dict[str, float] = {}
    async with harness.here(make(strict=False), target, sender={"model": target}) as pair:
        sender, receiver = pair
        peer = sender._sender.peers[0]
        async with receiver.reading():
            for value in range(300):
                some = choose.sample(names, 3)
                newest |= dict.fromkeys(some, float(value))
                last = sender.send_nowait({name: torch.full((1, 1), float(value)) for name in some})
                assert len(peer._snapshots) <= len(names) + 1
                if not value % 50:
                    await asyncio.sleep(0.01)
        await last
        assert {name: value.item() for name, value in target.state_dict().items()} == newest


async def test_what_comes_after_one_that_cannot_be_sent() -> None:
    """It is refused when its turn comes, by the limit of a header."""
    target = build()
    scheme = aiosync.MultiProcessWeightSyncScheme(strict=False)
    async with harness.here(scheme, target, sender={"model": build()}) as pair:
        sender, receiver = pair
        async with receiver.reading():
            handles = [
                sender.send_nowait(part(("base", 5.0))),
                sender.send_nowait({**part(("adapter", 6.0)), "note": "x" * 2**25}),
                sender.send_nowait(part(("adapter", 7.0), ("base", 8.0))),
                sender.send_nowait(part(("adapter", 9.0))),
            ]
        with pytest.raises(aiosync.PartialSyncError):
            await handles[1]
        await handles[-1]
        assert held(target) == (8.0, 9.0)


@both
async def test_what_waits_fails_with_the_link(make: Any) -> None:
    async with harness.here(make(strict=False), build(), sender={"model": build()}) as pair:
        sender, receiver = pair
        async with receiver.reading():
            handles = [
                sender.send_nowait(part(("base", 5.0))),
                sender.send_nowait(part(("adapter", 7.0))),
            ]
            receiver.abort()
            for handle in handles:
                with pytest.raises(Exception, match="closed|went away"):
                    await handle


# -- who comes later -------------------------------------------------------------------------------

everywhere = pytest.mark.parametrize("make", [*harness.SCHEMES, aiosync.TCPWeightSyncScheme])


async def come(sender: Any, worker_idx: int, target: Any, **options: Any) -> Any:
    late = harness.twin(sender)
    late.init_on_receiver(model_id="policy", model=target, worker_idx=worker_idx, **options)
    await late.connect(timeout=harness.PATIENCE)
    return late


@everywhere
@pytest.mark.parametrize("apply", ["auto", "manual"])
async def test_who_comes_later_gets_the_newest_of_each_name(make: Any, apply: Any) -> None:
    scheme = make(strict=False, apply=apply)
    async with harness.crowd(scheme, [build(), build()], sender={"model": build()}) as pair:
        sender, (first, second) = pair
        await second.aclose()
        await harness.until(lambda: 1 not in sender.worker_versions)
        for weights in (
            part(("base", 3.0), ("adapter", 4.0)),
            part(("adapter", 5.0)),
            part(("base", 6.0)),
            part(("adapter", 7.0)),
        ):
            handle = sender.send_nowait(weights)
            await first.wait_for_version(handle.version, timeout=harness.PATIENCE)
            with contextlib.suppress(aiosync.PartialSyncError):  # once it says who was lost
                await handle
        target = build()
        late = await come(sender, 1, target)
        try:
            assert late.version == handle.version  # and not that of one which comes before
            assert held(target) == (6.0, 7.0)
            handle = sender.send_nowait(part(("adapter", 8.0)))
            await late.wait_for_version(handle.version, timeout=harness.PATIENCE)
            assert held(target) == (6.0, 8.0)
        finally:
            await late.aclose()


@everywhere
async def test_what_others_got_meanwhile_is_not_for_who_comes_again(make: Any) -> None:
    scheme = make(strict=False, per_worker_weights=True)
    async with harness.crowd(scheme, [build(), build()], sender={"model": build()}) as pair:
        sender, (_, second) = pair
        await sender.send({0: part(("base", 1.0)), 1: part(("base", 2.0), ("adapter", 3.0))})
        await sender.send({0: part(("adapter", 9.0))})
        await sender.send(part(("adapter", 4.0)), worker_ids=1)
        await sender.send(part(("base", 8.0)), worker_ids=0)
        await second.aclose()
        await harness.until(lambda: 1 not in sender.worker_versions)
        target = build()
        late = await come(sender, 1, target)
        try:
            assert held(target) == (2.0, 4.0)
        finally:
            await late.aclose()


async def test_a_link_that_was_lost_is_made_up_for() -> None:
    target = build()
    scheme = aiosync.TCPWeightSyncScheme(strict=False)
    async with harness.here(scheme, target, sender={"model": build()}) as pair:
        sender, receiver = pair
        async with receiver.reading():
            handles = [
                sender.send_nowait(part(("base", 5.0))),
                last := sender.send_nowait(part(("adapter", 7.0))),
            ]
            sender._sender.peers[0].transport.abort()
            for handle in handles:
                with pytest.raises(aiosync.PartialSyncError):
                    await handle
            await harness.until(lambda: receiver.reconnects == 1)
        await receiver.wait_for_version(last.version, timeout=harness.PATIENCE)
        assert held(target) == (5.0, 7.0)


async def test_who_asks_gets_the_newest_of_each_name() -> None:
    scheme = aiosync.TCPWeightSyncScheme(strict=False)
    async with harness.here(scheme, build(), sender={"model": build()}) as (sender, _):
        await sender.send(part(("base", 5.0), ("adapter", 6.0)))
        last = await sender.send(part(("adapter", 7.0)))
        sender._sender.workers.num_workers = None
        asking = aiosync.TCPWeightSyncScheme(sender.address, strict=False, subscribe=False)
        target = build()
        asking.init_on_receiver(model_id="policy", model=target)
        try:
            await asking.connect(timeout=harness.PATIENCE)
            assert await asking.pull(timeout=harness.PATIENCE) == last.version
            assert held(target) == (5.0, 7.0)
            newer = await sender.send(part(("base", 8.0)))
            assert await asking.pull(timeout=harness.PATIENCE) == newer.version
            assert held(target) == (8.0, 7.0)
        finally:
            await asking.aclose()


@everywhere
async def test_parts_of_very_different_sizes(make: Any) -> None:
    def large() -> nn.Module:
        return nn.ModuleDict({"base": nn.Linear(1500, 1500), "adapter": nn.Linear(2, 2)})

    def filled(name: str, value: float) -> dict[str, torch.Tensor]:
        layer: Any = large()[name]  # type: ignore[index]
        return {f"{name}.weight": torch.full_like(layer.weight, value)}

    scheme = make(strict=False)
    async with harness.crowd(scheme, [large(), large()], sender={"num_workers": 2}) as pair:
        sender, (_, second) = pair
        await sender.send(filled("adapter", 1.0))
        for value in range(6):  # larger slots than there were
            await sender.send(filled("base", float(value)))
        await second.aclose()
        await harness.until(lambda: 1 not in sender.worker_versions)
        target: Any = large()
        late = await come(sender, 1, target)
        try:
            for _ in range(2):
                assert (target["adapter"].weight == 1.0).all()
                assert (target["base"].weight == value).all()
                value += 1
                handle = sender.send_nowait(filled("base", float(value)))
                await late.wait_for_version(handle.version, timeout=harness.PATIENCE)
                assert (await handle).acked == {0, 1}
        finally:
            await late.aclose()


@everywhere
async def test_a_mistake_that_all_refused_keeps_nobody_out(make: Any) -> None:
    scheme = make(strict=False)
    async with harness.crowd(scheme, [build(), build()], sender={"model": build()}) as pair:
        sender, (_, second) = pair
        await second.aclose()
        await harness.until(lambda: 1 not in sender.worker_versions)
        for mistake in ({"typo.weight": torch.zeros(3, 3)}, {"base.weight": torch.zeros(3, 3)}):
            with pytest.raises(aiosync.PartialSyncError):
                await sender.send(mistake)
        await sender.send(part(("base", 3.0), ("adapter", 4.0)))
        target = build()
        late = await come(sender, 1, target)
        try:
            assert late.version == sender.version
            assert held(target) == (3.0, 4.0)
        finally:
            await late.aclose()
