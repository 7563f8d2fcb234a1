"""Schemes for worker processes of one host: through shared memory, or through pipes.

Workers find the trainer through a Unix socket. Must not import torch, nor another concrete scheme.
"""

from __future__ import annotations

import abc
import socket
from multiprocessing.connection import Connection
from typing import Any

from aiosync.errors import AiosyncError, ConfigError
from aiosync.rendezvous.dialer import Left
from aiosync.rendezvous.handshake import Refused
from aiosync.rendezvous.listener import Listener
from aiosync.rendezvous.same_host import NobodyListens, bind_here, connect, peer_pid
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.roles import Trainer
from aiosync.schemes.sources import Sources
from aiosync.sender import WeightSender
from aiosync.sender.workers import watch_process
from aiosync.transports.base import Transport
from aiosync.transports.shared_memory import Arena, SharedMemTransport
from aiosync.transports.stream import MPTransport

__all__ = ["MultiProcessWeightSyncScheme", "SharedMemWeightSyncScheme"]


class _LocalScheme(WeightSyncScheme):
    """Common part of the schemes within one host."""

    # An attempt over a Unix socket costs little.
    _longest_pause = 0.1

    @abc.abstractmethod
    def _transport_over(self, end: Any, name: str) -> Transport:
        """Make a link over a connected socket or one end of a pipe."""

    def create_transport(self, pipe_or_context: Connection | socket.socket | Any) -> Transport:
        """Make a link over one end of a two-way pipe. Takes ownership of it; needs a running loop.

        Args:
            pipe_or_context: ``multiprocessing`` connection of a two-way pipe, Unix socket, or an
                existing link.
        """
        if isinstance(pipe_or_context, Transport):
            return pipe_or_context
        if not hasattr(pipe_or_context, "fileno"):
            raise ConfigError(f"{pipe_or_context!r} is not a multiprocessing pipe connection")
        return self._transport_over(pipe_or_context, "the peer")

    def _bind(self, sources: Sources) -> None:
        self._life.listeners = [Listener(bind_here(self._meeting))]

    def _start_listening(self, trainer: Trainer, sender: WeightSender) -> None:
        def on_connection(sock: socket.socket) -> None:
            pid = peer_pid(sock)
            if pid is None:
                # The process belongs to another user, who has no business here.
                sock.close()
                return
            link = self._transport_over(sock, f"worker process {pid}")
            watch_process(link, pid)
            sender.workers.welcome(link)

        for listener in self._life.listeners:
            assert isinstance(listener, Listener)
            listener.accept(on_connection, sender.workers.not_let_in)

    async def _dial_trainer(self, left: Left, again: bool) -> Transport:
        sock, _pid = connect(self._meeting, listener_pid=self._sender_pid)
        return self._transport_over(sock, "the trainer")

    def _nobody(self, within: str) -> str:
        return (
            f"no trainer listened{within}: call init_on_sender() and connect() on the trainer's "
            "copy of this scheme"
        )

    def _is_final(self, error: AiosyncError) -> bool:
        return not isinstance(error, (NobodyListens, Refused))


class SharedMemWeightSyncScheme(_LocalScheme):
    """Scheme that sends weights to worker processes of one host through shared memory.

    The sender copies each update once into a slot that no process reads, and names it to the
    workers; their parameters then point at the slot (or copy it, with ``apply_copy=True``). A send
    is over once its version is visible: a forward or ``reading()`` block that starts afterwards
    uses it or a newer one, or raises ``ApplyError``. Parameters that are read outside of these
    follow within 10 ms. Workers that cannot take versions in a forward answer to each update
    instead. A worker's own writes never leave its process, and never survive. See
    ``docs/topics/shared-memory.md``.

    Workers find the trainer through a socket that only the same user can reach, by pickling this
    object into them; or give connections: ``init_on_sender(pipes=[...])`` and
    ``init_on_receiver(pipe=...)``.
    """

    def _make_arena(self) -> Arena:
        return Arena()

    def _transport_over(self, end: Any, name: str) -> Transport:
        sender = self._life.sender
        arena = None if sender is None else sender.copier.arena
        return SharedMemTransport(end, arena=arena, name=name)


class MultiProcessWeightSyncScheme(_LocalScheme):
    """Scheme that sends weights to worker processes of one host through pipes.

    Each update is copied once by the sender, written to every worker's pipe, and received straight
    into the worker's memory. Prefer :class:`SharedMemWeightSyncScheme` if shared memory is
    available: its cost does not grow with the number of workers.

    Workers find the trainer through a socket that only the same user can reach, by pickling this
    object into them; or give connections: ``init_on_sender(pipes=[...])`` and
    ``init_on_receiver(pipe=...)``.
    """

    def _transport_over(self, end: Any, name: str) -> Transport:
        return MPTransport(end, name=name)
