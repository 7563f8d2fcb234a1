"""Mutual proof of the two ends of a link that they have the same token, which never travels.

The listener, the end that accepted the link, sends a :class:`~aiosync.wire.Challenge`. The dialer,
the end that opened the link, answers with a :class:`~aiosync.wire.Proof` and gets one back; its own
challenge is only a greeting. Each proof covers random bytes of both sides and the role of the side
that made it, so that an attacker can use neither an old proof nor one that this side has just sent.
This module does no I/O: ``transports.tcp`` exchanges the messages. It must never import asyncio,
anyio or torch.

Without TLS the proofs identify the two ends only at the moment when the link is opened: an attacker
who can change the bytes on the way can let the proofs pass and then take over the link. See
``docs/topics/wire-format.md``.
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
    """Return the challenge that either end of a link sends as its first message."""
    return Challenge(secrets.token_bytes(NONCE_NBYTES), required=token is not None)


def verify_dialer(
    challenge: Challenge,
    message: Message,
    *,
    token: bytes | None,
    pull_token: bytes | None = None,
) -> tuple[Proof, bool]:
    """Check the dialer's answer, on the side of the listener. Call this once for each challenge.

    Args:
        challenge: The listener's first message on this link, with a nonce that no other link has.
        message: The dialer's answer.
        token: The token that both sides must have; ``None`` admits only a dialer without a token.
        pull_token: A token that admits a dialer as well, but only to receive weights.

    Returns:
        The proof for the dialer, and True if the dialer has the ``pull_token`` and not the
        ``token``.

    Raises:
        AuthError: The two sides do not share a token. The caller should send the dialer a
            ``Refuse`` with the name and text of this error, and close the link.
        RemoteProtocolError: The dialer sent something other than a proof.
    """
    nonce = challenge.nonce
    if not isinstance(message, Proof):
        raise _unexpected("dialer", message, "Proof")
    if bool(message.mac) != (token is not None):
        raise _one_sided(dialer_has_it=bool(message.mac))
    if token is None:
        return Proof(nonce, b""), False
    # A dialer that repeats the listener's nonce has drawn no random bytes of its own.
    fresh = not hmac.compare_digest(message.nonce, nonce)
    for known in (token, pull_token):
        expected = _mac(known, _DIALER, nonce, message.nonce)
        if known is not None and hmac.compare_digest(message.mac, expected) and fresh:
            return Proof(nonce, _mac(known, _LISTENER, nonce, message.nonce)), known is not token
    raise AuthError("the dialer does not have the token of the listener: give both the same")


def answer_challenge(message: Message, token: bytes | None) -> tuple[Challenge, Proof]:
    """Answer the listener's first message, on the side of the dialer.

    A dialer without a token also answers: the listener then refuses it, and both ends report the
    reason.

    Returns:
        The listener's challenge, which is ``message`` itself, and the proof for the listener.

    Raises:
        ConfigError: The listener refused the link because of this side's configuration.
        ConnectError: The listener refused the link for another reason.
        RemoteProtocolError: The listener sent something other than a challenge.
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
    """Check the listener's proof, on the side of the dialer.

    Args:
        challenge: The listener's challenge.
        answer: The dialer's answer to it.
        message: The listener's next message.
        token: The token that was given to :func:`answer_challenge`.

    Raises:
        AuthError: The two sides do not share a token.
        ConfigError: The listener refused the link because of this side's configuration.
        ConnectError: The listener refused the link for another reason.
        RemoteProtocolError: The listener sent something other than a proof or a refusal.
    """
    mine = token is not None
    if isinstance(message, Refuse) and message.error_type != AuthError.__name__:
        raise _refused(message)
    if not isinstance(message, Proof | Refuse):
        raise _unexpected("listener", message, "Proof")
    # A refusal has no mac, so there only the challenge says if the listener has a token.
    has_mac = bool(message.mac) if isinstance(message, Proof) else challenge.required
    if challenge.required != mine or has_mac != mine:
        raise _one_sided(dialer_has_it=mine)
    if isinstance(message, Refuse):
        raise _refused_token(message, has_token=mine)
    same = hmac.compare_digest(message.nonce, challenge.nonce)
    expected = _mac(token, _LISTENER, challenge.nonce, answer.nonce)
    if not hmac.compare_digest(message.mac, expected) or not same:
        raise AuthError("the listener does not have the token of the dialer")


def _mac(token: bytes | None, role: bytes, listener_nonce: bytes, dialer_nonce: bytes) -> bytes:
    """Return the code by which the side of this role proves the token; empty without a token."""
    if token is None:
        return b""
    data = _PREFIX + role + b"\0" + listener_nonce + dialer_nonce
    return hmac.digest(token, data, "sha256")


def _one_sided(*, dialer_has_it: bool) -> AuthError:
    """Return the error for a link of which only one side has a token."""
    has, lacks = ("dialer", "listener") if dialer_has_it else ("listener", "dialer")
    return AuthError(f"the {has} has a token and the {lacks} has none: give the {lacks} token=...")


def _unexpected(who: str, message: Message, expected: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"the {who} sent a {type(message).__name__} where a {expected} was expected"
    )


def _refused(message: Refuse) -> ConnectError | ConfigError:
    """Return the error for a link that the listener refused for another reason than the token."""
    # An unauthenticated peer wrote this text, so it is clipped and its control characters are
    # escaped.
    text = ascii(f"{message.error_type}: {message.error_text}"[:_MAX_TEXT])
    kind = ConfigError if message.error_type == ConfigError.__name__ else ConnectError
    return kind(f"the listener refused the link: {text}")


def _refused_token(message: Refuse, *, has_token: bool) -> ConnectError | ConfigError:
    """Return the error for a link that the listener refused as it has another token."""
    if not has_token:
        # Neither side has a token, so tokens cannot be the reason.
        return _refused(message)
    # The peer's text adds nothing here, and may contain anything.
    return AuthError("the listener refused the dialer: their tokens are not the same")
