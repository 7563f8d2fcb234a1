"""The guard between forwards and updates, also while a model is not itself."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import importlib
import pickle
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import aiosync
from aiosync.schemes import Guard, Reading
from tests.schemes import _harness as harness
from tests.schemes import _models as models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.one_loop


def test_a_read_ends_on_whatever_thread_its_block_ends() -> None:
    """A thread pool steps a generator wherever there is room."""
    guard = Guard()
    applied: list[int] = []

    def stream():
        with Reading(guard):
            yield

    steps = stream()
    with ThreadPoolExecutor(1) as beginning, ThreadPoolExecutor(1) as ending:
        beginning.submit(next, steps).result()
        assert not guard.submit(lambda: applied.append(1))
        ending.submit(next, steps, None).result()
    assert applied == [1]
    assert not guard.reading_here
    assert guard.is_free()


def test_a_model_is_guarded_once_what_was_in_the_way_has_gone(monkeypatch) -> None:
    """Forgetting compiled code may take seconds, in which Ctrl-C comes, and may fail."""

    def fails() -> None:
        raise KeyboardInterrupt

    class Model(nn.Module):
        def forward(self) -> bool:
            return guard.is_read

    guard, model = Guard(), Model()
    monkeypatch.setitem(sys.modules, "torch._dynamo", SimpleNamespace())
    monkeypatch.setattr(torch.compiler, "reset", fails)
    with pytest.raises(KeyboardInterrupt):
        guard.install(model)
    assert not model()
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    guard.install(model)
    assert model()
    guard.uninstall()
    assert not model()


class _Model(nn.Module):
    """Calls itself, and a part before it, as models with a ``generate()`` do."""

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


class _Around(nn.Module):
    """As an adapter around a model: what generates is the model inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base = nn.ModuleDict({"model": model})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base["model"](x)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.base["model"].generate(x)


@pytest.mark.parametrize("kind", ["plain", "around", "compiled"])
def test_what_generates_inside_of_a_wrapper_is_guarded(kind: str) -> None:
    guard = Guard()
    module: Any
    module = model = _Model(guard)
    if kind != "plain":
        module = _Around(model) if kind == "around" else torch.compile(model, backend="eager")
    guard.install(module)
    module.generate(torch.zeros(4))
    guard.uninstall()
    module.generate(torch.zeros(4))
    assert (model.guarded[0], model.guarded[-1]) == (True, False)


# -- other tensors in a model, and transforms around it -------------------------------------------


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


async def _arrive(sender: Any, receiver: Any, target: Slow, call: Callable[[], Any]) -> Any:
    """Call in a thread what calls the model, and send while it is in there."""
    inside, go_on = threading.Event(), threading.Event()
    target.meanwhile = lambda: (inside.set(), go_on.wait(harness.PATIENCE))
    calling = asyncio.create_task(asyncio.to_thread(call))
    assert await asyncio.to_thread(inside.wait, harness.PATIENCE)
    handle = await harness.stage(sender, receiver)
    go_on.set()
    result = await calling
    assert (await handle).acked == {0}
    target.meanwhile = lambda: None
    return result


@pytest.mark.asyncio
@both
@pytest.mark.parametrize("way", ["functional_call", "to_module"])
async def test_other_tensors_in_a_model_stay_as_they_are_inside_of_reading(make, way) -> None:
    source, target = Slow(), Slow()
    other = {name: nn.Parameter(torch.full((3,), 5.0)) for name in ("weight", "bias")}
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):

        def call() -> torch.Tensor:
            with receiver.reading():
                if way == "functional_call":
                    return torch.func.functional_call(target, other, (torch.ones(3),))
                with TensorDict(other).to_module(target):
                    return target(torch.ones(3))

        models.fill(source, 7.0)
        result = await _arrive(sender, receiver, target, call)
        assert result.tolist() == [10.0] * 3
        assert all(torch.equal(each, torch.full((3,), 5.0)) for each in other.values())
        assert target(torch.ones(3)).tolist() == [14.0] * 3


