"""Links inside a Ray cluster: payloads through the object store, messages over a stream.

Ray is loaded when a link is made. Must not import torch or schemes.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import ClassVar

from aiosync.transports._beside import INLINE_NBYTES, BesideTransport
from aiosync.transports._ray_actor import RayActorTransport
from aiosync.transports._ray_carrier import RayCarrier
from aiosync.transports._ray_objects import RayObjects
from aiosync.transports.stream import FramedTransport
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Cancellation, Capabilities, Limits

__all__ = ["RayActorTransport", "RayTransport"]


class RayTransport(BesideTransport):
    """A link whose large payloads travel through Ray's object store. Owns ``control``.

    ``recv()`` without lent buffers returns the object itself where the system allows it: memory
    that all receivers of a node share, and that nobody can write to. A write through it ends the
    process. The memory lives until nothing refers to it any more.

    Args:
        control: Connected link for messages.
        objects: What the sender's links share; made when first needed if omitted.
        inline_nbytes: Payloads up to this size travel in the control stream.

    Raises:
        ConfigError: Ray is not installed, or this process is not connected to a cluster.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        name="ray",
        cross_host=True,
        whole_payloads=True,
        zero_copy_recv=True,
        send_cancellation=Cancellation.BREAKS_LINK,
        recv_cancellation=Cancellation.BREAKS_LINK,
    )

    def __init__(
        self,
        control: FramedTransport,
        *,
        objects: RayObjects | None = None,
        inline_nbytes: int = INLINE_NBYTES,
    ) -> None:
        carrier = RayCarrier(objects)
        super().__init__(control, carrier, inline_nbytes=inline_nbytes)
        self._ray_carrier = carrier

    def introduce(self) -> None:
        """Tell the other end which actor this process is, for its errors."""
        self._ray_carrier.introduce()

    @classmethod
    @contextlib.asynccontextmanager
    async def pair(
        cls,
        *,
        limits: Limits | None = None,
        objects: RayObjects | None = None,
        inline_nbytes: int = INLINE_NBYTES,
    ) -> AsyncIterator[tuple[RayTransport, RayTransport]]:
        """Two connected ends in this process, closed when the context ends."""
        async with TCPTransport.pair(limits=limits) as (left, right):
            async with (
                cls(left, objects=objects, inline_nbytes=inline_nbytes) as one,
                cls(right, objects=objects, inline_nbytes=inline_nbytes) as two,
            ):
                yield one, two
