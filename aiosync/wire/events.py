"""What a frame decoder reports, and a loop over it for bytes that are in memory already.

This module must never import asyncio, anyio or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from aiosync.errors import ProtocolError
from aiosync.wire.messages import ExtValue, Message

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiosync.wire.framing import FrameDecoder

__all__ = ["EndOfStream", "Event", "Failed", "FrameEnd", "FrameStart", "iter_events"]


@dataclass(slots=True)
class FrameStart:
    """A header arrived.

    Without payload this is the whole frame and no :class:`FrameEnd` follows. With one, the
    decoder waits for :meth:`FrameDecoder.lend`.

    Attributes:
        message: The decoded message.
        ext: What the peer's transport added, or ``None``.
        payload_nbytes: Bytes of the payload.
    """

    message: Message
    ext: Mapping[str, ExtValue] | None
    payload_nbytes: int


@dataclass(frozen=True, slots=True)
class FrameEnd:
    """The payload is complete; the decoder dropped the lent buffers."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The peer broke the rules. The last event; taking events again returns it again.

    Attributes:
        error: What was wrong, ready to be raised.
    """

    error: ProtocolError


@dataclass(frozen=True, slots=True)
class EndOfStream:
    """The stream ended. The last event; taking events again returns it again.

    Attributes:
        clean: It ended between two frames; False when a frame was cut.
    """

    clean: bool


Event: TypeAlias = FrameStart | FrameEnd | Failed | EndOfStream
"""What a decoder reports."""


def iter_events(
    decoder: FrameDecoder,
    data: Buffer,
    lend: Callable[[FrameStart], Sequence[Buffer]],
    *,
    eof: bool = False,
) -> Iterator[Event]:
    """Feed bytes of any length to a decoder and yield the events that they make.

    Args:
        decoder: May be in any state but waiting for buffers.
        data: C-contiguous bytes; copied.
        lend: Called for every frame with a payload, after its event was yielded; returns the
            buffers for it.
        eof: No more bytes come after these.

    Yields:
        Events in order. A final event ends the iteration; the rest of ``data`` is dropped.
    """
    view = memoryview(data).cast("B")
    while True:
        event = decoder.next_event()
        if event is not None:
            yield event
            if isinstance(event, Failed | EndOfStream):
                return
            if isinstance(event, FrameStart) and event.payload_nbytes:
                decoder.lend(lend(event))
        elif view:
            target = decoder.get_buffer()
            nbytes = min(len(target), len(view))
            target[:nbytes] = view[:nbytes]
            decoder.buffer_updated(nbytes)
            view = view[nbytes:]
        elif eof:
            decoder.feed_eof()
            eof = False
        else:
            return
