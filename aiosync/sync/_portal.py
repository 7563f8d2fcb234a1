"""The one thread that runs aiosync's event loop for blocking callers.

The first lease starts it, and it is joined when the last one is given back. Importing starts
nothing. Must not import torch or schemes.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import inspect
import os
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar, cast

from aiosync._interrupts import is_interrupt
from aiosync._run import find_descriptors
from aiosync.errors import ConnectError, LocalProtocolError, TransportClosed

__all__ = ["Lease", "Tenant", "lease", "refuse_inside_loop"]

_T = TypeVar("_T")
_CANCEL_SECONDS = 5.0
_JOIN_SECONDS = 10.0


class Tenant(Protocol):
    """An object that lives on the portal's loop."""

    def forgotten(self) -> None:
        """Warn that the user never closed the object."""

    def abort(self) -> None:
        """Close the object at once. Called on the loop."""


class _Call(Generic[_T]):
    """One coroutine whose end a thread waits for."""

    __slots__ = ("_coroutine", "_done", "_task", "outcome")

    def __init__(self, coroutine: Coroutine[Any, Any, _T]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[None] | None = None
        # The result and the error; None until the end.
        self.outcome: tuple[_T | None, BaseException | None] | None = None
        # Locked until the end. A bare lock costs a third of a concurrent.futures.Future, and Ctrl-C
        # interrupts its wait.
        self._done = threading.Lock()
        self._done.acquire()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the coroutine as a task. Called on the loop."""
        self._task = loop.create_task(self._run())
        self._task.add_done_callback(self.give_up)

    async def _run(self) -> None:
        try:
            self._end(await self._coroutine, None)
        except BaseException as exc:  # noqa: BLE001 - raised again in the thread that waits
            self._end(None, exc)

    def cancel(self) -> None:
        """Cancel the coroutine of a caller that was interrupted. Called on the loop."""
        if self._task is not None:
            self._task.cancel()
        else:
            # The caller was interrupted before the call was started.
            self.give_up()

    def give_up(self, _: object = None) -> None:
        """End the call as cancelled if nothing else will: its task or the loop has ended."""
        if self.outcome is None:
            if inspect.getcoroutinestate(self._coroutine) == inspect.CORO_CREATED:
                self._coroutine.close()
            self._end(None, asyncio.CancelledError())

    def _end(self, result: _T | None, error: BaseException | None) -> None:
        """Keep the outcome and wake the thread that waits for it."""
        self.outcome = (result, error)
        # The loop and the caller may both give up, and only the first has to release the lock.
        with contextlib.suppress(RuntimeError):
            self._done.release()

    def wait(self, timeout: float = -1) -> None:
        """Wait for the end (-1: for ever). Only one wait succeeds, as it takes the lock."""
        self._done.acquire(timeout=timeout)


class _Selector(selectors.DefaultSelector):
    """Selector that lets other threads have the loop's turn while the loop waits."""

    def __init__(self) -> None:
        super().__init__()
        # The thread that has it may touch the objects of the loop.
        self.turn = threading.RLock()
        # Number of other threads that wait for the turn, or have it.
        self.num_waiting = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Wait for descriptors; the loop's thread has the turn before and afterwards."""
        self.turn.release()
        try:
            if self.num_waiting and not timeout:
                # A loop that is always busy would never let another thread have the turn.
                time.sleep(0)
            return super().select(timeout)
        finally:
            self.turn.acquire()


class _Portal:
    """An event loop in a thread of its own.

    It is asyncio's and not uvloop's: only asyncio's takes a selector of this module's.

    Attributes:
        leases: Leases that are held. When the last one is given back, the thread is told to stop.
        calls: Calls that threads wait for. If the loop ends, they end as cancelled.
        selector: Selector of the loop. It has the turn that lets other threads act for the loop.
        loop: The event loop.
        stopping: True once the thread was told to stop, or stops by itself: it gets no new lease.
    """

    def __init__(self) -> None:
        self.leases: set[Lease] = set()
        self.calls: set[_Call[Any]] = set()
        try:
            find_descriptors()
        except OSError as exc:
            raise ConnectError(f"no file descriptors are left for an event loop: {exc}") from exc
        self.selector = _Selector()
        self.loop = asyncio.SelectorEventLoop(self.selector)
        self.stopping = False
        # True once the loop is being closed, and takes no more calls.
        self._ended = False
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="aiosync-portal", daemon=True)

    def start(self) -> None:
        """Start the thread. The caller must not hold the module's lock.

        The new thread may need the lock: the first steps of the thread may collect garbage, and
        with it a scheme that gives a lease back.
        """
        try:
            self._thread.start()
        except BaseException:
            # The error goes on to the caller of lease(). After Ctrl-C no other code would stop a
            # thread that did start, and a thread that did not start closes no loop.
            self.stop(join=False)
            if self._thread.ident is None:
                self._close()
            raise

    def _main(self) -> None:
        """Run the loop in the portal's thread until stop() is called, then close the loop."""
        self.selector.turn.acquire()
        try:
            self.loop.run_until_complete(self._stop.wait())
            self._end_tasks()
        finally:
            # If stop() was not called, foreign code has closed the loop's descriptors. The holders
            # of leases have to know.
            orphans = [] if self.stopping else list(self.leases)
            self.stopping = True
            for held in orphans:
                if held.on_death is not None:
                    held.on_death()
            self._close()
            self.selector.turn.release()

    def _end_tasks(self) -> None:
        """Cancel the tasks that still run on the loop, then end its generators and executor."""
        loop = self.loop
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_SECONDS))
        loop.run_until_complete(loop.shutdown_asyncgens())
        # The shutdown waits in a thread, which cannot start any more once the interpreter is
        # ending (Python 3.12 and newer). The interpreter then waits for the threads of executors
        # itself.
        with contextlib.suppress(RuntimeError):
            loop.run_until_complete(loop.shutdown_default_executor())

    def _close(self) -> None:
        """Close the loop, end the calls that are left, and forget this portal."""
        global _portals
        self._ended = True
        # Foreign code may have closed the loop's descriptors.
        with contextlib.suppress(OSError):
            self.loop.close()
        # These calls came too late to be cancelled, or even started.
        for call in list(self.calls):
            call.give_up()
        with _lock:
            _portals = tuple(each for each in _portals if each is not self)

    def stop(self, *, join: bool) -> None:
        """Tell the thread to end; with ``join`` wait for that, for 10 seconds at most."""
        self.stopping = True
        # The loop may have ended already.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._stop.set)
        if join and self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)

    def submit(self, function: Callable[..., object], *args: Any) -> None:
        """Have the loop call a function soon; raise TransportClosed if the loop has ended."""
        try:
            if self._ended:
                raise RuntimeError("its thread has ended")
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError as exc:
            if is_interrupt(exc):
                raise
            raise TransportClosed("the event loop of aiosync.sync has ended") from exc

    @property
    def has_turn_here(self) -> bool:
        """True if this thread is in :meth:`Lease.at_once`, or runs the loop."""
        return bool(self.selector.turn._is_owned())  # type: ignore[attr-defined]  # not in stubs


