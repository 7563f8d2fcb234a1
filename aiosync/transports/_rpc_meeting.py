"""How RPC workers learn where the sender of a scheme listens: it tells them, by RPC.

What was told is kept for the life of the process, by the random id of the scheme, as the worker
may ask long after. Drives torch; must not import schemes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import rpc

from aiosync.errors import ConnectError

__all__ = ["Told", "tell", "tell_address", "told", "wait_until_told"]

_MAX_KEPT = 1024

Told = tuple[str, bytes | None]
"""Where the sender listens, and the token of its streams."""

_lock = threading.Lock()
_told: dict[str, Told] = {}
_waiting: set[Callable[[], None]] = set()


def tell_address(scheme_id: str, url: str, token: bytes | None) -> None:
    """The sender of this scheme listens there. Called by RPC, on one of its threads."""
    with _lock:
        _told.pop(scheme_id, None)
        _told[scheme_id] = (url, token)
        if len(_told) > _MAX_KEPT:
            del _told[next(iter(_told))]
        waiting = list(_waiting)
    for wake in waiting:
        wake()


def told(scheme_id: str) -> Told | None:
    """What the sender of this scheme has told this process last."""
    return _told.get(scheme_id)


async def wait_until_told(scheme_id: str) -> None:
    """Wait until the sender of this scheme has told its address."""
    loop = asyncio.get_running_loop()
    news = asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(news.set)

    with _lock:
        _waiting.add(wake)
    try:
        while told(scheme_id) is None:
            await news.wait()
            news.clear()
    finally:
        with _lock:
            _waiting.discard(wake)


async def tell(name: str, scheme_id: str, url: str, token: bytes | None, timeout: float) -> None:
    """Tell one worker where the sender listens.

    Raises:
        ConnectError: It could not be told within ``timeout`` seconds, or does not exist (yet).
    """
    loop = asyncio.get_running_loop()
    answered = asyncio.Event()

    def on_done(_: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(answered.set)

    try:
        args = (scheme_id, url, token)
        future: Any = rpc.rpc_async(name, tell_address, args=args, timeout=timeout)
        future.add_done_callback(on_done)
        await answered.wait()
        future.value()
    except Exception as exc:  # of any type; the caller of connect() sees who is missing
        text = str(exc).partition("\n")[0]
        raise ConnectError(f"the RPC worker {name!r} was not told the address: {text}") from exc
