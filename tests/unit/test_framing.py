"""FrameDecoder and encode_frame: layout, limits, cuts, lent buffers, final events."""

from __future__ import annotations

import array
import struct
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiosync.errors import (
    FrameTooLarge,
    LocalProtocolError,
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
    EndOfStream,
    Failed,
    FrameDecoder,
    FrameEnd,
    FrameStart,
    Refuse,
    Update,
    encode_frame,
)
from tests.unit._frames import DIGEST, SAMPLES, cut_at, drive, exts, messages, raw_frame, raw_header

PAGE = raw_header("page", {})
ACK = Ack(5, 6, AckStatus.APPLIED)
UPDATE = Update(5, 6, DIGEST)


def fed(data: bytes, limits: Limits | None = None) -> FrameDecoder:
    decoder = FrameDecoder() if limits is None else FrameDecoder(limits)
    decoder.feed(data)
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


@pytest.mark.parametrize(
    ("message", "options", "text"),
    [
        (UPDATE, {"payload_nbytes": -1}, "payload"),
        (UPDATE, {"payload_nbytes": 2**40 + 1}, "payload"),
        (Refuse("E", "x" * 200), {"limits": Limits(max_header_nbytes=100)}, "at most 100 "),
        *(
            (ACK, {"ext": ext}, r"Ack\.x")
            for ext in (
                {"a": 1.5},
                {1: 1},
                {"a": None},
                {"a": [1]},
                dict.fromkeys(map(str, range(17)), 1),
            )
        ),
    ],
)
def test_what_is_illegal_is_not_encoded(message: Any, options: Any, text: str) -> None:
    with pytest.raises(LocalProtocolError, match=text):
        encode_frame(message, **options)


