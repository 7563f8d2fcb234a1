"""What programs of this generation read a transport's pipe with.

Workers then looked at ``receiver._transport.pipe`` themselves: ``poll()``, and ``recv()`` for
``((model_id, weights), "update_weights")``. No connection is below any more, nor any pickle.
Must not import torch.
"""

from __future__ import annotations

import abc
from typing import Any

from aiosync.errors import PeerClosed

__all__ = ["PipeView"]


class PipeView(abc.ABC):
    """Reads weights as if they were messages of a connection."""

    @abc.abstractmethod
    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether weights, or the end of the link, are there within ``timeout`` seconds.

        ``None`` waits as long as it takes.
        """

    @abc.abstractmethod
    def _take(self) -> tuple[str, Any] | None:
        """Wait for weights, and take them; ``None`` when there are none any more."""

    def recv(self) -> tuple[tuple[str, Any], str]:
        """Wait for weights; ``receiver.apply_weights()`` or ``send_ack()`` answers them.

        Returns:
            ``((model_id, weights), "update_weights")``; the weights on memory of their own.

        Raises:
            EOFError: The other side went away.
        """
        try:
            taken = self._take()
        except PeerClosed as exc:
            raise EOFError(str(exc)) from exc
        if taken is None:
            raise EOFError("the link was closed")
        return taken, "update_weights"
