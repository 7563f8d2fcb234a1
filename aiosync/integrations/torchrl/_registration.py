"""Makes aiosync's blocking classes known to TorchRL. Must not import collectors."""

from __future__ import annotations

from torchrl.weight_update import weight_sync_schemes

from aiosync.schemes import backend_names, scheme_class
from aiosync.sync import WeightSyncScheme
from aiosync.sync._schemes import twin_of

__all__ = ["register"]

_DEFAULT_BACKEND = "shared"


def register() -> None:
    """Register the schemes. Idempotent.

    Every scheme of :mod:`aiosync.sync` is a virtual subclass of TorchRL's ``WeightSyncScheme``
    then, and known to its ``from_backend()`` as ``"aiosync-<name>"`` for each of
    :func:`aiosync.schemes.backend_names`; ``"aiosync"`` alone means shared memory.
    """
    weight_sync_schemes.WeightSyncScheme.register(WeightSyncScheme)
    for name in backend_names():
        twin = twin_of(scheme_class(name))
        weight_sync_schemes.register_weight_sync_backend(f"aiosync-{name}")(twin)
        if name == _DEFAULT_BACKEND:
            weight_sync_schemes.register_weight_sync_backend("aiosync")(twin)