TRANSFORMS: dict[str, Callable[[Slow], Any]] = {
    "jacrev": lambda target: torch.func.jacrev(target)(torch.ones(3)),
    "grad": lambda target: torch.func.grad(lambda x: target(x).sum())(torch.ones(3)),
    "vmap": lambda target: torch.vmap(target)(torch.ones(2, 3)),
    "trace": lambda target: make_fx(target)(torch.ones(3)),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("apply_copy", [False, True], ids=["flip", "copy"])
@both
async def test_updates_wait_for_the_end_of_a_transform(make, apply_copy, transform) -> None:
    source, target = Slow(), Slow()
    ends = harness.here(make(apply_copy=apply_copy), target, sender={"model": source})
    async with ends as (sender, receiver):
        models.fill(source, 7.0)
        await _arrive(sender, receiver, target, lambda: transform(target))
        assert target(torch.ones(3)).tolist() == [14.0] * 3
        for version in range(3, 8):  # every slot is used again
            await harness.deliver(sender, receiver, float(version))
            assert target(torch.ones(3)).tolist() == [2.0 * version] * 3
        async with receiver.reading():  # and on the loop
            handle = await harness.stage(sender, receiver)
            transform(target)
        assert (await handle).acked == {0}


class _Generator(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        yield x


@pytest.mark.asyncio
@both
@pytest.mark.parametrize("inside", [False, True])
async def test_forwards_that_no_hook_guards_are_refused(make, inside) -> None:
    model = nn.ModuleDict({"actor": _Generator()}) if inside else _Generator()
    with pytest.raises(aiosync.ConfigError, match="guard='reading'"):
        make().init_on_receiver(model=model)
    for options in ({"guard": "reading"}, {"apply": "manual"}):
        make(**options).init_on_receiver(model=model)


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("inner", [False, True])
async def test_a_policy_that_was_compiled_and_warm_before(inner) -> None:
    source, target = Slow(), Slow()
    receivers, refused = [], []

    @torch.compiler.disable
    def change() -> None:
        for each in receivers:
            with pytest.raises(aiosync.LocalProtocolError) as caught:
                each.apply_weights(source.state_dict())
            refused.append(caught.value)

    target.meanwhile = change
    compiled = torch.compile(nn.Sequential(target) if inner else target, backend="eager")
    make = aiosync.SharedMemWeightSyncScheme
    with torch.no_grad():
        compiled(torch.ones(3))
        async with harness.here(make(), target, sender={"model": source}) as (_, receiver):
            receivers.append(receiver)
            compiled(torch.ones(3))
            assert refused, "nothing guards what was compiled before"
    torch.compiler.reset()


async def _longest_pause(stop: asyncio.Event) -> float:
    longest, last = 0.0, time.monotonic()
    while not stop.is_set():
        await asyncio.sleep(0.005)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


@pytest.mark.asyncio
@both
@pytest.mark.parametrize("cancelled", [False, True])
async def test_the_loop_goes_on_while_closing_waits_for_a_forward(make, cancelled) -> None:
    source, target = Slow(), Slow()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):

        def forward(wait: Callable[[], None]) -> None:
            target.meanwhile = wait
            results.append(target(torch.ones(3)).tolist())

        results: list[list[float]] = []
        stop = asyncio.Event()
        with harness.read_elsewhere(receiver, forward):
            with pytest.raises(aiosync.SyncTimeout, match="call apply_weights"):
                receiver.apply_weights(source.state_dict())  # nor does this wait for long
            ticking = asyncio.create_task(_longest_pause(stop))
            limit = 0.1 if cancelled else harness.PATIENCE / 2
            with pytest.raises(TimeoutError) if cancelled else contextlib.nullcontext():
                async with asyncio.timeout(limit):
                    await receiver.aclose()
            stop.set()
            assert await ticking < 0.5
        assert results == [[2.0] * 3]
        if cancelled:  # it had no time to say that it leaves
            with pytest.raises(aiosync.PartialSyncError):
                await sender.send(timeout=harness.PATIENCE)
        else:
            assert (await sender.send(timeout=harness.PATIENCE)).left == {0}
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "aiosync receiver"]
    assert target.weight.tolist() == [1.0] * 3


@contextlib.contextmanager
def computing(call: Callable[[], object]) -> Iterator[None]:
    """A thread calls meanwhile, again and again."""
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            call()

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.asyncio
@both
@pytest.mark.parametrize("kind", ["default device", "replaced", "transform"])
async def test_a_thread_that_computes_all_the_time_starves_no_update(make, kind) -> None:
    source, target = Slow(), Slow()
    target.meanwhile = lambda: time.sleep(0.02)

    def compute() -> None:
        if kind == "default device":
            torch.set_default_device("cpu")
        call = torch.func.jacrev(target) if kind == "transform" else target
        call(torch.ones(3))

    ends = harness.here(make(), target, sender={"model": source})
    async with ends as (sender, receiver):
        with computing(compute):
            for version in range(2, 7):
                if kind == "replaced":
                    kept = {name: value.clone() for name, value in target.state_dict().items()}
                    target.load_state_dict(kept, assign=True)
                started = time.monotonic()
                models.fill(source, float(version))
                assert (await sender.send()).acked == {0}
                await receiver.wait_for_version(version, timeout=harness.PATIENCE)
                assert time.monotonic() - started < harness.PATIENCE / 10
                assert models.filled(target, float(version))


# -- other methods of a model ------------------------------------------------------------------


