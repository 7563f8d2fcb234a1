"""What the owner of a model does when updates come. Must not import transports."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from aiosync._tasks import WorkerThread
from aiosync.errors import ConfigError

__all__ = ["Relay", "SchemeHooks", "in_thread", "run_hook"]

Relay: TypeAlias = Callable[[int, int], Awaitable[None]]
"""Called with the epoch and the version that the model has now."""


@dataclasses.dataclass(frozen=True)
class SchemeHooks:
    """What a receiver calls on the way of an update; given to ``init_on_receiver(hooks=...)``.

    Each may be a plain function or an ``async`` one, and is awaited before anything else happens.
    What it raises is a refusal: the trainer's ``send()`` raises it in its ``PartialSyncError``, as
    an :class:`~aiosync.ApplyError` with the type and the text. They are called with the epoch and
    the version of the update, on the event loop of the scheme, except where it says otherwise.

    Attributes:
        prepare_model: Called with the model, or the weights, that ``connect()`` finds (``None`` if
            there is none yet), before anything is received. What it raises is raised by
            ``connect()``, and the worker does not join.
        before_apply: Called before the update is applied. One that is refused leaves the model as
            it is. Each update is copied first, as by an own ``transform``, and forwards over
            shared memory do not take versions by themselves.
        applied: Called when the model has the version, before the trainer is told. A plain function
            is called in the very moment, in the thread that applies it, which may be that of a
            forward pass: it must not wait, nor compute with the model. The model
            keeps what it has, also if this raises.
        relay: Called after that, to pass the version on to copies of the model elsewhere. The
            trainer is told when it has ended; of versions that come meanwhile only the newest is
            passed on.

    Raises:
        ConfigError: One of them cannot be called.
    """

    applied: Callable[[int, int], object] | None = None
    before_apply: Callable[[int, int], object] | None = None
    relay: Callable[[int, int], object] | None = None
    prepare_model: Callable[[Any], object] | None = None

    def __post_init__(self) -> None:
        for name, hook in self.given().items():
            if not callable(hook):
                raise ConfigError(f"{name} must be callable, got {type(hook).__name__}")

    def given(self) -> dict[str, Any]:
        """Those that there are, by name."""
        named = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: hook for name, hook in named if hook is not None}

    @functools.cached_property
    def at_once(self) -> Callable[[int, int], object] | None:
        """A plain ``applied``."""
        return None if self.applied is None or _is_async(self.applied) else self.applied

    @functools.cached_property
    def after(self) -> Relay | None:
        """What has to be over before the trainer is told; ``None`` for nothing."""
        applied = None if self.at_once is self.applied else self.applied
        hooks = [hook for hook in (applied, self.relay) if hook is not None]
        if not hooks:
            return None

        async def run(epoch: int, version: int) -> None:
            for hook in hooks:
                await run_hook(hook, epoch, version)

        return run


def _is_async(hook: object) -> bool:
    """Whether calling it gives a coroutine."""
    called = getattr(type(hook), "__call__", None)  # noqa: B004 - of an object, perhaps async
    return inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(called)


async def in_thread(call: Callable[[], object]) -> None:
    """Call what may block in a thread of its own, and wait for it.

    A thread of a pool would keep a process from ending whose workers do not answer.
    """
    thread = WorkerThread("aiosync-cascade")
    try:
        await thread.run(call, patience=0.0)
    finally:
        thread.close(patience=1.0)


async def run_hook(hook: Callable[..., object], *args: object) -> None:
    """Call one, and wait for it if it is to be awaited."""
    result = hook(*args)
    if inspect.isawaitable(result):
        await result
