"""The newest version of each model as one file in a directory, or as a file and what has changed.

A file is a safetensors file whose header also holds the manifest, the values that are not tensors,
and checksums. This module writes it, and not the safetensors package: straight from the flat
buffer, in chunks, and replaced in one step. If the store may, it appends the changes of a version
to a second file instead, see ``server.store_changes``. This module must never import asyncio, a
transport or a scheme; nothing is unpickled.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import stat
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import xxhash

from aiosync._log import log
from aiosync._repr import in_every_state
from aiosync.errors import AiosyncError, ConfigError
from aiosync.server.store_changes import (
    append_record,
    apply_changes,
    encode_changes,
    read_records,
)
from aiosync.tensors import FlatBuffer, Layout, copy_bytes
from aiosync.tensors.delta import check_delta
from aiosync.tensors.joining import check_headers
from aiosync.types import Limits
from aiosync.wire import DEFAULT_LIMITS, LeafSpec, Manifest, encode_values
from aiosync.wire.values import InvalidData, pack, unpack

__all__ = ["DTYPES", "StoreError", "StoredUpdate", "WeightStore", "open_regular", "replacing"]

_SUFFIX = ".safetensors"
_CHANGES_SUFFIX = ".changes"
_MOST_CHANGES = 16
"""Versions that are appended before the file is written anew: reading each takes time."""

_TEMPORARY = re.compile(r"\.aiosync-[0-9a-f]{16}\.tmp")
_MAX_STEM = 240
"""Characters of a file name without its ending; the usual file systems allow 255 bytes."""

_BUFFER_NBYTES = 2**20
"""Bytes of the buffer of each open file; larger pieces bypass it."""

_FORMAT = "1"
_MAX_HEADER_NBYTES = 100_000_000
"""Longest header that readers of safetensors files accept, in bytes."""

_ALIGNMENT = 64
_METADATA = "__metadata__"

DTYPES = {
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
"""Dtypes that every release of safetensors can express; others are stored as bytes (U8)."""


class StoreError(AiosyncError):
    """Error for a store's file that is damaged or foreign, or that the disk refused."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredUpdate:
    """One version of one model, as a store keeps it.

    Attributes:
        epoch: Epoch of the sender that sent the version.
        version: Number of the version in that epoch.
        strategy: Name of the strategy that extracted the weights.
        layout: Position of each tensor in ``buffer``.
        buffer: The memory of the tensors; at least ``layout.nbytes`` long.
        values: Non-tensor values by dotted name, of plain msgpack types.
        replaced: Epochs of runs that this run and earlier ones have replaced, oldest first.
        saved_at: Time at which the file was written, in seconds since the Unix epoch; ``None`` for
            an update that was not loaded from a file.
    """

    epoch: int
    version: int
    strategy: str
    layout: Layout
    buffer: FlatBuffer
    values: Mapping[str, Any]
    replaced: tuple[int, ...] = ()
    saved_at: float | None = None


@dataclass(slots=True, eq=False)
class _Kept:
    """The version that was saved last, from which the next one's changes are made.

    Attributes:
        name: Its :func:`_name_of`.
        digest: Digest of its layout.
        buffer: Memory of its own, with its tensors.
        stamp: What tells the file from one that another process has put in its place.
        position: Bytes of the changes after it.
        count: Number of versions among these.
    """

    name: str
    digest: bytes
    buffer: FlatBuffer
    stamp: tuple[int, ...]
    position: int = 0
    count: int = 0

    def may_grow(self, path: str) -> bool:
        """Return True if a version may be appended: there are few, and no other process saved."""
        return (
            self.count < _MOST_CHANGES
            and self.stamp == _stamp(path)
            and self.position == _size(_changes_of(path))
        )


