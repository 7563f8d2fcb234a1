"""The user's functions on the way of an update into a model: hooks and transforms.

A transform changes an update: it gives other names, other dtypes or fused tensors. It runs in a
thread, so that the event loop goes on. Its result is copied into a flat buffer of its own: the
applied update never shares memory with the received one. Must not import transports.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable
from itertools import chain
from typing import Any, TypeAlias

import torch

from aiosync._tasks import Newest, TaskOwner, WorkerThread
from aiosync.errors import AiosyncError, ConfigError, ManifestMismatch
from aiosync.receiver.updates import Buffers, Staged
from aiosync.tensors import FlatBuffer, Layout, Leaf
from aiosync.tensors.copying import copy_bytes, copy_tensors
from aiosync.tensors.values import EXTRA_STATE, inner_names
from aiosync.wire import NO_LIMITS

__all__ = ["AfterApply", "SchemeHooks", "Transform", "Transformer", "in_thread", "run_hook"]

AfterApply: TypeAlias = Callable[[int, int], Awaitable[None]]
"""Awaited with the epoch and the version that the model has now, before the trainer is told."""

Transform: TypeAlias = Callable[
    [Iterable[tuple[str, torch.Tensor]]], Iterable[tuple[str, torch.Tensor]]
]
"""Takes the names and tensors of one version and gives those that the model wants. It may give back
the same tensors, views of them, or new ones; it must not write to the tensors that it is given.
"""

_CLOSE_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class SchemeHooks:
    """Functions that a receiver calls on the way of an update, for ``init_on_receiver(hooks=...)``.

    Each may be a plain function or an ``async`` one, and is awaited before anything else happens.
    If a hook raises, the worker refuses the update: the trainer's ``send()`` raises that in its
    ``PartialSyncError``, as an :class:`~aiosync.ApplyError` with the type and the text. Hooks are
    called with the epoch and the version of the update, on the event loop of the scheme, unless it
    says otherwise below.

    Attributes:
        prepare_model: Called with the model, or the weights, that ``connect()`` finds (``None`` if
            there is none yet), before anything is received. If it raises, ``connect()`` raises the
            same, and the worker does not join.
        before_apply: Called before the update is applied. A refused update leaves the model as it
            is. With this hook each update is copied first, as by a ``transform`` of yours, and
            forwards over shared memory do not take versions by themselves.
        applied: Called when the model has the version, before the trainer is told. A plain function
            is called at that very moment, in the thread that applies the version, which may be that
            of a forward pass: it must not wait, nor compute with the model. An ``async`` one may
            pass the version on to copies of the model elsewhere; of the versions that arrive
            meanwhile it is called with the newest only. The model keeps the version also if this
            raises.
        connected: Called with nothing when there is a link to the trainer, before anything is
            received over it: in ``connect()``, and again for each link that replaces a lost one. If
            it raises, the link ends, and the calls that wait for an update raise the same.
        lost: Called with the error when the trainer is lost: it said no farewell, and no link
            replaced the last one within ``reconnect`` seconds. If it raises, the calls that wait
            for an update raise the same, unless they raise that the trainer is lost.

    Raises:
        ConfigError: A hook cannot be called.
    """

    applied: Callable[[int, int], object] | None = None
    before_apply: Callable[[int, int], object] | None = None
    prepare_model: Callable[[Any], object] | None = None
    connected: Callable[[], object] | None = None
    lost: Callable[[AiosyncError], object] | None = None

    def __post_init__(self) -> None:
        for name, hook in self.given().items():
            if not callable(hook):
                raise ConfigError(f"{name} must be callable, got {type(hook).__name__}")

    def given(self) -> dict[str, Any]:
        """Return the hooks that were given, by name."""
        named = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: hook for name, hook in named if hook is not None}

    @functools.cached_property
    def at_once(self) -> Callable[[int, int], object] | None:
        """The ``applied`` hook if it is a plain function, else ``None``."""
        called = getattr(type(self.applied), "__call__", None)  # noqa: B004 - __call__ may be async
        is_async = any(map(inspect.iscoroutinefunction, (self.applied, called)))
        return None if is_async else self.applied

    @property
    def awaited(self) -> AfterApply | None:
        """The ``applied`` hook if it is an ``async`` function, else ``None``."""
        if self.applied is None or self.at_once is self.applied:
            return None
        return functools.partial(run_hook, self.applied)


async def in_thread(call: Callable[[], object]) -> None:
    """Run a call that may block in a thread of its own, and wait for it.

    A thread of a pool would keep the process from ending if its workers do not answer.
    """
    thread = WorkerThread("aiosync-cascade")
    try:
        await thread.run(call, patience=0.0)
    finally:
        thread.close(patience=1.0)


async def run_hook(hook: Callable[..., object], *args: object) -> None:
    """Call a hook, and await its result if that is awaitable."""
    result = hook(*args)
    if inspect.isawaitable(result):
        await result


class Transformer:
    """Applies a transform to updates in a thread.

    Args:
        transform: The function to apply; ``None`` to copy updates as they are.
        before: Called on the loop with epoch and version before the transform.
        tasks: Owner of the task that waits for the thread.
        done: Called on the loop with the transformed update and ``None``; or, after a failure, with
            the update as it arrived and the error: the caller then gives the memory back.

    Attributes:
        updates: The updates that are to be transformed.
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

    def close(self) -> None:
        """Forget every buffer, and let the thread end."""
        self._closed = True
        self.updates.waiting = None
        self._buffers = Buffers()
        self._thread.close(patience=_CLOSE_SECONDS)

    async def _run(self, staged: Staged) -> None:
        work = functools.partial(self._work, staged)
        try:
            if self._before is not None:
                await run_hook(self._before, staged.epoch, staged.version)
            layout, flat = await self._thread.run(work, patience=_CLOSE_SECONDS)
        except Exception as exc:  # noqa: BLE001 - the trainer gets it in the NACK
            self._done(staged, exc)
            return
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
        if self._transform is None:
            nbytes = staged.layout.nbytes
            flat = self._buffers.take(nbytes)
            copy_bytes(flat.memoryview()[:nbytes], staged.flat.memoryview()[:nbytes])
            return staged.layout, flat
        # The transform does not get the tensors inside extra states and other values.
        inside = inner_names(staged.values) if staged.values else frozenset[str]()
        outer: list[tuple[str, torch.Tensor]] = []
        inner: list[tuple[str, torch.Tensor]] = []
        for name, tensor in staged.flat.named_views(staged.layout):
            into = inner if name in inside or EXTRA_STATE in name.split(".") else outer
            into.append((name, tensor))
        with torch.inference_mode(False), torch.no_grad():
            return self._place(chain(self._transform(iter(outer)), inner))

    def _place(self, given: Iterable[Any]) -> tuple[Layout, FlatBuffer]:
        """Copy the tensors that a transform gave into a flat buffer."""
        found: dict[str, torch.Tensor] = {}
        for each in given:
            try:
                name, tensor = each
            except (TypeError, ValueError):
                name = tensor = None
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"a transform must give pairs of a name and a tensor, not {type(each).__name__}"
                )
            if name in found:
                raise ManifestMismatch(hint=f"the transform gave {name!r} twice")
            found[name] = tensor.detach()
        leaves = (Leaf(name, tensor) for name, tensor in found.items())
        layout = Layout.plan(leaves, NO_LIMITS)
        flat = self._buffers.take(layout.nbytes)
        copy_tensors(zip(flat.views(layout), found.values(), strict=True))
        return layout, flat
