"""TorchRL's collectors and servers take the schemes of :mod:`aiosync.sync` as they are.

There is one thing to write, ``weight_sync_schemes={"policy": SharedMemWeightSyncScheme()}`` with
the class of :mod:`aiosync.sync`: this module is loaded by itself when such a scheme meets
TorchRL. It makes the schemes virtual subclasses of TorchRL's ``WeightSyncScheme``, and knows how
its collectors and its ``InferenceServer`` call them. Import it to have the names for TorchRL's
``WeightSyncScheme.from_backend()`` registered, ``"aiosync-shared"`` for example.

Written for TorchRL 0.14. See ``docs/topics/torchrl.md``. Nothing else in aiosync imports TorchRL.
"""

from __future__ import annotations

import sys
from typing import Any

from torchrl.weight_update import weight_sync_schemes

from aiosync.integrations.torchrl._owners import CollectorOwner, ServerOwner
from aiosync.schemes import backend_names, scheme_class
from aiosync.sync import WeightSyncScheme
from aiosync.sync._schemes import twin_of

__all__ = ["owner_of", "register"]

_DEFAULT_BACKEND = "shared"
_OWNERS = (
    ("torchrl.collectors._base", "BaseCollector", CollectorOwner),
    ("torchrl.modules.inference_server._server", "InferenceServer", ServerOwner),
)


def register() -> None:
    """Register the schemes. Idempotent.

    Every scheme of :mod:`aiosync.sync` is a virtual subclass of TorchRL's ``WeightSyncScheme``
    then, and known to its ``from_backend()`` as ``"aiosync-<name>"`` for each of
    :func:`aiosync.schemes.backend_names`; ``"aiosync"`` alone means shared memory.
    """
    weight_sync_schemes.WeightSyncScheme.register(WeightSyncScheme)
    # TorchRL before 0.14 makes no schemes by name, so that nobody there could ask for these.
    register_name = getattr(weight_sync_schemes, "register_weight_sync_backend", None)
    if register_name is not None:
        for name in backend_names():
            twin = twin_of(scheme_class(name))
            register_name(f"aiosync-{name}")(twin)
            if name == _DEFAULT_BACKEND:
                register_name("aiosync")(twin)


def owner_of(context: Any, scheme: WeightSyncScheme) -> CollectorOwner | ServerOwner | None:
    """The owner for a collector or an inference server; ``None`` for anything else of TorchRL."""
    for module, name, owner in _OWNERS:
        # Its class was imported, or there would be no such object.
        cls = getattr(sys.modules.get(module), name, None)
        if cls is not None and isinstance(context, cls):
            return owner(context, scheme)
    return None


register()
