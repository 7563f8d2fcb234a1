"""Files of weights that ``aiosync push`` reads and ``aiosync pull`` writes.

Safetensors files, folders of them as Hugging Face's libraries save them, and PyTorch checkpoints.
Nothing in a file is run: a checkpoint that needs more than ``weights_only`` allows is refused. This
module must never import typer or rich.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from aiosync.errors import ConfigError
from aiosync.server.store import open_regular, replacing

if TYPE_CHECKING:
    from types import ModuleType

__all__ = [
    "SAFETENSORS",
    "TORCH",
    "FileStates",
    "check_target",
    "check_unchanged",
    "file_states",
    "load_weights",
    "save_weights",
    "stored_nbytes",
]

SAFETENSORS = (".safetensors",)
"""Endings of safetensors files."""

TORCH = (".pt", ".pth", ".bin", ".ckpt")
"""Endings of PyTorch checkpoints."""

FileStates: TypeAlias = Mapping[str, os.stat_result]
"""The state of each file that holds the weights, by its path."""

_KNOWN = ", ".join(SAFETENSORS + TORCH)
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

# Entries of a checkpoint that may hold the weights.
_INSIDE = ("state_dict", "model", "model_state_dict")
_ZIP = b"PK\x03\x04"
_CHECKPOINT = (_ZIP, b"\x80")  # the second is a pickle of any protocol that torch ever wrote


def load_weights(
    path: str | os.PathLike[str], *, note: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Read the tensors of a file onto the CPU.

    The tensors may be views of the mapped file: do not change the file while they are used.

    Args:
        path: Ends in ``.safetensors``, or in ``.pt``, ``.pth``, ``.bin`` or ``.ckpt``. Or a folder
            with ``model.safetensors``, or with shards and ``model.safetensors.index.json``.
        note: Called with a sentence that names the entry of a checkpoint whose weights are used,
            if it is not the whole file.

    Returns:
        Tensors by dotted name, and the values beside them. Tied tensors are one object under each
        name, except from ``.safetensors`` files, which do not record ties.

    Raises:
        ConfigError: The file does not exist, has an unknown ending, is damaged, holds no weights,
            or is a checkpoint that could run code. The message says what to do.
    """
    path = os.fspath(path)
    if _is_folder(path):
        return _load_folder(path)
    safetensors = _kind(path)
    try:
        with open(path, "rb", opener=open_regular) as file:
            magic = file.read(len(_ZIP))
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    if safetensors is not None:
        return _load_safetensors(safetensors, path)
    if not magic.startswith(_CHECKPOINT):
        raise ConfigError(f"{path}: not a PyTorch checkpoint, or damaged: it begins with {magic!r}")
    return _find_weights(path, _load_torch(path, mapped=magic == _ZIP), note)


