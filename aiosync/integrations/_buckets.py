"""Weights in buckets of bounded size: packed by the side that sends, landed by the other. No I/O.

A bucket is a manifest and the bytes of its tensors. A tensor that is larger than a bucket has a
manifest of its own, and travels in pieces. Must not import the links.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from aiosync.errors import ConfigError, RemoteProtocolError
from aiosync.protocol import as_count
from aiosync.tensors.buffer import FlatBuffer, Layout
from aiosync.tensors.dtypes import DTYPES
from aiosync.transports import Received
from aiosync.wire import (
    ALIGNMENT,
    Manifest,
    ManifestEntry,
    Message,
    RunningChecksum,
    Update,
    plan_manifest,
)

__all__ = ["Frame", "Landing", "NamedTensor", "Room", "Weights", "bucket_nbytes", "each_of", "pack"]

NamedTensor: TypeAlias = tuple[str, torch.Tensor]
Weights: TypeAlias = Iterable[NamedTensor] | AsyncIterable[NamedTensor]

# A consumer may hold the last tensor of one bucket while it has the next one, and a third arrives.
_MOST_BUFFERS = 3


def bucket_nbytes(value: int) -> int:
    """Return the size of a bucket in bytes: ``value``, rounded up to a multiple of 64.

    Raises:
        ConfigError: ``value`` is no positive integer.
    """
    return _round_up(as_count("bucket_size", value, 1))


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Frame:
    """One payload on its way: a bucket, or a piece of a tensor that is larger than a bucket.

    Attributes:
        manifest: Manifest of the whole bucket.
        payload: Bytes to send, valid until the next but one frame is asked for.
        chunk: (index, count) of a piece; (0, 1) for a whole bucket.
    """

    manifest: Manifest
    payload: memoryview
    chunk: tuple[int, int] = (0, 1)


async def each_of(weights: Weights) -> AsyncIterator[NamedTensor]:
    """Yield the items of an iterable or an asynchronous iterable."""
    if isinstance(weights, AsyncIterable):
        async for item in weights:
            yield item
    else:
        for item in weights:
            yield item


def _flatten(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, ManifestEntry]:
    """Return the bytes of a tensor, and its entry in a manifest.

    Raises:
        ConfigError: The tensor's dtype or layout cannot travel.
    """
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
        raise ConfigError(f"{name} cannot travel: {tensor.dtype}, {tensor.layout}")
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    source = plain.reshape(-1).view(torch.uint8)
    return source, (name, DTYPES[tensor.dtype], tensor.shape, "param", ())


async def pack(weights: AsyncIterator[NamedTensor], nbytes: int) -> AsyncIterator[Frame]:
    """Copy weights into two buffers by turns, and yield a frame for each that is full.

    Each tensor is copied before the next one is asked for, so a source may reuse its memory.

    Args:
        weights: Names and tensors of any device, in the order in which they are to arrive.
        nbytes: Size of a bucket in bytes, a multiple of 64.

    Raises:
        ConfigError: A dtype or a name cannot travel.
    """
    turn = itertools.cycle([FlatBuffer(nbytes), FlatBuffer(nbytes)])
    flat, entries, end = next(turn), list[ManifestEntry](), 0
    async for name, tensor in weights:
        source, entry = _flatten(name, tensor)
        size = source.numel()
        if entries and end + size > nbytes:
            yield Frame(plan_manifest(entries), flat.memoryview()[:end])
            flat, entries, end = next(turn), [], 0
        if size <= nbytes:
            flat.tensor()[end : end + size].copy_(source)
            entries.append(entry)
            end = _round_up(end + size)
            continue
        manifest = plan_manifest([entry])
        pieces = [source[start : start + nbytes] for start in range(0, size, nbytes)]
        for index, piece in enumerate(pieces):
            flat.tensor()[: piece.numel()].copy_(piece)
            payload = flat.memoryview()[: _round_up(piece.numel())]
            yield Frame(manifest, payload, (index, len(pieces)))
            flat = next(turn)
    if entries:
        yield Frame(plan_manifest(entries), flat.memoryview()[:end])


class Room:
    """Memory for buckets that arrive, which is used again once no tensor refers to it.

    Args:
        nbytes: Size of a bucket in bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._flats: list[FlatBuffer] = []

    def find(self, manifest: Manifest) -> FlatBuffer:
        """Return memory for a bucket; no tensor refers to that memory.

        Raises:
            RemoteProtocolError: The bucket is larger than this side's buckets.
        """
        if manifest.nbytes > self._nbytes and len(manifest.leaves) > 1:
            raise RemoteProtocolError(
                f"a bucket of {manifest.nbytes} bytes arrived, and this side takes at most "
                f"{self._nbytes}: give both sides the same bucket size"
            )
        for flat in self._flats:
            if flat.nbytes >= manifest.nbytes and flat.exclusive():
                flat.release()  # the views that it keeps are those of an earlier bucket
                return flat
        flat = FlatBuffer(max(self._nbytes, manifest.nbytes))
        self._flats = [*self._flats, flat][-_MOST_BUFFERS:]
        return flat

    def clear(self) -> None:
        """Give the memory back; tensors that are in use keep theirs."""
        self._flats.clear()


