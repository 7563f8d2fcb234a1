"""What an apply will do: which tensor of the target is flipped, copied, replaced.

Looks at the target and changes nothing. This module must never import asyncio or a transport.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aiosync.tensors._finding import memory_key
from aiosync.tensors._matching import (
    Assignment,
    Match,
    Spot,
    Survey,
    is_shared,
    match,
    refuse_overlapping,
    survey,
)
from aiosync.tensors._signature import Signature
from aiosync.tensors._tree import Place
from aiosync.tensors.buffer import in_flat_memory
from aiosync.tensors.copying import LARGE_NBYTES, is_plain_cpu

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from aiosync.tensors.layout import Layout

__all__ = ["Mode", "Plan", "make_plan"]


class Mode(enum.Enum):
    """How tensors get their new values."""

    FLIP = "flip"
    """Parameters become views of the buffer, where possible; the rest is copied in place."""
    COPY = "copy"
    """Everything is copied in place."""
    REPLACE = "replace"
    """New objects with memory of their own take the places of the old ones."""


@dataclass(slots=True)
class Plan:
    """What an apply does, in terms of the target's own objects; ints are leaf indices.

    Attributes:
        flips: Parameters that become views, and ``flip_leaves`` what they become views of.
        owns: Tensors that get new memory first, because theirs is not theirs alone.
        installs: Tensors that are replaced; the flag says that they become views.
        joins: Tensors that only one of the tables of a ``TensorDictParams`` has; both get them.
        small: Copied together by torch; below the size at which it uses its thread pool.
        large: Copied byte by byte without the GIL.
        equal: Assignments of which several leaves must be the same.
        copied: Plain tensors that are copied in place, and where they were.
    """

    survey: Survey
    match: Match
    signature: Signature
    flips: list[torch.Tensor] = field(default_factory=list)
    flip_leaves: list[int] = field(default_factory=list)
    pick_views: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] | None = None
    owns: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    installs: list[tuple[Spot, int, bool]] = field(default_factory=list)
    joins: list[tuple[Place, torch.Tensor]] = field(default_factory=list)
    small: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    large: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    equal: list[Assignment] = field(default_factory=list)
    copied: tuple[list[torch.Tensor], list[int]] = ([], [])
    layout: Layout | None = None
    only_flips: bool = False

    @property
    def has_values(self) -> bool:
        return bool(self.match.values or self.match.tensor_values)

    def valid(self, target: Any) -> bool:
        """Whether the target is still what it was when the plan was made. Cheap."""
        return self.survey.unchanged_in(target) and self.signature.same(self.survey.tensors)

    def valid_to_apply(self, target: Any) -> bool:
        """The same, and whether what is copied into is where it was."""
        tensors, addresses = self.copied
        there = list(map(torch.Tensor.data_ptr, tensors)) == addresses
        return there and self.valid(target)


def make_plan(
    target: nn.Module | TensorDictBase | dict[str, Any],
    layout: Layout,
    values: Mapping[str, Any],
    mode: Mode,
    *,
    strict: bool,
) -> Plan:
    """Plan how the weights of a layout get into a target as it is now.

    Raises:
        ManifestMismatch: They do not fit.
        ConfigError: The target cannot be a target.
    """
    found = survey(target)
    matched = match(found, layout, values, strict=strict)
    refuse_overlapping(found, matched.assignments)
    plan = Plan(found, matched, Signature(found.tensors))
    _sort(plan, layout, mode)
    plan.layout = layout
    plan.only_flips = not (
        plan.owns
        or plan.installs
        or plan.joins
        or plan.small
        or plan.large
        or plan.equal
        or plan.has_values
    )
    return plan


def _sort(plan: Plan, layout: Layout, mode: Mode) -> None:
    """Decide how each tensor gets its value."""
    module = plan.survey.tree is not None
    flipped: dict[int, Any] = {}  # leaf -> the tensor that became a view of it
    for assignment in plan.match.assignments:
        spot, leaf = assignment.spot, assignment.leaf
        tensor = spot.tensor
        same_dtype = tensor.dtype is layout.dtypes[leaf]
        if assignment.equal:
            plan.equal.append(assignment)
        if tensor.is_meta or mode is Mode.REPLACE:
            view = mode is Mode.FLIP and type(tensor) is nn.Parameter and same_dtype
            view = view and flipped.setdefault(leaf, spot) is spot
            plan.installs.append((spot, leaf, view))
            continue
        shared = mode is Mode.FLIP and is_shared(tensor)
        if (
            mode is Mode.FLIP
            and type(tensor) is nn.Parameter
            and same_dtype
            and is_plain_cpu(tensor)
            and (module or not shared)
        ):
            key = memory_key(tensor) or id(spot)
            if flipped.setdefault(leaf, key) == key:
                plan.flips.append(tensor)
                plan.flip_leaves.append(leaf)
                continue
            # a second parameter that is not tied here: it must not share memory
        if (shared and module) or in_flat_memory(tensor):
            plan.owns.append((tensor, leaf))
        elif tensor.nbytes >= LARGE_NBYTES and same_dtype and is_plain_cpu(tensor):
            plan.large.append((tensor, leaf))
        else:
            plan.small.append((tensor, leaf))
    if plan.survey.tree is not None and plan.survey.tree.split:
        replaced = {id(spot.tensor) for spot, _, _ in plan.installs}
        plan.joins = [
            (place, tensor)
            for place, tensor in plan.survey.tree.split
            if id(tensor) not in replaced and not tensor.is_meta  # what gets no weights stays so
        ]
    tensors = [tensor for tensor, _ in (*plan.small, *plan.large)]
    plan.copied = tensors, list(map(torch.Tensor.data_ptr, tensors))
