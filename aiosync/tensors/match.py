"""Matching: what was sent, what a target has, and how each tensor gets its value.

Looks at the target and changes nothing. What can be a target is said here, in one place: plain
strided tensors and parameters. This module must never import asyncio or a transport.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.tensors.buffer import in_flat_memory
from aiosync.tensors.copying import is_plain_cpu
from aiosync.tensors.flatten import Signature
from aiosync.tensors.layout import Layout
from aiosync.tensors.tensordicts import (
    is_plain_tensordict,
    is_tensor_collection,
    is_tensordict_params,
)
from aiosync.tensors.values import EXTRA_STATE, inner_names
from aiosync.tensors.walk import (
    PLAIN,
    Found,
    ModuleTree,
    Place,
    find_nested,
    memory_key,
    walk,
)

__all__ = ["Mode", "Plan", "Spot", "Strict", "is_ordinary", "is_shared"]

Mode: TypeAlias = Literal["flip", "copy", "replace"]
"""How tensors get their new values.

``"flip"``: parameters become views of the buffer, where possible; the rest is copied in place.
``"copy"``: everything is copied in place. ``"replace"``: new objects with memory of their own take
the places of the old ones.
"""


Strict: TypeAlias = bool | Literal["warn"]
"""``"warn"`` is strict, but extra state that was not sent is only warned of."""


@dataclass(slots=True, eq=False)
class Spot:
    """One tensor of the target, with every place where it is found."""

    tensor: torch.Tensor
    places: list[Place]

    @property
    def name(self) -> str:
        """Dotted name of the first place."""
        return self.places[0].name

    @property
    def is_optional(self) -> bool:
        """Whether it is no part of ``state_dict()``: it may be missing, or be rounded."""
        return not any(place.persistent for place in self.places)

    @property
    def is_split(self) -> bool:
        """Whether only one of the tables of a ``TensorDictParams`` has it."""
        owners = [each for each in self.places if is_tensordict_params(each.owner)]
        return any(
            self.tensor is not owner._parameters.get(key, owner._buffers.get(key))
            for _, owner, key, *_ in owners
        )


class Plan:
    """How weights get into a target as it is now; ints are leaf indices.

    Attributes:
        found: All tensors of the target, with their places, and where values are.
        tree: Of a module; ``None`` otherwise.
        spots: The tensors of the target, each object once.
        assigned: What gets which leaf.
        equal: Tensors whose leaf must have the same bytes as others: these were sent
            separately for names that are tied here.
        values: Where the values go; those of modules may be bare tensors.
        stateless: Extra state that was not sent, and stays.
        flips: Parameters that become views, and ``flip_leaves`` what they become views of.
        pick: Of tensors in the order of the leaves, those that ``flips`` become views of; only if
            that changes all there is to change, and cannot fail.
        digest: Of the layout.
        owns: Tensors that get new memory first, because theirs is not theirs alone.
        installs: Tensors that are replaced; the flag says that they become views.
        copies: What is copied in place: the tensors are ``copied``, and ``addresses`` where they
            are.
    """

    def __init__(
        self, target: Any, layout: Layout, values: Mapping[str, Any], mode: Mode, *, strict: Strict
    ) -> None:
        """Look at a target, and change nothing.

        Args:
            target: A module, a TensorDict or a dict.
            layout: What was sent.
            values: Non-tensor values that were sent, packed.
            mode: How tensors get their values.
            strict: Refuse names that only one side has, and other dtypes. Buffers that are not
                part of ``state_dict()`` may be missing, and may be rounded. ``"warn"`` lets
                extra state be missing.

        Raises:
            ManifestMismatch: They do not fit; all names are listed.
            ConfigError: The target is of an unsupported type, or has parameters that are not
                initialised yet.
        """
        self.found: Found
        self.tree: ModuleTree | None
        self.found, self.tree = walk(target)
        by_object: dict[int, Spot] = {}
        for place, tensor in zip(self.found.places, self.found.tensors, strict=True):
            by_object.setdefault(id(tensor), Spot(tensor, [])).places.append(place)
        self.spots: list[Spot] = list(by_object.values())
        self.tensors: list[torch.Tensor] = [spot.tensor for spot in self.spots]
        self._refuse_kinds()
        self._signature = Signature(self.tensors)
        self.assigned: list[tuple[Spot, int]] = []
        self.equal: list[tuple[Spot, int, list[int]]] = []
        self.values: list[Place] = []
        self.stateless: list[str] = []
        self._match(layout, values, strict=strict)
        self._refuse_overlapping()
        self.flips: list[torch.Tensor] = []
        self.flip_leaves: list[int] = []
        self.owns: list[tuple[torch.Tensor, int]] = []
        self.installs: list[tuple[Spot, int, bool]] = []
        self.copies: list[tuple[torch.Tensor, int]] = []
        self._sort(layout, mode)
        self.copied: list[torch.Tensor] = [tensor for tensor, _ in self.copies]
        self.addresses: list[int] = list(map(torch.Tensor.data_ptr, self.copied))
        self.digest: bytes = layout.digest
        self.pick: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] | None = None
        more = self.values or self.equal or self.owns or self.installs or self.addresses
        if self.flips and not more:
            self.pick = itemgetter(*self.flip_leaves, self.flip_leaves[-1])

    def _refuse_kinds(self) -> None:
        """Raise if a tensor cannot get weights for what it is, or for what holds it."""
        lazy = [spot.name for spot in self.spots if is_lazy(spot.tensor)]
        if lazy:
            raise ConfigError(
                f"the target is not initialised yet: {', '.join(lazy)}; run the lazy module first"
            )
        made = [
            place.name
            for place in self.found.places
            if is_tensor_collection(place.owner)
            and not (is_plain_tensordict(place.owner) or is_tensordict_params(place.owner))
        ]
        if made:
            raise ConfigError(
                f"cannot apply weights to {', '.join(made)}: of containers only TensorDict, "
                "TensorDictParams and dict can be targets, no lazy stack, part or tensorclass"
            )

    def is_valid(self, target: Any) -> bool:
        """Whether the target is still what it was when the plan was made. Cheap for a module."""
        if self.tree is None:
            same = find_nested(target).same_as(self.found)
        else:
            same = self.tree.unchanged()
        return same and self._signature.same(self.tensors)

    def _match(self, layout: Layout, values: Mapping[str, Any], *, strict: Strict) -> None:
        """Decide what gets which leaf and which value."""
        leaves, index = layout.manifest.leaves, layout.index
        inner = inner_names(values)
        missing: list[str] = []
        mismatched: dict[str, str] = {}
        taken: set[str] = set()
        for spot in self.spots:
            names = [place.name for place in spot.places]
            sent = {index[name]: name for name in reversed(names) if name in index}
            if not sent:
                plain = [name for name in names if name in values]
                for name in plain:
                    mismatched[name] = f"expected a tensor, got a {type(values[name]).__name__}"
                taken.update(plain)
                missing += [] if spot.is_optional or plain else names
                continue
            taken.update(names)
            for position, name in sent.items():
                why = _difference(spot, leaves[position].shape, layout.dtypes[position], strict)
                if why:
                    mismatched[name] = why
            first, *others = sorted(sent)
            self.assigned.append((spot, first))
            if others:
                self.equal.append((spot, first, others))
        for name, place in self.found.values.items():
            if name in values or (name in index and self.tree is not None):
                self.values.append(place)
                taken.add(name)
            elif strict == "warn" and name.rpartition(".")[2] == EXTRA_STATE:
                self.stateless.append(name)
            else:
                missing.append(name)
        unexpected = [name for name in (*index, *values) if name not in taken and name not in inner]
        lost = sorted(inner - index.keys())
        disjoint = bool(not taken and missing and unexpected)
        if mismatched or lost or disjoint or (strict and (missing or unexpected)):
            hint = "Nothing was changed."
            if any("dtype" in why for why in mismatched.values()):
                hint += _DTYPE_HINT
            if strict and all(why.startswith("expected dtype") for why in mismatched.values()):
                hint += _STRICT_HINT
            raise ManifestMismatch(
                missing=[*missing, *lost] if strict or disjoint else lost,
                unexpected=unexpected if strict or disjoint else (),
                mismatched=mismatched,
                hint=hint,
            )

    def _refuse_overlapping(self) -> None:
        """Raise if a tensor that gets weights has memory in common with one that gets others."""
        leaves = {id(spot): leaf for spot, leaf in self.assigned}
        extents = []
        for spot in self.spots:
            tensor = spot.tensor
            if is_ordinary(tensor) and tensor.numel():
                steps = zip(tensor.shape, tensor.stride(), strict=True)
                nbytes = (sum((n - 1) * step for n, step in steps) + 1) * tensor.element_size()
                start = (str(tensor.device), tensor.data_ptr())
                content = (leaves.get(id(spot)), memory_key(tensor))
                extents.append((start, start[1] + nbytes, spot.name, content))
        extents.sort(key=lambda extent: extent[0])
        mismatched = {
            name: f"has memory in common with {before}: give each its own"
            for ((device, _), end, before, one), ((other_device, at), _, name, other) in pairwise(
                extents
            )
            if device == other_device and at < end and one != other
        }
        if mismatched:
            raise ManifestMismatch(mismatched=mismatched, hint="Nothing was changed.")

    def _sort(self, layout: Layout, mode: Mode) -> None:
        """Decide how each tensor gets its value."""
        views: dict[int, Any] = {}  # leaf -> the tensor that becomes a view of it
        for spot, leaf in self.assigned:
            tensor = spot.tensor
            same_dtype = tensor.dtype is layout.dtypes[leaf]
            may_view = mode == "flip" and type(tensor) is nn.Parameter and same_dtype
            shared = mode == "flip" and is_shared(tensor)
            key = memory_key(tensor)
            if tensor.is_meta or mode == "replace" or spot.is_split:
                view = may_view and views.setdefault(leaf, key) == key
                self.installs.append((spot, leaf, view))
            elif (
                may_view
                and is_plain_cpu(tensor)
                and (self.tree is not None or not shared)
                and views.setdefault(leaf, key) == key  # a second one that is not tied here copies
            ):
                self.flips.append(tensor)
                self.flip_leaves.append(leaf)
            elif (shared and self.tree is not None) or in_flat_memory(tensor):
                self.owns.append((tensor, leaf))
            else:
                self.copies.append((tensor, leaf))


_DTYPE_HINT = (
    " If wire_dtype= of the sender chose that dtype, name patterns there can choose another."
)
_STRICT_HINT = (
    " With strict=False on the receiving scheme, what both sides have is taken, and floating-point "
    "dtypes are cast."
)


def _difference(spot: Spot, shape: tuple[int, ...], dtype: torch.dtype, strict: Strict) -> str:
    """Say in words what does not fit; empty if it fits."""
    tensor = spot.tensor
    if not (  # on the meta device it gets memory
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
        and all(step or n < 2 for step, n in zip(tensor.stride(), tensor.shape, strict=True))
    ):
        kind = type(tensor)
        return (
            f"the target is a {kind.__module__}.{kind.__qualname__} ({tensor.layout}), and only "
            "plain strided tensors and parameters, that are no conjugate, negative, expanded or "
            "inference tensors, take weights: use load= instead of model="
        )
    parts = []
    if tuple(tensor.shape) != shape:
        parts.append(f"expected shape {tuple(tensor.shape)}, got {shape}")
    # A single wire_dtype does not round computed buffers: a model in less precision does.
    exact = strict and not (spot.is_optional and tensor.dtype.itemsize <= dtype.itemsize)
    castable = (tensor.dtype.is_floating_point and dtype.is_floating_point) or (
        tensor.dtype.is_complex and dtype.is_complex
    )
    if tensor.dtype is not dtype and (exact or not castable):
        parts.append(f"expected dtype {tensor.dtype}, got {dtype}".replace("torch.", ""))
    return "; ".join(parts)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain strided tensor or parameter with memory."""
    return (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
    )


def is_shared(tensor: Any) -> bool:
    """Whether a CPU tensor is in memory that torch shares between processes."""
    return tensor.device.type == "cpu" and bool(tensor.is_shared())
