"""Matching: the leaf of an update that each tensor of a target gets, and the value of each place.

Names may differ by the prefixes of wrappers. Weights that do not fit raise ``ManifestMismatch``
here; ``receiver.applier`` keeps the old version, and ``receiver.receiver`` answers NACK. This
module must never import asyncio or a transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from aiosync.errors import ManifestMismatch
from aiosync.tensors.buffer import Layout
from aiosync.tensors.values import EXTRA_STATE, inner_names
from aiosync.tensors.walk import PLAIN, Found, Place, is_freed, plain_name

__all__ = ["BufferChoice", "Matching", "Spot", "Strict"]

Strict: TypeAlias = bool | Literal["warn"]
"""``"warn"`` is strict, but missing extra state only causes a warning."""

BufferChoice: TypeAlias = Literal["all", "persistent"]
"""The buffers of a module that get weights: with ``"persistent"`` others only without memory."""

_DTYPE_HINT = (
    " If wire_dtype= of the sender chose that dtype, name patterns there can choose another."
)
_STRICT_HINT = (
    " With strict=False on the receiving scheme, what both sides have is taken, and floating-point "
    "dtypes are cast."
)


@dataclass(slots=True, eq=False)
class Spot:
    """One tensor of the target, with every place where it is found, and the leaves that it gets.

    Leaves that were sent separately, for names that are one tensor here, must have the same bytes:
    the first of them counts.
    """

    tensor: torch.Tensor
    places: list[Place]
    leaves: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Dotted name of the first place."""
        return self.places[0].name

    @property
    def is_optional(self) -> bool:
        """True if the tensor is no part of ``state_dict()``: then its weights may be missing."""
        return not any(place.persistent for place in self.places)

    @property
    def is_buffer(self) -> bool:
        """True if the tensor is only a buffer of modules: then its values may be rounded."""
        return all(
            place.kind == "buffer" and isinstance(place.owner, nn.Module) for place in self.places
        )


class Matching:
    """Pairs the names that were sent with the tensors and places of a target.

    It sets ``leaves`` of each spot, and changes nothing of the target.

    Args:
        found: All tensors of the target with their places, and the places of its values.
        spots: The tensors of the target, each object once.
        layout: Layout of the weights that were sent.
        values: Non-tensor values that were sent, packed.
        in_module: The target is a module, whose values may be bare tensors.
        strict: Refuse names that only one side has, and other dtypes.
        buffers: The buffers that get weights.

    Attributes:
        values: Places that get values, with the names under which those were sent.
        stateless: Extra state that was not sent, and stays.
        transient: Buffers that were sent and are not persistent, by name; without those that
            ``buffers`` leaves out.

    Raises:
        ManifestMismatch: The weights do not fit; all names are listed.
    """

    def __init__(
        self,
        found: Found,
        spots: Iterable[Spot],
        layout: Layout,
        values: Mapping[str, Any],
        *,
        in_module: bool,
        strict: Strict,
        buffers: BufferChoice,
    ) -> None:
        self.values: list[Place] = []
        self.stateless: list[str] = []
        self.transient: dict[str, torch.Tensor] = {}
        self._layout, self._sent_values = layout, values
        self._in_module, self._strict, self._buffers = in_module, strict, buffers
        self._names = _SentNames(found, layout.index.keys() | values.keys(), strict)
        self._taken: set[str] = set()
        self._missing: list[str] = []
        self._mismatched: dict[str, str] = {}
        for spot in spots:
            self._match_tensor(spot)
        for place in found.values.values():
            self._match_value(place)
        self._refuse_misfits()

    def _match_tensor(self, spot: Spot) -> None:
        """Give a tensor the leaves of its names, or note why it gets none."""
        index = self._layout.index
        names = [name for place in spot.places for name in self._names.of(place)]
        # If several names have one leaf, the first of them counts.
        sent = {index[name]: name for name in reversed(names) if name in index}
        if not sent:
            self._note_absence(spot, names)
            return
        self._taken.update(names)
        if spot.is_optional and not spot.tensor.is_meta and self._stays(spot, sent):
            return
        self._note_differences(spot, sent)
        spot.leaves = sorted(sent)

    def _note_differences(self, spot: Spot, sent: Mapping[int, str]) -> None:
        """Note the leaves, by the names that were sent, that do not fit their tensor."""
        for leaf, name in sent.items():
            shape, dtype = self._layout.manifest.leaves[leaf].shape, self._layout.dtypes[leaf]
            if why := _difference(spot, shape, dtype, self._strict):
                self._mismatched[name] = why

    def _note_absence(self, spot: Spot, names: Iterable[str]) -> None:
        """Note the names of a spot that gets no leaf: missing, or mismatched if sent as values."""
        values = [name for name in names if name in self._sent_values]
        self._mismatched |= {
            name: f"expected a tensor, got a {type(self._sent_values[name]).__name__}"
            for name in values
        }
        self._taken.update(values)
        if not (values or spot.is_optional):
            self._missing += names

    def _stays(self, spot: Spot, leaves: Iterable[int]) -> bool:
        """Note a buffer that is not persistent; return True if it keeps the worker's values."""
        if self._buffers == "persistent":
            return True
        self.transient[spot.name] = spot.tensor
        # A tensor of another shape, or in inference mode, is state that this process made anew.
        shapes = [self._layout.manifest.leaves[leaf].shape for leaf in leaves]
        return spot.tensor.is_inference() or any(spot.tensor.shape != shape for shape in shapes)

    def _match_value(self, place: Place) -> None:
        """Give a place the value of its name, or note that there is none."""
        name = self._names.of(place)[0]
        if name in self._sent_values or (name in self._layout.index and self._in_module):
            self.values.append(place._replace(name=name))
            self._taken.add(name)
        elif self._strict == "warn" and name.rpartition(".")[2] == EXTRA_STATE:
            self.stateless.append(name)
        else:
            self._missing.append(name)

    def _refuse_misfits(self) -> None:
        """Raise if anything does not fit, with all names."""
        missing, unexpected = self._missing, self._find_unexpected()
        is_disjoint = not self._taken and missing and unexpected
        if not (self._strict or is_disjoint):
            # Each side may have names that the other lacks, but some have to be common.
            missing, unexpected = [], []
        # Values name tensors inside them that were not sent.
        lost = sorted(inner_names(self._sent_values) - self._layout.index.keys())
        if missing or lost or unexpected or self._mismatched:
            raise ManifestMismatch(
                missing=[*missing, *lost],
                unexpected=unexpected,
                mismatched=self._mismatched,
                hint=self._hint(),
            )

    def _hint(self) -> str:
        """Return the advice for an update that does not fit."""
        hint, reasons = "Nothing was changed.", self._mismatched.values()
        if any("dtype" in why for why in reasons):
            hint += _DTYPE_HINT
        if self._strict and all(why.startswith("expected dtype") for why in reasons):
            hint += _STRICT_HINT
        return hint

    def _find_unexpected(self) -> list[str]:
        """Return the names that were sent and belong nowhere, except transient buffers."""
        index, leaves = self._layout.index, self._layout.manifest.leaves
        known = self._taken | inner_names(self._sent_values)
        return [
            name
            for name in (*index, *self._sent_values)
            if name not in known
            and (name in self._sent_values or leaves[index[name]].kind != "transient")
        ]


