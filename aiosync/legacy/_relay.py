"""Has a worker's scheme receive from a trainer that uses a transport of this generation.

The transport knows no handshake, no guard and no staging. So the scheme receives from another
one in its own process, which sends on what arrives. Must not import the blocking classes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import aiosync.schemes as aio
from aiosync import transports
from aiosync._tasks import TaskOwner
from aiosync.errors import AiosyncError, ConfigError, PartialSyncError
from aiosync.legacy._endpoint import Arrived, Endpoint
from aiosync.legacy._greeting import Greeting
from aiosync.sender.workers import watch_process
from aiosync.transports._kept_errors import without_frames
from aiosync.transports.base import Transport

__all__ = ["Relay", "link_over"]


def link_over(sock: socket.socket, greeting: Greeting) -> Transport:
    """The link that a transport of this generation at the other end has. Needs a running loop."""
    if greeting.speaks == "memory":
        return transports.SharedMemTransport(sock)
    return transports.MPTransport(sock)


class Relay:
    """Hands on what arrives, one update after the other. Belongs to the portal's loop.

    Args:
        sock: The pipe, after the greetings; owned from now on.
        greeting: What the trainer said.
        model_id: Name of the receiving scheme's model.
        tasks: Owner of the relay's task.
        on_end: Called when the trainer's link has ended, before the scheme can see an end.
    """

    def __init__(
        self,
        sock: socket.socket,
        greeting: Greeting,
        model_id: str | None,
        tasks: TaskOwner,
        on_end: Callable[[], None],
    ) -> None:
        self.error: AiosyncError | None = None
        """Why the trainer's link has ended; ``None`` while it has not."""
        self._on_end = on_end
        outside = link_over(sock, greeting)
        watch_process(outside, greeting.pid)
        self._endpoint = Endpoint(outside, sock, newest_only=False, speaks=None)
        mine, theirs = socket.socketpair()
        self.transport: Transport = transports.MPTransport(theirs)
        """What the scheme receives from."""
        # What arrives is not of this process, nor is the time that the worker takes.
        self._sender = aio.MultiProcessWeightSyncScheme(timeout=None)
        self._sender.init_on_sender(model_id, transports={0: transports.MPTransport(mine)})
        self._settled = asyncio.Event()
        self._settled.set()
        tasks.start(self._run(), "aiosync legacy relay")

    async def _run(self) -> None:
        try:
            await self._sender.connect()
            while True:
                arrived = await self._endpoint.take(None)
                assert arrived is not None
                self._settled.clear()
                await self._endpoint.acknowledge(arrived, await self._hand_on(arrived))
                self._settled.set()
        except AiosyncError as exc:
            self.error = without_frames(exc)
            self._on_end()
            self._sender.abort()  # the scheme sees that nothing more will come
        finally:
            self._settled.set()

    async def _hand_on(self, arrived: Arrived) -> BaseException | None:
        """Have the scheme apply an update; returns why it did not."""
        try:
            await self._sender.send(arrived.weights)
        except PartialSyncError as exc:
            return exc.failed[0]
        except ConfigError as exc:
            return exc
        return None

    async def until_settled(self, seconds: float) -> None:
        """Wait until the trainer was told of what was applied: the process may end then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._settled.wait()

    async def aclose(self) -> None:
        """Close both links. Idempotent."""
        await self._sender.aclose()
        await self._endpoint.aclose()

    def abort(self) -> None:
        """The same, at once."""
        self._sender.abort()
        self._endpoint.abort()
