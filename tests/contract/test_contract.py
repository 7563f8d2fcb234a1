"""Every check of the contract over shared memory, pipes and TCP, and some over Gloo.

Without ``--heavy`` each combination of both runs on one of the two loops, but every scheme and
every check run on both.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

import aiosync
from aiosync.testing import FaultProxy
from tests.contract.bench import PATIENCE
from tests.contract.remote import Hired
from tests.contract.suite import ANYWHERE, CONTRACT_CHECKS, Check, Hooks
from tests.support.waiting import free_address

SCHEMES = {
    "shm": aiosync.SharedMemWeightSyncScheme,
    "pipe": aiosync.MultiProcessWeightSyncScheme,
    "tcp": aiosync.TCPWeightSyncScheme,
}


@contextlib.asynccontextmanager
async def relay(scheme: Any) -> AsyncIterator[tuple[Any, Any, Any]]:
    async with FaultProxy(scheme.address) as proxy:

        def lead_to(other: Any) -> None:
            proxy.upstream = other.address

        yield aiosync.TCPWeightSyncScheme(proxy.url, timeout=PATIENCE), proxy.reset, lead_to


def address() -> dict[str, Any]:
    """Return options with an address whose port was free just now."""
    return {"address": free_address()}


HOOKS = {
    "shm": Hooks(process=Hired),
    "pipe": Hooks(process=Hired),
    "tcp": Hooks(
        process=Hired,
        relay=relay,
        address=address,
        final={"reconnect": 0},
        pulls={"subscribe": False},
    ),
}


SLOW = (
    "cancel_send",
    "changed_source",
    "killed_worker",
    "lag_of_the_dead",
    "memory_stays",
    "nothing_is_aliased",
    "several_workers",
    "stopped_worker",
    "torn_reads",
)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] if each.name in SLOW else [])
        for each in CONTRACT_CHECKS
    ],
)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_contract(name: str, check: Check, forkserver: None) -> None:
    hooks = HOOKS[name]
    reason = check.skip_reason(hooks)
    if reason is not None:
        pytest.skip(reason)
    await check.run(SCHEMES[name], hooks)


make_gloo = partial(
    aiosync.DistributedWeightSyncScheme, timeout=PATIENCE, shared_memory=False, inline_nbytes=64
)


@pytest.mark.parametrize("check", ANYWHERE, ids=lambda check: check.name)
@pytest.mark.slow
@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_over_gloo(check: Check, forkserver: None) -> None:
    await check.run(make_gloo, Hooks(hire=Hired))


@pytest.mark.slow
@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_looks_without_a_read_over_gloo_on_one_host(forkserver: None) -> None:
    make = partial(aiosync.DistributedWeightSyncScheme, timeout=PATIENCE)
    check = next(check for check in ANYWHERE if check.name == "looks_without_a_read")
    await check.run(make, Hooks(hire=Hired))


@pytest.mark.slow
@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_a_cancelled_send_that_still_copies_over_gloo(forkserver: None) -> None:
    name = "cancelled_send_that_still_copies"
    check = next(check for check in CONTRACT_CHECKS if check.name == name)
    await check.run(make_gloo, Hooks(hire=Hired))
