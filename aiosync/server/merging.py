"""Puts updates of a part of the names together, into one that holds the newest of each.

Copies bytes, in whatever thread it is called. Must not import asyncio, a transport or a scheme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from aiosync.tensors import FlatBuffer, Layout, copy_bytes
from aiosync.tensors.values import inner_names
from aiosync.types import Limits
from aiosync.wire import LeafSpec, plan_manifest

if TYPE_CHECKING:
    from aiosync.wire.manifest import ManifestEntry

__all__ = ["Part", "merged"]


class Part(NamedTuple):
    """What an update holds."""

    layout: Layout
    buffer: FlatBuffer
    values: Mapping[str, Any]

    @property
    def names(self) -> set[str]:
        """Every name in it, of tensors and of values."""
        leaves = self.layout.manifest.leaves
        return {name for leaf in leaves for name in (leaf.name, *leaf.aliases)} | self.values.keys()


def merged(parts: Sequence[Part], limits: Limits) -> Part:
    """The newest of each name, in memory of its own unless the last part holds them all.

    Names that an older part ties stay tied, and get what is newest under any of them: so would
    a worker that applies one part after the other.

    Args:
        parts: Oldest first; at least one.
        limits: Bounds on the whole.

    Raises:
        ConfigError: Together they are beyond the limits.
    """
    *older, newest = parts
    chosen = [_leaves(newest)]
    found = {name: leaf for leaf in chosen[0] for name in leaf.names}
    gone = newest.names  # what something newer holds
    values = dict(newest.values)
    for part in reversed(older):
        dropped = part.values.keys() & gone
        inside = inner_names({key: part.values[key] for key in dropped})
        values = {key: part.values[key] for key in part.values.keys() - dropped} | values
        kept = list[_Leaf]()
        for leaf in _leaves(part):
            tied = next((found[name] for name in leaf.names if name in found), None)
            rest = [name for name in leaf.names if name not in gone | inside]
            if tied is not None:
                tied.names += rest
            elif rest:
                leaf.names, tied = rest, leaf
                kept.append(leaf)
            found |= dict.fromkeys(rest, leaf if tied is None else tied)
        chosen.append(kept)
        gone |= part.names
    if not any(chosen[1:]) and _is_whole(newest, chosen[0], values):
        return newest
    leaves = [leaf for kept in reversed(chosen) for leaf in kept]
    layout = Layout(plan_manifest(map(_Leaf.entry, leaves), limits))
    buffer = FlatBuffer(layout.nbytes)
    target = buffer.memoryview()
    for start, stop in layout.padding():
        target[start:stop] = bytes(stop - start)
    for leaf, spec in zip(leaves, layout.manifest.leaves, strict=True):
        if spec.nbytes:
            copy_bytes(target[spec.offset : spec.offset + spec.nbytes], leaf.source())
    return Part(layout, buffer, values)


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


def _leaves(part: Part) -> list[_Leaf]:
    return [_Leaf(part, spec, [spec.name, *spec.aliases]) for spec in part.layout.manifest.leaves]


def _is_whole(part: Part, leaves: list[_Leaf], values: Mapping[str, Any]) -> bool:
    names = {name for leaf in leaves for name in leaf.names}
    return names | values.keys() == part.names