class WeightStore:
    """A directory with one file for each model.

    A file changes in one step: whatever happens during a save, the end of the process or of the
    machine included, the directory has either the old or the new file, complete. Methods block.
    Several threads may call them at once, and several processes may share a directory. Of two
    saves of one model at the same time, the one that ends last stays.

    With ``deltas``, a version that changes few weights is appended to a second file, ``.changes``,
    as the changes since the version before. After 16 of them, or if they take more than half of the
    model's bytes, the file itself is written anew. A copy of each model stays in memory for this,
    and one thread of one process at a time may save a model.

    Attributes:
        directory: Absolute path of the directory.
        limits: Limits on the sizes in a file that is loaded.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        limits: Limits = DEFAULT_LIMITS,
        deltas: bool = False,
    ) -> None:
        """Open a directory, and remove the temporary files of interrupted saves.

        Args:
            directory: Path of the directory. It is made, for this user only, if it is missing.
            limits: Limits on the sizes in a file that is loaded.
            deltas: Append what changes, where that is little.

        Raises:
            ConfigError: This is no path, or not that of a directory, it cannot be made, or this
                user may not read and write it; or ``deltas`` needs zstandard, which is missing.
        """
        if deltas:
            check_delta()
        if not isinstance(directory, str | os.PathLike):
            raise ConfigError(f"a store is a directory, and not {directory!r}")
        self.directory: str = os.path.abspath(directory)
        self.limits: Limits = limits
        # The version of each model that was saved last; None if no changes are appended.
        self._kept: dict[str, _Kept] | None = {} if deltas else None
        try:
            os.makedirs(self.directory, 0o700, exist_ok=True)
            if not os.access(self.directory, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError("it is no directory that this user can read and write")
            _warn_of_others(self.directory, os.stat(self.directory))
            self._remove_stale()
        except OSError as exc:
            raise ConfigError(f"the store {self.directory} cannot be used: {exc}") from exc

    @in_every_state
    def __repr__(self) -> str:
        return f"<WeightStore {self.directory!r}>"

    def save(self, model_id: str, update: StoredUpdate) -> None:
        """Save a version of a model; return when it is safely on disk.

        Args:
            model_id: Any text that is not too long: the name of the file is derived from it.
            update: The version. The call reads its buffer, which must not change meanwhile.

        Raises:
            ConfigError: The update cannot be stored; nothing was written.
            StoreError: The disk refused the file because it is full, read-only or broken. The old
                version stays, unless the only failure was the sync of the directory.
        """
        path = self._path(model_id)
        manifest, memory = update.layout.manifest, update.buffer.memoryview()
        checksum = _checksum_of(manifest, memory)
        try:
            if self._append(path, model_id, update, checksum):
                return
            header = _encode_header(model_id, update, checksum)
            with replacing(path, 0o600) as (file, _):
                file.write(len(header).to_bytes(8, "little") + header)
                for leaf in _file_order(manifest):
                    file.write(memory[leaf.offset : leaf.offset + leaf.nbytes])
            # If the process ends before this, the changes are found to be of the old file.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_changes_of(path))
                _sync(self.directory)
            self._keep(path, model_id, update, checksum)
        except OSError as exc:
            raise StoreError(f"{path}: cannot be saved: {exc}") from exc

    def _append(self, path: str, model_id: str, update: StoredUpdate, checksum: str) -> bool:
        """Append the changes since the version that was saved last; False if there is no room."""
        kept, layout = (self._kept or {}).get(model_id), update.layout
        if kept is None or kept.digest != layout.digest or not kept.may_grow(path):
            return False
        memory, before = update.buffer.memoryview(), kept.buffer.memoryview()
        most = layout.nbytes // 2 - kept.position
        try:
            changes = encode_changes(layout.manifest, before, memory, most)
        except MemoryError:
            return False
        if changes is None:
            return False
        header = _encode_change(model_id, update, checksum, kept.name)
        end = self._write_change(_changes_of(path), kept.position, header, changes)
        copy_bytes(before[: layout.nbytes], memory[: layout.nbytes])
        kept.name, kept.position, kept.count = _name_of(update, checksum), end, kept.count + 1
        return True

    def _write_change(
        self, path: str, position: int, header: bytes, changes: Sequence[bytes]
    ) -> int:
        """Append a record, or leave the file as it was; return the position behind it."""
        fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb", buffering=_BUFFER_NBYTES) as file:
                end = append_record(file, position, header, changes)
            if not position:
                _sync(self.directory)
        except BaseException:  # The error goes on to the caller.
            # The version is refused, so that no start may find it.
            with contextlib.suppress(OSError):
                os.truncate(path, position)
            raise
        return end

    def _keep(self, path: str, model_id: str, update: StoredUpdate, checksum: str) -> None:
        """Keep a copy of a version that the file has, to make the next one's changes from it."""
        if self._kept is None:
            return
        layout = update.layout
        kept = self._kept.pop(model_id, None)
        try:
            same = kept is not None and kept.buffer.nbytes == layout.nbytes
            buffer = kept.buffer if kept is not None and same else FlatBuffer(layout.nbytes)
        except MemoryError:
            # The next version is written whole, too.
            return
        copy_bytes(buffer.memoryview(), update.buffer.memoryview()[: layout.nbytes])
        name = _name_of(update, checksum)
        self._kept[model_id] = _Kept(name, layout.digest, buffer, _stamp(path))

    def load(self, model_id: str) -> StoredUpdate | None:
        """Return the version that was saved last, in new memory; ``None`` if there is none.

        Raises:
            StoreError: The file is damaged, cut short, foreign or beyond the limits; the message
                names the file and the fault.
        """
        path = self._path(model_id)
        # Opened in this order: where the file is replaced meanwhile, the changes are of the old one
        # and do not count. The other way round they could be missing.
        with _opened(_changes_of(path)) as changes, _opened(path) as file:
            if file is None:
                return None
            with _named(path):
                update, checksum = _read(file, model_id, self.limits)
            if changes is None:
                return update
            with _named(_changes_of(path)):
                return _follow(changes, model_id, update, checksum, self.limits)

    def model_ids(self) -> list[str]:
        """Return the sorted ids of the models that have a file.

        A listed file may still turn out to be damaged when it is loaded.
        """
        found = []
        for name in os.listdir(self.directory):
            stem = name.removesuffix(_SUFFIX)
            model_id = "" if stem == "%" else urllib.parse.unquote(stem)
            with contextlib.suppress(ValueError):  # the name is none that a store gives to a file
                if _file_name(model_id) == name:
                    found.append(model_id)
        return sorted(found)

    def _path(self, model_id: str) -> str:
        return os.path.join(self.directory, _file_name(model_id))

    def _remove_stale(self) -> None:
        """Remove the temporary files of saves that were interrupted."""
        for name in filter(_TEMPORARY.fullmatch, os.listdir(self.directory)):
            path = os.path.join(self.directory, name)
            # Another process may have removed the file, or be writing it and hold its lock.
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                with open(path, "rb", opener=open_regular) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)


