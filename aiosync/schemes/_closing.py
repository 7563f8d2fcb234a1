"""How a scheme ends: awaited, at once, or collected without either.

Must not import the sender's or the receiver's half of the scheme.
"""

from __future__ import annotations

import asyncio
import warnings
from typing import TYPE_CHECKING, Self

from aiosync._tasks import current_task
from aiosync.errors import LocalProtocolError
from aiosync.schemes._core import SchemeCore
from aiosync.transports.base import Transport

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["ClosingScheme"]


class ClosingScheme(SchemeCore):
    """Methods that close; see :class:`aiosync.WeightSyncScheme`."""

    async def aclose(self) -> None:
        """Close every link, task, socket and buffer of this object. Idempotent, bounded.

        A receiver's model keeps its weights, in memory of its own. Workers of a closed sender
        see ``PeerClosed``.

        Raises:
            LocalProtocolError: The scheme's own loop runs in another thread.
        """
        loop = self._loop
        if self._inherited:
            self.abort()  # the tasks are the parent's, and nothing runs them here
        elif loop is None or loop is asyncio.get_running_loop() or not loop.is_running():
            await self._close_here()
        elif not self._closed:
            raise LocalProtocolError(
                "the event loop of this scheme runs in another thread: close it there, with "
                "asyncio.run_coroutine_threadsafe(scheme.aclose(), loop), or call abort()"
            )

    async def _close_here(self) -> None:
        """Close what there is, on its own loop. Also called again, and after :meth:`abort`."""
        if self._closed:
            return
        self._closed = True
        self._stop_connecting()
        self._close_listener()
        try:
            if self._sender is not None:
                await self._sender.aclose()
            if self._receiver is not None:
                await self._receiver.aclose()
        finally:
            self._abort_unused_links()

    def abort(self) -> None:
        """Close at once from synchronous code, for destructors and signal handlers."""
        if self._closed:
            return
        self._closed = True
        self._stop_connecting()
        self._close_listener()
        self._abort_runtime()
        self._abort_unused_links()

    def _abort_runtime(self) -> None:
        if self._sender is not None:
            self._sender.abort()
        elif self._maker is not None:
            self._maker.close()
        if self._receiver is not None:
            self._receiver.abort()

    def _stop_connecting(self) -> None:
        """End a connect() that goes on in another task; it raises ``TransportClosed``."""
        task, self._connecting = self._connecting, None
        if task is not None and not self._inherited and task is not current_task():
            task.cancel()

    def _close_listener(self) -> None:
        if self._listener is not None and not self._inherited:
            self._listener.close()

    def _abort_unused_links(self) -> None:
        for link in self._links.values():
            link.abort()
        if isinstance(self._pipe, Transport):
            self._pipe.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._abandon()

    def _abandon(self) -> None:
        """Close what nobody closed, and say so."""
        if getattr(self, "_closed", True) or self._inherited:
            return  # also where an option was refused: there is nothing yet
        if self._sender is None and self._receiver is None:
            self._close_listener()
            return
        try:
            warnings.warn(
                f"{self!r} was never closed: use `async with scheme:` or `await scheme.aclose()`",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
        finally:  # the warning may be an error
            self.abort()