class Landing:
    """Lender of the memory of one bucket, which checks each piece of it.

    Args:
        manifest: Manifest of the bucket.
        flat: Memory for it.
    """

    def __init__(self, manifest: Manifest, flat: FlatBuffer) -> None:
        self._layout, self._flat = Layout(manifest), flat
        # Offset and index of the next piece, the memory that is lent for it, and its checksum.
        self._start = self._index = 0
        self._lent = memoryview(b"")
        self._sum = RunningChecksum()

    def __call__(self, message: Message, nbytes: int) -> list[memoryview]:
        """Lend the memory of the next piece.

        Raises:
            RemoteProtocolError: It is not the next piece of this bucket.
        """
        end = self._start + nbytes
        index, count = self._position(message)
        is_last = index == count - 1
        # Only the last piece ends the bucket, so that nothing of it can be missing.
        if index != self._index or (end != self._layout.nbytes if is_last else not nbytes):
            raise RemoteProtocolError(f"piece {index} of {count} does not continue the bucket")
        if end > self._layout.nbytes:
            raise RemoteProtocolError("a piece is longer than its bucket")
        self._lent = self._flat.memoryview()[self._start : end]
        self._sum = RunningChecksum()
        return [self._lent]

    def _position(self, message: Message) -> tuple[int, int]:
        """Return (index, count) of a piece; raise if the message is none of this bucket."""
        if not isinstance(message, Update) or message.digest != self._layout.digest:
            raise RemoteProtocolError(f"expected a piece of a bucket, got {type(message).__name__}")
        return message.chunk or (0, 1)

    def landed(self, nbytes: int) -> None:
        """Add the bytes of the piece that have landed to its checksum: they are in the cache."""
        self._sum.update(self._lent[self._sum.nbytes : nbytes])

    def take(self, received: Received) -> bool:
        """Check the piece that arrived. Return True if the bucket is complete.

        Raises:
            RemoteProtocolError: Its bytes changed on the way.
        """
        message = received.message
        if not received.nbytes:
            # A transport calls this object for memory, and with that has the message checked. For
            # a piece without bytes it does not.
            self(message, 0)
        # The checksum goes on to the end of the piece.
        self.landed(len(self._lent))
        assert isinstance(message, Update)
        if message.checksum != self._sum.digest():
            raise RemoteProtocolError("a bucket changed on its way: its checksum differs")
        index, count = self._position(message)
        self._start, self._index = self._start + received.nbytes, index + 1
        return self._index == count

    def tensors(self) -> list[NamedTensor]:
        """Return the names and tensors of the complete bucket, as views of its memory."""
        return list(self._flat.named_views(self._layout))
