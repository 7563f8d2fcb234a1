"""Header maps of messages: every message, every illegal field, limits, and values."""

from __future__ import annotations

import collections
import dataclasses
import enum
import tracemalloc
import typing
from typing import Any

import msgpack
import pytest

from aiosync.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from aiosync.types import AckStatus, Limits
from aiosync.wire import (
    MAX_DEPTH,
    MAX_ITEMS,
    Ack,
    Challenge,
    Current,
    DeviceSlot,
    Fetch,
    Hello,
    Join,
    Leave,
    ManifestMessage,
    Message,
    PageMessage,
    Promise,
    Proof,
    Refuse,
    Segment,
    Setup,
    Status,
    Take,
    Update,
    Welcome,
    decode_header,
    encode_header,
    encode_values,
)
from tests.unit._frames import DIGEST, MANIFEST, raw_header

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

HEADERS: dict[str, dict[str, Any]] = {
    "hello": {"role": "receiver", "model_id": "policy", "pid": 1},
    "welcome": {"epoch": 1, "version": 0, "worker_idx": 0},
    "refuse": {"error_type": "E", "error_text": "no"},
    "manifest": {"manifest": MANIFEST.encode()},
    "update": {"epoch": 1, "version": 1, "digest": DIGEST},
    "ack": {"epoch": 1, "version": 1, "status": 1},
    "segment": {"segment_id": 0, "slot_nbytes": 64, "num_slots": 2},
    "page": {},
    "take": {"epoch": 1, "version": 0},
    "promise": {"digest": DIGEST},
    "challenge": {"nonce": bytes(32)},
    "proof": {"nonce": bytes(32), "mac": b""},
    "fetch": {"min_version": 0},
    "current": {"epoch": 1, "version": 0},
    "status": {},
}


IN_EXTENSION_MAP = {"serves", "follows", "partial_digest", "elsewhere", "path", "has_none"}
FIXED = {"epoch", "version", "digest", "status", "index", "count", "flags", "reserved"}


def header(kind: str, **changes: Any) -> bytes:
    fields = {**HEADERS[kind], **changes}
    fixed = {}
    if kind in ("update", "ack"):
        fixed = {name: fields.pop(name) for name in FIXED & fields.keys()}
    return raw_header(kind, fields, **fixed)


def refused(data: bytes, limits: Limits | None = None) -> str:
    with pytest.raises(RemoteProtocolError) as info:
        decode_header(data, limits=limits or Limits())
    return str(info.value)


def nested(depth: int, kind: str = "list") -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"k": value}
    return value


@pytest.mark.parametrize(
    ("message", "nbytes"),
    [(Update(1, 2, DIGEST), 80), (Ack(1, 2, AckStatus.APPLIED), 24), (PageMessage(), 2)],
)
def test_defaults_do_not_travel(message: Message, nbytes: int) -> None:
    assert len(encode_header(message)) == nbytes


def test_the_fixed_places_of_an_update_are_as_specified() -> None:
    message = Update(3, 4, DIGEST, "int8", {"a": 1}, (5, 6), b"c" * 16, b"s" * 16)
    assert encode_header(message, ext={"k": b"v"}) == raw_header(
        "update",
        {"codec": "int8", "values": {"a": 1}, "x": {"k": b"v"}},
        flags=3,
        index=5,
        count=6,
        epoch=3,
        version=4,
        checksum=b"c" * 16,
        state=b"s" * 16,
    )


