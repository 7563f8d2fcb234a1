"""Whole responses of an ASGI application."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["send_json"]


async def send_json(
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    status: int,
    body: Any,
    *more: tuple[bytes, bytes],
    is_head: bool = False,
) -> None:
    """Send a whole response of JSON, which no cache may keep.

    Args:
        send: The server's function.
        status: Status of the response.
        body: Values for JSON.
        *more: Further headers.
        is_head: True if the request was a HEAD, which gets no body.
    """
    data = json.dumps(body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(data)),
        (b"cache-control", b"no-store"),
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if is_head else data})
