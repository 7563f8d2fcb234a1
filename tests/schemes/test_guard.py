"""The guard between forwards and updates: models that generate, are compiled or transformed.

The contract suite tests the promises of every scheme: forwards, reads, updates that wait.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import functools
import importlib
import pickle
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import aiosync
from aiosync.schemes import Guard
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.one_loop
both = pytest.mark.parametrize("make", harness.SCHEMES)
SHM = aiosync.SharedMemWeightSyncScheme
X = torch.ones(4)


class Policy(nn.Module):
    """Model that computes with one layer and then with another, in several methods."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)
        models.fill(self, value)
        self.between: Callable[[], object] = list

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        self.between()
        return torch.cat([first, self.second(x)], -1)

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)

    @torch.no_grad()
    async def ponder_lazily(self, x: torch.Tensor) -> torch.Tensor:
        return await self.ponder(x)

    async def ponder(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        await asyncio.sleep(0.02)
        return torch.cat([first, self.second(x)], -1)

    def stream(self, x: torch.Tensor) -> Any:
        yield self.first(x)


def version(result: torch.Tensor) -> float:
    """Return the one version that both layers of a policy had."""
    [found] = set(result.flatten().tolist())
    return found / 5


@contextlib.asynccontextmanager
async def acting(make: Any, model: Any, **init: Any) -> AsyncIterator[tuple[Any, Any]]:
    source = {"model": Policy(1.0)}
    async with harness.here(make(), model, sender=source, receiver=init) as pair:
        yield pair


async def sent_while(sender: Any, call: Any) -> Any:
    """Return the result of a call in the middle of which an update is sent."""
    sending = asyncio.create_task(sender.send(Policy(sender.version + 1.0)))
    found = await call()
    await sending
    return found


# -- forwards that are entered elsewhere than at the model -----------------------------------------


class Generating(nn.Module):
    """Model with a ``generate()``, which calls a part of the model and then the model."""

    config = SimpleNamespace(is_encoder_decoder=True)

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.guard = guard
        self.encoder = nn.Identity()
        self.guarded: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.guarded.append(not self.guard.submit(lambda: None))
        return x

    def get_encoder(self) -> nn.Module:
        return self.encoder

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(self.get_encoder()(x))


class Around(nn.Module):
    """Adapter around a model, whose ``generate()`` is that of the model inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.generate = model.generate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


@pytest.mark.parametrize(
    "wrap", [lambda model: model, Around, functools.partial(torch.compile, backend="eager")]
)
def test_what_generates_inside_of_a_wrapper_is_guarded(wrap: Any) -> None:
    guard = Guard()
    model = Generating(guard)
    module = wrap(model)
    guard.install(module)
    module.generate(X)
    guard.uninstall()
    module.generate(X)
    assert (model.guarded[0], model.guarded[-1]) == (True, False)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "jacrev": lambda target: torch.func.jacrev(target)(X),
    "grad": lambda target: torch.func.grad(lambda x: target(x).sum())(X),
    "vmap": lambda target: torch.vmap(target)(torch.ones(2, 4)),
    "trace": lambda target: make_fx(target)(X),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@both
async def test_updates_wait_for_the_end_of_a_transform(make: Any, transform: Any) -> None:
    target = Policy()
    async with acting(make, target) as (sender, receiver):

        def call(wait: Callable[..., None]) -> None:
            target.between = wait
            transform(target)

        with harness.read_elsewhere(receiver, call):
            handle = await harness.stage(sender, receiver, Policy(2.0))
        target.between = list
        assert (await handle).acked == {0}
        # Enough sends follow that every slot is used again.
        for number in range(3, 8):
            await sender.send(Policy(number))
            assert version(target(X)) == number
        # An update also waits for a transform on the loop.
        async with receiver.reading():
            handle = await harness.stage(sender, receiver)
            transform(target)
        assert (await handle).acked == {0}


class Streaming(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        yield x


# torch warns that torch.compile should be used instead of torch.jit.
@pytest.mark.filterwarnings("ignore")
@both
@pytest.mark.parametrize(
    "build",
    [
        Streaming,
        lambda: nn.ModuleDict({"actor": Streaming()}),
        lambda: torch.jit.script(models.linear()),
    ],
)
def test_forwards_that_no_hook_guards_are_refused(make: Any, build: Any) -> None:
    with pytest.raises(aiosync.ConfigError, match="guard='reading'"):
        make().init_on_receiver(model=build())
    for options in ({"guard": "reading"}, {"apply": "manual"}):
        make(**options).init_on_receiver(model=build())


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("inner", [False, True])
async def test_a_policy_that_was_compiled_and_warm_before(inner: bool) -> None:
    target, receivers, refused = Policy(), list[Any](), list[Exception]()

    @torch.compiler.disable
    def change() -> None:
        for each in receivers:
            with pytest.raises(aiosync.LocalProtocolError) as caught:
                each.apply_weights(Policy().state_dict())
            refused.append(caught.value)

    target.between = change
    compiled = torch.compile(nn.Sequential(target) if inner else target, backend="eager")
    with torch.no_grad():
        compiled(X)
        async with acting(SHM, target) as (_, receiver):
            receivers.append(receiver)
            compiled(X)
            assert refused, "nothing guards what was compiled before"
    torch.compiler.reset()


@pytest.mark.asyncio
@both
async def test_closing_beside_a_forward_that_does_not_end(make: Any) -> None:
    target, results = Policy(), list[float]()
    async with acting(make, target) as (sender, receiver):

        def forward(wait: Callable[..., None]) -> None:
            target.between = wait
            results.append(version(target(X)))

        with harness.read_elsewhere(receiver, forward):
            with pytest.raises(aiosync.SyncTimeout, match="call apply_weights"):
                receiver.apply_weights(Policy(3.0).state_dict())
            async with asyncio.timeout(harness.PATIENCE / 2):
                await receiver.aclose()
        assert results == [1.0]
        assert (await sender.send(Policy(2.0), timeout=harness.PATIENCE)).left == {0}
    assert version(target(X)) == 1.0


@pytest.mark.asyncio
@both
async def test_two_calls_close_a_worker_beside_a_forward(make: Any) -> None:
    """The second one waits for the first, and lets it say that the worker leaves."""
    target = Policy()
    async with acting(make, target) as (sender, receiver):

        def forward(wait: Callable[..., None]) -> None:
            target.between = wait
            target(X)

        with harness.read_elsewhere(receiver, forward):
            began = time.monotonic()
            closing = [asyncio.create_task(receiver.aclose()) for _ in range(3)]
            await asyncio.sleep(0.05)
            # A call that is cancelled leaves the others to close the worker.
            closing[1].cancel()
            await asyncio.wait(closing, timeout=0.05)
            # The first call waits for the forward for one second.
            late = time.monotonic() - began > 0.9
            assert late or [each.done() for each in closing] == [False, True, False]
        await asyncio.gather(closing[0], closing[2])
        assert (await sender.send(Policy(2.0), timeout=harness.PATIENCE)).left == {0}


class Stateful(nn.Module):
    """Model that calls a function between weights and extra state, in updates and forwards."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer, self.state = nn.Linear(1, 1), value
        models.fill(self, value)
        self.between: Callable[[], object] = list
        self.arriving: Callable[[], object] = list

    def get_extra_state(self) -> float:
        return self.state

    def set_extra_state(self, state: float) -> None:
        self.arriving()
        self.state = state

    def forward(self) -> tuple[float, float]:
        weight = self.layer.weight.item()
        self.between()
        return weight, self.state


@pytest.mark.asyncio
@both
async def test_a_model_is_guarded_from_when_it_is_chosen_while_another_gets_weights(
    make: Any,
) -> None:
    old, first, second = Stateful(-1.0), Stateful(-1.0), Stateful(-1.0)
    entered, leave, found = threading.Event(), threading.Event(), list[Any]()
    async with harness.here(make(), old, sender={"model": Stateful(1.0)}) as (_, receiver):

        def wait() -> None:
            entered.set()
            leave.wait(harness.PATIENCE)

        def look() -> None:
            threading.Thread(target=lambda: found.append(second())).start()
            entered.wait(0.1)

        old.between = wait
        first.arriving = functools.partial(setattr, receiver, "model", second)
        second.arriving = look
        forward = asyncio.ensure_future(asyncio.to_thread(old))
        await harness.until(entered.is_set)
        entered.clear()
        receiver.model = first
        leave.set()
        assert await forward == (1.0, 1.0)
        await harness.until(lambda: bool(found))
        assert found == [(1.0, 1.0)]


@pytest.mark.asyncio
@both
async def test_a_model_that_the_old_one_cannot_fill_is_refused_or_logged(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A copied version is only in the old model, whose dtype may change before the read ends."""
    old, other, source = models.linear(), models.linear(), models.linear()
    pair = harness.here(make(apply_copy=True), old, sender={"model": source})
    async with pair as (sender, receiver):
        with harness.read_elsewhere(receiver):
            old.to(torch.bfloat16)
            with pytest.raises(aiosync.ApplyError, match="got bfloat16"):
                receiver.model = other
            assert (receiver.model, receiver.version) == (old, 1)
            old.to(torch.float32)
            receiver.model = other
            old.to(torch.bfloat16)
        await harness.until(lambda: receiver.version == 0)
        assert "version 0 until the next update: " in caplog.text
        assert (await sender.send()).acked == {0}
        assert receiver.version == 2


class Owner:
    """Object that has a model."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy


class Generates(Policy):
    """Model with a forward that no hook can guard."""

    forward = Policy.stream


class Mute(Policy):
    """Model without one of the methods."""

    act = None  # type: ignore[assignment]


@pytest.mark.asyncio
@both
@pytest.mark.parametrize("named", [False, True], ids=["forward", "methods"])
async def test_a_model_of_a_context_that_cannot_be_guarded_is_refused(
    make: Any, named: bool
) -> None:
    """The model before it stays guarded, whether it was assigned or found in the context."""
    target = Policy()
    one, wrong = Owner(target), Owner(Mute() if named else Generates())
    text = "no such function" if named else "cannot tell the end of"
    init = {"context": one, "model": None, "methods": ("act",) if named else None}
    source = {"model": Policy(1.0)}
    async with harness.here(make(), None, sender=source, receiver=init) as (sender, receiver):

        def forward(wait: Callable[..., None]) -> None:
            target.between = wait
            (target.act if named else target)(X)

        def check_is_guarded() -> None:
            with harness.read_elsewhere(receiver, forward):
                with pytest.raises(aiosync.SyncTimeout):
                    receiver.apply_weights(Policy(3.0).state_dict())
            target.between = list

        with pytest.raises(aiosync.ConfigError, match=text):
            receiver.context = wrong
        assert (receiver.context, receiver.model) == (one, target)
        check_is_guarded()
        one.policy = wrong.policy
        with pytest.raises(aiosync.PartialSyncError, match=text):
            await sender.send(Policy(2.0))
        check_is_guarded()
        one.policy = target
        assert (await sender.send(Policy(3.0))).acked == {0}
        assert version(target(X)) == 3.0


# -- other methods of a model ------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("make", harness.ANSWERING)
@pytest.mark.parametrize("how", ["methods", "guarded"])
async def test_named_methods_see_one_version_each(make: Any, how: str) -> None:
    model, names = Policy(), ("act", "ponder", "ponder_lazily")
    options = {"guard": "forward"} if make is harness.AnsweringScheme else {}
    init = {"methods": names} if how == "methods" else {}
    async with acting(functools.partial(make, **options), model, **init) as (sender, receiver):
        act, *ponder = (getattr(model, name) for name in names)
        if how == "guarded":
            act, *ponder = map(receiver.guarded, (act, *ponder))
        model.between = lambda: time.sleep(0.02)
        for _ in range(5):
            for each in (functools.partial(asyncio.to_thread, act), *ponder):
                version(await sent_while(sender, functools.partial(each, X)))
            # Here the call is inside another read.
            with receiver.reading():
                version(act(X))
        model.between = list
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for each in copies:
        models.fill(each, 7.0)
        assert version(each.act(X)) == version(each(X)) == 7.0 != version(model.act(X))
    assert type(model) is Policy


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["ponder", "ponder_lazily"])
async def test_a_guarded_coroutine_that_is_cancelled_before_its_read_is_closed(name: str) -> None:
    act = SHM().guarded(getattr(Policy(), name))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        task = asyncio.create_task(act(X))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
    assert not caught


@pytest.mark.asyncio
async def test_methods_of_a_compiled_model_and_of_the_next_one() -> None:
    model, other = Policy(), Policy()
    compiled: Any = torch.compile(model, backend="eager")
    model.between = other.between = lambda: time.sleep(0.02)
    make = functools.partial(harness.AnsweringScheme, guard="forward")
    async with acting(make, compiled, methods=["act"]) as (sender, worker):
        for each in (compiled, other):
            worker.model = each
            for _ in range(3):
                call = functools.partial(asyncio.to_thread, each.act, X)
                version(await sent_while(sender, call))
        assert type(model) is Policy
    assert type(other) is Policy


@pytest.mark.parametrize(
    ("methods", "text"),
    [
        ("act", "list of names"),
        (["fly"], "no such function"),
        (["stream"], "generator"),
        (["first"], "is a module in the model"),
    ],
)
def test_methods_that_cannot_be_guarded_are_refused(methods: Any, text: str) -> None:
    with pytest.raises(aiosync.ConfigError, match=text):
        SHM().init_on_receiver(model=Policy(), methods=methods)


def test_what_is_guarded_is_a_method_a_coroutine_function_and_no_generator() -> None:
    scheme = SHM()

    class Runner:
        @scheme.guarded
        def run(self, x: int) -> tuple[object, int]:
            return self, x

    runner = Runner()
    assert runner.run(3) == (runner, 3)
    assert asyncio.iscoroutinefunction(scheme.guarded(Policy().ponder))
    with pytest.raises(aiosync.ConfigError, match="is a generator"):
        scheme.guarded(lambda: (x for x in "ab"))()
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        futures = concurrent.futures.Future[int](), asyncio.Future[int](loop=loop)
    for future in futures:
        with pytest.raises(aiosync.ConfigError, match="returned a Future, whose work"):
            scheme.guarded(lambda future=future: future)()
    with pytest.raises(aiosync.ConfigError, match="no such function"):
        scheme.guarded(3)  # type: ignore[arg-type]


@pytest.mark.asyncio
@both
async def test_a_child_outside_of_every_read_is_warned_of_once(make: Any) -> None:
    """The hooks that look for such calls go then, or after a while: they slow no forward down."""
    # An optimizer loads the compiler, as it does in most programs.
    torch.optim.Adam([torch.zeros(1)])
    importlib.import_module("torch._dynamo.utils").counters.clear()

    def is_looked_at(model: Policy) -> bool:
        return bool(vars(model.first)["_forward_pre_hooks"])

    model, other = Policy(), Policy()
    async with acting(make, model) as (_, receiver):
        assert is_looked_at(model)
        model(X)
        with receiver.reading():
            model.act(X)
        with pytest.warns(UserWarning, match=r"Linear of the Policy.*methods=\[.*guarded"):
            model.act(X)
        # A second warning would be an error here.
        model.act(X)
        assert not is_looked_at(model)
        receiver.model = other
        assert is_looked_at(other)
        for _ in range(500):
            other(X)
        assert not is_looked_at(other)


@pytest.mark.asyncio
@both
async def test_tasks_that_a_block_started_let_updates_in_once_it_has_ended(make: Any) -> None:
    """Their reads overlap without a gap, so an update needs a turn of its own."""
    model, stop = models.linear(), asyncio.Event()
    source = models.linear()

    async def read(delay: float) -> None:
        await asyncio.sleep(delay)
        while not stop.is_set():
            async with receiver.reading():
                await asyncio.sleep(0.02)

    pair = harness.here(make(timeout=PATIENCE), model, sender={"model": source})
    async with pair as (sender, receiver), asyncio.TaskGroup() as tasks:
        async with receiver.reading():
            for delay in (0.0, 0.01):
                tasks.create_task(read(delay))
        await asyncio.sleep(0.05)
        for value in (2.0, 3.0, 4.0):
            models.fill(source, value)
            await sender.send()
            await until(lambda value=value: models.holds(receiver, value))
        stop.set()


class Part(nn.Module):
    """Part of a model, with a forward that says which values it computed with, first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = models.linear(), models.linear()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def forward(self) -> tuple[float, float]:
        first = self.first.weight[0, 0].item()
        self.begun.set()
        assert self.go_on.wait(PATIENCE)
        return first, self.second.weight[0, 0].item()


@pytest.mark.asyncio
@both
async def test_a_part_that_took_the_place_of_another_is_guarded(make: Any) -> None:
    """The model has no forward, so that those of its parts are reads, from the next update on."""
    source, model = (nn.ModuleDict({"actor": Part()}) for _ in "ab")
    scheme = make(timeout=PATIENCE)
    async with harness.here(scheme, model, sender={"model": source}) as (sender, receiver):
        model["actor"] = Part()
        models.fill(source, 2.0)
        await sender.send()
        assert models.holds(receiver, 2.0)
        call = asyncio.create_task(asyncio.to_thread(model["actor"]))
        await until(model["actor"].begun.is_set)
        models.fill(source, 3.0)
        handle = sender.send_nowait()
        # Long enough for an update that nothing holds back.
        await asyncio.sleep(0.1)
        model["actor"].go_on.set()
        assert await call == (2.0, 2.0)
        await handle


class Waiting(Owner):
    """Owner that keeps a thread that looks for its model, until it may go on."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.waits = model, False
        self.entered, self.go_on = threading.Event(), threading.Event()

    @property
    def policy(self) -> nn.Module:  # type: ignore[override]
        if self.waits and threading.current_thread() is not threading.main_thread():
            self.entered.set()
            assert self.go_on.wait(PATIENCE)
        return self.model


@pytest.mark.asyncio
@both
@pytest.mark.parametrize("moves", [False, True])
async def test_an_update_does_not_wait_for_that_of_another_scheme(make: Any, moves: bool) -> None:
    """Two schemes update one model without a forward, each in the thread of a read of its own."""
    source, model, next_model = (nn.ModuleDict({"actor": models.linear()}) for _ in "abc")
    owners = Waiting(model), Waiting(model)
    leaves = threading.Event(), threading.Event()
    start = {"model": source}

    def read(receiver: Any, leave: threading.Event, inside: asyncio.Event) -> None:
        with receiver.reading():
            loop.call_soon_threadsafe(inside.set)
            assert leave.wait(PATIENCE)

    loop = asyncio.get_running_loop()
    ends = [
        harness.here(make(), None, sender=start, receiver={"model": None, "context": owner})
        for owner in owners
    ]
    async with ends[0] as first, ends[1] as second:
        inside = asyncio.Event(), asyncio.Event()
        pairs, tasks = (first, second), list[Any]()
        for (_, receiver), *events in zip(pairs, leaves, inside, strict=True):
            tasks.append(asyncio.create_task(asyncio.to_thread(read, receiver, *events)))
            await events[1].wait()
        handles = [await harness.stage(*pair) for pair in pairs]
        owners[1].waits = True
        leaves[1].set()
        await until(owners[1].entered.is_set)
        if moves:
            owners[0].model = next_model
        leaves[0].set()
        await asyncio.wait(tasks[:1], timeout=PATIENCE)
        ended = [task.done() for task in tasks]
        owners[1].go_on.set()
        await asyncio.gather(*tasks, *handles)
        assert ended == [True, False]


@pytest.mark.asyncio
@both
@pytest.mark.parametrize("options", [{}, {"prepend": True}, {"always_call": True}])
async def test_hooks_that_were_registered_later_are_inside_the_read(
    make: Any, options: dict[str, bool]
) -> None:
    target, refused = Policy(), list[str]()
    async with acting(make, target) as (sender, receiver):

        def look(*_: Any) -> None:
            with pytest.raises(aiosync.LocalProtocolError) as caught:
                receiver.apply_weights(Policy().state_dict())
            refused.append(str(caught.value))

        for number in range(2, 5):
            handles = [target.register_forward_hook(look, **options) for _ in "ab"]
            for _ in range(2):
                assert version(target(X)) == receiver.last_read.version == number - 1
            for handle in handles:
                handle.remove()
            assert len(refused) == 4 * (number - 1)
            # The read has ended.
            assert (await sender.send(Policy(number))).acked == {0}
