"""Applying: from the bytes of a flat buffer into a model, all of it or none of it.

This module must never import asyncio or a transport.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aiosync.errors import ManifestMismatch
from aiosync.tensors import _changes as changes
from aiosync.tensors._matching import inner_names, is_ordinary, match, survey
from aiosync.tensors._params import inner_tensors
from aiosync.tensors._plan import Mode, Plan, make_plan
from aiosync.tensors._tensordict import is_tensordict
from aiosync.tensors._tree import find_nested
from aiosync.tensors._values import unpack_value

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from aiosync.tensors._matching import Spot
    from aiosync.tensors.buffer import FlatBuffer
    from aiosync.tensors.copying import CopyPool
    from aiosync.tensors.layout import Layout

__all__ = ["Mode", "Target"]

_QUICK_NBYTES = 2**18


class Target:
    """Something that weights are applied to.

    The tensors are resolved at every call: the module may be moved, cast, or have parameters and
    submodules replaced between two calls. Not thread-safe: the caller holds whatever lock a
    reader holds as well.
    """

    def __init__(
        self, target: nn.Module | TensorDictBase | dict[str, Any], *, strict: bool = True
    ) -> None:
        """Choose the target; it is not looked at yet.

        Args:
            target: A module, a TensorDict, or a dict of tensors, nested or with dotted keys.
            strict: Weights must have exactly the target's names and dtypes, but for buffers that
                are not persistent: those may be missing, and are rounded if the target has them
                in less precision. Otherwise names that only one side has are left alone, and
                floating-point values are cast; shapes must be the same in any case.
        """
        self.target = target
        self.strict = strict
        self._plan: Plan | None = None
        self._key: tuple[Mode, tuple[Any, ...]] | None = None

    def __repr__(self) -> str:
        return f"<Target {type(self.target).__name__} strict={self.strict}>"

    def check(self, layout: Layout, values: Mapping[str, Any]) -> None:
        """Raise unless the weights fit the target as it is now. Changes nothing.

        Tied parameters that were sent as separate tensors are compared by :meth:`apply_`.

        Args:
            layout: Names, dtypes and shapes of the weights.
            values: Non-tensor values by name, packed.

        Raises:
            ManifestMismatch: They do not fit; all names are listed.
            ConfigError: The target cannot be a target.
        """
        plan = self._plan
        facts = self._facts(layout, values)
        if (
            plan is None
            or self._key is None
            or self._key[1] != facts
            or not plan.valid(self.target)
        ):
            match(survey(self.target), layout, values, strict=self.strict)

    def apply_(
        self,
        layout: Layout,
        flat: FlatBuffer,
        values: Mapping[str, Any],
        *,
        copy: bool,
        pool: CopyPool | None = None,
    ) -> None:
        """Put the weights into the target. All of it, or nothing when something raises.

        Parameter objects stay the same, so that optimizers and references keep working; only
        those on the meta device are replaced. Gradients and optimizer state are untouched.

        Args:
            layout: Layout of the weights.
            flat: Buffer that holds them.
            values: Non-tensor values by name, packed.
            copy: ``False`` flips plain contiguous CPU parameters of the same dtype to views of
                the buffer: it must not be written to while :meth:`FlatBuffer.exclusive` is
                false. Buffers, and parameters of any other kind, are copied in place. Tensors
                of a module in memory that torch shares between processes get memory of their
                own. ``True`` copies everything in place.
            pool: Threads that share the copies of large tensors.

        Raises:
            ManifestMismatch: The weights do not fit, or a tensor is none that can be a target.
            ConfigError: The target cannot be a target, or the buffer is too small.
            Exception: Whatever ``set_extra_state()`` raised; every tensor has its old value
                again, and extra states are what it has made of them.
        """
        plan = self._plan
        if (
            plan is not None
            and plan.pick_views is not None
            and not (copy or values)
            and plan.layout is layout
            and self._key is not None
            and self._key[0] is Mode.FLIP
            and plan.only_flips
            and not torch.is_inference_mode_enabled()
            and plan.valid(self.target)
        ):
            # The usual case: nothing but flips, which cannot fail once the plan is valid.
            changes.flip(plan.flips, plan.pick_views(flat.views(layout)))
            return
        mode = Mode.COPY if copy else Mode.FLIP
        self._apply(layout, flat.views(layout), values, mode, pool)

    def apply_tensors(
        self,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        values: Mapping[str, Any],
        *,
        inplace: bool = True,
    ) -> None:
        """Like :meth:`apply_`, from tensors anywhere. The target never shares their memory.

        Args:
            layout: Layout of the tensors.
            tensors: One for each leaf, in order.
            values: Non-tensor values by name, packed.
            inplace: Keep the target's tensor objects and their memory. Otherwise new ones with
                memory of their own are put in their places.

        Raises:
            ManifestMismatch: They do not fit; nothing was changed.
            ConfigError: The target cannot be a target.
        """
        self._apply(layout, tensors, values, Mode.COPY if inplace else Mode.REPLACE, None)

    def is_quick(self, layout: Layout, values: Mapping[str, Any]) -> bool:
        """Whether :meth:`apply_` would change pointers, and copy next to nothing.

        Never before the first time, which plans.

        Args:
            layout: Names, dtypes and shapes of the weights.
            values: Non-tensor values by name, packed.
        """
        plan = self._plan
        if plan is None or values or self._key != (Mode.FLIP, self._facts(layout, values)):
            return False
        if plan.equal or plan.has_values:
            return False
        if not plan.valid(self.target):
            return False
        copied = sum(tensor.nbytes for tensor, _ in (*plan.small, *plan.large))
        return copied <= _QUICK_NBYTES

    def detach_(self, flat: FlatBuffer) -> None:
        """Give every tensor that is still a view of a buffer memory of its own.

        Also in a target that cannot be one any more, as some module in it is lazy now.

        Args:
            flat: The buffer. Afterwards nothing of the target refers to it.
        """
        self._plan = None
        target = self.target
        if isinstance(target, nn.Module) and not is_tensordict(target):
            tensors = [*target.parameters(), *target.buffers(), *inner_tensors(target)]
        else:
            tensors = find_nested(target, pack=False).tensors
        with torch.inference_mode(False), torch.no_grad():
            for tensor in tensors:
                if is_ordinary(tensor) and tensor.device.type == "cpu" and tensor.numel():
                    if flat.address <= tensor.data_ptr() < flat.address + flat.nbytes:
                        tensor.data = tensor.data.clone()

    # -- planning -------------------------------------------------------------------------

    def _facts(self, layout: Layout, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return all that decides what goes where, apart from the target."""
        if not values:
            return (layout.digest, self.strict)
        return (layout.digest, self.strict, tuple(values), inner_names(values))

    def _resolve(self, layout: Layout, values: Mapping[str, Any], mode: Mode) -> Plan:
        key = (mode, self._facts(layout, values))
        plan = self._plan
        if plan is not None and self._key == key and plan.valid_to_apply(self.target):
            return plan
        plan = make_plan(self.target, layout, values, mode, strict=self.strict)
        # What gets other objects or memory now has to be looked at again by the next apply.
        self._plan, self._key = (None if plan.installs or plan.owns or plan.joins else plan), key
        return plan

    # -- changing -------------------------------------------------------------------------

    def _apply(
        self,
        layout: Layout,
        sources: Sequence[torch.Tensor],
        values: Mapping[str, Any],
        mode: Mode,
        pool: CopyPool | None,
    ) -> None:
        plan = self._resolve(layout, values, mode)
        undo: changes.Undo = []
        with torch.inference_mode(False), torch.no_grad():
            if plan.equal:
                _check_equal(plan, layout, sources)
            if mode is not Mode.FLIP:
                sources = _untangle(plan, sources)
            try:
                self._change(plan, sources, pool, undo)
                if plan.has_values:
                    self._change_values(plan, layout, sources, values)
            except BaseException:  # goes on to the caller, once all is as it was
                self._plan = None
                for step in reversed(undo):
                    step()
                raise

    def _change(
        self,
        plan: Plan,
        sources: Sequence[torch.Tensor],
        pool: CopyPool | None,
        undo: changes.Undo,
    ) -> None:
        # What can fail comes before what cannot, so that the usual case needs no backup. Extra
        # states come last, as set_extra_state() may look at the weights: then all is backed up.
        new = _replacements(plan, sources)
        owned = [(tensor, changes.new_memory(tensor, sources[leaf])) for tensor, leaf in plan.owns]
        if plan.has_values:
            self._back_up(plan, undo)
        for spot, tensor in new:
            for place in spot.places:
                changes.put(self.target, place, tensor, undo)
        for place, tensor in plan.joins:
            changes.put(self.target, place, tensor, undo)
        for tensor, data in owned:
            changes.put_data(tensor, data, undo)
        if plan.small:
            torch._foreach_copy_(
                [tensor for tensor, _ in plan.small], [sources[leaf] for _, leaf in plan.small]
            )
        if plan.large:
            changes.copy_large([(tensor, sources[leaf]) for tensor, leaf in plan.large], pool)
        if plan.flips:
            if plan.pick_views is None:
                plan.pick_views = itemgetter(*plan.flip_leaves, plan.flip_leaves[-1])
            changes.flip(plan.flips, plan.pick_views(sources))

    @staticmethod
    def _back_up(plan: Plan, undo: changes.Undo) -> None:
        handled = {id(tensor) for tensor in plan.flips}
        handled.update(id(tensor) for tensor, _ in plan.owns)
        for tensor in plan.survey.tensors:
            if id(tensor) not in handled and is_ordinary(tensor):
                changes.back_up(tensor, undo)
        for tensor in plan.flips:
            changes.back_up_data(tensor, undo)

    def _change_values(
        self,
        plan: Plan,
        layout: Layout,
        sources: Sequence[torch.Tensor],
        values: Mapping[str, Any],
    ) -> None:
        by_name = {}
        for leaf, source in zip(layout.manifest.leaves, sources, strict=True):
            by_name.update(dict.fromkeys((leaf.name, *leaf.aliases), source))

        def get(name: str) -> Any:
            if name not in values:
                return by_name[name].clone()
            return unpack_value(values[name], lambda inner: by_name[inner].clone())

        steps = [(place, get(name)) for place, name in plan.match.values]
        steps += [(place, sources[leaf].clone()) for place, leaf in plan.match.tensor_values]
        for place, value in steps:
            if plan.survey.tree is not None:
                place.owner.set_extra_state(value)
            else:
                changes.put_value(self.target, place, value)


