"""Weights of a module inside a Ray actor that is a transform of an environment.

Ray is loaded when a scheme is constructed. Must not import another concrete scheme than the
one that it extends.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from aiosync.errors import ConfigError, ConnectError, ConnectTimeout
from aiosync.schemes._sources import DeviceMap
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.ray import RayWeightSyncScheme
from aiosync.transports._ray_objects import landed, need_cluster
from aiosync.transports.base import Transport

__all__ = [
    "RayModuleTransformReceiver",
    "RayModuleTransformScheme",
    "RayModuleTransformSender",
]

_CLOSE_SECONDS = 5.0
_RECEIVERS = "_aiosync_receivers"
_T = TypeVar("_T")


class RayModuleTransformScheme(RayWeightSyncScheme):
    """Sends weights to the module of a transform that runs in a Ray actor.

    There is one worker: the actor of the transform, an object with an attribute ``module``.
    :meth:`connect` makes a receiver inside it, so the actor needs no code of aiosync, and its
    methods may block: updates are received in a thread beside them and applied between two
    forward passes.

    Args are those of :class:`RayWeightSyncScheme`.
    """

    _ray_transform: Any
    _remote: RayModuleTransformSender | None
    _not_pickled = (*RayWeightSyncScheme._not_pickled, "_ray_transform", "_remote")

    def _reset(self) -> None:
        super()._reset()
        self._ray_transform = None
        self._remote = None

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
        """What makes the receiver inside of the transform's actor."""
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

    async def aclose(self) -> None:
        """See :meth:`WeightSyncScheme.aclose`; the receiver in the actor ends, too."""
        if await self._closed_elsewhere():
            return
        remote, self._remote = self._remote, None
        try:
            await super().aclose()
        finally:
            if remote is not None:
                await remote.stop(self._model_id or "policy")


class RayModuleTransformSender:
    """Makes and ends the receiver inside of a transform's actor.

    Args:
        ray_transform: An object with an attribute ``_actor``, or the handle of the actor.
    """

    def __init__(self, ray_transform: Any) -> None:
        self._ray = need_cluster()
        self.actor: Any = getattr(ray_transform, "_actor", ray_transform)

    async def start(self, scheme: WeightSyncScheme, model_id: str, timeout: float | None) -> None:
        """Have the actor join.

        Args:
            scheme: A copy of the sender's scheme, without a role.
            model_id: Name of the model.
            timeout: Seconds; ``None`` waits until the actor has ended.

        Raises:
            ConnectError: The actor has died, or what it did raised an error.
            ConnectTimeout: Not in time; a call that the actor is busy with may be the reason.
        """
        called = self.actor.__ray_call__.remote(_join, scheme, model_id, timeout)
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
        """Have the actor's receiver end, if the actor is alive. Waits for 5 seconds at most."""
        if not self._ray.is_initialized():
            return
        called = self.actor.__ray_call__.remote(_leave, model_id)
        await asyncio.wait({landed(called, asyncio.get_running_loop())}, timeout=_CLOSE_SECONDS)


class RayModuleTransformReceiver:
    """A receiver with a loop and a thread of its own, for an actor whose methods block.

    Args:
        scheme: A copy of the sender's scheme, without a role.
        module: What to keep up to date.
        model_id: Name of the model.
    """

    def __init__(self, scheme: WeightSyncScheme, module: Any, model_id: str) -> None:
        self.scheme = scheme
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="aiosync-transform", daemon=True
        )
        scheme.init_on_receiver(model_id=model_id, model=module, worker_idx=0)

    def start(self, timeout: float | None) -> Future[None]:
        """Begin to connect; the future says how that ended."""
        self._thread.start()
        return self._submit(self.scheme.connect(timeout=timeout))

    def _submit(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """End; the module keeps its weights. Idempotent, bounded."""
        if self._loop.is_closed():
            return
        with contextlib.suppress(TimeoutError):
            self._submit(self.scheme.aclose()).result(_CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


def _join(transform: Any, scheme: WeightSyncScheme, model_id: str, timeout: float | None) -> None:
    """Inside of the actor: receive for its module."""
    module = getattr(transform, "module", None)
    if module is None:
        raise ConfigError(f"{type(transform).__name__} has no attribute 'module'")
    receivers: dict[str, RayModuleTransformReceiver] = vars(transform).setdefault(_RECEIVERS, {})
    old = receivers.pop(model_id, None)
    if old is not None:
        old.close()
    receiver = RayModuleTransformReceiver(scheme, module, model_id)
    connecting = receiver.start(timeout)
    receivers[model_id] = receiver
    if asyncio._get_running_loop() is not None:
        return  # an asynchronous actor goes on serving; the trainer notices if it fails
    try:
        connecting.result()
    except BaseException:  # raised again: the trainer sees it
        receivers.pop(model_id).close()
        raise


def _leave(transform: Any, model_id: str) -> None:
    """Inside of the actor: end the receiver."""
    receiver = vars(transform).get(_RECEIVERS, {}).pop(model_id, None)
    if receiver is not None:
        receiver.close()
