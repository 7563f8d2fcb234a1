"""Links whose large payloads travel beside the stream: over a process group, or Ray's store.

The control stream is a framed link that the event loop watches: messages, acknowledgements and
the end of the peer arrive there, awaited without polling. A subclass of :class:`DataPlaneTransport`
moves the bytes of payloads that are too large to travel in the stream. Must not import torch, ray,
schemes or a concrete transport.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from aiosync._repr import in_every_state
from aiosync.errors import (
    AiosyncError,
    LocalProtocolError,
    PeerClosed,
    ProtocolError,
    RecvTimeout,
    RemoteProtocolError,
    SendTimeout,
    TransportBroken,
)
from aiosync.protocol import seconds_text
from aiosync.transports._processes import close_in_child
from aiosync.transports.base import (
    Handler,
    Lender,
    LinkError,
    Payload,
    Received,
    Transport,
    flat_view,
    in_turn,
    take_buffers,
    without_frames,
)
from aiosync.transports.stream import FramedTransport
from aiosync.wire import ExtValue, Message, Setup, encode_frame

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "CHANGED",
    "COPYING",
    "INLINE_NBYTES",
    "KEPT",
    "STEADY",
    "DataPlaneTransport",
    "Progress",
    "SharedPayload",
    "Threads",
    "copy_bytes",
    "cut",
    "first_line",
    "outlast",
    "result_of",
]

INLINE_NBYTES = 128 * 2**10
"""Payloads up to this size travel in the control stream."""

_NBYTES = "beside"
"""Entry of an extension map: bytes of the payload that travels beside the stream."""

_T = TypeVar("_T")

COPYING = "copying"
"""Key of :attr:`SharedPayload.memo`: the :class:`Progress` of the copy that fills the payload."""

STEADY = "steady"
"""Key of :attr:`SharedPayload.memo`: has a call made in another thread that reads the caller's own
tensors. Given what starts such a call, and the call, it returns the future of its result."""

CHANGED = "changed"
"""Key of :attr:`SharedPayload.memo`: why that failed, if it was for the tensors."""

KEPT = "kept"
"""Key of :attr:`SharedPayload.memo`: a transport keeps the bytes.

A call that brings them back, as buffers in order: an awaitable of ``Sequence[memoryview]``, which
raises :class:`~aiosync.errors.LocalProtocolError` where they are gone.
"""


class SharedPayload(list[memoryview]):
    """A payload that goes over several links, with a place for what is made of it once.

    Attributes:
        memo: Entries of transports, by keys of their own; cleared when the payload's memory is
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


