"""The newest version of each model as one file in a directory.

A file is a safetensors file whose header says more: it holds the manifest, the values that are not
tensors, and checksums. It is written here and not by the safetensors package: straight from the
flat buffer, in chunks, and replaced in one step. This module must never import asyncio, a transport
or a scheme; nothing is unpickled.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import xxhash

from aiosync._log import log
from aiosync._repr import in_every_state
from aiosync.errors import AiosyncError, ConfigError
from aiosync.tensors import FlatBuffer, Layout
from aiosync.types import Limits
from aiosync.wire import DEFAULT_LIMITS, LeafSpec, Manifest, encode_values
from aiosync.wire.values import InvalidData, pack, unpack

__all__ = ["DTYPES", "StoreError", "StoredUpdate", "WeightStore", "open_regular", "replacing"]

_SUFFIX = ".safetensors"
_TEMPORARY = re.compile(r"\.aiosync-[0-9a-f]{16}\.tmp")
_MAX_STEM = 240
"""Characters of a file name without its ending; the usual file systems allow 255 bytes."""

_BUFFER_NBYTES = 2**20
"""Bytes that files are buffered with; larger pieces bypass the buffer."""

_FORMAT = "1"
_MAX_HEADER_NBYTES = 100_000_000
"""Where the readers of safetensors files stop."""

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
        replaced: Epochs of runs that this one and others before it have replaced, oldest first.
        saved_at: When its file was written, in seconds since the Unix epoch; ``None`` for one
            that was not loaded from a file.
    """

    epoch: int
    version: int
    strategy: str
    layout: Layout
    buffer: FlatBuffer
    values: Mapping[str, Any]
    replaced: tuple[int, ...] = ()
    saved_at: float | None = None


