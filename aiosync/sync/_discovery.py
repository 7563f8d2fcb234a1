"""Finding the integration with the library that calls a blocking scheme.

Collectors and servers of other libraries call schemes in ways of their own. What is special about
one of them is in :mod:`aiosync.integrations`, which is loaded when an object of that library is
seen, and never before: the names below are all that this layer knows of them. Must not import
torch, nor an integration when it is imported itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from aiosync.sync._schemes import WeightSyncScheme

__all__ = ["Owner", "discover", "owner_of", "rpc_runs"]

_LIBRARY = "torchrl"
_SEEN = "torchrl.weight_update.weight_sync_schemes"  # all its users of schemes have imported it
_INTEGRATION = "aiosync.integrations.torchrl"


class Owner(Protocol):
    """Stands between a library's object and the scheme that it calls.

    Attributes:
        blocks_loops: Whether the object blocks the event loop of its caller anyway, as in a
            notebook, where there is no other API. The scheme does, too, then.
    """

    blocks_loops: bool

    def call(
        self,
        name: str,
        proceed: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Do what calling the method ``name`` of the scheme shall do.

        Args:
            name: Name of the method.
            proceed: What the method does for everybody else.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """

    def stands_for(self, context: object) -> bool:
        """Whether it was made for that object."""


def discover() -> None:
    """Load the integration with the library if that is imported already."""
    # Not while it is still being imported: the classes are not there yet.
    if _INTEGRATION not in sys.modules and hasattr(sys.modules.get(_SEEN), "WeightSyncScheme"):
        importlib.import_module(_INTEGRATION)


def owner_of(context: object, scheme: WeightSyncScheme) -> Owner | None:
    """What stands between ``context`` and ``scheme``; ``None`` for an object of the user's own."""
    packages = {cls.__module__.partition(".")[0] for cls in type(context).__mro__}
    if _LIBRARY not in packages or _SEEN not in sys.modules:  # what has schemes has imported it
        return None
    found: Owner | None = importlib.import_module(_INTEGRATION).owner_of(context, scheme)
    return found


def rpc_runs() -> bool:
    """Whether this process has joined ``torch.distributed.rpc``."""
    rpc = sys.modules.get("torch.distributed.rpc")
    return rpc is not None and getattr(rpc, "_is_current_rpc_agent_set", lambda: False)()
