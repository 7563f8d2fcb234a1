"""The event loop of a simulation: virtual time, and an order of events that a seed decides.

Every simulated process has a queue of its own, in which callbacks keep the order that asyncio
promises. The seed decides which process makes the next step, in which order descriptors are
reported, and how long each step takes. Must not import torch.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import Context, ContextVar
from random import Random
from typing import Any, TypeVar, TypeVarTuple

__all__ = ["Process", "SimLoop", "SimulationError", "current_process"]

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
# One callback takes up to this time.
_STEP_SECONDS = 2e-5
# A call in a thread takes up to this time.
_THREAD_SECONDS = 2e-3

_process: ContextVar[Process] = ContextVar("aiosync_simulated_process")


class SimulationError(AssertionError):
    """Error of a simulation: a check failed, a program failed, or nothing can happen any more."""


class Process:
    """A simulated process: the tasks and callbacks that a program starts. Made by the world.

    Args:
        name: Name in the trace and in errors.
        number: Number of the process, which is its process id.

    Attributes:
        name: As given.
        number: As given.
        is_alive: False once its program has ended, or after :meth:`World.kill`.
        stopped_until: Virtual time before which it makes no step.
        most_tasks: Number of tasks that it may have at a time.
        most_sockets: Number of sockets that it may have open at a time.
        tasks: The tasks that it has started, without some of those that have ended.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.is_alive: bool = True
        self.stopped_until: float = 0.0
        self.most_tasks: int = 200
        self.most_sockets: int = 200
        self.tasks: list[asyncio.Task[Any]] = []
        # Futures of those that wait for its end.
        self.waiters: list[asyncio.Future[None]] = []
        # Callbacks that can be made now, in their order.
        self.ready: deque[asyncio.Handle] = deque()
        # Number of callbacks of this turn that are left; then it looks at its descriptors again.
        self.turn: int = 0
        # True if a descriptor may be ready.
        self.is_due: bool = False
        # Callbacks to make while a descriptor is readable, or writable, by its number.
        self.readers: dict[int, asyncio.Handle] = {}
        self.writers: dict[int, asyncio.Handle] = {}

    @property
    def unfinished(self) -> list[asyncio.Task[Any]]:
        """Tasks of this process that have not ended."""
        return [task for task in self.tasks if not task.done()]

    def __repr__(self) -> str:
        return f"<Process {self.name}: {'alive' if self.is_alive else 'ended'}>"


def current_process() -> Process:
    """Return the simulated process that runs now.

    Raises:
        SimulationError: No simulated process runs.
    """
    process = _process.get(None)
    if process is None:
        raise SimulationError("no simulated process runs here")
    return process


class _Numbered:
    """A task or future whose hash is a number that the loop counts.

    A set has its members in the order of their hashes. Those of tasks and futures are their
    addresses in memory, which differ from run to run.
    """

    _loop: SimLoop
    _number: int = 0

    def __hash__(self) -> int:
        # Most futures are never in a set, and need no number.
        self._number = self._number or next(self._loop.numbers)
        return self._number


class _Task(_Numbered, asyncio.Task[_T]):
    """A task that may be in a set."""


class _Future(_Numbered, asyncio.Future[_T]):
    """A future that may be in a set."""


