"""Functions that are known by their code: those that no compiler traces, and automatic reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch

__all__ = ["automatic", "is_automatic", "itself", "never_traced", "no_guard"]

_F = TypeVar("_F", bound=Callable[..., Any])


def never_traced(function: _F) -> _F:
    """Have ``torch.compile`` call a function instead of tracing into it.

    ``torch.compiler.disable`` does the same, but importing it takes seconds. If a version of torch
    keeps this elsewhere, forwards of a compiled module are still guarded, with warnings.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compile reads it
    with contextlib.suppress(AttributeError):
        frames = torch._C._dynamo.eval_frame
        if hasattr(frames, "skip_code"):
            frames.skip_code(function.__code__)
        else:
            skip = frames._FrameAction.SKIP
            strategy = frames._FrameExecStrategy(skip, skip)
            frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def automatic(call: _F) -> _F:
    """Mark a function whose frames are automatic reads, for which the user did not ask."""
    _AUTOMATIC.add(call.__code__)
    return call


_AUTOMATIC: set[CodeType] = set()


def is_automatic(read: object) -> bool:
    """Return True for a read that the user did not ask for."""
    return isinstance(read, FrameType) and read.f_code in _AUTOMATIC


def itself(function: _F) -> _F:
    """Return the function: the pickle of a guarded one calls this, so that copies are unguarded."""
    return function


def no_guard(*_args: object) -> None:
    """Do nothing, in place of the hooks, in copies of a guarded module. A compiler may trace it."""
