"""Several updates of some names, joined into one. Must never import asyncio or a transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from aiosync.tensors.buffer import FlatBuffer, Layout
from aiosync.tensors.copying import copy_bytes
from aiosync.tensors.values import inner_names
from aiosync.wire import (
    ALIGNMENT,
    LeafSpec,
    Manifest,
    ManifestMessage,
    Update,
    encode_header,
    plan_manifest,
)

if TYPE_CHECKING:
    from aiosync.types import Limits

__all__ = ["Part", "check_headers", "check_joined", "join_parts", "joined_size"]

# Bytes that each name, and each message, may take in a header beside its encoding in a part.
_MORE_NBYTES = 64


class Part(Protocol):
    """The weights of one update of a part of the names."""

    layout: Layout
    buffer: FlatBuffer
    values: dict[str, Any]


_Source: TypeAlias = "tuple[Part, LeafSpec]"
"""The part that has the newest bytes of a tensor, and where it has them."""


def join_parts(parts: Sequence[Part], limits: Limits) -> tuple[Layout, FlatBuffer, dict[str, Any]]:
    """Join updates into the newest tensor or value of each name, in memory of its own.

    Names that an older part ties stay tied, and get the newest weights of any of them: a worker
    that applies one part after the other would get the same.

    Args:
        parts: Oldest first; at least one.
        limits: Bounds on the whole.

    Raises:
        ConfigError: Together they are beyond the limits.
    """
    sources, values = _newest(parts)
    return *_gather(sources, limits), values


def check_joined(parts: Sequence[Part], limits: Limits) -> None:
    """Check that updates can be joined and sent, without the memory of the whole.

    Args:
        parts: Oldest first; at least one.
        limits: Bounds on the whole.

    Raises:
        AiosyncError: Together they are beyond the limits.
    """
    if len(parts) == 1 or _fit_without_overlap(parts, limits):
        return
    sources, values = _newest(parts)
    tensors = {id(source): source for source in sources.values()}
    check_headers(_joined_manifest(tensors, _names_by_source(sources), limits), values, limits)


def joined_size(parts: Sequence[Part]) -> tuple[int, int]:
    """Return the number of tensors of updates once they are joined, and their bytes with padding.

    A tensor counts if no newer part has one of its names.

    Args:
        parts: Oldest first.
    """
    count, nbytes, newer = 0, 0, set[str]()
    for part in reversed(parts):
        leaves, index = part.layout.manifest.leaves, part.layout.index
        replaced = {index[name] for name in index.keys() & newer}
        count += len(leaves) - len(replaced)
        nbytes += part.layout.nbytes - sum(_padded(leaves[at].nbytes) for at in replaced)
        newer.update(index, part.values)
    return count, nbytes


def _padded(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT


def check_headers(manifest: Manifest, values: Mapping[str, Any], limits: Limits) -> None:
    """Check that the headers of an update's two messages can be sent.

    Raises:
        AiosyncError: One of them is beyond the limits.
    """
    for message in (ManifestMessage(manifest), Update(1, 1, manifest.digest, values=values)):
        encode_header(message, limits=limits)


def _fit_without_overlap(parts: Sequence[Part], limits: Limits) -> bool:
    """Return True, as nearly always, if the parts fit even if they have no name in common."""
    names = sum(len(each.layout.index) for each in parts)
    manifests = sum(len(each.layout.manifest.encode()) for each in parts)
    return (
        names <= limits.max_tensors
        and sum(each.layout.nbytes for each in parts) <= limits.max_payload_nbytes
        # Numbers may take more bytes in the manifest of the whole than in those of the parts.
        and manifests + _MORE_NBYTES * (names + 1) <= limits.max_header_nbytes
        and sum(bool(each.values) for each in parts) < 2
    )


def _newest(parts: Sequence[Part]) -> tuple[dict[str, _Source], dict[str, Any]]:
    """Return the newest source of each tensor, and the newest value of each other name."""
    sources: dict[str, _Source] = {}
    values: dict[str, Any] = {}
    for part in parts:
        held = part.layout.index.keys() | part.values.keys()
        replaced = {key: values.pop(key) for key in values.keys() & held}
        # Tensors that only a replaced value refers to go with it.
        sources = _newest_sources(part, sources, held | inner_names(replaced))
        values |= part.values
    return sources, values


def _newest_sources(
    part: Part, older: Mapping[str, _Source], overridden: Set[str]
) -> dict[str, _Source]:
    """Return the newest source of each name once a part was added; tied names stay tied.

    Args:
        part: The next part.
        older: Newest source of each name before; tied names have the same one.
        overridden: Names whose older source no longer counts: the part has them, or they were
            inside a value that it replaces.
    """
    sources = {name: source for name, source in older.items() if name not in overridden}
    tied = _names_by_source(sources)
    for spec in part.layout.manifest.leaves:
        own = (spec.name, *spec.aliases)
        before = [older[name] for name in own if name in older]
        # Names that were tied to one of these, and that this part does not have, follow it.
        followers = [name for source in before for name in tied.get(id(source), ())]
        sources.update(dict.fromkeys((*own, *followers), (part, spec)))
    return sources


def _names_by_source(sources: Mapping[str, _Source]) -> dict[int, list[str]]:
    """Return the names of each source, by its id; the names of one source are tied."""
    names: dict[int, list[str]] = {}
    for name, source in sources.items():
        names.setdefault(id(source), []).append(name)
    return names


def _joined_manifest(
    tensors: Mapping[int, _Source], names: Mapping[int, Sequence[str]], limits: Limits
) -> Manifest:
    """Lay out the tensors one after the other, each under all names that its source has."""
    entries = (
        (names[key][0], spec.dtype, spec.shape, spec.kind, names[key][1:])
        for key, (_, spec) in tensors.items()
    )
    return plan_manifest(entries, limits)


def _gather(sources: Mapping[str, _Source], limits: Limits) -> tuple[Layout, FlatBuffer]:
    """Copy each tensor from its source into one new buffer."""
    tensors = {id(source): source for source in sources.values()}
    layout = Layout(_joined_manifest(tensors, _names_by_source(sources), limits))
    buffer = FlatBuffer(layout.nbytes)
    target = buffer.memoryview()
    for start, stop in layout.padding():
        target[start:stop] = bytes(stop - start)
    # For memory on a device, each call copies the whole buffer to the host.
    parts = {id(part): part for part, _ in tensors.values()}
    memory = {key: part.buffer.memoryview() for key, part in parts.items()}
    for (part, old), new in zip(tensors.values(), layout.manifest.leaves, strict=True):
        if new.nbytes:
            source = memory[id(part)][old.offset : old.offset + old.nbytes]
            copy_bytes(target[new.offset : new.offset + new.nbytes], source)
    return layout, buffer
