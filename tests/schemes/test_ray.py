"""The Ray scheme, on a cluster of this host whose driver is a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("ray", reason="needs aiosync[ray]")

from tests.schemes import _ray_scenarios as scenarios
from tests.schemes._ray_driver import Driver

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from typing import Any

pytestmark = [pytest.mark.slow, pytest.mark.apart]


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


@pytest.mark.parametrize(
    ("scenario", "loop"),
    [
        (scenarios.local_cluster, "uvloop"),
        pytest.param(scenarios.late_joiner, "asyncio", marks=pytest.mark.heavy),
        (scenarios.killed_and_restarted, "uvloop"),
        pytest.param(scenarios.coalesced, "asyncio", marks=pytest.mark.heavy),
        (scenarios.serves_meanwhile, "uvloop"),
        pytest.param(scenarios.in_place, "asyncio", marks=pytest.mark.heavy),
        pytest.param(scenarios.hub_dies, "uvloop", marks=pytest.mark.heavy),
        pytest.param(scenarios.cancelled_send, "asyncio", marks=pytest.mark.heavy),
        (scenarios.plain_actors, "uvloop"),
        (scenarios.transform, "asyncio"),
        (scenarios.transform_changes, "uvloop"),
        (scenarios.transform_given_up, "asyncio"),
        pytest.param(scenarios.full_store, "uvloop", marks=pytest.mark.heavy),
        (scenarios.on_this_host, "uvloop"),
        (scenarios.near_and_far, "asyncio"),
        pytest.param(scenarios.before_anybody_came, "uvloop", marks=pytest.mark.heavy),
        (scenarios.joins_in_the_middle, "asyncio"),
        pytest.param(scenarios.lost_in_the_store, "uvloop", marks=pytest.mark.heavy),
        (scenarios.killed_on_this_host, "uvloop"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_scenario(
    driver: Driver, scenario: Callable[[], Coroutine[Any, Any, None]], loop: str
) -> None:
    driver.run(scenario, loop=loop)


def test_two_nodes() -> None:
    driver = Driver(nodes=2)
    try:
        driver.run(scenarios.two_nodes)
    finally:
        driver.close()


def test_without_ray() -> None:
    """The error says what to install."""
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from aiosync.schemes.ray import RayWeightSyncScheme\n"
        "try: RayWeightSyncScheme()\n"
        "except Exception as e: print(type(e).__name__, e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("ConfigError")
    assert "aiosync[ray]" in done.stdout


def test_without_a_cluster() -> None:
    from aiosync.errors import ConfigError
    from aiosync.schemes.ray import RayWeightSyncScheme

    with pytest.raises(ConfigError, match=r"ray\.init"):
        RayWeightSyncScheme().init_on_sender(model_id="policy", weights={}, num_workers=1)
