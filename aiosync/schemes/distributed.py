"""The scheme over process groups of ``torch.distributed``. Must not import torch."""

from __future__ import annotations

import functools
import os
from typing import Any, ClassVar, Literal

from aiosync._tasks import in_own_thread
from aiosync.errors import AiosyncError, AuthError, ConnectError
from aiosync.schemes.cluster import INLINE_NBYTES, ClusterFabric, ClusterScheme
from aiosync.schemes.options import DistributedOptions
from aiosync.sender import How
from aiosync.strategy import WeightStrategy
from aiosync.tensors import Dtypes
from aiosync.transports.address import Address, own_host
from aiosync.transports.data_plane import DataPlaneTransport
from aiosync.transports.distributed import DistributedTransport
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits, Require

__all__ = ["DistributedWeightSyncScheme"]

_SEPARATOR = b"\n"


class DistributedWeightSyncScheme(DistributedOptions, ClusterScheme):
    """Scheme that sends weights over process groups of ``torch.distributed``.

    Each worker has a control stream to the sender, which carries messages and small updates, and a
    process group of two ranks for large ones; they meet through the control stream. The default
    group of the process, of a DDP trainer for example, is never touched. Workers may come and go at
    any time. Those on the sender's own host do not need a group: they read updates from shared
    memory, unless told otherwise (``shared_memory``). See ``docs/topics/torch-distributed.md``.

    Only the control stream is authenticated: ``torch.distributed`` itself is made for trusted
    networks.

    Args:
        backend: ``"gloo"``; ``"nccl"`` is refused.
        sync: Accepted for TorchRL's signature: ``send()`` waits for the workers in any case.
        timeout: Default timeout of calls in seconds; ``None`` for ever.
        strategy: As for :class:`WeightSyncScheme`, like all options up to ``require``.
        per_worker_weights: ``send({0: ..., 1: ...})`` gives each worker its own weights.
        apply: ``"auto"``, or ``"manual"`` to apply only in calls that ask for it.
        apply_copy: Copy updates into the parameters' memory.
        buffers: ``"persistent"`` keeps updates out of other buffers of a worker's module.
        guard: ``"forward"``, or ``"reading"`` for ``with scheme.reading():``.
        strict: Every name and dtype must match.
        require: Number of workers that must apply an update for ``send()`` to succeed.
        wire_dtype: A floating-point dtype to which the sender casts the weights on their way; or
            one for each name pattern.
        first_version: A sender's first version; a trainer that resumes continues with it.
        store: A ``torch.distributed`` store in which workers look up the sender, for processes that
            are not started by the sender. Not pickled.
        address: Address at which the sender listens for control streams. By default on any port of
            the address from which this host reaches ``store`` or ``MASTER_ADDR``, or else of the
            loopback address.
        token: Secret of the control streams. Generated when omitted: it travels in the pickle of
            the scheme, or through ``store``.
        reconnect: Seconds that a worker keeps trying to restore a lost link; ``None`` for ever, 0
            for not at all.
        patience: Seconds that a transfer may stall before the worker's link breaks.
        handshake_timeout: Seconds that a peer has to prove its identity.
        inline_nbytes: Updates up to this size travel in the control stream.
        limits: Limits on what a peer may announce.
        shared_memory: Workers on the sender's host read updates from shared memory instead of a
            stream and a group. Must be true on both sides. On Linux only.

    Raises:
        ConfigError: An option has an illegal value, or the back-end cannot be used here.
    """

    def __init__(
        self,
        backend: Literal["gloo", "nccl"] = "gloo",
        sync: bool = True,
        timeout: float | None = 120.0,
        *,
        strategy: Literal["tensordict", "state_dict"] | WeightStrategy = "tensordict",
        per_worker_weights: bool = False,
        apply: Literal["auto", "manual"] = "auto",
        apply_copy: bool = False,
        buffers: Literal["all", "persistent"] = "all",
        guard: Literal["forward", "reading"] = "forward",
        strict: bool = True,
        require: Require = "all",
        wire_dtype: Dtypes | None = None,
        first_version: int = 1,
        store: Any = None,
        address: str | None = None,
        token: str | bytes | None = None,
        reconnect: float | None = 30.0,
        patience: float = 10.0,
        handshake_timeout: float = 10.0,
        inline_nbytes: int = INLINE_NBYTES,
        limits: Limits | None = None,
        shared_memory: bool = True,
    ) -> None:
        self.backend = backend
        super().__init__(
            strategy,
            sync=sync,
            per_worker_weights=per_worker_weights,
            apply=apply,
            apply_copy=apply_copy,
            buffers=buffers,
            guard=guard,
            strict=strict,
            require=require,
            timeout=timeout,
            reconnect=reconnect,
            handshake_timeout=handshake_timeout,
            limits=limits,
            wire_dtype=wire_dtype,
            first_version=first_version,
            shared_memory=shared_memory,
        )
        self._use(_StoreFabric(address, token, store))
        self.inline_nbytes = inline_nbytes
        self.patience = patience


