"""What of a scheme can travel into a worker's process. Must not import anything of schemes."""

from __future__ import annotations

import pickle
import sys

from aiosync.errors import ConfigError
from aiosync.strategy import WeightStrategy

__all__ = ["check_picklable"]


def check_picklable(strategy: WeightStrategy) -> None:
    """Say what to do about a strategy that cannot travel into a worker process."""
    if _pickled_by("cloudpickle"):
        return  # it takes lambdas
    try:
        pickle.dumps(strategy)
    except (pickle.PicklingError, AttributeError, TypeError) as exc:
        raise ConfigError(
            f"the strategy of this scheme cannot be pickled into a worker process ({exc}): define "
            "its class and its functions at the top level of a module instead of as lambdas or "
            "local functions, or start the workers with the 'fork' method"
        ) from exc


def _pickled_by(package: str) -> bool:
    frame = sys._getframe()
    for _ in range(6):
        if frame.f_globals.get("__name__", "").partition(".")[0] == package:
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
