"""The older generation's weight synchronisation: senders, receivers, transports, updaters.

For programs that were written for ``init_on_worker()``, ``get_sender()`` and
``get_receiver()``: only the import line changes. What runs below is :mod:`aiosync.sync`, so
weights are copied when they are sent, and change in a worker as a whole. Importing it starts
nothing.
"""

from __future__ import annotations

from aiosync.legacy._cluster import (
    DistributedWeightSyncScheme,
    RayModuleTransformReceiver,
    RayModuleTransformScheme,
    RayModuleTransformSender,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
)
from aiosync.legacy._local import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
)
from aiosync.legacy._receiver import WeightReceiver
from aiosync.legacy._remote import RayActorTransport, RayTransport, RPCTransport
from aiosync.legacy._schemes import WeightSyncScheme
from aiosync.legacy._sender import WeightSender
from aiosync.legacy._store import DistributedTransport
from aiosync.legacy._strategy import WeightStrategy
from aiosync.legacy._transports import MPTransport, SharedMemTransport, TransportBackend
from aiosync.legacy.updaters import (
    DistributedWeightUpdater,
    MultiProcessedWeightUpdater,
    RayWeightUpdater,
    RemoteModuleWeightUpdater,
    RPCWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)

__all__ = [
    "DistributedTransport",
    "DistributedWeightSyncScheme",
    "DistributedWeightUpdater",
    "MPTransport",
    "MultiProcessWeightSyncScheme",
    "MultiProcessedWeightUpdater",
    "NoWeightSyncScheme",
    "RPCTransport",
    "RPCWeightSyncScheme",
    "RPCWeightUpdater",
    "RayActorTransport",
    "RayModuleTransformReceiver",
    "RayModuleTransformScheme",
    "RayModuleTransformSender",
    "RayTransport",
    "RayWeightSyncScheme",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "TransportBackend",
    "VanillaWeightUpdater",
    "WeightReceiver",
    "WeightSender",
    "WeightStrategy",
    "WeightSyncScheme",
    "WeightUpdaterBase",
]
