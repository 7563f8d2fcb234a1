"""Puts updates of a part of the names together, into one that holds the newest of each.

Copies bytes, in whatever thread it is called. Must not import asyncio, a transport or a scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from aiosync.tensors.buffer import FlatBuffer
from aiosync.tensors.copying import copy_bytes
from aiosync.tensors.layout import Layout
from aiosync.tensors.values import inner_names
from aiosync.types import Limits
from aiosync.wire import LeafSpec, plan_manifest

if TYPE_CHECKING:
    from aiosync.wire.manifest import ManifestEntry

__all__ = ["Part", "merged"]


class Part(Protocol):
    """What an update holds."""

    layout: Layout
    buffer: FlatBuffer
    values: dict[str, Any]


def merged(parts: Sequence[Part], limits: Limits) -> tuple[Layout, FlatBuffer, dict[str, Any]]:
    """The newest of each name, in memory of its own.

    Names that an older part ties stay tied, and get what is newest under any of them: so would
    a worker that applies one part after the other.

    Args:
        parts: Oldest first; at least one.
        limits: Bounds on the whole.

    Raises:
        ConfigError: Together they are beyond the limits.
    """
    leaves = list[_Leaf]()
    found: dict[str, _Leaf] = {}
    gone: set[str] = set()  # what something newer holds
    values: dict[str, Any] = {}
    for part in reversed(parts):
        dropped = part.values.keys() & gone
        inside = inner_names({key: part.values[key] for key in dropped})
        values = {key: part.values[key] for key in part.values.keys() - dropped} | values
        kept = list[_Leaf]()
        for spec in part.layout.manifest.leaves:
            names = (spec.name, *spec.aliases)
            leaf = next((found[name] for name in names if name in found), None)
            rest = [name for name in names if name not in gone | inside]
            if leaf is None and rest:
                leaf = _Leaf(part, spec, rest)
                kept.append(leaf)
            elif leaf is not None:
                leaf.names += rest
            found |= {name: leaf for name in rest if leaf is not None}
        leaves = kept + leaves
        gone |= part.layout.index.keys() | part.values.keys()
    layout = Layout(plan_manifest(map(_Leaf.entry, leaves), limits))
    buffer = FlatBuffer(layout.nbytes)
    target = buffer.memoryview()
    for start, stop in layout.padding():
        target[start:stop] = bytes(stop - start)
    for leaf, spec in zip(leaves, layout.manifest.leaves, strict=True):
        if spec.nbytes:
            copy_bytes(target[spec.offset : spec.offset + spec.nbytes], leaf.source())
    return layout, buffer, values


@dataclass(slots=True, eq=False)
class _Leaf:
    part: Part
    spec: LeafSpec
    names: list[str]

    def entry(self) -> ManifestEntry:
        name, *aliases = self.names
        return name, self.spec.dtype, self.spec.shape, self.spec.kind, aliases

    def source(self) -> memoryview:
        start = self.spec.offset
        return self.part.buffer.memoryview()[start : start + self.spec.nbytes]
