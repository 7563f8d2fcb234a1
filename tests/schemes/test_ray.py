"""The Ray scheme, on a cluster of this host whose driver is a process of its own."""

from __future__ import annotations

import pickle
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

import aiosync
from aiosync import sync

pytest.importorskip("ray", reason="needs aiosync[ray]")

from tests.contract.suite import ANYWHERE
from tests.schemes import _ray_scenarios as scenarios
from tests.schemes._driver import Driver, cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

pytestmark = [pytest.mark.slow, pytest.mark.apart]


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with closing(Driver(cluster)) as driver:
        yield driver


@pytest.mark.parametrize("number", range(len(ANYWHERE)), ids=lambda n: ANYWHERE[n].name)
def test_contract(number: int, driver: Driver) -> None:
    driver.run(scenarios.contract, number, loop=("asyncio", "uvloop")[number % 2])


@pytest.mark.parametrize(
    ("scenario", "args", "loop"),
    [
        (scenarios.many_updates, [False], "uvloop"),
        (scenarios.many_updates, [True], "uvloop"),
        (scenarios.killed, [False], "uvloop"),
        (scenarios.killed, [True], "uvloop"),
        (scenarios.in_place, [], "asyncio"),
        (scenarios.faults_of_the_store, [], "asyncio"),
        (scenarios.changed_after_a_cancellation, [], "asyncio"),
        (scenarios.cancelled_before_the_store, [], "asyncio"),
        (scenarios.lost_in_the_store, [], "uvloop"),
        (scenarios.dead_hub, [], "asyncio"),
        (scenarios.dead_hub_of_a_scheme, [], "uvloop"),
        (scenarios.plain_actors, [], "uvloop"),
        (scenarios.parts_for_a_busy_actor, [], "asyncio"),
        (scenarios.transform, [], "asyncio"),
        (scenarios.a_refusal_of_a_transform, [], "uvloop"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_scenario(
    driver: Driver, scenario: Callable[..., Coroutine[Any, Any, None]], args: list[Any], loop: str
) -> None:
    driver.run(scenario, *args, loop=loop)


# The suite is split so that no test takes long.
@pytest.mark.parametrize("share", range(3))
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_conformance(driver: Driver, loop: str, share: int) -> None:
    passed, skipped = driver.run(scenarios.conformance, share, 3, loop=loop)
    assert passed
    assert all("hook" in reason for reason in skipped.values()), skipped


@pytest.mark.parametrize("package", [aiosync, sync])
def test_the_name_under_which_a_trainer_is_found(package: Any) -> None:
    scheme = package.RayWeightSyncScheme()
    name, twin = scheme.connection_info_name, pickle.loads(pickle.dumps(scheme))
    assert "policy" in name
    assert twin.connection_info_name == name
    assert package.RayWeightSyncScheme().connection_info_name != name
    twin.model_id = "critic"
    assert twin.connection_info_name == name.replace("policy", "critic")


def test_without_ray() -> None:
    """The error names the extra to install."""
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
