"""Faults of TorchRL's own schemes with process workers, each of which must not happen here.

Four more have their tests beside the contract, in ``test_torchrl_multi.py``: ``worker_ids`` that
are only a hint, models of other names, torn forwards, and no synchronization with a policy.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aiosync
import aiosync.sync

pytest.importorskip("torchrl")

from tests.integrations import _multi_workers as workers
from tests.integrations import _worlds as worlds
from tests.integrations._multi_workers import ask, collecting, held, seen, stopping, weights_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHM = aiosync.sync.SharedMemWeightSyncScheme
PIPE = aiosync.sync.MultiProcessWeightSyncScheme
TCP = aiosync.sync.TCPWeightSyncScheme
SCHEMES = [SHM, PIPE, TCP]
SOON = 5.0  # seconds

pytestmark = [
    pytest.mark.slow,
    # TorchRL says what its next versions will do; it is nothing that a scheme could change.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def forked() -> Iterator[None]:
    """Fork the workers, which takes a tenth of a second; spawning them takes five."""
    with workers.start_method("fork"):
        yield


def kill(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join(workers.PATIENCE)


# -- aliasing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", SCHEMES)
def test_01_training_changes_nothing_in_the_workers(make: Any) -> None:
    policy = worlds.make_policy(1.0)
    parameters = list(policy.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1.0)

    def step() -> None:
        optimizer.zero_grad()
        sum(parameters).backward()
        optimizer.step()  # takes one from everything

    with collecting(make(), policy) as collector:
        batches = iter(collector)
        calls = policy.module.calls
        assert all(a is b for a, b in zip(policy.parameters(), parameters, strict=True))
        assert not any(parameter.is_shared() for parameter in parameters)
        step()
        assert parameters[0].item() == 0.0
        assert seen(next(batches)) == [(1.0, 0)] * 2
        collector.update_policy_weights_()
        step()
        assert seen(next(batches)) == [(0.0, 1)] * 2
        given = weights_of(worlds.make_policy(8.0))
        collector.update_policy_weights_(given)
        given.apply_(lambda tensor: tensor.fill_(9.0))
        assert seen(next(batches)) == [(8.0, 2)] * 2
        # Nor the other way round, nor from worker to worker.
        for idx in range(2):
            ask(collector, idx, "policy.module.calls.fill_", 100.0 * idx)
        assert ask(collector, 0, "policy.module.calls").item() == 0.0
        assert policy.module.calls is calls
        assert calls.item() == 0.0


# -- workers that die -------------------------------------------------------------------------


@pytest.mark.parametrize("make", SCHEMES)
def test_03_a_dead_worker_is_named_and_the_other_is_updated(make: Any) -> None:
    scheme = make()
    with collecting(scheme, worlds.make_policy(1.0)) as collector:
        kill(collector.procs[0])
        started = time.monotonic()
        with pytest.raises(aiosync.PartialSyncError) as caught:
            collector.update_policy_weights_(worlds.make_policy(2.0))
        assert time.monotonic() - started < SOON
        assert set(caught.value.failed) == {0}
        assert caught.value.acked == {1}
        assert held(collector, 1) == 2.0
        assert ask(collector, 1, "policy_version") == 1
        collector.update_policy_weights_(worlds.make_policy(3.0))  # said once
        assert held(collector, 1) == 3.0


@pytest.mark.parametrize("make", SCHEMES)
def test_03_a_worker_that_dies_during_an_update(make: Any) -> None:
    with collecting(make(), worlds.make_policy(1.0)) as collector:
        with stopping(collector.procs[0]), _update(collector, 2.0) as outcome:
            workers.until(lambda: workers.all_held(collector, 1) == {2.0})
            assert not outcome  # it waits for the other one
            kill(collector.procs[0])
        error = outcome[0]
        assert isinstance(error, aiosync.PartialSyncError)
        assert set(error.failed) == {0}
        assert error.acked == {1}


@contextlib.contextmanager
def _update(collector: Any, value: float) -> Iterator[list[Exception | None]]:
    """Update in another thread; what came of it is listed when it is over, soon after the block."""
    outcome: list[Exception | None] = []

    def update() -> None:
        try:
            collector.update_policy_weights_(worlds.make_policy(value))
            outcome.append(None)
        except Exception as exc:  # noqa: BLE001 - the test looks at it
            outcome.append(exc)

    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    yield outcome
    thread.join(SOON)
    assert not thread.is_alive(), "the update hangs"


@pytest.mark.parametrize("make", SCHEMES)
def test_12_shutdown_after_a_death_with_updates_that_nobody_took(make: Any) -> None:
    scheme = make()
    with collecting(scheme, worlds.make_policy(1.0)) as collector:
        with stopping(collector.procs[1]):
            for value in range(12):
                scheme.send_async(worlds.make_policy(float(value)))
            kill(collector.procs[1])
        started = time.monotonic()
        collector.shutdown()
        scheme.shutdown()
        assert time.monotonic() - started < 15.0


# -- updates that do not fit ------------------------------------------------------------------


def _reshaped(weights: dict[str, torch.Tensor]) -> None:
    weights["module.values.3"] = torch.zeros(2)


def _broadcast(weights: dict[str, torch.Tensor]) -> None:
    weights["module.values.3"] = torch.full((1,), 9.0)


def _cast(weights: dict[str, torch.Tensor]) -> None:
    weights["module.values.3"] = weights["module.values.3"].double()


def _short(weights: dict[str, torch.Tensor]) -> None:
    del weights["module.values.3"]


def _long(weights: dict[str, torch.Tensor]) -> None:
    weights["module.more"] = torch.zeros(())


@pytest.mark.parametrize("make", SCHEMES)
def test_04_22_what_does_not_fit_is_refused_whole_and_by_name(make: Any) -> None:
    faults: dict[Callable[[dict[str, torch.Tensor]], None], str] = {
        _reshaped: "module.values.3",
        _broadcast: "module.values.3",
        _cast: "module.values.3",
        _short: "module.values.3",
        _long: "module.more",
    }
    with collecting(make(), worlds.make_policy(1.0)) as collector:
        batches = iter(collector)
        label = 0
        for round_, (spoil, name) in enumerate(faults.items(), start=1):
            before = seen(next(batches))
            weights = dict(worlds.make_policy(9.0).state_dict())
            spoil(weights)
            started = time.monotonic()
            with pytest.raises(aiosync.PartialSyncError) as caught:
                collector.update_policy_weights_(weights)
            assert time.monotonic() - started < SOON
            assert not caught.value.acked
            for idx in range(2):
                error = caught.value.failed[idx]
                assert isinstance(error, aiosync.ApplyError)
                assert error.worker_idx == idx
                assert error.remote_type == "ManifestMismatch"
                assert name in str(error), spoil
            assert seen(next(batches)) == before, spoil
            collector.update_policy_weights_(worlds.make_policy(float(round_)))
            after = seen(next(batches))
            assert [value for value, _ in after] == [round_, round_]
            assert after[0][1] == after[1][1] > label
            label = after[0][1]


# -- updates that nobody waits for ------------------------------------------------------------


@pytest.mark.parametrize("make", SCHEMES)
def test_07_08_what_is_sent_is_what_the_policy_had_then(make: Any) -> None:
    policy, scheme = worlds.make_policy(1.0), make()
    with collecting(scheme, policy) as collector:
        with stopping(collector.procs[0]):
            worlds.set_value(policy, 42.0)
            version = scheme.send_async()
            worlds.set_value(policy, 999.0)
            workers.until(lambda: scheme.worker_versions[1] == version)  # waits for nobody
            assert held(collector, 1) == 42.0
            assert scheme.worker_versions[0] == version - 1
        report = scheme.wait_async()
        assert (report.version, report.acked) == (version, {0, 1})
        assert held(collector, 0) == 42.0
        assert seen(next(iter(collector))) == [(42.0, 1)] * 2


@pytest.mark.parametrize("make", SCHEMES)
def test_07_late_answers_do_not_count_for_later_updates(make: Any) -> None:
    policy, scheme = worlds.make_policy(1.0), make()
    with collecting(scheme, policy) as collector:
        with stopping(collector.procs[0]):
            for value in (2.0, 3.0, 4.0):
                scheme.send_async(worlds.make_policy(value))
            # Worker 1 answers three times, worker 0 not once.
            with pytest.raises(aiosync.PartialSyncError) as caught:
                scheme.send(worlds.make_policy(5.0), timeout=0.3)
            assert isinstance(caught.value.failed[0], aiosync.AckTimeout)
            assert caught.value.acked == {1}
        for value in (6.0, 7.0, 8.0):
            collector.update_policy_weights_(worlds.make_policy(value))
            assert [held(collector, idx) for idx in range(2)] == [value, value]


@pytest.mark.parametrize("make", SCHEMES)
def test_09_updates_do_not_pile_up_for_a_worker_that_takes_none(make: Any) -> None:
    policy, scheme = workers.make_heavy(1.0), make()
    with collecting(scheme, policy) as collector:
        with stopping(collector.procs[0]):
            for _ in range(3):  # as many buffers as it will ever need
                scheme.send_async()
            gc.collect()
            fds, memory = workers.open_fds(), workers.resident()
            for value in range(50):
                worlds.set_value(policy, float(value))
                version = scheme.send_async()
            workers.until(lambda: scheme.worker_versions[1] == version)
            assert workers.open_fds() - fds <= 4
            assert workers.resident() - memory < 40 * 2**20  # ten of fifty
        report = scheme.wait_async()
        assert report.acked == {0, 1}
        assert [held(collector, idx) for idx in range(2)] == [49.0, 49.0]


@pytest.mark.parametrize("make", SCHEMES)
def test_10_a_late_update_does_not_shift_later_ones(make: Any) -> None:
    scheme = make()
    with collecting(scheme, worlds.make_policy(1.0)) as collector:
        batches = iter(collector)
        assert seen(next(batches)) == [(1.0, 0)] * 2
        with stopping(collector.procs[0]):
            with pytest.raises(aiosync.PartialSyncError):
                scheme.send(worlds.make_policy(2.0), timeout=0.3)
        for version in range(2, 6):
            collector.update_policy_weights_(worlds.make_policy(version * 10.0))
            assert seen(next(batches)) == [(version * 10.0, version)] * 2


# -- what models have -------------------------------------------------------------------------


@pytest.mark.parametrize("factory", [False, True], ids=["policy", "factory"])
@pytest.mark.parametrize("make", SCHEMES)
def test_23_tied_weights_stay_tied(make: Any, factory: bool) -> None:
    policy = workers.make_many(1.0)
    options: dict[str, Any] = {"policy_factory": _many} if factory else {}
    with collecting(make(), policy, **options) as collector:
        assert policy.module.tied
        assert [ask(collector, idx, "policy.module.tied") for idx in range(2)] == [True, True]
        worlds.set_value(policy, 2.0)
        collector.update_policy_weights_()
        assert [ask(collector, idx, "policy.module.tied") for idx in range(2)] == [True, True]
        for idx in range(2):
            weights = ask(collector, idx, "policy.state_dict")
            assert (weights["module.first.weight"] == 2.0).all()
            assert (weights["module.last.weight"] == 2.0).all()


def _many() -> Any:
    return workers.make_many(0.0)


@pytest.mark.parametrize("make", SCHEMES)
def test_24_state_dicts(make: Any) -> None:
    policy = worlds.make_policy(1.0)
    with collecting(make(strategy="state_dict"), policy) as collector:
        batches = iter(collector)
        assert seen(next(batches)) == [(1.0, 0)] * 2
        worlds.set_value(policy, 2.0)
        collector.update_policy_weights_()
        assert seen(next(batches)) == [(2.0, 1)] * 2
        collector.update_policy_weights_(worlds.make_policy(3.0).state_dict())
        assert seen(next(batches)) == [(3.0, 2)] * 2
        collector.update_policy_weights_(weights_of(worlds.make_policy(4.0)))
        assert seen(next(batches)) == [(4.0, 3)] * 2


# -- bookkeeping ------------------------------------------------------------------------------


def test_30_the_history_of_versions_does_not_grow() -> None:
    with collecting(SHM(), worlds.make_policy(1.0)) as collector:
        for value in range(1, 61):
            collector.update_policy_weights_(worlds.make_policy(float(value)))
        for idx in range(2):
            assert ask(collector, idx, "policy_version") == 60
            assert len(ask(collector, idx, "policy_version_tracker.version_history")) < 5


@pytest.mark.parametrize("make", SCHEMES)
def test_32_threads_may_update_at_the_same_time(make: Any) -> None:
    errors: list[Exception] = []
    with collecting(make(), worlds.make_policy(1.0)) as collector:

        def update(first: int) -> None:
            try:
                for value in range(first, first + 10):
                    collector.update_policy_weights_(worlds.make_policy(float(value)))
            except Exception as exc:  # noqa: BLE001 - the test fails with it
                errors.append(exc)

        threads = [threading.Thread(target=update, args=(each,)) for each in (100, 200, 300)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(workers.PATIENCE)
            assert not thread.is_alive()
        assert not errors
        first, second = seen(next(iter(collector)))
        assert first == second
        assert first[0] in {109.0, 209.0, 309.0}
        assert first[1] == 30


# -- workers that never begin -----------------------------------------------------------------


class Broken(worlds.World):
    """A world that cannot be made."""

    def __init__(self) -> None:
        raise LookupError("there is no such world")


class BrokenFactory(workers.Factory):
    """Makes policies in the trainer only."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.trainer = os.getpid()

    def __call__(self) -> Any:
        if os.getpid() != self.trainer:
            raise LookupError("there is no such world")
        return super().__call__()


