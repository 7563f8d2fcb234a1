"""Admission of workers: handshakes on new links, the indices that workers get, and refusals."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol

from aiosync._log import log
from aiosync._tasks import Notifier, TaskOwner
from aiosync.errors import AiosyncError
from aiosync.rendezvous.dialer import is_final
from aiosync.rendezvous.handshake import ANY_STRATEGY, admit, is_same_strategy
from aiosync.sender.update_queue import LateJoinerUpdates
from aiosync.sender.worker_deaths import is_up
from aiosync.sender.worker_link import WorkerLink
from aiosync.sender.worker_record import WorkerRecord, WorkerRecords
from aiosync.transports.base import Transport
from aiosync.wire import Hello

__all__ = ["FIRST_OF_OTHERS", "Admission"]

FIRST_OF_OTHERS = 2**15
"""Least index of a client that only pulls, and of a server if any number of workers may come."""


class AdmissionOwner(Protocol):
    """The registry as the admission sees it.

    Attributes:
        model_id: Name of the model.
        epoch: Epoch of the versions.
        version: The version that was drawn last; 0 before any.
        records: Records of workers, by index.
        links: Links of the workers that are connected, by index.
        history: Updates for workers that join later.
        tasks: Owner of the handshakes' tasks.
        changed: Notified when a worker was refused.
        counts: Counts for :class:`SyncStats`, with the workers that came back.
        crash: The exception that ended the sender; ``None`` for none.
    """

    model_id: str
    epoch: int
    version: int
    records: WorkerRecords
    links: dict[int, WorkerLink]
    history: LateJoinerUpdates
    tasks: TaskOwner
    changed: Notifier
    counts: dict[str, int]
    crash: tuple[BaseException, TracebackType | None] | None

    def record(self, idx: int) -> WorkerRecord:
        """Return the record of a worker, made if there is none yet."""

    def join(self, transport: Transport, idx: int, hello: Hello) -> None:
        """Connect a worker that was admitted."""

    def not_reached(self, idx: int, error: AiosyncError) -> None:
        """Note why no link to a worker comes any more: sends and ``connect()`` fail for it then."""


class Admission:
    """Admits links: does the handshake, gives the worker an index, and hands it to the registry.

    Args:
        registry: Owner of the records and links, which the worker joins.
        strategy: Name of the strategy, compared in the handshake.
        num_workers: Number of expected workers; ``None`` for any number.
        is_joining: ``connect()`` waits for expected workers.

    Attributes:
        strategy: As given; may change.
        num_workers: As given.
        is_joining: True until ``connect()`` no longer waits for expected workers.
        arriving: Links in their handshake, with the worker's index once it is known, else -1.
        refusals: The reasons of the last refusals.
        initial: Indices of the workers whose initial weights are still being copied; ``None`` in
            it stands for the weights that are for all workers.
        note: Returns the text that a worker is sent while there is no update for it.
        strangers: Returns the refusals of peers before there was a link.
        path: The :attr:`Welcome.path` for workers; empty at a trainer.
    """

    def __init__(
        self,
        registry: AdmissionOwner,
        strategy: str,
        num_workers: int | None,
        *,
        is_joining: bool,
    ) -> None:
        self._registry = registry
        self.strategy: str = strategy
        self.num_workers: int | None = num_workers
        self.is_joining: bool = is_joining
        self.arriving: dict[Transport, int] = {}
        self.refusals: list[str] = []
        self.initial: set[int | None] = set()
        self.note: Callable[[], str] = str
        self.strangers: Callable[[], list[str]] = list
        self.path: tuple[bytes, ...] = ()

    def welcome(
        self,
        transport: Transport,
        worker_idx: int | None = None,
        hello: Hello | None = None,
        *,
        from_user: bool = False,
    ) -> None:
        """Start the handshake on a new link, in the background.

        Args:
            transport: The link.
            worker_idx: Index of the worker, if the link belongs to one.
            hello: The worker's Hello, if it was read already.
            from_user: The user gave this link, and nobody dialled: there will be no other one to
                that worker, whose process may start later.
        """
        if self._registry.crash is not None:
            transport.abort()
            return
        self.arriving[transport] = -1
        coroutine = self._shake_hands(transport, worker_idx, hello, from_user=from_user)
        self._registry.tasks.start(coroutine, "aiosync handshake")

    async def _shake_hands(
        self,
        transport: Transport,
        expected_idx: int | None,
        hello: Hello | None,
        *,
        from_user: bool,
    ) -> None:
        """Do the handshake on a link; hand the worker to the registry, or note why that failed."""
        registry = self._registry
        try:
            hello, idx = await admit(
                transport,
                model_id=registry.model_id,
                strategy=self.strategy,
                epoch=registry.epoch,
                num_workers=self.num_workers,
                worker_idx=expected_idx,
                indices=self._indices,
                holder=self._holder,
                reserve=lambda idx, hello: self._reserve(transport, idx, hello),
                hello=hello,
                from_user=from_user,
                note=self.note,
                path=lambda: self.path,
            )
        except AiosyncError as exc:
            # The worker was refused, and told so, or its link failed. connect() repeats the reason
            # if it waits for the worker in vain.
            self.arriving.pop(transport, None)
            self.not_let_in(str(exc))
            if expected_idx is not None:
                self._note_failure(expected_idx, exc, is_last=from_user or is_final(exc))
            await transport.aclose()
            registry.changed.notify()
            return
        except BaseException:  # The task was cancelled, or has met a bug that the registry is told.
            self.arriving.pop(transport, None)
            transport.abort()
            raise
        # A link that is gone from the dictionary lost its index to a newer link, in _reserve().
        if self.arriving.pop(transport, None) is None:
            return
        if not is_same_strategy(hello.strategy, self.strategy):
            # The strategy has changed since. The worker dials again, and is told.
            transport.abort()
            return
        registry.join(transport, idx, hello)

    def _note_failure(self, idx: int, error: AiosyncError, *, is_last: bool) -> None:
        """Note why a handshake with a worker failed; if ``is_last``, no other link to it comes."""
        if is_last:
            self._registry.not_reached(idx, error)
            return
        record = self._registry.record(idx)
        is_lost = record.error is not None and not record.is_closed
        if is_lost and idx not in self._registry.links and record.subscribes:
            # With this error, send() says why the worker does not come back.
            if record.end is None:
                record.error = error
            else:
                record.end = error

    def _indices(self, hello: Hello) -> Iterable[int]:
        """Return the indices in the order in which workers that ask for none get them."""
        # A file or another server gets a high index, so that it has none that a worker asks for. A
        # server has the place of a worker that is expected, but no client that only pulls.
        is_other = hello.strategy == ANY_STRATEGY
        if self.num_workers is None or (is_other and not hello.subscribe):
            return itertools.count(FIRST_OF_OTHERS if is_other else 0)
        indices = range(self.num_workers)
        if not self.is_joining:
            return indices
        # Indices that no process has had come first. connect() counts a worker that came and left
        # as one that came, as long as no other one has its index.
        return sorted(indices, key=lambda idx: self._registry.record(idx).pid != 0)

    def _holder(self, idx: int, hello: Hello) -> int | None:
        """Return the id of the live process whose link has an index; ``None`` if the index is free.

        The index is also free for the very receiver that has it, whose old link has broken.
        """
        record = self._registry.records.get(idx)
        if record is None or (hello.session is not None and record.session == hello.session):
            return None
        links = [link for link, taken in self.arriving.items() if taken == idx]
        if idx in self._registry.links:
            links.append(self._registry.links[idx].transport)
        return record.pid if any(map(is_up, links)) else None

    def _reserve(self, transport: Transport, idx: int, hello: Hello) -> int:
        """Give an index to a worker; return the version that it is sent first, 0 for none."""
        registry = self._registry
        for link in [link for link, taken in self.arriving.items() if taken == idx]:
            # This link ended during its handshake, or its receiver has dialled anew.
            del self.arriving[link]
            link.abort()
        self.arriving[transport] = idx
        record = registry.record(idx)
        record.pid, record.session = hello.pid, hello.session
        if idx in self.initial or None in self.initial:
            # The weights of this version are still being copied, and follow.
            return registry.version
        return registry.history.for_worker(idx).version

    def not_let_in(self, error: OSError | str) -> None:
        """Note the refusal of a worker, which connect() reports if it waits in vain."""
        text = error if isinstance(error, str) else f"a worker could not be let in: {error}"
        if text not in self.refusals:
            log(logging.INFO, "refused", text, model=self._registry.model_id)
        self.refusals = [*[each for each in self.refusals if each != text][-2:], text]

    def refused(self) -> str:
        """Return the last refusals as the end of a sentence; "" if there are none."""
        refusals = [*self.refusals, *self.strangers()]
        return f"; refused: {'; '.join(refusals)}" if refusals else ""

    def abort(self) -> None:
        """End the links in their handshake: a task that never began to run cannot end its link."""
        for transport in self.arriving:
            transport.abort()
