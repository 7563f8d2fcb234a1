"""Links over stream sockets: TCP between hosts, Unix sockets within one, with or without TLS.

The event loop drives the sockets: bytes go straight from the sender's buffers and land straight
in the buffers that the receiver lends. Both ends of a new link prove that they have the same token:
neither end sends the token, and neither trusts the other before the proof. Must not import torch or
schemes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import ClassVar, Self

from aiohappyeyeballs import AddrInfoType, start_connection

from aiosync.errors import (
    AiosyncError,
    ConnectError,
    ConnectTimeout,
    PeerClosed,
    RecvTimeout,
    RemoteProtocolError,
    SendTimeout,
    TransportBroken,
)
from aiosync.transports._forks import new_socket
from aiosync.transports.address import Address
from aiosync.transports.base import in_time
from aiosync.transports.byte_stream import ByteStream
from aiosync.transports.credentials import Credentials
from aiosync.transports.framed_link import FramedTransport
from aiosync.transports.striped_stream import StripedStream
from aiosync.transports.tls_stream import TlsStream, why_refused
from aiosync.types import Cancellation, Capabilities, Limits
from aiosync.wire import (
    Challenge,
    Join,
    Message,
    Refuse,
    answer_challenge,
    encode_frame,
    new_challenge,
    verify_dialer,
    verify_listener,
)

__all__ = ["TCPTransport", "prove_as_dialer", "prove_as_listener"]

_NO_CREDENTIALS = Credentials()
_KEEPALIVE_SECONDS = 30.0
_UNTAKEN_SECONDS = 60.0
_HEAD_START_SECONDS = 0.25
# Linux takes no larger value.
_MAX_KEEPALIVE_SECONDS = 32767


class TCPTransport(FramedTransport):
    """A link over a connected stream socket, which it takes ownership of.

    Use :meth:`connect` on the side that dials and :meth:`accept` on the side that listens: they
    do the handshakes, with deadlines. The constructor does no handshake.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        name="tcp",
        cross_host=True,
        send_cancellation=Cancellation.BREAKS_LINK,
        recv_cancellation=Cancellation.BREAKS_LINK,
    )

    # These limits hold once the peer has proved its identity.
    _default_limits: ClassVar[Limits] = Limits()

    @staticmethod
    def _connected_sockets() -> tuple[socket.socket, socket.socket]:
        """Return the two sockets of a connection over the loopback interface."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            left = socket.create_connection(listening.getsockname())
            right, _ = listening.accept()
        for sock in (left, right):
            _prepare(sock, _KEEPALIVE_SECONDS, _UNTAKEN_SECONDS)
        return left, right

    @classmethod
    async def connect(
        cls,
        url: str | Address,
        *,
        credentials: Credentials | None = None,
        limits: Limits | None = None,
        name: str | None = None,
        keepalive: float | None = _KEEPALIVE_SECONDS,
        untaken: float | None = _UNTAKEN_SECONDS,
        payloads: bool = True,
        streams: int = 1,
        timeout: float | None = 30.0,
    ) -> TCPTransport:
        """Dial an address, and authenticate both ends. This makes one attempt.

        If a host has several addresses, the link uses the first one that answers: each address has
        a quarter of a second before the next one is tried as well.

        Args:
            url: ``tcp://host:port`` or ``unix:///path``.
            credentials: Token and TLS; the same as on the other side.
            limits: Bounds on what the peer may announce after the handshake.
            name: Name of the peer in errors; its address by default.
            keepalive: Seconds after which the kernel probes an idle TCP peer; a peer that does not
                answer is lost after twice that time. ``None`` never probes.
            untaken: Seconds after which a TCP link is lost if the peer takes none of the bytes that
                were sent, because its host is gone or because it does not read. ``None``
                leaves it to the kernel, which tries for a quarter of an hour. On Linux it also
                decides how long a probe of ``keepalive`` may stay without an answer.
            payloads: True if the peer may send payloads at once; otherwise it may from
                ``channel.allow_payloads()`` on, once its role is known.
            streams: Number of connections of the link, from 1 to 16, which are dialled one after
                the other. With more than one, the other end has to be a
                :class:`~aiosync.rendezvous.listener.StreamListener`.
            timeout: Seconds for the whole call; ``None`` waits for ever.

        Raises:
            ConnectError: Nothing listens at the address, or the other end refused the link.
            AuthError: The tokens or certificates do not match.
            ConnectTimeout: The handshakes were not done in time.
            ConfigError: ``url`` is not an address, or a certificate file cannot be used.

        Cancellation:
            Class A.
        """
        address = Address.parse(url)
        credentials = credentials or _NO_CREDENTIALS
        name = name or str(address)
        hostname = getattr(credentials.tls, "hostname", None) or address.host or "localhost"
        # A bad certificate file is an error even if the other end cannot be reached.
        credentials = replace(credentials, tls=credentials.dialling_context())
        options = limits, keepalive, untaken, payloads and streams == 1

        async def dial(address: Address) -> TCPTransport:
            sock = await _open(address)
            return await cls._proved(sock, credentials, hostname, name, *options)

        async with in_time(timeout, ConnectTimeout, f"{name} did not answer"):
            if streams == 1:
                return await dial(address)
            link = await cls._dial_several(dial, address, streams)
            if payloads:
                link.allow_payloads()
            return link

    @classmethod
    async def accept(
        cls,
        sock: socket.socket,
        *,
        credentials: Credentials | None = None,
        limits: Limits | None = None,
        name: str = "a peer",
        keepalive: float | None = _KEEPALIVE_SECONDS,
        untaken: float | None = _UNTAKEN_SECONDS,
        payloads: bool = True,
        timeout: float | None = 10.0,
    ) -> TCPTransport:
        """Do the listening side's half of :meth:`connect`, for a socket that was accepted.

        Takes ownership of ``sock``. Until the peer has proved its identity, it gets only a
        read-ahead of 4 KiB as memory.

        Args:
            sock: Socket that ``accept()`` returned.
            credentials: As for :meth:`connect`.
            limits: Bounds on what the peer may announce after the handshake.
            name: Name of the peer in errors.
            keepalive: As for :meth:`connect`.
            untaken: As for :meth:`connect`.
            payloads: As for :meth:`connect`.
            timeout: Seconds for the whole call; ``None`` waits for ever.

        Raises:
            AuthError: The tokens or certificates do not match; the peer was told.
            ConnectError: The peer closed the connection, or does not speak TLS.
            RemoteProtocolError: The peer does not speak aiosync.
            ConnectTimeout: The handshakes were not done in time.

        Cancellation:
            Closes the socket.
        """
        credentials = credentials or _NO_CREDENTIALS
        async with in_time(timeout, ConnectTimeout, f"{name} did not prove its identity"):
            options = limits, keepalive, untaken, payloads
            return await cls._proved(sock, credentials, None, name, *options)

    @classmethod
    async def _proved(
        cls,
        sock: socket.socket,
        credentials: Credentials,
        hostname: str | None,
        name: str,
        limits: Limits | None,
        keepalive: float | None,
        untaken: float | None,
        payloads: bool,
    ) -> Self:
        """Return a link over ``sock``, which it owns, after the handshakes.

        ``hostname`` is that of the listener for the side that dialled, and ``None`` for the side
        that listens. The last four arguments are those of :meth:`connect`.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(sock.close)
            try:
                _prepare(sock, keepalive, untaken)
            except OSError as exc:
                raise ConnectError(f"{name} has gone: {exc}") from exc
            io = ByteStream(sock)
            context = (
                credentials.dialling_context() if hostname else credentials.listening_context()
            )
            if context is not None:
                server_side = not hostname
                io = tls = TlsStream(sock, context, server_side=server_side, hostname=hostname)
                undo.callback(tls.close)
                await tls.handshake()
            transport = cls(io, limits=limits, name=name)
            undo.callback(transport.abort)
            transport.refuse_payloads()
            await (prove_as_dialer if hostname else prove_as_listener)(transport, credentials)
            undo.pop_all()
        if payloads:
            transport.allow_payloads()
        return transport

    @classmethod
    async def _dial_several(
        cls,
        dial: Callable[[Address], Awaitable[TCPTransport]],
        address: Address,
        streams: int,
    ) -> TCPTransport:
        """Return one link, without payloads, over several connections.

        They are dialled one after the other, so that they take no place from one another at the
        listener, where each is a stranger first.
        """
        join, links = Join(secrets.token_bytes(16), 0, streams), list[TCPTransport]()
        with contextlib.ExitStack() as undo:
            try:
                for index in range(streams):
                    links.append(link := await dial(address))
                    undo.callback(link.abort)
                    join = replace(join, index=index)
                    link.queue(encode_frame(join))
                    if index == streams - 1:
                        link = cls.join(links)
                        undo.callback(link.abort)
                    _check_join(join, (await link.recv()).message)
                    # A name may have several hosts; all connections have to reach one.
                    with contextlib.suppress(OSError):
                        peer = link.io.sock.getpeername()
                        address = replace(address, host=peer[0]) if address.host else address
            except (PeerClosed, TransportBroken) as exc:
                raise ConnectError(
                    f"{address} closed one of {streams} connections of a link: it may be at its "
                    "connection limit, or of another release"
                ) from exc
            undo.pop_all()
        return link

    @classmethod
    def join(cls, links: Sequence[TCPTransport]) -> TCPTransport:
        """Return one link, without payloads, over the connections of several.

        Args:
            links: Links to one peer whose other end is joined as well, in the same order. They end,
                and nothing may be on its way to them.

        Raises:
            TransportError: One of them has ended.
        """
        for each in links:
            each.check()
        first = links[0]
        streams = [each.release_stream() for each in links]
        link = cls(StripedStream(streams), limits=first.limits, name=first.name)
        link.read_only = any(each.read_only for each in links)
        link.refuse_payloads()
        return link

    def limit_untaken(self, seconds: float = _UNTAKEN_SECONDS) -> None:
        """Have the kernel end the link if the peer takes no sent byte for so many ``seconds``.

        This is the option ``untaken`` of :meth:`connect`, for a link whose peer's role is only
        known after that.
        """
        if not self.ended:
            for sock in self.io.socks:
                _prepare(sock, None, seconds)


