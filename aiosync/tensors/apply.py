"""Applying: from the bytes of a flat buffer into a model, all of it or none of it.

``tensors.plan`` has the step by which each tensor gets its value. Only plain strided tensors and
parameters can be targets. This module must never import asyncio or a transport.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, product
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from aiosync._log import log
from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.tensors.accelerator import accelerator
from aiosync.tensors.buffer import FlatBuffer, Layout, in_flat_memory
from aiosync.tensors.cache_owners import erase_caches, find_cache_owners
from aiosync.tensors.device_buffer import DeviceBuffer
from aiosync.tensors.in_place import QUICK_NBYTES
from aiosync.tensors.matching import BufferChoice, Strict
from aiosync.tensors.places import Undo, put, store
from aiosync.tensors.plan import Mode, Plan
from aiosync.tensors.target_tensors import is_ordinary
from aiosync.tensors.transient import TransientBuffers
from aiosync.tensors.values import (
    inner_names,
    unpack_value,
)
from aiosync.tensors.views import new_memory
from aiosync.tensors.walk import (
    Place,
    is_freed,
    memory_key,
    walk,
)

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = ["BufferChoice", "LoadTarget", "Loader", "Strict", "Target"]

Loader: TypeAlias = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""Takes the names and tensors of one version. The tensors are views of received memory, which is
valid and unchanged until the loader returns: it copies what it keeps, and writes to no tensor.
Its result is ignored.
"""

