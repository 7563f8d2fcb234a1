"""What an update has to look like: names, shapes and dtypes in checkpoint format.

Must not import vLLM, and reads headers of files only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from aiosync.errors import ManifestMismatch

__all__ = ["Reference", "of_checkpoint", "of_tensors"]

_MAX_HEADER_NBYTES = 100 * 2**20
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

Shape = tuple[int, ...]


class Reference:
    """Names, shapes and dtypes that updates are held against.

    Args:
        entries: For each name its shape, and its dtype where that is known.
        also: A floating dtype that is as good as the one expected: that of the engine.
        optional: Names that may be there or not, such as the head of a model that ties it.
        source: Where the entries are from, for messages.
    """

    def __init__(
        self,
        entries: Mapping[str, tuple[Shape, torch.dtype | None]],
        *,
        also: torch.dtype | None,
        optional: Iterable[str] = (),
        source: str,
    ) -> None:
        self._entries = dict(entries)
        self._also = also
        self._optional = frozenset(optional)
        self._source = source

    def check(self, items: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise unless ``items`` are what is expected.

        Raises:
            ManifestMismatch: They are not; it names every difference.
        """
        given = dict(items)
        missing = [name for name in self._entries if name not in given and self._counts(name)]
        unexpected = [name for name in given if name not in self._entries and self._counts(name)]
        mismatched = {}
        for name, tensor in given.items():
            if name in self._entries:
                text = self._difference(tensor, *self._entries[name])
                if text:
                    mismatched[name] = text
        if missing or unexpected or mismatched:
            cast = any("dtype" in text for text in mismatched.values())
            raise ManifestMismatch(
                missing=missing,
                unexpected=unexpected,
                mismatched=mismatched,
                hint=f"Expected is {self._source}."
                + (" wire_dtype= of the trainer casts." if cast else ""),
            )

    def _counts(self, name: str) -> bool:
        return name not in self._optional and not name.endswith("rotary_emb.inv_freq")

    def _difference(
        self, tensor: torch.Tensor, shape: Shape, dtype: torch.dtype | None
    ) -> str | None:
        if tuple(tensor.shape) != shape:
            return f"shape {list(shape)} was expected, {list(tensor.shape)} came"
        if dtype is None or tensor.dtype == dtype:
            return None
        if tensor.dtype == self._also and dtype.is_floating_point and dtype.itemsize > 1:
            return None
        return f"dtype {dtype} was expected, got {tensor.dtype}"


def of_tensors(items: Iterable[tuple[str, torch.Tensor]], *, also: torch.dtype | None) -> Reference:
    """What an update looked like that was loaded."""
    entries = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in items}
    return Reference(entries, also=also, source="what the first update had")


def of_checkpoint(
    model: str, revision: str | None, *, also: torch.dtype | None, ties_head: bool
) -> Reference | None:
    """What a checkpoint has, from the headers of its safetensors files.

    Args:
        model: A directory, or the name of a model in the local cache of the hub.
        revision: Of such a model.
        also: Dtype of the engine.
        ties_head: Whether the model ties its head to its embedding.

    Returns:
        ``None`` if there are no such files here. Nothing is downloaded.
    """
    folder = Path(model) if os.path.isdir(model) else _cached(model, revision)
    if folder is None:
        return None
    entries: dict[str, tuple[Shape, torch.dtype | None]] = {}
    for file in _files(folder):
        header = _header(file)
        if header is None:
            return None
        for name, entry in header.items():
            if name != "__metadata__":
                entries[name] = (tuple(entry["shape"]), _DTYPES.get(entry["dtype"]))
    if not entries:
        return None
    optional = ("lm_head.weight",) if ties_head else ()
    return Reference(entries, also=also, optional=optional, source=f"the checkpoint in {folder}")


def _files(folder: Path) -> list[Path]:
    """The files that a loader would read: those of the index, if there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = json.loads(index.read_text())["weight_map"].values()
        return sorted(folder / name for name in set(named))
    found = sorted(folder.glob("*.safetensors"))
    sharded = [file for file in found if not file.name.startswith("consolidated")]
    return sharded or found


def _header(file: Path) -> dict[str, Any] | None:
    try:
        with file.open("rb") as opened:
            nbytes = int.from_bytes(opened.read(8), "little")
            if nbytes > _MAX_HEADER_NBYTES:
                return None
            header: dict[str, Any] = json.loads(opened.read(nbytes))
    except (OSError, ValueError):
        return None  # what vLLM was started from is something else: the first update counts
    return header


def _cached(model: str, revision: str | None) -> Path | None:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                local_files_only=True,
                allow_patterns=["*.safetensors", "*.safetensors.index.json"],
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError):
        return None  # not in the cache, or no name of the hub
