"""The blocking twins of the Ray schemes. Must not import torch."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

import aiosync.schemes as aio
from aiosync.schemes._engine import INLINE_NBYTES
from aiosync.schemes._options import Fixed
from aiosync.schemes.ray_transform import RayModuleTransformSender
from aiosync.strategy import WeightStrategy
from aiosync.sync._blocking import blocking, initialising, on_loop, option
from aiosync.sync._schemes import _TWINS, WeightSyncScheme
from aiosync.tensors import Dtypes
from aiosync.types import Limits, Require

__all__ = ["RayModuleTransformScheme", "RayWeightSyncScheme"]


class RayWeightSyncScheme(WeightSyncScheme):
    """Blocking twin of :class:`aiosync.RayWeightSyncScheme`; same arguments."""

    _async_class: ClassVar[type[aio.RayWeightSyncScheme]] = aio.RayWeightSyncScheme
    _scheme: aio.RayWeightSyncScheme

    token: Fixed = Fixed()
    reconnect: option[float | None] = option("Seconds to keep trying to restore a lost link.")
    handshake_timeout: option[float] = option("Seconds that a peer has to prove its identity.")
    limits: option[Limits | None] = option("What a peer may announce.")
    backend: option[str] = option("Kept for TorchRL's signature.")
    inline_nbytes: option[int] = option("Updates up to this size travel in the control stream.")
    shared_memory: option[bool] = option("Workers on the sender's host read shared memory.")

    init_on_sender: Final = initialising(  # type: ignore[misc]  # the override has one argument more
        aio.RayWeightSyncScheme.init_on_sender
    )
    send: Final = blocking(  # type: ignore[misc]  # the override has the same signature
        aio.RayWeightSyncScheme.send,
        at_once=aio.RayWeightSyncScheme._send_at_once,
    )
    create_transport: Final = on_loop(  # type: ignore[misc]  # the override has the same signature
        aio.RayWeightSyncScheme.create_transport
    )

    def __init__(
        self,
        strategy: Literal["tensordict", "state_dict"] | WeightStrategy = "tensordict",
        backend: str = "gloo",
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
        handshake_timeout: float = 10.0,
        inline_nbytes: int = INLINE_NBYTES,
        limits: Limits | None = None,
        shared_memory: bool = True,
    ) -> None:
        self._adopt(
            self._async_class(
                strategy,
                backend,
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
                handshake_timeout=handshake_timeout,
                inline_nbytes=inline_nbytes,
                limits=limits,
                shared_memory=shared_memory,
            )
        )

    @property
    def address(self) -> str:
        """Where the sender listens for control streams; with the port once it is bound."""
        return self._scheme.address

    @property
    def reconnects(self) -> int:
        """Receiver: how often a lost link was replaced."""
        return self._scheme.reconnects


class RayModuleTransformScheme(RayWeightSyncScheme):
    """Blocking twin of :class:`aiosync.RayModuleTransformScheme`; same arguments."""

    _async_class = aio.RayModuleTransformScheme
    _scheme: aio.RayModuleTransformScheme

    init_on_sender: Final = initialising(  # type: ignore[misc]  # the override has one argument more
        aio.RayModuleTransformScheme.init_on_sender
    )

    def _set_transform(self, ray_transform: Any) -> None:
        self._scheme._set_transform(ray_transform)

    def create_sender(self) -> RayModuleTransformSender:
        """What makes the receiver inside the transform's actor."""
        return self._scheme.create_sender()


_TWINS.append(RayWeightSyncScheme)
_TWINS.append(RayModuleTransformScheme)
