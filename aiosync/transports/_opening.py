"""Connecting to a name that has several addresses, of which some may never answer (RFC 8305).

Must not import torch, nor know what is said over the connection.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

__all__ = ["Opening", "Place"]

Place: TypeAlias = tuple[int, Any]
"""A family of addresses, and what ``socket.connect()`` takes for it."""

_HEAD_START_SECONDS = 0.25
_UNDER_WAY = (errno.EINPROGRESS, errno.EINTR)


class Opening:
    """Connects to the first of several places that answers.

    The next one is begun when the last one has failed, or has not answered for a quarter of a
    second; those begun before go on.

    Args:
        prepare: Called with the socket that was connected; with an ``OSError`` it failed.
    """

    def __init__(self, prepare: Callable[[socket.socket], None]) -> None:
        self.failures: list[OSError] = []
        self._prepare = prepare
        self._pending: dict[socket.socket, Any] = {}
        self._found: socket.socket | None = None
        self._silent: list[Any] = []

    def why_not(self) -> str:
        """Which addresses were tried in vain, and why each failed; ``""`` if none was."""
        silent = [f"{where} did not answer" for where in self._silent]
        return "; ".join([*map(str, self.failures), *silent])

    async def connect(self, places: Sequence[Place]) -> socket.socket | None:
        """Return a connected socket, or ``None`` when every place has failed.

        Cancellation:
            Class A; closes every socket.
        """
        loop = asyncio.get_running_loop()
        waiting = deque(places)
        changed = asyncio.Event()
        try:
            while self._found is None and (waiting or self._pending):
                while waiting and self._found is None:
                    if self._begin(loop, *waiting.popleft(), changed):
                        break
                if self._found is not None or not self._pending:
                    continue
                changed.clear()
                timer = loop.call_later(_HEAD_START_SECONDS, changed.set) if waiting else None
                try:
                    await changed.wait()
                finally:
                    if timer is not None:
                        timer.cancel()
        except BaseException:  # cancelled: raised again
            self._silent = list(self._pending.values())
            if self._found is not None:
                self._found.close()
            raise
        finally:
            for sock in self._pending:  # the losers
                loop.remove_writer(sock)
                sock.close()
            self._pending.clear()
        if self._found is not None:
            self.failures.clear()
        return self._found

    def _begin(
        self, loop: asyncio.AbstractEventLoop, family: int, where: Any, changed: asyncio.Event
    ) -> bool:
        """Whether the answer has to be waited for."""
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as exc:  # no descriptors, or no such family
            self.failures.append(exc)
            return False
        try:
            sock.setblocking(False)
            error = sock.connect_ex(where)
            if error in _UNDER_WAY:
                self._pending[sock] = where
                loop.add_writer(sock, self._answered, loop, sock, changed)
                return True
        except OSError as exc:  # not an address, or the loop can watch no more
            self._pending.pop(sock, None)
            sock.close()
            self.failures.append(exc)
            return False
        self._settle(sock, where, error)
        return False

    def _answered(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, changed: asyncio.Event
    ) -> None:
        loop.remove_writer(sock)
        where = self._pending.pop(sock)
        self._settle(sock, where, sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        changed.set()

    def _settle(self, sock: socket.socket, where: Any, error: int) -> None:
        if self._found is not None:
            sock.close()  # another one was quicker
            return
        try:
            if error:
                text = f"Connect call failed {where}: {os.strerror(error)}"
                raise OSError(error, text)
            self._prepare(sock)
        except OSError as exc:
            sock.close()
            self.failures.append(exc)
        else:
            self._found = sock
