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
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from aiosync.errors import (
    AiosyncError,
    ConfigError,
    ConnectError,
    ConnectTimeout,
    RecvTimeout,
)
from aiosync.schemes.ray import Notes, RayWeightSyncScheme
from aiosync.schemes.sources import DeviceMap
from aiosync.transports._ray_store import landed, need_cluster
from aiosync.transports.base import Transport
from aiosync.transports.data_plane import outlast

__all__ = [
    "RayModuleTransformReceiver",
    "RayModuleTransformScheme",
    "RayModuleTransformSender",
]

_CLOSE_SECONDS = 5.0
_WAITS = b"waits"
_LOOK_SECONDS = 0.2  # between two looks whether the trainer still waits


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

    def _reset(self) -> None:
        super()._reset()
        self._ray_transform: Any = None
        self._remote: RayModuleTransformSender | None = None
        self._inside: Any = None  # the transform, where this is the receiver in its actor

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
            model_id = self._model_id or "policy"
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

    async def _connect_sender(
        self, weights: Any, timeout: float | None, processes: Sequence[Any]
    ) -> None:
        self._remote = self.create_sender()
        starting = asyncio.ensure_future(
            self._remote.start(copy.copy(self), self._model_id or "policy", timeout)
        )
        meeting = asyncio.ensure_future(super()._connect_sender(weights, timeout, processes))
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

    # -- inside of the actor -------------------------------------------------------------------

    def _receive_for(self, transform: Any, model_id: str) -> None:
        self.init_on_receiver(model_id=model_id, model=transform.module, worker_idx=0)
        self._inside = transform

    def _resolve_target(self) -> Any:
        if self._inside is not None:
            return getattr(self._inside, "module", None)
        return super()._resolve_target()

    async def _follow(self) -> None:
        """Receive until the trainer is given up; raises why."""
        receiver = self._require_receiver("receive")
        await receiver.wait_until(lambda: False, timeout=None, late=RecvTimeout())

    # -- closing -------------------------------------------------------------------------------

    async def _close_here(self) -> None:
        remote, self._remote = self._remote, None
        try:
            await super()._close_here()
        finally:
            if remote is not None:  # the receiver in the actor ends, too
                await remote.stop(self._model_id or "policy")


