"""One end of a scheme of the older generation: the transports that the scheme made for it.

Must not import schemes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiosync._repr import in_every_state
from aiosync.legacy.transports import Backend, MPTransport

if TYPE_CHECKING:
    from typing import Self

    from aiosync.legacy.schemes import WeightSyncScheme

__all__ = ["SchemeEnd"]


class SchemeEnd:
    """Base class of senders and receivers, with the transports of a scheme.

    A pickle of it holds the scheme and nothing else.

    Attributes:
        connected: True if ``connect()`` of the scheme succeeded, or is under way.
    """

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme
        self._transports: dict[int, Any] = {}
        self.connected = False

    @property
    def transports(self) -> dict[int, Any]:
        """Transports by index of the worker, as the scheme made them."""
        found = self._transports.items()
        return {idx: each.inner if isinstance(each, Backend) else each for idx, each in found}

    def close(self, *, at_once: bool = False) -> None:
        """Close every transport that can be closed.

        Args:
            at_once: Close without waiting, for destructors and signal handlers.
        """
        for transport in self._transports.values():
            if at_once and isinstance(transport, MPTransport):
                transport.abort()
            elif hasattr(transport, "close"):  # a user's transport need not have close()
                transport.close()

    def __reduce__(self) -> tuple[type[Self], tuple[WeightSyncScheme]]:
        return type(self), (self._scheme,)

    @in_every_state
    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._scheme!r}>"
