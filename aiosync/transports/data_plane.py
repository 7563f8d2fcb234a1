"""Links whose large payloads travel beside the stream: over a process group, or Ray's store.

The control stream is a framed link that the event loop watches: messages, acknowledgements and
the end of the peer arrive there, without polling. A subclass of :class:`DataPlaneTransport`
moves the payloads that are too large to travel in the stream. Must not import torch, ray,
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

from aiosync._repr import in_every_state, text_of
from aiosync._tasks import call_soon
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
from aiosync.transports._forks import close_in_child
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
from aiosync.transports.framed_link import LEAST_SECONDS, FramedTransport
from aiosync.wire import ExtValue, Message, Setup, encode_frame

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "INLINE_NBYTES",
    "DataPlaneTransport",
    "PayloadState",
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
"""Key in an extension map: the size in bytes of the payload that travels beside the stream."""

_T = TypeVar("_T")


class Progress:
    """The progress of a copy that fills the memory of a payload from its start on.

    One thread copies, and any number of threads wait for it.
    """

    def __init__(self) -> None:
        self._nbytes = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def advance(self, nbytes: int) -> None:
        """Report that ``nbytes`` bytes from the start are in place."""
        with self._changed:
            self._nbytes = nbytes
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Report that the copy failed, so that no more bytes will follow."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, nbytes: int) -> None:
        """Block until ``nbytes`` bytes from the start are in place.

        Raises:
            LocalProtocolError: The copy failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._nbytes >= nbytes or self._error is not None)
            if self._error is not None:
                raise LocalProtocolError(f"the weights could not be copied: {self._error}")


