"""Updates that are changed on their way into a model: other names, other dtypes, fused tensors.

The transform of a receiver runs in a thread, so that the event loop goes on, and its result is
copied into a flat buffer of its own: what is applied never shares memory with what was received.
Must not import transports.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch

from aiosync._tasks import TaskOwner
from aiosync.errors import ManifestMismatch
from aiosync.receiver.hooks import run_hook
from aiosync.schemes._background import Background
from aiosync.schemes._staging import Staged, Staging
from aiosync.tensors import FlatBuffer, Layout, dtype_name
from aiosync.tensors.apply import named_views
from aiosync.tensors.copying import as_bytes, is_plain_cpu
from aiosync.tensors.values import EXTRA_STATE, inner_names
from aiosync.wire import NO_LIMITS, plan_manifest

__all__ = ["Transform", "Transforming"]

Transform: TypeAlias = Callable[
    [Iterable[tuple[str, torch.Tensor]]], Iterable[tuple[str, torch.Tensor]]
]
"""Takes the names and tensors of one version and gives those that the model wants. It may give
back the same tensors, views of them, or new ones; it must not write to those that it is given."""

_CLOSE_SECONDS = 5.0
_END = object()


class Transforming:
    """Transforms updates, one at a time; of those that come meanwhile only the newest.

    Args:
        transform: What to do with them; ``None`` to copy them as they are.
        before: Called on the loop with epoch and version, before that.
        tasks: Runs the waiting part.
        staging: Gets the received memory back.
        done: Called on the loop with the update as the model wants it.
        failed: Called on the loop with the update and why it cannot be had; the caller gives
            its memory back.
    """

    def __init__(
        self,
        transform: Transform | None,
        before: Callable[[int, int], object] | None,
        *,
        tasks: TaskOwner,
        staging: Staging,
        done: Callable[[Staged], None],
        failed: Callable[[Staged, BaseException], None],
    ) -> None:
        self._transform = transform
        self._before = before
        self._tasks = tasks
        self._staging = staging
        self._done = done
        self._failed = failed
        self._next: Staged | None = None
        self._now: Staged | None = None
        self.since: float | None = None  # when the work on _now began
        self._thread = Background("aiosync-mapping")
        self._layout: Layout | None = None  # of the last result
        self._spare: list[FlatBuffer] = []
        self._closed = False

    def begin(self, staged: Staged) -> None:
        """Transform this update, after the one that is being transformed now."""
        old, self._next = self._next, staged
        if old is not None:
            old.give_back()
        if self._now is None:
            self._now = staged
            self._tasks.start(self._run(), "aiosync transform")

    def has(self, epoch: int, version: int) -> bool:
        """Whether this update is being transformed, or will be."""
        pending = (self._now, self._next)
        return any(
            each is not None and (each.epoch, each.version) == (epoch, version) for each in pending
        )

    def close(self) -> None:
        """Forget every buffer, and let the thread end."""
        self._closed = True
        self._next = None
        self._spare.clear()
        self._thread.close(patience=_CLOSE_SECONDS)

    async def _run(self) -> None:
        try:
            while self._next is not None:
                (staged, self._next) = (self._next, None)
                self._now, self.since = staged, time.monotonic()
                work = functools.partial(self._work, staged)
                try:
                    if self._before is not None:
                        await run_hook(self._before, staged.epoch, staged.version)
                    layout, flat = await self._thread.run(work, patience=_CLOSE_SECONDS)
                except Exception as exc:  # noqa: BLE001 - the trainer gets it in the NACK
                    self._failed(staged, exc)
                    continue
                self._staging.retire(staged)
                self._layout = layout
                give_back = lambda flat=flat: self._put_back(flat)  # noqa: E731 - bound to it
                result = Staged(
                    staged.epoch, staged.version, layout, flat, staged.values, give_back
                )
                if not self._closed:
                    self._done(result)  # also with a newer one waiting, which may be overtaken, too
        finally:
            self._now = self.since = None

    def _put_back(self, flat: FlatBuffer) -> None:
        if len(self._spare) < 2 and not self._closed:
            self._spare.append(flat)

    # -- in the thread -------------------------------------------------------------------------

    def _work(self, staged: Staged) -> tuple[Layout, FlatBuffer]:
        """The result of the transform, in memory of its own."""
        if self._transform is None:
            nbytes = staged.layout.nbytes
            flat = self._buffer(nbytes)
            flat.memoryview()[:nbytes] = staged.flat.memoryview()[:nbytes]
            return staged.layout, flat
        # What is inside of extra states and other values is not the transform's business.
        inside = inner_names(staged.values) if staged.values else frozenset[str]()
        outer: list[tuple[str, torch.Tensor]] = []
        inner: list[tuple[str, torch.Tensor]] = []
        for name, tensor in named_views(staged.layout, staged.flat):
            into = inner if name in inside or EXTRA_STATE in name.split(".") else outer
            into.append((name, tensor))
        with torch.inference_mode(False), torch.no_grad():
            return self._place(chain(self._transform(iter(outer)), inner))

    def _place(self, given: Any) -> tuple[Layout, FlatBuffer]:
        """Copy each tensor to where the last version had it; plan anew when something differs."""
        layout, names = self._layout, set[str]()
        early: list[tuple[str, torch.Tensor]] = []
        if layout is not None:
            flat = self._buffer(layout.nbytes)
            for leaf, dtype in zip(layout.manifest.leaves, layout.dtypes, strict=True):
                found = next(given, _END)
                if found is _END:
                    break
                name, tensor = _checked(found, names)
                if (name, tensor.dtype, tuple(tensor.shape)) != (leaf.name, dtype, leaf.shape):
                    early.append((name, tensor))
                    break
                _put(tensor, flat, leaf.offset)
                names.add(name)
            else:
                more = next(given, _END)
                if more is _END:
                    return layout, flat
                early.append(_checked(more, names))
            # Another result than the last one: what was placed already is copied once more.
            early[:0] = [
                (leaf.name, view)
                for leaf, view in zip(layout.manifest.leaves, flat.views(layout), strict=True)
                if leaf.name in names
            ]
        return self._place_anew(early, given)

    def _place_anew(
        self, early: list[tuple[str, torch.Tensor]], given: Any
    ) -> tuple[Layout, FlatBuffer]:
        names = {name for name, _ in early}
        for found in given:
            name, tensor = _checked(found, names)
            names.add(name)
            early.append((name, tensor))
        layout = Layout(
            plan_manifest(
                (
                    (name, dtype_name(tensor.dtype), tuple(tensor.shape), "param", ())
                    for name, tensor in early
                ),
                NO_LIMITS,
            )
        )
        flat = FlatBuffer(layout.nbytes)
        for leaf, (_, tensor) in zip(layout.manifest.leaves, early, strict=True):
            _put(tensor, flat, leaf.offset)
        return layout, flat

    def _buffer(self, nbytes: int) -> FlatBuffer:
        for index, flat in enumerate(self._spare):
            if flat.nbytes == nbytes:
                return self._spare.pop(index)
        return FlatBuffer(nbytes)


def _checked(found: Any, names: set[str]) -> tuple[str, torch.Tensor]:
    try:
        name, tensor = found
    except (TypeError, ValueError):
        name = tensor = None
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"a transform must give pairs of a name and a tensor, not {type(found).__name__}"
        )
    if name in names:
        raise ManifestMismatch(hint=f"the transform gave {name!r} twice")
    return name, tensor.detach()


def _put(tensor: torch.Tensor, flat: FlatBuffer, offset: int) -> None:
    """Copy a tensor into a buffer; without torch's thread pool where the bytes are in order."""
    if not tensor.numel():
        return
    if is_plain_cpu(tensor):
        source = as_bytes(tensor)
        np.copyto(flat.array[offset : offset + source.nbytes], source)
        return
    nbytes = tensor.numel() * tensor.element_size()
    target = torch.from_numpy(flat.array[offset : offset + nbytes])
    target.view(tensor.dtype).view(tensor.shape).copy_(tensor)
