"""Samples and Hypothesis strategies of messages, frames made by hand, and a driver of decoders."""

from __future__ import annotations

import itertools
import struct
import zlib
from typing import TYPE_CHECKING, Any

import msgpack
from hypothesis import strategies as st

from aiosync.errors import ProtocolError
from aiosync.types import AckStatus
from aiosync.wire import (
    DTYPE_NBYTES,
    Ack,
    Challenge,
    Current,
    DeviceSlot,
    Fetch,
    FrameDecoder,
    FrameEnd,
    FrameStart,
    Hello,
    Manifest,
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
    plan_manifest,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiosync.types import Limits

BIG = 2**63 - 1
DIGEST = bytes(range(16))
MANIFEST = plan_manifest(
    [
        ("actor.weight", "float32", (3, 5), "param", ("critic.weight",)),
        ("actor.bias", "bfloat16", (7,), "param", ()),
        ("steps", "int64", (), "buffer", ()),
        ("empty", "float8_e4m3fn", (4, 0), "buffer", ()),
    ]
)
SAMPLES: list[Message] = [
    Hello("receiver", "policy", 4711),
    Hello("receiver", "", 0, 0, "state_dict", False, 1, 0),
    Hello("sender", "größe", 2**32 - 1, 2**16 - 1, "s", True, BIG, BIG),
    Welcome(1, 0, 0),
    Welcome(BIG, BIG, 2**16 - 1, 8),
    Welcome(1, 0, 0, None, "weights of: größe"),
    Refuse("ConfigError", "no such model"),
    Refuse("", ""),
    ManifestMessage(Manifest((), 0)),
    ManifestMessage(MANIFEST),
    Update(1, 1, DIGEST),
    Update(BIG, BIG, DIGEST, "int8", {"lr": 0.5, "n": [1, {"a": None}]}, (0, 1), b"\0" * 16),
    Ack(1, 1, AckStatus.RECEIVED),
    Ack(BIG, BIG, AckStatus.APPLIED),
    Ack(7, 8, AckStatus.NACK, "ManifestMismatch", "missing: a"),
    Ack(7, 8, AckStatus.SKIPPED),
    Segment(0, 0, 1),
    Segment(BIG, 2**17, 65535),
    Segment(1, 4096, 1, True),
    DeviceSlot(0, 0, "c", bytes(16), 0),
    DeviceSlot(BIG, 255, "cuda", b"\xff" * 16, BIG),
    PageMessage(),
    Take(1, 0),
    Take(BIG, BIG),
    Promise(b""),
    Promise(DIGEST),
    Hello("status", "", 1, session=bytes(16), subscribe=False),
    Hello("r", "m", 1, 2, "s", True, 3, 4, b"\xff" * 16, True, BIG, BIG, BIG),
    Update(1, 2, DIGEST, values={"lr": 1}, chunk=(1, 2), checksum=b"c" * 16, state=b"s" * 16),
    Update(1, 2, DIGEST, trace="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    Update(3, 4, DIGEST, "delta", chunk=(0, 2), checksum=b"c" * 16, base=(3, 64)),
    Ack(7, 8, AckStatus.RECEIVED, is_base=True),
    Challenge(bytes(32)),
    Challenge(b"\xff" * 32, False),
    Proof(b"n" * 32, b""),
    Proof(b"n" * 32, b"m" * 64),
    Fetch(0),
    Fetch(BIG),
    Fetch(2, has_none=True),
    Current(1, 0),
    Current(BIG, BIG),
    Status(),
    Status({"workers": [{"idx": 0, "lag": None}], "version": 7}),
    Setup("gloo"),
    Setup("größe", "0/1", b"\xff" * 2048),
    Hello("receiver", "policy", 1, serves="tcp://[::1]:7000", follows=True),
    Refuse("SentOn", "full", ("tcp://größe:7000", "tcp://b:1")),
    Ack(7, 8, AckStatus.RECEIVED, behind=(64, 12)),
]


def feed(decoder: FrameDecoder, data: bytes) -> None:
    """Copy bytes into a decoder, as a link does when it reads them."""
    view = memoryview(data)
    while view:
        target = decoder.get_buffer()
        assert target, "there is no room: take events first"
        nbytes = min(len(target), len(view))
        target[:nbytes] = view[:nbytes]
        decoder.buffer_updated(nbytes)
        view = view[nbytes:]


names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
ids = st.integers(1, BIG)
addresses = names.map(lambda name: f"tcp://{name.replace(' ', '')}:1")
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | texts
    | st.binary(max_size=50)
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    found = draw(st.lists(names.filter(bool), unique=True, max_size=8))
    entries: list[Any] = []
    while found:
        name = found.pop()
        aliases = tuple(found.pop() for _ in range(draw(st.integers(0, min(2, len(found))))))
        entries.append(
            (
                name,
                draw(st.sampled_from(sorted(DTYPE_NBYTES))),
                tuple(draw(st.lists(st.integers(0, 40), max_size=4))),
                draw(st.sampled_from(["param", "buffer", "transient"])),
                aliases,
            )
        )
    return plan_manifest(entries)


messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Hello,
        names.filter(bool),
        names,
        st.integers(0, 2**32 - 1),
        st.none() | st.integers(0, 2**16 - 1),
        names.filter(bool),
        st.booleans(),
        st.none() | ids,
        st.none() | st.integers(0, BIG),
        st.none() | st.binary(min_size=16, max_size=16),
        st.booleans(),
        st.none() | ids,
        st.none() | ids,
        st.integers(0, BIG),
        serves=st.just("") | addresses,
        follows=st.booleans(),
    ),
    st.builds(
        Welcome,
        ids,
        st.integers(0, BIG),
        st.integers(0, 2**16 - 1),
        st.none() | st.integers(0, 2**16 - 1),
    ),
    st.builds(
        Refuse,
        texts.filter(lambda text: len(text.encode()) <= 256),
        texts,
        st.lists(addresses, max_size=8).map(tuple),
    ),
    st.builds(ManifestMessage, manifests()),
    st.builds(
        Update,
        ids,
        ids,
        st.binary(min_size=16, max_size=16),
        names.filter(bool),
        st.dictionaries(texts, trees, max_size=4),
        st.none()
        | st.integers(1, 2**32 - 1).flatmap(
            lambda count: st.tuples(st.integers(0, count - 1), st.just(count))
        ),
        st.none() | st.binary(min_size=16, max_size=16),
        st.none() | st.binary(min_size=16, max_size=16),
    ),
    st.builds(
        Ack,
        ids,
        ids,
        st.sampled_from(AckStatus),
        texts.filter(lambda text: len(text.encode()) <= 256),
        texts,
    ),
    st.builds(
        Segment, st.integers(0, BIG), st.integers(0, 2**40), st.integers(1, 65535), st.booleans()
    ),
    st.builds(
        DeviceSlot,
        st.integers(0, BIG),
        st.integers(0, 255),
        st.text(min_size=1, max_size=16),
        st.binary(min_size=16, max_size=16),
        st.integers(0, 2**40),
    ),
    st.builds(PageMessage),
    st.builds(Take, ids, st.integers(0, BIG)),
    st.builds(Promise, st.binary(max_size=16)),
    st.builds(Challenge, st.binary(min_size=32, max_size=32), st.booleans()),
    st.builds(Proof, st.binary(min_size=32, max_size=32), st.binary(max_size=64)),
    st.builds(Fetch, st.integers(0, BIG)),
    st.builds(Current, ids, st.integers(0, BIG)),
    st.builds(Status, st.dictionaries(texts, trees, max_size=4)),
    st.builds(Setup, names.filter(bool), texts, st.binary(max_size=300)),
)
exts = st.dictionaries(
    texts,
    st.booleans() | st.integers(-(2**63), 2**64 - 1) | texts | st.binary(max_size=20),
    max_size=5,
)


