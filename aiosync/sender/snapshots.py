"""Snapshots of the sender: one copy of the weights per update, how it is made and how long kept.

A :class:`Snapshot` is written once and then only read, until no part of the sender needs it and its
memory becomes the next one. That is memory of this process, for links that carry bytes; or a slot
of an arena, which receivers read in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeAlias, TypeVar

from aiosync._log import log
from aiosync.device_memory import Driver
from aiosync.errors import (
    ConfigError,
    ConnectTimeout,
    LocalProtocolError,
    SendTimeout,
    TransportClosed,
)
from aiosync.sender.incoming import Incoming
from aiosync.sender.steps import STEPS, STILL_STEPPING, steadily
from aiosync.tensors import (
    CopyPool,
    Dtypes,
    FlatBuffer,
    Flattener,
    Layout,
    LiveBytes,
    Prepared,
    copy_pieces,
)
from aiosync.tensors.device_buffer import DeviceBuffer
from aiosync.tensors.mapping import DtypeRule
from aiosync.transports.data_plane import PayloadState, Progress, outlast
from aiosync.transports.shared_memory import DEVICE_SLOTS, MAX_SLOTS, Arena, Slot
from aiosync.types import Limits
from aiosync.wire import DEFAULT_LIMITS

__all__ = [
    "OVERTAKEN",
    "STEP_SECONDS",
    "How",
    "Snapshot",
    "SnapshotCopier",
    "release_all",
    "turn_to_copy",
]

STEP_SECONDS = 60.0
"""Seconds that a copy waits for an optimizer's step if its caller has no timeout."""
OVERTAKEN = (
    "send_nowait() copied newer weights meanwhile, and {:g} s were too short to copy them again"
)
"""Text of the error for a copy that would replace newer weights."""

_T = TypeVar("_T")

# Copies up to this size run on the loop: a hop to a thread costs more than they do. Larger slots
# are allocated in a thread, too.
_INLINE_NBYTES = 4 * 2**20
# A copy that a link follows reports its progress after so many bytes.
_AHEAD_NBYTES = 2 * 2**20
# Seconds that a send waits for readers to leave a slot, before it takes another one.
_LEAVING_SECONDS = 0.02
# Pause between two checks for a free slot.
_PAUSE_SECONDS = 0.0005
# All slots together count as small up to this size.
_SMALL_NBYTES = 16 * 2**20


How: TypeAlias = Literal["copy", "borrow", "copy ahead"]


