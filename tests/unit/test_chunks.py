"""Chunks: cutting, placing, damage, resuming; and whole transfers with any order of faults."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiosync.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from aiosync.protocol import Assembly, ChunkPlan, Verdict
from aiosync.wire import Update, checksum, state_checksum

EPOCH, VERSION = 7, 3
DIGEST = bytes(range(16))
VALUES = {"step": 12}
GOOD, DAMAGED, COMPLETE = Verdict.GOOD, Verdict.DAMAGED, Verdict.COMPLETE


class Sender:
    """A payload, and the messages that announce its chunks."""

    def __init__(self, payload: bytes, chunk_nbytes: int = 64) -> None:
        self.payload = payload
        self.plan = ChunkPlan(len(payload), chunk_nbytes)
        self.sums = [checksum(self.data(index)) for index in range(self.plan.count)]

    def data(self, index: int) -> bytes:
        return self.payload[slice(*self.plan.span(index))]

    def update(self, index: int, **changes: Any) -> Update:
        last = index == self.plan.count - 1
        message = Update(
            EPOCH,
            VERSION,
            DIGEST,
            values=VALUES if last else {},
            chunk=(index, self.plan.count),
            checksum=self.sums[index],
            state=state_checksum(DIGEST, self.sums) if last else None,
        )
        return dataclasses.replace(message, **changes)


def assembly(nbytes: int, **options: Any) -> Assembly:
    return Assembly(nbytes, DIGEST, EPOCH, VERSION, **options)


def payload_of(nbytes: int) -> bytes:
    return bytes(index * 31 % 251 for index in range(nbytes))


def put(
    target: Assembly, memory: bytearray, update: Update, data: bytes, *, damage: bool = False
) -> Verdict:
    """Let one chunk arrive, as a transport does it."""
    start, stop = target.place(update, len(data))
    assert stop - start == len(data)
    memory[start:stop] = data
    if damage:
        memory[start] ^= 1
    return target.arrived(update, memoryview(memory)[start:stop])


# -- the plan -----------------------------------------------------------------------------------


@given(st.integers(0, 5000), st.integers(1, 20))
def test_spans_tile_the_payload(nbytes: int, units: int) -> None:
    plan = ChunkPlan(nbytes, 64 * units)
    spans = [plan.span(index) for index in range(plan.count)]
    assert spans[0][0] == 0 and spans[-1][1] == nbytes
    assert all(stop - start == 64 * units for start, stop in spans[:-1])
    assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
    assert all(stop > start for start, stop in spans) or nbytes == 0
    for index, (start, stop) in enumerate(spans):
        assert plan.index_at(start) == index
        assert plan.index_at(stop) == (index + 1 if nbytes else 0)
        if start + 1 < stop:
            assert plan.index_at(start + 1) == 0
    for index in (-1, plan.count):
        with pytest.raises(LocalProtocolError, match="no chunk"):
            plan.span(index)


def test_an_empty_payload_has_one_chunk() -> None:
    plan = ChunkPlan(0, 64)
    assert (plan.count, plan.span(0), plan.index_at(0)) == (1, (0, 0), 0)


@pytest.mark.parametrize("nbytes", [-64, 1, 63, 65, 129, 193, 200, 2**63])
def test_a_prefix_that_ends_in_no_chunk_is_not_used(nbytes: int) -> None:
    assert ChunkPlan(192, 64).index_at(nbytes) == 0


@pytest.mark.parametrize("size", [0, -64, 1, 63, 96, 64.0, True, None])
def test_an_illegal_chunk_size_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="chunk_nbytes"):
        ChunkPlan(10, size)


@pytest.mark.parametrize("nbytes", [-1, 1.0, None])
def test_an_illegal_payload_size_is_refused(nbytes: Any) -> None:
    with pytest.raises(ConfigError, match="nbytes"):
        ChunkPlan(nbytes, 64)


# -- placing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 64, 65, 256, 300])
def test_chunks_in_order(nbytes: int) -> None:
    sender, target, memory = Sender(payload_of(nbytes)), assembly(nbytes), bytearray(nbytes)
    for index in range(sender.plan.count):
        assert target.good_nbytes == index * 64
        assert target.values == {}
        verdict = put(target, memory, sender.update(index), sender.data(index))
        assert verdict is (COMPLETE if index == sender.plan.count - 1 else GOOD)
    assert memory == sender.payload
    assert target.values == VALUES
    assert target.good_nbytes == nbytes
    assert target.damaged == 0


@pytest.mark.parametrize("nbytes", [0, 1, 100])
def test_an_update_without_chunk_is_one_chunk(nbytes: int) -> None:
    data = payload_of(nbytes)
    update = Update(EPOCH, VERSION, DIGEST, values=VALUES, checksum=checksum(data))
    target, memory = assembly(nbytes), bytearray(nbytes)
    if nbytes:
        assert put(target, memory, update, data, damage=True) is DAMAGED
        assert target.good_nbytes == 0
    assert put(target, memory, update, data) is COMPLETE
    assert (bytes(memory), target.values, target.good_nbytes) == (data, VALUES, nbytes)


def test_the_last_chunk_may_come_first() -> None:
    sender, target, memory = Sender(payload_of(200)), assembly(200), bytearray(200)
    assert put(target, memory, sender.update(3), sender.data(3)) is GOOD
    assert (target.good_nbytes, target.values) == (0, VALUES)
    assert put(target, memory, sender.update(1), sender.data(1)) is GOOD
    assert put(target, memory, sender.update(0), sender.data(0)) is GOOD
    assert target.good_nbytes == 128
    assert put(target, memory, sender.update(2), sender.data(2)) is COMPLETE
    assert memory == sender.payload


ILLEGAL: list[tuple[str, int, dict[str, Any], int]] = [
    ("epoch", 0, {"epoch": 8}, 64),
    ("version", 0, {"version": 4}, 64),
    ("manifest", 0, {"digest": bytes(16)}, 64),
    ("no checksum", 0, {"checksum": None}, 64),
    ("only the last", 0, {"values": {"a": 1}}, 64),
    ("only the last", 0, {"state": b"s"}, 64),
    ("does not fit", 0, {}, 0),
    ("does not fit", 0, {}, 63),
    ("does not fit", 0, {}, 96),
    ("does not fit", 0, {}, 128),
    ("does not fit", 0, {}, 2**60),
    ("does not fit", 0, {"chunk": (0, 3)}, 64),
    ("does not fit", 0, {"chunk": (0, 5)}, 64),
    ("does not fit", 0, {"chunk": (0, 2**32 - 1)}, 64),
    ("does not fit", 0, {"chunk": None}, 64),
    ("does not fit", 0, {"chunk": None}, 201),
    ("does not fit", 0, {"chunk": (0, 1)}, 199),
    ("does not fit", 3, {}, 0),
    ("does not fit", 3, {}, 7),
    ("does not fit", 3, {}, 9),
    ("does not fit", 3, {}, 64),
    ("does not fit", 3, {}, 200),
    ("does not fit", 3, {}, 264),
    ("does not fit", 3, {"chunk": (4, 5)}, 8),
]


@pytest.mark.parametrize(("text", "index", "changes", "nbytes"), ILLEGAL)
@pytest.mark.parametrize("known", [False, True])
def test_an_illegal_chunk_is_refused_before_it_is_written(
    text: str, index: int, changes: dict[str, Any], nbytes: int, known: bool
) -> None:
    sender, target, memory = Sender(payload_of(200)), assembly(200), bytearray(200)
    if known:
        put(target, memory, sender.update(1), sender.data(1))
        if "chunk" in changes:
            text = "became|does not fit"
    update = sender.update(index, **changes)
    if "chunk" in changes:
        update = dataclasses.replace(update, values={}, state=None)
    with pytest.raises(RemoteProtocolError, match=text):
        target.place(update, nbytes)
    # It changed nothing: the others still arrive.
    for each in (0, 2, 3) if known else (1, 0, 2, 3):
        verdict = put(target, memory, sender.update(each), sender.data(each))
    assert verdict is COMPLETE
    assert memory == sender.payload


def test_a_chunk_that_is_verified_may_not_come_again() -> None:
    sender, target, memory = Sender(payload_of(200)), assembly(200), bytearray(200)
    put(target, memory, sender.update(0), sender.data(0))
    for _ in range(2):  # a chunk that was only announced may
        target.place(sender.update(1), 64)
    with pytest.raises(RemoteProtocolError, match="already there"):
        target.place(sender.update(0), 64)
    with pytest.raises(RemoteProtocolError, match="already there"):
        target.arrived(sender.update(0), memoryview(sender.data(0)))


def test_an_empty_payload_cannot_be_cut() -> None:
    target = assembly(0)
    for chunk, nbytes in (((0, 2), 0), ((1, 2), 0), ((0, 2), 64), ((0, 1), 1)):
        with pytest.raises(RemoteProtocolError, match="does not fit"):
            target.place(Update(EPOCH, VERSION, DIGEST, chunk=chunk, checksum=b"x"), nbytes)


@pytest.mark.slow
@given(st.integers(0, 400), st.data())
def test_what_is_placed_lies_within_the_payload(nbytes: int, draw: st.DataObject) -> None:
    """Whatever a peer announces: an error, or a span that no other chunk has."""
    target = assembly(nbytes)
    taken: set[int] = set()
    for _ in range(8):
        count = draw.draw(st.integers(1, 8))
        index = draw.draw(st.integers(0, count - 1))
        size = draw.draw(st.sampled_from([0, 1, 64, 128, nbytes, nbytes - 64, nbytes % 64]))
        update = Update(EPOCH, VERSION, DIGEST, chunk=(index, count), checksum=b"")
        data = bytes(max(size, 0))
        update = dataclasses.replace(update, checksum=checksum(data))
        try:
            start, stop = target.place(update, len(data))
            target.arrived(update, memoryview(data))
        except RemoteProtocolError:
            continue
        assert 0 <= start <= stop <= nbytes
        span = set(range(start, stop))
        assert not span & taken
        taken |= span


# -- damage -------------------------------------------------------------------------------------


def test_a_damaged_chunk_comes_again() -> None:
    sender, target, memory = Sender(payload_of(200)), assembly(200), bytearray(200)
    assert put(target, memory, sender.update(0), sender.data(0)) is GOOD
    assert put(target, memory, sender.update(1), sender.data(1), damage=True) is DAMAGED
    assert put(target, memory, sender.update(2), sender.data(2)) is GOOD
    assert put(target, memory, sender.update(3), sender.data(3), damage=True) is DAMAGED
    assert (target.good_nbytes, target.damaged, target.values) == (64, 2, {})
    assert put(target, memory, sender.update(1), sender.data(1)) is GOOD
    assert target.good_nbytes == 192
    assert put(target, memory, sender.update(3), sender.data(3)) is COMPLETE
    assert (bytes(memory), target.values, target.damaged) == (sender.payload, VALUES, 2)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_each_chunk_may_be_damaged_so_often(limit: int) -> None:
    sender, memory = Sender(payload_of(128)), bytearray(128)
    target = assembly(128, max_damaged=limit)
    for _ in range(limit):
        for index in (0, 1):
            assert put(target, memory, sender.update(index), sender.data(index), damage=True) is (
                DAMAGED
            )
    with pytest.raises(RemoteProtocolError, match=f"damaged {limit + 1} times"):
        put(target, memory, sender.update(1), sender.data(1), damage=True)
    assert target.damaged == 2 * limit + 1


@pytest.mark.parametrize("length", [1, 4, 15, 17, 64])
def test_a_checksum_of_another_length_never_matches(length: int) -> None:
    data = payload_of(64)
    sent = (checksum(data) * 4)[:length]
    target = assembly(64)
    update = Update(EPOCH, VERSION, DIGEST, checksum=sent)
    assert put(target, bytearray(64), update, data) is DAMAGED
    wrong = Update(EPOCH, VERSION, DIGEST, checksum=checksum(data), state=sent)
    with pytest.raises(RemoteProtocolError, match="does not match its checksum"):
        put(target, bytearray(64), wrong, data)


def test_the_whole_is_checked_too() -> None:
    """Each chunk is what was sent, but one of them is that of another version."""
    sender, other = Sender(payload_of(200)), Sender(bytes(200))
    target, memory = assembly(200), bytearray(200)
    for index in (0, 1, 2):
        source = other if index == 1 else sender
        put(target, memory, source.update(index), source.data(index))
    with pytest.raises(RemoteProtocolError, match="does not match its checksum"):
        put(target, memory, sender.update(3), sender.data(3))
    assert (target.good_nbytes, target.values) == (0, {})
    for index in range(4):  # nothing of it is believed; all of it may come again
        verdict = put(target, memory, sender.update(index), sender.data(index))
    assert verdict is COMPLETE
    assert memory == sender.payload


def test_chunks_without_checksums() -> None:
    sender, memory = Sender(payload_of(200)), bytearray(200)
    target = assembly(200, require_checksum=False)
    for index in range(4):
        update = sender.update(index, checksum=None, state=None)
        verdict = put(target, memory, update, sender.data(index), damage=index == 2)
    assert verdict is COMPLETE
    assert target.good_nbytes == 200
    target = assembly(200, require_checksum=False)
    put(target, memory, sender.update(0), sender.data(0))
    assert put(target, memory, sender.update(1), sender.data(1), damage=True) is DAMAGED
    put(target, memory, sender.update(1, checksum=None), sender.data(1))
    put(target, memory, sender.update(2), sender.data(2))
    with pytest.raises(RemoteProtocolError, match="some of its chunks had none"):
        put(target, memory, sender.update(3), sender.data(3))


# -- another link -------------------------------------------------------------------------------


def holed() -> tuple[Sender, Assembly, bytearray]:
    """Chunks 0, 1 and 3 to 4 of 5 are verified."""
    sender, target, memory = Sender(payload_of(300)), assembly(300), bytearray(300)
    for index in (0, 1, 3, 4):
        put(target, memory, sender.update(index), sender.data(index))
    return sender, target, memory


@pytest.mark.parametrize("first", [0, 1, 2])
def test_another_link_goes_on_where_the_sender_likes(first: int) -> None:
    sender, target, memory = holed()
    assert target.resume() == target.good_nbytes == 128
    assert sender.plan.index_at(128) == 2
    assert target.values == {}
    for index in range(first, 5):
        verdict = put(target, memory, sender.update(index), sender.data(index))
    assert verdict is COMPLETE
    assert (bytes(memory), target.values) == (sender.payload, VALUES)


def test_another_link_may_not_leave_a_gap() -> None:
    sender, target, memory = holed()
    target.resume()
    with pytest.raises(RemoteProtocolError, match="byte 192, but it is here up to byte 128"):
        target.place(sender.update(3), 64)
    assert put(target, memory, sender.update(2), sender.data(2)) is GOOD


def test_from_the_start_another_link_may_cut_in_another_way() -> None:
    _, target, memory = holed()
    target.resume()
    sender = Sender(payload_of(300), 128)
    for index in range(3):
        verdict = put(target, memory, sender.update(index), sender.data(index))
    assert verdict is COMPLETE
    assert memory == sender.payload


@pytest.mark.parametrize(("before", "after"), [(512, 64), (64, 512), (192, 128), (128, 192)])
def test_another_link_goes_on_in_another_cut(before: int, after: int) -> None:
    payload = payload_of(2100)
    sender, target, memory = Sender(payload, before), assembly(2100), bytearray(2100)
    for index in range(1536 // before):
        put(target, memory, sender.update(index), sender.data(index))
    assert target.resume(memoryview(memory)) == 1536
    sender = Sender(payload, after)
    first = sender.plan.index_at(1536)
    with pytest.raises(RemoteProtocolError, match="but it is here up to byte 1536 only"):
        target.place(sender.update(first + 1), len(sender.data(first + 1)))
    for index in range(first, sender.plan.count):
        assert target.good_nbytes == index * after
        verdict = put(target, memory, sender.update(index), sender.data(index))
    assert verdict is COMPLETE
    assert (bytes(memory), target.values) == (payload, VALUES)


def test_the_whole_is_checked_in_another_cut_too() -> None:
    _, target, memory = holed()
    target.resume(memoryview(memory))
    sender = Sender(bytes(64) + payload_of(300)[64:], 128)  # the first chunk was of another version
    put(target, memory, sender.update(1), sender.data(1))
    with pytest.raises(RemoteProtocolError, match="does not match its checksum"):
        put(target, memory, sender.update(2), sender.data(2))
    assert (target.good_nbytes, target.values) == (0, {})


def test_another_cut_needs_the_memory() -> None:
    _, target, _ = holed()
    target.resume()
    sender = Sender(payload_of(300), 128)
    with pytest.raises(RemoteProtocolError, match="5 chunks goes on with chunk 1 of 3"):
        target.place(sender.update(1), 128)
    assert target.good_nbytes == 128  # it changed nothing


def test_another_cut_may_not_be_too_fine() -> None:
    half = 64 * (2**16 + 1)
    payload = bytes(2 * half)
    sender, target, memory = Sender(payload, half), assembly(2 * half), bytearray(2 * half)
    put(target, memory, sender.update(0), sender.data(0))
    target.resume(memoryview(memory))
    fine = Update(EPOCH, VERSION, DIGEST, chunk=(half // 64, 2 * half // 64), checksum=b"")
    with pytest.raises(RemoteProtocolError, match="2 chunks goes on with chunk 65537"):
        target.place(fine, 64)
    assert put(target, memory, sender.update(1), sender.data(1)) is COMPLETE


def test_damage_stays_counted_on_another_link() -> None:
    sender, memory = Sender(payload_of(128)), bytearray(128)
    target = assembly(128, max_damaged=1)
    put(target, memory, sender.update(0), sender.data(0), damage=True)
    assert target.resume() == 0
    assert target.damaged == 1
    with pytest.raises(RemoteProtocolError, match="damaged 2 times"):
        put(target, memory, sender.update(0), sender.data(0), damage=True)


def test_a_complete_update_may_be_resumed() -> None:
    sender, target, memory = Sender(payload_of(300)), assembly(300), bytearray(300)
    for index in range(5):
        put(target, memory, sender.update(index), sender.data(index))
    assert target.resume() == 300
    assert target.values == VALUES
    assert put(target, memory, sender.update(4), sender.data(4)) is COMPLETE


@pytest.mark.slow
@given(
    nbytes=st.integers(0, 700),
    units=st.integers(1, 4),
    limit=st.integers(0, 3),
    draw=st.data(),
)
def test_any_order_of_faults_ends_in_the_same_bytes_or_an_error(
    nbytes: int, units: int, limit: int, draw: st.DataObject
) -> None:
    sender = Sender(payload_of(nbytes), 64 * units)
    target, memory = assembly(nbytes, max_damaged=limit), bytearray(nbytes)
    queue = list(range(sender.plan.count))
    hits = Counter[int]()
    resumed = False
    for _ in range(200):
        index = queue.pop(0)
        update, data = sender.update(index), sender.data(index)
        fault = draw.draw(st.sampled_from(["none"] * 4 + ["damage", "cut", "lost", "swap"]))
        if fault == "swap" and queue and not resumed:
            queue.append(index)
            continue
        if fault in ("cut", "lost"):
            start, stop = target.place(update, len(data))
            if fault == "cut":  # the link was lost in the middle of the chunk
                memory[start : (start + stop) // 2] = data[: (start + stop) // 2 - start]
            if draw.draw(st.booleans()):
                sender = Sender(sender.payload, 64 * draw.draw(st.integers(1, 4)))
            first = sender.plan.index_at(target.resume(memoryview(memory)))
            queue = list(range(draw.draw(st.integers(0, first)), sender.plan.count))
            resumed = True
            continue
        resumed = False
        damage = fault == "damage" and nbytes > 0
        hits[index] += damage
        try:
            verdict = put(target, memory, update, data, damage=damage)
        except RemoteProtocolError:
            assert hits[index] == limit + 1
            return
        assert hits[index] <= limit
        assert verdict is DAMAGED if damage else verdict in (GOOD, COMPLETE)
        assert memory[: target.good_nbytes] == sender.payload[: target.good_nbytes]
        assert target.damaged == hits.total()
        if verdict is DAMAGED:
            queue.insert(draw.draw(st.integers(0, len(queue))), index)
        if verdict is COMPLETE:
            assert not queue
            assert memory == sender.payload
            assert target.values == VALUES
            return
        assert queue, "the receiver waits for what nobody sends"
