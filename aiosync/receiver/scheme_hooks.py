"""Hooks: the user's functions that a receiver calls on the way of an update.

Must not import transports.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from aiosync._tasks import in_own_thread
from aiosync.errors import AiosyncError, ConfigError

__all__ = ["AfterApply", "Labelled", "SchemeHooks", "in_thread", "run_hook"]

AfterApply: TypeAlias = Callable[[int, int], Awaitable[None]]
"""Awaited with the epoch and the version that the model has now, before the trainer is told."""


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
            same, and the worker does not join. Its time is within the timeout of ``connect()``.
        before_apply: Called before the update is applied. A refused update leaves the model as it
            is. With this hook each update is copied first, as by a ``transform`` of yours, and
            forwards over shared memory do not take versions by themselves.
        applied: Called when the model has the version, before the trainer is told. A plain function
            is called at that very moment, in the thread that applies the version, which may be that
            of a forward pass: it must not wait, compute with the model, or return a coroutine. An
            ``async`` one may pass the version on to copies of the model elsewhere; of the versions
            that arrive meanwhile it is called with the newest only. The model keeps the version
            also if this raises, and no read raises that.
        connected: Called with nothing when there is a link to the trainer, before anything is
            received over it: in ``connect()``, and again for each link that replaces a lost one. If
            it raises, the link ends, the trainer is lost, and the calls that wait for an update
            raise the same, unless they raise that the trainer is lost.
        lost: Called with the error when the trainer is lost: it said no farewell, and no link
            replaced the last one within ``reconnect`` seconds; or a hook or code that cancels
            tasks ended the receiver. If it raises, the calls that wait for an update raise the
            same, unless they raise that the trainer is lost.

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

    @property
    def _plain(self) -> Callable[[int, int], object] | None:
        """The part of the ``applied`` hook that may be a plain function."""
        return self.applied.label if isinstance(self.applied, Labelled) else self.applied

    @functools.cached_property
    def at_once(self) -> Callable[[int, int], object] | None:
        """A call of the ``applied`` hook if it is a plain function, else ``None``."""
        applied = self._plain
        if applied is None or _is_async(applied):
            return None
        return functools.partial(_call_plain, applied)

    @property
    def awaited(self) -> AfterApply | None:
        """The ``applied`` hook if it is an ``async`` function, else ``None``."""
        if isinstance(self.applied, Labelled):
            return functools.partial(run_hook, self.applied.awaited)
        if self.applied is None or self.at_once is not None:
            return None
        return functools.partial(run_hook, self.applied)


@dataclasses.dataclass(frozen=True)
class Labelled:
    """An ``applied`` hook of two: a plain one at the very moment, and an ``async`` one after it."""

    label: Callable[[int, int], object]
    awaited: Callable[[int, int], object]

    async def __call__(self, epoch: int, version: int) -> None:
        """Call both."""
        self.label(epoch, version)
        await run_hook(self.awaited, epoch, version)


def _is_async(hook: Callable[..., object]) -> bool:
    """Return True for a coroutine function, also below decorators or as a ``__call__()``."""
    called = getattr(type(hook), "__call__", None)  # noqa: B004 - __call__ may be async
    return any(inspect.iscoroutinefunction(inspect.unwrap(each)) for each in (hook, called) if each)


def _call_plain(hook: Callable[[int, int], object], epoch: int, version: int) -> None:
    """Call a plain ``applied`` hook; refuse a result that has to be awaited."""
    result = hook(epoch, version)
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise ConfigError(
            "the hook `applied` returned an awaitable, and is no coroutine function: define it "
            "with `async def`"
        )


async def in_thread(call: Callable[[], object]) -> None:
    """Run a call that may block in a thread of its own; await its result if that is awaitable."""
    result = await in_own_thread(call, "aiosync-cascade")
    # An `async def` below a decorator looks like a plain function, and gives a coroutine.
    if inspect.isawaitable(result):
        await result


async def run_hook(hook: Callable[..., object], *args: object) -> None:
    """Call a hook, and await its result if that is awaitable."""
    result = hook(*args)
    if inspect.isawaitable(result):
        await result
