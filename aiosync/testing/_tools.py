"""What the conformance checks are written with: expectations, bounded waits, payloads.

This module must never import pytest or torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from aiosync.errors import AiosyncError, PeerClosed, TransportBroken, TransportClosed
from aiosync.wire import Message, Update

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer

    from aiosync.transports.base import Lender, Received, Transport

__all__ = [
    "CLOG_NBYTES",
    "EPOCH",
    "KIB",
    "MIB",
    "ConformanceError",
    "Tasks",
    "arrives",
    "broken_or_closed",
    "cancel",
    "clog",
    "deliver",
    "drain",
    "drain_until_error",
    "expect",
    "gets_cut",
    "is_blocked",
    "lend_after",
    "lend_into",
    "lend_new",
    "pattern",
    "require",
    "settle",
    "stays_broken",
    "text_of",
    "update",
    "verify",
    "within",
]

_T = TypeVar("_T")
_E = TypeVar("_E", bound=BaseException)

EPOCH = 0x5EED
KIB = 1024
MIB = 1024 * KIB
PATIENCE = 5.0
"""Seconds after which something that should happen at once counts as hung."""

CLOG_NBYTES = 2 * MIB
"""Size of the payloads that :func:`clog` sends: more than a kernel buffer usually takes."""

_CYCLE = bytes(range(251))  # a prime length, so that a shift by any power of two shows
_CLOG_LIMIT_NBYTES = 64 * MIB


class ConformanceError(AssertionError):
    """A transport does not do what the contract says."""


def require(condition: bool, text: str) -> None:
    """Raise :class:`ConformanceError` with ``text`` unless ``condition`` holds."""
    if not condition:
        raise ConformanceError(text)


def text_of(error: BaseException) -> str:
    """Describe an exception in one line."""
    return f"{type(error).__name__}: {error}"


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Make ``nbytes`` bytes that differ between seeds and between positions."""
    shift = seed % len(_CYCLE)
    return (_CYCLE * ((nbytes + shift) // len(_CYCLE) + 1))[shift : shift + nbytes]


def update(version: int) -> Update:
    """Make a message that carries a payload in real use."""
    return Update(epoch=EPOCH, version=version, digest=version.to_bytes(16, "little"))


async def settle(turns: int = 10) -> None:
    """Let the loop run ``turns`` times, so that what is ready happens."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def within(awaitable: Coroutine[Any, Any, _T] | asyncio.Future[_T], what: str) -> _T:
    """Await something that should happen at once; a hang is a :class:`ConformanceError`."""
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=PATIENCE)
        if not task.done():
            raise ConformanceError(f"{what} hangs: not finished after {PATIENCE:g} s")
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=PATIENCE)
    return task.result()


async def expect(
    kinds: type[_E] | tuple[type[_E], ...],
    awaitable: Coroutine[Any, Any, Any] | asyncio.Future[Any],
    what: str,
) -> _E:
    """Await something that should raise one of ``kinds``; returns the exception."""
    wanted = kinds if isinstance(kinds, tuple) else (kinds,)
    names = " or ".join(kind.__name__ for kind in wanted)
    try:
        result = await within(awaitable, what)
    except wanted as exc:
        return exc
    except ConformanceError:
        raise
    except asyncio.CancelledError as exc:
        current = asyncio.current_task()
        if current is not None and getattr(current, "cancelling", int)():
            raise
        raise ConformanceError(f"{what}: expected {names}, got CancelledError") from exc
    except Exception as exc:  # reported to the caller as the wrong exception
        raise ConformanceError(f"{what}: expected {names}, got {text_of(exc)}") from exc
    raise ConformanceError(f"{what}: expected {names}, but it returned {type(result).__name__}")


async def broken_or_closed(operation: Callable[[], Coroutine[Any, Any, Any]], what: str) -> None:
    """Repeat an operation until it raises ``PeerClosed`` or ``TransportBroken``.

    The kernel may take some data before it tells that the peer has gone.
    """
    for _ in range(100):
        try:
            await within(operation(), what)
        except (PeerClosed, TransportBroken):
            return
        except AiosyncError as exc:
            raise ConformanceError(
                f"{what}: expected PeerClosed or TransportBroken, got {text_of(exc)}"
            ) from exc
    raise ConformanceError(f"{what}: 100 operations succeeded although the link has ended")


async def is_blocked(task: asyncio.Future[Any], seconds: float = 0.03) -> bool:
    """Whether a task still waits after the loop had every chance to move it on."""
    for _ in range(20):
        if task.done():
            return False
        await asyncio.sleep(0)
    await asyncio.wait({task}, timeout=seconds)
    return not task.done()


async def cancel(task: asyncio.Task[Any], what: str) -> None:
    """Cancel a task and check that it ends so."""
    task.cancel()
    await asyncio.wait({task}, timeout=PATIENCE)
    require(task.done(), f"{what} ignores its cancellation")
    require(task.cancelled(), f"{what} swallowed its cancellation")


class Tasks:
    """Background tasks of one check; cancels and awaits what is left of them at its end."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, coro: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Start a coroutine in the background."""
        task = asyncio.ensure_future(coro)
        self._tasks.append(task)
        return task

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        left = [task for task in self._tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            _, hung = await asyncio.wait(left, timeout=PATIENCE)
            if hung and exc is None:
                raise ConformanceError(f"tasks ignore their cancellation: {hung}")
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.exception()  # retrieved: the check has looked at those that matter


def lend_into(*buffers: bytearray) -> Lender:
    """Make a lender that lends these buffers for a payload, and nothing for an empty one."""

    def lend(message: Message, nbytes: int) -> Sequence[Buffer]:
        return buffers if nbytes else ()

    return lend


def lend_new(message: Message, nbytes: int) -> Sequence[Buffer]:
    """A lender that lends new memory."""
    return [bytearray(nbytes)] if nbytes else []


def lend_after(action: Callable[[], object]) -> Lender:
    """Make a lender that does something before it lends new memory."""

    def lend(message: Message, nbytes: int) -> Sequence[Buffer]:
        action()
        return lend_new(message, nbytes)

    return lend


def verify(received: Received, version: int, payload: bytes) -> None:
    """Check that a message is the update ``version`` with exactly this payload."""
    require(
        received.message == update(version),
        f"expected update {version}, got {received.message!r:.200}",
    )
    require(
        received.nbytes == len(payload),
        f"update {version}: nbytes is {received.nbytes}, {len(payload)} bytes were sent",
    )
    require(
        b"".join(received.payload) == payload,
        f"update {version}: the payload of {len(payload)} bytes did not arrive as it was sent",
    )


async def arrives(
    receiving: Coroutine[Any, Any, Received] | asyncio.Future[Received],
    what: str,
    version: int,
    payload: bytes,
) -> None:
    """Await a ``recv()``, check that it gets the update ``version``, and release it."""
    received = await within(receiving, what)
    verify(received, version, payload)
    received.release()


async def deliver(
    sender: Transport, receiver: Transport, version: int, payload: bytes = b""
) -> None:
    """Send one update and check that it arrives."""
    async with Tasks() as tasks:
        sending = tasks.start(sender.send(update(version), [payload] if payload else []))
        received = await within(receiver.recv(), f"recv() of update {version}")
        await within(sending, f"send() of update {version}")
    verify(received, version, payload)
    received.release()


async def clog(
    tasks: Tasks, sender: Transport, *, nbytes: int = CLOG_NBYTES
) -> tuple[int, asyncio.Task[None]]:
    """Send updates 1, 2, ... of ``nbytes`` bytes until one blocks.

    Returns:
        The version that blocks, and its task.
    """
    version = 0
    while version * nbytes <= _CLOG_LIMIT_NBYTES:
        version += 1
        task = tasks.start(sender.send(update(version), [pattern(nbytes, version)]))
        if await is_blocked(task):
            return version, task
        task.result()
    raise ConformanceError(
        f"the link took {version} messages of {nbytes} bytes that nobody read: "
        "there is no backpressure"
    )


async def drain(receiver: Transport, first: int, last: int, *, nbytes: int = CLOG_NBYTES) -> None:
    """Receive and check the updates ``first`` to ``last`` that :func:`clog` sent."""
    for version in range(first, last + 1):
        await arrives(
            receiver.recv(),
            f"recv() of update {version} of {last}",
            version,
            pattern(nbytes, version),
        )


async def drain_until_error(receiver: Transport, *, nbytes: int = CLOG_NBYTES) -> AiosyncError:
    """Receive the updates 1, 2, ... that :func:`clog` sent, until the link ends.

    Each must be whole and in order; how many arrive is not checked. Returns the error.
    """
    version = 0
    while True:
        version += 1
        try:
            received = await within(receiver.recv(), f"recv() of update {version}")
        except AiosyncError as exc:
            return exc
        verify(received, version, pattern(nbytes, version))
        received.release()


async def gets_cut(receiver: Transport) -> None:
    """Check that the link ends with ``TransportBroken``, after whole messages of :func:`clog`."""
    error = await drain_until_error(receiver)
    require(
        isinstance(error, TransportBroken),
        f"the receiver of a cut message expected TransportBroken, got {text_of(error)}",
    )


async def stays_broken(transport: Transport, what: str) -> None:
    """Check that a broken link stays so for every operation, until this side closes it."""
    await expect(TransportBroken, transport.recv(), f"recv() after {what}")
    await expect(TransportBroken, transport.send(update(999)), f"send() after {what}")
    await expect(TransportBroken, transport.recv(timeout=0), f"second recv() after {what}")
    await within(transport.aclose(), f"aclose() after {what}")
    await expect(TransportClosed, transport.recv(), f"recv() after {what} and aclose()")
