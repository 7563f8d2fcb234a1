"""Plans: the step by which each tensor of a target gets its value.

Making a plan changes nothing. This module must never import asyncio or a transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from aiosync.errors import ConfigError
from aiosync.tensors.accelerator import accelerator
from aiosync.tensors.buffer import Layout, in_flat_memory
from aiosync.tensors.cache_owners import find_cache_owners
from aiosync.tensors.copying import is_plain_cpu
from aiosync.tensors.in_place import InPlaceCopies
from aiosync.tensors.matching import BufferChoice, Matching, Spot, Strict
from aiosync.tensors.target_tensors import TargetTensors, in_shared_memory
from aiosync.tensors.values import is_tensordict_params
from aiosync.tensors.walk import Place, memory_key

__all__ = ["Mode", "Plan"]

Mode: TypeAlias = Literal["flip", "copy", "copy there", "replace"]
"""The way in which tensors get their new values.

``"flip"``: parameters become views of the buffer, where possible; the rest is copied in place.
``"copy"``: everything is copied in place, with ``"copy there"`` from the memory of the device that
has the target. ``"replace"``: new objects with memory of their own take
the places of the old ones.
"""


_Pick: TypeAlias = "Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]"


class Plan:
    """The steps by which weights get into a target as it is now; ints are leaf indices.

    Attributes:
        tensors: The tensors of the target.
        assigned: The spots that get weights.
        equal: The spots that get several leaves, which were sent separately.
        values: Places that get values; the values of modules may be bare tensors.
        stateless: Extra state that was not sent, and stays.
        transient: Buffers that were sent and are not persistent, by name; without those that
            ``buffers`` leaves out.
        moves: Triples (tensor, leaf, is_view) of the tensors that get other memory: the tensor
            becomes a view of the leaf if ``is_view``, else it gets memory of its own.
        moved: The tensors of ``moves``.
        puts: Triples (spot, leaf, is_view) of the spots whose tensors are replaced by others, which
            get their memory likewise.
        copies: Tensors that are copied in place.
        devices: The accelerators of the tensors that get weights.
        first_parameter: The first plain parameter of the target; ``None`` for none.
        cache_owners: Objects in the target that keep results made of its tensors.
        is_single_use: The target is another one afterwards, for which there is no plan yet.
        pick_flipped: Picks, of tensors in the order of the leaves, those that ``moved`` become
            views of; ``None`` unless that is all there is to change, and cannot fail.
        digest: Digest of the layout.
    """

    def __init__(
        self,
        target: Any,
        layout: Layout,
        values: Mapping[str, Any],
        mode: Mode,
        *,
        strict: Strict,
        buffers: BufferChoice,
    ) -> None:
        """Look at a target, and change nothing.

        Args:
            target: A module, a TensorDict or a dict.
            layout: Layout of the weights that were sent.
            values: Non-tensor values that were sent, packed.
            mode: The way in which tensors get their values.
            strict: Refuse names that only one side has, and other dtypes. Buffers of a module may
                be rounded, and either side may lack those that are no part of ``state_dict()``.
                ``"warn"`` lets extra state be missing.
            buffers: The buffers that get weights.

        Raises:
            ManifestMismatch: The weights do not fit; all names are listed.
            ConfigError: The target is of an unsupported type, or has parameters that are not
                initialised yet.
        """
        self.tensors: TargetTensors = TargetTensors(target)
        in_module = self.tensors.tree is not None
        matched = Matching(
            self.tensors.found,
            self.tensors.spots,
            layout,
            values,
            in_module=in_module,
            strict=strict,
            buffers=buffers,
        )
        self.values: list[Place] = matched.values
        self.stateless: list[str] = matched.stateless
        self.transient: dict[str, torch.Tensor] = matched.transient
        self.assigned: list[Spot] = [spot for spot in self.tensors.spots if spot.leaves]
        self.equal: list[Spot] = [spot for spot in self.assigned if len(spot.leaves) > 1]
        self.tensors.refuse_overlapping()
        self.moves: list[tuple[torch.Tensor, int, bool]] = []
        self.puts: list[tuple[Spot, int, bool]] = []
        copies = self._sort(layout, mode, in_module=in_module)
        self.copies: InPlaceCopies = InPlaceCopies(copies, keeps_views=mode == "flip" and in_module)
        self.devices: set[torch.device] = _accelerators_of(self.assigned)
        self.first_parameter: nn.Parameter | None = _first_parameter(self.tensors.tensors)
        if self.devices and mode != "copy there":
            self.copies.allocate_on_devices(layout)
        self.moved: list[torch.Tensor] = [tensor for tensor, _, _ in self.moves]
        self.is_single_use: bool = bool(self.puts) or not self._only_moves_to_views()
        self.digest: bytes = layout.digest
        self.cache_owners: list[Any] = find_cache_owners(target, self.tensors.tree)
        self.pick_flipped: _Pick | None = None if copies else self._picker()

    def _only_moves_to_views(self) -> bool:
        """Return True if each moved tensor becomes a view of its leaf."""
        return all(is_view for _, _, is_view in self.moves)

    def _picker(self) -> _Pick | None:
        """Return the function that picks the leaves of the moves; ``None`` if more changes."""
        if self.is_single_use or self.values or self.equal or self.cache_owners:
            return None
        leaves = [leaf for _, leaf, _ in self.moves]
        # For a single index, itemgetter() would return no sequence. _flip() stops
        # before the surplus view.
        return itemgetter(*leaves, leaves[-1]) if leaves else None

    def _sort(
        self, layout: Layout, mode: Mode, *, in_module: bool
    ) -> list[tuple[torch.Tensor, int]]:
        """Decide the step by which each tensor gets its value; return those copied in place."""
        copies: list[tuple[torch.Tensor, int]] = []
        # The memory of the tensor that becomes a view of a leaf, by leaf.
        views: dict[int, Any] = {}
        for spot in self.assigned:
            tensor, leaf = spot.tensor, spot.leaves[0]
            memory, is_shared = memory_key(tensor), mode == "flip" and in_shared_memory(tensor)
            is_replaced = mode == "replace" or _is_replaced(spot)
            may_flip = mode == "flip" and (is_replaced or in_module or not is_shared)
            is_flipped = may_flip and _can_be_view(spot, layout.dtypes[leaf])
            # If a leaf goes to two tensors that are not tied here, the second one copies.
            is_view = is_flipped and views.setdefault(leaf, memory) == memory
            if is_replaced:
                self.puts.append((spot, leaf, is_view))
            elif is_view or (is_shared and in_module) or in_flat_memory(tensor):
                # A module's tensor in memory that torch shares gets other memory, too. So does a
                # view of a flat buffer, which must not be written to.
                self.moves.append((tensor, leaf, is_view))
            else:
                copies.append((tensor, leaf))
        return copies

    def check_device(self, device: torch.device) -> None:
        """Raise if the target is not on the device that has the weights; a part may be on the CPU.

        Raises:
            ConfigError: It is on another accelerator, too, or only on the CPU.
        """
        # Tensors on the meta device get memory where the weights are.
        new = any(spot.tensor.is_meta for spot, *_ in self.puts)
        if self.devices != {device} and (self.devices or not new):
            where = ", ".join(map(str, self.devices)) or "the CPU"
            raise ConfigError(
                f"the weights are on {device}, and this worker's model is on {where}: use "
                "memory='host'"
            )


def _accelerators_of(spots: Iterable[Spot]) -> set[torch.device]:
    """Return the accelerators that have tensors."""
    has = accelerator().has
    return {spot.tensor.device for spot in spots if has(spot.tensor)}


def _first_parameter(tensors: Sequence[torch.Tensor]) -> nn.Parameter | None:
    return next((each for each in tensors if type(each) is nn.Parameter), None)


def _is_replaced(spot: Spot) -> bool:
    """Return True if a new tensor takes the place of this one, whatever the mode."""
    return spot.tensor.is_meta or _is_split(spot)


def _can_be_view(spot: Spot, dtype: torch.dtype) -> bool:
    """Return True if a parameter, or the one in its place, can be a view of received memory."""
    tensor = spot.tensor
    if type(tensor) is not nn.Parameter or tensor.dtype is not dtype:
        return False
    return _is_replaced(spot) or is_plain_cpu(tensor)


def _is_split(spot: Spot) -> bool:
    """Return True if a TensorDictParams has the tensor inside, and another one in its table."""
    return any(
        is_tensordict_params(owner)
        and spot.tensor is not owner._parameters.get(key, owner._buffers.get(key))
        for _, owner, key, *_ in spot.places
    )