# -- names ------------------------------------------------------------------------------------


def _file_name(model_id: str) -> str:
    """Return the name of a model's file: letters, digits and ``-_.%~``, without a dot in front."""
    stem = urllib.parse.quote(model_id.encode(), safe="").replace("~", "%7E") or "%"
    if stem.startswith("."):
        stem = "%2E" + stem[1:]
    if len(stem) > _MAX_STEM:
        raise ConfigError(f"the model id {model_id[:40]!r}... is too long to be stored")
    return stem + _SUFFIX


def _changes_of(path: str) -> str:
    """Return the path of the changes of a model's file."""
    return path.removesuffix(_SUFFIX) + _CHANGES_SUFFIX


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Have the errors of reading a file name it, as :class:`StoreError`."""
    try:
        yield
    except OSError as exc:
        raise StoreError(f"{path}: cannot be read: {exc}") from exc
    except MemoryError as exc:
        raise StoreError(f"{path}: there is no memory to read it") from exc
    except AiosyncError as exc:
        raise StoreError(f"{path}: {exc}") from exc


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO | None]:
    """Open a file for reading, and warn if others can write to it; ``None`` if there is none."""
    with contextlib.ExitStack() as stack:
        file: BinaryIO | None = None
        with _named(path), contextlib.suppress(FileNotFoundError):
            file = stack.enter_context(
                open(path, "rb", buffering=_BUFFER_NBYTES, opener=open_regular)
            )
            _warn_of_others(path, os.fstat(file.fileno()))
        yield file


def _stamp(path: str) -> tuple[int, ...]:
    """Return what tells a file from one that takes its place; empty if there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _size(path: str) -> int:
    """Return the bytes of a file; 0 if there is none."""
    return (_stamp(path) or (0,))[-1]