NUMBERS = {
    "update": 1,
    "ack": 2,
    "hello": 3,
    "welcome": 4,
    "refuse": 5,
    "manifest": 6,
    "segment": 7,
    "page": 8,
    "take": 9,
    "promise": 10,
    "challenge": 11,
    "proof": 12,
    "fetch": 13,
    "current": 14,
    "status": 15,
    "setup": 16,
}


def raw_header(kind: str, rest: dict[Any, Any] | bytes, **fixed: Any) -> bytes:
    """Build a header by hand, legal or not. Independent of the code under test.

    Args:
        kind: Name of the message on the page about the wire format.
        rest: The map, or its bytes.
        fixed: For update and ack, the fields in fixed places that do not have the default.
    """
    data = rest if isinstance(rest, bytes) else msgpack.packb(rest) if rest else b""
    at = {"flags": 0, "reserved": 0, "epoch": 1, "version": 1, "nbytes": len(data), **fixed}
    if kind == "update":
        at = {"index": 0, "count": 0, "checksum": bytes(16), "state": bytes(16), **at}
        return (
            struct.pack("<BBH", 1, at["flags"], at["reserved"])
            + struct.pack("<IIQQ", at["index"], at["count"], at["epoch"], at["version"])
            + at.get("digest", DIGEST)
            + at["checksum"]
            + at["state"]
            + struct.pack("<I", at["nbytes"])
            + data
        )
    if kind == "ack":
        head = struct.pack("<BBH", 2, at.get("status", 1), at["reserved"])
        return head + struct.pack("<QQI", at["epoch"], at["version"], at["nbytes"]) + data
    return bytes([NUMBERS[kind]]) + (data or b"\x80")