class _StoreFabric(ClusterFabric[DistributedWeightSyncScheme]):
    """Fabric whose workers find the sender in a store, and get large payloads from a group.

    Args:
        address: As for :class:`ClusterFabric`.
        token: As for :class:`ClusterFabric`.
        store: The store; ``None`` if workers get the address otherwise. Not pickled.
    """

    _of_process: ClassVar[tuple[str, ...]] = (*ClusterFabric._of_process, "_store")

    _store: Any = None

    def __init__(self, address: str | None, token: str | bytes | None, store: Any) -> None:
        super().__init__(address, token)
        self._store = store
        # True if the user gave no token.
        self._is_token_made = token is None

    def how(self, scheme: DistributedWeightSyncScheme) -> How:
        """Return how ``send()`` copies: links may send a copy while it is still being made."""
        return "copy ahead"

    def carry(
        self, scheme: DistributedWeightSyncScheme, control: TCPTransport, *, listened: bool
    ) -> DataPlaneTransport:
        """Return a link whose large payloads go through a group."""
        # A link that the user has made by create_transport() gets its end later. Only the sender
        # has large payloads.
        return DistributedTransport(
            control,
            inline_nbytes=scheme.inline_nbytes,
            patience=scheme.patience,
        )

    def default_address(self) -> Address:
        """Return the address at which the store's host, or ``MASTER_ADDR``, reaches this host."""
        towards = getattr(self._store, "host", None) or os.environ.get("MASTER_ADDR")
        return Address("tcp", own_host(towards))

    def early_address(self) -> Address | None:
        """Return the address to bind before ``init_on_sender()``, for earlier copies of the scheme.

        ``None`` if they know an address, or look in the store.
        """
        return None if self.address or self._store is not None else self.default_address()

    def may_retry(self, error: AiosyncError) -> bool:
        """Return True if another attempt may succeed, also while the store has no token yet."""
        # The token that was generated here is only a guess until the trainer publishes its own.
        guesses = self._store is not None and self._is_token_made
        return (guesses and isinstance(error, AuthError)) or super().may_retry(error)

    # -- finding each other in the store ---------------------------------------------------------

    @property
    def not_found_text(self) -> str:
        """Text of errors while the store has no address; empty without a store."""
        if self._store is None:
            return ""
        return "its address is not in the store, under the same model_id"

    @property
    def _key(self) -> str:
        """The key of the trainer's address and token in the store."""
        return f"aiosync/{self.model_id}"

    async def publish(self, address: Address) -> None:
        """Put the address and the token into the store, if there is one."""
        if self._store is None:
            return
        try:
            token = self.credentials.token_bytes or b""
            value = str(address).encode() + _SEPARATOR + token.hex().encode()
            announce = functools.partial(self._store.set, self._key, value)
            await in_own_thread(announce, "aiosync-cluster")
        except RuntimeError as exc:
            # torch raises this.
            raise ConnectError(f"the store did not accept the trainer's address: {exc}") from exc

    async def find(self) -> tuple[str, bytes | None] | None:
        """Return the address and the token in the store; ``None`` without them."""
        try:
            # Only check() neither blocks nor leaves a thread behind when it is cancelled.
            if self._store is None or not await self.ask(self._store.check, [self._key]):
                return None
            found = await self.ask(self._store.get, self._key)
        except RuntimeError as exc:
            # torch raises this.
            if self.address:
                # The store is gone; the trainer may not be.
                return None
            raise ConnectError(f"the store cannot be reached: {exc}") from exc
        url, _, token = bytes(found).partition(_SEPARATOR)
        return url.decode(), bytes.fromhex(token.decode())