def test_every_field_of_every_message_is_encoded() -> None:
    full = [
        Hello("r", "m", 1, 2, "s", False, 3, 4, bytes(16), False, 5, 6, 7, True, True, True),
        Welcome(1, 2, 3, 4, "note"),
        Refuse("a", "b"),
        ManifestMessage(MANIFEST),
        Update(1, 2, DIGEST, "c", {"a": 1}, (1, 2), b"x" * 16, b"y" * 16, TRACE),
        Ack(1, 2, AckStatus.NACK, "a", "b"),
        Segment(1, 2, 3, True),
        DeviceSlot(1, 2, "cuda", bytes(range(16)), 3),
        PageMessage(),
        Take(1, 2),
        Promise(DIGEST),
        Challenge(bytes(32), False),
        Proof(bytes(32), b"m"),
        Fetch(1),
        Current(1, 2),
        Status({"a": 1}),
        Setup("gloo", "0/1", b"where"),
        Leave(),
        Join(bytes(range(16)), 1, 2),
    ]
    assert {type(message) for message in full} == set(typing.get_args(Message))
    for message in full:
        if not isinstance(message, Update | Ack):
            keys = set(msgpack.unpackb(encode_header(message)[1:]))
            own = {each.name for each in dataclasses.fields(message)} - IN_EXTENSION_MAP
            assert keys == own
        assert decode_header(encode_header(message))[0] == message


ILLEGAL: list[tuple[str, str, list[Any]]] = [
    ("hello", "role", ["", 1, None, b"receiver", "x" * 1025, "ä" * 513]),
    ("hello", "model_id", [1, None, "x" * 1025]),
    ("hello", "pid", [-1, 2**32, True, "1", 1.0]),
    ("hello", "worker_idx", [-1, 2**16, None, False]),
    ("hello", "strategy", ["", 1]),
    ("hello", "has_target", [1, 0, None, "yes"]),
    ("hello", "epoch", [0, 2**63, None]),
    ("hello", "version", [-1, 2**63, None]),
    ("hello", "session", [b"", b"x" * 15, b"x" * 17, "x" * 16, 1, None]),
    ("hello", "subscribe", [1, 0, None, "yes"]),
    ("hello", "partial_epoch", [0, -1, 2**63, True, None]),
    ("hello", "partial_version", [0, -1, 2**63, 1.0, None]),
    ("hello", "partial_nbytes", [-1, 2**63, False, 1.0, None]),
    ("hello", "parts", [1, 0, None, "yes"]),
    ("welcome", "epoch", [0, -1, 2**63, 1.0, True]),
    ("welcome", "version", [-1, 2**63]),
    ("welcome", "worker_idx", [-1, 2**16, None]),
    ("welcome", "note", [1, None, b"x", "x" * 3073]),
    ("welcome", "num_workers", [-1, 2**16, None]),
    ("refuse", "error_type", [1, None, b"x", "x" * 257]),
    ("refuse", "error_text", [1, "x" * 3073, "ä" * 1537]),
    ("manifest", "manifest", [1, "x", None]),
    ("update", "codec", ["", 1, None]),
    ("update", "values", [1, [], None]),
    ("ack", "error_type", [1, "x" * 257]),
    ("ack", "error_text", [None, "x" * 3073]),
    ("segment", "segment_id", [-1, 2**63]),
    ("segment", "slot_nbytes", [-1, 2**63, None]),
    ("segment", "num_slots", [0, 65536]),
    ("hello", "slots", [1, 0, None, "yes"]),
    ("hello", "take_over", [1, 0, None, "yes"]),
    ("take", "epoch", [0, 2**63, None]),
    ("take", "version", [-1, 2**63, None]),
    ("promise", "digest", [b"x" * 17, "x", 1, None]),
    ("challenge", "nonce", [b"", b"x" * 31, b"x" * 33, "x" * 32, 1, None]),
    ("challenge", "required", [1, 0, None]),
    ("proof", "nonce", [b"", b"x" * 31, b"x" * 33, "x" * 32, None]),
    ("proof", "mac", [b"x" * 65, "", 0, None]),
    ("fetch", "min_version", [-1, 2**63, True, None]),
    ("current", "epoch", [0, 2**63, None]),
    ("current", "version", [-1, 2**63, None]),
    ("status", "values", [1, [], None]),
]


