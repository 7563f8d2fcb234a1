"""Schemes of a Ray cluster, over its object store: to actors, and to a transform's module.

Ray is loaded when a scheme is constructed. Must not import another concrete scheme.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import importlib
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Literal

from aiosync._repr import text_of
from aiosync._tasks import in_own_thread
from aiosync.errors import AiosyncError, ApplyError, ConfigError, ConnectError, ConnectTimeout
from aiosync.rendezvous.dialer import Backoff
from aiosync.schemes.cluster import INLINE_NBYTES, ClusterFabric, ClusterScheme
from aiosync.schemes.lifecycle import ConnectArguments, Life
from aiosync.schemes.options import RayOptions
from aiosync.schemes.sources import DeviceMap
from aiosync.sender import How
from aiosync.strategy import WeightStrategy
from aiosync.tensors import Dtypes
from aiosync.transports.address import Address
from aiosync.transports.base import Transport
from aiosync.transports.data_plane import DataPlaneTransport
from aiosync.transports.ray import (
    RayActorTransport,
    RayObjects,
    RayTransport,
    error_of_cluster,
    landed,
    load_ray,
    need_cluster,
)
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits, Require, SendReport

__all__ = [
    "RayModuleTransformReceiver",
    "RayModuleTransformScheme",
    "RayModuleTransformSender",
    "RayWeightSyncScheme",
]

_NAMESPACE = b"aiosync"
_CLOSE_SECONDS = 5.0
# Longest pause in seconds between two checks whether an actor has joined.
_LONGEST_PAUSE = 0.5
# Larger weights are sent from the tensors themselves, which only the object store copies at once.
_MAX_BORROWING_INLINE_NBYTES = 4 * 2**20


class RayWeightSyncScheme(RayOptions, ClusterScheme):
    """Scheme that sends weights to actors of a Ray cluster.

    Each worker has a control stream to the sender, which carries messages and small updates. Large
    ones are put into Ray's object store, once for all workers; workers of one node share that
    memory and point their parameters at it. Workers on the sender's own host read all of them from
    shared memory, unless told otherwise (``shared_memory``). See ``docs/topics/ray.md``.

    The object store's memory is read-only: a worker that writes to its parameters in place, for
    example by training them, dies with a segmentation fault. Pass ``apply_copy=True`` if workers do
    so.

    Args:
        strategy: As for :class:`WeightSyncScheme`, like all options up to ``timeout``.
        backend: Kept for TorchRL's signature; all values mean the object store.
        sync: As for :class:`aiosync.WeightSyncScheme`.
        per_worker_weights: ``send({0: ..., 1: ...})`` gives each worker its own weights.
        apply: ``"auto"``, or ``"manual"`` to apply only in calls that ask for it.
        apply_copy: Copy updates into the parameters' memory.
        buffers: ``"persistent"`` keeps updates out of other buffers of a worker's module.
        guard: ``"forward"``, or ``"reading"`` for ``with scheme.reading():``.
        strict: Every name and dtype must match.
        require: Number of workers that must apply an update for ``send()`` to succeed.
        timeout: Default timeout of calls in seconds; ``None`` for ever.
        wire_dtype: A floating-point dtype to which the sender casts the weights on their way; or
            one for each name pattern.
        first_version: A sender's first version; a trainer that resumes continues with it.
        address: Address at which the sender listens for control streams; its node's address in the
            cluster, and a free port, if omitted.
        token: Secret of the control streams; generated when omitted, and pickled with the scheme.
        reconnect: Seconds that a worker keeps trying to restore a lost link; ``None`` for ever, 0
            for not at all.
        handshake_timeout: Seconds that a peer has to prove its identity.
        inline_nbytes: Updates up to this size travel in the control stream.
        limits: Limits on what a peer may announce.
        shared_memory: Workers on the sender's host read updates from shared memory instead of a
            stream and the object store. Must be true on both sides. On Linux only.

    Raises:
        ConfigError: Ray is not installed, or an option has an illegal value.
    """

    def __init__(
        self,
        strategy: Literal["tensordict", "state_dict"] | WeightStrategy = "tensordict",
        backend: str = "gloo",
        sync: bool = True,
        *,
        per_worker_weights: bool = False,
        apply: Literal["auto", "manual"] = "auto",
        apply_copy: bool = False,
        buffers: Literal["all", "persistent"] = "all",
        guard: Literal["forward", "reading"] = "forward",
        strict: bool = True,
        require: Require = "all",
        timeout: float | None = 120.0,
        wire_dtype: Dtypes | None = None,
        first_version: int = 1,
        address: str | None = None,
        token: str | bytes | None = None,
        reconnect: float | None = 30.0,
        handshake_timeout: float = 10.0,
        inline_nbytes: int = INLINE_NBYTES,
        limits: Limits | None = None,
        shared_memory: bool = True,
    ) -> None:
        load_ray()
        super().__init__(
            strategy,
            sync=sync,
            per_worker_weights=per_worker_weights,
            apply=apply,
            apply_copy=apply_copy,
            buffers=buffers,
            guard=guard,
            strict=strict,
            require=require,
            timeout=timeout,
            reconnect=reconnect,
            handshake_timeout=handshake_timeout,
            limits=limits,
            wire_dtype=wire_dtype,
            first_version=first_version,
            shared_memory=shared_memory,
        )
        fabric = _RayFabric(address, token)
        # The actor of a transform may replace its module without notice.
        fabric.promises = not isinstance(self, RayModuleTransformScheme)
        self._use(fabric)
        self.inline_nbytes = inline_nbytes
        self.backend = backend

    _fabric: _RayFabric

    # -- the sender ----------------------------------------------------------------------------

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
        ctx: Any = None,
    ) -> None:
        """Make this object the sender; see :meth:`WeightSyncScheme.init_on_sender`.

        Args:
            model_id: Name of the model.
            context: Owner of the model.
            params_map: Worker index -> its weights.
            weights: Weights for every worker.
            model: Module whose weights every worker gets.
            devices: One device for each worker.
            device_map_fn: Called with (worker index, weights) for each worker and send.
            num_workers: Number of workers that ``connect()`` waits for; ``None`` for any number.
            pipes: Connected sockets to the workers, by index.
            transports: Links to the workers, by index; :class:`RayActorTransport` for actors that
                know nothing about aiosync.
            remote_collectors: The workers' actors; they only say how many workers there are.
            ctx: Ignored.
        """
        if remote_collectors is not None:
            num_workers = _count_collectors(remote_collectors, num_workers)
        need_cluster()
        super().init_on_sender(
            model_id,
            context,
            params_map=params_map,
            weights=weights,
            model=model,
            devices=devices,
            device_map_fn=device_map_fn,
            num_workers=num_workers,
            pipes=pipes,
            transports=transports,
            ctx=ctx,
        )
        self._fabric.given = links = [*(transports or {}).values()]
        self._life.shared.update(links)
        for link in links:
            if isinstance(link, RayActorTransport):
                link.model_id = self.model_id or "policy"

    async def send(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
        max_lag: int | None = None,
    ) -> SendReport:
        """Send a snapshot of the weights; see :meth:`WeightSyncScheme.send`.

        Args:
            weights: The weights to send.
            worker_ids: Only these workers change.
            timeout: Seconds for the whole call, excluding copying into the object store.
            max_lag: Number of versions that workers may be behind.
        """
        try:
            return await super().send(weights, worker_ids, timeout=timeout, max_lag=max_lag)
        finally:
            # The tensors are the caller's afterwards, even if the send failed.
            await self._fabric.idle()

    @property
    def connection_info_name(self) -> str:
        """Name under which the sender announces its address in the cluster.

        Copies of one scheme have the same; no two other schemes do, nor two models.
        """
        return self._fabric.key


class _RayFabric(ClusterFabric[RayWeightSyncScheme]):
    """Fabric of a Ray cluster: its key-value store, and its object store.

    Attributes:
        given: Links to the workers that the user gave.
        transform: The transform whose actor is the only worker; ``None`` for others.
    """

    _of_process: ClassVar[tuple[str, ...]] = (
        *ClusterFabric._of_process,
        "given",
        "transform",
        "_objects",
        "_published",
        "_remote",
    )

    not_found_text = (
        "it has not announced itself in this Ray cluster with the scheme that this one was "
        "copied from, and the same model_id"
    )

    def begin(self, life: Life) -> None:
        """Take the scheme's new life in this process, in which it has no links yet."""
        super().begin(life)
        self.given: list[Transport] = []
        self.transform: Any = None
        # Payloads in the object store, which all links of a sender share.
        self._objects: RayObjects | None = None
        # The address that this sender has left in the cluster.
        self._published: bytes | None = None
        # Maker of the receiver in the transform's actor.
        self._remote: RayModuleTransformSender | None = None

    @property
    def key(self) -> str:
        """Name under which the sender announces its address in the cluster."""
        # Leave out the NUL byte that makes a Unix address of it.
        return f"{self.meeting[1:]}:{self.model_id}"

    async def meet(
        self, scheme: RayWeightSyncScheme, timeout: float | None, arguments: ConnectArguments
    ) -> None:
        """Meet the other side; the sender of a transform makes the actor join at the same time."""
        if not isinstance(scheme, RayModuleTransformScheme) or self.life.role != "sender":
            await super().meet(scheme, timeout, arguments)
            return
        self._remote = scheme.create_sender()
        starting = asyncio.ensure_future(
            self._remote.start(copy.copy(scheme), self.model_id, timeout)
        )
        meeting = asyncio.ensure_future(super().meet(scheme, timeout, arguments))
        try:
            await asyncio.wait({starting, meeting}, return_when=asyncio.FIRST_EXCEPTION)
            if starting.done():
                # The error of the actor says more than that no worker came.
                starting.result()
            await meeting
            await starting
        finally:
            for task in (starting, meeting):
                task.cancel()
            await asyncio.gather(starting, meeting, return_exceptions=True)

    # -- links -----------------------------------------------------------------------------------

    def how(self, scheme: RayWeightSyncScheme) -> How:
        """Return how ``send()`` copies: ``"borrow"`` leaves large tensors to the object store."""
        # Links to plain actors and those of this fabric share what one of them puts there; other
        # links that the user gave need a copy of the bytes. So does a plain actor that is behind
        # with parts of the names: what the store has for it cannot be read back, to join them.
        sharing: set[type] = {RayActorTransport} if scheme.strict else set()
        shares = {type(link) for link in self.given} <= sharing
        return (
            "borrow" if shares and scheme.inline_nbytes <= _MAX_BORROWING_INLINE_NBYTES else "copy"
        )

    def carry(
        self, scheme: RayWeightSyncScheme, control: TCPTransport, *, listened: bool
    ) -> DataPlaneTransport:
        """Return a link whose large payloads go through the object store."""
        if listened and self._objects is None:
            self._objects = RayObjects()
            self.life.shared.add(self._objects)
        return RayTransport(control, objects=self._objects, inline_nbytes=scheme.inline_nbytes)

    async def idle(self) -> None:
        """Wait until no thread reads the sender's tensors any more."""
        for link in self.given:
            if isinstance(link, RayActorTransport):
                await link.idle()
        if self._objects is not None:
            await self._objects.threads.idle()

    # -- finding each other ----------------------------------------------------------------------

    def default_address(self) -> Address:
        """Return the address of this node in the cluster, with any port."""
        return Address("tcp", need_cluster().util.get_node_ip_address())

    async def publish(self, address: Address) -> None:
        """Put the sender's address into the cluster's key-value store."""
        self._published, key = str(address).encode(), self.key.encode()
        put = functools.partial(_store()._internal_kv_put, namespace=_NAMESPACE)
        try:
            announce = functools.partial(put, key, self._published, True)
            await in_own_thread(announce, "aiosync-cluster")
        except Exception as exc:  # Ray's, of any type; connect() and send() raise it
            raise ConnectError(
                f"the trainer could not be registered in the Ray cluster: "
                f"{type(exc).__name__}: {exc}"
            ) from exc

    async def find(self) -> tuple[str, bytes | None] | None:
        """Return the sender's address in that store, without a token; ``None`` if there is none."""
        need_cluster()
        found = await self.ask(_find, self.key.encode())
        return None if found is None else (found.decode(), None)

    # -- the end ---------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Withdraw the address, and end the receiver in the transform's actor."""
        published, self._published = self._published, None
        remote, self._remote = self._remote, None
        try:
            # Without a cluster, a call of Ray's would connect this process to one.
            if published is not None and load_ray().is_initialized():
                forget = functools.partial(_forget, self.key.encode(), published)
                # After a timeout the entry stays, and workers find no trainer there.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(in_own_thread(forget, "aiosync-cluster"), _CLOSE_SECONDS)
        finally:
            if remote is not None:
                await remote.stop(self.model_id)


