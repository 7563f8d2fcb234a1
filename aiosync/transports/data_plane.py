"""What moves large payloads beside the stream of a link: the contract, and what goes with it.

Must not import torch, ray, schemes or a concrete transport.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from aiosync.errors import LocalProtocolError, RemoteProtocolError, TransportBroken
from aiosync.transports._fork import close_in_child
from aiosync.transports.stream import FramedTransport
from aiosync.wire import ExtValue, Setup, encode_frame

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "COPYING",
    "KEPT",
    "DataPlane",
    "Progress",
    "SharedPayload",
    "Threads",
    "copy_bytes",
    "outlast",
]

_T = TypeVar("_T")

COPYING = "copying"
"""Key of :attr:`SharedPayload.memo`: the :class:`Progress` of the copy that fills the payload."""

KEPT = "kept"
"""Key of :attr:`SharedPayload.memo`: some data plane keeps the bytes.

A call that brings them back, as buffers in order: an awaitable of ``Sequence[memoryview]``, which
raises :class:`~aiosync.errors.LocalProtocolError` where they are gone.
"""


class SharedPayload(list[memoryview]):
    """A payload that goes over several links, with a place for what is made of it once.

    Attributes:
        memo: Entries of data planes, by keys of their own; cleared when the payload's memory is
            about to be used for another.
    """

    def __init__(self, views: Iterable[memoryview], memo: dict[Any, Any]) -> None:
        super().__init__(views)
        self.memo = memo


class Progress:
    """How much of a payload is in place while it is still being copied, from its start on.

    One thread copies, any threads wait.
    """

    def __init__(self) -> None:
        self._nbytes = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def advance(self, nbytes: int) -> None:
        """So many bytes from the start are in place."""
        with self._changed:
            self._nbytes = nbytes
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """No more will come."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, nbytes: int) -> None:
        """Block until so many bytes are in place.

        Raises:
            LocalProtocolError: The copy failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._nbytes >= nbytes or self._error is not None)
            if self._error is not None:
                raise LocalProtocolError(f"the weights could not be copied: {self._error}")


class DataPlane(abc.ABC):
    """Moves payloads of one link, one at a time in each direction.

    Its coroutines run on the loop of the link and may raise
    :class:`~aiosync.errors.TransportError`, which ends the link. When one of them is cancelled it
    must not return before nothing reads from or writes to the memory that it was given.
    """

    kind: ClassVar[str]
    """Names it in :class:`~aiosync.wire.Setup` messages."""

    follows_copies: ClassVar[bool] = False
    """Whether :meth:`push` waits for the parts of a payload that are not in place yet."""

    control: FramedTransport
    """The control stream; set before anything else is called."""

    @abc.abstractmethod
    async def offer(
        self, payload: list[memoryview], nbytes: int, memo: dict[Any, Any]
    ) -> Mapping[str, ExtValue]:
        """Prepare to send; returns what the peer has to know. It is told after this.

        Args:
            payload: The bytes, in order.
            nbytes: How many in total.
            memo: Belongs to the payload, see :class:`SharedPayload`.

        Raises:
            LocalProtocolError: It cannot be sent; the link is as it was.
        """

    @abc.abstractmethod
    async def push(self, payload: list[memoryview], nbytes: int) -> None:
        """Send, once the peer was told. Returns when the payload's memory may change."""

    @abc.abstractmethod
    async def fetch(
        self, ext: Mapping[str, ExtValue], nbytes: int, lend: Callable[[], list[memoryview]] | None
    ) -> tuple[Sequence[memoryview], Hashable]:
        """Receive what the peer told of.

        Args:
            ext: What the peer's :meth:`offer` returned, unchecked.
            nbytes: Size of the payload.
            lend: Gives the buffers that the payload has to land in; ``None`` where memory of the
                data plane is welcome.

        Returns:
            The bytes, and :attr:`Received.key`: ``None`` where they lie in lent buffers.
        """

    def hear(self, message: Setup) -> None:
        """The peer set something up. May raise ``RemoteProtocolError``, which ends the link."""
        raise RemoteProtocolError(f"unexpected set-up of {message.kind!r}")

    async def settle(self) -> None:
        """Bring what is being set up to its end while the peer can still be heard. Bounded."""
        return None

    @abc.abstractmethod
    def end(self) -> None:
        """The link has ended: make what is under way fail soon. Never waits."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Give everything back. Bounded."""

    def hint(self) -> str:
        """What the peer may have ended the link for, as far as this side can tell; or nothing."""
        return ""

    def say(self, key: str, value: bytes = b"") -> None:
        """Tell the peer's data plane something, once the stream is between two frames."""
        if not self.control.ended:
            self.control.queue(encode_frame(Setup(self.kind, key, value)))


