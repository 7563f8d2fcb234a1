"""The scheme of a ``torch.distributed.rpc`` group. Must not import torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from aiosync.errors import ConfigError, ConnectError
from aiosync.rendezvous.dialer import Left, retry
from aiosync.schemes.cluster import ClusterFabric, ClusterScheme
from aiosync.schemes.lifecycle import Life
from aiosync.schemes.options import RPCOptions
from aiosync.schemes.sources import DeviceMap
from aiosync.schemes.stream import StreamFabric
from aiosync.sender import Streaming
from aiosync.strategy import WeightStrategy
from aiosync.tensors import Dtypes
from aiosync.transports.address import Address, own_host
from aiosync.transports.base import Transport
from aiosync.transports.rpc import RPCTransport, invitation, invite, need_rpc
from aiosync.types import Limits, Require

__all__ = ["RPCWeightSyncScheme"]

# Seconds for one call that invites a worker to the address.
_INVITE_SECONDS = 5.0
# Seconds after which a lost link has all workers told again, whether or not all were told before.
_ROUND_SECONDS = 1.0
# Seconds of such attempts for a worker that is not up, or is down.
_KEEP_INVITING_SECONDS = 120.0


class RPCWeightSyncScheme(RPCOptions, ClusterScheme):
    """Scheme that sends weights to the workers of a ``torch.distributed.rpc`` group.

    RPC tells each worker where the sender listens; updates travel in a stream of its own, in chunks
    with checksums, as with :class:`aiosync.TCPWeightSyncScheme`. Workers on the sender's own host
    read them from shared memory, unless told otherwise (``shared_memory``). Every process calls
    ``init_rpc()`` itself, before :meth:`connect`, and ``rpc.shutdown()`` after :meth:`aclose`.
    Copies of this object may be made before :meth:`init_on_sender`, as TorchRL's collectors do: the
    sender then tells the workers that it knows by name. Workers may come and go at any time. See
    ``docs/topics/rpc.md``.

    RPC executes what its peers send, by design: use it only between hosts that trust each other.

    Args:
        strategy: As for :class:`WeightSyncScheme`, like all options up to ``timeout``.
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
        address: Address at which the sender listens. By default on any port of the address from
            which this host reaches ``MASTER_ADDR``, or else of the loopback address.
        token: Secret of the streams. Generated when omitted: it travels in the pickle of the
            scheme, and by RPC.
        reconnect: Seconds that a worker keeps trying to restore a lost link; ``None`` for ever, 0
            for not at all.
        patience: Seconds without progress after which a worker that owes an answer is dropped.
        handshake_timeout: Seconds that a peer has to prove its identity.
        limits: Limits on what a peer may announce.
        shared_memory: Workers on the sender's host read updates from shared memory instead of a
            stream. Must be true on both sides. On Linux only.

    Raises:
        ConfigError: An option has an illegal value.
    """

    def __init__(
        self,
        strategy: Literal["tensordict", "state_dict"] | WeightStrategy = "tensordict",
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
        self._use(_CallFabric(address, token))
        self.patience = patience

    _fabric: _CallFabric

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
            context: May also have ``collector_infos``, as TorchRL's ``RPCCollector`` has: the RPC
                workers that are told the sender's address.
            workers: Names of the RPC workers that are told the address, instead. Only copies that
                were made before this call need it.
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
        names = _names_of(workers, context)
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
        self._fabric.workers = names


class _CallFabric(ClusterFabric[RPCWeightSyncScheme]):
    """Fabric whose workers learn the sender's address by a call of RPC.

    Attributes:
        workers: Names of the RPC workers that are told the address.
    """

    _of_process: ClassVar[tuple[str, ...]] = (*ClusterFabric._of_process, "workers")

    not_found_text = (
        "it has not told this process its address: it has to know this RPC worker by name "
        "(workers=, or a context with collector_infos), and to have the same model_id"
    )

    def begin(self, life: Life) -> None:
        """Take the scheme's new life in this process, in which it knows no workers yet."""
        super().begin(life)
        self.workers: list[str] = []

    # -- links -----------------------------------------------------------------------------------

    def streaming(self, scheme: RPCWeightSyncScheme) -> Streaming:
        """Return the settings of payloads, which travel in the stream, in chunks."""
        return Streaming(stall_timeout=scheme.patience)

    def untaken(self, scheme: RPCWeightSyncScheme) -> float | None:
        """Return as for other streams: updates travel in it, which a busy worker leaves untaken."""
        return StreamFabric.untaken(self, scheme)

    def link(self, scheme: RPCWeightSyncScheme, sock: socket.socket, name: str) -> Transport:
        """Make a link over a connected socket."""
        return RPCTransport(sock, limits=scheme.limits, name=name)

    def default_address(self) -> Address:
        """Return the address at which the host ``MASTER_ADDR`` reaches this host."""
        return Address("tcp", own_host(os.environ.get("MASTER_ADDR")))

    @property
    def _key(self) -> str:
        """Name under which workers keep this model's address: copies may serve other models."""
        return f"{self.meeting}:{self.model_id}"

    # -- inviting workers ------------------------------------------------------------------------

    async def publish(self, address: Address) -> None:
        """Tell every worker the address, also after a lost link: the worker may have restarted."""
        async with asyncio.TaskGroup() as inviting:
            while self.workers:
                self._link_lost.clear()
                calls = [
                    inviting.create_task(self._keep_inviting(name, str(address)))
                    for name in self.workers
                ]
                # A worker that cannot be told must not delay the others. Without any wait, many
                # losses in a row would each make a call to every worker.
                await asyncio.wait(calls, timeout=_ROUND_SECONDS)
                await self._link_lost.wait()
                for call in calls:
                    call.cancel()

    async def _keep_inviting(self, name: str, url: str) -> None:
        """Tell one RPC worker the address and the token; try for 120 s until it has them."""
        token = self.credentials.token_bytes

        def attempt(left: Left) -> Awaitable[None]:
            return invite(name, self._key, url, token, _INVITE_SECONDS)

        # connect() and send() report the workers that are missing.
        with contextlib.suppress(ConnectError):
            await retry(attempt, _KEEP_INVITING_SECONDS, late=lambda last: ConnectError(str(last)))

    # -- receiving the address -------------------------------------------------------------------

    async def find(self) -> tuple[str, bytes | None] | None:
        """Return the address and the token that the sender told this process; ``None`` before."""
        need_rpc()
        return invitation(self._key)


def _names_of(workers: Sequence[str] | None, context: Any) -> list[str]:
    """Return the names of the RPC workers that are given, or else those of the context."""
    if isinstance(workers, str):
        raise ConfigError(f"workers must be a list of names, got {workers!r}")
    infos = getattr(context, "collector_infos", None) if workers is None else workers
    return [_name_of(info) for info in infos or ()]


def _name_of(info: Any) -> str:
    """Return the name of an RPC worker that is given by its name or by its ``WorkerInfo``."""
    name = info if isinstance(info, str) else getattr(info, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{info!r} is neither the name of an RPC worker nor its WorkerInfo")
    return name
