"""Collectors of TorchRL that have no workers: what they are given is for their own policy."""

from __future__ import annotations

import contextlib
import multiprocessing
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aiosync
import aiosync.sync

pytest.importorskip("torchrl")


from tests.integrations import _multi_workers as workers
from tests.integrations import _worlds as worlds
from tests.integrations._multi_workers import Collector, collecting, seen, seen_by_one, weights_of

if TYPE_CHECKING:
    from collections.abc import Iterator

SHM = aiosync.sync.SharedMemWeightSyncScheme

pytestmark = [
    pytest.mark.slow,
    # TorchRL says what its next versions will do; it is nothing that a scheme could change.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _arena() -> None:
    """Let multiprocessing map what it keeps for values that processes share."""
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
    with alone(worlds.make_policy(1.0), track_policy_version=True) as collector:
        batches = iter(collector)
        assert seen_by_one(next(batches)) == (1.0, 0)
        collector.update_policy_weights_(worlds.make_policy(2.0), worker_ids=worker_ids)
        assert collector.policy_version == 1
        assert seen_by_one(next(batches)) == (2.0, 1)
        collector.update_policy_weights_(weights_of(worlds.make_policy(3.0)), worker_ids=worker_ids)
        assert seen_by_one(next(batches)) == (3.0, 2)
        collector._weight_sync_schemes["policy"].send(worlds.make_policy(4.0), worker_ids)
        assert worlds.actions(next(batches)).unique().tolist() == [4.0]


@pytest.mark.parametrize("worker_ids", [1, [7], [0, 7], True, [False], -1, "0", [0.5]])
def test_other_indices_are_refused_before_anything_changes(worker_ids: Any) -> None:
    with alone(worlds.make_policy(1.0), track_policy_version=True) as collector:
        batches = iter(collector)
        next(batches)
        with pytest.raises(aiosync.ConfigError, match="not registered|must be an int"):
            collector.update_policy_weights_(worlds.make_policy(9.0), worker_ids=worker_ids)
        assert collector.policy_version == 0
        assert seen_by_one(next(batches)) == (1.0, 0)


def test_nobody_is_nobody() -> None:
    with alone(worlds.make_policy(1.0)) as collector:
        collector.update_policy_weights_(worlds.make_policy(9.0), worker_ids=[])
        assert worlds.actions(next(iter(collector))).unique().tolist() == [1.0]


def test_weights_for_each_worker_are_those_of_index_0() -> None:
    with alone(worlds.make_policy(1.0), SHM(per_worker_weights=True)) as collector:
        batches = iter(collector)
        collector.update_policy_weights_({0: weights_of(worlds.make_policy(2.0))})
        assert worlds.actions(next(batches)).unique().tolist() == [2.0]
        with pytest.raises(aiosync.ConfigError, match="Worker 1 not registered"):
            collector.update_policy_weights_({1: weights_of(worlds.make_policy(3.0))})
        assert worlds.actions(next(batches)).unique().tolist() == [2.0]


def test_a_closed_scheme_changes_nothing() -> None:
    scheme = SHM()
    with alone(worlds.make_policy(1.0), scheme) as collector:
        scheme.shutdown()
        with pytest.raises(aiosync.TransportClosed):
            collector.update_policy_weights_(worlds.make_policy(9.0))
        assert worlds.actions(next(iter(collector))).unique().tolist() == [1.0]


def test_a_truth_value_is_no_index() -> None:
    with workers.start_method("fork"), collecting(SHM(), worlds.make_policy(1.0)) as collector:
        batches = iter(collector)
        for worker_ids in (True, [True], torch.tensor(True)):
            with pytest.raises(aiosync.ConfigError, match="must be an int"):
                collector.update_policy_weights_(worlds.make_policy(9.0), worker_ids=worker_ids)
        assert seen(next(batches)) == [(1.0, 0)] * 2
