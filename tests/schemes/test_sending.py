"""Sends to workers with weights of their own, sends of parts of the names, and sends to no worker.

The contract suite tests the promises of every scheme: reports, require, lost and late workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import functools
import mmap
import multiprocessing
import os
import random
import threading
import time
from typing import Any

import pytest
import torch
from anyio import to_thread
from tensordict import TensorDict
from torch import nn

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.support.waiting import PATIENCE, until

both = pytest.mark.parametrize("make", harness.SCHEMES)
pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


def values(receivers: list[Any]) -> list[float]:
    """Return the one value that the model of each receiver has."""
    found = []
    for receiver in receivers:
        with receiver.reading():
            found.append(next(receiver.model.parameters()).flatten()[0].item())
        assert models.holds(receiver, found[-1])
    return found


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 4), value), "bias": torch.full((2,), value)}


@both
async def test_a_worker_without_weights_of_its_own_connects_all_the_same(make: Any) -> None:
    init = {"params_map": {0: weights(1.0), 2: weights(3.0)}, "num_workers": None}
    targets = [models.linear() for _ in range(3)]
    async with harness.crowd(make(), targets, sender=init) as (sender, others):
        assert values(others) == [1.0, -1.0, 3.0]
        assert [other.version for other in others] == [1, 0, 1]
        assert sender.prepare_weights(None).keys() == {0, 2}
        assert (await sender.send()).acked == {0, 2}
        for name, value in (("model", models.linear()), ("weights", weights(3.0))):
            # One set of weights cannot be for all workers.
            with pytest.raises(aiosync.ConfigError, match="worker_idx"):
                setattr(sender, name, value)


async def test_the_age_of_a_version_is_right_although_sends_are_uneven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, rng, targets = 1e6, random.Random(0), [models.linear() for _ in range(2)]
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    init = {"model": models.linear(), "num_workers": 2}
    scheme = aiosync.MultiProcessWeightSyncScheme()
    async with harness.crowd(scheme, targets, sender=init) as (sender, _):
        sent_at = {1: now}
        for _ in range(1000):
            now += rng.choice([0.0, 0.06, 0.06, 0.06, 1.0, rng.choice([1.0, 30.0, 1000.0])])
            everywhere = rng.random() < 0.01
            report = await sender.send(worker_ids=None if everywhere else [0])
            sent_at[report.version] = now
            for worker in sender.stats().workers:
                age = now - sent_at[worker.version]
                assert abs(worker.age - age) <= max(0.05, 0.1 * age) + 1e-6


@both
async def test_an_old_refusal_is_not_why_a_worker_without_weights_fails(make: Any) -> None:
    init = {"model": models.linear(), "num_workers": 2}
    targets = [models.linear() for _ in range(2)]
    async with harness.crowd(make(per_worker_weights=True), targets, sender=init) as (sender, _):
        bad = weights(0.0) | {"bias": torch.zeros(9)}
        for given, kind in (({1: bad}, aiosync.ApplyError), ({0: bad}, aiosync.ConfigError)):
            with pytest.raises(aiosync.PartialSyncError) as caught:
                await sender.send(given, worker_ids=1)
            assert isinstance(caught.value.failed[1], kind)


@both
async def test_a_device_map_gives_each_worker_its_own(make: Any) -> None:
    """The function gets tensors and no model, because ``.to()`` would change a model in place."""
    source, kinds = models.linear(1.0), set()

    def scaled(idx: int, given: Any) -> Any:
        kinds.add(type(given))
        return given.to(torch.float64).apply(lambda x: x * (idx + 1)).to(torch.float32)

    options = {"model": source, "device_map_fn": scaled}
    targets = [models.linear() for _ in range(3)]
    async with harness.crowd(make(), targets, sender=options) as (sender, others):
        assert values(others) == [1.0, 2.0, 3.0]
        await sender.send(weights(2.0))
        assert values(others) == [2.0, 4.0, 6.0]
    assert kinds == {TensorDict}
    assert source.weight.dtype is torch.float32


async def test_no_synchronisation_at_all() -> None:
    scheme = aiosync.NoWeightSyncScheme()
    other = harness.twin(scheme)
    scheme.init_on_sender(model=models.linear(), num_workers=3)
    other.init_on_receiver(model=models.linear())
    async with scheme, other:
        await scheme.connect()
        with pytest.raises(aiosync.ConfigError, match="worker_idx"):
            await other.connect(worker_idx=-3)
        await other.connect(worker_idx=2)
        report = await scheme.send(max_lag=2)
        assert (report.version, report.acked) == (0, frozenset())
        assert (await scheme.send_nowait()) == report
        for call in (scheme.wait_lag_below(True), scheme.send(max_lag=0)):
            with pytest.raises(aiosync.ConfigError, match="a lag must be"):
                await call
        assert await other.receive(timeout=0) is None
        assert (other.worker_idx, other.version) == (2, 0)
        assert models.holds(other, -1.0)


# -- parts of the names, with strict=False: none of them replaces another part ---------------------


def letters(names: str, value: float) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": torch.full((1, 1), value) for name in names}


def build() -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in "abc"})


def content(model: Any) -> list[float]:
    return [model[name].weight.item() for name in "abc"]


@both
@pytest.mark.parametrize(
    "bad", [{"a.weight": torch.zeros(3, 3)}, {**letters("b", 6.0), "note": "x" * 2**24}]
)
async def test_a_part_that_is_refused_or_too_large_holds_up_nobody(make: Any, bad: Any) -> None:
    init = {"weights": letters("abc", 1.0)}
    async with harness.here(make(strict=False), build(), sender=init) as (sender, receiver):
        async with receiver.reading():
            sender.send_nowait(letters("a", 5.0))
            refused = sender.send_nowait(bad)
            good = sender.send_nowait(letters("b", 9.0))
        with pytest.raises(aiosync.PartialSyncError):
            await refused
        assert (await good).acked == {0}
        with receiver.reading():
            assert content(receiver.model) == [5.0, 9.0, 1.0]


@pytest.mark.parametrize("make", [*harness.SCHEMES, aiosync.TCPWeightSyncScheme])
@pytest.mark.parametrize("order", ["abcb", "abcabcbbca", "bcb", "acbabccab"])
async def test_a_worker_never_has_what_the_trainer_never_had(make: Any, order: str) -> None:
    """A slow worker, and one that joins after the last send, see only states of the trainer."""
    scheme, seen = make(strict=False), list[tuple[int, list[float]]]()
    scheme.init_on_sender(model_id="policy", weights=letters("abc", 1.0))
    had, now = {}, dict.fromkeys("abc", 1.0)

    def joining(worker: Any) -> Any:
        target = build()
        seen.clear()
        applied = lambda _, version: seen.append((version, content(target)))  # noqa: E731
        hooks = aiosync.SchemeHooks(applied=applied)
        worker.init_on_receiver(model_id="policy", model=target, hooks=hooks)
        return worker.connect(timeout=harness.PATIENCE)

    def saw_what_was_there() -> None:
        assert seen[-1] == (scheme.version, [*now.values()])
        assert all(had[version] == found for version, found in seen), (had, seen)

    async with scheme, harness.twin(scheme) as worker, harness.twin(scheme) as late:
        await scheme.connect()
        await joining(worker)
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
        saw_what_was_there()
        await joining(late)
        await late.wait_for_version(scheme.version, timeout=harness.PATIENCE)
        saw_what_was_there()


@pytest.mark.parametrize("make", [*harness.SCHEMES, aiosync.TCPWeightSyncScheme])
@pytest.mark.parametrize("copy", [False, True])
async def test_another_model_gets_the_newest_of_each_name(make: Any, copy: bool) -> None:
    """The last update may have held only some of the names."""
    scheme = make(strict=False, apply_copy=copy)
    scheme.init_on_sender(model_id="policy", weights=letters("abc", 1.0))
    async with scheme, harness.twin(scheme) as worker:
        await scheme.connect()
        first, other = build(), build()
        worker.init_on_receiver(model_id="policy", model=first)
        await worker.connect(timeout=harness.PATIENCE)
        await scheme.send(letters("b", 2.0))
        await worker.wait_for_version(2, timeout=harness.PATIENCE)
        worker.model = other
        assert content(other) == content(first) == [1.0, 2.0, 1.0]
        await scheme.send(letters("c", 3.0))
        await worker.wait_for_version(3, timeout=harness.PATIENCE)
        with worker.reading():
            assert content(other) == [1.0, 2.0, 3.0]
        assert content(first) == [1.0, 2.0, 1.0]


@pytest.mark.parametrize("make", [*harness.SCHEMES, aiosync.TCPWeightSyncScheme])
@pytest.mark.parametrize("strict", [False, True])
async def test_another_model_does_not_get_memory_that_torch_shares(make: Any, strict: bool) -> None:
    """share_memory() moves the memory that an update was received in."""
    scheme, first, other = make(strict=strict), build(), build()
    init = {"weights": letters("abc", 1.0)}
    async with harness.here(scheme, first, sender=init) as (sender, worker):
        first.share_memory()
        worker.model = other
        models.fill(first, 9.0)
        assert content(other) == [1.0] * 3
        models.fill(other, 8.0)
        for value in (2.0, 3.0, 4.0):
            await harness.deliver(sender, worker, value, letters("abc", value))
        assert content(first) == [9.0] * 3


@pytest.mark.parametrize("make", [*harness.SCHEMES, aiosync.TCPWeightSyncScheme])
@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("read", [False, True])
async def test_another_model_gets_what_the_old_one_could_not_keep(
    make: Any, copy: bool, read: bool
) -> None:
    """The old model has fewer of the names, and less precision; a copy is no more than it has."""
    scheme, value = make(strict=False, apply_copy=copy), 1.001
    scheme.init_on_sender(model_id="policy", weights=letters("abc", value))
    async with scheme, harness.twin(scheme) as worker:
        await scheme.connect()
        first, other = nn.ModuleDict({"a": build()["a"].to(torch.bfloat16)}), build()
        worker.init_on_receiver(model_id="policy", model=first)
        await worker.connect(timeout=harness.PATIENCE)
        with harness.read_elsewhere(worker) if read else contextlib.nullcontext():
            if copy:
                with pytest.raises(aiosync.ApplyError, match=r"missing: b\.weight, c\.weight"):
                    worker.model = other
                assert worker.model is first
            else:
                worker.model = other
        if not copy:
            await harness.until(lambda: content(other) == [pytest.approx(value)] * 3)
            assert first["a"].weight.item() == 1.0
        assert worker.version == 1


@both
async def test_a_worker_that_leaves_after_it_applied_a_version_has_acked_it(make: Any) -> None:
    """The farewell may arrive together with the answer."""
    source, targets = models.linear(1.0), [models.linear() for _ in range(2)]
    async with harness.crowd(make(), targets, sender={"model": source}) as (scheme, others):
        models.fill(source, 2.0)
        sending = scheme.send_nowait()
        for other in others:
            await other.wait_for_version(2, timeout=harness.PATIENCE)
            await other.aclose()
        report = await sending
        assert (report.acked, report.left, report.failed) == ({0, 1}, frozenset(), {})


async def test_a_send_behind_one_that_waits_for_an_optimizer_keeps_its_deadline() -> None:
    source, began, go = models.linear(), threading.Event(), threading.Event()
    optimizer = torch.optim.SGD(source.parameters(), lr=0.0)
    for each in source.parameters():
        each.grad = torch.zeros_like(each)

    def closure() -> float:
        began.set()
        go.wait(20)
        return 0.0

    sender = aiosync.SharedMemWeightSyncScheme()
    async with harness.here(sender, models.linear(), sender={"model": source}):
        stepping = asyncio.create_task(asyncio.to_thread(optimizer.step, closure))
        await asyncio.to_thread(began.wait, 10)
        first = asyncio.create_task(sender.send(timeout=10))
        await asyncio.sleep(0.1)
        started = time.monotonic()
        with pytest.raises(aiosync.SyncTimeout, match=r"0\.3 s"):
            await sender.send(timeout=0.3)
        assert time.monotonic() - started < 8
        go.set()
        await stepping
        assert (await first).acked == {0}


@pytest.mark.parametrize("call", ["connect", "send"])
async def test_an_open_step_of_an_optimizer_outlasts_no_call(call: str) -> None:
    """connect() keeps its timeout, and a send ends when the scheme is closed."""
    source, began, go = models.linear(), threading.Event(), threading.Event()
    optimizer = torch.optim.SGD(source.parameters(), lr=0.0)
    for each in source.parameters():
        each.grad = torch.zeros_like(each)

    def closure() -> float:
        began.set()
        go.wait(20)
        return 0.0

    first, sender = (aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0") for _ in range(2))
    async with first, sender:
        for each in (first, sender):
            each.init_on_sender(model=source, num_workers=None)
        # The first copy of this process lets torch call hooks around steps.
        await first.connect(timeout=PATIENCE)
        stepping = asyncio.create_task(asyncio.to_thread(optimizer.step, closure))
        await asyncio.to_thread(began.wait, 10)
        started = time.monotonic()
        try:
            if call == "connect":
                with pytest.raises(aiosync.ConnectTimeout, match="weights were not copied"):
                    await sender.connect(timeout=0.3)
            else:
                sending = asyncio.create_task(first.send(timeout=50))
                await asyncio.sleep(0.3)
                await first.aclose()
                with pytest.raises(aiosync.TransportClosed, match="was closed"):
                    await sending
            assert time.monotonic() - started < 8
        finally:
            go.set()
            await stepping


async def test_a_trainer_does_not_wait_for_workers_that_do_not_subscribe() -> None:
    """The last subscriber has left, and the one that is still linked only pulls."""
    trainer = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0")
    trainer.init_on_sender(model=models.linear())
    async with trainer:
        await trainer.connect(timeout=PATIENCE)
        pulls = aiosync.TCPWeightSyncScheme(trainer.address, subscribe=False)
        subscribes = aiosync.TCPWeightSyncScheme(trainer.address)
        async with pulls:
            async with subscribes:
                for worker in (pulls, subscribes):
                    worker.init_on_receiver(model=models.linear())
                    await worker.connect(timeout=PATIENCE)
                await trainer.send(timeout=PATIENCE)
            await until(lambda: len(trainer.worker_versions) == 1)
            await trainer.send(timeout=PATIENCE)
            assert await trainer.wait_for_version(trainer.version, timeout=1) == trainer.version


async def test_a_worker_that_pulls_and_is_named_gets_the_parts_that_it_lacks() -> None:
    """Otherwise it would report a version with weights that the trainer had before."""

    def part(**values: float) -> dict[str, torch.Tensor]:
        return {name: torch.full((4,), value) for name, value in values.items()}

    trainer = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", strict=False)
    trainer.init_on_sender(weights=part(a=1.0, b=1.0))
    target = part(a=0.0, b=0.0)
    worker = aiosync.TCPWeightSyncScheme(
        trainer.address, strict=False, subscribe=False, guard="reading"
    )
    worker.init_on_receiver(weights=target, worker_idx=0)
    async with trainer, worker:
        await asyncio.gather(trainer.connect(timeout=PATIENCE), worker.connect(timeout=PATIENCE))

        async def named(given: dict[str, torch.Tensor], **expected: float) -> None:
            report = await trainer.send(given, worker_ids=[0], timeout=PATIENCE)
            assert report.acked == {0}
            with worker.reading():
                assert worker.version == report.version
                assert {name: float(each[0]) for name, each in target.items()} == expected

        await named(part(a=2.0), a=2.0, b=1.0)
        await trainer.send(part(b=3.0))
        await trainer.send(part(b=4.0))
        await named(part(a=5.0), a=5.0, b=4.0)
        await named(part(a=6.0), a=6.0, b=4.0)
        await trainer.send(part(a=7.0, b=7.0))
        await named(part(a=8.0, b=8.0), a=8.0, b=8.0)
        assert await worker.pull(timeout=PATIENCE) == trainer.version


async def test_updates_that_cannot_be_put_together_cost_one_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process can start no thread for it, and the worker dials anew."""
    run, errors = to_thread.run_sync, [RuntimeError("can't start new thread")]

    async def fail_first(*args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return await run(*args, **options)

    weights, names = {"a": torch.zeros(4), "b": torch.zeros(4)}, ("a", "b")
    trainer = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", strict=False)
    trainer.init_on_sender(weights=weights)
    async with trainer:
        await trainer.connect(timeout=PATIENCE)
        for name in names:
            await trainer.send({name: torch.ones(4)})
        target = {name: torch.zeros(4) for name in names}
        worker = aiosync.TCPWeightSyncScheme(
            trainer.address, strict=False, subscribe=False, guard="reading"
        )
        worker.init_on_receiver(weights=target)
        async with worker:
            await worker.connect(timeout=PATIENCE)
            for name in names:
                await trainer.send({name: torch.full((4,), 2.0)})
            monkeypatch.setattr(to_thread, "run_sync", fail_first)
            await worker.pull(min_version=trainer.version, timeout=PATIENCE)
            assert not errors
            with worker.reading():
                assert all(bool((each == 2.0).all()) for each in target.values())


@both
async def test_a_wait_names_the_workers_that_never_get_the_version(make: Any) -> None:
    targets = [models.linear() for _ in range(3)]
    async with harness.crowd(make(), targets, sender={"model": models.linear()}) as (sender, _):
        report = await sender.send(worker_ids=[0], timeout=PATIENCE)
        for wait in (sender.wait_for_version, sender.wait_staged):
            with pytest.raises(aiosync.RecvTimeout, match="was not sent to workers 1, 2\n"):
                await wait(report.version, timeout=0.1)
        # No worker lacks a version only because it was not sent yet.
        with pytest.raises(aiosync.RecvTimeout) as info:
            await sender.wait_for_version(report.version + 1, timeout=0.1)
        assert "not sent" not in str(info.value)


@pytest.mark.slow
async def test_a_close_that_is_cancelled_behind_a_copy_is_cancelled() -> None:
    scheme = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0")
    scheme.init_on_sender(model=nn.Linear(8192, 8192), num_workers=None)
    await scheme.connect()
    sending = asyncio.ensure_future(scheme.send())
    await asyncio.sleep(0)  # a thread has begun to copy 256 MiB
    closing = asyncio.ensure_future(scheme.aclose())
    await asyncio.sleep(0)
    assert not closing.done()
    closing.cancel()
    await asyncio.wait({closing})
    assert closing.cancelled()
    with pytest.raises(aiosync.TransportClosed):
        await sending
    await scheme.aclose()


async def test_a_thread_that_could_not_start_is_started_for_the_next_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, failures = threading.Thread.start, [RuntimeError("can't start new thread")]

    def start_later(thread: threading.Thread) -> None:
        if failures and thread.name == "aiosync-mapping":
            raise failures.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    source, target = models.linear(), models.linear()
    scheme, options = aiosync.MultiProcessWeightSyncScheme(), {"transform": lambda found: found}
    async with harness.here(scheme, target, sender={}, receiver=options):
        with pytest.raises(aiosync.PartialSyncError, match="can't start new thread"):
            await scheme.send(source, timeout=PATIENCE)
        models.fill(source, 2.0)
        assert (await scheme.send(source, timeout=PATIENCE)).acked == {0}
        assert models.filled(target, 2.0)


@pytest.mark.parametrize("named", [True, False])
async def test_a_worker_that_refuses_a_version_after_it_was_named_has_not_acked_it(
    named: bool,
) -> None:
    """Its next read takes the version, while the send still waits for another worker."""
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=models.linear(), num_workers=2)
    targets = [models.linear(), models.linear()]
    first, second = (copy.copy(scheme) for _ in targets)
    second.apply = "manual"
    for worker, target in zip((first, second), targets, strict=True):
        worker.init_on_receiver(model_id="policy", model=target)
    async with scheme, first, second:
        await asyncio.gather(scheme.connect(), first.connect(), second.connect())
        for _ in range(5 if named else 0):
            await scheme.send(worker_ids=first.worker_idx)
            targets[0](torch.ones(4))
        targets[0].weight = nn.Parameter(torch.zeros(3, 4))
        targets[0].bias = nn.Parameter(torch.zeros(3))
        sending = asyncio.ensure_future(scheme.send())
        await asyncio.sleep(0.05)
        with contextlib.suppress(aiosync.ApplyError):
            targets[0](torch.ones(4))
        await second.wait_staged(scheme.version)
        await asyncio.sleep(0.1)
        assert second.apply_pending() == scheme.version
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await sending
        assert isinstance(caught.value.failed[first.worker_idx], aiosync.ApplyError)
        assert caught.value.acked == {second.worker_idx}


