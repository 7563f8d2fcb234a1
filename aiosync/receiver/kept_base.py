"""The bytes of the last update that arrived whole, against which the next delta is decoded.

They are a copy that nothing else uses: the model may view the update itself, and a program may
write to its weights. Each chunk of a new update replaces the bytes of the old one as soon as it was
verified, since no later chunk is decoded against them. An update that stops in between leaves bytes
of two updates, and these are no base.
"""

from __future__ import annotations

from aiosync.errors import AiosyncError, TransportBroken
from aiosync.tensors import FlatBuffer, Layout, copy_bytes
from aiosync.tensors.delta import DeltaLayout
from aiosync.wire import RunningChecksum, Update

__all__ = ["KeptBase"]


class KeptBase:
    """The base of a worker's next delta."""

    def __init__(self) -> None:
        self._flat: FlatBuffer | None = None
        # Digest of a layout, and the dtypes in it.
        self._layout: tuple[bytes, DeltaLayout] | None = None
        # Epoch, version and layout of the update that the bytes are of.
        self._base_id: tuple[int, int, bytes] | None = None
        # Epoch and version of the update whose first chunks have replaced some of them.
        self._replacing_id: tuple[int, int] | None = None

    @property
    def held(self) -> tuple[int, int]:
        """Epoch and version of the base; (0, 0) for none."""
        # A thread that decodes a chunk may forget the base meanwhile.
        base_id = self._base_id
        if base_id is None or self._replacing_id is not None:
            return 0, 0
        return base_id[:2]

    def lend(self, update: Update, nbytes: int) -> memoryview:
        """Return memory for the bytes of a chunk that is a delta, if it fits the base.

        Raises:
            TransportBroken: It is a delta to another base: over the next link, which begins
                without one, the sender sends whole updates. Or it is no smaller than what it makes;
                or there is no memory for it.
        """
        version, plain_nbytes = update.base or (0, 0)
        of, now = (update.epoch, version, update.digest), (update.epoch, update.version)
        if of != self._base_id or self._replacing_id not in (None, now):
            self._base_id = None
            raise TransportBroken(
                f"version {update.version} is a delta to version {version}, which is no base here"
            )
        if nbytes >= plain_nbytes:
            text = f"a delta of {nbytes} bytes is no smaller than {plain_nbytes} bytes"
            raise TransportBroken(text)
        try:
            return memoryview(bytearray(nbytes))
        except MemoryError as exc:
            raise TransportBroken(
                f"this process has no memory for a delta of {nbytes} bytes"
            ) from exc

    def take(
        self,
        update: Update,
        layout: Layout,
        landing: FlatBuffer,
        place: tuple[int, int],
        encoded: memoryview | None,
        running: RunningChecksum,
    ) -> None:
        """Decode and verify a chunk that has arrived, and keep its bytes. In a thread.

        Args:
            update: The message of the chunk.
            layout: The layout of the update.
            landing: Memory of the update; has the bytes of the chunk, unless it is encoded.
            place: Start and stop of the chunk in the update.
            encoded: The chunk as a delta, in memory of :meth:`lend`; ``None`` for a chunk without.
            running: Checksum of the first bytes of the chunk; afterwards of all.

        Raises:
            TransportBroken: The chunk was damaged on its way, or made with another base; or there
                is no memory for the base.
        """
        start, stop = place
        memory, base = landing.memoryview(), self._base_for(layout.nbytes)
        if encoded is not None:
            delta_layout = self._delta_layout(layout)
            try:
                delta_layout.apply(start, stop, encoded, base, memory)
            except AiosyncError as exc:
                self._base_id = None
                raise TransportBroken(f"version {update.version} cannot be decoded: {exc}") from exc
        running.update(memory[start + running.nbytes : stop])
        if running.digest() != update.checksum:
            # Assembly.arrived() refuses the chunk, as its checksum is wrong.
            self._base_id = None
            return
        now = (update.epoch, update.version)
        if self._replacing_id not in (None, now):
            # Some bytes are of an update that stopped in between.
            self._base_id = None
        self._replacing_id = now
        copy_bytes(base[start:stop], memory[start:stop])

    def _base_for(self, nbytes: int) -> memoryview:
        """Return the memory of the base; new memory, and no base, if the size is another one."""
        if self._flat is None or self._flat.nbytes != nbytes:
            self._base_id = self._flat = None
            try:
                self._flat = FlatBuffer(nbytes)
            except MemoryError as exc:
                raise TransportBroken(
                    f"this process has no memory for a base of {nbytes} bytes"
                ) from exc
        return self._flat.memoryview()

    def _delta_layout(self, layout: Layout) -> DeltaLayout:
        """Return the places of the deltas of a layout, the same object for the same layout."""
        if self._layout is None or self._layout[0] != layout.digest:
            self._layout = layout.digest, DeltaLayout(layout.manifest)
        return self._layout[1]

    def complete(self, update: Update) -> None:
        """Register that all chunks of an update were taken."""
        self._base_id, self._replacing_id = (update.epoch, update.version, update.digest), None

    def close(self) -> None:
        """Give the memory back."""
        self._flat = self._base_id = self._replacing_id = None
