"""The guard between reads and updates: nobody ever computes on two versions.

Readers (forward passes, ``reading()`` blocks) share it; applying an update excludes them. An
update that arrives while nobody reads is applied at once by whoever brings it; one that arrives
during a forward is applied by the thread of that forward as soon as it ends. So nothing waits
for a busy loop, and the loop never waits for a forward.

A forward that Ctrl-C ended, or any exception under ``torch.compile``, never says that it is
over: forward hooks do not see it. Such reads are known by their frames, which run no more.

Whole requests of a server have a gate: ``serving.gate``. Must not import transports; used from any
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import nn

from aiosync._tasks import current_task
from aiosync.errors import LocalProtocolError, SyncTimeout
from aiosync.spans import VersionSpan, epoch_text

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = [
    "PATIENCE_SECONDS",
    "Guard",
    "itself",
    "never_traced",
    "why_unguarded",
]

PATIENCE_SECONDS = 30.0
"""How long a call in one thread waits for another one."""

_LOOK_SECONDS = 0.05
_PAUSE_SECONDS = 0.001
# A read that begins lets an update go first that waits for other reads: for so long at first, then
# not for three times as long, and so on; the last turn takes 64 times as long.
_FIRST_TURN_SECONDS = 0.08
_LAST_TURN = 6
_MOST_LOOKS = 1000
_MOST_RUNS = 256

# What makes torch operations of a thread do something else than they say: dispatch modes (tracers,
# fake tensors) and transforms of torch.func. Private API; without it torch refuses updates there.
_num_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_interpreter: Callable[[], Any] = getattr(
    torch._C._functorch, "peek_interpreter_stack", lambda: None
)

_FUNCTIONAL_CALL = torch.nn.utils.stateless._functional_call.__code__

_F = TypeVar("_F", bound=Callable[..., Any])
_Read: TypeAlias = "FrameType | asyncio.Task[Any] | None"
_Where: TypeAlias = "asyncio.Task[object] | threading.Thread"


def _is_plain() -> bool:
    """Return True if the operations of this thread do what they say, with a model's own tensors."""
    return not _num_modes() and _interpreter() is None and not _in_functional_call()


