"""The guard between reads and updates: no read ever computes on two versions.

Readers (forward passes, ``reading()`` blocks) share the guard; applying an update excludes them. If
no thread reads, the thread that brings an update applies it at once. If an update arrives during a
forward, the thread of that forward applies it as soon as the forward ends. So no update waits for a
busy loop, and the loop never waits for a forward.

A forward that Ctrl-C ended, or under ``torch.compile`` any exception, never tells the guard that it
is over: forward hooks do not see it. Such reads are known by their frames, which no longer run.

Whole requests of a server have a gate: ``serving.gate``. Must not import transports; used from any
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from itertools import chain
from types import FrameType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from aiosync._tasks import current_task
from aiosync.errors import LocalProtocolError, SyncTimeout, TransportClosed
from aiosync.receiver.caches import clear_caches
from aiosync.receiver.code_marks import is_automatic, never_traced, no_guard
from aiosync.receiver.forwards import Forwards
from aiosync.receiver.read_versions import CURRENT_TASKS, ReadVersions

__all__ = ["PATIENCE_SECONDS", "TASKS_AROUND", "Guard", "weakly"]

PATIENCE_SECONDS = 30.0
"""Seconds for which a call in one thread waits for another thread."""

TASKS_AROUND: ContextVar[tuple[tuple[int, weakref.ref[asyncio.Task[Any]]], ...]]
"""Tasks in whose ``async with`` blocks this code is: its own one, and those that started it there.

Each is there once for each guard, after the ``id()`` of the guard. A block may have ended since. A
context may outlive such a task, so the references are weak.
"""
TASKS_AROUND = ContextVar("aiosync_tasks_around", default=())

# A thread that waits looks again at the latest after this, and a coroutine after this pause.
_LOOK_SECONDS = 0.05
_PAUSE_SECONDS = 0.001
# A read that begins lets an update go first that waits for other reads: for so long at first, then
# not for twice as long, then for four times as long, and so on. The last turn takes 64 times as
# long.
_FIRST_TURN_SECONDS = 0.08
_LAST_TURN = 6

# These make torch operations of a thread do something else than they say: dispatch modes (tracers,
# fake tensors) and transforms of torch.func. Private API; without it torch refuses updates there.
_num_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_interpreter: Callable[[], Any] = getattr(
    torch._C._functorch, "peek_interpreter_stack", lambda: None
)

# After a forward that raised, the frame of this code calls the hooks; after other forwards a frame
# inside it does.
_CALL = nn.Module._call_impl.__code__
_FUNCTIONAL_CALL = torch.nn.utils.stateless._functional_call.__code__

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])
_Read: TypeAlias = "FrameType | asyncio.Task[Any] | None"


def _is_plain() -> bool:
    """Return True if operations of this thread do what they say, with a model's own tensors."""
    return not _num_modes() and _interpreter() is None and not _in_functional_call()


def _in_functional_call() -> bool:
    """Return True if a ``functional_call()`` of this thread has put other tensors into modules."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _FUNCTIONAL_CALL:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def _outside_transform() -> Iterator[None]:
    """Let torch operations of this thread do what they say inside this block."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def weakly(owner: _T, method: Callable[[_T], object]) -> Callable[[], object]:
    """Return a function that calls a method of ``owner`` while that object is alive.

    A model keeps its guard alive: an object that the guard called directly would live as long as
    the model does.
    """
    found = weakref.ref(owner)

    def call() -> None:
        alive = found()
        if alive is not None:
            method(alive)

    return call


