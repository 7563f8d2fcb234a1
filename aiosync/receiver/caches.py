"""Caches in which torch keeps results made of weights, and which an update makes out of date.

Inside an ``autocast`` block torch casts each weight once, and inside ``parametrize.cached()`` it
computes each parametrized weight once. Neither cache notices that the weights change. Code that
inductor compiled with ``freezing`` contains the values of the weights, and no call can clear them.
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
    """Clear torch's caches of cast and computed weights, of every model and in every thread."""
    torch.clear_autocast_cache()
    # Private to torch: without this name nothing is cleared, and a test fails.
    getattr(parametrize, "_cache", {}).clear()


def warn_if_frozen(target: Any) -> bool:
    """Warn if compiled code contains values of a target's tensors, and return True then."""
    # torch imports this module when it compiles with freezing. From torch 2.7 on it marks the
    # tensors whose values it put into code.
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
