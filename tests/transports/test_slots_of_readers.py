"""Slots that a reader has locked."""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from typing import Any

import pytest

from aiosync.errors import RemoteProtocolError
from aiosync.transports.shared_memory.reader import SlotReader
from aiosync.transports.shared_memory.slots import WANT, Segment, Slot
from aiosync.wire.messages import Segment as SegmentMessage

NBYTES = 2**16


def test_an_older_segment_goes_though_an_interrupt_left_its_slot_locked() -> None:
    """The model then holds the slot of the newer segment that has the same index."""
    segments = [Segment(number, NBYTES) for number in (1, 2)]
    descriptors = deque(os.dup(segment.read_only_fd) for segment in segments)
    reader = SlotReader(descriptors)
    reader.words = memoryview(bytearray(4096)).cast("Q")
    for segment, number in zip(segments, (1, 2), strict=True):
        slot = segment.grow()
        assert slot.index == 0 and slot.lock()
        slot.seal(number, b"", 8)
        reader.announce(SegmentMessage(number, NBYTES, 1))
        reader.words[WANT] = number << 16 | number << 8
        # The first slot stays locked and is not held, as after an interrupt between the two.
        named = reader.open()
        assert named is not None and named.version == number
    reader.hold(named)
    assert len(reader.segments) == 2
    reader.leave_others()
    assert list(reader.segments) == [2]
    reader.close()
    for segment in segments:
        segment.close()


def test_kept_memory_stays_though_another_thread_asked_for_the_version_meanwhile() -> None:
    """The thread begins before the slot is opened for the first time, and ends after it."""
    segment = Segment(1, NBYTES)
    reader = SlotReader(deque([os.dup(segment.read_only_fd)]))
    reader.words = memoryview(bytearray(4096)).cast("Q")
    slot = segment.grow()
    assert slot.lock()
    slot.view[:4] = b"old!"
    slot.seal(7, b"", 4)
    reader.announce(SegmentMessage(1, NBYTES, 1))
    reader.words[WANT] = 1 << 16 | 1 << 8
    real, begun, go = os.fstat, threading.Event(), threading.Event()

    def fstat(fd: int) -> os.stat_result:
        if threading.current_thread() is asking and not begun.is_set():
            begun.set()
            assert go.wait(20)
        return real(fd)

    found: list[tuple[int, bytes]] = []
    asking = threading.Thread(target=lambda: found.append(reader.named_version))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fstat", fstat)
        asking.start()
        assert begun.wait(20)
        named = reader.open()
        go.set()
        asking.join()
    assert named is not None and found == [(7, bytes(16))]
    reader.hold(named)
    kept = named.memory[:4]
    reader.leave(named, keep=True)
    assert slot.lock()
    slot.view[:4] = b"new!"
    slot.seal(8, b"", 4)
    assert bytes(kept) == b"old!"
    reader.close()
    segment.close()


def test_a_version_still_counts_as_named_once_foreign_code_has_closed_the_descriptor() -> None:
    """Otherwise nothing would open the slot, and so nothing would raise the error."""
    segment = Segment(1, NBYTES)
    given = os.dup(segment.read_only_fd)
    reader = SlotReader(deque([given]))
    reader.words = memoryview(bytearray(4096)).cast("Q")
    slot = segment.grow()
    assert slot.lock()
    slot.seal(7, b"", 4)
    reader.announce(SegmentMessage(1, NBYTES, 1))
    reader.words[WANT] = 1 << 16 | 1 << 8
    named = reader.open()
    assert named is not None
    reader.hold(named)
    reader.words[WANT] = 2 << 16 | 1 << 8
    os.close(given)
    assert reader.named_version[0] > 0
    reader.close()
    segment.close()


@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_version_that_is_being_opened_while_the_reader_is_closed_stays(is_mapped: bool) -> None:
    """The sender writes to the slot as soon as it is not locked any more."""
    segment = Segment(1, NBYTES)
    reader = SlotReader(deque([os.dup(segment.read_only_fd)]))
    reader.words = memoryview(bytearray(4096)).cast("Q")
    slot = segment.grow()
    reader.announce(SegmentMessage(1, NBYTES, 1))
    reader.words[WANT] = 1 << 16 | 1 << 8
    _write(slot, b"old!", 7)
    if is_mapped:
        named = reader.open()
        assert named is not None
        reader.hold(named)
        reader.leave(named, keep=False)
        reader.words[WANT] = 2 << 16 | 1 << 8
        _write(slot, b"new!", 8)
    wanted = b"new!" if is_mapped else b"old!"
    real, mapped, closed = mmap.mmap, threading.Event(), threading.Event()
    opening = threading.current_thread()

    def pause() -> None:
        """Let the other thread go on once this one has the slot's mapping."""
        if threading.current_thread() is opening:
            mapped.set()
            # With a lock that keeps the other thread out, this waits in vain.
            closed.wait(0.3)

    class Maps(dict[int, Any]):
        def get(self, key: int, default: Any = None) -> Any:
            found = super().get(key, default)
            if found is not None:
                pause()
            return found

    def mapping(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        pause()
        return found

    def close() -> None:
        assert mapped.wait(20)
        reader.close()
        closed.set()

    [view] = reader.segments.values()
    view.maps = Maps(view.maps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mmap, "mmap", mapping)
        closing = threading.Thread(target=close)
        closing.start()
        named = reader.open()
        closing.join()
    assert named is not None
    _write(slot, b"bad!", 9)
    assert bytes(named.memory[:4]) == wanted
    segment.close()


def _write(slot: Slot, content: bytes, version: int) -> None:
    """Write a version into a slot that no reader has locked."""
    assert slot.lock()
    slot.view[: len(content)] = content
    slot.seal(version, b"", len(content))


def test_a_slot_at_an_offset_that_no_file_has_names_no_version() -> None:
    """The opening of the slot raises the error."""
    segment = Segment(1, NBYTES)
    segment.grow()
    reader = SlotReader(deque([os.dup(segment.read_only_fd)]))
    reader.words = memoryview(bytearray(4096)).cast("Q")
    reader.announce(SegmentMessage(1, 2**63 - 1, 1))
    reader.words[WANT] = 1 << 16 | 1 << 8 | 2
    assert reader.named_version == (0, b"")
    with pytest.raises(RemoteProtocolError, match="no slot 2"):
        reader.open()
    reader.close()
    segment.close()
