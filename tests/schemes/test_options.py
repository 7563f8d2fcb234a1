"""Options that schemes, servers and clients refuse at once, in whatever class they are given."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import aiosync
import aiosync.sync
from aiosync.schemes._streaming import Streaming
from aiosync.server import WeightClient, WeightServer
from aiosync.serving import AdmissionGate
from aiosync.transports.address import Address
from tests.schemes import _models as models


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


# -- assigned, between the constructor and connect() -----------------------------------------------

BASE = {
    "strategy": "best",
    "per_worker_weights": "yes",
    "apply": "Manual",
    "apply_copy": None,
    "guard": "Forward",
    "strict": "no",
    "require": 0,
    "timeout": 0,
    "wire_dtype": torch.int8,
}
STREAM = {"reconnect": "5", "handshake_timeout": 0, "limits": 3}
ENGINE = {**BASE, **STREAM, "inline_nbytes": -1, "shared_memory": "no"}
TCP = {
    **BASE,
    **STREAM,
    "subscribe": "no",
    "stall_timeout": -1,
    "chunk_nbytes": 65,
    "keepalive": "x",
    "max_connections": 0,
}
ILLEGAL: dict[str, dict[str, object]] = {
    "MultiProcessWeightSyncScheme": BASE,
    "SharedMemWeightSyncScheme": BASE,
    "NoWeightSyncScheme": BASE,
    "TCPWeightSyncScheme": TCP,
    "DistributedWeightSyncScheme": {**ENGINE, "patience": 0, "backend": "mpi"},
    "RPCWeightSyncScheme": {**ENGINE, "patience": 0},
    "RayWeightSyncScheme": ENGINE,
    "RayModuleTransformScheme": ENGINE,
}
FIXED = {"token", "tls", "dial", "group", "store"}  # only the constructor takes them
# Of no effect in aiosync; and read-only, as Python says itself.
UNCHECKED = {"sync", "backend", "address"}
LEGAL = {
    "strict": False,
    "subscribe": False,
    "reconnect": None,
    "stall_timeout": None,
    "keepalive": 5,
    "apply": "manual",
    "guard": "reading",
    "patience": 3.0,
    "handshake_timeout": 2,
    "max_connections": 2,
    "chunk_nbytes": 128,
    "limits": aiosync.Limits(max_ndim=3),
}

assignable = pytest.mark.parametrize("name", ILLEGAL)
facades = pytest.mark.parametrize("module", [aiosync, aiosync.sync], ids=lambda m: m.__name__)


def scheme_class(module: Any, name: str) -> Any:
    if name.startswith("Ray"):
        pytest.importorskip("ray")
    return getattr(module, name)


@facades
@assignable
def test_an_assigned_option_is_checked_as_a_given_one(module: Any, name: str) -> None:
    cls = scheme_class(module, name)
    scheme = cls()
    for option, value in ILLEGAL[name].items():
        before = getattr(scheme, option)
        with pytest.raises(aiosync.ConfigError) as given:
            cls(**{option: value})
        with pytest.raises(aiosync.ConfigError) as assigned:
            setattr(scheme, option, value)
        assert str(assigned.value) == str(given.value)
        assert getattr(scheme, option) is before


@facades
@assignable
def test_every_option_is_checked_or_cannot_be_assigned(module: Any, name: str) -> None:
    cls = scheme_class(module, name)
    taken = set(inspect.signature(cls).parameters)
    assert taken - ILLEGAL[name].keys() <= FIXED | UNCHECKED
    scheme = cls()
    for option in sorted(taken & FIXED):
        with pytest.raises(aiosync.ConfigError, match=rf"{option} cannot be assigned: pass it to"):
            setattr(scheme, option, "secret")
        assert not hasattr(scheme, option)
    if "address" in taken:
        with pytest.raises(AttributeError):
            scheme.address = "tcp://127.0.0.1:9"


@facades
@assignable
def test_an_assigned_option_counts_and_travels(module: Any, name: str) -> None:
    cls = scheme_class(module, name)
    scheme = cls()
    legal = {option: value for option, value in LEGAL.items() if option in ILLEGAL[name]}
    for option, value in legal.items():
        setattr(scheme, option, value)
    for each in (scheme, pickle.loads(pickle.dumps(scheme))):
        assert {option: getattr(each, option) for option in legal} == legal


def test_the_stream_is_as_the_options_say() -> None:
    scheme = aiosync.TCPWeightSyncScheme()
    scheme.subscribe, scheme.stall_timeout, scheme.chunk_nbytes = False, 7.0, 128
    scheme.keepalive, scheme.max_connections = None, 3
    scheme.init_on_receiver(worker_idx=0)
    assert not scheme._hello().subscribe
    assert scheme._streaming() == Streaming(chunk_nbytes=128, stall_timeout=7.0)
    dialler = scheme._dialler(Address.parse("tcp://127.0.0.1:9"), "the trainer")
    assert (dialler._keepalive, scheme._max_connections) == (None, 3)


@facades
@assignable
def test_a_worker_idx_that_is_none_is_refused(module: Any, name: str) -> None:
    scheme = scheme_class(module, name)()
    for value in (-3, "1", 1.5, 2**40):
        with pytest.raises(aiosync.ConfigError, match="worker_idx must be an int of at "):
            scheme.worker_idx = value
    scheme.worker_idx = None
    scheme.worker_idx = 3
    scheme.init_on_receiver()
    assert scheme.worker_idx == 3


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "make",
    [
        aiosync.MultiProcessWeightSyncScheme,
        aiosync.SharedMemWeightSyncScheme,
        aiosync.TCPWeightSyncScheme,
        aiosync.DistributedWeightSyncScheme,
        aiosync.NoWeightSyncScheme,
    ],
)
async def test_worker_idx_stays_once_connected(make: Callable[..., Any]) -> None:
    sender = make()
    sender.init_on_sender(model=models.linear(), num_workers=1)
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model=models.linear(), worker_idx=0)
    async with sender, receiver:
        await asyncio.gather(sender.connect(), receiver.connect())
        with pytest.raises(aiosync.LocalProtocolError, match="worker_idx cannot be changed once"):
            receiver.worker_idx = 77
        assert receiver.worker_idx == 0


@pytest.mark.asyncio
async def test_no_sync_checks_the_worker_idx_of_connect() -> None:
    async with aiosync.NoWeightSyncScheme() as scheme:
        scheme.init_on_receiver()
        with pytest.raises(aiosync.ConfigError, match="worker_idx must be an int"):
            await scheme.connect(worker_idx=-3)
