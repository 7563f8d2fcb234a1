"""The receiving side of shared memory: the slot that this link's word names, read in place.

Used by the thread that applies an update, whichever that is: one at a time. Must not import
asyncio, torch or anything above ``transports``.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from aiosync.errors import ApplyError, RemoteProtocolError, TransportBroken
from aiosync.transports._fork import FORKING, close_in_child, keep_across_fork
from aiosync.transports._io import DescriptorStream
from aiosync.transports._page import BELL, HOLDS, WANT, Page
from aiosync.transports._segment import HEADER, HEADER_NBYTES
from aiosync.transports._segment_view import SegmentView
from aiosync.wire import PageMessage, Segment

__all__ = ["NamedSlot", "SlotReader"]

_MAX_SEGMENTS = 64  # a descriptor or two each, while something in this process uses one
_QUICK_TRIES = 100
_PAUSE_SECONDS = 0.001
_PATIENCE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class NamedSlot:
    """A slot that a word named, locked.

    Attributes:
        want: The word.
        version: What is in it.
        digest: Of the manifest of that.
        nbytes: Of the payload.
        memory: What the payload is the beginning of.
        key: Names the mapping that this lies in.
    """

    want: int
    version: int
    digest: bytes
    nbytes: int
    memory: memoryview
    key: tuple[int, int, int]
    view: SegmentView
    index: int


class SlotReader:
    """The segments and the page that one peer announced.

    Args:
        io: Brings their descriptors.
    """

    def __init__(self, io: DescriptorStream) -> None:
        self._io = io
        self._views: dict[int, SegmentView] = {}
        self._page: Page | None = None
        self._newest: SegmentView | None = None
        self._held: NamedSlot | None = None
        self._seen = 0  # the word that was dealt with
        self.outlives_link: bool = False  # whoever reads here closes it
        self._closed = False
        keep_across_fork(self)
        close_in_child(self)

    def before_fork(self) -> None:
        """Copy what this side reads: it will leave it, but a child would go on reading it.

        Another thread may apply updates: :data:`FORKING` keeps it from doing so before the fork.
        """
        for view in list(self._views.values()):
            for index in list(view.locked):
                view.keep(index)

    def close_after_fork(self) -> None:
        """In a forked child: close its copies of the descriptors, and read no words."""
        self._page = self._newest = None
        for view in self._views.values():
            view.close_descriptors()
        self._views.clear()

    def announce(self, message: Segment | PageMessage) -> None:
        """Take over the descriptor of a new segment, or of the page.

        Raises:
            RemoteProtocolError: There came none, or too many are in use.
            TransportBroken: It cannot be mapped: no room, no descriptor, or no ``/proc``.
        """
        if not self._io.received_fds:
            raise RemoteProtocolError("the peer announced shared memory without its descriptor")
        fd = self._io.received_fds.popleft()
        if self._closed:  # nobody reads here any more
            os.close(fd)
            return
        try:
            if isinstance(message, PageMessage):
                if self._page is not None:
                    raise RemoteProtocolError("the peer announced a second page")
                self._page = Page(fd)
            elif message.segment_id in self._views:
                raise RemoteProtocolError("the peer announced a segment twice")
            else:
                view = SegmentView(fd, message.segment_id, message.slot_nbytes)
                self._views[message.segment_id] = self._newest = view
                fd = -1
        except (OSError, ValueError) as exc:
            raise TransportBroken(f"shared memory cannot be mapped here: {exc}") from exc
        finally:
            if fd >= 0:
                os.close(fd)
        self._drop_old_segments()

    def _drop_old_segments(self) -> None:
        with FORKING:  # or another thread is about to lock a slot of one
            newest = next(reversed(self._views), None)
            for segment_id, view in list(self._views.items()):
                if segment_id != newest and not view.locked:
                    del self._views[segment_id]
                    view.close()
        if len(self._views) > _MAX_SEGMENTS:
            raise RemoteProtocolError("the peer announced too many segments")

    @property
    def words(self) -> memoryview | None:
        """The words of the page, the first of which names a slot; ``None`` before it came."""
        return None if self._page is None else self._page.words

    @property
    def is_behind(self) -> bool:
        """Whether the word names something that was not dealt with yet."""
        return self._page is not None and self._page.words[WANT] != self._seen

    @property
    def named_version(self) -> int:
        """Version that the word names, if it was not dealt with yet; else 0. Nothing is locked."""
        words = self.words
        want = self._seen if words is None else words[WANT]
        if words is None or want == self._seen:
            return 0
        view = self._view_of(want)
        try:
            version: int = 0 if view is None else HEADER.unpack_from(view.view(want & 255), 0)[0]
        except (OSError, RemoteProtocolError):
            return 0
        return version if words[WANT] == want else 0  # else it may be that of another one

    def ring_me(self, wanted: bool) -> None:
        """Have the sender tell of each new word from now on, or not any more."""
        if self._page is not None:
            self._page.words[BELL] = int(wanted)

    def open(self) -> NamedSlot | None:
        """Lock the slot that the word names; ``None`` if that was dealt with.

        Also where its segment was not announced yet: a message that is on its way does, and
        then asks for it.

        Raises:
            ApplyError: The sender writes to it, and does not stop.
            RemoteProtocolError: What the word names is no slot.
            OSError: There is no room for a mapping.
        """
        page, tries, until = self._page, 0, 0.0
        if page is None or page.words[WANT] == self._seen:
            return None
        words = page.words
        while True:
            want = words[WANT]
            index = want & 255
            with FORKING:
                view = self._view_of(want)
                if view is None:
                    return None
                locked = view.lock(index)
                if locked and words[WANT] == want:
                    break
                if locked and not self._reads(view, index):
                    view.unlock(index)
            tries += 1
            if tries > _QUICK_TRIES:
                until = until or time.monotonic() + _PATIENCE_SECONDS
                if time.monotonic() > until:
                    raise ApplyError("the trainer was stopped while it wrote a version")
                time.sleep(_PAUSE_SECONDS)
        held = self._held
        if held is not None and held.view is view and held.index == index:
            mapped, key = view.held(index)
        else:
            # An operation of another thread that began on an older version, an optimizer's step,
            # may have written here since the slot was left.
            mapped, key = view.fresh(index)
        version, nbytes, digest, _ = HEADER.unpack_from(mapped, 0)
        memory = mapped[HEADER_NBYTES:]
        if not version or nbytes > len(memory):
            view.unlock(index)
            raise RemoteProtocolError("the peer named a slot that holds nothing")
        return NamedSlot(want, version, digest, nbytes, memory, key, view, index)

    def _view_of(self, want: int) -> SegmentView | None:
        last_byte, newest = want >> 8 & 255, self._newest
        if newest is not None and newest.segment_id & 255 == last_byte:
            return newest
        # Another thread may announce one meanwhile.
        return next((v for i, v in list(self._views.items()) if i & 255 == last_byte), None)

    def _reads(self, view: SegmentView, index: int) -> bool:
        held = self._held
        return held is not None and held.view is view and held.index == index

    def hold(self, slot: NamedSlot) -> None:
        """The model has what is in this slot."""
        self._held, self._seen = slot, slot.want
        if self._page is not None:
            self._page.words[HOLDS] = slot.version

    def has(self, slot: NamedSlot) -> bool:
        """Whether a slot is one of this peer's."""
        return self._views.get(slot.view.segment_id) is slot.view

    def refuse(self, slot: NamedSlot) -> None:
        """What is in this slot is not for the model: do not open it again."""
        self._seen = slot.want

    def leave(self, slot: NamedSlot, *, keep: bool) -> None:
        """Give a slot back, which may be done already.

        Args:
            slot: Which one.
            keep: Something in this process goes on using the memory: it stays as it is.
        """
        with FORKING:
            # The same slot may have been named again, and be held for that.
            taken = self._held is not slot and self._reads(slot.view, slot.index)
            if taken or slot.index not in slot.view.locked:
                return
            if keep:
                slot.view.keep(slot.index)
                slot.view.abandon(slot.index)
            slot.view.unlock(slot.index)
            if self._held is slot:
                self._held = None

    def leave_others(self) -> None:
        """Give back what an interrupt left locked."""
        for view in self._views.values():
            for index in view.locked - {self._held.index if self._held else -1}:
                view.unlock(index)
        if len(self._views) > 1:
            self._drop_old_segments()

    def close(self) -> None:
        """Give everything back; what views the memory keeps it, and what another thread took."""
        self._closed = True
        self._page = self._held = self._newest = (
            None  # unmapped once nobody looks at its words any more
        )
        with FORKING:
            for view in self._views.values():
                for index in view.locked:
                    view.keep(index)
                view.close()
            self._views.clear()
