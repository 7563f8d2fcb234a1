"""How RPC workers learn where the sender of a scheme listens: it tells them, by RPC.

What was told is kept for the life of the process, by the random id of the scheme, as the worker
may ask long after. Drives torch; must not import schemes.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable

from torch.distributed import rpc

from aiosync.errors import ConnectError
from aiosync.transports._rpc_flight import call, from_thread

__all__ = ["Told", "stream_to", "take_stream", "tell", "told", "wait_until_told"]

_MAX_KEPT = 1024
_SECRET_NBYTES = 16

Told = tuple[str, bytes | None]
"""Where the sender listens, and the token of the control stream."""

_lock = threading.Lock()
_told: dict[str, Told] = {}
_streams: dict[str, socket.socket] = {}
_waiting: dict[str, list[Callable[[], None]]] = {}


# -- in the worker, called by RPC on one of its threads ----------------------------------------


def tell_address(scheme_id: str, url: str, token: bytes | None) -> None:
    """The sender of this scheme listens there."""
    with _lock:
        _told.pop(scheme_id, None)
        _told[scheme_id] = (url, token)
        while len(_told) > _MAX_KEPT:
            del _told[next(iter(_told))]
    _wake(scheme_id)


def dial_back(scheme_id: str, host: str, port: int, secret: bytes, timeout: float) -> None:
    """Open a stream to the sender of this scheme, for whichever receiver wants it first."""
    sock = socket.create_connection((host, port), timeout)
    try:
        sock.sendall(secret)
        _make_ready(sock)
    except OSError:
        sock.close()
        raise
    with _lock:
        old = _streams.pop(scheme_id, None)
        _streams[scheme_id] = sock
    if old is not None:
        old.close()
    _wake(scheme_id)


def _wake(scheme_id: str) -> None:
    with _lock:
        waiting = _waiting.pop(scheme_id, [])
    for wake in waiting:
        wake()


# -- in the worker, by its scheme --------------------------------------------------------------


def told(scheme_id: str) -> Told | None:
    """What the sender of this scheme has told this process last."""
    with _lock:
        return _told.get(scheme_id)


def take_stream(scheme_id: str) -> socket.socket | None:
    """A stream that the sender of this scheme asked for; each is given once."""
    with _lock:
        return _streams.pop(scheme_id, None)


async def wait_until_told(scheme_id: str) -> None:
    """Wait until the sender of this scheme has told its address or asked for a stream."""
    loop = asyncio.get_running_loop()
    news = asyncio.Event()

    def wake() -> None:
        from_thread(loop, news.set)

    with _lock:
        if scheme_id in _told or scheme_id in _streams:
            return
        _waiting.setdefault(scheme_id, []).append(wake)
    try:
        await news.wait()
    finally:
        with _lock:
            left = [each for each in _waiting.pop(scheme_id, []) if each is not wake]
            if left:
                _waiting[scheme_id] = left


# -- in the sender -----------------------------------------------------------------------------


async def tell(name: str, scheme_id: str, url: str, token: bytes | None, timeout: float) -> None:
    """Tell one worker where the sender listens.

    Raises:
        ConnectError: It could not be told within ``timeout`` seconds, or does not exist (yet).
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Exception | None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if not answer.done():
            answer.set_result(error)

    args = (scheme_id, url, token)
    call(loop, name, tell_address, args, timeout, settle)
    error = await answer
    if error is not None:
        raise ConnectError(
            f"the RPC worker {name!r} was not told the address: {_text(error)}"
        ) from error


def stream_to(name: str, scheme_id: str, host: str, timeout: float) -> socket.socket:
    """A stream to one worker, which dials. Blocks for a round trip.

    Args:
        name: The RPC worker.
        scheme_id: Which scheme there gets it.
        host: Address of this host that the worker reaches.
        timeout: Seconds for all of it.

    Raises:
        ConnectError: It did not work in time.
    """
    secret = secrets.token_bytes(_SECRET_NBYTES)
    with socket.create_server((host, 0)) as listening:
        listening.settimeout(timeout)
        port = listening.getsockname()[1]
        try:
            args = (scheme_id, host, port, secret, timeout)
            rpc.rpc_sync(name, dial_back, args=args, timeout=timeout)
            while True:
                sock, _ = listening.accept()
                try:
                    sock.settimeout(timeout)
                    shown = sock.recv(_SECRET_NBYTES, socket.MSG_WAITALL)
                except OSError:
                    shown = b""
                if secrets.compare_digest(shown, secret):
                    _make_ready(sock)
                    return sock
                sock.close()  # a stranger
        except (OSError, RuntimeError, ValueError) as exc:
            raise ConnectError(
                f"the RPC worker {name!r} did not open a stream to {host}: {_text(exc)}"
            ) from exc


def _make_ready(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)


def _text(error: Exception) -> str:
    return str(error).partition("\n")[0]
