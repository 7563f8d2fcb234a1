"""Two ends of a link prove to each other that they have the same token, which never travels.

Whoever accepted the link (the listener) sends a :class:`~aiosync.wire.Challenge`; whoever opened
it (the dialer, whose own challenge is only a greeting) answers with a
:class:`~aiosync.wire.Proof`, and gets one back. Each proof covers random bytes of both sides and
the role of who made it, so that neither an old proof nor one of our own is worth anything. No
I/O. This module must never import asyncio, anyio or torch.

Without TLS this says who was there when the link was opened, and no more: whoever can change the
bytes on the way can wait for the proofs and then take over. See ``docs/topics/wire-format.md``.
"""

from __future__ import annotations

import hmac
import secrets

from aiosync.errors import AuthError, ConfigError, ConnectError, RemoteProtocolError
from aiosync.wire.messages import NONCE_NBYTES, Challenge, Message, Proof, Refuse

__all__ = ["DialerAuth", "ListenerAuth"]

_PREFIX = b"aiosync-auth-1\0"
_DIALER = b"dialer"
_LISTENER = b"listener"
_MAX_TEXT = 200


class ListenerAuth:
    """The side that accepted one link; not for a second link, nor for a second answer.

    Args:
        token: What both sides have to know; ``None`` lets in who has none either.
        pull_token: What a dialer may know instead, that is to get weights only.

    Attributes:
        challenge: The first message of the link.
        read_only: Whether the dialer proved that it has the ``pull_token``.
    """

    __slots__ = ("_pull_token", "_token", "challenge", "read_only")

    def __init__(self, token: bytes | None, pull_token: bytes | None = None) -> None:
        self._token = token
        self._pull_token = pull_token
        nonce = secrets.token_bytes(NONCE_NBYTES)
        self.challenge: Challenge = Challenge(nonce, required=token is not None)
        self.read_only: bool = False

    def verify(self, message: Message) -> Proof:
        """Check the dialer's answer.

        Returns:
            What the dialer gets back.

        Raises:
            AuthError: The two sides do not share a token. The dialer should get a ``Refuse``
                with the name and text of this error, and the link be closed.
            RemoteProtocolError: The peer sent something else than a proof.
        """
        nonce = self.challenge.nonce
        if not isinstance(message, Proof):
            raise _unexpected("dialer", message, "Proof")
        if bool(message.mac) != (self._token is not None):
            raise _one_sided(dialer_has_it=bool(message.mac))
        if self._token is None:
            return Proof(nonce, b"")
        # With one nonce for both sides the dialer would have drawn nothing itself.
        fresh = not hmac.compare_digest(message.nonce, nonce)
        for token in (self._token, self._pull_token):
            expected = _mac(token, _DIALER, nonce, message.nonce)
            if token is not None and hmac.compare_digest(message.mac, expected) and fresh:
                self.read_only = token is not self._token
                return Proof(nonce, _mac(token, _LISTENER, nonce, message.nonce))
        raise AuthError("the dialer does not have the token of the listener")


class DialerAuth:
    """The side that opened one link; not for a second link.

    A side without a token answers too: it is the listener that refuses it, and both know why.

    Args:
        token: What both sides have to know; ``None`` when there is none.
        message: The listener's first one.

    Attributes:
        answer: What the listener gets.

    Raises:
        ConfigError: The listener cannot take this side, and says why.
        ConnectError: It refused the link for another reason.
        RemoteProtocolError: The peer sent something else than a challenge.
    """

    __slots__ = ("_challenge", "_token", "answer")

    def __init__(self, token: bytes | None, message: Message) -> None:
        if isinstance(message, Refuse):
            raise _refused(message)
        if not isinstance(message, Challenge):
            raise _unexpected("listener", message, "Challenge")
        self._token = token
        self._challenge = message
        nonce = secrets.token_bytes(NONCE_NBYTES)
        self.answer: Proof = Proof(nonce, _mac(token, _DIALER, message.nonce, nonce))

    def verify(self, message: Message) -> None:
        """Check the listener's proof.

        Raises:
            AuthError: The two sides do not share a token.
            ConnectError: The listener refused the link for another reason.
            RemoteProtocolError: The peer sent something else than a proof or a refusal.
        """
        challenge, mine = self._challenge, self._token is not None
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
        expected = _mac(self._token, _LISTENER, challenge.nonce, self.answer.nonce)
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
