"""Tools of the conformance checks: links, expectations, bounded waits, payloads.

This module must never import pytest or torch.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from aiosync.errors import ConfigError, PeerClosed, RecvTimeout, TransportBroken, TransportClosed
from aiosync.testing.leaks import LEAK_KINDS, LeakError, assert_no_leaks
from aiosync.transports.base import Lender, Received, Transport
from aiosync.types import Capabilities, Limits
from aiosync.wire import Message, Update

if TYPE_CHECKING:
    from typing_extensions import Buffer

_T = TypeVar("_T")
_E = TypeVar("_E", bound=BaseException)
Pair: TypeAlias = tuple[Transport, Transport]

EPOCH = 0x5EED
KIB = 1024
MIB = 1024 * KIB
ENDED = (PeerClosed, TransportBroken)
"""Errors that report the end of a link, for checks that allow either."""

CLOG_NBYTES = 2 * MIB
"""Size of the payloads that :func:`clog` sends: more than a kernel buffer usually takes."""

_CLOG_LIMIT_NBYTES = 64 * MIB
# Seconds after which an operation that should end at once counts as hung.
_patience = ContextVar("patience", default=5.0)


class ConformanceError(AssertionError):
    """Error for a transport that breaks the contract."""


def require(condition: bool, text: str) -> None:
    """Raise :class:`ConformanceError` with ``text`` unless ``condition`` holds."""
    if not condition:
        raise ConformanceError(text)


# -- the author's side of the suite, and the tools of a check --------------------------------------


class TransportFactory(Protocol):
    """Factory of one link: ``async with factory() as (sender, receiver)``.

    Both ends live on the running loop. The end of the context must close both ends, whatever state
    the check left them in, and everything that was opened to make them.
    """

    def __call__(self) -> AbstractAsyncContextManager[Pair]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Optional functions of a transport's author; a check is skipped if its hooks are missing.

    Attributes:
        cut: Severs the raw link beneath one end at once, from outside, as the death of that
            end's process would: nothing is flushed, and the transport sends no farewell.
        limited: Makes a link whose ends have the given limits (sender's, receiver's).
    """

    cut: Callable[[Transport], None] | None = None
    limited: Callable[[Limits, Limits], AbstractAsyncContextManager[Pair]] | None = None


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """Result of :func:`check_transport`.

    Attributes:
        passed: Names of the checks that passed.
        skipped: The reason for each check that was not run, by its name.
    """

    passed: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])


