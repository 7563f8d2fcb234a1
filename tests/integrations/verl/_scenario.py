"""Syncs through verl's own manager and workers, good ones and bad ones; prints what was seen.

Run as a program: ``python -m tests.integrations.verl._scenario``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import ray
from verl.checkpoint_engine import CheckpointEngineManager
from verl.checkpoint_engine.base import RayWorkerGroup
from verl.workers.config import RolloutConfig

from aiosync.integrations.verl import StagingManager
from tests.integrations.verl._workers import (
    Replica,
    Rollout,
    Trainer,
    make_config,
    make_weights,
    start,
    sum_of,
)

STEPS = 20


def expected(step: int, large: int = 0) -> Any:
    """Return what a rollout worker has after a sync."""
    return {name: sum_of(tensor) for name, tensor in make_weights(step, large)}


def group_of(replicas: Sequence[Replica]) -> RayWorkerGroup:
    """Return the worker group that verl's manager makes of its replicas for each sync."""
    from verl.checkpoint_engine.base import RayClassWithInitArgs

    workers = [worker for replica in replicas for worker in replica.workers]
    made = RayClassWithInitArgs(cls=ray.remote(Rollout))
    return RayWorkerGroup(worker_handles=workers, ray_cls_with_init=made)


def attempt(manager: CheckpointEngineManager, step: int) -> tuple[list[str], list[str]]:
    """Make one sync as the manager does, and return the outcome of each trainer and rollout."""
    rollout = group_of(manager.replicas)
    manager.build_process_group(rollout)
    sent = manager.actor_wg.update_weights(global_steps=step, mode="aiosync")
    taken = rollout.update_weights(global_steps=step)
    return [outcome(each) for each in sent], [outcome(each) for each in taken]


def outcome(reference: Any) -> str:
    """Wait for a call of an actor, and return its error, or ``""``."""
    try:
        ray.get(reference, timeout=120)
    except Exception as exc:  # noqa: BLE001 - any error is what this looks for
        cause = getattr(exc, "cause", exc)
        return f"{type(cause).__name__}: {cause}"
    return ""


def sums_of(replicas: Sequence[Replica]) -> list[Any]:
    return [json.loads(json.dumps(each)) for each in group_of(replicas).sums()]


def is_at(replicas: Sequence[Replica], step: int, large: int = 0) -> list[bool]:
    wanted = json.loads(json.dumps(expected(step, large)))
    return [list(each.items()) == list(wanted.items()) for each in sums_of(replicas)]


def prepare_to(replica: Replica, fault: str) -> None:
    ray.get(replica.workers[0].prepare_to.remote(fault))


def main() -> None:
    seen: dict[str, Any] = {}
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    config = make_config()
    rollout_config = RolloutConfig(name="vllm", checkpoint_engine=config)
    began = time.perf_counter()
    trainers = start(Trainer, 2, config=config)
    first = start(Rollout, 3, rollout_config=rollout_config)
    one, two, spare = map(Replica, first.workers)
    manager = CheckpointEngineManager(config=config, actor_wg=trainers, replicas=[one, two])
    # Wait until every worker has started.
    trainers.prepare_to()
    first.prepare_to("")
    seen["start"] = time.perf_counter() - began

    loop, seconds, links, metrics = [], [], [], {}
    for step in range(STEPS):
        began = time.perf_counter()
        metrics = manager.update_weights(global_steps=step)
        seconds.append(time.perf_counter() - began)
        loop.append(is_at([one, two], step))
        links.append(trainers.links()[0])
    seen |= {
        "loop": loop,
        "links": [links[0], links[-1]],
        "seconds": seconds,
        "metrics": metrics,
        "calls": one.calls[:4],
    }

    began = time.perf_counter()
    manager.build_process_group(group_of([one, two]))
    seen["later process group"] = time.perf_counter() - began

    prepare_to(two, "raise")
    sent, taken = attempt(manager, 50)
    seen["rollout raised"] = {"sent": sent, "taken": taken, "at": is_at([one, two], 50)}
    prepare_to(two, "")
    manager.update_weights(global_steps=51)
    seen["after rollout raised"] = is_at([one, two], 51)

    trainers.prepare_to("raise")
    sent, taken = attempt(manager, 52)
    seen["trainer raised"] = {"sent": sent, "taken": taken, "at": is_at([one, two], 51)}
    trainers.prepare_to()
    manager.update_weights(global_steps=53)
    seen["after trainer raised"] = is_at([one, two], 53)
    seen["gathered"] = trainers.gathered()

    prepare_to(two, "die")
    sent, taken = attempt(manager, 54)
    seen["rollout killed"] = {"sent": sent, "taken": taken, "at": is_at([one], 54)}
    manager.remove_replicas([two])
    manager.update_weights(global_steps=55)
    seen["after rollout killed"] = is_at([one], 55)
    manager.add_replicas([spare])
    manager.update_weights(global_steps=56)
    seen["replaced"] = is_at([one, spare], 56)

    trainers.prepare_to("die")
    began = time.perf_counter()
    sent, taken = attempt(manager, 57)
    seen["trainer killed"] = {"sent": sent[:1], "taken": taken, "at": is_at([one, spare], 56)}
    seen["trainer killed"]["seconds"] = time.perf_counter() - began
    again = start(Trainer, 1, config=config)
    manager = CheckpointEngineManager(config=config, actor_wg=again, replicas=[one, spare])
    manager.update_weights(global_steps=58)
    seen["after trainer killed"] = is_at([one, spare], 58)

    again.prepare_to("", 64)
    for step in range(3):
        manager.update_weights(global_steps=step)
    nbytes = sum(tensor.nbytes for _, tensor in make_weights(0, 64))
    seen["large"] = {"nbytes": nbytes, "seconds": group_of([one, spare]).seconds()}
    seen["large"]["pause"] = one.pause

    staging = StagingManager(config=config, actor_wg=again, replicas=[one, spare])
    for step in range(60, 63):
        metrics = staging.update_weights(global_steps=step)
    seen["staged"] = {
        "at": is_at([one, spare], 62, 64),
        "calls": one.calls[-4:],
        "metrics": metrics,
        "pause": one.pause,
    }
    again.prepare_to("raise")
    one.calls.clear()
    try:
        staging.update_weights(global_steps=63)
    except Exception as exc:  # noqa: BLE001 - its text is what this looks for
        seen["staged"]["failed"] = str(exc)
    seen["staged"]["calls when it failed"] = list(one.calls)
    seen["staged"]["at when it failed"] = is_at([one, spare], 62, 64)
    again.prepare_to()
    staging.update_weights(global_steps=64)
    seen["staged"]["at in the end"] = is_at([one, spare], 64)
    ray.shutdown()
    sys.stdout.write("SEEN " + json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