@pytest.mark.parametrize(
    ("what", "broken", "ready"),
    [
        ("env", [0, 1], False),
        ("env", [1], False),
        ("env", [0], False),
        ("policy", [0, 1], False),
        ("policy", [1], False),
        ("policy", [0], False),
        ("env", [0, 1], True),
        ("env", [1], True),
        ("policy", [0], True),
    ],
)
def test_the_constructor_raises_what_a_worker_raised(
    what: str, broken: list[int], ready: bool
) -> None:
    """Soon, and not that a worker is missing; ``ready``: the user has initialised the scheme."""
    scheme = SHM(timeout=4.0)
    if ready:
        scheme.init_on_sender(model_id="policy", model=worlds.make_policy(1.0), num_workers=2)
    factories = [BrokenFactory() if idx in broken else workers.Factory(1.0) for idx in range(2)]
    options: dict[str, Any] = {"policy_factory": factories}
    envs: list[Any] = [worlds.World] * 2
    if what == "env":
        envs = [Broken if idx in broken else worlds.World for idx in range(2)]
        options = {"policy": worlds.make_policy(1.0)}
    started = time.monotonic()
    try:
        with pytest.raises(LookupError, match="there is no such world"):
            workers.MultiSyncCollector(
                envs,
                frames_per_batch=workers.FRAMES,
                total_frames=-1,
                weight_sync_schemes={"policy": scheme},
                cat_results="stack",
                **options,
            )
        assert time.monotonic() - started < 3.0
    finally:
        scheme.shutdown()


# -- a collector without workers ----------------------------------------------------------------


@pytest.mark.parametrize("make", [SHM, PIPE])
def test_weights_for_a_collector_of_one_process_are_for_its_own_policy(make: Any) -> None:
    from torchrl.collectors import Collector

    def values() -> set[float]:
        return {float(each.detach()) for each in collector.policy.parameters()}

    learner = worlds.make_policy(2.0)
    collector = Collector(
        worlds.World,
        policy=worlds.make_policy(1.0),
        frames_per_batch=8,
        total_frames=16,
        weight_sync_schemes={"policy": make()},
    )
    try:
        collector.update_policy_weights_(learner)
        assert values() == {2.0}
        with pytest.raises(aiosync.ManifestMismatch, match="nonsense"):
            collector.update_policy_weights_({"nonsense": torch.zeros(1)})
        worlds.set_value(learner, 3.0)
        assert values() == {2.0}
    finally:
        collector.shutdown()
