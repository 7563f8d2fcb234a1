"""The blocking API: the classes of :mod:`aiosync` under the same names, without ``await``.

For classic trainers, collectors and workers that run no event loop. Importing it starts
nothing; the first call that has to wait starts one background thread.
"""

from aiosync.schemes import WeightSyncBackend
from aiosync.strategy import WeightStrategy
from aiosync.sync._schemes import (
    DistributedWeightSyncScheme,
    InitialSyncTransport,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RayModuleTransformScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
    TCPWeightSyncScheme,
    WeightSyncScheme,
)

__all__ = [
    "DistributedWeightSyncScheme",
    "InitialSyncTransport",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RayModuleTransformScheme",
    "RayWeightSyncScheme",
    "SharedMemWeightSyncScheme",
    "TCPWeightSyncScheme",
    "WeightStrategy",
    "WeightSyncBackend",
    "WeightSyncScheme",
]
