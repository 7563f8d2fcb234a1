"""A simulated world: processes, their network and their clock, all of which follow from one seed.

Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import random as random_module
import secrets
import select
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from random import Random
from typing import Any, TypeVar

from anyio import to_thread

from aiosync.testing.sim.loop import Process, SimLoop, SimulationError
from aiosync.testing.sim.network import Network, ProcessEnd, SimPoll, SimSocket, Weather

__all__ = ["World", "simulate"]

_T = TypeVar("_T")
# Turns of the loop in which a process whose program has ended may still close things.
_TURNS = 10
_SHOWN_LINES = 40
# A program that is over awaits at most so many things in its ``finally`` blocks.
_MOST_AWAITS = 100
_FIRST_PID = 10_000_000
# Virtual time of the day at the start.
_EPOCH_SECONDS = 1_700_000_000.0


class World:
    """A simulated world, which :func:`simulate` makes.

    Attributes:
        seed: The seed that everything follows from.
        random: Random numbers for the program; not those that the world itself draws.
        network: The network: its ``weather`` decides what happens to connections, and
            ``part()`` and ``heal()`` make and end partitions.
        trace: What has happened so far, one line each.
        checks: Called with the process after each step of a process; a check that raises ends the
            simulation.
    """

    def __init__(self, seed: int, weather: Weather, max_seconds: float) -> None:
        self.seed: int = seed
        self.random: Random = Random(f"program {seed}")
        self.trace: list[str] = []
        self._loop = SimLoop(Random(f"steps {seed}"), max_seconds)
        self.checks: list[Callable[[Process], None]] = self._loop.checks
        self._loop.set_exception_handler(self._note_exception)
        self.network: Network = Network(self._loop, Random(f"network {seed}"), self.note)
        self.network.weather = weather
        self._began = self._loop.now
        self._dead: list[Process] = []
        # Those of processes that end before their first step have to be closed.
        self._programs: list[Coroutine[Any, Any, Any]] = []
        # Descriptor that takes the place of those of dead processes.
        self._nothing = -1

    # -- for programs ------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Virtual seconds since the simulation began."""
        return self._loop.now - self._began

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self._loop.steps

    @property
    def digest(self) -> int:
        """A number that stands for every step and its time: equal for equal runs."""
        return self._loop.digest

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.now:11.6f}  {text}")

    def start(self, name: str, program: Coroutine[Any, Any, Any]) -> Process:
        """Start a simulated process. An exception that ``program`` raises ends the simulation.

        A process that ends has to have closed what it opened: tasks and sockets that it leaves are
        an error.

        Args:
            name: Name in the trace, in errors, and for :meth:`Network.part`.
            program: The coroutine that the process runs.
        """
        process = self._new(name)
        self._programs.append(program)
        self.note(f"{name} starts")
        self._loop.start(process, self._live(process, program))
        return process

    def kill(self, process: Process, *, silently: bool = False) -> None:
        """End a process at once, as SIGKILL does: none of its code runs any more.

        Args:
            process: The process.
            silently: True if its whole host is lost, so that no peer is told.
        """
        if not process.is_alive:
            return
        self.note(f"{process.name} {'and its host are' if silently else 'is'} lost")
        if silently:
            for sock in self.network.sockets_of(process):
                if sock.peer is not None:
                    self.network.lose(sock)
        self._end(process)

    def stop(self, process: Process, seconds: float) -> None:
        """Let a process make no step for so many seconds, as if it computed or were swapped out."""
        self.note(f"{process.name} stops for {seconds:.3f} s")
        process.stopped_until = max(process.stopped_until, self._loop.now + seconds)

    async def ended(self, process: Process) -> None:
        """Wait until a process has ended, on its own or by :meth:`kill`."""
        if process.is_alive:
            waiter = self._loop.create_future()
            process.waiters.append(waiter)
            await waiter

    def fail(self, text: str) -> None:
        """End the simulation with an error, from any process."""
        self._loop.fail(SimulationError(text))

    # -- processes ---------------------------------------------------------------------------------

    def _new(self, name: str) -> Process:
        return Process(name, _FIRST_PID + next(self._loop.numbers))

    async def _live(self, process: Process, program: Coroutine[Any, Any, Any]) -> None:
        """Run a program to its end, and check that it has left nothing open."""
        try:
            await program
        except BaseException as exc:  # noqa: BLE001 - raised by simulate()
            # The program of a killed process is only closed now: see _dispose().
            if process.is_alive:
                self.note(f"{process.name} fails: {exc!r}")
                self._loop.fail(exc)
            return
        own = asyncio.current_task()
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        left = [*(task.get_name() for task in process.unfinished if task is not own)]
        left += [repr(sock) for sock in self.network.sockets_of(process)]
        left += [f"descriptor {fd}" for fd in self._loop.files_of(process)]
        if left:
            self.fail(f"{process.name} has ended, and left {', '.join(left)}")
        self.note(f"{process.name} has ended")
        self._end(process)

    def _end(self, process: Process) -> None:
        """Drop a process with its sockets and files, and tell those that wait for its end."""
        process.is_alive = False
        # A task that failed, and that nothing refers to any more, reports its error now. Callbacks
        # in the queue would have seen the error of theirs, so the queue stays as it is.
        process.tasks = process.unfinished
        self._loop.processes.remove(process)
        self._dead.append(process)
        for sock in self.network.sockets_of(process):
            sock.close()
        # Locks of open files end. Objects of the process may still close these numbers later.
        for fd in self._loop.files_of(process):
            os.dup2(self._nothing, fd)
        for sock in self.network.ends_of(process):
            sock.touch()
        for waiter in process.waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- errors ------------------------------------------------------------------------------------

    def _note_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the simulation: no program saw this error, so no test would."""
        error = SimulationError(f"only the event loop saw an error: {context.get('message')}")
        error.__cause__ = context.get("exception")
        self._loop.fail(error)

    # -- running -----------------------------------------------------------------------------------

    def run(self, main: Coroutine[Any, Any, _T]) -> _T:
        """Run the simulation; :func:`simulate` calls this."""
        process = self._new("the world")
        with self._in_place():
            try:
                task = self._loop.start(process, main)
                result: _T = self._loop.run_until_complete(task)
                self._end_all()
                if self._loop.error is not None:
                    raise self._loop.error
                return result
            except (Exception, asyncio.CancelledError, SystemExit) as exc:
                # The last two would show neither the seed nor the process.
                what = exc if isinstance(exc, Exception) else repr(exc)
                text = "\n".join(self.trace[-_SHOWN_LINES:])
                raise SimulationError(f"seed {self.seed}: {what}\n{text}") from exc
            finally:
                self._end_all()
                self._dispose()
                self._loop.close()
                if self._loop.files:
                    # Objects of dead processes may close some.
                    gc.collect()
                    for fd in [*self._loop.files]:
                        os.close(fd)

    def _end_all(self) -> None:
        for process in [*self._loop.processes]:
            self._end(process)

    def _dispose(self) -> None:
        """Drop the tasks of processes that did not end by themselves.

        Their ``finally`` blocks run until they await something, in a process that has no sockets
        and whose callbacks are dropped.
        """
        asyncio._set_running_loop(self._loop)
        try:
            for process in self._dead:
                for task in process.tasks:  # more may come meanwhile
                    if not task.done():
                        task._log_destroy_pending = False  # type: ignore[attr-defined]
                        self._loop.call_in(process, _close, task.get_coro())
                process.tasks.clear()
            for program in self._programs:
                program.close()
        finally:
            asyncio._set_running_loop(None)

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        """Put the simulated clock, sockets, threads and randomness in place of the real ones."""
        loop, random = self._loop, Random(f"secrets {self.seed}")
        real_readv, real_writev, real_close = os.readv, os.writev, os.close

        class OwnSocket(SimSocket):
            network = self.network

        class OwnEnd(ProcessEnd):
            network = self.network

        class OwnPoll(SimPoll):
            network = self.network

        find = self.network.find

        def readv(fd: int, buffers: Any) -> int:
            sock = find(fd)
            return real_readv(fd, buffers) if sock is None else sock.read(buffers)

        def writev(fd: int, buffers: Any) -> int:
            sock = find(fd)
            return real_writev(fd, buffers) if sock is None else sock.write(buffers)

        def close(fd: int) -> None:
            sock = find(fd)
            if sock is not None:
                sock.close()
                return
            loop.files.pop(fd, None)
            real_close(fd)

        def owned(call: Callable[..., int]) -> Callable[..., int]:
            """Make the running process the owner of each descriptor that ``call`` returns."""

            def make(*args: Any, **options: Any) -> int:
                fd = call(*args, **options)
                loop.files[fd] = loop.running
                return fd

            return make

        def pidfd_open(pid: int, flags: int = 0) -> int:
            for process in loop.processes:
                if process.number == pid:
                    return OwnEnd(process).fd
            raise ProcessLookupError(errno.ESRCH, "there is no such simulated process")

        def sleep(seconds: float) -> None:
            loop.now += seconds

        async def run_sync(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
            return await loop.run_in_executor(None, call, *args)

        places: list[tuple[Any, str, Any]] = [
            (time, "monotonic", loop.read_clock),
            (time, "perf_counter", loop.read_clock),
            (time, "time", lambda: _EPOCH_SECONDS + loop.read_clock() - self._began),
            (time, "sleep", sleep),
            (os, "getpid", lambda: loop.running.number),
            (os, "open", owned(os.open)),
            (os, "dup", owned(os.dup)),
            (os, "memfd_create", owned(os.memfd_create)),
            (os, "pidfd_open", pidfd_open),
            (os, "close", close),
            (os, "readv", readv),
            (os, "writev", writev),
            (socket, "socket", OwnSocket),
            (select, "poll", OwnPoll),
            (secrets, "token_bytes", lambda nbytes=32: random.randbytes(nbytes or 32)),
            (secrets, "randbelow", random.randrange),
            (secrets, "randbits", random.getrandbits),
            (to_thread, "run_sync", run_sync),
        ]
        with contextlib.ExitStack() as undo:
            self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            undo.callback(real_close, self._nothing)
            undo.callback(random_module.setstate, random_module.getstate())
            random_module.seed(self.seed)
            if gc.isenabled():
                # The collector would run destructors at moments that no seed decides.
                gc.disable()
                undo.callback(gc.enable)
            for module, name, value in places:
                undo.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
            yield


def _close(coroutine: Any) -> None:
    """End a coroutine by cancelling whatever its ``finally`` blocks await."""
    with contextlib.suppress(BaseException):  # of a program that is over
        for _ in range(_MOST_AWAITS):
            coroutine.throw(asyncio.CancelledError())
        coroutine.close()


def simulate(
    main: Callable[[World], Coroutine[Any, Any, _T]],
    *,
    seed: int,
    weather: Weather | None = None,
    max_seconds: float = 3600.0,
) -> _T:
    """Run ``main(world)`` in a simulated world, and return its result.

    Args:
        main: Starts processes with ``world.start()``, and decides what happens to them.
        seed: Decides everything that is left to chance: equal seeds give equal runs.
        weather: What happens to connections; by default there are delays and no faults.
        max_seconds: Virtual seconds after which a simulation that has not ended counts as stuck.
            A program that spins makes about 100,000 steps in each.

    Raises:
        SimulationError: A program or a check raised an error, which is the cause; a process left
            tasks or sockets; or nothing could happen any more. The text has the seed and the end of
            the trace.
    """
    world = World(seed, weather or Weather(), max_seconds)
    return world.run(main(world))
