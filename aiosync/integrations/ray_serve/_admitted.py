"""Methods of a deployment as requests at its gate, whose answers name their version.

Must not import ray, so that a method can be tested without it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Generic, TypeVar, overload

from anyio import to_thread

from aiosync.errors import ConfigError, LocalProtocolError
from aiosync.serving import Admission, WeightFeed

__all__ = ["Answer", "admitted"]

_OWN = ("min_version", "epoch")  # keywords that `admitted` takes out of a call

R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Answer(Generic[T_co]):
    """What an :func:`admitted` method returns.

    Attributes:
        value: What the method returned, or one of the things that it yielded.
        version: Version of the weights; the oldest that may have contributed, if several did.
        epoch: Epoch of that version, if the source has any.
        versions: All that may have contributed, in the order in which they came. One, unless
            the gate's mode is ``"immediate"``.
    """

    value: T_co
    version: int
    epoch: int | None
    versions: tuple[int, ...]


@overload
def admitted(
    method: Callable[..., Coroutine[Any, Any, R]], /
) -> Callable[..., Coroutine[Any, Any, Answer[R]]]: ...


@overload
def admitted(  # type: ignore[overload-overlap]  # what gives an iterator is a function, too
    method: Callable[..., AsyncIterator[R]], /
) -> Callable[..., AsyncIterator[Answer[R]]]: ...


@overload
def admitted(method: Callable[..., R], /) -> Callable[..., Coroutine[Any, Any, Answer[R]]]: ...


@overload
def admitted(*, timeout: float | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


def admitted(
    method: Callable[..., Any] | None = None, /, *, timeout: float | None = None
) -> Callable[..., Any]:
    """Make a method of a deployment a request at the gate, and tell the version with its result.

    For ``async def`` methods and asynchronous generators, whose items are wrapped one by one
    while the admission lasts until the last of them. A method without ``async`` runs in a
    thread, as Serve does it, and is a part of the admission until the thread is done, also when
    the caller has given up.

    Callers may add the keywords ``min_version`` and ``epoch``, as for
    :meth:`aiosync.serving.AdmissionGate.request`; the method does not see them. Callers get
    ``AdmissionTimeout`` if no such version arrives in time: they may try again.

    Args:
        method: The method, of a :class:`WeightsMixin`. One with ``@serve.batch`` is called from
            it: the requests of a batch are inside together, so that it sees one version.
        timeout: Seconds that a request waits to be admitted; ``None`` takes the gate's.

    Returns:
        A coroutine function, or an asynchronous generator function, of :class:`Answer`.

    Raises:
        ConfigError: It is a generator without ``async``, has ``@serve.batch``, or a parameter of
            these names.
    """
    if method is None:
        return partial(_admitted, timeout=timeout)
    return _admitted(method, timeout=timeout)


def _admitted(method: Callable[..., Any], *, timeout: float | None) -> Callable[..., Any]:
    name = getattr(method, "__qualname__", repr(method))
    if not callable(method):
        raise ConfigError(f"admitted() is for methods, not for {name}")
    if inspect.isgeneratorfunction(method):
        raise ConfigError(f"{name} is a generator: make it `async def` to be admitted")
    if hasattr(method, "set_max_batch_size"):
        raise ConfigError(f"{name} has @serve.batch: call it from an admitted method")
    for taken in set(inspect.signature(method).parameters) & set(_OWN):
        raise ConfigError(f"{name} has a parameter {taken!r}, which admitted() uses itself")

    def begin(deployment: Any, options: dict[str, Any]) -> Admission:
        feed = getattr(deployment, "weight_feed", None)
        if not isinstance(feed, WeightFeed):
            raise LocalProtocolError(f"{name} is admitted, so its class must be a WeightsMixin")
        wanted = {key: options.pop(key) for key in _OWN if key in options}
        return feed.request(timeout=timeout, **wanted)

    if inspect.isasyncgenfunction(method):

        @wraps(method)
        async def stream(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Answer[Any]]:
            admission = begin(self, kwargs)
            async with admission:
                items = method(self, *args, **kwargs)
                try:
                    async for item in items:
                        yield _answer(item, admission)
                finally:
                    await items.aclose()

        return stream

    compute = method if inspect.iscoroutinefunction(method) else _threaded(method)

    @wraps(method)
    async def unary(self: Any, *args: Any, **kwargs: Any) -> Answer[Any]:
        admission = begin(self, kwargs)
        async with admission:
            value = await compute(self, *args, **kwargs)
        return _answer(value, admission)

    return unary


def _answer(value: R, admission: Admission) -> Answer[R]:
    versions = admission.versions
    return Answer(value, versions[0], admission.epoch, versions)


def _threaded(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        # anyio's threads are those that Serve runs methods without `async` in: as many as
        # max_ongoing_requests, with the context of the request.
        working = asyncio.ensure_future(to_thread.run_sync(partial(function, *args, **kwargs)))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            # The thread goes on: no switch may come before it has ended.
            while not working.done():
                with suppress(asyncio.CancelledError):  # raised again below
                    await asyncio.wait([working])
            if not working.cancelled():
                working.exception()  # nobody waits for it any more
            raise

    return call
