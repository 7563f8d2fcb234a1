"""Links over pipes: ``multiprocessing`` connections and Unix socket pairs.

The event loop drives the descriptors; there is no reader thread and nothing is pickled. Must
not import torch or schemes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from aiosync.transports.stream import FramedTransport
from aiosync.types import Cancellation, Capabilities

__all__ = ["MPTransport", "MemoryTransport"]


class MPTransport(FramedTransport):
    """A link over a two-way pipe: ``multiprocessing.Pipe()``, or one socket of a Unix socket pair.

    Takes ownership of it, as :class:`FramedTransport` does.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        name="pipe",
        send_cancellation=Cancellation.BREAKS_LINK,
        recv_cancellation=Cancellation.BREAKS_LINK,
    )


class MemoryTransport(MPTransport):
    """A link inside one process: a pipe of which both ends are here. Make them with ``pair()``."""

    capabilities: ClassVar[Capabilities] = replace(
        MPTransport.capabilities, name="memory", cross_process=False
    )
