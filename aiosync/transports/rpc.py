"""Links between workers of a ``torch.distributed.rpc`` group: RPC only invites to a stream.

What a worker was told is kept for the life of the process, by the random id of the scheme, as it
may ask long after. Must not import schemes.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from dataclasses import replace
from typing import Any, ClassVar

from torch import distributed

from aiosync.errors import ConfigError, ConnectError
from aiosync.transports.data_plane import first_line
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Capabilities

__all__ = ["RPCTransport", "invitation", "invite", "need_rpc"]

_MAX_KEPT = 1024

_invitations: dict[str, tuple[str, bytes | None]] = {}


class RPCTransport(TCPTransport):
    """A link between two workers of an RPC group: a stream, as :class:`TCPTransport` is.

    RPC only tells a worker where to connect, see :class:`aiosync.RPCWeightSyncScheme`.
    """

    capabilities: ClassVar[Capabilities] = replace(TCPTransport.capabilities, name="rpc")


def need_rpc() -> Any:
    """The module ``torch.distributed.rpc``, in a process that is a worker of an RPC group.

    Raises:
        ConfigError: RPC is not initialised in this process, or this build of torch has none.
    """
    rpc: Any = distributed.is_available() and importlib.import_module("torch.distributed.rpc")
    if not rpc or not rpc.is_available():
        raise ConfigError("this build of torch has no torch.distributed.rpc")
    try:
        rpc.get_worker_info()
    except RuntimeError as exc:
        raise ConfigError(
            "RPC is not initialised in this process: call torch.distributed.rpc.init_rpc() first"
        ) from exc
    return rpc


def keep_invitation(scheme_id: str, url: str, token: bytes | None) -> None:
    """The sender of this scheme listens there. Called by RPC, on one of its threads."""
    _invitations.pop(scheme_id, None)
    _invitations[scheme_id] = (url, token)
    for old in list(_invitations)[:-_MAX_KEPT]:
        _invitations.pop(old, None)


def invitation(scheme_id: str) -> tuple[str, bytes | None] | None:
    """Where the sender of this scheme listens, and its token, as it has told this process last."""
    return _invitations.get(scheme_id)


async def invite(name: str, scheme_id: str, url: str, token: bytes | None, timeout: float) -> None:
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
        future = need_rpc().rpc_async(name, keep_invitation, args=args, timeout=timeout)
        future.add_done_callback(on_done)
        await answered.wait()
        future.value()
    except Exception as exc:  # of any type; the caller of connect() sees who is missing
        raise ConnectError(
            f"the RPC worker {name!r} was not told the address: {first_line(exc)}"
        ) from exc
