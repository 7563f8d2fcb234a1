"""Life cycle of a scheme in one process: its role, its loop, what it opened, and its end.

Must not import a concrete scheme, nor the roles.
"""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

from aiosync._log import Waiting, log
from aiosync._meter import Meter
from aiosync._tasks import call_soon, current_task, running_loop
from aiosync.errors import ConfigError, LocalProtocolError, TransportClosed
from aiosync.protocol import as_pids
from aiosync.receiver.guard import Guard
from aiosync.receiver.receiver import WeightReceiver
from aiosync.rendezvous.listener import Listener
from aiosync.schemes.sources import Given
from aiosync.sender import WeightSender

__all__ = ["ConnectArguments", "Life", "Side", "check_connect_call"]


@dataclass(frozen=True)
class ConnectArguments:
    """Arguments of ``connect()`` that only one of the roles reads; see there.

    Attributes:
        weights: For a trainer: the initial weights.
        processes: For a trainer: the workers' processes.
        initial: For a worker: True if it waits for the initial weights.
    """

    weights: Any
    processes: Sequence[Any]
    initial: bool


class Side(Protocol):
    """The role of a scheme as its life sees it: a trainer, or a worker."""

    @property
    def role(self) -> Literal["sender", "receiver"]:
        """Name of the role."""

    @property
    def runtime(self) -> WeightSender | WeightReceiver | None:
        """The sender or the receiver, once the scheme connects."""

    def assign(self, scheme: Any, life: Life, name: str, value: Any) -> None:
        """Set the model, the weights or the context of a scheme that has this role."""

    async def connect(
        self,
        scheme: Any,
        life: Life,
        fabric: Any,
        timeout: float | None,
        arguments: ConnectArguments,
    ) -> None:
        """Meet the other side, and bring the workers to the initial weights."""

    def awaited(self) -> str:
        """Return a text that says what ``connect()`` waits for."""

    def versions_text(self) -> str:
        """Return a text with the versions that are there, for a call that waits for another."""

    def abort_links(self) -> None:
        """End the links that no runtime has taken."""


def check_connect_call(role: str | None, begun: bool, worker_idx: object, weights: object) -> None:
    """Raise if ``connect()`` was called before, or is given an argument of the other side.

    Raises:
        LocalProtocolError: It was called before, or is given such an argument.
    """
    if begun:
        raise LocalProtocolError(f"Cannot synchronize weights on {role} twice.")
    name, value = ("worker_idx", worker_idx) if role == "sender" else ("weights", weights)
    if value is not None:
        raise LocalProtocolError(f"Cannot specify {name} on {role} side during synchronization.")


