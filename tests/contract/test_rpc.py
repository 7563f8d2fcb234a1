"""Checks of the contract over RPC, in one group of processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.contract import rpc_trainer
from tests.contract.suite import ANYWHERE
from tests.schemes._driver import Driver
from tests.schemes._rpc_group import grouped


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with closing(Driver(grouped, 2)) as driver:
        yield driver


@pytest.mark.parametrize("number", range(len(ANYWHERE)), ids=lambda n: ANYWHERE[n].name)
@pytest.mark.slow
def test_over_rpc(number: int, driver: Driver) -> None:
    driver.run(rpc_trainer.run, number, loop=("asyncio", "uvloop")[number % 2])