def open_regular(path: str, flags: int, mode: int = 0o777) -> int:
    """Open a regular file; an ``opener`` for ``open()``. Never blocks, not even at a pipe.

    Raises:
        OSError: The path is a pipe, a device or a socket, or cannot be opened.
    """
    fd = os.open(path, flags | os.O_NONBLOCK, mode)
    kind = os.fstat(fd).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # open() itself refuses a directory
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file")
    return fd


def _warn_of_others(path: str, found: os.stat_result) -> None:
    """Log a warning if another user can write the directory or file, and so choose the weights."""
    if found.st_uid not in (0, os.geteuid()):
        who = "it belongs to another user"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        who = "others can write to it"
    else:
        return
    text = f"{path}: {who}, and so choose what this server serves: chown it, and chmod go-w"
    log(logging.WARNING, "store", text, model=None)


# -- replacing a file -------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: str, mode: int | None = None) -> Iterator[tuple[BinaryIO, str]]:
    """Write a temporary file that replaces ``path`` in one step, unless the block raises.

    Args:
        path: Path of the file to replace; it need not exist.
        mode: Mode of the new file; ``None`` for the mode of the old file, or that of the umask if
            there is no old file.

    Yields:
        The open temporary file and its path, which is in the same directory. No more users can
        read it than the file that it becomes. The block may replace the temporary file by another.

    Raises:
        OSError: The disk refused the file. The new file is in place only if the failure was the
            sync of the directory.
    """
    folder = os.path.dirname(path)
    if mode is None and os.path.exists(path):
        mode = os.stat(path).st_mode & 0o777
    temporary = os.path.join(folder, f".aiosync-{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o666 if mode is None else 0o600)
    try:
        with os.fdopen(fd, "wb", buffering=_BUFFER_NBYTES) as file:
            # The lock tells other processes that this file is being written. A file system without
            # locks is allowed; then processes must not share the directory.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            if mode is None:
                mode = os.fstat(fd).st_mode & 0o777
            yield file, temporary
            file.flush()
            os.chmod(temporary, mode)
            _sync(temporary)
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):  # os.replace() has moved it
            os.unlink(temporary)
    _sync(folder)


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -- the format -------------------------------------------------------------------------------


def _read(file: BinaryIO, model_id: str, limits: Limits) -> tuple[StoredUpdate, str]:
    """Read and check a whole file into new memory; return the update and its checksum.

    Raises:
        StoreError: The file is damaged, cut short, foreign or beyond the limits.
        OSError: The disk refused the read.
    """
    found = os.fstat(file.fileno())
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(found.st_size - 8, _MAX_HEADER_NBYTES):
        raise StoreError("it is cut short, or not a safetensors file")
    header = file.read(length)
    update, checksum = _parse_header(header, model_id, limits)
    leaves = update.layout.manifest.leaves
    expected = 8 + len(header) + sum(leaf.nbytes for leaf in leaves)
    if found.st_size != expected:
        raise StoreError(f"it has {found.st_size} bytes instead of {expected}")
    try:
        buffer = FlatBuffer(update.layout.nbytes)
    except MemoryError as exc:
        raise StoreError(f"no memory for its {update.layout.nbytes} bytes") from exc
    memory = buffer.memoryview()
    for leaf in _file_order(update.layout.manifest):
        with memory[leaf.offset : leaf.offset + leaf.nbytes] as part:
            file.readinto(part)  # type: ignore[attr-defined]  # a short read fails the checksum
    if _checksum_of(update.layout.manifest, memory) != checksum:
        raise StoreError("its tensors are damaged: the checksum differs")
    for start, end in update.layout.padding():
        buffer.array[start:end] = 0  # the padding travels, and must not hold this process's memory
    return replace(update, buffer=buffer, saved_at=found.st_mtime), checksum


