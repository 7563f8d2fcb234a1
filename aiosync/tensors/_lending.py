"""Whether a module has other tensors only for the time of a call.

``torch.func.functional_call()`` puts tensors into a module before a forward, and the module's own
ones back after it. This module must never import asyncio or a transport.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from itertools import accumulate, chain, islice, repeat, starmap, takewhile
from operator import attrgetter, methodcaller, truth
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from aiosync.tensors._tree import ModuleTree

__all__ = ["is_lent"]

# Where torch's functions are whose argument `module` has other tensors while they run.
_HOMES = ("torch._functorch.functional_call", "torch.nn.utils.stateless")

# What f_code and id() are asked for is told to audit hooks, which may be written in Python.
_globals = attrgetter("f_globals")
_locals = attrgetter("f_locals")
_module = methodcaller("get", "module")


def is_lent(tree: ModuleTree) -> bool:
    """Whether what is in a module instead of the tensors of ``tree`` is there for a call only.

    So it is while a thread is inside a ``functional_call()`` of it, and where a plain tensor has
    taken a parameter's place. The parameters that TensorDict's ``to_module()`` puts there look as
    if they were to stay: such calls have to be made inside ``reading()``.
    """
    for place, tensor in zip(tree.found.places, tree.found.tensors, strict=True):
        if place.kind == "param" and isinstance(tensor, nn.Parameter):
            now = place.owner._parameters.get(place.key)
            if isinstance(now, torch.Tensor) and not isinstance(now, nn.Parameter):
                return True
    return any(_concerns(module, tree) for module in _called())


def _concerns(called: Any, tree: ModuleTree) -> bool:
    """Whether a module is this one, one around it or one inside."""
    return isinstance(called, nn.Module) and (
        any(called is each for each in tree.modules)
        or any(tree.root is each for each in called.modules())
    )


def _called() -> list[Any]:
    """The modules of the calls that threads are inside of now.

    Whoever holds a frame of another thread while that goes on keeps the variables of all its
    callers, and destroys them in the wrong thread, which has ended processes. So each look is
    one call of C code, during which no other thread runs; nor does the garbage collector.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        called = list[Any]()
        homes = list(map(dict.get, map(_globals, _frames()), repeat("__name__")))
        for at, home in enumerate(homes):
            if home in _HOMES:
                # Other threads may have run since: what is another frame by now has no module.
                # Not this one, whose own frames have to be as many as they were.
                called += list(map(_module, map(_locals, islice(_frames(), at, at + 1))))
        return called
    finally:
        if collects:
            gc.enable()


def _frames() -> Iterator[FrameType]:
    """The frames of all threads, innermost first; lazily, without a step in Python."""
    tops = chain.from_iterable(map(dict.values, starmap(sys._current_frames, [()])))
    starts = map(chain, zip(tops), repeat(repeat("f_back")))
    stacks: Iterator[Iterator[Any]] = map(accumulate, starts, repeat(getattr))
    ended: Any = takewhile  # mypy loses what it yields
    return chain.from_iterable(map(ended, repeat(truth), stacks))
