"""Looks at a worker's model without a forward, which see the weights of each finished ``send()``.

Transforms read their parameters, environments call other methods, checkpoints ask for a
``state_dict()``: none of them calls the forward that takes versions from shared memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import pickle
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = pytest.mark.asyncio

SHM = aiosync.SharedMemWeightSyncScheme


class Normalizer(nn.Module):
    """Model whose forward is never called, while another method is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.zeros(2))
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.weight - self.mean

    def scale(self) -> torch.Tensor:
        return self.weight.detach().clone()


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(value)


def called(model: Normalizer) -> torch.Tensor:
    """Call the model by functional_call() with its weights and buffers, some of them replaced."""
    own = {"weight": model.weight.detach(), "mean": model.mean, "inner.weight": torch.zeros(2, 2)}
    return functional_call(model, {**own, "inner.bias": torch.full((2,), 1.0)}, torch.ones(2))


LOOKS: dict[str, Callable[[Normalizer], torch.Tensor]] = {
    "parameter": lambda model: model.weight,
    "buffer": lambda model: model.mean,
    "method": lambda model: model.scale(),
    "module inside": lambda model: model.inner.bias,
    "functional_call": lambda model: called(model) * 0 + model.weight,
}
"""Looks at a model without its own forward; each finds the value that was sent."""


async def fresh(sender: Any, source: nn.Module, look: Callable[[], torch.Tensor]) -> int:
    """Return how many of 20 looks, each right after a send, found the value that was sent."""
    found = 0
    for value in range(100, 120):
        fill(source, float(value))
        assert (await sender.send()).acked == {0}
        found += set(look().detach().flatten().tolist()) == {float(value)}
    return found


@pytest.mark.parametrize("copies", [False, True], ids=["flip", "copy"])
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
async def test_a_module_whose_forward_nobody_calls(look: Any, copies: bool) -> None:
    source, target = Normalizer(), Normalizer()
    scheme = SHM(timeout=harness.PATIENCE, apply_copy=copies)
    async with harness.here(scheme, target, sender={"model": source}) as (sender, _):
        assert await fresh(sender, source, lambda: look(target)) == 20


async def test_a_functional_call_leaves_a_version_to_the_next_read() -> None:
    source, target = Normalizer(), Normalizer()
    async with harness.here(SHM(), target, sender={"model": source}) as (sender, receiver):
        target(torch.ones(2))
        await asyncio.sleep(0)
        others = {name: torch.ones_like(p) for name, p in target.named_parameters()}
        for value in range(2, 10):
            fill(source, float(value))
            await sender.send()
            functional_call(target, others, torch.ones(2))
            assert all(bool((other == 1.0).all()) for other in others.values())
            with receiver.reading():
                assert target.weight.tolist() == target.inner.bias.tolist() == [value] * 2


async def test_plain_tensors() -> None:
    source, target = nn.Linear(2, 2), {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    options = {"model": None, "weights": target}
    scheme = SHM(guard="reading", timeout=harness.PATIENCE)
    ends = harness.here(scheme, None, sender={"model": source}, receiver=options)
    async with ends as (sender, _):
        assert await fresh(sender, source, lambda: target["weight"]) == 20


async def test_a_model_that_is_not_computed_with_any_more() -> None:
    """The worker answers again after some versions that no forward took."""
    source, target = Normalizer(), Normalizer()
    async with harness.here(SHM(), target, sender={"model": source}) as (sender, _):
        for value in (2.0, 3.0, 4.0):
            fill(source, value)
            await sender.send()
            target(torch.ones(2))
        before = target.weight.detach().clone()
        fill(source, 5.0)
        await sender.send()
        # Only a forward would take the new version.
        assert torch.equal(target.weight, before)
        for value in range(20):
            fill(source, float(value))
            await sender.send()
            await asyncio.sleep(0.02)
        assert await fresh(sender, source, lambda: target.weight) == 20


# -- copies ------------------------------------------------------------------------------------


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module, nn.Module], torch.Tensor]] = {
    "state_dict": lambda model, owner: model.state_dict()["weight"],
    "state_dict of the owner": lambda model, owner: owner.state_dict()["0.weight"],
    "named_parameters": lambda model, owner: dict(model.named_parameters())["weight"],
    "parameters of the owner": lambda model, owner: next(iter(owner.parameters())),
    "buffers of the owner": lambda model, owner: dict(owner.named_buffers())["0.mean"],
    "deepcopy": lambda model, owner: copy.deepcopy(model).weight,
    "deepcopy of the owner": lambda model, owner: copy.deepcopy(owner)[0].mean,
    "copy": lambda model, owner: copy.copy(model).weight,
    "pickle": lambda model, owner: pickle.loads(pickle.dumps(model)).weight,
    "pickle of the owner": lambda model, owner: pickle.loads(pickle.dumps(owner))[0].mean,
    "torch.save": lambda model, owner: saved(model).weight,
    "to": lambda model, owner: model.to(torch.float32).weight,
    "to of the owner": lambda model, owner: owner.float()[0].mean,
}


