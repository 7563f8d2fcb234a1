"""Runs checks of the contract in the driver of a Ray cluster, with actors as workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import ray

import aiosync
from tests.contract import remote
from tests.contract.bench import PATIENCE, Hooks
from tests.contract.suite import ANYWHERE


@ray.remote(num_cpus=0)
class Actor:
    """Where workers are; it takes seconds to start."""

    async def act(self, *args: Any) -> Any:
        return await remote.act(*args)


@cache
def turns() -> Iterator[Any]:
    return itertools.cycle([Actor.remote() for _ in range(3)])


def hire(scheme: Any, init: dict[str, Any]) -> remote.Remote:
    return remote.Remote(scheme, init, next(turns()).act.remote)


async def run(number: int) -> None:
    make = partial(
        aiosync.RayWeightSyncScheme, timeout=PATIENCE, shared_memory=False, inline_nbytes=64
    )
    await ANYWHERE[number].run(make, Hooks(hire=hire), leaks=("tasks",))
