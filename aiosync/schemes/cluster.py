"""Fabric of a cluster: a control stream, and another medium beside it for large payloads.

The sender listens and workers dial, as with TCP. Each kind of cluster decides how a worker finds
the address, and what moves large payloads. Workers on the sender's host may read shared memory
instead. Must not import torch.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

from aiosync._tasks import in_own_thread
from aiosync.errors import AiosyncError, AuthError, ConfigError, ConnectError, ConnectTimeout
from aiosync.rendezvous.dialer import Left
from aiosync.rendezvous.same_host import SameHost, dial_here
from aiosync.schemes.lifecycle import Life
from aiosync.schemes.options import EngineOptions
from aiosync.schemes.sources import Sources
from aiosync.schemes.stream import StreamFabric, StreamScheme
from aiosync.sender import WeightSender
from aiosync.strategy import WeightStrategy
from aiosync.tensors import Dtypes
from aiosync.transports.address import Address
from aiosync.transports.base import Transport
from aiosync.transports.credentials import Credentials
from aiosync.transports.shared_memory import Arena
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits, Require
from aiosync.wire import Hello

__all__ = ["INLINE_NBYTES", "ClusterFabric", "ClusterScheme"]

INLINE_NBYTES = 4 * 2**20
"""Updates up to this size travel in the control stream.

Starting a transfer beside it takes a few messages or calls, and a thread or two: as long as a
stream takes for so many bytes.
"""


class ClusterScheme(EngineOptions, StreamScheme):
    """Common part of schemes that send messages over a control stream, large payloads beside it.

    Args:
        strategy: As for :class:`WeightSyncScheme`, like all options up to ``timeout``.
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
        self._set_options(
            reconnect=reconnect,
            shared_memory=shared_memory,
            handshake_timeout=handshake_timeout,
            limits=limits,
        )

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


_T = TypeVar("_T")
_Scheme = TypeVar("_Scheme", bound=ClusterScheme, contravariant=True)


