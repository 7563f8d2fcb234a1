"""The guard between a forward pass and an update: nobody ever computes on two versions.

Readers (forward passes, ``reading()`` blocks) may overlap; applying an update excludes them. An
update that arrives while nobody reads is applied at once by whoever brings it; one that arrives
during a forward is applied by the thread of that forward as soon as it ends. So nothing waits
for a busy loop, and the loop never waits for a forward.

A forward that Ctrl-C ended, or any exception under ``torch.compile``, never says that it is
over: forward hooks do not see it. Such reads are known by their frames, which have ended.

Must not import transports; it is used from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiosync.schemes._guard_forks import reset_in_children
from aiosync.schemes._guard_hooks import CALL, Hooks, never_traced
from aiosync.schemes._reading import Reading

if TYPE_CHECKING:
    from types import FrameType

    from torch import nn

__all__ = ["Guard", "Reading"]

_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 0.1
_MAX_PATIENCE_SECONDS = 5.0


def _nothing() -> None:
    return None


def _has_ended(frame: FrameType) -> bool:
    """Whether a frame has ended; the locals of one that has are forgotten."""
    try:
        frame.clear()
    except RuntimeError:  # it is being executed
        return False
    return True


class Guard:
    """Many readers or one apply. Thread-safe; a reader may enter again in its own thread.

    Readers let a waiting update go first, but only for a while: a reader that waits for the
    forward of another thread must not wait for ever.
    """

    def __init__(self) -> None:
        self._hooks = Hooks()
        self.reset()
        reset_in_children(self)

    def reset(self) -> None:
        """Forget every read; also in a forked child, where the parent's threads are not."""
        # Re-entrant: a destructor or a signal handler may close a scheme inside any call.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._sleepers = 0  # threads that wait on _changed
        # Open reads of each thread: the frame of a forward, or None for a reading() block.
        self._open: dict[int, list[FrameType | None]] = {}
        self.tasks: dict[int, list[asyncio.Task[Any]]] = {}  # those in reading() blocks
        # Thread and frame that apply, and what they took from _pending.
        self._applying: tuple[int, FrameType, Callable[[], None] | None] | None = None
        self._pending: Callable[[], None] | None = None
        self._claims = 0  # calls of exclusively() that wait for the readers
        self._patience = _PATIENCE_SECONDS
        self._patient_until = 0.0  # 0: nothing waits for readers
        self._watchers: list[Callable[[], None]] = []
        self.at_read: bool = False  # what is applied now is applied by a read that begins or ends
        self._held_until = 0.0
        # Called under the lock when the next outermost read starts, before it sees anything.
        self.before_next_read: Callable[[], None] | None = None
        self._words: memoryview | None = None
        self._on_word: Callable[[], None] = _nothing
        self._on_overlap: Callable[[], None] = _nothing
        self.seen: int = 0  # the word that was dealt with

    # -- a word that others write --------------------------------------------------------------

    def watch_word(
        self, words: memoryview, on_word: Callable[[], None], on_overlap: Callable[[], None]
    ) -> None:
        """Look at a word whenever an outermost read begins or ends while no other is open.

        Args:
            words: The first of these is the word.
            on_word: Runs, as what :meth:`submit` is given does, if it is not :attr:`seen`; what
                it raises ends the read that is about to begin.
            on_overlap: Called when reads overlap, which then all use what the first one has.
        """
        with self._lock:
            self._on_word, self._on_overlap, self._words = on_word, on_overlap, words

    def ignore_word(self) -> None:
        """Do not look at a word any more. Idempotent."""
        with self._lock:
            self._words, self._on_word, self._on_overlap = None, _nothing, _nothing

    def note_overlap(self) -> None:
        """Another task of this thread is about to begin a read while one of them is in one."""
        if self._open.get(threading.get_ident()):
            self._on_overlap()

    # -- readers -------------------------------------------------------------------------------

    @never_traced
    def enter(self, frame: FrameType | None = None) -> None:
        """Start reading.

        The outermost read of a thread waits for an apply in progress and, outside an event
        loop, lets an update go first that waits for other readers.

        Args:
            frame: The frame that lives as long as the read, if an exception could end the read
                without :meth:`leave`; ``None`` when :meth:`leave` is certain.
        """
        thread = threading.get_ident()
        while True:
            with self._lock:
                reads = self._open.get(thread)
                if reads:
                    self._drop_dead(thread)
                    reads = self._open.get(thread)
                elif self._words is not None and self._open:
                    self._sweep()
                wanted = self._pending is not None or self._claims > 0 or self._held_until
                if not reads and (wanted or self._applying is not None):
                    if self._applying is not None:  # maybe cut short, also in this thread
                        self._sweep()
                    self._wait_for_turn(thread, forward=frame is not None)
                todo, words = None, self._words
                if not self._open and self._applying is None:
                    if self._pending is not None or (words and words[0] != self.seen):
                        todo = self._begin(sys._getframe())
                    else:
                        self._patient_until = 0.0
                if todo is None:
                    if self.before_next_read is not None:
                        call, self.before_next_read = self.before_next_read, None
                        call()
                    if self._words is not None and not reads and self._open:
                        self._on_overlap()
                    self._open.setdefault(thread, []).append(frame)
                    return
            self._run(todo, at_read=True)

    @never_traced
    def leave(self, frame: FrameType | None = None, *, thread: int | None = None) -> None:
        """End a read of a thread, this one by default; applies what waited for it.

        Args:
            frame: What :meth:`enter` got; ``None`` ends the newest block.
            thread: Where it was entered.
        """
        thread = threading.get_ident() if thread is None else thread
        with self._lock:
            reads, todo, words = self._open.get(thread), None, self._words
            if reads and len(reads) == 1 and reads[0] is frame:
                del self._open[thread]
            else:
                self._end_read(thread, frame)
            if not self._open and self._applying is None:
                if self._pending is not None or (words and words[0] != self.seen):
                    todo = self._begin(sys._getframe())
                else:
                    self._patient_until = 0.0
            if self._sleepers:
                self._changed.notify_all()
        if todo is not None:
            self._run(todo, at_read=True)

    def _end_read(self, thread: int, frame: FrameType | None) -> None:
        reads = self._open.get(thread, [])
        for index in range(len(reads) - 1, -1, -1):
            if reads[index] is frame:
                del reads[index]
                break
        else:
            # torch calls the hook after a forward also where the one before it raised, and then
            # there is no read to end; but compiled ones may name other frames.
            num_reads = len(reads)
            self._drop_dead(thread)
            reads = self._open.get(thread, [])
            if frame is not None and len(reads) == num_reads and frame.f_code is not CALL:
                for index in range(len(reads) - 1, -1, -1):
                    if reads[index] is not None:
                        del reads[index]
                        break
        if not reads:
            self._open.pop(thread, None)

    def _wait_for_turn(self, thread: int, *, forward: bool) -> None:
        in_loop = asyncio._get_running_loop() is not None
        while True:
            # The forward may be one that a reading() block of another thread waits for: holding
            # it back would hold the update back. New blocks wait, so that those there are end.
            polite = not in_loop and not (forward and self._has_block)
            if self._applying is not None and self._applying[0] != thread:
                self._sleep(_LOOK_SECONDS)
            elif polite and (pause := self._patience_left()) > 0:
                self._sleep(min(pause, _LOOK_SECONDS))
            else:
                return
            self._sweep()

    @property
    def _has_block(self) -> bool:
        """Whether a thread is inside a reading() block."""
        return any(None in reads for reads in self._open.values())

    @property
    def _wanted(self) -> bool:
        return self._pending is not None or self._claims > 0

    def _patience_left(self) -> float:
        """Seconds that a new reader should let an update go first that waits for old readers."""
        now = time.monotonic()
        if self._held_until > now:
            return self._held_until - now
        self._held_until = 0.0
        if not self._wanted or not self._open:
            return 0.0
        if now >= self._patient_until + 4 * self._patience:
            self._patience = min(2 * self._patience, _MAX_PATIENCE_SECONDS)
            self._patient_until = now + self._patience
        return self._patient_until - now

    def _want(self) -> None:
        if not self._patient_until:
            self._patience = _PATIENCE_SECONDS
            self._patient_until = time.monotonic() + self._patience

    def _sleep(self, seconds: float) -> None:
        self._sleepers += 1
        try:
            self._changed.wait(seconds)
        finally:
            self._sleepers -= 1

    # -- reads that ended without leave() ------------------------------------------------------

    def _drop_dead(self, thread: int) -> None:
        """Forget reads of a thread whose frames have ended."""
        reads = self._open.get(thread, ())
        kept = [frame for frame in reads if frame is None or not _has_ended(frame)]
        if kept:
            self._open[thread] = kept
        else:
            self._open.pop(thread, None)

    def _sweep(self) -> None:
        """Forget every read and apply whose frame has ended."""
        for thread in list(self._open):
            self._drop_dead(thread)
        if self._applying is not None:
            _, frame, todo = self._applying
            if _has_ended(frame):
                self._applying, self._pending = None, self._pending or todo

    # -- applying ------------------------------------------------------------------------------

    def submit(self, apply: Callable[[], None]) -> bool:
        """Run ``apply`` now if nobody reads, else as soon as the last reader leaves.

        A newer ``apply`` replaces one that still waits. ``apply`` must not raise; one that
        a signal's handler interrupts runs again, at the latest before the next read.

        Returns:
            Whether it has run. If not, call :meth:`retry` now and then.
        """
        with self._lock:
            if self._open or self._applying is not None or self._pending is not None:
                self._pending = apply
                busy = True
            else:
                self._patient_until = 0.0
                self._applying = (threading.get_ident(), sys._getframe(), apply)
                self.at_read = busy = False
        if busy:
            return not self.retry()
        # Ctrl-C may end this anywhere: _sweep() then puts back what was not applied.
        apply()
        more = self._end_apply(sys._getframe())
        if more is not None:
            self._run(more)
        return True

    def retry(self) -> bool:
        """Run what waits if the readers that it waited for have ended without a word.

        Returns:
            Whether it still waits, or is being applied by another thread.
        """
        with self._lock:
            if self._pending is None and self._applying is None:
                return False
            if self._open or self._applying is not None:
                self._sweep()
            if self._open or self._applying is not None:
                self._want()
                return True
            todo = self._begin(sys._getframe())
        if todo is not None:
            self._run(todo)
        return False

    def put_back(self, apply: Callable[[], None]) -> None:
        """Have this run before the next read: it was cut short, and nothing waits in its place."""
        with self._lock:
            if self._pending is None:
                self._pending = apply

    def withdraw(self) -> bool:
        """Take back what waits; False when nothing waited, or it is being applied."""
        with self._lock:
            waited, self._pending = self._pending is not None, None
            self._changed.notify_all()
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher()
        return waited

    def exclusively(self, action: Callable[[], None], *, timeout: float) -> bool:
        """Run ``action`` while no other thread reads; waits for the readers to leave.

        Args:
            action: What to run; may raise.
            timeout: Seconds to wait for the readers.

        Returns:
            False, without running it, when a reader stayed.
        """
        thread = threading.get_ident()
        deadline = time.monotonic() + timeout
        with self._lock:
            self._claims += 1
            try:
                while self._applying is not None or self._open.keys() - {thread}:
                    self._want()
                    self._sweep()
                    if self._applying is None and not self._open.keys() - {thread}:
                        break
                    left = deadline - time.monotonic()
                    if left <= 0 or (self._applying is not None and self._applying[0] == thread):
                        return False
                    self._sleep(min(left, _LOOK_SECONDS))
            finally:
                self._claims -= 1
                if self._sleepers:
                    self._changed.notify_all()
            self._applying = (thread, sys._getframe(), None)
            self.at_read = False
        try:
            action()
        finally:
            more = self._end_apply(sys._getframe())
            if more is not None:
                self._run(more)
        return True

    def hold(self, seconds: float) -> None:
        """Have new reads outside event loops wait for so long, or until :meth:`let_go`."""
        with self._lock:
            self._held_until = time.monotonic() + seconds

    def let_go(self) -> None:
        """Let those read that :meth:`hold` keeps waiting."""
        with self._lock:
            self._held_until = 0.0
            self._changed.notify_all()
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher()

    def is_free(self) -> bool:
        """Whether no other thread reads or applies at this moment."""
        with self._lock:
            self._sweep()
            return self._applying is None and not self._open.keys() - {threading.get_ident()}

    @property
    def reading_here(self) -> bool:
        """Whether this thread is inside a read."""
        thread = threading.get_ident()
        with self._lock:
            if thread in self._open:
                self._drop_dead(thread)
            return thread in self._open

    def watch(self, callback: Callable[[], None]) -> float:
        """Call back, from any thread, once what waits for readers was applied or withdrawn.

        Returns:
            Seconds for which a new reader should let that update go first; 0, without ever
            calling back, when there is no need.
        """
        with self._lock:
            patience = self._patience_left()
            if patience > 0:
                self._watchers.append(callback)
            return max(patience, 0.0)

    def unwatch(self, callback: Callable[[], None]) -> None:
        """Forget a callback of :meth:`watch`. Idempotent."""
        with self._lock, contextlib.suppress(ValueError):  # it was called meanwhile
            self._watchers.remove(callback)

    def _begin(self, frame: FrameType) -> Callable[[], None] | None:
        """Claim what waits, for the method of ``frame`` to run."""
        todo = self._pending
        self._patient_until = 0.0
        if todo is None and self._words is not None and self._words[0] != self.seen:
            todo = self._on_word
        if todo is not None:
            self._applying = (threading.get_ident(), frame, todo)
            self._pending = None
        return todo

    def _run(self, todo: Callable[[], None], *, at_read: bool = False) -> None:
        # Ctrl-C may end this anywhere: _sweep() then puts back what was not applied.
        more: Callable[[], None] | None = todo
        while more is not None:
            self.at_read = at_read
            more()
            self.at_read = False
            more = self._end_apply(sys._getframe())

    def _end_apply(self, frame: FrameType) -> Callable[[], None] | None:
        with self._lock:
            self._applying = None
            more = None
            if self._pending is not None and not self._open:
                more = self._begin(frame)
            watchers = self._watchers
            if watchers:
                self._watchers = []
            if self._sleepers:
                self._changed.notify_all()
        for watcher in watchers:
            watcher()
        return more

    # -- forward hooks -------------------------------------------------------------------------

    def install(self, module: nn.Module) -> None:
        """Make every forward pass of ``module`` a read, through its forward hooks.

        Without a forward of its own, as a ``ModuleDict`` is, those of its parts.
        """
        self._hooks.install(self, module)

    def uninstall(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()
