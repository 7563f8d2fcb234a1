"""Snapshots: from a live model to the bytes of a flat buffer, planned once and reused.

This module must never import asyncio or a transport.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any

import torch

from aiosync._log import log
from aiosync.errors import ConfigError
from aiosync.tensors.accelerator import accelerator
from aiosync.tensors.buffer import Layout
from aiosync.tensors.copying import (
    LARGE_NBYTES,
    CopyPool,
    as_bytes,
    copy_blocks,
    copy_tensors,
    is_plain_cpu,
)
from aiosync.tensors.device_buffer import DeviceBuffer
from aiosync.tensors.devices import DeviceCopies, copies_by_device
from aiosync.tensors.mapping import DtypeRule, Dtypes
from aiosync.tensors.values import EXTRA_STATE, inner_names
from aiosync.tensors.walk import (
    ExtractAs,
    Found,
    Leaf,
    Leaves,
    ModuleTree,
    Source,
    group_tied,
    is_freed,
    memory_key,
    outline,
    refuse_valueless,
    to_leaves,
    walk,
)
from aiosync.wire import ALIGNMENT, DEFAULT_LIMITS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aiosync.device_memory import Driver
    from aiosync.tensors.buffer import FlatBuffer
    from aiosync.types import Limits

__all__ = [
    "Flattener",
    "LiveBytes",
    "Prepared",
    "Signature",
]

# This compares type, dtype, shape, strides and device in C++: 0.1 us a tensor. Private API.
try:
    from torch._C._dynamo.guards import TensorGuards as _new_guards
except ImportError:  # pragma: no cover - depends on the version of torch
    _new_guards = None  # type: ignore[assignment,misc]

# Bytes that are copied with the GIL held, at a time.
_BATCH_NBYTES = 2 * 2**20
_PADDING = memoryview(bytes(ALIGNMENT))
_properties = attrgetter("dtype", "device", "layout", "shape")


class Signature:
    """The properties of some tensors other than their addresses; to be compared later.

    Type, dtype, device, shape and strides of each, and its flags as a conjugate or negative view,
    whose memory holds other numbers.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._facts = _facts(tensors)
        self._guards = _guards(tensors)

    def same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if other (or the same) tensor objects still have these properties. Cheap.

        Args:
            tensors: The objects that this was made of, or others. None of the others may be nested:
                torch would end the process.
        """
        if self._guards is not None and self._guards.check(*tensors):
            return True
        # The guards also look at properties that do not matter here (requires_grad, autocast).
        if _facts(tensors) != self._facts:
            return False
        self._guards = _guards(tensors)
        return True


def _facts(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the properties of each tensor; of one without strides, which object it is."""
    # A conjugate view differs from its base only in a flag, not even in its address.
    return [
        (type(t), _properties(t), t.stride(), t.is_conj(), t.is_neg())
        if t.layout is torch.strided and not t.is_nested
        else (t.layout, id(t))
        for t in tensors
    ]


def _guards(tensors: Sequence[torch.Tensor]) -> Any:
    """Return torch's quick comparison with tensors like these; ``None`` if it has none for them."""
    if _new_guards is None or any(t.is_nested or t.layout is not torch.strided for t in tensors):
        # torch ends the process for some tensors without strides.
        return None
    try:
        return _new_guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except (RuntimeError, TypeError, ValueError):  # pragma: no cover - private API, may change
        return None


