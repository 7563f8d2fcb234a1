"""Schemes of a cluster: a control stream, and another medium beside it for large payloads.

The sender listens and workers dial, as with TCP. Each scheme decides how a worker finds the
address, and what moves large payloads. Workers on the sender's host may read shared memory instead.
Must not import torch.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal

from aiosync.errors import AiosyncError, AuthError, ConfigError, ConnectError
from aiosync.rendezvous.dialer import Left, retry
from aiosync.rendezvous.listener import StreamListener
from aiosync.rendezvous.same_host import SameHost, dial_here
from aiosync.schemes.options import DistributedOptions, EngineOptions, RPCOptions
from aiosync.schemes.roles import Trainer
from aiosync.schemes.sources import DeviceMap, Sources
from aiosync.schemes.tcp import StreamScheme
from aiosync.sender import Streaming, WeightSender
from aiosync.strategy import WeightStrategy
from aiosync.tensors import Dtypes
from aiosync.transports.address import Address, own_host
from aiosync.transports.base import Transport
from aiosync.transports.credentials import Credentials
from aiosync.transports.data_plane import DataPlaneTransport
from aiosync.transports.distributed import DistributedTransport
from aiosync.transports.rpc import RPCTransport, invitation, invite, need_rpc
from aiosync.transports.shared_memory import Arena
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits, Require
from aiosync.wire import Hello

__all__ = ["INLINE_NBYTES", "ClusterScheme", "DistributedWeightSyncScheme", "RPCWeightSyncScheme"]

INLINE_NBYTES = 4 * 2**20
"""Updates up to this size travel in the control stream.

