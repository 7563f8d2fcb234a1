"""Two ends of a link prove to each other that they have the same token, which never travels.

Whoever accepted the link (the listener) sends a :class:`~aiosync.wire.Challenge`; whoever opened
it (the dialer, whose own challenge is only a greeting) answers with a
:class:`~aiosync.wire.Proof`, and gets one back. Each proof covers random bytes of both sides and
the role of who made it, so that neither an old proof nor one of our own is worth anything. No
I/O: ``transports.tcp`` exchanges them. This module must never import asyncio, anyio or torch.

Without TLS this says who was there when the link was opened, and no more: whoever can change the
bytes on the way can wait for the proofs and then take over. See ``docs/topics/wire-format.md``.
"""

from __future__ import annotations

import hmac
import secrets

from aiosync.errors import AuthError, ConfigError, ConnectError, RemoteProtocolError
from aiosync.wire.messages import NONCE_NBYTES, Challenge, Message, Proof, Refuse

__all__ = ["answer_challenge", "new_challenge", "verify_dialer", "verify_listener"]

_PREFIX = b"aiosync-auth-1\0"
_DIALER = b"dialer"
_LISTENER = b"listener"
_MAX_TEXT = 200


def new_challenge(token: bytes | None) -> Challenge:
    """Return the first message of a side of a link."""
    return Challenge(secrets.token_bytes(NONCE_NBYTES), required=token is not None)


def verify_dialer(
    challenge: Challenge,
    message: Message,
    *,
    token: bytes | None,
    pull_token: bytes | None = None,
) -> tuple[Proof, bool]:
    """Check the dialer's answer, on the side that accepted the link. Once for each challenge.

    Args:
        challenge: The first message of the link, with a nonce of its own.
        message: The answer.
        token: What both sides have to know; ``None`` lets in who has none either.
        pull_token: What a dialer may know instead, that is to get weights only.

    Returns:
        What the dialer gets back, and whether it proved that it has the ``pull_token``.

    Raises:
        AuthError: The two sides do not share a token. The dialer should get a ``Refuse``
            with the name and text of this error, and the link be closed.
        RemoteProtocolError: The peer sent something else than a proof.
    """
    nonce = challenge.nonce
    if not isinstance(message, Proof):
        raise _unexpected("dialer", message, "Proof")
    if bool(message.mac) != (token is not None):
        raise _one_sided(dialer_has_it=bool(message.mac))
    if token is None:
        return Proof(nonce, b""), False
    # With one nonce for both sides the dialer would have drawn nothing itself.
    fresh = not hmac.compare_digest(message.nonce, nonce)
    for known in (token, pull_token):
        expected = _mac(known, _DIALER, nonce, message.nonce)
        if known is not None and hmac.compare_digest(message.mac, expected) and fresh:
            return Proof(nonce, _mac(known, _LISTENER, nonce, message.nonce)), known is not token
    raise AuthError("the dialer does not have the token of the listener: give both the same")


def answer_challenge(message: Message, token: bytes | None) -> tuple[Challenge, Proof]:
    """Answer the listener's first message, on the side that opened the link.

    A side without a token answers too: it is the listener that refuses it, and both know why.

    Returns:
        The challenge that the message is, and what the listener gets.

    Raises:
        ConfigError: The listener cannot take this side, and says why.
        ConnectError: It refused the link for another reason.
        RemoteProtocolError: The peer sent something else than a challenge.
    """
    if isinstance(message, Refuse):
        raise _refused(message)
    if not isinstance(message, Challenge):
        raise _unexpected("listener", message, "Challenge")
    nonce = secrets.token_bytes(NONCE_NBYTES)
    return message, Proof(nonce, _mac(token, _DIALER, message.nonce, nonce))


def verify_listener(
    challenge: Challenge, answer: Proof, message: Message, *, token: bytes | None
) -> None:
    """Check the listener's proof, on the side that opened the link.

    Args:
        challenge: What the listener sent first.
        answer: What it got.
        message: What it sent then.
        token: As for :func:`answer_challenge`.

    Raises:
        AuthError: The two sides do not share a token.
        ConnectError: The listener refused the link for another reason.
        RemoteProtocolError: The peer sent something else than a proof or a refusal.
    """
    mine = token is not None
    if isinstance(message, Refuse) and message.error_type != AuthError.__name__:
        raise _refused(message)
    if not isinstance(message, Proof | Refuse):
        raise _unexpected("listener", message, "Proof")
    has_mac = bool(message.mac) if isinstance(message, Proof) else challenge.required
    if challenge.required != mine or has_mac != mine:
        raise _one_sided(dialer_has_it=mine)
    if isinstance(message, Refuse):
        if not mine:
            raise _refused(message)  # although it asks for no token
        # The peer's text is not needed here, and may hold anything.
        raise AuthError("the listener refused the dialer: their tokens are not the same")
    same = hmac.compare_digest(message.nonce, challenge.nonce)
    expected = _mac(token, _LISTENER, challenge.nonce, answer.nonce)
    if not hmac.compare_digest(message.mac, expected) or not same:
        raise AuthError("the listener does not have the token of the dialer")


def _mac(token: bytes | None, role: bytes, listener_nonce: bytes, dialer_nonce: bytes) -> bytes:
    if token is None:
        return b""
    data = _PREFIX + role + b"\0" + listener_nonce + dialer_nonce
    return hmac.digest(token, data, "sha256")


def _one_sided(*, dialer_has_it: bool) -> AuthError:
    has, lacks = ("dialer", "listener") if dialer_has_it else ("listener", "dialer")
    return AuthError(f"the {has} has a token and the {lacks} has none: give the {lacks} token=...")


def _unexpected(who: str, message: Message, expected: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"the {who} sent a {type(message).__name__} where a {expected} was expected"
    )


def _refused(message: Refuse) -> ConnectError | ConfigError:
    # A peer that proved nothing wrote this: short, and without control characters.
    text = ascii(f"{message.error_type}: {message.error_text}"[:_MAX_TEXT])
    kind = ConfigError if message.error_type == ConfigError.__name__ else ConnectError
    return kind(f"the listener refused the link: {text}")