class _Policy(nn.Module):
    """Computes in methods beside ``forward()``; says whether an update could come in between."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)
        models.fill(self, value)
        self.between: Any = list

    def forward(self, x: torch.Tensor) -> tuple[float, float]:
        first = self.first(x).sum().item()
        self.between()
        return first, self.second(x).sum().item()

    def act(self, x: torch.Tensor) -> tuple[float, float]:
        return self.forward(x)

    @torch.no_grad()
    async def ponder_lazily(self, x: torch.Tensor) -> tuple[float, float]:
        return await self.ponder(x)

    async def ponder(self, x: torch.Tensor) -> tuple[float, float]:
        first = self.first(x).sum().item()
        await asyncio.sleep(0.02)
        return first, self.second(x).sum().item()

    def stream(self, x: torch.Tensor) -> Any:
        yield self.first(x)


def _looks_at(model: _Policy) -> bool:
    return bool(vars(model.first)["_forward_pre_hooks"])


@contextlib.asynccontextmanager
async def _acting(make: Any, model: Any, **init: Any) -> Any:
    source = {"model": _Policy(1.0)}
    async with harness.here(make(), model, sender=source, receiver=init) as pair:
        yield pair


async def _sent_while(sender: Any, call: Any) -> Any:
    """What a call finds that an update meets in the middle."""
    sending = asyncio.create_task(sender.send(_Policy(sender.version + 1.0)))
    found = await call()
    await sending
    return found


@pytest.mark.asyncio
@pytest.mark.parametrize("make", harness.ANSWERING)
@pytest.mark.parametrize("how", ["methods", "guarded"])
async def test_named_methods_see_one_version_each(make: Any, how: str) -> None:
    model = _Policy()
    options = {"guard": "forward"} if make is harness.AnsweringScheme else {}
    names = ("act", "ponder", "ponder_lazily")
    init = {"methods": names} if how == "methods" else {}
    async with _acting(lambda: make(**options), model, **init) as (sender, receiver):
        act, *ponder = (getattr(model, name) for name in names)
        if how == "guarded":
            act, *ponder = map(receiver.guarded, (act, *ponder))
            ponder.extend(map(receiver.guarded, tuple(ponder)))
        model.between = lambda: time.sleep(0.02)
        for _ in range(5):
            calls = [functools.partial(asyncio.to_thread, act), *ponder]
            for call in (functools.partial(each, torch.ones(4)) for each in calls):
                first, second = await _sent_while(sender, call)
                assert first == second
            with receiver.reading():  # nested
                assert len(set(act(torch.ones(4)))) == 1
        model.between = list
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for each in copies:
        models.fill(each, 7.0)
        assert (
            each.act(torch.ones(4))[0]
            == each(torch.ones(4))[0]
            == 70.0
            != model.act(torch.ones(4))[0]
        )
    assert type(model) is _Policy


@pytest.mark.asyncio
async def test_methods_of_a_compiled_model_and_of_the_next_one() -> None:
    model, other = _Policy(), _Policy()
    compiled: Any = torch.compile(model, backend="eager")
    model.between = other.between = lambda: time.sleep(0.02)
    async with _acting(
        lambda: harness.AnsweringScheme(guard="forward"), compiled, methods=["act"]
    ) as (
        sender,
        worker,
    ):
        for each in (compiled, other):
            worker.model = each
            for _ in range(3):
                call = functools.partial(asyncio.to_thread, each.act, torch.ones(4))
                assert len(set(await _sent_while(sender, call))) == 1
        assert type(model) is _Policy
    assert type(other) is _Policy


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
    scheme = aiosync.SharedMemWeightSyncScheme()
    with pytest.raises(aiosync.ConfigError, match=text):
        scheme.init_on_receiver(model=_Policy(), methods=methods)
    with pytest.raises(aiosync.ConfigError, match="no such function"):
        scheme.guarded(3)  # type: ignore[arg-type]


def test_what_is_guarded_is_a_method_a_coroutine_function_and_no_generator() -> None:
    scheme = aiosync.SharedMemWeightSyncScheme()

    class Runner:
        @scheme.guarded
        def run(self, x: int) -> tuple[object, int]:
            return self, x

    runner = Runner()
    assert runner.run(3) == (runner, 3)
    assert asyncio.iscoroutinefunction(scheme.guarded(_Policy().ponder))
    with pytest.raises(aiosync.ConfigError, match="is a generator"):
        scheme.guarded(lambda: (x for x in "ab"))()


@pytest.mark.asyncio
async def test_closing_one_of_two_schemes_leaves_the_guard_of_the_other() -> None:
    model = _Policy()
    make = functools.partial(harness.AnsweringScheme, guard="forward")
    async with _acting(make, model, methods=["act"]) as (sender, _):
        async with _acting(make, model, methods=["act", "ponder"]):
            pass
        model.between = lambda: time.sleep(0.02)
        for _ in range(5):
            call = functools.partial(asyncio.to_thread, model.act, torch.ones(4))
            assert len(set(await _sent_while(sender, call))) == 1
    assert type(model) is _Policy


@pytest.mark.asyncio
async def test_methods_that_are_attributes_of_a_model_stay() -> None:
    model = _Policy()
    model.act = act = functools.partial(_Policy.act, model)  # type: ignore[method-assign]
    make = functools.partial(harness.AnsweringScheme, guard="forward")
    async with _acting(make, model, methods=["act"]) as (sender, _):
        model.between = lambda: time.sleep(0.02)
        for again in range(5):
            if again == 3:
                model.act = act = functools.partial(_Policy.act, model)  # type: ignore[method-assign]
            call = functools.partial(asyncio.to_thread, model.act, torch.ones(4))
            assert len(set(await _sent_while(sender, call))) == 1
    assert model.act is act


@pytest.mark.asyncio
async def test_shallow_copies_and_replicas_compute_with_their_own_weights() -> None:
    model = _Policy()
    make = aiosync.SharedMemWeightSyncScheme
    async with _acting(make, model, methods=["act"]):
        twins = copy.copy(model), object.__new__(type(model))  # as DataParallel makes replicas
        vars(twins[1]).update(vars(model))
        for each in twins:
            vars(each)["_modules"] = {name: nn.Linear(4, 2) for name in ("first", "second")}
            models.fill(each, 7.0)
            assert each.act(torch.ones(4)) == (70.0, 70.0)
    assert type(twins[0]) is _Policy
    assert [each.act(torch.ones(4)) for each in twins] == [(70.0, 70.0)] * 2


@pytest.mark.asyncio
@pytest.mark.slow
async def test_a_compiled_forward_that_calls_a_guarded_method_stays_compiled() -> None:
    model, graphs = _Compilable(), []

    def backend(graph: Any, _example: object) -> Any:
        graphs.append(graph)
        return graph.forward

    async with _acting(aiosync.SharedMemWeightSyncScheme, model, methods=["act"]):
        with torch.no_grad():
            compiled = torch.compile(model, backend=backend)
            assert torch.equal(compiled(torch.ones(4)), model(torch.ones(4)))
        assert graphs
    torch.compiler.reset()


class _Compilable(_Policy):
    def forward(self, x: torch.Tensor) -> Any:
        return self.act(x + 1) * 2

    def act(self, x: torch.Tensor) -> Any:
        return self.second(x) + self.first(x)


@pytest.fixture
def nothing_compiled() -> None:
    torch.optim.Adam([torch.zeros(1)])  # loads the compiler, as most programs do
    importlib.import_module("torch._dynamo.utils").counters.clear()


@pytest.mark.asyncio
@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("make", harness.SCHEMES)
async def test_a_child_outside_of_every_read_is_warned_of_once(make: Any) -> None:
    model = _Policy()
    async with _acting(make, model) as (_, receiver):
        assert _looks_at(model)
        model(torch.ones(4))
        with receiver.reading():
            model.act(torch.ones(4))
        with pytest.warns(UserWarning, match=r"Linear of the _Policy.*methods=\[.*guarded"):
            model.act(torch.ones(4))
        model.act(torch.ones(4))  # warnings are errors here
        assert not _looks_at(model)


@pytest.mark.asyncio
@pytest.mark.usefixtures("nothing_compiled")
async def test_whoever_looks_for_such_children_stops_after_a_while() -> None:
    """So that no forward is slower than without."""
    model, other = _Policy(), _Policy()
    async with _acting(aiosync.SharedMemWeightSyncScheme, model) as (_, receiver):
        for _ in range(500):
            model(torch.ones(4))
        assert not _looks_at(model)
        receiver.model = other
        assert _looks_at(other)
    assert not _looks_at(other)
    async with _acting(lambda: aiosync.SharedMemWeightSyncScheme(apply="manual"), model):
        model.act(torch.ones(4))


@pytest.mark.asyncio
async def test_what_was_compiled_beside_such_a_look_is_not_compiled_anew() -> None:
    model = _Policy()
    async with _acting(aiosync.SharedMemWeightSyncScheme, model):
        compiled = torch.compile(model, backend="eager")
        child = torch.compile(model.first, backend="eager", fullgraph=True)
        config = importlib.import_module("torch._dynamo.config")
        with config.patch(error_on_recompile=True):
            for _ in range(500):
                compiled(torch.ones(4))
                child(torch.ones(4))
                model(torch.ones(4))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                model.act(torch.ones(4))  # the look is over
    torch.compiler.reset()
