"""Copies between tensors on an accelerator and a flat buffer: few transfers, from pinned memory.

Small tensors are gathered on the device into one block, which is an image of a part of the flat
buffer, and the block is transferred at once; in the other direction the block is transferred and
then scattered. The blocks take bounded memory of the device. A loader of another library takes its
tensors one by one: they are transferred a step ahead of it. This module must never import asyncio
or a transport.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from aiosync.tensors.accelerator import PINNED_NBYTES, Accelerator, accelerator
from aiosync.tensors.copying import CopyPool

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aiosync.tensors.buffer import FlatBuffer, Layout
    from aiosync.wire import LeafSpec

__all__ = ["BLOCK_NBYTES", "DeviceCopies", "copies_by_device", "uploaded"]

BLOCK_NBYTES = 32 * 2**20
"""Bytes of a device's memory that the copies of one model take at most; of pinned memory twice."""

# Least share of a thread.
_SHARE_NBYTES = 4 * 2**20
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class _Block:
    """A range of a flat buffer that is transferred at once.

    Attributes:
        start: Its first byte in the flat buffer.
        stop: The end of the range.
        leaves: Indices of the leaves in it.
        batches: Indices of leaves, and their places in the block on the device; those of each batch
            have one dtype, and their tensors have one. Empty if the only leaf is transferred from
            and to its own memory.
        at: Offset of the range in the bytes of that leaf.
        gaps: Ranges of the flat buffer in it that belong to no leaf.
    """

    start: int
    stop: int
    leaves: list[int]
    batches: list[tuple[list[int], list[torch.Tensor]]]
    at: int = 0
    gaps: tuple[tuple[int, int], ...] = ()


