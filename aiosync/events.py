"""What a sync was and what it cost: events, statistics, and who is told of them.

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
"""Who says it: a trainer, a worker, or a weight server."""

SyncOutcome: TypeAlias = Literal["ok", "skipped", "refused", "timeout", "error"]
"""How a sync ended.

Of a trainer: ``"ok"``, the send returned a report; ``"skipped"``, it did, and every worker that it
addressed had something newer; ``"refused"``, too few workers applied it, and one of them refused
it; ``"timeout"``, one did not answer, or the weights could not be copied in time; ``"error"``, any
other one. Of a worker: ``"ok"``, the model has the version; ``"skipped"``, something newer came
before it was applied; ``"refused"``, it was refused by the model, or by who transforms it.
"""

WorkerState: TypeAlias = Literal["joining", "ready", "lagging", "lost", "left"]
"""How a worker does, as its trainer sees it.

``"joining"``: it is expected, or connected, and has no weights yet. ``"ready"``: it has the newest
version or the one before. ``"lagging"``: it is further behind. ``"lost"``: its link has ended,
because it died for example. ``"left"``: it was closed.
"""


@dataclass(frozen=True, slots=True)
class SyncEvent:
    """One send of a trainer, or one version at a worker, whose outcome is known.

    Attributes:
        role: Whose: ``"sender"`` or ``"receiver"``.
        model: Name of the model.
        transport: Short name of the scheme, for example ``"shared"`` or ``"tcp"``.
        epoch: Which run of a trainer the version is of; 0 where there is no version.
        version: The version; 0 if the send failed before it had one.
        outcome: How it ended.
        seconds: How long each phase took, of those that were measured. Of a trainer:
            ``"snapshot"``, from the call until the weights were copied, and ``"wire"``, from
            then until the outcome was known. Of a worker: ``"stage"``, from the first byte until
            all of it was there, was verified and transformed (not for shared memory, which is read
            in place); ``"apply"``, from then until the model had it, with what it waited for
            forward passes (in shared memory: from when the worker took it); and ``"pause"``, the
            part of that for which no forward pass could begin.
        nbytes: Bytes of the weights, counted once.
        wire_nbytes: Bytes of payload that travelled until it ended: of a trainer, to all workers
            together, and those of other sends at the same time are among them; 0 through shared
            memory.
        started_at: When it began, in seconds since the Unix epoch.
        trace: The ``traceparent`` (W3C Trace Context) of the trainer's span, where it has one.
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
        index: Its index.
        pid: Its process, as it said; 0 before it came.
        version: The newest version that it has taken, as far as it is known; 0 for none.
        lag: How many versions it is behind the newest one.
        state: How it does.
        age: Seconds since the version that it has was sent, to within a twentieth of a second or
            a tenth of it; 0.0 without one.
    """

    index: int
    pid: int
    version: int
    lag: int
    state: WorkerState
    age: float = 0.0


@dataclass(frozen=True, slots=True)
class SyncStats:
    """What a scheme has done so far, and how it stands. Numbers count from ``connect()`` on.

    Attributes:
        role: Of the scheme; of a weight server's model ``"server"``.
        model: Name of the model.
        transport: Short name of the scheme, for example ``"shared"`` or ``"tcp"``.
        epoch: Which run of a trainer the versions are of; 0 before any.
        version: Of a trainer the version that it sent last, of a worker the one that the model
            has; 0 before any.
        newest_version: The newest version that is known to exist.
        lag: How far the model of a worker, or the slowest worker of a trainer, is behind that.
        age: Seconds since ``version`` was sent (of a worker over links that carry bytes: since
            all of it was there); 0.0 before any.
        started: Sends, or versions that came to a worker, so far. It never falls; where two threads
            ask at once, one of them may see one too few or too many for a moment.
        finished: How many of them ended in which way.
        nbytes: Bytes of the weights in those that ended well; each send counts once.
        wire_nbytes: Bytes of payload that travelled: of a trainer, to all workers together.
        skipped: How often a worker skipped a version for a newer one.
        refused: How often a worker refused one.
        reconnects: How often a worker reached its trainer again; of a trainer, how often a worker
            came again.
        seconds: The phases of the newest :class:`SyncEvent`; empty while nobody listens.
        workers: Those of a trainer or a server, by index; those that ended lately are among them.
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
    """Whoever is told of syncs: give one to a scheme's ``add_observer()``.

    It may also have ``traceparent(started_at: float) -> str | None``. That is called when the
    weights of a send are copied, on whatever thread sends, with the time at which the send began,
    in seconds since the Unix epoch. What it returns, the ``traceparent`` of a span that it began
    for it, travels with the update, and is :attr:`SyncEvent.trace` here and at the workers.
    """

    def on_sync(self, event: SyncEvent) -> object:
        """A sync has ended.

        Called on the scheme's event loop, never in the middle of a send or a forward pass, in the
        order in which they ended. It must not block the loop. An observer that raises is removed,
        and the logger ``aiosync`` has one warning with the traceback.
        """
