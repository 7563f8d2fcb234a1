"""Progress of an update that a server passes on while it arrives. Must not import transports."""

from __future__ import annotations

import asyncio

from aiosync.errors import LocalProtocolError

__all__ = ["Abandoned", "Incoming"]


class Abandoned(LocalProtocolError):
    """The rest of an update never comes. The links that carry it go on with another one."""


class Incoming:
    """The verified part of an update that arrives. Use it on one event loop.

    The last chunk waits until the update is served, so that no worker has it before the server.
    """

    def __init__(self) -> None:
        self.nbytes: int = 0
        self._served = self._abandoned = False
        self._changed: asyncio.Future[None] | None = None

    def advance(self, nbytes: int) -> None:
        """Register that so many bytes from the start are here and verified."""
        self.nbytes = nbytes
        self._wake()

    def serve(self) -> None:
        """Register that the update is served: all its bytes may be sent."""
        self._served = True
        self._wake()

    def abandon(self) -> None:
        """Register that the rest does not come, or is not served; ignored after :meth:`serve`."""
        self._abandoned = not self._served
        self._wake()

    def until(self, nbytes: int, *, is_last: bool) -> asyncio.Future[None] | None:
        """Return a future to wait for before the bytes may be sent; ``None`` if they may be.

        Do not cancel it: other links wait for it, too.

        Raises:
            Abandoned: The rest never comes.
        """
        if self._abandoned:
            raise Abandoned("the update did not arrive whole")
        if self._served or (self.nbytes >= nbytes and not is_last):
            return None
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    def _wake(self) -> None:
        """Wake the links that wait; each then calls :meth:`until` again."""
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set_result(None)