@dataclass(frozen=True, slots=True)
class Prepared:
    """The tensors that :meth:`Flattener.prepare` found, ready to be copied.

    Attributes:
        plan: The plan of the copies.
        layout: Layout of the flat buffer. The same object for as long as nothing changes.
        tensors: The live tensors, one for each leaf, in order.
        values: Non-tensor values by dotted name, of plain msgpack types.
        signature: Properties of the tensors other than their addresses. The same object as long as
            ``layout`` is. ``None`` if some have another dtype than the layout says.
    """

    plan: _Plan
    layout: Layout
    tensors: Sequence[torch.Tensor]
    values: dict[str, Any]
    signature: Signature | None

    @property
    def waits(self) -> bool:
        """True if copying waits for an accelerator, whatever the size."""
        return bool(self.plan.devices)

    @property
    def fits_device(self) -> bool:
        """True if the copy may be on a device: values and extra state are read on the CPU."""
        return not (self.values or self.plan.has_extra_state)

    def driver(self) -> Driver:
        """Return the driver of the device that has the weights, and is to have their copy.

        Raises:
            ConfigError: There is not exactly one device, or it cannot share memory.
        """
        devices = self.plan.devices
        if len(devices) != 1:
            where = ", ".join(map(str, devices)) or "the CPU"
            raise ConfigError(
                f"memory='device' sends weights of one GPU, and these are on {where}: use "
                "memory='host'"
            )
        [device] = devices
        return accelerator().driver(device)

    def copy_into(self, flat: FlatBuffer, *, pool: CopyPool | None = None) -> None:
        """Copy every tensor to its place in a flat buffer.

        Does not run torch kernels for plain tensors on the CPU, so that it never waits for torch's
        thread pool. Padding between tensors is zeroed once for each buffer and layout.

        Args:
            flat: At least ``layout.nbytes`` long, writable, and exclusive.
            pool: Threads that share the copies of large tensors.

        Raises:
            ConfigError: The buffer is too small, or the storage of a tensor was freed.
        """
        layout, plan, program = self.layout, self.plan, self.plan.program
        addresses = list(map(torch.Tensor.data_ptr, self.tensors))
        is_new = program is None or program.addresses != addresses
        if is_new and not all(addresses):
            # The plan may be older than the loss of the memory. Tensors without elements have no
            # address either.
            leaves = zip(layout.manifest.leaves, self.tensors, addresses, strict=True)
            refuse_valueless((leaf.name, tensor) for leaf, tensor, at in leaves if not at)
        if flat.padded_for != layout.digest:
            # A device buffer is never padded, so that each copy into one ends here.
            if isinstance(flat, DeviceBuffer):
                copy_tensors(zip(flat.views(layout), self.tensors, strict=True), pool)
                return
            flat.zero_padding(layout)
        if plan.devices:
            for copies in plan.on_devices:
                copies.gather(self.tensors, flat)
        if not plan.on_host:
            return
        if is_new:
            program = self._prepare_program(addresses)
        if program is None:
            views = flat.views(layout)
            copy_tensors(((views[at], self.tensors[at]) for at in plan.on_host), pool)
            return
        program.run(self.tensors, flat, pool)

    def _prepare_program(self, addresses: list[int]) -> _Program | None:
        """Prepare the copies of tensors at these addresses; ``None`` if that is not worth it yet.

        Preparing a program pays only for tensors that stay where they are. The first one is made at
        once; after that, addresses have to be seen twice in a row.
        """
        plan = self.plan
        has_moved = plan.program is not None and plan.addresses != addresses
        plan.addresses = addresses
        if has_moved or self.signature is None:
            # The tensors may never be seen again, or are cast on the way.
            return None
        plan.program = _Program(self, addresses)
        return plan.program