async def test_a_part_for_one_worker_may_have_no_weight_of_a_pattern() -> None:
    weights = {"base.w": torch.ones(4), "head.w": torch.ones(4)}
    scheme = aiosync.MultiProcessWeightSyncScheme(
        strict=False,
        per_worker_weights=True,
        guard="reading",
        wire_dtype={"base.*": torch.bfloat16, "head.*": torch.bfloat16},
    )
    target = {"weights": {name: torch.zeros(4) for name in weights}}
    async with harness.crowd(scheme, [None], sender={"weights": weights}, receiver=target) as (
        _,
        _w,
    ):
        await scheme.send({"head.w": torch.full((4,), 2.0)})
        await scheme.send({0: {"head.w": torch.full((4,), 3.0)}})
        assert target["weights"]["head.w"].tolist() == [3.0] * 4


@both
async def test_parts_of_other_sizes_come_again_to_another_model(make: Any) -> None:
    """Over shared memory the worker has closed the segment of the first part."""
    model = {"a": torch.ones(4), "b": torch.ones(4096)}
    scheme = make(strict=False)

    def net() -> nn.Module:
        return nn.ParameterDict({name: torch.zeros_like(each) for name, each in model.items()})

    sender = {"weights": {"a": model["a"]}}
    async with harness.here(scheme, net(), sender=sender) as (_, worker):
        await scheme.send({"b": model["b"]})
        for _ in range(3):
            worker.model = None
            worker.model = other = net()
            assert await worker.pull(timeout=PATIENCE) == 2
            with worker.reading():
                assert all((each == 1).all() for each in other.values())
        assert (await scheme.send({"b": model["b"]})).acked == {0}