class Guard:
    """Lets in many readers or one apply. Thread-safe; a reader may enter again in its own thread.

    Attributes:
        at_read: True while an update is applied by a read that begins or ends.
        words: Shared memory whose first word reads look at, see :meth:`watch_word`.
        seen: The last word that was handled.
        before_next_read: Called once under the lock when the next read starts, before it sees
            anything; ``None`` for nothing to call.
        check: Called under the lock when an outermost read that computes begins; the read raises
            the exception that this raises.
        held: Epoch and version of the weights that reads see, (0, 0) for none; set by
            the code that applies updates, and by that which loads other weights. Does not change
            during a read, unless code in the read loads weights.
        has_computed: True if a read that computes has begun since this was set to false.
        on_compute: Called under the lock by the read that sets :attr:`has_computed`, in its thread.
        read_versions: The versions that reads used.
    """

    def __init__(self) -> None:
        self._forwards = Forwards(self)
        self.reset()
        _guards.add(self)

    def reset(self) -> None:
        """Forget every read; also in a forked child, which has none of the parent's threads."""
        # Re-entrant, because a destructor or a signal handler may close a scheme inside any call.
        self._lock = threading.RLock()
        # One lock for each thread that waits for a change. A condition would not do: Ctrl-C may
        # come after its wait() gave the lock back and before it took the lock again.
        self._waiters: list[threading.Lock] = []
        # Open reads of each thread: a forward by its frame, a block by its task or None.
        self._open: dict[int, list[_Read]] = {}
        # Name and begin of the last automatic read of each thread that was inside no other read.
        self._calls: dict[int, tuple[str, float]] = {}
        # Thread and frame that apply, and True if an interrupted apply has to run again.
        self._applying: tuple[int, FrameType, bool] | None = None
        self._pending = False
        # Number of calls that wait for the readers.
        self._claims = 0
        # Time when a reader found a waiting update; 0 if none has.
        self._met_since = 0.0
        # Applies the waiting update, and the one that the word names; keeps no object alive, see
        # weakly().
        self._apply: Callable[[], object] = no_guard
        self.at_read: bool = False
        self.before_next_read: Callable[[], object] | None = None
        self.check: Callable[[], object] | None = None
        self.words: memoryview | None = None
        self._on_overlap: Callable[[], object] = no_guard
        self.seen: int = 0
        self.held: tuple[int, int] = (0, 0)
        self.has_computed: bool = False
        self.on_compute: Callable[[], object] | None = None
        self.read_versions: ReadVersions = ReadVersions(self._lock)

    # -- readers -------------------------------------------------------------------------------

    def watch_word(
        self, words: memoryview, apply: Callable[[], object], on_overlap: Callable[[], object]
    ) -> None:
        """Look at a word whenever an outermost read begins or ends while no other read is open.

        Args:
            words: Memory whose first word is watched; other processes write it.
            apply: Runs, as the argument of :meth:`submit` does, if the word is not :attr:`seen`; if
                it raises, the read that is about to begin raises the same.
            on_overlap: Called when reads overlap: then all of them use the version of the first
                one.
        """
        with self._lock:
            self._apply, self._on_overlap, self.words = apply, on_overlap, words

    def ignore_word(self) -> None:
        """Stop looking at the word. Idempotent."""
        with self._lock:
            self.words, self._on_overlap = None, no_guard

    def refuse_reads(self) -> None:
        """Make every read that begins from now on raise, as no more updates can come."""

        def refuse() -> None:
            # The guard drops the function before it calls it, so that only one read would raise.
            self.before_next_read = refuse
            # Closing the scheme reads, too, and has to work.
            if self._applying is not None:
                return
            raise TransportClosed(
                "the event loop of aiosync.sync has ended: other code of this process has closed "
                "its descriptors (os.closerange()?), and no update can come. Connect a new scheme"
            )

        self.before_next_read = refuse

    def note_overlap(self) -> None:
        """Report an overlap if this thread reads: another of its tasks is about to read."""
        if self._open.get(threading.get_ident()):
            self._on_overlap()

    @never_traced
    def enter(self, read: _Read = None, *, computes: bool = True) -> None:
        """Begin a read.

        The outermost read of a thread waits for an apply in progress. Outside an event loop, it
        also lets an update go first that waits for other readers.

        Args:
            read: The frame that lives as long as the read, if an exception could end the read
                without :meth:`leave`. If :meth:`leave` is certain, the task that reads, if any.
            computes: True if the model computes during the read, and is not only copied.
        """
        thread = threading.get_ident()
        tried: int | None = None
        while True:
            with self._lock:
                words = self.words
                if (
                    self._open
                    or self._pending
                    or self._claims
                    or (words is not None and words[0] != self.seen)
                    or self._applying is not None
                    or self.check is not None
                    or self.before_next_read is not None
                ):
                    run_before = self._begin_slowly(thread, read, computes, tried)
                else:
                    # Nearly every read finds nothing to do, and no other read.
                    self._met_since, run_before = 0.0, None
                    self._open[thread] = [read]
                if run_before is None:
                    if computes:
                        if not self.has_computed:
                            self._note_compute()
                        # The held version is noted at the beginning: it stays until the read ends,
                        # and may change then.
                        versions = self.read_versions
                        if not CURRENT_TASKS:
                            versions.of_thread.held = self.held
                        else:
                            # Quick if the same task reads the same version again.
                            before, loop, last, held = versions.last_task
                            is_same = last() is CURRENT_TASKS.get(loop(), versions)
                            if not is_same or held is not self.held or before != thread:
                                versions.note(thread, self.held)
                    return
            # An apply handles no word while there is no model: then the read begins without it.
            tried = self.seen if run_before == self._run else None
            run_before()

    def _begin_slowly(
        self, thread: int, read: _Read, computes: bool, tried: int | None
    ) -> Callable[[], object] | None:
        """Begin a read beside others, or for which an update may wait. Runs under the lock.

        Args:
            thread: This thread.
            read: As for :meth:`enter`.
            computes: As for :meth:`enter`.
            tried: The value of :attr:`seen` before this read ran the apply just now; ``None`` if it
                has not. As long as that is the value, the apply cannot handle the word.

        Returns:
            The function that applies an update, or waits, and has to run first, without the lock;
            ``None`` if the read has begun.
        """
        reads = self._open.get(thread)
        if reads:
            reads = self._drop_ended(thread)
        elif self.words is not None and self._open:
            self._sweep()
        pause = 0.0 if reads else self._pause_before(thread, read)
        if pause > 0:
            return functools.partial(self._new_waiter().acquire, timeout=pause)
        idle = not self._open and self._applying is None
        has_news = self._pending or (self.has_news and self.seen != tried)
        if idle and has_news and not _in_functional_call():
            # The frame of enter(), which runs the apply, tells whether that was interrupted.
            self._begin(sys._getframe(1), at_read=True)
            return self._run
        self._check_outermost(thread, computes)
        if self.before_next_read is not None:
            call, self.before_next_read = self.before_next_read, None
            call()
        if self.words is not None and not reads and self._open:
            self._on_overlap()
        self._open.setdefault(thread, []).append(read)
        return None

    def _check_outermost(self, thread: int, computes: bool) -> None:
        """Raise what :attr:`check` raises; forget since when an update waits, if none does."""
        if self.check is not None and computes:
            # The blocks of other tasks of this thread say nothing about this read.
            if not (self._is_inside(thread) or self.is_open_around):
                self.check()
        if not (self._pending or self._claims or self._open):
            self._met_since = 0.0

    @never_traced
    def leave(
        self, read: _Read = None, *, thread: int | None = None, computes: bool = True
    ) -> None:
        """End a read of a thread, by default of this one; apply the update that waited for it.

        Args:
            read: The argument that :meth:`enter` got.
            thread: The thread that entered the read.
            computes: As for :meth:`enter`: spans count only reads that compute.
        """
        thread = threading.get_ident() if thread is None else thread
        with self._lock:
            reads, applies, words = self._open.get(thread), False, self.words
            # Nearly every read is the only one of its thread.
            if reads and len(reads) == 1 and reads[0] is read:
                del self._open[thread]
            else:
                self._end_read(thread, read)
            if (
                computes
                and self.read_versions.runs is not None
                and reads
                and not self._is_inside(thread)
            ):
                # The read is counted before a newer version is applied.
                self.read_versions.count(*self.held)
            if not self._open and self._applying is None:
                if self._pending or (words is not None and words[0] != self.seen):
                    # A transform of torch.func may go on with the weights that this forward used.
                    if _is_plain():
                        self._begin(sys._getframe(), at_read=True)
                        applies = True
            if self._waiters:
                self._wake()
        # _begin() has claimed the apply, which holds back reads: it runs without the lock.
        if applies:
            self._run()

    def _note_compute(self) -> None:
        """Note that the model computes with its own weights, unless torch does something else."""
        if _is_plain():
            self.has_computed = True
            if self.on_compute is not None:
                self.on_compute()

    @never_traced
    def take(self) -> None:
        """Have the published version applied, as by a read that begins."""
        frame = sys._getframe()
        try:
            self.enter(frame, computes=False)
            self.leave(frame, computes=False)
        finally:
            # A frame with a reference to itself would keep the variables of all callers.
            del frame

    def end_automatic(self) -> None:
        """End the automatic reads of this thread, which is about to wait for an update."""
        for read in self._open.get(threading.get_ident(), [])[::-1]:
            if read is not None and is_automatic(read):
                self.leave(read)

    def _end_read(self, thread: int, read: _Read) -> None:
        """End a read of a thread, and forget those whose frames have ended without leave()."""
        num_reads = len(self._open.get(thread, ()))
        reads = self._drop_ended(thread)
        found = [index for index, each in enumerate(reads) if each is read]
        if not found and len(reads) == num_reads and isinstance(read, FrameType):
            # If the hook before a forward raised, the frame of _CALL calls the hook after it: then
            # there is no read to end. But hooks of compiled forwards may name other frames.
            if read.f_code is not _CALL and not _is_block(read):
                found = [i for i, each in enumerate(reads) if isinstance(each, FrameType)]
        if found:
            del reads[found[-1]]
        if not reads:
            self._open.pop(thread, None)

    def _is_inside(self, thread: int) -> bool:
        """Return True if a forward or a block of this task is open: spans count outer reads."""
        task = current_task()
        reads = self._open.get(thread, ())
        return any(read is task or isinstance(read, FrameType) for read in reads)

    def _pause_before(self, thread: int, read: _Read) -> float:
        """Return the seconds that an outermost read should wait now, and then look again; or 0."""
        if not (self._pending or self._claims or self._applying is not None):
            return 0.0
        self._sweep()
        if self._applying is not None and self._applying[0] != thread:
            return _LOOK_SECONDS
        # A loop must not be held up. Without open reads, and claims of calls that wait for them,
        # this read applies the update.
        if asyncio._get_running_loop() is not None or not (self._open or self._claims):
            return 0.0
        if not _is_block(read) and any(map(_is_block, chain.from_iterable(self._open.values()))):
            # The reading() block of another thread may wait for this forward: holding the forward
            # back would hold the update back. New blocks wait, so that the open blocks end.
            return 0.0
        return min(self._turn_left(), _LOOK_SECONDS)

    def _turn_left(self) -> float:
        """Return the seconds for which a new reader should let an update go first."""
        if not (self._pending or self._claims):
            return 0.0
        now = time.monotonic()
        self._met_since = self._met_since or now
        waited = now - self._met_since
        # In even turns the update goes first, in odd ones the reads; each is twice as long.
        turn = int(math.log2(waited / _FIRST_TURN_SECONDS + 1))
        ends = _FIRST_TURN_SECONDS * (2 ** (turn + 1) - 1)
        return 0.0 if turn % 2 or turn > _LAST_TURN else ends - waited

    @property
    def turn_left(self) -> float:
        """Seconds for which a new reader should let an update go first that waits for others."""
        with self._lock:
            return self._turn_left() if self._open else 0.0

    def _new_waiter(self) -> threading.Lock:
        """Return a lock that this thread cannot acquire before the guard changes."""
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        return waiter

    def _wake(self) -> None:
        """Let every thread go on that waits for a change of the guard."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.release()

    # -- reads that ended without leave() ------------------------------------------------------

    def _drop_ended(self, thread: int) -> list[_Read]:
        """Forget the reads of a thread whose frames have ended; return those that are open."""
        reads = [read for read in self._open.get(thread, ()) if not _has_ended(read)]
        if reads:
            self._open[thread] = reads
        else:
            # An interrupt may have left the list empty.
            self._open.pop(thread, None)
        return reads

    def _sweep(self) -> None:
        """Forget reads whose frames have ended; let an apply that an interrupt ended wait anew."""
        for thread in list(self._open):
            self._drop_ended(thread)
        if self._applying is not None:
            _, frame, again = self._applying
            if _has_ended(frame):
                self._applying, self._pending = None, self._pending or again

    # -- applying ------------------------------------------------------------------------------

    def submit(self, apply: Callable[[], object]) -> bool:
        """Run ``apply`` now if no thread reads, else as soon as the last reader leaves.

        A newer ``apply`` replaces one that still waits. ``apply`` must not raise; if a signal's
        handler interrupts it, it runs again, at the latest before the next read.

        Returns:
            True if it has run. If not, submit it again now and then, as readers may have ended
            without :meth:`leave`.
        """
        self.offer(apply)
        return self.apply_offered()

    def offer(self, apply: Callable[[], object]) -> None:
        """Have the next read run ``apply`` before it begins, unless it has run by then."""
        with self._lock:
            self._apply, self._pending = apply, True

    def apply_offered(self) -> bool:
        """Run the waiting apply if no thread reads; return True if none waits. On any thread."""
        with self._lock:
            if not self._pending:
                return True
            if self._open or self._applying is not None:
                self._sweep()
                if self._open or self._applying is not None:
                    return False
            self._begin(sys._getframe())
        self._run()
        return True

    def withdraw(self) -> None:
        """Take back the waiting apply, unless it runs already."""
        with self._lock:
            self._pending = False
            self._wake()

    def exclusively(self, action: Callable[[], object], *, timeout: float) -> bool:
        """Run ``action`` while no other thread reads, after waiting for the readers to leave.

        Reads that begin meanwhile let it go first for a while, as they do for an update. An update
        that came meanwhile is applied afterwards.

        Args:
            action: The function to run; may raise.
            timeout: Seconds to wait for the readers.

        Returns:
            False, without running it, if a reader stayed, or if this thread is applying already.
        """
        thread, deadline = threading.get_ident(), time.monotonic() + timeout
        with self._lock:
            self._claims += 1
        try:
            while True:
                with self._lock:
                    if self.is_free():
                        self._applying, self.at_read = (thread, sys._getframe(), False), False
                        break
                    left = deadline - time.monotonic()
                    if left <= 0 or (self._applying is not None and self._applying[0] == thread):
                        return False
                    waiter = self._new_waiter()
                waiter.acquire(timeout=min(left, _LOOK_SECONDS))
        finally:
            with self._lock:
                self._claims -= 1
                self._wake()
        try:
            action()
        finally:
            self._run(done=True)
        return True

    def between_reads(
        self, change: Callable[[], object], *, method: str, patience: float = PATIENCE_SECONDS
    ) -> None:
        """Change the model on this thread, after the reads of other threads.

        Args:
            change: The function that changes it.
            method: The method that the user called, for the error text.
            patience: Seconds to wait for the reads; on a loop, which must not be held up, none.

        Raises:
            SyncTimeout: The reads did not end.
        """
        on_loop = asyncio._get_running_loop() is not None
        if not self.exclusively(change, timeout=0.0 if on_loop else patience):
            text = f"a forward pass in another thread went on for {patience:g} s"
            if on_loop:
                text = (
                    "a forward pass is running in another thread, and an event loop must not be "
                    f"blocked until it ends: call {method}() again, or in a thread"
                )
            raise SyncTimeout(text)

    async def wait_free(self, seconds: float) -> None:
        """Wait for the reads of other threads to end, at most so long, while the loop goes on."""
        until = time.monotonic() + seconds
        with self._lock:
            self._claims += 1
        try:
            # Threads that end a read do not wake a loop.
            while not self.is_free() and time.monotonic() < until:  # noqa: ASYNC110
                await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            with self._lock:
                self._claims -= 1
                self._wake()

    @property
    def has_offer(self) -> bool:
        """True if an offered apply has not begun yet."""
        return self._pending

    @property
    def has_news(self) -> bool:
        """True if an update waits to be applied, or the word that is watched names a new one."""
        words = self.words
        return self._pending or (words is not None and words[0] != self.seen)

    @property
    def is_read(self) -> bool:
        """True if any thread reads, as far as is known."""
        return bool(self._open)

    def is_free(self) -> bool:
        """Return True if no other thread reads or applies at this moment."""
        with self._lock:
            self._sweep()
            return self._applying is None and not self._open.keys() - {threading.get_ident()}

    @property
    def reading_here(self) -> bool:
        """True if this thread is inside a read."""
        with self._lock:
            return bool(self._drop_ended(threading.get_ident()))

    @property
    def is_nested(self) -> bool:
        """True if this thread is inside a read that is inside another read."""
        return len(self._open.get(threading.get_ident(), ())) > 1

    def holds(self, task: asyncio.Task[Any] | None) -> bool:
        """Return True if this very task is inside a block of this thread."""
        return task is not None and self.num_blocks(task) > 0

    def num_blocks(self, task: asyncio.Task[Any] | None) -> int:
        """Return how many blocks of this thread a task, or code without one, is in."""
        return self._open.get(threading.get_ident(), []).count(task)

    @property
    def is_open_around(self) -> bool:
        """True inside an open block of this task, or of one that started this one inside it."""
        around = [task() for guard, task in TASKS_AROUND.get() if guard == id(self)]
        with self._lock:
            reads = [read for reads in self._open.values() for read in reads]
        return any(task is not None and task in reads for task in around)

    def note_call(self, name: str, began: float) -> None:
        """Note an automatic read that is about to begin, unless it is inside another read."""
        if not (self._open and self.reading_here):
            self._calls[threading.get_ident()] = name, began

    def calls_since(self, since: float) -> list[str]:
        """Return the names of automatic reads that have been open since before a time."""
        calls = list(self._calls.items())
        with self._lock:
            first = {thread: reads[0] for thread, reads in self._open.items() if reads}
        return [
            name
            for thread, (name, began) in calls
            if began < since and is_automatic(first.get(thread))
        ]

    def refuse_inside_read(self, method: str) -> None:
        """Raise if this thread reads, as a call inside a read cannot wait for it to end.

        Automatic reads, for which the user did not ask, are ended first and do not count.

        Raises:
            LocalProtocolError: This thread reads.
        """
        self.end_automatic()
        if self.reading_here:
            raise LocalProtocolError(
                f"{method}() was called inside a forward pass or a reading() block; call it "
                "between two of them"
            )

    def _begin(self, frame: FrameType, *, at_read: bool = False) -> None:
        """Claim the waiting apply for the method of ``frame`` to run."""
        self._met_since, self.at_read = 0.0, at_read
        self._applying = (threading.get_ident(), frame, True)
        # Last, because an interrupt may come between these statements.
        self._pending = False

    def _run(self, *, done: bool = False) -> None:
        """Run the claimed apply, unless it is ``done``; then let reads in, or run a waiting one."""
        while True:
            # Caches are cleared first, so that no view in them keeps memory that the model no
            # longer has.
            clear_caches()
            # Ctrl-C may end this anywhere: _sweep() then lets the apply run again.
            if done:
                done = False
            elif _num_modes() or _interpreter() is not None:
                with _outside_transform():
                    self._apply()
            else:
                self._apply()
            with self._lock:
                self._applying = None
                if self._waiters:
                    self._wake()
                # The frame is kept in no variable, as that would be a cycle.
                if self._pending and not self._open:
                    self._begin(sys._getframe(), at_read=self.at_read)
                    continue
                self.at_read = False
                if self.words is None and not self._pending:
                    self._apply = no_guard
                return

    def install(self, module: nn.Module, *, watch: bool = False) -> None:
        """Make the forwards of this module reads, and no longer those of the module before it.

        Args:
            module: The module.
            watch: Warn once if a part of the module computes outside every read.
        """
        self._forwards.install(module, watch=watch)

    def follow_parts(self) -> None:
        """Guard the parts that a module without a forward has by now, and no others."""
        self._forwards.follow_parts()

    def uninstall(self) -> None:
        """Stop guarding forwards. Idempotent."""
        self._forwards.uninstall()


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


def _reset_all() -> None:
    """Forget the reads of the parent, in a forked child."""
    for guard in list(_guards):
        guard.reset()


os.register_at_fork(after_in_child=_reset_all)


def _is_block(read: _Read) -> bool:
    """Return True for a block or an automatic read, which may wait for a read elsewhere."""
    return not isinstance(read, FrameType) or is_automatic(read)


def _has_ended(read: _Read) -> bool:
    """Return True if a read, or an apply, is known by a frame that no longer runs.

    Only the frame itself is asked. Walking the stack of another thread in CPython 3.11 may collect
    garbage. The other thread then runs on, and its frames may be freed while they are walked.
    """
    if not isinstance(read, FrameType):
        return False
    try:
        # This clears a frame that has ended, whose variables are no longer needed.
        read.clear()
    except RuntimeError:
        return False
    return True
