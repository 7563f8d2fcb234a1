"""Slots whose pages an accelerator of a reader or of the sender has pinned."""

from __future__ import annotations

import fcntl
import os

from aiosync.transports.shared_memory.slots import PINNED, SET_LOCK, Segment, reopen


def test_the_memory_of_a_slot_stays_while_a_reader_has_it_pinned() -> None:
    segment = Segment(1, 2**16)
    slot = segment.grow()
    slot.has_memory = True
    # A reader has a file description of its own.
    other = reopen(segment.read_only_fd, os.O_RDONLY)
    try:
        fcntl.fcntl(other, SET_LOCK, PINNED[slot.index])
        assert slot.lock()
        slot.view[:4] = b"here"
        segment.shrink(slot)
        assert slot.has_memory and bytes(slot.view[:4]) == b"here"
        # Shrinking has given the slot back, so it can be locked again.
        assert slot.lock()
    finally:
        os.close(other)
    segment.shrink(slot)
    assert not slot.has_memory
    segment.close()


def test_an_accelerator_of_the_sender_is_told_before_pages_go() -> None:
    class Buffer:
        def unpin(self) -> None:
            seen.append(bytes(slot.view[:4]))

    seen: list[bytes] = []
    segment = Segment(1, 2**16)
    slot = segment.grow()
    slot.view[:4] = b"here"
    slot.buffer = Buffer()
    assert slot.lock()
    segment.shrink(slot)
    assert seen == [b"here"]
    segment.close()
