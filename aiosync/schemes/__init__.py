"""Schemes: one for each way to bring weights to workers. May import everything below it."""

from aiosync.receiver.guard import Guard
from aiosync.receiver.hooks import SchemeHooks, Transform
from aiosync.receiver.reading import Reading
from aiosync.receiver.receiver import WeightReceiver
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.cluster import DistributedWeightSyncScheme, RPCWeightSyncScheme
from aiosync.schemes.local import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from aiosync.schemes.no_sync import NoWeightSyncScheme
from aiosync.schemes.ray import (
    RayModuleTransformReceiver,
    RayModuleTransformScheme,
    RayModuleTransformSender,
    RayWeightSyncScheme,
)
from aiosync.schemes.registry import (
    backend_names,
    register_weight_sync_backend,
    scheme_class,
    scheme_from_backend,
)
from aiosync.schemes.sources import DeviceMap
from aiosync.schemes.state import AppliedUpdate, Ready, SendHandle
from aiosync.schemes.tcp import TCPWeightSyncScheme
from aiosync.sender import WeightSender

__all__ = [
    "AppliedUpdate",
    "DeviceMap",
    "DistributedWeightSyncScheme",
    "Guard",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RayModuleTransformReceiver",
    "RayModuleTransformScheme",
    "RayModuleTransformSender",
    "RayWeightSyncScheme",
    "Reading",
    "Ready",
    "SchemeHooks",
    "SendHandle",
    "SharedMemWeightSyncScheme",
    "TCPWeightSyncScheme",
    "Transform",
    "WeightReceiver",
    "WeightSender",
    "WeightSyncScheme",
    "backend_names",
    "register_weight_sync_backend",
    "scheme_class",
    "scheme_from_backend",
]

_BACKENDS: dict[str, type[WeightSyncScheme]] = {
    "distributed": DistributedWeightSyncScheme,
    "none": NoWeightSyncScheme,
    "process": MultiProcessWeightSyncScheme,
    "ray": RayWeightSyncScheme,
    "rpc": RPCWeightSyncScheme,
    "shared": SharedMemWeightSyncScheme,
    "tcp": TCPWeightSyncScheme,
}
for _name, _cls in _BACKENDS.items():
    register_weight_sync_backend(_name)(_cls)
