"""TorchRL's collectors without workers, whose updates are for their own policy."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import multiprocessing
import pickle
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

import aiosync
import aiosync.sync

pytest.importorskip("torchrl")

from torchrl.data import LazyTensorStorage, ReplayBuffer

from tests.integrations import _multi_workers as workers
from tests.integrations import _worlds as worlds
from tests.integrations._multi_workers import (
    SHM,
    TCP,
    Collector,
    seen_by_one,
    weights_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = workers.MARKS


@pytest.fixture(scope="module", autouse=True)
def _arena() -> None:
    """Let multiprocessing map the memory that it keeps for values that processes share."""
    [multiprocessing.Value("q") for _ in range(40)]


@contextlib.contextmanager
def alone(policy: Any, scheme: Any = None, **options: Any) -> Iterator[Any]:
    scheme = SHM(timeout=workers.PATIENCE) if scheme is None else scheme
    collector = Collector(
        worlds.World,
        policy,
        frames_per_batch=4,
        total_frames=-1,
        weight_sync_schemes={"policy": scheme},
        **options,
    )
    try:
        yield collector
    finally:
        collector.async_shutdown(timeout=workers.PATIENCE)
        scheme.shutdown()


# -- indices ----------------------------------------------------------------------------------


@pytest.mark.parametrize("worker_ids", [None, 0, [0], {0}, torch.tensor(0)])
def test_index_0_is_the_collector_itself(worker_ids: Any) -> None:
    scheme = SHM(timeout=workers.PATIENCE)
    with alone(worlds.make_policy(1.0), scheme, track_policy_version=True) as collector:
        batches = iter(collector)
        assert seen_by_one(next(batches)) == (1.0, 0)
        collector.update_policy_weights_(worlds.make_policy(2.0), worker_ids=worker_ids)
        assert collector.policy_version == 1
        assert seen_by_one(next(batches)) == (2.0, 1)
        collector.update_policy_weights_(weights_of(worlds.make_policy(3.0)), worker_ids=worker_ids)
        assert seen_by_one(next(batches)) == (3.0, 2)
        scheme.send(worlds.make_policy(4.0), worker_ids)
        assert worlds.actions(next(batches)).unique().tolist() == [4.0]


@pytest.mark.parametrize(
    "worker_ids", [1, [7], [0, 7], True, [False], -1, "0", [0.5], torch.tensor([False]), []]
)
def test_other_indices_are_refused_before_anything_changes(worker_ids: Any) -> None:
    with alone(worlds.make_policy(1.0), track_policy_version=True) as collector:
        batches = iter(collector)
        next(batches)
        with pytest.raises(aiosync.ConfigError, match="not registered|must be an int|names nobody"):
            collector.update_policy_weights_(worlds.make_policy(9.0), worker_ids=worker_ids)
        assert collector.policy_version == 0
        assert seen_by_one(next(batches)) == (1.0, 0)


def test_weights_by_index_are_refused_before_anything_changes() -> None:
    with alone(worlds.make_policy(1.0), track_policy_version=True) as collector:
        weights = weights_of(worlds.make_policy(9.0))
        with pytest.raises(aiosync.ConfigError, match="as they are, not by index"):
            collector.update_policy_weights_({0: weights})
        assert seen_by_one(next(iter(collector))) == (1.0, 0)


# -- on another device ------------------------------------------------------------------------


def test_a_collector_with_a_copy_of_the_policy_follows_the_policy() -> None:
    """TorchRL copies a policy that is on another device, and ``cpu`` is not ``cpu:0`` to it."""
    policy, scheme = worlds.make_counting(1.0), SHM(timeout=workers.PATIENCE)
    options = {"policy_device": "cpu:0", "track_policy_version": True}
    with alone(policy, scheme, **options) as collector:
        assert collector.policy is not policy
        batches = iter(collector)
        assert seen_by_one(next(batches)) == (1.0, 0)
        worlds.set_value(policy, 2.0)
        collector.update_policy_weights_()
        assert seen_by_one(next(batches)) == (2.0, 1)
        worlds.set_value(policy, 3.0)
        assert seen_by_one(next(batches)) == (2.0, 1)
        scheme.send()
        data = next(batches)
        assert worlds.actions(data).tolist() == [3.0] * 4
        assert data["collector", "policy_version"].tolist() == [3] * 4
        collector.update_policy_weights_(worlds.make_counting(4.0))
        assert seen_by_one(next(batches))[0] == 4.0


# -- in a thread of its own -------------------------------------------------------------------


class Slow(nn.Module):
    """Module that reads one parameter in each millisecond."""

    def __init__(self, value: float) -> None:
        super().__init__()
        count = range(worlds.WIDTH)
        self.values = nn.ParameterList([nn.Parameter(torch.full((), value)) for _ in count])

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        read = []
        for each in self.values:
            read.append(each + 0 * observation[..., 0])
            time.sleep(0.001)
        return torch.stack(read, -1)


def make_slow(value: float) -> TensorDictModule:
    return TensorDictModule(Slow(value), in_keys=["observation"], out_keys=["action"])


def make_buffer() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(2000), batch_size=8)


def test_updates_stay_out_of_forwards_of_a_collector_that_was_started() -> None:
    buffer = make_buffer()
    with alone(make_slow(0.0), replay_buffer=buffer) as collector:
        collector.start()
        for version in range(1, 101):
            collector.update_policy_weights_(make_slow(float(version)))
            time.sleep(0.005)
        newest = buffer.write_count
        workers.until(lambda: buffer.write_count > newest + 8)
    # actions() fails on a mix of two versions.
    values = worlds.actions(buffer[:])
    assert values.max() == 100.0
    # With fewer versions the test would show nothing.
    assert len(values.unique()) > 10


class Blocked(nn.Module):
    """Module whose forward ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(worlds.WIDTH))
        # The gate is not a part of the module.
        self.gate: dict[str, threading.Event] = {}

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if self.gate:
            self.gate["inside"].set()
            self.gate["go"].wait(workers.PATIENCE)
        return self.value + 0 * observation