class Tasks(AbstractAsyncContextManager["Tasks"]):
    """Background tasks of one check; the end of the context cancels and awaits them."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Future[Any]] = []

    def start(self, awaitable: Coroutine[Any, Any, _T] | asyncio.Future[_T]) -> asyncio.Future[_T]:
        """Start a coroutine in the background; return its task."""
        task = asyncio.ensure_future(awaitable)
        self._tasks.append(task)
        return task

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        # The errors of the tasks are dropped: the check itself has raised those that matter.
        ended = asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.wait({ended}, timeout=_patience.get())


Link: TypeAlias = tuple[Transport, Transport, Tasks]
"""Sender, receiver, and the background tasks that end with the link."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The links and hooks that a check works with.

    Attributes:
        pair: Makes a link.
        hooks: The author's hooks; a check uses only those that it declares.
    """

    pair: TransportFactory
    hooks: Hooks

    @asynccontextmanager
    async def link(
        self, limits: tuple[Limits, Limits] | None = None, *, flipped: bool = False
    ) -> AsyncGenerator[Link, None]:
        """Make a link with its background tasks.

        Args:
            limits: Limits of the sender and of the receiver; ``None`` for the transport's own.
            flipped: Yield the two ends in the other order.
        """
        limited = self.hooks.limited
        made = self.pair() if limits is None or limited is None else limited(*limits)
        async with made as (left, right), Tasks() as tasks:
            yield (right, left, tasks) if flipped else (left, right, tasks)

    def cut(self, transport: Transport) -> None:
        """Sever the link beneath ``transport``."""
        assert self.hooks.cut is not None
        self.hooks.cut(transport)


@dataclass(frozen=True, slots=True)
class Check:
    """One statement of the transport contract, as a test.

    Attributes:
        name: Stable name, which ``Capabilities.exceptions`` refers to.
        description: The statement, in one sentence.
        needs: Names of the :class:`Hooks` that the check uses.
        body: The coroutine function of the check.
    """

    name: str
    description: str
    needs: frozenset[str]
    body: Callable[[Bench], Coroutine[Any, Any, None]]

    def skip_reason(
        self, hooks: Hooks | None = None, capabilities: Capabilities | None = None
    ) -> str | None:
        """Return the reason why this check cannot or need not run; ``None`` if it has to run."""
        declared = {} if capabilities is None else capabilities.exceptions
        if exception := declared.get(self.name) or declared.get("*"):
            return f"declared exception: {exception}"
        missing = sorted(need for need in self.needs if getattr(hooks, need, None) is None)
        return f"needs the hook {', '.join(missing)}" if missing else None

    async def run(
        self,
        pair_factory: TransportFactory,
        *,
        hooks: Hooks | None = None,
        leaks: tuple[str, ...] = LEAK_KINDS,
        patience: float = 5.0,
    ) -> None:
        """Run the check on fresh links; ask :meth:`skip_reason` before.

        Args:
            pair_factory: Makes a link for the check.
            hooks: The author's hooks.
            leaks: Kinds of leaks to look for after the check; see
                :data:`aiosync.testing.LEAK_KINDS`.
            patience: Seconds after which an operation that should end at once counts as hung. The
                whole check has six times as long, and 30 seconds at least.

        Raises:
            ConfigError: A hook that the check needs is missing.
            ConformanceError: The statement does not hold, or the check hangs.
            LeakError: The statement holds, but the check left something behind.
        """
        if reason := self.skip_reason(hooks):
            raise ConfigError(f"the check {self.name} {reason}: skip it without that")

        async def body() -> None:
            _patience.set(patience)  # within() runs this in a task of its own, so only there
            await self.body(Bench(pair_factory, hooks or Hooks()))

        try:
            async with assert_no_leaks(kinds=leaks):
                await within(body(), self.name, max(30.0, 6 * patience))
        except (ConformanceError, LeakError) as exc:
            exc.add_note(f"conformance check {self.name}: {self.description}")
            raise


def check(*needs: str) -> Callable[[Callable[[Bench], Coroutine[Any, Any, None]]], Check]:
    """Return a decorator that makes a check of a ``check_*`` coroutine function.

    The first line of the function's docstring becomes the statement.

    Args:
        needs: Names of the hooks that the check uses.
    """

    def make(body: Callable[[Bench], Coroutine[Any, Any, None]]) -> Check:
        name = body.__name__.removeprefix("check_")
        return Check(name, (body.__doc__ or "").splitlines()[0], frozenset(needs), body)

    return make


def link_check(body: Callable[[Transport, Transport, Tasks], Coroutine[Any, Any, None]]) -> Check:
    """Make a check, without hooks, of a coroutine function that works with one link."""

    @functools.wraps(body)
    async def check_link(bench: Bench) -> None:
        async with bench.link() as link:
            await body(*link)

    return check()(check_link)


# -- waiting and expecting -------------------------------------------------------------------------


async def settle(turns: int = 10) -> None:
    """Let the loop run ``turns`` times, so that ready callbacks and tasks proceed."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def within(
    awaitable: Coroutine[Any, Any, _T] | asyncio.Future[_T],
    what: str,
    seconds: float | None = None,
) -> _T:
    """Await an operation that should end at once; return its result.

    Raises:
        ConformanceError: The operation did not end in time, or was cancelled.
    """
    limit = _patience.get() if seconds is None else seconds
    async with Tasks() as tasks:
        task = tasks.start(awaitable)
        await asyncio.wait({task}, timeout=limit)
        require(task.done(), f"{what} hangs: not finished after {limit:g} s")
        require(not task.cancelled(), f"{what} ended with CancelledError")
        return task.result()


