"""The blocking twin of the TCP scheme. Must not import torch."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Final, Literal

import aiosync.schemes as aio
from aiosync.schemes._options import Fixed
from aiosync.strategy import WeightStrategy
from aiosync.sync._blocking import on_loop, option
from aiosync.sync._schemes import _TWINS, WeightSyncScheme
from aiosync.tensors import Dtypes
from aiosync.transports.credentials import TLS
from aiosync.types import Limits, Require

__all__ = ["TCPWeightSyncScheme"]


class TCPWeightSyncScheme(WeightSyncScheme):
    """Blocking twin of :class:`aiosync.TCPWeightSyncScheme`; same arguments."""

    _async_class = aio.TCPWeightSyncScheme
    _scheme: aio.TCPWeightSyncScheme

    token: Fixed = Fixed()
    tls: Fixed = Fixed()
    dial: Fixed = Fixed()
    subscribe: option[bool] = option("Whether a worker gets every update.")
    reconnect: option[float | None] = option("Seconds to keep trying to restore a lost link.")
    stall_timeout: option[float | None] = option("Seconds without progress until a drop.")
    chunk_nbytes: option[int] = option("Bytes that share one checksum.")
    keepalive: option[float | None] = option("Seconds after which a silent peer is probed.")
    handshake_timeout: option[float] = option("Seconds that a peer has to prove its identity.")
    max_connections: option[int] = option("Links that a listening side accepts at a time.")
    limits: option[Limits | None] = option("What a peer may announce.")

    create_transport: Final = on_loop(  # type: ignore[misc]  # the override has the same signature
        aio.TCPWeightSyncScheme.create_transport
    )

    def __init__(
        self,
        address: str | Sequence[str] = "tcp://127.0.0.1:0",
        strategy: Literal["tensordict", "state_dict"] | WeightStrategy = "tensordict",
        *,
        sync: bool = True,
        per_worker_weights: bool = False,
        apply: Literal["auto", "manual"] = "auto",
        apply_copy: bool = False,
        guard: Literal["forward", "reading"] = "forward",
        strict: bool = True,
        require: Require = "all",
        timeout: float | None = 120.0,
        wire_dtype: Dtypes | None = None,
        token: str | bytes | None = None,
        tls: TLS | ssl.SSLContext | None = None,
        dial: Literal["receiver", "sender", "both"] = "receiver",
        subscribe: bool = True,
        reconnect: float | None = 30.0,
        stall_timeout: float | None = 60.0,
        chunk_nbytes: int = 4 * 2**20,
        keepalive: float | None = 30.0,
        handshake_timeout: float = 10.0,
        max_connections: int = 1024,
        limits: Limits | None = None,
    ) -> None:
        self._adopt(
            aio.TCPWeightSyncScheme(
                address,
                strategy,
                sync=sync,
                per_worker_weights=per_worker_weights,
                apply=apply,
                apply_copy=apply_copy,
                guard=guard,
                strict=strict,
                require=require,
                timeout=timeout,
                wire_dtype=wire_dtype,
                token=token,
                tls=tls,
                dial=dial,
                subscribe=subscribe,
                reconnect=reconnect,
                stall_timeout=stall_timeout,
                chunk_nbytes=chunk_nbytes,
                keepalive=keepalive,
                handshake_timeout=handshake_timeout,
                max_connections=max_connections,
                limits=limits,
            )
        )

    @property
    def address(self) -> str:
        """Where the side that listens does so; with the port once it is bound."""
        return self._scheme.address

    @property
    def reconnects(self) -> int:
        """Receiver: how often a lost link was replaced."""
        return self._scheme.reconnects

    @property
    def refused(self) -> dict[str, int]:
        """Connections that a listening side refused, by the name of the error."""
        return self._scheme.refused


_TWINS.append(TCPWeightSyncScheme)