def _store() -> Any:
    """Return the store of the cluster's head. Its calls are round trips, and may raise anything."""
    return importlib.import_module("ray.experimental.internal_kv")


def _find(key: bytes) -> bytes | None:
    """Return the value that a trainer has left under a key; ``None`` if there is none now."""
    try:
        found = _store()._internal_kv_get(key, namespace=_NAMESPACE)
    except Exception:  # noqa: BLE001 - the caller looks again
        return None
    return None if found is None else bytes(found)


def _forget(key: bytes, value: bytes) -> None:
    """Delete the value of a key if it still is ``value``: another trainer may have left its own."""
    # The cluster may have ended.
    with contextlib.suppress(Exception):
        if _find(key) == value:
            _store()._internal_kv_del(key, namespace=_NAMESPACE)


class RayModuleTransformScheme(RayWeightSyncScheme):
    """Scheme that sends weights to the module of a transform that runs in a Ray actor.

    There is one worker: the actor of the transform, an object with an attribute ``module``.
    :meth:`connect` makes a receiver inside it, so the actor needs no code of aiosync, and its
    methods may block: updates are received in a thread beside them and applied between two forward
    passes. If the actor replaces its module, the new one gets the next update. The receiver ends
    with the scheme, and when it has given up a trainer that was lost (``reconnect``).

    Args are those of :class:`RayWeightSyncScheme`.
    """

    def _set_transform(self, ray_transform: Any) -> None:
        """Set the transform; TorchRL's ``RayModuleTransform`` does so with itself."""
        self._fabric.transform = ray_transform

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
        """Make this object the sender; see :meth:`RayWeightSyncScheme.init_on_sender`.

        Args:
            model_id: Name of the model.
            context: Owner of the trainer's model.
            params_map: Worker index -> its weights.
            weights: The weights.
            model: Module whose weights the transform's module gets.
            devices: A list with one device.
            device_map_fn: Called with (0, weights) for each send.
            num_workers: 1, the transform's actor.
            pipes: Not to be given.
            transports: Not to be given.
            remote_collectors: Not to be given.
            ray_transform: The transform: an object with an attribute ``_actor``, or the handle of
                the actor.
            ctx: Ignored.

        Raises:
            ConfigError: There is no transform, or more than one worker.
        """
        transform = ray_transform if ray_transform is not None else self._fabric.transform
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
        self._fabric.transform = transform

    def create_sender(self) -> RayModuleTransformSender:
        """Make the object that makes the receiver inside the transform's actor."""
        return RayModuleTransformSender(self._fabric.transform)


