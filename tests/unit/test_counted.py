"""The short cut for messages of which only a counter changes says what the long way says."""

from __future__ import annotations

import msgpack
import pytest

from aiosync.errors import LocalProtocolError, RemoteProtocolError
from aiosync.types import AckStatus
from aiosync.wire import Ack, FrameDecoder, Message, Release, Update, encode_frame
from aiosync.wire.messages import decode_header, encode_header
from tests.unit._frames import raw_frame

MESSAGES: list[Message] = [
    Ack(5, 1, AckStatus.APPLIED),
    Ack(5, 1, AckStatus.RECEIVED),
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
        event = decoder.next_event()
        assert event.message == sent
        assert event.ext == {"slot": 1}


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


def test_a_counter_inside_of_another_field_is_no_counter() -> None:
    # The bytes end like those of a counter, but belong to the extension map.
    def frame(inner: int) -> bytes:
        header = {"t": "ack", "epoch": 5, "version": 2**63 - 1, "status": 2}
        packed = msgpack.packb({**header, "x": {"version": 2**63}})
        return packed[:-8] + inner.to_bytes(8)

    for inner in (2**63 - 1, 4):
        message, ext = decode_header(frame(inner))
        assert message == Ack(5, 2**63 - 1, AckStatus.APPLIED)
        assert ext == {"version": inner}
    decoder = FrameDecoder()
    for inner in (2**63 - 1, 4):
        decoder.feed(raw_frame(frame(inner)))
        event = decoder.next_event()
        assert event.message == Ack(5, 2**63 - 1, AckStatus.APPLIED)


def test_an_out_of_range_counter_is_refused_after_a_legal_one() -> None:
    decoder = FrameDecoder()
    decoder.feed(encode_frame(Ack(5, 1, AckStatus.APPLIED)))
    assert decoder.next_event().message.version == 1
    header = encode_header(Ack(5, 1, AckStatus.APPLIED))[:-8] + (2**64 - 1).to_bytes(8)
    decoder.feed(raw_frame(header))
    assert isinstance(decoder.next_event().error, RemoteProtocolError)
