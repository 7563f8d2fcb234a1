"""aiosync: asyncio-first weight synchronization for reinforcement learning.

A trainer learns, many inference workers act; aiosync moves the policy's weights from one to the
others, versioned, never torn, and without hanging. See ``docs/quickstart.md``; the blocking
twin of this interface is :mod:`aiosync.sync`. What needs torch is imported when it is first used.
"""

import logging
from typing import TYPE_CHECKING

from aiosync._exports import lazily
from aiosync._run import run
from aiosync._version import __version__
from aiosync.errors import (
    AckTimeout,
    AdmissionTimeout,
    AiosyncError,
    ApplyError,
    AuthError,
    ConfigError,
    ConnectError,
    ConnectTimeout,
    FrameTooLarge,
    LocalProtocolError,
    ManifestMismatch,
    PartialSyncError,
    PeerClosed,
    ProtocolError,
    RecvTimeout,
    RemoteProtocolError,
    SendTimeout,
    StaleVersion,
    SwapTimeout,
    SyncTimeout,
    TransportBroken,
    TransportBusy,
    TransportClosed,
    TransportError,
    WeightsChanged,
    WeightsError,
    WireVersionMismatch,
)
from aiosync.events import Observer, SyncEvent, SyncStats, WorkerStats
from aiosync.spans import LastRead, VersionSpan, staleness
from aiosync.types import AckStatus, Capabilities, Limits, SendReport

if TYPE_CHECKING:
    from aiosync.schemes import (
        AppliedUpdate,
        DistributedWeightSyncScheme,
        MultiProcessWeightSyncScheme,
        NoWeightSyncScheme,
        RayModuleTransformReceiver,
        RayModuleTransformScheme,
        RayModuleTransformSender,
        RayWeightSyncScheme,
        Ready,
        RPCWeightSyncScheme,
        SchemeHooks,
        SendHandle,
        SharedMemWeightSyncScheme,
        TCPWeightSyncScheme,
        WeightReceiver,
        WeightSender,
        WeightSyncScheme,
        connect_all,
        register_weight_sync_backend,
    )
    from aiosync.strategy import WeightStrategy
    from aiosync.tensors import WeightMap, gather_weights
    from aiosync.transports import (
        DistributedTransport,
        MemoryTransport,
        MPTransport,
        RayActorTransport,
        RayTransport,
        RPCTransport,
        SharedMemTransport,
        TCPTransport,
        Transport,
        TransportBackend,
    )
    from aiosync.transports.credentials import TLS
else:
    __getattr__, __dir__ = lazily(
        __name__,
        "aiosync.transports",
        "aiosync.strategy",
        "aiosync.tensors",
        "aiosync.schemes",
    )

# The package itself shows no log records.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "TLS",
    "AckStatus",
    "AckTimeout",
    "AdmissionTimeout",
    "AiosyncError",
    "AppliedUpdate",
    "ApplyError",
    "AuthError",
    "Capabilities",
    "ConfigError",
    "ConnectError",
    "ConnectTimeout",
    "DistributedTransport",
    "DistributedWeightSyncScheme",
    "FrameTooLarge",
    "LastRead",
    "Limits",
    "LocalProtocolError",
    "MPTransport",
    "ManifestMismatch",
    "MemoryTransport",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "Observer",
    "PartialSyncError",
    "PeerClosed",
    "ProtocolError",
    "RPCTransport",
    "RPCWeightSyncScheme",
    "RayActorTransport",
    "RayModuleTransformReceiver",
    "RayModuleTransformScheme",
    "RayModuleTransformSender",
    "RayTransport",
    "RayWeightSyncScheme",
    "Ready",
    "RecvTimeout",
    "RemoteProtocolError",
    "SchemeHooks",
    "SendHandle",
    "SendReport",
    "SendTimeout",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "StaleVersion",
    "SwapTimeout",
    "SyncEvent",
    "SyncStats",
    "SyncTimeout",
    "TCPTransport",
    "TCPWeightSyncScheme",
    "Transport",
    "TransportBackend",
    "TransportBroken",
    "TransportBusy",
    "TransportClosed",
    "TransportError",
    "VersionSpan",
    "WeightMap",
    "WeightReceiver",
    "WeightSender",
    "WeightStrategy",
    "WeightSyncScheme",
    "WeightsChanged",
    "WeightsError",
    "WireVersionMismatch",
    "WorkerStats",
    "__version__",
    "connect_all",
    "gather_weights",
    "register_weight_sync_backend",
    "run",
    "staleness",
]
