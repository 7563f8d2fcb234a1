"""The blocking API: the classes of :mod:`aiosync` under the same names, without ``await``.

For classic trainers, collectors and workers that run no event loop. Importing it starts
nothing; the first call that has to wait starts one background thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiosync
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

if not TYPE_CHECKING:  # checkers shall not take every name for one of this module's

    def __getattr__(name: str) -> object:
        text = f"module 'aiosync.sync' has no attribute {name!r}"
        if name in aiosync.__all__:
            text += f", as it only has the schemes: use aiosync.{name}"
        raise AttributeError(text, name=name)