def _follow(
    file: BinaryIO, model_id: str, update: StoredUpdate, checksum: str, limits: Limits
) -> StoredUpdate:
    """Apply the changes that were appended after an update was written; return the newest one.

    Raises:
        StoreError: The changes are damaged, foreign or beyond the limits.
        RemoteProtocolError: The changes are damaged.
        OSError: The disk refused the read.
    """
    saved_at, first, memory = os.fstat(file.fileno()).st_mtime, update, update.buffer.memoryview()
    for header, changes in read_records(file):
        found, after, onto = _parse_change(header, model_id, update)
        if onto != _name_of(update, checksum):
            if update is first:
                # The file was written after these changes, which should be gone.
                return update
            raise StoreError("a version is missing among the changes")
        apply_changes(changes, update.layout.manifest, memory)
        update, checksum = replace(found, saved_at=saved_at), after
    _check_limits(update, limits)
    return update


def _name_of(update: StoredUpdate, checksum: str) -> str:
    """Return the text by which the changes of the next version name this one."""
    return f"{update.epoch} {update.version} {checksum}"


def _encode_change(model_id: str, update: StoredUpdate, checksum: str, onto: str) -> bytes:
    """Return the header of the changes that make a version of the one with the name ``onto``.

    Raises:
        ConfigError: A value of the update cannot be stored.
    """
    metadata = _encode_metadata(model_id, update, checksum) | {"aiosync.onto": onto}
    del metadata["aiosync.manifest"]
    metadata["aiosync.header_checksum"] = xxhash.xxh3_128_hexdigest(json.dumps(metadata).encode())
    return json.dumps(metadata).encode()


def _parse_change(
    header: bytes, model_id: str, before: StoredUpdate
) -> tuple[StoredUpdate, str, str]:
    """Return the version that a header describes, its checksum, and the name of the one before.

    Its tensors are still those of ``before``.

    Raises:
        StoreError: The header is damaged, or belongs to another model.
    """
    try:
        metadata = json.loads(header)
        update = _parse_metadata(metadata, before.layout, before.buffer)
        checksum, onto = metadata["aiosync.checksum"], metadata["aiosync.onto"]
        expected = _encode_change(model_id, update, checksum, onto)
    except (LookupError, ValueError, TypeError, RecursionError, AiosyncError) as exc:
        raise StoreError(f"a change is damaged: {type(exc).__name__}: {exc}") from exc
    if header != expected:
        raise StoreError("a change is damaged, or belongs to another model")
    return update, checksum, onto


def _parse_metadata(metadata: Any, layout: Layout, buffer: FlatBuffer) -> StoredUpdate:
    """Return the update that a header describes, but for its layout and its bytes."""
    return StoredUpdate(
        epoch=int(metadata["aiosync.epoch"]),
        version=int(metadata["aiosync.version"]),
        strategy=str(metadata["aiosync.strategy"]),
        layout=layout,
        buffer=buffer,
        values=unpack(base64.b64decode(metadata["aiosync.values"], validate=True)),
        replaced=tuple(map(int, metadata.get("aiosync.replaced", "").split())),
    )


def _check_limits(update: StoredUpdate, limits: Limits) -> None:
    """Raise :class:`StoreError` if no peer with these limits would take the update."""
    try:
        check_headers(update.layout.manifest, update.values, limits)
    except AiosyncError as exc:
        raise StoreError(f"the limits let it be sent to nobody: {exc}") from exc


def _parse_header(header: bytes, model_id: str, limits: Limits) -> tuple[StoredUpdate, Any]:
    """Return the update that a header describes, still without its bytes, and their checksum.

    Raises:
        StoreError: The header is damaged, foreign or beyond the limits.
    """
    try:
        metadata = json.loads(header)[_METADATA]
        if metadata["aiosync.format"] != _FORMAT:
            other = f"{metadata['aiosync.format']!r:.20}"
            raise StoreError(f"it has the format version {other}; only {_FORMAT!r} is supported")
        if metadata["aiosync.model_id"] != model_id:
            other = str(metadata["aiosync.model_id"])[:80]
            raise StoreError(f"it belongs to the model {other!r}")
        manifest = base64.b64decode(metadata["aiosync.manifest"], validate=True)
        layout = Layout(Manifest.decode(manifest, limits))
        update = _parse_metadata(metadata, layout, FlatBuffer(0))
        checksum = metadata["aiosync.checksum"]
        expected_header = _encode_header(model_id, update, checksum)
    except StoreError:
        raise
    except (LookupError, ValueError, TypeError, RecursionError, AiosyncError) as exc:
        raise StoreError(
            "its header is damaged, or it was not written by an aiosync store: "
            f"{type(exc).__name__}: {exc}"
        ) from exc
    # Everything else in the header follows from these values: one comparison checks it all.
    if header != expected_header:
        raise StoreError("its header is damaged")
    _check_limits(update, limits)
    return update, checksum


