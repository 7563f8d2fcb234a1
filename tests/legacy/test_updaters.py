"""The legacy weight updaters, alone and in real collectors of TorchRL."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib.util
import json
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
from tensordict import TensorDict
from torch import nn

import aiosync
import aiosync.legacy.updaters as legacy
from aiosync.legacy.updaters._worker import make_private

pytestmark = pytest.mark.apart

ROOT = Path(__file__).parents[2]
LIMIT = 55.0


def run(name: str, method: str = "fork") -> None:
    """Run a scenario of ``_updater_workers`` in a process of its own; none of it stays behind."""
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
            with contextlib.suppress(ProcessLookupError):  # workers that did not end with it
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


@needs_torchrl
@pytest.mark.slow
def test_vanilla_and_an_updater_of_the_users_own() -> None:
    run("local")


@needs_torchrl
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.heavy)])
def test_multi_processed_in_a_synchronous_collector(method: str) -> None:
    run("sync", method)


@needs_torchrl
@pytest.mark.heavy
def test_multi_processed_in_an_asynchronous_collector() -> None:
    run("asynchronous")


@needs_torchrl
@pytest.mark.slow
def test_many_small_tensors_cost_no_descriptors_and_nothing_is_left() -> None:
    run("many")


@needs_torchrl
@pytest.mark.heavy
def test_distributed_in_a_collector() -> None:
    run("distributed")


@needs_torchrl
@pytest.mark.heavy
def test_rpc_in_a_collector() -> None:
    run("rpc")


@needs_torchrl
@needs_ray
@pytest.mark.heavy  # a cluster has to start
def test_ray_in_a_collector() -> None:
    run("ray")


# -- alone ------------------------------------------------------------------------------------


class Recorder(legacy.WeightUpdaterBase):
    """Notes what would be sent."""

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
    """As much of a collector as the base class knows."""

    version = 0

    def increment_version(self) -> None:
        self.version += 1


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
    for wrong in (None, 3):
        with pytest.raises(TypeError, match="policy_or_weights must be"):
            updater(wrong)
    assert calls.count("first") == 3


def test_collectors_are_kept_by_weak_references() -> None:
    updater = Recorder()
    assert updater.collector is None
    assert updater.collectors is None
    with pytest.raises(RuntimeError, match="no collector"):
        updater.increment_version()
    first, second = Owner(), Owner()
    updater.register_collector(first)
    assert updater.collector is first
    updater.register_collector(second)
    with pytest.raises(ValueError, match="multiple collectors"):
        _ = updater.collector
    assert updater.collectors == [first, second]
    updater.increment_version()
    assert (first.version, second.version) == (1, 1)
    del first
    gc.collect()
    assert updater.collectors == [None, second]
    updater.increment_version()
    assert second.version == 2
    assert Recorder.from_policy(nn.Linear(1, 1)) is None


def test_the_base_class_is_abstract() -> None:
    with pytest.raises(TypeError, match="_sync_weights_with_worker"):
        legacy.WeightUpdaterBase()  # type: ignore[abstract]


def test_vanilla_copies_all_or_nothing() -> None:
    policy, source = nn.Linear(2, 2), nn.Linear(2, 2)
    updater = legacy.VanillaWeightUpdater.from_policy(policy)
    updater()  # nothing to do
    updater(source)
    assert torch.equal(policy.weight, source.weight)
    assert policy.weight.data_ptr() != source.weight.data_ptr()
    before = policy.weight.clone()
    with pytest.raises(aiosync.ManifestMismatch, match="bias"):
        updater({"weight": torch.zeros(2, 2), "bias": torch.zeros(3)})
    assert torch.equal(policy.weight, before)
    updater({"bias": torch.ones(2, dtype=torch.float64)})  # a part, and another dtype
    assert policy.bias.tolist() == [1.0, 1.0]


def test_multi_processed_without_a_collector_copies() -> None:
    ours = {0: TensorDict({"w": torch.zeros(2)}), 1: TensorDict({"w": torch.zeros(2)})}
    updater = legacy.MultiProcessedWeightUpdater(
        get_server_weights=lambda: {"w": torch.ones(2)}, policy_weights=ours
    )
    updater(worker_ids=[1])
    assert [ours[idx]["w"].sum().item() for idx in ours] == [0.0, 2.0]
    updater()
    assert [ours[idx]["w"].sum().item() for idx in ours] == [2.0, 2.0]
    with pytest.raises(aiosync.ConfigError, match="no weights for worker 2"):
        updater(worker_ids=2)


def test_remote_module_wants_weights() -> None:
    updater = legacy.RemoteModuleWeightUpdater()
    with pytest.raises(RuntimeError, match="passed explicitly"):
        updater()
    updater({"w": torch.zeros(1)})


@pytest.mark.parametrize("cls", [legacy.RPCWeightUpdater, legacy.RayWeightUpdater])
def test_remote_updaters_without_workers_say_what_is_missing(cls: Any) -> None:
    with pytest.raises(aiosync.LocalProtocolError, match="register a"):
        cls()({"w": torch.zeros(1)})
    for timeout in (0, "5", True):
        with pytest.raises(aiosync.ConfigError, match="timeout must be positive seconds or None"):
            cls(timeout=timeout)


def test_distributed_checks_its_arguments() -> None:
    updater = legacy.DistributedWeightUpdater(object(), {}, 2)
    with pytest.raises(RuntimeError, match="at least 1"):
        updater(worker_ids=0)
    with pytest.raises(aiosync.ConfigError, match="no workers"):
        updater(worker_ids=[2])
    with pytest.raises(aiosync.LocalProtocolError, match="policy_weights"):
        legacy.DistributedWeightUpdater()()


def test_a_policy_for_distributed_workers_gets_memory_when_it_arrives() -> None:
    policy = nn.Linear(2, 2).share_memory()
    collector = Owner()
    collector._policy_to_send = policy  # type: ignore[attr-defined]  # as a collector has it
    updater = legacy.DistributedWeightUpdater()
    updater.register_collector(collector)
    twin: Any = collector._policy_to_send  # type: ignore[attr-defined]  # the same
    assert twin.weight.data_ptr() != policy.weight.data_ptr()
    twin.share_memory()  # as pickling for another process does it
    for arrived in (pickle.loads(pickle.dumps(twin)), copy.deepcopy(twin)):
        assert type(arrived) is nn.Linear
        assert torch.equal(arrived.weight, policy.weight)
        assert not arrived.weight.is_shared()
        assert "__reduce_ex__" not in vars(arrived)
    with pytest.raises(ValueError, match="already has a collector"):
        updater.register_collector(collector)


def test_private_memory_keeps_ties_and_objects() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    whole = torch.zeros(4)
    module.register_buffer("left", whole[:2])
    module.register_buffer("right", whole[1:])
    module.share_memory()
    before = dict(module.named_parameters())
    values = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert make_private(module) is module
    assert dict(module.named_parameters()).keys() == before.keys()
    for name, tensor in module.named_parameters():
        assert tensor is before[name]
        assert not tensor.is_shared()
    assert module[1].weight is module[0].weight
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, values[name])
    module.left[1] = 5.0
    assert module.right[0] == 5.0
