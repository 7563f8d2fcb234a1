"""FrameDecoder and encode_frame: layout, limits, cuts, lent buffers, final events."""

from __future__ import annotations

import array
import struct
import tracemalloc
import zlib

import msgpack
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
    iter_events,
)
from tests.unit._frames import DIGEST, SAMPLES, cut_at, drive, exts, messages, raw_frame

ACK = Ack(5, 6, AckStatus.APPLIED)
UPDATE = Update(5, 6, DIGEST)


def fed(data: bytes, limits: Limits | None = None) -> FrameDecoder:
    decoder = FrameDecoder() if limits is None else FrameDecoder(limits)
    decoder.feed(data)
    return decoder


def failure(data: bytes, limits: Limits | None = None) -> ProtocolError:
    decoder = fed(data, limits)
    event = decoder.next_event()
    assert isinstance(event, Failed)
    return event.error


# -- encoding -----------------------------------------------------------------------------------


def test_the_bytes_of_a_frame_are_as_specified() -> None:
    # The counter comes last, as a 64-bit integer: see "Counters" in the wire format.
    header = msgpack.packb({"t": "ack", "epoch": 5, "status": 2, "version": 2**63})
    header = header[:-8] + struct.pack(">Q", 6)
    expected = (
        b"AIOS\x01\x00\x00\x00"
        + struct.pack("<I", len(header))
        + struct.pack("<I", zlib.crc32(header))
        + struct.pack("<Q", 4096)
        + header
    )
    assert encode_frame(ACK, 4096) == expected
    assert WIRE_VERSION == 1
    assert PREFIX_NBYTES == len(expected) - len(header) == 24


def test_the_extension_map_travels_beside_the_fields() -> None:
    frame = encode_frame(ACK, ext={"slot": 3, "name": "a", "raw": b"b", "flag": True})
    event = fed(frame).next_event()
    assert event == FrameStart(ACK, {"slot": 3, "name": "a", "raw": b"b", "flag": True}, 0)
    assert type(event.ext["flag"]) is bool


@pytest.mark.parametrize("nbytes", [-1, 2**40 + 1])
def test_a_payload_over_the_limit_is_not_encoded(nbytes: int) -> None:
    with pytest.raises(LocalProtocolError, match="payload"):
        encode_frame(UPDATE, nbytes)


def test_a_header_over_the_limit_is_not_encoded() -> None:
    with pytest.raises(LocalProtocolError, match="at most 100 "):
        encode_frame(Refuse("E", "x" * 200), limits=Limits(max_header_nbytes=100))


@pytest.mark.parametrize(
    "ext", [{"a": 1.5}, {1: 1}, {"a": None}, {"a": [1]}, {str(i): i for i in range(65)}]
)
def test_an_illegal_extension_map_is_not_encoded(ext: dict[str, int]) -> None:
    with pytest.raises(LocalProtocolError, match=r"Ack\.x"):
        encode_frame(ACK, ext=ext)


# -- decoding -----------------------------------------------------------------------------------


def test_nothing_gives_no_event() -> None:
    decoder = FrameDecoder()
    assert decoder.next_event() is None
    assert not decoder.mid_frame
    assert decoder.error is None
    assert len(decoder.get_buffer()) == READ_AHEAD_NBYTES


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
    decoder = fed(encode_frame(UPDATE, 100_000))
    assert isinstance(decoder.next_event(), FrameStart)
    lent = bytearray(100_000)
    decoder.lend([lent])
    target = decoder.get_buffer()
    assert len(target) == 100_000
    target[:3] = b"abc"
    assert lent[:3] == b"abc"
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
        (raw_frame({}, magic=b"HTTP"), RemoteProtocolError, "not aiosync"),
        (raw_frame({}, magic=b"aios"), RemoteProtocolError, "not aiosync"),
        (b"GET / HTTP", RemoteProtocolError, "not aiosync"),
        (raw_frame({}, version=0), WireVersionMismatch, "version 0"),
        (raw_frame({}, version=2), WireVersionMismatch, "version 2"),
        (b"AIOS\x07", WireVersionMismatch, "version 7"),
        (raw_frame({}, flags=1), RemoteProtocolError, "flags"),
        (raw_frame({}, reserved=1), RemoteProtocolError, "reserved"),
        (raw_frame(b""), RemoteProtocolError, "no header"),
        (raw_frame({}, crc=0), RemoteProtocolError, "CRC"),
        (raw_frame({}, header_nbytes=2**24 + 1), FrameTooLarge, "header"),
        (raw_frame({}, 2**40 + 1), FrameTooLarge, "payload"),
        (raw_frame({}, 2**64 - 1), FrameTooLarge, "payload"),
        (raw_frame({}), RemoteProtocolError, "unknown message type"),
    ],
)
def test_an_illegal_frame_fails_for_good(
    frame: bytes, kind: type[ProtocolError], text: str
) -> None:
    decoder = fed(frame)
    event = decoder.next_event()
    assert isinstance(event, Failed)
    assert type(event.error) is kind
    assert text in str(event.error)
    assert decoder.error is event.error
    # Sticky: no more bytes, no more events, whatever comes.
    assert len(decoder.get_buffer()) == 0
    with pytest.raises(LocalProtocolError):
        decoder.feed(encode_frame(ACK))
    decoder.feed_eof()
    assert decoder.next_event() is event
    assert not decoder.mid_frame


