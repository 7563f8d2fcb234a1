"""Values of options that each class of schemes, servers and clients accepts or refuses at once."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import math
import pickle
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import aiosync
import aiosync.sync
from aiosync.server import WeightClient, WeightServer
from aiosync.serving import AdmissionGate
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.support.waiting import free_address

NO_SECONDS = [-1.0, math.nan, "5", True]
NO_DEADLINE = [*NO_SECONDS, 0, math.inf, None]


class Halving(aiosync.WeightStrategy):
    """Strategy with a way of its own to extract weights."""

    def extract_weights(self, source: Any) -> Any:
        return {name: tensor / 2 for name, tensor in source.state_dict().items()}


class Dropping(aiosync.WeightStrategy):
    """Strategy with a way of its own to apply weights."""

    def apply_weights(self, *given: Any, **options: Any) -> None:
        pass


ILLEGAL: dict[str, list[Any]] = {
    "strategy": ["best", Halving(), Dropping()],
    "per_worker_weights": ["yes"],
    "apply": ["Manual"],
    "apply_copy": [None],
    "buffers": ["none", None],
    "guard": ["Forward"],
    "strict": ["no"],
    "require": [0, "most", 1.5, True, math.nan],
    "timeout": [0, math.nan],
    "wire_dtype": [torch.int8, "bfloat16", {"a": None}],
    "first_version": [0, -1, "3", None, 1.5, 2**62],
    "reconnect": NO_SECONDS,
    "handshake_timeout": NO_DEADLINE,
    "patience": NO_DEADLINE,
    "limits": [3],
    "inline_nbytes": [-1, "5", None, 1.5],
    "memory": ["gpu", None, True],
    "shared_memory": ["no"],
    "subscribe": ["no"],
    "take_over": ["no", None],
    "stall_timeout": [-1, 0],
    "chunk_nbytes": [65, 0],
    "delta": ["yes", True, None],
    "streams": [0, 17, True, "2", None],
    "keepalive": [*NO_SECONDS, 0, math.inf],
    "max_connections": [0, -1, "3", None, math.nan],
    "max_models": [0, "3", None],
    "model_ids": [5, "policy", b"policy", [5]],
}
LEGAL: dict[str, Any] = {
    "per_worker_weights": True,
    "require": 0.5,
    "timeout": 7.0,
    "apply_copy": True,
    "wire_dtype": {"*.weight": torch.bfloat16},
    "first_version": 101,
    "memory": "device",
    "shared_memory": False,
    "strict": False,
    "subscribe": False,
    "take_over": True,
    "reconnect": None,
    "stall_timeout": None,
    "keepalive": 5,
    "apply": "manual",
    "buffers": "persistent",
    "guard": "reading",
    "patience": 3.0,
    "handshake_timeout": 2,
    "max_connections": 2,
    "chunk_nbytes": 128,
    "delta": "auto",
    "streams": 4,
    "limits": aiosync.Limits(max_ndim=3),
}
# Only the constructor takes these options.
FIXED = {"token", "tls", "dial", "store"}
# The first has no effect, other tests have the second, and the third is read-only.
UNCHECKED = {"sync", "backend", "address"}

every = pytest.mark.parametrize(
    "name",
    [
        f"{kind}WeightSyncScheme"
        for kind in ("MultiProcess", "SharedMem", "No", "TCP", "Distributed", "RPC", "Ray")
    ]
    + ["RayModuleTransformScheme"],
)
facades = pytest.mark.parametrize("module", [aiosync, aiosync.sync], ids=lambda m: m.__name__)


def scheme_class(module: Any, name: str) -> Any:
    if name.startswith("Ray"):
        pytest.importorskip("ray")
    return getattr(module, name)


def options_of(cls: Any) -> set[str]:
    return set(inspect.signature(cls).parameters)


@facades
@every
def test_illegal_values_are_refused_given_and_assigned(module: Any, name: str) -> None:
    cls = scheme_class(module, name)
    scheme = cls()
    assert options_of(cls) <= ILLEGAL.keys() | FIXED | UNCHECKED
    for option in options_of(cls) & ILLEGAL.keys():
        before = getattr(scheme, option)
        for value in ILLEGAL[option]:
            with pytest.raises(aiosync.ConfigError, match=option):
                cls(**{option: value})
            with pytest.raises(aiosync.ConfigError, match=option):
                setattr(scheme, option, value)
        assert getattr(scheme, option) is before
    for option in options_of(cls) & FIXED:
        with pytest.raises(aiosync.ConfigError, match=option):
            setattr(scheme, option, "secret")
        assert not hasattr(scheme, option)
    # An empty token mostly comes of an environment variable that is not set.
    if "token" in options_of(cls):
        with pytest.raises(aiosync.ConfigError, match="token"):
            cls(token="")
    for value in (-3, "1", 1.5, 2**40):
        with pytest.raises(aiosync.ConfigError, match="worker_idx"):
            scheme.worker_idx = value
    scheme.worker_idx = 3
    scheme.init_on_receiver()
    assert scheme.worker_idx == 3


@facades
@every
def test_legal_values_count_and_travel(module: Any, name: str) -> None:
    cls = scheme_class(module, name)
    legal = {option: LEGAL[option] for option in options_of(cls) & LEGAL.keys()}
    assigned = cls()
    for option, value in legal.items():
        setattr(assigned, option, value)
    for scheme in (assigned, cls(**legal)):
        for each in (scheme, pickle.loads(pickle.dumps(scheme)), copy.copy(scheme)):
            assert {option: getattr(each, option) for option in legal} == legal


def test_a_server_refuses_them_too() -> None:
    for option in ("handshake_timeout", "max_connections", "max_models"):
        for value in ILLEGAL[option]:
            with pytest.raises(aiosync.ConfigError, match=option):
                WeightServer("tcp://127.0.0.1:0", **{option: value})
    with pytest.raises(aiosync.ConfigError, match="token"):
        WeightServer("tcp://127.0.0.1:0", token="")
    for value in ILLEGAL["model_ids"]:
        with pytest.raises(aiosync.ConfigError, match="model_ids must be a list of names"):
            WeightServer("tcp://127.0.0.1:0", model_ids=value)
    with pytest.raises(aiosync.ConfigError, match="a store is a directory"):
        WeightServer("tcp://127.0.0.1:0", store=5)  # type: ignore[arg-type]


def test_a_server_does_not_follow_itself() -> None:
    url = free_address()
    with pytest.raises(aiosync.ConfigError, match="would follow itself"):
        WeightServer(url, model_ids=["policy"], upstream=["tcp://127.0.0.1:1", url])


@pytest.mark.parametrize("module", [aiosync, aiosync.sync], ids=lambda m: m.__name__)
def test_roles_refuse_arguments_of_another_type(module: Any) -> None:
    scheme = module.SharedMemWeightSyncScheme()
    for value in (5, b"act", "act", [5]):
        with pytest.raises(aiosync.ConfigError, match="methods must be a list of names"):
            scheme.init_on_receiver(model=models.linear(), methods=value)
    with pytest.raises(aiosync.ConfigError, match="transports must be a mapping"):
        scheme.init_on_sender(model=models.linear(), transports="x")


@pytest.mark.asyncio
@pytest.mark.one_loop
@pytest.mark.parametrize("timeout", [math.nan, "5", True])
async def test_clients_and_gates_refuse_a_timeout_that_is_none(timeout: Any) -> None:
    client = WeightClient("tcp://127.0.0.1:9")
    with pytest.raises(aiosync.ConfigError, match="timeout"):
        await client.pull(timeout=timeout)
    with pytest.raises(aiosync.ConfigError, match="timeout"):
        await client.status(timeout=timeout)
    with pytest.raises(aiosync.ConfigError, match="timeout"):
        async with AdmissionGate().request(timeout=timeout):
            pass


class Tagged(aiosync.TCPWeightSyncScheme):
    """A user's scheme with a tag of its own."""

    def __init__(self, tag: str, **options: Any) -> None:
        super().__init__(**options)
        self.tag = tag


