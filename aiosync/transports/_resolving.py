"""Looking up host names, without ever waiting for a name server that does not answer.

``loop.getaddrinfo()`` would need a thread of the loop's executor, which cannot be interrupted and
is waited for when the loop is closed and when the interpreter ends. Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from typing import Any, TypeAlias

__all__ = ["look_up"]

_Found: TypeAlias = list[Any]
"""What ``socket.getaddrinfo()`` returns."""


async def look_up(host: str, port: int) -> _Found:
    """Return what ``socket.getaddrinfo()`` finds for stream sockets.

    Calls for one host and port at a time share one thread, however many loops they come from and
    however often they are repeated while the name server is silent.

    Raises:
        OSError: There is no such name, or it cannot be looked up.

    Cancellation:
        Class A; takes effect at once. The thread ends when the resolver gives up, and nobody
        waits for it.
    """
    try:  # numbers need no resolver, which would need a thread
        flags = 0 if host == "localhost" else socket.AI_NUMERICHOST
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except socket.gaierror:
        pass
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[_Found] = loop.create_future()
    lookup = _join(host, port, waiter)
    try:
        return await waiter
    finally:
        with _lock:
            lookup.waiters.discard(waiter)


class _Lookup:
    """One that is under way, in a thread of its own."""

    def __init__(self, host: str, port: int) -> None:
        self.key = host, port
        self.waiters: set[asyncio.Future[_Found]] = set()

    def start(self) -> None:
        # A daemon: the interpreter ends without it.
        thread = threading.Thread(target=self._run, name="aiosync-lookup", daemon=True)
        try:
            thread.start()  # without the lock, which garbage that it collects may need
        except RuntimeError as exc:
            self._end([], OSError(str(exc)))

    def _run(self) -> None:
        found: _Found = []
        error: Exception | None = None
        try:
            found = socket.getaddrinfo(*self.key, type=socket.SOCK_STREAM)
        except Exception as exc:  # noqa: BLE001  # raised again where it is waited for
            error = exc
        self._end(found, error)

    def _end(self, found: _Found, error: Exception | None) -> None:
        with _lock:
            _under_way.pop(self.key, None)
            waiters, self.waiters = self.waiters, set()
        for waiter in waiters:
            with contextlib.suppress(RuntimeError):  # its loop was closed
                waiter.get_loop().call_soon_threadsafe(_deliver, waiter, found, error)


def _deliver(waiter: asyncio.Future[_Found], found: _Found, error: Exception | None) -> None:
    if waiter.done():  # cancelled
        return
    if error is not None:
        waiter.set_exception(error)
    else:
        waiter.set_result(found)


# Re-entrant: garbage that is collected while it is held may be a coroutine that waited.
_lock = threading.RLock()
_under_way: dict[tuple[str, int], _Lookup] = {}
_registered = False


def _join(host: str, port: int, waiter: asyncio.Future[_Found]) -> _Lookup:
    global _registered
    with _lock:
        if not _registered:
            os.register_at_fork(after_in_child=_forget)
            _registered = True
        lookup = _under_way.get((host, port))
        started = lookup is not None
        if lookup is None:
            lookup = _under_way[host, port] = _Lookup(host, port)
        lookup.waiters.add(waiter)
    if not started:
        lookup.start()
    return lookup


def _forget() -> None:
    # A forked child has none of the threads.
    global _lock
    _lock = threading.RLock()
    _under_way.clear()