Starting a transfer beside it takes a few messages or calls, and a thread or two: as long as a
stream takes for so many bytes.
"""


class ClusterScheme(EngineOptions, StreamScheme):
    """Common part of schemes that send messages over a control stream, large payloads beside it.

    Args:
        strategy: As for :class:`WeightSyncScheme`, like all options up to ``timeout``.
        address: Address at which the sender listens for control streams; ``None`` lets the engine
            choose.
        token: Secret of the control stream; generated when omitted, and pickled with the scheme.
        reconnect: Seconds that a worker keeps trying to restore a lost link.
        handshake_timeout: Seconds that a peer has to prove its identity.
        limits: Limits on what a peer may announce.
        wire_dtype: Dtype to which the sender casts floating-point weights on their way.
        first_version: A sender's first version; a trainer that resumes continues with it.
        shared_memory: Workers on the sender's host read updates from shared memory.
    """

    def __init__(
        self,
        strategy: Literal["tensordict", "state_dict"] | WeightStrategy = "tensordict",
        *,
        sync: bool,
        per_worker_weights: bool,
        apply: Literal["auto", "manual"],
        apply_copy: bool,
        buffers: Literal["all", "persistent"],
        guard: Literal["forward", "reading"],
        strict: bool,
        require: Require,
        timeout: float | None,
        address: str | None,
        token: str | bytes | None,
        reconnect: float | None,
        handshake_timeout: float,
        limits: Limits | None,
        wire_dtype: Dtypes | None,
        first_version: int,
        shared_memory: bool,
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
            wire_dtype=wire_dtype,
            first_version=first_version,
        )
        self._address = None if address is None else Address.parse(address)
        self._credentials = Credentials(token=secrets.token_bytes(32) if token is None else token)
        self._set_options(
            reconnect=reconnect,
            shared_memory=shared_memory,
            handshake_timeout=handshake_timeout,
            limits=limits,
        )

    # Longest pause in seconds between two searches for the sender.
    _longest_pause = 0.5

    def _reset(self, model_id: str | None) -> None:
        super()._reset(model_id)
        self._link_lost = asyncio.Event()
        # The first is true during the search for a trainer; the second if the trainer told its
        # token.
        self._looking = self._invited = False
        self._same_host: SameHost | None = None

    @property
    def _untaken(self) -> float | None:
        # Large updates do not travel here. The messages that do fit into the buffers of the peer's
        # host, which takes them however busy the process is, unless the host is gone.
        return None if self._keepalive is None else 2 * self._keepalive

    def create_transport(self, pipe_or_context: Any = None, **torchrl: Any) -> Transport:
        """Make a link over a connected stream socket. Takes ownership of it; needs a running loop.

        Args:
            pipe_or_context: Connected TCP or Unix socket, or an existing link.
            torchrl: Refused: the arguments of TorchRL's scheme of this name.

        Raises:
            ConfigError: It is something else.
        """
        if torchrl or isinstance(pipe_or_context, tuple | None):
            given = "=, ".join([*torchrl, ""]).removesuffix(", ") or repr(pipe_or_context)
            raise ConfigError(
                f"{type(self).__name__}.create_transport() takes a connected socket, and not "
                f"{given}: workers find the trainer after init_on_sender() and connect(); the "
                "scheme of this name in aiosync.legacy takes what TorchRL's does"
            )
        return super().create_transport(pipe_or_context)

    # -- methods for subclasses to override ----------------------------------------------------

    def _carry(self, control: TCPTransport, *, listened: bool) -> Transport:
        """Return a link over a control stream, which it owns from then on; or that stream."""
        del listened
        return control

    @abc.abstractmethod
    def _default_address(self) -> Address:
        """Return the address at which the sender listens if none was given."""

    @abc.abstractmethod
    async def _publish(self, address: Address) -> None:
        """Sender: let workers that have no address find this one."""

    _invites: str = ""
    """Text of errors while there is no :meth:`_invitation`; empty if there never is one."""

    @abc.abstractmethod
    async def _invitation(self) -> tuple[str, bytes | None] | None:
        """Worker: return the address that the sender published last, and a new token, if any."""

    # -- links ---------------------------------------------------------------------------------

    def _linked(self, control: TCPTransport, *, listened: bool) -> Transport:
        try:
            link = self._carry(control, listened=listened)
        except BaseException:
            # The error is raised again for the caller.
            control.abort()
            raise
        self._life.shared.add(link)
        return link

    def _transport_over(self, sock: socket.socket, name: str) -> Transport:
        control = TCPTransport(sock, limits=self.limits, name=name)
        return self._linked(control, listened=self._life.role == "sender")

    def _make_arena(self) -> Arena | None:
        if self._same_host is None:
            return None
        self._same_host.arena = arena = Arena()
        return arena

    # -- the sender ----------------------------------------------------------------------------

    def _listen(self, address: Address) -> StreamListener:
        listener = super()._listen(address)
        if self.shared_memory:
            # If the address is taken, workers come the other way.
            with contextlib.suppress(ConfigError):
                self._same_host = SameHost(
                    Address.parse(listener.url),
                    self._credentials,
                    handshake_timeout=self.handshake_timeout,
                    limits=self.limits,
                )
                self._life.listeners.append(self._same_host)
        return listener

    def _bind(self, sources: Sources) -> None:
        self._address = self._address or self._default_address()
        super()._bind(sources)

    def _start_listening(self, trainer: Trainer, sender: WeightSender) -> None:
        if self._listener is not None:

            def join(link: Transport, hello: Hello) -> None:
                assert link.channel is not None
                link.channel.call_on_end(self._link_lost.set)
                sender.workers.welcome(link, None, hello)

            def wrap(control: TCPTransport) -> Transport:
                return self._linked(control, listened=True)

            if self._same_host is not None:
                self._same_host.start(join, sender.workers.tasks)
            sender.workers.strangers = self._listener.refusals
            self._listener.start(join, sender.workers.crashed, wrap)
            assert self._address is not None
            sender.workers.tasks.start(self._publish(self._address), "aiosync rendez-vous")

    # -- a worker ------------------------------------------------------------------------------

    async def _dial_trainer(self, left: Left, again: bool) -> Transport:
        self._looking = True
        found = await self._invitation()
        self._looking = False
        self._invited = self._accept(found)
        dialer = self._dialer()
        if self.shared_memory:
            rest = left()
            limit = self.handshake_timeout if rest is None else min(rest, self.handshake_timeout)
            here = await dial_here(
                dialer.address,
                self._credentials,
                self.limits,
                timeout=limit,
            )
            if here is not None:
                return here
        return self._linked(await dialer.dial(left(), again=again), listened=False)

    def _nobody(self, within: str) -> str:
        where = "" if self._address is None else f" at {self._address}"
        return (
            f"the trainer{where} was not reached{within}: it has to run init_on_sender() and "
            "connect()"
        )

    def _is_final(self, error: AiosyncError) -> bool:
        # A new trainer may be about to publish its address and its token.
        waits = self._invited and isinstance(error, AuthError)
        return self._looking or (super()._is_final(error) and not waits)

    def _accept(self, found: tuple[str, bytes | None] | None) -> bool:
        """Take over the sender's published address; return True if it came with a token."""
        if found is not None:
            url, token = found
            self._address = Address.parse(url)
            if token is not None:
                self._credentials = Credentials(token=token)
            return token is not None
        where = self._address
        if self._invites and (where is None or not (where.port or where.path)):
            raise ConnectError(self._invites)
        if where is None:
            raise ConfigError(
                "this worker does not know where the trainer listens: pickle or copy the scheme "
                "after init_on_sender(), or pass address="
            )
        return False


