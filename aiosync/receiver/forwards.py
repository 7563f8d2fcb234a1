"""The forwards of a model as reads: hooks before and after, and where one gets into a model.

Must not import transports; used from any thread.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Set
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aiosync.receiver.frames import itself, never_traced, no_guard

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from aiosync.receiver.guard import Guard

__all__ = ["Forwards", "has_no_forward", "why_unguarded"]

_MOST_LOOKS = 1000
_CALL_FRAMES = frozenset({"_call_impl", "inner"})
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_NO_FORWARD = nn.Module.forward


class Forwards:
    """Makes every forward pass of a module a read of a guard, through its forward hooks.

    Without a forward of its own, as a ``ModuleDict`` is, those of its parts.

    Args:
        guard: Keeps updates out meanwhile.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._module: weakref.ref[nn.Module] | None = None
        # Those that have its hooks.
        self._parts: weakref.WeakKeyDictionary[nn.Module, _Hooks] = weakref.WeakKeyDictionary()
        self._watch: _Watch | None = None

    def install(self, module: nn.Module, *, watch: bool = False) -> None:
        """Guard the forwards of this module, and no longer those of another one.

        Args:
            module: The module.
            watch: Warn once where a child of it computes outside of every read.
        """
        if self._module is not None and self._module() is module:
            return
        self.uninstall()
        parts = {part: _hooks_of(part) for part in _entrances(module)}
        if "torch._dynamo" in sys.modules and not all(hooks.handles for hooks in parts.values()):
            # What was compiled before takes for granted that hooks never change.
            torch.compiler.reset()
        self._parts.update(parts)
        for part, hooks in parts.items():
            hooks.guard(part, (*hooks.guards, self._guard))
        self._module = weakref.ref(module)  # now: whoever was interrupted has to begin anew
        if watch:
            self._watch = _Watch(self._guard, module, parts.keys() - {module})

    def uninstall(self) -> None:
        """Do not guard it any more. Idempotent."""
        for part, hooks in list(self._parts.items()):
            hooks.guard(part, tuple(each for each in hooks.guards if each is not self._guard))
        if self._watch is not None:
            self._watch.end()
        self._parts.clear()
        self._module = self._watch = None


class _Hooks:
    """Before and after the forwards of one module: gets into guards, and out of them.

    Stays where compiled code may call it. Copies and pickles as hooks that do nothing: a copied
    module is not guarded.
    """

    def __init__(self) -> None:
        self.guards: tuple[Guard, ...] = ()
        self.handles: list[RemovableHandle] = []

    @never_traced
    def __call__(self, module: nn.Module, args: tuple[Any, ...], *output: Any) -> None:
        frame = sys._getframe(1)
        if frame.f_code.co_name not in _CALL_FRAMES:
            frame = _call_frame(frame)
        for guard in self.guards:
            if output:  # or None, after a forward that raised
                guard.leave(frame)
            else:
                guard.enter(frame)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return itself, (no_guard,)

    def guard(self, module: nn.Module, guards: tuple[Guard, ...]) -> None:
        """Have forwards of the module, whose hooks these are, get into these guards."""
        self.guards = guards
        if guards and not self.handles:
            self.handles = [
                module.register_forward_pre_hook(self, prepend=True),
                module.register_forward_hook(self, always_call=True),
            ]
        elif not guards and "torch._dynamo" not in sys.modules:
            while self.handles:
                self.handles.pop().remove()


# The modules keep their hooks: from here a guard, and what it guards, would be kept for ever.
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
    """The frame that lives as long as the forward that a hook is called for."""
    frame: FrameType | None = caller
    while frame is not None and (
        frame.f_code.co_name not in _CALL_FRAMES or frame.f_code.co_flags & _SUSPENDS
    ):
        frame = frame.f_back
    return frame or caller


class _Watch:
    """Before the forwards inside of a model: warns once of a method that calls one, and is no read.

    Of a model without a forward the parts are guarded one by one, and the methods as a whole. There
    only a method that was taken before it was guarded can call a part outside of them.

    It looks at the first thousand, and is gone then: no hook costs as much as a tenth of the
    forward of a small model. Where something was compiled it stays and does nothing, as that would
    have to be compiled anew without it.
    """

    def __init__(self, guard: Guard, model: nn.Module, parts: Set[nn.Module]) -> None:
        self._guard, self._model, self._left = guard, weakref.ref(model), _MOST_LOOKS
        self._in_parts = has_no_forward(model)
        inside = set(model.modules()) - {model}
        if not self._in_parts:
            inside -= parts
        self._handles = [module.register_forward_pre_hook(self) for module in inside]

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not self._left:
            return
        self._left -= 1
        model = self._model()
        method = None if model is None else _calling_method(model)
        outside = not self._guard.is_read
        if self._in_parts:  # the part itself is a read, and what called it is none
            outside = method is not None and not self._guard.is_nested
        if outside or not self._left:
            self.end()
        if outside:
            named = f"{method!r}" if method else "..."
            early = ", before you take that method from the model" if self._in_parts else ""
            warnings.warn(
                f"a {type(module).__name__} of the {type(model).__name__} computed outside of its "
                "forward pass, where an update may come in between: name the method that calls it "
                f"in init_on_receiver(methods=[{named}]){early}, or use scheme.guarded(function) "
                "or `with scheme.reading():`",
                stacklevel=2,
            )

    def end(self) -> None:
        """Look no more."""
        self._left, dynamo = 0, sys.modules.get("torch._dynamo.utils")
        while self._handles and not (dynamo and dynamo.counters["frames"]):
            self._handles.pop().remove()

    __reduce__ = _Hooks.__reduce__


def _calling_method(model: nn.Module) -> str | None:
    """Return the outermost public method of a model that runs in this thread, if any."""
    frame: FrameType | None = sys._getframe(2)
    found = None
    while frame is not None:
        if not frame.f_code.co_name.startswith("_") and frame.f_locals.get("self") is model:
            found = frame.f_code.co_name
        frame = frame.f_back
    return found


def why_unguarded(model: object) -> str | None:
    """Why hooks would not tell of the forward passes of this; ``None`` if they do."""
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
    """Return True if the forward of a module is torch's, or a stub that only raises."""
    forward: Any = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
    if forward is _NO_FORWARD:
        return True
    code = getattr(forward, "__code__", None)
    return code is not None and not any(
        each.opname.startswith(("RETURN_V", "RETURN_C", "YIELD"))
        for each in dis.get_instructions(code)
    )


def _forward_parts(module: nn.Module) -> list[nn.Module]:
    """The modules whose forwards are those of ``module``: itself, or its parts if it has none.

    A ``ModuleDict`` of an actor and a critic is never called, and they are.
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
    """Where one gets into ``module``: its own forwards, and those that ``generate()`` calls.

    That of a wrapper (PEFT, ``torch.compile``) runs that of the model inside, which calls itself
    then, and that of an encoder-decoder calls the encoder on its own.
    """
    found = dict.fromkeys(_forward_parts(module))
    for each in module.modules():
        if callable(getattr(type(each), "generate", None)):
            found[each] = None
            if getattr(getattr(each, "config", None), "is_encoder_decoder", False):
                encoder: Any = None
                with contextlib.suppress(AttributeError, NotImplementedError, TypeError):
                    encoder = each.get_encoder()  # type: ignore[operator]  # if it has one
                if isinstance(encoder, nn.Module):
                    found[encoder] = None
    return list(found)
