"""Whether a module has other tensors only for the time of a call.

``torch.func.functional_call()`` puts tensors into a module before a forward, and the module's own
ones back after it. This module must never import asyncio or a transport.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from aiosync.tensors._tree import ModuleTree

__all__ = ["is_lent"]

_CALLS = frozenset({"functional_call", "_functional_call"})
_PLACES = frozenset({"torch._functorch.functional_call", "torch.nn.utils.stateless"})


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
    return any(_calls(frame, tree) for frame in sys._current_frames().values())


def _calls(frame: FrameType | None, tree: ModuleTree) -> bool:
    """Whether a thread is inside a call of this module, of one around it or of one inside."""
    while frame is not None:
        if frame.f_code.co_name in _CALLS and frame.f_globals.get("__name__") in _PLACES:
            called = frame.f_locals.get("module")
            if isinstance(called, nn.Module) and (
                any(called is each for each in tree.modules)
                or any(tree.root is each for each in called.modules())
            ):
                return True
        frame = frame.f_back
    return False
