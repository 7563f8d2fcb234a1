"""The short cut for messages of which only a counter changes says what the long way says."""

from __future__ import annotations

import msgpack
import pytest

from aiosync.errors import LocalProtocolError, RemoteProtocolError
from aiosync.types import AckStatus
from aiosync.wire import (
    Ack,
    EndOfStream,
    Failed,
    FrameDecoder,
    FrameStart,
    Message,
    Release,
    Segment,
    Update,
    counted_frame,
    encode_frame,
)
from aiosync.wire.messages import decode_header, encode_header
from tests.unit._frames import raw_frame

MESSAGES: list[Message] = [
    Ack(5, 1, AckStatus.APPLIED),
    Ack(5, 1, AckStatus.RECEIVED),
    Ack(5, 1, AckStatus.SKIPPED),
    Update(7, 1, b"d" * 16),
    Update(7, 1, b"d" * 16, chunk=(0, 2)),
    Release(1, 0, 1),
    Release(1, 0, 1, retained=True),
]


def with_counter(message: Message, counter: int) -> Message:
    fields = {name: getattr(message, name) for name in type(message).__slots__}
    name = "serial" if isinstance(message, Release) else "version"
    return type(message)(**{**fields, name: counter})


@pytest.mark.parametrize("message", MESSAGES)
def test_every_counter_arrives_whether_or_not_the_rest_is_known(message: Message) -> None:
    decoder = FrameDecoder()
    for counter in (1, 2, 255, 2**32, 2**63 - 1, 3):
        sent = with_counter(message, counter)
        decoder.feed(encode_frame(sent, ext={"slot": 1}))
        assert decoder.next_event() == FrameStart(sent, {"slot": 1}, 0)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_bytes_do_not_depend_on_what_was_encoded_before(message: Message) -> None:
    first = encode_header(message)
    encode_header(with_counter(message, 9))
    assert encode_header(message) == first
    assert decode_header(first)[0] == message


@pytest.mark.parametrize("counter", [0, -1, 2**63, 1.0, "1", True])
def test_an_illegal_counter_is_refused_after_a_legal_one(counter: object) -> None:
    encode_header(Ack(5, 1, AckStatus.APPLIED))
    with pytest.raises(LocalProtocolError):
        encode_header(Ack(5, counter, AckStatus.APPLIED))  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("framed", [False, True])
def test_a_counter_inside_of_another_field_is_no_counter(framed: bool) -> None:
    # The bytes end like those of a counter, but belong to the extension map.
    ack = {"t": "ack", "epoch": 5, "version": 2**63 - 1, "status": 2}
    header = msgpack.packb({**ack, "x": {"version": 2**63}})[:-8]
    decoder = FrameDecoder()
    for inner in (2**63 - 1, 4):
        data = header + inner.to_bytes(8)
        if framed:
            decoder.feed(raw_frame(data))
            event = decoder.next_event()
            message, ext = event.message, event.ext
        else:
            message, ext = decode_header(data)
        assert (message, ext) == (Ack(5, 2**63 - 1, AckStatus.APPLIED), {"version": inner})


# -- whole frames ------------------------------------------------------------------------------

COUNTED = [message for message in MESSAGES if getattr(message, "chunk", None) is None]


@pytest.mark.parametrize("message", COUNTED)
@pytest.mark.parametrize("ext", [None, {"slot": 1, "seg": 70000}])
def test_a_counted_frame_has_the_bytes_of_any_other(
    message: Message, ext: dict[str, int] | None
) -> None:
    frame = counted_frame(message, ext=ext)
    assert frame is not None
    for counter in (1, 7, 2**40, 2**63 - 1):
        assert frame.encode(counter) == encode_frame(with_counter(message, counter), ext=ext)


@pytest.mark.parametrize(
    "message",
    [
        Ack(5, 1, AckStatus.NACK, "ValueError", "no"),
        Update(7, 1, b"d" * 16, values={"a": 1}),
        Update(7, 1, b"d" * 16, chunk=(0, 2)),
        Segment(1, 4096, 2),
    ],
)
def test_what_has_more_than_a_counter_is_no_counted_frame(message: Message) -> None:
    assert counted_frame(message) is None


