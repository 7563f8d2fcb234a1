"""Guarded copies and changes of a module: calls other than forwards that touch its weights.

Copies are reads: they first take the published version, as forwards do. Changes come between two
reads. ``state_dict()``, ``copy.deepcopy()``, pickling, ``load_state_dict()``, ``to()``, and code
that walks over the parameters of an owner all call a method of the module itself. So the module
gets a few attributes of its own, which hide the methods of its class. A copy has none of these
attributes: it is not guarded. Used from any thread. Must not import transports.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import nn

from aiosync.receiver.code_marks import never_traced
from aiosync.receiver.guard import Guard

__all__ = ["Copies", "passing_on"]

# A change waits this long for the reads of other threads.
_PATIENCE_SECONDS = 1.0


class Copies:
    """Makes copies of a model reads of a guard.

    Args:
        guard: Keeps updates out during a copy.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._doors: list[_Door] = []

    @property
    def model_is_gone(self) -> bool:
        """Return True if the garbage collector is freeing the model, so that calls would fail."""
        return any(door.module() is None for door in self._doors)

    def wrap(self, model: nn.Module | None) -> None:
        """Guard copies of this model, and no longer those of the model before it."""
        while self._doors:
            self._doors.pop().remove(self._guard)
        if model is None:
            return
        compiled = getattr(model, "_orig_mod", None)
        for module in (model, compiled) if isinstance(compiled, nn.Module) else (model,):
            for name, kind in _KINDS.items():
                door = _door_of(module, name, kind)
                door.guards = *door.guards, self._guard
                self._doors.append(door)


def _door_of(module: nn.Module, name: str, kind: type[_Door]) -> _Door:
    """Return the door in front of a method of a module; make it if the module has none."""
    door = vars(module).get(name)
    if isinstance(door, _Door) and door.module() is module:
        return door
    # The attributes may be copied from another module, with the doors of that module.
    before = None if isinstance(door, _Door) else door
    made = vars(module)[name] = kind(module, name, before)
    return made


class _Door:
    """One method of one module, calls of which are reads of its guards.

    Args:
        module: The module, which is not kept alive; ``None`` for a copy that is not known yet.
        name: Name of the method.
        before: The module's own attribute of that name, if it had one.
    """

    def __init__(self, module: nn.Module | None, name: str, before: Any) -> None:
        self.guards: tuple[Guard, ...] = ()
        self.module: Callable[[], nn.Module | None]
        self.module = _nothing if module is None else weakref.ref(module)
        self._name = name
        self._before = before

    def __deepcopy__(self, memo: dict[int, Any]) -> _Door:
        # A module may copy its attributes itself. The copy's methods must not act on the module.
        before = copy.deepcopy(self._before, memo)
        return type(self)(memo.get(id(self.module())), self._name, before)

    def remove(self, guard: Guard) -> None:
        """Stop entering this guard; restore the module's attribute if no guard is left."""
        self.guards = tuple(each for each in self.guards if each is not guard)
        module = self.module()
        if not self.guards and module is not None and vars(module).get(self._name) is self:
            self.restore(vars(module))

    def restore(self, table: dict[str, Any]) -> None:
        """Put the attribute from before this door back into a module's table, or a copy of it."""
        if self._before is None:
            del table[self._name]
        else:
            table[self._name] = self._before

    @never_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method inside a read."""
        module, frame = self.module(), sys._getframe()
        if module is None:
            raise ReferenceError(
                f"{self._name}() of attributes that were copied from a worker's model: copy the "
                "model itself"
            )
        guards = self.guards
        for guard in guards:
            guard.enter(frame, computes=False)
        try:
            return self.call(module, *args, **kwargs)
        finally:
            for guard in reversed(guards):
                guard.leave(frame, computes=False)
            # A frame with a reference to itself would keep the variables of all callers.
            del frame

    def method(self, module: nn.Module) -> Callable[..., Any] | None:
        """Return the method behind this door, if there is one."""
        if self._before is not None:
            found: Callable[..., Any] = self._before
            return found
        method = getattr(type(module), self._name, None)
        return None if method is None else types.MethodType(method, module)

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the method behind this door."""
        method = self.method(module)
        assert method is not None
        return method(*args, **kwargs)


