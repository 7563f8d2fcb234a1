"""Who is there: both ends of a fresh link prove that they have the same token.

Neither side says the token, and neither believes the other anything before. Must not import torch
or schemes.
"""

from __future__ import annotations

import contextlib
import re
import ssl

from aiosync.errors import (
    AiosyncError,
    ConnectError,
    PeerClosed,
    RecvTimeout,
    RemoteProtocolError,
    SendTimeout,
    TransportBroken,
)
from aiosync.transports.credentials import Credentials
from aiosync.transports.stream import FramedTransport
from aiosync.transports.tls_stream import why_refused
from aiosync.wire import (
    Challenge,
    Refuse,
    answer_challenge,
    new_challenge,
    verify_dialer,
    verify_listener,
)

__all__ = ["name_from", "prove_as_dialer", "prove_as_listener"]

_NOT_IN_NAMES = re.compile(r"[^\w .:()/-]", re.ASCII)
_MAX_NAME = 120


def name_from(value: bytes) -> str:
    """How a peer wants to be called, with nothing in it that could harm a log."""
    return _NOT_IN_NAMES.sub("_", value.decode("ascii", "replace")[:_MAX_NAME])


async def prove_as_dialer(transport: FramedTransport, credentials: Credentials) -> None:
    """Prove that this side has the token, and that the listener has it.

    Args:
        transport: The link, which takes no payloads.
        credentials: With the token, if any.

    Raises:
        AuthError: The tokens do not fit.
        ConfigError: The listener cannot take this side, and says why.
        ConnectError: It went away.
        RemoteProtocolError: It does not speak aiosync.
    """
    try:
        # The first word, so that a side that expects TLS notices at once.
        token = credentials.token_bytes
        await transport.send(new_challenge(token))
        challenge, answer = answer_challenge((await transport.recv()).message, token)
        await transport.send(answer)
        verify_listener(challenge, answer, (await transport.recv()).message, token=token)
    except (PeerClosed, TransportBroken) as exc:
        if isinstance(exc.__cause__, ssl.SSLError):
            # The listener looks at this end's certificate when this end is done already.
            raise why_refused(exc.__cause__) from exc
        raise ConnectError(
            f"{transport.channel.name} closed the link during the handshake: it may be at its "
            "connection limit, require TLS, or not be aiosync"
        ) from exc


async def prove_as_listener(transport: FramedTransport, credentials: Credentials) -> None:
    """The same, on the side that listens: who does not fit is told so.

    Notes on the channel who may not push.

    Args:
        transport: The link, which takes no payloads.
        credentials: With the token, if any.

    Raises:
        AuthError: The tokens do not fit.
        ConnectError: The dialer went away.
        RemoteProtocolError: It does not speak aiosync.
    """
    token, pull_token = credentials.token_bytes, credentials.pull_token_bytes
    challenge = new_challenge(token)
    try:
        # At once, before anything is read: a peer that speaks TLS finds out from it.
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
            with contextlib.suppress(AiosyncError):  # it is refused anyway
                await transport.send(Refuse(type(exc).__name__, str(exc)), timeout=1.0)
        raise