class ClusterFabric(StreamFabric[_Scheme]):
    """Fabric of a control stream that carries messages, and of large payloads beside it.

    Args:
        address: Where the sender listens for control streams; ``None`` lets the cluster choose.
        token: Secret of the control stream; generated when omitted, and pickled with the scheme.
    """

    longest_pause: ClassVar[float] = 0.5
    # A worker replaces the two below by those that its trainer published.
    address: Address | None
    credentials: Credentials

    _of_process: ClassVar[tuple[str, ...]] = (
        *StreamFabric._of_process,
        "_link_lost",
        "_is_looking",
        "_is_asked",
        "_is_invited",
        "_same_host",
    )

    def __init__(self, address: str | None, token: str | bytes | None) -> None:
        super().__init__(
            None if address is None else Address.parse(address),
            Credentials(token=secrets.token_bytes(32) if token is None else token),
        )

    def begin(self, life: Life) -> None:
        """Take the scheme's new life in this process, in which nothing was found yet."""
        super().begin(life)
        # Set on a sender whenever a link to a worker ends.
        self._link_lost = asyncio.Event()
        # True while find() runs, and once it has raised: its errors are final.
        self._is_looking = False
        # True while a thread makes a call of ask(), which may have been given up.
        self._is_asked = False
        # True if the token came with the address that was found last.
        self._is_invited = False
        # The sender's listener for workers of its host, if shared memory is wanted.
        self._same_host: SameHost | None = None

    # -- what the kinds of clusters differ in ----------------------------------------------------

    def carry(self, scheme: _Scheme, control: TCPTransport, *, listened: bool) -> Transport:
        """Return a link over a control stream, which it owns from then on; or that stream.

        Args:
            scheme: The scheme.
            control: The stream.
            listened: True on the sender's side of the stream, False on the worker's.
        """
        del scheme, listened
        return control

    @abc.abstractmethod
    def default_address(self) -> Address:
        """Return the address at which the sender listens if none was given."""

    @abc.abstractmethod
    async def publish(self, address: Address) -> None:
        """Sender: let workers that have no address find this one."""

    @abc.abstractmethod
    async def find(self) -> tuple[str, bytes | None] | None:
        """Worker: return the published address and its token; ``None`` while there is no address.

        The token is ``None`` if it travels only in the pickle of the scheme.
        """

    @property
    @abc.abstractmethod
    def not_found_text(self) -> str:
        """Text of errors while the sender published none; empty if senders never publish."""

    # -- links -----------------------------------------------------------------------------------

    def untaken(self, scheme: _Scheme) -> float | None:
        """Return the seconds after which a peer that takes no bytes is lost; ``None`` for never."""
        # Updates have no deadline here, so only the kernel notices that a worker's host is gone. It
        # cannot tell that from a process that is busy for so long, and whose host has no room for
        # an update of inline_nbytes: such a worker redials. Other messages fit.
        keepalive = self.keepalive(scheme)
        return None if keepalive is None else 2 * keepalive

    def _linked(self, scheme: _Scheme, control: TCPTransport, *, listened: bool) -> Transport:
        """Return the link over a control stream, which the scheme closes in the end."""
        try:
            link = self.carry(scheme, control, listened=listened)
        except BaseException:  # raised again for the caller
            control.abort()
            raise
        self.life.shared.add(link)
        return link

    def link(self, scheme: _Scheme, sock: socket.socket, name: str) -> Transport:
        """Make a link over a connected socket, which becomes its control stream."""
        control = TCPTransport(sock, limits=scheme.limits, name=name)
        return self._linked(scheme, control, listened=self.life.role == "sender")

    def arena(self, scheme: _Scheme) -> Arena | None:
        """Return shared memory that workers of this host read; ``None`` if none can connect so."""
        if self._same_host is None:
            return None
        self._same_host.arena = arena = Arena()
        return arena

    def limits(self, scheme: _Scheme) -> Limits | None:
        """Return the limits that receivers are expected to have: those of this side."""
        # Links to workers of this host take more than streams do, unless the user limits both.
        return scheme.limits if self._same_host is not None else super().limits(scheme)

    # -- the sender ------------------------------------------------------------------------------

    def open_listener(self, scheme: _Scheme, address: Address) -> None:
        """Bind an address for all workers, and beside it a socket for those of this host."""
        super().open_listener(scheme, address)
        if scheme.shared_memory:
            # If the socket's name is taken, or no descriptor is left, workers of this host use TCP.
            with contextlib.suppress(ConfigError):
                self._same_host = SameHost(
                    Address.parse(self.url),
                    self.credentials,
                    handshake_timeout=scheme.handshake_timeout,
                    limits=scheme.limits,
                )
                self.life.listeners.append(self._same_host)

    def bind(self, scheme: _Scheme, sources: Sources) -> None:
        """Choose an address if none was given, and bind it."""
        self.address = self.address or self.default_address()
        super().bind(scheme, sources)

    def listen(self, scheme: _Scheme, sender: WeightSender, *, given: bool) -> None:
        """Let workers in from now on, and publish the address; do nothing without a listener."""
        if self.listener is None:
            return

        def join(link: Transport, hello: Hello) -> None:
            assert link.channel is not None
            link.channel.call_on_end(self._link_lost.set)
            sender.workers.admission.welcome(link, None, hello)

        def wrap(control: TCPTransport) -> Transport:
            return self._linked(scheme, control, listened=True)

        if self._same_host is not None:
            self._same_host.start(join, sender.workers.tasks)
        # connect() reports these refusals if it waits for a worker in vain.
        sender.workers.admission.strangers = self.listener.refusals
        self.listener.start(join, sender.workers.crashed, wrap)
        assert self.address is not None
        sender.workers.tasks.start(self.publish(self.address), "aiosync rendez-vous")

    # -- a worker --------------------------------------------------------------------------------

    async def dial(self, scheme: _Scheme, left: Left, is_redial: bool) -> Transport:
        """Look for the trainer's address, and make one attempt there: on this host, or over TCP."""
        await self._look_up(scheme.handshake_timeout, left())
        dialer = self.dialer(scheme)
        if scheme.shared_memory:
            rest = left()
            limit = (
                scheme.handshake_timeout if rest is None else min(rest, scheme.handshake_timeout)
            )
            here = await dial_here(
                dialer.addresses[0],
                self.credentials,
                scheme.limits,
                timeout=limit,
            )
            if here is not None:
                return here
        link = await dialer.dial(dialer.addresses[0], left, is_redial)
        return self._linked(scheme, link, listened=False)

    async def ask(self, call: Callable[..., _T], *args: object) -> _T:
        """Make a blocking call to the cluster in a thread, see :func:`in_own_thread`.

        Raises:
            TimeoutError: An earlier call was given up, and its thread still hangs.
        """
        if self._is_asked:
            # Each attempt of a worker would leave one more thread behind.
            raise TimeoutError

        def asking() -> _T:
            self._is_asked = True
            try:
                return call(*args)
            finally:
                self._is_asked = False

        return await in_own_thread(asking, "aiosync-cluster")

    async def _look_up(self, most: float, rest: float | None) -> None:
        """Look for the trainer's address and use it; or the known one, if there is no answer.

        Args:
            most: Seconds for it if an address is known.
            rest: Seconds for the attempt; ``None`` for no limit.
        """
        found, limit = None, rest
        if self._knows_address:
            # The trainer may still be there, and needs a share of the time.
            limit = most if rest is None else min(most, rest / 2)
        self._is_looking = True
        try:
            async with asyncio.timeout(limit):
                found = await self.find()
        except TimeoutError as exc:
            if not self._knows_address:
                self._is_looking = False
                text = "the cluster did not answer with the trainer's address"
                raise ConnectTimeout(text) from exc
        self._is_looking = False
        self._is_invited = self._accept(found)

    def not_reached_text(self, scheme: _Scheme, within: str) -> str:
        """Return the text of an error while the trainer is not reached."""
        where = "" if self.address is None else f" at {self.address}"
        return (
            f"the trainer{where} was not reached{within}: it has to run init_on_sender() and "
            "connect()"
        )

    def may_retry(self, error: AiosyncError) -> bool:
        """Return True if another attempt to meet the trainer may succeed after an error."""
        # A new trainer may be about to publish its address and its token.
        waits = self._is_invited and isinstance(error, AuthError)
        # An error of find() itself is final.
        return not self._is_looking and (super().may_retry(error) or waits)

    def _accept(self, found: tuple[str, bytes | None] | None) -> bool:
        """Use the address that was found, or else the known one; return True if a token came."""
        if found is not None:
            url, token = found
            self.address = Address.parse(url)
            if token is not None:
                self.credentials = Credentials(token=token)
            return token is not None
        self._check_address()
        return False

    @property
    def _knows_address(self) -> bool:
        """True if this worker knows an address of the trainer that it could dial."""
        return self.address is not None and bool(self.address.port or self.address.path)

    def _check_address(self) -> None:
        """Raise if this worker knows no address of the trainer that it could dial."""
        # The trainer may still publish its address: a ConnectError lets this worker try again.
        if self.not_found_text and not self._knows_address:
            raise ConnectError(self.not_found_text)
        if self.address is None:
            raise ConfigError(
                "this worker does not know where the trainer listens: pickle or copy the scheme "
                "after init_on_sender(), or pass address="
            )
