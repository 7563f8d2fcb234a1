"""Authentication without I/O: every pair of tokens, and peers that cheat."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac

import pytest

from aiosync.errors import (
    AiosyncError,
    AuthError,
    ConfigError,
    ConnectError,
    LocalProtocolError,
    RemoteProtocolError,
)
from aiosync.types import AckStatus
from aiosync.wire import (
    Ack,
    Challenge,
    DialerAuth,
    Hello,
    ListenerAuth,
    Message,
    Proof,
    Refuse,
    decode_header,
    encode_header,
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
    """Play both sides as a transport does; return the error of each, and what travelled."""
    listener, dialer = ListenerAuth(listener_token), DialerAuth(dialer_token)
    seen = [travel(listener.challenge())]
    seen.append(travel(dialer.answer(seen[0])))
    at_listener: AiosyncError | None = None
    at_dialer: AiosyncError | None = None
    try:
        seen.append(travel(listener.verify(seen[1])))
    except AuthError as exc:
        at_listener = exc
        seen.append(travel(Refuse(type(exc).__name__, str(exc))))
    try:
        dialer.verify(seen[2])
    except AiosyncError as exc:
        at_dialer = exc
    return at_listener, at_dialer, seen


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


@pytest.mark.parametrize("name", ["nonce", "mac"])
@pytest.mark.parametrize("of_dialer", [True, False])
def test_a_changed_proof_is_refused(name: str, of_dialer: bool) -> None:
    listener, dialer = ListenerAuth(TOKEN), DialerAuth(TOKEN)
    proof = dialer.answer(listener.challenge())
    judge: ListenerAuth | DialerAuth = listener
    if not of_dialer:
        proof, judge = listener.verify(proof), dialer
    changed = dataclasses.replace(proof, **{name: flip(getattr(proof, name))})
    with pytest.raises(AuthError, match="does not have the token") as info:
        judge.verify(changed)
    assert_silent(info.value, TOKEN, proof.mac, changed.mac)


@pytest.mark.parametrize("length", [0, 1, 31, 33, 64])
def test_a_code_of_another_length_is_refused(length: int) -> None:
    listener, dialer = ListenerAuth(TOKEN), DialerAuth(TOKEN)
    answer = dialer.answer(listener.challenge())
    with pytest.raises(AuthError):
        listener.verify(Proof(answer.nonce, (answer.mac * 2)[:length]))


def test_a_dialer_is_not_fooled_by_its_own_proof() -> None:
    """Reflection: the peer knows no token, and sends back what it got."""
    challenge = Challenge(b"n" * 32)
    for of_listener in (True, False):
        dialer = DialerAuth(TOKEN)
        answer = dialer.answer(challenge)
        with pytest.raises(AuthError):
            dialer.verify(Proof(challenge.nonce if of_listener else answer.nonce, answer.mac))


def test_a_listener_is_not_fooled_by_another_listener() -> None:
    """Reflection: the peer lets a second listener with the token make the proof for it."""
    victim, oracle = ListenerAuth(TOKEN), ListenerAuth(TOKEN)
    nonce = victim.challenge().nonce
    oracle.challenge()
    with pytest.raises(AuthError):  # it proves nothing to who has proved nothing
        oracle.verify(Proof(nonce, b"m" * 32))
    # Even a proof that a listener made for a real dialer is worth nothing in the other role.
    dialer = DialerAuth(TOKEN)
    reply = oracle.verify(dialer.answer(oracle.challenge()))
    for stolen in (reply.nonce, nonce):
        again = ListenerAuth(TOKEN)
        again.challenge()
        with pytest.raises(AuthError):
            again.verify(Proof(stolen, reply.mac))


def test_the_nonce_of_the_listener_is_not_a_nonce_of_the_dialer() -> None:
    listener = ListenerAuth(TOKEN)
    nonce = listener.challenge().nonce
    data = b"aiosync-auth-1\0dialer\0" + nonce + nonce
    with pytest.raises(AuthError):
        listener.verify(Proof(nonce, hmac.digest(TOKEN, data, "sha256")))


def test_old_proofs_are_worth_nothing_on_another_link() -> None:
    _, _, (challenge, answer, reply) = handshake(TOKEN, TOKEN)
    listener, dialer = ListenerAuth(TOKEN), DialerAuth(TOKEN)
    listener.challenge()
    with pytest.raises(AuthError):
        listener.verify(answer)
    dialer.answer(challenge)
    with pytest.raises(AuthError):
        dialer.verify(reply)


@pytest.mark.parametrize(
    ("token", "required", "mac", "text"),
    [
        (TOKEN, False, b"", GIVE_LISTENER),  # it pretends to need none
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
    dialer = DialerAuth(token)
    dialer.answer(Challenge(b"n" * 32, required=required))
    with pytest.raises(AuthError, match=text):
        dialer.verify(Proof(b"n" * 32, mac))


def test_one_guess_for_each_challenge() -> None:
    listener = ListenerAuth(TOKEN)
    answer = DialerAuth(TOKEN).answer(listener.challenge())
    with pytest.raises(AuthError):
        listener.verify(dataclasses.replace(answer, mac=flip(answer.mac)))
    for nobody_asked in (listener, DialerAuth(TOKEN)):
        with pytest.raises(LocalProtocolError):
            nobody_asked.verify(answer)


# -- other messages -----------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize(
    "message", [Hello("receiver", "", 1), Ack(1, 1, AckStatus.APPLIED), Challenge(bytes(32))]
)
def test_another_message_is_an_error(token: bytes | None, message: Message) -> None:
    listener, dialer = ListenerAuth(token), DialerAuth(token)
    challenge = listener.challenge()
    with pytest.raises(RemoteProtocolError, match=f"dialer sent a {type(message).__name__}"):
        listener.verify(message)
    dialer.answer(challenge)
    with pytest.raises(RemoteProtocolError, match=f"listener sent a {type(message).__name__}"):
        dialer.verify(message)
    if not isinstance(message, Challenge):
        with pytest.raises(RemoteProtocolError, match="where a Challenge was expected"):
            DialerAuth(token).answer(message)


@pytest.mark.parametrize(
    ("name", "kind"), [("ConfigError", ConfigError), ("TransportClosed", ConnectError)]
)
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_listener_may_refuse_at_any_time(
    token: bytes | None, asked: bool, name: str, kind: type[Exception]
) -> None:
    refusal = Refuse(name, "shutting\x1b[2J down " + "x" * 1000)
    dialer = DialerAuth(token)
    if asked:
        dialer.answer(Challenge(bytes(32), required=token is not None))
    with pytest.raises(kind, match=f"{name}: shutting") as info:
        (dialer.verify if asked else dialer.answer)(refusal)
    assert type(info.value) is kind
    assert "\x1b" not in str(info.value)
    assert len(str(info.value)) < 400
