"""The format of a stored version: a safetensors file whose header says more.

The header holds the manifest, the values that are not tensors, and checksums. Files are written
here and not by the safetensors package: straight from the flat buffer, in chunks. This module
must never import asyncio, a transport or a scheme; nothing is unpickled.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, NoReturn, TypeAlias

import xxhash

from aiosync.errors import AiosyncError, ConfigError
from aiosync.tensors import FlatBuffer, Layout
from aiosync.types import Limits
from aiosync.wire import LeafSpec, Manifest, encode_values
from aiosync.wire.values import InvalidData, pack, unpack

__all__ = [
    "BUFFER_NBYTES",
    "SaveProgress",
    "StoreError",
    "StoredUpdate",
    "checksum_of",
    "encode_header",
    "open_file",
    "read",
    "read_model_id",
    "write",
]

SaveProgress: TypeAlias = Callable[[int, int], None]
"""Called with the tensor bytes written so far, and with how many there are."""

BUFFER_NBYTES = 2**20
"""Bytes that files are buffered with; larger pieces bypass the buffer."""

_FORMAT = "1"
_CHUNK_NBYTES = 16 * 2**20
_MAX_HEADER_NBYTES = 100_000_000
"""Where the readers of safetensors files stop."""

_ALIGNMENT = 64
_METADATA = "__metadata__"

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
}
"""What every release of safetensors can express; the others are stored as bytes (U8)."""


class StoreError(AiosyncError):
    """A file of a store is damaged, or was not written by a store, or the disk refused it."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredUpdate:
    """One version of one model, as a store keeps it.

    Attributes:
        epoch: Epoch of the sender that made it.
        version: Its number in that epoch.
        strategy: Name of the strategy that extracted the weights.
        layout: Where each tensor lies in ``buffer``.
        buffer: The tensors; at least ``layout.nbytes`` long.
        values: Non-tensor values by dotted name, of plain msgpack types.
        saved_at: When its file was written, in seconds since the Unix epoch; ``None`` for one
            that was not loaded from a file.
    """

    epoch: int
    version: int
    strategy: str
    layout: Layout
    buffer: FlatBuffer
    values: Mapping[str, Any]
    saved_at: float | None = None


def _fail(path: str, why: str) -> NoReturn:
    raise StoreError(f"{path}: {why}")


def read(file: io.BufferedReader, path: str, model_id: str, limits: Limits) -> StoredUpdate:
    """Read and check a whole file into new memory.

    Raises:
        StoreError: The file is damaged, cut short, foreign or beyond the limits.
        OSError: The disk refused it.
    """
    header = _read_header(file, path)
    metadata = _read_metadata(header, path)
    update, checksum = _decode_metadata(metadata, model_id, path, limits)
    manifest = update.layout.manifest
    try:
        again = encode_header(model_id, update, checksum)
    except ConfigError as exc:
        raise StoreError(f"{path}: its header is not valid: {exc}") from exc
    if again != header:  # what else it says is implied: one comparison checks it all
        _fail(path, "its header is damaged")
    expected = 8 + len(header) + sum(leaf.nbytes for leaf in manifest.leaves)
    found = os.fstat(file.fileno())
    if found.st_size != expected:
        _fail(path, f"it has {found.st_size} bytes instead of {expected}")
    try:
        buffer = FlatBuffer(update.layout.nbytes)
    except MemoryError as exc:
        raise StoreError(f"{path}: no memory for its {manifest.nbytes} bytes") from exc
    memory = buffer.memoryview()
    for leaf in _file_order(manifest):
        with memory[leaf.offset : leaf.offset + leaf.nbytes] as part:
            if leaf.nbytes and file.readinto(part) != leaf.nbytes:
                _fail(path, "it was cut short while it was read")
    if checksum_of(manifest, memory) != checksum:
        _fail(path, "its tensors are damaged: the checksum differs")
    for start, end in update.layout.padding():
        buffer.array[start:end] = 0  # no old memory of this process may travel
    return replace(update, buffer=buffer, saved_at=found.st_mtime)


def _file_order(manifest: Manifest) -> list[LeafSpec]:
    """Sort by size of the elements, so that each tensor is aligned without gaps between them."""
    return sorted(manifest.leaves, key=lambda leaf: -_itemsize(leaf))


def _itemsize(leaf: LeafSpec) -> int:
    """Return a power of two that divides the size; the elements' own size if any are there."""
    name = _DTYPES.get(leaf.dtype, "U8")
    return 1 if name.startswith("F8") or name == "BOOL" else int(re.sub(r"\D", "", name)) // 8


def checksum_of(manifest: Manifest, memory: memoryview) -> str:
    """Return the XXH3-128 of all tensors in the order of the manifest, without the padding."""
    digest = xxhash.xxh3_128()
    for leaf in manifest.leaves:
        digest.update(memory[leaf.offset : leaf.offset + leaf.nbytes])
    return digest.hexdigest()


def write(
    file: BinaryIO, header: bytes, update: StoredUpdate, progress: SaveProgress | None
) -> None:
    """Write header and tensors; nothing is flushed.

    Args:
        file: A buffered file.
        header: What :func:`encode_header` returned for this update.
        update: The version. Its buffer is read.
        progress: Called about every 16 MiB, and after the last byte.
    """
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    manifest = update.layout.manifest
    memory = update.buffer.memoryview()
    total = sum(leaf.nbytes for leaf in manifest.leaves)
    written = reported = 0
    for leaf in _file_order(manifest):
        end = leaf.offset + leaf.nbytes
        for start in range(leaf.offset, end, _CHUNK_NBYTES):
            written += file.write(memory[start : min(end, start + _CHUNK_NBYTES)])
            if progress is not None and (written - reported >= _CHUNK_NBYTES or written == total):
                progress(written, total)
                reported = written