def _check_join(join: Join, answer: Message) -> None:
    """Raise if the listener has not answered a Join with the same message."""
    if isinstance(answer, Refuse):
        raise ConnectError(f"a connection of a link was refused: {answer.error_text}")
    if answer != join:
        raise RemoteProtocolError(f"expected the same Join, got {type(answer).__name__}")


# -- sockets ----------------------------------------------------------------------------------


async def _open(address: Address) -> socket.socket:
    """Return a non-blocking socket that is connected to the address, or raise ConnectError."""
    sock = None
    try:
        if address.scheme == "unix":
            sock = new_socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            # Event loops take a socket for connected when the listener's backlog is full, so this
            # does not use sock_connect(). Connecting a Unix socket never waits.
            sock.connect(address.path)
        else:
            found = await _look_up(address.host, address.port)
            sock = await start_connection(
                found,
                happy_eyeballs_delay=_HEAD_START_SECONDS,
                socket_factory=lambda info: new_socket(*info[:3]),
            )
    # A loop raises RuntimeError for some failures; an impossible host name is a ValueError.
    except (OSError, RuntimeError, ValueError) as exc:
        if sock is not None:
            sock.close()
        raise ConnectError(f"{address} cannot be reached: {exc}") from exc
    return sock


async def _look_up(host: str, port: int) -> Sequence[AddrInfoType]:
    """Return the addresses of a host, and use a thread only if its name needs a resolver."""
    # A numeric address and "localhost" need no resolver, which would run in a thread.
    try:
        flags = 0 if host == "localhost" else socket.AI_NUMERICHOST
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except socket.gaierror:
        loop = asyncio.get_running_loop()
        return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def _prepare(sock: socket.socket, keepalive: float | None, untaken: float | None) -> None:
    """Set the options of a connected socket; a time of ``None`` leaves its option as it is."""
    # A Unix socket has none of these options.
    if sock.family == socket.AF_UNIX:
        return
    set_option = functools.partial(sock.setsockopt, socket.IPPROTO_TCP)
    set_option(socket.TCP_NODELAY, 1)
    if keepalive is not None:
        probes = 3
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        set_option(socket.TCP_KEEPIDLE, _seconds(keepalive))
        set_option(socket.TCP_KEEPINTVL, _seconds(keepalive / probes))
        set_option(socket.TCP_KEEPCNT, probes)
    if untaken is not None:
        millis = 1000 * max(1, round(min(untaken, 2.0e6)))
        set_option(socket.TCP_USER_TIMEOUT, millis)


