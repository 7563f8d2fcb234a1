"""Links that move messages and payloads; see :mod:`aiosync.transports.base` for the contract.

Must not import torch, tensors or schemes.
"""

from typing import TYPE_CHECKING

from aiosync._exports import lazily
from aiosync.transports.base import (
    Handler,
    Lender,
    Payload,
    Received,
    Transport,
    TransportBackend,
)
from aiosync.transports.credentials import TLS, Credentials
from aiosync.transports.framed_link import MemoryTransport, MPTransport
from aiosync.transports.ray import RayActorTransport, RayTransport
from aiosync.transports.shared_memory import SharedMemTransport
from aiosync.transports.tcp import TCPTransport

if TYPE_CHECKING:
    from aiosync.transports.distributed import DistributedTransport
    from aiosync.transports.rpc import RPCTransport
else:
    # These modules import torch, so they are loaded when a name of them is used.
    __getattr__, __dir__ = lazily(
        __name__, "aiosync.transports.distributed", "aiosync.transports.rpc"
    )

__all__ = [
    "TLS",
    "Credentials",
    "DistributedTransport",
    "Handler",
    "Lender",
    "MPTransport",
    "MemoryTransport",
    "Payload",
    "RPCTransport",
    "RayActorTransport",
    "RayTransport",
    "Received",
    "SharedMemTransport",
    "TCPTransport",
    "Transport",
    "TransportBackend",
]
