"""The newest version of each model as one file in a directory.

Names of files, and how a file is replaced in one step; what is in it is ``_format.py``'s
business. This module must never import asyncio, a transport or a scheme; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import urllib.parse

from aiosync.errors import ConfigError
from aiosync.server._format import (
    BUFFER_NBYTES,
    SaveProgress,
    StoredUpdate,
    StoreError,
    checksum_of,
    encode_header,
    open_file,
    read,
    read_model_id,
    write,
)
from aiosync.types import Limits
from aiosync.wire import DEFAULT_LIMITS

__all__ = ["StoreError", "StoredUpdate", "WeightStore"]

_log = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_TEMPORARY = re.compile(r"\.aiosync-[0-9a-f]{16}\.tmp")
_MAX_STEM = 200
"""Characters of a file name without its ending; the usual file systems allow 255 bytes."""


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
            directory: Made, for this user only, if it is missing; so are missing parents.
            limits: Bounds on what is loaded.

        Raises:
            ConfigError: It is not a directory, cannot be made, or is not ours to write.
        """
        self.directory: str = os.path.abspath(directory)
        self.limits: Limits = limits
        try:
            _make_private(self.directory)
            if not os.access(self.directory, os.R_OK | os.W_OK | os.X_OK):
                raise ConfigError(f"the store {self.directory} is not readable and writable")
            self._remove_stale()
        except OSError as exc:
            raise ConfigError(f"the store {self.directory} cannot be used: {exc}") from exc

    def __repr__(self) -> str:
        return f"<WeightStore {self.directory!r}>"

    def save(
        self, model_id: str, update: StoredUpdate, progress: SaveProgress | None = None
    ) -> None:
        """Replace the file of a model; returns when the new one is safely on disk.

        Args:
            model_id: Any text; the name of the file is derived from it.
            update: The version. Its buffer is read, and must not change during the call.
            progress: Called from this thread about every 16 MiB, and after the last byte.
                What it raises ends the save and is raised here; an ``OSError`` becomes a
                ``StoreError``. The old file stays.

        Raises:
            ConfigError: The update cannot be stored; nothing was written.
            StoreError: The disk refused it: full, read-only, broken. The old file stays, except
                if the message says that the directory could not be synced.
        """
        path = self._path(model_id)
        layout = update.layout
        if update.buffer.nbytes < layout.nbytes:
            raise ConfigError(
                f"the buffer has {update.buffer.nbytes} bytes, the layout needs {layout.nbytes}"
            )
        checksum = checksum_of(layout.manifest, update.buffer.memoryview())
        header = encode_header(model_id, update, checksum)
        try:
            temporary, fd = self._new_temporary()
            try:
                with os.fdopen(fd, "wb", buffering=BUFFER_NBYTES) as file:
                    write(file, header, update, progress)
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(temporary, path)
            finally:
                with contextlib.suppress(FileNotFoundError):  # it has become the file
                    os.unlink(temporary)
        except OSError as exc:
            raise StoreError(f"{path}: cannot be saved: {exc}") from exc
        try:
            _sync_directory(self.directory)
        except OSError as exc:
            raise StoreError(
                f"{path}: saved, but the directory could not be synced: {exc}"
            ) from exc

    def load(self, model_id: str) -> StoredUpdate | None:
        """Return the version that was saved last, in new memory; ``None`` if there is none.

        Raises:
            ConfigError: ``model_id`` is not a text.
            StoreError: The file is damaged, cut short, foreign or beyond the limits; the
                message names the file and what is wrong.
        """
        path = self._path(model_id)
        try:
            file = open_file(path)
            if file is None:
                return None
            with file:
                return read(file, path, model_id, self.limits)
        except OSError as exc:
            raise StoreError(f"{path}: cannot be read: {exc}") from exc

    def model_ids(self) -> list[str]:
        """Return the ids of the models that have a file, in order.

        Only long ids need a look into their files; one that cannot be read is logged and left
        out. A listed file may still turn out to be damaged when it is loaded.

        Raises:
            StoreError: The directory cannot be read.
        """
        try:
            names = os.listdir(self.directory)
        except OSError as exc:
            raise StoreError(f"{self.directory}: cannot be read: {exc}") from exc
        found = []
        for name in names:
            if not name.endswith(_SUFFIX):
                continue
            model_id = _decode_stem(name.removesuffix(_SUFFIX))
            if "~" in name:
                model_id = self._id_inside(name)
            if model_id is not None and _file_name(model_id) == name:
                found.append(model_id)
        return sorted(found)

    def _path(self, model_id: str) -> str:
        return os.path.join(self.directory, _file_name(model_id))

    def _id_inside(self, name: str) -> str | None:
        path = os.path.join(self.directory, name)
        try:
            file = open_file(path)
            if file is None:
                return None
            with file:
                model_id = read_model_id(file, path)
            _file_name(model_id)
        except (OSError, StoreError, ConfigError) as exc:
            _log.warning("skipping %s: %s", path, exc)
            return None
        return model_id

    def _new_temporary(self) -> tuple[str, int]:
        """Create a file that says by its lock that somebody is writing it."""
        while True:
            path = os.path.join(self.directory, f".aiosync-{secrets.token_hex(8)}.tmp")
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(OSError):  # no locks here: then processes must not share
                fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return path, fd
            os.close(fd)  # another process took it for stale before it was locked

    def _remove_stale(self) -> None:
        for name in os.listdir(self.directory):
            if not _TEMPORARY.fullmatch(name):
                continue
            path = os.path.join(self.directory, name)
            with contextlib.suppress(FileNotFoundError, BlockingIOError):  # gone; being written
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
                finally:
                    os.close(fd)


# -- names ------------------------------------------------------------------------------------


def _file_name(model_id: str) -> str:
    """Return a name of letters, digits and ``-_.%~`` that does not start with a dot."""
    if not isinstance(model_id, str):
        raise ConfigError(f"a model id must be a str, not a {type(model_id).__name__}")
    try:
        encoded = model_id.encode()
    except UnicodeEncodeError as exc:
        raise ConfigError(f"the model id {model_id!r} is not valid Unicode") from exc
    stem = urllib.parse.quote(encoded, safe="").replace("~", "%7E") or "%"
    if stem.startswith("."):
        stem = "%2E" + stem[1:]
    if len(stem) > _MAX_STEM:
        digest = hashlib.blake2b(encoded, digest_size=16).hexdigest()
        stem = f"{stem[: _MAX_STEM - 33]}~{digest}"
    return stem + _SUFFIX


def _decode_stem(stem: str) -> str | None:
    """Return the id that a short name stands for; ``None`` for a long or foreign name."""
    if "~" in stem:
        return None
    try:
        return "" if stem == "%" else urllib.parse.unquote(stem, errors="strict")
    except UnicodeDecodeError:
        return None


def _make_private(directory: str) -> None:
    missing = []
    while not os.path.isdir(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):  # made meanwhile, or not a directory
            os.mkdir(path, 0o700)
        if not os.path.isdir(path):
            raise NotADirectoryError(f"{path} is not a directory")
        _sync_directory(os.path.dirname(path))


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
