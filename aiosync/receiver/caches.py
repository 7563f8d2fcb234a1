"""Caches in which torch keeps what it made of weights, and which an update makes out of date.

Inside of an ``autocast`` block torch casts each weight once, and inside of ``parametrize.cached()``
it computes each parametrized one once. Neither notices that the weights change. Code that inductor
compiled with ``freezing`` has the values of the weights in it, and no cache that could be cleared.
Must not import transports.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch.nn.utils import parametrize

from aiosync.tensors.walk import walk

__all__ = ["clear_caches", "warn_if_frozen"]


def clear_caches() -> None:
    """Forget what was cast or computed of weights, of every model and in every thread."""
    torch.clear_autocast_cache()
    getattr(parametrize, "_cache", {}).clear()  # private; without it a test fails


def warn_if_frozen(target: Any) -> bool:
    """Warn if compiled code has values of tensors of a target in it, and return True then."""
    # Imported where something was compiled so; what it put into code is marked from torch 2.7 on.
    if "torch._inductor.freezing" not in sys.modules:
        return False
    frozen = "torch._inductor.freezing_utils" not in sys.modules or any(
        hasattr(place.tensor, "_is_frozen_param") for place in walk(target)[0].places
    )
    if frozen:
        warnings.warn(
            "torch.compile() has put weights of a worker's model into compiled code, where no "
            "update changes them: compile it without TORCHINDUCTOR_FREEZING=1",
            stacklevel=2,
        )
    return frozen
