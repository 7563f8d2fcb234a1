"""The weight updaters of TorchRL's older API, on top of the schemes of aiosync.

They have the constructors, hooks and defaults of TorchRL's classes of the same names, and work as
``weight_updater=`` of its collectors. New code passes ``weight_sync_schemes=`` instead. Importing
this starts nothing. Must not import torchrl or ray.
"""

from __future__ import annotations

from aiosync.legacy.updaters._base import WeightUpdaterBase
from aiosync.legacy.updaters._distributed import DistributedWeightUpdater
from aiosync.legacy.updaters._local import RemoteModuleWeightUpdater, VanillaWeightUpdater
from aiosync.legacy.updaters._multiprocess import MultiProcessedWeightUpdater
from aiosync.legacy.updaters._remote import RayWeightUpdater, RPCWeightUpdater

__all__ = [
    "DistributedWeightUpdater",
    "MultiProcessedWeightUpdater",
    "RPCWeightUpdater",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]