@pytest.mark.asyncio
@pytest.mark.parametrize("way", [copy.copy, harness.twin])
async def test_what_a_subclass_sets_travels_from_either_end(way: Any) -> None:
    ends = harness.here(Tagged("south"), models.linear(), sender={"model": models.linear()})
    async with ends as pair:
        for scheme in pair:
            scheme.later = "set after connect()"
            other = way(scheme)
            assert (other.tag, other.later) == ("south", scheme.later)
            assert not (other.initialized_on_sender or other.initialized_on_receiver)


# -- a newcomer's first mistakes, and machines that lack something --------------------------------


@pytest.mark.asyncio
async def test_a_worker_that_forgot_to_connect_is_told() -> None:
    with pytest.warns(UserWarning, match="does not connect"):
        async with aiosync.MultiProcessWeightSyncScheme() as worker:
            worker.init_on_receiver(model=models.linear())


def test_a_blocking_worker_that_forgot_to_connect_is_told() -> None:
    with pytest.warns(UserWarning, match="`with` does not connect, call `scheme.connect"):
        with aiosync.sync.MultiProcessWeightSyncScheme() as worker:
            worker.init_on_receiver(model=models.linear())


@pytest.mark.parametrize("address", [None, 7000])
def test_an_address_that_is_none_is_told_what_one_is(address: Any) -> None:
    with pytest.raises(aiosync.ConfigError, match=f"such as 'tcp://host:7000', not {address}"):
        aiosync.TCPWeightSyncScheme(address)


