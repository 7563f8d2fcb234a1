"""Events and statistics of syncs, and the interface of their observers.

No behaviour lives here. This module imports nothing from aiosync, and neither asyncio, anyio nor
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, runtime_checkable

__all__ = [
    "Observer",
    "SyncEvent",
    "SyncOutcome",
    "SyncRole",
    "SyncStats",
    "WorkerState",
    "WorkerStats",
]

SyncRole: TypeAlias = Literal["sender", "receiver", "server"]
"""The side that reports a sync: a trainer, a worker, or a weight server."""

SyncOutcome: TypeAlias = Literal["ok", "skipped", "refused", "timeout", "error"]
"""The outcome of a sync.

Of a trainer: ``"ok"``, the send returned a report; ``"skipped"``, it did, and every worker that it
addressed had a newer version; ``"refused"``, too few workers applied the version, and one of them
refused it; ``"timeout"``, a worker did not answer, or the weights could not be copied in time;
``"error"``, any other failure. Of a worker: ``"ok"``, the model has the version, and an ``async``
hook for it has ended; ``"skipped"``, a newer one came before it was applied; ``"refused"``, the
model, a transform or a hook refused it.
"""

WorkerState: TypeAlias = Literal["joining", "ready", "lagging", "lost", "left"]
"""The state of a worker, as its trainer sees it.

``"joining"``: it is expected, or connected, and has no weights yet. ``"ready"``: it has the newest
version or the one before. ``"lagging"``: it is further behind. ``"lost"``: its link has ended,
because it died for example. ``"left"``: it was closed.
"""


@dataclass(frozen=True, slots=True)
class SyncEvent:
    """One send of a trainer, or one version at a worker, whose outcome is known.

    Attributes:
        role: Role of the scheme: ``"sender"`` or ``"receiver"``.
        model: Name of the model.
        transport: Short name of the scheme, for example ``"shared"`` or ``"tcp"``.
        epoch: The run of a trainer that the version belongs to; 0 without a version.
        version: The version; 0 if the send failed before it had one.
        outcome: The outcome.
        seconds: Seconds of each phase that was measured. Of a trainer: ``"snapshot"``, from the
            call until the weights were copied, and ``"wire"``, from then until the outcome was
            known. Of a worker: ``"stage"``, from the first byte until the update was complete,
            verified and transformed (not for shared memory, which is read in place); ``"apply"``,
            from then until the model had it, including its wait for forward passes (in shared
            memory: from when the worker took it); and ``"pause"``, the part of that in which no
            forward pass could begin.
        nbytes: Bytes of the weights, counted once.
        wire_nbytes: Bytes of payload that travelled until the sync ended. Of a trainer, to all
            workers together, including those of other sends at the same time. 0 through shared
            memory.
        started_at: When the sync began, in seconds since the Unix epoch.
        trace: The ``traceparent`` (W3C Trace Context) of the trainer's span, if it has one.
    """

    role: SyncRole
    model: str
    transport: str
    epoch: int
    version: int
    outcome: SyncOutcome
    seconds: Mapping[str, float] = field(default_factory=dict)
    nbytes: int = 0
    wire_nbytes: int = 0
    started_at: float = 0.0
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker, as its trainer or weight server sees it.

    Attributes:
        index: Index of the worker.
        pid: Process of the worker, as its Hello said; 0 before it came.
        version: The newest version that the worker is known to have taken; 0 for none.
        lag: Number of versions that it is behind the newest one.
        state: State of the worker.
        age: Seconds since the version that it has was sent, to within a twentieth of a second or a
            tenth of it; 0.0 without one.
        behind: Number of workers behind a weight server that passes versions on, over any number of
            hops; 0 for a worker.
        oldest: The oldest version among these workers; 0 if one has none, or there are none.
    """

    index: int
    pid: int
    version: int
    lag: int
    state: WorkerState
    age: float = 0.0
    behind: int = 0
    oldest: int = 0


@dataclass(frozen=True, slots=True)
class SyncStats:
    """Counts and present state of a scheme. Numbers count from ``connect()`` on.

    Attributes:
        role: Role of the scheme; ``"server"`` for a weight server's model.
        model: Name of the model.
        transport: Short name of the scheme, for example ``"shared"`` or ``"tcp"``.
        epoch: The run of a trainer that the versions belong to; 0 before any.
        version: Of a trainer the version that it sent last, of a worker the one that the model has;
            0 before any.
        newest_version: The newest version that is known to exist.
        lag: Number of versions that the model of a worker, or the slowest worker of a trainer, is
            behind ``newest_version``.
        age: Seconds since ``version`` was sent (of a worker over links that carry bytes: since it
            was complete there); 0.0 before any.
        started: Sends, or versions that came to a worker, so far. The number never falls. If two
            threads ask at once, one of them may see one too few or too many for a moment.
        finished: Number of them that ended, by outcome.
        nbytes: Bytes of the weights in those that ended well; each send counts once.
        wire_nbytes: Bytes of payload that travelled: of a trainer, to all workers together.
        skipped: How often a worker skipped a version for a newer one.
        refused: How often a worker refused a version.
        reconnects: How often a worker reached its trainer again; of a trainer, how often a worker
            came back.
        seconds: Seconds of each phase of the newest :class:`SyncEvent`; empty without observers.
        workers: Workers of a trainer or a server, by index; those that ended lately are among them.
    """

    role: SyncRole
    model: str
    transport: str
    epoch: int = 0
    version: int = 0
    newest_version: int = 0
    lag: int = 0
    age: float = 0.0
    started: int = 0
    finished: Mapping[SyncOutcome, int] = field(default_factory=dict)
    nbytes: int = 0
    wire_nbytes: int = 0
    skipped: int = 0
    refused: int = 0
    reconnects: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    workers: tuple[WorkerStats, ...] = ()


@runtime_checkable
class Observer(Protocol):
    """An object that is told of syncs: give one to a scheme's ``add_observer()``.

    It may also have ``traceparent(started_at: float) -> str | None``. That is called when the
    weights of a send are copied, or could not be, on the thread that sends, with the time at which
    the send began, in seconds since the Unix epoch. It returns the ``traceparent`` of a span that
    it began for the send. That travels with the update, and is :attr:`SyncEvent.trace` here and at
    the workers.
    """

    def on_sync(self, event: SyncEvent) -> object:
        """Take note of a sync that has ended.

        Called on the scheme's event loop, never in the middle of a send or a forward pass, in the
        order in which the syncs ended. It must not block the loop. An observer that raises is
        removed, and the logger ``aiosync`` has one warning with the traceback.
        """