def _seconds(value: float) -> int:
    """Return a time as the kernel takes it for keepalive: whole seconds in its range."""
    return max(1, round(min(value, _MAX_KEEPALIVE_SECONDS)))


# -- authentication ---------------------------------------------------------------------------


async def prove_as_dialer(transport: FramedTransport, credentials: Credentials) -> None:
    """Prove that this side has the token, and that the listener has it.

    Args:
        transport: The link, which takes no payloads.
        credentials: The credentials with the token, if there is one.

    Raises:
        AuthError: The tokens do not match.
        ConfigError: The listener refused the link because of this side's configuration.
        ConnectError: The listener refused or closed the link.
        RemoteProtocolError: The listener does not speak aiosync.
    """
    try:
        # The dialer sends first, so that a listener that expects TLS notices at once.
        token = credentials.token_bytes
        await transport.send(new_challenge(token))
        challenge, answer = answer_challenge((await transport.recv()).message, token)
        await transport.send(answer)
        verify_listener(challenge, answer, (await transport.recv()).message, token=token)
    except (PeerClosed, TransportBroken) as exc:
        if isinstance(exc.__cause__, ssl.SSLError):
            # The listener checks this end's certificate after this end has finished the TLS
            # handshake, so that its refusal only arrives now.
            raise why_refused(exc.__cause__) from exc
        raise ConnectError(
            f"{transport.channel.name} closed the link during the handshake: it may be at its "
            "connection limit, require TLS, or not be aiosync"
        ) from exc


