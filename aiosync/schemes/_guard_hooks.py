"""The forward hooks of a guard: they make every forward pass of a module a read.

Called inside of forwards, compiled ones too, from any thread. Must not import transports.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from types import FrameType

    from torch import nn

    from aiosync.schemes.guard import Guard

__all__ = ["EnterHook", "LeaveHook", "never_traced", "takes_hooks"]

_CALL_FRAMES = frozenset({"_call_impl", "inner"})

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
    """Whether a guard can be told of the forward passes of this; a scripted module has no hooks."""
    kind = torch.jit.RecursiveScriptModule  # type: ignore[attr-defined]  # public all the same
    return hasattr(model, "register_forward_hook") and not isinstance(model, kind)


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
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_name not in _CALL_FRAMES:
            frame = frame.f_back
        self.guard.enter(frame or sys._getframe(1))


class LeaveHook(_Hook):
    """After a forward, or what ended it: leaves the guard."""

    @never_traced
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.guard.leave(forward=True)


def _no_guard(*_args: object) -> None:
    """Stand-in for the hooks in copies of a guarded module. May be traced: it does nothing."""


def _copied_hook() -> Callable[..., None]:
    return _no_guard