class _Plan:
    """The layout of one source, and the conditions under which it is still right.

    Attributes:
        layout: Layout of the flat buffer.
        names: The name, kind and persistence of each place.
        firsts: For each leaf, the index of its first place.
        tied: Indices of the places of each tied tensor.
        in_all_places: The tensors of the last source, by place.
        tensors: The tensors of the last source, by leaf.
        signature: Properties of the tensors.
        on_host: Indices of the leaves on the CPU.
        devices: The accelerators that have the other leaves.
        has_extra_state: True if a leaf belongs to an extra state.
        is_cast: True if the layout has another dtype for some tensor.
        outline: The keys of a container that needs no walk; ``None`` for other sources.
        program: The copies of tensors that stay where they are; ``None`` before the first ones.
        addresses: Addresses of the tensors that were copied last.
    """

    def __init__(self, found: Found, layout: Layout) -> None:
        self.layout: Layout = layout
        self.names: list[tuple[str, str, bool]] = _names(found)
        tensors = found.tensors
        groups = group_tied(tensors)
        self.firsts: list[int] = [group[0] for group in groups]
        self.tied: list[list[int]] = [group for group in groups if len(group) > 1]
        self.in_all_places: Sequence[torch.Tensor] = tensors
        self.tensors: list[torch.Tensor] = [tensors[first] for first in self.firsts]
        self.signature: Signature = Signature(self.tensors)
        has = accelerator().has
        self.on_host: list[int] = [at for at, each in enumerate(self.tensors) if not has(each)]
        self.devices: set[torch.device] = {each.device for each in self.tensors if has(each)}
        self._on_devices: list[DeviceCopies] | None = None
        names = (leaf.name for leaf in layout.manifest.leaves)
        self.has_extra_state: bool = any(EXTRA_STATE in name.split(".") for name in names)
        self.is_cast: bool = [each.dtype for each in self.tensors] != [*layout.dtypes]
        self.outline: list[object] | None = None
        self.program: _Program | None = None
        self.addresses: list[int] = []

    @property
    def on_devices(self) -> list[DeviceCopies]:
        """The copies from devices to the host; made at the first use, as they take memory there."""
        if self._on_devices is None:
            found = copies_by_device(self.layout, enumerate(self.tensors)) if self.devices else ()
            self._on_devices = [copies for copies, _ in found]
        return self._on_devices

    def prepared(self, tensors: Sequence[torch.Tensor], values: dict[str, Any]) -> Prepared:
        """Take over the tensors of a source that fits, and return them ready to be copied."""
        self.in_all_places, self.tensors = tensors, [tensors[first] for first in self.firsts]
        signature = None if self.is_cast else self.signature
        return Prepared(self, self.layout, self.tensors, values, signature)

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if other tensors of the same names have the same shapes, dtypes and ties."""
        unique = [tensors[first] for first in self.firsts]
        # The signature takes no nested tensors but its own.
        if not all(map(is_, unique, self.tensors)) and any(each.is_nested for each in unique):
            return False
        return self.signature.same(unique) and (not self.tied or self.still_tied(tensors))

    def still_tied(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if tensors that were the same memory still are."""
        return all(
            tensors[other] is tensors[first]
            or memory_key(tensors[other]) == memory_key(tensors[first])
            for first, *others in self.tied
            for other in others
        )


def _names(found: Found) -> list[tuple[str, str, bool]]:
    """Return the name, kind and persistence of each place, on which a plan depends."""
    return [(place.name, place.kind, place.persistent) for place in found.places]