class DeviceCopies:
    """The copies between tensors on one device and flat buffers of a layout, in both directions.

    Takes memory of the device, at most :data:`BLOCK_NBYTES`, for as long as it lives. Calls of
    :meth:`gather` on several threads take turns; :meth:`scatter` runs beside no other call.

    Args:
        layout: Layout of the flat buffers.
        tensors: The tensors to copy, by the indices of their leaves; looked at, not kept.
        device: Their device.

    Raises:
        ConfigError: The device has no memory left.

    Attributes:
        device: As given.
        leaves: Indices of the leaves, in order.
        rest: Those of them that torch has to copy one by one.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Mapping[int, torch.Tensor],
        device: torch.device,
    ) -> None:
        self.device: torch.device = device
        self.leaves: list[int] = sorted(tensors)
        self.rest: list[int] = []
        self._api = api = accelerator()
        self._layout = layout
        self._ring: _Ring | None = None
        # send_nowait() copies on the loop while the thread of a send() may copy, too.
        self._gathering = threading.Lock()
        self._blocks: list[_Block] = []
        specs = layout.manifest.leaves
        runs = _runs(specs, self._add_large_blocks(tensors))
        nbytes = max((_end(specs[run[-1]]) - specs[run[0]].offset for run in runs), default=0)
        # No later call could write to memory of the inference mode of the caller.
        with torch.inference_mode(False), torch.no_grad():
            self._memory: torch.Tensor = api.empty(nbytes, device)
            self._blocks += [self._make_block(run, tensors) for run in runs]
        self._largest = max((block.stop - block.start for block in self._blocks), default=0)

    def _add_large_blocks(self, tensors: Mapping[int, torch.Tensor]) -> list[int]:
        """Make the blocks of large leaves, note those that torch copies; return the small ones."""
        small: list[int] = []
        for leaf in self.leaves:
            spec, tensor = self._layout.manifest.leaves[leaf], tensors[leaf]
            if not spec.nbytes:
                continue
            if tensor.is_conj() or tensor.is_neg():
                self.rest.append(leaf)
            elif spec.nbytes <= BLOCK_NBYTES:
                small.append(leaf)
            elif tensor.is_contiguous() and tensor.dtype is self._layout.dtypes[leaf]:
                for at in range(0, spec.nbytes, BLOCK_NBYTES):
                    stop = spec.offset + min(at + BLOCK_NBYTES, spec.nbytes)
                    self._blocks.append(_Block(spec.offset + at, stop, [leaf], [], at))
            else:
                self.rest.append(leaf)
        return small

    def _make_block(self, run: list[int], tensors: Mapping[int, torch.Tensor]) -> _Block:
        """Make the block of a run of small leaves, with their places in the device's memory."""
        specs = [self._layout.manifest.leaves[leaf] for leaf in run]
        start = specs[0].offset
        batches: dict[object, tuple[list[int], list[torch.Tensor]]] = {}
        for leaf, spec in zip(run, specs, strict=True):
            dtype = self._layout.dtypes[leaf]
            leaves, places = batches.setdefault((dtype, tensors[leaf].dtype), ([], []))
            leaves.append(leaf)
            place = self._memory[spec.offset - start : _end(spec) - start]
            places.append(place.view(dtype).view(spec.shape))
        between = ((_end(one), other.offset) for one, other in pairwise(specs))
        gaps = tuple(gap for gap in between if gap[0] < gap[1])
        return _Block(start, _end(specs[-1]), run, [*batches.values()], 0, gaps)

    def gather(self, tensors: Sequence[torch.Tensor], flat: FlatBuffer) -> None:
        """Copy tensors into a flat buffer, after all work that was queued for them on any stream.

        Args:
            tensors: One for each leaf of the layout; only those of :attr:`leaves` are copied.
            flat: The flat buffer; the padding between them becomes zero.
        """
        with self._gathering:
            self._gather(tensors, flat)

    @torch.no_grad()
    def _gather(self, tensors: Sequence[torch.Tensor], flat: FlatBuffer) -> None:
        """Do what :meth:`gather` says."""
        api, host = self._api, self.source_of(flat).tensor()
        api.synchronize(self.device)
        try:
            for block in self._blocks:
                for leaves, places in block.batches:
                    api.copy(places, [tensors[leaf] for leaf in leaves])
                api.transfer(host[block.start : block.stop], self._device_bytes(block, tensors))
        finally:
            # After an error, too, the caller may use the buffer again at once.
            api.synchronize(self.device)
        views = flat.views(self._layout)
        for leaf in self.rest:
            views[leaf].copy_(tensors[leaf])
        # Padding is sent as zeros, and blocks share the device's memory, so that gaps hold bytes of
        # the block before.
        for block in self._blocks:
            for start, stop in block.gaps:
                flat.array[start:stop] = 0

    @torch.no_grad()
    def scatter(
        self, flat: FlatBuffer, source: FlatBuffer, tensors: Mapping[int, torch.Tensor]
    ) -> None:
        """Copy a flat buffer into tensors, after all work that was queued on any stream.

        Args:
            flat: The flat buffer.
            source: Result of :meth:`source_of` for it.
            tensors: The tensors of the leaves.
        """
        api = self._api
        # The ring is for memory that can never be pinned. Other memory is, from its second use on.
        ring = None if source.pinnable or flat.is_shareable else self._pinned_ring()
        host = source.tensor()
        threads = min(len(os.sched_getaffinity(0)), self._largest // _SHARE_NBYTES, _MAX_THREADS)
        api.synchronize(self.device)
        try:
            with contextlib.closing(CopyPool(max(1, threads))) as pool:
                for block in self._blocks:
                    part = host[block.start : block.stop]
                    if ring is not None:
                        part = ring.fill(flat.array[block.start : block.stop], pool)
                    api.transfer(self._device_bytes(block, tensors), part)
                    if ring is not None:
                        ring.used()
                    for leaves, places in block.batches:
                        api.copy([tensors[leaf] for leaf in leaves], places)
        finally:
            # After an error, too, the caller may give the buffer back at once.
            api.synchronize(self.device)
        views = flat.views(self._layout)
        for leaf in self.rest:
            tensors[leaf].copy_(views[leaf])
        if self.rest:
            api.synchronize(self.device)

    def _device_bytes(
        self, block: _Block, tensors: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]
    ) -> torch.Tensor:
        """Return the bytes of a block on the device, where a transfer reads or writes them."""
        if block.batches:
            return self._memory[: block.stop - block.start]
        large = tensors[block.leaves[0]].detach().view(-1).view(torch.uint8)
        return large[block.at : block.at + block.stop - block.start]

    def _pinned_ring(self) -> _Ring | None:
        """Return pinned blocks; ``None`` if all transfers are small, or nothing can be pinned."""
        if self._largest < PINNED_NBYTES:
            return None
        # Without memory to pin, the copy is only slower.
        with contextlib.suppress(RuntimeError):
            self._ring = self._ring or _Ring(
                self._api, self.device, self._largest, len(self._blocks)
            )
        return self._ring

    def source_of(self, flat: FlatBuffer) -> FlatBuffer:
        """Return the buffer to transfer with: from the second transfer on pinned, if that works.

        Raises:
            TransportBroken: Foreign code has closed the descriptor of the shared memory.
        """
        # Pinning takes long, so it pays only for memory that is used again.
        again, flat.was_transferred = flat.was_transferred, True
        if not again or flat.nbytes < PINNED_NBYTES:
            return flat
        # A private mapping must not be pinned, but the same memory mapped shared may be.
        seen = flat.shared() or flat
        if seen.pinnable:
            self._api.pin(seen, self.device)
        return flat if seen.pinned is None else seen


