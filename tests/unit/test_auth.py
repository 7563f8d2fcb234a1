"""Authentication without I/O: every pair of tokens, and peers that cheat."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest

from aiosync.errors import (
    AiosyncError,
    AuthError,
    ConfigError,
    ConnectError,
    RemoteProtocolError,
)
from aiosync.types import AckStatus
from aiosync.wire import (
    Ack,
    Challenge,
    Message,
    Proof,
    Refuse,
    answer_challenge,
    decode_header,
    encode_header,
    new_challenge,
    verify_dialer,
    verify_listener,
)

TOKEN = b"correct horse battery staple"
OTHER = b"correct horse battery stable"
GIVE_DIALER = "give the dialer token="
GIVE_LISTENER = "give the listener token="


def travel(message: Message) -> Message:
    return decode_header(encode_header(message))[0]


def handshake(
    listener_token: bytes | None, dialer_token: bytes | None
) -> tuple[AiosyncError | None, AiosyncError | None, list[Message]]:
    """Play both sides as a transport does; return the error of each, and all messages."""
    challenge = new_challenge(listener_token)
    received, answer = answer_challenge(travel(challenge), dialer_token)
    seen, errors = [challenge, travel(answer)], list[AiosyncError | None]()
    try:
        seen.append(travel(verify_dialer(challenge, seen[1], token=listener_token)[0]))
        errors.append(None)
    except AuthError as exc:
        seen.append(travel(Refuse(type(exc).__name__, str(exc))))
        errors.append(exc)
    try:
        verify_listener(received, answer, seen[2], token=dialer_token)
        errors.append(None)
    except AiosyncError as exc:
        errors.append(exc)
    return *errors, seen


def assert_silent(error: AiosyncError, *secrets: bytes) -> None:
    shown = f"{error} {error!r} {error.args} {error.__cause__!r} {error.__context__!r}"
    for secret in secrets:
        for form in (
            secret.decode("latin-1"),
            repr(secret),
            secret.hex(),
            base64.b64encode(secret).decode(),
        ):
            assert not form or form not in shown


# -- pairs of tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, TOKEN, b"\0", bytes(range(256)) * 5])
def test_the_same_token_on_both_sides_is_accepted(token: bytes | None) -> None:
    at_listener, at_dialer, seen = handshake(token, token)
    assert (at_listener, at_dialer) == (None, None)
    assert [type(message) for message in seen] == [Challenge, Proof, Proof]
    assert seen[0].required is (token is not None)
    assert all(bool(proof.mac) is (token is not None) for proof in seen[1:])


@pytest.mark.parametrize(
    ("listener_token", "dialer_token", "listener_says", "dialer_says"),
    [
        (TOKEN, None, GIVE_DIALER, GIVE_DIALER),
        (None, TOKEN, GIVE_LISTENER, GIVE_LISTENER),
        (TOKEN, OTHER, "does not have the token", "tokens are not the same"),
        (TOKEN, TOKEN + b"\n", "does not have the token", "tokens are not the same"),
    ],
)
def test_another_pair_is_an_error_on_both_sides(
    listener_token: bytes | None, dialer_token: bytes | None, listener_says: str, dialer_says: str
) -> None:
    at_listener, at_dialer, seen = handshake(listener_token, dialer_token)
    assert type(at_listener) is type(at_dialer) is AuthError
    assert listener_says in str(at_listener)
    assert dialer_says in str(at_dialer)
    macs = [message.mac for message in seen if isinstance(message, Proof)]
    for error in (at_listener, at_dialer):
        assert isinstance(error, ConnectError)
        assert_silent(error, listener_token or b"", dialer_token or b"", *macs)


def test_the_token_never_travels_and_the_code_is_the_documented_one() -> None:
    _, _, (challenge, answer, reply) = handshake(TOKEN, TOKEN)
    for message in (challenge, answer, reply):
        assert TOKEN not in encode_header(message)
    both = challenge.nonce + answer.nonce
    for role, proof in ((b"dialer", answer), (b"listener", reply)):
        data = b"aiosync-auth-1\0" + role + b"\0" + both
        assert proof.mac == hmac.new(TOKEN, data, hashlib.sha256).digest()
    assert reply.nonce == challenge.nonce
    assert len(challenge.nonce) == len(answer.nonce) == 32


# -- peers that cheat ---------------------------------------------------------------------------


def flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


class Link(NamedTuple):
    """The state of both sides after the dialer's answer, and the functions that verify proofs."""

    challenge: Challenge
    answer: Proof
    listener: Callable[[Message], tuple[Proof, bool]]
    dialer: Callable[[Message], None]


