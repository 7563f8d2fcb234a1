"""Updates as changes to the one before, over TCP: exact, small, and never without a way out."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from anyio import to_thread
from torch import nn

import aiosync
import aiosync.sync
from aiosync.errors import ConfigError
from aiosync.tensors.delta import DeltaLayout
from aiosync.testing import FaultProxy, Faults, Plan
from tests.schemes import _deltas as deltas
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.schemes._harness import PATIENCE
from tests.support.waiting import free_port

CHUNK = 128 * 1024
SIZE = sum(each.numel() * each.element_size() for each in deltas.build().buffers())


def tcp(url: str = "tcp://127.0.0.1:0", delta: Any = "always", **options: Any) -> Any:
    return aiosync.TCPWeightSyncScheme(url, delta=delta, chunk_nbytes=CHUNK, **options)


def step(model: nn.Module, share: float = 0.01) -> None:
    """Move a share of the elements by one step."""
    rng = torch.Generator().manual_seed(0)
    for each in model.buffers():
        if each.numel() and each.dtype == torch.bfloat16:
            each.view(torch.int16)[torch.rand(each.shape, generator=rng) < share] += 1


async def sent_nbytes(sender: Any) -> int:
    """Send, and return the bytes that travelled."""
    before = sender.stats().wire_nbytes
    await sender.send()
    found: int = sender.stats().wire_nbytes - before
    return found


@contextlib.asynccontextmanager
async def pair(**options: Any) -> Any:
    """A sender, its model, and a receiver with its model in this process."""
    model, target = deltas.build(), deltas.build()
    given = {"sender": {"model": model}}
    async with harness.here(tcp(**options), target, **given) as (sender, receiver):
        yield sender, model, receiver, target


# -- what travels ----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_an_update_of_few_changes_travels_in_few_bytes() -> None:
    async with pair() as (sender, model, _, target):
        assert sender.stats().wire_nbytes >= SIZE  # there is no base for the first one
        for _ in range(3):
            step(model)
            assert await sent_nbytes(sender) < SIZE / 30
            assert deltas.digests(target) == deltas.digests(model)


@pytest.mark.asyncio
async def test_a_worker_counts_the_bytes_that_travelled() -> None:
    seen: list[aiosync.SyncEvent] = []
    async with pair() as (sender, model, receiver, _):
        receiver.add_observer(SimpleNamespace(on_sync=seen.append))
        for number in range(1, 4):
            assert receiver.stats().wire_nbytes == sender.stats().wire_nbytes
            before = receiver.stats().wire_nbytes
            step(model)
            sent = await sent_nbytes(sender)
            assert receiver.stats().wire_nbytes == before + sent < before + SIZE / 30
            await harness.until(lambda number=number: len(seen) == number)  # type: ignore[misc]
            assert seen[-1].wire_nbytes == sent and seen[-1].nbytes >= SIZE


@pytest.mark.asyncio
async def test_by_default_everything_travels() -> None:
    assert aiosync.TCPWeightSyncScheme().delta == "off"
    async with pair(delta="off") as (sender, model, _, target):
        step(model)
        assert await sent_nbytes(sender) >= SIZE
        assert deltas.digests(target) == deltas.digests(model)


@pytest.mark.asyncio
@pytest.mark.parametrize(("trainer", "worker"), [("always", "off"), ("off", "always")])
async def test_both_sides_have_to_say_so(trainer: Any, worker: Any) -> None:
    """So a worker of an older release gets whole updates, too."""
    sender, model, target = tcp(delta=trainer), deltas.build(), deltas.build()
    sender.init_on_sender("policy", model=model, num_workers=1)
    receiver = tcp(sender.address, delta=worker)
    receiver.init_on_receiver("policy", model=target)
    async with sender, receiver:
        await asyncio.gather(sender.connect(), receiver.connect())
        for _ in range(2):
            step(model)
            assert await sent_nbytes(sender) >= SIZE
            assert deltas.digests(target) == deltas.digests(model)


@pytest.mark.asyncio
async def test_auto_does_not_use_deltas_where_bytes_are_cheap() -> None:
    async with pair(delta="auto") as (sender, model, _, target):
        for _ in range(3):
            step(model)
            assert await sent_nbytes(sender) >= SIZE
            assert deltas.digests(target) == deltas.digests(model)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_auto_uses_deltas_on_a_slow_link() -> None:
    count = 8 * 2**20
    model, target = (nn.Linear(1, count, dtype=torch.bfloat16, bias=False) for _ in range(2))
    sender = aiosync.TCPWeightSyncScheme(delta="auto")
    sender.init_on_sender("policy", model=model, num_workers=1)
    async with FaultProxy(sender.address) as proxy, sender:
        proxy.plan = Plan(back=Faults(delay=0.002))  # 33 MB/s at most
        receiver = aiosync.TCPWeightSyncScheme(proxy.url, delta="auto")
        receiver.init_on_receiver("policy", model=target)
        async with receiver:
            await asyncio.gather(sender.connect(), receiver.connect())
            found = []
            for _ in range(3):
                with torch.no_grad():
                    model.weight.view(torch.int16)[::100] += 1
                found.append(await sent_nbytes(sender))
                assert torch.equal(target.weight, model.weight)
    assert min(found) < 2 * count / 30


@pytest.mark.slow
@pytest.mark.asyncio
async def test_auto_tries_deltas_again_soon_after_a_late_one() -> None:
    count = 8 * 2**20
    model, target = (nn.Linear(1, count, dtype=torch.bfloat16, bias=False) for _ in range(2))
    sender = aiosync.TCPWeightSyncScheme(delta="auto")
    sender.init_on_sender("policy", model=model, num_workers=1)
    async with FaultProxy(sender.address) as proxy, sender:
        proxy.plan = Plan(back=Faults(delay=0.002))  # a whole update takes half a second at least
        receiver = aiosync.TCPWeightSyncScheme(proxy.url, delta="auto")
        receiver.init_on_receiver("policy", model=target)
        async with receiver:
            await asyncio.gather(sender.connect(), receiver.connect())
            are_deltas = []
            for number in range(5):
                with torch.no_grad():
                    model.weight.view(torch.int16)[::100] += 1
                if number == 1:
                    proxy.stall()
                    asyncio.get_running_loop().call_later(3.0, proxy.resume)
                are_deltas.append(await sent_nbytes(sender) < 2 * count / 30)
                assert torch.equal(target.weight, model.weight)
    assert are_deltas == [True, True, False, False, True]


@pytest.mark.asyncio
async def test_a_worker_that_skipped_versions_gets_the_changes_since_its_own() -> None:
    """Otherwise a link that takes long for a whole update would carry nothing else for ever."""
    model, quick, slow = deltas.build(), deltas.build(), deltas.build()
    sender = tcp(require=1)
    sender.init_on_sender("policy", model=model)
    first = tcp(sender.address)
    first.init_on_receiver("policy", model=quick)
    async with FaultProxy(sender.address) as proxy, sender, first:
        await asyncio.gather(sender.connect(), first.connect())
        proxy.plan = Plan(back=Faults(delay=0.05))
        second = tcp(proxy.url, subscribe=True)
        second.init_on_receiver("policy", model=slow)
        async with second:
            joining = asyncio.create_task(second.connect())
            while not joining.done():  # it gets the first version meanwhile
                step(model)
                await sender.send()
                await asyncio.sleep(0.01)
            await second.wait_for_version(sender.version, timeout=PATIENCE)
            assert deltas.digests(slow) == deltas.digests(model)
            sent = sender.stats().wire_nbytes
    assert sender.version > 4
    assert sent < 2.5 * SIZE


@pytest.mark.asyncio
async def test_a_small_update_travels_whole() -> None:
    model, target = models.linear(), models.linear()
    async with harness.here(tcp(), target, sender={"model": model}) as (sender, receiver):
        for value in (1.0, 2.0, 3.0):
            await harness.deliver(sender, receiver, value)


@pytest.mark.asyncio
async def test_another_layout_travels_whole_and_is_the_next_base() -> None:
    """Layouts of the same size with other dtypes are told apart, too."""
    target = deltas.build()
    async with harness.here(tcp(strict=False), target, sender={"model": deltas.build()}) as (
        sender,
        _,
    ):
        for names in (["bfloat16_3"], ["float16_3"], ["bfloat16_3", "bfloat16_0"]):
            given = {name: torch.ones_like(target.get_buffer(name)) for name in names}
            for number in range(3):
                before = sender.stats().wire_nbytes
                for each in given.values():
                    each.view(torch.int16)[::50] += 1
                await sender.send(given)
                small = sender.stats().wire_nbytes - before < 20_000
                assert small == (number > 0)
                for name, each in given.items():
                    assert torch.equal(target.get_buffer(name), each)


@pytest.mark.asyncio
@pytest.mark.parametrize("cut", [False, True])
async def test_parts_that_arrived_joined_are_no_base_of_a_part(cut: bool) -> None:
    """They have the version of the last part, and over another link that version came joined."""

    def part(name: str, value: float) -> dict[str, torch.Tensor]:
        return {name: torch.full((SIZE // 8,), value)}

    sender = tcp(strict=False, timeout=PATIENCE)
    sender.init_on_sender(weights=part("a", 1.0) | part("b", 1.0), num_workers=None)
    target = part("a", 0.0) | part("b", 0.0)
    async with FaultProxy(sender.address) as proxy, sender, contextlib.AsyncExitStack() as stack:

        async def join(url: str, weights: dict[str, torch.Tensor]) -> Any:
            scheme = tcp(url, strict=False, guard="reading")
            scheme.init_on_receiver(weights=weights)
            await stack.enter_async_context(scheme)
            await scheme.connect()
            return scheme

        await sender.connect()
        await join(sender.address, part("a", 0.0) | part("b", 0.0))
        await sender.send(part("a", 2.0))
        await sender.send(part("b", 3.0))
        late = await join(proxy.url, target)
        if cut:
            proxy.cut()
            await harness.until(lambda: late.stats().reconnects == 1)
            await harness.until(lambda: len(sender.sender_transports) == 2)
            await asyncio.sleep(0.2)  # the worker's word about its base arrives
        for value in (4.0, 5.0):
            assert (await sender.send(part("b", value))).acked == {0, 1}
            await late.wait_for_version(sender.version, timeout=PATIENCE)
            with late.reading():
                assert [float(each[0]) for each in target.values()] == [2.0, value]
        assert late.stats().reconnects == cut


@pytest.mark.asyncio
@pytest.mark.parametrize("cut", [False, True])
async def test_joins_of_one_version_are_no_bases_of_each_other(cut: bool) -> None:
    """Two workers get each a part of its own while both links are busy, and then one for all."""
    values = {name: torch.full((SIZE // 8,), 1.0) for name in "ab"}
    sender = tcp(strict=False, timeout=PATIENCE)
    sender.init_on_sender(weights=values, num_workers=2)
    targets = [{name: torch.zeros(SIZE // 8) for name in "ab"} for _ in range(2)]
    async with FaultProxy(sender.address) as proxy, sender, contextlib.AsyncExitStack() as stack:
        workers = []
        for idx, target in enumerate(targets):
            worker = tcp(proxy.url, strict=False, guard="reading")
            worker.init_on_receiver(weights=target, worker_idx=idx)
            workers.append(await stack.enter_async_context(worker))
        await asyncio.gather(sender.connect(), *(each.connect() for each in workers))
        a, b = values.values()
        sender.send_nowait(values)
        sender.send_nowait({"b": b + 1})
        sender.send_nowait({"a": a + 1}, worker_ids=0)
        sender.send_nowait({"a": a + 2}, worker_ids=1)
        await sender.send_nowait({"b": b + 2})
        for worker, target, value in zip(workers, targets, (2.0, 3.0), strict=True):
            with worker.reading():
                assert [each.unique().tolist() for each in target.values()] == [[value], [3.0]]
        if cut:
            proxy.cut()
            await harness.until(lambda: all(each.stats().reconnects for each in workers))
            await harness.until(lambda: len(sender.sender_transports) == 2)
        await asyncio.sleep(0.2)  # the workers' words about their bases arrive
        assert (await sender.send({"a": a + 3, "b": b + 3})).acked == {0, 1}
        for worker, target in zip(workers, targets, strict=True):
            with worker.reading():
                assert [each.unique().tolist() for each in target.values()] == [[4.0], [4.0]]
            assert worker.stats().reconnects == cut


# -- what a worker does to its weights -------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("copy", [False, True])
async def test_what_a_worker_writes_is_no_base(copy: bool) -> None:
    async with pair(apply_copy=copy) as (sender, model, receiver, target):
        for _ in range(3):
            for each in target.buffers():
                each.fill_(1)
            step(model)
            assert await sent_nbytes(sender) < SIZE / 30
            assert deltas.digests(target) == deltas.digests(model)
        assert receiver.stats().reconnects == 0


@pytest.mark.asyncio
async def test_a_refused_update_is_a_base_all_the_same() -> None:
    """A worker's base is the update that arrived, whether or not its model took that."""
    async with pair(strict=False) as (sender, model, receiver, target):
        for wrong in (True, False, True, True, False):
            step(model)
            target.bfloat16_3 = torch.zeros(3 if wrong else 70_000, dtype=torch.bfloat16)
            before = sender.stats().wire_nbytes
            with pytest.raises(aiosync.PartialSyncError) if wrong else contextlib.nullcontext():
                await sender.send()
            assert sender.stats().wire_nbytes - before < SIZE / 30
        assert deltas.digests(target) == deltas.digests(model)
        assert receiver.stats().reconnects == 0


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_damaged_delta_costs_the_link_and_comes_again_whole() -> None:
    model, target = deltas.build(), deltas.build()
    sender = tcp(timeout=PATIENCE)
    sender.init_on_sender("policy", model=model, num_workers=1)
    async with FaultProxy(sender.address) as proxy, sender:
        receiver = tcp(proxy.url)
        receiver.init_on_receiver("policy", model=target)
        async with receiver:
            await asyncio.gather(sender.connect(), receiver.connect())
            before = proxy.bytes_back
            step(model)
            await sender.send()
            length = proxy.bytes_back - before
            for number in range(6):
                # The next link is damaged in its first update, which is a delta.
                proxy.plan = Plan(back=Faults(corrupt_at=600 + number * length // 7))
                links = proxy.connections
                proxy.cut()
                await harness.until(lambda links=links: proxy.connections > links)
                await harness.until(lambda: len(sender.sender_transports) == 1)
                await asyncio.sleep(0.1)  # the worker's word about its base arrives
                proxy.plan = None
                step(model)
                with contextlib.suppress(aiosync.PartialSyncError):
                    await sender.send()
                await receiver.wait_for_version(sender.version, timeout=PATIENCE)
                assert deltas.digests(target) == deltas.digests(model)
                assert proxy.connections > links + 1


@pytest.mark.asyncio
async def test_a_chunk_that_cannot_be_encoded_travels_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without memory, or without a thread, for it."""
    async with pair(timeout=PATIENCE) as (sender, model, _, target):
        encode, errors = DeltaLayout.encode, [MemoryError(), RuntimeError("can't start new thread")]

        def fail_first(*args: Any) -> bytes:
            if errors:
                raise errors.pop()
            return encode(*args)

        monkeypatch.setattr(DeltaLayout, "encode", fail_first)
        for _ in range(2):
            step(model)
            assert (await sender.send()).acked == {0}
            assert deltas.digests(target) == deltas.digests(model)
        assert not errors


@pytest.mark.asyncio
@pytest.mark.parametrize("failing", [(DeltaLayout, "apply"), (to_thread, "run_sync")])
async def test_a_chunk_that_cannot_be_decoded_costs_the_link(
    failing: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory, or without a thread, for it."""
    async with pair(timeout=PATIENCE) as (sender, model, receiver, target):
        call, errors = getattr(*failing), [MemoryError()]
        errors += [RuntimeError("can't start new thread")] * 10

        def fail_first(*args: Any, **options: Any) -> Any:
            if errors:
                raise errors.pop()
            return call(*args, **options)

        monkeypatch.setattr(*failing, fail_first)
        while errors:
            step(model)
            with contextlib.suppress(aiosync.PartialSyncError):
                await sender.send()
        await receiver.wait_for_version(sender.version, timeout=PATIENCE)
        assert deltas.digests(target) == deltas.digests(model)
        assert receiver.stats().reconnects


@pytest.mark.asyncio
async def test_a_link_that_comes_back_goes_on_with_deltas() -> None:
    model, target = deltas.build(), deltas.build()
    sender = tcp()
    sender.init_on_sender("policy", model=model, num_workers=1)
    async with FaultProxy(sender.address) as proxy, sender:
        receiver = tcp(proxy.url)
        receiver.init_on_receiver("policy", model=target)
        async with receiver:
            await asyncio.gather(sender.connect(), receiver.connect())
            proxy.cut()
            await harness.until(lambda: receiver.stats().reconnects == 1)
            await harness.until(lambda: len(sender.sender_transports) == 1)
            await asyncio.sleep(0.2)  # the worker's word about its base arrives
            step(model)
            assert await sent_nbytes(sender) < SIZE / 30
            assert deltas.digests(target) == deltas.digests(model)


def test_options_that_exclude_each_other_and_a_missing_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def connect(**options: Any) -> None:
        scheme = tcp(**options)
        weights = {0: models.linear()} if options else None
        del weights
        scheme.init_on_sender("policy", model=models.linear(), num_workers=1)
        async with scheme:
            await scheme.connect(timeout=5)

    with pytest.raises(ConfigError, match="per_worker_weights has many: choose one of them"):
        asyncio.run(connect(per_worker_weights=True))
    state = dict(models.linear().state_dict())
    maps: list[dict[str, Any]] = [
        {"params_map": {0: state, 1: dict(state)}},
        {"weights": state, "num_workers": 2, "device_map_fn": lambda _, given: dict(given)},
    ]
    for sources in maps:
        scheme = tcp()
        scheme.init_on_sender("policy", **sources)
        with pytest.raises(ConfigError, match="makes one for each worker: choose one of them"):
            asyncio.run(scheme.connect(timeout=5))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"pip install 'aiosync\[delta\]'"):
        asyncio.run(connect())


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.asyncio
async def test_each_side_keeps_one_more_copy() -> None:
    """NumPy and the flat buffers of less than 1 MiB tell tracemalloc what they allocate."""
    peaks = {}
    for mode in ("off", "always"):
        async with pair(delta=mode) as (sender, model, _, _target):
            for _ in range(3):
                step(model)
                await sender.send()
            tracemalloc.start()
            try:
                for _ in range(5):
                    step(model)
                    await sender.send()
                peaks[mode] = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
    assert peaks["always"] < peaks["off"] + 3 * SIZE


# -- processes -------------------------------------------------------------------------------------


async def _history(updates: int, seed: int) -> None:
    """Random updates to two worker processes that come and go, over links that are damaged."""
    rng, url = random.Random(seed), f"tcp://127.0.0.1:{free_port()}"
    model, crew = deltas.build(), dict[int, harness.Worker]()
    deltas.change(model, rng)

    async def trainer() -> Any:
        # A damaged length may have a worker wait for bytes that never come.
        scheme = tcp(url, timeout=PATIENCE, require=1, stall_timeout=3)
        scheme.init_on_sender("policy", model=model, num_workers=None)
        await scheme.connect()
        return scheme

    async def same(worker: harness.Worker, version: int) -> None:
        await worker.call(deltas.wait_for, sender.stats().epoch, version)
        assert await worker.call(deltas.worker_digests) == deltas.digests(model)

    sender = await trainer()
    async with FaultProxy(url) as proxy:

        async def join(idx: int) -> None:
            crew[idx] = harness.start(tcp(proxy.url), deltas.build)
            await crew[idx].call(harness.join, idx)

        try:
            for idx in range(2):
                await join(idx)
            for number in range(updates):
                event = rng.random()
                if event < 0.02:
                    idx = rng.randrange(2)
                    crew[idx].kill()
                    crew.pop(idx).end()
                    await join(idx)
                elif event < 0.04:
                    await sender.aclose()
                    sender = await trainer()
                elif event < 0.09:
                    plan = Plan(back=Faults(corrupt_at=rng.randrange(2 * SIZE)))
                    harmed = [plan] * len(crew)
                    proxy.plan = lambda _, left=harmed: left.pop() if left else None
                    proxy.cut()
                elif event < 0.12:
                    await crew[rng.randrange(2)].call(deltas.overwrite)
                deltas.change(model, rng)
                with contextlib.suppress(aiosync.PartialSyncError):
                    await sender.send()
                # Sometimes a worker is still at an older version when the next update comes.
                if number % 3 != 1:
                    for worker in crew.values():
                        await same(worker, sender.version)
            for worker in crew.values():
                await same(worker, sender.version)
        finally:
            await sender.aclose()
            for worker in crew.values():
                worker.end()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("updates", "seed"), [(30, 0), pytest.param(300, 1, marks=pytest.mark.heavy)]
)
def test_every_applied_state_is_the_trainers(updates: int, seed: int) -> None:
    harness.run("uvloop", _history(updates, seed))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("updates", "seed"), [(20, 0), pytest.param(300, 1, marks=pytest.mark.heavy)]
)
def test_the_blocking_api_does_the_same(updates: int, seed: int) -> None:
    rng, model = random.Random(seed), deltas.build()
    context = harness.context("forkserver")
    with aiosync.sync.TCPWeightSyncScheme(delta="always", chunk_nbytes=CHUNK) as sender:
        sender.init_on_sender("policy", model=model, num_workers=1)
        ours, theirs = context.Pipe()
        process = context.Process(
            target=deltas.blocking_worker, args=(sender.address, theirs), daemon=True
        )
        process.start()
        theirs.close()
        try:
            sender.connect(timeout=PATIENCE)
            for _ in range(updates):
                deltas.change(model, rng)
                report = sender.send()
                ours.send(True)
                assert ours.poll(PATIENCE), "the worker said nothing"
                assert ours.recv() == (report.version, deltas.digests(model))
            assert sender.stats().wire_nbytes < updates * SIZE
            ours.send(False)
        finally:
            harness.end(process)