class SimLoop(asyncio.BaseEventLoop):
    """Event loop of simulated processes. Time passes only in it.

    Args:
        random: Decides the order of the steps.
        horizon: Virtual time at which a simulation that has not ended counts as stuck.

    Attributes:
        now: Virtual time in seconds.
        processes: The live processes.
        running: The process that makes the present step, or made the last one.
        descriptors: The open simulated files, by number; each has an ``owner``, which is a process,
            ``is_readable`` and ``is_writable``.
        files: The open files of the system: the process that has each descriptor.
        checks: Called with the process after each of its steps.
        error: Ends the simulation after the present step.
        steps: Number of steps so far.
        digest: A number that stands for all steps and their times so far.
        numbers: Numbers in the order in which things were made.
    """

    _stopping: bool

    def __init__(self, random: Random, horizon: float) -> None:
        super().__init__()
        self.now: float = 1000.0
        self.processes: list[Process] = []
        self.descriptors: dict[int, Any] = {}
        self.files: dict[int, Process] = {}
        self.checks: list[Callable[[Process], None]] = []
        self.error: BaseException | None = None
        self.steps: int = 0
        self.digest: int = 0
        self.numbers: Iterator[int] = itertools.count(1)
        self._random = random
        self._horizon = self.now + horizon
        # Heap of calls outside of all processes, and of processes' timers: time, number, call.
        self._events: list[tuple[float, int, Callable[[], None] | asyncio.Handle]] = []
        # Process of the callbacks that no simulated process has made.
        self.running: Process = Process("outside", 0)
        self.processes.append(self.running)
        self._outside = self.running
        self.set_task_factory(self._make_task)
        # Every handle asks for this, and a class is called faster than a method: bool() is False.
        vars(self)["get_debug"] = bool

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coro: Any,
        context: Context | None = None,
        **options: Any,
    ) -> asyncio.Task[Any]:
        """Make a task, which belongs to the process in whose context it is made."""
        process = _process.get(None) if context is None else context.get(_process)
        task = _Task(coro, loop=self, context=context, **options)
        if process is not None:
            process.tasks.append(task)
            if len(process.tasks) > process.most_tasks and process.is_alive:
                process.tasks = process.unfinished
                self.limit(process, "tasks", len(process.tasks), process.most_tasks)
        return task

    def limit(self, process: Process, what: str, count: int, most: int) -> None:
        """End the simulation if a process has too many things at a time."""
        if count > most:
            text = f"{process.name} has {count} {what}: more than {most} at a time"
            self.fail(SimulationError(text))

    def files_of(self, process: Process) -> list[int]:
        """Return the descriptors of the files that a process has open."""
        return [fd for fd, owner in self.files.items() if owner is process]

    def fail(self, error: BaseException) -> None:
        """End the simulation after this step, unless an earlier error does."""
        self.error = self.error or error

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """See :meth:`asyncio.loop.call_soon`: each process has a queue of its own."""
        handle = asyncio.Handle(callback, args, self, context)
        self._enqueue(handle)
        return handle

    call_soon_threadsafe = call_soon

    def _enqueue(self, handle: Any) -> None:
        """Put a callback into the queue of its process; drop it if that has ended."""
        process = handle._context.get(_process, self._outside)
        if process.is_alive:
            process.ready.append(handle)

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """See :meth:`asyncio.loop.call_at`."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._events, (when, next(self.numbers), timer))
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        """See :meth:`asyncio.loop.create_future`."""
        return _Future(loop=self)

    def time(self) -> float:
        """Return the virtual time."""
        return self.now

    def read_clock(self) -> float:
        """Return the virtual time, which passes a little: a loop that waits for it must end."""
        self.now += 1e-7
        return self.now

    def start(self, process: Process, program: Any) -> asyncio.Task[Any]:
        """Run a coroutine as the program of a process."""
        self.processes.append(process)
        return self.call_in(process, self.create_task, program)

    def call_in(self, process: Process, call: Callable[..., _T], *args: Any) -> _T:
        """Make a call in the context of a process, to which the tasks that it starts belong."""
        context = Context()
        context.run(_process.set, process)
        return context.run(call, *args)

    # -- events outside of all processes -------------------------------------------------------

    def at(self, when: float, callback: Callable[[], None]) -> None:
        """Make a call at a virtual time, outside of all processes."""
        heapq.heappush(self._events, (when, next(self.numbers), callback))

    # -- steps ---------------------------------------------------------------------------------

    def _run_once(self) -> None:
        """Make steps until the loop is to stop: one call for each of them would take longer."""
        random = self._random.random
        while not self._stopping:
            self.now += random() * _STEP_SECONDS
            # Time passes with each step, so a process that never waits gets there, too.
            while self.now > self._horizon or not (runnable := self._runnable()):
                self._advance()
            process = runnable[0]
            if len(runnable) > 1:
                process = runnable[int(random() * len(runnable))]
            if not process.turn:
                if process.is_due:
                    self._poll(process)
                process.turn = len(process.ready)
                if not process.turn:
                    continue
            handle: Any = process.ready.popleft()
            process.turn -= 1
            if handle._cancelled:
                continue
            self.steps += 1
            self.running = process
            self.digest = hash((self.digest, process.number, self.now))
            handle._run()
            if self.error is not None:
                raise self.error
            for check in self.checks:
                check(process)

    def _runnable(self) -> list[Process]:
        """Let everything happen that is due, and return the processes that can make a step."""
        now, events = self.now, self._events
        while events and events[0][0] <= now:
            event = heapq.heappop(events)[2]
            if not isinstance(event, asyncio.Handle):
                event()
            elif not event.cancelled():
                self._enqueue(event)
        return [
            each
            for each in self.processes
            if (each.ready or each.is_due) and each.stopped_until <= now
        ]

    def _advance(self) -> None:
        """Let time pass until something happens."""
        when = min(
            self._events[0][0] if self._events else math.inf,
            *(each.stopped_until for each in self.processes if each.ready or each.is_due),
            math.inf,
        )
        if max(when, self.now) > self._horizon:
            waiting = [
                f"{each.name}: {task.get_name()}"
                for each in self.processes
                for task in each.unfinished
            ]
            what = "nothing can happen any more" if when == math.inf else "the time is up"
            raise SimulationError(f"{what}, and these tasks wait: {', '.join(waiting)}")
        self.now = max(when, self.now)

    def _poll(self, process: Process) -> None:
        """Queue the callbacks of a process for its ready descriptors, in an order that is drawn."""
        files = self.descriptors
        found = [each for fd, each in process.readers.items() if files[fd].is_readable]
        found += [each for fd, each in process.writers.items() if files[fd].is_writable]
        if len(found) > 1:
            self._random.shuffle(found)
        process.ready.extend(found)
        process.is_due = bool(found)

    # -- descriptors ---------------------------------------------------------------------------

    def _owner(self, fd: Any) -> Process:
        """Return the process whose socket has this descriptor."""
        if fd not in self.descriptors:
            raise SimulationError(f"descriptor {fd} is not simulated")
        owner: Process = self.descriptors[fd].owner
        return owner

    def _watch(
        self,
        handles: dict[int, asyncio.Handle],
        fd: Any,
        callback: Callable[..., object],
        args: tuple[Any, ...],
    ) -> None:
        """Have a callback made while a descriptor is ready; ``handles`` are readers or writers."""
        self._unwatch(handles, fd)
        handles[fd] = asyncio.Handle(callback, args, self)
        self.descriptors[fd].owner.is_due = True

    @staticmethod
    def _unwatch(handles: dict[int, asyncio.Handle], fd: Any) -> bool:
        """Drop the callback for a descriptor; return False if there is none."""
        handle = handles.pop(fd, None)
        if handle is not None:
            handle.cancel()
        return handle is not None

    def add_reader(self, fd: Any, callback: Callable[[*_Ts], Any], *args: *_Ts) -> None:
        """See :meth:`asyncio.loop.add_reader`, for simulated sockets."""
        self._watch(self._owner(fd).readers, fd, callback, args)

    def remove_reader(self, fd: Any) -> bool:
        """See :meth:`asyncio.loop.remove_reader`."""
        return fd in self.descriptors and self._unwatch(self._owner(fd).readers, fd)

    def add_writer(self, fd: Any, callback: Callable[[*_Ts], Any], *args: *_Ts) -> None:
        """See :meth:`asyncio.loop.add_writer`, for simulated sockets."""
        self._watch(self._owner(fd).writers, fd, callback, args)

    def remove_writer(self, fd: Any) -> bool:
        """See :meth:`asyncio.loop.remove_writer`."""
        return fd in self.descriptors and self._unwatch(self._owner(fd).writers, fd)

    async def sock_connect(self, sock: Any, address: Any) -> None:
        """See :meth:`asyncio.loop.sock_connect`, for simulated sockets."""
        await sock.connect_to(address)

    # -- threads -------------------------------------------------------------------------------

    def run_in_executor(
        self, executor: Any, func: Callable[[*_Ts], _T], *args: *_Ts
    ) -> asyncio.Future[_T]:
        """Make the call in one step, some time later. No thread is started."""
        ended = self.create_future()

        def run() -> None:
            end: Callable[[Any], None] = ended.set_result
            try:
                result: Any = func(*args)
            except Exception as exc:  # noqa: BLE001 - raised where the caller awaits the future
                end, result = ended.set_exception, exc
            if not ended.done():
                end(result)

        self.call_later(self._random.random() * _THREAD_SECONDS, run)
        return ended

    def _write_to_self(self) -> None:
        """Do nothing: the loop never waits in a system call."""
