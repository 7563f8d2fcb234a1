"""The transport contract: awaitable ``send``, ``recv``, ``ack`` over one established link.

A transport moves messages of :mod:`aiosync.wire` and, beside each, an optional payload of raw
bytes. It knows nothing of torch, tensors or schemes and must never import them. The published
suite in :mod:`aiosync.testing` checks every statement made here; see
``docs/topics/transports.md``. A scheme gets its links from a fabric, see ``schemes.fabric``: a new
transport needs one, or a scheme with a ``create_transport``. The end of this module has helpers of
several transports: for calls that take turns and end in time, for byte views of buffers, and for
errors that are kept.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import errno
import operator
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    ClassVar,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    runtime_checkable,
)

import numpy as np

from aiosync._repr import text_of
from aiosync.errors import (
    AiosyncError,
    LocalProtocolError,
    ProtocolError,
    SyncTimeout,
    TransportBroken,
    TransportBusy,
    TransportError,
)
from aiosync.protocol import seconds_text
from aiosync.types import AckStatus, Capabilities, Limits
from aiosync.wire import Ack, ExtValue, Message

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from typing_extensions import Buffer

    from aiosync.transports.byte_stream import ByteStream
    from aiosync.transports.shared_memory.publisher import SlotPublisher
    from aiosync.transports.shared_memory.reader import SlotReader

__all__ = [
    "Channel",
    "Handler",
    "Lender",
    "LinkError",
    "Payload",
    "Received",
    "Transport",
    "TransportBackend",
    "again",
    "flat_view",
    "in_time",
    "in_turn",
    "is_no_room",
    "make_ack",
    "take_buffers",
    "without_frames",
]

LinkError = TransportError | ProtocolError
_Error = TypeVar("_Error", bound=BaseException)
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_is_readonly = operator.attrgetter("readonly")

Payload: TypeAlias = "Sequence[Buffer]"
"""Buffers that are sent one after the other. The transport only reads them."""

Lender: TypeAlias = "Callable[[Message, int], Sequence[Buffer]]"
"""Called with a message and its payload size; returns writable buffers of that size in total.

It may raise an :class:`~aiosync.errors.AiosyncError` to refuse: the link then breaks, because
there is no place for the payload that follows. A lender may be an object with one or both of these:

- A method ``landed(nbytes)``. The transport may call it now and then with the number of bytes, from
  the start of the payload, that are in place, so that the lender can read them while they are in
  the cache. It must not raise.
- A handler ``arrived``, or ``None``. The transport may call it with a message whose whole payload
  came at once, and go on waiting, where ``recv()`` would return that message: this is quicker by a
  turn of the loop. It is called and may raise as a handler of :meth:`Transport.subscribe`, but it
  has to take the message: what it returns does not count.