def test_a_model_in_the_place_of_its_name_is_told_where_it_goes() -> None:
    scheme = aiosync.SharedMemWeightSyncScheme()
    with pytest.raises(aiosync.ConfigError, match="got a Linear; a model is passed as model="):
        scheme.init_on_sender(models.linear())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["m" * 1025, "\ud800"], ids=["too long", "surrogate"])
def test_a_name_that_cannot_travel_is_refused(name: str) -> None:
    scheme = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:9")
    with pytest.raises(aiosync.ConfigError, match="model_id must be a str of 1 to 1024 bytes"):
        scheme.init_on_receiver(name, model=models.linear())


@facades
@every
def test_an_index_that_is_given_to_a_copy_travels_with_it(module: Any, name: str) -> None:
    first = copy.copy(scheme_class(module, name)())
    first.worker_idx = 2
    for same in (pickle.loads(pickle.dumps(first)), copy.copy(first)):
        assert same.worker_idx == 2
        same.init_on_receiver()
        # Another worker cannot have the index that this one has.
        assert (same.worker_idx, copy.copy(same).worker_idx) == (2, None)


@pytest.mark.asyncio
@pytest.mark.one_loop
@pytest.mark.parametrize("make", harness.SCHEMES)
async def test_a_connect_that_is_refused_changes_no_index(make: Any) -> None:
    trainer = make()
    trainer.init_on_sender(model=models.linear(1.0))
    worker = harness.twin(trainer)
    worker.init_on_receiver(model=models.linear())
    async with trainer, worker:
        with pytest.raises(aiosync.LocalProtocolError, match="weights on receiver side"):
            await worker.connect(worker_idx=5, weights={})
        await asyncio.gather(trainer.connect(), worker.connect())
        assert worker.worker_idx == 0
        with pytest.raises(aiosync.LocalProtocolError, match="on receiver twice"):
            await worker.connect(worker_idx=5)


@pytest.fixture
def collected() -> Iterator[None]:
    """Have tasks of closed loops say now that they were destroyed, and not in a later test."""
    yield
    gc.collect()


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("make", harness.SCHEMES)
@pytest.mark.parametrize("closed", [False, True], ids=["stopped", "closed"])
def test_a_scheme_is_closed_when_its_own_loop_does_not_run(make: Any, closed: bool) -> None:
    source, target, scheme = models.medium(), models.medium(), make()
    worker = copy.copy(scheme)
    scheme.init_on_sender(model=source, num_workers=1)
    worker.init_on_receiver(model=target)
    loop = asyncio.SelectorEventLoop()

    async def connect() -> None:
        await asyncio.gather(scheme.connect(), worker.connect())

    loop.run_until_complete(connect())
    if closed:
        loop.close()

    async def close() -> None:
        # aclose() does not wait for tasks of a loop that does not run.
        async with asyncio.timeout(4.5):
            for each in (worker, scheme):
                await each.aclose()

    asyncio.run(close())
    asyncio.run(close())
    assert models.filled(target, -1.0)
    if not closed:
        loop.run_until_complete(asyncio.sleep(0.01))
        assert not asyncio.all_tasks(loop)
        loop.close()


@pytest.mark.slow
def test_without_uvloop(fresh: Any) -> None:
    script = """
    import sys, warnings
    warnings.simplefilter("error")
    sys.modules["uvloop"] = None  # as if it were not installed
    import importlib.util
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *a: None if name == "uvloop" else find_spec(name, *a)
    import asyncio, torch, aiosync, aiosync.sync

    async def main():
        return type(asyncio.get_running_loop()).__module__

    assert aiosync.run(main).startswith("asyncio"), aiosync.run(main)

    with aiosync.sync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=torch.nn.Linear(4, 2))
        scheme.connect()
        scheme.send()
    print("good")
    """
    done = fresh.script(textwrap.dedent(script))
    assert done.stdout == "good\n", done.stderr


def test_run_inside_of_a_loop_raises_and_warns_of_nothing() -> None:
    async def inner() -> None: ...

    async def outer() -> None:
        with pytest.raises(RuntimeError, match="await the coroutine there"):
            aiosync.run(inner())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        aiosync.run(outer)
        gc.collect()
    assert not caught, [str(each.message) for each in caught]