def save_weights(
    path: str | os.PathLike[str],
    mapping: Mapping[str, Any],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file of weights in one step.

    Whatever happens, the path has either the old or the new file, complete.

    A ``.ckpt`` file holds ``{"state_dict": mapping, "metadata": metadata}``; the other PyTorch
    files hold the mapping alone, ready for ``load_state_dict()``. A safetensors file holds tied
    tensors under each of their names.

    Args:
        path: Path with an ending as for :func:`load_weights`. A symbolic link is followed. The new
            file gets the mode of the old file, if there is one. In a folder it is
            ``model.safetensors``, with the text ``format`` that Hugging Face's libraries ask for.
        mapping: Tensors and plain values by dotted name. They are only read.
        metadata: Texts to keep beside them; ``.pt``, ``.pth`` and ``.bin`` files do not hold them.

    Raises:
        ConfigError: The ending is unknown, the folder is missing, there is no permission, the disk
            is full, or the format cannot hold the weights. The old file, if there is one, stays.
    """
    texts = dict(metadata or {})
    if _is_folder(path):
        texts["format"] = "pt"
    path = check_target(path)
    safetensors = _kind(path)
    if safetensors is not None:
        _refuse_what_safetensors_lacks(path, mapping)
    try:
        with replacing(path) as (file, temporary):
            if safetensors is not None:
                # The package replaces the temporary file by a private file of its own.
                safetensors.torch.save_file(_unshared(mapping), temporary, texts)
            elif path.lower().endswith(".ckpt"):
                torch.save({"state_dict": dict(mapping), "metadata": texts}, file)
            else:
                torch.save(dict(mapping), file)
    except Exception as exc:  # the user sees the error: torch and safetensors raise several types
        raise ConfigError(f"{path}: cannot be written: {_why_not_written(exc)[:200]}") from exc


def _why_not_written(error: Exception) -> str:
    """Return the reason of the operating system, if it has one, or else the error itself."""
    why = error.__context__ if isinstance(error.__context__, OSError) else error
    return str(why.strerror) if isinstance(why, OSError) else f"{type(why).__name__}: {why}"


def check_target(path: str | os.PathLike[str]) -> str:
    """Check that weights can be saved at a path, so that an error comes before they are fetched.

    Returns:
        Path of the file, without symbolic links.

    Raises:
        ConfigError: The ending is unknown, the folder is missing, not writable or has shards, a
            folder or a device has this path, or safetensors is not installed.
    """
    path = os.path.realpath(path)
    if _is_folder(path):
        if os.path.lexists(os.path.join(path, _INDEX)):
            raise ConfigError(
                f"{path}: has {_INDEX}, and readers would mix its shards with a new file: pull "
                "into another folder"
            )
        path = os.path.realpath(os.path.join(path, _WHOLE))
    _kind(path)
    folder = os.path.dirname(path)
    if not os.access(f"{folder}/", os.W_OK | os.X_OK):
        raise ConfigError(f"{path}: there is no folder {folder}, or no permission to write there")
    if os.path.lexists(path) and not os.path.isfile(path):
        raise ConfigError(f"{path}: this is not a regular file, which would be replaced by one")
    return path


def stored_nbytes(path: str | os.PathLike[str]) -> int:
    """Return the bytes of all files that :func:`load_weights` reads the tensors of."""
    return sum(each.st_size for each in file_states(path).values())


def file_states(path: str | os.PathLike[str]) -> FileStates:
    """Return the present state of each file that :func:`load_weights` reads the tensors of.

    Raises:
        ConfigError: There is no such file, or no permission to look at it.
    """
    path = os.fspath(path)
    if not _is_folder(path):
        _kind(path)
    try:
        return {each: os.stat(each) for each in (_shards(path) if _is_folder(path) else (path,))}
    except OSError as exc:
        raise ConfigError(f"{exc.filename}: cannot be read: {exc.strerror}") from exc


def check_unchanged(states: FileStates) -> None:
    """Check that no file was written to since its state was taken.

    A file that was removed, or replaced by a rename, does not count: the memory that is mapped from
    it has the old bytes.

    Raises:
        ConfigError: A file was written to.
    """
    for path, old in states.items():
        with contextlib.suppress(OSError):
            new = os.stat(path)
            is_same_file = (new.st_dev, new.st_ino) == (old.st_dev, old.st_ino)
            if is_same_file and (new.st_size, new.st_mtime_ns) != (old.st_size, old.st_mtime_ns):
                raise ConfigError(
                    f"{path}: changed while it was read: save the next one under a new name, and "
                    "then rename it"
                )


def _is_folder(path: str | os.PathLike[str]) -> bool:
    """Return True for a folder, unless its name is that of a file of weights."""
    is_named_as_file = os.path.splitext(path)[1].lower() in SAFETENSORS + TORCH
    return os.path.isdir(path) and not is_named_as_file


def _kind(path: str) -> ModuleType | None:
    """Return the package safetensors if it reads and writes the file; ``None`` for torch.

    Raises:
        ConfigError: The ending is unknown, or safetensors is not installed.
    """
    ending = os.path.splitext(path)[1].lower()
    if ending in TORCH:
        return None
    if ending not in SAFETENSORS:
        raise ConfigError(f"{path}: the name of the file must end in one of: {_KNOWN}")
    try:
        import safetensors.torch
    except ModuleNotFoundError as exc:
        advice = ".safetensors files need safetensors: pip install 'aiosync[cli]'"
        raise ConfigError(advice) from exc
    return safetensors


# -- folders ----------------------------------------------------------------------------------


def _load_folder(path: str) -> dict[str, Any]:
    """Read the weights of a folder; shards if it has their index, as other libraries do."""
    found: dict[str, Any] = {}
    for shard, names in _shards(path).items():
        tensors = load_weights(shard)
        if missing := [name for name in names if name not in tensors]:
            raise ConfigError(f"{shard}: has no tensor {missing[0]!r}, of which {_INDEX} says so")
        found |= {name: tensors[name] for name in names or tensors}
    return found


def _shards(path: str) -> dict[str, list[str]]:
    """Return the files of a folder's weights, each with the names to read; without names, all."""
    index, whole = os.path.join(path, _INDEX), os.path.join(path, _WHOLE)
    if os.path.lexists(whole):
        return {whole: []}
    if not os.path.lexists(index):
        raise ConfigError(
            f"{path}: a folder needs {_WHOLE} or {_INDEX}; the name of a file must end in one of: "
            f"{_KNOWN}"
        )
    return {os.path.join(path, shard): names for shard, names in _read_index(index).items()}


def _read_index(path: str) -> dict[str, list[str]]:
    """Return the names of the tensors in each shard.

    Raises:
        ConfigError: This is no index, or names a file that is no safetensors file beside it.
    """
    try:
        with open(path, "rb", opener=open_regular) as file:
            where = json.load(file)["weight_map"]
        shards: dict[str, list[str]] = {}
        for name, shard in where.items():
            shards.setdefault(shard, []).append(name)
            if os.path.basename(shard) != shard or not shard.endswith(SAFETENSORS):
                raise ConfigError(f"{path}: names a file outside of its folder: {shard[:200]!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ConfigError(f"{path}: no index of shards: {type(exc).__name__}: {exc}"[:400]) from exc
    if not shards:
        raise ConfigError(f"{path}: no index of shards: it names no tensor")
    return shards


# -- PyTorch ----------------------------------------------------------------------------------


def _load_torch(path: str, *, mapped: bool) -> Any:
    """Read a PyTorch checkpoint and run no code of it; ``mapped`` tensors are views of the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of files that are refused below
            return torch.load(path, weights_only=True, map_location="cpu", mmap=mapped)
    except pickle.UnpicklingError as exc:
        # torch's text advises to load the file without the check, so only the name of the global
        # that it found is passed on.
        found = re.search(r"GLOBAL ([\w.]+)", str(exc))
        raise ConfigError(
            f"{path}: refused: it holds {found[1] if found else 'more'}, not only tensors and "
            "plain values, and loading it could run code. Save only model.state_dict() where the "
            "file is made"
        ) from exc
    except Exception as exc:  # the user sees the error: a damaged file raises nearly any type
        why = f"{type(exc).__name__}: {exc}".splitlines()[0][:200]
        raise ConfigError(f"{path}: not a PyTorch checkpoint, or damaged: {why}") from exc


def _find_weights(path: str, loaded: Any, note: Callable[[str], None] | None) -> dict[str, Any]:
    """Return the weights of a checkpoint: those of a known entry, or else the whole of it."""
    if isinstance(loaded, torch.Tensor) or not isinstance(loaded, Mapping):
        raise ConfigError(
            f"{path}: holds a {type(loaded).__name__}, not a state dict; save model.state_dict()"
        )
    key = _key_inside(loaded)
    if key is not None:
        if note is not None:
            note(f"{path}: used the state dict under {key!r}")
        return dict(loaded[key])
    if not _is_state_dict(loaded):
        keys = ", ".join(repr(key)[:40] for key in list(loaded)[:8]) or "nothing"
        raise ConfigError(
            f"{path}: found no state dict, neither at the top level nor under "
            f"{', '.join(_INSIDE)}; it has {keys}. Save model.state_dict()"
        )
    return dict(loaded)


def _key_inside(loaded: Mapping[Any, Any]) -> str | None:
    """Return the known entry of a checkpoint that is a state dict; ``None`` without one."""
    inside = [key for key in _INSIDE if isinstance(loaded.get(key), Mapping)]
    return next((key for key in inside if _is_state_dict(loaded[key])), None)


def _is_state_dict(value: Mapping[Any, Any]) -> bool:
    """Return True if all keys are texts, and there is a tensor."""
    return all(isinstance(key, str) for key in value) and any(
        isinstance(item, torch.Tensor) for item in value.values()
    )


# -- safetensors ------------------------------------------------------------------------------


def _refuse_what_safetensors_lacks(path: str, mapping: Mapping[str, Any]) -> None:
    """Refuse weights with values that are no tensors, or with the name of the file's texts."""
    others = [name for name, each in mapping.items() if not isinstance(each, torch.Tensor)]
    if others:
        listed = ", ".join(others)[:200]
        raise ConfigError(f"{path}: safetensors holds tensors only, not {listed}: use .pt")
    if "__metadata__" in mapping:
        raise ConfigError(f"{path}: safetensors holds no tensor of the name __metadata__: use .pt")


def _unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors, copied where they share memory, which the package refuses."""
    own, seen = dict[str, torch.Tensor](), set[int]()
    for name, each in tensors.items():
        memory = each.untyped_storage().data_ptr()
        own[name] = (each.clone() if memory in seen else each).contiguous()
        seen.add(memory)
    return own


def _load_safetensors(package: ModuleType, path: str) -> dict[str, Any]:
    """Return the tensors of a file; refuse a file of a weight server's store."""
    found, texts = _read_safetensors(package, path)
    if any(name.startswith("aiosync.") for name in texts):
        raise ConfigError(
            f"{path}: this is a file of a weight server's store, or of an older `aiosync pull`, "
            "which may hold more than tensors by name; serve its folder and pull the weights"
        )
    if not found:
        raise ConfigError(f"{path}: holds no tensors; save model.state_dict()")
    return found


def _read_safetensors(package: ModuleType, path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tensors of a file by name, and the texts that it keeps beside them."""
    try:
        with package.safe_open(path, framework="pt", device="cpu") as file:
            texts = file.metadata() or {}
            return {name: file.get_tensor(name) for name in file.keys()}, texts
    except Exception as exc:  # the user sees the error: the package and torch raise several types
        raise ConfigError(f"{path}: not a safetensors file, or damaged: {str(exc)[:200]}") from exc
