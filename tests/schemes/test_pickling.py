"""What travels when a scheme is pickled or copied, and what does not."""

from __future__ import annotations

import copy
import pickle

import pytest

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = pytest.mark.one_loop

both = pytest.mark.parametrize("make", [*harness.SCHEMES, aiosync.NoWeightSyncScheme])

OPTIONS = {
    "strategy": "state_dict",
    "sync": False,
    "per_worker_weights": True,
    "apply": "manual",
    "apply_copy": True,
    "guard": "reading",
    "strict": False,
    "require": 0.5,
    "timeout": 7.0,
}


@both
@pytest.mark.parametrize("way", [copy.copy, harness.twin])
def test_options_travel(make, way) -> None:
    scheme = make(**OPTIONS)
    scheme.model_id = "critic"
    other = way(scheme)
    assert type(other) is make
    for name, value in OPTIONS.items():
        if name != "strategy":
            assert getattr(other, name) == value
    assert other.strategy.extract_as == other.strategy_str == "state_dict"
    assert other.model_id == "critic"
    assert other._address == scheme._address


@pytest.mark.asyncio
@both
@pytest.mark.parametrize("way", [copy.copy, harness.twin])
async def test_roles_links_and_models_do_not(make, way) -> None:
    scheme, context = make(), models.Tied()
    scheme.init_on_sender(model_id="first", context=context)
    await scheme.connect()
    other = way(scheme)
    assert not (other.initialized_on_sender or other.initialized_on_receiver)
    assert not (other.synchronized_on_sender or other.synchronized_on_receiver)
    assert other.model is None
    assert other.context is None
    assert other.weights is None
    assert other.worker_versions == {}
    assert (other.version, other.lag) == (0, 0)
    assert b"Linear" not in pickle.dumps(scheme)
    again = way(other)
    again.init_on_receiver(model=models.linear())
    assert again.initialized_on_receiver
    await again.aclose()
    await scheme.aclose()
    assert way(scheme).initialized_on_sender is False  # a copy of a closed one is a new one
    way(scheme).init_on_receiver(model=models.linear())


class Tagged(aiosync.SharedMemWeightSyncScheme):
    """A user's scheme that counts its updates under a tag."""

    def __init__(self, tag: str, **options) -> None:
        super().__init__(**options)
        self.tag = tag
        self.seen = [0]

    def _on_applied(self, epoch: int, version: int) -> None:
        self.seen.append(version)


def _tag(state) -> tuple[str, list[int], str]:
    return state.scheme.tag, state.scheme.seen, state.scheme.guard


@pytest.mark.asyncio
@pytest.mark.slow
async def test_what_a_subclass_sets_reaches_a_spawned_worker() -> None:
    scheme = Tagged("north", guard="reading")
    scheme.init_on_sender(model=models.linear(), num_workers=1)
    async with harness.workers(scheme, models.linear, 1, method="spawn") as crew:
        assert await crew[0].call(_tag) == ("north", [0, 1], "reading")
        assert scheme.seen == [0]


@pytest.mark.asyncio
@pytest.mark.parametrize("way", [copy.copy, harness.twin])
async def test_what_a_subclass_sets_travels_and_runtime_state_does_not(way) -> None:
    async with harness.here(
        Tagged("south", timeout=7.0), models.linear(), sender={"model": models.linear()}
    ) as ends:
        fresh = vars(Tagged("south"))
        for scheme in ends:
            scheme.later = "set after connect()"
            other = way(scheme)
            assert (other.tag, other.later, other.timeout) == ("south", scheme.later, 7.0)
            assert vars(other).keys() == fresh.keys() | {"later"}
            for name in ("_sender", "_receiver", "_listener", "_model", "_arena"):
                assert getattr(other, name) is None
            assert other._guard_object is not scheme._guard_object
            assert not other._connected
        state = ends[0].__getstate__()
        assert not {"_sender", "_arena", "_loop", "_guard_object", "_pid"} & state.keys()


def test_cloudpickle_takes_lambdas() -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    strategy = aiosync.WeightStrategy()
    strategy.function = lambda weights: weights
    strategy.__class__ = type("Local", (aiosync.WeightStrategy,), {})
    scheme = aiosync.SharedMemWeightSyncScheme(strategy)
    other = pickle.loads(cloudpickle.dumps(scheme))
    assert other.strategy.function(3) == 3


@both
def test_reprs(make) -> None:
    scheme = make()
    assert "no role yet" in repr(scheme)
    scheme.init_on_sender(model=models.linear())
    assert "sender" in repr(scheme)
    scheme.abort()
    assert "closed" in repr(scheme)
