"""The legacy weight updaters, alone and in real collectors of TorchRL."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
import aiosync.legacy.updaters as legacy
from tests.legacy import _tools as workers

pytestmark = pytest.mark.apart

ROOT = Path(__file__).parents[2]
LIMIT = 55.0


def run(name: str, method: str = "fork") -> None:
    """Run a scenario of ``_updater_workers`` in a process of its own; kill all that it leaves."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        report = Path(folder) / "report"
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.legacy._updater_workers", name, method, str(report)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "PYTHONWARNINGS": "ignore",
                "RAY_USAGE_STATS_ENABLED": "0",
                "RL_LOGGING_LEVEL": "WARNING",
            },
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT)
        finally:
            # The group has only the workers that did not end with the process, and may be gone.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        passed = report.exists() and json.loads(report.read_text()) == {"passed": name}
        assert passed, log.read()[-6000:]


needs_torchrl = pytest.mark.skipif(
    importlib.util.find_spec("torchrl") is None, reason="needs TorchRL"
)
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")


# -- in collectors ----------------------------------------------------------------------------


slow, heavy = pytest.mark.slow, pytest.mark.heavy


@needs_torchrl
@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param("vanilla", "fork", marks=slow),
        pytest.param("sync", "fork", marks=slow),
        pytest.param("sync", "spawn", marks=heavy),
        pytest.param("moved", "fork", marks=slow),
        pytest.param("distributed", "fork", marks=heavy),
        pytest.param("rpc", "fork", marks=heavy),
    ],
)
def test_in_a_collector(name: str, method: str) -> None:
    run(name, method)


@needs_torchrl
@needs_ray
# A cluster has to start.
@pytest.mark.heavy
def test_ray_in_a_collector() -> None:
    run("ray")


@needs_torchrl
@needs_ray
@pytest.mark.apart
def test_an_actor_that_ray_restarts_gets_weights_again() -> None:
    run("restarted")


@needs_torchrl
def test_a_worker_that_refuses_its_receiver_keeps_no_weights_from_the_others() -> None:
    run("refused_by_rpc")


@needs_torchrl
def test_an_overridden_hook_chooses_what_a_worker_gets() -> None:
    run("overridden")


@needs_torchrl
@needs_ray
# A cluster has to start for each.
@pytest.mark.parametrize("name", ["unreachable", "busy", "busy_beside_another", "two_busy"])
def test_an_actor_that_gets_no_receiver_keeps_no_weights_from_the_others(name: str) -> None:
    run(name)


@needs_torchrl
@pytest.mark.parametrize("name", ["told_by_rpc", pytest.param("told_by_ray", marks=needs_ray)])
def test_an_error_of_a_remote_method_is_no_timeout_and_no_death(name: str) -> None:
    run(name)


# -- alone ------------------------------------------------------------------------------------


class Recorder(legacy.WeightUpdaterBase):
    """Updater that records what it would send."""

    def __init__(self, ids: Any = None) -> None:
        self.ids = ids
        self.sent: list[Any] = []
        self.skipped: set[int] = set()

    def all_worker_ids(self) -> Any:
        return self.ids

    def _skip_update(self, worker_id: int) -> bool:
        return worker_id in self.skipped

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        self.sent.append((worker_id, server_weights))


class Owner:
    """The part of a TorchRL collector that an updater uses."""

    def __init__(self, policy: nn.Module) -> None:
        self._policy_to_send = policy

    @property
    def policy_to_send(self) -> Any:
        return self._policy_to_send


def test_the_hooks_of_an_update() -> None:
    updater, weights = Recorder([0, 1, 2]), {"w": torch.zeros(1)}
    calls: list[str] = []
    updater.register_post_hook(lambda: calls.append("first"))
    updater.register_post_hook(lambda: calls.append("second"))
    updater(weights)
    assert updater.sent == [(0, weights), (1, weights), (2, weights)]
    assert calls == ["first", "second"]
    assert len(updater.post_hooks) == 2
    updater.sent.clear()
    updater.skipped = {1}
    updater.push_weights(weights, [1, 2])
    assert updater.sent == [(2, weights)]
    updater.sent.clear()
    updater(policy_weights=weights, worker_ids=torch.device("cpu"))
    assert updater.sent == [(torch.device("cpu"), weights)]
    one = Recorder()
    one(nn.Linear(1, 1))
    assert one.sent[0][0] is None
    assert not one.sent[0][1]["weight"].requires_grad
    with pytest.raises(TypeError):
        updater(3)
    assert calls.count("first") == 3


def test_a_push_of_its_own_ends_with_the_hooks() -> None:
    class Pushes(Recorder):
        def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
            self._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)
            self._call_post_hooks()

    updater, calls = Pushes([0]), list[int]()
    updater.register_post_hook(lambda: calls.append(len(updater.sent)))
    updater({"w": torch.zeros(1)})
    assert calls == [1]


AT_ONCE: list[tuple[Any, dict[str, Any]]] = [
    (
        legacy.MultiProcessedWeightUpdater,
        {"get_server_weights": None, "policy_weights": {0: None, 1: None}},
    ),
    (legacy.RPCWeightUpdater, {"collector_rrefs": [None, None]}),
    (legacy.RayWeightUpdater, {"remote_collectors": [None, None]}),
    (legacy.DistributedWeightUpdater, {"policy_weights": {}, "num_workers": 2}),
]


