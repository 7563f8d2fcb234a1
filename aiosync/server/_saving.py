"""What is on its way to a weight server's disk, and is written there.

Must not import the server or its models.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from aiosync._tasks import TaskOwner
from aiosync.errors import AiosyncError
from aiosync.sender.snapshots import Snapshot
from aiosync.server._merging import Part, merged
from aiosync.server._store import StoredUpdate, WeightStore
from aiosync.transports._kept_errors import without_frames
from aiosync.transports.tcp import TCPTransport

__all__ = ["Saver", "Unsaved"]


@dataclass(slots=True, eq=False)
class Unsaved:
    """A version that has to reach the disk before it is served.

    Attributes:
        link: Who brought it, and is told what became of it.
        snapshot: The version; a reference is held.
        update: The same, as the store takes it.
        overtaken: Versions of this link that waited, and that this one replaced.
    """

    link: TCPTransport
    snapshot: Snapshot
    update: StoredUpdate
    overtaken: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


class Saver:
    """Writes versions of one model, one at a time; what is replaced before its turn is not written.

    Args:
        store: Where to.
        model_id: Whose versions.
        executor: Where the store writes.
        tasks: Owner of the task that waits for it.
        needed_before: What else a reader of this version needs, oldest first; no references.
        saved: Told of each version that is on disk; takes over the reference.
        refused: Told of each one that the disk refused, and why.

    Attributes:
        refusals: Versions that could not be stored.
        refusal: The last of them and why, until one is stored again.
    """

    def __init__(
        self,
        store: WeightStore,
        model_id: str,
        executor: Executor | None,
        *,
        tasks: TaskOwner,
        needed_before: Callable[[Unsaved], Sequence[Snapshot]],
        saved: Callable[[Unsaved], None],
        refused: Callable[[Unsaved, AiosyncError], None],
    ) -> None:
        self.refusals = 0
        self.refusal: str | None = None
        self._store = store
        self._model_id = model_id
        self._executor = executor
        self._tasks = tasks
        self._needed_before = needed_before
        self._saved = saved
        self._refused = refused
        self._next: Unsaved | None = None  # only the newest is worth writing, so at most one waits
        self._task: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a version is on its way to the disk."""
        return self._task is not None

    def save_soon(self, unsaved: Unsaved) -> None:
        """Write this version next; takes over its reference."""
        replaced, self._next = self._next, unsaved
        if replaced is not None:
            replaced.snapshot.release()
            if replaced.link is unsaved.link:
                before = (replaced.update.epoch, replaced.update.version)
                unsaved.overtaken = [*replaced.overtaken, before]
        if self._task is None:
            self._task = self._tasks.start(self._run(), "aiosync store")

    async def drain(self) -> None:
        """Let the newest version reach the disk, or be refused."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def close(self) -> None:
        """Forget what waits. Call it after the tasks have ended."""
        if self._next is not None:
            self._next.snapshot.release()
            self._next = None

    async def _run(self) -> None:
        try:
            while self._next is not None:
                unsaved, self._next = self._next, None
                try:
                    await self._write(unsaved)
                except AiosyncError as exc:
                    unsaved.snapshot.release()
                    self.refusals += 1
                    epoch, version = unsaved.update.epoch, unsaved.update.version
                    self.refusal = f"version {version} of epoch {epoch}: {exc}"
                    self._refused(unsaved, without_frames(exc))
                except BaseException:  # cancelled, or a bug
                    unsaved.snapshot.release()
                    raise
                else:
                    self.refusal = None
                    self._saved(unsaved)
        finally:
            self._task = None

    async def _write(self, unsaved: Unsaved) -> None:
        older = self._needed_before(unsaved)
        kept = [snapshot.retain() for snapshot in (unsaved.snapshot, *older)]
        parts = [Part(each.layout, each.buffer, each.values) for each in older]
        save = functools.partial(_save_whole, self._store, self._model_id, unsaved.update, parts)
        writing = asyncio.get_running_loop().run_in_executor(self._executor, save)
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait({writing})  # its memory must not be reused meanwhile
            raise
        finally:
            for snapshot in kept:
                snapshot.release()


def _save_whole(
    store: WeightStore, model_id: str, update: StoredUpdate, older: Sequence[Part]
) -> None:
    """Write a version, with what it lacks of those before it. Blocking.

    Args:
        store: Where to.
        model_id: Whose version it is.
        update: The version.
        older: What else is served, oldest first.

    Raises:
        StoreError: It cannot be written.
    """
    if older:  # an update of some names is no whole model
        part = Part(update.layout, update.buffer, update.values)
        update = dataclasses.replace(update, **merged([*older, part], store.limits)._asdict())
    store.save(model_id, update)
