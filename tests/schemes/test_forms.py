"""Every form of ``init_on_sender`` and ``init_on_receiver``, and forms that exclude each other."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import aiosync
import aiosync.sync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = pytest.mark.one_loop
both = pytest.mark.parametrize("make", harness.SCHEMES)


class _Owner:
    """Context with models behind attributes."""

    def __init__(self, module: nn.Module) -> None:
        self.policy = module
        self.env = SimpleNamespace(transform=[module])


FORMS: dict[str, Any] = {
    "model": lambda m: {"model": m},
    "devices": lambda m: {"model": m, "devices": ["cpu"], "num_workers": None},
    "devices and num_workers": lambda m: {"weights": TensorDict.from_module(m), "devices": ["cpu"]},
    "a TensorDict": lambda m: {"weights": TensorDict.from_module(m)},
    "dotted names": lambda m: {"weights": dict(m.state_dict())},
    "nested dicts": lambda m: {"weights": TensorDict.from_module(m).to_dict()},
    "params_map": lambda m: {"params_map": {0: TensorDict.from_module(m)}, "num_workers": None},
}


@pytest.mark.asyncio
@both
@pytest.mark.parametrize("form", FORMS)
async def test_weights_in_every_form(make, form) -> None:
    source, target = (nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)) for _ in range(2))
    models.fill(source, 1.0)
    async with harness.here(make(), target, sender=FORMS[form](source)) as (sender, receiver):
        assert models.holds(receiver, 1.0)
        assert sender.initialized_on_sender and sender.synchronized_on_sender
        assert receiver.initialized_on_receiver and receiver.synchronized_on_receiver
        models.fill(source, 5.0)
        assert (await sender.send()).acked == {0}
        assert models.holds(receiver, 5.0)


@pytest.mark.asyncio
@both
@pytest.mark.parametrize("path", ["policy", "env.transform[0]"])
async def test_context_with_a_path(make, path) -> None:
    context, worker = _Owner(models.linear(7.0)), _Owner(models.linear())
    init = {"context": context, "model_id": path}
    there = {"context": worker, "model_id": path, "model": None}
    async with harness.here(make(), None, sender=init, receiver=there) as (sender, receiver):
        assert models.holds(receiver, 7.0)
        # The weights of a send may be a dotted name.
        await sender.send("env.transform[0]")
        await receiver.wait_for_version(2, timeout=harness.PATIENCE)
        with pytest.raises(AttributeError, match="nothing_there"):
            await sender.send("nothing_there")


@pytest.mark.asyncio
@both
async def test_links_that_are_given(make) -> None:
    """A sender expects only the workers of the given links, whether pipes or transports."""
    ours, theirs = multiprocessing.Pipe()
    one, other = socket.socketpair()
    maker = make()
    async with aiosync.MemoryTransport.pair() as (mine, its):
        for sender, receiver, idx in (
            ({"pipes": [ours]}, {"pipe": theirs}, 0),
            ({"transports": {0: mine}}, {"transport": its}, 0),
            (
                {"transports": {1: maker.create_transport(one)}},
                {"transport": maker.create_transport(other), "worker_idx": None},
                1,
            ),
        ):
            init = {"model": models.linear(), "num_workers": None, **sender}
            ends = harness.here(make(), models.linear(), sender=init, receiver=receiver)
            async with ends as pair:
                await harness.deliver(*pair, 2.0)
                assert (pair[1].worker_idx, bool(pair[0].ready)) == (idx, True)
    maker.abort()


@pytest.mark.asyncio
@both
async def test_a_context_that_has_no_such_model(make) -> None:
    owner, missing = models.linear(), "a Linear, has no model 'p'"
    scheme = make()
    scheme.init_on_sender(model_id="p", context=owner, num_workers=1)
    receiver = harness.twin(scheme)
    receiver.init_on_receiver(model_id="p", context=owner)
    async with scheme, receiver:
        with pytest.warns(UserWarning, match=missing):
            await asyncio.gather(scheme.connect(), receiver.connect())
        for call in (scheme.send, scheme.send_nowait):
            with pytest.raises(aiosync.ConfigError, match=missing):
                await call()
        with pytest.raises(aiosync.PartialSyncError, match="without a model"):
            await scheme.send(dict(models.linear().state_dict()), timeout=0.05)
        with pytest.raises(aiosync.RecvTimeout, match=missing):
            await receiver.wait_for_version(1, timeout=0.01)
        receiver.model = models.linear()
        assert await receiver.wait_for_version(1) == 1


@pytest.mark.asyncio
@both
@pytest.mark.parametrize("path", ["models['critic']", "models[0]"])
async def test_a_context_whose_container_comes_later(make, path) -> None:
    owner = _Owner(models.linear())
    owner.models = None
    scheme = make()
    scheme.init_on_sender(model_id=path, model=models.linear(1.0), num_workers=None)
    receiver = harness.twin(scheme)
    receiver.init_on_receiver(model_id=path, context=owner)
    async with scheme, receiver:
        await scheme.connect()
        with pytest.warns(UserWarning, match="has no model"):
            await receiver.connect(initial=False)
        owner.models = {"critic": models.linear(), 0: models.linear()}
        assert await receiver.wait_for_version(1) == 1
        assert models.holds(receiver, 1.0)


@pytest.mark.asyncio
@both
async def test_a_context_that_raises_refuses_an_update_and_ends_no_link(make) -> None:
    owner = _Owner(models.linear())
    scheme = make(timeout=harness.PATIENCE)
    scheme.init_on_sender(model_id="p", model=models.linear(1.0), num_workers=1)
    receiver = harness.twin(scheme)
    receiver.init_on_receiver(model_id="p", context=owner)

    def get_model(model_id: str) -> Any:
        raise RuntimeError("not loaded yet")

    async with scheme, receiver:
        with pytest.warns(UserWarning, match="has no model"):
            await asyncio.gather(scheme.connect(), receiver.connect(initial=False))
        owner.get_model = get_model
        with pytest.raises(aiosync.PartialSyncError, match="not loaded yet"):
            await scheme.send()
        assert receiver.link_lost is None
        owner.get_model = lambda model_id: owner.policy
        assert (await scheme.send()).acked == {0}
        assert models.holds(receiver, 1.0)


WEIGHTS = {"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}
WRONG: list[dict[str, Any]] = [
    {"weights": WEIGHTS},
    {"params_map": {0: WEIGHTS}},
    {"num_workers": True},
    {"num_workers": 1.5},
    {"num_workers": -1},
    {"num_workers": 2**16},
    {"devices": "cpu"},
    {"devices": torch.device("cpu")},
    {"devices": ["cpu"], "num_workers": 2},
    {"device_map_fn": max},
    {"device_map_fn": 3, "num_workers": 1},
    {"pipes": 3},
    {"transports": {"0": None}},
    {"transports": {0: None}, "num_workers": 2},
    {"model": lambda x: x},
    {"model": None, "weights": [1, 2]},
    *(
        {"model": None, "params_map": params_map}
        for params_map in ({"a": WEIGHTS}, {}, {0: 1}, {True: {}})
    ),
    {"model": None, "params_map": {0: WEIGHTS}, "num_workers": 1},
    {"model": None, "params_map": {0: WEIGHTS}, "context": _Owner(nn.ReLU())},
    {"model": None, "context": _Owner(nn.ReLU())},
    {"model": None, "context": {"policy": nn.ReLU()}, "model_id": "policy"},
    {"model": None, "context": _Owner(nn.ReLU()), "model_id": "p", "devices": ["cpu"]},
    {"model": None, "context": _Owner(nn.ReLU()), "model_id": "p", "device_map_fn": max},
    {"model": None, "context": SimpleNamespace(num_workers="two"), "model_id": "p"},
    *({"model_id": model_id} for model_id in (3, b"policy", "ü" * 512 + "x")),
]


@pytest.mark.parametrize("init", WRONG, ids=range(len(WRONG)))
def test_what_a_sender_is_not_set_up_with(init) -> None:
    """A refused attempt changes nothing: it takes neither a role nor an address."""
    for make in harness.SCHEMES:
        scheme = make()
        with pytest.raises(aiosync.ConfigError):
            scheme.init_on_sender(**{"model": models.linear(), **init})
        assert not scheme.initialized_on_sender
        scheme.init_on_sender(model=models.linear())
        scheme.abort()


@pytest.mark.parametrize(
    ("init", "match"),
    [
        ({"model": models.linear(), "weights": WEIGHTS}, "weights"),
        ({"weights": WEIGHTS}, "guard='reading'"),
        ({"model": models.linear(), "worker_idx": 2**40}, "worker_idx"),
        ({"model": models.linear(), "worker_idx": True}, "worker_idx"),
        ({"model": models.linear(), "load": print}, "load"),
        ({"load": 7}, "load"),
        ({"load": print}, "no forward pass to guard"),
        ({"model": type(models.linear())}, "a type has no weights to replace"),
        ({"model": "policy"}, "a str has no weights to replace"),
        ({"weights": [torch.ones(2)]}, "a list has no weights to replace"),
        ({"model": models.linear(), "transform": 7}, "transform"),
        ({"model_id": "policy", "context": {"policy": models.linear()}}, "model itself"),
        ({"model_id": 3, "model": models.linear()}, "model_id"),
    ],
)
def test_what_a_receiver_is_not_set_up_with(init, match) -> None:
    for make in harness.SCHEMES:
        scheme = make()
        with pytest.raises(aiosync.ConfigError, match=match):
            scheme.init_on_receiver(**init)
        scheme.init_on_receiver()
        if "weights" in init:
            with pytest.raises(aiosync.ConfigError, match="guard='reading'"):
                scheme.model = WEIGHTS


@pytest.mark.parametrize("module", [aiosync, aiosync.sync], ids=["async", "blocking"])
@both
def test_torchrl_arguments_in_its_order(make, module) -> None:
    cls = getattr(module, make.__name__)
    scheme = cls("state_dict", False, True)
    assert scheme.strategy_str == "state_dict"
    assert (scheme.sync, scheme.per_worker_weights, scheme.shared_transport) == (False, True, None)
    with pytest.raises(TypeError):
        cls("state_dict", False, True, "manual")


def test_schemes_by_back_end_name() -> None:
    for names, cls in (
        (("shared", "thread"), aiosync.SharedMemWeightSyncScheme),
        (("process", "multiprocessing"), aiosync.MultiProcessWeightSyncScheme),
        (("none", "direct"), aiosync.NoWeightSyncScheme),
    ):
        for name in names:
            named = aiosync.WeightSyncScheme.from_backend(name, strategy="state_dict")
            assert type(named) is cls
            assert named.strategy_str == "state_dict"
    with pytest.raises(aiosync.ConfigError, match="shared"):
        aiosync.WeightSyncScheme.from_backend("carrier pigeon")


class OwnScheme(aiosync.WeightSyncScheme):
    """A user's scheme with no more than it has to have."""

    def create_transport(self, pipe_or_context: Any) -> aiosync.Transport:
        return aiosync.MPTransport(pipe_or_context)


@pytest.mark.asyncio
async def test_a_scheme_of_ones_own_needs_nothing_but_its_transport() -> None:
    ours, theirs = multiprocessing.Pipe()
    options = {"sender": {"model": models.linear(), "pipes": [ours]}, "receiver": {"pipe": theirs}}
    async with harness.here(OwnScheme(), models.linear(), **options) as pair:
        await harness.deliver(*pair, 2.0)
    async with OwnScheme() as lonely:
        lonely.init_on_receiver(model=models.linear())
        with pytest.raises(aiosync.ConfigError, match="OwnScheme dials nobody: pass pipe="):
            await lonely.connect()
