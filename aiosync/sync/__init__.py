"""The blocking API: the classes of :mod:`aiosync` under the same names, without ``await``.

For classic trainers, collectors and workers that run no event loop. Importing it starts
nothing; the first call that has to wait starts one background thread.
"""

from aiosync.schemes import WeightSyncBackend
from aiosync.strategy import WeightStrategy
from aiosync.sync._connect_all import connect_all
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
    twin,
)

# Transports that create_transport() of these schemes makes, for programs that import them here.
from aiosync.transports import DistributedTransport as DistributedTransport
from aiosync.transports import MPTransport as MPTransport
from aiosync.transports import RayActorTransport as RayActorTransport
from aiosync.transports import RayTransport as RayTransport
from aiosync.transports import RPCTransport as RPCTransport
from aiosync.transports import SharedMemTransport as SharedMemTransport
from aiosync.transports import TransportBackend as TransportBackend

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
    "connect_all",
    "twin",
]