def _replacements(plan: Plan, sources: Sequence[torch.Tensor]) -> list[tuple[Spot, torch.Tensor]]:
    """What takes the places of tensors that are replaced.

    Whoever puts a module on the meta device mostly makes every parameter anew there, and with
    that unties what was tied; where the sender has one tensor, the module gets one again.
    """
    new: list[tuple[Spot, torch.Tensor]] = []
    first: dict[tuple[Any, ...], torch.Tensor] = {}
    for spot, leaf, view in plan.installs:
        old = spot.tensor
        key = (leaf, type(old), old.dtype, old.requires_grad) if old.is_meta else (id(spot),)
        tensor = first.get(key)
        if tensor is None:
            tensor = first[key] = changes.replacement(old, sources[leaf], view=view)
        new.append((spot, tensor))
    return new


def _untangle(plan: Plan, sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Copy sources that lie in memory of the target, where an earlier copy may write."""
    written = {_storage_of(assignment.spot.tensor) for assignment in plan.match.assignments} - {0}
    return [source.clone() if _storage_of(source) in written else source for source in sources]


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _check_equal(plan: Plan, layout: Layout, sources: Sequence[torch.Tensor]) -> None:
    """Refuse leaves that differ although they are one tensor here."""
    leaves = layout.manifest.leaves
    mismatched = {}
    for assignment in plan.equal:
        dtype = assignment.spot.tensor.dtype
        first = _bits(sources[assignment.leaf], dtype)
        for leaf in assignment.equal:
            if not torch.equal(first, _bits(sources[leaf], dtype)):
                mismatched[leaves[leaf].name] = (
                    f"tied to {leaves[assignment.leaf].name} here, but sent with other values"
                )
    if mismatched:
        raise ManifestMismatch(mismatched=mismatched, hint="Nothing was changed.")


def _bits(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = tensor.detach().resolve_conj().resolve_neg().to(dtype).contiguous().reshape(-1)
    return cast.view(torch.uint8) if cast.numel() else cast