def raw_frame(
    header: bytes,
    payload_nbytes: int = 0,
    *,
    magic: bytes = b"AIOS",
    version: int = 2,
    flags: int = 0,
    reserved: int = 0,
    header_nbytes: int | None = None,
    crc: int | None = None,
) -> bytes:
    """Build a frame by hand, legal or not. Independent of the code under test."""
    data = header
    return (
        struct.pack(
            "<4sBBHIIQ",
            magic,
            version,
            flags,
            reserved,
            len(data) if header_nbytes is None else header_nbytes,
            zlib.crc32(data) if crc is None else crc,
            payload_nbytes,
        )
        + data
    )


def drive(cuts: Iterable[bytes], limits: Limits | None = None, *, pieces: int = 1) -> list[Any]:
    """Feed the cuts to a decoder; return its events, with each payload before its FrameEnd.

    The last item is the error that the decoder raised. Without an error it is True if the stream
    ended inside a frame, and False if it did not.

    Args:
        cuts: The bytes as they arrive.
        limits: Limits of the decoder.
        pieces: Number of buffers over which each payload is spread.
    """
    decoder = FrameDecoder() if limits is None else FrameDecoder(limits)
    seen: list[Any] = []
    lent: list[bytearray] = []
    for cut in cuts:
        left = memoryview(cut)
        while True:
            try:
                event = decoder.next_event()
            except ProtocolError as exc:
                return [*seen, exc]
            if event is None:
                if not left:
                    break
                room = decoder.get_buffer()[: len(left)]
                room[:] = left[: len(room)]
                decoder.buffer_updated(len(room))
                left = left[len(room) :]
                continue
            if isinstance(event, FrameEnd):
                seen.append(b"".join(lent))
            seen.append(event)
            if isinstance(event, FrameStart) and event.payload_nbytes:
                share, rest = divmod(event.payload_nbytes, pieces)
                lent = [bytearray(share) for _ in range(pieces - 1)] + [bytearray(share + rest)]
                decoder.lend([memoryview(each) for each in lent])
    return [*seen, decoder.mid_frame]


def cut_at(data: bytes, positions: Iterable[int]) -> list[bytes]:
    """Split bytes at positions, given in any order."""
    edges = [0, *sorted(position for position in positions if position < len(data)), len(data)]
    return [data[start:stop] for start, stop in itertools.pairwise(edges)]