def encode_header(model_id: str, update: StoredUpdate, checksum: str) -> bytes:
    """Return the header, padded so that the tensors start on a multiple of 64 bytes.

    Args:
        model_id: Which model it is.
        update: The version; its buffer is not looked at.
        checksum: What :func:`checksum_of` returned for its tensors.

    Raises:
        ConfigError: Something in it cannot be stored.
    """
    try:
        values = pack(encode_values(update.values))
    except InvalidData as exc:
        raise ConfigError(f"the values cannot be stored: {exc}") from exc
    manifest = update.layout.manifest
    metadata = {
        "aiosync.format": _FORMAT,
        "aiosync.model_id": model_id,
        "aiosync.epoch": str(update.epoch),
        "aiosync.version": str(update.version),
        "aiosync.strategy": update.strategy,
        "aiosync.manifest": base64.b64encode(manifest.encode()).decode(),
        "aiosync.values": base64.b64encode(values).decode(),
        "aiosync.checksum": checksum,
    }
    # The checksum of the tensors says nothing about a flipped digit of the version.
    metadata["aiosync.header_checksum"] = xxhash.xxh3_128_hexdigest(json.dumps(metadata).encode())
    table: dict[str, Any] = {_METADATA: metadata}
    reserved = _METADATA
    names = {leaf.name for leaf in manifest.leaves}
    while reserved in names:  # a tensor of this name needs another key in the file
        reserved += "."
    position = 0
    for leaf in _file_order(manifest):
        known = _DTYPES.get(leaf.dtype)
        table[reserved if leaf.name == _METADATA else leaf.name] = {
            "dtype": known or "U8",
            "shape": leaf.shape if known else (leaf.nbytes,),
            "data_offsets": (position, position + leaf.nbytes),
        }
        position += leaf.nbytes
    try:
        header = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as exc:
        raise ConfigError(f"the strategy {update.strategy!r} is not valid Unicode") from exc
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    if len(header) > _MAX_HEADER_NBYTES:
        raise ConfigError(
            f"names and values need {len(header)} bytes; at most {_MAX_HEADER_NBYTES} fit"
        )
    return header


def open_file(path: str) -> io.BufferedReader | None:
    """Open a file of a store; ``None`` if there is none.

    Raises:
        StoreError: It is not a regular file.
        OSError: It cannot be opened; a symbolic link cannot.
    """
    try:
        # O_NONBLOCK: a FIFO in its place must not stop the server.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        _fail(path, "it is not a regular file")
    return io.BufferedReader(io.FileIO(fd), BUFFER_NBYTES)


def _read_header(file: io.BufferedReader, path: str) -> bytes:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, _MAX_HEADER_NBYTES):
        _fail(path, "it is cut short, or not a safetensors file")
    header = file.read(length)
    if len(header) != length:
        _fail(path, "it was cut short while it was read")
    return header


def read_model_id(file: io.BufferedReader, path: str) -> str:
    """Return which model a file is of, from its header alone.

    Raises:
        StoreError: The header is damaged or foreign.
        OSError: The disk refused it.
    """
    model_id = _read_metadata(_read_header(file, path), path).get("aiosync.model_id")
    return _fail(path, "its header is damaged: it names no model") if model_id is None else model_id


def _read_metadata(header: bytes, path: str) -> dict[str, str]:
    try:
        table = json.loads(header)
    except (ValueError, RecursionError) as exc:
        raise StoreError(f"{path}: its header is damaged, or it is not a safetensors file") from exc
    metadata = table.get(_METADATA) if isinstance(table, dict) else None
    if not isinstance(metadata, dict) or "aiosync.format" not in metadata:
        _fail(path, "it was not written by an aiosync store, or its header is damaged")
    if not all(isinstance(value, str) for value in metadata.values()):
        _fail(path, "its header is damaged: metadata that is not text")
    if metadata["aiosync.format"] != _FORMAT:
        found = metadata["aiosync.format"][:20]
        _fail(path, f"it has the format version {found!r}; only {_FORMAT!r} is supported")
    return metadata


def _decode_metadata(
    metadata: dict[str, str], model_id: str, path: str, limits: Limits
) -> tuple[StoredUpdate, str]:
    """Return the update, its buffer still empty, and the checksum of the tensors."""
    try:
        if metadata["aiosync.model_id"] != model_id:
            _fail(path, f"it belongs to the model {metadata['aiosync.model_id'][:80]!r}")
        manifest = base64.b64decode(metadata["aiosync.manifest"], validate=True)
        values = unpack(base64.b64decode(metadata["aiosync.values"], validate=True))
        update = StoredUpdate(
            epoch=int(metadata["aiosync.epoch"]),
            version=int(metadata["aiosync.version"]),
            strategy=metadata["aiosync.strategy"],
            layout=Layout(Manifest.decode(manifest, limits)),
            buffer=FlatBuffer(0),
            values=values,
        )
        return update, metadata["aiosync.checksum"]
    except StoreError:
        raise
    except KeyError as exc:
        raise StoreError(f"{path}: its header is damaged: {exc} is missing") from exc
    except (ValueError, AiosyncError) as exc:
        raise StoreError(f"{path}: its header is not valid: {exc}") from exc
