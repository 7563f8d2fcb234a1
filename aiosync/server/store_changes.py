"""Changes of a stored model since its file was written: records, in a file next to it.

A record has its sizes, a header, and the changes of all tensors since the version before it. The
sizes are written last, once the rest is safely on disk: where they are zeros, or missing, a record
was being written that never counted. The headers are those of ``server.store``. This module must
never import asyncio, a transport or a scheme.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from aiosync.errors import RemoteProtocolError
from aiosync.tensors import copy_bytes
from aiosync.tensors.delta import apply_delta, encode_delta
from aiosync.wire import Manifest

__all__ = ["append_record", "apply_changes", "encode_changes", "read_records"]

# Bytes of the header and of the changes; then the CRC-32 of these two numbers.
_SIZES, _CRC = struct.Struct("<QQ"), struct.Struct("<I")
_HEAD_NBYTES = _SIZES.size + _CRC.size
# Records begin at multiples of this, so that a disk writes the sizes whole, or not at all.
_ALIGNMENT = 64
# Bytes of the changes of one piece.
_LENGTH = struct.Struct("<Q")
# A larger tensor is encoded in pieces, so that little memory is needed beside it.
_PIECE_NBYTES = 64 * 2**20


def _pieces(manifest: Manifest) -> Iterator[tuple[slice, str]]:
    """Yield the places of all elements in the memory of an update, with their dtypes."""
    for leaf in manifest.leaves:
        end = leaf.offset + leaf.nbytes
        for start in range(leaf.offset, end, _PIECE_NBYTES):
            yield slice(start, min(start + _PIECE_NBYTES, end)), leaf.dtype


def encode_changes(
    manifest: Manifest, base: memoryview, new: memoryview, most: int
) -> list[bytes] | None:
    """Encode the changes from one version to the next.

    Args:
        manifest: The manifest of both.
        base: Memory of the older version.
        new: Memory of the newer one.
        most: Largest number of bytes of the result.

    Returns:
        The encoded pieces; ``None`` if they would take more bytes.
    """
    found, left = list[bytes](), most
    for place, dtype in _pieces(manifest):
        encoded = encode_delta(base[place], new[place], dtype)
        left -= _LENGTH.size + len(encoded)
        if left < 0:
            return None
        found += _LENGTH.pack(len(encoded)), encoded
    return found


def apply_changes(changes: memoryview, manifest: Manifest, memory: memoryview) -> None:
    """Turn a version into the next one, in its memory. After an error that is undefined.

    Raises:
        RemoteProtocolError: The changes are damaged, or were made from another version.
        ConfigError: zstandard is not installed.
    """
    at = 0
    for place, dtype in _pieces(manifest):
        start = at + _LENGTH.size
        if start > len(changes):
            raise RemoteProtocolError("changes of some tensors are missing")
        at = start + _LENGTH.unpack_from(changes, at)[0]
        made = memoryview(bytearray(place.stop - place.start))
        apply_delta(changes[start:at], memory[place], made, dtype)
        copy_bytes(memory[place], made)
    if at != len(changes):
        raise RemoteProtocolError("the changes of the tensors have another size")


def append_record(file: BinaryIO, position: int, header: bytes, changes: Sequence[bytes]) -> int:
    """Write a record at a position, where the file then ends; return when it is safely on disk.

    Returns:
        The position behind it.

    Raises:
        OSError: The disk refused the record. The caller cuts the file at the position.
    """
    nbytes = sum(map(len, changes))
    sizes = _SIZES.pack(len(header), nbytes)
    padding = bytes(-(_HEAD_NBYTES + len(header) + nbytes) % _ALIGNMENT)
    file.truncate(position)
    file.seek(position)
    file.writelines([bytes(_HEAD_NBYTES), header, *changes, padding])
    end = file.tell()
    _sync(file)
    file.seek(position)
    file.write(sizes + _CRC.pack(zlib.crc32(sizes)))
    _sync(file)
    return end


def _sync(file: BinaryIO) -> None:
    """Return when all that was written is safely on disk."""
    file.flush()
    os.fsync(file.fileno())


def read_records(file: BinaryIO) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the header and the changes of each record that counts.

    Raises:
        RemoteProtocolError: The size of a record is damaged.
        OSError: The disk refused the read.
    """
    left = os.fstat(file.fileno()).st_size
    while left >= _HEAD_NBYTES:
        sizes, crc = file.read(_SIZES.size), file.read(_CRC.size)
        if not any(sizes + crc):
            return
        if _CRC.pack(zlib.crc32(sizes)) != crc:
            raise RemoteProtocolError("the size of a change is damaged")
        header_nbytes, nbytes = _SIZES.unpack(sizes)
        whole = _HEAD_NBYTES + header_nbytes + nbytes
        left -= whole
        if left < 0:
            raise RemoteProtocolError("a change is cut short")
        yield file.read(header_nbytes), memoryview(file.read(nbytes))
        left -= len(file.read(-whole % _ALIGNMENT))
