"""Links between workers of a ``torch.distributed.rpc`` group: RPC only carries invitations.

The sender tells each worker the address of its stream by RPC. The worker's process keeps this
invitation by the random id of the scheme and the name of the model, as long as it lives, because
the worker's scheme may ask for it much later. Must not import schemes.
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

    RPC only carries the sender's address to a worker, see :class:`aiosync.RPCWeightSyncScheme`.
    """

    capabilities: ClassVar[Capabilities] = replace(TCPTransport.capabilities, name="rpc")


def need_rpc() -> Any:
    """Return the module ``torch.distributed.rpc``, in a process that is a worker of an RPC group.

    Raises:
        ConfigError: RPC is not initialised in this process, or this build of torch has no RPC.
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


def keep_invitation(key: str, url: str, token: bytes | None) -> None:
    """Keep the address and the token of a scheme's sender. RPC calls this, on one of its threads.

    Only the newest 1024 invitations are kept.
    """
    _invitations.pop(key, None)
    _invitations[key] = (url, token)
    for old in list(_invitations)[:-_MAX_KEPT]:
        _invitations.pop(old, None)


def invitation(key: str) -> tuple[str, bytes | None] | None:
    """Return the URL and the token that the sender of a scheme last told this process.

    ``None`` if it has told nothing yet.
    """
    return _invitations.get(key)


async def invite(name: str, key: str, url: str, token: bytes | None, timeout: float) -> None:
    """Tell one RPC worker the address and the token of the sender.

    Args:
        name: Name of the RPC worker.
        key: Random id of the scheme, and name of the model.
        url: Address on which the sender listens.
        token: Token of the sender.
        timeout: Seconds for the call.

    Raises:
        ConnectError: The worker could not be told within ``timeout`` seconds, or does not exist
            (yet).
    """
    loop = asyncio.get_running_loop()
    answered = asyncio.Event()

    def on_done(_: Any) -> None:
        # A closed loop raises RuntimeError; no task waits for the answer then.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(answered.set)

    try:
        args = (key, url, token)
        future = need_rpc().rpc_async(name, keep_invitation, args=args, timeout=timeout)
        future.add_done_callback(on_done)
        await answered.wait()
        future.value()
    except Exception as exc:
        # torch raises errors of any type; the caller of connect() sees which worker it was.
        raise ConnectError(
            f"the RPC worker {name!r} was not told the address: {first_line(exc)}"
        ) from exc
