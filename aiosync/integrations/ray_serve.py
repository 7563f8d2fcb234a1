"""Ray Serve: each replica of a deployment keeps its model on the newest version.

:class:`WeightsMixin` gives a deployment a :class:`~aiosync.serving.WeightFeed` on the event loop
on which Serve runs its code; :func:`admitted` makes a method return its version with its result;
:class:`ReplicaWeightsMiddleware` does the same for an ingress. See ``docs/topics/ray-serve.md``.
Needs ``ray[serve]``. Must not be imported by the rest of aiosync.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Generic, TypeVar, overload

from anyio import to_thread
from ray import serve
from ray.serve.exceptions import RayServeException

from aiosync.errors import AdmissionTimeout, ConfigError, LocalProtocolError, RecvTimeout
from aiosync.integrations.asgi import WeightsMiddleware
from aiosync.protocol import validate_seconds, validate_timeout
from aiosync.receiver.transformer import Transform
from aiosync.schemes import TCPWeightSyncScheme, WeightSyncScheme
from aiosync.serving import Admission, AdmissionGate, WeightFeed
from aiosync.spans import VersionSpan
from aiosync.tensors.apply import Loader

__all__ = ["TOKEN_VARIABLE", "Answer", "ReplicaWeightsMiddleware", "WeightsMixin", "admitted"]

TOKEN_VARIABLE = "AIOSYNC_TOKEN"
"""Environment variable of a replica with the token for a source that is given as an address."""

_logger = logging.getLogger(__name__)


class WeightsMixin:
    """Base class of a Ray Serve deployment whose model follows a source of weights.

    ::

        @serve.deployment(num_replicas=2)
        class Policy(WeightsMixin):
            async def __init__(self, source: str) -> None:
                self.policy = make_policy()
                await self.follow_weights(source, model=self.policy)  # no requests before this

            @admitted
            async def act(self, observation: torch.Tensor) -> torch.Tensor:
                return self.policy(observation)

        answer = await handle.act.remote(observation, min_version=7)
        answer.value, answer.version

    A replica that is started, or restarted after a crash, takes requests once
    :meth:`follow_weights` has returned. When the source is lost, the replica answers with the
    version that it has; :meth:`weight_status` says so. The feed ends when Serve shuts the replica
    down.
    """

    _weight_feed: WeightFeed | None = None
    _max_staleness: float | None = None
    _was_stale: bool = False

    async def follow_weights(
        self,
        source: str | WeightSyncScheme,
        *,
        model: Any = None,
        weights: Any = None,
        load: Loader | None = None,
        transform: Transform | None = None,
        model_id: str | None = None,
        gate: AdmissionGate | None = None,
        min_version: int | None = None,
        timeout: float | None = 60.0,
        max_staleness: float | None = None,
    ) -> int:
        """Start to follow the source, and wait until there is a complete version.

        Await it in the deployment's ``async def __init__``, which Serve calls on the loop of the
        replica's code: no request arrives before ``__init__`` has ended. If it raises, Serve starts
        the replica again after a pause, up to its ``max_constructor_retry_count``.

        Args:
            source: A scheme without a role; or an address of a trainer, as for
                :class:`aiosync.TCPWeightSyncScheme`, with the token in the variable
                ``AIOSYNC_TOKEN`` of the replica's environment, if there is one.
            model: Module to keep up to date.
            weights: TensorDict or dict of tensors to keep up to date instead.
            load: Function that loads versions, instead.
            transform: Function that changes updates before they are applied or loaded. These four
                are as for :class:`~aiosync.serving.WeightFeed`.
            model_id: Name of the model, as the sender calls it.
            gate: The gate; ``None`` makes a new one.
            min_version: The lowest version to take requests with; ``None`` takes the newest version
                that the source has when it is reached.
            timeout: Seconds to wait for that version; ``None`` for ever.
            max_staleness: Seconds without a source after which the replica is unhealthy, so that
                Serve replaces it; ``None`` for never. The new replica has to reach the source.

        Returns:
            The version that the model has.

        Raises:
            RecvTimeout: There was no such version in time; the text holds the feed's reason.
            ConfigError: The arguments exclude each other, an option has an illegal value, or the
                scheme already has a role.
            LocalProtocolError: The replica follows a source already.

        Cancellation:
            Ends the feed; the replica follows nothing.
        """
        if self._weight_feed is not None:
            raise LocalProtocolError("a replica follows only one source, and this one already does")
        for name, value in (("timeout", timeout), ("max_staleness", max_staleness)):
            validate_seconds(name, value, endless=True, none=True)
        if isinstance(source, str):
            source = TCPWeightSyncScheme(source, token=os.environ.get(TOKEN_VARIABLE) or None)
        feed = WeightFeed(
            source,
            model=model,
            weights=weights,
            load=load,
            transform=transform,
            model_id=model_id,
            gate=gate,
            min_version=min_version,
        )
        await feed.start()
        where = f" from {source.address}" if isinstance(source, TCPWeightSyncScheme) else ""
        version = await _first_version(feed, where, math.inf if timeout is None else timeout)
        self._weight_feed = feed
        self._max_staleness = max_staleness
        self._close_with_the_replica()
        return version

    def _close_with_the_replica(self) -> None:
        """Have Serve close the feed when it shuts this replica down."""
        # Serve looks `__del__` up on the instance, and awaits it on the loop of the feed. The
        # garbage collector would also call a `__del__` of the class, and cannot await it.
        inner: Any = getattr(type(self), "__del__", None)

        async def close() -> None:
            try:
                if inner is not None:
                    result = inner(self)
                    if inspect.isawaitable(result):
                        await result
            finally:
                if self._weight_feed is not None:
                    await self._weight_feed.aclose()

        self.__dict__["__del__"] = close

    @property
    def weight_feed(self) -> WeightFeed:
        """Feed of this replica, with its ``request()``, ``batch()``, ``version`` and ``gate``.

        It is only for coroutines of the deployment, because it belongs to their event loop.

        Raises:
            LocalProtocolError: The replica follows no source yet.
        """
        if self._weight_feed is None:
            raise LocalProtocolError("await follow_weights() in __init__ first")
        return self._weight_feed

    async def weight_status(self) -> dict[str, Any]:
        """Return the name of this replica and the status of its feed, as plain values.

        Call it through a handle: ``await handle.weight_status.remote()``; see
        :class:`~aiosync.serving.FeedStatus`.
        """
        return {"replica": _replica_name(), **self.weight_feed.status.as_dict()}

    async def check_health(self) -> None:
        """Raise if the replica is unhealthy; Serve calls it every ``health_check_period_s``.

        A replica whose source is lost is healthy, unless ``max_staleness`` says otherwise. A
        subclass that has a check of its own also calls this one with ``super()``.

        Raises:
            RecvTimeout: The weights are stale for longer than ``max_staleness``.
            LocalProtocolError: The feed itself has ended with an error.
        """
        if self._weight_feed is None:
            return
        status = self._weight_feed.status
        if status.state == "failed":
            raise LocalProtocolError(f"the weight feed has ended: {status.reason}")
        stale = status.stale_for > 0
        if stale != self._was_stale:
            self._was_stale = stale
            if stale:
                _logger.warning(
                    "%s answers with version %d, which is stale: %s",
                    *(_replica_name(), status.version, status.reason),
                )
            else:
                _logger.warning("%s is live again", _replica_name())
        limit = self._max_staleness
        if limit is not None and status.stale_for > limit:
            raise RecvTimeout(
                f"version {status.version} has been stale for {status.stale_for:.1f} s, and "
                f"max_staleness is {limit:g} s: {status.reason}"
            )


def _replica_name() -> str:
    """Return the name of this replica in errors and logs."""
    try:
        replica = serve.get_replica_context()
    except RayServeException:  # outside a replica, as in a test of the deployment's class
        return f"process {os.getpid()}"
    return f"replica {replica.replica_tag} of {replica.app_name}#{replica.deployment}"


# -- methods as requests, whose answers name their version --------------------------------------

_OWN = ("min_version", "epoch")  # keywords that `admitted` takes out of a call

_R = TypeVar("_R")
_T_co = TypeVar("_T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Answer(Generic[_T_co]):
    """Result of an :func:`admitted` method, with its versions.

    Attributes:
        value: The method's result, or one of the items that it yielded.
        version: Version of the weights; the oldest that may have contributed, if several did.
        epoch: Epoch of that version; ``None`` if the source has none, or if versions of several
            epochs may have contributed.
        versions: All versions that may have contributed, in the order in which they came. It is one
            version, unless the gate's mode is ``"immediate"``.
        span: The versions with the number of batches of each, or with the counts of the method; for
            an item that was yielded, up to that item. See
            :attr:`aiosync.serving.Admission.span`.
    """

    value: _T_co
    version: int
    epoch: int | None
    versions: tuple[int, ...]
    span: VersionSpan


@overload
def admitted(
    method: Callable[..., Coroutine[Any, Any, _R]], /
) -> Callable[..., Coroutine[Any, Any, Answer[_R]]]: ...


@overload
def admitted(  # type: ignore[overload-overlap]  # the last overload takes these methods, too
    method: Callable[..., AsyncIterator[_R]], /
) -> Callable[..., AsyncIterator[Answer[_R]]]: ...


@overload
def admitted(method: Callable[..., _R], /) -> Callable[..., Coroutine[Any, Any, Answer[_R]]]: ...


@overload
def admitted(*, timeout: float | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


def admitted(
    method: Callable[..., Any] | None = None, /, *, timeout: float | None = None
) -> Callable[..., Any]:
    """Make calls of a method requests at the gate; return each result with its version.

    The method is an ``async def`` method or an asynchronous generator. A generator's items are
    wrapped one by one, and its admission lasts until the last item. A method without ``async`` runs
    in a thread, as Serve does it. It is a part of the admission until the thread is done, even if
    the caller has given up.

    Callers may add the keywords ``min_version`` and ``epoch``, as for
    :meth:`aiosync.serving.AdmissionGate.request`; the method does not see them. Callers get
    ``AdmissionTimeout`` if no such version arrives in time, and may try again.

    Args:
        method: A method of a :class:`WeightsMixin`. It may call a method with ``@serve.batch``:
            the requests of a batch are admitted together, so that the batch sees one version.
        timeout: Seconds that a request waits to be admitted; ``None`` takes the gate's.

    Returns:
        A coroutine function, or an asynchronous generator function, of :class:`Answer`.

    Raises:
        ConfigError: The method is a generator without ``async``, has ``@serve.batch``, or has a
            parameter named ``min_version`` or ``epoch``; or the timeout is negative or no number.
    """
    validate_timeout(timeout)
    if method is None:
        return partial(admitted, timeout=timeout)
    name = getattr(method, "__qualname__", repr(method))
    if inspect.isgeneratorfunction(method):
        raise ConfigError(f"{name} is a generator: make it `async def` to be admitted")
    if hasattr(method, "set_max_batch_size"):
        raise ConfigError(f"{name} has @serve.batch: call it from an admitted method")
    for taken in set(inspect.signature(method).parameters) & set(_OWN):
        raise ConfigError(f"{name} has a parameter {taken!r}, which admitted() uses itself")

    def begin(deployment: Any, options: dict[str, Any]) -> Admission:
        """Make the admission of a call, and take its keywords out of those of the method."""
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


def _answer(value: _R, admission: Admission) -> Answer[_R]:
    """Return a result with the versions that its admission has seen so far."""
    versions, span = admission.versions, admission.span
    # After a restart of the trainer the first version may be of another epoch than the admission.
    epoch = admission.epoch if span.first else None
    return Answer(value, versions[0], epoch, versions, span)


def _threaded(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Make a coroutine function that calls this one in a thread, and ends no earlier than it."""

    async def call(*args: Any, **kwargs: Any) -> Any:
        # Serve runs methods without `async` in anyio's threads, too: there are as many of them as
        # max_ongoing_requests, and they have the context of the request.
        working = asyncio.ensure_future(to_thread.run_sync(partial(function, *args, **kwargs)))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            # The thread cannot be stopped, and no switch may happen before it has ended.
            while not working.done():
                with suppress(asyncio.CancelledError):  # raised again below
                    await asyncio.wait([working])
            if not working.cancelled():
                working.exception()  # so that asyncio does not log it as never retrieved
            raise

    return call


