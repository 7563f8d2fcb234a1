"""Applying: from the bytes of a flat buffer into a model, all of it or none of it.

A plan holds the weights that were sent, the tensors of the target, and the step by which each
tensor gets its value; making a plan changes nothing. Only plain strided tensors and parameters can
be targets. This module must never import asyncio or a transport.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from aiosync._log import log
from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.tensors.accelerator import accelerator
from aiosync.tensors.buffer import FlatBuffer, Layout, in_flat_memory
from aiosync.tensors.copying import copy_tensors, is_plain_cpu
from aiosync.tensors.device_buffer import DeviceBuffer
from aiosync.tensors.devices import DeviceCopies, copies_by_device
from aiosync.tensors.flatten import Signature
from aiosync.tensors.matching import BufferChoice, Matching, Spot, Strict
from aiosync.tensors.places import Undo, put, store
from aiosync.tensors.transient import TransientBuffers
from aiosync.tensors.values import (
    inner_names,
    is_plain_tensordict,
    is_tensor_collection,
    is_tensordict_params,
    unpack_value,
)
from aiosync.tensors.views import Viewed, new_memory
from aiosync.tensors.walk import (
    PLAIN,
    Found,
    ModuleTree,
    Place,
    find_nested,
    memory_key,
    walk,
)

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = ["BufferChoice", "LoadTarget", "Loader", "Strict", "Target"]

Mode: TypeAlias = Literal["flip", "copy", "copy there", "replace"]
"""The way in which tensors get their new values.

``"flip"``: parameters become views of the buffer, where possible; the rest is copied in place.
``"copy"``: everything is copied in place, with ``"copy there"`` from the memory of the device that
has the target. ``"replace"``: new objects with memory of their own take
the places of the old ones.
"""

Loader: TypeAlias = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""Takes the names and tensors of one version. The tensors are views of received memory, which is
valid and unchanged until the loader returns: it copies what it keeps, and writes to no tensor.
Its result is ignored.
"""

