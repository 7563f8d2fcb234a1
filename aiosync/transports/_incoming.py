"""The receiving side of shared memory: slots that the peer published, read in place.

Knows which slots this side still reads, and tells the peer when it left them. Must not import
torch or anything above ``transports``.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Hashable, Mapping
from typing import Any

from aiosync.errors import (
    FrameTooLarge,
    RemoteProtocolError,
    TransportBroken,
    TransportClosed,
)
from aiosync.transports._channel import FramedChannel
from aiosync.transports._fork import FORKING, close_in_child, keep_across_fork
from aiosync.transports._io import SocketIo
from aiosync.transports._publishing import LAST, LEFT, LEFT_SLOT, FrameCache
from aiosync.transports._segment_view import SegmentView
from aiosync.transports.base import Again, Received
from aiosync.types import AckStatus
from aiosync.wire import Ack, Message, Release, Repeat, Segment, encode_frame

__all__ = ["LAZY_NBYTES", "SlotReader"]

_MAX_SEGMENTS = 64  # a descriptor each, while something in this process uses one
# The release of a slot up to this size may wait for the next message to the peer, which then
# needs no system call of its own; senders keep one such slot more.
LAZY_NBYTES = 8 * 2**20
"""Bytes up to which the release of a slot may ride along with the next message."""


class SlotReader:
    """The segments that one peer announced.

    Args:
        channel: Where releases go.
        io: Brings the segments' descriptors.
        frames: Of this link.
    """

    def __init__(self, channel: FramedChannel, io: SocketIo, frames: FrameCache) -> None:
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._io = io
        self._frames = frames
        self._views: dict[int, SegmentView] = {}
        # What rides along with the next write: releases that the peer does not wait for.
        self._releases: list[Release] = []
        self._flushing = self._said_farewell = False
        keep_across_fork(self)
        close_in_child(self)

    def before_fork(self) -> None:
        """Copy what this side reads: it will leave it, but a child would go on reading it.

        Another thread may apply updates: :data:`FORKING` keeps it from leaving a slot, or taking
        one, before the fork.
        """
        for view in list(self._views.values()):
            view.keep_held()

    def close_after_fork(self) -> None:
        """In a forked child: close its copies of the descriptors."""
        for view in self._views.values():
            view.close_descriptor()

    def announce(self, message: Segment) -> None:
        """Take over the descriptor of a new segment.

        Raises:
            RemoteProtocolError: There came none, or too many segments are in use.
        """
        if not self._io.received_fds:
            raise RemoteProtocolError("the peer announced a segment without its descriptor")
        fd = self._io.received_fds.popleft()
        old = self._views.pop(message.segment_id, None)
        if old is not None:
            old.close()
        view = SegmentView(fd, message.segment_id, message.slot_nbytes)
        self._views[message.segment_id] = view
        self._drop_old_segments()

    def _drop_old_segments(self) -> None:
        if len(self._views) < 2:
            return
        newest = next(reversed(self._views), None)
        for segment_id, view in list(self._views.items()):
            if segment_id != newest and not view.held:
                del self._views[segment_id]
                view.close()
        if len(self._views) > _MAX_SEGMENTS:
            raise RemoteProtocolError("the peer announced too many segments")

    # -- reading -------------------------------------------------------------------------------

    def message(self, message: Message, ext: Mapping[str, Any]) -> Received:
        """A message whose payload is a slot, read in place.

        A wrong reference ends the link, and so does a slot for which there is no memory.
        """
        try:
            view, index = self._locate(ext)
        except (RemoteProtocolError, TransportBroken) as exc:
            self._channel.fail(exc)
            raise
        serial = self._hold(view, index)
        payload = view.view(index)[: ext["n"]]
        release = functools.partial(self._release, view, index, serial)
        return Received(message, [payload], payload.nbytes, release, (view.segment_id, index))

    def _hold(self, view: SegmentView, index: int) -> int:
        serial = view.count(index)
        with FORKING:
            if self._said_farewell:  # by another thread: the sender believes it
                raise TransportClosed(f"this end of the link to {self._channel.name} was closed")
            if not view.reads(index):
                # An operation of another thread that began on an older version, an optimizer's
                # step, may have written here since the slot was left.
                view.forget_writes(index)
            view.held.add((index, serial))
        return serial

    def _locate(self, ext: Mapping[str, Any]) -> tuple[SegmentView, int]:
        segment_id, index, nbytes = ext.get("seg"), ext.get("slot"), ext.get("n")
        if not (
            type(segment_id) is int
            and type(index) is int
            and type(nbytes) is int
            and index >= 0 <= nbytes
        ):
            raise RemoteProtocolError("the peer's slot reference is malformed")
        view = self._views.get(segment_id)
        if view is None or nbytes > view.slot_nbytes:
            raise _never_announced()
        if nbytes > self._channel.limits.max_payload_nbytes:
            raise FrameTooLarge(f"a payload of {nbytes} bytes is over the limit")
        try:
            view.view(index)
        except OSError as exc:
            raise TransportBroken(
                f"this process cannot map an update of {nbytes} bytes: {exc.strerror}"
            ) from exc
        return view, index

    def repeated(self, again: Again, ext: Mapping[str, Any]) -> Repeat:
        """Handle the same slot of the same segment again, with another version.

        Args:
            again: What the handler of the first message returned.
            ext: Names the slot; :meth:`message` has checked it.
        """
        view = self._views[ext["seg"]]
        index: int = ext["slot"]
        payload = view.view(index)

        def repeat(version: int) -> None:
            if view.closed:  # dropped meanwhile
                raise _never_announced()
            serial = self._hold(view, index)
            again(version, payload, functools.partial(self._release, view, index, serial))

        return repeat

    # -- leaving -------------------------------------------------------------------------------

    def _release(self, view: SegmentView, index: int, serial: int) -> None:
        if (index, serial) not in view.held:
            return
        with FORKING:
            view.held.discard((index, serial))
            view.forget_writes(index)
        if not self._channel.ended:
            self._queue(Release(view.segment_id, index, serial))
            if view.slot_nbytes > LAZY_NBYTES or len(self._releases) > 1:
                self._flush_soon()
            self._drop_old_segments()
        elif view.closed and not view.held:
            view.close()
            if self._views.get(view.segment_id) is view:
                del self._views[view.segment_id]

    def tell_retained(self, key: tuple[int, int]) -> None:
        """Tell the sender not to wait for a slot: something in this process still uses it."""
        view = self._views.get(key[0])
        if view is not None and not self._channel.ended:
            for index, serial in view.held:
                if index == key[1]:
                    self._queue(Release(key[0], index, serial, retained=True))
                    self._flush_soon()

    def _queue(self, release: Release) -> None:
        if not self._loop.is_closed():  # else a destructor after the end: nobody is left
            self._releases.append(release)

    def _flush_soon(self) -> None:
        if not self._flushing and not self._loop.is_closed():
            self._flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send the releases that wait."""
        self._flushing = False
        if self._releases and not self._channel.ended:
            self._channel.queue(self.pending())
        self._releases.clear()

    def farewell(self) -> None:
        """Say which slots this process goes on using; it reads none of the others any more.

        Neither what came and was not read, nor what may still come.
        """
        if self._channel.ended or self._loop.is_closed():
            return
        with FORKING:
            self._said_farewell = True
            held = [(view.segment_id, *each) for view in self._views.values() for each in view.held]
        said = [Release(*each, retained=True) for each in held] + [Release(0, 0, 0)]
        self._channel.queue(b"".join(encode_frame(each, 0, ext={LAST: True}) for each in said))

    def pending(self) -> bytes:
        """The releases that wait, as frames; :meth:`sent` says that they are on their way."""
        return b"".join(map(self._encode, self._releases))

    def sent(self) -> None:
        """What :meth:`pending` or :meth:`ack` returned was written."""
        self._releases.clear()

    def _encode(self, release: Release) -> bytes:
        key = (Release, release.segment_id, release.slot, release.retained)
        frame = self._frames.get(key) or self._frames.make(key, release)
        return frame.encode(release.serial)

    def ack(self, epoch: int, version: int, status: AckStatus) -> bytes:
        """An acknowledgement together with the releases that wait, in one frame if possible."""
        releases, frames = self._releases, self._frames
        if len(releases) == 1 and not releases[0].retained:
            left = releases[0]
            key: Hashable = (Ack, epoch, status, left.segment_id, left.slot)
            frame = frames.get(key)
            if frame is None:
                ext = {LEFT: left.segment_id, LEFT_SLOT: left.slot}
                frame = frames.make(key, Ack(epoch, version, status), ext)
            return frame.encode(version)
        key = (Ack, epoch, status)
        data = (frames.get(key) or frames.make(key, Ack(epoch, version, status))).encode(version)
        return data + self.pending() if releases else data

    def close(self) -> None:
        """Unmap everything that nobody uses; the rest, when it is left."""
        for segment_id, view in list(self._views.items()):
            view.close()
            if not view.held:
                del self._views[segment_id]


def _never_announced() -> RemoteProtocolError:
    return RemoteProtocolError("the peer named a slot that it never announced")
