"""Models without a forward: their public methods are reads by default."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import pickle
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import aiosync
import aiosync.sync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = pytest.mark.asyncio

SHM, PIPE = aiosync.SharedMemWeightSyncScheme, aiosync.MultiProcessWeightSyncScheme


class Base(nn.Module):
    def score(self) -> tuple[float, float]:
        return self.look()

    def look(self) -> tuple[float, float]:
        raise NotImplementedError


class Agent(Base):
    """Model with two parts and without a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.actor = (nn.Linear(1, 1, bias=False) for _ in "ab")
        self.between: Callable[[], object] = list

    def look(self) -> tuple[float, float]:
        """Return the values that a call computes with, first and last."""
        first = self.network(torch.ones(1)).item()
        self.between()
        return first, self.actor(torch.ones(1)).item()

    async def ponder(self) -> tuple[float, float]:
        return self.look()

    def stream(self) -> Iterator[tuple[float, float]]:
        yield self.look()

    @staticmethod
    def double(x: float) -> float:
        return 2 * x

    @classmethod
    def make(cls) -> Agent:
        return cls()

    @property
    def size(self) -> int:
        return 2


class Stub(Agent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("use look()")


class Slotted(Agent):
    __slots__ = ("extra",)


class WithForward(Agent):
    def forward(self) -> tuple[float, float]:
        return self.look()


class Called(Agent):
    """Agent that is called, and yet has no forward."""

    def __call__(self) -> tuple[float, float]:
        return self.look()


class CalledAround(Agent):
    """Agent whose call uses a part before its forward."""

    def __call__(self) -> tuple[float, float]:
        first = self.network(torch.ones(1)).item()
        self.between()
        return first, super().__call__()

    def forward(self) -> float:
        return self.actor(torch.ones(1)).item()


@contextlib.asynccontextmanager
async def acting(make: Any, agent: nn.Module, **init: Any) -> AsyncIterator[Any]:
    """A connected sender of an agent's weights, and its worker."""
    source, receiver = Agent(), {"methods": None, **init}
    models.fill(source, 1.0)
    scheme = make(timeout=harness.PATIENCE)
    ends = harness.here(scheme, agent, sender={"model": source}, receiver=receiver)
    async with ends as (sender, worker):
        yield sender, worker


async def looks_beside_sends(sender: Any, agent: Agent, call: Callable[[], Any]) -> None:
    """Check that every call sees one version, although updates are sent in its middle."""
    loop = asyncio.get_running_loop()
    for value in range(2, 22):
        models.fill(sender.model, float(value))
        handles: list[Any] = []

        def between(handles: list[Any] = handles) -> None:
            done = threading.Event()
            loop.call_soon_threadsafe(lambda: (handles.append(sender.send_nowait()), done.set()))
            done.wait(harness.PATIENCE)

        agent.between = torch.compiler.disable(between)
        first, last = await asyncio.to_thread(call)
        agent.between = list
        assert first == last
        await handles[0]


@pytest.mark.parametrize("make", [SHM, PIPE])
@pytest.mark.parametrize("kind", [Agent, Stub, Slotted])
async def test_a_call_computes_with_one_version(make: Any, kind: Any) -> None:
    agent = kind()
    async with acting(make, agent) as (sender, _):
        assert isinstance(agent, kind) and agent.size == 2
        assert agent.double(2.0) == 4.0 and type(agent.make()) is not type(None)
        for call in (lambda: agent.look(), lambda: agent.score()):
            await looks_beside_sends(sender, agent, call)
        copies = copy.deepcopy(agent), pickle.loads(pickle.dumps(agent))
        assert all(type(each) is kind for each in copies)
    assert type(agent) is kind


@pytest.mark.parametrize("make", [SHM, PIPE])
@pytest.mark.parametrize("kind", [Called, CalledAround])
async def test_an_agent_that_defines_how_it_is_called(make: Any, kind: Any) -> None:
    agent = kind()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with acting(make, agent) as (sender, _):
            await looks_beside_sends(sender, agent, lambda: agent())
            assert isinstance(copy.deepcopy(agent), kind)
    assert type(agent) is kind


class Cloning(Agent):
    """Agent that makes others of its class, one of them when it is copied."""

    def clone(self) -> Cloning:
        return type(self)()

    def __deepcopy__(self, memo: Any) -> Cloning:
        return self.clone()


@pytest.mark.parametrize("make", [SHM, PIPE])
@pytest.mark.parametrize("methods", [None, ("look",)])
async def test_another_model_of_the_class_is_not_guarded(make: Any, methods: Any) -> None:
    agent = Cloning()
    async with acting(make, agent, methods=methods) as (sender, worker):
        for version, clone in enumerate((type(agent)(), agent.clone(), copy.deepcopy(agent)), 2):
            entered, leave = threading.Event(), threading.Event()
            clone.between = lambda entered=entered, leave=leave: (entered.set(), leave.wait(9))
            running = asyncio.ensure_future(asyncio.to_thread(clone.look))
            await harness.until(entered.is_set)
            await sender.send()
            assert await worker.wait_for_version(version, timeout=harness.PATIENCE) == version
            assert not running.done()
            leave.set()
            await running
            clone.between = list
        await looks_beside_sends(sender, agent, lambda: agent.look())
    assert type(pickle.loads(pickle.dumps(clone))) is Cloning


@pytest.mark.parametrize("make", [SHM, PIPE])
async def test_another_model_of_the_class_can_be_guarded_itself(make: Any) -> None:
    agent = Cloning()
    async with acting(make, agent):
        clone = agent.clone()
        async with acting(make, clone) as (sender, _):
            await looks_beside_sends(sender, clone, lambda: clone.look())
            assert type(pickle.loads(pickle.dumps(clone))) is Cloning
        assert type(clone) is Cloning
    assert type(agent) is Cloning


# The first call compiles the method, which takes long.
@pytest.mark.filterwarnings("ignore:.*kept an update waiting")
async def test_a_compiled_agent_and_a_method_that_was_compiled_before() -> None:
    agent = Agent()
    agent.look = torch.compile(agent.look, backend="eager")  # type: ignore[method-assign]
    async with acting(SHM, torch.compile(agent, backend="eager")) as (sender, _):
        # This first call compiles the method.
        agent.look()
        await looks_beside_sends(sender, agent, lambda: agent.look())
        await looks_beside_sends(sender, agent, lambda: agent.score())


async def test_the_log_names_them_and_methods_chooses(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiosync")
    async with acting(SHM, Agent()):
        [text] = [each.getMessage() for each in caplog.records if "are reads" in each.getMessage()]
    assert "Agent has no forward(), so calls of its methods are reads: look" in text
    assert "score" in text and "double" not in text and "size" not in text
    caplog.clear()
    agent = Agent()
    async with acting(SHM, agent, methods=()):
        assert type(agent) is Agent
    agent = Agent()
    async with acting(SHM, agent, methods=["score"]) as (sender, _):
        await looks_beside_sends(sender, agent, lambda: agent.score())
    assert not [each for each in caplog.records if "are reads" in each.getMessage()]


async def test_what_goes_on_after_the_call_is_warned_of_once() -> None:
    agent = Agent()
    async with acting(SHM, agent):
        with pytest.warns(UserWarning, match=r"ponder\(\).*methods=\(\)"):
            assert await agent.ponder() == (1.0, 1.0)
        with pytest.warns(UserWarning, match=r"stream\(\).*methods=\(\)"):
            assert list(agent.stream()) == [(1.0, 1.0)]
        # A second warning would be an error here.
        assert await agent.ponder() == (1.0, 1.0)


class Loop(Agent):
    """Agent that waits for updates inside a method."""

    def __init__(self) -> None:
        super().__init__()
        self.scheme: Any = None

    def run(self, wait: Callable[[Any], object]) -> tuple[float, float]:
        self.look()
        wait(self.scheme)
        return self.look()


WAITS: dict[str, Callable[[Any], object]] = {
    "receive": lambda scheme: scheme.receive(timeout=harness.PATIENCE),
    "wait_for_version": lambda scheme: scheme.wait_for_version(2, timeout=harness.PATIENCE),
    "close": lambda scheme: scheme.shutdown(),
}


@pytest.mark.parametrize("name", WAITS)
async def test_a_method_that_waits_for_an_update_is_no_read_any_more(name: str) -> None:
    source, agent = Agent(), Loop()
    sender = aiosync.sync.SharedMemWeightSyncScheme(timeout=harness.PATIENCE)
    worker = copy.copy(sender)
    sender.init_on_sender(model=source, num_workers=1)
    models.fill(source, 1.0)
    agent.scheme = worker

    def act() -> tuple[float, float]:
        worker.init_on_receiver(model=agent)
        with worker:
            worker.connect()
            return agent.run(WAITS[name])

    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(act)
        pool.submit(sender.connect).result(harness.PATIENCE)
        if name != "close":
            await asyncio.sleep(0.05)
            models.fill(source, 2.0)
            pool.submit(sender.send).result(harness.PATIENCE)
        assert running.result(harness.PATIENCE)[1] == (1.0 if name == "close" else 2.0)
        pool.submit(sender.shutdown).result(harness.PATIENCE)


async def test_by_hand_a_method_may_apply_what_waits() -> None:
    agent = Loop()
    manual = lambda **options: SHM(apply="manual", **options)  # noqa: E731
    async with acting(manual, agent) as (sender, worker):
        agent.scheme = worker
        handle = sender.send_nowait()
        await worker.wait_staged(2)
        agent.run(lambda scheme: scheme.apply_pending())
        assert worker.version == 2
        await handle


async def test_a_long_call_is_warned_of_once() -> None:
    agent = Agent()
    async with acting(SHM, agent) as (sender, _):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                entered, leave = threading.Event(), threading.Event()
                agent.between = lambda entered=entered, leave=leave: (entered.set(), leave.wait(9))
                running = asyncio.ensure_future(asyncio.to_thread(agent.look))
                await harness.until(entered.is_set)
                handle = sender.send_nowait()
                await asyncio.sleep(1.1)
                leave.set()
                await running
                await handle
        [text] = [str(each.message) for each in caught]
        assert "look()" in text and "kept an update waiting" in text and "methods=()" in text


class Running(Agent):
    """Agent with a method that calls another one until it is told to end."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.ends = threading.Event(), threading.Event()

    def run(self) -> None:
        self.runs.set()
        while not self.ends.wait(0.001):
            self.look()


@pytest.mark.slow
@pytest.mark.parametrize("make", [SHM, PIPE])
async def test_a_call_that_does_not_return_is_warned_of_while_it_runs(make: Any) -> None:
    agent = Running()
    async with acting(make, agent) as (sender, _):
        for _ in range(3):
            agent.look()
            await sender.send()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            running = asyncio.ensure_future(asyncio.to_thread(agent.run))
            await harness.until(agent.runs.is_set)
            handle = sender.send_nowait()
            try:
                await harness.until(lambda: bool(caught) or running.done())
                assert not running.done()
            finally:
                agent.ends.set()
            await running
            await handle
        [text] = [str(each.message) for each in caught]
        assert "run(), which" in text and "kept an update waiting" in text


async def test_where_there_is_a_forward_the_methods_to_name_are_said() -> None:
    agent = WithForward()
    async with acting(SHM, agent):
        agent()
        with pytest.warns(UserWarning, match=r"methods=\['score'\]"):
            agent.score()


async def test_a_method_that_was_taken_before_is_warned_of() -> None:
    agent = Agent()
    look = agent.look
    async with acting(SHM, agent):
        # A call of a part outside of any method brings no warning.
        agent.actor(torch.ones(1))
        agent.look()
        with pytest.warns(UserWarning, match=r"methods=\['look'\].*before you take"):
            look()


class Registered(Agent):
    """Agent whose class notes the classes that are derived from it, and wants an option of them."""

    kinds: ClassVar[list[type]] = []

    def __init_subclass__(cls, *, name: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.kinds.append(cls)


class Walker(Registered, name="walker"):
    pass


async def test_a_class_that_notes_its_subclasses_sees_none_of_aiosync() -> None:
    agent = Walker()
    async with acting(SHM, agent) as (sender, _):
        await looks_beside_sends(sender, agent, lambda: agent.look())
        assert isinstance(agent, Walker)
        assert type(copy.deepcopy(agent)) is Walker
    assert type(agent) is Walker
    assert Registered.kinds == [Walker]


class Sealed(type):
    """Metaclass of a class from which no other is derived."""

    def __new__(mcs, name: str, bases: tuple[type, ...], names: dict[str, Any]) -> Any:
        if any(isinstance(base, Sealed) for base in bases):
            raise RuntimeError("this class is sealed")
        return super().__new__(mcs, name, bases, names)


class SealedAgent(Agent, metaclass=Sealed):
    pass


async def test_a_class_that_makes_no_subclass_is_only_unguarded() -> None:
    async with acting(SHM, SealedAgent()) as (sender, worker):
        await harness.deliver(sender, worker, 2.0)
    with pytest.raises(aiosync.ApplyError, match="'look' of a SealedAgent: .*is sealed"):
        async with acting(SHM, SealedAgent(), methods=["look"]):
            pass


@pytest.mark.parametrize("make", [SHM, PIPE])
async def test_an_agent_of_such_a_class_does_not_take_the_place_of_another(make: Any) -> None:
    agent, sealed = Agent(), SealedAgent()
    models.fill(sealed, 9.0)
    async with acting(make, agent, methods=["look"]) as (sender, worker):
        with pytest.raises(aiosync.ConfigError, match="is sealed"):
            worker.model = sealed
        assert worker.model is agent
        assert models.filled(sealed, 9.0)
        await looks_beside_sends(sender, agent, agent.look)
        assert models.filled(sealed, 9.0)
