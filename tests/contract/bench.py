"""Tools of the contract's checks, and the hooks that a scheme's author hands to the suite.

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
"""Device of the models of the checks.

``DEVICE=cuda pytest tests/contract`` runs the checks on a GPU, and ``DEVICE=deferred`` on the
stand-in of :mod:`tests.support.accelerator`.
"""
if DEVICE == "deferred":
    # Processes of workers import this module, so they use the stand-in, too.
    use_accelerator(Deferred())
    DEVICE = "cpu"


class SchemeFactory(Protocol):
    """Factory of schemes without a role: ``factory(timeout=5.0)``, with options of every scheme.

    A pickle of a scheme that has the sender's role becomes a worker's scheme.
    """

    def __call__(self, **options: Any) -> aiosync.WeightSyncScheme: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Optional tools of a scheme's author; a check is skipped if its hooks are missing.

    Attributes:
        hire: Makes a worker in another process: takes a worker's scheme and the arguments of its
            ``init_on_receiver()``, and returns an object with the coroutines of :class:`Worker`.
            Only for the checks in :data:`tests.contract.suite.ANYWHERE`.
        process: Like ``hire``, but starts a process for each worker; its object also has the
            attribute ``pid`` and the methods ``stop()`` and ``cont()``.
        relay: ``async with relay(scheme) as (worker, cut, lead_to)`` gives a worker's scheme whose
            link passes a relay. ``cut()`` cuts the link, and ``lead_to(scheme)`` directs the next
            links to another sender. For schemes that dial again.
        address: Makes options with which a worker finds a sender that got its role only after the
            worker's pickle was made.
        final: Options that make the loss of a link final, for schemes that would dial again.
        pulls: Options with which workers get only the updates that they pull.
    """

    hire: Callable[[Any, dict[str, Any]], Any] | None = None
    process: Callable[[Any, dict[str, Any]], Any] | None = None
    relay: Callable[[Any], AbstractAsyncContextManager[tuple[Any, Any, Any]]] | None = None
    address: Callable[[], dict[str, Any]] = dict
    final: dict[str, Any] = field(default_factory=dict)
    pulls: dict[str, Any] | None = None


# -- models -----------------------------------------------------------------------------------


class Net(nn.Module):
    """Model whose ``forward`` returns one number of its first and one of its last layer."""

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
    """Return a model of 400 bytes."""
    return Net(value, 5)


def wide(value: float = -1.0) -> Net:
    """Return a model with the names of :func:`small` and other shapes."""
    return Net(value, 7)


def large(value: float = -1.0) -> Net:
    """Return a model of 10 MiB, more than a sender copies on its event loop."""
    return Net(value, 2**17)


def value_of(scheme: Any, model: nn.Module) -> float:
    """Return the one number that all parameters of a worker's model have inside ``reading()``."""
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
        """Connect to the sender."""
        await self.scheme.connect(timeout=PATIENCE)

    async def value(self) -> float:
        """Return the number that the worker's model has."""
        return value_of(self.scheme, self.model)

    async def look(self) -> float:
        """Return one number of the model, and begin no read."""
        return float(self.model.layers[0].detach()[0, 0])

    async def compute(self) -> None:
        """Compute with the model."""
        self.model()

    async def version(self) -> int:
        """Return the version that the worker's model has."""
        return int(self.scheme.version)

    async def wait(self, version: int) -> None:
        """Wait until the worker's model has a version."""
        await self.scheme.wait_for_version(version, timeout=PATIENCE)

    async def hold(self) -> None:
        """Begin a read that never ends."""
        self.scheme.reading().__enter__()

    async def leave(self) -> None:
        """Close the worker's scheme."""
        await self.scheme.aclose()

    async def die(self) -> None:
        """End the scheme as the death of its process would: without a farewell."""
        self.scheme.abort()


def hire(scheme: Any, init: dict[str, Any]) -> Worker:
    """Give a scheme the role of a receiver in this process; return its worker."""
    scheme.init_on_receiver(**init)
    return Worker(scheme, init["model"])


