"""The lifespan messages of a server, with a feed around the application's own.

Must not import a web framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiosync.integrations._asgi_types import App, Message, Receive, Scope, Send
    from aiosync.serving import WeightFeed

__all__ = ["Lifespan"]


class _NotAsked(RuntimeError):
    """An application answered the server's start as if it were a request."""


class Lifespan:
    """One lifespan call: the feed starts before the application, and closes after it.

    Where the application knows nothing of lifespans, the server is answered from here.
    """

    def __init__(self, feed: WeightFeed, receive: Receive, send: Send) -> None:
        self._feed = feed
        self._receive_next = receive
        self._send = send
        self._started = False
        self._first: Message | None = None
        self._asked = False  # the application looked for a message
        self._foreign = False  # and answered with one of another protocol
        self._told = ""  # what the server heard last
        self._stopping = False

    async def run(self, app: App, scope: Scope) -> None:
        self._first = await self._receive_next()
        try:
            try:
                await self._feed.start()
                self._started = True
                await self._run_app(app, scope)
            except Exception as exc:  # raised again: the server sees it
                if not self._told:
                    await self._close()
                    await self._fail("startup", exc)
                raise
        finally:
            await self._close()

    async def _run_app(self, app: App, scope: Scope) -> None:
        try:
            await app(scope, self._receive, self._forward)
        except Exception:  # raised again, unless it only means that there is no lifespan
            if self._told or (self._asked and not self._foreign):
                raise
        if not self._told:
            await self._tell("startup.complete")
        if self._told == "lifespan.startup.complete":
            if not self._stopping:
                await self._receive_next()
            await self._tell("shutdown.complete")

    async def _receive(self) -> Message:
        self._asked = True
        message, self._first = self._first, None
        if message is None:
            message = await self._receive_next()
            self._stopping = True
        return message

    async def _forward(self, message: Message) -> None:
        kind = message["type"]
        if not kind.startswith("lifespan."):
            self._foreign = True
            raise _NotAsked(f"{kind} does not belong to a lifespan")
        if kind != "lifespan.startup.complete":
            try:
                await self._close()
            except Exception as exc:  # raised again: the server sees it
                if kind == "lifespan.shutdown.complete":
                    await self._fail("shutdown", exc)
                raise
        self._told = kind
        await self._send(message)

    async def _tell(self, what: str) -> None:
        await self._forward({"type": f"lifespan.{what}"})

    async def _fail(self, phase: str, error: Exception) -> None:
        self._told = f"lifespan.{phase}.failed"
        await self._send({"type": self._told, "message": f"{type(error).__name__}: {error}"})

    async def _close(self) -> None:
        if self._started:
            self._started = False
            await self._feed.aclose()