async def expect(
    kinds: type[_E] | tuple[type[_E], ...],
    awaitable: Coroutine[Any, Any, Any] | asyncio.Future[Any],
    what: str,
) -> _E:
    """Await an operation that should raise one of ``kinds``; return the exception.

    Raises:
        ConformanceError: The operation returned, raised another exception, or hung.
    """
    try:
        result = await within(awaitable, what)
    except kinds as exc:
        return exc
    except Exception as exc:  # the caller gets it as the cause: it is the wrong exception
        raise ConformanceError(f"{what}: expected {kinds}, got {exc!r}") from exc
    raise ConformanceError(f"{what}: expected {kinds}, but it returned {type(result).__name__}")


async def ends_soon(operation: Callable[[], Coroutine[Any, Any, Any]], what: str) -> None:
    """Repeat an operation until it raises ``PeerClosed`` or ``TransportBroken``.

    The kernel may accept some data before it reports the end of the peer.
    """

    async def repeat() -> None:
        for _ in range(100):
            await operation()

    await expect(ENDED, repeat(), what)


async def is_blocked(task: asyncio.Future[Any], seconds: float = 0.03) -> bool:
    """Return True if a task still waits after the loop had time to move it on."""
    await settle(20)
    await asyncio.wait({task}, timeout=seconds)
    return not task.done()


async def cancel(task: asyncio.Future[Any], what: str) -> None:
    """Cancel a task and check that it ends with ``CancelledError``."""
    task.cancel()
    await asyncio.wait({task}, timeout=_patience.get())
    require(task.cancelled(), f"{what} ignores or swallows its cancellation")