def _in_functional_call() -> bool:
    """Return True if a ``functional_call()`` of this thread has put other tensors into modules."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _FUNCTIONAL_CALL:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def _outside_transform() -> Iterator[None]:
    """Have torch operations of this thread do what they say meanwhile."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def never_traced(function: _F) -> _F:
    """Have ``torch.compile`` call a function instead of tracing into it.

    ``torch.compiler.disable`` does the same, but importing it takes seconds. Where torch keeps
    this elsewhere, forwards of a compiled module are guarded all the same, with warnings.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # read by torch.compile
    with contextlib.suppress(AttributeError):
        frames = torch._C._dynamo.eval_frame
        if hasattr(frames, "skip_code"):
            frames.skip_code(function.__code__)
        else:
            skip = frames._FrameAction.SKIP
            strategy = frames._FrameExecStrategy(skip, skip)
            frames.set_code_exec_strategy(function.__code__, strategy)
    return function


class Guard:
    """Many readers or one apply. Thread-safe; a reader may enter again in its own thread.

    Attributes:
        at_read: What is applied now is applied by a read that begins or ends.
        words: The first of these is the word that reads look at, see :meth:`watch_word`.
        seen: The word that was dealt with.
        before_next_read: Called under the lock when the next read starts, before it sees anything.
        held: Epoch and version of what is read, (0, 0) for none: what applies sets it. Does not
            change while anybody reads.
        has_computed: A read that computes has begun since this was set to false.
        on_compute: Called under the lock by the read that sets :attr:`has_computed`, in its thread.
    """

    def __init__(self) -> None:
        self._module: weakref.ref[nn.Module] | None = None
        self._parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those that have its hooks
        self._watch: _Watch | None = None
        self.reset()
        _guards.add(self)

    def reset(self) -> None:
        """Forget every read; also in a forked child, where the parent's threads are not."""
        # Re-entrant: a destructor or a signal handler may close a scheme inside any call.
        self._lock = threading.RLock()
        # Of threads that wait until something has changed. Not a condition: while one of those
        # waits, Ctrl-C may come between giving its lock back and taking it again.
        self._waiters: list[threading.Lock] = []
        # Open reads of each thread: the frame of a forward; of a block its task, or None.
        self._open: dict[int, list[_Read]] = {}
        # Thread and frame that apply, and whether to apply again if they are interrupted.
        self._applying: tuple[int, FrameType, bool] | None = None
        self._pending = False
        self._claims = 0  # calls that wait for the readers
        self._waits_since = 0.0  # when a reader found out that something waits; 0: none has
        # Of what waits and of a word. No longer than it takes: the hooks of a model know the guard,
        # and would keep whoever applies.
        self._apply: Callable[[], object] = _no_guard
        self.at_read: bool = False
        self.before_next_read: Callable[[], object] | None = None
        self.words: memoryview | None = None
        self._on_overlap: Callable[[], object] = _no_guard
        self.seen: int = 0
        self.held: tuple[int, int] = (0, 0)
        self.has_computed: bool = False
        self.on_compute: Callable[[], object] | None = None
        # Epoch and runs of (version, reads) of each thread or task in which reads ended, until it
        # takes them; ``None`` until somebody has asked for spans.
        self._runs: weakref.WeakKeyDictionary[_Where, tuple[int, list[tuple[int, int]]]] | None
        self._runs = None

    # -- readers -------------------------------------------------------------------------------

    def watch_word(
        self, words: memoryview, apply: Callable[[], object], on_overlap: Callable[[], object]
    ) -> None:
        """Look at a word whenever an outermost read begins or ends while no other is open.

        Args:
            words: The first of these is the word, which others write.
            apply: Runs, as what :meth:`submit` is given does, if the word is not :attr:`seen`; what
                it raises ends the read that is about to begin.
            on_overlap: Called when reads overlap, which then all use what the first one has.
        """
        with self._lock:
            self._apply, self._on_overlap, self.words = apply, on_overlap, words

    def ignore_word(self) -> None:
        """Do not look at a word any more. Idempotent."""
        with self._lock:
            self.words, self._on_overlap = None, _no_guard

    def note_overlap(self) -> None:
        """Another task of this thread is about to begin a read while one of them is in one."""
        if self._open.get(threading.get_ident()):
            self._on_overlap()

    @never_traced
    def enter(self, read: _Read = None, *, computes: bool = True) -> None:
        """Start reading.

        The outermost read of a thread waits for an apply in progress and, outside an event
        loop, lets an update go first that waits for other readers.

        Args:
            read: The frame that lives as long as the read, if an exception could end the read
                without :meth:`leave`. Where that is certain, the task that reads, if any.
            computes: The model computes meanwhile, and is not only copied.
        """
        thread = threading.get_ident()
        while True:
            pause = 0.0
            with self._lock:
                reads, words = self._open.get(thread), self.words
                if reads:
                    reads = self._drop_ended(thread)
                elif words is not None and self._open:
                    self._sweep()
                waits = self._pending or self._claims
                if not reads and (waits or self._applying is not None):
                    pause = self._pause_before(thread, forward=isinstance(read, FrameType))
                is_news = self._pending or (words is not None and words[0] != self.seen)
                is_news = is_news and not _in_functional_call()
                if pause > 0:
                    waiter = self._new_waiter()
                elif is_news and not self._open and self._applying is None:
                    waiter = None
                    self._begin(sys._getframe(), at_read=True)
                else:
                    if not (waits or self._open):
                        self._waits_since = 0.0
                    if self.before_next_read is not None:
                        call, self.before_next_read = self.before_next_read, None
                        call()
                    if words is not None and not reads and self._open:
                        self._on_overlap()
                    self._open.setdefault(thread, []).append(read)
                    if computes and not self.has_computed:
                        self._note_compute()
                    return
            if waiter is None:
                self._run()
            else:
                waiter.acquire(timeout=pause)

    @never_traced
    def leave(
        self, read: _Read = None, *, thread: int | None = None, computes: bool = True
    ) -> None:
        """End a read of a thread, this one by default; applies what waited for it.

        Args:
            read: What :meth:`enter` got.
            thread: Where it was entered.
            computes: As for :meth:`enter`: other reads are in no span.
        """
        thread = threading.get_ident() if thread is None else thread
        with self._lock:
            reads, applies, words = self._open.get(thread), False, self.words
            if reads and len(reads) == 1 and reads[0] is read:
                del self._open[thread]
            else:
                self._end_read(thread, read)
            if computes and self._runs is not None and reads and not self._is_inside(thread):
                self._count_read(*self.held)  # before something newer is applied
            if not self._open and self._applying is None:
                if self._pending or (words is not None and words[0] != self.seen):
                    # A transform may go on with what this forward computed with.
                    if _is_plain():
                        self._begin(sys._getframe(), at_read=True)
                        applies = True
            if self._waiters:
                self._wake()
        if applies:
            self._run()

    def _note_compute(self) -> None:
        """Tell that the model computes with its own weights, unless torch does something else."""
        if _is_plain():
            self.has_computed = True
            if self.on_compute is not None:
                self.on_compute()

    @never_traced
    def take(self) -> None:
        """Have what is published applied, as a read that begins does."""
        frame = sys._getframe()
        self.enter(frame, computes=False)
        self.leave(frame, computes=False)

    def _end_read(self, thread: int, read: _Read) -> None:
        num_reads = len(self._open.get(thread, ()))
        reads = self._drop_ended(thread)
        found = [index for index, each in enumerate(reads) if each is read]
        if not found and len(reads) == num_reads and isinstance(read, FrameType):
            # torch calls the hook after a forward also where the one before it raised, and then
            # there is no read to end; but compiled ones may name other frames.
            if read.f_code is not _CALL:
                found = [i for i, each in enumerate(reads) if isinstance(each, FrameType)]
        if found:
            del reads[found[-1]]
        if not reads:
            self._open.pop(thread, None)

    def _is_inside(self, thread: int) -> bool:
        """Whether what runs in this thread is inside of a forward, or of a block of its task."""
        task = current_task()
        reads = self._open.get(thread, ())
        return any(read is task or isinstance(read, FrameType) for read in reads)

    def _count_read(self, epoch: int, version: int) -> None:
        """A read of this thread or task has ended, which had this version.

        Memory is bounded: where nobody asks, the two oldest of many runs become one of the older
        version. What was read in another epoch before counts as version 0, which is no version.
        """
        assert self._runs is not None
        here = current_task() or threading.current_thread()
        known, runs = self._runs.get(here, (epoch, []))
        if known != epoch:
            runs[:] = [(0, sum(count for _, count in runs))]
        count = runs.pop()[1] if runs and runs[-1][0] == version else 0
        runs.append((version, count + 1))
        if len(runs) > _MOST_RUNS:
            runs[:2] = [(min(runs[0][0], runs[1][0]), runs[0][1] + runs[1][1])]
        self._runs[here] = epoch, runs

    def span(self) -> VersionSpan | None:
        """The versions of the reads that ended here since the last call; counts from the first."""
        with self._lock:
            if self._runs is None:
                self._runs = weakref.WeakKeyDictionary()
            here = current_task() or threading.current_thread()
            epoch, runs = self._runs.pop(here, (0, []))
        return VersionSpan.from_runs(runs, epoch_text(epoch)) if runs else None

    def _pause_before(self, thread: int, *, forward: bool) -> float:
        """Seconds for which an outermost read should wait now, and look again then; 0 for none."""
        self._sweep()
        if self._applying is not None and self._applying[0] != thread:
            return _LOOK_SECONDS
        if asyncio._get_running_loop() is not None or not (self._open or self._claims):
            return 0.0
        if forward and any(
            not isinstance(read, FrameType) for reads in self._open.values() for read in reads
        ):
            # It may be what the reading() block of another thread waits for: holding it back would
            # hold the update back. New blocks wait, so that those there are end.
            return 0.0
        return min(self._turn_left(), _LOOK_SECONDS)

    def _turn_left(self) -> float:
        """Seconds that a new reader should let an update go first."""
        if not (self._pending or self._claims):
            return 0.0
        now = time.monotonic()
        self._waits_since = self._waits_since or now
        waited = now - self._waits_since
        turn = int(math.log2(waited / _FIRST_TURN_SECONDS + 1))
        ends = _FIRST_TURN_SECONDS * (2 ** (turn + 1) - 1)
        return 0.0 if turn % 2 or turn > _LAST_TURN else ends - waited

    @property
    def turn_left(self) -> float:
        """Seconds for which a new reader should let an update go first that waits for others."""
        with self._lock:
            return self._turn_left() if self._open else 0.0

    def _new_waiter(self) -> threading.Lock:
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        return waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.release()

    # -- reads that ended without leave() ------------------------------------------------------

    def _drop_ended(self, thread: int) -> list[_Read]:
        """The reads of a thread, without those whose frames have ended."""
        reads = [read for read in self._open.get(thread, ()) if not _has_ended(read)]
        if reads:
            self._open[thread] = reads
        else:  # maybe an interrupt left it empty
            self._open.pop(thread, None)
        return reads

    def _sweep(self) -> None:
        """Forget every read and apply whose frame has ended."""
        for thread in list(self._open):
            self._drop_ended(thread)
        if self._applying is not None:
            _, frame, again = self._applying
            if _has_ended(frame):
                self._applying, self._pending = None, self._pending or again

    # -- applying ------------------------------------------------------------------------------

    def submit(self, apply: Callable[[], object]) -> bool:
        """Run ``apply`` now if nobody reads, else as soon as the last reader leaves.

        A newer ``apply`` replaces one that still waits. ``apply`` must not raise; one that
        a signal's handler interrupts runs again, at the latest before the next read.

        Returns:
            Whether it has run. If not, submit it again now and then, as readers may have ended
            without a word.
        """
        with self._lock:
            self._apply, self._pending = apply, True
            if self._open or self._applying is not None:
                self._sweep()
                if self._open or self._applying is not None:
                    return False
            self._begin(sys._getframe())
        self._run()
        return True

    def withdraw(self) -> None:
        """Take back what waits, unless it is being applied already."""
        with self._lock:
            self._pending = False
            self._wake()

    def exclusively(self, action: Callable[[], object], *, timeout: float) -> bool:
        """Run ``action`` while no other thread reads; waits for the readers to leave.

        Args:
            action: What to run; may raise.
            timeout: Seconds to wait for the readers.

        Returns:
            False, without running it, when a reader stayed.
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
        """Change the model on this thread, after the reads of others.

        Args:
            change: What to do.
            method: What the user called.
            patience: Seconds to wait for them; on a loop, which is not held, none.

        Raises:
            SyncTimeout: They did not end.
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
        """Let the reads of other threads end, for so long at most, while the loop goes on."""
        until = time.monotonic() + seconds
        with self._lock:
            self._claims += 1
        try:
            # Threads tell no loop.
            while not self.is_free() and time.monotonic() < until:  # noqa: ASYNC110
                await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            with self._lock:
                self._claims -= 1
                self._wake()

    @property
    def is_read(self) -> bool:
        """Whether any thread reads, as far as is known."""
        return bool(self._open)

    def is_free(self) -> bool:
        """Whether no other thread reads or applies at this moment."""
        with self._lock:
            self._sweep()
            return self._applying is None and not self._open.keys() - {threading.get_ident()}

    @property
    def reading_here(self) -> bool:
        """Whether this thread is inside a read."""
        with self._lock:
            return bool(self._drop_ended(threading.get_ident()))

    def holds(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether this very task is inside a block of this thread."""
        return task is not None and task in self._open.get(threading.get_ident(), ())

    def refuse_inside_read(self, method: str) -> None:
        """Raise if this thread reads, which no call from it can wait for.

        Raises:
            LocalProtocolError: It does.
        """
        if self.reading_here:
            raise LocalProtocolError(
                f"{method}() was called inside a forward pass or a reading() block; call it "
                "between two of them"
            )

    def _begin(self, frame: FrameType, *, at_read: bool = False) -> None:
        """Claim what is to be applied, for the method of ``frame`` to run."""
        self._waits_since, self.at_read = 0.0, at_read
        self._applying = (threading.get_ident(), frame, True)
        self._pending = False  # an interrupt may come in between: so no earlier

    def _run(self, *, done: bool = False) -> None:
        """Apply what was claimed, unless that is done, and what waits then."""
        while True:
            # Ctrl-C may end this anywhere: _sweep() then has it applied again.
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
                if self._pending and not self._open:  # in no variable: it would be a cycle
                    self._begin(sys._getframe(), at_read=self.at_read)
                    continue
                self.at_read = False
                if self.words is None and not self._pending:
                    self._apply = _no_guard
                return

    # -- forward hooks -------------------------------------------------------------------------

    def install(self, module: nn.Module, *, watch: bool = False) -> None:
        """Make every forward pass of ``module`` a read, through its forward hooks.

        Without a forward of its own, as a ``ModuleDict`` is, those of its parts.

        Args:
            module: The module.
            watch: Warn once where a child of it computes outside of every read.
        """
        if self._module is not None and self._module() is module:
            return
        self.uninstall()
        parts = {part: _hooks.setdefault(part, _Hooks()) for part in _entrances(module)}
        if "torch._dynamo" in sys.modules and not all(hooks.handles for hooks in parts.values()):
            # What was compiled before takes for granted that hooks never change.
            torch.compiler.reset()
        self._parts.update(parts)
        for part, hooks in parts.items():
            hooks.guard(part, (*hooks.guards, self))
        self._module = weakref.ref(module)  # now: whoever was interrupted has to begin anew
        if watch:
            children = {child for part in parts for child in part.children()}
            self._watch = _Watch(self, type(module).__name__, children - parts.keys())

    def uninstall(self) -> None:
        """Do not guard it any more. Idempotent."""
        for part in list(self._parts):
            hooks = _hooks[part]
            hooks.guard(part, tuple(each for each in hooks.guards if each is not self))
        if self._watch is not None:
            self._watch.end()
        self._parts.clear()
        self._module = self._watch = None


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


def _reset_all() -> None:
    for guard in list(_guards):
        guard.reset()


os.register_at_fork(after_in_child=_reset_all)


def _has_ended(read: _Read) -> bool:
    """Whether a read is known by a frame, and that one runs no more.

    Only the frame itself is asked. Whoever walks the stack of another thread in CPython 3.11 may
    collect garbage there, which lets that thread go on, and finds whatever is in its memory then.
    """
    if not isinstance(read, FrameType):
        return False
    try:
        read.clear()  # the variables of one that has ended, which nobody needs any more
    except RuntimeError:
        return False
    return True


# -- hooks ---------------------------------------------------------------------------------------

_CALL_FRAMES = frozenset({"_call_impl", "inner"})
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# Whose frame calls the hooks after a forward that raised; otherwise a frame inside it does.
_CALL = nn.Module._call_impl.__code__
_NO_FORWARD = nn.Module.forward


class _Hooks:
    """Before and after the forwards of one module: gets into guards, and out of them.

    Stays where compiled code may call it. Copies and pickles as hooks that do nothing: a copied
    module is not guarded.
    """

    def __init__(self) -> None:
        self.guards: tuple[Guard, ...] = ()
        self.handles: list[RemovableHandle] = []

    @never_traced
    def __call__(self, module: nn.Module, args: tuple[Any, ...], *output: Any) -> None:
        frame = sys._getframe(1)
        if frame.f_code.co_name not in _CALL_FRAMES:
            frame = _call_frame(frame)
        for guard in self.guards:
            if output:  # or None, after a forward that raised
                guard.leave(frame)
            else:
                guard.enter(frame)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return itself, (_no_guard,)

    def guard(self, module: nn.Module, guards: tuple[Guard, ...]) -> None:
        """Have forwards of the module, whose hooks these are, get into these guards."""
        self.guards = guards
        if guards and not self.handles:
            self.handles = [
                module.register_forward_pre_hook(self, prepend=True),
                module.register_forward_hook(self, always_call=True),
            ]
        elif not guards and "torch._dynamo" not in sys.modules:
            while self.handles:
                self.handles.pop().remove()


_hooks: weakref.WeakKeyDictionary[nn.Module, _Hooks] = weakref.WeakKeyDictionary()


@never_traced
def _call_frame(caller: FrameType) -> FrameType:
    """The frame that lives as long as the forward that a hook is called for."""
    frame: FrameType | None = caller
    while frame is not None and (
        frame.f_code.co_name not in _CALL_FRAMES or frame.f_code.co_flags & _SUSPENDS
    ):
        frame = frame.f_back
    return frame or caller


class _Watch:
    """Before the forwards of a model's children: warns once of one outside of every read.

    It looks at the first thousand, and is gone then: no hook costs as much as a tenth of the
    forward of a small model. Where something was compiled it stays and does nothing, as that would
    have to be compiled anew without it.
    """

    def __init__(self, guard: Guard, model: str, children: Iterable[nn.Module]) -> None:
        self._guard, self._model, self._left = guard, model, _MOST_LOOKS
        self._handles = [child.register_forward_pre_hook(self) for child in children]

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not self._left:
            return
        self._left -= 1
        outside = not self._guard.is_read
        if outside or not self._left:
            self.end()
        if outside:
            warnings.warn(
                f"a {type(module).__name__} of the {self._model} computed outside of its forward "
                "pass, where an update may come in between: name the method that calls it in "
                "init_on_receiver(methods=[...]), or use scheme.guarded(function) or "
                "`with scheme.reading():`",
                stacklevel=2,
            )

    def end(self) -> None:
        """Look no more."""
        self._left, dynamo = 0, sys.modules.get("torch._dynamo.utils")
        while self._handles and not (dynamo and dynamo.counters["frames"]):
            self._handles.pop().remove()

    __reduce__ = _Hooks.__reduce__


def itself(function: _F) -> _F:
    """What a pickle of something guarded calls: copies are not guarded."""
    return function


def _no_guard(*_args: object) -> None:
    """Stand-in for the hooks in copies of a guarded module. May be traced: it does nothing."""


def why_unguarded(model: object) -> str | None:
    """Why hooks would not tell of the forward passes of this; ``None`` if they do."""
    if not isinstance(model, nn.Module):
        return "has no forward pass to guard"
    scripted = torch.jit.RecursiveScriptModule  # type: ignore[attr-defined]  # public all the same
    goes_on = inspect.isgeneratorfunction, inspect.isasyncgenfunction, inspect.iscoroutinefunction
    for part in _forward_parts(model):
        if isinstance(part, scripted) or any(each(part.forward) for each in goes_on):
            return (
                f"has a forward that hooks cannot tell the end of: that of a {type(part).__name__} "
                "is scripted, a generator or a coroutine"
            )
    return None


def _forward_parts(module: nn.Module) -> list[nn.Module]:
    """The modules whose forwards are those of ``module``: itself, or its parts if it has none.

    A ``ModuleDict`` of an actor and a critic is never called, and they are.
    """
    found: dict[nn.Module, None] = {}
    waiting = [module]
    while waiting:
        each = waiting.pop()
        forward: Any = each.forward
        if getattr(forward, "__func__", forward) is _NO_FORWARD:
            waiting += each.children()
        else:
            found[each] = None
    return list(found)


def _entrances(module: nn.Module) -> list[nn.Module]:
    """Where one gets into ``module``: its own forwards, and those that ``generate()`` calls.

    That of a wrapper (PEFT, ``torch.compile``) runs that of the model inside, which calls itself
    then, and that of an encoder-decoder calls the encoder on its own.
    """
    found = dict.fromkeys(_forward_parts(module))
    for each in module.modules():
        if callable(getattr(type(each), "generate", None)):
            found[each] = None
            if getattr(getattr(each, "config", None), "is_encoder_decoder", False):
                encoder: Any = None
                with contextlib.suppress(AttributeError, NotImplementedError, TypeError):
                    encoder = each.get_encoder()  # type: ignore[operator]  # if it has one
                if isinstance(encoder, nn.Module):
                    found[encoder] = None
    return list(found)
