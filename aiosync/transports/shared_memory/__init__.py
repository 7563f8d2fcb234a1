"""Links through shared memory: weights in slots of one segment, messages over a Unix socket.

The sender writes a version once into a slot, however many receivers read it, and names it to each
of them by one word of memory; they read it in place. The descriptors travel over the socket, and so
does whatever is no version of weights in a slot. Must not import torch or schemes. See
``docs/topics/shared-memory.md``.
"""

from aiosync.transports.shared_memory.reader import NamedSlot, SlotReader
from aiosync.transports.shared_memory.slots import (
    MAX_SLOTS,
    Arena,
    Slot,
)
from aiosync.transports.shared_memory.transport import SharedMemTransport, SlotPublisher

__all__ = [
    "MAX_SLOTS",
    "Arena",
    "NamedSlot",
    "SharedMemTransport",
    "Slot",
    "SlotPublisher",
    "SlotReader",
]