def test_a_forward_that_does_not_end_is_an_error_that_says_what_to_do() -> None:
    module = Blocked()
    policy = TensorDictModule(module, in_keys=["observation"], out_keys=["action"])
    other = {"module.value": torch.ones(worlds.WIDTH)}
    scheme = SHM(timeout=0.2)
    with alone(policy, scheme, replay_buffer=make_buffer()) as collector:
        module.gate = {"inside": threading.Event(), "go": threading.Event()}
        collector.start()
        try:
            assert module.gate["inside"].wait(workers.PATIENCE)
            with pytest.raises(aiosync.SyncTimeout, match=r"0\.2 s.*timeout="):
                collector.update_policy_weights_(other)
            assert not module.value.any()
        finally:
            module.gate["go"].set()
        scheme.timeout = workers.PATIENCE
        collector.update_policy_weights_(other)
        assert module.value.all()


def test_frames_have_the_version_of_the_scheme() -> None:
    """The versions are right if forwards and updates take turns, and while a thread collects."""
    scheme = SHM(timeout=workers.PATIENCE)
    key = ("collector", "policy_version")
    with alone(worlds.make_policy(1.0), scheme, track_policy_version=True) as collector:
        batches = iter(collector)
        for version in (1, 2, 3):
            data = next(batches)
            assert data[key].tolist() == worlds.actions(data).tolist() == [version] * 4
            collector.update_policy_weights_(worlds.make_policy(version + 1.0))
    buffer = make_buffer()
    with alone(make_slow(1.0), replay_buffer=buffer, track_policy_version=True) as collector:
        collector.start()
        for version in range(2, 52):
            collector.update_policy_weights_(make_slow(float(version)))
            time.sleep(0.005)
    data = buffer[:]
    assert torch.equal(data[key].flatten(), worlds.actions(data).long())
    # With fewer versions the test would show nothing.
    assert len(data[key].unique()) > 5


def test_the_policy_itself_has_no_hooks() -> None:
    """The policy is the trainer's, which compiles, exports, scripts and pickles it."""
    policy = worlds.make_policy(1.0)
    with alone(policy) as collector:
        next(iter(collector))
        copy.deepcopy(policy)
        pickle.loads(pickle.dumps(policy))
        compiled = torch.compile(policy.module, backend="eager", fullgraph=True)
        assert compiled(torch.zeros(1)).tolist() == [1.0] * worlds.WIDTH


# -- in a worker that the program itself started -----------------------------------------------


