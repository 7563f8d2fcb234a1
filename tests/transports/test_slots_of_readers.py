"""Slots that a reader has locked."""

from __future__ import annotations

import os
from collections import deque

from aiosync.transports.shared_memory.reader import SlotReader
from aiosync.transports.shared_memory.slots import WANT, Segment
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