def link(token: bytes | None = TOKEN, challenge: Challenge | None = None) -> Link:
    challenge, answer = answer_challenge(challenge or new_challenge(token), token)
    listener = partial(verify_dialer, challenge, token=token)
    return Link(
        challenge, answer, listener, partial(verify_listener, challenge, answer, token=token)
    )


@pytest.mark.parametrize(
    "change", [{"nonce": b"n" * 32}, *({"mac": b"m" * n} for n in (0, 31, 32))]
)
@pytest.mark.parametrize("of_dialer", [True, False])
def test_a_changed_proof_is_refused(change: dict[str, bytes], of_dialer: bool) -> None:
    _, answer, listener, dialer = link()
    proof = answer if of_dialer else listener(answer)[0]
    changed = dataclasses.replace(proof, **change)
    with pytest.raises(AuthError) as info:
        (listener if of_dialer else dialer)(changed)
    assert_silent(info.value, TOKEN, proof.mac, changed.mac)


def test_a_dialer_is_not_fooled_by_its_own_proof() -> None:
    """Reflection: a peer without the token sends the dialer's own proof back."""
    challenge, answer, _, dialer = link()
    for nonce in (challenge.nonce, answer.nonce):
        with pytest.raises(AuthError):
            dialer(Proof(nonce, answer.mac))


def test_a_listener_is_not_fooled_by_another_listener() -> None:
    """Reflection: the first listener refuses the proof that a second one gave to a real dialer."""
    victim, oracle = link(), link()
    reply, _ = oracle.listener(oracle.answer)
    for stolen in (reply.nonce, victim.challenge.nonce):
        with pytest.raises(AuthError):
            victim.listener(Proof(stolen, reply.mac))


def test_the_nonce_of_the_listener_is_not_a_nonce_of_the_dialer() -> None:
    challenge, _, listener, _ = link()
    nonce = challenge.nonce
    data = b"aiosync-auth-1\0dialer\0" + nonce + nonce
    with pytest.raises(AuthError):
        listener(Proof(nonce, hmac.digest(TOKEN, data, "sha256")))


def test_old_proofs_are_worth_nothing_on_another_link() -> None:
    _, _, (challenge, answer, reply) = handshake(TOKEN, TOKEN)
    with pytest.raises(AuthError):
        link().listener(answer)
    with pytest.raises(AuthError):
        link(challenge=challenge).dialer(reply)


@pytest.mark.parametrize(
    ("token", "required", "mac", "text"),
    [
        # This listener pretends to need no token.
        (TOKEN, False, b"", GIVE_LISTENER),
        (TOKEN, False, b"m" * 32, GIVE_LISTENER),
        (TOKEN, True, b"", GIVE_LISTENER),
        (None, True, b"", GIVE_DIALER),
        (None, True, b"m", GIVE_DIALER),
        (None, False, b"m", GIVE_DIALER),
    ],
)
def test_a_dialer_wants_a_listener_that_has_a_token_or_none_as_it_has(
    token: bytes | None, required: bool, mac: bytes, text: str
) -> None:
    dialer = link(token, Challenge(b"n" * 32, required=required)).dialer
    with pytest.raises(AuthError, match=text):
        dialer(Proof(b"n" * 32, mac))


# -- other messages -----------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize("message", [Ack(1, 1, AckStatus.APPLIED), Challenge(bytes(32))])
def test_another_message_is_an_error(token: bytes | None, message: Message) -> None:
    for verify, who in zip(link(token)[2:], ("dialer", "listener"), strict=True):
        with pytest.raises(RemoteProtocolError, match=f"{who} sent a {type(message).__name__}"):
            verify(message)
    if not isinstance(message, Challenge):
        with pytest.raises(RemoteProtocolError, match="where a Challenge was expected"):
            answer_challenge(message, token)


@pytest.mark.parametrize(
    ("name", "kind"), [("ConfigError", ConfigError), ("TransportClosed", ConnectError)]
)
@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_listener_may_refuse_at_any_time(
    token: bytes | None, name: str, kind: type[Exception]
) -> None:
    refusal = Refuse(name, "shutting\x1b[2J down " + "x" * 1000)
    for read in (partial(answer_challenge, token=token), link(token).dialer):
        with pytest.raises(kind, match=f"{name}: shutting") as info:
            read(refusal)
        assert type(info.value) is kind
        assert "\x1b" not in str(info.value)
        assert len(str(info.value)) < 400
