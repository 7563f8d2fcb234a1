"""Links through shared memory: weights in slots of one segment, messages over a Unix socket.

The sender writes a version once into a slot, for any number of receivers, and names the slot to
each of them by one word of memory; they read it in place. The descriptors travel over the socket,
and so does everything that is not a version in a slot. Must not import torch or schemes. See
``docs/topics/shared-memory.md``.
"""

from aiosync.transports.shared_memory.publisher import SlotPublisher
from aiosync.transports.shared_memory.reader import NamedSlot, SlotReader
from aiosync.transports.shared_memory.slots import (
    DEVICE_SLOTS,
    MAX_SLOTS,
    Arena,
    Slot,
)
from aiosync.transports.shared_memory.transport import SharedMemTransport

__all__ = [
    "DEVICE_SLOTS",
    "MAX_SLOTS",
    "Arena",
    "NamedSlot",
    "SharedMemTransport",
    "Slot",
    "SlotPublisher",
    "SlotReader",
]
