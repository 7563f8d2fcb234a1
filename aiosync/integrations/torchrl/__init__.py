"""TorchRL's collectors and servers take the schemes of :mod:`aiosync.sync` as they are.

There is one thing to write, ``weight_sync_schemes={"policy": SharedMemWeightSyncScheme()}`` with
the class of :mod:`aiosync.sync`: this module is loaded by itself when such a scheme meets
TorchRL. It makes the schemes virtual subclasses of TorchRL's ``WeightSyncScheme``, and knows how
its collectors and its ``InferenceServer`` call them. Import it to have the names for TorchRL's
``WeightSyncScheme.from_backend()`` registered, ``"aiosync-shared"`` for example.

Written for TorchRL 0.14. See ``docs/topics/torchrl.md``. Nothing else in aiosync imports TorchRL.
"""

from __future__ import annotations

from aiosync.integrations.torchrl._owners import owner_of
from aiosync.integrations.torchrl._registration import register

__all__ = ["owner_of", "register"]

register()
