"""TorchRL's distributed, RPC and Ray collectors, with the schemes of ``aiosync.sync``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.apart

ROOT = Path(__file__).parents[2]
SECONDS = 55.0
HEAVY = pytest.mark.heavy


def run(*args: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations._remote_run", *args]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    assert lines, f"it ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    seen: dict[str, Any] = json.loads(lines[-1].removeprefix("SEEN "))
    return seen


def check(seen: dict[str, Any], kind: str) -> None:
    """Check first weights, no aliasing, and one version more with each update, on every worker."""
    # The data of the distributed collector has no place for versions.
    assert seen["stamps"] == ([] if kind == "distributed" else [0])
    assert seen["first"] == [[100.0, 0]]
    assert seen["aliased"] == [[100.0, 0]]
    assert seen["batches"] == [[[float(version), version]] for version in range(1, 5)]
    assert seen["calls"] == 0, "workers wrote to a buffer of the trainer's policy"
    assert seen["threads"] == []


@pytest.mark.parametrize(
    "args",
    [
        ("rpc", "RPCWeightSyncScheme"),
        ("ray", "RayWeightSyncScheme"),
        pytest.param(("distributed", "DistributedWeightSyncScheme"), marks=HEAVY),
        pytest.param(("distributed", "SharedMemWeightSyncScheme"), marks=HEAVY),
        pytest.param(("distributed", "MultiProcessWeightSyncScheme"), marks=HEAVY),
        pytest.param(("distributed", "TCPWeightSyncScheme"), marks=HEAVY),
        pytest.param(("rpc", "TCPWeightSyncScheme"), marks=HEAVY),
        pytest.param(("rpc", "SharedMemWeightSyncScheme"), marks=HEAVY),
        pytest.param(("rpc", "DistributedWeightSyncScheme"), marks=HEAVY),
        pytest.param(("ray", "TCPWeightSyncScheme"), marks=HEAVY),
        pytest.param(("ray", "SharedMemWeightSyncScheme"), marks=HEAVY),
    ],
    ids=lambda args: "-".join(args),
)
def test_updates_reach_every_worker(args: tuple[str, ...]) -> None:
    seen = run(*args, "one")
    check(seen, args[0])
    assert seen["one"] == [[4.0, 4], [50.0, 5]], "worker_ids=[1] changes that worker alone"


@pytest.mark.parametrize(
    "args",
    [
        ("ray", "RayWeightSyncScheme"),
        pytest.param(("rpc", "RPCWeightSyncScheme"), marks=HEAVY),
        pytest.param(("distributed", "DistributedWeightSyncScheme"), marks=HEAVY),
        pytest.param(("distributed", "SharedMemWeightSyncScheme"), marks=HEAVY),
        pytest.param(("distributed", "MultiProcessWeightSyncScheme"), marks=HEAVY),
        pytest.param(("rpc", "SharedMemWeightSyncScheme"), marks=HEAVY),
        pytest.param(("ray", "SharedMemWeightSyncScheme"), marks=HEAVY),
        pytest.param(("ray", "RayWeightSyncScheme", "nested"), marks=HEAVY),
        pytest.param(("distributed", "DistributedWeightSyncScheme", "nested"), marks=HEAVY),
    ],
    ids=lambda args: "-".join(args),
)
def test_schemes_of_the_older_generation(args: tuple[str, ...]) -> None:
    check(run(*args, "legacy"), "nested" if "nested" in args else args[0])


@pytest.mark.parametrize(
    "args",
    [
        ("rpc", "RPCWeightSyncScheme"),
        pytest.param(("rpc", "RPCWeightSyncScheme", "nested"), marks=HEAVY),
        pytest.param(("rpc", "RPCWeightSyncScheme", "legacy"), marks=HEAVY),
        pytest.param(("ray", "RayWeightSyncScheme"), marks=HEAVY),
        pytest.param(("distributed", "DistributedWeightSyncScheme"), marks=HEAVY),
    ],
    ids=lambda args: "-".join(args),
)
def test_a_random_policy_has_no_weights_and_is_no_mistake(args: tuple[str, ...]) -> None:
    assert run(*args, "random")["frames"] == [32, 32]


@pytest.mark.parametrize("generation", ["legacy", pytest.param("sync", marks=HEAVY)])
def test_a_trainer_does_not_wait_for_actors_that_cannot_come(generation: str) -> None:
    """The error comes long before ``timeout=``, which is 120 seconds."""
    seen = run("ray", "RayWeightSyncScheme", generation, "killed")
    name, text, seconds = seen["killed"]
    assert name == "PartialSyncError"
    assert "worker 1: ConnectError: the actor of worker 1 ended before it connected" in text
    assert seconds < 30.0
    assert seen["path"][0] == "ConfigError"
    assert "plain names only" in seen["path"][1]


def test_a_checkpoint_is_loaded_where_weights_came_from_the_object_store() -> None:
    seen = run("ray", "RayWeightSyncScheme", "stored")
    check(seen, "ray")
    assert seen["loaded"] == [[4.0, 4]]


@pytest.mark.parametrize(
    "args",
    [
        ("distributed", "DistributedWeightSyncScheme"),
        pytest.param(("distributed", "TCPWeightSyncScheme"), marks=HEAVY),
        pytest.param(("rpc", "RPCWeightSyncScheme"), marks=HEAVY),
        pytest.param(("ray", "RayWeightSyncScheme"), marks=HEAVY),
    ],
    ids=lambda args: "-".join(args),
)
def test_collectors_that_have_workers_pass_updates_on(args: tuple[str, ...]) -> None:
    check(run(*args, "nested"), "nested")


@pytest.mark.heavy
@pytest.mark.parametrize(
    "args",
    [
        ("distributed", "SharedMemWeightSyncScheme"),
        ("rpc", "RPCWeightSyncScheme"),
        ("ray", "RayWeightSyncScheme"),
    ],
    ids=lambda args: "-".join(args),
)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_policy_factories(args: tuple[str, ...], nested: bool) -> None:
    seen = run(*args, "factory", *(["nested"] if nested else []))
    values = [[value for value, _ in batch] for batch in seen["batches"]]
    assert values == [[1.0], [2.0], [3.0], [4.0]]
    labels = [label for batch in seen["batches"] for _, label in batch]
    assert labels == list(range(labels[0], labels[0] + 4)), "one more with each update"
    # Without weights an update sends those of the factory, or those that were sent last.
    assert [value for value, _ in seen["made"]] == [0.0]
    assert [value for value, _ in seen["again"]] == [5.0]
