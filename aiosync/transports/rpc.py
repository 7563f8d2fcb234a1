"""Links between workers of a ``torch.distributed.rpc`` group. Must not import schemes."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import distributed

from aiosync.errors import ConfigError
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Capabilities

__all__ = ["RPCTransport", "check_rpc"]


class RPCTransport(TCPTransport):
    """A link between two workers of an RPC group: a stream, as :class:`TCPTransport` is.

    RPC only tells a worker where to connect, see :class:`aiosync.RPCWeightSyncScheme`.
    """

    capabilities: ClassVar[Capabilities] = replace(TCPTransport.capabilities, name="rpc")


def check_rpc() -> None:
    """See whether this process is a worker of an RPC group.

    Raises:
        ConfigError: RPC is not initialised in this process, or this build of torch has none.
    """
    if not distributed.is_available():
        raise ConfigError("this build of torch has no torch.distributed")
    from torch.distributed import rpc

    if not rpc.is_available():
        raise ConfigError("this build of torch has no torch.distributed.rpc")
    try:
        rpc.get_worker_info()
    except RuntimeError as exc:
        raise ConfigError(
            "RPC is not initialised in this process: call torch.distributed.rpc.init_rpc() first"
        ) from exc