class RayModuleTransformSender:
    """Maker of the receiver inside a transform's actor, which it ends, too.

    Args:
        ray_transform: An object with an attribute ``_actor``, or the handle of the actor.
    """

    def __init__(self, ray_transform: Any) -> None:
        self._ray = need_cluster()
        self.actor: Any = getattr(ray_transform, "_actor", ray_transform)
        # This object ends only the receiver that it has made, which has the same ticket.
        self._ticket = secrets.token_bytes(16)

    async def start(
        self, scheme: RayModuleTransformScheme, model_id: str, timeout: float | None
    ) -> None:
        """Have the actor join, and wait until it has.

        Args:
            scheme: A copy of the sender's scheme, without a role.
            model_id: Name of the model.
            timeout: Seconds; ``None`` waits until the actor has ended.

        Raises:
            ConnectError: The actor has died, or its attempt to join raised an error.
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
        except BaseException as exc:  # The caller gets the error, or one that it causes.
            if self._ray.is_initialized():
                self.actor.__ray_call__.remote(_leave, model_id, self._ticket)
            if isinstance(exc, TimeoutError) and not isinstance(exc, AiosyncError):
                raise ConnectTimeout(
                    f"{self.actor!r} did not join within {timeout:g} s: it may be busy with a call"
                ) from exc
            raise

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of this module in the actor, which is its first argument."""
        called = self.actor.__ray_call__.remote(function, *args)
        try:
            return await landed(called)
        except Exception as exc:  # The error may be of any type; the caller of connect() sees it.
            if isinstance(error_of_cluster(exc), self._ray.exceptions.RayActorError):
                raise ConnectError(f"{self.actor!r} has died") from exc
            reason = getattr(exc, "cause", None) or exc
            raise ConnectError(
                f"{self.actor!r} could not join: {type(reason).__name__}: {text_of(reason)}"
            ) from exc

    async def stop(self, model_id: str) -> None:
        """End the receiver that this object made, if it runs and the actor is alive.

        Waits for 5 seconds at most.
        """
        if self._ray.is_initialized():
            called = self.actor.__ray_call__.remote(_leave, model_id, self._ticket)
            left = landed(called)
            await asyncio.wait({left}, timeout=_CLOSE_SECONDS)


