"""Weights over ``torch.distributed.rpc``.

Must not import another concrete scheme, nor torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal

from aiosync.errors import ConfigError, ConnectError
from aiosync.rendezvous.dialer import Left, retry
from aiosync.schemes._stream import StreamScheme
from aiosync.schemes.cluster import ClusterScheme
from aiosync.schemes.options import Option, seconds
from aiosync.schemes.sources import DeviceMap
from aiosync.sender import Streaming
from aiosync.strategy import WeightStrategy
from aiosync.tensors import Dtypes
from aiosync.transports.address import Address, any_port_of, own_host
from aiosync.transports.base import Transport
from aiosync.transports.rpc import RPCTransport, invitation, invite, need_rpc
from aiosync.types import Limits, Require

__all__ = ["RPCWeightSyncScheme"]

_TELL_SECONDS = 5.0  # for one call that tells a worker the address
_KEEP_TELLING_SECONDS = 120.0  # to a worker that is not up, or down


class RPCWeightSyncScheme(ClusterScheme):
    """Sends weights to the workers of a ``torch.distributed.rpc`` group.

    RPC tells each worker where the sender listens; updates travel in a stream of its own, in
    chunks with checksums, as with :class:`aiosync.TCPWeightSyncScheme`. Workers on the sender's
    own host read them from shared memory, unless told otherwise (``shared_memory``). Every process
    calls ``init_rpc()`` itself, before :meth:`connect`, and ``rpc.shutdown()`` after
    :meth:`aclose`. Copies of this object may be made before :meth:`init_on_sender`, as TorchRL's
    collectors do: the sender then tells the workers that it knows by name. Workers may come and go
    at any time. See ``docs/topics/rpc.md``.

    RPC executes what its peers send, by design: use it only between hosts that trust each other.

    Args:
        strategy: As for :class:`WeightSyncScheme`, like all options up to ``timeout``.
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
        address: Where the sender listens. By default on any port of the address
            from which this host reaches ``MASTER_ADDR``, or else of the loopback address.
        token: Secret of the streams. Generated when omitted: it travels in the pickle
            of the scheme, and by RPC.
        reconnect: Seconds that a worker keeps trying to restore a lost link; ``None`` for
            ever, 0 for not at all.
        patience: Seconds without progress after which a worker that owes an answer is dropped.
        handshake_timeout: Seconds that a peer has to prove its identity.
        limits: What a peer may announce.
        shared_memory: Workers on the sender's host read updates from shared memory instead of a
            stream. Must be true on both sides. On Linux only.

    Raises:
        ConfigError: An option has an illegal value.
    """

    patience: Option[float] = Option(seconds(), "Seconds without progress until a drop.")

    def __init__(
        self,
        strategy: Literal["tensordict", "state_dict"] | WeightStrategy = "tensordict",
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
        patience: float = 60.0,
        handshake_timeout: float = 10.0,
        limits: Limits | None = None,
        shared_memory: bool = True,
    ) -> None:
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
        self.patience = patience
        self._scheme_id = secrets.token_hex(16)  # the same in every copy

    def _reset(self) -> None:
        super()._reset()
        self._rpc_workers: list[str] = []

    def _separate(self) -> None:
        super()._separate()
        self._scheme_id = secrets.token_hex(16)

    # -- links ---------------------------------------------------------------------------------

    def _streaming(self) -> Streaming:
        return Streaming(stall_timeout=self.patience)

    _untaken = StreamScheme._untaken  # here updates travel in the stream

    def _transport_over(self, sock: socket.socket, name: str) -> Transport:
        return RPCTransport(sock, limits=self.limits, name=name)

    def _default_address(self) -> Address:
        return any_port_of(own_host(os.environ.get("MASTER_ADDR")))

    # -- the sender tells the workers ----------------------------------------------------------

    def init_on_sender(
        self,
        model_id: str | None = None,
        context: Any = None,
        *,
        workers: Sequence[str] | None = None,
        params_map: Mapping[int, Any] | None = None,
        weights: Any = None,
        model: Any = None,
        devices: Sequence[Any] | None = None,
        device_map_fn: DeviceMap | None = None,
        num_workers: int | None = None,
        pipes: Sequence[Any] | None = None,
        transports: Mapping[int, Transport] | None = None,
        ctx: Any = None,
    ) -> None:
        """Make this object the sender; see :meth:`WeightSyncScheme.init_on_sender`.

        Args:
            model_id: As there, like everything that is not listed here.
            context: May also have ``collector_infos``, as TorchRL's ``RPCCollector`` has: the
                RPC workers that are told where to connect.
            workers: Names of the RPC workers that are told, instead. Only copies that were made
                before this call need it.
            params_map: As there.
            weights: As there.
            model: As there.
            devices: As there.
            device_map_fn: As there.
            num_workers: As there; by default as many as are named.
            pipes: As there.
            transports: As there.
            ctx: Ignored.

        Raises:
            ConfigError: The arguments exclude each other.
            LocalProtocolError: This object already has a role.
        """
        if isinstance(workers, str):
            raise ConfigError(f"workers must be a list of names, got {workers!r}")
        infos = getattr(context, "collector_infos", None) if workers is None else workers
        names = [_name_of(info) for info in infos or ()]
        others = (params_map, devices, pipes, transports)
        if num_workers is None and names and all(other is None for other in others):
            num_workers = getattr(context, "num_workers", None) or len(names)
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
        self._rpc_workers = names

    async def _publish(self, address: Address) -> None:
        """Tell every worker, and again whenever a link was lost: it may have started again."""
        while self._rpc_workers:
            self._link_lost.clear()
            async with asyncio.TaskGroup() as telling:
                for name in self._rpc_workers:
                    telling.create_task(self._keep_telling(name, str(address)))
            await self._link_lost.wait()

    async def _keep_telling(self, name: str, url: str) -> None:
        token = self._credentials.token_bytes

        def attempt(left: Left) -> Awaitable[None]:
            return invite(name, self._scheme_id, url, token, _TELL_SECONDS)

        with contextlib.suppress(ConnectError):  # connect() and send() say who is missing
            await retry(attempt, _KEEP_TELLING_SECONDS, late=lambda last: ConnectError(str(last)))

    # -- a worker is told ----------------------------------------------------------------------

    _invites = (
        "it has not told this process its address, and has to know this RPC worker by name "
        "(workers=, or a context with collector_infos)"
    )

    async def _invitation(self) -> tuple[str, bytes | None] | None:
        need_rpc()
        return invitation(self._scheme_id)


def _name_of(info: Any) -> str:
    name = info if isinstance(info, str) else getattr(info, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{info!r} is neither the name of an RPC worker nor its WorkerInfo")
    return name