_QUICK_NBYTES = 2**18
_SMALL_NUMEL = 2**15  # for more, torch shares a copy out to threads, which is slower
_is_cpu = attrgetter("is_cpu")
_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class Plan:
    """The steps by which weights get into a target as it is now; ints are leaf indices.

    Attributes:
        found: All tensors of the target with their places, and the places of its values.
        tree: The walk of a module; ``None`` for other targets.
        spots: The tensors of the target, each object once.
        assigned: The spots that get weights.
        equal: The spots that get several leaves, which were sent separately.
        values: Places that get values; the values of modules may be bare tensors.
        stateless: Extra state that was not sent, and stays.
        transient: Buffers that were sent and are not persistent, by name; without those that
            ``buffers`` leaves out.
        moves: Tensors that get other memory, which are ``moved``: with the flag that of the leaf,
            without it memory of their own.
        puts: Spots whose tensors are replaced by others; the flag means the same.
        copies: Tensors that are copied in place: these are ``copied``, and ``addresses`` are
            theirs. If they are few and small, they are ``quick`` to copy. From a flat buffer of the
            host those ``on_devices`` are copied together, by device, and those ``on_host`` as
            everywhere.
        devices: The accelerators of the tensors that get weights.
        keeps_views: Tensors on the CPU get new memory if something else views theirs.
        viewed: Finds these tensors; ``None`` if there can be none.
        once: The target is another one afterwards, for which there is no plan yet.
        pick: Picks, of tensors in the order of the leaves, those that ``moved`` become views of;
            ``None`` unless that is all there is to change, and cannot fail.
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
        self.found: Found
        self.tree: ModuleTree | None
        self.found, self.tree = walk(target)
        by_object: dict[int, Spot] = {}
        for place in self.found.places:
            by_object.setdefault(id(place.tensor), Spot(place.tensor, [])).places.append(place)
        self.spots: list[Spot] = list(by_object.values())
        self.tensors: list[torch.Tensor] = [spot.tensor for spot in self.spots]
        self._refuse_kinds()
        self._signature = Signature(self.tensors)
        matched = Matching(
            self.found,
            self.spots,
            layout,
            values,
            in_module=self.tree is not None,
            strict=strict,
            buffers=buffers,
        )
        self.values: list[Place] = matched.values
        self.stateless: list[str] = matched.stateless
        self.transient: dict[str, torch.Tensor] = matched.transient
        self.assigned: list[Spot] = [spot for spot in self.spots if spot.leaves]
        self.equal: list[Spot] = [spot for spot in self.assigned if len(spot.leaves) > 1]
        self._refuse_overlapping()
        self.moves: list[tuple[torch.Tensor, int, bool]] = []
        self.puts: list[tuple[Spot, int, bool]] = []
        self.copies: list[tuple[torch.Tensor, int]] = []
        self._sort(layout, mode)
        has = accelerator().has
        assigned = [spot.tensor for spot in self.assigned]
        self.devices: set[torch.device] = {each.device for each in assigned if has(each)}
        self.on_devices: list[tuple[DeviceCopies, dict[int, torch.Tensor]]] = []
        self.on_host: list[tuple[torch.Tensor, int]] = self.copies
        if self.devices and mode != "copy there":
            self._sort_copies(layout)
        self.moved: list[torch.Tensor] = [tensor for tensor, _, _ in self.moves]
        self.copied: list[torch.Tensor] = [tensor for tensor, _ in self.copies]
        self.quick: bool = (
            mode != "copy there"
            and all(tensor.is_cpu and tensor.numel() < _SMALL_NUMEL for tensor in self.copied)
            and sum(tensor.nbytes for tensor in self.copied) <= _QUICK_NBYTES
        )
        self.keeps_views: bool = mode == "flip" and self.tree is not None
        self.note_memory()
        self.once: bool = bool(self.puts) or not all(is_view for _, _, is_view in self.moves)
        self.digest: bytes = layout.digest
        self.pick: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] | None = None
        if self.moves and not (self.once or self.values or self.equal or self.copies):
            leaves = [leaf for _, leaf, _ in self.moves]
            self.pick = itemgetter(*leaves, leaves[-1])  # of one index it gives no sequence

    def note_memory(self) -> None:
        """Note the addresses of the tensors that are copied in place."""
        self.addresses: list[int] = list(map(torch.Tensor.data_ptr, self.copied))
        own = [each for each in self.copied if self.keeps_views and each.is_cpu and each.numel()]
        self.viewed: Viewed | None = Viewed(own) if own else None

    def _refuse_kinds(self) -> None:
        """Raise if a tensor, or its container, is of a kind that cannot get weights."""
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
        """Return True if the target is still as it was for the plan. Cheap for a module."""
        tree = self.tree
        same = tree.unchanged() if tree is not None else find_nested(target).same_as(self.found)
        return same and self._signature.same(self.tensors)

    def _refuse_overlapping(self) -> None:
        """Raise if a tensor that gets weights shares memory with one that gets other weights."""
        extents = []
        for spot in self.spots:
            tensor = spot.tensor
            if is_ordinary(tensor) and tensor.numel():
                steps = zip(tensor.shape, tensor.stride(), strict=True)
                nbytes = (sum((n - 1) * step for n, step in steps) + 1) * tensor.element_size()
                start = (str(tensor.device), tensor.data_ptr())
                content = (spot.leaves[:1], memory_key(tensor))
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
        """Decide the step by which each tensor gets its value."""
        views: dict[int, Any] = {}  # leaf -> the tensor that becomes a view of it
        for spot in self.assigned:
            tensor, leaf = spot.tensor, spot.leaves[0]
            shared = mode == "flip" and _is_shared(tensor)
            memory = memory_key(tensor)
            split = any(  # only one table of a TensorDictParams has it
                is_tensordict_params(owner)
                and tensor is not owner._parameters.get(key, owner._buffers.get(key))
                for _, owner, key, *_ in spot.places
            )
            other = tensor.is_meta or mode == "replace" or split
            is_view = (
                mode == "flip"
                and type(tensor) is nn.Parameter
                and tensor.dtype is layout.dtypes[leaf]
                and (other or (is_plain_cpu(tensor) and (self.tree is not None or not shared)))
                # If a leaf goes to two tensors that are not tied here, the second one copies.
                and views.setdefault(leaf, memory) == memory
            )
            if other:
                self.puts.append((spot, leaf, is_view))
            elif is_view or (shared and self.tree is not None) or in_flat_memory(tensor):
                self.moves.append((tensor, leaf, is_view))  # also if it shares its memory
            else:
                self.copies.append((tensor, leaf))

    def _sort_copies(self, layout: Layout) -> None:
        """Allocate what copies to accelerators need: after the first change, nothing may fail."""
        first: dict[int, torch.Tensor] = {}
        for tensor, leaf in self.copies:
            first.setdefault(leaf, tensor)
        self.on_devices = [*copies_by_device(layout, first.items())]
        there = {id(each) for _, tensors in self.on_devices for each in tensors.values()}
        self.on_host = [copy for copy in self.copies if id(copy[0]) not in there]


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is a plain strided tensor or parameter with memory to write to."""
    return (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta or tensor.is_inference())
    )


