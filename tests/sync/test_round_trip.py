"""Sends through the facade: their reports, failures and lag, and when a scheme is ready."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
import aiosync.sync
from aiosync.schemes.sources import Given
from aiosync.transports.shared_memory import SlotPublisher
from tests.support.accelerator import deferred
from tests.sync import _tools as tools


@pytest.mark.parametrize("make", tools.SCHEMES)
def test_send_async_and_wait_async(make: Any) -> None:
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(make, source, target) as (sender, receiver):
        with pytest.raises(aiosync.LocalProtocolError):
            sender.wait_async()
        tools.fill(source, 2.0)
        version = sender.send_async()
        # The snapshot was taken before, so this value is not sent.
        tools.fill(source, 3.0)
        assert sender.wait_async().version == version == 2
        assert tools.value_at(receiver) == 2.0
        with pytest.raises(aiosync.LocalProtocolError):
            sender.wait_async()
        assert receiver.wait_for_version(2) == 2
        assert receiver.receive(timeout=0) is not None
        assert receiver.receive(timeout=0) is None


@pytest.mark.parametrize("make", tools.SCHEMES)
@pytest.mark.parametrize("again", [False, True])
def test_wait_async_tells_every_failure_and_the_loop_none(
    make: Any, again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # An earlier test may have closed a loop under its tasks, whose messages come with collection.
    gc.collect()
    caplog.clear()
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(make, source, target, apply="manual") as (sender, receiver):
        first = sender.send_async()
        tools.until(lambda: receiver.lag == 1)
        receiver.abort()
        tools.until(lambda: sender.worker_versions == {})
        # This send has no worker.
        second = sender.send_async()
        if again:
            assert sender.send_async() == second + 1
        with pytest.raises(aiosync.PartialSyncError) as caught:
            sender.wait_async()
        versions = [first, second, second + 1][: 3 if again else 2]
        assert caught.value.version == versions.pop()
        for version, note in zip(versions, caught.value.__notes__[1:], strict=True):
            assert f"PartialSyncError: version {version} " in note
        with pytest.raises(aiosync.LocalProtocolError):
            sender.wait_async()
        del caught
        gc.collect()
    assert not caplog.records


def test_what_nobody_waits_for_is_bounded_and_told_by_the_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(tools.SHM, source, target) as (sender, _):
        for _ in range(40):
            sender.send_async({"weight": torch.zeros(3, 3)})

        def told() -> bool:
            gc.collect()
            return any("never retrieved" in each.message for each in caplog.records)

        tools.until(told)
        with pytest.raises(aiosync.PartialSyncError) as caught:
            sender.wait_async()
        assert len(caught.value.__notes__) < 20


def test_require_may_be_assigned_between_two_sends() -> None:
    """The new value counts even for a send that needs no event loop."""
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(aiosync.sync.SharedMemWeightSyncScheme, source, target) as (sender, _):
        assert sender.send().acked == {0}
        sender.require = 2
        with pytest.raises(aiosync.PartialSyncError, match="require= asks for more"):
            sender.send()


@pytest.mark.parametrize("make", tools.SCHEMES)
def test_the_lag_is_bounded_and_told(make: Any) -> None:
    """Observers are called on the portal's thread, even if the send needs no event loop."""

    class Listener:
        def __init__(self) -> None:
            self.told: list[tuple[str, int, str]] = []

        def on_sync(self, event: aiosync.SyncEvent) -> None:
            self.told.append((event.role, event.version, threading.current_thread().name))

    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(make, source, target) as (sender, receiver):
        listener = Listener()
        sender.add_observer(listener)
        with receiver.reading():
            for _ in range(2):
                sender.send_async()
            with pytest.raises(aiosync.RecvTimeout, match="0 by 2"):
                sender.wait_lag_below(2, timeout=0.01)
            with pytest.raises(aiosync.RecvTimeout):
                sender.send(max_lag=2, timeout=0.01)
        assert sender.send(max_lag=1).version == 4
        assert receiver.wait_lag_below(1) == sender.wait_lag_below(1) == 0
        tools.until(lambda: len(listener.told) == 3)
        assert [each[:2] for each in listener.told] == [("sender", 2), ("sender", 3), ("sender", 4)]
        assert {each[2] for each in listener.told} == {"aiosync-portal"}
        assert sender.stats().finished["ok"] + sender.stats().finished["skipped"] == 3
        sender.wait_async()


