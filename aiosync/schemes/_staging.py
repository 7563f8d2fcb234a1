"""Where updates land at the receiver before they are applied, and when that memory is reused.

Links that carry bytes land in private buffers; shared memory is read in place. Either way the
module may be flipped to views of the buffer, so it is given back only once no tensor of this
process uses it any more. Must not import asyncio.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from aiosync.errors import RemoteProtocolError, TransportBroken
from aiosync.protocol import Assembly
from aiosync.tensors import FlatBuffer, Layout
from aiosync.transports.base import Received, Transport
from aiosync.transports.shared_memory import NamedSlot, SlotReader
from aiosync.wire import Manifest, Message, RunningChecksum, Update

__all__ = ["Staged", "Staging"]

_KNOWN_LAYOUTS = 4
_NO_VALUES: Mapping[str, Any] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Staged:
    """One complete update that waits to be applied, or that the module views."""

    epoch: int
    version: int
    layout: Layout
    flat: FlatBuffer
    values: Mapping[str, Any]
    give_back: Callable[[], None]
    slot: NamedSlot | None = None  # whose memory it is, if it is shared
    lent: bool = False  # it is that of the link


class Staging:
    """The receiver's buffers.

    Args:
        transport: The link that updates come from.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._layouts: dict[bytes, Layout] = {}
        self._spare: list[FlatBuffer] = []
        self._landing: FlatBuffer | None = None
        self._assembly: Assembly | None = None  # of the update that comes in parts
        capabilities = transport.capabilities
        # Every part has a checksum.
        self.checks: bool = capabilities.cross_host and not capabilities.whole_payloads
        self._part = memoryview(b"")  # what is landing
        self._running: RunningChecksum | None = None
        self._mapped: dict[tuple[Any, ...], FlatBuffer] = {}
        self.slots: SlotReader | None = _slots_of(transport)
        self.epoch: int | None = None  # of what the word of the link names

    def learn(self, manifest: Manifest) -> None:
        """Remember the layout of updates to come."""
        layout = Layout(manifest)
        self._layouts.pop(layout.digest, None)
        self._layouts[layout.digest] = layout
        while len(self._layouts) > _KNOWN_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]

    def lend(self, message: Message, nbytes: int) -> list[memoryview]:
        """Buffers for the payload of ``message``, checked against its manifest."""
        if self.checks:
            update, assembly, landing = self._assembly_for(message)
            start, stop = assembly.place(update, nbytes)
            self._part = landing.memoryview()[start:stop]
            self._running = RunningChecksum()
            return [self._part]
        layout = self._layout_of(message, nbytes)
        self._landing = self._new_landing(layout)
        return [self._landing.memoryview()]

    def _new_landing(self, layout: Layout) -> FlatBuffer:
        for index, flat in enumerate(self._spare):
            if flat.nbytes == layout.nbytes:
                return self._spare.pop(index)
        self._spare.clear()
        try:
            return FlatBuffer(layout.nbytes)
        except MemoryError as exc:
            raise TransportBroken(
                f"this process has no memory for an update of {layout.nbytes} bytes"
            ) from exc

    # -- updates in checked parts --------------------------------------------------------------

    def _assembly_for(self, message: Message) -> tuple[Update, Assembly, FlatBuffer]:
        """What ``message`` is a part of, and where that lands; a newer update takes the place."""
        layout = self._layout_of(message, None)
        assert isinstance(message, Update)
        current, landing = self._assembly, self._landing
        if (
            current is not None
            and landing is not None
            and (current.epoch, current.version) == (message.epoch, message.version)
            and current.digest == message.digest
        ):
            return message, current, landing
        if landing is None or landing.nbytes != layout.nbytes:
            self._landing = self._assembly = None  # before another one is allocated
            landing = self._landing = self._new_landing(layout)
        self._assembly = Assembly(layout.nbytes, layout.digest, message.epoch, message.version)
        return message, self._assembly, landing

    def take_part(self, received: Received) -> Staged | None:
        """A part of an update arrived.

        Returns:
            The update if it is complete.

        Raises:
            RemoteProtocolError: It does not belong there.
            TransportBroken: It was damaged on its way.
        """
        message, assembly, landing = self._assembly_for(received.message)
        start, stop = assembly.place(message, received.nbytes)
        running = self._running if self._running and received.nbytes else RunningChecksum()
        self._running = None
        running.update(landing.memoryview()[start + running.nbytes : stop])
        if not assembly.arrived(message, running.digest()):
            return None
        layout = self._layouts[message.digest]
        self._assembly = self._landing = None
        give_back = lambda: self._put_back(landing)  # noqa: E731 - bound to this buffer
        return Staged(assembly.epoch, assembly.version, layout, landing, message.values, give_back)

    def next_link(self, transport: Transport) -> None:
        """Go on with another link: what was verified of an update stays."""
        self._transport = transport
        if self._assembly is not None:
            self._assembly.resume()
        self._mapped.clear()
        if self.slots is not None:
            self.slots.close()
        self.slots, self.epoch = _slots_of(transport), None

    @property
    def partial(self) -> tuple[int, int, int] | None:
        """Epoch, version and verified bytes of an update that is here in part."""
        assembly = self._assembly
        if assembly is None or not assembly.good_nbytes:
            return None
        return assembly.epoch, assembly.version, assembly.good_nbytes

    # -- whole updates -------------------------------------------------------------------------

    @property
    def lender(self) -> Callable[[Message, int], list[memoryview]] | None:
        """What ``recv(into=...)`` gets: nothing where the link lends its own memory."""
        return None if self._transport.capabilities.zero_copy_recv else _Lender(self)

    def landed(self, nbytes: int) -> None:
        """So many bytes of the part that is on its way are in place: look while they are hot."""
        running = self._running
        if running is not None and nbytes > running.nbytes:
            running.update(self._part[running.nbytes : nbytes])

    def _layout_of(self, message: Message, nbytes: int | None) -> Layout:
        if not isinstance(message, Update):
            raise RemoteProtocolError(f"{type(message).__name__} came with a payload")
        layout = self._layouts.get(message.digest)
        if layout is None:
            raise _unknown_manifest()
        if message.codec != "dense" or (message.chunk is not None and nbytes is not None):
            raise RemoteProtocolError(f"codec {message.codec!r} was not agreed on")
        if nbytes not in (None, layout.nbytes):
            raise RemoteProtocolError(
                f"an update of {nbytes} bytes does not fit its manifest of {layout.nbytes} bytes"
            )
        return layout

    def take(self, received: Received) -> Staged:
        """The update that arrived, as tensors can see it."""
        message = received.message
        layout = self._layout_of(message, received.nbytes)
        assert isinstance(message, Update)
        if isinstance(received.key, tuple):  # the link's own memory, which it lends
            flat = self._map(received.key, received.payload[0])
            values, give_back = message.values, received.release
            return Staged(
                message.epoch, message.version, layout, flat, values, give_back, lent=True
            )
        landing, self._landing = self._landing, None
        flat = landing if landing is not None else self._new_landing(layout)
        if landing is None and received.nbytes:
            _fill(flat, received)
        received.release()
        give_back = lambda: self._put_back(flat)  # noqa: E731 - bound to this buffer
        return Staged(message.epoch, message.version, layout, flat, message.values, give_back)

    def _map(self, key: tuple[Any, ...], payload: memoryview) -> FlatBuffer:
        """A link's own memory as tensors can see it; the same object for the same memory."""
        flat = self._mapped.get(key)
        if flat is None or flat.nbytes < payload.nbytes:
            for old in [old for old in self._mapped if old[0] != key[0]]:
                del self._mapped[old]  # what the sender replaced
            flat = self._mapped[key] = FlatBuffer.wrap(payload.obj)
        return flat

    # -- slots of shared memory ----------------------------------------------------------------

    def open_named(self) -> Staged | None:
        """What the word of the link names, if that is news, where it lies. On any thread.

        Raises:
            ApplyError: The sender was stopped while it wrote.
            RemoteProtocolError: The word names nothing that was announced.
        """
        slots, epoch = self.slots, self.epoch
        slot = None if slots is None or epoch is None else slots.open()
        if slots is None or slot is None or epoch is None:
            return None
        layout = self._layouts.get(slot.digest)
        if layout is None or layout.nbytes != slot.nbytes:
            slots.leave(slot, keep=False)
            return None  # its manifest is on its way, and a message behind it
        flat = self._mapped.get(slot.key)
        if flat is None:
            flat = self._mapped[slot.key] = FlatBuffer.wrap(slot.memory)

        def give_back() -> None:
            kept = not flat.exclusive()
            if kept:  # a state_dict() that somebody kept, a graph: their memory stays as it is
                self._mapped.pop(slot.key, None)
            slots.leave(slot, keep=kept)

        return Staged(epoch, slot.version, layout, flat, _NO_VALUES, give_back, slot)

    def _put_back(self, flat: FlatBuffer) -> None:
        if len(self._spare) < 2:
            self._spare.append(flat)

    def retire(self, staged: Staged) -> None:
        """The module left ``staged``: give its memory back, unless something else uses it.

        Then it goes when its last user lets go.
        """
        if staged.slot is not None or staged.flat.exclusive():
            staged.give_back()

    def keep(self, staged: Staged | None) -> None:
        """Give what is in a slot memory of this process: nobody keeps the sender from it now."""
        if self.slots is not None and staged is not None and staged.slot is not None:
            self._mapped.pop(staged.slot.key, None)
            self.slots.leave(staged.slot, keep=True)

    def close(self) -> None:
        """Forget every buffer."""
        self._spare.clear()
        self._assembly = self._landing = self._running = None
        self._part = memoryview(b"")
        self._mapped.clear()
        self._layouts.clear()
        if self.slots is not None:
            self.slots.close()
            self.slots = None


def _slots_of(transport: Transport) -> SlotReader | None:
    if transport.slots is not None:
        # What was named last before the link ended is still to be read.
        transport.slots.outlives_link = True
    return transport.slots


class _Lender:
    """Lends, and looks at what has landed; see :data:`aiosync.transports.base.Lender`."""

    __slots__ = ("_staging", "landed")

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self.landed = staging.landed if staging.checks else None

    def __call__(self, message: Message, nbytes: int) -> list[memoryview]:
        return self._staging.lend(message, nbytes)


def _unknown_manifest() -> RemoteProtocolError:
    return RemoteProtocolError("an update names a manifest that was never sent")


def _fill(flat: FlatBuffer, received: Received) -> None:
    target = flat.memoryview()
    offset = 0
    for piece in received.payload:
        target[offset : offset + piece.nbytes] = piece
        offset += piece.nbytes
