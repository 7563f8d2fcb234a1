"""Chunks and checksums: their plan, chunks that arrive or are refused, and fixed values."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiosync.errors import AiosyncError, RemoteProtocolError, TransportBroken
from aiosync.protocol import Assembly
from aiosync.wire import Update, checksum, state_checksum

EPOCH, VERSION = 7, 3
DIGEST = bytes(range(16))


class Sender:
    """A payload, and the messages that announce its chunks."""

    def __init__(self, payload: bytes, chunk_nbytes: int = 64) -> None:
        self.payload = payload
        starts = range(0, max(1, len(payload)), chunk_nbytes)
        self.chunks = [payload[start : start + chunk_nbytes] for start in starts]
        self.sums = [checksum(each) for each in self.chunks]

    def update(self, index: int, **changes: Any) -> Update:
        last = index == len(self.chunks) - 1
        message = Update(
            EPOCH,
            VERSION,
            DIGEST,
            values={"step": 12} if last else {},
            chunk=(index, len(self.chunks)),
            checksum=self.sums[index],
            state=state_checksum(DIGEST, self.sums) if last else None,
        )
        return dataclasses.replace(message, **changes)


class Receiver(Assembly):
    """An assembly with memory."""

    __slots__ = ("memory",)

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes, DIGEST, EPOCH, VERSION)
        self.memory = bytearray(nbytes)

    def put(self, sender: Sender, index: int, *, damage: bool = False, **changes: Any) -> bool:
        """Let one chunk arrive as in a transport; return True if the update is complete."""
        update, data = sender.update(index, **changes), sender.chunks[index]
        start, stop = self.place(update, len(data))
        assert stop - start == len(data)
        self.memory[start:stop] = data
        if damage:
            self.memory[start] ^= 1
        return self.arrived(update, checksum(self.memory[start:stop]))


def payload_of(nbytes: int) -> bytes:
    return bytes(index * 31 % 251 for index in range(nbytes))


@pytest.mark.parametrize("nbytes", [0, 1, 100])
def test_an_update_without_chunk_is_one_chunk(nbytes: int) -> None:
    sender, target = Sender(payload_of(nbytes), 128), Receiver(nbytes)
    assert target.put(sender, 0, chunk=None, state=None)
    assert (target.memory, target.good_nbytes) == (sender.payload, nbytes)


ILLEGAL: list[tuple[int, dict[str, Any], int]] = [
    # A row has the index of a chunk, its wrong fields, and its bytes. The payload has four chunks.
    (0, {"checksum": None}, 64),
    (0, {"values": {"a": 1}}, 64),
    (0, {"state": b"s"}, 64),
    (0, {}, 0),
    (0, {}, 63),
    (0, {}, 96),
    (0, {}, 128),
    (0, {}, 2**60),
    (0, {"chunk": (0, 3)}, 64),
    (0, {"chunk": (0, 5)}, 64),
    (0, {"chunk": (0, 200)}, 0),
    (0, {"chunk": (0, 2**32 - 1)}, 64),
    (0, {"chunk": None}, 64),
    (0, {"chunk": None}, 201),
    (0, {"chunk": (0, 1)}, 199),
    (1, {}, 0),
    (1, {}, 63),
    (1, {}, 72),
    (1, {"chunk": (1, 5)}, 64),
    (2, {}, 64),
    (3, {}, 8),
]


@pytest.mark.parametrize(("index", "changes", "nbytes"), ILLEGAL)
def test_an_illegal_chunk_is_refused_before_it_is_written(
    index: int, changes: dict[str, Any], nbytes: int
) -> None:
    sender, target = Sender(payload_of(200)), Receiver(200)
    if index:
        target.put(sender, 0)
    with pytest.raises(RemoteProtocolError, match=f"chunk {index}"):
        target.place(sender.update(index, **changes), nbytes)
    # The next link begins with the first chunk, and may cut the payload in another way.
    assert target.good_nbytes == 0
    target.resume()
    other = Sender(payload_of(200), 128)
    assert [target.put(other, each) for each in (0, 1)] == [False, True]
    assert target.memory == sender.payload


@pytest.mark.parametrize("length", [1, 4, 15, 17, 64])
def test_a_checksum_of_another_length_never_matches(length: int) -> None:
    sender = Sender(payload_of(64))
    sent = (sender.sums[0] * 4)[:length]
    with pytest.raises(TransportBroken):
        Receiver(64).put(sender, 0, checksum=sent)
    with pytest.raises(RemoteProtocolError):
        Receiver(64).put(sender, 0, state=sent)


def test_the_whole_is_checked_too() -> None:
    """Each chunk has its checksum, but one of them belongs to another version."""
    sender, other, target = Sender(payload_of(200)), Sender(bytes(200)), Receiver(200)
    for index in (0, 1, 2):
        target.put(other if index == 1 else sender, index)
    with pytest.raises(RemoteProtocolError, match=f"version {VERSION}"):
        target.put(sender, 3)
    # No chunk counts as good any more, so that all of them can be sent again.
    assert target.good_nbytes == 0
    assert [target.put(sender, index) for index in range(4)][-1]
    assert target.memory == sender.payload


@pytest.mark.parametrize(
    ("first", "chunk_nbytes", "fits"),
    [
        # This link goes on after the last chunk.
        (2, 64, True),
        # These links begin with the first chunk, which may have another size.
        (0, 64, True),
        (0, 128, True),
        (1, 64, False),
        (3, 64, False),
        (1, 128, False),
    ],
)
def test_another_link_goes_on_or_begins_anew(first: int, chunk_nbytes: int, fits: bool) -> None:
    sender, target = Sender(payload_of(300)), Receiver(300)
    for index in (0, 1):
        target.put(sender, index)
    target.resume()
    assert target.good_nbytes == 128
    other = Sender(sender.payload, chunk_nbytes)
    if not fits:
        with pytest.raises(RemoteProtocolError):
            target.put(other, first)
        assert target.good_nbytes == 0
        first = 0
    assert [target.put(other, index) for index in range(first, len(other.chunks))][-1]
    assert target.memory == sender.payload


@pytest.mark.slow
@given(st.integers(0, 2000), st.integers(1, 4), st.data())
def test_a_transfer_over_links_that_are_lost(nbytes: int, units: int, draw: st.DataObject) -> None:
    """Chunks are damaged and links are lost, but a complete payload is the one that was sent."""
    sender, target = Sender(payload_of(nbytes), 64 * units), Receiver(nbytes)
    complete, faults = False, draw.draw(st.lists(st.integers(0, 9), max_size=12))
    while not complete:
        good = target.good_nbytes
        first = min(-(-good // (64 * units)), len(sender.chunks) - 1)
        for index in range(first, len(sender.chunks)):
            fault = faults.pop() if faults else 9
            if fault == 0:
                break
            try:
                complete = target.put(sender, index, damage=fault == 1 and nbytes > 0)
            except AiosyncError:
                break
            assert target.good_nbytes >= good
        target.resume()
    assert target.memory == sender.payload


# -- checksums ------------------------------------------------------------------------------------


def test_the_values_are_those_of_the_specification() -> None:
    assert checksum(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert checksum(b"abc").hex() == "06b05ab6733a618578af5f94892f3950"
    joined = DIGEST + checksum(b"abc") + checksum(b"")
    assert state_checksum(DIGEST, [checksum(b"abc"), checksum(b"")]) == checksum(joined)
