"""Links over ``torch.distributed.rpc``: payloads by calls, messages over a stream.

See :mod:`aiosync.transports._rpc_carrier`; must not import schemes.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import ClassVar

from torch import distributed

from aiosync.errors import ConfigError
from aiosync.transports._beside import INLINE_NBYTES, BesideTransport
from aiosync.transports._framed import FramedTransport
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Cancellation, Capabilities, Limits

__all__ = ["RPCTransport", "rpc_name"]


class RPCTransport(BesideTransport):
    """A link whose large payloads travel by RPC. Takes ownership of ``control``.

    Both processes have called ``torch.distributed.rpc.init_rpc()`` before, and both are workers
    of one RPC group. Messages and small payloads travel in the control stream. A large payload
    travels in calls of some MiB; each is copied once at the receiver, into memory that is used
    again. No call is outstanding while nothing is sent.

    RPC executes what its peers send, by design: use it only between hosts that trust each other.

    Args:
        control: Connected link for messages.
        inline_nbytes: Payloads up to this size travel in the control stream.
        patience: Seconds that a transfer may stall before the link breaks.

    Raises:
        ConfigError: RPC is not initialised in this process.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        name="rpc",
        cross_host=True,
        whole_payloads=True,
        send_cancellation=Cancellation.BREAKS_LINK,
        recv_cancellation=Cancellation.BREAKS_LINK,
    )

    def __init__(
        self,
        control: FramedTransport,
        *,
        inline_nbytes: int = INLINE_NBYTES,
        patience: float = 30.0,
    ) -> None:
        own_name = rpc_name()
        # Not before: some builds of torch have no RPC.
        from aiosync.transports._rpc_carrier import RPCCarrier

        carrier = RPCCarrier(own_name, patience=patience)
        super().__init__(control, carrier, inline_nbytes=inline_nbytes)

    @classmethod
    @contextlib.asynccontextmanager
    async def pair(
        cls, *, limits: Limits | None = None, inline_nbytes: int = INLINE_NBYTES
    ) -> AsyncIterator[tuple[RPCTransport, RPCTransport]]:
        """Two connected ends in this process, closed when the context ends.

        The RPC worker of this process calls itself.
        """
        async with TCPTransport.pair(limits=limits) as (left, right):
            async with (
                cls(left, inline_nbytes=inline_nbytes) as one,
                cls(right, inline_nbytes=inline_nbytes) as two,
            ):
                yield one, two


def rpc_name() -> str:
    """Name of this process's RPC worker.

    Raises:
        ConfigError: RPC is not initialised in this process, or this build of torch has none.
    """
    if not distributed.is_available():
        raise ConfigError("this build of torch has no torch.distributed.rpc")
    from torch.distributed import rpc

    if not rpc.is_available():
        raise ConfigError("this build of torch has no torch.distributed.rpc")
    try:
        return str(rpc.get_worker_info().name)
    except RuntimeError as exc:
        raise ConfigError(
            "RPC is not initialised in this process: call torch.distributed.rpc.init_rpc() first"
        ) from exc