# -- an ingress ------------------------------------------------------------------------------------


class ReplicaWeightsMiddleware:
    """Form of :class:`aiosync.integrations.asgi.WeightsMiddleware` for ``@serve.ingress(app)``.

    ::

        app = FastAPI()
        app.add_middleware(ReplicaWeightsMiddleware)

        @serve.deployment
        @serve.ingress(app)
        class Policy(WeightsMixin): ...

    The app is made, and pickled, before there is a replica. The middleware therefore finds the feed
    of its replica when the first request comes.

    Args:
        app: The application inside.
        options: As for :class:`aiosync.integrations.asgi.WeightsMiddleware`, without ``feed``.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], **options: Any) -> None:
        self._app = app
        self._options = options
        self._inner: Callable[..., Awaitable[None]] | None = None

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[..., Any],
        send: Callable[..., Any],
    ) -> None:
        """Handle one connection of the server; an ASGI 3 application."""
        if scope["type"] == "lifespan":  # the replica starts and ends the feed itself
            await self._app(scope, receive, send)
            return
        if self._inner is None:
            replica: Any = serve.get_replica_context().servable_object
            if not isinstance(replica, WeightsMixin):
                raise LocalProtocolError(f"{type(replica).__name__} is not a WeightsMixin")
            self._inner = WeightsMiddleware(self._app, replica.weight_feed, **self._options)
        await self._inner(scope, receive, send)


async def _first_version(feed: WeightFeed, where: str, timeout: float) -> int:
    """Return the version with which requests may begin; on any error end the feed.

    Raises:
        RecvTimeout: There is none in time.
    """
    try:
        async with feed.request(timeout=timeout) as version:
            return version
    except BaseException as exc:  # a cancellation ends the feed and is raised again
        status = feed.status
        await feed.aclose()
        if not isinstance(exc, AdmissionTimeout):
            raise
        raise RecvTimeout(
            f"{_replica_name()} has no version of the weights{where} to start with after "
            f"{timeout:g} s: it has version {status.version} and needs {status.waits_for}; "
            f"{status.reason or 'the source has nothing newer'}"
        ) from exc
