"""The weight server: trainers push, workers pull, and the newest version stays on disk.

This package must never import the command line; it unpickles nothing.
"""

from __future__ import annotations

from aiosync.server._client import PulledWeights, PullProgress, WeightClient
from aiosync.server._server import WeightServer
from aiosync.server._store import StoredUpdate, StoreError, WeightStore

__all__ = [
    "PullProgress",
    "PulledWeights",
    "StoreError",
    "StoredUpdate",
    "WeightClient",
    "WeightServer",
    "WeightStore",
]
