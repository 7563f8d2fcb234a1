"""One end of a link for blocking callers: an endpoint on the portal's loop.

Must not import torch.
"""

from __future__ import annotations

import abc
import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from aiosync.errors import LocalProtocolError, TransportClosed
from aiosync.legacy._endpoint import Endpoint
from aiosync.legacy._pipes import take_socket
from aiosync.sync._portal import Lease, lease, refuse_inside_loop

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["Closing", "Link", "is_up", "poll", "wait_for_any"]

_T = TypeVar("_T")


class _Tenant:
    """What a transport leaves on the portal. Refers to no transport."""

    endpoint: Endpoint | None = None

    def forgotten(self) -> None:
        return None  # nobody closes transports of this generation

    def abort(self) -> None:
        if self.endpoint is not None:
            self.endpoint.abort()


class Link:
    """An endpoint, made by the first use of it, and the right to use the portal."""

    def __init__(self, pipe: Any, make: Callable[[socket.socket], Endpoint]) -> None:
        self._sock: socket.socket | None = take_socket(pipe)
        self._make = make
        self._pid = os.getpid()
        self._lease: Lease | None = None
        self._tenant = _Tenant()
        self._closed = False

    @property
    def inherited(self) -> bool:
        """Whether the endpoint is that of the process that this one was forked from."""
        return self._pid != os.getpid() and self._lease is not None

    def call(self, what: str, function: Callable[[Endpoint], Coroutine[Any, Any, _T]], /) -> _T:
        """Run a coroutine with the endpoint on the portal's loop."""
        refuse_inside_loop(what, "the transports of aiosync.transports")
        if self._closed:
            raise TransportClosed("this transport was closed")
        if self.inherited:
            raise LocalProtocolError(f"{what}(): this transport was used before the process forked")
        if self._lease is None or not self._lease.valid:
            self._lease = lease(self._tenant)

        async def run() -> _T:
            if self._tenant.endpoint is None:
                assert self._sock is not None
                self._tenant.endpoint = self._make(self._sock)
                self._sock = None
            return await function(self._tenant.endpoint)

        return self._lease.call(run())

    def close(self) -> None:
        """Close the link. Idempotent."""
        self._closed = True
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        held, self._lease = self._lease, None
        if held is None or not held.valid:
            return
        try:
            if self._tenant.endpoint is not None:
                held.call(self._tenant.endpoint.aclose())
        finally:
            held.release()

    def __del__(self) -> None:
        held: Lease | None = getattr(self, "_lease", None)
        if held is not None:
            held.abort()
        sock: socket.socket | None = getattr(self, "_sock", None)
        if sock is not None:
            sock.close()


class Closing(abc.ABC):
    """``with transport:`` and ``close()``."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the link; the other side sees ``PeerClosed``. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def is_up(link: Link) -> bool:
    async def look(endpoint: Endpoint) -> bool:
        return endpoint.error is None

    if link.inherited:
        return False
    try:
        return link.call("check_connection", look)
    except TransportClosed:
        return False


def poll(link: Link, timeout: float | None) -> bool:
    """Whether an update, or the end of the link, is there in time."""

    async def wait(endpoint: Endpoint) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await endpoint.until_ready()
        except TimeoutError:
            return False
        return True

    return link.call("poll", wait)


def wait_for_any(links: Sequence[Link], timeout: float | None) -> None:
    """Wait until an update can be taken from one of the links, or one has ended.

    Args:
        links: At least one, all of this process.
        timeout: Seconds; ``None`` waits as long as it takes.
    """

    async def itself(endpoint: Endpoint) -> Endpoint:
        return endpoint

    endpoints = [link.call("receive_weights", itself) for link in links]

    async def wait(_: Endpoint) -> None:
        looks = [asyncio.ensure_future(endpoint.until_ready()) for endpoint in endpoints]
        try:
            await asyncio.wait(looks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for look in looks:
                look.cancel()
            await asyncio.gather(*looks, return_exceptions=True)

    links[0].call("receive_weights", wait)
