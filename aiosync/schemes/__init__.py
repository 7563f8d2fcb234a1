"""Schemes: one for each way to bring weights to workers, and the back-end names that TorchRL uses.

May import everything below it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

from aiosync.errors import ConfigError
from aiosync.receiver.guard import Guard
from aiosync.receiver.reads import Reading
from aiosync.receiver.receiver import WeightReceiver
from aiosync.receiver.scheme_hooks import SchemeHooks
from aiosync.receiver.transformer import Transform
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.connect_all import connect_all
from aiosync.schemes.distributed import DistributedWeightSyncScheme
from aiosync.schemes.local import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from aiosync.schemes.no_sync import NoWeightSyncScheme
from aiosync.schemes.ray import (
    RayModuleTransformReceiver,
    RayModuleTransformScheme,
    RayModuleTransformSender,
    RayWeightSyncScheme,
)
from aiosync.schemes.results import AppliedUpdate, Ready, SendHandle
from aiosync.schemes.rpc import RPCWeightSyncScheme
from aiosync.schemes.sources import DeviceMap
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
    "WeightSyncBackend",
    "WeightSyncScheme",
    "backend_names",
    "connect_all",
    "register_weight_sync_backend",
    "scheme_class",
]

WeightSyncBackend: TypeAlias = Literal[
    "none",
    "direct",
    "shared",
    "thread",
    "process",
    "multiprocessing",
    "distributed",
    "rpc",
    "ray",
    "tcp",
]
"""Names of back-ends; :func:`register_weight_sync_backend` adds others, which no type lists."""

_ALIASES = {"direct": "none", "thread": "shared", "multiprocessing": "process"}
_known: dict[str, type[WeightSyncScheme]] = {
    "distributed": DistributedWeightSyncScheme,
    "none": NoWeightSyncScheme,
    "process": MultiProcessWeightSyncScheme,
    "ray": RayWeightSyncScheme,
    "rpc": RPCWeightSyncScheme,
    "shared": SharedMemWeightSyncScheme,
    "tcp": TCPWeightSyncScheme,
}
for _name, _cls in _known.items():
    _cls._backend = _name
_Scheme = TypeVar("_Scheme", bound=type[WeightSyncScheme])


def register_weight_sync_backend(name: str) -> Callable[[_Scheme], _Scheme]:
    """Class decorator that registers a scheme under a back-end name.

    Raises:
        ConfigError: Another scheme has that name.
    """

    def register(cls: _Scheme) -> _Scheme:
        if name in _ALIASES or _known.get(name, cls) is not cls:
            raise ConfigError(f"a weight-sync backend named {name!r} exists already")
        _known[name], cls._backend = cls, name
        return cls

    return register


def backend_names() -> list[str]:
    """Return every name and alias, sorted."""
    return sorted({*_known, *_ALIASES})


def scheme_class(backend: str) -> type[WeightSyncScheme]:
    """Return the class that a back-end name stands for.

    Raises:
        ConfigError: There is none with that name.
    """
    cls = _known.get(_ALIASES.get(backend, backend))
    if cls is None:
        raise ConfigError(
            f"Unsupported weight-sync backend {backend!r}. Expected one of {backend_names()}"
        )
    return cls
