"""Every keyword form of ``init_on_sender``, on both schemes, over their real links."""

from __future__ import annotations

import asyncio
import multiprocessing

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import aiosync
import aiosync.sync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

both = pytest.mark.parametrize("make", harness.SCHEMES)


def _weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 4), value), "bias": torch.full((2,), value)}


class _Trainer:
    """A context with ``get_model``."""

    num_workers = 1

    def __init__(self, model: nn.Module) -> None:
        self.nets = {"policy": model}

    def get_model(self, model_id: str) -> nn.Module:
        return self.nets[model_id]


class _Env:
    def __init__(self, module: nn.Module) -> None:
        self.transform = [module]


class _Owner:
    def __init__(self, module: nn.Module) -> None:
        self.policy = module
        self.env = _Env(module)


async def _send_and_check(sender, receiver, target, source) -> None:
    models.fill(source, 5.0)
    report = await sender.send()
    assert report.acked == {0}
    assert models.filled(target, 5.0)
    assert sender.version == receiver.version == report.version


@pytest.mark.asyncio
@both
async def test_model(make) -> None:
    source, target = models.linear(), models.linear()
    models.fill(source, 1.0)
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        assert models.filled(target, 1.0)
        assert sender.initialized_on_sender
        assert sender.synchronized_on_sender
        assert receiver.initialized_on_receiver
        assert receiver.synchronized_on_receiver
        await _send_and_check(sender, receiver, target, source)


@pytest.mark.asyncio
@both
@pytest.mark.parametrize("form", ["tensordict", "dotted", "nested"])
async def test_weights(make, form) -> None:
    target = models.batch_norm()
    source = models.batch_norm()
    models.fill(source, 1.0)
    if form == "tensordict":
        weights = TensorDict.from_module(source)
    elif form == "dotted":
        weights = dict(source.state_dict())
    else:
        weights = TensorDict.from_module(source).to_dict()
    async with harness.here(make(), target, sender={"weights": weights}) as (sender, receiver):
        assert models.filled(target, 1.0)
        await _send_and_check(sender, receiver, target, source)
        models.fill(source, 6.0)
        await sender.send(TensorDict.from_module(source))
        assert models.filled(target, 6.0)


@pytest.mark.asyncio
@both
async def test_context_with_get_model(make) -> None:
    source, target = models.linear(), models.linear()
    models.fill(source, 1.0)
    context = _Trainer(source)
    init = {"context": context, "num_workers": None}
    async with harness.here(make(), target, sender=init) as (sender, receiver):
        assert models.filled(target, 1.0)
        await _send_and_check(sender, receiver, target, source)
        context.nets["policy"] = other = models.linear()  # re-created behind our back
        await _send_and_check(sender, receiver, target, other)
        del context
        init.clear()
        assert sender.context is None  # a weak reference
        with pytest.raises(aiosync.ConfigError, match="nothing to send"):
            await sender.send()


@pytest.mark.asyncio
@both
@pytest.mark.parametrize("path", ["policy", "env.transform[0]"])
async def test_context_with_a_path(make, path) -> None:
    source, target = models.linear(), models.linear()
    models.fill(source, 1.0)
    context, worker = _Owner(source), _Owner(target)
    init = {"context": context, "model_id": path}
    receiver_init = {"context": worker, "model_id": path, "model": None}
    async with harness.here(make(), None, sender=init, receiver=receiver_init) as (
        sender,
        receiver,
    ):
        assert models.filled(target, 1.0)
        await _send_and_check(sender, receiver, target, source)
        models.fill(source, 7.0)
        await sender.send("env.transform[0]")  # a dotted name
        assert models.filled(target, 7.0)
        with pytest.raises(AttributeError, match="nothing_there"):
            await sender.send("nothing_there")


@pytest.mark.asyncio
@both
async def test_a_name_needs_a_context(make) -> None:
    async with harness.here(make(), models.linear(), sender={"model": models.linear()}) as (
        sender,
        _,
    ):
        with pytest.raises(aiosync.ConfigError, match="without context"):
            await sender.send("policy")


@pytest.mark.asyncio
@both
@pytest.mark.parametrize("form", ["devices", "num_workers", "devices and num_workers"])
@pytest.mark.parametrize("what", ["model", "weights"])
async def test_devices(make, form, what) -> None:
    source, target = models.linear(), models.linear()
    models.fill(source, 1.0)
    init = {what: source if what == "model" else TensorDict.from_module(source)}
    init["num_workers"] = 1 if "num_workers" in form else None
    init["devices"] = ["cpu"] if "devices" in form else None
    async with harness.here(make(), target, sender=init) as (sender, receiver):
        assert models.filled(target, 1.0)
        await _send_and_check(sender, receiver, target, source)