class Snapshot:
    """One version of the weights in flat memory, reference-counted by the sender.

    Args:
        layout: Place of each tensor in the payload.
        memory: Memory for the payload; a slot is in use from now on.
        free: Called once, when the memory is not needed any more.
        values: Values of the update that are not tensors.
        version: Version of the update.

    Attributes:
        filling: Future that is done when the bytes are in the memory; ``None`` once they are.
        live: The tensors in their own memory, which is read until then; they must not change yet.
        slot: The slot that has the bytes; ``None`` if they are in memory of this process.
        incoming: Progress of an update that is passed on while it arrives; ``None`` for others.
        kept: Brings the bytes back from a transport that keeps them, if they are nowhere else.
        checksums: Checksums of the payload's first chunks, as far as links needed them.
        state: State of the payload that its links share; ``None`` before there is any.
        trace: The traceparent of the span of its send, if that has one.
    """

    filling: asyncio.Future[None] | None = None
    incoming: Incoming | None = None
    live: LiveBytes | None = None
    kept: Callable[[], Awaitable[Sequence[memoryview]]] | None = None
    slot: Slot | None = None
    state: PayloadState | None = None
    trace: str | None = None
    _refs = 0

    def __init__(
        self,
        layout: Layout,
        memory: FlatBuffer | Slot,
        free: Callable[[], None],
        values: Mapping[str, Any] | None = None,
        version: int = 0,
    ) -> None:
        self._free = free
        self._refs = 1
        self.layout: Layout = layout
        self.nbytes: int = layout.nbytes
        self.version: int = version
        self.checksums: list[bytes] = []
        self.values: dict[str, Any] = copy.deepcopy(dict(values)) if values else {}
        if isinstance(memory, FlatBuffer):
            self.buffer: FlatBuffer = memory
            return
        if memory.buffer is None:
            memory.buffer = _buffer_of(memory)
        self.slot, self.buffer = memory, memory.buffer
        # Set last, so that an interrupt leaves the slot free. No other send takes a new one before.
        memory.has_memory = memory.in_use = True

    def __del__(self) -> None:
        # A signal's handler raised before any code could keep or release the snapshot.
        if self._refs > 0:
            self._refs = 1
            self.release()

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return some bytes of the payload as pieces in order; an empty list for no bytes."""
        if self.live is not None:
            return self.live.views(start, stop)
        return [self.buffer.memoryview()[start:stop]] if stop > start else []

    def share(self) -> PayloadState:
        """Return the state of the payload that its links share."""
        if self.state is None:
            self.state = PayloadState()
        return self.state

    async def filled(self) -> None:
        """Wait until the bytes are in the memory.

        Raises:
            LocalProtocolError: The bytes could not be copied, or do not all arrive.
        """
        incoming = self.incoming
        if incoming is not None:
            # All bytes are enough here, even if the update is not served yet.
            while (waiting := incoming.until(self.nbytes, is_last=False)) is not None:
                await asyncio.wait({waiting})
        filling = self.filling
        if filling is not None:
            await asyncio.wait({filling})
            if (error := filling.exception()) is not None:
                raise LocalProtocolError(f"there is no copy of the weights: {error}") from error

    async def in_memory(self) -> None:
        """Wait for :meth:`filled`, and bring the bytes back if only a transport keeps them."""
        await self.filled()
        if self.kept is not None:
            copy_pieces(self.buffer.memoryview(), await self.kept())
            self.kept = None

    @property
    def names(self) -> Set[str]:
        """Every name that the update holds."""
        # The index's own view of its keys: a copy of thousands of names takes long.
        tensors = self.layout.index.keys()
        return tensors | self.values.keys() if self.values else tensors

    def holds_same(self, other: Snapshot) -> bool:
        """Return True if the other update holds the same names, with the same shapes."""
        same = self.layout is other.layout or self.layout.digest == other.layout.digest
        return same and self.values.keys() == other.values.keys()

    @property
    def in_use(self) -> bool:
        """True until the last reference was released."""
        return self._refs > 0

    def retain(self) -> Snapshot:
        """Add a reference."""
        self._refs += 1
        return self

    def release(self) -> None:
        """Drop a reference; the last one gives the memory back, after a copy that is under way."""
        self._refs -= 1
        if not self._refs:
            # A traceback that is kept may keep this object alive: the memory must not stay with it.
            free, self._free = self._free, _nothing
            self.buffer, self.slot, self.kept = _no_buffer, None, None
            if self.state is not None:
                self.state.clear()
            if self.filling is None or self.filling.done() or self.live is not None:
                free()
            else:
                self.filling.add_done_callback(lambda _: free())


def release_all(snapshots: Iterable[Snapshot]) -> None:
    """Give back the snapshots of an update that is not sent."""
    for snapshot in snapshots:
        snapshot.release()


def _buffer_of(slot: Slot) -> FlatBuffer:
    """Return the memory of a slot as a buffer: its pages, or its block of a device's memory."""
    block = slot.device
    if block is None:
        return FlatBuffer(slot.view, pinnable=True)
    return DeviceBuffer(block.nbytes, lambda: block)


def _nothing() -> None:
    return None


_no_buffer = FlatBuffer(0)


# -- copies of the weights -------------------------------------------------------------------------