async def test_a_quorum_that_naming_alone_meets_ends_the_send() -> None:
    scheme = aiosync.SharedMemWeightSyncScheme(require=1, timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=models.linear(), num_workers=2)
    targets = [models.linear(), models.linear()]
    first, second = (copy.copy(scheme) for _ in targets)
    second.apply = "manual"
    for worker, target in zip((first, second), targets, strict=True):
        worker.init_on_receiver(model_id="policy", model=target)
    async with scheme, first, second:
        await asyncio.gather(scheme.connect(), first.connect(), second.connect())
        for _ in range(5):
            await scheme.send(worker_ids=first.worker_idx)
            targets[0](torch.ones(4))
        report = await asyncio.wait_for(scheme.send(), PATIENCE / 4)
        assert (report.acked, report.waiting) == ({first.worker_idx}, {second.worker_idx})


def _cluster(**options: Any) -> aiosync.DistributedWeightSyncScheme:
    return aiosync.DistributedWeightSyncScheme(address="tcp://127.0.0.1:0", **options)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (aiosync.TCPWeightSyncScheme, f"at most {2**36} are allowed"),
        (functools.partial(_cluster, shared_memory=False), f"at most {2**36} are allowed"),
        # Workers of the same host could take them, if there was enough memory.
        (_cluster, "no room"),
    ],
)
async def test_weights_that_no_link_carries_are_refused_before_they_are_copied(
    make: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = make(timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", weights=weights(1.0))
    async with scheme:
        await scheme.connect()
        await _send_too_much(scheme, text, monkeypatch)
        await scheme.send()


async def test_a_link_of_the_users_carries_what_its_own_limits_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = multiprocessing.Pipe()
    pipes = aiosync.MultiProcessWeightSyncScheme(timeout=PATIENCE)
    given = {0: pipes.create_transport(ours)}
    scheme = aiosync.TCPWeightSyncScheme(timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", weights=weights(1.0), transports=given)
    pipes.init_on_receiver(model_id="policy", model=models.linear(), pipe=theirs)
    async with scheme, pipes:
        await asyncio.gather(scheme.connect(), pipes.connect())
        await _send_too_much(scheme, "no memory", monkeypatch)
        await scheme.send()


async def _send_too_much(scheme: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send 64 GiB and some bytes on a host that has no such memory: the error has this text."""
    with monkeypatch.context() as patch:
        for module, name in ((os, "posix_fallocate"), (mmap, "mmap")):
            patch.setattr(module, name, functools.partial(_allocate, getattr(module, name)))
        with pytest.raises(aiosync.ConfigError, match=text):
            await scheme.send({"w": torch.empty(1, dtype=torch.uint8).expand(2**36 + 64)})


def _allocate(real: Any, *args: Any, **options: Any) -> Any:
    """Allocate memory with ``real``, as on a host that has less than 64 GiB."""
    if max(each for each in args if isinstance(each, int)) > 2**36:
        raise OSError(errno.ENOMEM, "no room")
    return real(*args, **options)