# -- decoding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("payload", [b"", b"x", b"payload" * 1000], ids=len)
def test_every_message_survives_every_cut(message: object, payload: bytes) -> None:
    data = encode_frame(message, len(payload), ext={"k": 1}) + payload
    expected: list[object] = [FrameStart(message, {"k": 1}, len(payload))]
    if payload:
        expected += [payload, FrameEnd()]
    expected.append(EndOfStream(True))
    assert drive([data]) == expected
    step = max(1, len(data) // 150)
    for cut in range(1, len(data), step):
        assert drive([data[:cut], data[cut:]]) == expected
    assert drive(cut_at(data, range(0, len(data), 7)), pieces=3) == expected


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
    expected.append(EndOfStream(True))
    assert drive(cut_at(data, cuts), pieces=pieces) == expected


@pytest.mark.parametrize("nbytes", [4095, 4096, 65536, 65537, 1_000_003])
@pytest.mark.parametrize("pieces", [1, 7])
def test_payloads_around_the_read_ahead(nbytes: int, pieces: int) -> None:
    payload = bytes(i * 31 % 251 for i in range(nbytes))
    data = (encode_frame(UPDATE, nbytes) + payload) * 2 + encode_frame(ACK)
    once = [FrameStart(UPDATE, None, nbytes), payload, FrameEnd()]
    expected = [*once, *once, FrameStart(ACK, None, 0), EndOfStream(True)]
    for step in (len(data), 65536, 9973):
        assert drive(cut_at(data, range(0, len(data), step)), pieces=pieces) == expected


def test_a_large_payload_is_read_straight_into_the_lent_buffer() -> None:
    decoder, lent = waiting(100_000), bytearray(100_000)
    decoder.lend([lent])
    target = decoder.get_buffer()
    assert len(target) == 100_000
    target[:3] = b"abc"
    decoder.buffer_updated(3)
    decoder.get_buffer()[:1] = b"d"
    assert lent[:5] == b"abcd\0"


@pytest.mark.parametrize("nbytes", [65536 - 24, 65536, 300_000])
def test_a_header_larger_than_the_read_ahead(nbytes: int) -> None:
    message = Update(1, 2, DIGEST, values={"blob": b"z" * nbytes})
    data = encode_frame(message, 3) + b"abc" + encode_frame(ACK)
    expected = [
        FrameStart(message, None, 3),
        b"abc",
        FrameEnd(),
        FrameStart(ACK, None, 0),
        EndOfStream(True),
    ]
    for step in (len(data), 65536, 10_007):
        assert drive(cut_at(data, range(0, len(data), step))) == expected


def test_the_decoded_message_does_not_share_the_buffer() -> None:
    decoder = FrameDecoder()
    message = Update(1, 2, DIGEST, values={"blob": b"first"})
    decoder.feed(encode_frame(message))
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
def test_an_illegal_frame_fails_for_good(
    frame: bytes, kind: type[ProtocolError], text: str
) -> None:
    decoder = fed(encode_frame(ACK) + frame)
    assert isinstance(decoder.next_event(), FrameStart)
    event = decoder.next_event()
    assert isinstance(event, Failed)
    assert type(event.error) is kind
    assert text in str(event.error)
    # Sticky: no more bytes, no more events, whatever comes.
    assert len(decoder.get_buffer()) == 0
    with pytest.raises(LocalProtocolError):
        decoder.feed(encode_frame(ACK))
    decoder.feed_eof()
    assert decoder.next_event() is event


@pytest.mark.parametrize("header_nbytes", [1000, 1001])
@pytest.mark.parametrize("payload_nbytes", [5000, 5001])
def test_limits_are_checked_before_the_frame_is_complete(
    header_nbytes: int, payload_nbytes: int
) -> None:
    limits = Limits(max_header_nbytes=1000, max_payload_nbytes=5000)
    prefix = raw_frame(b"", payload_nbytes, header_nbytes=header_nbytes, crc=0)
    event = fed(prefix, limits).next_event()
    if (header_nbytes, payload_nbytes) == (1000, 5000):
        assert event is None
    else:
        assert isinstance(event.error, FrameTooLarge)


def test_an_announcement_allocates_no_more_than_its_header() -> None:
    prefix = raw_frame(b"", 2**40, header_nbytes=2**20, crc=0)
    tracemalloc.start()
    try:
        decoder = fed(prefix)
        assert decoder.next_event() is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20 + READ_AHEAD_NBYTES + 20_000


# -- end of stream --------------------------------------------------------------------------------


@pytest.mark.parametrize("large", [False, True])
def test_the_end_in_a_frame_is_not_clean(large: bool) -> None:
    message = Update(1, 1, DIGEST, values={"b": b"x" * 70_000} if large else {})
    data = encode_frame(message, 10) + b"0123456789"
    step = 997 if large else 1
    for nbytes in range(1, len(data), step):
        events = drive([data[:nbytes]])
        assert events[-1] == EndOfStream(False)
        assert FrameEnd() not in events


def test_a_payload_that_was_read_ahead_is_complete_after_the_end() -> None:
    decoder, lent = fed(encode_frame(UPDATE, 3) + b"abc"), bytearray(3)
    decoder.feed_eof()
    assert isinstance(decoder.next_event(), FrameStart)
    assert decoder.next_event() is None  # a buffer is needed, not bytes
    decoder.lend([lent])
    assert (decoder.next_event(), lent) == (FrameEnd(), b"abc")
    assert decoder.next_event() == decoder.next_event() == EndOfStream(True)


def test_mid_frame_and_needs_buffers_follow_the_stream() -> None:
    frame = encode_frame(UPDATE, 2)
    decoder = FrameDecoder()

    def state() -> tuple[object, bool, bool]:
        return decoder.next_event(), decoder.mid_frame, decoder.needs_buffers

    assert state() == (None, False, False)
    decoder.feed(frame[:5])
    assert state() == (None, True, False)
    decoder.feed(frame[5:])
    assert state() == (FrameStart(UPDATE, None, 2), True, True)
    decoder.lend([bytearray(2)])
    decoder.feed(b"x")
    assert state() == (None, True, False)
    decoder.feed(b"y")
    assert state() == (FrameEnd(), False, False)


# -- backpressure and lending ---------------------------------------------------------------------


def test_no_room_while_a_payload_waits_for_buffers_and_the_read_ahead_is_full() -> None:
    decoder, lent = waiting(200_000), bytearray(200_000)
    decoder.feed(b"p" * len(decoder.get_buffer()))
    with pytest.raises(LocalProtocolError, match="room for 0"):
        decoder.feed(b"p")
    decoder.lend([lent])
    assert lent.count(b"p") == READ_AHEAD_NBYTES
    assert len(decoder.get_buffer()) == 200_000 - READ_AHEAD_NBYTES


def test_no_room_while_events_wait_but_what_taken_ones_left_is_used() -> None:
    frame = encode_frame(ACK)
    count, rest = divmod(READ_AHEAD_NBYTES, len(frame))
    decoder = fed((frame * (count + 1))[:READ_AHEAD_NBYTES])
    assert len(decoder.get_buffer()) == 0
    assert isinstance(decoder.next_event(), FrameStart)
    decoder.feed((frame * 2)[rest : rest + len(frame)])
    assert [type(event) for event in iter(decoder.next_event, None)] == [FrameStart] * count


def waiting(nbytes: int = 4) -> FrameDecoder:
    """A decoder that waits for buffers of so many bytes."""
    decoder = fed(encode_frame(UPDATE, nbytes))
    decoder.next_event()
    return decoder


@pytest.mark.parametrize(
    "buffers",
    [
        [],
        [bytearray(3)],
        [bytearray(5)],
        [bytearray(4), bytearray(1)],
        [b"1234"],
        [memoryview(bytearray(8))[::2]],
        ["1234"],
        [4],
    ],
)
def test_buffers_that_do_not_fit_are_refused_and_others_may_follow(buffers: list[object]) -> None:
    decoder = waiting()
    with pytest.raises(LocalProtocolError):
        decoder.lend(buffers)
    decoder.lend([bytearray(4)])


def test_lent_buffers_may_have_any_item_type_and_may_be_empty() -> None:
    numbers, decoder = array.array("H", [0, 0]), waiting()
    decoder.lend([bytearray(), numbers, bytearray()])
    decoder.feed(b"\1\0\2\0")
    assert (decoder.next_event(), numbers.tobytes()) == (FrameEnd(), b"\1\0\2\0")


def test_buffers_are_only_taken_when_a_payload_waits() -> None:
    served = waiting()
    served.lend([bytearray(4)])
    for decoder in (FrameDecoder(), fed(encode_frame(ACK)), served):
        with pytest.raises(LocalProtocolError):
            decoder.lend([bytearray(4)])


@pytest.mark.parametrize("complete", [True, False])
def test_the_decoder_drops_lent_buffers_when_payload_or_stream_ends(complete: bool) -> None:
    decoder, lent = waiting(8192), bytearray(8192)
    decoder.lend([lent])
    with pytest.raises(BufferError):
        lent.extend(b"x")
    if complete:
        decoder.buffer_updated(len(decoder.get_buffer()))
    else:
        decoder.feed_eof()
    assert decoder.next_event() == (FrameEnd() if complete else EndOfStream(False))
    lent.extend(b"x")  # nobody exports it any more


def test_lending_between_get_buffer_and_buffer_updated() -> None:
    decoder, lent = waiting(5), bytearray(5)
    target = decoder.get_buffer()
    decoder.lend([lent])
    target[:7] = b"12345AI"
    decoder.buffer_updated(7)
    assert (decoder.next_event(), lent) == (FrameEnd(), b"12345")
    assert decoder.next_event() is None
    assert decoder.mid_frame


@pytest.mark.parametrize("counts", [[-1], [READ_AHEAD_NBYTES + 1], [10, 10]])
def test_a_wrong_count_of_bytes_is_refused(counts: list[int]) -> None:
    decoder = FrameDecoder()
    decoder.get_buffer()
    *good, wrong = counts
    for count in good:
        decoder.buffer_updated(count)
    with pytest.raises(LocalProtocolError):
        decoder.buffer_updated(wrong)
