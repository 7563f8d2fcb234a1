"""Checks of the contract over Ray, in one cluster whose driver is a process of its own."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("ray", reason="needs aiosync[ray]")

from tests.contract import ray_trainer
from tests.contract.suite import ANYWHERE
from tests.schemes._ray_driver import Driver

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with closing(Driver()) as driver:
        yield driver


@pytest.mark.parametrize("number", range(len(ANYWHERE)), ids=lambda n: ANYWHERE[n].name)
@pytest.mark.slow
@pytest.mark.apart
def test_over_ray(number: int, driver: Driver) -> None:
    driver.run(ray_trainer.run, number, loop=("asyncio", "uvloop")[number % 2])
