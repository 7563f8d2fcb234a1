"""Snapshots in another dtype than the trainer's: one pass from its tensors to the payload.

Private to :mod:`aiosync.tensors`; changes what its snapshots are. This module must never import
asyncio or a transport.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aiosync.errors import ConfigError
from aiosync.tensors._matching import inner_names
from aiosync.tensors._values import EXTRA_STATE
from aiosync.tensors.copying import (
    PIECE,
    TensorPair,
    as_bytes,
    copy_blocks,
    copy_pairs,
    cut,
    is_plain_cpu,
)
from aiosync.tensors.dtypes import dtype_name
from aiosync.tensors.layout import Layout
from aiosync.tensors.mapping import DtypeRule, Dtypes, check_dtypes
from aiosync.tensors.snapshot import Flattener, Prepared
from aiosync.wire import DEFAULT_LIMITS, plan_manifest

if TYPE_CHECKING:
    from aiosync.tensors.buffer import FlatBuffer
    from aiosync.tensors.copying import CopyPool
    from aiosync.tensors.leaves import ExtractAs, Source
    from aiosync.types import Limits

__all__ = ["CastPrepared", "CastingFlattener", "check_wire_dtype"]


def check_wire_dtype(value: object) -> Dtypes | None:
    """Check the option ``wire_dtype`` of a scheme; a mapping is copied.

    Raises:
        ConfigError: It is not a floating-point dtype that can travel, nor a mapping to such.
    """
    return check_dtypes(value, "wire_dtype")


@dataclass(frozen=True, slots=True)
class CastPrepared(Prepared):
    """Like :class:`Prepared`, where some tensors have another dtype than the layout says.

    Attributes:
        small: Positions of the tensors that are copied in one call; the others are ``large``.
    """

    small: Sequence[int] = ()
    large: Sequence[int] = ()


class CastingFlattener:
    """A :class:`Flattener` whose layouts and buffers have other floating-point dtypes.

    The source is only read. Integers, complex numbers, values that are not tensors, and the
    tensors inside values and extra states keep what they have. Tied tensors stay one leaf. Buffers
    of a module that are not persistent are computed, not learned, and a model in another dtype
    may still have them in this one: a single dtype does not round them. A source in which nothing
    has to be cast is treated as a :class:`Flattener` does.

    Args:
        extract_as: As for :class:`Flattener`.
        dtype: A floating-point dtype, or name patterns to dtypes; see :func:`check_wire_dtype`.
        limits: As for :class:`Flattener`.

    Raises:
        ConfigError: As for :class:`Flattener` and :func:`check_wire_dtype`.
    """

    def __init__(
        self, extract_as: ExtractAs, dtype: Dtypes, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        checked = check_wire_dtype(dtype)
        assert checked is not None
        self._rule = DtypeRule(checked)
        self._inner = Flattener(extract_as, limits, persistence=self._rule.for_all)
        self._limits = limits
        self._source_layout: Layout | None = None  # of the last source
        self._inside: frozenset[str] = frozenset()  # of its values
        self._computed: frozenset[str] = frozenset()  # of its tensors
        self._layout: Layout | None = None  # what becomes of it
        self._small: list[int] = []
        self._large: list[int] = []

    def release(self) -> None:
        """See :meth:`Flattener.release`."""
        self._inner.release()
        self._source_layout = self._layout = None

    def prepare(self, source: Source) -> Prepared:
        """See :meth:`Flattener.prepare`; the layout says what will be sent.

        Raises:
            ConfigError: Something in the source cannot travel, or a pattern fits no name.
        """
        prepared = self._inner.prepare(source)
        inside = inner_names(prepared.values) if prepared.values else frozenset[str]()
        computed = prepared.computed if self._rule.for_all else frozenset[str]()
        if (
            prepared.layout is not self._source_layout
            or inside != self._inside
            or computed != self._computed
        ):
            self._layout = self._plan(prepared.layout, inside, computed)
            self._source_layout, self._inside = prepared.layout, inside
            self._computed = computed
        assert self._layout is not None
        if self._layout is prepared.layout:
            return prepared
        tensors, values = prepared.tensors, prepared.values
        return CastPrepared(self._layout, tensors, values, self._small, self._large)

    def _plan(self, layout: Layout, inside: frozenset[str], computed: frozenset[str]) -> Layout:
        used: set[str] = set()
        dtypes = []
        for leaf, dtype in zip(layout.manifest.leaves, layout.dtypes, strict=True):
            names = (leaf.name, *leaf.aliases)
            found = self._rule.find(names, dtype, used)
            keeps = leaf.name in inside or EXTRA_STATE in leaf.name.split(".")
            if found.itemsize <= dtype.itemsize and computed.issuperset(names):
                keeps = True
            dtypes.append(dtype if keeps else found)
        spare = [pattern for pattern in self._rule.patterns if pattern not in used]
        if spare and dtypes:
            raise ConfigError(
                f"wire_dtype has patterns that match no weight: {', '.join(spare)}; the first of "
                f"{len(dtypes)} is named {layout.manifest.leaves[0].name!r}. Correct or remove them"
            )
        self._small, self._large = [], []
        for position, leaf in enumerate(layout.manifest.leaves):
            (self._small if math.prod(leaf.shape) <= PIECE else self._large).append(position)
        if tuple(dtypes) == layout.dtypes:
            return layout
        new = Layout(
            plan_manifest(
                (
                    (leaf.name, dtype_name(dtype), leaf.shape, leaf.kind, leaf.aliases)
                    for leaf, dtype in zip(layout.manifest.leaves, dtypes, strict=True)
                ),
                self._limits,
            )
        )
        old = self._layout
        return old if old is not None and old.digest == new.digest else new

    def copy_into(
        self, prepared: Prepared, flat: FlatBuffer, *, pool: CopyPool | None = None
    ) -> None:
        """See :meth:`Flattener.copy_into`. Allocates nothing for tensors on the CPU.

        Args:
            prepared: What :meth:`prepare` returned.
            flat: At least ``prepared.layout.nbytes`` long, writable, and exclusive.
            pool: Threads that share the copies of large tensors.

        Raises:
            ConfigError: The buffer is too small.
        """
        if not isinstance(prepared, CastPrepared):
            self._inner.copy_into(prepared, flat, pool=pool)
            return
        layout = prepared.layout
        views = flat.views(layout)
        if flat.padded_for != layout.digest:
            for start, end in layout.padding():
                flat.array[start:end] = 0
            flat.padded_for = layout.digest
        tensors, blocks = prepared.tensors, []
        pairs = [(views[i], tensors[i]) for i in prepared.small]
        whole: list[TensorPair] = []
        with torch.no_grad():
            for position in prepared.large:
                view, tensor = views[position], tensors[position]
                if not is_plain_cpu(tensor):
                    whole.append((view, tensor))
                elif view.dtype is not tensor.dtype:
                    pairs += cut(view, tensor)
                else:
                    leaf = layout.manifest.leaves[position]
                    target = flat.array[leaf.offset : leaf.offset + leaf.nbytes]
                    blocks.append((target, as_bytes(tensor)))
            for view, tensor in whole:
                view.copy_(tensor)
        copy_pairs(pairs, pool)
        if blocks:
            (copy_blocks if pool is None else pool.copy)(blocks)
