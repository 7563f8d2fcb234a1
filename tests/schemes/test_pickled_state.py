"""Exactly what of each scheme class is in a pickle, whatever the object has been through."""

from __future__ import annotations

import asyncio
import copy
import gc
from typing import TYPE_CHECKING, Any

import pytest

import aiosync
from aiosync import legacy, sync
from aiosync.schemes import RPCWeightSyncScheme
from aiosync.schemes._engine import EngineScheme
from tests.schemes import _harness as harness
from tests.schemes import _models as models

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.one_loop

PLAIN = {
    "_address",
    "_model_id",
    "_sender_pid",
    "_strategy",
    "apply",
    "apply_copy",
    "guard",
    "per_worker_weights",
    "require",
    "strategy_str",
    "strict",
    "sync",
    "timeout",
    "wire_dtype",
}
STREAM = PLAIN | {"_addresses", "_credentials", "_dial"}
STREAM |= {"handshake_timeout", "limits", "reconnect"}
ENGINE = STREAM | {"inline_nbytes", "shared_memory"}
KEYS: dict[str, set[str]] = {
    "NoWeightSyncScheme": PLAIN,
    "MultiProcessWeightSyncScheme": PLAIN,
    "SharedMemWeightSyncScheme": PLAIN,
    "TCPWeightSyncScheme": STREAM
    | {"chunk_nbytes", "keepalive", "max_connections", "stall_timeout", "subscribe"},
    "DistributedWeightSyncScheme": ENGINE | {"_group", "_store", "backend", "patience"},
    "RPCWeightSyncScheme": ENGINE | {"_scheme_id", "patience"},
    "RayWeightSyncScheme": ENGINE | {"_meeting", "backend"},
    "RayModuleTransformScheme": ENGINE | {"_meeting", "backend"},
}
HERE = [
    aiosync.NoWeightSyncScheme,
    aiosync.MultiProcessWeightSyncScheme,
    aiosync.SharedMemWeightSyncScheme,
    aiosync.TCPWeightSyncScheme,
    aiosync.DistributedWeightSyncScheme,
    RPCWeightSyncScheme,
]
RAY = ["RayWeightSyncScheme", "RayModuleTransformScheme"]
ABSTRACT = {"WeightSyncScheme", "TrainersArriving", "StreamReceiving", "EngineScheme"}

everywhere = pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(cls, id=cls.__name__) for cls in HERE),
        # Loading Ray takes long.
        *(
            pytest.param(
                lambda name=name: _of_ray(name)(),
                id=name,
                marks=[pytest.mark.slow, pytest.mark.apart],
            )
            for name in RAY
        ),
    ],
)


def _of_ray(name: str) -> type[aiosync.WeightSyncScheme]:
    from aiosync.schemes import ray, ray_transform

    pytest.importorskip("ray")
    found: type[aiosync.WeightSyncScheme] = getattr(
        ray if name == "RayWeightSyncScheme" else ray_transform, name
    )
    return found


def _check(scheme: Any) -> None:
    wanted = KEYS[type(scheme).__name__]
    assert scheme.__getstate__().keys() == wanted
    other = harness.twin(scheme)
    assert type(other) is type(scheme)
    assert other.__getstate__().keys() == wanted
    assert vars(other).keys() == vars(type(scheme)()).keys()
    assert vars(copy.copy(scheme)).keys() == vars(other).keys()


def _without_ray(monkeypatch: pytest.MonkeyPatch, scheme: Any) -> None:
    if type(scheme).__name__ in RAY:
        monkeypatch.setattr("aiosync.schemes.ray.need_cluster", lambda: None)
        monkeypatch.setattr(type(scheme), "_default_address", EngineScheme._default_address)
    if type(scheme).__name__ == "RayModuleTransformScheme":
        scheme._set_transform(object())