# Re-entrant: a destructor or a signal handler may give a lease back at any time.
_lock = threading.RLock()
# Portals whose thread has not ended: at most one that goes on, and those that were told to stop.
_portals: tuple[_Portal, ...] = ()
_inherited: list[_Portal] = []


class Lease:
    """The right to use the portal, until :meth:`release`; :func:`lease` explains the arguments."""

    def __init__(
        self, portal: _Portal, tenant: Tenant, on_death: Callable[[], object] | None = None
    ) -> None:
        self._portal = portal
        # Called on the portal's thread if that ends without having been told to.
        self.on_death = on_death
        # The object that lives on the portal's loop.
        self._tenant = tenant
        # A forked child has no right to the portal, whose thread runs only in this process.
        self._pid = os.getpid()
        self._released = False

    @property
    def valid(self) -> bool:
        """True while the lease is held and the portal runs, in the process that got the lease."""
        return not self._released and self._pid == os.getpid() and not self._portal.stopping

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The portal's loop."""
        return self._portal.loop

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the portal's loop and wait for it.

        Any exception that interrupts the wait, such as ``KeyboardInterrupt``, cancels the
        coroutine first.

        Raises:
            TransportClosed: The portal ended meanwhile.
        """
        portal, call = self._portal, _Call(coroutine)
        # The call is registered first: if the loop closes before it takes the call, that ends it.
        portal.calls.add(call)
        try:
            portal.submit(call.start, portal.loop)
            call.wait()
        except BaseException:
            # The error goes on to the caller.
            # After Ctrl-C the coroutine must not go on behind the caller's back.
            if call.outcome is None:
                try:
                    portal.submit(call.cancel)
                except TransportClosed:
                    call.give_up()
                call.wait(_CANCEL_SECONDS)
            raise
        finally:
            portal.calls.discard(call)
        assert call.outcome is not None
        result, error = call.outcome
        if error is None:
            return cast("_T", result)
        try:
            if isinstance(error, asyncio.CancelledError):
                raise TransportClosed("the scheme was shut down while this call waited")
            raise error
        finally:
            # The traceback refers to this frame: leave no reference cycle.
            call.outcome = error = None

    def at_once(self, function: Callable[[], tuple[_T, Callable[[], None] | None]]) -> _T:
        """Call a function on this thread while the portal's loop waits.

        The function must not wait, and must leave the loop alone. It returns its result, and a
        function that is to be called on the loop afterwards, or ``None``.

        Raises:
            TransportClosed: The portal ended meanwhile.
        """
        selector = self._portal.selector
        selector.num_waiting += 1
        try:
            with selector.turn:
                result, rest = function()
        finally:
            selector.num_waiting -= 1
        if rest is not None:
            self._portal.submit(rest)
        return result

    def release(self, *, join: bool = True) -> None:
        """Give the right back; the last lease to do so ends the portal's thread. Idempotent.

        Args:
            join: Wait for the end of that thread, at most 10 seconds.
        """
        portal = self._portal
        with _lock:
            if self._released or self._pid != os.getpid():
                return
            self._released = True
            portal.leases.discard(self)
            last = not portal.leases
            portal.stopping |= last
        if last:
            portal.stop(join=join)

    def abort(self) -> None:
        """Close the tenant without waiting, and give the right back. Idempotent."""
        if self.valid:
            # The loop may have ended meanwhile.
            with contextlib.suppress(RuntimeError):
                self._portal.loop.call_soon_threadsafe(self._tenant.abort)
        self.release(join=False)

    def forgotten(self) -> None:
        """Warn of a tenant whose owner is gone, and close it."""
        try:
            if self.valid:
                self._tenant.forgotten()
        finally:
            self.abort()


def lease(tenant: Tenant, on_death: Callable[[], object] | None = None) -> Lease:
    """Get the right to use the portal, and start the portal if need be.

    Args:
        tenant: The object that lives there.
        on_death: Called on the portal's thread if that ends without having been told to.
    """
    global _portals
    _stop_with_the_program()
    with _lock:
        portal = next((each for each in _portals if not each.stopping), None)
        created = None if portal is not None else _Portal()
        if created is not None:
            portal, _portals = created, (*_portals, created)
        assert portal is not None
        held = Lease(portal, tenant, on_death)
        portal.leases.add(held)
    if created is not None:
        try:
            created.start()
        except BaseException:  # The error goes on to the caller.
            held.release(join=False)
            raise
    return held


def refuse_inside_loop(what: str, instead: str | None = None, *, may_block: bool = False) -> None:
    """Raise unless it is safe to block this thread.

    Args:
        what: Name of the method that would block.
        instead: The expression to use in async code.
        may_block: True if any loop may be blocked but the portal's own, which would wait for
            itself.

    Raises:
        LocalProtocolError: An event loop runs in this thread and would be blocked. Or a
            :meth:`Lease.at_once` of this thread is under way, for which the portal waits.
    """
    loop = asyncio._get_running_loop()
    if loop is None:
        # In its turn this thread keeps the portal's loop from running: a wait for it never ends.
        for portal in _portals:
            if portal.has_turn_here:
                raise LocalProtocolError(
                    f"aiosync.sync: {what}() was called inside of a send(): call it when that has "
                    "returned"
                )
        return
    if not may_block or any(portal.loop is loop for portal in _portals):
        raise LocalProtocolError(
            f"aiosync.sync: {what}() was called inside a running event loop, which it would "
            f"block; use the async API there: `{instead or f'await scheme.{what}()'}` on a scheme "
            "of `aiosync`"
        )


def _forget() -> None:
    # A forked child has the memory of the portal but not its thread. The loop stays referenced:
    # its destructor would work on descriptors that it shares with the parent.
    global _portals, _lock
    _inherited.extend(_portals)
    _portals, _lock = (), threading.RLock()


def _stop_at_exit() -> None:
    """Warn of the objects on portals that were never closed, close them, and end the threads."""
    try:
        for portal in _portals:
            for held in list(portal.leases):
                held.forgotten()
    finally:
        # A thread that is in torch when the interpreter is torn down would abort the process.
        for portal in _portals:
            portal.stop(join=True)


@functools.cache
def _stop_with_the_program() -> None:
    # This is done at the first lease, and not at import: exit functions that other code registered
    # before that lease run later, when the portal is gone.
    atexit.register(_stop_at_exit)


os.register_at_fork(after_in_child=_forget)