class PayloadState:
    """State of one payload that all its links share. It is cleared before its memory is used again.

    Attributes:
        progress: Progress of the copy that fills the payload; ``None`` once it is complete.
        steadily: Runs a call that reads the payload in another thread, and fails if the weights
            change meanwhile, as the payload is the caller's own tensors; ``None`` if it is a copy.
            It is called with a function that starts a call in a thread, and with the call, and
            returns the future of the result.
        unusable: Error of a call of ``steadily``, after which no link can send the payload.
        bring_back: Brings back bytes that a transport keeps; ``None`` if no transport does. Its
            awaitable gives the buffers in order, and raises
            :class:`~aiosync.errors.LocalProtocolError` if the bytes are gone.
        made: Objects that transports made of the payload, by keys of their own.
    """

    __slots__ = ("bring_back", "made", "progress", "steadily", "unusable")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop everything that belongs to the payload."""
        self.progress: Progress | None = None
        self.steadily: Callable[..., asyncio.Future[Any]] | None = None
        self.unusable: BaseException | None = None
        self.bring_back: Callable[[], Awaitable[Sequence[memoryview]]] | None = None
        self.made: dict[object, asyncio.Future[Any]] = {}


class SharedPayload(list[memoryview]):
    """A payload that goes over several links.

    Attributes:
        share: Returns the state that its links share, made if there is none yet.
    """

    def __init__(self, views: Iterable[memoryview], share: Callable[[], PayloadState]) -> None:
        super().__init__(views)
        self.share: Callable[[], PayloadState] = share


class DataPlaneTransport(Transport):
    """A link over a control stream whose large payloads travel beside it. Owns the stream.

    A subclass moves one payload at a time in each direction, by the abstract methods. They run on
    the loop of the link and may raise :class:`~aiosync.errors.TransportError`, which ends the link.
    A method that is cancelled must not return while anything still reads from or writes to the
    memory that it was given.

    Args:
        control: A connected framed link, the control stream.
        inline_nbytes: Payloads up to this size travel in the control stream.
    """

    _kind: ClassVar[str]
    """Name of the path beside the stream in :class:`~aiosync.wire.Setup` messages."""

    def __init__(self, control: FramedTransport, inline_nbytes: int) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._inline_nbytes = inline_nbytes
        # The kinds of calls that run, for in_turn().
        self._running: set[str] = set()
        # True once send() has told the peer of its payload, so that a cut breaks the link.
        self._told = False
        # The futures of _until_told(), by key and value of the message that each waits for.
        self._awaited: dict[tuple[str, bytes], asyncio.Future[None]] = {}
        # True after a transfer failed: recv() then raises, even if the control stream still has
        # messages.
        self._broken = False
        # Done once the link has ended.
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._handler: Handler | None = None
        control.subscribe(self._deliver)
        control.call_on_end(self._end)

    @abc.abstractmethod
    async def _offer(
        self, payload: list[memoryview], state: PayloadState
    ) -> tuple[Mapping[str, ExtValue], Callable[[], Awaitable[None]]]:
        """Prepare to send a payload.

        Args:
            payload: The buffers of the payload, in order.
            state: The state of the payload, which its links share; kept until all is sent.

        Returns:
            The entries of the extension map for the peer, and a function that sends the payload
            once the peer has them. That function returns when the payload's memory may change. The
            two are not the steps of one generator, because a generator that waits cannot be closed.

        Raises:
            LocalProtocolError: The payload cannot be sent; the link goes on as before.
        """

    @abc.abstractmethod
    async def _fetch(
        self, ext: Mapping[str, ExtValue], nbytes: int, lend: Callable[[], list[memoryview]] | None
    ) -> tuple[Sequence[memoryview], Hashable]:
        """Receive a payload that the peer announced.

        Args:
            ext: The entries that the peer's :meth:`_offer` returned, unchecked.
            nbytes: Size of the payload in bytes.
            lend: Returns the buffers for the payload; ``None`` allows memory of the transport.

        Returns:
            The buffers with the payload, and :attr:`Received.key`, which is ``None`` for lent
            buffers.
        """

    def _hear(self, message: Setup) -> None:
        """Handle a :class:`~aiosync.wire.Setup` message of the peer that no call waits for.

        Raises:
            RemoteProtocolError: The message is illegal, which ends the link.
        """
        raise RemoteProtocolError(f"unexpected {message.key[:40]!a} from the peer")

    def _end(self) -> None:
        """Make transfers that are under way fail soon, as the link has ended. Never waits."""
        if not self._over.done() and not self._loop.is_closed():
            self._over.set_result(None)

    def _say(self, key: str, value: bytes = b"") -> None:
        """Send the peer a Setup message as soon as the stream is between two frames."""
        self._control.queue(encode_frame(Setup(self._kind, key, value)))

    def _until_told(self, key: str, value: bytes = b"") -> asyncio.Future[None]:
        """Return a future that is done once the peer sends this Setup message.

        A message that no call waits for is handled by :meth:`_hear`.
        """
        waiter = self._awaited[key, value] = self._loop.create_future()
        return waiter

    async def _outcome(self, waited: asyncio.Future[_T], seconds: float | None = None) -> _T:
        """Return the result of a future that the peer completes, unless the link ends first.

        Args:
            waited: The future; it is cancelled if it is not done when this returns.
            seconds: Seconds to wait; ``None`` for no limit.

        Raises:
            TransportBroken: The future was not done in time.
            LinkError: The error that ended the link.
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
        """Run a transfer. The link ends if the transfer fails, or is cut once it has begun.

        Args:
            what: Name of the transfer in errors.
            timeout: Seconds for the transfer; ``None`` for no limit.
            late: Type of the error for a timeout.
        """
        try:
            async with asyncio.timeout(timeout) as deadline:
                yield
        except BaseException as exc:
            # The error is raised again, or replaced by the one that caused it. A transfer to this
            # side has always begun, as recv() has the message; one to the peer once it was told.
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
        """End the link after a failed transfer, with the link's error, or as cut in mid-payload."""
        control = self._control
        if control.closed:
            return
        lost = control.error or (error if isinstance(error, LinkError) else None)
        if lost is None or isinstance(lost, PeerClosed | LocalProtocolError):
            # The stream may have ended between two messages, and yet in the middle of this payload.
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

        A send that is cut while its payload is on its way returns only once nothing reads the
        payload any more.
        """
        control = self._control
        with in_turn(self._running, "send", control.name):
            views = [view for view in map(flat_view, payload) if view.nbytes]
            nbytes = sum(view.nbytes for view in views)
            if nbytes <= self._inline_nbytes:
                await control.send(message, views, timeout=timeout)
                return
            # A stream makes these checks before it writes anything.
            encode_frame(message, nbytes, limits=control.limits)
            what = f"the payload of a {type(message).__name__} to {control.name}"
            # Until the peer is told of the payload, a cut leaves the link intact.
            self._told = False
            async with self._transfer(what, timeout, SendTimeout):
                # This is a checkpoint before the first byte, where cancelling harms nothing.
                await asyncio.sleep(0)
                control.check()
                state = payload.share() if isinstance(payload, SharedPayload) else PayloadState()
                about, push = await self._offer(views, state)
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

    def _on_setup(self, message: Setup) -> None:
        """Wake the call that waits for this message of the peer, or hand it to :meth:`_hear`."""
        if message.kind != self._kind:
            raise RemoteProtocolError(
                f"the peer moves payloads by {message.kind[:40]!a}, this side by "
                f"{self._kind!r}: construct both schemes with the same back-end"
            )
        waiter = self._awaited.pop((message.key, message.value), None)
        if waiter is None:
            self._hear(message)
        elif not waiter.done():
            # A future that is done was cancelled: this side gave up.
            waiter.set_result(None)

    def _deliver(self, received: Received) -> bool:
        """Handle a message that has no payload in the control stream; False leaves it to recv()."""
        message = received.message
        if isinstance(message, Setup):
            self._on_setup(message)
            return True
        if self._handler is None or (received.ext and _NBYTES in received.ext):
            # recv() fetches the payload of this message.
            return False
        return self._handler(received) is not False

    async def recv(self, *, into: Lender | None = None, timeout: float | None = None) -> Received:
        """See :meth:`Transport.recv`. Cancellation: class B; idle it is safe.

        A recv() that is cut while a payload is on its way beside the stream returns only once
        nothing writes to the lent buffers any more.
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
                    # As over a stream: a shorter wait would end each link that announces one.
                    timeout = max(LEAST_SECONDS, timeout + started - clock())
                what += f" from {self._control.name}"
                async with self._transfer(what, timeout, RecvTimeout):
                    await self._take_beside(received, received.ext, into)
            return received

    async def _take_beside(
        self, received: Received, ext: Mapping[str, ExtValue], into: Lender | None
    ) -> None:
        """Check the size that the peer announced, and put the fetched payload into ``received``."""
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
        """Close the link at once; the path beside the stream follows as soon as it can."""
        self._control.abort()

    @in_every_state
    def __repr__(self) -> str:
        return repr(self._control).replace(type(self._control).__name__, type(self).__name__, 1)


