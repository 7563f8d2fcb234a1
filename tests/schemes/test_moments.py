"""Updates that come while a model is not itself: other tensors in it, transforms around it."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import aiosync
from tests.schemes import _harness as harness

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]
both = pytest.mark.parametrize("make", harness.SCHEMES)


class Slow(nn.Module):
    """Multiplies, and lets something happen in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.bias = nn.Parameter(torch.ones(3))
        self.meanwhile: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        self.meanwhile()
        return y + self.bias


def _fill(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


async def _arrive(sender: Any, receiver: Any, target: Slow, call: Callable[[], Any]) -> Any:
    """Call in a thread what calls the model, and send while it is in there."""
    inside, go_on = threading.Event(), threading.Event()

    def meanwhile() -> None:
        inside.set()
        go_on.wait(harness.PATIENCE)

    target.meanwhile = meanwhile
    calling = asyncio.create_task(asyncio.to_thread(call))
    assert await asyncio.to_thread(inside.wait, harness.PATIENCE)
    sending = asyncio.create_task(sender.send())
    await receiver.wait_staged(2, timeout=harness.PATIENCE)
    go_on.set()
    result = await calling
    report = await sending
    assert report.acked == {0}
    target.meanwhile = lambda: None
    return result


def _swapped(target: Slow, other: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.func.functional_call(target, other, (torch.ones(3),))


@both
@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
async def test_tensors_of_a_functional_call_stay_as_they_are(make, kind) -> None:
    source, target = Slow(), Slow()
    other = {name: kind(torch.full((3,), 5.0)) for name in ("weight", "bias")}
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        _fill(source, 7.0)
        result = await _arrive(sender, receiver, target, lambda: _swapped(target, other))
        assert result.tolist() == [10.0] * 3
        assert all(torch.equal(each, torch.full((3,), 5.0)) for each in other.values())
        assert target(torch.ones(3)).tolist() == [14.0] * 3
        assert receiver.version == 2


@both
async def test_tensors_of_a_to_module_stay_as_they_are_inside_of_reading(make) -> None:
    from tensordict import TensorDict

    source, target = Slow(), Slow()
    other = TensorDict.from_module(copy.deepcopy(target)).detach().clone()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):

        def call() -> torch.Tensor:
            with receiver.reading(), other.to_module(target):
                return target(torch.ones(3))

        _fill(source, 7.0)
        await _arrive(sender, receiver, target, call)
        assert other["weight"].tolist() == [1.0] * 3
        assert target(torch.ones(3)).tolist() == [14.0] * 3


async def test_swapping_all_the_time_beside_updates() -> None:
    source, target = Slow(), Slow()
    other = {name: torch.full((3,), -1.0) for name in ("weight", "bias")}
    stop, seen = threading.Event(), set()

    def swap() -> None:
        while not stop.is_set():
            seen.add(float(_swapped(target, other)[0]))

    make = aiosync.SharedMemWeightSyncScheme
    async with harness.here(make(), target, sender={"model": source}) as (sender, _):
        swapping = asyncio.create_task(asyncio.to_thread(swap))
        try:
            for version in range(2, 60):
                _fill(source, float(version))
                report = await sender.send(timeout=harness.PATIENCE)
                assert report.acked == {0}
        finally:
            stop.set()
            await swapping
        assert seen == {-2.0}
        assert target.weight.tolist() == [59.0] * 3


@both
async def test_tensors_that_were_replaced_for_good_get_the_weights(make) -> None:
    source, target = Slow(), Slow()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        await asyncio.to_thread(target, torch.ones(3))  # another thread reads
        new = target.weight = nn.Parameter(torch.zeros(3))
        _fill(source, 7.0)
        assert (await sender.send()).acked == {0}
        assert new.tolist() == [7.0] * 3

        def replace() -> None:
            target.bias = nn.Parameter(torch.zeros(3))

        _fill(source, 8.0)
        with receiver.reading():
            sending = asyncio.create_task(sender.send())
            await receiver.wait_staged(3, timeout=harness.PATIENCE)
            replace()
        await sending
        assert target.bias.tolist() == target.weight.tolist() == [8.0] * 3


@both
async def test_a_functional_call_of_another_module_says_nothing_of_this_one(make) -> None:
    source, target, other = Slow(), Slow(), Slow()
    inside, go_on = threading.Event(), threading.Event()
    other.meanwhile = lambda: (inside.set(), go_on.wait(harness.PATIENCE))
    tensors = {name: nn.Parameter(torch.ones(3)) for name in ("weight", "bias")}
    async with harness.here(make(), target, sender={"model": source}) as (sender, _):
        calling = asyncio.create_task(asyncio.to_thread(_swapped, other, tensors))
        assert await asyncio.to_thread(inside.wait, harness.PATIENCE)
        new = target.weight = nn.Parameter(torch.zeros(3))
        _fill(source, 7.0)
        await sender.send()
        go_on.set()
        await calling
        assert new.tolist() == [7.0] * 3


TRANSFORMS: dict[str, Callable[[Slow], Any]] = {
    "jacrev": lambda target: torch.func.jacrev(target)(torch.ones(3)),
    "grad": lambda target: torch.func.grad(lambda x: target(x).sum())(torch.ones(3)),
    "vmap": lambda target: torch.vmap(target)(torch.ones(2, 3)),
}


def _fake(target: Slow) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        target(torch.ones(3))


@pytest.mark.parametrize("transform", [*TRANSFORMS.values(), _fake], ids=[*TRANSFORMS, "fake"])
@pytest.mark.parametrize("apply_copy", [False, True], ids=["flip", "copy"])
@both
async def test_updates_wait_for_the_end_of_a_transform(make, apply_copy, transform) -> None:
    source, target = Slow(), Slow()
    async with harness.here(make(apply_copy=apply_copy), target, sender={"model": source}) as (
        sender,
        receiver,
    ):
        _fill(source, 7.0)
        await _arrive(sender, receiver, target, lambda: transform(target))
        assert target(torch.ones(3)).tolist() == [14.0] * 3
        for version in range(3, 8):  # every slot is used again
            _fill(source, float(version))
            await sender.send()
            assert target(torch.ones(3)).tolist() == [2.0 * version] * 3


@both
async def test_a_transform_on_the_loop(make) -> None:
    source, target = Slow(), Slow()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        _fill(source, 7.0)

        async def call() -> None:
            async with receiver.reading():
                sending = asyncio.create_task(sender.send())
                await receiver.wait_staged(2, timeout=harness.PATIENCE)
                waiting.append(sending)
                torch.func.jacrev(target)(torch.ones(3))

        waiting: list[asyncio.Task[Any]] = []
        await call()
        await asyncio.wait_for(waiting[0], harness.PATIENCE)
        assert target.weight.tolist() == [7.0] * 3


@both
async def test_parts_of_a_container_are_guarded(make) -> None:
    source, target = (nn.ModuleDict({"actor": Slow(), "critic": Slow()}) for _ in range(2))
    async with harness.here(make(), target, sender={"model": source}) as (sender, _):
        started = threading.Event()

        def meanwhile() -> None:
            started.set()
            time.sleep(0.2)

        target["actor"].meanwhile = meanwhile
        _fill(source, 7.0)
        calling = asyncio.create_task(asyncio.to_thread(target["actor"], torch.ones(3)))
        assert await asyncio.to_thread(started.wait, harness.PATIENCE)
        await sender.send()
        assert (await calling).tolist() == [2.0] * 3  # the old weights, all of them
        target["actor"].meanwhile = lambda: None
        assert target["actor"](torch.ones(3)).tolist() == [14.0] * 3
    assert not target["actor"]._forward_hooks


class _Generator(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        yield x


class _Coroutine(nn.Module):
    async def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _OwnCall(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@both
@pytest.mark.parametrize("cls", [_Generator, _Coroutine])
@pytest.mark.parametrize("inside", [False, True])
async def test_forwards_that_no_hook_guards_are_refused(make, cls, inside) -> None:
    model = nn.ModuleDict({"actor": cls()}) if inside else cls()
    with pytest.raises(aiosync.ConfigError, match="guard='reading'"):
        make().init_on_receiver(model=model)
    for options in ({"guard": "reading"}, {"apply": "manual"}):
        make(**options).init_on_receiver(model=model)


class _Decorated(_OwnCall):
    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Module.__call__(self, x)


@both
async def test_a_call_that_may_run_no_hooks_is_told(make) -> None:
    with pytest.warns(UserWarning, match="guard='reading'"):
        make().init_on_receiver(model=_OwnCall())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(guard="reading").init_on_receiver(model=_OwnCall())
        make().init_on_receiver(model=_Decorated())


@pytest.mark.slow
@pytest.mark.parametrize("inner", [False, True])
async def test_a_policy_that_was_compiled_and_warm_before(inner) -> None:
    source, target = (nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]) for _ in range(2))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = target

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.policy(x)

    compiled = torch.compile(Outer() if inner else target, backend="eager")
    compiled(torch.ones(4))
    make = aiosync.SharedMemWeightSyncScheme
    async with harness.here(make(), target, sender={"model": source}) as (_, receiver):
        guard = receiver._guard_object
        entered, enter = [], guard.enter
        guard.enter = lambda *args: (entered.append(args), enter(*args))
        compiled(torch.ones(4))
        assert entered
    torch._dynamo.reset()


# -- reads that go on ----------------------------------------------------------------------------


async def _longest_pause(stop: asyncio.Event) -> float:
    longest, last = 0.0, time.monotonic()
    while not stop.is_set():
        await asyncio.sleep(0.005)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


@both
async def test_the_loop_goes_on_while_closing_waits_for_a_forward(make) -> None:
    source, target = Slow(), Slow()
    async with harness.here(make(), target, sender={"model": source}) as (_, receiver):
        inside, go_on = threading.Event(), threading.Event()
        target.meanwhile = lambda: (inside.set(), go_on.wait(harness.PATIENCE))
        calling = asyncio.create_task(asyncio.to_thread(target, torch.ones(3)))
        assert await asyncio.to_thread(inside.wait, harness.PATIENCE)
        stop = asyncio.Event()
        ticking = asyncio.create_task(_longest_pause(stop))
        started = time.monotonic()
        await receiver.aclose()
        assert time.monotonic() - started < harness.PATIENCE / 2
        stop.set()
        assert await ticking < 0.5
        go_on.set()
        assert (await calling).tolist() == [2.0] * 3
    assert target.weight.tolist() == [1.0] * 3


@both
async def test_weights_by_hand_do_not_hold_the_loop(make) -> None:
    source, target = Slow(), Slow()
    async with harness.here(make(), target, sender={"model": source}) as (_, receiver):
        inside, go_on = threading.Event(), threading.Event()
        target.meanwhile = lambda: (inside.set(), go_on.wait(harness.PATIENCE))
        calling = asyncio.create_task(asyncio.to_thread(target, torch.ones(3)))
        assert await asyncio.to_thread(inside.wait, harness.PATIENCE)
        started = time.monotonic()
        with pytest.raises(aiosync.SyncTimeout, match="call apply_weights"):
            receiver.apply_weights(source.state_dict())
        assert time.monotonic() - started < 1.0
        go_on.set()
        await calling
        receiver.apply_weights(source.state_dict())


@both
async def test_a_model_that_became_lazy_can_be_left(make) -> None:
    source, target = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    async with harness.here(make(), target, sender={"model": source}) as (_, receiver):
        before = target[0].weight.data_ptr()
        target[1] = nn.LazyLinear(2)
        await receiver.aclose()
        assert target[0].weight.data_ptr() != before
        assert torch.equal(target[0].weight, source[0].weight)


@both
@pytest.mark.parametrize("kind", ["default device", "replaced", "transform"])
async def test_a_thread_that_computes_all_the_time_starves_no_update(make, kind) -> None:
    source, target = Slow(), Slow()
    target.meanwhile = lambda: time.sleep(0.02)
    stop = threading.Event()

    def compute() -> None:
        if kind == "default device":
            torch.set_default_device("cpu")
        while not stop.is_set():
            call = torch.func.jacrev(target) if kind == "transform" else target
            call(torch.ones(3))

    async with harness.here(make(), target, sender={"model": source}) as (sender, _):
        thread = threading.Thread(target=compute)
        thread.start()
        try:
            for version in range(2, 7):
                if kind == "replaced":
                    kept = {name: value.clone() for name, value in target.state_dict().items()}
                    target.load_state_dict(kept, assign=True)
                _fill(source, float(version))
                started = time.monotonic()
                await sender.send(timeout=harness.PATIENCE)
                assert time.monotonic() - started < harness.PATIENCE / 10
                assert target.weight.tolist() == [float(version)] * 3
        finally:
            stop.set()
            thread.join()


async def test_closing_beside_a_busy_thread_gives_every_slot_back() -> None:
    source = Slow()
    make = aiosync.SharedMemWeightSyncScheme
    sender = make()
    sender.init_on_sender(model_id="policy", model=source)
    async with sender:
        await sender.connect()
        for _ in range(8):
            target, stop = Slow(), threading.Event()
            target.meanwhile = lambda: time.sleep(0.002)

            def compute(target: Slow = target, stop: threading.Event = stop) -> None:
                while not stop.is_set():
                    target(torch.ones(3))

            receiver = harness.twin(sender)
            receiver.init_on_receiver(model_id="policy", model=target)
            await receiver.connect(timeout=harness.PATIENCE)
            thread = threading.Thread(target=compute)
            thread.start()
            try:
                await sender.send(timeout=harness.PATIENCE)
                started = time.monotonic()
                await receiver.aclose()
                assert time.monotonic() - started < 0.8
            finally:
                stop.set()
                thread.join()
        assert sender._arena.num_slots <= 4


@both
async def test_a_close_that_is_cancelled_has_closed(make) -> None:
    source, target = Slow(), Slow()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        inside, go_on = threading.Event(), threading.Event()
        target.meanwhile = lambda: (inside.set(), go_on.wait(harness.PATIENCE))
        calling = asyncio.create_task(asyncio.to_thread(target, torch.ones(3)))
        assert await asyncio.to_thread(inside.wait, harness.PATIENCE)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await receiver.aclose()
        with pytest.raises(aiosync.PartialSyncError):
            await sender.send(timeout=harness.PATIENCE)
        go_on.set()
        await calling
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "aiosync receiver"]
