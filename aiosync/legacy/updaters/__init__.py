"""The weight updaters of TorchRL's older API, on top of the schemes of aiosync.

They have the constructors, hooks and defaults of TorchRL's classes of the same names, and work as
``weight_updater=`` of its collectors. New code passes ``weight_sync_schemes=`` instead. The import
starts nothing. Must not import torchrl or ray.
"""

from aiosync.legacy.updaters.base import (
    RemoteModuleWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from aiosync.legacy.updaters.by_scheme import (
    MultiProcessedWeightUpdater,
    RayWeightUpdater,
    RPCWeightUpdater,
)
from aiosync.legacy.updaters.distributed import DistributedWeightUpdater

__all__ = [
    "DistributedWeightUpdater",
    "MultiProcessedWeightUpdater",
    "RPCWeightUpdater",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]
