"""Schemes for worker processes of one host: through shared memory, or through pipes.

Workers find the trainer through a Unix socket. Must not import torch, nor another concrete scheme.
"""

from __future__ import annotations

import abc
import logging
import socket
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Literal, TypeVar

from aiosync.errors import AiosyncError, ConfigError
from aiosync.rendezvous.dialer import Left
from aiosync.rendezvous.handshake import Refused
from aiosync.rendezvous.listener import Listener
from aiosync.rendezvous.same_host import NotYetReachable, bind_here, connect, peer_pid
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.fabric import Fabric
from aiosync.schemes.options import SharedMemOptions
from aiosync.schemes.sources import Sources
from aiosync.sender import WeightSender
from aiosync.sender.worker_deaths import watch_process
from aiosync.strategy import WeightStrategy
from aiosync.tensors import Dtypes
from aiosync.transports.base import Transport
from aiosync.transports.framed_link import MPTransport
from aiosync.transports.shared_memory import Arena, SharedMemTransport
from aiosync.types import Require

__all__ = ["MultiProcessWeightSyncScheme", "SharedMemWeightSyncScheme"]

_EXPERIMENTAL = (
    "memory='device' is experimental: the tests imitate the GPU's driver, and no GPU has seen it"
)


_Scheme = TypeVar("_Scheme", bound=WeightSyncScheme, contravariant=True)


class _LocalFabric(Fabric[_Scheme]):
    """Fabric within one host: workers find the trainer through a Unix socket."""

    # An attempt over a Unix socket costs little.
    longest_pause: ClassVar[float] = 0.1

    @abc.abstractmethod
    def link(self, end: Any, name: str) -> Transport:
        """Make a link over a connected socket or one end of a pipe."""

    def bind(self, scheme: _Scheme, sources: Sources) -> None:
        """Listen on the Unix socket that workers dial; :meth:`listen` accepts them."""
        self.life.listeners = [Listener(bind_here(self.meeting))]

    def listen(self, scheme: _Scheme, sender: WeightSender, *, given: bool) -> None:
        """Accept the workers of this user from now on, and have the sender welcome each."""

        def on_connection(sock: socket.socket) -> None:
            pid = peer_pid(sock)
            if pid is None:
                # The process belongs to another user, who has no business here.
                sock.close()
                return
            link = self.link(sock, f"worker process {pid}")
            watch_process(link, pid)
            sender.workers.admission.welcome(link)

        for listener in self.life.listeners:
            listener.accept(on_connection, sender.workers.admission.not_let_in)

    async def dial(self, scheme: _Scheme, left: Left, is_redial: bool) -> Transport:
        """Make one attempt to reach the trainer's socket, which succeeds or fails at once."""
        sock, _pid = connect(self.meeting, listener_pid=self.sender_pid)
        return self.link(sock, "the trainer")

    def not_reached_text(self, scheme: _Scheme, within: str) -> str:
        """Return the text of an error while no trainer listens."""
        return (
            f"no trainer listened{within}: call init_on_sender() and connect() on the trainer's "
            "copy of this scheme"
        )

    def may_retry(self, error: AiosyncError) -> bool:
        """Return True if the trainer does not listen yet, is busy, or has refused for now."""
        return isinstance(error, (NotYetReachable, Refused))


class _SharedMemFabric(_LocalFabric["SharedMemWeightSyncScheme"]):
    """Fabric within one host, whose sender writes updates into memory that workers read."""

    def arena(self, scheme: SharedMemWeightSyncScheme) -> Arena:
        """Return the sender's shared memory; with ``memory="device"`` its slots are on the GPU."""
        on_device = scheme.memory == "device"
        if on_device:
            self.life.log("experimental", _EXPERIMENTAL, level=logging.WARNING)
        return Arena(on_device=on_device)

    def copies(self, scheme: SharedMemWeightSyncScheme) -> bool:
        """Return True for slots on a GPU, which workers always copy, whatever ``apply_copy`` is."""
        return scheme.memory == "device"

    def link(self, end: Any, name: str) -> Transport:
        """Make a link that names the slots of this process's sender, or reads those of the peer."""
        sender = self.life.sender
        arena = None if sender is None else sender.copier.arena
        return SharedMemTransport(end, arena=arena, name=name)


class _PipeFabric(_LocalFabric[WeightSyncScheme]):
    """Fabric within one host, whose links carry the bytes of updates."""

    def link(self, end: Any, name: str) -> Transport:
        """Make a link over a connected socket or one end of a pipe."""
        return MPTransport(end, name=name)


class _LocalScheme(WeightSyncScheme):
    """Common part of the schemes within one host."""

    _fabric: _LocalFabric[Any]

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
        return self._fabric.link(pipe_or_context, "the peer")


class SharedMemWeightSyncScheme(SharedMemOptions, _LocalScheme):
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

    Args:
        strategy: As for :class:`WeightSyncScheme`, like all the others but ``memory``.
        sync: As for every scheme.
        per_worker_weights: As for every scheme.
        apply: As for every scheme.
        apply_copy: Copy updates into the parameters' memory.
        buffers: As for every scheme.
        guard: As for every scheme.
        strict: As for every scheme.
        require: As for every scheme.
        timeout: As for every scheme.
        wire_dtype: As for every scheme.
        first_version: As for every scheme.
        memory: ``"device"`` puts the slots into memory of the GPU that has the models of trainer
            and workers, which then always copy. Experimental; see ``docs/topics/gpu.md``. The same
            on both sides.

    Raises:
        ConfigError: An option has an illegal value.
    """

    _fabric_type = _SharedMemFabric

    def __init__(
        self,
        strategy: Literal["tensordict", "state_dict"] | WeightStrategy = "tensordict",
        sync: bool = True,
        per_worker_weights: bool = False,
        *,
        apply: Literal["auto", "manual"] = "auto",
        apply_copy: bool = False,
        buffers: Literal["all", "persistent"] = "all",
        guard: Literal["forward", "reading"] = "forward",
        strict: bool = True,
        require: Require = "all",
        timeout: float | None = 120.0,
        wire_dtype: Dtypes | None = None,
        first_version: int = 1,
        memory: Literal["host", "device"] = "host",
    ) -> None:
        super().__init__(
            strategy,
            sync,
            per_worker_weights,
            apply=apply,
            apply_copy=apply_copy,
            buffers=buffers,
            guard=guard,
            strict=strict,
            require=require,
            timeout=timeout,
            wire_dtype=wire_dtype,
            first_version=first_version,
        )
        self.memory = memory


class MultiProcessWeightSyncScheme(_LocalScheme):
    """Scheme that sends weights to worker processes of one host through pipes.

    Each update is copied once by the sender, written to every worker's pipe, and received straight
    into the worker's memory. Prefer :class:`SharedMemWeightSyncScheme` if shared memory is
    available: its cost does not grow with the number of workers.

    Workers find the trainer through a socket that only the same user can reach, by pickling this
    object into them; or give connections: ``init_on_sender(pipes=[...])`` and
    ``init_on_receiver(pipe=...)``.
    """

    _fabric_type = _PipeFabric