"""


@dataclass(slots=True)
class Received:
    """One message that arrived, with its payload.

    Attributes:
        message: The decoded message.
        payload: The payload's buffers: those that the lender gave, or the transport's own.
        nbytes: Bytes of the payload in total.
        key: Key of the transport's own memory that holds the payload: equal keys on one link stand
            for the same memory. ``None`` for buffers that were lent, or made for this payload only.
        ext: Entries that the peer's transport added for this side's transport.
    """

    message: Message
    payload: Sequence[memoryview] = ()
    nbytes: int = 0
    key: Hashable | None = None
    ext: Mapping[str, ExtValue] | None = None


Handler: TypeAlias = "Callable[[Received], bool | None]"
"""Handles a message, or returns False to leave it to ``recv()``; see :meth:`Transport.subscribe`.
"""


@runtime_checkable
class TransportBackend(Protocol):
    """Structural type of a link, for code that does not subclass :class:`Transport`."""

    capabilities: ClassVar[Capabilities]

    async def send(
        self, message: Message, payload: Payload = (), *, timeout: float | None = None
    ) -> None:
        """See :meth:`Transport.send`."""

    async def recv(self, *, into: Lender | None = None, timeout: float | None = None) -> Received:
        """See :meth:`Transport.recv`."""

    async def ack(
        self,
        epoch: int,
        version: int,
        status: AckStatus,
        *,
        error: BaseException | None = None,
        timeout: float | None = None,
    ) -> None:
        """See :meth:`Transport.ack`."""

    async def aclose(self) -> None:
        """See :meth:`Transport.aclose`."""

    def abort(self) -> None:
        """See :meth:`Transport.abort`."""


class Channel(Protocol):
    """The framed stream below a link, as the code above the transports uses it.

    ``FramedTransport`` of ``framed_link`` is one, and describes the attributes.
    """

    io: ByteStream
    limits: Limits
    name: str
    ended: bool
    pidfd: int
    written_nbytes: int

    def refuse_payloads(self) -> None:
        """Allow the peer only small messages, from the next frame on."""

    def allow_payloads(self) -> None:
        """Allow the peer all messages within ``limits``, from the next frame on."""

    def watch_process(self, pid: int) -> None:
        """Notice the end of the peer's process."""

    def call_on_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` once when the link ends."""


class Transport(abc.ABC):
    """One established link between a sender and a receiver.

    A link is not thread-safe: use it on the loop on which it was made. At most one ``send()`` (or
    ``ack()``) and one ``recv()`` may run at a time; a second one raises
    :class:`~aiosync.errors.TransportBusy`.

    Every operation raises :class:`~aiosync.errors.TransportClosed` after this side closed,
    :class:`~aiosync.errors.PeerClosed` after the peer closed between messages, and
    :class:`~aiosync.errors.TransportBroken` after the link was lost or a transfer was cut. The
    last is sticky.
    """

    capabilities: ClassVar[Capabilities]

    publisher: SlotPublisher | None = None
    """Publisher that names slots of shared memory to the peer; ``None`` if this end names none."""

    slots: SlotReader | None = None
    """Reader of the slots of shared memory that the peer names; ``None`` without shared memory."""

    follows_copies_above: int | None = None
    """Size in bytes above which a payload may still be copied into its memory while it is sent.

    The copy fills the memory from its start on. ``None`` if every payload must be complete.
    """

    def take_segments(self, wanted: bool) -> None:
        """Allow or forbid the peer to announce memory to be read in place, if the link has that."""
        del wanted

    @property
    def channel(self) -> Channel | None:
        """The framed stream below this link, which watches the peer's process; ``None`` without."""
        return None

    @abc.abstractmethod
    async def send(
        self, message: Message, payload: Payload = (), *, timeout: float | None = None
    ) -> None:
        """Hand one message and its payload to the link.

        When the call returns, the link took the message; the peer may not have read it yet. The
        call waits while the peer does not read (backpressure). It is always a checkpoint.

        Args:
            message: The message to send.
            payload: Contiguous buffers, sent one after the other. They must not change until the
                call returns.
            timeout: Seconds for the whole call; ``None`` waits for ever.

        Raises:
            SendTimeout: The link did not take the message in time. If a part of it was
                written, the link is broken from then on.
            TransportBusy: Another ``send()`` or ``ack()`` is running.
            LocalProtocolError: The message or payload is larger than the limits allow.

        Cancellation:
            As ``capabilities.send_cancellation`` says.
        """

    @abc.abstractmethod
    async def recv(self, *, into: Lender | None = None, timeout: float | None = None) -> Received:
        """Wait for the next message. Always a checkpoint.

        Args:
            into: Lends the buffers for the payload. Without it the payload lands in the
                transport's own memory, which lives until its last view is gone.
            timeout: Seconds until the message is complete, 10 ms at least; ``None`` waits for ever.

        Raises:
            RecvTimeout: No whole message arrived in time. The link is intact, unless the deadline
                passed in the middle of a payload: the link is broken then.
            PeerClosed: The peer closed between messages.
            RemoteProtocolError: The peer sent something illegal. Sticky.
            TransportBusy: Another ``recv()`` is running.

        Cancellation:
            As ``capabilities.recv_cancellation`` says; cancelling an idle ``recv()`` never
            loses a message.
        """

    async def ack(
        self,
        epoch: int,
        version: int,
        status: AckStatus,
        *,
        error: BaseException | None = None,
        timeout: float | None = None,
    ) -> None:
        """Acknowledge one update: RECEIVED, APPLIED, or NACK with the error.

        Args:
            epoch: Epoch of the update.
            version: Version of the update.
            status: Status of the update at this receiver.
            error: For a NACK, the reason; its type's name and its text travel.
            timeout: As for :meth:`send`. Errors and cancellation are those of :meth:`send`, too.
        """
        await self.send(make_ack(epoch, version, status, error), timeout=timeout)

    def send_nowait(self, message: Message, payload: Payload = ()) -> bool:
        """Send without waiting, if the link can take the whole of it now.

        Returns:
            True when the link took everything; False when nothing was written, and
            :meth:`send` has to be awaited instead. Raises as :meth:`send` does.
        """
        return False

    def send_batch_nowait(self, messages: Sequence[Message]) -> bool:
        """Send several messages without payload in one write, if the link can take them now.

        Returns:
            True when the link took all of them; False when nothing was written.
        """
        return len(messages) == 1 and self.send_nowait(messages[0])

    def subscribe(self, handler: Handler) -> bool:
        """Hand messages to ``handler`` as they are read, bypassing ``recv()``.

        This is quicker by a turn of the loop. Messages whose payload needs a lent buffer, and
        messages that were read before, still come through :meth:`recv`, which also goes on to
        report the end of the link. The order of messages is kept as long as a ``recv()`` is
        always waiting.

        Args:
            handler: Called on the loop; a message for which it returns False comes through
                :meth:`recv` after all. An :class:`~aiosync.errors.TransportError` or
                :class:`~aiosync.errors.ProtocolError` that it raises ends the link; it must
                raise nothing else.

        Returns:
            False if this transport has no such way; every message comes through :meth:`recv` then.
        """
        return False

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close the link, in bounded time, and wake every waiter with ``TransportClosed``.

        Idempotent.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """Close the link at once, without waiting; for destructors and signals. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def make_ack(
    epoch: int,
    version: int,
    status: AckStatus,
    error: BaseException | None,
    *,
    is_base: bool = False,
) -> Ack:
    """Build the acknowledgement message, with the error's type name and text for a NACK.

    ``is_base`` tells the sender that the next update may come as a delta to this one.
    """
    if error is None:
        return Ack(epoch=epoch, version=version, status=status, is_base=is_base)
    return Ack(
        epoch=epoch,
        version=version,
        status=status,
        error_type=type(error).__name__,
        error_text=text_of(error) or type(error).__name__,
        is_base=is_base,
    )


@contextlib.contextmanager
def in_turn(running: set[str], call: str, name: str) -> Iterator[None]:
    """Let only one call of a kind run at a time on a link.

    Args:
        running: Kinds of the calls that run on the link; updated.
        call: Kind of this call, such as ``"send"``.
        name: Name of the peer in errors.

    Raises:
        TransportBusy: Another call of this kind is running.
    """
    if call in running:
        raise TransportBusy(f"another {call}() is running on the link to {name}")
    running.add(call)
    try:
        yield
    finally:
        running.discard(call)


@contextlib.asynccontextmanager
async def in_time(seconds: float | None, late: type[SyncTimeout], what: str) -> AsyncIterator[None]:
    """Cancel the block after so many seconds, and raise ``late``.

    Args:
        seconds: Seconds for the block; ``None`` for no limit.
        late: Type of the error.
        what: First part of the error's text, which says what did not happen in time.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as exc:
        # The block itself may raise a SyncTimeout, which is a TimeoutError, too.
        if isinstance(exc, AiosyncError):
            raise
        raise late(f"{what} within {seconds_text(seconds)}") from exc


def flat_view(buffer: object) -> memoryview:
    """Return a byte view of a contiguous buffer of any format and shape."""
    view = memoryview(cast("bytes", buffer))
    if view.format == "B" and view.ndim == 1:
        return view
    try:
        return view.cast("B")
    except (TypeError, ValueError):
        if not view.c_contiguous:
            raise
        # Python casts no complex numbers, none of the other byte order, and no empty table.
        return np.frombuffer(view, np.uint8).data if view.nbytes else memoryview(b"")


def take_buffers(
    into: Lender | None, message: Message, nbytes: int, limits: Limits
) -> list[memoryview]:
    """Borrow the buffers for a payload, or allocate them if there is no lender.

    Raises:
        LocalProtocolError: The lent buffers are read-only or do not have the size of the payload;
            or there is no lender, and the payload is larger than ``limits`` let this side allocate.
        TransportBroken: There is no lender, and no memory for the payload.
    """
    if into is not None:
        views = [*map(flat_view, into(message, nbytes))]
        total = sum(map(len, views))
        if total != nbytes or any(map(_is_readonly, views)):
            raise LocalProtocolError(f"lent {total} bytes, or read-only ones, for {nbytes}")
        return views
    if nbytes > limits.max_buffer_nbytes:
        raise LocalProtocolError(
            f"a payload of {nbytes} bytes needs lent buffers: recv(into=...) allocates at most "
            f"{limits.max_buffer_nbytes} bytes itself (Limits.max_buffer_nbytes)"
        )
    try:
        return [memoryview(bytearray(nbytes))]
    except MemoryError as exc:
        raise TransportBroken(f"this process has no memory for {nbytes} bytes") from exc


def without_frames(error: _Error) -> _Error:
    """Drop the tracebacks of an error that is going to be kept, and of its causes.

    The frames of a traceback would keep their local variables alive, among them buffers of the size
    of a model. Tracebacks of other types of errors stay, because they show a bug.
    """
    link: BaseException | None = error
    while isinstance(link, (AiosyncError, OSError)):
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def again(error: _Error) -> _Error:
    """Return a copy of an error that is kept, to be raised in its place.

    Raising the kept error itself several times would pile up tracebacks on it.
    """
    fresh = type(error)(*error.args)
    fresh.__cause__ = error.__cause__
    return fresh


def is_no_room(error: object) -> bool:
    """Return True if an operation failed because no descriptor or no memory is left.

    Either the limit of this process or that of its host was reached.
    """
    return isinstance(error, OSError) and error.errno in _NO_ROOM
