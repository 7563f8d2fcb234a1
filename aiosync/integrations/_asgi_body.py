"""The body of a request, received before the request is admitted.

A client that uploads slowly would hold up every switch if its request were admitted first. Must
not import a web framework.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aiosync.integrations._asgi_types import Message, Receive, Scope

__all__ = ["is_announced", "receive_early", "replayed"]

# A message of one byte takes some hundred bytes of memory, so the bytes alone are no bound.
_MOST_MESSAGES: Final = 4096


def is_announced(scope: Scope) -> bool:
    """Whether the headers say that a body follows."""
    empty = False
    for name, value in scope["headers"]:
        if name == b"transfer-encoding":
            return True
        if name == b"content-length":
            if value.strip(b" \t0"):
                return True
            empty = True
    # From HTTP/2 on a body needs neither; a server knows at once where there is none.
    later = scope.get("http_version", "1.1").startswith(("2", "3"))
    return later and not empty and scope["method"] not in ("GET", "HEAD")


async def receive_early(receive: Receive, limit: int) -> deque[Message] | None:
    """The messages of a body, or those of its first ``limit`` bytes.

    The message that reaches the bound is kept as a whole. ``None`` if the client left.
    """
    messages: deque[Message] = deque()
    size = 0
    while size < limit and len(messages) < _MOST_MESSAGES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        messages.append(message)
        if message["type"] != "http.request" or not message.get("more_body", False):
            break
        size += len(message.get("body") or b"")
    return messages


def replayed(messages: deque[Message], receive: Receive) -> Receive:
    """A ``receive`` that returns ``messages`` as they were, and then what the server says."""

    async def replay() -> Message:
        return messages.popleft() if messages else await receive()

    return replay