class Threads:
    """Threads for calls that block: torch's, Ray's, and copies. Each is made when it is needed.

    Args:
        name: Of the threads.
        count: How many calls run at a time; others wait for their turn.
    """

    def __init__(self, name: str, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, name)
        self._loop = asyncio.get_running_loop()
        self._running: set[Future[Any]] = set()
        self._used = self._ended = False
        close_in_child(self)

    def start(self, call: Callable[[], _T]) -> asyncio.Future[_T]:
        """Run ``call``, and let go of what it holds as it returns.

        Raises:
            TransportBroken: :meth:`end` was called.
        """
        if self._ended:
            raise TransportBroken("the link has ended")
        self._used = True
        return self._future_of(self._submit(call))

    async def run(
        self, call: Callable[[], _T], on_cancel: Callable[[], object] | None = None
    ) -> _T:
        """The result of ``call``. When this is cancelled, it still waits, and is cancelled then."""
        running = self.start(call)
        cancelled = await outlast(running, on_cancel)
        if cancelled is not None:
            raise cancelled
        return running.result()

    async def idle(self) -> None:
        """Wait until nothing runs; when cancelled, too, and is cancelled then."""
        every = asyncio.gather(*map(self._future_of, self._running), return_exceptions=True)
        cancelled = await outlast(every)
        if cancelled is not None:
            raise cancelled

    def end(self, last: Callable[[], object] | None = None) -> None:
        """Take no more calls but this one, after all others. Never waits; idempotent."""
        if self._ended:
            return
        self._ended = True
        if last is not None and self._used:
            before = set(self._running)
            with contextlib.suppress(RuntimeError):  # the interpreter is about to end
                self._submit(lambda: (wait(before), last()))
        self._pool.shutdown(wait=False)

    async def aclose(self, seconds: float) -> None:
        """Wait for so long until the threads have ended. Call :meth:`end` first."""
        pending = {self._future_of(each) for each in self._running}
        if pending:
            _, pending = await asyncio.wait(pending, timeout=seconds)
        if not pending:
            self._pool.shutdown(wait=True)

    def close_after_fork(self) -> None:
        """In a forked child: the threads are the parent's."""
        self._ended = True
        self._running.clear()

    def _submit(self, call: Callable[[], _T]) -> Future[_T]:
        # An executor lets go of a call only some time after it has told its outcome, and the
        # buffers of a payload must be their owner's again by then.
        calls = [call]
        running = self._pool.submit(lambda: calls.pop()())
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return running

    def _future_of(self, running: Future[_T]) -> asyncio.Future[_T]:
        there = asyncio.wrap_future(running, loop=self._loop)
        # Whoever waits for it raises it; when cut, the cut is the news.
        there.add_done_callback(lambda done: done.cancelled() or done.exception())
        return there


async def outlast(
    running: asyncio.Future[Any], on_cancel: Callable[[], object] | None = None
) -> asyncio.CancelledError | None:
    """Wait until ``running`` has ended, as it uses memory of others, also when cancelled.

    Args:
        running: Not cancelled by this.
        on_cancel: Called at once whenever this is cancelled.

    Returns:
        What cancelled this, for the caller to raise.
    """
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as exc:
            cancelled = exc
            if on_cancel is not None:
                on_cancel()
    return cancelled


def copy_bytes(sources: Iterable[NDArray[np.uint8]], targets: Iterable[memoryview]) -> None:
    """Copy, however the two sides are cut into pieces; without the GIL."""
    left = iter(targets)
    target = np.empty(0, np.uint8)
    for source in sources:
        rest = source
        while rest.size:
            while not target.size:
                target = np.frombuffer(next(left), np.uint8)
            step = min(rest.size, target.size)
            np.copyto(target[:step], rest[:step])
            rest, target = rest[step:], target[step:]
