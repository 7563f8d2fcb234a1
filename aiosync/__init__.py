"""aiosync: asyncio-first weight synchronization for reinforcement learning.

A trainer learns, many inference workers act; aiosync moves the policy's weights from one to the
others, versioned, never torn, and without hanging. See ``docs/quickstart.md``; the blocking
twin of this interface is :mod:`aiosync.sync`.
"""

from __future__ import annotations

from aiosync._run import run
from aiosync._version import __version__
from aiosync.errors import (
    AckTimeout,
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
    SyncTimeout,
    TransportBroken,
    TransportBusy,
    TransportClosed,
    TransportError,
    UnknownTransportError,
    WeightsError,
    WireVersionMismatch,
)
from aiosync.schemes import (
    AppliedUpdate,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    Ready,
    SendHandle,
    SharedMemWeightSyncScheme,
    TCPWeightSyncScheme,
    WeightReceiver,
    WeightSender,
    WeightSyncScheme,
    register_weight_sync_backend,
)
from aiosync.strategy import WeightStrategy
from aiosync.transports import (
    MemoryTransport,
    MPTransport,
    SharedMemTransport,
    TCPTransport,
    Transport,
    TransportBackend,
)
from aiosync.transports.credentials import TLS
from aiosync.types import AckStatus, Capabilities, Limits, SendReport, VersionId

__all__ = [
    "TLS",
    "AckStatus",
    "AckTimeout",
    "AiosyncError",
    "AppliedUpdate",
    "ApplyError",
    "AuthError",
    "Capabilities",
    "ConfigError",
    "ConnectError",
    "ConnectTimeout",
    "FrameTooLarge",
    "Limits",
    "LocalProtocolError",
    "MPTransport",
    "ManifestMismatch",
    "MemoryTransport",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "PartialSyncError",
    "PeerClosed",
    "ProtocolError",
    "Ready",
    "RecvTimeout",
    "RemoteProtocolError",
    "SendHandle",
    "SendReport",
    "SendTimeout",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "StaleVersion",
    "SyncTimeout",
    "TCPTransport",
    "TCPWeightSyncScheme",
    "Transport",
    "TransportBackend",
    "TransportBroken",
    "TransportBusy",
    "TransportClosed",
    "TransportError",
    "UnknownTransportError",
    "VersionId",
    "WeightReceiver",
    "WeightSender",
    "WeightStrategy",
    "WeightSyncScheme",
    "WeightsError",
    "WireVersionMismatch",
    "__version__",
    "register_weight_sync_backend",
    "run",
]
