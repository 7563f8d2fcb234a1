"""The schemes in TorchRL's collectors with process workers, used as its users write it."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import math
import multiprocessing
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

import aiosync
import aiosync.sync

pytest.importorskip("torchrl")


from torchrl.data import LazyMemmapStorage, ReplayBuffer

from tests.integrations import _multi_workers as workers
from tests.integrations import _worlds as worlds
from tests.integrations._multi_workers import (
    FRAMES,
    PIPE,
    SCHEMES,
    SHM,
    TCP,
    Evaluator,
    MultiAsyncCollector,
    MultiSyncCollector,
    WeightSyncScheme,
    collecting,
    seen,
    weights_of,
)

DISTRIBUTED = aiosync.sync.DistributedWeightSyncScheme
OFFSET = "env.transform[0].module"

pytestmark = workers.FORKED


@pytest.fixture(scope="module", autouse=True)
def _arena() -> None:
    """Let multiprocessing map the memory that it keeps for values that processes share."""
    [multiprocessing.Value("q") for _ in range(40)]


def _closing(scheme: Any, ready: bool) -> contextlib.AbstractContextManager[Any]:
    """Return a context that closes a scheme which the test initialised.

    A scheme that a collector initialised ends with the collector.
    """
    return scheme if ready else contextlib.nullcontext()


# -- updates ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "ready"),
    [(SHM, False), (PIPE, False), (DISTRIBUTED, False), (TCP, True)],
)
def test_every_way_to_update(make: Any, ready: bool) -> None:
    policy = worlds.make_policy(1.0)
    scheme = make(timeout=workers.PATIENCE)
    if ready:
        scheme.init_on_sender(model_id="policy", model=policy, num_workers=2)
    with _closing(scheme, ready), collecting(scheme, policy) as collector:
        batches = iter(collector)
        assert seen(next(batches)) == [(1.0, 0)] * 2

        def other(value: float) -> Any:
            return worlds.make_policy(value)

        update = collector.update_policy_weights_
        ways = [
            lambda value: (worlds.set_value(policy, value), update()),
            lambda value: update(other(value)),
            lambda value: update(weights_of(other(value))),
            lambda value: update(weights=weights_of(other(value))),
            lambda value: update(policy=other(value)),
            lambda value: update(other(value).state_dict()),
            lambda value: update(weights=other(value).state_dict()),
            lambda value: update(weights_dict={"policy": other(value)}),
            lambda value: update(weights_dict={"policy": weights_of(other(value))}),
            lambda value: update(policy_or_weights=other(value), model_id="policy"),
            lambda value: (worlds.set_value(policy, value), update(model_id="policy")),
        ]
        # If the scheme was ready before, there is nothing to look a name up in.
        if not ready:
            ways.append(lambda value: (worlds.set_value(policy, value), update("policy")))
        for version, way in enumerate(ways, start=1):
            way(10.0 + version)
            assert seen(next(batches)) == [(10.0 + version, version)] * 2, version
        version = len(ways)
        update(other(-1.0))
        update(other(-2.0))
        assert seen(next(batches)) == [(-2.0, version + 2)] * 2
        # No version is counted without an update.
        assert seen(next(batches)) == [(-2.0, version + 2)] * 2
        assert scheme.worker_versions == dict.fromkeys(range(2), scheme.version)


@pytest.mark.parametrize("make", SCHEMES)
def test_two_models(make: Any) -> None:
    policy, offset = worlds.make_policy(1.0), torch.nn.Linear(1, 1)
    worlds.set_value(offset, 5.0)
    other = make()
    other.init_on_sender(model_id=OFFSET, model=offset, num_workers=2)
    schemes = {"policy": make(), OFFSET: other}
    with other, collecting(schemes, policy, envs=workers.make_offset_world) as collector:
        batches = iter(collector)

        def offsets() -> tuple[set[float], list[tuple[float, int]]]:
            data = next(batches)
            return set(data["next", "observation"].flatten().tolist()), seen(data)

        assert offsets() == ({5.0}, [(1.0, 0)] * 2)
        worlds.set_value(offset, 6.0)
        worlds.set_value(policy, 2.0)
        collector.update_policy_weights_(model_id=OFFSET)
        # An update of the other model does not change the policy's version.
        assert offsets() == ({6.0}, [(1.0, 0)] * 2)
        worlds.set_value(offset, 7.0)
        collector.update_policy_weights_(offset, model_id=OFFSET)
        assert offsets() == ({7.0}, [(1.0, 0)] * 2)
        worlds.set_value(offset, 8.0)
        collector.update_policy_weights_(weights_dict={"policy": policy, OFFSET: offset})
        assert offsets() == ({8.0}, [(2.0, 1)] * 2)
        collector.update_policy_weights_(worlds.make_policy(3.0))
        assert offsets() == ({8.0}, [(3.0, 2)] * 2)
        with pytest.raises(KeyError, match="critic"):
            collector.update_policy_weights_(policy, model_id="critic")


def test_extra_state_that_an_update_lacks_stays_and_is_warned_of() -> None:
    """TorchRL sends ``TensorDict.from_module()``, which has none; its workers hide the warning."""
    torchrl = importlib.import_module("torchrl")
    with collecting(SCHEMES[0](), worlds.make_counting(1.0)) as collector:
        batches = iter(collector)
        assert seen(next(batches)) == [(1.0, 0)] * 2
        collector.update_policy_weights_(weights_of(worlds.make_counting(2.0)))
        assert seen(next(batches)) == [(2.0, 1)] * 2
    with pytest.MonkeyPatch.context() as shown:
        shown.setattr(torchrl, "filter_warnings_subprocess", False)
        with collecting(SCHEMES[0](), worlds.make_counting(1.0)) as collector:
            next(iter(collector))
            with pytest.raises(aiosync.PartialSyncError, match=r"Warning.*: module._extra_state"):
                collector.update_policy_weights_(weights_of(worlds.make_counting(2.0)))


# -- initial weights of workers ---------------------------------------------------------------


@pytest.mark.parametrize("make", [SHM, TCP])
def test_beside_a_factory_what_was_given_last_is_sent_again(make: Any) -> None:
    with collecting(make(), policy_factory=workers.Factory(3.0)) as collector:
        batches = iter(collector)
        assert seen(next(batches)) == [(3.0, 0)] * 2
        collector.update_policy_weights_(worlds.make_policy(4.0))
        collector.update_policy_weights_()
        assert seen(next(batches)) == [(4.0, 2)] * 2
        collector.update_policy_weights_(worlds.make_policy(5.0), worker_ids=[1])
        collector.update_policy_weights_()
        assert [value for value, _ in seen(next(batches))] == [4.0, 5.0]
        collector.update_policy_weights_(worlds.make_policy(6.0))
        collector.update_policy_weights_()
        assert [value for value, _ in seen(next(batches))] == [6.0] * 2


@pytest.mark.parametrize("only", [0, torch.tensor(0), np.array([0])], ids=repr)
def test_beside_a_factory_every_form_of_an_index_is_remembered(only: Any) -> None:
    with collecting(SHM(), policy_factory=workers.Factory(3.0)) as collector:
        collector.update_policy_weights_(worlds.make_policy(4.0))
        collector.update_policy_weights_(worlds.make_policy(5.0), worker_ids=only)
        collector.update_policy_weights_()
        assert [value for value, _ in seen(next(iter(collector)))] == [5.0, 4.0]


@pytest.mark.parametrize("make", [SHM, PIPE])
def test_beside_a_factory_an_update_that_one_worker_missed_is_remembered(make: Any) -> None:
    scheme = make()
    with collecting(scheme, policy_factory=workers.Factory(3.0)) as collector:
        collector.update_policy_weights_(worlds.make_policy(4.0))
        collector.procs[0].kill()
        collector.procs[0].join(workers.PATIENCE)
        with pytest.raises(aiosync.PartialSyncError) as caught:
            collector.update_policy_weights_(worlds.make_policy(5.0))
        assert caught.value.acked == {1}
        collector.update_policy_weights_()
        state = workers.ask(collector, 1, "policy.state_dict")
        five = worlds.make_policy(5.0).state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in five.items())


@pytest.mark.parametrize("make", [SHM, PIPE])
def test_frames_after_a_checkpoint_have_no_version_until_an_update(make: Any) -> None:
    policy = worlds.make_policy(1.0)
    with collecting(make(), policy) as collector:
        batches = iter(collector)
        next(batches)
        worlds.set_value(policy, 2.0)
        collector.update_policy_weights_()
        saved = copy.deepcopy(collector.state_dict())
        worlds.set_value(policy, 3.0)
        collector.update_policy_weights_()
        for load, value, version in ((True, 2.0, 0), (False, 3.0, 4)):
            if load:
                collector.load_state_dict(saved)
            else:
                collector.update_policy_weights_()
            data = next(batches)
            assert set(worlds.actions(data).flatten().tolist()) == {value}
            assert set(data["collector", "policy_version"].flatten().tolist()) == {version}


def test_no_synchronization_begins_with_the_policy_and_leaves_it() -> None:
    policy = worlds.make_policy(1.0)
    with collecting(aiosync.sync.NoWeightSyncScheme(), policy) as collector:
        batches = iter(collector)
        assert seen(next(batches)) == [(1.0, 0)] * 2
        worlds.set_value(policy, 2.0)
        collector.update_policy_weights_()
        collector.update_policy_weights_(worlds.make_policy(3.0))
        assert seen(next(batches)) == [(1.0, 0)] * 2


# -- asynchronous collectors ------------------------------------------------------------------


def _slow_world() -> worlds.World:
    """Make an environment that leaves time for updates between an action and its label."""
    return worlds.World(pause=0.001)


@pytest.mark.parametrize("make", SCHEMES)
def test_every_action_is_labelled_with_the_version_that_computed_it(make: Any) -> None:
    """The trainer updates as fast as it can, while both workers compute."""
    policy = worlds.make_policy(0.0)
    stop, errors, sent = threading.Event(), [], 0
    with collecting(
        make(), policy, cls=MultiAsyncCollector, frames=100, envs=_slow_world
    ) as collector:

        def update() -> None:
            nonlocal sent
            try:
                while not stop.is_set():
                    sent += 1
                    worlds.set_value(policy, float(sent))
                    collector.update_policy_weights_()
            except Exception as exc:  # noqa: BLE001 - the test fails with it
                errors.append(exc)

        thread = threading.Thread(target=update)
        thread.start()
        try:
            labels: set[float] = set()
            frames = 0
            for data in collector:
                label = data["next", "policy_version"].flatten().to(torch.float32)
                values = worlds.actions(data)
                assert torch.equal(values, label)
                # Each frame also has the scheme's own version, from 1 on, as data of the collector.
                assert torch.equal(data["collector", "policy_version"].flatten(), label.long() + 1)
                labels.update(values.tolist())
                frames += data.numel()
                if frames >= 1000:
                    break
        finally:
            stop.set()
            thread.join(workers.PATIENCE)
        assert not errors
        assert not thread.is_alive()
    # With fewer versions the test would show nothing.
    assert len(labels) > 20
    assert max(labels) <= sent


def test_frames_have_the_version_of_the_scheme() -> None:
    """Frames of random actions have none, and a trainer that resumes goes on counting."""
    policy, scheme = worlds.make_policy(1.0), SHM(first_version=101)
    with collecting(scheme, policy, init_random_frames=FRAMES) as collector:
        batches = iter(collector)

        def stamps() -> set[int]:
            data = next(batches)
            assert data["collector", "policy_version"].shape == data.shape
            return set(data["collector", "policy_version"].flatten().tolist())

        assert stamps() == {0}
        assert stamps() == {101}
        collector.update_policy_weights_()
        collector.update_policy_weights_()
        assert stamps() == {scheme.version} == {103}
    with collecting(SHM(), policy, track_policy_version=False) as collector:
        assert ("collector", "policy_version") not in next(iter(collector)).keys(True)


@pytest.mark.parametrize("shared_init", [True, False])
def test_frames_in_a_replay_buffer(shared_init: bool) -> None:
    """A storage has a place for versions if the workers' first data makes it."""
    storage = LazyMemmapStorage(1000, shared_init=shared_init)
    buffer = ReplayBuffer(storage=storage, batch_size=8, shared=True)
    policy = worlds.make_policy(1.0)
    with collecting(SHM(), policy, cat_results=None, replay_buffer=buffer) as collector:
        batches = iter(collector)
        for version in (1, 2, 3):
            next(batches)
            worlds.set_value(policy, version + 1.0)
            collector.update_policy_weights_()
        data = buffer[:]
        stamps = data.get(("collector", "policy_version"), None)
        assert (stamps is not None) == shared_init
        if stamps is not None:
            assert torch.equal(stamps.flatten(), worlds.actions(data).long())
            assert set(stamps.flatten().tolist()) == {1, 2, 3}


