"""Weights inside a Ray cluster, through its object store.

Ray is loaded when a scheme is constructed. Must not import another concrete scheme.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from aiosync.errors import ConfigError, ConnectError
from aiosync.schemes.cluster import INLINE_NBYTES, ClusterScheme
from aiosync.schemes.options import Option, count
from aiosync.schemes.sources import DeviceMap
from aiosync.sender import How
from aiosync.strategy import WeightStrategy
from aiosync.tensors import Dtypes
from aiosync.transports.address import Address, any_port_of
from aiosync.transports.base import Transport
from aiosync.transports.data_plane import DataPlaneTransport
from aiosync.transports.ray import (
    RayActorTransport,
    RayObjects,
    RayTransport,
    load_ray,
    need_cluster,
)
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits, Require, SendReport

__all__ = ["RayWeightSyncScheme"]

_NAMESPACE = b"aiosync"
_CLOSE_SECONDS = 5.0
# Larger weights go out from the tensors themselves, which only the object store copies at once.
_MAX_BORROWING_INLINE_NBYTES = 4 * 2**20


class RayWeightSyncScheme(ClusterScheme):
    """Sends weights to actors of a Ray cluster.

    Each worker has a control stream to the sender, which carries messages and small updates.
    Large ones are put into Ray's object store, once for all workers; workers of one node share
    that memory and point their parameters at it. Workers on the sender's own host read all of
    them from shared memory, unless told otherwise (``shared_memory``). See
    ``docs/topics/ray.md``.

    The object store's memory is read-only: a worker that writes to its parameters in place, for
    example by training them, dies with a segmentation fault.
    Pass ``apply_copy=True`` where workers do so.

    Args:
        strategy: As for :class:`WeightSyncScheme`, like all options up to ``timeout``.
        backend: Kept for TorchRL's signature; all values mean the object store.
        sync: Kept for TorchRL's signature.
        per_worker_weights: ``send({0: ..., 1: ...})`` gives each worker its own weights.
        apply: ``"auto"``, or ``"manual"`` to apply only in calls that ask for it.
        apply_copy: Copy updates into the parameters' memory.
        guard: ``"forward"``, or ``"reading"`` for ``with scheme.reading():``.
        strict: Every name and dtype must match.
        require: How many workers must apply an update for ``send()`` to succeed.
        timeout: Default timeout of calls in seconds; ``None`` for ever.
        wire_dtype: A floating-point dtype to which the sender casts the weights on their way; or
            one for each name pattern.
        first_version: What a sender counts from; a trainer that resumes continues with it.
        address: Where the sender listens for control streams; its node's address in the
            cluster, and a free port, if omitted.
        token: Secret of the control streams; generated when omitted, and pickled with the
            scheme.
        reconnect: Seconds that a worker keeps trying to restore a lost link; ``None`` for
            ever, 0 for not at all.
        handshake_timeout: Seconds that a peer has to prove its identity.
        inline_nbytes: Updates up to this size travel in the control stream.
        limits: What a peer may announce.
        shared_memory: Workers on the sender's host read updates from shared memory instead of a
            stream and the object store. Must be true on both sides. On Linux only.

    Raises:
        ConfigError: Ray is not installed, or an option has an illegal value.
    """

    backend: Option[str] = Option(lambda _, value: value, "Kept for TorchRL's signature.")
    inline_nbytes: Option[int] = Option(
        count(0), "Updates up to this size travel in the control stream."
    )

    def __init__(
        self,
        strategy: Literal["tensordict", "state_dict"] | WeightStrategy = "tensordict",
        backend: str = "gloo",
        sync: bool = True,
        *,
        per_worker_weights: bool = False,
        apply: Literal["auto", "manual"] = "auto",
        apply_copy: bool = False,
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
            guard=guard,
            strict=strict,
            require=require,
            timeout=timeout,
            address=address,
            token=token,
            reconnect=reconnect,
            handshake_timeout=handshake_timeout,
            limits=limits,
            wire_dtype=wire_dtype,
            first_version=first_version,
            shared_memory=shared_memory,
        )
        self.inline_nbytes = inline_nbytes
        self.backend = backend

    def _reset(self, model_id: str | None) -> None:
        super()._reset(model_id)
        self._objects: RayObjects | None = None
        self._published: bytes | None = None
        self._shares = True

    @property
    def _how(self) -> How:  # type: ignore[override]  # a constant above
        borrows = self._shares and self.inline_nbytes <= _MAX_BORROWING_INLINE_NBYTES
        return "borrow" if borrows else "copy"

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
        """See :meth:`WeightSyncScheme.init_on_sender`.

        Args:
            model_id: Name of the model.
            context: Owner of the model.
            params_map: Worker index -> its weights.
            weights: Weights for every worker.
            model: Module whose weights every worker gets.
            devices: One device for each worker.
            device_map_fn: Called with (worker index, weights) for each worker and send.
            num_workers: How many workers ``connect()`` waits for; ``None`` for any number.
            pipes: Connected sockets to the workers, by index.
            transports: Links to the workers, by index; :class:`RayActorTransport` for actors
                that know nothing about aiosync.
            remote_collectors: The workers' actors; they only say how many workers there are.
            ctx: Ignored.
        """
        if remote_collectors is not None:
            if num_workers not in (None, len(remote_collectors)):
                raise ConfigError(
                    f"conflicting numbers of workers (num_workers: "
                    f"{num_workers}, remote_collectors: {len(remote_collectors)})"
                )
            num_workers = len(remote_collectors)
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
        kinds = {type(link) for link in self._given_links()}
        # What one of these puts the others use, too; links of another kind need the bytes.
        self._shares = kinds <= {RayActorTransport}
        for link in self._given_links():
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
        """See :meth:`WeightSyncScheme.send`.

        Args:
            weights: What to send.
            worker_ids: Only these workers change.
            timeout: Seconds for the whole call, excluding copying into the object store.
            max_lag: How far workers may be behind.
        """
        try:
            return await super().send(weights, worker_ids, timeout=timeout, max_lag=max_lag)
        finally:  # also when it failed: the tensors are the caller's again afterwards
            await self._puts_done()

    def _given_links(self) -> list[Transport]:
        trainer = self._life.trainer
        return [] if trainer is None else list(trainer.links.values())

    async def _puts_done(self) -> None:
        for link in self._given_links():
            if isinstance(link, RayActorTransport):
                await link.idle()
        if self._objects is not None:
            await self._objects.threads.idle()

    def _carry(self, control: TCPTransport, *, listened: bool) -> DataPlaneTransport:
        if listened and self._objects is None:
            self._objects = RayObjects()
            self._life.shared.add(self._objects)
        return RayTransport(control, objects=self._objects, inline_nbytes=self.inline_nbytes)

    def _default_address(self) -> Address:
        return any_port_of(need_cluster().util.get_node_ip_address())

    # -- finding each other --------------------------------------------------------------------

    _invites = (
        "it has not announced itself in this Ray cluster with the scheme that this one was "
        "copied from, and the same model_id"
    )

    @property
    def connection_info_name(self) -> str:
        """Name under which the sender announces its address in the cluster.

        Copies of one scheme have the same; no two other schemes do, nor two models.
        """
        # Without the NUL that makes a Unix address of it.
        return f"{self._meeting[1:]}:{self.model_id or 'policy'}"

    async def _publish(self, address: Address) -> None:
        self._published, key = str(address).encode(), self.connection_info_name.encode()
        put = functools.partial(_store()._internal_kv_put, namespace=_NAMESPACE)
        try:
            await asyncio.to_thread(put, key, self._published, True)
        except Exception as exc:  # of any type; connect() and send() raise it
            raise ConnectError(
                f"the trainer could not be registered in the Ray cluster: "
                f"{type(exc).__name__}: {exc}"
            ) from exc

    async def _invitation(self) -> tuple[str, bytes | None] | None:
        need_cluster()
        found = await asyncio.to_thread(_find, self.connection_info_name.encode())
        return None if found is None else (found.decode(), None)

    # -- closing -------------------------------------------------------------------------------

    async def _close_here(self) -> None:
        published, self._published = self._published, None
        self._life.shared.update(self._given_links())
        connected = load_ray().is_initialized()  # before anything of Ray's connects again
        try:
            await super()._close_here()
        finally:
            if published is not None and connected and load_ray().is_initialized():
                key = self.connection_info_name.encode()
                withdrawing = asyncio.to_thread(_forget, key, published)
                with contextlib.suppress(TimeoutError):  # workers find nobody there then
                    await asyncio.wait_for(withdrawing, _CLOSE_SECONDS)


def _store() -> Any:
    """The store of the cluster's head. Each call is a round trip, and may raise anything."""
    return importlib.import_module("ray.experimental.internal_kv")


def _find(key: bytes) -> bytes | None:
    """What the trainer left there, as far as the cluster can say so now."""
    try:
        found = _store()._internal_kv_get(key, namespace=_NAMESPACE)
    except Exception:  # noqa: BLE001 - the caller looks again
        return None
    return None if found is None else bytes(found)


def _forget(key: bytes, value: bytes) -> None:
    """Take a note back if it still says ``value``: somebody else may have left another one."""
    with contextlib.suppress(Exception):  # the cluster has ended
        if _find(key) == value:
            _store()._internal_kv_del(key, namespace=_NAMESPACE)