_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]


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
        # Names of the missing extra state of which the last warning told.
        self._stateless: list[str] = []
        # True once it was logged that tensors got new memory, which old views do not follow.
        self._told = False
        self.strict = strict
        self.buffers: BufferChoice = buffers
        self._transient = TransientBuffers(type(target).__name__)
        # The last plan, unless it can be used only once, and the facts that it was made for.
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
        # With the mode of the last update the plan may be used again.
        self._resolve(layout, values, self._key[0] if self._key else "copy")

    def find_leaves(self, layout: Layout, values: Mapping[str, Any]) -> dict[int, str]:
        """Return the leaves of the weights that the target takes, with its names for them.

        Args:
            layout: Names, dtypes and shapes of the weights.
            values: Non-tensor values by name, packed.

        Raises:
            ManifestMismatch: The weights do not fit.
        """
        plan = self._resolve(layout, values, "copy")
        return {leaf: spot.name for spot in plan.assigned for leaf in spot.leaves}

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
            and plan.pick_flipped is not None
            and not isinstance(flat, DeviceBuffer)
            and plan.digest == layout.digest
            and not (copy or values)
            and not torch.is_inference_mode_enabled()
            and plan.tensors.are_those_of(self.target)
        ):
            # The usual case: only flips, which cannot fail once the plan is valid.
            _flip(plan.moved, plan.pick_flipped(flat.views(layout)))
            return
        mode: Mode = "copy" if copy else "flip"
        if isinstance(flat, DeviceBuffer):
            mode = "copy there"
            self._check_there(layout, flat, values, copy=copy)
        self.apply_tensors(layout, flat.views(layout), values, mode, flat)

    def _check_there(
        self, layout: Layout, flat: DeviceBuffer, values: Mapping[str, Any], *, copy: bool
    ) -> None:
        """Raise if the target cannot take weights from memory of a device."""
        if not copy:
            raise ConfigError(
                "weights in device memory are copied, and this worker was told to point at "
                "them: construct its scheme with memory='device', too"
            )
        self._resolve(layout, values, "copy there").check_device(flat.device)

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
            flat: The buffer that the sources are views of; ``None`` for other tensors.

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
                sources = _clone_overwritten(plan, sources)
            try:
                self._change(plan, layout, sources, values, undo, flat)
            except BaseException:  # The caller gets the error after the undo.
                self._plan = None
                for step in reversed(undo):
                    _try_undo(step)
                raise
        self._transient.note(plan.transient)

    @property
    def waits(self) -> bool:
        """True if applying waits for an accelerator, to which the target may just have moved."""
        plan, target, has = self._plan, self.target, accelerator().has
        if plan is not None:
            # module.to() moves all parameters, so that the first one tells, and costs little.
            first = plan.first_parameter
            return bool(plan.devices) or (first is not None and has(first))
        try:
            # The methods of a module that list its tensors may be reads, which take updates first.
            return any(map(has, walk(target)[0].tensors))
        except ConfigError:
            # Applying raises it, too, and the trainer gets it.
            return False

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
            and plan.tensors.are_those_of(self.target)
            and plan.copies.nbytes <= QUICK_NBYTES
        )

    def detach_(self, flat: FlatBuffer) -> None:
        """Give every tensor that is still a view of a buffer memory of its own.

        Works also if the target cannot be a target any more, because a module in it is lazy now.

        Args:
            flat: The buffer. Afterwards nothing of the target refers to it, and no view that it
                gives out is in memory of the target, which share_memory() may have moved there.
        """
        self._plan = None
        found, tree = walk(self.target)
        erase_caches(find_cache_owners(self.target, tree))
        # The table of a TensorDictParams may have parameters that a walk does not find. A call of
        # parameters() may be a read of another scheme.
        modules = () if tree is None else tree.modules
        tables = chain.from_iterable(module._parameters.values() for module, _ in modules)
        tensors: list[Any] = [*found.tensors, *tables]
        clones: dict[Any, torch.Tensor] = {}
        with torch.inference_mode(False), torch.no_grad():
            for tensor in tensors:
                if is_ordinary(tensor) and tensor.device.type == "cpu" and tensor.numel():
                    if flat.address <= tensor.data_ptr() < flat.address + flat.nbytes:
                        # Two tensors may be tied by their memory alone.
                        key = memory_key(tensor)
                        if key in clones:
                            tensor.data = clones[key]
                        else:
                            tensor.data = tensor.data.clone()
                            clones[key] = tensor.data
        flat.renew_moved()

    def _log_new_memory(self, plan: Plan, viewed: Sequence[torch.Tensor]) -> None:
        """Log once that viewed tensors got new memory: their views keep the old values."""
        if not self._told:
            self._told = True
            ids = set(map(id, viewed))
            names = ", ".join(spot.name for spot in plan.tensors.spots if id(spot.tensor) in ids)
            text = f"{names}: got new memory, as something views the old, which keeps its values; "
            text += "with apply_copy=True the memory stays, and views see new versions"
            log(logging.INFO, "applied", text, model=None)

    def _facts(self, layout: Layout, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the facts of an update that must be the same for a plan to be used again."""
        return (layout.digest, self.strict, *values, inner_names(values))

    def _resolve(self, layout: Layout, values: Mapping[str, Any], mode: Mode) -> Plan:
        """Return the last plan if it fits this update and the target as it is now, or a new one."""
        key = (mode, *self._facts(layout, values))
        plan = self._plan
        if (
            plan is not None
            and self._key == key
            and plan.copies.are_in_place()
            and plan.tensors.are_those_of(self.target)
        ):
            return plan
        self._plan = None
        plan = Plan(self.target, layout, values, mode, strict=self.strict, buffers=self.buffers)
        if plan.stateless and plan.stateless != self._stateless:
            self._warn_of_missing_state(plan.stateless)
        if not plan.is_single_use:
            self._plan, self._key = plan, key
        return plan

    def _warn_of_missing_state(self, names: list[str]) -> None:
        """Warn that the target keeps its extra state of these names, and note the names."""
        self._stateless = names
        warnings.warn(
            f"the weights lack extra state of the {type(self.target).__name__}, which keeps "
            f"what it has: {', '.join(names)}; send the module itself to send it",
            stacklevel=3,
        )

    def _change(
        self,
        plan: Plan,
        layout: Layout,
        sources: Sequence[torch.Tensor],
        values: Mapping[str, Any],
        undo: Undo,
        flat: FlatBuffer | None,
    ) -> None:
        """Change the target as planned; ``undo`` gets the steps for the caller after an error."""
        # Steps that can fail come before those that cannot, so that the usual case needs no backup.
        # Extra states come last, as set_extra_state() may look at the weights: then all is backed
        # up.
        new = _replacements(plan, sources)
        # Views are counted when the caches have none any more, and the backup has none yet.
        erase_caches(plan.cache_owners)
        viewed = plan.copies.find_viewed()
        memory = _memory_of_moved(plan, sources)
        if plan.values:
            _back_up(plan, undo)
        for place, tensor in new:
            put(self.target, place, tensor, undo)
        fresh = new_memory(viewed) if viewed else {}
        if plan.copies.tensors:
            plan.copies.write(sources, flat, fresh)
        if isinstance(flat, DeviceBuffer):
            # The trainer writes to the buffer afterwards, and the copies in new tensors are only
            # queued so far.
            accelerator().synchronize(flat.device)
        if plan.moved or viewed:
            _flip([*plan.moved, *viewed], [*memory, *(fresh[id(each)] for each in viewed)])
        if viewed:
            plan.copies.note_memory()
            self._log_new_memory(plan, viewed)
        self._set_values(plan, layout, sources, values, undo)

    def _set_values(
        self,
        plan: Plan,
        layout: Layout,
        sources: Sequence[torch.Tensor],
        values: Mapping[str, Any],
        undo: Undo,
    ) -> None:
        """Set the values of the target; an extra state of a module may be a bare tensor."""
        clones: dict[int, torch.Tensor] = {}

        def own(name: str) -> torch.Tensor:
            # A peer may name one tensor often: the clones take no more memory than the update.
            leaf = layout.index[name]
            if leaf not in clones:
                clones[leaf] = sources[leaf].clone()
            return clones[leaf]

        unpacked = [
            unpack_value(values[place.name], own) if place.name in values else own(place.name)
            for place in plan.values
        ]
        for place, value in zip(plan.values, unpacked, strict=True):
            if plan.tensors.tree is not None:
                place.owner.set_extra_state(value)
            else:
                store(self.target, place.owner, place.key, value, undo)


def _flip(tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
    """Give each tensor, as its ``data``, the memory of its view.

    The loop runs in C: no other Python thread, and no signal handler, sees only some of the tensors
    flipped. Autograd is told as of any change in place: some operations keep the parameter itself
    for their backward pass, which would silently use other weights.
    """
    deque(map(_set_data, tensors, views), maxlen=0)
    torch.autograd.graph.increment_version(tensors)


def _back_up(plan: Plan, undo: Undo) -> None:
    """Add steps to ``undo`` that restore all memory and elements of a target.

    Only an update with values that are no tensors needs it: setting an extra state runs code of the
    module, which may raise, or write to any tensor.
    """
    moved = set(map(id, plan.moved))
    for tensor in filter(is_ordinary, plan.tensors.tensors):
        # A moved tensor leaves its old memory, so that the elements there need no copy. Freed ones
        # have nothing to copy.
        if id(tensor) not in moved and not is_freed(tensor):
            # torch refuses to write to an expanded tensor, whose elements are one in memory.
            single = tuple(slice(None if step else 1) for step in tensor.stride())
            elements = tensor.detach()[single]
            restore = _put_back if in_flat_memory(tensor) else torch.Tensor.copy_
            undo.append(partial(restore, elements, elements.clone()))
        undo.append(partial(_set_data, tensor, tensor.data))


def _put_back(elements: torch.Tensor, old: torch.Tensor) -> None:
    """Write the old elements back if they differ: the memory of an update may be read-only."""
    if not torch.equal(_bits(elements, old.dtype), _bits(old, old.dtype)):
        elements.copy_(old)


def _try_undo(step: Callable[[], object]) -> None:
    """Take a step of an undo; log its error, which must not keep the steps after it from it."""
    try:
        step()
    except Exception as exc:  # noqa: BLE001 - the caller raises the error that came first
        text = "a part of the model could not be put back after a refused update"
        log(logging.ERROR, "failed", text, model=None, error=exc)


def _memory_of_moved(plan: Plan, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensor whose memory each moved one gets: its source, or a copy of the source."""
    copies: dict[Any, torch.Tensor] = {}
    return [
        sources[leaf] if is_view else _copy_once(sources[leaf], tensor, copies)
        for tensor, leaf, is_view in plan.moves
    ]


def _copy_once(
    source: torch.Tensor, tensor: torch.Tensor, copies: dict[Any, torch.Tensor]
) -> torch.Tensor:
    """Return a copy of the source that is like a tensor: one for all that are tied by memory."""
    key = memory_key(tensor)
    if key not in copies:
        copies[key] = torch.empty_like(tensor, requires_grad=False).copy_(source)
    return copies[key]


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
            tensor = first[key] = _replacement(old, source, is_view=is_view)
        new += [(place, tensor) for place in spot.places]
    return new


def _replacement(old: Any, source: torch.Tensor, *, is_view: bool) -> torch.Tensor:
    """Return a tensor like the old one that is a view of the source, or else has a copy of it."""
    if not is_view:
        device = source.device if old.is_meta else old.device
        source = torch.empty(old.shape, dtype=old.dtype, device=device).copy_(source)
    new = nn.Parameter(source, requires_grad=False) if type(old) is nn.Parameter else source
    return new.requires_grad_(old.requires_grad)


def _clone_overwritten(plan: Plan, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sources, with clones of those in memory that the plan writes to."""
    written = {_storage_of(spot.tensor) for spot in plan.assigned} - {0}
    return [each.clone() if _storage_of(each) in written else each for each in sources]


def _storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if that has no memory."""
    return tensor.untyped_storage().data_ptr()


def _check_equal(plan: Plan, layout: Layout, sources: Sequence[torch.Tensor]) -> None:
    """Raise if leaves that were sent separately, and are one tensor here, have other values."""
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
    """Return the bytes of a tensor after a cast: in these, a NaN equals itself."""
    cast = tensor.detach().resolve_conj().resolve_neg().to(dtype).contiguous().reshape(-1)
    return cast.view(torch.uint8) if cast.numel() else cast


# -- functions in place of a model ------------------------------------------------------------


_NOT_AT_ONCE = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
_NOT_AT_ONCE_TEXT = (
    "load= must do its work when it is called: define it with `def`, and neither with `async def` "
    "nor with `yield`"
)


class LoadTarget:
    """Hands versions to a function, for engines that load weights in a way of their own.

    Used like a :class:`~aiosync.tensors.Target`.

    Attributes:
        load: The function.
    """

    def __init__(self, load: Loader) -> None:
        """Choose the function; it is not called yet.

        Raises:
            ConfigError: It cannot be called, or is a coroutine or generator function.
        """
        if not callable(load):
            raise ConfigError(f"load must be a function, got {type(load).__name__}")
        if any(each(load) for each in _NOT_AT_ONCE):
            raise ConfigError(_NOT_AT_ONCE_TEXT)
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
            self._run(layout, flat)
            return
        api = accelerator()
        api.synchronize(flat.device)
        try:
            self._run(layout, flat)
        finally:
            # The trainer writes to this memory afterwards.
            api.synchronize(flat.device)

    def _run(self, layout: Layout, flat: FlatBuffer) -> None:
        """Call the function, and raise if it only returned what would do the work."""
        result: Any = self.load(flat.named_views(layout))
        if inspect.isawaitable(result) or inspect.isgenerator(result):
            # A coroutine or generator that never ran has to be closed; a future has no such method.
            getattr(result, "close", bool)()
            raise ConfigError(_NOT_AT_ONCE_TEXT)