class Threads:
    """Threads for blocking calls: those of torch and Ray, and copies.

    A thread is started when it is first needed.

    Args:
        name: Name of the threads.
        count: Greatest number of calls that run at a time; other calls wait for their turn.
    """

    def __init__(self, name: str, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, name)
        self._loop = asyncio.get_running_loop()
        # Each thread takes its call off as that ends, so only a copy can be iterated.
        self._running: set[Future[Any]] = set()
        # If no call was ever started, end() makes no last call, which would start a thread.
        self._used = self._ended = False
        self._last: Callable[[], object] | None = None
        close_in_child(self)

    def start(self, call: Callable[[], _T]) -> asyncio.Future[_T]:
        """Run ``call`` in a thread, and drop every reference to it as it returns.

        Returns:
            The future of its result.

        Raises:
            TransportBroken: :meth:`end` was called, or the system starts no thread.
        """
        if self._ended:
            raise TransportBroken("the link has ended")
        self._used, calls = True, [call]
        try:
            running = self._submit(calls)
        except RuntimeError as exc:
            # The executor keeps what it could not start, and runs it in its next thread.
            calls.clear()
            raise TransportBroken(f"a thread cannot start: {exc}") from exc
        return self._future_of(running)

    async def run(
        self, call: Callable[[], _T], on_cancel: Callable[[], object] | None = None
    ) -> _T:
        """Return the result of ``call``, which runs in a thread.

        Args:
            call: The blocking call.
            on_cancel: Called at once whenever this is cancelled.

        Cancellation:
            Waits until ``call`` has ended, and is raised then.
        """
        return await result_of(self.start(call), on_cancel)

    async def idle(self) -> None:
        """Wait until all calls that were started have ended, and none reads a tensor any more.

        Cancellation:
            Goes on to wait, and is raised then.
        """
        every = asyncio.gather(*map(self._future_of, self._running.copy()), return_exceptions=True)
        await result_of(every)

    def end(self, last: Callable[[], object] | None = None) -> None:
        """Take no more calls. Never waits; idempotent.

        Args:
            last: A last call, which runs after all others, if any call ever ran.
        """
        if self._ended:
            return
        self._ended, self._last = True, last if self._used else None
        if self._loop.is_running():
            # A signal's handler may have interrupted a call of an executor, whose locks this thread
            # would then wait for until it gives them back itself.
            call_soon(self._loop, self._shut_down)
        else:
            self._shut_down()

    def _shut_down(self) -> None:
        """Make the last call after all others, and let the threads end. Idempotent."""
        last, self._last = self._last, None
        if last is not None:
            before = set(self._running)
            # The interpreter may be about to end.
            with contextlib.suppress(RuntimeError):
                self._submit([lambda: (wait(before), last())])
        self._pool.shutdown(wait=False)

    async def aclose(self, seconds: float) -> None:
        """Wait until the threads have ended, at most for ``seconds``. Call :meth:`end` first."""
        self._shut_down()
        pending = {self._future_of(each) for each in self._running.copy()}
        if pending:
            _, pending = await asyncio.wait(pending, timeout=seconds)
        if not pending:
            self._pool.shutdown(wait=True)

    def close_after_fork(self) -> None:
        """Take no more calls in a forked child, as only the parent has the threads."""
        self._ended = True
        self._running.clear()

    def _submit(self, calls: list[Callable[[], _T]]) -> Future[_T]:
        # An executor drops its reference to a call only some time after the result is known, and by
        # then the buffers of a payload must belong to their owner alone. So the executor gets a
        # function that takes the call off a list.
        running = self._pool.submit(lambda: calls.pop()())
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return running

    def _future_of(self, running: Future[_T]) -> asyncio.Future[_T]:
        there = asyncio.wrap_future(running, loop=self._loop)
        # The exception counts as seen: a caller that waits raises it, and a caller that was
        # cancelled raises the cancellation instead.
        there.add_done_callback(lambda done: done.cancelled() or done.exception())
        return there


