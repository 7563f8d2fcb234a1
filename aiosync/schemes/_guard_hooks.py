"""The forward hooks of a guard: they make every forward pass of a module a read.

Called inside forwards, compiled ones too, from any thread. Must not import transports.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

if TYPE_CHECKING:
    from types import FrameType

    from torch.utils.hooks import RemovableHandle

    from aiosync.schemes.guard import Guard

__all__ = [
    "CALL",
    "Hooks",
    "forward_parts",
    "has_own_call",
    "in_transform",
    "never_traced",
    "takes_hooks",
    "why_unguarded",
]

_CALL_FRAMES = frozenset({"_call_impl", "inner"})
CALL = nn.Module._call_impl.__code__
"""Whose frame calls the hooks after a forward that raised; otherwise a frame inside it does."""

_NO_FORWARD = nn.Module.forward
_CALLS = frozenset({"__call__", "_call_impl", "_wrapped_call", "_wrapped_call_impl"})

# Private API; without it updates are applied inside of transforms, too, and refused there by torch.
_num_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_dispatch_stack", None)
_interpreter: Callable[[], Any] | None = getattr(
    torch._C._functorch, "peek_interpreter_stack", None
)

_F = TypeVar("_F", bound=Callable[..., Any])


def never_traced(function: _F) -> _F:
    """Have ``torch.compile`` call a function instead of tracing into it.

    ``torch.compiler.disable`` does the same, but importing it takes seconds. Where torch keeps
    this elsewhere, forwards of a compiled module are guarded all the same, with warnings.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # read by torch.compile
    with contextlib.suppress(AttributeError):
        frames = torch._C._dynamo.eval_frame
        if hasattr(frames, "skip_code"):
            frames.skip_code(function.__code__)
        else:
            skip = frames._FrameAction.SKIP
            strategy = frames._FrameExecStrategy(skip, skip)
            frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def takes_hooks(model: object) -> bool:
    """Whether a guard can be told of the forward passes of this."""
    return why_unguarded(model) is None


def why_unguarded(model: object) -> str | None:
    """Why hooks would not tell of the forward passes of this; ``None`` if they do."""
    if not isinstance(model, nn.Module):
        return "has no forward pass to guard"
    for part in forward_parts(model):
        why = _why_unguarded(part)
        if why is not None:
            return why if part is model else f"has a {type(part).__name__} that {why}"
    return None


def forward_parts(module: nn.Module) -> list[nn.Module]:
    """The modules whose forwards are those of ``module``: itself, or its parts if it has none.

    A ``ModuleDict`` of an actor and a critic is never called, and they are.
    """
    found: dict[nn.Module, None] = {}
    waiting = [module]
    while waiting:
        each = waiting.pop()
        forward: Any = each.forward
        if getattr(forward, "__func__", forward) is _NO_FORWARD:
            waiting += each.children()
        else:
            found[each] = None
    return list(found)


def _entrances(module: nn.Module) -> list[nn.Module]:
    """Where one gets into ``module``: its own forwards, and those that ``generate()`` calls.

    That of a wrapper (PEFT, ``torch.compile``) runs that of the model inside, which calls itself
    then, and that of an encoder-decoder calls the encoder on its own.
    """
    found = dict.fromkeys(forward_parts(module))
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


def _why_unguarded(part: nn.Module) -> str | None:
    scripted = torch.jit.RecursiveScriptModule  # type: ignore[attr-defined]  # public all the same
    if isinstance(part, scripted):
        return "takes no forward hooks"
    forward: Any = part.forward
    if inspect.isgeneratorfunction(forward) or inspect.isasyncgenfunction(forward):
        return "has a forward that is a generator, and goes on after its hooks ran"
    if inspect.iscoroutinefunction(forward):
        return "has a forward that is a coroutine, and goes on after its hooks ran"
    return None


def has_own_call(model: object) -> bool:
    """Whether the class of a model has a ``__call__`` that does not seem to run any hooks."""
    if not isinstance(model, nn.Module):
        return False
    for part in forward_parts(model):
        call = inspect.unwrap(type(part).__call__)
        code = getattr(call, "__code__", None)
        if call is not nn.Module.__call__ and code and not _CALLS.intersection(code.co_names):
            return True
    return False


def in_transform() -> bool:
    """Whether torch operations of this thread may do something else than they say.

    Inside ``torch.func`` transforms, fake tensors, tracers and other dispatch modes.
    """
    if _num_modes is not None and _num_modes() > 0:
        return True
    return _interpreter is not None and _interpreter() is not None


def compile_again() -> None:
    """Have ``torch.compile`` look again at every module that it compiled.

    It takes for granted that hooks never change: what it compiled before would run without them.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


class Hooks:
    """The hooks of one guard, in one module at a time."""

    def __init__(self) -> None:
        self._module: weakref.ref[nn.Module] | None = None
        self._handles: list[RemovableHandle] = []

    def install(self, guard: Guard, module: nn.Module) -> None:
        """Have every forward that gets into ``module`` enter and leave the guard.

        The guard is no attribute: it would live until a garbage collection.
        """
        if self._module is not None and self._module() is module:
            return
        self.remove()
        self._module = weakref.ref(module)
        compile_again()
        for part in _entrances(module):
            self._handles += [
                part.register_forward_pre_hook(EnterHook(guard), prepend=True),
                part.register_forward_hook(LeaveHook(guard), always_call=True),
            ]

    def remove(self) -> None:
        """Remove them. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._module = [], None


class _Hook:
    """A hook that copies and pickles as one that does nothing: a copied module is not guarded."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _no_guard

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _copied_hook, ()


class EnterHook(_Hook):
    """Before a forward: enters the guard."""

    @never_traced
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.guard.enter(_call_frame(sys._getframe(1)))


class LeaveHook(_Hook):
    """After a forward, or what ended it: leaves the guard."""

    @never_traced
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.guard.leave(_call_frame(sys._getframe(1)))


@never_traced
def _call_frame(caller: FrameType) -> FrameType:
    """The frame that lives as long as the forward that a hook is called for."""
    frame: FrameType | None = caller
    while frame is not None and frame.f_code.co_name not in _CALL_FRAMES:
        frame = frame.f_back
    return frame or caller


def _no_guard(*_args: object) -> None:
    """Stand-in for the hooks in copies of a guarded module. May be traced: it does nothing."""


def _copied_hook() -> Callable[..., None]:
    return _no_guard
