"""Links over ``torch.distributed``: payloads over a process group, messages over a stream.

Drives torch (see :mod:`aiosync.transports._gloo`); must not import schemes.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import ClassVar, Literal

from torch import distributed as dist

from aiosync.errors import ConfigError
from aiosync.transports.data_plane import INLINE_NBYTES, DataPlaneTransport
from aiosync.transports.stream import FramedTransport
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Cancellation, Capabilities, Limits

__all__ = ["DistributedTransport", "check_backend"]


def check_backend(backend: str) -> Literal["gloo", "nccl"]:
    """The back-end, if it can be used here.

    Raises:
        ConfigError: It is unknown or not supported, or this build of torch lacks it.
    """
    if backend == "nccl":
        raise ConfigError("backend='nccl' was never tested, and is not supported: use 'gloo'")
    if backend != "gloo":
        raise ConfigError(f"backend must be 'gloo', got {backend!r}")
    if not dist.is_available() or not dist.is_gloo_available():
        raise ConfigError("this build of torch has no torch.distributed with gloo")
    return "gloo"


class DistributedTransport(DataPlaneTransport):
    """A link whose large payloads travel over a process group. Takes ownership of ``control``.

    Messages and small payloads travel in the control stream. The first large payload makes a
    process group of two ranks, which never touches the default group.

    Args:
        control: Connected link for messages.
        rank: 0 at one end, 1 at the other.
        inline_nbytes: Payloads up to this size travel in the control stream.
        patience: Seconds that a transfer may stall before the link breaks.

    Raises:
        ConfigError: The back-end cannot be used here.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        name="distributed",
        cross_host=True,
        whole_payloads=True,
        send_cancellation=Cancellation.BREAKS_LINK,
        recv_cancellation=Cancellation.BREAKS_LINK,
    )

    def __init__(
        self,
        control: FramedTransport,
        *,
        rank: int,
        inline_nbytes: int = INLINE_NBYTES,
        patience: float = 10.0,
    ) -> None:
        check_backend("gloo")
        if rank not in (0, 1):
            raise ConfigError(f"rank must be 0 or 1, got {rank!r}: one for each end of the link")
        # Not before: some builds of torch have no process groups.
        from aiosync.transports._gloo import GlooPlane

        host = control.local_host
        plane = GlooPlane(rank, host, patience=patience)
        super().__init__(control, plane, inline_nbytes)

    @classmethod
    @contextlib.asynccontextmanager
    async def pair(
        cls, *, limits: Limits | None = None
    ) -> AsyncIterator[tuple[DistributedTransport, DistributedTransport]]:
        """Two connected ends in this process, closed when the context ends."""
        async with TCPTransport.pair(limits=limits) as (left, right):
            async with cls(left, rank=0) as one, cls(right, rank=1) as two:
                yield one, two
