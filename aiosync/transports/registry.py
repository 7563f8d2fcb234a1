"""Transports by name, imported only when asked for. Must not import torch or schemes."""

from __future__ import annotations

import importlib
from typing import cast

from aiosync.errors import ConfigError, UnknownTransportError
from aiosync.transports.base import Transport

__all__ = ["get_transport", "register_transport", "transport_names"]

_known: dict[str, str | type[Transport]] = {
    "distributed": "aiosync.transports.distributed:DistributedTransport",
    "memory": "aiosync.transports.pipe:MemoryTransport",
    "pipe": "aiosync.transports.pipe:MPTransport",
    "ray": "aiosync.transports.ray:RayTransport",
    "rpc": "aiosync.transports.rpc:RPCTransport",
    "tcp": "aiosync.transports.tcp:TCPTransport",
    "shm": "aiosync.transports.shared_memory:SharedMemTransport",
}


def register_transport(name: str, transport: str | type[Transport]) -> None:
    """Make a transport known.

    Args:
        name: Short lower-case name.
        transport: The class, or ``"module:Class"`` to import it on first use.

    Raises:
        ConfigError: The name is taken by another transport.
    """
    if _known.get(name, transport) != transport:
        raise ConfigError(f"a transport named {name!r} is registered already")
    _known[name] = transport


def transport_names() -> list[str]:
    """Every name that :func:`get_transport` knows, sorted."""
    return sorted(_known)


def get_transport(name: str) -> type[Transport]:
    """The transport class of that name.

    Raises:
        UnknownTransportError: There is none; the message lists the names there are.
    """
    found = _known.get(name)
    if found is None:
        names = ", ".join(transport_names())
        raise UnknownTransportError(f"no transport is named {name!r}; there are: {names}")
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = cast("type[Transport]", getattr(importlib.import_module(module), attribute))
        _known[name] = found
    return found