class Flattener:
    """Turns a source into a layout, and into the copies of its tensors into flat buffers.

    Keeps the plan of the last source, so that a second snapshot of the same source costs a
    comparison. It holds references to that source's tensors until another source is prepared.

    With a dtype, layouts and buffers have other floating-point dtypes than the source, which is
    only read. Integers, complex numbers, values that are not tensors, and the tensors inside values
    and extra states keep their dtypes. A single dtype does not round two kinds of buffers of a
    module either: those that are not persistent, which are computed, not learned, so that a model
    in another dtype may still have them in this one; and those in float64, which are statistics.

    Args:
        extract_as: The weights of a module that are sent; see :func:`~aiosync.tensors.collect`.
        limits: Bounds that the receivers are expected to have.
        dtype: The result of :func:`~aiosync.tensors.check_dtypes`; or the rule that was made of
            it, which flatteners may share: a pattern has to match a weight of one of them.
    """

    def __init__(
        self,
        extract_as: ExtractAs = "tensordict",
        limits: Limits = DEFAULT_LIMITS,
        dtype: Dtypes | DtypeRule | None = None,
    ) -> None:
        self.extract_as: ExtractAs = extract_as
        self._limits = limits
        if dtype is not None and not isinstance(dtype, DtypeRule):
            dtype = DtypeRule(dtype)
        self._rule: DtypeRule | None = dtype
        self._tree: ModuleTree | None = None
        self._plan: _Plan | None = None
        # Buffers of which it was logged that they are not rounded.
        self._told: list[str] = []
        # The last result for the tree, if it may be returned again: values are read anew each time.
        self._steady: Prepared | None = None

    def prepare(self, source: Source) -> Prepared:
        """Find the weights to send; nothing is copied yet.

        The tensors are resolved now: parameters that were re-created, moved, cast or replaced since
        the last call are seen.

        Args:
            source: A module, a TensorDict or a mapping; see :func:`~aiosync.tensors.collect`.

        Raises:
            ConfigError: Something in the source cannot travel, or a pattern for dtypes fits no
                name.
        """
        tree, steady = self._tree, self._steady
        # The tree notices tensors that were replaced, the signature those that changed in place.
        if tree is None or tree.source is not source or not tree.unchanged():
            tree = None
        elif (
            steady is not None
            and steady.plan.signature.same(steady.tensors)
            and (not steady.plan.tied or steady.plan.still_tied(steady.plan.in_all_places))
            and (self.extract_as == "tensordict" or tree.standard_state_dict())
        ):
            return steady
        return self._prepare_anew(source, tree)

    def _prepare_anew(self, source: Source, tree: ModuleTree | None) -> Prepared:
        """Prepare a source that the last result does not fit; ``tree`` is its walk if that does."""
        plan = self._plan
        # A container with the same keys, and with tensors like the last ones, needs no walk.
        keys, tensors = outline(source) or (None, [])
        if plan is not None and keys is not None and keys == plan.outline and plan.fits(tensors):
            return plan.prepared(tensors, {})
        if tree is None:
            found, tree = walk(source, self.extract_as)
        else:
            found = tree.select(self.extract_as)
        values = found.pack()
        tensors = found.tensors
        plan = self._plan = self._plan_for(found, tensors, values)
        plan.outline = None if found.values else keys
        prepared = plan.prepared(tensors, values)
        self._tree, self._steady = tree, prepared if self._is_steady(found, tree) else None
        return prepared

    def _is_steady(self, found: Found, tree: ModuleTree | None) -> bool:
        """Return True if a source needs no walk as long as its modules and tensors stay."""
        if tree is None or found.values:
            return False
        return self.extract_as == "tensordict" or tree.standard_state_dict()

    def _plan_for(
        self, found: Found, tensors: Sequence[torch.Tensor], values: dict[str, Any]
    ) -> _Plan:
        """Return the last plan if it fits, or else a new one, with the last layout if that fits."""
        last = self._plan
        if last is not None and last.names == _names(found) and last.fits(tensors):
            return last
        leaves = to_leaves(found, values)
        cast = leaves.leaves if self._rule is None else self._cast(self._rule, found, leaves)
        layout = Layout.plan(cast, self._limits)
        if last is not None and last.layout.digest == layout.digest:
            layout = last.layout
        return _Plan(found, layout)

    def _cast(self, rule: DtypeRule, found: Found, leaves: Leaves) -> list[Leaf]:
        """Return the leaves, each with a meta tensor of the dtype that it has on the way."""
        dtypes = self._choose_dtypes(rule, found, leaves)
        spare = [pattern.text for pattern in rule.patterns if pattern not in rule.used]
        if spare and leaves.leaves:
            raise ConfigError(
                f"wire_dtype has patterns that match no weight: {', '.join(spare)}; the first of "
                f"{len(dtypes)} is named {leaves.leaves[0].name!r}. Correct or remove them"
            )
        return [
            replace(leaf, tensor=torch.empty(leaf.tensor.shape, dtype=dtype, device="meta"))
            for leaf, dtype in zip(leaves.leaves, dtypes, strict=True)
        ]

    def _choose_dtypes(self, rule: DtypeRule, found: Found, leaves: Leaves) -> list[torch.dtype]:
        """Return the dtype of each leaf on the way; log the buffers that are not rounded."""
        inside = inner_names(leaves.values)
        buffers = {place.name: place for place in found.places if place.kind == "buffer"}
        dtypes, exact = list[torch.dtype](), list[str]()
        for leaf in leaves.leaves:
            names, now = (leaf.name, *leaf.aliases), leaf.tensor.dtype
            dtype = rule.find(names, now, rule.used)
            if leaf.name in inside or EXTRA_STATE in leaf.name.split("."):
                dtype = now
            elif rule.for_all and buffers.keys() >= {*names}:
                if now is torch.float64 is not dtype:
                    exact.append(leaf.name)
                    dtype = now
                elif not any(buffers[name].persistent for name in names):
                    # A computed buffer may get more precision, but no less.
                    dtype = max(now, dtype, key=attrgetter("itemsize"))
            dtypes.append(dtype)
        if exact and exact != self._told:
            self._log_exact(exact)
        return dtypes

    def _log_exact(self, names: list[str]) -> None:
        """Log the float64 buffers that a single dtype does not round."""
        self._told = names
        text = (
            f"these float64 buffers are sent as they are: {', '.join(names)}; "
            'to cast them, too, pass wire_dtype={"*": dtype}'
        )
        log(logging.INFO, "planned", text, model=None)