def _file_order(manifest: Manifest) -> list[LeafSpec]:
    """Return the leaves by falling size of their elements.

    In this order each tensor is aligned without gaps between the tensors.
    """
    return sorted(manifest.leaves, key=lambda leaf: -_itemsize(leaf))


def _itemsize(leaf: LeafSpec) -> int:
    """Return the bytes of one element in the file, a power of two; 1 for a dtype stored as U8."""
    name = DTYPES.get(leaf.dtype, "U8")
    return 1 if name.startswith("F8") or name == "BOOL" else int(re.sub(r"\D", "", name)) // 8


def _checksum_of(manifest: Manifest, memory: memoryview) -> str:
    """Return the XXH3-128 of all tensors in the order of the manifest, without the padding."""
    digest = xxhash.xxh3_128()
    for leaf in manifest.leaves:
        digest.update(memory[leaf.offset : leaf.offset + leaf.nbytes])
    return digest.hexdigest()


def _encode_header(model_id: str, update: StoredUpdate, checksum: str) -> bytes:
    """Return the header, padded so that the tensors start on a multiple of 64 bytes.

    An update always has the same header: :func:`_parse_header` compares it with what it has read.

    Args:
        model_id: Name of the model.
        update: The version; its buffer is not read.
        checksum: The result of :func:`_checksum_of` for its tensors.

    Raises:
        ConfigError: A value of the update cannot be stored, or the header is too large.
    """
    metadata = _encode_metadata(model_id, update, checksum)
    # The header has a checksum of its own: that of the tensors would not reveal a flipped digit of
    # the version.
    metadata["aiosync.header_checksum"] = xxhash.xxh3_128_hexdigest(json.dumps(metadata).encode())
    table = {_METADATA: metadata, **_encode_table(update.layout.manifest)}
    header = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    if len(header) > _MAX_HEADER_NBYTES:
        raise ConfigError(
            f"names and values need {len(header)} bytes; at most {_MAX_HEADER_NBYTES} fit"
        )
    return header


def _encode_metadata(model_id: str, update: StoredUpdate, checksum: str) -> dict[str, str]:
    """Return all that a header says of an update but the places of its tensors."""
    try:
        values = pack(encode_values(update.values))
    except InvalidData as exc:
        raise ConfigError(f"the values cannot be stored: {exc}") from exc
    metadata = {
        "aiosync.format": _FORMAT,
        "aiosync.model_id": model_id,
        "aiosync.epoch": str(update.epoch),
        "aiosync.version": str(update.version),
        "aiosync.strategy": update.strategy,
        "aiosync.manifest": base64.b64encode(update.layout.manifest.encode()).decode(),
        "aiosync.values": base64.b64encode(values).decode(),
        "aiosync.checksum": checksum,
    }
    if update.replaced:
        metadata["aiosync.replaced"] = " ".join(map(str, update.replaced))
    return metadata


def _encode_table(manifest: Manifest) -> dict[str, Any]:
    """Return the dtype, the shape and the place of each tensor, by its key in the file."""
    table: dict[str, Any] = {}
    reserved = _METADATA
    names = {leaf.name for leaf in manifest.leaves}
    # A tensor whose name is the key of the metadata gets another key in the file.
    while reserved in names:
        reserved += "."
    position = 0
    for leaf in _file_order(manifest):
        known = DTYPES.get(leaf.dtype)
        table[reserved if leaf.name == _METADATA else leaf.name] = {
            "dtype": known or "U8",
            "shape": leaf.shape if known else (leaf.nbytes,),
            "data_offsets": (position, position + leaf.nbytes),
        }
        position += leaf.nbytes
    return table
