"""Functions in the place of models, transforms, hooks, and what is staged but not applied."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
import aiosync.sync
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.support.waiting import free_address

pytestmark = pytest.mark.one_loop


every = pytest.mark.parametrize(
    "make",
    [*harness.SCHEMES, lambda **options: aiosync.TCPWeightSyncScheme(free_address(), **options)],
    ids=["pipe", "shared", "tcp"],
)


class Engine:
    """Loads weights in a way of its own."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.loads = 0
        self.error: Exception | None = None
        self.thread = ""

    def load(self, weights) -> None:
        self.loads += 1
        self.thread = threading.current_thread().name
        if self.error is not None:
            raise self.error
        self.weights = {name: tensor.clone() for name, tensor in weights}


def here(scheme, source, receiver):
    return harness.here(scheme, None, sender={"model": source}, receiver=receiver)


@every
@pytest.mark.asyncio
async def test_after_a_function_that_raised_nobody_knows_what_is_read(make) -> None:
    source, engine = models.linear(), Engine()
    async with here(make(guard="reading"), source, {"load": engine.load}) as (sender, receiver):
        engine.error = RuntimeError("in the middle of a layer")
        with pytest.raises(aiosync.PartialSyncError):
            await sender.send()
        with receiver.reading() as read:
            assert read.version == 0
        assert sender.staleness(read.span) is None
        engine.error = None
        report = await sender.send()
        with receiver.reading() as read:
            assert read.version == report.version


@every
@pytest.mark.asyncio
async def test_what_a_function_keeps_is_never_written_to(make) -> None:
    source = models.linear()
    kept: list[torch.Tensor] = []
    scheme = make(guard="reading")
    init = {"load": lambda weights: kept.append(dict(weights)["weight"])}
    async with here(scheme, source, init) as (sender, _):
        for value in range(1, 8):
            models.fill(source, float(value))
            await sender.send()
        assert [each.unique().tolist() for each in kept] == [[float(v)] for v in [-1, *range(1, 8)]]
        kept.clear()


@pytest.mark.asyncio
async def test_a_function_gets_tied_tensors_under_each_name_and_no_other_values() -> None:
    engine = Engine()
    scheme = aiosync.SharedMemWeightSyncScheme(guard="reading")
    async with here(scheme, models.Tied(), {"load": engine.load}) as (sender, _):
        names = set(models.Tied().state_dict())
        assert set(engine.weights) == names
        with pytest.raises(aiosync.PartialSyncError, match="also has other values: extra"):
            await sender.send({**{n: torch.zeros(2) for n in names}, "extra": 7})


@every
@pytest.mark.asyncio
async def test_what_is_told_of_a_version_that_was_transformed(make) -> None:
    trace, events = f"00-{'1' * 32}-{'2' * 16}-01", list[aiosync.SyncEvent]()

    class Observer:
        def on_sync(self, event: aiosync.SyncEvent) -> None:
            events.append(event)

        def traceparent(self, started_at: float) -> str:
            return trace

    release = threading.Event()

    def transform(weights):
        assert release.wait(harness.PATIENCE)
        return [(name, tensor.float()) for name, tensor in weights]

    release.set()
    init = {"model": models.linear(), "transform": transform}
    source = models.linear().bfloat16()
    async with here(make(), source, init) as (sender, receiver):
        release.clear()
        sender.add_observer(Observer())
        receiver.add_observer(Observer())
        handle, shared = sender.send_nowait(), sender.stats().transport == "shared"
        await asyncio.sleep(0.2)
        release.set()
        report = await handle
        await harness.until(lambda: len(events) == 2)
        assert (receiver.stats().age > 0.2) == shared
        assert {each.trace for each in events} == {trace}
        assert {each.wire_nbytes for each in events} == {0 if shared else report.nbytes}