# -- collectors of other kinds ----------------------------------------------------------------


@pytest.mark.parametrize("make", [SHM, TCP])
def test_an_evaluator(make: Any) -> None:
    def measured(data: Any) -> dict[str, float]:
        return {"value": worlds.actions(data).mean().item()}

    evaluator = Evaluator(
        worlds.World,
        policy_factory=workers.Factory(3.0),
        backend="process",
        weight_sync_schemes={"policy": make()},
        num_trajectories=1,
        max_steps=4,
        metrics_fn=measured,
    )
    try:
        assert evaluator.evaluate()["eval/value"] == 3.0
        assert evaluator.evaluate(worlds.make_policy(4.0))["eval/value"] == 4.0
        assert evaluator.trigger_eval(weights_of(worlds.make_policy(5.0)))
        result = evaluator.wait(workers.PATIENCE)
        assert result is not None
        assert result["eval/value"] == 5.0
    finally:
        evaluator.shutdown()


# -- the end ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "cls"),
    [
        (SHM, MultiSyncCollector),
        (TCP, MultiAsyncCollector),
    ],
)
def test_shutdown_leaves_nothing(make: Any, cls: type) -> None:
    def shared() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}

    gc.collect()
    fds, entries, scheme = workers.open_fds(), shared(), make()
    with collecting(scheme, worlds.make_policy(1.0), cls=cls) as collector:
        batches = iter(collector)
        next(batches)
        for value in range(5):
            collector.update_policy_weights_(worlds.make_policy(float(value)))
        next(batches)
        assert any(thread.name == "aiosync-portal" for thread in threading.enumerate())
        processes = list(collector.procs)
        started = time.monotonic()
        collector.shutdown()
        collector.shutdown()
        assert time.monotonic() - started < 8.0
    assert not any(process.is_alive() for process in processes)
    workers.until(lambda: "closed" in repr(scheme), 5.0)
    workers.until(lambda: "aiosync-portal" not in {t.name for t in threading.enumerate()}, 5.0)
    with pytest.raises(aiosync.TransportClosed):
        scheme.send()
    scheme.shutdown()
    scheme.shutdown()
    del batches, collector, processes
    gc.collect()
    assert workers.open_fds() <= fds
    workers.until(lambda: shared() <= entries, 5.0)  # other tests have entries, too