class WeightStore:
    """A directory with one file for each model.

    A file changes in one step: whatever happens while one is saved, the end of the process or
    of the machine included, the directory has either the old or the new file, complete. Methods
    block; several threads may call them at once, and several processes may share a directory.
    Of two saves of one model at the same time, the one that ends last stays.

    Attributes:
        directory: Absolute path of the directory.
        limits: Bounds on what is loaded.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        """Open a directory, and remove what saves that were cut short left in it.

        Args:
            directory: Made, for this user only, if it is missing.
            limits: Bounds on what is loaded.

        Raises:
            ConfigError: It is not a directory, cannot be made, or is not ours to write.
        """
        self.directory: str = os.path.abspath(directory)
        self.limits: Limits = limits
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
        """Replace the file of a model; returns when the new one is safely on disk.

        Args:
            model_id: Any text that is not too long: the name of the file is derived from it.
            update: The version. Its buffer is read, and must not change during the call.

        Raises:
            ConfigError: The update cannot be stored; nothing was written.
            StoreError: The disk refused it: full, read-only, broken. The old file stays, unless
                only the directory could not be synced.
        """
        path = self._path(model_id)
        manifest, memory = update.layout.manifest, update.buffer.memoryview()
        header = _encode_header(model_id, update, _checksum_of(manifest, memory))
        try:
            with replacing(path, 0o600) as (file, _):
                file.write(len(header).to_bytes(8, "little") + header)
                for leaf in _file_order(manifest):
                    file.write(memory[leaf.offset : leaf.offset + leaf.nbytes])
        except OSError as exc:
            raise StoreError(f"{path}: cannot be saved: {exc}") from exc

    def load(self, model_id: str) -> StoredUpdate | None:
        """Return the version that was saved last, in new memory; ``None`` if there is none.

        Raises:
            StoreError: The file is damaged, cut short, foreign or beyond the limits; the
                message names the file and what is wrong.
        """
        path = self._path(model_id)
        try:
            with open(path, "rb", buffering=_BUFFER_NBYTES, opener=open_regular) as file:
                _warn_of_others(path, os.fstat(file.fileno()))
                return _read(file, model_id, self.limits)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise StoreError(f"{path}: cannot be read: {exc}") from exc
        except StoreError as exc:
            raise StoreError(f"{path}: {exc}") from exc

    def model_ids(self) -> list[str]:
        """Return the ids of the models that have a file, in order.

        A listed file may still turn out to be damaged when it is loaded.
        """
        found = []
        for name in os.listdir(self.directory):
            stem = name.removesuffix(_SUFFIX)
            model_id = "" if stem == "%" else urllib.parse.unquote(stem)
            with contextlib.suppress(ValueError):  # somebody else's
                if _file_name(model_id) == name:
                    found.append(model_id)
        return sorted(found)

    def _path(self, model_id: str) -> str:
        return os.path.join(self.directory, _file_name(model_id))

    def _remove_stale(self) -> None:
        for name in filter(_TEMPORARY.fullmatch, os.listdir(self.directory)):
            path = os.path.join(self.directory, name)
            with contextlib.suppress(FileNotFoundError, BlockingIOError):  # gone; being written
                with open(path, "rb", opener=open_regular) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)


# -- names ------------------------------------------------------------------------------------


def _file_name(model_id: str) -> str:
    """Return a name of letters, digits and ``-_.%~`` that does not start with a dot."""
    stem = urllib.parse.quote(model_id.encode(), safe="").replace("~", "%7E") or "%"
    if stem.startswith("."):
        stem = "%2E" + stem[1:]
    if len(stem) > _MAX_STEM:
        raise ConfigError(f"the model id {model_id[:40]!r}... is too long to be stored")
    return stem + _SUFFIX


def open_regular(path: str, flags: int) -> int:
    """Open a file, as the ``opener`` of ``open()``; one that is no regular file never blocks.

    Raises:
        OSError: It is a pipe, a device or a socket, or cannot be opened.
    """
    fd = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # open() itself refuses a folder
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file")
    return fd


def _warn_of_others(path: str, found: os.stat_result) -> None:
    """Warn of a folder or a file of a store whose weights another user can choose."""
    if found.st_uid not in (0, os.geteuid()):
        who = "it belongs to another user"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        who = "others can write to it"
    else:
        return
    text = f"{path}: {who}, and so choose what this server serves: chown it, and chmod go-w"
    log(logging.WARNING, "store", text, model=None)


# -- files that are replaced ------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: str, mode: int | None = None) -> Iterator[tuple[BinaryIO, str]]:
    """Write a file that takes the place of another in one step, where the block does not raise.

    Args:
        path: Of that.
        mode: What it may have; ``None`` for what the other has, or as the umask has it.

    Yields:
        The file, and where it lies until then, beside the other and not more readable; it may be
        replaced itself.

    Raises:
        OSError: The disk refused it. Only where the folder could not be synced the file is there.
    """
    folder = os.path.dirname(path)
    if mode is None and os.path.exists(path):
        mode = os.stat(path).st_mode & 0o777
    temporary = os.path.join(folder, f".aiosync-{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o666 if mode is None else 0o600)
    try:
        with os.fdopen(fd, "wb", buffering=_BUFFER_NBYTES) as file:
            with contextlib.suppress(OSError):  # no locks here: then processes must not share
                fcntl.flock(fd, fcntl.LOCK_EX)  # somebody is writing it
            if mode is None:
                mode = os.fstat(fd).st_mode & 0o777
            yield file, temporary
            file.flush()
            os.chmod(temporary, mode)
            _sync(temporary)
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):  # it has become the file
            os.unlink(temporary)
    _sync(folder)


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -- the format -------------------------------------------------------------------------------


def _read(file: BinaryIO, model_id: str, limits: Limits) -> StoredUpdate:
    """Read and check a whole file into new memory.

    Raises:
        StoreError: The file is damaged, cut short, foreign or beyond the limits.
        OSError: The disk refused it.
    """
    found = os.fstat(file.fileno())
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(found.st_size - 8, _MAX_HEADER_NBYTES):
        raise StoreError("it is cut short, or not a safetensors file")
    header = file.read(length)
    try:
        metadata = json.loads(header)[_METADATA]
        if metadata["aiosync.format"] != _FORMAT:
            other = f"{metadata['aiosync.format']!r:.20}"
            raise StoreError(f"it has the format version {other}; only {_FORMAT!r} is supported")
        if metadata["aiosync.model_id"] != model_id:
            other = str(metadata["aiosync.model_id"])[:80]
            raise StoreError(f"it belongs to the model {other!r}")
        manifest = base64.b64decode(metadata["aiosync.manifest"], validate=True)
        update = StoredUpdate(
            epoch=int(metadata["aiosync.epoch"]),
            version=int(metadata["aiosync.version"]),
            strategy=str(metadata["aiosync.strategy"]),
            layout=Layout(Manifest.decode(manifest, limits)),
            buffer=FlatBuffer(0),
            values=unpack(base64.b64decode(metadata["aiosync.values"], validate=True)),
            replaced=tuple(map(int, metadata.get("aiosync.replaced", "").split())),
        )
        checksum = metadata["aiosync.checksum"]
        again = _encode_header(model_id, update, checksum)
    except StoreError:
        raise
    except (LookupError, ValueError, TypeError, RecursionError, AiosyncError) as exc:
        raise StoreError(
            "its header is damaged, or it was not written by an aiosync store: "
            f"{type(exc).__name__}: {exc}"
        ) from exc
    if again != header:  # what else it says is implied: one comparison checks it all
        raise StoreError("its header is damaged")
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
            file.readinto(part)  # type: ignore[attr-defined]  # cut short meanwhile, it has another checksum
    if _checksum_of(update.layout.manifest, memory) != checksum:
        raise StoreError("its tensors are damaged: the checksum differs")
    for start, end in update.layout.padding():
        buffer.array[start:end] = 0  # no old memory of this process may travel
    return replace(update, buffer=buffer, saved_at=found.st_mtime)


def _file_order(manifest: Manifest) -> list[LeafSpec]:
    """Sort by size of the elements, so that each tensor is aligned without gaps between them."""
    return sorted(manifest.leaves, key=lambda leaf: -_itemsize(leaf))


def _itemsize(leaf: LeafSpec) -> int:
    """Return a power of two that divides the size; the elements' own size if any are there."""
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

    Args:
        model_id: Which model it is.
        update: The version; its buffer is not looked at.
        checksum: What :func:`_checksum_of` returned for its tensors.

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
    if update.replaced:
        metadata["aiosync.replaced"] = " ".join(map(str, update.replaced))
    # The checksum of the tensors says nothing about a flipped digit of the version.
    metadata["aiosync.header_checksum"] = xxhash.xxh3_128_hexdigest(json.dumps(metadata).encode())
    table: dict[str, Any] = {_METADATA: metadata}
    reserved = _METADATA
    names = {leaf.name for leaf in manifest.leaves}
    while reserved in names:  # a tensor of this name needs another key in the file
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
    header = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    if len(header) > _MAX_HEADER_NBYTES:
        raise ConfigError(
            f"names and values need {len(header)} bytes; at most {_MAX_HEADER_NBYTES} fit"
        )
    return header