class SnapshotCopier:
    """Copier of weights into snapshots: small ones on the loop, large ones on plain threads.

    Besides the slots that are named to workers, or kept for workers that join, there are at most as
    many slots as workers hold: a worker that computes for long keeps its slot, and no other worker
    waits for it. Unless all slots together are small, another one is made only after no slot has
    become free for a moment: mostly there are two. Of the process's own memory, at most two buffers
    are kept that are not in use.

    Args:
        arena: Owner of the slots; ``None`` for snapshots in memory of this process.
        extract_as: The form in which a module's weights travel.
        wire_dtype: Type that floating-point tensors are cast to on the way; ``None`` for no cast.
        limits: Limits that the receivers are expected to have; ``None`` for the defaults.

    Attributes:
        arena: As given.
        flatteners: Planners of copies: by index those of workers that get weights of their own, and
            by -1 the one for weights that all workers get.
        ring: Rings the workers that compute with an older version.
    """

    def __init__(
        self,
        arena: Arena | None,
        extract_as: Literal["tensordict", "state_dict"],
        wire_dtype: Dtypes | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.arena: Arena | None = arena
        self.ring: Callable[[], object] = _nothing
        rule = None if wire_dtype is None else DtypeRule(wire_dtype)
        flattener = functools.partial(Flattener, extract_as, limits or DEFAULT_LIMITS, rule)
        self.flatteners: defaultdict[int, Flattener] = defaultdict(flattener)
        self._idle: list[FlatBuffer] = []
        self._closed = False
        STEPS.watch()
        # Allocation of a slot that runs in a thread.
        self._growing: asyncio.Future[Slot] | None = None
        # One thread, so that copies run one after the other.
        self._executor = ThreadPoolExecutor(1, "aiosync-snapshot")
        self._pool = CopyPool()
        self._has_thread = False
        # True while a call is given to the executor.
        self._is_starting = False

    # -- memory --------------------------------------------------------------------------------

    def _in_own_memory(self, prepared: Prepared) -> Snapshot:
        """Return a snapshot, not filled yet, in memory of this process; it travels in messages.

        It is for links without shared memory, for copies for which no slot is free or that the
        memory of a device cannot have, and for borrowed weights.

        Raises:
            ConfigError: There is no memory.
        """
        if self.arena is not None and self.arena.on_device:
            text = "an update goes through the host: it has values, or no device slot is free"
            log(logging.DEBUG, "send", text, model=None)
        buffer = self._idle.pop() if self._idle else None
        if buffer is None or buffer.nbytes != prepared.layout.nbytes:
            self._idle.clear()
            nbytes = prepared.layout.nbytes
            try:
                buffer = FlatBuffer(nbytes)
            except MemoryError as exc:
                text = f"this process has no memory for a copy of {nbytes} bytes of weights"
                raise ConfigError(text) from exc
        free = functools.partial(self._put_back, buffer)
        return Snapshot(prepared.layout, buffer, free, prepared.values)

    def _put_back(self, buffer: FlatBuffer) -> None:
        """Keep a buffer for the next snapshot. With slots it is seldom used, and not kept."""
        if self.arena is None and not self._closed and len(self._idle) < 2:
            self._idle.append(buffer)

    def _may_grow(self, arena: Arena, nbytes: int, driver: Driver | None, *, at_once: bool) -> bool:
        """Return True if another slot may be made; ``at_once`` if the caller can wait for one."""
        if self._growing is not None:
            return False
        if arena.segment is None or not arena.segment.fits(nbytes, driver):
            return True
        if arena.on_device:
            return arena.num_slots < DEVICE_SLOTS
        large = nbytes * (arena.num_links + 2) > _SMALL_NBYTES
        if at_once and large and arena.num_slots > 1:
            return False
        # Only workers can hold the slots that the sender has left. Each may be in a read of another
        # version, and on its way to the next.
        left = sum(not slot.is_needed for slot in arena.segment.taken)
        return left < 2 * arena.num_links + 2 and arena.num_slots < MAX_SLOTS

    async def _acquire(self, prepared: Prepared) -> Snapshot:
        """Get memory, and wait a moment for a slot that is about to become free.

        One call at a time.

        Raises:
            ConfigError: Workers hold slots that they were not given.
        """
        arena, driver = self._arena_for(prepared)
        if arena is None:
            return self._in_own_memory(prepared)
        nbytes = prepared.layout.nbytes
        # A call that was cancelled left an allocation in the thread.
        if self._growing is not None:
            await asyncio.wait({self._growing})
        until = time.monotonic() + _LEAVING_SECONDS
        while (slot := arena.take_slot(nbytes, driver)) is None:
            late = time.monotonic() >= until
            if self._may_grow(arena, nbytes, driver, at_once=not late):
                if nbytes <= _INLINE_NBYTES:
                    slot = arena.grow(nbytes, driver)
                    break
                return await self._grow_in_thread(arena, prepared, driver)
            if arena.num_slots == MAX_SLOTS or (late and arena.on_device):
                return self._in_own_memory(prepared)
            if late:
                raise ConfigError("workers hold more slots of shared memory than they were given")
            self.ring()
            # The kernel announces no lock that was given back, so this has to poll.
            await asyncio.sleep(_PAUSE_SECONDS)
        return Snapshot(prepared.layout, slot, slot.release, prepared.values)

    def _arena_for(self, prepared: Prepared) -> tuple[Arena | None, Driver | None]:
        """Return the arena that a copy goes into, and the driver if the arena is on a device.

        There is no arena for a copy that travels with a message.

        Raises:
            ConfigError: The weights are not all on one device that can share memory.
        """
        arena = self.arena
        if arena is None or not arena.on_device:
            return arena, None
        # Values and extra state are read on the CPU: updates with them travel with a message.
        return (arena, prepared.driver()) if prepared.fits_device else (None, None)

    def _grown(self, _: object) -> None:
        """Note that the thread has allocated the slot of a call that was cancelled."""
        self._growing = None

    # -- copies --------------------------------------------------------------------------------

    def copy_now(self, prepared: Prepared, timeout: float) -> Snapshot:
        """Copy on this thread, into memory of this process if no slot is free.

        Raises:
            SendTimeout: An optimizer's step in another thread did not end in time.
        """
        snapshot = self.copy_if_free(prepared, timeout, always=True)
        if snapshot is None:
            raise SendTimeout(STILL_STEPPING.format(timeout))
        return snapshot

    async def _grow_in_thread(
        self, arena: Arena, prepared: Prepared, driver: Driver | None
    ) -> Snapshot:
        """Get memory from a new slot, which a thread allocates."""
        # Until the slot is taken, no other call makes one or gives one's memory back.
        growing = self._start(functools.partial(arena.grow, prepared.layout.nbytes, driver))
        self._growing = growing
        try:
            slot = await asyncio.shield(growing)
            return Snapshot(prepared.layout, slot, slot.release, prepared.values)
        finally:
            if growing.done():
                self._growing = None
            else:
                # This call is cancelled. The next one that grows the arena gets the slot.
                growing.add_done_callback(self._grown)

    def copy_if_free(
        self, prepared: Prepared, timeout: float = 0.0, *, always: bool = False
    ) -> Snapshot | None:
        """Copy weights on this thread at once, if they are small and memory for them is free.

        Args:
            prepared: The weights to copy.
            timeout: Seconds to wait for an optimizer's step that is open in another thread.
            always: Copy weights of any size, and wait for an accelerator that has them; if no slot
                is free, copy into memory of this process.

        Returns:
            The snapshot; ``None`` if nothing was copied: the weights are large or on an
            accelerator, no slot is free, or the step did not end in time.
        """
        nbytes, slot = prepared.layout.nbytes, None
        if not always and (nbytes > _INLINE_NBYTES or prepared.waits):
            return None
        arena, driver = self.arena, None
        if arena is not None and arena.on_device:
            arena, driver = self._arena_for(prepared)
        if arena is not None:
            slot = arena.take_slot(nbytes, driver, growing=self._growing is not None)
            if slot is None and self._may_grow(arena, nbytes, driver, at_once=not always):
                slot = arena.grow(nbytes, driver)
            if slot is None and not always:
                return None
        if slot is None:
            snapshot = self._in_own_memory(prepared)
        else:
            snapshot = Snapshot(prepared.layout, slot, slot.release, prepared.values)
        copied = False
        try:
            copied = self._copy(prepared, snapshot, timeout)
        finally:
            if not copied:
                snapshot.release()
        return snapshot if copied else None

    @staticmethod
    def _copy(prepared: Prepared, snapshot: Snapshot, timeout: float = 0.0) -> bool:
        """Copy on this thread between steps; return False if another thread's step stays open."""
        # A hook of this thread's step may send: copies of other threads must not wait for it.
        step = STEPS.pause() if STEPS.open else None
        try:
            STEPS.copies.add(snapshot)
            if STEPS.open and STEPS.wait(timeout) is None:
                return False
            prepared.copy_into(snapshot.buffer)
        finally:
            STEPS.copies.discard(snapshot)
            if STEPS.num_waiting:
                STEPS.end(snapshot)
            if step is not None:
                STEPS.begin_or_resume(step)
        return True

    async def take(
        self, prepared: Prepared, how: How = "copy", timeout: float = STEP_SECONDS
    ) -> Snapshot:
        """Copy without holding the loop for long.

        Args:
            prepared: The weights to copy.
            how: ``"borrow"`` leaves the bytes of large tensors where they are, and ``"copy ahead"``
                returns while they are still being copied, in order. With both, the tensors must not
                change until :meth:`settle` was awaited.
            timeout: Seconds to wait for an optimizer's step that is open in another thread.

        Raises:
            SendTimeout: The step did not end.
            WeightsChanged: The weights were written to meanwhile.

        Cancellation: safe; the memory is kept until a copy on a thread has ended.
        """
        source = None
        steady = functools.partial(
            steadily, prepared=prepared, timeout=timeout, gave_up=lambda: self._closed
        )
        large = prepared.waits or prepared.layout.nbytes > _INLINE_NBYTES
        if large and how != "copy" and prepared.signature is not None:
            source = LiveBytes.of(prepared.layout, prepared.tensors)
        if source is not None and how == "borrow":
            return self._borrow(prepared, source, steady)
        snapshot = await self._acquire(prepared)
        try:
            if source is not None and _may_copy_ahead(snapshot):
                self._copy_ahead(snapshot, source)
            # A small copy waits in the thread, like a large one, if an optimizer's step is open.
            elif large or not self._copy(prepared, snapshot):
                flat = snapshot.buffer
                snapshot.filling = steady(
                    self._start, lambda: prepared.copy_into(flat, pool=self._pool)
                )
                await asyncio.shield(snapshot.filling)
                snapshot.filling = None
        except BaseException:  # The error goes on to the caller of send().
            STEPS.end(snapshot)
            snapshot.release()
            raise
        return snapshot

    async def take_initial(self, prepared: Prepared, left: float) -> Snapshot:
        """Copy weights like :meth:`take`, for ``connect()``, which ends in ``left`` seconds."""
        try:
            return await self.take(prepared, timeout=min(STEP_SECONDS, max(0.0, left)))
        except SendTimeout as exc:
            raise ConnectTimeout(f"the initial weights were not copied: {exc}") from exc

    async def take_all(
        self, planned: Mapping[int | None, Prepared], how: How, timeout: float | None
    ) -> dict[int | None, Snapshot]:
        """Copy the weights of each worker like :meth:`take`, or of none if one copy fails."""
        snapshots: dict[int | None, Snapshot] = {}
        patience = STEP_SECONDS if timeout is None else timeout
        try:
            for key, plan in planned.items():
                snapshots[key] = await self.take(plan, how, patience)
        except BaseException:  # The error goes on to the caller of send().
            release_all(snapshots.values())
            raise
        return snapshots

    def _borrow(
        self,
        prepared: Prepared,
        source: LiveBytes,
        steady: Callable[..., asyncio.Future[Any]],
    ) -> Snapshot:
        """Return a snapshot whose bytes are those of the tensors, until it is settled."""
        snapshot = self._in_own_memory(prepared)
        snapshot.live, snapshot.filling = source, asyncio.get_running_loop().create_future()
        snapshot.share().steadily = steady
        return snapshot

    def _copy_ahead(self, snapshot: Snapshot, source: LiveBytes) -> None:
        """Begin to copy in order, so that links can send bytes that were copied already."""
        progress = snapshot.share().progress = Progress()
        copy = functools.partial(_copy_in_order, source, snapshot, progress)
        snapshot.filling = self._start(copy)

    async def settle(self, snapshot: Snapshot) -> None:
        """Bring the bytes to where they stay, and release the snapshot; tensors may change then.

        Cancellation: waits for the copy all the same, and is raised then.
        """
        try:
            await self._settle(snapshot)
        finally:
            snapshot.release()

    async def settle_cancelled(self, snapshot: Snapshot | None) -> None:
        """Settle for a cancelled send: an error of the copy must not replace the cancellation.

        The links raise that error, too, so that the next report has it.
        """
        if snapshot is not None:
            with contextlib.suppress(Exception):
                await self.settle(snapshot)

    async def _settle(self, snapshot: Snapshot) -> None:
        """Wait for the copy of a snapshot, or make it, and raise its error."""
        filling, live, cancelled = snapshot.filling, snapshot.live, None
        if filling is None:
            return
        if live is None:
            cancelled = await outlast(filling)
        else:
            cancelled = await self._copy_live(snapshot, live, filling)
        if cancelled is not None:
            # Retrieve the exception, so that asyncio does not log it: the cancellation is raised
            # instead.
            filling.exception()
            raise cancelled
        filling.result()
        snapshot.filling = None
        if snapshot.state is not None and snapshot.state.unusable is not None:
            # The send fails; the copy made now is for workers that join later.
            changed, snapshot.state.unusable = snapshot.state.unusable, None
            raise changed

    async def _copy_live(
        self, snapshot: Snapshot, live: LiveBytes, filling: asyncio.Future[None]
    ) -> asyncio.CancelledError | None:
        """Copy borrowed bytes unless a transport keeps them; return a cancellation, if one came."""
        state, cancelled = snapshot.share(), None
        snapshot.live, snapshot.kept = None, state.bring_back
        assert state.steadily is not None
        try:
            if snapshot.kept is None and not self._closed:
                copy = functools.partial(_copy_in_order, live, snapshot, Progress())
                copying = state.steadily(self._start, copy)
                cancelled = await outlast(copying)
                copying.result()
        except BaseException as exc:  # noqa: BLE001 - settle() raises it
            filling.set_exception(exc)
        else:
            filling.set_result(None)
        state.steadily = None
        return cancelled

    # -- threads -------------------------------------------------------------------------------

    def _start(self, call: Callable[[], _T]) -> asyncio.Future[_T]:
        """Start a call in the copying thread; return the future of its result."""
        if self._closed:
            raise TransportClosed("this scheme was closed")
        loop, calls = asyncio.get_running_loop(), [call]
        self._is_starting = True
        try:
            running = loop.run_in_executor(self._executor, lambda: calls.pop()())
        except RuntimeError as exc:
            # The executor keeps what it could not start, and runs it in its next thread.
            calls.clear()
            raise ConfigError(f"the thread that copies weights cannot start: {exc}") from exc
        finally:
            self._is_starting = False
            if self._closed:
                # A signal's handler has called close() meanwhile.
                self.close()
        # Retrieve the exception, which each waiting caller raises: a cancelled one does not.
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._has_thread = True
        return running

    async def aclose(self) -> None:
        """Close like :meth:`close`, without holding the loop until copies have ended."""
        cancelled, last = None, None
        # At the interpreter's end the thread has ended already, and takes no call.
        with contextlib.suppress(ConfigError):
            # Calls under way may belong to another loop; this one belongs to the running loop.
            last = self._start(_nothing) if self._has_thread else None
        if last is not None:
            # Copies that wait for an optimizer's step give up.
            self._closed = True
            cancelled = await outlast(last)
        self.close()
        if cancelled is not None:
            raise cancelled

    def close(self) -> None:
        """Join the copying threads and give the memory back."""
        self._closed = True
        if self._is_starting:
            # The executor's lock may be this thread's own: _start() calls this again.
            return
        self._executor.shutdown()
        self._pool.close()
        self._idle.clear()
        if self.arena is not None:
            self.arena.close()


def _may_copy_ahead(snapshot: Snapshot) -> bool:
    """Register a copy; return True if links may send what was copied before it has ended.

    They may not while another thread is inside an optimizer's step. They would have to be told if
    that step does not end, so the copy has to end first.
    """
    STEPS.copies.add(snapshot)
    if STEPS.wait() is False:
        return True
    STEPS.end(snapshot)
    return False


def _copy_in_order(source: LiveBytes, snapshot: Snapshot, progress: Progress) -> None:
    """Copy a payload from its start on, report the progress, and let optimizers step afterwards."""
    target, at = snapshot.buffer.memoryview(), 0
    try:
        while at < snapshot.nbytes:
            pieces = source.views(at, min(at + _AHEAD_NBYTES, snapshot.nbytes))
            at = copy_pieces(target, pieces, at)
            progress.advance(at)
    except BaseException as exc:
        # send() raises the error, and so does every link that waits for the copy.
        progress.fail(exc)
        raise
    finally:
        STEPS.end(snapshot)


@contextlib.asynccontextmanager
async def turn_to_copy(
    turn: asyncio.Lock, timeout: float | None
) -> AsyncGenerator[float | None, None]:
    """Hold the lock for one copy at a time during a block, which gets the seconds that are left.

    Raises:
        SendTimeout: The copies of other sends did not end in time.
    """
    began = time.monotonic()
    try:
        async with asyncio.timeout(timeout):
            await turn.acquire()
    except TimeoutError as exc:
        raise SendTimeout(f"the copy of an earlier send did not end within {timeout:g} s") from exc
    try:
        yield None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
    finally:
        turn.release()