@pytest.mark.asyncio
async def test_syncs_that_end_while_another_thread_asks_are_counted_once() -> None:
    source, init = models.linear(), {"model": models.linear()}
    async with here(aiosync.MultiProcessWeightSyncScheme(), source, init) as (sender, receiver):
        reading, loop = receiver.reading(), asyncio.get_running_loop()
        reading.__enter__()
        handle = sender.send_nowait()

        async def end() -> None:
            reading.__exit__(None, None, None)
            await handle

        def ask() -> int:
            def profile(frame, event, arg) -> None:
                if event == "c_call" and arg.__name__ == "copy":
                    sys.setprofile(None)
                    asyncio.run_coroutine_threadsafe(end(), loop).result(harness.PATIENCE)

            sys.setprofile(profile)
            return sender.stats().started

        before = await asyncio.to_thread(ask)
        assert before == sender.stats().started == sender.stats().finished["ok"] == 1


@every
@pytest.mark.asyncio
async def test_waiting_for_what_a_worker_refuses_or_takes_to_its_grave(make) -> None:
    refuse = threading.Event()

    def transform(weights):
        if refuse.is_set():
            raise RuntimeError("not this one")
        return weights

    init = {"model": models.linear(), "transform": transform}
    async with here(make(apply="manual"), models.linear(), init) as (sender, receiver):
        refuse.set()
        handle = sender.send_nowait()
        for waiting in (sender.wait_staged(2), handle):
            with pytest.raises(aiosync.PartialSyncError, match="not this one"):
                await waiting
        with pytest.raises(aiosync.ApplyError, match="not this one"):
            await receiver.wait_staged(2)
        assert await sender.wait_staged(1) == 1
        refuse.clear()
        handle = sender.send_nowait()
        for version in (3, 2):  # the newer one counts for both
            assert await sender.wait_staged(version) == 3
            assert await receiver.wait_staged(version) == 3
        assert (receiver.staged_version, receiver.version) == (3, 1)
        for scheme in (receiver, sender):
            with pytest.raises(aiosync.RecvTimeout, match="version 9 was not complete"):
                await scheme.wait_staged(9, timeout=0.01)
        waiting = asyncio.ensure_future(sender.wait_staged(4, timeout=30))
        await asyncio.sleep(0)
        await sender.aclose()
        for ended in (waiting, handle):
            with pytest.raises(aiosync.TransportClosed):
                await ended


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "'a' twice"),
        ([("a", 7)], "pairs of a name and a tensor"),
        (7, "not iterable"),
        ([("a", torch.ones(1).to_sparse())], "parse"),
        (asyncio.CancelledError, "CancelledError"),
        (CancelledError, "CancelledError"),
        (SystemExit, "SystemExit"),
    ],
)
@pytest.mark.asyncio
async def test_results_that_are_no_weights_and_whatever_is_raised(result, text) -> None:
    bad = threading.Event()

    def transform(weights):
        if bad.is_set() and isinstance(result, type):
            raise result
        return result if bad.is_set() else weights

    init = {"model": models.linear(), "transform": transform}
    scheme = aiosync.SharedMemWeightSyncScheme()
    async with here(scheme, models.linear(), init) as (sender, receiver):
        bad.set()
        with pytest.raises(aiosync.PartialSyncError, match=text):
            await sender.send()
        bad.clear()
        assert (await harness.deliver(sender, receiver, 3.0)).version == 3


class Stated(nn.Linear):
    def get_extra_state(self) -> object:
        return {"inner": self.extra}

    def set_extra_state(self, state) -> None:
        self.extra = state["inner"]


@pytest.mark.asyncio
async def test_extra_states_pass_a_transform_by() -> None:
    source, target = Stated(2, 2), Stated(2, 2).bfloat16()
    source.extra, target.extra = torch.full((2,), 2.003), None
    init = {"model": target, "transform": aiosync.WeightMap(dtype=torch.bfloat16)}
    async with here(aiosync.SharedMemWeightSyncScheme(), source, init):
        assert target.weight.dtype is torch.bfloat16
        assert torch.equal(target.extra, source.extra)


# -- what the owner of a model is told on the way of an update ------------------------------------