_SEPARATOR = b"\n"


class DistributedWeightSyncScheme(DistributedOptions, ClusterScheme):
    """Scheme that sends weights over process groups of ``torch.distributed``.

    Each worker has a control stream to the sender, which carries messages and small updates, and a
    process group of two ranks for large ones; they meet through the control stream. The default
    group of the process, of a DDP trainer for example, is never touched. Workers may come and go at
    any time. Those on the sender's own host do not need a group: they read updates from shared
    memory, unless told otherwise (``shared_memory``). See ``docs/topics/torch-distributed.md``.

    Only the control stream is authenticated: ``torch.distributed`` itself is made for trusted
    networks.

    Args:
        backend: ``"gloo"``; ``"nccl"`` is refused.
        sync: As for :class:`aiosync.WeightSyncScheme`.
        timeout: Default timeout of calls in seconds; ``None`` for ever.
        strategy: As for :class:`WeightSyncScheme`, like all options up to ``require``.
        per_worker_weights: ``send({0: ..., 1: ...})`` gives each worker its own weights.
        apply: ``"auto"``, or ``"manual"`` to apply only in calls that ask for it.
        apply_copy: Copy updates into the parameters' memory.
        buffers: ``"persistent"`` keeps updates out of other buffers of a worker's module.
        guard: ``"forward"``, or ``"reading"`` for ``with scheme.reading():``.
        strict: Every name and dtype must match.
        require: Number of workers that must apply an update for ``send()`` to succeed.
        wire_dtype: A floating-point dtype to which the sender casts the weights on their way; or
            one for each name pattern.
        first_version: A sender's first version; a trainer that resumes continues with it.
        store: A ``torch.distributed`` store in which workers look up the sender, for processes that
            are not started by the sender. Not pickled.
        address: Address at which the sender listens for control streams. By default on any port of
            the address from which this host reaches ``store`` or ``MASTER_ADDR``, or else of the
            loopback address.
        token: Secret of the control streams. Generated when omitted: it travels in the pickle of
            the scheme, or through ``store``.
        reconnect: Seconds that a worker keeps trying to restore a lost link; ``None`` for ever, 0
            for not at all.
        patience: Seconds that a transfer may stall before the worker's link breaks.
        handshake_timeout: Seconds that a peer has to prove its identity.
        inline_nbytes: Updates up to this size travel in the control stream.
        limits: Limits on what a peer may announce.
        shared_memory: Workers on the sender's host read updates from shared memory instead of a
            stream and a group. Must be true on both sides. On Linux only.

    Raises:
        ConfigError: An option has an illegal value, or the back-end cannot be used here.
    """

    def __init__(
        self,
        backend: Literal["gloo", "nccl"] = "gloo",
        sync: bool = True,
        timeout: float | None = 120.0,
        *,
        strategy: Literal["tensordict", "state_dict"] | WeightStrategy = "tensordict",
        per_worker_weights: bool = False,
        apply: Literal["auto", "manual"] = "auto",
        apply_copy: bool = False,
        buffers: Literal["all", "persistent"] = "all",
        guard: Literal["forward", "reading"] = "forward",
        strict: bool = True,
        require: Require = "all",
        wire_dtype: Dtypes | None = None,
        first_version: int = 1,
        store: Any = None,
        address: str | None = None,
        token: str | bytes | None = None,
        reconnect: float | None = 30.0,
        patience: float = 10.0,
        handshake_timeout: float = 10.0,
        inline_nbytes: int = INLINE_NBYTES,
        limits: Limits | None = None,
        shared_memory: bool = True,
    ) -> None:
        self.backend = backend
        self._store = store
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
        self.patience = patience

    _how = "copy ahead"

    @property
    def _invites(self) -> str:  # type: ignore[override]  # a constant above
        return (
            ""
            if self._store is None
            else "its address is not in the store, under the same model_id"
        )

    def _default_address(self) -> Address:
        towards = getattr(self._store, "host", None) or os.environ.get("MASTER_ADDR")
        return Address("tcp", own_host(towards))

    def _early_address(self) -> Address | None:
        return None if self._address or self._store is not None else self._default_address()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_store": None}

    def _carry(self, control: TCPTransport, *, listened: bool) -> DataPlaneTransport:
        return DistributedTransport(
            control,
            rank=0 if listened else 1,
            inline_nbytes=self.inline_nbytes,
            patience=self.patience,
        )

    # -- finding each other in a store ---------------------------------------------------------

    @property
    def _key(self) -> str:
        return f"aiosync/{self.model_id or 'policy'}"

    async def _publish(self, address: Address) -> None:
        if self._store is None:
            return
        try:
            token = self._credentials.token_bytes or b""
            value = str(address).encode() + _SEPARATOR + token.hex().encode()
            await asyncio.to_thread(self._store.set, self._key, value)
        except RuntimeError as exc:
            # torch raises this.
            raise ConnectError(f"the store did not accept the trainer's address: {exc}") from exc

    async def _invitation(self) -> tuple[str, bytes | None] | None:
        try:
            # Only check() neither blocks nor leaves a thread behind when it is cancelled.
            if self._store is None or not await asyncio.to_thread(self._store.check, [self._key]):
                return None
            found = await asyncio.to_thread(self._store.get, self._key)
        except RuntimeError as exc:
            # torch raises this.
            if self._address:
                # The store is gone; the trainer may not be.
                return None
            raise ConnectError(f"the store cannot be reached: {exc}") from exc
        url, _, token = bytes(found).partition(_SEPARATOR)
        return url.decode(), bytes.fromhex(token.decode())