@pytest.mark.parametrize(
    ("kind", "name", "value"), [(kind, name, value) for kind, name, vs in ILLEGAL for value in vs]
)
def test_an_illegal_field_is_refused_by_its_name(kind: str, name: str, value: Any) -> None:
    assert f"({name})" in refused(header(kind, **{name: value}))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind, fields in HEADERS.items()
        for name in fields
        if kind not in ("update", "ack")
    ],
)
def test_a_missing_field_is_refused_by_its_name(kind: str, name: str) -> None:
    fields = {**HEADERS[kind]}
    del fields[name]
    assert name in refused(raw_header(kind, fields))


@pytest.mark.parametrize("kind", HEADERS)
def test_the_text_of_an_unknown_field_is_escaped(kind: str) -> None:
    text = refused(header(kind, **{"\x1b[2J\nforged \u202e": 1}))
    assert "(\\x1b[2J\\nforged \\u202e): unknown field" in text


@pytest.mark.parametrize("kind", ["update", "status", "manifest"])
def test_who_sends_no_payloads_sends_no_weights(kind: str) -> None:
    limits = Limits(max_header_nbytes=4096, max_payload_nbytes=0)
    assert "sends no weights" in refused(header(kind), limits)


def test_lists_that_lie_about_their_length_cost_next_to_nothing() -> None:
    """Each level announces more entries than the header has bytes."""
    liar = b"\xdd" + (100_000).to_bytes(4, "big")
    assert "max_array_len" in refused(b"\x0f\x81\xa6values" + liar * 15 + b"\0" * 2000)
    half = b"\xdc" + (1500).to_bytes(2, "big")
    tracemalloc.start()
    try:
        refused(b"\x0f\x81\xa6values" + half * 300 + b"\0" * 2000)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
        for kind in set(HEADERS) - {"update", "status"}:
            for few in (b"\xdc\x00\x11", b"\x91" * 300, b"\xde\x00\x11", b"\x81\xa1k" * 300):
                # Python 3.13 collects the errors of the messages before later.
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                refused(raw_header(kind, b"\x81\xa1t" + few))
                assert tracemalloc.get_traced_memory()[1] - before < 2**17
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["list", "map"])
@pytest.mark.parametrize("padding", [0, 2000])
def test_nesting_has_one_limit_in_both_directions(kind: str, padding: int) -> None:
    pad = {"pad": "x" * padding} if padding else {}
    # The header and `values` are two levels.
    deepest = MAX_DEPTH - 2
    message = Update(1, 1, DIGEST, values={"k": nested(deepest, kind), **pad})
    assert decode_header(encode_header(message))[0] == message
    with pytest.raises(ConfigError, match="deeper"):
        encode_header(Update(1, 1, DIGEST, values={"k": nested(deepest + 1, kind), **pad}))
    data = header("update", values={"k": nested(deepest + 1, kind), **pad})
    assert "deeper" in refused(data)


