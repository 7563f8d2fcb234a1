"""TorchRL integration: collectors and servers take the schemes of :mod:`aiosync.sync` as they are.

A program writes only ``weight_sync_schemes={"policy": SharedMemWeightSyncScheme()}`` with the class
of :mod:`aiosync.sync`; this module is loaded when TorchRL uses such a scheme. It makes the schemes
virtual subclasses of TorchRL's ``WeightSyncScheme``, and adapts the calls of TorchRL's collectors
and its ``InferenceServer``. Import it to register the names for TorchRL's
``WeightSyncScheme.from_backend()``, ``"aiosync-shared"`` for example.

Written for TorchRL 0.14. See ``docs/topics/torchrl.md``. Nothing else in aiosync imports TorchRL.
"""

from __future__ import annotations

import sys
from typing import Any

from torchrl.weight_update import weight_sync_schemes

from aiosync.integrations.torchrl._adapters import CollectorOwner, ServerOwner
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
    """Register the schemes with TorchRL. Idempotent.

    Afterwards every scheme of :mod:`aiosync.sync` is a virtual subclass of TorchRL's
    ``WeightSyncScheme``. Its ``from_backend()`` knows the schemes as ``"aiosync-<name>"`` for each
    of :func:`aiosync.schemes.backend_names`; ``"aiosync"`` alone means shared memory.
    """
    weight_sync_schemes.WeightSyncScheme.register(WeightSyncScheme)
    # TorchRL before 0.14 makes no schemes by name, so the names are of no use there.
    register_name = getattr(weight_sync_schemes, "register_weight_sync_backend", None)
    if register_name is not None:
        for name in backend_names():
            twin = twin_of(scheme_class(name))
            register_name(f"aiosync-{name}")(twin)
            if name == _DEFAULT_BACKEND:
                register_name("aiosync")(twin)


def owner_of(context: Any, scheme: WeightSyncScheme) -> CollectorOwner | ServerOwner | None:
    """Return the owner for a collector or an inference server; ``None`` for any other object."""
    for module, name, owner in _OWNERS:
        # An object of the class exists only if the class's module was imported.
        cls = getattr(sys.modules.get(module), name, None)
        if cls is not None and isinstance(context, cls):
            return owner(context, scheme)
    return None


register()