async def outlast(
    running: asyncio.Future[Any], on_cancel: Callable[[], object] | None = None
) -> asyncio.CancelledError | None:
    """Wait until ``running`` has ended, even if this call is cancelled.

    The wait is needed because ``running`` uses memory that other code reuses after this returns.

    Args:
        running: The future of the call in another thread. This never cancels it.
        on_cancel: Called at once whenever this is cancelled.

    Returns:
        The error that cancelled this call, for the caller to raise; ``None`` if nothing did.
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
    """Return the result of ``running`` once it has ended, waiting for it as :func:`outlast` does.

    Cancellation:
        Waits until ``running`` has ended, and is raised then.
    """
    if (cancelled := await outlast(running, on_cancel)) is not None:
        raise cancelled
    return running.result()


def cut(pieces: Iterable[memoryview], sizes: Iterable[int]) -> Iterator[list[memoryview]]:
    """Cut a payload into parts of the given sizes, without a copy.

    Args:
        pieces: The buffers of the payload, in order.
        sizes: Sizes of the parts in bytes, in order.

    Yields:
        For each size, the views of that part, in order; a single view if it lies in one piece.
    """
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
    """Copy bytes from arrays to buffers, each in order, without holding the GIL.

    The two sides may be cut into different pieces.
    """
    sizes = [source.nbytes for source in sources]
    for source, views in zip(sources, cut(targets, sizes), strict=False):
        at = 0
        for view in views:
            np.copyto(np.frombuffer(view, np.uint8), source[at : at + view.nbytes])
            at += view.nbytes


def first_line(error: BaseException | None) -> str:
    """Return the first line of an error's text. Some libraries put a stack on the next ones."""
    return text_of(error).strip().partition("\n")[0]