class _Ring:
    """One or two pinned blocks in turns: threads fill one while the other is transferred."""

    def __init__(
        self, api: Accelerator, device: torch.device, nbytes: int, num_blocks: int
    ) -> None:
        self._api, self._device = api, device
        self._blocks = [api.pinned(nbytes) for _ in range(min(num_blocks, 2))]
        # The function of each block that waits for its last transfer.
        self._waits: list[Callable[[], object]] = [_nothing] * len(self._blocks)
        self._turn = 0

    def fill(self, source: NDArray[np.uint8], pool: CopyPool) -> torch.Tensor:
        """Copy bytes into the next block once it is free; a call of :meth:`used` has to follow."""
        self._waits[self._turn]()
        block = self._blocks[self._turn][: source.size]
        pool.copy([(block.numpy(), source)])
        return block

    def used(self) -> None:
        """Note that the transfer from the block of :meth:`fill` has begun; it is not free yet."""
        self._waits[self._turn] = self._api.mark(self._device)
        self._turn = (self._turn + 1) % len(self._blocks)


def _nothing() -> None:
    """Do nothing, as a new block has no transfer to wait for."""
    return None


def _end(spec: LeafSpec) -> int:
    """Return the end of a leaf in a flat buffer."""
    return spec.offset + spec.nbytes


def _runs(specs: Sequence[LeafSpec], leaves: Iterable[int]) -> list[list[int]]:
    """Join leaves with only padding between them into runs of at most a block each."""
    runs: list[list[int]] = []
    for leaf in leaves:
        if (
            runs
            and runs[-1][-1] == leaf - 1
            and _end(specs[leaf]) - specs[runs[-1][0]].offset <= BLOCK_NBYTES
        ):
            runs[-1].append(leaf)
        else:
            runs.append([leaf])
    return runs


def copies_by_device(
    layout: Layout, tensors: Iterable[tuple[int, torch.Tensor]]
) -> Iterator[tuple[DeviceCopies, dict[int, torch.Tensor]]]:
    """Yield, for each accelerator, the copies of the tensors that it has, and these tensors.

    Args:
        layout: Layout of the flat buffers.
        tensors: Indices of leaves, each once, and their tensors; those on the CPU are left out.
    """
    found: dict[torch.device, dict[int, torch.Tensor]] = {}
    for leaf, tensor in tensors:
        if accelerator().has(tensor):
            found.setdefault(tensor.device, {})[leaf] = tensor
    for device, some in found.items():
        yield DeviceCopies(layout, some, device), some


def uploaded(
    items: Sequence[tuple[str, torch.Tensor]], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of tensors on a device, each in memory of its own, when they have arrived.

    The next tensor is on its way while the caller uses one, so that the device has memory for one
    tensor more than the caller keeps.

    Args:
        items: Names, and contiguous tensors in memory of the host.
        device: The accelerator.

    Raises:
        ConfigError: The device has no memory left.
    """
    largest = max((tensor.nbytes for _, tensor in items), default=0)
    with contextlib.closing(_Uploads(device, min(largest, BLOCK_NBYTES))) as uploads:
        ahead: tuple[str, torch.Tensor, Callable[[], object]] | None = None
        for name, tensor in items:
            ready, ahead = ahead, (name, *uploads.begin(tensor))
            # The third item of a triple waits until the copy has arrived.
            if ready is not None:
                ready[2]()
                yield ready[:2]
        if ahead is not None:
            ahead[2]()
            yield ahead[:2]


class _Uploads:
    """Transfers of whole tensors to a device, through pinned blocks of ``nbytes`` if that pays."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._api, self._device, self._ring = accelerator(), device, None
        threads = min(len(os.sched_getaffinity(0)), nbytes // _SHARE_NBYTES, _MAX_THREADS)
        self._pool = CopyPool(max(1, threads))
        if nbytes >= PINNED_NBYTES:
            # Without memory to pin, the copies are only slower.
            with contextlib.suppress(RuntimeError):
                self._ring = _Ring(self._api, device, nbytes, 2)

    def begin(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
        """Begin to copy a contiguous host tensor; return the copy, and a wait for its end."""
        source = tensor.detach().view(-1).view(torch.uint8)
        target = self._api.empty(source.numel(), self._device)
        for at in range(0, source.numel(), BLOCK_NBYTES):
            part = source[at : at + BLOCK_NBYTES]
            if self._ring is None:
                self._api.transfer(target[at : at + BLOCK_NBYTES], part)
            else:
                pinned = self._ring.fill(part.numpy(), self._pool)
                self._api.transfer(target[at : at + BLOCK_NBYTES], pinned)
                self._ring.used()
        return target.view(tensor.dtype).view(tensor.shape), self._api.mark(self._device)

    def close(self) -> None:
        """End the threads that copy."""
        self._pool.close()
