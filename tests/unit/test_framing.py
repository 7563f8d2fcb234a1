"""FrameDecoder and encode_frame: layout, limits, cuts, lent buffers."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiosync.errors import (
    FrameTooLarge,
    ProtocolError,
    RemoteProtocolError,
    WireVersionMismatch,
)
from aiosync.types import AckStatus, Limits
from aiosync.wire import (
    PREFIX_NBYTES,
    READ_AHEAD_NBYTES,
    WIRE_VERSION,
    Ack,
    Fetch,
    FrameDecoder,
    FrameEnd,
    FrameStart,
    ManifestMessage,
    Update,
    encode_frame,
    plan_manifest,
)
from tests.unit._frames import DIGEST, cut_at, drive, exts, feed, messages, raw_frame, raw_header

PAGE = raw_header("page", {})
ACK = Ack(5, 6, AckStatus.APPLIED)
UPDATE = Update(5, 6, DIGEST)


def fed(data: bytes, limits: Limits | None = None) -> FrameDecoder:
    decoder = FrameDecoder() if limits is None else FrameDecoder(limits)
    feed(decoder, data)
    return decoder


# -- encoding -----------------------------------------------------------------------------------


def test_the_bytes_of_a_frame_are_as_specified() -> None:
    header = struct.pack("<BBHQQI", 2, 2, 0, 5, 6, 0)
    expected = (
        b"AIOS\x02\x00\x00\x00"
        + struct.pack("<I", len(header))
        + struct.pack("<I", zlib.crc32(header))
        + struct.pack("<Q", 4096)
        + header
    )
    assert encode_frame(ACK, 4096) == expected
    assert WIRE_VERSION == 2
    assert PREFIX_NBYTES == len(expected) - len(header) == 24


# -- decoding -----------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    st.lists(st.tuples(messages, st.binary(max_size=300), st.none() | exts), max_size=4),
    st.lists(st.integers(0, 3000), max_size=12),
    st.integers(1, 4),
)
def test_any_frames_in_any_cuts_arrive_as_they_were_sent(
    frames: list[tuple[object, bytes, dict[str, int] | None]], cuts: list[int], pieces: int
) -> None:
    data = b""
    expected: list[object] = []
    for message, payload, ext in frames:
        data += encode_frame(message, len(payload), ext=ext) + payload
        expected.append(FrameStart(message, ext or None, len(payload)))
        expected += [payload, FrameEnd()] if payload else []
    expected.append(False)
    assert drive(cut_at(data, cuts), pieces=pieces) == expected


def test_a_large_payload_is_read_straight_into_the_lent_buffer() -> None:
    decoder, lent = waiting(100_000), bytearray(100_000)
    decoder.lend([memoryview(lent)])
    target = decoder.get_buffer()
    assert len(target) == 100_000
    target[:3] = b"abc"
    decoder.buffer_updated(3)
    decoder.get_buffer()[:1] = b"d"
    assert lent[:5] == b"abcd\0"


def test_the_decoded_message_does_not_share_the_buffer() -> None:
    decoder = FrameDecoder()
    message = Update(1, 2, DIGEST, values={"blob": b"first"})
    feed(decoder, encode_frame(message))
    event = decoder.next_event()
    decoder.get_buffer()[:] = b"\xff" * READ_AHEAD_NBYTES
    assert event.message == message


@pytest.mark.parametrize(
    ("frame", "kind", "text"),
    [
        (raw_frame(PAGE, magic=b"HTTP"), RemoteProtocolError, "not aiosync"),
        (raw_frame(PAGE, magic=b"aios"), RemoteProtocolError, "not aiosync"),
        (b"GET / HTTP", RemoteProtocolError, "not aiosync"),
        (raw_frame(PAGE, version=0), WireVersionMismatch, "version 0"),
        (raw_frame(PAGE, version=1), WireVersionMismatch, "version 1"),
        (b"AIOS\x07", WireVersionMismatch, "version 7"),
        (raw_frame(PAGE, flags=1), RemoteProtocolError, "flags"),
        (raw_frame(PAGE, reserved=1), RemoteProtocolError, "reserved"),
        (raw_frame(b""), RemoteProtocolError, "no header"),
        (raw_frame(PAGE, crc=0), RemoteProtocolError, "CRC"),
        (raw_frame(PAGE, header_nbytes=2**24 + 1), FrameTooLarge, "header"),
        (raw_frame(PAGE, 2**40 + 1), FrameTooLarge, "payload"),
        (raw_frame(PAGE, 2**64 - 1), FrameTooLarge, "payload"),
        (raw_frame(b"\x80"), RemoteProtocolError, "unknown message type 128"),
    ],
)
def test_an_illegal_frame_is_refused(frame: bytes, kind: type[ProtocolError], text: str) -> None:
    decoder = fed(encode_frame(ACK) + frame)
    assert isinstance(decoder.next_event(), FrameStart)
    with pytest.raises(kind, match=text) as caught:
        decoder.next_event()
    assert caught.type is kind


# -- backpressure and lending ---------------------------------------------------------------------


def waiting(nbytes: int = 4) -> FrameDecoder:
    """Return a decoder that waits for buffers of ``nbytes`` bytes."""
    decoder = fed(encode_frame(UPDATE, nbytes))
    decoder.next_event()
    return decoder


def test_the_decoder_drops_lent_buffers_when_the_payload_ends() -> None:
    decoder, lent = waiting(8192), bytearray(8192)
    decoder.lend([memoryview(lent)])
    with pytest.raises(BufferError):
        lent.extend(b"x")
    decoder.buffer_updated(len(decoder.get_buffer()))
    assert decoder.next_event() == FrameEnd()
    # The decoder does not export the buffer any more, so it can grow.
    lent.extend(b"x")


def test_a_large_manifest_is_decoded_in_steps() -> None:
    """An event loop can turn between two steps; the next frame is decoded after the last step."""
    leaves = [(f"layer.{at}", "float32", (at % 7,), "param", (f"tied.{at}",)) for at in range(5000)]
    manifest = plan_manifest(leaves)
    frames = encode_frame(ManifestMessage(manifest)) + encode_frame(Fetch(1))
    decoder, busy = FrameDecoder(), 0
    while frames:
        room = decoder.get_buffer()[: len(frames)]
        room[:] = frames[: len(room)]
        frames = frames[len(room) :]
        decoder.buffer_updated(len(room))
        if decoder.next_event() is not None:
            pytest.fail("it is complete at once")
    while (event := decoder.next_event()) is None:
        assert decoder.is_busy
        assert decoder.mid_frame
        busy += 1
    assert event.message == ManifestMessage(manifest)
    assert event.message.manifest.digest == manifest.digest
    assert event.message.manifest.index == manifest.index
    assert busy > 100
    assert not decoder.is_busy
    assert decoder.next_event().message == Fetch(1)
    assert decoder.next_event() is None
    assert not decoder.mid_frame
