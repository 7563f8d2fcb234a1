"""Links over pipes: ``multiprocessing`` connections, raw descriptors and Unix socket pairs.

The event loop drives the descriptors; there is no reader thread and nothing is pickled. Must
not import torch or schemes.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import ClassVar

from aiosync.errors import ConfigError
from aiosync.transports.stream import ByteStream, FramedTransport, widen_socket
from aiosync.types import Cancellation, Capabilities, Limits

__all__ = ["MPTransport"]


class MPTransport(FramedTransport):
    """A link over one two-way pipe, or over a pair of one-way pipes.

    Takes ownership of what it is given: closing the transport closes the connections. Nothing
    else may read from or write to them meanwhile.

    Args:
        pipe: A two-way end: ``multiprocessing.Pipe()`` or one socket of a Unix socket pair.
        reader: The readable end of a one-way pipe, instead of ``pipe``.
        writer: The writable end of another one-way pipe, instead of ``pipe``.
        limits: What the peer may announce.
        name: How errors and reprs call the peer.

    Raises:
        ConfigError: Neither ``pipe`` nor both of ``reader`` and ``writer`` were given.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        name="pipe",
        send_cancellation=Cancellation.BREAKS_LINK,
        recv_cancellation=Cancellation.BREAKS_LINK,
    )

    def __init__(
        self,
        pipe: Connection | socket.socket | None = None,
        *,
        reader: Connection | None = None,
        writer: Connection | None = None,
        limits: Limits | None = None,
        name: str = "the peer",
    ) -> None:
        if pipe is not None and reader is None and writer is None:
            io = ByteStream(pipe)
        elif pipe is None and reader is not None and writer is not None:
            io = ByteStream(reader, writer)
        else:
            raise ConfigError(
                "pass either one two-way pipe, MPTransport(conn), or both one-way ends, "
                "MPTransport(reader=..., writer=...)"
            )
        for fd in {io.read_fd, io.write_fd}:
            widen_socket(fd)
        super().__init__(io, limits=limits, name=name)

    @classmethod
    @contextlib.asynccontextmanager
    async def pair(
        cls, *, limits: Limits | None = None
    ) -> AsyncIterator[tuple[MPTransport, MPTransport]]:
        """Two connected ends in this process, closed when the context ends."""
        left, right = socket.socketpair()
        async with (
            cls(left, limits=limits, name="the right end") as one,
            cls(right, limits=limits, name="the left end") as two,
        ):
            yield one, two
