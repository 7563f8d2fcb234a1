"""The blocking twin of the RPC scheme. Must not import torch."""

from __future__ import annotations

from typing import Final, Literal

import aiosync.schemes as aio
from aiosync.schemes._options import Fixed
from aiosync.strategy import WeightStrategy
from aiosync.sync._blocking import initialising, on_loop, option
from aiosync.sync._schemes import _TWINS, WeightSyncScheme
from aiosync.tensors import Dtypes
from aiosync.types import Limits, Require

__all__ = ["RPCWeightSyncScheme"]


class RPCWeightSyncScheme(WeightSyncScheme):
    """Blocking twin of :class:`aiosync.RPCWeightSyncScheme`; same arguments."""

    _async_class = aio.RPCWeightSyncScheme
    _scheme: aio.RPCWeightSyncScheme

    token: Fixed = Fixed()
    reconnect: option[float | None] = option("Seconds to keep trying to restore a lost link.")
    handshake_timeout: option[float] = option("Seconds that a peer has to prove its identity.")
    limits: option[Limits | None] = option("What a peer may announce.")
    patience: option[float] = option("Seconds without progress until a drop.")
    shared_memory: option[bool] = option("Workers on the sender's host read shared memory.")

    init_on_sender: Final = initialising(  # type: ignore[misc]  # the override has one argument more
        aio.RPCWeightSyncScheme.init_on_sender
    )
    create_transport: Final = on_loop(  # type: ignore[misc]  # the override has the same signature
        aio.RPCWeightSyncScheme.create_transport
    )

    def __init__(
        self,
        strategy: Literal["tensordict", "state_dict"] | WeightStrategy = "tensordict",
        sync: bool = True,
        *,
        per_worker_weights: bool = False,
        apply: Literal["auto", "manual"] = "auto",
        apply_copy: bool = False,
        guard: Literal["forward", "reading"] = "forward",
        strict: bool = True,
        require: Require = "all",
        timeout: float | None = 120.0,
        wire_dtype: Dtypes | None = None,
        address: str | None = None,
        token: str | bytes | None = None,
        reconnect: float | None = 30.0,
        patience: float = 60.0,
        handshake_timeout: float = 10.0,
        limits: Limits | None = None,
        shared_memory: bool = True,
    ) -> None:
        self._adopt(
            aio.RPCWeightSyncScheme(
                strategy,
                sync,
                per_worker_weights=per_worker_weights,
                apply=apply,
                apply_copy=apply_copy,
                guard=guard,
                strict=strict,
                require=require,
                timeout=timeout,
                wire_dtype=wire_dtype,
                address=address,
                token=token,
                reconnect=reconnect,
                patience=patience,
                handshake_timeout=handshake_timeout,
                limits=limits,
                shared_memory=shared_memory,
            )
        )

    @property
    def address(self) -> str:
        """Where the sender listens; with the port once it is bound."""
        return self._scheme.address

    @property
    def reconnects(self) -> int:
        """Receiver: how often a lost link was replaced."""
        return self._scheme.reconnects


_TWINS.append(RPCWeightSyncScheme)