class _Program:
    """The copies of one snapshot, for tensors that stay where they are in memory."""

    def __init__(self, prepared: Prepared, addresses: list[int]) -> None:
        self.layout: Layout = prepared.layout
        self.addresses = addresses
        # Ranges of the flat buffer and bytes of the tensors, for small tensors in batches.
        self._batches: list[tuple[list[slice], list[memoryview]]] = []
        self._large: list[tuple[slice, NDArray[np.uint8]]] = []
        # Indices of the leaves on the CPU that torch has to copy.
        self._others: list[int] = []
        filled, here = _BATCH_NBYTES, set(prepared.plan.on_host)
        leaves = zip(self.layout.manifest.leaves, prepared.tensors, strict=True)
        for index, (leaf, tensor) in enumerate(leaves):
            target = slice(leaf.offset, leaf.offset + leaf.nbytes)
            if not is_plain_cpu(tensor):
                self._others += [index] if index in here else []
            elif leaf.nbytes >= LARGE_NBYTES:
                self._large.append((target, as_bytes(tensor)))
            elif leaf.nbytes:
                filled += leaf.nbytes
                if filled > _BATCH_NBYTES:
                    self._batches.append(([], []))
                    filled = leaf.nbytes
                self._batches[-1][0].append(target)
                self._batches[-1][1].append(as_bytes(tensor).data)

    def run(self, tensors: Sequence[torch.Tensor], flat: FlatBuffer, pool: CopyPool | None) -> None:
        """Copy the tensors on the CPU into a flat buffer; plain ones at the addresses they had."""
        # Each batch runs in C with the GIL held, half a millisecond at most. Releasing the GIL for
        # every small copy would cost a switch interval (5 ms) each, next to a busy thread.
        store = flat.array.data.__setitem__
        for slices, sources in self._batches:
            deque(map(store, slices, sources), maxlen=0)
        if self._large:
            blocks = [(flat.array[target], source) for target, source in self._large]
            (copy_blocks if pool is None else pool.copy)(blocks)
        if self._others:
            views = flat.views(self.layout)
            copy_tensors(((views[index], tensors[index]) for index in self._others), pool)


# -- without a copy -------------------------------------------------------------------------------


class LiveBytes:
    """A payload made of views of tensors, and of the zeros between them.

    For links that carry bytes: they read the payload at the addresses of the tensors, which must
    not change meanwhile.

    Args:
        layout: Layout of the payload.
        tensors: The leaves, in order: contiguous and on the CPU.
    """

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        pieces: list[tuple[int, memoryview]] = []
        at = 0
        for leaf, tensor in zip(layout.manifest.leaves, tensors, strict=True):
            if leaf.nbytes:
                pieces += (at, _PADDING[: leaf.offset - at]), (leaf.offset, as_bytes(tensor).data)
                at = leaf.offset + leaf.nbytes
        pieces.append((at, _PADDING[: layout.nbytes - at]))
        # Pairs of an offset and bytes.
        self._pieces = [piece for piece in pieces if piece[1].nbytes]

    @classmethod
    def of(cls, layout: Layout, tensors: Sequence[torch.Tensor]) -> LiveBytes | None:
        """Return the live bytes of tensors, or ``None`` if a copy is better.

        A copy is better for tensors that are not one block of memory of this process, and for many
        small ones, as each piece costs a little of every write. A copy also refuses freed ones.
        """
        small = layout.nbytes < LARGE_NBYTES * max(1, len(tensors))
        if small or not all(map(is_plain_cpu, tensors)) or any(map(is_freed, tensors)):
            return None
        return cls(layout, tensors)

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes from ``start`` to ``stop``, as pieces in order."""
        found = []
        first = max(0, bisect_right(self._pieces, start, key=itemgetter(0)) - 1)
        # islice() would walk over the pieces before.
        for index in range(first, len(self._pieces)):
            at, piece = self._pieces[index]
            if at >= stop:
                break
            part = piece[max(0, start - at) : stop - at]
            if len(part):
                found.append(part)
        return found