# -- encoding faults ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Ack(0, 1, AckStatus.APPLIED), "cannot encode Ack"),
        (Ack(1, 0, AckStatus.APPLIED), "cannot encode Ack"),
        (Ack(1, 2**63, AckStatus.APPLIED), "cannot encode Ack"),
        (Ack(1, 1, 5), "cannot encode Ack"),
        (Update(1, 1, b"short"), "cannot encode Update"),
        (Update(1, 1, DIGEST, chunk=(2, 2)), "cannot encode Update"),
        (Update(1, 1, DIGEST, chunk=(0, 2**32)), "cannot encode Update"),
        (Update(1, 1, DIGEST, checksum=bytes(15)), "cannot encode Update"),
        (Update(1, 1, DIGEST, codec=""), "Update.codec"),
        (Update(1, 1, DIGEST, values=[1]), "Update.values"),
        (Hello("r", "m", -1), "Hello.pid"),
        (Hello("r", "m", 1, has_target=1), "Hello.has_target"),
        (Hello("\ud800", "m", 1), "cannot encode Hello"),
        (Hello("r", "m", 1, serves="unix:///tmp/a"), "Hello.x"),
        (Hello("r", "m", 1, serves="tcp://a:1 tcp://b:1"), "Hello.x"),
        (Hello("r", "m", 1, serves=5), "Hello.x"),
        (Refuse("a", "b", ("tcp://a:1",) * 9), "Refuse.x"),
        (Refuse("a", "b", ("tcp://a:1", "unix:///tmp/a")), "Refuse.x"),
        (Refuse("a", "b", "tcp://a:1"), "Refuse.x"),
        (Welcome(1, None, 0), "Welcome.version"),
        (Segment(1, 2, 0), "Segment.num_slots"),
        (DeviceSlot(1, 256, "cuda", bytes(16), 1), "DeviceSlot.index"),
        (DeviceSlot(1, 2, "cuda", bytes(15), 1), "DeviceSlot.uuid"),
        (Take(1, -1), "Take.version"),
        (Promise(bytes(17)), "Promise.digest"),
        (ManifestMessage("manifest"), "ManifestMessage.manifest"),
        (Hello("r", "m", 1, session=bytes(15)), "Hello.session"),
        (Hello("r", "m", 1, partial_version=0), "Hello.partial_version"),
        (Hello("r", "m", 1, partial_nbytes=None), "Hello.partial_nbytes"),
        (Update(1, 1, DIGEST, state=b""), "cannot encode Update"),
        (Challenge(bytes(31)), "Challenge.nonce"),
        (Challenge(bytes(32), None), "Challenge.required"),
        (Proof(bytes(33), b""), "Proof.nonce"),
        (Proof(bytes(32), bytes(65)), "Proof.mac"),
        (Proof(bytes(32), bytearray(4)), "Proof.mac"),
        (Join(bytes(15), 0, 2), "Join.link"),
        (Join(bytes(16), 16, 2), "Join.index"),
        (Join(bytes(16), 0, 1), "Join.count"),
        (Fetch(-1), "Fetch.min_version"),
        (Current(0, 1), "Current.epoch"),
        (Status([1]), "Status.values"),
        ("hello", "str is not a message"),
    ],
)
def test_an_illegal_message_is_not_encoded(message: Any, text: str) -> None:
    with pytest.raises(LocalProtocolError, match=text):
        encode_header(message)


@pytest.mark.parametrize(
    "trace",
    [
        TRACE.upper(),
        TRACE[:-1],
        TRACE + "0",
        TRACE.replace("-", " "),
        "01" + TRACE[2:],
        f"00-{'0' * 32}-{'1' * 16}-01",
        f"00-{'1' * 32}-{'0' * 16}-01",
        "\u0660" * 55,
        "",
        TRACE.encode(),
        1,
    ],
)
def test_a_trace_that_is_none_is_ignored(trace: Any) -> None:
    message = Update(1, 2, DIGEST)
    assert encode_header(Update(1, 2, DIGEST, trace=trace)) == encode_header(message)
    ext = {"trace": trace, "k": 1}
    assert decode_header(encode_header(message, ext=ext)) == (message, ext)


def test_a_trace_travels_in_the_extension_map() -> None:
    message = Update(1, 2, DIGEST, trace=TRACE)
    assert encode_header(message, ext={"k": 1}) == raw_header(
        "update", {"x": {"k": 1, "trace": TRACE}}, version=2
    )
    assert decode_header(encode_header(message)) == (message, None)
    assert decode_header(encode_header(message, ext={"k": 1})) == (message, {"k": 1})
    other = Ack(1, 2, AckStatus.APPLIED)
    assert decode_header(encode_header(other, ext={"trace": TRACE})) == (other, {"trace": TRACE})


