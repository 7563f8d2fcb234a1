"""What a check of the contract works with, and what the author of a scheme hands to the suite.

This module must never import pytest, nor a private name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

import aiosync
from aiosync.tensors.accelerator import use_accelerator
from aiosync.testing import assert_no_leaks
from tests.schemes._models import fill as fill
from tests.support.accelerator import Deferred
from tests.support.waiting import PATIENCE as PATIENCE
from tests.support.waiting import until as until

LEAKS = ("tasks", "fds", "processes", "shm", "mappings")
DEVICE = os.environ.get("DEVICE", "cpu")
"""Where the models of the checks are: ``DEVICE=cuda pytest tests/contract`` runs them on a GPU, and
``DEVICE=deferred`` on what :mod:`tests.support.accelerator` has in its place."""
if DEVICE == "deferred":
    use_accelerator(Deferred())  # in the processes of workers, too
    DEVICE = "cpu"


class SchemeFactory(Protocol):
    """Makes a scheme without a role: ``factory(timeout=5.0)``. Options are those of every scheme.

    A pickle of it, once it has the sender's role, is a worker's.
    """

    def __call__(self, **options: Any) -> aiosync.WeightSyncScheme: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What an author can offer beyond the factory; checks that lack theirs are skipped.

    Attributes:
        hire: Makes workers elsewhere: given a worker's scheme and the arguments of its
            ``init_on_receiver()``, what has the coroutines of :class:`Worker`. Only for the
            checks in :data:`tests.contract.suite.ANYWHERE`.
        process: The same, each in a process of its own from then on, with the attribute ``pid``
            and the methods ``stop()`` and ``cont()``.
        relay: ``async with relay(scheme) as (worker, cut, lead_to)`` gives a worker's scheme whose
            link goes through something that ``cut()`` severs, and ``lead_to(scheme)`` leads to
            another sender from the next link on. For schemes that dial again.
        address: Makes options with which a worker finds a sender of which it has no pickle yet.
        final: Options that make the loss of a link final, where workers would dial again.
        pulls: Options that make workers get only what they pull.
    """

    hire: Callable[[Any, dict[str, Any]], Any] | None = None
    process: Callable[[Any, dict[str, Any]], Any] | None = None
    relay: Callable[[Any], AbstractAsyncContextManager[tuple[Any, Any, Any]]] | None = None
    address: Callable[[], dict[str, Any]] = dict
    final: dict[str, Any] = field(default_factory=dict)
    pulls: dict[str, Any] | None = None


# -- models -----------------------------------------------------------------------------------


