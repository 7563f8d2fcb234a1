"""Weights through pipes: the bytes of each update travel to every worker.

Must not import torch, nor another concrete scheme.
"""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection
from typing import Any

from aiosync.errors import ConfigError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.transports.base import Transport
from aiosync.transports.pipe import MPTransport

__all__ = ["MultiProcessWeightSyncScheme"]


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Sends weights to worker processes of one host through pipes.

    Each update is copied once by the sender, written to every worker's pipe, and received
    straight into the worker's memory. Prefer :class:`SharedMemWeightSyncScheme` where shared
    memory is available: its cost does not grow with the number of workers.

    Workers find the trainer through a socket that only the same user can reach, by pickling
    this object into them; or give connections: ``init_on_sender(pipes=[...])`` and
    ``init_on_receiver(pipe=...)``.
    """

    def _transport_over(self, sock: socket.socket, name: str) -> Transport:
        return MPTransport(sock, name=name)

    def create_transport(self, pipe_or_context: Connection | socket.socket | Any) -> Transport:
        """A link over one end of a two-way pipe. Takes ownership of it; needs a running loop.

        Args:
            pipe_or_context: ``multiprocessing`` connection, Unix socket, or an existing link.
        """
        if isinstance(pipe_or_context, Transport):
            return pipe_or_context
        if not hasattr(pipe_or_context, "fileno"):
            raise ConfigError(f"{pipe_or_context!r} is not a multiprocessing pipe connection")
        return MPTransport(pipe_or_context)
