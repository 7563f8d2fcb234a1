"""The older generation's weight synchronisation: senders, receivers, transports, updaters.

It is for programs that were written for ``init_on_worker()``, ``get_sender()`` and
``get_receiver()``: only their import line changes. Weights are copied when they are sent, and a
worker's weights change as a whole. The import starts nothing.
"""

from aiosync.legacy.clusters import (
    DistributedWeightSyncScheme,
    RayModuleTransformReceiver,
    RayModuleTransformScheme,
    RayModuleTransformSender,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
)
from aiosync.legacy.ends import WeightReceiver, WeightSender
from aiosync.legacy.local import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
)
from aiosync.legacy.remote import RayActorTransport, RayTransport, RPCTransport
from aiosync.legacy.schemes import WeightSyncScheme
from aiosync.legacy.transports import MPTransport, SharedMemTransport, TransportBackend
from aiosync.legacy.updaters import (
    DistributedWeightUpdater,
    MultiProcessedWeightUpdater,
    RayWeightUpdater,
    RemoteModuleWeightUpdater,
    RPCWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from aiosync.legacy.updaters.distributed import DistributedTransport
from aiosync.strategy import WeightStrategy

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
