"""The Ray transport against every check of the published suite, in a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("ray", reason="needs aiosync[ray]")

from tests.schemes import _ray_scenarios as scenarios
from tests.schemes._ray_driver import Driver

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.apart]

SHARES = 3  # of the suite, so that no test takes long


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_conformance(driver: Driver, loop: str, share: int) -> None:
    passed, skipped = driver.run(scenarios.conformance, share, SHARES, loop=loop)
    assert passed
    assert all("hook" in reason for reason in skipped.values()), skipped