@pytest.mark.parametrize(("cls", "arguments"), AT_ONCE)
def test_an_overridden_hook_sends_to_each_worker(cls: Any, arguments: dict[str, Any]) -> None:
    sent: list[Any] = []

    class Own(cls):  # type: ignore[misc]
        def _sync_weights_with_worker(self, worker_id: Any, server_weights: Any) -> None:
            sent.append((worker_id, server_weights))

    weights = {"w": torch.zeros(1)}
    Own(**arguments)(weights)
    assert sent == [(0, weights), (1, weights)]


def test_a_worker_that_an_overridden_hook_misses_keeps_no_weights_from_the_others() -> None:
    lost = aiosync.PeerClosed("gone")

    class Own(legacy.RPCWeightUpdater):
        def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
            sent.append(worker_id)
            if worker_id < 2:
                raise aiosync.PartialSyncError(failed={worker_id: lost})

    sent: list[int] = []
    with pytest.raises(aiosync.PartialSyncError) as caught:
        Own(collector_rrefs=[None] * 3)({"w": torch.zeros(1)})
    assert sent == [0, 1, 2]
    assert caught.value.failed == {0: lost, 1: lost}


def test_an_overridden_hook_tells_of_a_lost_worker_once() -> None:
    class Own(legacy.RPCWeightUpdater):
        def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
            if worker_id in lost:
                raise aiosync.PartialSyncError(failed={worker_id: aiosync.PeerClosed("gone")})

    lost, calls = {0}, list[int]()
    updater = Own(collector_rrefs=[None] * 2)
    updater.register_post_hook(lambda: calls.append(1))
    weights = {"w": torch.zeros(1)}
    with pytest.raises(aiosync.PartialSyncError):
        updater(weights)
    updater(weights)
    assert calls == [1]
    # An update that nobody gets fails each time.
    for _ in range(2):
        with pytest.raises(aiosync.PartialSyncError, match="worker 0"):
            updater(weights, worker_ids=0)
    lost.add(1)
    with pytest.raises(aiosync.PartialSyncError, match="worker 1"):
        updater(weights)
    assert calls == [1]


def test_vanilla_copies_all_or_nothing() -> None:
    policy, source = nn.Linear(2, 2), nn.Linear(2, 2)
    updater = legacy.VanillaWeightUpdater.from_policy(policy)
    # There are no weights to copy.
    updater()
    updater(source)
    assert torch.equal(policy.weight, source.weight)
    assert policy.weight.data_ptr() != source.weight.data_ptr()
    before = policy.weight.clone()
    with pytest.raises(aiosync.ManifestMismatch, match="bias"):
        updater({"weight": torch.zeros(2, 2), "bias": torch.zeros(3)})
    assert torch.equal(policy.weight, before)
    # These weights are a part of the model's, with another dtype.
    updater({"bias": torch.ones(2, dtype=torch.float64)})
    assert policy.bias.tolist() == [1.0, 1.0]


def test_arguments_that_cannot_be() -> None:
    weights = {"w": torch.zeros(1)}
    legacy.RemoteModuleWeightUpdater()(weights)
    distributed = legacy.DistributedWeightUpdater(object(), {}, 2)
    multi = legacy.MultiProcessedWeightUpdater(get_server_weights=None, policy_weights={})
    keyed = legacy.MultiProcessedWeightUpdater(get_server_weights=None, policy_weights={0: weights})
    single = Owner(nn.Linear(1, 1))
    workers.refuses(
        (RuntimeError, "num_workers", lambda: multi(weights)),
        (aiosync.ConfigError, "MultiSync", lambda: keyed(weights)),
        (
            aiosync.ConfigError,
            "MultiSync",
            lambda: multi.register_collector(single),
        ),
        (RuntimeError, "explicitly", legacy.RemoteModuleWeightUpdater()),
        (RuntimeError, "at least 1", lambda: distributed(worker_ids=0)),
        (aiosync.ConfigError, "2", lambda: distributed(worker_ids=[2])),
        (aiosync.LocalProtocolError, "policy_weights", legacy.DistributedWeightUpdater()),
    )
    for cls in (legacy.RPCWeightUpdater, legacy.RayWeightUpdater):
        workers.refuses(
            (aiosync.LocalProtocolError, "register", lambda cls=cls: cls()(weights)),
            *(
                (aiosync.ConfigError, "timeout", lambda cls=cls, value=value: cls(timeout=value))
                for value in (0, "5", True)
            ),
        )


def test_infinity_is_for_ever() -> None:
    """Ray and RPC wait for no infinite number of seconds."""
    for cls in (legacy.RPCWeightUpdater, legacy.RayWeightUpdater, legacy.DistributedWeightUpdater):
        assert cls(timeout=math.inf).timeout is None


def test_a_policy_for_distributed_workers_gets_memory_when_it_arrives() -> None:
    policy = nn.Linear(2, 2).share_memory()
    collector = Owner(policy)
    updater = legacy.DistributedWeightUpdater()
    updater.register_collector(collector)
    twin = collector.policy_to_send
    assert twin.weight.data_ptr() != policy.weight.data_ptr()
    # Pickling for another process does the same.
    twin.share_memory()
    for arrived in (pickle.loads(pickle.dumps(twin)), copy.deepcopy(twin)):
        assert type(arrived) is nn.Linear
        assert torch.equal(arrived.weight, policy.weight)
        assert not arrived.weight.is_shared()
        assert "__reduce_ex__" not in vars(arrived)
    with pytest.raises(ValueError, match="already has a collector"):
        updater.register_collector(collector)
