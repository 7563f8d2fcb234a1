"""Weights through shared memory: one copy per update, whatever the number of workers.

Must not import torch, nor another concrete scheme.
"""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection
from typing import Any

from aiosync.errors import ConfigError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.transports.base import Transport
from aiosync.transports.shared_memory import Arena, SharedMemTransport

__all__ = ["SharedMemWeightSyncScheme"]


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """Sends weights to worker processes of one host through shared memory.

    The sender copies each update once into a slot that no process reads, and names it to the
    workers; their parameters then point at the slot (or copy it, with ``apply_copy=True``). A send
    is over once its version is visible: a forward or ``reading()`` block that starts afterwards
    uses it or a newer one, or raises ``ApplyError``. Parameters that are looked at outside of these
    follow within 10 ms. Workers that cannot take versions in a forward answer to each update
    instead. A worker's own writes never leave its process, and never survive. See
    ``docs/topics/shared-memory.md``.

    Workers find the trainer through a socket that only the same user can reach, by pickling
    this object into them; or give connections: ``init_on_sender(pipes=[...])`` and
    ``init_on_receiver(pipe=...)``.
    """

    _arena: Arena | None

    def _transport_over(self, sock: socket.socket, name: str) -> Transport:
        return SharedMemTransport(sock, arena=self._arena, name=name)

    def create_transport(self, pipe_or_context: Connection | socket.socket | Any) -> Transport:
        """A link over one end of a two-way pipe. Takes ownership of it; needs a running loop.

        Args:
            pipe_or_context: ``multiprocessing`` connection of a two-way pipe, Unix socket, or
                an existing link.
        """
        if isinstance(pipe_or_context, Transport):
            return pipe_or_context
        if isinstance(pipe_or_context, socket.socket):
            return SharedMemTransport(pipe_or_context, arena=self._arena)
        if not hasattr(pipe_or_context, "fileno"):
            raise ConfigError(f"{pipe_or_context!r} is not a multiprocessing pipe connection")
        fd = os.dup(pipe_or_context.fileno())
        try:
            sock = socket.socket(fileno=fd)
        except OSError as exc:
            os.close(fd)
            raise ConfigError(
                "shared memory needs two-way pipes: multiprocessing.Pipe(duplex=True)"
            ) from exc
        pipe_or_context.close()
        return SharedMemTransport(sock, arena=self._arena)

    def _make_arena(self) -> Arena:
        self._arena = Arena()
        return self._arena

    def _reset(self) -> None:
        super()._reset()
        self._arena = None