def _nothing() -> None:
    """Stand for a weak reference to a module that is not known."""


def _remove_doors(table: dict[str, Any], owner: object = None) -> None:
    """Remove the doors from a module's table, except those that guard its owner."""
    for door in [each for each in table.values() if isinstance(each, _Door)]:
        if not (door.guards and door.module() is owner):
            door.restore(table)


def _without_doors(table: Any) -> Any:
    """Return a copy of a module's table without its doors; other objects stay as they are."""
    if isinstance(table, dict) and any(isinstance(each, _Door) for each in table.values()):
        table = {**table}
        _remove_doors(table)
    return table


class _State(_Door):
    """``__getstate__()``, which every copy and every pickle of a module calls."""

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the module without its doors."""
        state = super().call(module, *args, **kwargs)
        if isinstance(state, tuple):
            return tuple(map(_without_doors, state))
        return _without_doors(state)


class _Reduction(_Door):
    """``__reduce_ex__()``, which may give the attributes of a module without ``_State``."""

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return how the module is made again, without its doors."""
        found = super().call(module, *args, **kwargs)
        if isinstance(found, str):
            return found
        make, made_of, *state = found
        return make, tuple(map(_without_doors, made_of)), *map(_without_doors, state)


class _DeepCopy(_Door):
    """``__deepcopy__()``; for a module without that method, it does what ``copy`` does."""

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Copy the module while its weights stay as they are."""
        method = self.method(module)
        if method is not None:
            result = method(*args, **kwargs)
            _remove_doors(getattr(result, "__dict__", {}), result)
            return result
        [memo] = args
        made: Any = module.__reduce_ex__(4)
        make, made_of, *state = made
        result = memo[id(module)] = make(*copy.deepcopy(made_of, memo))
        if state:
            result.__setstate__(copy.deepcopy(state[0], memo))
        return result


class _Change(_Door):
    """A method that writes to the module while no other thread reads.

    Three calls run as a read instead: one inside a read; one on an event loop while another thread
    reads; and one that has waited in vain for another thread's read. The reader may be waiting for
    this very call.
    """

    @never_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method between two reads."""
        done: list[Any] = []
        change: Callable[[], object] = lambda: done.append(read(*args, **kwargs))  # noqa: E731
        read = super().__call__
        for guard in self.guards:
            # A version that was sent before the change must not overwrite it later.
            guard.take()
            change = functools.partial(_exclude, guard, change)
        change()
        return done[0]


# True in code that passes a version on, perhaps to the very model that has it.
_passes_on: ContextVar[bool] = ContextVar("aiosync_passes_on", default=False)


@contextlib.contextmanager
def passing_on() -> Iterator[None]:
    """Let ``load_state_dict()`` in this block leave the version of reads as it is."""
    token = _passes_on.set(True)
    try:
        yield
    finally:
        _passes_on.reset(token)


class _Load(_Change):
    """``load_state_dict()``: reads have version 0 from then on, until the next update."""

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the method, which loads weights that the trainer never sent."""
        try:
            return super().call(module, *args, **kwargs)
        finally:
            # A method that raises may have loaded a part of them.
            for guard in () if _passes_on.get() else self.guards:
                guard.held = 0, 0


def _exclude(guard: Guard, change: Callable[[], object]) -> None:
    """Make a change while no other thread reads, or beside readers that do not end in time."""
    on_loop = asyncio._get_running_loop() is not None
    patience = 0.0 if on_loop or guard.reading_here else _PATIENCE_SECONDS
    if not guard.exclusively(change, timeout=patience):
        change()


# Code that walks over the parameters of an owner calls named_modules() of each module in it.
_KINDS: dict[str, type[_Door]] = {
    "state_dict": _Door,
    "named_modules": _Door,
    "load_state_dict": _Load,
    "_apply": _Change,
    "__getstate__": _State,
    "__reduce_ex__": _Reduction,
    "__deepcopy__": _DeepCopy,
}