@contextlib.asynccontextmanager
async def published() -> AsyncIterator[Any]:
    """A model that takes versions in forwards, its owner, a function to send, and the receiver."""
    source, target = Normalizer(), Normalizer()
    owner = nn.Sequential(target, nn.Linear(2, 2))
    async with harness.here(SHM(), target, sender={"model": source}) as (sender, receiver):
        for value in (2.0, 3.0):
            fill(source, value)
            await sender.send()
            target(torch.ones(2))

        def send(value: float) -> None:
            fill(source, value)
            # Naming the version in shared memory is enough for the send.
            assert sender.send_nowait().done()

        yield target, owner, send, receiver


@pytest.mark.parametrize("take", COPIES.values(), ids=COPIES)
async def test_a_copy_has_what_was_sent(take: Any) -> None:
    async with published() as (target, owner, send, _):
        for value in (5.0, 6.0, 7.0):
            send(value)
            assert take(target, owner).tolist() == [value] * 2


PUTS: dict[str, Callable[[Any, nn.Module, Any], object]] = {
    "apply_weights": lambda receiver, model, state: receiver.apply_weights(state),
    "replaced": lambda receiver, model, state: receiver.apply_weights(state, inplace=False),
    "load_state_dict": lambda receiver, model, state: model.load_state_dict(state),
}
"""Ways to put weights into a worker's model that the trainer never sent."""


@pytest.mark.parametrize("put", PUTS.values(), ids=PUTS)
async def test_weights_by_hand_come_after_what_was_sent(put: Any) -> None:
    given = Normalizer()
    fill(given, 9.0)
    async with published() as (target, _, send, receiver):
        for value in (5.0, 6.0, 7.0):
            send(value)
            put(receiver, target, given.state_dict())
            with receiver.reading() as read:
                assert (target.weight.tolist(), read.version) == ([9.0] * 2, 0)


async def test_a_copy_is_a_plain_module() -> None:
    plain = Normalizer()
    async with published() as (target, _, send, receiver):
        pickled = pickle.loads(pickle.dumps(target))
        for copied in (copy.deepcopy(target), copy.copy(target), pickled):
            assert vars(copied).keys() == vars(plain).keys()
        kept = copy.deepcopy(copy.deepcopy(target))
        send(9.0)
        assert kept.state_dict()["weight"].tolist() == [3.0] * 2
        kept.load_state_dict(plain.state_dict())
        await receiver.aclose()
    assert vars(target).keys() == vars(plain).keys()
    assert target.state_dict()["weight"].tolist() in ([3.0] * 2, [9.0] * 2)


async def test_what_a_module_has_in_the_place_of_a_method_stays() -> None:
    source, target = models.linear(), models.linear()
    own = {"weight": torch.ones(1)}
    vars(target)["state_dict"] = lambda: own
    async with harness.here(SHM(), target, sender={"model": source}):
        assert target.state_dict() is own
    assert vars(target)["state_dict"]() is own


async def test_a_module_that_took_over_the_attributes_of_a_guarded_one() -> None:
    source, target, other = models.linear(3.0), models.linear(), models.linear()
    async with harness.here(SHM(), target, sender={"model": source}):
        vars(other).update(vars(target), _parameters=vars(models.linear())["_parameters"])
    async with harness.here(SHM(), other, sender={"model": models.linear(5.0)}):
        assert models.filled(copy.deepcopy(other), 5.0)
        assert set(other.state_dict()["weight"].flatten().tolist()) == {5.0}


async def test_a_module_that_got_a_copy_of_the_attributes_of_a_guarded_one() -> None:
    source, target, other = models.linear(3.0), models.linear(), models.linear()
    async with harness.here(SHM(), target, sender={"model": source}) as (sender, receiver):
        vars(other).update(copy.deepcopy(vars(target)))
        assert set(other.weight.flatten().tolist()) == {3.0}
        with pytest.raises(ReferenceError, match=r"load_state_dict\(\) .*copy the model itself"):
            other.load_state_dict(models.linear(9.0).state_dict())
        await harness.deliver(sender, receiver, 5.0)


class Deep(nn.Linear):
    """Layer that defines its own deep copy."""

    def __deepcopy__(self, memo: Any) -> Any:
        result = nn.Linear(4, 2)
        result.load_state_dict(self.state_dict())
        return result


async def test_a_module_that_says_how_it_is_copied() -> None:
    source, target = models.linear(3.0), Deep(4, 2)
    async with harness.here(SHM(), target, sender={"model": source}):
        copied = copy.deepcopy([target, target])
        assert type(copied[0]) is nn.Linear and copied[0] is copied[1]
        assert models.filled(copied[0], 3.0)


class Updates(nn.Linear):
    """Layer whose copies take over its attributes, and whose pickles do."""

    def __deepcopy__(self, memo: Any) -> Any:
        memo[id(self)] = new = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def __reduce__(self) -> Any:
        return rebuilt, (self.__dict__.copy(), type(self))


class Clones(Updates):
    """Layer whose copies have its attributes, but parameters of their own."""

    def __deepcopy__(self, memo: Any) -> Any:
        memo[id(self)] = new = type(self).__new__(type(self))
        vars(new).update(vars(self), _parameters=copy.deepcopy(self._parameters, memo))
        return new


