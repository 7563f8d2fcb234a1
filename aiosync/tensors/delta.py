"""Deltas: the bytes of a tensor, encoded as their difference to an older version of it.

A training step changes few weights, and most of those by one unit in the last place. So an encoding
says where the changed elements are and by how many steps each moved. It begins with the checksum of
the new bytes; one block follows for each 2 MiB of them, in the layout that is the smallest:

=========  =====================================================================================
unchanged  nothing
gaps       the distances between changed elements, and the steps of these
bitmap     one bit for each element, and the steps of the changed ones
dense      the steps of all elements
raw        the new bytes
=========  =====================================================================================

Steps, distances and bits travel as byte planes: the lowest byte of each number, then the next one.
Each plane is compressed with zstd at level 1 if that makes it smaller. A plane of zeros is empty.

An encoding is exact for every pattern of bits. It comes from a peer, so :func:`apply_delta` checks
each number in it before it allocates or writes anything. This module must never import asyncio or
a transport.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from aiosync.errors import ConfigError, RemoteProtocolError
from aiosync.wire import CHECKSUM_NBYTES, DTYPE_NBYTES, Manifest, checksum

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

__all__ = ["DeltaLayout", "apply_delta", "check_delta", "encode_delta"]

_Bytes: TypeAlias = "NDArray[np.uint8]"
_Elements: TypeAlias = "NDArray[Any]"
_Places: TypeAlias = "NDArray[np.int64]"

_BLOCK_NBYTES = 2 * 2**20
# Bytes that are compared at a time. The masks of a comparison stay in the cache.
_STRIDE_NBYTES = 2**19
_UNCHANGED, _GAPS, _BITMAP, _DENSE, _RAW = range(5)
_LENGTH = struct.Struct("<I")
# Bytes of a distance, changed elements, distances.
_GAPS_HEAD = struct.Struct("<BII")
# Shares of changed elements from which, and up to which, a layout can be the smallest. Between two
# of them both are made, and the smaller one is taken.
_BITMAP_FROM, _GAPS_TO, _DENSE_FROM, _BITMAP_TO = 0.12, 0.2, 0.8, 0.97
# The new bytes are compressed as well if the steps save less than a quarter.
_RAW_FROM = 0.75
# Bytes of a distance, and the mean distance from which it takes as many.
_LONG_GAPS = {1: 0, 2: 300}
_MIN_ZSTD_NBYTES = 64
_MAX_WINDOW_NBYTES = 2**23
# Types whose steps are counted in the order of the numbers, so that a step over 0 is a small one.
_ORDERED = {"bfloat16", "float16", "complex32"}


def check_delta() -> None:
    """Check that deltas can be made and applied here.

    Raises:
        ConfigError: zstandard is not installed.
    """
    _zstandard()


class DeltaLayout:
    """The dtypes in a payload of many tensors, any part of which can be a delta.

    Args:
        manifest: The manifest of the payload.
    """

    def __init__(self, manifest: Manifest) -> None:
        # Neighbours of one dtype, with the padding between them, are one run. Each has its start.
        self._starts: list[int] = []
        self._dtypes: list[str] = []
        for leaf in manifest.leaves:
            if not self._dtypes or leaf.dtype != self._dtypes[-1]:
                self._starts.append(leaf.offset)
                self._dtypes.append(leaf.dtype)

    def _runs(self, start: int, stop: int) -> Iterator[tuple[slice, str]]:
        """Cut a range of the payload into slices of one dtype each, and yield these with it."""
        first = bisect.bisect_right(self._starts, start) - 1
        last = bisect.bisect_left(self._starts, stop)
        ends = [*self._starts[first + 1 : last], stop]
        for begin, end, dtype in zip(
            self._starts[first:last], ends, self._dtypes[first:last], strict=True
        ):
            yield slice(max(begin, start), end), dtype

    def encode(self, start: int, stop: int, base: memoryview, new: memoryview) -> bytes:
        """Encode some bytes of a payload; see :func:`encode_delta`.

        Args:
            start: Place of the first byte, a multiple of 64.
            stop: Place behind the last byte, a multiple of 64.
            base: The whole older payload.
            new: The whole payload.
        """
        parts = list[bytes]()
        for run, dtype in self._runs(start, stop):
            part = encode_delta(base[run], new[run], dtype)
            parts += _LENGTH.pack(len(part)), part
        return b"".join(parts)

    def apply(
        self, start: int, stop: int, encoded: Buffer, base: memoryview, out: memoryview
    ) -> None:
        """Write some bytes of a payload; see :func:`apply_delta`.

        Args:
            start: Place of the first byte, a multiple of 64.
            stop: Place behind the last byte, a multiple of 64.
            encoded: What :meth:`encode` returned there.
            base: The whole older payload.
            out: Memory for the whole payload.

        Raises:
            ConfigError: zstandard is not installed.
            RemoteProtocolError: The encoding is malformed, or it was made with another base.
        """
        reader = _Reader(encoded, None)
        for run, dtype in self._runs(start, stop):
            apply_delta(reader.take(reader.number()), base[run], out[run], dtype)
        reader.end()


def encode_delta(base: Buffer, new: Buffer, dtype: str, *, known: bytes | None = None) -> bytes:
    """Encode the bytes of a tensor as a difference to older bytes of it.

    Most of the work releases the GIL. Besides the result it takes at most 64 MiB of memory.

    Args:
        base: The older bytes: contiguous, with the elements in C order.
        new: The bytes to encode, as many as there are in ``base``.
        dtype: The type of the elements, a key of :data:`aiosync.wire.DTYPE_NBYTES`.
        known: The :func:`aiosync.wire.checksum` of ``new`` if it was computed before.

    Returns:
        The encoding, which :func:`apply_delta` reads. It is larger than ``new`` by at most 16 bytes
        and another 9 for each 2 MiB of them.

    Raises:
        ConfigError: zstandard is not installed, or the arguments do not fit each other.
    """
    old, fresh = _elements(base, dtype), _elements(new, dtype)
    if old.size != fresh.size:
        raise ConfigError(f"a delta of {fresh.nbytes} bytes needs as many in its base")
    compress = _zstandard().ZstdCompressor(level=1).compress
    parts = [checksum(new) if known is None else known]
    for block in _blocks(old):
        body = _encode_block(old[block], fresh[block], dtype in _ORDERED, compress)
        parts += _LENGTH.pack(len(body)), body
    return b"".join(parts)


def apply_delta(encoded: Buffer, base: Buffer, out: Buffer, dtype: str) -> bytes:
    """Write the bytes that an encoding and its base make, and check them.

    Besides ``out`` it takes at most 64 MiB of memory, whatever the encoding claims. Most of the
    work releases the GIL.

    Args:
        encoded: The encoding, which may come from a peer.
        base: The bytes that the encoding was made with.
        out: Writable memory of as many bytes, apart from ``base``. After an error its content is
            undefined.
        dtype: As it was given to :func:`encode_delta`.

    Returns:
        The :func:`aiosync.wire.checksum` of the bytes in ``out``.

    Raises:
        ConfigError: zstandard is not installed, or ``base`` and ``out`` differ in size.
        RemoteProtocolError: The encoding is malformed, or it was made with another base.
    """
    old, made = _elements(base, dtype), _elements(out, dtype)
    if old.size != made.size:
        raise ConfigError(f"a delta of {made.nbytes} bytes needs as many in its base")
    zstd = _zstandard()
    reader = _Reader(encoded, zstd)
    expected = bytes(reader.take(CHECKSUM_NBYTES))
    for block in _blocks(old):
        body = _Reader(reader.take(reader.number()), zstd)
        _apply_block(body, old[block], made[block], dtype in _ORDERED)
        body.end()
    reader.end()
    found = checksum(out)
    if found != expected:
        raise RemoteProtocolError(
            "a delta does not make the bytes that it was made from: it was damaged, or the sender "
            "has another base"
        )
    return found


def _zstandard() -> Any:
    """Import zstandard, which is optional, and return it; raise ConfigError if it is missing."""
    try:
        import zstandard
    except ImportError as exc:
        raise ConfigError(
            f"deltas need zstandard, which cannot be imported ({exc}): pip install 'aiosync[delta]'"
        ) from exc
    return zstandard


def _elements(data: Buffer, dtype: str) -> _Elements:
    """Return bytes as unsigned integers of the size of one element, or of half a complex one."""
    nbytes = DTYPE_NBYTES.get(dtype)
    if nbytes is None:
        raise ConfigError(f"unknown dtype {dtype!r}; there are: {', '.join(DTYPE_NBYTES)}")
    if dtype.startswith("complex"):
        nbytes //= 2
    array = np.frombuffer(memoryview(data).cast("B"), np.uint8)
    if array.size % nbytes:
        raise ConfigError(f"{array.size} bytes are no whole number of elements of {dtype}")
    return array.view(f"u{nbytes}")


def _blocks(elements: _Elements) -> Iterator[slice]:
    """Cut elements into blocks of 2 MiB, which are encoded one by one."""
    size = _BLOCK_NBYTES // elements.itemsize
    return (slice(start, start + size) for start in range(0, elements.size, size))


# -- steps -----------------------------------------------------------------------------------------


def _in_order(bits: _Elements) -> _Elements:
    """Map the bits of 16-bit numbers to integers in the order of the numbers, one to one."""
    mapped: _Elements = bits ^ ((bits.view(np.int16) >> 15).view(np.uint16) | 0x8000)
    return mapped


def _from_order(places: _Elements) -> _Elements:
    """Return the bits that :func:`_in_order` maps to these integers."""
    bits: _Elements = places ^ (~(places.view(np.int16) >> 15).view(np.uint16) | 0x8000)
    return bits


def _steps(base: _Elements, new: _Elements, ordered: bool) -> _Elements:
    """Return by how many steps each element moved, with the sign as the lowest bit."""
    # If `ordered`, a step leads to the next 16-bit float, and else to the next integer.
    step = _in_order(new) - _in_order(base) if ordered else new - base
    sign = (step.view(f"i{step.itemsize}") >> (8 * step.itemsize - 1)).view(step.dtype)
    steps: _Elements = (step << 1) ^ sign
    return steps


def _moved(base: _Elements, steps: _Elements, ordered: bool) -> _Elements:
    """Return the elements to which the result of :func:`_steps` leads from ``base``."""
    step = (steps >> 1) ^ np.negative(steps & 1)
    return _from_order(_in_order(base) + step) if ordered else base + step


def _changed(base: _Elements, new: _Elements) -> _Places:
    """Return the indices of the elements that differ, in order."""
    # Whole words of eight bytes, of `ratio` elements each, are compared first.
    ratio = 8 // base.itemsize
    whole, stride = base.size // ratio, _STRIDE_NBYTES // 8
    found, mask = list[_Places](), np.empty(_STRIDE_NBYTES // base.itemsize, np.bool_)
    words, others = (each[: whole * ratio].view(np.int64) for each in (base, new))
    for start in range(0, whole, stride):
        word, other = words[start : start + stride], others[start : start + stride]
        differs = np.not_equal(word, other, out=mask[: word.size])
        count = np.count_nonzero(differs)
        if not count:
            continue
        if count * 16 < word.size:
            # Few words differ, so the elements of only these are looked at.
            at = np.flatnonzero(differs)
            inner = np.flatnonzero((word.take(at) ^ other.take(at)).view(base.dtype) != 0)
            places = at.take(inner // ratio) * ratio + inner % ratio
        else:
            pair = word.view(base.dtype), other.view(base.dtype)
            places = np.flatnonzero(np.not_equal(*pair, out=mask[: pair[0].size]))
        found.append(places + start * ratio)
    found.append(np.flatnonzero(base[whole * ratio :] != new[whole * ratio :]) + whole * ratio)
    return np.concatenate(found)


# -- encoding --------------------------------------------------------------------------------------


def _encode_block(
    base: _Elements, new: _Elements, ordered: bool, compress: Callable[[Any], bytes]
) -> bytes:
    """Encode one block in the smallest of the layouts that its share of changes allows."""
    places = _changed(base, new)
    if not places.size:
        return bytes([_UNCHANGED])
    share, where, made = places.size / base.size, list[bytes](), list[bytes]()
    if share < _GAPS_TO:
        where.append(_pack_gaps(places, base.size, compress))
    if _BITMAP_FROM < share < _BITMAP_TO:
        where.append(bytes([_BITMAP]) + _pack(np.packbits(base != new), compress))
    if where:
        # No changed element has 0 steps, so that 0 stands for the smallest change.
        changed = _steps(base.take(places), new.take(places), ordered) - 1
        made.append(min(where, key=len) + _pack_planes(changed, compress))
    if share > _DENSE_FROM:
        made.append(bytes([_DENSE]) + _pack_planes(_steps(base, new, ordered), compress))
    best = min(made, key=len)
    if len(best) > _RAW_FROM * new.nbytes:
        best = min(best, bytes([_RAW]) + _pack(new.view(np.uint8), compress), key=len)
    return best


def _pack_gaps(places: _Places, size: int, compress: Callable[[Any], bytes]) -> bytes:
    """Encode the indices of changed elements, of ``size`` elements, as distances."""
    mean = size / places.size
    nbytes = max(each for each, least in _LONG_GAPS.items() if mean >= least)
    limit = 256**nbytes - 1
    # A longer distance takes several numbers: `limit` means that the next one is added to it.
    gap = np.diff(places, prepend=-1) - 1
    extra = gap // limit
    gaps = np.full(int(extra.sum()) + gap.size, limit, f"u{nbytes}")
    gaps[np.cumsum(extra + 1) - 1] = gap % limit
    head = _GAPS_HEAD.pack(nbytes, places.size, gaps.size)
    return bytes([_GAPS]) + head + _pack_planes(gaps, compress)


def _pack_planes(numbers: _Elements, compress: Callable[[Any], bytes]) -> bytes:
    """Encode numbers as byte planes: the lowest byte of each number, then the next one."""
    shifts = range(0, 8 * numbers.itemsize, 8)
    return b"".join(_pack((numbers >> shift).astype(np.uint8), compress) for shift in shifts)


def _pack(plane: _Bytes, compress: Callable[[Any], bytes]) -> bytes:
    """Return a plane with its length in front; compressed if smaller, and zeros as no bytes."""
    if not plane.any():
        return _LENGTH.pack(0)
    packed = compress(plane) if plane.size >= _MIN_ZSTD_NBYTES else b""
    if not packed or len(packed) >= plane.size:
        packed = plane.tobytes()
    return _LENGTH.pack(len(packed)) + packed


# -- decoding --------------------------------------------------------------------------------------


class _Reader:
    """Takes numbers and planes from bytes of a peer, one after the other."""

    def __init__(self, data: Buffer, zstd: Any) -> None:
        self._left = memoryview(data).cast("B")
        self._zstd = zstd

    def take(self, nbytes: int) -> memoryview:
        """Take the next bytes; raise if fewer are left."""
        if nbytes > self._left.nbytes:
            raise _malformed()
        taken, self._left = self._left[:nbytes], self._left[nbytes:]
        return taken

    def number(self) -> int:
        """Take a length, which is a number of four bytes."""
        [number] = _LENGTH.unpack(self.take(_LENGTH.size))
        return int(number)

    def plane(self, size: int) -> _Bytes:
        """Take a plane, and unpack it to exactly ``size`` bytes, whatever the peer claims."""
        nbytes = self.number()
        if nbytes > size:
            raise _malformed()
        if not nbytes:
            return np.zeros(size, np.uint8)
        packed = self.take(nbytes)
        if nbytes == size:
            return np.frombuffer(packed, np.uint8)
        try:
            # The library allocates what the frame says that it unpacks to.
            if self._zstd.frame_content_size(packed) != size:
                raise _malformed()
            unpack = self._zstd.ZstdDecompressor(max_window_size=_MAX_WINDOW_NBYTES).decompress
            plane = np.frombuffer(unpack(packed), np.uint8)
        except self._zstd.ZstdError as exc:
            raise _malformed() from exc
        if plane.size != size:
            raise _malformed()
        return plane

    def planes(self, count: int, nbytes: int) -> _Elements:
        """Take the byte planes of ``count`` numbers of ``nbytes`` each; return the numbers."""
        numbers = self.plane(count).astype(f"u{nbytes}")
        for index in range(1, nbytes):
            numbers |= self.plane(count).astype(numbers.dtype) << 8 * index
        return numbers

    def gaps(self, size: int) -> _Places:
        """Take distances; return the indices of changed elements among ``size`` elements."""
        nbytes, count, length = _GAPS_HEAD.unpack(self.take(_GAPS_HEAD.size))
        if nbytes not in _LONG_GAPS or count > size:
            raise _malformed()
        limit = 256**nbytes - 1
        # Each number that stands for no changed element skips at least ``limit`` elements.
        if not count <= length <= count + size // limit:
            raise _malformed()
        gaps = self.planes(length, nbytes)
        last = gaps != limit
        places: _Places = (np.cumsum(gaps + last.astype(np.int64)) - 1)[last]
        if places.size != count or (count and places[-1] >= size):
            raise _malformed()
        return places

    def end(self) -> None:
        """Check that nothing is left."""
        if self._left.nbytes:
            raise _malformed()


def _malformed() -> RemoteProtocolError:
    """Return the error for an encoding that no sender makes."""
    return RemoteProtocolError("a delta is malformed: it was damaged, or its sender is at fault")


def _apply_block(body: _Reader, base: _Elements, out: _Elements, ordered: bool) -> None:
    """Write the elements of one block, made of its encoding and of the base."""
    [layout] = body.take(1)
    if layout == _RAW:
        out.view(np.uint8)[:] = body.plane(out.nbytes)
    elif layout == _DENSE:
        out[:] = _moved(base, body.planes(base.size, base.itemsize), ordered)
    elif layout in (_UNCHANGED, _GAPS, _BITMAP):
        np.copyto(out, base)
        if layout == _UNCHANGED:
            return
        if layout == _GAPS:
            places = body.gaps(base.size)
        else:
            bits = body.plane(-(-base.size // 8))
            places = np.flatnonzero(np.unpackbits(bits, count=base.size).view(np.bool_))
        # The encoding of a changed element is one less than its steps.
        steps = body.planes(places.size, base.itemsize) + 1
        out[places] = _moved(base.take(places), steps, ordered)
    else:
        raise _malformed()