class Life:
    """State of a scheme in one process, from when it was made or unpickled.

    Args:
        model_id: Name of the model, if it is known.
        transport: Short name of the scheme, for its statistics.

    Attributes:
        given: Arguments of ``init_on_*()``, and values assigned since.
        side: Role of the scheme, once it has one: a trainer, or a worker.
        worker_idx: Index of the worker, once it is known.
        connected: True once ``connect()`` has succeeded, or failed and left a sender open.
        closed: True once the scheme was closed.
        closing: Done when the newest call that closes the scheme has ended; ``None`` without one.
        ended: Set when the scheme is closed.
        pid: The process in which the scheme lives.
        loop: The event loop of its ``connect()``.
        connecting: The task that runs ``connect()``.
        guard: Keeps reads and updates apart.
        meter: Counts the syncs.
        listeners: Let the other side in.
        shared: Objects that links share, and links that no runtime may have taken.
    """

    def __init__(self, model_id: str | None, transport: str) -> None:
        self.given: Given = Given(model_id)
        self.side: Side | None = None
        self.worker_idx: int | None = None
        self.connected: bool = False
        self.closed: bool = False
        self.closing: asyncio.Future[None] | None = None
        self.ended: asyncio.Event = asyncio.Event()
        self.pid: int = os.getpid()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.connecting: asyncio.Task[Any] | None = None
        self.guard: Guard = Guard()
        self.meter: Meter = Meter(transport=transport)
        self.listeners: list[Listener] = []
        # Each has abort() and aclose().
        self.shared: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def role(self) -> Literal["sender", "receiver"] | None:
        """Name of the role, once the scheme has one."""
        return None if self.side is None else self.side.role

    @property
    def runtime(self) -> WeightSender | WeightReceiver | None:
        """The sender or the receiver, once the scheme connects."""
        return None if self.side is None else self.side.runtime

    @property
    def sender(self) -> WeightSender | None:
        """The sender, once a trainer connects."""
        return self.runtime if isinstance(self.runtime, WeightSender) else None

    @property
    def receiver(self) -> WeightReceiver | None:
        """The receiver, once a worker is connected."""
        return self.runtime if isinstance(self.runtime, WeightReceiver) else None

    @property
    def runs(self) -> bool:
        """True if the scheme has a runtime or is connected, so that there is something to close."""
        return not self.closed and (self.runtime is not None or self.connected)

    @property
    def inherited(self) -> bool:
        """True if the process was forked since: tasks and open links are the parent's."""
        return self.pid != os.getpid()

    @property
    def free_idx(self) -> int | None:
        """Index that was assigned for a later worker; ``None`` once this scheme has a role."""
        return self.worker_idx if self.side is None else None

    def is_a(self, role: str) -> bool:
        """Return True if the scheme has this role, in this process."""
        return self.role == role and not self.inherited

    def log(
        self, phase: str, text: str, version: int | None = None, level: int = logging.INFO
    ) -> None:
        """Log an event of this scheme: one word, a sentence, and the version that it is about."""
        log(level, phase, text, model=self.given.model_id, worker=self.worker_idx, version=version)

    def warn_if_unconnected(self, block: str, call: str) -> None:
        """Warn when a worker's ``with`` block ends without ``connect()``."""
        if self.role == "receiver" and self.loop is None and not self.closed:
            warnings.warn(
                f"this worker never had the trainer's weights: `{block}` does not connect, call "
                f"`{call}` inside of the block",
                stacklevel=3,
            )

    def waiting(self, call: str, timeout: float | None, what: Callable[[], str]) -> Waiting:
        """Return a context manager that logs a call which waits for long, and for what."""
        return Waiting(call, timeout, what, model=self.given.model_id, worker=self.worker_idx)

    def why_not_here(self, method: str, role: str | None) -> NoReturn:
        """Raise the reason why the scheme cannot run a method in this process, on this loop.

        Args:
            method: Name of the method.
            role: The role that the method needs; ``None`` if any role will do.
        """
        if role is None:
            self.check_has_role()
        self.check_open()
        role = role or self.role
        doing = "sending" if role == "sender" else "receiving"
        if self.role != role:
            raise LocalProtocolError(
                f"{method}(): Must be initialized on {role} before {doing} weights: call "
                f"init_on_{role}() and connect() first"
            )
        if not self.connected:
            raise LocalProtocolError(
                f"{method}(): Must be synchronized on {role} before {doing} weights: "
                "call scheme.connect() first, with `await` unless it is of aiosync.sync"
            )
        self.check_process()
        raise LocalProtocolError(
            "this scheme belongs to another event loop; connect and use it on one loop, or "
            "use aiosync.sync from threads"
        )

    def check_open(self) -> None:
        """Raise if the scheme was closed."""
        if self.closed:
            raise TransportClosed(
                "this scheme was closed; make a new one, or copy.copy(scheme), to connect again"
            )

    def check_process(self) -> None:
        """Raise if the scheme had a role, and the process was forked since."""
        if self.side is not None and self.inherited:
            done = "set up" if self.loop is None else "connected"
            raise LocalProtocolError(
                f"this scheme was {done} before the process forked; call init_on_{self.role}() and "
                "connect() in the child"
            )

    def check_here(self) -> None:
        """Raise if the scheme was closed, or had a role before this process was forked."""
        self.check_open()
        self.check_process()

    def check_no_role(self, method: str) -> None:
        """Raise if the scheme was closed or has a role."""
        self.check_open()
        if self.role is not None:
            raise LocalProtocolError(
                f"{method}(): this object is already a {self.role}; pickle it or use "
                "copy.copy(scheme) for the other side"
            )

    def check_has_role(self) -> None:
        """Raise if the scheme was closed or has no role."""
        self.check_open()
        if self.role is None:
            raise LocalProtocolError(
                "Neither init_on_sender nor init_on_receiver have been called. Call "
                "init_on_sender() in the trainer and init_on_receiver() in a worker first"
            )

    def check_may_connect(self, weights: object, worker_idx: object, processes: object) -> None:
        """Raise if the scheme may not begin to connect.

        Raises:
            ConfigError: ``processes`` is no list of processes, or ``connect()`` waits for no worker
                that they may become.
            LocalProtocolError: It may not connect now, or was given an argument of the other role.
        """
        self.check_has_role()
        self.check_process()
        check_connect_call(self.role, self.loop is not None, worker_idx, weights)
        pids = as_pids("processes", processes)
        if pids and self.role == "sender" and not self.given.sources.expected:
            raise ConfigError(
                "connect(processes=) watches processes while it waits for workers, and waits for "
                "none without their number: pass num_workers= to init_on_sender()"
            )

    def begin_to_connect(self) -> int:
        """Bind the scheme to this loop; return how often the caller's task was cancelled before."""
        self.loop = running_loop()
        self.connecting = task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    def check_cancelled(self, error: BaseException, cancelled_before: int) -> None:
        """Raise ``TransportClosed`` if only the scheme's own close cancelled ``connect()``."""
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None:
            # With a higher count the caller has cancelled the task, too.
            if task.uncancel() <= cancelled_before:
                raise TransportClosed("this scheme was closed while it connected") from None

    def begin_to_close(self) -> bool:
        """Stop listening and cancel ``connect()``; return False if the scheme was closed before."""
        if self.closed:
            return False
        self.closed = True
        for listener in () if self.inherited else self.listeners:
            listener.close()
        self.ended.set()
        task, self.connecting = self.connecting, None
        if task is not None and not self.inherited and task is not current_task():
            # connect() runs in another task.
            task.cancel()
        return True

    def abort_links(self) -> None:
        """End the links that no runtime has taken, and the objects that links share."""
        if self.side is not None:
            self.side.abort_links()
        for each in self.shared:
            each.abort()
        if self.loop is not None:
            # A signal's handler may run inside of the loop's wait, which nothing else would end.
            call_soon(self.loop, bool)