@pytest.mark.asyncio
@both
@pytest.mark.parametrize("what", ["model", "weights"])
async def test_device_map_fn(make, what) -> None:
    source, target = models.linear(), models.linear()
    models.fill(source, 1.0)
    asked = []

    def double(idx, weights):
        asked.append(idx)
        return weights.data * 2

    given = source if what == "model" else TensorDict.from_module(source)
    init = {what: given, "device_map_fn": double}
    async with harness.here(make(), target, sender=init) as (sender, _):
        assert models.filled(target, 2.0)
        models.fill(source, 3.0)
        assert (await sender.send()).acked == {0}
        assert models.filled(target, 6.0)
        assert set(asked) == {0}


@pytest.mark.asyncio
@both
async def test_device_map_fn_gets_a_tensordict_of_a_state_dict(make) -> None:
    source, target = models.linear(), models.linear()
    init = {"model": source, "device_map_fn": lambda idx, weights: weights.to("cpu") * 2}
    async with harness.here(make(), target, sender=init) as (sender, _):
        models.fill(source, 3.0)
        assert (await sender.send(source.state_dict())).acked == {0}
        assert models.filled(target, 6.0)


@pytest.mark.asyncio
@both
async def test_params_map(make) -> None:
    source, target = models.linear(), models.linear()
    models.fill(source, 1.0)
    shared = TensorDict.from_module(source)
    init = {"params_map": {0: shared}, "num_workers": None}
    async with harness.here(make(), target, sender=init) as (sender, receiver):
        assert models.filled(target, 1.0)
        await _send_and_check(sender, receiver, target, source)


@pytest.mark.asyncio
@both
async def test_a_pipe_whose_other_end_is_gone_is_not_waited_for(make) -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    async with make() as sender:
        sender.init_on_sender(model=models.linear(), pipes=[ours])
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await sender.connect(timeout=harness.PATIENCE)
        assert isinstance(caught.value.failed[0], aiosync.PeerClosed)


@pytest.mark.asyncio
@both
async def test_a_pipe_is_waited_for_as_long_as_connect_waits(make, monkeypatch) -> None:
    monkeypatch.setattr("aiosync.schemes._handshake.HANDSHAKE_SECONDS", 0.05)
    ours, theirs = multiprocessing.Pipe()
    async with make() as sender, make() as receiver:
        sender.init_on_sender(model=models.linear(), pipes=[ours])
        receiver.init_on_receiver(model=models.linear(), pipe=theirs)
        connecting = asyncio.ensure_future(sender.connect(timeout=harness.PATIENCE))
        await asyncio.sleep(0.3)  # the worker's process starts
        await receiver.connect(timeout=harness.PATIENCE)
        await connecting


@pytest.mark.asyncio
@both
async def test_pipes(make) -> None:
    source, target = models.linear(), models.linear()
    models.fill(source, 1.0)
    ours, theirs = multiprocessing.Pipe()
    init = {"model": source, "pipes": [ours], "num_workers": None}
    async with harness.here(make(), target, sender=init, receiver={"pipe": theirs}) as (
        sender,
        receiver,
    ):
        assert models.filled(target, 1.0)
        await _send_and_check(sender, receiver, target, source)


@pytest.mark.asyncio
@both
async def test_transports(make) -> None:
    source, target = models.linear(), models.linear()
    models.fill(source, 1.0)
    async with aiosync.MemoryTransport.pair() as (ours, theirs):
        init = {"model": source, "transports": {0: ours}, "num_workers": None}
        async with harness.here(make(), target, sender=init, receiver={"transport": theirs}) as (
            sender,
            receiver,
        ):
            assert models.filled(target, 1.0)
            await _send_and_check(sender, receiver, target, source)


@pytest.mark.asyncio
@both
async def test_nothing_until_the_first_send(make) -> None:
    target = models.linear()
    async with harness.here(make(), target, sender={}) as (sender, receiver):
        assert receiver.version == 0
        assert models.filled(target, -1.0)
        with pytest.raises(aiosync.ConfigError, match="nothing to send"):
            await sender.send()
        await sender.send(_weights(2.0))
        assert models.filled(target, 2.0)
        await sender.send({"weight": _weights(3.0)["weight"], "bias": torch.full((2,), 3.0)})
        assert models.filled(target, 3.0)


@pytest.mark.asyncio
@both
async def test_initial_weights_given_to_connect(make) -> None:
    scheme, target = make(), models.linear()
    other = scheme.__class__.__new__(scheme.__class__)
    other.__setstate__(scheme.__getstate__())
    async with scheme, other:
        scheme.init_on_sender(num_workers=1)
        other.init_on_receiver(model=target)
        await asyncio.gather(scheme.connect(weights=_weights(4.0)), other.connect())
        assert models.filled(target, 4.0)
        assert other.worker_idx == 0


