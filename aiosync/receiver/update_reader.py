"""Arriving updates: their manifests, their buffers, and when these buffers are free again.

Links that carry bytes write them into private buffers; shared memory is read in place. In both
cases a module may be flipped to views of the buffer, so the buffer is reused only once no tensor of
this process uses it any more. Must not import asyncio.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

from aiosync._meter import SyncFacts
from aiosync.device_memory import DeviceMemory
from aiosync.errors import ConfigError, PeerClosed, RemoteProtocolError, TransportBroken
from aiosync.protocol import Assembly
from aiosync.receiver.kept_base import KeptBase
from aiosync.receiver.scheme_hooks import AfterApply
from aiosync.tensors import FlatBuffer, Layout, copy_pieces
from aiosync.tensors.accelerator import accelerator
from aiosync.tensors.device_buffer import DeviceBuffer
from aiosync.transports.base import Received, Transport
from aiosync.transports.shared_memory import NamedSlot, SlotReader
from aiosync.wire import Leave, ManifestMessage, Message, Refuse, RunningChecksum, Update

__all__ = ["Buffers", "Staged", "UpdateReader"]

_KNOWN_LAYOUTS = 4
_NO_VALUES: Mapping[str, Any] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Staged:
    """One complete update that waits to be applied, or that the module views.

    Attributes:
        give_back: Call this once, when the model no longer needs the memory.
        taken: True if the model has it, or had it. If it is false, and there is no error, a newer
            update came before it.
        error: The reason of a refusal; or, if it was taken, the exception of the ``applied`` hook.
        reported: True once the receiver knows the outcome.
    """

    epoch: int
    version: int
    layout: Layout
    flat: FlatBuffer
    values: Mapping[str, Any]
    give_back: Callable[[], None]
    # The traceparent of the sender's span. That of a slot is only read if there is an observer.
    trace: str | None = None
    # Bytes that travelled.
    wire_nbytes: int = 0
    # The slot whose memory this is, and the reader of the slot, if the memory is shared.
    slot: NamedSlot | None = None
    slots: SlotReader | None = None
    # True if the memory is the link's.
    lent: bool = False
    # The async hook that has to end before the outcome is known, and the facts to count then.
    hook: tuple[AfterApply, SyncFacts] | None = None
    taken: bool = False
    error: BaseException | None = None
    reported: bool = False
    # Time when an update in a slot was sent, in nanoseconds since the Unix epoch.
    sent_at: int = 0
    # Times when its first byte arrived, 0.0 if that is unknown, and when all of it was here, on
    # time.perf_counter()'s clock.
    began: float = 0.0
    at: float = field(default_factory=time.perf_counter)

    @property
    def age(self) -> float:
        """Seconds since the update was sent; if that is unknown, since all of it was here."""
        if self.sent_at:
            return max(0.0, time.time() - self.sent_at * 1e-9)
        return time.perf_counter() - self.at


class Buffers:
    """Spare buffers, kept to be used again."""

    def __init__(self) -> None:
        self._spare: list[FlatBuffer] = []

    def take(self, nbytes: int) -> FlatBuffer:
        """Return a buffer of exactly so many bytes.

        Raises:
            TransportBroken: There is no memory.
        """
        for index, flat in enumerate(self._spare):
            if flat.nbytes == nbytes:
                return self._spare.pop(index)
        self._spare.clear()
        try:
            return FlatBuffer(nbytes)
        except MemoryError as exc:
            raise TransportBroken(
                f"this process has no memory for an update of {nbytes} bytes"
            ) from exc

    def put_back(self, flat: FlatBuffer) -> None:
        """Keep a buffer that its owner no longer uses, unless a tensor still views it.

        The memory of a buffer that is not kept goes with its last view.
        """
        if len(self._spare) < 2 and flat.exclusive():
            self._spare.append(flat)


class UpdateReader:
    """Reads the updates that arrive over a link, and over each link that replaces it.

    Give it a link with :meth:`use_link`, pass it to ``recv(into=...)`` as :attr:`lender`, and every
    manifest and update to :meth:`read`.

    Args:
        takes_deltas: Keep the bytes of updates that arrive in checked chunks, for deltas to them.
        arrived: Takes small updates as they are read, where ``recv()`` would return them.

    Attributes:
        slots: Reads the slot that the link's word names; ``None`` if the link has no word.
        epoch: Epoch of the versions in slots, once it is known.
        lender: The argument of ``recv(into=...)``: this object, or ``None`` if the link lends its
            own memory.
        arrived: As given, unless deltas are taken: their work must not hold the loop.
    """

    def __init__(
        self,
        takes_deltas: bool = False,
        arrived: Callable[[Received], bool | None] | None = None,
    ) -> None:
        self.arrived: Callable[[Received], bool | None] | None
        self.arrived = None if takes_deltas else arrived
        self._kept = KeptBase() if takes_deltas else None
        # The chunk that is landing, if it is a delta.
        self._encoded: memoryview | None = None
        # The layouts of the newest manifests, by their digests.
        self._layouts: dict[bytes, Layout] = {}
        self._buffers = Buffers()
        # The buffer of the update that arrives.
        self._landing: FlatBuffer | None = None
        # True if a server passes on what has landed there.
        self._is_shared = False
        # The update that arrives in chunks.
        self._assembly: Assembly | None = None
        # The chunk that is landing, and the checksum over its bytes.
        self._chunk = memoryview(b"")
        self._running: RunningChecksum | None = None
        # Buffers over slots, and over memory that the link lends, by the key of that memory.
        self._mapped: dict[tuple[Any, ...], FlatBuffer] = {}
        # True if each chunk has a checksum.
        self._in_chunks = False
        # Time when the first byte of the arriving update came.
        self._began = 0.0
        self.slots: SlotReader | None = None
        self.epoch: int | None = None
        self.lender: UpdateReader | None = self

    def use_link(self, transport: Transport) -> None:
        """Go on with this link; verified chunks of an update stay."""
        capabilities = transport.capabilities
        self._in_chunks = capabilities.cross_host and not capabilities.whole_payloads
        self.lender = None if capabilities.zero_copy_recv else self
        if self._assembly is not None:
            self._assembly.resume()
        self._mapped.clear()
        if self.slots is not None:
            self.slots.close()
        self.slots, self.epoch = transport.slots, None
        if self.slots is not None:
            # The last slot that the word named before the link ended is still to be read.
            self.slots.outlives_link = True

    def end_link(self) -> None:
        """Give a lost link's device memory back, unless its word names a version to read yet.

        A trainer that restarts needs that memory before it can be reached. On the loop.
        """
        slots, known = self.slots, [*self._mapped.values()]
        buffers = [flat for flat in known if isinstance(flat, DeviceBuffer)]
        if buffers and slots is not None and not slots.is_behind:
            # The model's update keeps its buffer, but was copied.
            for flat in buffers:
                flat.forget()
            self._mapped.clear()
            slots.close()

    @property
    def partial(self) -> tuple[int, int, int, bytes] | None:
        """Epoch, version, verified bytes and digest of an update of which a chunk is here."""
        assembly = self._assembly
        if assembly is None or not assembly.good_nbytes:
            return None
        return assembly.epoch, assembly.version, assembly.good_nbytes, assembly.digest

    def drop_partial(self) -> None:
        """Forget the chunks of the update that arrives, which then begins anew."""
        self._assembly = None

    def share_partial(self) -> tuple[Layout, FlatBuffer, Callable[[], None]] | None:
        """Return the update that arrives, for a server to pass on; the next gets other memory.

        Returns:
            Its layout, its memory, and the function that gives the memory back: call either this
            one or that of the whole update; ``None`` if no chunk has arrived.
        """
        assembly, landing = self._assembly, self._landing
        if assembly is None or landing is None or not assembly.good_nbytes:
            return None
        layout = self._layouts.get(assembly.digest)
        if layout is None:
            return None
        self._is_shared = True
        return layout, landing, functools.partial(self._buffers.put_back, landing)

    @property
    def base(self) -> tuple[int, int]:
        """Epoch and version of the update to which the next may be a delta; (0, 0) for none."""
        return (0, 0) if self._kept is None else self._kept.held

    def __call__(self, message: Message, nbytes: int) -> list[memoryview]:
        """Lend buffers for the payload of ``message``, checked against its manifest."""
        update, layout = self._layout_of(message, nbytes)
        if self._in_chunks:
            assembly, landing = self._assembly_of(update, layout)
            start, stop = assembly.place(update, nbytes)
            # The update begins anew, and the weight server that got it from share_partial() still
            # passes on the bytes that came before.
            if self._is_shared and not assembly.good_nbytes:
                landing = self._take_landing(layout.nbytes)
            self._running = RunningChecksum()
            self._chunk, self._encoded = landing.memoryview()[start:stop], None
            if update.base is not None and self._kept is not None:
                self._chunk = self._encoded = self._kept.lend(update, nbytes)
            return [self._chunk]
        self._landing, self._began = self._buffers.take(layout.nbytes), time.perf_counter()
        return [self._landing.memoryview()]

    def landed(self, nbytes: int) -> None:
        """Add landed bytes of the chunk to its checksum, while the CPU's caches still hold them."""
        running = self._running
        if running is not None and self._encoded is None and nbytes > running.nbytes:
            running.update(self._chunk[running.nbytes : nbytes])

    def refuse(self, message: Message) -> NoReturn:
        """Raise the error for a message that brings no update.

        Raises:
            TransportBroken: The trainer cannot keep the link, and says why.
            RemoteProtocolError: The message does not belong there.
        """
        if isinstance(message, Refuse):
            raise TransportBroken(f"the trainer ended the link: {message.error_text}")
        raise RemoteProtocolError(f"the trainer sent an unexpected {type(message).__name__}")

    def read(self, received: Received) -> Staged | None:
        """Take over a manifest, an update or a chunk of an update.

        Returns:
            The update that this message completes, as tensors can view it, if it completes one.

        Raises:
            PeerClosed: The message is a farewell.
            RemoteProtocolError: The message is none of these, or does not belong there.
            TransportBroken: The update was damaged on its way, or there is no memory for it.
        """
        message = received.message
        if isinstance(message, Leave):
            raise PeerClosed("the other end said farewell, and closed the link")
        if isinstance(message, ManifestMessage):
            self._keep_layout(Layout(message.manifest))
            return None
        update, layout = self._layout_of(message, received.nbytes)
        epoch, version, values = update.epoch, update.version, update.values
        more = update.trace, layout.nbytes
        landing: FlatBuffer | None
        if self._in_chunks:
            whole = self._assemble(update, layout, received)
            if whole is None:
                return None
            landing, wire_nbytes = whole
            more = update.trace, wire_nbytes
        elif isinstance(received.key, tuple):
            # The link lends its own memory.
            lent = self._map(received.key, received.payload[0])
            return Staged(epoch, version, layout, lent, values, _nothing, *more, lent=True)
        else:
            landing, self._landing = self._landing, None
            if landing is None:
                landing = self._buffers.take(layout.nbytes)
                copy_pieces(landing.memoryview(), received.payload)
        give_back = functools.partial(self._buffers.put_back, landing)
        began, self._began = self._began, 0.0
        return Staged(epoch, version, layout, landing, values, give_back, *more, began=began)

    def _keep_layout(self, layout: Layout) -> None:
        """Keep the layout of a manifest as the newest one, and forget the oldest ones."""
        self._layouts.pop(layout.digest, None)
        self._layouts[layout.digest] = layout
        while len(self._layouts) > _KNOWN_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]

    def _layout_of(self, message: Message, nbytes: int) -> tuple[Update, Layout]:
        """Return a message and its layout; raise if it is no update that this link may carry."""
        if not isinstance(message, Update):
            self.refuse(message)
        layout = self._layouts.get(message.digest)
        if layout is None:
            raise RemoteProtocolError("an update names a manifest that was never sent")
        if message.codec == "delta":
            is_agreed = message.base is not None and self._in_chunks and self._kept is not None
        else:
            is_agreed = message.codec == "dense" and message.base is None
        if not is_agreed or (message.chunk is not None and not self._in_chunks):
            raise RemoteProtocolError(f"codec {message.codec!r} was not agreed on")
        if nbytes != layout.nbytes and not self._in_chunks:
            raise RemoteProtocolError(
                f"an update of {nbytes} bytes does not fit its manifest of {layout.nbytes} bytes"
            )
        return message, layout

    # -- updates in checked chunks -------------------------------------------------------------

    def _assembly_of(self, update: Update, layout: Layout) -> tuple[Assembly, FlatBuffer]:
        """Return the assembly and the buffer of a chunk's update, after beginning it if it is new.

        Another update that was arriving is dropped then. Its buffer is used again, unless the size
        differs or a server still passes it on.
        """
        named = (update.epoch, update.version, update.digest)
        current, landing = self._assembly, self._landing
        if landing is None or landing.nbytes != layout.nbytes:
            # The old buffer's memory goes back before another one is allocated.
            current = landing = self._landing = self._assembly = None
            landing = self._take_landing(layout.nbytes)
        if current is None or (current.epoch, current.version, current.digest) != named:
            if self._is_shared:
                landing = self._take_landing(layout.nbytes)
            self._began = time.perf_counter()
            current = self._assembly = Assembly(
                layout.nbytes, layout.digest, update.epoch, update.version
            )
        return current, landing

    def _take_landing(self, nbytes: int) -> FlatBuffer:
        """Take a buffer for the arriving update; a shared one before it stays with the server."""
        self._landing, self._is_shared = None, False
        landing = self._landing = self._buffers.take(nbytes)
        return landing

    def heavy_work(self, received: Received) -> Callable[[], None] | None:
        """Return the work on a chunk that must not hold the loop, if there is any.

        With deltas, each chunk is decoded and kept for the next delta, in a thread before
        :meth:`read`. This raises :class:`TransportBroken` for a chunk that cannot be decoded.
        """
        update, kept, landing = received.message, self._kept, self._landing
        assembly, running = self._assembly, self._running
        if kept is None or not isinstance(update, Update) or not received.nbytes:
            return None
        if landing is None or assembly is None or running is None:
            return None
        place = assembly.place(update, received.nbytes)
        layout, encoded = self._layouts[update.digest], self._encoded
        return functools.partial(kept.take, update, layout, landing, place, encoded, running)

    def _assemble(
        self, update: Update, layout: Layout, received: Received
    ) -> tuple[FlatBuffer, int] | None:
        """Verify a chunk that arrived; after the last one return the update and what travelled."""
        assembly, landing = self._assembly_of(update, layout)
        start, stop = assembly.place(update, received.nbytes)
        assembly.wire_nbytes += received.nbytes
        running = self._running if self._running and received.nbytes else RunningChecksum()
        self._running = self._encoded = None
        running.update(landing.memoryview()[start + running.nbytes : stop])
        if not assembly.arrived(update, running.digest()):
            return None
        self._assembly = self._landing = None
        self._is_shared = False
        if self._kept is not None:
            self._kept.complete(update)
        return landing, assembly.wire_nbytes

    # -- memory of other processes -------------------------------------------------------------

    def _map(self, key: tuple[Any, ...], payload: memoryview) -> FlatBuffer:
        """Return a link's own memory as a flat buffer; the same object for the same memory."""
        flat = self._mapped.get(key)
        if flat is None or flat.nbytes < payload.nbytes:
            self._forget_others(key)
            flat = self._mapped[key] = FlatBuffer(payload.obj)
        return flat

    def _forget_others(self, key: tuple[Any, ...]) -> None:
        """Forget memory of which the first part of the key differs: the sender has replaced it."""
        for old in [old for old in self._mapped if old[0] != key[0]]:
            del self._mapped[old]

    def knows(self, digest: bytes) -> bool:
        """Return True if updates of the manifest with this digest can be read."""
        return digest in self._layouts

    @property
    def named_version(self) -> int:
        """Version that the link's word names, if it is new and can be read; else 0."""
        # Another thread may ask while the link ends.
        slots = self.slots
        if slots is None or self.epoch is None:
            return 0
        version, digest = slots.named_version
        return version if digest in self._layouts else 0

    def open_named(self) -> Staged | None:
        """Return the update in the slot that the link's word names, read in place, if it is new.

        On any thread.

        Raises:
            ApplyError: The sender was stopped while it wrote.
            RemoteProtocolError: The word names no announced slot.
        """
        slots, epoch = self.slots, self.epoch
        slot = None if slots is None or epoch is None else slots.open()
        if slots is None or slot is None or epoch is None:
            return None
        layout = self._layouts.get(slot.digest)
        if layout is None or layout.nbytes != slot.nbytes:
            slots.leave(slot, keep=False)
            slots.unread = slot.want
            # Its manifest is on its way, and a message about this version follows it.
            return None
        flat = self._mapped.get(slot.key)
        if flat is None:
            self._forget_others(slot.key)
            flat = self._mapped[slot.key] = _memory_of(slot)

        def give_back() -> None:
            kept = not flat.exclusive()
            # If something, such as a kept state_dict() or a graph, uses the memory, that becomes
            # private memory with the same content. The sender gets the slot back in any case.
            if kept:
                self._mapped.pop(slot.key, None)
                flat.unshare()
            slots.leave(slot, keep=kept)

        return Staged(
            epoch,
            slot.version,
            layout,
            flat,
            _NO_VALUES,
            give_back,
            slot=slot,
            slots=slots,
            sent_at=slot.sent_at,
        )

    def keep(self, staged: Staged | None) -> None:
        """Give an update in a slot memory of this process, as the sender may soon write there.

        A slot that an accelerator reads directly stays locked until that has ended.
        """
        if staged is None or staged.slot is None or staged.slots is None:
            return
        if staged.taken or not staged.slot.view.is_read_directly:
            self._mapped.pop(staged.slot.key, None)
            staged.flat.unshare()
            staged.slots.leave(staged.slot, keep=True)

    def close(self) -> None:
        """Forget every buffer, and give every slot back."""
        # Buffers that are put back after this are not kept.
        self._buffers = Buffers()
        self._assembly = self._landing = self._running = None
        self._chunk, self._encoded = memoryview(b""), None
        if self._kept is not None:
            self._kept.close()
        self._mapped.clear()
        self._layouts.clear()
        if self.slots is not None:
            self.slots.close()
            self.slots = None


def _nothing() -> None:
    """Do nothing, as memory of a link goes with its last view."""


def _memory_of(slot: NamedSlot) -> FlatBuffer:
    """Return a slot's memory as a buffer; that of a device is opened when tensors view it."""
    block = slot.block
    if block is None:
        return FlatBuffer(slot.memory, share=slot.share)
    about = block.about

    def find() -> DeviceMemory:
        driver = accelerator().find(about.kind, about.uuid)
        if not block.is_open:
            raise ConfigError("the descriptor of the trainer's device memory was closed here")
        if about.nbytes % driver.granularity:
            raise ConfigError(f"the trainer announced a block of {about.nbytes} bytes")
        return DeviceMemory.open(driver, block.fd, about.nbytes)

    return DeviceBuffer(about.nbytes, find)