def rebuilt(table: dict[str, Any], kind: type) -> Any:
    new = kind.__new__(kind)
    new.__dict__.update(table)
    return new


def bounded() -> nn.Module:
    """Return a layer with a parametrization, which gives it a copy function."""
    model = nn.Linear(4, 2)
    parametrize.register_parametrization(model, "bias", nn.Tanh(), unsafe=True)
    return model


COPIED: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "parametrized": (bounded, False),
    "traced": (lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 2))), True),
    "attributes": (lambda: Updates(4, 2), True),
    "shallow": (lambda: Clones(4, 2), True),
}
"""Models that copy their attributes themselves, and ``True`` if pickle can copy them."""


@pytest.mark.parametrize(("build", "pickles"), COPIED.values(), ids=COPIED)
async def test_a_module_that_copies_its_attributes_itself(build: Any, pickles: bool) -> None:
    source, target, plain = build(), build(), vars(copy.deepcopy(build())).keys()
    async with harness.here(SHM(), target, sender={"model": source}) as (sender, receiver):
        copies = [copy.deepcopy(target), copy.deepcopy(nn.Sequential(target))[0]]
        copies += [copy.deepcopy(copies[0])]
        if pickles:
            copies += [pickle.loads(pickle.dumps(target)), saved(target)]
        await harness.deliver(sender, receiver, 3.0)
        own = {name: value + 1 for name, value in target.state_dict().items()}
        for copied in copies:
            assert vars(copied).keys() == plain
            assert next(copied.parameters()) is not next(target.parameters())
            copied.load_state_dict(own)
            assert models.filled(copied, 4.0)
            assert set(copied.state_dict()[next(iter(own))].flatten().tolist()) == {4.0}
            copied(torch.ones(4))
        assert models.holds(receiver, 3.0)
    for copied in copies:
        async with harness.here(SHM(), copied, sender={"model": source}) as (sender, receiver):
            await harness.deliver(sender, receiver, 5.0)
            assert models.filled(copy.deepcopy(copied), 5.0)


class Shared(nn.Linear):
    """Layer that copies of its owner share."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self


async def test_a_module_that_is_its_own_copy_stays_guarded() -> None:
    source, target = models.linear(3.0), Shared(4, 2)
    async with harness.here(SHM(), target, sender={"model": source}) as (sender, _):
        for value in (4.0, 5.0, 6.0):
            target(torch.ones(4))
            assert copy.deepcopy(target) is target
            models.fill(source, value)
            assert (await sender.send()).acked == {0}
            assert set(target.state_dict()["weight"].flatten().tolist()) == {value}


@pytest.mark.parametrize("make", harness.SCHEMES)
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.load_state_dict({k: v + 0 for k, v in model.state_dict().items()}),
        lambda model: model.to(torch.float32),
        lambda model: copy.deepcopy(model),
        lambda model: model.state_dict(),
    ],
    ids=["load_state_dict", "to", "deepcopy", "state_dict"],
)
async def test_copies_and_changes_inside_of_reads_and_beside_them(make: Any, change: Any) -> None:
    """Nothing hangs in a read, in a forward's hook, or in a thread that a hook waits for."""
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        with receiver.reading():
            change(target)

        def elsewhere(*_: Any) -> None:
            thread = threading.Thread(target=change, args=[target])
            thread.start()
            thread.join(harness.PATIENCE)
            assert not thread.is_alive()

        for hook in (lambda *_: change(target) and None, elsewhere):
            handle = target.register_forward_hook(hook)
            await asyncio.to_thread(target, torch.ones(4))
            target(torch.ones(4))
            handle.remove()
        await harness.deliver(sender, receiver, 5.0)


async def test_a_model_takes_the_place_of_weights_and_they_of_a_model() -> None:
    source, model = models.linear(1.0), models.linear()
    kept = {name: torch.zeros_like(each) for name, each in source.state_dict().items()}
    init = {"weights": kept}
    start = {"model": source}
    scheme = SHM(guard="reading")
    async with harness.here(scheme, None, sender=start, receiver=init) as (sender, worker):
        worker.model = model
        assert models.holds(worker, 1.0)
        models.fill(source, 2.0)
        assert (await sender.send()).acked == {0}
        assert models.holds(worker, 2.0)
        worker.weights = kept
        assert (worker.model, worker.weights) == (None, kept)
        models.fill(source, 3.0)
        assert (await sender.send()).acked == {0}
        with worker.reading():
            assert (kept["bias"].tolist(), model.bias.tolist()) == ([3.0, 3.0], [2.0, 2.0])


async def test_a_function_that_loads_weights_keeps_its_place() -> None:
    start, init = {"model": models.linear()}, {"load": lambda weights: list(weights)}
    scheme = SHM(guard="reading")
    async with harness.here(scheme, None, sender=start, receiver=init) as (_, worker):
        for name, value in (("model", models.linear()), ("weights", {"w": torch.zeros(1)})):
            with pytest.raises(aiosync.ConfigError, match="load cannot be provided"):
                setattr(worker, name, value)
            setattr(worker, name, None)
