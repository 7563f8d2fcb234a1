"""Weights over torch.distributed.rpc, between real processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

import aiosync
from aiosync import RPCWeightSyncScheme
from tests.contract.suite import ANYWHERE
from tests.schemes import _models as models
from tests.schemes import _rpc_group
from tests.schemes._driver import Driver


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with closing(Driver(_rpc_group.grouped, 3)) as driver:
        yield driver


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ANYWHERE)), ids=lambda n: ANYWHERE[n].name)
def test_contract(number: int, driver: Driver) -> None:
    driver.run(_rpc_group.contract, number, loop=("asyncio", "uvloop")[number % 2])


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_workers_that_are_told_where_to_connect(driver: Driver, loop: str) -> None:
    driver.run(_rpc_group.told_where, loop=loop)


# -- without RPC ---------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_worker_without_rpc_is_told_what_to_do() -> None:
    worker = RPCWeightSyncScheme()
    worker.init_on_receiver(model=models.linear())
    with pytest.raises(aiosync.ConfigError, match="init_rpc"):
        await worker.connect(timeout=5)
    await worker.aclose()


@pytest.mark.parametrize("workers", ["worker0", [3]])
def test_names_of_workers(workers) -> None:
    with pytest.raises(aiosync.ConfigError):
        RPCWeightSyncScheme().init_on_sender(model=models.linear(), workers=workers)
