"""The blocking API: the classes of :mod:`aiosync` under the same names, without ``await``.

For classic trainers, collectors and workers that run no event loop. Importing it starts
nothing; the first call that has to wait starts one background thread.
"""

from __future__ import annotations

from aiosync.sync._distributed import DistributedWeightSyncScheme
from aiosync.sync._local import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
)
from aiosync.sync._ray import RayModuleTransformScheme, RayWeightSyncScheme
from aiosync.sync._rpc import RPCWeightSyncScheme
from aiosync.sync._schemes import WeightSyncScheme
from aiosync.sync._tcp import TCPWeightSyncScheme

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
