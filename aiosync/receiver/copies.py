"""Guarded copies and changes of a module: calls other than forwards that touch its weights.

Copies are reads: they first take the published version, as forwards do. Changes come between two
reads. ``state_dict()``, ``copy.deepcopy()``, pickling, ``load_state_dict()``, ``to()``, and code
that walks over the parameters of an owner all call a method of the module itself. So the module
gets a few attributes of its own, which hide the methods of its class. A copy has none of these
attributes: it is not guarded. Used from any thread. Must not import transports.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from aiosync.receiver.code_marks import never_traced
from aiosync.receiver.guard import Guard

__all__ = ["Copies"]

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
        module: The module; not kept alive.
        name: Name of the method.
        before: The module's own attribute of that name, if it had one.
    """

    def __init__(self, module: nn.Module, name: str, before: Any) -> None:
        self.guards: tuple[Guard, ...] = ()
        self.module = weakref.ref(module)
        self._name = name
        self._before = before

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
        assert module is not None
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


class _State(_Door):
    """``__getstate__()``, which every copy and every pickle of a module calls."""

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the module without its doors."""
        state = super().call(module, *args, **kwargs)
        table, *slots = state if isinstance(state, tuple) else (state,)
        if isinstance(table, dict):
            table = {**table}
            for door in [each for each in table.values() if isinstance(each, _Door)]:
                door.restore(table)
        return (table, *slots) if slots else table


class _DeepCopy(_Door):
    """``__deepcopy__()``; for a module without that method, it does what ``copy`` does."""

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Copy the module while its weights stay as they are."""
        method = self.method(module)
        if method is not None:
            return method(*args, **kwargs)
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
    "load_state_dict": _Change,
    "_apply": _Change,
    "__getstate__": _State,
    "__deepcopy__": _DeepCopy,
}