@pytest.mark.parametrize("make", [SHM, TCP])
def test_a_worker_has_the_index_that_it_is_given(make: Any) -> None:
    sender, given = make(timeout=workers.PATIENCE), [2, 0, 1]
    sender.init_on_sender(model_id="policy", model=worlds.make_policy(7.0), num_workers=3)
    connecting = threading.Thread(target=sender.connect)
    connecting.start()
    with contextlib.ExitStack() as opened:
        opened.callback(connecting.join, workers.PATIENCE)
        opened.callback(sender.shutdown)
        for idx in given:
            receiver = pickle.loads(pickle.dumps(sender))
            collector = Collector(
                worlds.World,
                worlds.make_policy(),
                frames_per_batch=4,
                total_frames=-1,
                track_policy_version=True,
            )
            opened.callback(collector.shutdown)
            opened.callback(receiver.shutdown)
            receiver.init_on_receiver(model_id="policy", context=collector, worker_idx=idx)
            receiver.connect()
            assert receiver.worker_idx == idx
            data = next(iter(collector))
            assert worlds.actions(data).tolist() == [7.0] * 4
            assert data["collector", "policy_version"].tolist() == [1] * 4
        connecting.join(workers.PATIENCE)
        assert set(sender.worker_versions) == set(given)


def _join(sender: Any, receiver: Any) -> None:
    """Connect both ends."""
    connecting = threading.Thread(target=sender.connect)
    connecting.start()
    receiver.connect()
    connecting.join(workers.PATIENCE)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_collector_registers_a_worker_that_has_versions_and_a_hook(is_async: bool) -> None:
    told, token, policy = [], "0" * 32, worlds.make_policy()

    def applied(epoch: int, version: int) -> None:
        told.append(version)

    async def awaited(epoch: int, version: int) -> None:
        applied(epoch, version)

    first = TCP(token=token, timeout=workers.PATIENCE)
    first.init_on_sender(model_id="policy", model=worlds.make_policy(1.0), num_workers=1)
    receiver = pickle.loads(pickle.dumps(first))
    hooks = aiosync.SchemeHooks(applied=awaited if is_async else applied)
    receiver.init_on_receiver(model_id="policy", model=policy, worker_idx=0, hooks=hooks)
    with receiver:
        with first:
            _join(first, receiver)
            address = first.address
            for value in (2.0, 3.0):
                first.send(worlds.make_policy(value))
            collector = Collector(
                worlds.World,
                policy,
                frames_per_batch=4,
                total_frames=-1,
                track_policy_version=True,
            )
            collector.register_scheme_receiver({"policy": receiver})
            batches = iter(collector)
            labels = [_label_of(batches)]
        with TCP(address=address, token=token, timeout=workers.PATIENCE) as second:
            # A trainer that restarts begins with version 1.
            second.init_on_sender(model_id="policy", model=worlds.make_policy(4.0), num_workers=1)
            second.connect()
            labels.append(_label_of(batches))
            second.send(worlds.make_policy(5.0))
            labels.append(_label_of(batches))
        collector.shutdown()
    assert labels == [(3.0, 0), (4.0, 1), (5.0, 2)]
    assert told == [1, 2, 3, 1, 2]


def test_a_label_does_not_wait_for_an_async_hook() -> None:
    goes_on, policy = threading.Event(), worlds.make_policy()

    async def applied(epoch: int, version: int) -> None:
        if version > 1:
            await asyncio.to_thread(goes_on.wait, workers.PATIENCE)

    sender = TCP(token="0" * 32, timeout=workers.PATIENCE)
    sender.init_on_sender(model_id="policy", model=worlds.make_policy(1.0), num_workers=1)
    receiver = pickle.loads(pickle.dumps(sender))
    hooks = aiosync.SchemeHooks(applied=applied)
    receiver.init_on_receiver(model_id="policy", model=policy, worker_idx=0, hooks=hooks)
    with sender, receiver:
        _join(sender, receiver)
        collector = Collector(
            worlds.World, policy, frames_per_batch=4, total_frames=-1, track_policy_version=True
        )
        collector.register_scheme_receiver({"policy": receiver})
        batches = iter(collector)
        labels = [_label_of(batches)]
        for value in (2.0, 3.0):
            sender.send_async(worlds.make_policy(value))
            receiver.wait_for_version(sender.version)
        labels.append(_label_of(batches))
        goes_on.set()
        sender.wait_async()
        collector.shutdown()
    assert labels == [(1.0, 0), (3.0, 2)]


def _label_of(batches: Any) -> tuple[float, int]:
    """Return the action of the next frames and their label, the same for all of them."""
    data = next(batches)
    [action], [label] = worlds.actions(data).unique(), data["next", "policy_version"].unique()
    return action.item(), label.item()
