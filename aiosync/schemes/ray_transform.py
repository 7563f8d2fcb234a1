"""Weights of a module inside a Ray actor that is a transform of an environment.

Ray is loaded when a scheme is constructed. Must not import another concrete scheme than the
one that it extends.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from aiosync.errors import (
    AiosyncError,
    ConfigError,
    ConnectError,
    ConnectTimeout,
)
from aiosync.rendezvous.dialer import Backoff
from aiosync.schemes.ray import RayWeightSyncScheme
from aiosync.schemes.roles import Trainer, Worker
from aiosync.schemes.sources import DeviceMap
from aiosync.transports.base import Transport
from aiosync.transports.ray import landed, need_cluster

__all__ = [
    "RayModuleTransformReceiver",
    "RayModuleTransformScheme",
    "RayModuleTransformSender",
]

_CLOSE_SECONDS = 5.0
_LONGEST_PAUSE = 0.5  # seconds between two looks whether the actor has joined


class RayModuleTransformScheme(RayWeightSyncScheme):
    """Sends weights to the module of a transform that runs in a Ray actor.

    There is one worker: the actor of the transform, an object with an attribute ``module``.
    :meth:`connect` makes a receiver inside it, so the actor needs no code of aiosync, and its
    methods may block: updates are received in a thread beside them and applied between two
    forward passes. Where the actor replaces its module, the new one gets the next update. The
    receiver ends with the scheme, and when it has given up a trainer that was lost
    (``reconnect``).

    Args are those of :class:`RayWeightSyncScheme`.
    """

    def _reset(self, model_id: str | None) -> None:
        super()._reset(model_id)
        self._ray_transform: Any = None
        self._remote: RayModuleTransformSender | None = None

    def _set_transform(self, ray_transform: Any) -> None:
        """Name the transform; TorchRL's ``RayModuleTransform`` does so with itself."""
        self._ray_transform = ray_transform

    def init_on_sender(
        self,
        model_id: str | None = None,
        context: Any = None,
        *,
        params_map: Mapping[int, Any] | None = None,
        weights: Any = None,
        model: Any = None,
        devices: Sequence[Any] | None = None,
        device_map_fn: DeviceMap | None = None,
        num_workers: int | None = None,
        pipes: Sequence[Any] | None = None,
        transports: Mapping[int, Transport] | None = None,
        remote_collectors: Sequence[Any] | None = None,
        ray_transform: Any = None,
        ctx: Any = None,
    ) -> None:
        """See :meth:`RayWeightSyncScheme.init_on_sender`; for one worker, the transform's actor.

        Args:
            model_id: Name of the model.
            context: Owner of the trainer's model.
            params_map: Worker index -> its weights.
            weights: The weights.
            model: Module whose weights the transform's module gets.
            devices: Of one worker.
            device_map_fn: Called with (0, weights) for each send.
            num_workers: 1.
            pipes: Not to be given.
            transports: Not to be given.
            remote_collectors: Not to be given.
            ray_transform: The transform: an object with an attribute ``_actor``, or the handle
                of the actor.
            ctx: Ignored.

        Raises:
            ConfigError: There is no transform, or more than one worker.
        """
        transform = ray_transform if ray_transform is not None else self._ray_transform
        if transform is None:
            raise ConfigError(
                "pass ray_transform= to init_on_sender(), or the scheme to RayModuleTransform"
            )
        if num_workers not in (None, 1) or any(
            each is not None for each in (pipes, transports, remote_collectors)
        ):
            raise ConfigError("the only worker of this scheme is the actor of the transform")
        if context is not None and model_id is None:
            model_id = self.model_id or "policy"
        super().init_on_sender(
            model_id,
            context,
            params_map=params_map,
            weights=weights,
            model=model,
            devices=devices,
            device_map_fn=device_map_fn,
            num_workers=1,
            ctx=ctx,
        )
        self._ray_transform = transform

    def create_sender(self) -> RayModuleTransformSender:
        """What makes the receiver inside the transform's actor."""
        return RayModuleTransformSender(self._ray_transform)

    async def _meet(self, side: Trainer | Worker, timeout: float | None, **given: Any) -> None:
        if isinstance(side, Worker):
            await super()._meet(side, timeout, **given)
            return
        self._remote = self.create_sender()
        starting = asyncio.ensure_future(
            self._remote.start(copy.copy(self), self.model_id or "policy", timeout)
        )
        meeting = asyncio.ensure_future(super()._meet(side, timeout, **given))
        try:
            await asyncio.wait({starting, meeting}, return_when=asyncio.FIRST_EXCEPTION)
            if starting.done():
                starting.result()  # says more than that nobody came
            await meeting
            await starting
        finally:
            for task in (starting, meeting):
                task.cancel()
            await asyncio.gather(starting, meeting, return_exceptions=True)

    _promises = False  # the actor may replace its module, and tells nobody

    async def _close_here(self) -> None:
        remote, self._remote = self._remote, None
        try:
            await super()._close_here()
        finally:
            if remote is not None:  # the receiver in the actor ends, too
                await remote.stop(self.model_id or "policy")