def test_what_a_delta_is_made_of_travels_in_the_extension_map() -> None:
    """A reader of an older release ignores it there; it only sends what it has agreed to."""
    update = Update(1, 2, DIGEST, "delta", base=(3, 64))
    base = (3).to_bytes(8, "little") + (64).to_bytes(8, "little")
    assert encode_header(update, ext={"k": 1}) == raw_header(
        "update", {"codec": "delta", "x": {"k": 1, "base": base}}, version=2
    )
    assert decode_header(encode_header(update, ext={"k": 1})) == (update, {"k": 1})
    ack = Ack(1, 2, AckStatus.NACK, "E", "no", is_base=True)
    assert decode_header(encode_header(ack, ext={"k": 1})) == (ack, {"k": 1})
    assert decode_header(encode_header(Ack(1, 2, AckStatus.APPLIED))) == (
        Ack(1, 2, AckStatus.APPLIED),
        None,
    )


@pytest.mark.parametrize("base", [b"", bytes(15), bytes(17)])
def test_a_base_of_another_size_is_refused(base: bytes) -> None:
    assert "illegal header" in refused(raw_header("update", {"x": {"base": base}}))


@pytest.mark.parametrize("base", [1, True, "x"])
def test_a_base_of_another_type_is_no_base(base: Any) -> None:
    data = raw_header("update", {"x": {"base": base}})
    assert decode_header(data) == (Update(1, 1, DIGEST), {"base": base})


def test_error_texts_are_clipped_on_a_character() -> None:
    message = Ack(1, 1, AckStatus.NACK, "E" * 300, "ä" * 5000)
    decoded, _ = decode_header(encode_header(message))
    assert decoded == Ack(1, 1, AckStatus.NACK, "E" * 256, "ä" * 1536)
    decoded, _ = decode_header(encode_header(Refuse("", "x" + "€" * 5000)))
    assert decoded == Refuse("", "x" + "€" * 1023)


# -- values ---------------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "where", "kind"),
    [
        (object(), "'key'", "object"),
        ({"a": [1, {2}]}, "'key'", "set"),
        ({"a": (1, 1j)}, "'key'", "complex"),
        (Colour.RED, "'key'", "Colour"),
        (Text("x"), "'key'", "Text"),
        (collections.OrderedDict(a=1), "'key'", "collections.OrderedDict"),
        ({1: 2}, "'key'", "int is not allowed"),
        ({b"a": 2}, "'key'", "not a string"),
        (2**64, "'key'", "64 bits"),
        (-(2**63) - 1, "'key'", "64 bits"),
        ("\ud800", "'key'", "surrogates"),
        ({"\ud800": 1}, "'key'", "surrogates"),
    ],
)
def test_a_value_that_cannot_travel_is_named(value: Any, where: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=where) as info:
        encode_values({"key": value})
    assert kind in str(info.value)
    with pytest.raises(ConfigError, match=where):
        encode_header(Update(1, 1, DIGEST, values={"key": value}))


@pytest.mark.parametrize("more", [0, 1])
def test_lists_and_maps_are_counted_over_all_values(more: int) -> None:
    # The map of the header, its map of values, its extension map, and four lists are counted, too.
    rest = 2**18 - 7 - 3 * MAX_ITEMS + more
    values: dict[str, Any] = {name: [[]] * MAX_ITEMS for name in "abc"} | {"d": [[]] * rest}
    update = Update(1, 1, DIGEST, values=values)
    if more:
        with pytest.raises(ConfigError, match="together: .* 262144 lists and maps"):
            encode_values(values)
        with pytest.raises(ConfigError, match="together: .* 262144 lists and maps"):
            encode_header(update)
    else:
        assert decode_header(encode_header(update, ext={"x": 1}))[0] == update


ADDRESSES = [
    b"tcp://a:1",
    1,
    True,
    "",
    " ",
    "unix:///tmp/a",
    "http://a:1",
    "tcp://" + "a" * 250,
    "tcp://" + "\u00e4" * 125,
]


@pytest.mark.parametrize("address", [*ADDRESSES, "tcp://a:1 tcp://b:1"])
def test_a_relay_serves_at_one_address_that_others_can_dial(address: Any) -> None:
    assert "illegal header (x)" in refused(header("hello", x={"serves": address}))