# -- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("aiosync", SHM),
        ("aiosync-shared", SHM),
        ("aiosync-process", PIPE),
        ("aiosync-tcp", TCP),
        ("aiosync-distributed", DISTRIBUTED),
        ("aiosync-none", aiosync.sync.NoWeightSyncScheme),
    ],
)
def test_torchrl_makes_them_by_name(name: str, cls: type) -> None:
    # The import registers the names.
    importlib.import_module("aiosync.integrations.torchrl")
    scheme = WeightSyncScheme.from_backend(name, timeout=math.pi)
    assert type(scheme) is cls
    assert isinstance(scheme, WeightSyncScheme) and issubclass(cls, WeightSyncScheme)
    assert scheme.timeout == math.pi
    with pytest.raises(ValueError, match="aiosync-tcp"):
        WeightSyncScheme.from_backend("aiosync-nothing")


def test_names_are_optional_as_older_releases_have_none(fresh: Any) -> None:
    done = fresh.script(
        "from torchrl.weight_update import WeightSyncScheme, weight_sync_schemes as theirs\n"
        "del theirs.register_weight_sync_backend\n"
        "import aiosync.integrations.torchrl, aiosync.sync, sys\n"
        "sys.exit(not issubclass(aiosync.sync.TCPWeightSyncScheme, WeightSyncScheme))"
    )
    assert done.returncode == 0, done.stderr


def test_the_facade_does_not_import_torchrl(fresh: Any) -> None:
    done = fresh.script("import sys, aiosync.sync; sys.exit('torchrl' in sys.modules)")
    assert done.returncode == 0