class RayModuleTransformSender:
    """Makes and ends the receiver inside a transform's actor.

    Args:
        ray_transform: An object with an attribute ``_actor``, or the handle of the actor.
    """

    def __init__(self, ray_transform: Any) -> None:
        self._ray = need_cluster()
        self.actor: Any = getattr(ray_transform, "_actor", ray_transform)
        # What it made is its own to end. In the cluster while it waits for the actor, whose calls
        # cannot be called off: the actor does not join any more once this is gone.
        self._ticket = f"aiosync:transform:{secrets.token_hex(16)}".encode()

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
            The actor stops to join, or does not begin.
        """
        put = asyncio.ensure_future(asyncio.to_thread(Notes.put, self._ticket, _WAITS))
        try:
            cancelled = await outlast(put)
            if cancelled is not None:
                raise cancelled
            put.result()
            await self._start(scheme, model_id, timeout)
        finally:
            if self._ray.is_initialized():
                forgetting = asyncio.ensure_future(
                    asyncio.to_thread(Notes.forget, self._ticket, _WAITS)
                )
                await asyncio.wait({forgetting}, timeout=_CLOSE_SECONDS)

    async def _start(
        self, scheme: RayModuleTransformScheme, model_id: str, timeout: float | None
    ) -> None:
        called = self.actor.__ray_call__.remote(_join, scheme, model_id, timeout, self._ticket)
        answer = landed(called, asyncio.get_running_loop())
        done, _ = await asyncio.wait({answer}, timeout=timeout)
        if not done:
            raise ConnectTimeout(
                f"{self.actor!r} did not join within {timeout:g} s: it may be busy with a call"
            )
        error = answer.exception()
        if isinstance(error, self._ray.exceptions.RayActorError):
            raise ConnectError(f"{self.actor!r} has died") from error
        if error is not None:
            reason = getattr(error, "cause", None) or error
            raise ConnectError(
                f"{self.actor!r} could not join: {type(reason).__name__}: {reason}"
            ) from error

    async def stop(self, model_id: str) -> None:
        """Have the receiver end that this made, if the actor is alive and it has not ended.

        Waits for 5 seconds at most.
        """
        if not self._ray.is_initialized():
            return
        called = self.actor.__ray_call__.remote(_leave, model_id, self._ticket)
        await asyncio.wait({landed(called, asyncio.get_running_loop())}, timeout=_CLOSE_SECONDS)


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
        scheme._receive_for(transform, model_id)
        self.ticket = ticket
        self._scheme = scheme
        self._key = (id(transform), model_id)
        self._joined: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None  # None when it ends by itself
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, timeout: float | None) -> Future[None]:
        """Begin to connect; the future says how that ended."""
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live(timeout)), name="aiosync-transform", daemon=True
        )
        _receivers[self._key] = self
        self._thread.start()
        return self._joined

    async def _live(self, timeout: float | None) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            async with self._scheme:
                try:
                    await self._connect(timeout)
                    self._joined.set_result(None)
                    await self._scheme._follow()
                finally:
                    self._task = None
        except (AiosyncError, asyncio.CancelledError) as exc:
            # Afterwards it is the end: the trainer has gone, or close() was called.
            if not self._joined.done():
                self._joined.set_exception(exc)
        except BaseException as exc:  # a bug: whoever waits sees it, and so does stderr
            if not self._joined.done():
                self._joined.set_exception(exc)
            raise
        finally:
            if _receivers.get(self._key) is self:
                del _receivers[self._key]

    async def _connect(self, timeout: float | None) -> None:
        connecting = asyncio.ensure_future(self._scheme.connect(timeout=timeout))
        try:
            while not connecting.done():
                await asyncio.wait({connecting}, timeout=_LOOK_SECONDS)
                if self._closed:
                    raise ConnectError("the receiver was closed")
                if not connecting.done() and not await asyncio.to_thread(_is_wanted, self.ticket):
                    raise _not_wanted()
        finally:
            connecting.cancel()
            await asyncio.wait({connecting})
        connecting.result()

    def close(self) -> None:
        """End; the module keeps its weights. Idempotent, bounded."""
        self._closed = True
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(self._cancel)
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


_receivers: dict[tuple[int, str], RayModuleTransformReceiver] = {}
"""The receivers of this process, which is an actor. Not kept in the actor's object: it has to
stay as picklable as it is."""


def _is_wanted(ticket: bytes) -> bool:
    return Notes.find(ticket, unknown=_WAITS) is not None


def _not_wanted() -> ConnectError:
    return ConnectError("the trainer is no longer waiting for this actor")


def _join(
    transform: Any,
    scheme: RayModuleTransformScheme,
    model_id: str,
    timeout: float | None,
    ticket: bytes,
) -> None:
    """Inside the actor: receive for its module."""
    if not _is_wanted(ticket):
        raise _not_wanted()  # it has waited behind other calls
    if getattr(transform, "module", None) is None:
        raise ConfigError(f"{type(transform).__name__} has no attribute 'module'")
    old = _receivers.pop((id(transform), model_id), None)
    if old is not None:
        old.close()
    receiver = RayModuleTransformReceiver(scheme, transform, model_id, ticket)
    joined = receiver.start(timeout)
    if asyncio._get_running_loop() is not None:
        return  # an asynchronous actor goes on serving; the trainer notices if it fails
    try:
        joined.result()
    except BaseException:  # raised again: the trainer sees it
        receiver.close()
        raise


def _leave(transform: Any, model_id: str, ticket: bytes) -> None:
    """Inside the actor: end the receiver that was made with this ticket."""
    receiver = _receivers.get((id(transform), model_id))
    if receiver is not None and receiver.ticket == ticket:
        receiver.close()