both = pytest.mark.parametrize("make", harness.SCHEMES)
kinds = pytest.mark.parametrize("kind", ["plain", "async"])


class Refuses(Exception):
    """What a hook of these tests raises."""


class Told:
    """Notes what it is told, as a plain function or as an async one."""

    def __init__(self, kind: str) -> None:
        self.told: list[tuple[str, int]] = []
        self.refused: str | None = None
        self._kind = kind

    def hook(self, name: str) -> Any:
        def plain(epoch: Any, version: int = 0) -> None:
            self.told.append((name, version))
            if self.refused == name:
                raise Refuses(f"not {version}")

        async def slow(epoch: Any, version: int = 0) -> None:
            await asyncio.sleep(0.001)
            plain(epoch, version)

        return plain if self._kind == "plain" else slow

    def hooks(self, *names: str) -> dict[str, Any]:
        hooks = aiosync.SchemeHooks(**{name: self.hook(name) for name in names})
        return {"hooks": hooks}


def taking(make: Any, owner: Told, *names: str) -> Any:
    source = {"model": models.linear(1.0)}
    return harness.here(make(), models.linear(), sender=source, receiver=owner.hooks(*names))


@pytest.mark.asyncio
@both
@kinds
async def test_they_are_called_in_order_and_before_the_trainer_is_told(make, kind) -> None:
    owner = Told(kind)
    names = ("prepare_model", "before_apply", "applied", "relay")
    async with taking(make, owner, *names) as (sender, receiver):
        first = [("prepare_model", 0), ("before_apply", 1), ("applied", 1), ("relay", 1)]
        assert owner.told == first
        assert (await sender.send()).acked == {0}
        assert owner.told == [*first, *((name, 2) for name in names[1:])]
        assert receiver.version == 2


@pytest.mark.asyncio
@both
@kinds
@pytest.mark.parametrize("name", ["before_apply", "applied", "relay"])
async def test_what_they_raise_is_a_refusal(make, kind, name) -> None:
    owner = Told(kind)
    async with taking(make, owner, name) as (sender, receiver):
        model = receiver.model
        owner.refused = name
        for k in (2, 3):
            with pytest.raises(aiosync.PartialSyncError) as caught:
                await sender.send(models.linear(float(k)))
                with contextlib.suppress(aiosync.ApplyError):  # a forward may be what takes it
                    model(torch.ones(1, 4))
                await sender.send(models.linear(float(k)))
            error = caught.value.failed[0]
            assert isinstance(error, aiosync.ApplyError)
            assert error.remote_type == "Refuses"
            assert "not " in str(error)
            kept = 1.0 if name == "before_apply" else float(k)
            with receiver.reading():
                assert models.filled(model, kept)
        owner.refused = None
        assert (await sender.send(models.linear(9.0))).acked == {0}
        assert models.holds(receiver, 9.0)


@pytest.mark.asyncio
@both
@kinds
async def test_a_model_that_is_refused_does_not_join(make, kind) -> None:
    owner = Told(kind)
    owner.refused = "prepare_model"
    scheme = make(timeout=10.0)
    scheme.init_on_sender(model=models.linear(1.0), num_workers=1)
    worker = harness.twin(scheme)
    worker.init_on_receiver(model=models.linear(), **owner.hooks("prepare_model"))
    async with scheme, worker:
        with pytest.raises(Refuses, match="not 0"):
            await worker.connect()
        with pytest.raises(aiosync.ConnectTimeout):
            await scheme.connect(timeout=0.1)


@pytest.mark.asyncio
async def test_mistakes() -> None:
    scheme = aiosync.SharedMemWeightSyncScheme()
    with pytest.raises(aiosync.ConfigError, match="relay must be callable, got int"):
        aiosync.SchemeHooks(relay=3)  # type: ignore[arg-type]
    with pytest.raises(aiosync.ConfigError, match="hooks must be aiosync.SchemeHooks"):
        scheme.init_on_receiver(hooks={"relay": print})