def test_ready_blocks_until_there_is_a_version() -> None:
    source = tools.filled(1.0)
    sender, receiver = tools.roles(aiosync.sync.TCPWeightSyncScheme, None, tools.filled(-1.0))
    fresh = copy.copy(sender)
    assert not fresh.ready
    with pytest.raises(aiosync.LocalProtocolError):
        fresh.ready.wait(timeout=1)
    with sender, receiver:
        tools.join(sender, receiver)
        for scheme in (sender, receiver):
            assert not scheme.ready.is_set()
            with pytest.raises(aiosync.RecvTimeout):
                scheme.ready.wait(timeout=0.02)
        with tools.threads(receiver.ready.wait):
            sender.send(source)
        sender.ready.wait()
        told = (receiver.ready.is_set(), bool(sender.ready), repr(receiver.ready))
        assert told == (True, True, "<ready>")
        assert tools.value_at(receiver) == 1.0


@pytest.mark.parametrize("make", tools.SCHEMES)
def test_a_model_that_is_assigned_while_connect_runs(
    monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    """The thread that assigns it has seen no receiver, and then there is one."""
    seen, may_go_on = threading.Event(), threading.Event()

    def assign_late(given: Any, name: str, value: Any) -> None:
        if name == "model" and value is not None:
            seen.set()
            assert may_go_on.wait(tools.PATIENCE)
        object.__setattr__(given, name, value)

    model = tools.filled(0.0)
    with make() as sender:
        sender.init_on_sender(model=tools.filled(1.0))
        sender.connect()
        with copy.copy(sender) as worker:
            worker.init_on_receiver()
            monkeypatch.setattr(Given, "__setattr__", assign_late, raising=False)
            thread = threading.Thread(target=setattr, args=(worker, "model", model))
            thread.start()
            assert seen.wait(tools.PATIENCE)
            worker.connect(initial=False)
            worker.wait_staged(1)
            may_go_on.set()
            thread.join()
            # Forwards are guarded, and take the version that waited for the model.
            deadline = time.monotonic() + 5.0
            while tools.value_of(model) != 1.0 and time.monotonic() < deadline:
                model(torch.ones(1, model.in_features))
            assert tools.value_of(model) == 1.0


@contextlib.contextmanager
def two_workers() -> Iterator[Any]:
    """A sender over shared memory, whose sends name slots on the caller's thread."""
    sender = tools.SHM(timeout=tools.PATIENCE, per_worker_weights=True)
    sender.init_on_sender(model_id="policy", model=tools.filled(1.0), num_workers=2)
    targets = [tools.filled(0.0) for _ in range(2)]
    workers = [copy.copy(sender) for _ in targets]
    for idx, (worker, target) in enumerate(zip(workers, targets, strict=True)):
        worker.init_on_receiver(model_id="policy", model=target, worker_idx=idx)
    with sender, workers[0], workers[1]:
        with tools.threads(*(worker.connect for worker in workers)):
            sender.connect()
        for _ in range(5):
            assert sender.send().acked == {0, 1}
            for target in targets:
                target(torch.zeros(1, 4))
        yield sender


def test_a_target_without_weights_fails_in_one_version() -> None:
    with two_workers() as sender:
        before, weights = sender.version, tools.filled(2.0).state_dict()
        with pytest.raises(aiosync.PartialSyncError, match="no weights were given for worker 1"):
            sender.send({0: dict(weights)}, worker_ids=[0, 1])
        assert sender.version == before + 1


def test_a_worker_that_leaves_while_it_is_named_has_not_acked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with two_workers() as sender:
        store, named = SlotPublisher.store, list[SlotPublisher]()

        def leave_second(self: SlotPublisher, *args: Any) -> bool:
            named.append(self)
            return store(self, *args) and len(named) != 2

        before = sender.version
        monkeypatch.setattr(SlotPublisher, "store", leave_second)
        report = sender.send()
        monkeypatch.undo()
        assert (report.acked, report.left, len(named)) == ({0}, {1}, 2)
        assert sender.version == before + 1


@pytest.mark.parametrize("make", tools.SCHEMES)
def test_a_busy_accelerator_delays_a_send_and_no_other_call(make: Any) -> None:
    source, target = tools.filled(1.0), tools.filled(0.0)
    with deferred() as device, contextlib.ExitStack() as stack:
        # The model of the trainer is on the accelerator, that of the worker is not.
        device.has = {*source.parameters()}.__contains__  # type: ignore[method-assign]
        sender, receiver = stack.enter_context(tools.pair(make, source, target))
        # From then on naming a version in shared memory is enough.
        for _ in range(5):
            sender.send()
            target(torch.zeros(1, 4))
        tools.fill(source, 2.0)
        synchronize, began, idle = device.synchronize, threading.Event(), threading.Event()

        def wait(where: torch.device) -> None:
            began.set()
            assert idle.wait(tools.PATIENCE)
            synchronize(where)

        device.synchronize = wait  # type: ignore[method-assign]
        with tools.threads(sender.send):
            assert began.wait(tools.PATIENCE)
            polling = tools.in_thread(lambda: receiver.receive(timeout=0))
            polling.join(tools.PATIENCE / 2)
            is_stuck = polling.is_alive()
            idle.set()
        assert not is_stuck
        assert tools.value_at(receiver) == 2.0


@pytest.mark.slow
def test_a_send_in_a_step_beside_another_threads_send_waits_for_no_timeout() -> None:
    """The portal's loop waits for the step, and so must not be waited for in the step."""
    models = [tools.filled(1.0), tools.filled(1.0)]
    with contextlib.ExitStack() as stack:
        inside, other = [aiosync.sync.TCPWeightSyncScheme("tcp://127.0.0.1:0") for _ in models]
        for scheme, model in zip((inside, other), models, strict=True):
            stack.enter_context(scheme)
            scheme.init_on_sender(model=model)
            scheme.connect()
        optimizer, begun = torch.optim.SGD(models[0].parameters(), lr=0.1), threading.Event()
        optimizer.register_step_post_hook(
            lambda *_: (begun.set(), time.sleep(0.2), inside.send()) and None
        )
        models[0](torch.ones(1, 4)).sum().backward()
        stepping = tools.in_thread(optimizer.step)
        assert begun.wait(tools.PATIENCE)
        other.send_async(timeout=tools.PATIENCE / 2)
        other.wait_async()
        stepping.join(tools.PATIENCE)
        assert inside.version == 2


@pytest.mark.slow
def test_sends_in_the_steps_of_two_threads_do_not_wait_for_each_other() -> None:
    meet, versions = threading.Barrier(2, timeout=tools.PATIENCE / 2), list[int]()

    async def train() -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheme = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", timeout=tools.PATIENCE / 2)
        scheme.init_on_sender(model=model)
        async with scheme:
            await scheme.connect()
            handles: list[aiosync.SendHandle] = []
            optimizer.register_step_post_hook(
                lambda *_: (meet.wait(), handles.append(scheme.send_nowait())) and None
            )
            model(torch.ones(4)).sum().backward()
            meet.wait()  # A connect() waits for the steps of other threads, as a send() does.
            optimizer.step()
            versions.append((await handles[0]).version)

    threads = [tools.in_thread(lambda: asyncio.run(train())) for _ in range(2)]
    for thread in threads:
        thread.join(tools.PATIENCE)
    assert versions == [2, 2]


@pytest.mark.parametrize("make", [tools.SHM, tools.PIPE])
def test_a_timeout_of_zero_is_for_the_lag_alone(make: Any) -> None:
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(make, source, target, sync=False, guard="reading") as (sender, receiver):
        for value in (2.0, 3.0, 4.0, 5.0):
            tools.fill(source, value)
            sender.send(max_lag=5, timeout=0)
            time.sleep(0.05)
        receiver.wait_for_version(sender.version, timeout=tools.PATIENCE)
        assert sender.version == 5
        assert not sender.wait_async().failed