def _is_shared(tensor: Any) -> bool:
    """Return True if a CPU tensor is in memory that torch shares between processes."""
    return tensor.is_cpu and bool(tensor.is_shared())


class Target:
    """An object that weights are applied to.

    The tensors are resolved at every call: the module may be moved, cast, or have parameters and
    submodules replaced between two calls. Not thread-safe: the caller holds the lock that readers
    hold, too.
    """

    def __init__(
        self,
        target: nn.Module | TensorDictBase | dict[str, Any],
        *,
        strict: Strict = True,
        buffers: BufferChoice = "all",
    ) -> None:
        """Choose the target; it is not looked at yet.

        Args:
            target: A module, a TensorDict, or a dict of tensors, nested or with dotted keys.
            strict: Weights must have exactly the target's names and dtypes, except for the buffers
                of a module: they are rounded if the target has them in less precision, and either
                side may lack those that are not persistent. Otherwise names that only one side has
                are left alone, and floating-point values are cast; shapes must be the same in any
                case. ``"warn"`` warns once if extra state is missing, and keeps the target's.
            buffers: ``"persistent"`` leaves buffers that are not persistent alone, unless they are
                on the meta device. ``"all"`` warns once of those that other code writes to, or
                replaces. Buffers of another shape are left alone in any case, as are inference
                tensors.
        """
        self.target = target
        self._stateless: list[str] = []  # extra state of which was warned
        self._told = False  # it was said that views do not follow their buffers
        self.strict = strict
        self.buffers: BufferChoice = buffers
        self._transient = TransientBuffers(type(target).__name__)
        self._plan: Plan | None = None
        self._key: tuple[Any, ...] = ()

    def check(self, layout: Layout, values: Mapping[str, Any]) -> None:
        """Raise unless the weights fit the target as it is now. Changes nothing.

        Tied parameters that were sent as separate tensors are compared by :meth:`apply_`.

        Args:
            layout: Names, dtypes and shapes of the weights.
            values: Non-tensor values by name, packed.

        Raises:
            ManifestMismatch: The weights do not fit; all names are listed.
            ConfigError: The target cannot be a target.
        """
        self._resolve(layout, values, self._key[0] if self._key else "copy")

    def apply_(
        self,
        layout: Layout,
        flat: FlatBuffer,
        values: Mapping[str, Any],
        *,
        copy: bool,
    ) -> None:
        """Put the weights into the target. All of them, or none if something raises.

        Parameter objects stay the same, so that optimizers and references keep working; only those
        on the meta device are replaced. Gradients and optimizer state are untouched.

        Args:
            layout: Layout of the weights.
            flat: Buffer that holds them.
            values: Non-tensor values by name, packed.
            copy: ``False`` flips plain contiguous CPU parameters of the same dtype to views of the
                buffer: it must not be written to while :meth:`FlatBuffer.exclusive` is false.
                Buffers, and parameters of any other kind, are copied in place; but those of a
                module on the CPU get new memory if something else views theirs, or torch shares it
                between processes. ``True`` copies everything in place.

        Raises:
            ManifestMismatch: The weights do not fit, or a tensor cannot be a target.
            ConfigError: The target cannot be a target, or the buffer is too small.
            Exception: Whatever ``set_extra_state()`` raised; every tensor has its old value again,
                and extra states are as ``set_extra_state()`` left them.
        """
        plan = self._plan
        if (
            plan is not None
            and plan.pick is not None
            and not isinstance(flat, DeviceBuffer)
            and plan.digest == layout.digest
            and not (copy or values)
            and not torch.is_inference_mode_enabled()
            and plan.is_valid(self.target)
        ):
            # The usual case: only flips, which cannot fail once the plan is valid.
            _flip(plan.moved, plan.pick(flat.views(layout)))
            return
        mode: Mode = "copy" if copy else "flip"
        if isinstance(flat, DeviceBuffer):
            if not copy:
                raise ConfigError(
                    "weights in device memory are copied, and this worker was told to point at "
                    "them: construct its scheme with memory='device', too"
                )
            mode = "copy there"
            plan = self._resolve(layout, values, mode)
            devices = plan.devices
            # Tensors on the meta device get memory where the weights are.
            new = any(spot.tensor.is_meta for spot, *_ in plan.puts)
            if devices != {flat.device} and (devices or not new):
                where = ", ".join(map(str, devices)) or "the CPU"
                raise ConfigError(
                    f"the weights are on {flat.device}, and this worker's model is on {where}: use "
                    "memory='host'"
                )
        self.apply_tensors(layout, flat.views(layout), values, mode, flat)

    def apply_tensors(
        self,
        layout: Layout,
        sources: Sequence[torch.Tensor],
        values: Mapping[str, Any],
        mode: Mode = "copy",
        flat: FlatBuffer | None = None,
    ) -> None:
        """Put weights into the target like :meth:`apply_`, from tensors anywhere.

        Args:
            layout: Layout of the tensors.
            sources: One for each leaf, in order. The target shares their memory only with
                ``"flip"``.
            values: Non-tensor values by name, packed.
            mode: The way in which tensors get their values.
            flat: The buffer that the sources are views of, if they are.

        Raises:
            ManifestMismatch: The weights do not fit; nothing was changed.
            ConfigError: The target cannot be a target.
        """
        plan = self._resolve(layout, values, mode)
        self._transient.check(plan.transient)
        undo: Undo = []
        with torch.inference_mode(False), torch.no_grad():
            _check_equal(plan, layout, sources)
            # A copy may write to memory that a later one reads, but none writes to a flat buffer.
            if mode != "flip" and flat is None:
                written = {_storage_of(spot.tensor) for spot in plan.assigned} - {0}
                sources = [s.clone() if _storage_of(s) in written else s for s in sources]
            try:
                self._change(plan, layout, sources, values, undo, flat)
            except BaseException:  # the caller gets it after the undo
                self._plan = None
                for step in reversed(undo):
                    step()
                raise
        self._transient.note(plan.transient)

    @property
    def waits(self) -> bool:
        """True if applying waits for an accelerator, as far as is known; cheap."""
        plan, target = self._plan, self.target
        if plan is not None:
            return bool(plan.devices)
        tensors = target.parameters() if isinstance(target, nn.Module) else ()
        return any(map(accelerator().has, tensors))

    def is_quick(self, layout: Layout, values: Mapping[str, Any]) -> bool:
        """Return True if :meth:`apply_` would flip pointers, copy next to nothing, and not wait.

        Never before the first :meth:`apply_`, which makes the plan.

        Args:
            layout: Names, dtypes and shapes of the weights.
            values: Non-tensor values by name, packed.
        """
        plan = self._plan
        return (
            plan is not None
            and self._key == ("flip", *self._facts(layout, values))
            and not (values or plan.values or plan.equal or plan.devices)
            and plan.is_valid(self.target)
            and sum(tensor.nbytes for tensor in plan.copied) <= _QUICK_NBYTES
        )

    def detach_(self, flat: FlatBuffer) -> None:
        """Give every tensor that is still a view of a buffer memory of its own.

        Works also if the target cannot be a target any more, because a module in it is lazy now.

        Args:
            flat: The buffer. Afterwards nothing of the target refers to it.
        """
        self._plan = None
        found, tree = walk(self.target)
        tensors = [*found.tensors, *(tree.root.parameters() if tree is not None else ())]
        with torch.inference_mode(False), torch.no_grad():
            for tensor in tensors:
                if is_ordinary(tensor) and tensor.device.type == "cpu" and tensor.numel():
                    if flat.address <= tensor.data_ptr() < flat.address + flat.nbytes:
                        tensor.data = tensor.data.clone()

    def _tell_of(self, plan: Plan, viewed: Sequence[torch.Tensor]) -> None:
        """Log once that views of buffers do not follow them."""
        if not self._told:
            self._told = True
            ids = set(map(id, viewed))
            names = ", ".join(spot.name for spot in plan.spots if id(spot.tensor) in ids)
            text = f"{names}: got new memory, as something views the old, which keeps its values; "
            text += "with apply_copy=True the memory stays, and views see new versions"
            log(logging.INFO, "applied", text, model=None)

    def _facts(self, layout: Layout, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the facts that decide what goes where, apart from the target."""
        return (layout.digest, self.strict, *values, inner_names(values))

    def _resolve(self, layout: Layout, values: Mapping[str, Any], mode: Mode) -> Plan:
        key = (mode, *self._facts(layout, values))
        plan = self._plan
        if (
            plan is not None
            and self._key == key
            and list(map(torch.Tensor.data_ptr, plan.copied)) == plan.addresses
            and plan.is_valid(self.target)
        ):
            return plan
        self._plan = None
        plan = Plan(self.target, layout, values, mode, strict=self.strict, buffers=self.buffers)
        if plan.stateless and plan.stateless != self._stateless:
            self._stateless = plan.stateless
            warnings.warn(
                f"the weights lack extra state of the {type(self.target).__name__}, which keeps "
                f"what it has: {', '.join(plan.stateless)}; send the module itself to send it",
                stacklevel=2,
            )
        if not plan.once:
            self._plan, self._key = plan, key
        return plan

    def _change(
        self,
        plan: Plan,
        layout: Layout,
        sources: Sequence[torch.Tensor],
        values: Mapping[str, Any],
        undo: Undo,
        flat: FlatBuffer | None,
    ) -> None:
        # Steps that can fail come before those that cannot, so that the usual case needs no backup.
        # Extra states come last, as set_extra_state() may look at the weights: then all is backed
        # up.
        new = _replacements(plan, sources)
        # They are found before a backup views the tensors, too.
        viewed = [] if plan.viewed is None else plan.viewed.find()
        memory = [
            sources[leaf]
            if is_view
            else torch.empty_like(tensor, requires_grad=False).copy_(sources[leaf])
            for tensor, leaf, is_view in plan.moves
        ]
        if plan.values:
            _back_up(plan, undo)
        for place, tensor in new:
            put(self.target, place, tensor, undo)
        fresh, moved = new_memory(viewed) if viewed else {}, plan.moved
        if viewed:
            moved, memory = [*moved, *viewed], [*memory, *(fresh[id(each)] for each in viewed)]
        if plan.copies:
            alone = plan.copies if flat is None else plan.on_host
            given = [sources[leaf] for _, leaf in alone]
            targets = [fresh.get(id(tensor), tensor) for tensor, _ in alone]
            if given and plan.quick and all(map(_is_cpu, given)):
                torch._foreach_copy_(targets, given)
            else:
                copy_tensors(zip(targets, given, strict=True))
            if flat is not None:
                for copies, tensors in plan.on_devices:
                    copies.scatter(flat, tensors)
            torch.autograd.graph.increment_version(plan.copied)
        if isinstance(flat, DeviceBuffer):
            accelerator().synchronize(flat.device)  # new tensors were copied on the device, too
        if moved:
            _flip(moved, memory)
        if viewed:
            plan.note_memory()
            self._tell_of(plan, viewed)

        def own(name: str) -> torch.Tensor:
            return sources[layout.index[name]].clone()

        unpacked = [
            unpack_value(values[place.name], own) if place.name in values else own(place.name)
            for place in plan.values
        ]
        for place, value in zip(plan.values, unpacked, strict=True):
            if plan.tree is not None:
                place.owner.set_extra_state(value)
            else:
                store(self.target, place.owner, place.key, value)


def _flip(tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
    """Give each tensor the memory of its view.

    The loop runs in C: no other Python thread, and no signal handler, sees only some of the tensors
    flipped. Autograd is told as of any change in place: some operations keep the parameter itself
    for their backward pass, which would silently use other weights.
    """
    deque(map(_set_data, tensors, views), maxlen=0)
    torch.autograd.graph.increment_version(tensors)


def _back_up(plan: Plan, undo: Undo) -> None:
    """Add steps to ``undo`` that restore all memory and elements of a target."""
    moved = set(map(id, plan.moved))
    for tensor in filter(is_ordinary, plan.tensors):
        if id(tensor) not in moved:
            undo.append(partial(tensor.copy_, tensor.detach().clone()))
        undo.append(partial(_set_data, tensor, tensor.data))


def _replacements(plan: Plan, sources: Sequence[torch.Tensor]) -> list[tuple[Place, torch.Tensor]]:
    """Return the tensors that replace others, each with its place.

    Code that puts a module on the meta device mostly makes every parameter anew there, and so
    unties tied ones; if the sender has one tensor, the module gets one again.
    """
    new: list[tuple[Place, torch.Tensor]] = []
    first: dict[tuple[Any, ...], torch.Tensor] = {}
    for spot, leaf, is_view in plan.puts:
        old, source = spot.tensor, sources[leaf]
        key = (leaf, type(old), old.dtype, old.requires_grad) if old.is_meta else (id(spot),)
        tensor = first.get(key)
        if tensor is None:
            device = source.device if old.is_meta else old.device
            if not is_view:
                source = torch.empty(old.shape, dtype=old.dtype, device=device).copy_(source)
            is_param = type(old) is nn.Parameter
            tensor = nn.Parameter(source, requires_grad=False) if is_param else source
            first[key] = tensor.requires_grad_(old.requires_grad)
        new += [(place, tensor) for place in spot.places]
    return new


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _check_equal(plan: Plan, layout: Layout, sources: Sequence[torch.Tensor]) -> None:
    """Refuse leaves that differ although they are one tensor here."""
    leaves = layout.manifest.leaves
    mismatched = {
        leaves[other].name: f"tied to {leaves[first].name} here, but sent with other values"
        for spot in plan.equal
        for first, other in product(spot.leaves[:1], spot.leaves[1:])
        if not torch.equal(
            _bits(sources[first], spot.tensor.dtype), _bits(sources[other], spot.tensor.dtype)
        )
    }
    if mismatched:
        raise ManifestMismatch(mismatched=mismatched, hint="Nothing was changed.")


def _bits(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = tensor.detach().resolve_conj().resolve_neg().to(dtype).contiguous().reshape(-1)
    return cast.view(torch.uint8) if cast.numel() else cast


# -- functions in place of a model ------------------------------------------------------------


class LoadTarget:
    """Hands versions to a function, for engines that load weights in a way of their own.

    Used like a :class:`~aiosync.tensors.Target`.

    Attributes:
        load: The function.
    """

    def __init__(self, load: Loader) -> None:
        """Choose the function; it is not called yet.

        Raises:
            ConfigError: It cannot be called.
        """
        if not callable(load):
            raise ConfigError(f"load must be a function, got {type(load).__name__}")
        self.load = load

    def check(self, layout: Layout, values: Mapping[str, Any]) -> None:
        """Raise unless the weights can be handed over. The function decides whether they fit.

        Raises:
            ConfigError: There are values that are not tensors.
        """
        if values:
            raise ConfigError(
                "a load function takes tensors, and the update also has other values: "
                f"{', '.join(sorted(values))}. Send without them, for example with a strategy or "
                "a dict of tensors"
            )

    def apply_(
        self,
        layout: Layout,
        flat: FlatBuffer,
        values: Mapping[str, Any],
        *,
        copy: bool,
    ) -> None:
        """Call the function with the weights.

        Args:
            layout: Layout of the weights.
            flat: Buffer that holds them.
            values: Non-tensor values by name; there must be none.
            copy: Not used: the function copies.

        Raises:
            ConfigError: There are values that are not tensors.
            Exception: Whatever the function raised. The function has to undo its changes itself.
        """
        self.check(layout, values)
        if not isinstance(flat, DeviceBuffer):
            self.load(flat.named_views(layout))
            return
        api = accelerator()
        api.synchronize(flat.device)
        try:
            self.load(flat.named_views(layout))
        finally:
            api.synchronize(flat.device)  # the trainer writes to this memory afterwards