class RayModuleTransformSender:
    """Makes and ends the receiver inside a transform's actor.

    Args:
        ray_transform: An object with an attribute ``_actor``, or the handle of the actor.
    """

    def __init__(self, ray_transform: Any) -> None:
        self._ray = need_cluster()
        self.actor: Any = getattr(ray_transform, "_actor", ray_transform)
        self._ticket = secrets.token_bytes(16)  # what it made is its own to end

    async def start(
        self, scheme: RayModuleTransformScheme, model_id: str, timeout: float | None
    ) -> None:
        """Have the actor join.

        Args:
            scheme: A copy of the sender's scheme, without a role.
            model_id: Name of the model.
            timeout: Seconds; ``None`` waits until the actor has ended.

        Raises:
            ConnectError: The actor has died, or what it did raised an error.
            ConnectTimeout: Not in time; a call that the actor is busy with may be the reason.

        Cancellation:
            The actor leaves as soon as it can.
        """
        pause = Backoff(longest=_LONGEST_PAUSE)
        try:
            async with asyncio.timeout(timeout):
                await self._call(_join, scheme, model_id, timeout, self._ticket)
                while not await self._call(_has_joined, model_id, self._ticket):
                    await pause.wait()
        except BaseException as exc:  # raised again, or what it comes from
            if self._ray.is_initialized():
                self.actor.__ray_call__.remote(_leave, model_id, self._ticket)
            if isinstance(exc, TimeoutError) and not isinstance(exc, AiosyncError):
                raise ConnectTimeout(
                    f"{self.actor!r} did not join within {timeout:g} s: it may be busy with a call"
                ) from exc
            raise

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function of this module returns in the actor, which it is given first."""
        called = self.actor.__ray_call__.remote(function, *args)
        try:
            return await landed(called)
        except self._ray.exceptions.RayActorError as exc:
            raise ConnectError(f"{self.actor!r} has died") from exc
        except Exception as exc:  # of any type; the caller of connect() sees it
            reason = getattr(exc, "cause", None) or exc
            raise ConnectError(
                f"{self.actor!r} could not join: {type(reason).__name__}: {reason}"
            ) from exc

    async def stop(self, model_id: str) -> None:
        """Have the receiver end that this made, if the actor is alive and it has not ended.

        Waits for 5 seconds at most.
        """
        if self._ray.is_initialized():
            called = self.actor.__ray_call__.remote(_leave, model_id, self._ticket)
            left = landed(called)
            await asyncio.wait({left}, timeout=_CLOSE_SECONDS)


class _ModuleOf:
    """The context of the receiver in an actor: its transform's module, also when it is another."""

    def __init__(self, transform: Any) -> None:
        self._transform = transform

    def get_model(self, model_id: str) -> Any:
        del model_id
        return self._transform.module


class RayModuleTransformReceiver:
    """A receiver with a loop and a thread of its own, for an actor whose methods block.

    Args:
        scheme: A copy of the sender's scheme, without a role.
        transform: Object whose attribute ``module`` is kept up to date.
        model_id: Name of the model.
        ticket: Names the sender that wanted it.
    """

    def __init__(
        self, scheme: RayModuleTransformScheme, transform: Any, model_id: str, ticket: bytes
    ) -> None:
        self._context = _ModuleOf(transform)  # a scheme keeps a weak reference
        scheme.init_on_receiver(model_id=model_id, context=self._context, worker_idx=0)
        self.ticket = ticket
        self._scheme = scheme
        self._key = (id(transform), model_id)
        self._joined: Future[None] = Future()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._task: asyncio.Task[None] | None = None  # None again when it ends by itself
        self._thread: threading.Thread | None = None

    def start(self, timeout: float | None) -> Future[None]:
        """Begin to connect; the future says how that ended."""
        self._task = self._runner.get_loop().create_task(self._live(timeout))
        self._thread = threading.Thread(
            target=self._run, args=(self._task,), name="aiosync-transform", daemon=True
        )
        self._thread.start()
        return self._joined

    async def _live(self, timeout: float | None) -> None:
        async with self._scheme:
            try:
                await self._scheme.connect(timeout=timeout)
                self._joined.set_result(None)
                while True:
                    await self._scheme.receive(timeout=None)
            finally:
                self._task = None

    def _run(self, living: asyncio.Task[None]) -> None:
        try:
            with self._runner:
                self._runner.get_loop().run_until_complete(living)
        except BaseException as exc:  # the trainer has gone, or close() was called
            if not self._joined.done():
                self._joined.set_exception(exc)  # kept for who asks, or the next trainer
            elif _receivers.get(self._key, (None,))[0] is self:
                del _receivers[self._key]
            if not isinstance(exc, AiosyncError | asyncio.CancelledError):
                raise  # a bug, for stderr as well

    def close(self) -> None:
        """End; the module keeps its weights. Idempotent, bounded."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._runner.get_loop().call_soon_threadsafe(self._cancel)
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


_receivers: dict[tuple[int, str], tuple[RayModuleTransformReceiver, Future[None]]] = {}
"""The receivers of this process, which is an actor, and what came of joining. Not kept in the
actor's object: it has to stay as picklable as it is."""

# Inside of the actor: none of these waits for the trainer, as the actor has other callers.


def _join(
    transform: Any,
    scheme: RayModuleTransformScheme,
    model_id: str,
    timeout: float | None,
    ticket: bytes,
) -> None:
    """Begin to receive for the actor's module, instead of for another trainer."""
    if getattr(transform, "module", None) is None:
        raise ConfigError(f"{type(transform).__name__} has no attribute 'module'")
    _leave(transform, model_id)
    receiver = RayModuleTransformReceiver(scheme, transform, model_id, ticket)
    _receivers[id(transform), model_id] = receiver, receiver.start(timeout)


def _has_joined(transform: Any, model_id: str, ticket: bytes) -> bool:
    receiver, joined = _receivers.get((id(transform), model_id), (None, None))
    if receiver is None or joined is None or receiver.ticket != ticket:
        raise ConnectError("another trainer has this transform by now, or its link was lost")
    return joined.done() and joined.result() is None


def _leave(transform: Any, model_id: str, ticket: bytes | None = None) -> None:
    """End the receiver that was made with this ticket, or any."""
    receiver, _ = _receivers.get((id(transform), model_id), (None, None))
    if receiver is not None and ticket in (None, receiver.ticket):
        del _receivers[id(transform), model_id]
        receiver.close()