class _SentNames:
    """Finds the names under which the weights of a place were sent."""

    def __init__(self, found: Found, sent: Set[str], strict: Strict) -> None:
        self._sent = sent
        self._own = {place.name for place in found.places} | found.values.keys()
        self._by_plain_name = {plain_name(name): name for name in sent}
        self._prefix = _leading(found, sent) if strict else ""

    def of(self, place: Place) -> Sequence[str]:
        """Return the names sent for a place, also with other wrappers; or else its own name."""
        known = [self._prefix + place.name]
        if not self._prefix:
            others = {
                self._by_plain_name.get(plain_name(each)) for each in (place.name, place.path)
            }
            # A name that another place has as its own is not sent for this one.
            known += [name for name in others - self._own if name is not None]
        return [name for name in known if name in self._sent] or [place.name]


def _leading(found: Found, sent: Set[str]) -> str:
    """Return the ``module.`` in front of all names that were sent, if they fit without it.

    A ``state_dict()`` of a data-parallel model has this prefix. It is not removed from parts of
    weights: once parts are put together, the same tensor would have two names.
    """
    needed = {place.name for place in found.places if place.persistent}
    needed |= found.values.keys()
    prefix = ""
    while sent and all(name.startswith(prefix) for name in sent):
        if needed <= {name.removeprefix(prefix) for name in sent}:
            return prefix
        prefix += "module."
    return ""


def _difference(spot: Spot, shape: tuple[int, ...], dtype: torch.dtype, strict: object) -> str:
    """Return a text on the differences of a leaf from its tensor; empty if it fits."""
    tensor = spot.tensor
    if not _takes_weights(tensor):
        kind = type(tensor)
        return (
            f"the target is a {kind.__module__}.{kind.__qualname__} ({tensor.layout}), and only "
            "plain strided tensors and parameters, that are no conjugate, negative, expanded or "
            "inference tensors, take weights: use load= instead of model="
        )
    if is_freed(tensor):
        return "the storage of the target was freed: give it memory before an update"
    parts = []
    if tuple(tensor.shape) != shape:
        parts.append(f"expected shape {tuple(tensor.shape)}, got {shape}")
    # A single wire_dtype does not round all buffers, so a model in less precision rounds them.
    exact = strict and not (spot.is_buffer and tensor.dtype.itemsize <= dtype.itemsize)
    castable = _are_alike(tensor.dtype, dtype)
    if tensor.dtype is not dtype and (exact or not castable):
        parts.append(f"expected dtype {tensor.dtype}, got {dtype}".replace("torch.", ""))
    return "; ".join(parts)


def _are_alike(one: torch.dtype, other: torch.dtype) -> bool:
    """Return True if one dtype can be cast to the other: both floating-point, or both complex."""
    return (one.is_floating_point and other.is_floating_point) or (
        one.is_complex and other.is_complex
    )


def _takes_weights(tensor: torch.Tensor) -> bool:
    """Return True if weights can be copied into a tensor, or into its replacement if on meta."""
    return (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
        # Along a dimension with step 0 all elements are one in memory.
        and all(step or n < 2 for step, n in zip(tensor.stride(), tensor.shape, strict=True))
    )
