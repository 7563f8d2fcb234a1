"""Options that schemes, servers and clients refuse at once, in whatever class they are given."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

import aiosync
from aiosync.server import WeightClient, WeightServer
from aiosync.serving import AdmissionGate


def tcp(**options: Any) -> object:
    return aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", **options)


def server(**options: Any) -> object:
    return WeightServer("tcp://127.0.0.1:0", **options)


MAKERS: list[Callable[..., Any]] = [
    aiosync.DistributedWeightSyncScheme,
    aiosync.RPCWeightSyncScheme,
    aiosync.RayWeightSyncScheme,
    tcp,
    server,
]
ENGINES = MAKERS[:3]
NO_SECONDS = [-1.0, math.nan, "5", True]


def refused(make: Callable[..., Any], name: str, value: object) -> None:
    if make is aiosync.RayWeightSyncScheme:
        pytest.importorskip("ray")
    with pytest.raises(aiosync.ConfigError, match=name):
        make(**{name: value})


@pytest.mark.parametrize("value", [*NO_SECONDS, 0, math.inf, None])
@pytest.mark.parametrize("make", MAKERS)
def test_handshake_timeout(make: Callable[..., Any], value: object) -> None:
    refused(make, "handshake_timeout", value)


@pytest.mark.parametrize("value", NO_SECONDS)
@pytest.mark.parametrize("make", MAKERS[:4])
def test_reconnect(make: Callable[..., Any], value: object) -> None:
    refused(make, "reconnect", value)


@pytest.mark.parametrize("value", [None, 0, 3, math.inf])
def test_reconnect_may_be_endless_or_none(value: float | None) -> None:
    assert aiosync.DistributedWeightSyncScheme(reconnect=value).reconnect == value


@pytest.mark.parametrize("value", [*NO_SECONDS, 0, math.inf, None])
@pytest.mark.parametrize("make", ENGINES[:2])
def test_patience(make: Callable[..., Any], value: object) -> None:
    refused(make, "patience", value)


@pytest.mark.parametrize("value", [-1, "5", None, 1.5])
@pytest.mark.parametrize("make", ENGINES)
def test_inline_nbytes(make: Callable[..., Any], value: object) -> None:
    refused(make, "inline_nbytes", value)


@pytest.mark.parametrize("value", [0, -1, "3", None, math.nan])
@pytest.mark.parametrize("make", MAKERS[3:])
def test_max_connections(make: Callable[..., Any], value: object) -> None:
    refused(make, "max_connections", value)


@pytest.mark.parametrize("value", [0, "3", None])
def test_max_models(value: object) -> None:
    refused(server, "max_models", value)


@pytest.mark.parametrize("value", [*NO_SECONDS, 0, math.inf])
def test_keepalive(value: object) -> None:
    refused(tcp, "keepalive", value)


@pytest.mark.parametrize("make", MAKERS)
def test_an_empty_token_is_no_token(make: Callable[..., Any]) -> None:
    """Mostly a variable of the environment that is not set: a secret of its own helps nobody."""
    refused(make, "token", "")


@pytest.mark.asyncio
@pytest.mark.parametrize("timeout", [math.nan, "5", True])
async def test_clients_and_gates_refuse_a_timeout_that_is_none(timeout: Any) -> None:
    client = WeightClient("tcp://127.0.0.1:9")
    with pytest.raises(aiosync.ConfigError, match="timeout"):
        await client.pull(timeout=timeout)
    with pytest.raises(aiosync.ConfigError, match="timeout"):
        await client.status(timeout=timeout)
    gate = AdmissionGate()
    with pytest.raises(aiosync.ConfigError, match="timeout"):
        async with gate.request(timeout=timeout):
            pass
    with pytest.raises(aiosync.ConfigError, match="timeout"):
        await gate._wait_until_ready(timeout)
