"""Which owner stands between an object of TorchRL and the scheme that it calls."""

from __future__ import annotations

import sys
from typing import Any

from aiosync.integrations.torchrl._collectors import CollectorOwner
from aiosync.integrations.torchrl._server import ServerOwner
from aiosync.sync import WeightSyncScheme

__all__ = ["owner_of"]


def owner_of(context: Any, scheme: WeightSyncScheme) -> CollectorOwner | ServerOwner | None:
    """The owner for a collector or an inference server; ``None`` for anything else of TorchRL."""
    if _is_a(context, "torchrl.collectors._base", "BaseCollector"):
        return CollectorOwner(context, scheme)
    if _is_a(context, "torchrl.modules.inference_server._server", "InferenceServer"):
        return ServerOwner(context, scheme)
    return None


def _is_a(value: object, module: str, name: str) -> bool:
    # Its class was imported, or there would be no such object.
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(value, cls)
