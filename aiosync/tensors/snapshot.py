"""Snapshots: from a live model to the bytes of a flat buffer, planned once and reused.

This module must never import asyncio or a transport.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aiosync.errors import ConfigError
from aiosync.tensors._finding import find, find_in_tree, group_tied, memory_key
from aiosync.tensors._signature import Signature, any_nested
from aiosync.tensors._tensordict import is_tensordict
from aiosync.tensors._tree import Found, ModuleTree, outline, unwrap
from aiosync.tensors.copying import LARGE_NBYTES, CopyPool, as_bytes, copy_blocks, is_plain_cpu
from aiosync.tensors.layout import Layout
from aiosync.tensors.leaves import ExtractAs, Leaves, Source, to_leaves
from aiosync.wire import DEFAULT_LIMITS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aiosync.tensors.buffer import FlatBuffer
    from aiosync.types import Limits

__all__ = ["Flattener", "Prepared"]

_FOREACH_NBYTES = 32 * 2**10
"""Below this, torch never uses its thread pool for a copy, whatever the dtype."""

_BATCH_NBYTES = 2 * 2**20
_data_ptr = torch.Tensor.data_ptr


@dataclass(frozen=True, slots=True)
class Prepared:
    """What :meth:`Flattener.prepare` found, ready to be copied.

    Attributes:
        layout: Where each leaf goes. The same object for as long as nothing changes.
        tensors: The live tensors, one for each leaf, in order.
        values: Non-tensor values by dotted name, of plain msgpack types.
        signature: How the tensors look, apart from where they are. Kept as ``layout`` is.
        computed: Names of a module's buffers that are not persistent: they are computed, not
            learned. Kept as ``layout`` is.
    """

    layout: Layout
    tensors: Sequence[torch.Tensor]
    values: dict[str, Any] = field(default_factory=dict)
    signature: Signature | None = field(default=None, kw_only=True)
    computed: frozenset[str] = field(default=frozenset(), kw_only=True)


class _Plan:
    """How one source was laid out, and what must hold for that to be still true."""

    def __init__(self, found: Found, leaves: Leaves, layout: Layout) -> None:
        self.names = [place.name for place in found.places]
        self.kinds = [place.kind for place in found.places]
        self.computed = _computed(found)
        self.groups = group_tied(found.tensors)
        self.firsts = [group[0] for group in self.groups]
        self.tied = [group for group in self.groups if len(group) > 1]
        self.layout = layout
        self.tensors = [leaf.tensor for leaf in leaves.leaves]
        self.signature = Signature(self.tensors)
        self.outline: list[object] | None = None

    def prepared(self, tensors: Sequence[torch.Tensor], values: dict[str, Any]) -> Prepared:
        """What is copied by this plan: these tensors and values."""
        return Prepared(
            self.layout, tensors, values, signature=self.signature, computed=self.computed
        )

    def fits(self, found: Found) -> bool:
        """Whether another walk gave the same names, shapes, dtypes and ties."""
        if [place.name for place in found.places] != self.names:
            return False
        if [place.kind for place in found.places] != self.kinds:
            return False
        if _computed(found) != self.computed:
            return False
        return self.fits_tensors(found.tensors)

    def fits_tensors(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether other tensors under the same names have the same shapes, dtypes and ties."""
        unique = [tensors[first] for first in self.firsts]
        if not all(map(is_, unique, self.tensors)) and any_nested(unique):
            return False
        return self.signature.same(unique) and self.still_tied(tensors)

    def still_tied(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether tensors that were the same memory still are."""
        for group in self.tied:
            first = tensors[group[0]]
            others = [tensors[position] for position in group[1:] if tensors[position] is not first]
            if others:
                key = memory_key(first)
                if any(memory_key(other) != key for other in others):
                    return False
        return True


class Flattener:
    """Turns a source into a layout and copies its tensors into flat buffers.

    Keeps the plan of the last source, so that a second snapshot of the same source costs a
    comparison. It holds references to that source's tensors until :meth:`release`, or until
    another source is prepared.
    """

    def __init__(
        self,
        extract_as: ExtractAs = "tensordict",
        limits: Limits = DEFAULT_LIMITS,
        *,
        persistence: bool = False,
    ) -> None:
        """Prepare for sources.

        Args:
            extract_as: What of a module is sent; see :func:`~aiosync.tensors.collect`.
            limits: Bounds that the receivers are expected to have.
            persistence: Notice also where nothing else changes that a buffer became persistent,
                or is no longer. With ``"state_dict"`` that is always so.

        Raises:
            ConfigError: ``extract_as`` is something else.
        """
        if extract_as not in ("tensordict", "state_dict"):
            raise ConfigError(f"extract_as must be 'tensordict' or 'state_dict', got {extract_as}")
        self.extract_as: ExtractAs = extract_as
        self._limits = limits
        self._persistence = persistence or extract_as == "state_dict"
        self.release()

    def release(self) -> None:
        """Forget the last source, and every reference to its tensors."""
        self._source: weakref.ref[Any] | None = None
        self._tree: ModuleTree | None = None
        self._tree_tensors: list[torch.Tensor] = []
        self._plan: _Plan | None = None
        self._prepared: Prepared | None = None
        self._program: _Program | None = None
        self._addresses: list[int] = []

    def prepare(self, source: Source) -> Prepared:
        """Find what there is to send; nothing is copied yet.

        The tensors are resolved now: parameters that were re-created, moved, cast or replaced
        since the last call are seen.

        Args:
            source: A module, a TensorDict or a mapping; see :func:`~aiosync.tensors.collect`.

        Raises:
            ConfigError: Something in the source cannot travel.
        """
        plan, tree = self._plan, self._tree
        if (
            plan is not None
            and tree is not None
            and self._source is not None
            and self._source() is source
            and isinstance(source, nn.Module)
            and unwrap(source) is tree.root
            and tree.unchanged(persistence=self._persistence)
        ):
            prepared = self._prepare_known(plan, tree)
            if prepared is not None:
                return prepared
        return self._prepare_new(source)

    def _prepare_known(self, plan: _Plan, tree: ModuleTree) -> Prepared | None:
        assert self._prepared is not None
        if self.extract_as == "state_dict" and not tree.standard_state_dict():
            return None
        if tree.extra:
            found = find_in_tree(tree, self.extract_as)
            if not plan.fits(found):
                return None
            return self._reuse(plan, found)
        if not plan.signature.same(plan.tensors) or not plan.still_tied(self._tree_tensors):
            return None
        return self._prepared

    def _prepare_new(self, source: Source) -> Prepared:
        nested = not isinstance(source, nn.Module) and (
            isinstance(source, Mapping) or is_tensordict(source)
        )
        keys, tensors = (outline(source) if nested else None) or (None, [])
        plan = self._plan
        if plan is not None and keys is not None and plan.outline == keys:
            if plan.fits_tensors(tensors):
                unique = [tensors[first] for first in plan.firsts]
                return plan.prepared(unique, {})
        found, tree = find(source, self.extract_as)
        if self._plan is not None and self._plan.fits(found):
            prepared = self._reuse(self._plan, found)
        else:
            leaves = to_leaves(found)
            layout = Layout.plan(leaves, self._limits)
            if self._plan is not None and self._plan.layout.digest == layout.digest:
                layout = self._plan.layout
            self._plan = _Plan(found, leaves, layout)
            self._program = None
            prepared = self._plan.prepared(self._plan.tensors, leaves.values)
        self._plan.outline = keys
        standard = self.extract_as == "tensordict" or (tree and tree.standard_state_dict())
        self._tree = tree if standard else None
        self._tree_tensors = found.tensors if self._tree is not None else []
        plain_module = isinstance(source, nn.Module) and not is_tensordict(source)
        self._source = weakref.ref(source) if plain_module else None
        self._prepared = prepared
        return prepared

    def _reuse(self, plan: _Plan, found: Found) -> Prepared:
        tensors = [found.tensors[first] for first in plan.firsts]
        plan.tensors = tensors
        values = found.values
        if values:
            values = to_leaves(_only_values(found)).values
        return plan.prepared(tensors, values)

    def copy_into(
        self, prepared: Prepared, flat: FlatBuffer, *, pool: CopyPool | None = None
    ) -> None:
        """Copy every tensor to its place in a flat buffer.

        Does not run torch kernels for plain tensors on the CPU, so that it never waits for
        torch's thread pool. Padding between tensors is zeroed once for each buffer and layout.

        Args:
            prepared: What :meth:`prepare` returned.
            flat: At least ``prepared.layout.nbytes`` long, writable, and exclusive.
            pool: Threads that share the copies of large tensors.

        Raises:
            ConfigError: The buffer is too small.
        """
        layout = prepared.layout
        if flat.nbytes < layout.nbytes:
            raise ConfigError(
                f"the buffer has {flat.nbytes} bytes, the layout needs {layout.nbytes}"
            )
        if flat.padded_for != layout.digest:
            for start, end in layout.padding():
                flat.array[start:end] = 0
            flat.padded_for = layout.digest
        tensors = prepared.tensors
        addresses = _addresses(tensors)
        program = self._program
        if program is None or program.layout is not layout:
            program = None
        elif program.signature is not prepared.signature:
            program = None  # another view, prepared before this one was copied
        elif program.addresses != addresses:
            # Preparing pays only for tensors that stay where they are.
            if self._addresses != addresses:
                self._addresses = addresses
                _copy_once(layout, tensors, flat, pool)
                return
            program = None
        if program is None:
            program = self._program = _Program(prepared, addresses)
        program.run(tensors, flat, pool)


def _computed(found: Found) -> frozenset[str]:
    return frozenset(place.name for place in found.places if not place.persistent)


def _only_values(found: Found) -> Found:
    only = Found()
    only.values = found.values
    return only


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return list(map(_data_ptr, tensors))
    except RuntimeError:  # a subclass without memory of its own
        return []


class _Program:
    """The copies of one snapshot, for tensors that stay where they are in memory."""

    def __init__(self, prepared: Prepared, addresses: list[int]) -> None:
        self.layout = layout = prepared.layout
        self.signature = prepared.signature
        tensors = prepared.tensors
        self.addresses = addresses
        self._batches: list[tuple[list[slice], list[memoryview]]] = []
        self._large: list[tuple[slice, NDArray[np.uint8]]] = []
        self._others: list[int] = []
        slices: list[slice] = []
        sources: list[memoryview] = []
        filled = 0
        for index, (leaf, tensor) in enumerate(zip(layout.manifest.leaves, tensors, strict=True)):
            if not leaf.nbytes:
                continue
            if not addresses or not is_plain_cpu(tensor):
                self._others.append(index)
                continue
            target = slice(leaf.offset, leaf.offset + leaf.nbytes)
            source = as_bytes(tensor)
            if leaf.nbytes >= LARGE_NBYTES:
                self._large.append((target, source))
                continue
            if filled + leaf.nbytes > _BATCH_NBYTES or not slices:
                slices, sources, filled = [], [], 0
                self._batches.append((slices, sources))
            slices.append(target)
            sources.append(source.data)
            filled += leaf.nbytes

    def run(self, tensors: Sequence[torch.Tensor], flat: FlatBuffer, pool: CopyPool | None) -> None:
        array = flat.array
        # Each batch runs in C with the GIL held, half a millisecond at most. Releasing it for
        # every small copy would cost a switch interval (5 ms) each, next to a busy thread.
        store = flat.memoryview().__setitem__
        for slices, sources in self._batches:
            deque(map(store, slices, sources), maxlen=0)
        if self._large:
            pairs = [(array[target], source) for target, source in self._large]
            if pool is None:
                copy_blocks(pairs)
            else:
                pool.copy(pairs)
        if self._others:
            views = flat.views(self.layout)
            with torch.no_grad():
                for index in self._others:
                    views[index].copy_(tensors[index])


def _copy_once(
    layout: Layout, tensors: Sequence[torch.Tensor], flat: FlatBuffer, pool: CopyPool | None
) -> None:
    """Copy tensors that were never seen before and may never be seen again."""
    views = flat.views(layout)
    small = []
    large = []
    for index, (leaf, tensor) in enumerate(zip(layout.manifest.leaves, tensors, strict=True)):
        if leaf.nbytes < _FOREACH_NBYTES or not is_plain_cpu(tensor):
            small.append(index)
        else:
            large.append((flat.array[leaf.offset : leaf.offset + leaf.nbytes], as_bytes(tensor)))
    with torch.no_grad():
        if small:
            torch._foreach_copy_([views[i] for i in small], [tensors[i] for i in small])
        if large:
            (copy_blocks if pool is None else pool.copy)(large)
