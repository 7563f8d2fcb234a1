"""Transforms: functions that change an update before it is applied.

A transform gives other names, other dtypes or fused tensors. It runs in a thread, so that the event
loop goes on. Its result is copied into a flat buffer of its own: the applied update never shares
memory with the received one. Must not import transports.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, TypeAlias

import torch

from aiosync._tasks import Newest, TaskOwner, WorkerThread
from aiosync.errors import ManifestMismatch
from aiosync.receiver.scheme_hooks import run_hook
from aiosync.receiver.update_reader import Buffers, Staged
from aiosync.tensors import FlatBuffer, Layout, Leaf
from aiosync.tensors.copying import copy_bytes, copy_tensors
from aiosync.tensors.device_buffer import DeviceBuffer
from aiosync.tensors.values import EXTRA_STATE, inner_names
from aiosync.wire import NO_LIMITS

__all__ = ["Transform", "Transformer"]

Transform: TypeAlias = Callable[
    [Iterable[tuple[str, torch.Tensor]]], Iterable[tuple[str, torch.Tensor]]
]
"""Takes the names and tensors of one version and gives those that the model wants. It may give back
the same tensors, views of them, or new ones; it must not write to the tensors that it is given.
"""

_CLOSE_SECONDS = 5.0


class Transformer:
    """Applies a transform to updates in a thread.

    Args:
        transform: The function to apply; ``None`` to copy updates as they are.
        before: Called on the loop with epoch and version before the transform.
        tasks: Owner of the task that waits for the thread.
        done: Called on the loop with the transformed update and ``None``; or, after a failure, with
            the update as it arrived and the error: the caller then gives the memory back.

    Attributes:
        updates: Transforms one update at a time, and of those that come meanwhile the newest.
    """

    def __init__(
        self,
        transform: Transform | None,
        before: Callable[[int, int], object] | None,
        tasks: TaskOwner,
        done: Callable[[Staged, BaseException | None], None],
    ) -> None:
        self._transform = transform
        self._before = before
        self._done = done
        self.updates: Newest[Staged] = Newest(self._run, tasks, "aiosync transform")
        self._thread = WorkerThread("aiosync-mapping")
        self._buffers = Buffers()
        self._closed = False
        # The update that the thread has to read yet, or reads.
        self._reading: Staged | None = None

    def close(self) -> None:
        """Forget every buffer, and let the thread end; a transform that runs is not waited for."""
        self._closed = True
        waiting, self.updates.waiting = self.updates.waiting, None
        # The trainer waits for its slot. Memory of this process goes with the buffers.
        if waiting is not None and waiting.slot is not None:
            waiting.give_back()
        self._buffers = Buffers()
        self._thread.close(patience=_CLOSE_SECONDS)

    async def _run(self, staged: Staged) -> None:
        """Call the hook and the transform for one update, give its memory back, and hand over."""
        work = functools.partial(self._work, staged)
        try:
            if self._before is not None:
                await run_hook(self._before, staged.epoch, staged.version)
            self._reading = staged
            layout, flat = await self._thread.run(work, patience=_CLOSE_SECONDS)
        except Exception as exc:  # noqa: BLE001 - the trainer gets it in the NACK
            self._done(staged, exc)
            return
        except BaseException:  # raised again once the slot is given back
            # The receiver has ended. Device memory cannot be kept from the trainer's next version,
            # so that its slot stays locked until it is given back here, or by the thread.
            if staged.slot is not None and self._reading is not staged:
                staged.give_back()
            raise
        staged.give_back()
        give_back = functools.partial(self._buffers.put_back, flat)
        result = dataclasses.replace(
            staged,
            layout=layout,
            flat=flat,
            give_back=give_back,
            slot=None,
            slots=None,
            lent=False,
            trace=staged.trace if staged.slot is None else staged.slot.trace,
            began=staged.began or staged.at,
            at=time.perf_counter(),
        )
        if not self._closed:
            # A newer update may be waiting; this one is handed over all the same.
            self._done(result, None)

    # -- in the thread -------------------------------------------------------------------------

    def _work(self, staged: Staged) -> tuple[Layout, FlatBuffer]:
        """Return the result of the transform, in memory of its own."""
        try:
            return self._result_of(staged)
        finally:
            self._reading = None
            if self._closed and staged.slot is not None:
                # The task that waits for this may be cancelled, and then gives no slot back.
                staged.give_back()

    def _result_of(self, staged: Staged) -> tuple[Layout, FlatBuffer]:
        """Transform an update; without a transform, copy it."""
        if self._transform is None:
            # The copy waits for the model in the update's place, so that the link's memory is free.
            return staged.layout, self._copy_of(staged)
        # The transform does not get the tensors inside extra states and other values.
        inside = inner_names(staged.values) if staged.values else frozenset[str]()
        outer: list[tuple[str, torch.Tensor]] = []
        inner: list[tuple[str, torch.Tensor]] = []
        for name, tensor in staged.flat.named_views(staged.layout):
            into = inner if name in inside or EXTRA_STATE in name.split(".") else outer
            into.append((name, tensor))
        with torch.inference_mode(False), torch.no_grad():
            return self._place(chain(self._transform(iter(outer)), inner), staged.layout)

    def _copy_of(self, staged: Staged) -> FlatBuffer:
        """Copy an update into memory of this process."""
        nbytes = staged.layout.nbytes
        flat = self._buffers.take(nbytes)
        if isinstance(staged.flat, DeviceBuffer):
            views = flat.views(staged.layout), staged.flat.views(staged.layout)
            copy_tensors(zip(*views, strict=True))
        else:
            copy_bytes(flat.memoryview()[:nbytes], staged.flat.memoryview()[:nbytes])
        return flat

    def _place(self, given: Iterable[Any], before: Layout) -> tuple[Layout, FlatBuffer]:
        """Copy the tensors that a transform gave into a flat buffer.

        Args:
            given: Names and tensors.
            before: Layout of the update before the transform: names in it keep their kinds, as a
                worker may lack a buffer that is not persistent.
        """
        found: dict[str, torch.Tensor] = {}
        for each in given:
            name, tensor = _as_pair(each)
            if name in found:
                raise ManifestMismatch(hint=f"the transform gave {name!r} twice")
            found[name] = tensor.detach()
        kinds = {name: before.manifest.leaves[leaf].kind for name, leaf in before.index.items()}
        leaves = (Leaf(name, each, kinds.get(name, "param")) for name, each in found.items())
        layout = Layout.plan(leaves, NO_LIMITS)
        flat = self._buffers.take(layout.nbytes)
        copy_tensors(zip(flat.views(layout), found.values(), strict=True))
        return layout, flat


def _as_pair(given: Any) -> tuple[str, torch.Tensor]:
    """Return the name and the tensor of a pair, or raise :class:`TypeError` if it is none."""
    try:
        name, tensor = given
    except (TypeError, ValueError):
        name = tensor = None
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"a transform must give pairs of a name and a tensor, not {type(given).__name__}"
        )
    return name, tensor