# -- payloads and messages -------------------------------------------------------------------------


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Make ``nbytes`` bytes that differ between seeds and between positions."""
    shift = seed % 251  # the period is a prime, so that a shift by any power of two is seen
    return (bytes(range(251)) * (nbytes // 251 + 2))[shift : shift + nbytes]


def update(version: int) -> Update:
    """Make the update message ``version``, a message that may carry a payload."""
    return Update(epoch=EPOCH, version=version, digest=version.to_bytes(16, "little"))


class Lending:
    """Lender that records its calls.

    Args:
        buffers: Buffers to lend for a payload that is not empty; without any, new memory.
        first: Function to call before the buffers are lent.
    """

    def __init__(self, *buffers: bytearray, first: Callable[[], object] = bool) -> None:
        self.calls: list[tuple[Message, int]] = []
        self._buffers = buffers
        self._first = first

    def __call__(self, message: Message, nbytes: int) -> Sequence[Buffer]:
        """Lend the buffers; a :data:`~aiosync.transports.base.Lender`."""
        self.calls.append((message, nbytes))
        self._first()
        return (self._buffers or [bytearray(nbytes)]) if nbytes else []


async def send(
    transport: Transport, version: int, *payload: Buffer, timeout: float | None = None
) -> None:
    """Send the update ``version`` with a payload."""
    await transport.send(update(version), payload, timeout=timeout)


def verify(received: Received, version: int, *payload: Buffer) -> None:
    """Check that a message is the update ``version`` with exactly this payload."""
    sent = b"".join(payload)
    arrived = b"".join(received.payload)
    require(
        (received.message, received.nbytes, arrived) == (update(version), len(sent), sent),
        f"expected update {version} with {len(sent)} bytes as they were sent, "
        f"got {received.message!r:.200} with {received.nbytes} bytes",
    )


async def arrives(
    receiving: Coroutine[Any, Any, Received] | asyncio.Future[Received],
    version: int,
    *payload: Buffer,
) -> Received:
    """Await a ``recv()``, and check that it returns the update ``version`` with this payload."""
    received = await within(receiving, f"recv() of update {version}")
    verify(received, version, *payload)
    return received


async def deliver(
    sender: Transport,
    receiver: Transport,
    version: int,
    *payload: Buffer,
    into: Lender | None = None,
    timeout: float | None = None,
) -> Received:
    """Send one update and check that it arrives."""
    async with Tasks() as tasks:
        sending = tasks.start(send(sender, version, *payload, timeout=timeout))
        received = await arrives(receiver.recv(into=into), version, *payload)
        await within(sending, f"send() of update {version}")
        return received


async def send_all(
    sender: Transport, payloads: Iterable[bytes], pause: float = 0.0, drift: float = 0.0
) -> None:
    """Send the updates 1, 2, ... with these payloads; wait ``drift`` seconds longer after each."""
    for version, payload in enumerate(payloads, 1):
        await send(sender, version, payload)
        await asyncio.sleep(pause + drift * version)


async def keep_trying(receiver: Transport, timeout: float, late: list[RecvTimeout]) -> Received:
    """Call ``recv()`` with a timeout until it returns; add the errors to ``late``."""
    while True:
        try:
            return await receiver.recv(timeout=timeout)
        except RecvTimeout as exc:
            late.append(exc)


async def receive_all(receiver: Transport, payloads: Iterable[bytes]) -> None:
    """Receive and check the updates 1, 2, ... with these payloads."""
    for version, payload in enumerate(payloads, 1):
        await arrives(receiver.recv(), version, payload)


async def gets(transport: Transport, *messages: Message) -> None:
    """Check that the next messages are exactly these, each without payload."""
    for message in messages:
        received = await within(transport.recv(), f"recv() of {message!r:.200}")
        require(
            received.message == message and received.nbytes == 0,
            f"sent {message!r:.200}, got {received.message!r:.200}, {received.nbytes} bytes",
        )


# -- links that are full, broken or cut ------------------------------------------------------------


async def clog(
    tasks: Tasks, sender: Transport, *, nbytes: int = CLOG_NBYTES, timeout: float | None = None
) -> tuple[int, asyncio.Future[None]]:
    """Send updates 1, 2, ... of ``nbytes`` bytes until one blocks or fails.

    Returns:
        The version that blocked or failed, and the task that sends it.

    Raises:
        ConformanceError: The link took 64 MiB that the receiver did not read.
    """
    for version in range(1, _CLOG_LIMIT_NBYTES // nbytes):
        task = tasks.start(send(sender, version, pattern(nbytes, version), timeout=timeout))
        if await is_blocked(task) or task.exception() is not None:
            return version, task
    raise ConformanceError(
        f"the link took {_CLOG_LIMIT_NBYTES} bytes in messages of {nbytes} that nobody read: "
        "there is no backpressure"
    )


async def drain(receiver: Transport, last: int = 10**6, *, nbytes: int = CLOG_NBYTES) -> None:
    """Receive and check the updates 1 to ``last`` of :func:`clog`, or until the link ends."""
    await receive_all(receiver, (pattern(nbytes, version) for version in range(1, last + 1)))


async def stays_broken(transport: Transport, what: str) -> None:
    """Check that a broken link stays broken for every operation until this side closes it."""
    for timeout in (None, 0):
        await expect(TransportBroken, transport.recv(timeout=timeout), f"recv() after {what}")
        await expect(TransportBroken, send(transport, 999), f"send() after {what}")
    await within(transport.aclose(), f"aclose() after {what}")
    await expect(TransportClosed, transport.recv(), f"recv() after {what} and aclose()")


async def intact_or_cut(link: Link, version: int, what: str) -> bool:
    """Check the link after a failed send() of :func:`clog`; return True if it is intact.

    Either no byte of the message was written and the link works, or the link is broken for good and
    the peer gets only whole messages before its error.
    """
    sender, receiver, tasks = link
    after = tasks.start(send(sender, version, pattern(CLOG_NBYTES, version)))
    if await is_blocked(after) or after.exception() is None:
        await drain(receiver, version)
        await within(after, f"send() after {what}, while the peer reads")
        await deliver(sender, receiver, version + 1, b"after")
        return True
    await expect(TransportBroken, after, f"send() after {what}")
    await expect(TransportBroken, drain(receiver), f"the receiver after {what}")
    await stays_broken(sender, what)
    return False