class _ModuleOf:
    """Context of the receiver in an actor: the transform's module, even after a replacement."""

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
        ticket: Random bytes by which the sender that asked for the receiver knows it again.

    Attributes:
        ticket: As given.
        joined: Done once the receiver has connected, or has failed to.
    """

    def __init__(
        self, scheme: RayModuleTransformScheme, transform: Any, model_id: str, ticket: bytes
    ) -> None:
        # A scheme keeps only a weak reference to its context.
        self._context = _ModuleOf(transform)
        scheme.init_on_receiver(model_id=model_id, context=self._context, worker_idx=0)
        self.ticket = ticket
        self._scheme = scheme
        # Its key in _receivers.
        self._key = (id(transform), model_id)
        self.joined: Future[None] = Future()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        # The task that close() cancels; None before start(), and once it closes the scheme itself.
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    def start(self, timeout: float | None) -> Future[None]:
        """Begin to connect; return a future that is done when that has succeeded or failed."""
        self._task = self._runner.get_loop().create_task(self._live(timeout))
        self._thread = threading.Thread(
            target=self._run, args=(self._task,), name="aiosync-transform", daemon=True
        )
        self._thread.start()
        return self.joined

    async def _live(self, timeout: float | None) -> None:
        """Connect, and receive updates until the link ends or :meth:`close` cancels this."""
        async with self._scheme:
            try:
                await self._scheme.connect(timeout=timeout)
                self.joined.set_result(None)
                while True:
                    # With apply="manual" this raises each refusal; the trainer was told, too.
                    with contextlib.suppress(ApplyError):
                        await self._scheme.receive(timeout=None)
            finally:
                # The scheme is closed next, which close() must not cancel.
                self._task = None

    def _run(self, living: asyncio.Task[None]) -> None:
        """Run the loop in the receiver's thread until the task is done, and note how it ended."""
        try:
            with self._runner:
                self._runner.get_loop().run_until_complete(living)
        except BaseException as exc:  # The trainer has gone, or close() was called.
            if not self.joined.done():
                # The error is kept until a caller asks for it, or the next trainer comes.
                self.joined.set_exception(exc)
            elif _receivers.get(self._key) is self:
                del _receivers[self._key]
            if not isinstance(exc, AiosyncError | asyncio.CancelledError):
                # This is a bug, which has to appear on stderr, too.
                raise

    def close(self) -> None:
        """End the receiver; the module keeps its weights. Idempotent, bounded."""
        # The receiver may have ended already.
        with contextlib.suppress(RuntimeError):
            self._runner.get_loop().call_soon_threadsafe(self._cancel)
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