async def prove_as_listener(transport: FramedTransport, credentials: Credentials) -> None:
    """Prove that this side has the token, and that the dialer has it or the ``pull_token``.

    A dialer that fails is told the reason. ``read_only`` of the channel becomes True if the dialer
    has the ``pull_token``, so that it must not push.

    Args:
        transport: The link, which takes no payloads.
        credentials: The credentials with the tokens, if there are any.

    Raises:
        AuthError: The tokens do not match.
        ConnectError: The dialer closed the link.
        RemoteProtocolError: The dialer does not speak aiosync.
    """
    token, pull_token = credentials.token_bytes, credentials.pull_token_bytes
    challenge = new_challenge(token)
    try:
        # The challenge is sent before anything is read: a peer that speaks TLS learns from it that
        # this side does not.
        if not transport.send_nowait(challenge):
            await transport.send(challenge)
        greeting = (await transport.recv()).message
        if not isinstance(greeting, Challenge):
            raise RemoteProtocolError(f"expected a Challenge, got {type(greeting).__name__}")
        answer = (await transport.recv()).message
        proof, read_only = verify_dialer(challenge, answer, token=token, pull_token=pull_token)
        await transport.send(proof)
        transport.channel.read_only = read_only
    except (PeerClosed, TransportBroken, SendTimeout, RecvTimeout) as exc:
        raise ConnectError(f"{transport.channel.name} disconnected during the handshake") from exc
    except AiosyncError as exc:
        if not transport.channel.ended:
            # The link ends anyway, so an error of this send does not matter.
            with contextlib.suppress(AiosyncError):
                await transport.send(Refuse(type(exc).__name__, str(exc)), timeout=1.0)
        raise
