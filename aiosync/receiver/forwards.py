"""The forwards of a model as reads: hooks before and after them, and the modules that get hooks.

Must not import transports; used from any thread.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Set
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from aiosync.receiver.code_marks import itself, never_traced, no_guard

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["Forwards", "has_no_forward", "why_unguarded"]

_MOST_LOOKS = 1000
# Functions of torch that call a module's hooks, and that run as long as its forward.
_CALL_FRAMES = frozenset({"_call_impl", "inner"})
# Flags of generators and coroutines, whose frames pause before they end.
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_NO_FORWARD = nn.Module.forward


class ReadGuard(Protocol):
    """The guard as forwards see it; see :class:`aiosync.receiver.guard.Guard`."""

    @property
    def is_read(self) -> bool: ...

    @property
    def is_nested(self) -> bool: ...

    def enter(self, read: FrameType, /) -> None:
        """Begin a read of this thread, which a frame stands for."""

    def leave(self, read: FrameType, /) -> None:
        """End that read."""


class Forwards:
    """Makes every forward pass of a module a read of a guard, through its forward hooks.

    If a module has no forward of its own, as a ``ModuleDict``, the forwards of its parts are reads.

    Args:
        guard: Keeps updates out during a forward.
    """

    def __init__(self, guard: ReadGuard) -> None:
        self._guard = guard
        self._module: weakref.ref[nn.Module] | None = None
        # True if the module had no forward of its own.
        self._in_parts = False
        # The modules that have hooks of this object.
        self._parts: weakref.WeakKeyDictionary[nn.Module, _Hooks] = weakref.WeakKeyDictionary()
        self._watch: _Watch | None = None

    def install(self, module: nn.Module, *, watch: bool = False) -> None:
        """Guard the forwards of this module, and no longer those of the module before it.

        Args:
            module: The module.
            watch: Warn once if a child of the module computes outside every read.
        """
        if self._module is not None and self._module() is module:
            return
        self.uninstall()
        parts = _entrances(module)
        self._add(parts)
        self._in_parts = has_no_forward(module)
        # Set last: an install() that an interrupt cut short has to begin anew.
        self._module = weakref.ref(module)
        if watch:
            self._watch = _Watch(self._guard, module, set(parts) - {module})

    def _add(self, modules: list[nn.Module]) -> None:
        """Guard the forwards of these modules, too."""
        parts = {part: _hooks_of(part) for part in modules}
        if "torch._dynamo" in sys.modules and not all(hooks.handles for hooks in parts.values()):
            # Code that was compiled before assumes that hooks never change.
            torch.compiler.reset()
        self._parts.update(parts)
        for part, hooks in parts.items():
            hooks.guard(part, (*hooks.guards, self._guard))

    def _remove(self, part: nn.Module) -> None:
        """Stop guarding the forwards of one module."""
        hooks = self._parts.pop(part)
        hooks.guard(part, tuple(each for each in hooks.guards if each is not self._guard))

    def follow_parts(self) -> None:
        """Guard the parts that a module without a forward has by now, and no others."""
        module = self._module() if self._module is not None and self._in_parts else None
        if module is None:
            return
        found = dict.fromkeys(_entrances(module))
        # The others stay guarded meanwhile: another thread may begin a forward.
        if new := [part for part in found if self._guard not in _hooks_of(part).guards]:
            self._add(new)
        for part in [part for part in self._parts if part not in found]:
            self._remove(part)

    def uninstall(self) -> None:
        """Stop guarding the module. Idempotent."""
        for part in list(self._parts):
            self._remove(part)
        if self._watch is not None:
            self._watch.end()
        self._module = self._watch = None


class _Hooks:
    """The hooks before and after the forwards of one module: they enter guards, and leave them.

    The hooks stay where compiled code may call them. In a copy or a pickle of the module they do
    nothing: a copied module is not guarded.
    """

    def __init__(self) -> None:
        self.guards: tuple[ReadGuard, ...] = ()
        self.handles: list[RemovableHandle] = []

    @never_traced
    def __call__(self, module: nn.Module, args: tuple[Any, ...], *output: Any) -> None:
        """Enter the guards before a forward, and leave them after it: torch calls it for both."""
        frame = sys._getframe(1)
        if frame.f_code.co_name not in _CALL_FRAMES:
            frame = _call_frame(frame)
        # Hooks that were registered after this one may compute with the model, so that they belong
        # to the read. torch lists the hooks after the forward: the move counts for this call.
        if not output and len(module._forward_hooks) > 1:
            self._move_last(module._forward_hooks)
        for guard in self.guards:
            # The hook after a forward gets the output, which is None if the forward raised.
            if output:
                guard.leave(frame)
            else:
                guard.enter(frame)

    def _move_last(self, hooks: Any) -> None:
        """Have torch call this object after all other hooks of a table."""
        if next(reversed(hooks.values())) is not self:
            # Another thread may move it, too: the list is made in one step.
            for key in [key for key, hook in list(hooks.items()) if hook is self]:
                hooks.move_to_end(key)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return itself, (no_guard,)

    def guard(self, module: nn.Module, guards: tuple[ReadGuard, ...]) -> None:
        """Let forwards of ``module``, which has these hooks, enter these guards."""
        self.guards = guards
        if guards and not self.handles:
            self.handles = [
                module.register_forward_pre_hook(self, prepend=True),
                module.register_forward_hook(self, always_call=True),
            ]
        elif not guards and "torch._dynamo" not in sys.modules:
            while self.handles:
                self.handles.pop().remove()


# Weak references, because the modules keep their hooks alive: a strong one would keep each guard,
# and the objects it guards, for ever.
_hooks: weakref.WeakKeyDictionary[nn.Module, weakref.ref[_Hooks]] = weakref.WeakKeyDictionary()


def _hooks_of(module: nn.Module) -> _Hooks:
    """Return the hooks of one module, new ones if it has none."""
    known = _hooks.get(module)
    hooks = None if known is None else known()
    if hooks is None:
        hooks = _Hooks()
        _hooks[module] = weakref.ref(hooks)
    return hooks


@never_traced
def _call_frame(caller: FrameType) -> FrameType:
    """Return the frame that lives as long as the forward for which a hook is called."""
    frame: FrameType | None = caller
    while frame is not None and (
        frame.f_code.co_name not in _CALL_FRAMES or frame.f_code.co_flags & _SUSPENDS
    ):
        frame = frame.f_back
    return frame or caller


class _Watch:
    """Hooks before the inner forwards of a model, which warn of a call outside every read.

    They warn once, and name the method of the model that calls the inner module.

    If the model has no forward, its parts are guarded one by one, and its methods as a whole. Then
    only a method that was taken from the model before it was guarded can call a part outside a
    read.

    The hooks look at the first thousand calls, and are removed then for their cost, up to a tenth
    of the forward of a small model. After torch has compiled something they stay and do nothing,
    because without them it would have to compile anew.

    Args:
        guard: Knows the reads.
        model: The model; not kept alive.
        parts: The modules inside the model whose forwards are reads.
    """

    def __init__(self, guard: ReadGuard, model: nn.Module, parts: Set[nn.Module]) -> None:
        # The last of these is the number of calls that are still looked at.
        self._guard, self._model, self._left = guard, weakref.ref(model), _MOST_LOOKS
        # True if the model has no forward, so that the parts are guarded instead of it.
        self._in_parts = has_no_forward(model)
        inside = set(_modules_in(model)) - {model}
        if not self._in_parts:
            # The forward of such a part is a read of its own, so that it is never outside one.
            inside -= parts
        self._handles = [module.register_forward_pre_hook(self) for module in inside]

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not self._left:
            return
        self._left -= 1
        model = self._model()
        method = None if model is None else _calling_method(model)
        outside = not self._guard.is_read
        # The part itself is a read. A method that is a read, too, makes that read a nested one.
        if self._in_parts:
            outside = method is not None and not self._guard.is_nested
        if outside or not self._left:
            self.end()
        if outside:
            self._warn(module, model, method)

    def _warn(self, module: nn.Module, model: nn.Module | None, method: str | None) -> None:
        """Warn that an inner module of the model computed outside every read."""
        named = f"{method!r}" if method else "..."
        early = ", before you take that method from the model" if self._in_parts else ""
        warnings.warn(
            f"a {type(module).__name__} of the {type(model).__name__} computed outside of its "
            "forward pass, where an update may come in between: name the method that calls it "
            f"in init_on_receiver(methods=[{named}]){early}, or use scheme.guarded(function) "
            "or `with scheme.reading():`",
            stacklevel=3,
        )

    def end(self) -> None:
        """Stop watching; remove the hooks unless torch has compiled something."""
        self._left, dynamo = 0, sys.modules.get("torch._dynamo.utils")
        while self._handles and not (dynamo and dynamo.counters["frames"]):
            self._handles.pop().remove()

    __reduce__ = _Hooks.__reduce__


def _calling_method(model: nn.Module) -> str | None:
    """Return the name of the model's outermost public method on this thread's stack, if any.

    The warning of :class:`_Watch` names it, as the method that the user should guard.
    """
    # The frame of torch that called the hook that calls this function.
    frame: FrameType | None = sys._getframe(2)
    found = None
    while frame is not None:
        if not frame.f_code.co_name.startswith("_") and frame.f_locals.get("self") is model:
            found = frame.f_code.co_name
        frame = frame.f_back
    return found


def why_unguarded(model: object) -> str | None:
    """Return, as the end of a sentence, why hooks cannot guard a model; ``None`` if they can."""
    if not isinstance(model, nn.Module):
        return "has no forward pass to guard"
    scripted = torch.jit.RecursiveScriptModule  # type: ignore[attr-defined]  # public all the same
    goes_on = inspect.isgeneratorfunction, inspect.isasyncgenfunction, inspect.iscoroutinefunction
    for part in _forward_parts(model):
        if isinstance(part, scripted) or any(each(part.forward) for each in goes_on):
            return (
                f"has a forward that hooks cannot tell the end of: that of a {type(part).__name__} "
                "is scripted, a generator or a coroutine"
            )
    return None


def has_no_forward(module: nn.Module) -> bool:
    """Return True if the forward of a module is torch's, or a stub that only raises.

    Its parts and the public methods that the user's classes define become reads instead.
    """
    forward: Any = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
    if forward is _NO_FORWARD:
        return True
    code = getattr(forward, "__code__", None)
    return code is not None and _only_raises(code)


@functools.lru_cache(maxsize=256)
def _only_raises(code: CodeType) -> bool:
    """Return True if a function can neither return nor yield."""
    return not any(
        each.opname.startswith(("RETURN_V", "RETURN_C", "YIELD"))
        for each in dis.get_instructions(code)
    )


def _modules_in(module: nn.Module) -> list[nn.Module]:
    """Return a module and all modules below it.

    ``modules()`` of a guarded module is a read of each of its schemes: inside an update of one it
    would wait for an update of another, which may wait for the first.
    """
    found: dict[nn.Module, None] = {}
    waiting = [module]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found[each] = None
            waiting += each.children()
    return list(found)


def _forward_parts(module: nn.Module) -> list[nn.Module]:
    """Return the modules whose forwards make up that of ``module``: itself, or its parts.

    A module without a forward, such as a ``ModuleDict`` of an actor and a critic, is never called,
    but its parts are.
    """
    found: dict[nn.Module, None] = {}
    waiting = [module]
    while waiting:
        each = waiting.pop()
        if has_no_forward(each):
            waiting += each.children()
        else:
            found[each] = None
    return list(found)


def _entrances(module: nn.Module) -> list[nn.Module]:
    """Return the modules that callers call: of the forward itself, and those behind ``generate()``.

    The ``generate()`` of a wrapper (PEFT, ``torch.compile``) runs that of the model inside, which
    then calls its own forward. The ``generate()`` of an encoder-decoder also calls the encoder by
    itself.
    """
    found = dict.fromkeys(_forward_parts(module))
    for each in _modules_in(module):
        if callable(getattr(type(each), "generate", None)):
            found[each] = None
            if getattr(getattr(each, "config", None), "is_encoder_decoder", False):
                encoder: Any = None
                with contextlib.suppress(AttributeError, NotImplementedError, TypeError):
                    encoder = each.get_encoder()  # type: ignore[operator]  # not every model has it
                if isinstance(encoder, nn.Module):
                    found[encoder] = None
    return list(found)