class Crew:
    """A sender with its model, and its workers in the order in which they were hired."""

    def __init__(self, bench: Bench, sender: Any, source: Any) -> None:
        self.bench, self.sender, self.source = bench, sender, source
        self.workers: list[Any] = []

    async def send(self, value: float, **options: Any) -> aiosync.SendReport:
        """Fill the sender's model with ``value`` and send it."""
        fill(self.source, value)
        report: aiosync.SendReport = await self.sender.send(**options)
        return report

    def send_nowait(self, value: float, **options: Any) -> aiosync.SendHandle:
        """Fill the sender's model with ``value`` and send it in the background."""
        fill(self.source, value)
        handle: aiosync.SendHandle = self.sender.send_nowait(**options)
        return handle

    def hire(
        self, model: Any, worker_idx: int | None = None, *, apply: str | None = None, **init: Any
    ) -> Any:
        """Make a worker that is not connected yet; ``apply`` replaces that option of its scheme."""
        init = {"model_id": "policy", "model": model, "worker_idx": worker_idx, **init}
        scheme = self.bench.twin(self.sender)
        scheme.apply = apply or scheme.apply
        self.workers.append((self.bench.hooks.hire or hire)(scheme, init))
        return self.workers[-1]

    async def join(self, model: Any, worker_idx: int | None = None, **init: Any) -> Any:
        """Make a worker, connect it, and return it."""
        worker = self.hire(model, worker_idx, **init)
        await worker.connect()
        return worker

    async def values(self) -> list[float]:
        """Return the number that each worker's model has."""
        return [await worker.value() for worker in self.workers]


@dataclass(frozen=True, slots=True)
class Bench:
    """The factory and the hooks that a check works with.

    Attributes:
        make: Factory of the schemes.
        hooks: The author's hooks.
    """

    make: SchemeFactory
    hooks: Hooks = field(default_factory=Hooks)

    def twin(self, scheme: Any) -> Any:
        """Return the scheme that a worker gets by a pickle of ``scheme``."""
        return pickle.loads(pickle.dumps(scheme))

    @contextlib.asynccontextmanager
    async def sender(
        self, source: Any, init: dict[str, Any] | None = None, **options: Any
    ) -> AsyncIterator[Crew]:
        """A crew whose sender is not connected; the end closes its workers and then the sender."""
        scheme = self.make(**{"timeout": PATIENCE, **options})
        crew = Crew(self, scheme, source)
        # The stack ends each scheme, even if the end of another one is cancelled.
        async with contextlib.AsyncExitStack() as ending:
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
        """A crew of a connected sender and one connected worker for each target."""
        asked = {"num_workers": len(targets), **(init or {})}
        async with self.sender(source, asked, **options) as crew:
            for idx, target in enumerate(targets):
                crew.hire(target, idx, **(worker or {}))
            joining = (each.connect() for each in crew.workers)
            await asyncio.gather(crew.sender.connect(), *joining)
            yield crew

    @property
    def elsewhere(self) -> Bench:
        """The same bench, whose workers have processes of their own."""
        return Bench(self.make, replace(self.hooks, hire=self.hooks.process))


# -- checks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """One statement of the contract of schemes, as a test.

    Attributes:
        name: Stable name.
        description: The statement, in one sentence.
        needs: Names of the :class:`Hooks` that the check uses.
        body: The coroutine function of the check.
    """

    name: str
    description: str
    needs: frozenset[str]
    body: Callable[[Bench], Awaitable[None]]

    def skip_reason(self, hooks: Hooks) -> str | None:
        """Return the reason why this check cannot run; ``None`` if it can."""
        missing = sorted(need for need in self.needs if getattr(hooks, need) is None)
        return f"needs the hook {', '.join(missing)}" if missing else None

    async def run(
        self, make: SchemeFactory, hooks: Hooks | None = None, leaks: tuple[str, ...] = LEAKS
    ) -> None:
        """Run the check; raise if its statement does not hold, it hangs, or it leaves resources."""
        async with assert_no_leaks(kinds=leaks, grace=5.0), asyncio.timeout(PATIENCE + 5):
            await self.body(Bench(make, hooks or Hooks()))


def needs(*names: str) -> Callable[[Any], Any]:
    """Return a decorator that notes which hooks a check needs."""

    def mark(body: Any) -> Any:
        body.needs = frozenset(names)
        return body

    return mark


def as_check(body: Any) -> Check:
    """Make a check of a ``check_*`` coroutine function.

    The first line of the function's docstring becomes the statement.
    """
    description = (body.__doc__ or "").strip().splitlines()[0]
    name = body.__name__.removeprefix("check_")
    return Check(name, description, getattr(body, "needs", frozenset()), body)


# -- expectations --------------------------------------------------------------------------------


async def raises(kind: type[BaseException], call: Awaitable[Any]) -> Any:
    """Await a call that has to raise ``kind``; return the exception."""
    try:
        result = await call
    except kind as exc:
        return exc
    raise AssertionError(f"{kind.__name__} expected, but it returned {result!r}")


def refuses(kind: type[BaseException], call: Callable[[], Any]) -> Any:
    """Call a function that has to raise ``kind``; return the exception."""
    try:
        result = call()
    except kind as exc:
        return exc
    raise AssertionError(f"{kind.__name__} expected, but it returned {result!r}")


@contextlib.asynccontextmanager
async def background(*calls: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Background tasks of these calls; the end cancels those that still run."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.sleep(0)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
