"""Checks of the contract through the blocking API, whose calls wait in threads."""

from __future__ import annotations

import asyncio
import copy
from functools import partial
from typing import Any

import pytest

import aiosync.sync
from tests.contract import costs, delivery, failures, lifetime, reading, spans
from tests.contract.bench import Hooks, as_check

WAIT = {"connect", "send", "receive", "wait_for_version", "wait_staged", "pull", "wait_lag_below"}
SCHEMES = (
    aiosync.sync.SharedMemWeightSyncScheme,
    aiosync.sync.MultiProcessWeightSyncScheme,
    partial(aiosync.sync.TCPWeightSyncScheme, reconnect=0),
)
BODIES = (
    delivery.check_send_applies,
    delivery.check_several_workers,
    delivery.check_late_joiner_gets_what_was_sent,
    delivery.check_worker_ids,
    delivery.check_per_worker_weights,
    delivery.check_parts_for_a_late_joiner,
    failures.check_refused_shape,
    failures.check_dead_worker,
    failures.check_dead_trainer,
    reading.check_receive,
    reading.check_apply_weights,
    reading.check_apply_weights_of_another_worker,
    reading.check_torn_reads,
    spans.check_spans_of_tasks_and_threads,
    spans.check_first_version,
    lifetime.check_replaced_model,
    lifetime.check_context,
    lifetime.check_restarted_trainer,
    lifetime.check_worker_comes_again,
    costs.check_stats,
    costs.check_observers,
    costs.check_observed_refusals,
    costs.check_observer_raises,
    spans.check_last_read,
    spans.check_last_read_of_tasks_and_threads,
)


class Awaited:
    """A blocking scheme with the coroutines of the async one, which run in threads."""

    def __init__(self, scheme: Any) -> None:
        vars(self)["scheme"] = scheme

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.scheme, name)
        return partial(asyncio.to_thread, found) if name in WAIT else found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.scheme, name, value)

    async def aclose(self) -> None:
        await asyncio.to_thread(self.scheme.shutdown)

    async def __aenter__(self) -> Awaited:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __reduce__(self) -> Any:
        return Awaited, (copy.copy(self.scheme),)


@pytest.mark.parametrize("number", range(len(BODIES)), ids=lambda n: as_check(BODIES[n]).name)
@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_through_the_facade(number: int) -> None:
    make = SCHEMES[number % len(SCHEMES)]
    await as_check(BODIES[number]).run(lambda **options: Awaited(make(**options)), Hooks())