@pytest.mark.parametrize(
    "addresses",
    [*ADDRESSES, " ".join(["tcp://a:1"] * 9), "tcp://a:1  tcp://b:1", "tcp://a:1 unix:///tmp/a"],
)
def test_a_receiver_is_sent_on_to_few_addresses_that_it_can_dial(addresses: Any) -> None:
    assert "illegal header (x)" in refused(header("refuse", x={"elsewhere": addresses}))


def test_addresses_travel_in_the_extension_map() -> None:
    """A reader of an older release ignores them there, and takes the refusal as any other."""
    named = tuple(f"tcp://{'h' * 240}:{number}" for number in range(8))
    refusal = Refuse("SentOn", "full", named)
    data = encode_header(refusal, ext={"k": 1})
    assert data == header("refuse", error_type="SentOn", error_text="full", x=_sent_on(named))
    assert len(data) < 4096
    assert decode_header(data) == (refusal, {"k": 1})
    hello = Hello("receiver", "policy", 1, serves=named[0], follows=True)
    assert encode_header(hello) == header("hello", x={"serves": named[0], "follows": True})
    assert decode_header(encode_header(hello)) == (hello, None)


def test_what_is_behind_a_receiver_travels_in_the_extension_map() -> None:
    ack = Ack(1, 2, AckStatus.RECEIVED, behind=(64, 12))
    numbers = (64).to_bytes(8, "little") + (12).to_bytes(8, "little")
    assert encode_header(ack) == header("ack", version=2, x={"behind": numbers})
    assert decode_header(encode_header(ack)) == (ack, None)
    for wrong in (b"", bytes(15), packed_numbers(2**32, 1), packed_numbers(1, 2**63)):
        assert "illegal header" in refused(header("ack", x={"behind": wrong}))
    for illegal in ((-1, 0), (1, 2**64), (2**32, 1), (1,), "no"):
        with pytest.raises(LocalProtocolError):
            encode_header(Ack(1, 2, AckStatus.RECEIVED, behind=illegal))  # type: ignore[arg-type]


def packed_numbers(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


def _sent_on(addresses: tuple[str, ...]) -> dict[str, Any]:
    return {"k": 1, "elsewhere": " ".join(addresses)}


@pytest.mark.parametrize("value", [1, False, "yes", b""])
def test_a_receiver_that_follows_says_true(value: Any) -> None:
    message, ext = decode_header(header("hello", x={"follows": value}))
    assert message == Hello("receiver", "policy", 1)
    assert ext == {"follows": value}


def test_the_digest_of_a_part_travels_in_the_extension_map() -> None:
    hello = Hello("receiver", "policy", 1, partial_digest=DIGEST)
    assert encode_header(hello) == header("hello", x={"partial_digest": DIGEST})
    assert decode_header(encode_header(hello)) == (hello, None)
    message, ext = decode_header(header("hello", x={"partial_digest": 1}))
    assert (message, ext) == (Hello("receiver", "policy", 1), {"partial_digest": 1})


SESSIONS = tuple(bytes([number]) * 16 for number in range(16))


def test_the_path_of_a_server_travels_in_the_extension_map() -> None:
    welcome = Welcome(1, 2, 3, path=SESSIONS)
    data = encode_header(welcome)
    assert data == header("welcome", version=2, worker_idx=3, x={"path": b"".join(SESSIONS)})
    assert decode_header(data) == (welcome, None)
    assert len(data) < 4096
    with pytest.raises(LocalProtocolError, match=r"Welcome\.x"):
        encode_header(Welcome(1, 2, 3, path=(*SESSIONS, bytes(16))))


@pytest.mark.parametrize("path", [b"", bytes(15), bytes(17 * 16), "a" * 16, 5, True])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    assert "illegal header (x)" in refused(header("welcome", x={"path": path}))