EXCLUDED = {
    "model and weights": {"model": models.linear(), "weights": _weights(0.0)},
    "params_map and model": {"params_map": {0: _weights(0.0)}, "model": models.linear()},
    "params_map and num_workers": {"params_map": {0: _weights(0.0)}, "num_workers": 1},
    "params_map and context": {"params_map": {0: _weights(0.0)}, "context": _Owner(nn.ReLU())},
    "params_map of names": {"params_map": {"a": _weights(0.0)}},
    "params_map empty": {"params_map": {}},
    "params_map of numbers": {"params_map": {0: 1}},
    "context and devices": {"context": _Owner(nn.ReLU()), "model_id": "p", "devices": ["cpu"]},
    "context and device_map_fn": {
        "context": _Owner(nn.ReLU()),
        "model_id": "p",
        "device_map_fn": max,
    },
    "context without model_id": {"context": _Owner(nn.ReLU())},
    "device_map_fn without num_workers": {"model": models.linear(), "device_map_fn": max},
    "device_map_fn not callable": {
        "model": models.linear(),
        "device_map_fn": 3,
        "num_workers": 1,
    },
    "devices and num_workers differ": {
        "model": models.linear(),
        "devices": ["cpu"],
        "num_workers": 2,
    },
    "no such device": {"model": models.linear(), "devices": ["abacus"]},
    "negative num_workers": {"model": models.linear(), "num_workers": -1},
    "more workers than can be numbered": {"model": models.linear(), "num_workers": 2**31},
    "a model that is none": {"model": lambda x: x},
    "weights that are none": {"weights": [1, 2]},
}


@both
@pytest.mark.parametrize("form", EXCLUDED)
def test_forms_that_exclude_each_other(make, form) -> None:
    scheme = make()
    with pytest.raises(aiosync.ConfigError) as caught:
        scheme.init_on_sender(**EXCLUDED[form])
    assert str(caught.value)
    scheme.init_on_sender(model=models.linear())  # nothing was changed by the attempt
    scheme.abort()


@both
def test_receiver_forms_that_exclude_each_other(make) -> None:
    scheme = make()
    with pytest.raises(aiosync.ConfigError, match="weights cannot be provided if model"):
        scheme.init_on_receiver(model=models.linear(), weights=_weights(0.0))
    with pytest.raises(aiosync.ConfigError, match="guard='reading'"):
        scheme.init_on_receiver(weights=_weights(0.0))
    with pytest.raises(aiosync.ConfigError, match="worker_idx must be an int of at most"):
        scheme.init_on_receiver(model=models.linear(), worker_idx=2**40)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "pickle"},
        {"apply": "later"},
        {"guard": "none"},
        {"require": 0},
        {"require": 1.5},
        {"require": "most"},
        {"require": True},
        {"timeout": 0},
        {"timeout": -1.0},
    ],
    ids=str,
)
@both
def test_options_with_illegal_values(make, options) -> None:
    with pytest.raises(aiosync.ConfigError):
        make(**options)


def test_schemes_by_back_end_name() -> None:
    from aiosync.schemes import scheme_from_backend

    expected = {
        "shared": aiosync.SharedMemWeightSyncScheme,
        "thread": aiosync.SharedMemWeightSyncScheme,
        "process": aiosync.MultiProcessWeightSyncScheme,
        "multiprocessing": aiosync.MultiProcessWeightSyncScheme,
        "none": aiosync.NoWeightSyncScheme,
        "direct": aiosync.NoWeightSyncScheme,
    }
    for name, cls in expected.items():
        assert type(scheme_from_backend(name, strategy="state_dict")) is cls
        named = aiosync.WeightSyncScheme.from_backend(name, strategy="state_dict")
        assert type(named) is cls
        assert named.strategy_str == "state_dict"
    with pytest.raises(aiosync.ConfigError, match="shared"):
        scheme_from_backend("carrier pigeon")


@pytest.mark.parametrize("value", [True, False, torch.tensor(True)])
def test_a_truth_value_is_no_index_and_no_count(value) -> None:
    with pytest.raises(aiosync.ConfigError, match="num_workers must be an int"):
        aiosync.SharedMemWeightSyncScheme().init_on_sender(num_workers=value)
    with pytest.raises(aiosync.ConfigError, match="worker_idx must be an int"):
        aiosync.SharedMemWeightSyncScheme().init_on_receiver(worker_idx=value)
    with pytest.raises(aiosync.ConfigError, match="a key of params_map must be an int"):
        aiosync.SharedMemWeightSyncScheme().init_on_sender(params_map={value: {}})


@pytest.mark.parametrize("module", [aiosync, aiosync.sync], ids=["async", "blocking"])
@both
def test_torchrl_arguments_in_its_order(make, module) -> None:
    cls = getattr(module, make.__name__)
    scheme = cls("state_dict", False, True)
    assert (scheme.strategy_str, scheme.sync, scheme.per_worker_weights) == (
        "state_dict",
        False,
        True,
    )
    scheme = cls("state_dict", per_worker_weights=True, sync=False)
    assert (scheme.sync, scheme.per_worker_weights) == (False, True)
    with pytest.raises(TypeError):
        cls("state_dict", False, True, "manual")
    assert scheme.shared_transport is None


@pytest.mark.parametrize("module", [aiosync, aiosync.sync], ids=["async", "blocking"])
@both
def test_a_context_without_weak_references(make, module) -> None:
    scheme = getattr(module, make.__name__)()
    with pytest.raises(TypeError, match="weak reference") as caught:
        scheme.context = 3
    assert isinstance(caught.value, aiosync.ConfigError)
    assert scheme.context is None