def test_a_failure_after_good_frames_comes_in_its_turn() -> None:
    decoder = fed(encode_frame(ACK) + raw_frame({}, crc=1) + encode_frame(ACK))
    assert isinstance(decoder.next_event(), FrameStart)
    assert isinstance(decoder.next_event(), Failed)
    assert isinstance(decoder.next_event(), Failed)


def test_limits_are_checked_before_the_frame_is_complete() -> None:
    limits = Limits(max_header_nbytes=1000, max_payload_nbytes=5000)
    prefix = raw_frame(b"", 1, header_nbytes=1001, crc=0)
    assert isinstance(failure(prefix, limits), FrameTooLarge)
    prefix = raw_frame(b"", 5001, header_nbytes=10, crc=0)
    assert isinstance(failure(prefix, limits), FrameTooLarge)
    assert fed(raw_frame(b"", 5000, header_nbytes=1000, crc=0), limits).next_event() is None


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


def test_the_end_between_frames_is_clean() -> None:
    decoder = fed(encode_frame(ACK))
    decoder.feed_eof()
    assert decoder.next_event() == FrameStart(ACK, None, 0)
    assert decoder.next_event() == EndOfStream(True)
    assert decoder.next_event() == EndOfStream(True)
    assert decoder.error is None


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
    decoder = fed(encode_frame(UPDATE, 3) + b"abc")
    decoder.feed_eof()
    assert isinstance(decoder.next_event(), FrameStart)
    assert decoder.next_event() is None  # a buffer is needed, not bytes
    lent = bytearray(3)
    decoder.lend([lent])
    assert decoder.next_event() == FrameEnd()
    assert lent == b"abc"
    assert decoder.next_event() == EndOfStream(True)


def test_mid_frame_follows_the_stream() -> None:
    decoder = FrameDecoder()
    frame = encode_frame(UPDATE, 2)
    decoder.feed(frame[:5])
    assert decoder.next_event() is None
    assert decoder.mid_frame
    decoder.feed(frame[5:])
    assert decoder.needs_buffers is False
    decoder.next_event()
    assert decoder.mid_frame
    assert decoder.needs_buffers
    decoder.lend([bytearray(2)])
    assert not decoder.needs_buffers
    decoder.feed(b"x")
    assert decoder.next_event() is None
    assert decoder.mid_frame
    decoder.feed(b"y")
    assert decoder.next_event() == FrameEnd()
    assert not decoder.mid_frame


# -- backpressure and lending ---------------------------------------------------------------------


def test_no_room_while_a_payload_waits_for_buffers_and_the_read_ahead_is_full() -> None:
    decoder = FrameDecoder()
    frame = encode_frame(UPDATE, 200_000)
    decoder.feed(frame + b"p" * (READ_AHEAD_NBYTES - len(frame)))
    assert isinstance(decoder.next_event(), FrameStart)
    room = len(decoder.get_buffer())
    decoder.get_buffer()[:] = b"p" * room
    decoder.buffer_updated(room)
    assert len(decoder.get_buffer()) == 0
    with pytest.raises(LocalProtocolError, match="room for 0"):
        decoder.feed(b"p")
    lent = bytearray(200_000)
    decoder.lend([lent])
    assert lent.count(b"p") == READ_AHEAD_NBYTES
    assert len(decoder.get_buffer()) == 200_000 - READ_AHEAD_NBYTES