_receivers: dict[tuple[int, str], RayModuleTransformReceiver] = {}
"""The receivers of this process, which is an actor, by the transform's id and the model.

Not kept in the actor's object, which has to stay as picklable as it is.
"""

# These functions run inside the actor. None waits for the trainer, as the actor has other callers.


def _join(
    transform: Any,
    scheme: RayModuleTransformScheme,
    model_id: str,
    timeout: float | None,
    ticket: bytes,
) -> None:
    """Begin to receive for the actor's module; end the receiver of another trainer first."""
    if getattr(transform, "module", None) is None:
        raise ConfigError(f"{type(transform).__name__} has no attribute 'module'")
    _leave(transform, model_id)
    receiver = RayModuleTransformReceiver(scheme, transform, model_id, ticket)
    receiver.start(timeout)
    _receivers[id(transform), model_id] = receiver


def _has_joined(transform: Any, model_id: str, ticket: bytes) -> bool:
    """Return True once the receiver with this ticket has joined; raise if it failed or is gone."""
    receiver = _receivers.get((id(transform), model_id))
    if receiver is None or receiver.ticket != ticket:
        raise ConnectError("another trainer has this transform by now, or its link was lost")
    return receiver.joined.done() and receiver.joined.result() is None


def _leave(transform: Any, model_id: str, ticket: bytes | None = None) -> None:
    """End the receiver with this ticket; with ``None``, end any."""
    receiver = _receivers.get((id(transform), model_id))
    if receiver is not None and ticket in (None, receiver.ticket):
        del _receivers[id(transform), model_id]
        receiver.close()


def _count_collectors(collectors: Sequence[Any], num_workers: int | None) -> int:
    """Return the number of collectors; raise if another number of workers was given."""
    if num_workers not in (None, len(collectors)):
        raise ConfigError(
            f"conflicting numbers of workers (num_workers: "
            f"{num_workers}, remote_collectors: {len(collectors)})"
        )
    return len(collectors)