class Net(nn.Module):
    """``forward`` returns one number of its first and one of its last layer."""

    def __init__(self, value: float, size: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(
            torch.full((size, 4), value, device=DEVICE) for _ in range(5)
        )

    def forward(self) -> tuple[float, float]:
        first = self.layers[0].mean().item()
        for layer in self.layers:
            layer.sum()
        return first, self.layers[-1].mean().item()


def small(value: float = -1.0) -> Net:
    """A model of 400 bytes."""
    return Net(value, 5)


def wide(value: float = -1.0) -> Net:
    """The same names as :func:`small`, in other shapes."""
    return Net(value, 7)


def large(value: float = -1.0) -> Net:
    """10 MiB: more than is copied on an event loop."""
    return Net(value, 2**17)


def value_of(scheme: Any, model: nn.Module) -> float:
    """The one number that every parameter of a worker's model has, seen inside ``reading()``."""
    with scheme.reading():
        found = {float(each) for p in model.parameters() for each in p.detach().aminmax()}
    assert len(found) == 1, f"a mix of versions: {sorted(found)}"
    return found.pop()


# -- a sender and its workers --------------------------------------------------------------------


class Worker:
    """A receiver in this process."""

    def __init__(self, scheme: Any, model: Any) -> None:
        self.scheme, self.model = scheme, model

    async def connect(self) -> None:
        """Meet the sender."""
        await self.scheme.connect(timeout=PATIENCE)

    async def value(self) -> float:
        """The number that its model has."""
        return value_of(self.scheme, self.model)

    async def version(self) -> int:
        """The version that its model has."""
        return int(self.scheme.version)

    async def wait(self, version: int) -> None:
        """Wait until its model has a version."""
        await self.scheme.wait_for_version(version, timeout=PATIENCE)

    async def hold(self) -> None:
        """Begin a read that does not end."""
        self.scheme.reading().__enter__()

    async def leave(self) -> None:
        """Close it."""
        await self.scheme.aclose()

    async def die(self) -> None:
        """End it as the death of its process would: without a farewell."""
        self.scheme.abort()


def hire(scheme: Any, init: dict[str, Any]) -> Worker:
    """Give a scheme the role of a receiver in this process."""
    scheme.init_on_receiver(**init)
    return Worker(scheme, init["model"])


class Crew:
    """A sender with its model, and its workers, in the order in which they joined."""

    def __init__(self, bench: Bench, sender: Any, source: Any) -> None:
        self.bench, self.sender, self.source = bench, sender, source
        self.workers: list[Any] = []

    async def send(self, value: float, **options: Any) -> aiosync.SendReport:
        """Fill the sender's model and send it."""
        fill(self.source, value)
        report: aiosync.SendReport = await self.sender.send(**options)
        return report

    def send_nowait(self, value: float, **options: Any) -> aiosync.SendHandle:
        """Fill the sender's model and send it in the background."""
        fill(self.source, value)
        handle: aiosync.SendHandle = self.sender.send_nowait(**options)
        return handle

    def hire(
        self, model: Any, worker_idx: int | None = None, *, apply: str | None = None, **init: Any
    ) -> Any:
        """A receiver that is not connected yet; with ``apply`` its own."""
        init = {"model_id": "policy", "model": model, "worker_idx": worker_idx, **init}
        scheme = self.bench.twin(self.sender)
        scheme.apply = apply or scheme.apply
        self.workers.append((self.bench.hooks.hire or hire)(scheme, init))
        return self.workers[-1]

    async def join(self, model: Any, worker_idx: int | None = None, **init: Any) -> Any:
        """A worker that connects now."""
        worker = self.hire(model, worker_idx, **init)
        await worker.connect()
        return worker

    async def values(self) -> list[float]:
        """The number that each worker's model has."""
        return [await worker.value() for worker in self.workers]


@dataclass(frozen=True, slots=True)
class Bench:
    """What a check works with.

    Attributes:
        make: Makes a scheme.
        hooks: What else the author offers.
    """

    make: SchemeFactory
    hooks: Hooks = field(default_factory=Hooks)

    def twin(self, scheme: Any) -> Any:
        """What arrives when a scheme is pickled into a worker."""
        return pickle.loads(pickle.dumps(scheme))

    @contextlib.asynccontextmanager
    async def sender(
        self, source: Any, init: dict[str, Any] | None = None, **options: Any
    ) -> AsyncIterator[Crew]:
        """A sender that is not connected; closed at the end, after its workers."""
        scheme = self.make(**{"timeout": PATIENCE, **options})
        crew = Crew(self, scheme, source)
        async with contextlib.AsyncExitStack() as ending:  # each ends, also when one is cut
            ending.push_async_callback(scheme.aclose)
            try:
                scheme.init_on_sender(**{"model_id": "policy", "model": source, **(init or {})})
                yield crew
            finally:
                for worker in reversed(crew.workers):
                    ending.push_async_callback(worker.leave)

    @contextlib.asynccontextmanager
    async def crew(
        self,
        source: Any,
        targets: Sequence[Any],
        *,
        init: dict[str, Any] | None = None,
        worker: dict[str, Any] | None = None,
        **options: Any,
    ) -> AsyncIterator[Crew]:
        """A connected sender with one connected worker for each target."""
        asked = {"num_workers": len(targets), **(init or {})}
        async with self.sender(source, asked, **options) as crew:
            for idx, target in enumerate(targets):
                crew.hire(target, idx, **(worker or {}))
            joining = (each.connect() for each in crew.workers)
            await asyncio.gather(crew.sender.connect(), *joining)
            yield crew

    @property
    def elsewhere(self) -> Bench:
        """The same, with workers in processes of their own."""
        return Bench(self.make, replace(self.hooks, hire=self.hooks.process))


# -- checks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """One statement of the contract of schemes, as a test.

    Attributes:
        name: Stable name.
        description: The statement, in one sentence.
        needs: Names of the :class:`Hooks` that it uses.
        body: The coroutine function.
    """

    name: str
    description: str
    needs: frozenset[str]
    body: Callable[[Bench], Awaitable[None]]

    def skip_reason(self, hooks: Hooks) -> str | None:
        """Why this check cannot run, or ``None``."""
        missing = sorted(need for need in self.needs if getattr(hooks, need) is None)
        return f"needs the hook {', '.join(missing)}" if missing else None

    async def run(
        self, make: SchemeFactory, hooks: Hooks | None = None, leaks: tuple[str, ...] = LEAKS
    ) -> None:
        """Run the check; raises when the statement does not hold, hangs, or leaves something."""
        async with assert_no_leaks(kinds=leaks), asyncio.timeout(PATIENCE + 5):
            await self.body(Bench(make, hooks or Hooks()))


def needs(*names: str) -> Callable[[Any], Any]:
    """Note which hooks a check needs."""

    def mark(body: Any) -> Any:
        body.needs = frozenset(names)
        return body

    return mark


def as_check(body: Any) -> Check:
    """The entry of a ``check_*`` coroutine function."""
    description = (body.__doc__ or "").strip().splitlines()[0]
    name = body.__name__.removeprefix("check_")
    return Check(name, description, getattr(body, "needs", frozenset()), body)


# -- expectations --------------------------------------------------------------------------------


async def raises(kind: type[BaseException], call: Awaitable[Any]) -> Any:
    """Await something that has to raise ``kind``; returns the exception."""
    try:
        result = await call
    except kind as exc:
        return exc
    raise AssertionError(f"{kind.__name__} expected, but it returned {result!r}")


def refuses(kind: type[BaseException], call: Callable[[], Any]) -> Any:
    """Call something that has to raise ``kind``; returns the exception."""
    try:
        result = call()
    except kind as exc:
        return exc
    raise AssertionError(f"{kind.__name__} expected, but it returned {result!r}")


@contextlib.asynccontextmanager
async def background(*calls: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Tasks that run meanwhile; cancelled at the end, as far as they still run."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.sleep(0)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