def test_no_room_while_events_wait_and_the_read_ahead_is_full() -> None:
    decoder = FrameDecoder()
    frame = encode_frame(ACK)
    count = READ_AHEAD_NBYTES // len(frame)
    decoder.feed((frame * (count + 1))[:READ_AHEAD_NBYTES])
    assert len(decoder.get_buffer()) == 0
    for _ in range(count):
        assert isinstance(decoder.next_event(), FrameStart)
    assert decoder.next_event() is None
    assert len(decoder.get_buffer()) > 0


def test_feed_uses_the_room_that_taken_events_left() -> None:
    decoder = FrameDecoder()
    frame = encode_frame(ACK)
    count = READ_AHEAD_NBYTES // len(frame)
    rest = READ_AHEAD_NBYTES - count * len(frame)
    decoder.feed((frame * (count + 1))[:READ_AHEAD_NBYTES])
    assert isinstance(decoder.next_event(), FrameStart)
    decoder.feed((frame * 2)[rest : rest + len(frame)])
    seen = 0
    while decoder.next_event() is not None:
        seen += 1
    assert seen == count
    assert decoder.mid_frame == (rest > 0)


def waiting(nbytes: int = 4) -> FrameDecoder:
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
    ids=repr,
)
def test_buffers_that_do_not_fit_are_refused_and_others_may_follow(buffers: list[object]) -> None:
    decoder = waiting()
    with pytest.raises(LocalProtocolError):
        decoder.lend(buffers)
    decoder.lend([bytearray(4)])


def test_lent_buffers_may_have_any_item_type_and_may_be_empty() -> None:
    numbers = array.array("H", [0, 0])
    decoder = waiting()
    decoder.lend([bytearray(), numbers, bytearray()])
    decoder.feed(b"\1\0\2\0")
    assert decoder.next_event() == FrameEnd()
    assert numbers.tobytes() == b"\1\0\2\0"


def test_buffers_are_only_taken_when_a_payload_waits() -> None:
    decoder = FrameDecoder()
    with pytest.raises(LocalProtocolError):
        decoder.lend([bytearray(4)])
    decoder.feed(encode_frame(ACK))
    decoder.next_event()
    with pytest.raises(LocalProtocolError):
        decoder.lend([])
    decoder = waiting()
    decoder.lend([bytearray(4)])
    with pytest.raises(LocalProtocolError):
        decoder.lend([bytearray(4)])


def test_the_decoder_drops_lent_buffers_when_the_payload_is_complete() -> None:
    decoder = waiting(8192)
    lent = bytearray(8192)
    decoder.lend([lent])
    with pytest.raises(BufferError):
        lent.extend(b"x")
    target = decoder.get_buffer()
    decoder.buffer_updated(len(target))
    del target
    assert decoder.next_event() == FrameEnd()
    lent.extend(b"x")  # nobody exports it any more


def test_the_decoder_drops_lent_buffers_when_the_stream_ends() -> None:
    decoder = waiting(8192)
    lent = bytearray(8192)
    decoder.lend([lent])
    decoder.feed_eof()
    assert decoder.next_event() == EndOfStream(False)
    lent.extend(b"x")


def test_lending_between_get_buffer_and_buffer_updated() -> None:
    decoder = waiting(5)
    target = decoder.get_buffer()
    lent = bytearray(5)
    decoder.lend([lent])
    target[:7] = b"12345AI"
    decoder.buffer_updated(7)
    assert decoder.next_event() == FrameEnd()
    assert lent == b"12345"
    assert decoder.next_event() is None
    assert decoder.mid_frame


@pytest.mark.parametrize("nbytes", [-1, READ_AHEAD_NBYTES + 1])
def test_a_wrong_count_of_bytes_is_refused(nbytes: int) -> None:
    decoder = FrameDecoder()
    decoder.get_buffer()
    with pytest.raises(LocalProtocolError):
        decoder.buffer_updated(nbytes)


def test_bytes_are_reported_once() -> None:
    decoder = FrameDecoder()
    decoder.get_buffer()
    decoder.buffer_updated(10)
    with pytest.raises(LocalProtocolError):
        decoder.buffer_updated(10)


def test_iter_events_takes_more_than_fits_at_once() -> None:
    frame = encode_frame(ACK)
    count = 5000
    events = list(iter_events(FrameDecoder(), frame * count, lambda start: [], eof=True))
    assert len(events) == count + 1
    assert events[-1] == EndOfStream(True)
