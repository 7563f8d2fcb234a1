"""The blocking API: the classes of :mod:`aiosync` under the same names, without ``await``.

For classic trainers, collectors and workers that run no event loop. Importing it starts
nothing; the first call that has to wait starts one background thread.
"""

from __future__ import annotations

from aiosync.sync._schemes import (
    DistributedWeightSyncScheme,
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
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RayModuleTransformScheme",
    "RayWeightSyncScheme",
    "SharedMemWeightSyncScheme",
    "TCPWeightSyncScheme",
    "WeightSyncScheme",
]