@everywhere
def test_before_and_with_a_role(
    make: Callable[[], aiosync.WeightSyncScheme], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = make()
    _check(scheme)
    _without_ray(monkeypatch, scheme)
    worker = copy.copy(scheme)
    scheme.init_on_sender(model=models.linear(), num_workers=1)
    _check(scheme)
    worker.init_on_receiver(model=models.linear())
    _check(worker)
    for each in (scheme, worker):
        each.abort()
        _check(each)


@pytest.mark.asyncio
@pytest.mark.parametrize("make", HERE)
async def test_a_sender_that_listens(make: type[aiosync.WeightSyncScheme]) -> None:
    scheme = make()
    scheme.init_on_sender(model=models.linear())
    await scheme.connect()
    _check(scheme)
    await scheme.aclose()
    _check(scheme)


@pytest.mark.asyncio
@pytest.mark.parametrize("make", [make for make in HERE if make is not RPCWeightSyncScheme])
async def test_both_ends_of_a_link(make: type[aiosync.WeightSyncScheme]) -> None:
    trainer = make()
    trainer.init_on_sender(model=models.linear(), num_workers=1)
    worker = harness.twin(trainer)
    worker.init_on_receiver(model=models.linear())
    async with asyncio.timeout(harness.PATIENCE), trainer, worker:
        await asyncio.gather(trainer.connect(), worker.connect())
        await trainer.send()
        _check(trainer)
        _check(worker)
    _check(trainer)
    _check(worker)


@pytest.mark.parametrize("cls", [cls for cls in HERE if hasattr(sync, cls.__name__)])
def test_a_blocking_twin_pickles_the_async_scheme(cls: type[aiosync.WeightSyncScheme]) -> None:
    with getattr(sync, cls.__name__)() as scheme:
        assert scheme.__getstate__().keys() == {"_scheme"}
        _check(harness.twin(scheme)._scheme)
        scheme.init_on_sender(model=models.linear())
        scheme.connect()
        assert scheme.__getstate__().keys() == {"_scheme"}
        _check(harness.twin(scheme)._scheme)


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (legacy.NoWeightSyncScheme, set()),
        (legacy.MultiProcessWeightSyncScheme, set()),
        (legacy.SharedMemWeightSyncScheme, {"policy_weights", "auto_register", "_first"}),
        (legacy.DistributedWeightSyncScheme, set()),
        (legacy.RPCWeightSyncScheme, set()),
    ],
)
def test_the_older_generation_adds_its_own(make: Callable[[], Any], more: set[str]) -> None:
    scheme = make()
    assert scheme.__getstate__().keys() == {"_scheme", "_apply_given"} | more
    _check(harness.twin(scheme)._scheme)
    scheme.abort()


def test_every_class_is_looked_at() -> None:
    found, left = set(), [aiosync.WeightSyncScheme]
    while left:
        cls = left.pop()
        left += cls.__subclasses__()
        if cls.__module__.startswith("aiosync."):
            found.add(cls.__name__)
    assert found - ABSTRACT - set(RAY) == {cls.__name__ for cls in HERE}


def test_what_was_taken_along_travels_and_outlives_the_runtime() -> None:
    scheme = aiosync.NoWeightSyncScheme()
    scheme.carry(models.linear())
    for _ in range(2):
        assert scheme.__getstate__().keys() == PLAIN | {"_carried", "_not_carried"}
        other = harness.twin(scheme)
        assert other._carried[1] == scheme._carried[1]
        assert other.__getstate__().keys() == scheme.__getstate__().keys()
        scheme.init_on_sender(model=models.linear())
        scheme = other


class Mended(aiosync.TCPWeightSyncScheme):
    """Has a runtime attribute of its own, and says so nowhere else."""

    def _reset(self) -> None:
        super()._reset()
        self._live: Any = None


def test_what_a_subclass_resets_is_not_pickled() -> None:
    scheme = Mended()
    scheme._live = lambda: None  # no pickle takes it
    assert "_live" not in scheme.__getstate__()
    assert harness.twin(scheme)._live is None
    assert copy.copy(scheme)._live is None


@everywhere
def test_nothing_that_is_reset_is_pickled(make: Callable[[], aiosync.WeightSyncScheme]) -> None:
    scheme = make()
    fresh = object.__new__(type(scheme))
    fresh._reset()
    assert not vars(fresh).keys() & scheme.__getstate__().keys()
    assert vars(fresh).keys() | scheme.__getstate__().keys() == vars(scheme).keys()


def test_pickling_leaves_nothing_to_the_garbage_collector() -> None:
    class Watched(aiosync.TCPWeightSyncScheme):
        """A class of this test's own, as other tests may leave schemes."""

    scheme = Watched()
    gc.disable()
    try:
        scheme.__getstate__()
        copy.copy(scheme).abort()
        objects = [each for each in gc.get_objects() if type(each) is Watched]
    finally:
        gc.enable()
    assert [each for each in objects if not each._closed] == [scheme]