class DataPlaneTransport(Transport):
    """A link over a control stream whose large payloads travel beside it. Owns the stream.

    A subclass moves one payload at a time in each direction, by the abstract methods. They run on
    the loop of the link and may raise :class:`~aiosync.errors.TransportError`, which ends the link.
    When one of them is cancelled it must not return before nothing reads from or writes to the
    memory that it was given.

    Args:
        control: A connected framed link.
        inline_nbytes: Payloads up to this size travel in it.
    """

    _kind: ClassVar[str]
    """Names the way beside the stream in :class:`~aiosync.wire.Setup` messages."""

    def __init__(self, control: FramedTransport, inline_nbytes: int) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._inline_nbytes = inline_nbytes
        self._running: set[str] = set()
        self._told = False
        self._awaited: dict[tuple[str, bytes], asyncio.Future[None]] = {}
        self._broken = False  # whatever the control stream may still have in hand
        self._over: asyncio.Future[None] = self._loop.create_future()  # the link
        self._handler: Handler | None = None
        control.subscribe(self._deliver)
        control.call_on_end(self._end)

    @abc.abstractmethod
    async def _offer(
        self, payload: list[memoryview], memo: dict[Any, Any]
    ) -> tuple[Mapping[str, ExtValue], Callable[[], Awaitable[None]]]:
        """Prepare to send.

        Args:
            payload: The bytes, in order.
            memo: Belongs to the payload, see :class:`SharedPayload`; kept until all is sent.

        Returns:
            What the peer has to know, and what sends once it was told. That ends when the
            payload's memory may change. No generator of both: one that waits cannot be closed.

        Raises:
            LocalProtocolError: It cannot be sent; the link is as it was.
        """

    @abc.abstractmethod
    async def _fetch(
        self, ext: Mapping[str, ExtValue], nbytes: int, lend: Callable[[], list[memoryview]] | None
    ) -> tuple[Sequence[memoryview], Hashable]:
        """Receive what the peer told of.

        Args:
            ext: What the peer's :meth:`_offer` returned, unchecked.
            nbytes: Size of the payload.
            lend: Gives the buffers that the payload has to land in; ``None`` where memory of the
                transport is welcome.

        Returns:
            The bytes, and :attr:`Received.key`: ``None`` where they lie in lent buffers.
        """

    def _hear(self, message: Setup) -> None:
        """The peer said what nobody waits for.

        Raises:
            RemoteProtocolError: That is illegal; it ends the link.
        """
        raise RemoteProtocolError(f"unexpected {message.key[:40]!a} from the peer")

    def _end(self) -> None:
        """The link has ended: make what is under way fail soon. Never waits."""
        if not self._over.done() and not self._loop.is_closed():
            self._over.set_result(None)

    def _say(self, key: str, value: bytes = b"") -> None:
        """Tell the peer something, once the stream is between two frames."""
        self._control.queue(encode_frame(Setup(self._kind, key, value)))

    def _until_told(self, key: str, value: bytes = b"") -> asyncio.Future[None]:
        """Until the peer tells this, which it must not do unasked."""
        waiter = self._awaited[key, value] = self._loop.create_future()
        return waiter

    async def _outcome(self, waited: asyncio.Future[_T], seconds: float | None = None) -> _T:
        """What a future brings that the peer decides on; its wait ends with the link, or late.

        Raises:
            TransportBroken: Nothing came in time. What ended the link is raised as it is.
        """
        try:
            either: set[asyncio.Future[Any]] = {waited, self._over}
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            self._control.check()
            if not waited.done():
                raise TransportBroken(
                    f"{self._kind} did not deliver the payload within {seconds:g} s"
                )
            return waited.result()
        finally:
            waited.cancel()

    @property
    def channel(self) -> FramedTransport:
        """See :attr:`Transport.channel`: the control stream."""
        return self._control

    @contextlib.asynccontextmanager
    async def _transfer(
        self, what: str, timeout: float | None, late: type[AiosyncError]
    ) -> AsyncIterator[None]:
        """A transfer that ends the link when it is cut once it has begun, or fails."""
        try:
            async with asyncio.timeout(timeout) as deadline:
                yield
        except BaseException as exc:  # raised again, or what it comes from
            ours = isinstance(exc, AiosyncError)
            if (
                late is RecvTimeout
                or self._told
                or (ours and not isinstance(exc, LocalProtocolError))
            ):
                self._fail(exc, what)
            if deadline.expired() and not ours and isinstance(exc, TimeoutError):
                raise late(f"{what} did not get through within {seconds_text(timeout)}") from exc
            if ours and not isinstance(exc, ProtocolError):
                self._control.check()
            raise

    def _fail(self, error: BaseException, what: str) -> None:
        control = self._control
        if control.closed:
            return
        lost = control.error or (error if isinstance(error, LinkError) else None)
        if lost is None or isinstance(lost, PeerClosed | LocalProtocolError):
            # The end of a stream between two messages may be one within this payload.
            broken = TransportBroken(f"the link was lost in the middle of {what}: {error}")
            broken.__cause__ = lost or (error if isinstance(error, AiosyncError) else None)
            lost = broken
        self._broken = True
        control.fail(lost)
        control.error = without_frames(lost)

    # -- sending -------------------------------------------------------------------------------

    def send_nowait(self, message: Message, payload: Payload = ()) -> bool:
        """See :meth:`Transport.send_nowait`; payloads beside the stream are always refused."""
        nbytes = sum([flat_view(each).nbytes for each in payload])
        if "send" in self._running or nbytes > self._inline_nbytes:
            self._control.check()
            return False
        return self._control.send_nowait(message, payload)

    def send_batch_nowait(self, messages: Sequence[Message]) -> bool:
        """See :meth:`Transport.send_batch_nowait`."""
        return "send" not in self._running and self._control.send_batch_nowait(messages)

    async def send(
        self, message: Message, payload: Payload = (), *, timeout: float | None = None
    ) -> None:
        """See :meth:`Transport.send`. Cancellation: class B.

        A send that is cut while its payload is on its way returns once nothing reads the payload
        any more.
        """
        control = self._control
        with in_turn(self._running, "send", control.name):
            views = [view for view in map(flat_view, payload) if view.nbytes]
            nbytes = sum(view.nbytes for view in views)
            if nbytes <= self._inline_nbytes:
                await control.send(message, views, timeout=timeout)
                return
            encode_frame(message, nbytes, limits=control.limits)  # the checks of a stream
            what = f"the payload of a {type(message).__name__} to {control.name}"
            self._told = False  # until then a cut harms nothing
            async with self._transfer(what, timeout, SendTimeout):
                await asyncio.sleep(0)  # a checkpoint, before the first byte
                control.check()
                memo = payload.memo if isinstance(payload, SharedPayload) else {}
                about, push = await self._offer(views, memo)
                ext = {**about, _NBYTES: nbytes}
                self._told = True
                if not control.send_nowait(message, ext=ext):
                    await control.send(message, ext=ext)
                await push()
                control.check()

    # -- receiving -----------------------------------------------------------------------------

    def subscribe(self, handler: Handler) -> bool:
        """See :meth:`Transport.subscribe`; for messages without payload."""
        self._handler = handler
        return True

    def _deliver(self, received: Received) -> bool:
        message = received.message
        if isinstance(message, Setup):
            if message.kind != self._kind:
                raise RemoteProtocolError(
                    f"the peer moves payloads by {message.kind[:40]!a}, this side by "
                    f"{self._kind!r}: construct both schemes with the same back-end"
                )
            waiter = self._awaited.pop((message.key, message.value), None)
            if waiter is None:
                self._hear(message)
            elif not waiter.done():  # otherwise this side has just called it off
                waiter.set_result(None)
            return True
        if self._handler is None or (received.ext and _NBYTES in received.ext):
            return False  # its payload is fetched by recv()
        return self._handler(received) is not False

    async def recv(self, *, into: Lender | None = None, timeout: float | None = None) -> Received:
        """See :meth:`Transport.recv`. Cancellation: class B; idle it is safe.

        Cut while a payload is on its way beside the stream, it returns once nothing writes to
        the lent buffers any more.
        """
        clock = self._loop.time
        started = clock()
        with in_turn(self._running, "recv", self._control.name):
            if self._broken:
                self._control.check()
            received = await self._control.recv(into=into, timeout=timeout)
            if received.ext and _NBYTES in received.ext:
                what = f"the payload of a {type(received.message).__name__}"
                if timeout is not None:
                    timeout = max(0.0, timeout + started - clock())
                what += f" from {self._control.name}"
                async with self._transfer(what, timeout, RecvTimeout):
                    await self._take_beside(received, received.ext, into)
            return received

    async def _take_beside(
        self, received: Received, ext: Mapping[str, ExtValue], into: Lender | None
    ) -> None:
        limits, nbytes = self._control.limits, ext[_NBYTES]
        if type(nbytes) is not int or nbytes < 1:
            raise RemoteProtocolError("a payload beside the stream has no valid size")
        if not self._control.takes_payloads:
            raise RemoteProtocolError("the peer sent a payload before it was allowed to")
        if nbytes > limits.max_payload_nbytes:
            raise RemoteProtocolError(
                f"a payload of {nbytes} bytes is over the limit of {limits.max_payload_nbytes} "
                "(Limits.max_payload_nbytes)"
            )

        own = into is None and self.capabilities.zero_copy_recv
        lend = functools.partial(take_buffers, into, received.message, nbytes, limits)
        received.payload, received.key = await self._fetch(ext, nbytes, None if own else lend)
        received.nbytes, received.ext = nbytes, None

    # -- closing -------------------------------------------------------------------------------

    def abort(self) -> None:
        """Close at once; what carries payloads follows as soon as it can."""
        self._control.abort()

    @in_every_state
    def __repr__(self) -> str:
        return repr(self._control).replace(type(self._control).__name__, type(self).__name__, 1)


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
        return await result_of(self.start(call), on_cancel)

    async def idle(self) -> None:
        """Wait until nothing runs; when cancelled, too, and is cancelled then."""
        every = asyncio.gather(*map(self._future_of, self._running), return_exceptions=True)
        await result_of(every)

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


