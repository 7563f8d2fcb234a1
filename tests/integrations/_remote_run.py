"""Program: a trainer with one of TorchRL's distributed collectors; prints its findings as JSON.

It has a process of its own, as these collectors take the process's default group, RPC agent or Ray.

    python -m tests.integrations._remote_run distributed TCPWeightSyncScheme nested
    python -m tests.integrations._remote_run ray RayWeightSyncScheme legacy killed
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from typing import Any

import torch
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.modules import RandomPolicy

import aiosync.legacy
import aiosync.sync
from tests.integrations._worlds import World, actions, make_policy, set_value
from tests.support.waiting import free_port

UPDATES = 4
FRAMES = 16


def generation_of(modes: set[str]) -> Any:
    return aiosync.legacy if "legacy" in modes else aiosync.sync


def make_collector(
    kind: str, scheme: Any, policy: Any, modes: set[str], model_id: str = "policy"
) -> Any:
    inner: dict[str, Any] = {"track_policy_version": True}
    outer = 1 if "nested" in modes else 2
    options: dict[str, Any] = {
        "create_env_fn": [World] * outer,
        "collector_class": MultiSyncCollector if "nested" in modes else Collector,
        "frames_per_batch": 2 * FRAMES,
        "total_frames": 10_000,
        "weight_sync_schemes": {model_id: scheme},
        "collector_kwargs": inner,
        "sync": True,
    }
    if "nested" in modes:
        options["num_workers_per_collector"] = 2
        if "random" not in modes:
            below = generation_of(modes).SharedMemWeightSyncScheme()
            inner["weight_sync_schemes"] = {"policy": below}
    if "factory" in modes:
        options["policy_factory"] = make_policy
    else:
        options["policy"] = policy
    if kind == "distributed":
        from torchrl.collectors.distributed import DistributedCollector

        return DistributedCollector(launcher="mp", backend="gloo", tcp_port=free_port(), **options)
    if kind == "rpc":
        from torchrl.collectors.distributed import RPCCollector

        return RPCCollector(launcher="mp", tcp_port=free_port(), **options)
    from torchrl.collectors.distributed import RayCollector

    return RayCollector(
        num_collectors=outer,
        ray_init_config={
            # The program must not join a cluster of somebody else on the same machine.
            "address": "local",
            "num_cpus": 2,
            "include_dashboard": False,
            "log_to_driver": False,
        },
        remote_configs={"num_cpus": 0.5, "num_gpus": 0, "memory": 2**26},
        **options,
    )


def stamps_of(data: Any, version: int) -> list[int]:
    """Return how far the scheme's versions in the frames are behind the newest, each once."""
    stamps = data.get(("collector", "policy_version"), None)
    return [] if stamps is None else sorted({version - each for each in stamps.flatten().tolist()})


def values_of(data: Any) -> list[list[float]]:
    """Return the pairs of an action's value and its label, each once."""
    labels = data["next", "policy_version"].reshape(-1).tolist()
    return sorted(map(list, set(zip(actions(data).tolist(), labels, strict=True))))


def told(call: Any, *args: Any) -> list[Any]:
    """Return the class and the text of the error that a call raises, and the seconds it took."""
    started = time.monotonic()
    try:
        call(*args)
    except aiosync.AiosyncError as exc:
        return [type(exc).__name__, str(exc), time.monotonic() - started]
    return ["nothing", "", time.monotonic() - started]


def lost(name: str, modes: set[str]) -> dict[str, Any]:
    """Return the errors that a trainer of a RayCollector gets if its actors cannot come."""
    policy = make_policy(1.0)
    make, path = getattr(generation_of(modes), name), "env.transform[0]"
    collector = make_collector("ray", make(), policy, modes)
    ray: Any = importlib.import_module("ray")
    ray.kill(collector.remote_collectors[1])
    killed = told(collector.update_policy_weights_)
    collector.shutdown(shutdown_ray=False)
    scheme = make()
    return {"killed": killed, "path": told(make_collector, "ray", scheme, policy, modes, path)}


def random(kind: str, name: str, modes: set[str]) -> dict[str, Any]:
    """Return what a trainer sees whose policy has no weights."""
    scheme = getattr(generation_of(modes), name)()
    policy = RandomPolicy(World().action_spec)
    collector = make_collector(kind, scheme, policy, modes)
    batches = iter(collector)
    frames = [next(batches).numel()]
    collector.update_policy_weights_()
    frames.append(next(batches).numel())
    collector.shutdown()
    return {"frames": frames}


def main(kind: str, name: str, *given: str) -> dict[str, Any]:
    modes = set(given)
    torch.set_num_threads(1)
    if "random" in modes:
        return random(kind, name, modes)
    if "killed" in modes:
        return lost(name, modes)
    policy = make_policy(100.0)
    # Weights of any size come from the object store, as on another host.
    stored = {"shared_memory": False, "inline_nbytes": 0} if "stored" in modes else {}
    scheme = getattr(generation_of(modes), name)(**stored)
    collector = make_collector(kind, scheme, policy, modes)
    seen: dict[str, Any] = {"batches": []}
    batches = iter(collector)
    calls = policy.module.calls.item()
    if "factory" not in modes:
        seen["first"] = values_of(next(batches))
        # Without an update nothing that the trainer does reaches a worker.
        set_value(policy, 99.0)
        seen["aliased"] = values_of(next(batches))
    else:
        # Workers get what the factory made once more.
        collector.update_policy_weights_()
        seen["made"] = values_of(next(batches))
    for version in range(1, UPDATES + 1):
        set_value(policy, float(version))
        collector.update_policy_weights_(policy if "factory" in modes else None)
        data = next(batches)
        seen["batches"].append(values_of(data))
        seen["stamps"] = stamps_of(data, scheme.version)
    if "factory" in modes:
        set_value(policy, 5.0)
        collector.update_policy_weights_()
        seen["again"] = values_of(next(batches))
    if "one" in modes:
        set_value(policy, 50.0)
        collector.update_policy_weights_(worker_ids=[1])
        seen["one"] = values_of(next(batches))
    if "stored" in modes:
        # This writes to the workers' parameters.
        collector.load_state_dict(collector.state_dict())
        seen["loaded"] = values_of(next(batches))
    seen["calls"] = policy.module.calls.item() - calls
    collector.shutdown()
    scheme.shutdown()
    seen["threads"] = [t.name for t in threading.enumerate() if t.name.startswith("aiosync")]
    return seen


if __name__ == "__main__":
    found = main(*sys.argv[1:])
    sys.stdout.write(f"SEEN {json.dumps(found)}\n")
    sys.stdout.flush()
    # RPC's and Ray's own threads are not tested here, so the process ends without them.
    os._exit(0)