# Seconds for one call that tells a worker the address.
_TELL_SECONDS = 5.0
# Seconds of such attempts for a worker that is not up, or is down.
_KEEP_TELLING_SECONDS = 120.0


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

    def _reset(self, model_id: str | None) -> None:
        super()._reset(model_id)
        self._rpc_workers: list[str] = []

    # -- links ---------------------------------------------------------------------------------

    def _streaming(self) -> Streaming:
        return Streaming(stall_timeout=self.patience)

    # In this scheme, updates travel in the stream.
    _untaken = StreamScheme._untaken

    def _transport_over(self, sock: socket.socket, name: str) -> Transport:
        return RPCTransport(sock, limits=self.limits, name=name)

    def _default_address(self) -> Address:
        return Address("tcp", own_host(os.environ.get("MASTER_ADDR")))

    # -- telling workers the address -----------------------------------------------------------

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
        """Tell every worker the address, also after a lost link: the worker may have restarted."""
        while self._rpc_workers:
            self._link_lost.clear()
            async with asyncio.TaskGroup() as telling:
                for name in self._rpc_workers:
                    telling.create_task(self._keep_telling(name, str(address)))
            await self._link_lost.wait()

    async def _keep_telling(self, name: str, url: str) -> None:
        token = self._credentials.token_bytes

        def attempt(left: Left) -> Awaitable[None]:
            return invite(name, self._meeting, url, token, _TELL_SECONDS)

        # connect() and send() report the workers that are missing.
        with contextlib.suppress(ConnectError):
            await retry(attempt, _KEEP_TELLING_SECONDS, late=lambda last: ConnectError(str(last)))

    # -- receiving the address -----------------------------------------------------------------

    _invites = (
        "it has not told this process its address, and has to know this RPC worker by name "
        "(workers=, or a context with collector_infos)"
    )

    async def _invitation(self) -> tuple[str, bytes | None] | None:
        need_rpc()
        return invitation(self._meeting)


def _name_of(info: Any) -> str:
    name = info if isinstance(info, str) else getattr(info, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{info!r} is neither the name of an RPC worker nor its WorkerInfo")
    return name