async def result_of(
    running: asyncio.Future[_T], on_cancel: Callable[[], object] | None = None
) -> _T:
    """What ``running`` has brought once it has ended; as :func:`outlast`, which see."""
    if (cancelled := await outlast(running, on_cancel)) is not None:
        raise cancelled
    return running.result()


def cut(pieces: Iterable[memoryview], sizes: Iterable[int]) -> Iterator[list[memoryview]]:
    """The same bytes in other pieces: a list of views for each size, of one if it lies in one."""
    left, piece = iter(pieces), memoryview(b"")
    for size in sizes:
        views: list[memoryview] = []
        missing = size
        while missing:
            while not piece:
                piece = next(left)
            views.append(piece[:missing])
            piece = piece[missing:]
            missing -= views[-1].nbytes
        yield views


def copy_bytes(sources: Sequence[NDArray[np.uint8]], targets: Iterable[memoryview]) -> None:
    """Copy, however the two sides are cut into pieces; without the GIL."""
    sizes = [source.nbytes for source in sources]
    for source, views in zip(sources, cut(targets, sizes), strict=False):
        at = 0
        for view in views:
            np.copyto(np.frombuffer(view, np.uint8), source[at : at + view.nbytes])
            at += view.nbytes


def first_line(error: BaseException | None) -> str:
    """What a library's error says, without the stack that some put behind it."""
    return str(error).strip().partition("\n")[0]
