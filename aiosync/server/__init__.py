"""The weight server: trainers push, workers pull, and the newest version stays on disk.

This package must never import the command line; it unpickles nothing.
"""

from typing import TYPE_CHECKING

from aiosync._exports import lazily
from aiosync.server.client import PulledWeights, PullProgress, WeightClient

if TYPE_CHECKING:
    from aiosync.server.server import WeightServer
    from aiosync.server.store import StoredUpdate, StoreError, WeightStore
else:  # these need torch, which a request for the status does not
    __getattr__, __dir__ = lazily(__name__, "aiosync.server.server", "aiosync.server.store")

__all__ = [
    "PullProgress",
    "PulledWeights",
    "StoreError",
    "StoredUpdate",
    "WeightClient",
    "WeightServer",
    "WeightStore",
]