def remembering(message: Message) -> tuple[FrameDecoder, list[int]]:
    """A decoder that has seen ``message`` once and remembers it, and the counters it repeats."""
    counters: list[int] = []
    decoder = FrameDecoder()
    decoder.feed(encode_frame(message))
    assert isinstance(decoder.next_event(), FrameStart)
    decoder.remember(counters.append)
    return decoder, counters


def repeats(decoder: FrameDecoder, counters: list[int]) -> list[int]:
    while (repeated := decoder.next_repeat()) is not None:
        repeat, counter, _ = repeated
        repeat(counter)
    return counters


@pytest.mark.parametrize("message", COUNTED)
def test_a_remembered_message_is_repeated_with_its_counter(message: Message) -> None:
    decoder, _ = remembering(message)
    for counter in (2, 2**63 - 1):
        decoder.feed(encode_frame(with_counter(message, counter)))
    _, first, more = decoder.next_repeat() or pytest.fail("not repeated")
    assert (first, more) == (2, True)
    _, second, more = decoder.next_repeat() or pytest.fail("not repeated")
    assert (second, more) == (2**63 - 1, False)


def test_any_other_message_is_left_to_the_events() -> None:
    decoder, counters = remembering(Ack(5, 1, AckStatus.APPLIED))
    others = [Ack(6, 2, AckStatus.APPLIED), Ack(5, 2, AckStatus.RECEIVED), Release(1, 0, 2)]
    for other in others:
        decoder.feed(encode_frame(other))
        assert repeats(decoder, counters) == []
        assert decoder.next_event().message == other
    decoder.feed(encode_frame(Ack(5, 3, AckStatus.APPLIED)))
    assert repeats(decoder, counters) == [3]


def test_a_repeat_that_is_not_complete_waits() -> None:
    decoder, counters = remembering(Ack(5, 1, AckStatus.APPLIED))
    frame = encode_frame(Ack(5, 2, AckStatus.APPLIED))
    for index in range(len(frame)):
        assert repeats(decoder, counters) == []
        decoder.feed(frame[index : index + 1])
    assert repeats(decoder, counters) == [2]


@pytest.mark.parametrize("at", [4, 5, 8, 12, 16, 24, -9, -1])
def test_a_damaged_repeat_fails_as_any_frame_does(at: int) -> None:
    decoder, counters = remembering(Ack(5, 1, AckStatus.APPLIED))
    frame = bytearray(encode_frame(Ack(5, 2, AckStatus.APPLIED)))
    frame[at] ^= 0x40
    decoder.feed(frame)
    assert repeats(decoder, counters) == []
    decoder.feed_eof()
    event = decoder.next_event()
    assert isinstance(event, Failed) or event == EndOfStream(False) or event.payload_nbytes


@pytest.mark.parametrize("remembered", [False, True])
@pytest.mark.parametrize("counter", [0, 2**63, 2**64 - 1])
def test_an_illegal_counter_is_no_repeat(counter: int, remembered: bool) -> None:
    decoder, counters = remembering(Ack(5, 1, AckStatus.APPLIED))
    if not remembered:
        decoder.forget()
    header = encode_header(Ack(5, 2, AckStatus.APPLIED))[:-8] + counter.to_bytes(8)
    decoder.feed(raw_frame(header))
    assert repeats(decoder, counters) == []
    assert isinstance(decoder.next_event().error, RemoteProtocolError)


def test_an_announced_payload_is_no_repeat() -> None:
    decoder, counters = remembering(Update(7, 1, b"d" * 16))
    decoder.feed(encode_frame(Update(7, 2, b"d" * 16), 4))
    assert repeats(decoder, counters) == []
    assert decoder.next_event().payload_nbytes == 4
    decoder.remember(counters.append)  # does nothing: it has a payload
    decoder.lend([bytearray(4)])
    decoder.feed(b"1234" + encode_frame(Update(7, 3, b"d" * 16), 4))
    decoder.next_event()
    assert repeats(decoder, counters) == []


def test_what_was_forgotten_is_not_repeated() -> None:
    decoder, counters = remembering(Ack(5, 1, AckStatus.APPLIED))
    decoder.forget()
    decoder.remember(counters.append)
    decoder.feed(encode_frame(Ack(5, 2, AckStatus.APPLIED)))
    assert repeats(decoder, counters) == []
