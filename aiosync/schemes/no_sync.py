"""The scheme that never synchronizes weights, behind the interface of the others.

Must not import a concrete transport, nor another concrete scheme.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from torch import nn

from aiosync.errors import ConfigError, LocalProtocolError, TransportClosed
from aiosync.protocol import as_version
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.fabric import Fabric
from aiosync.schemes.lifecycle import ConnectArguments
from aiosync.schemes.results import AppliedUpdate, SendHandle
from aiosync.schemes.worker import Worker
from aiosync.tensors import FlatBuffer, Layout, Target, collect, lacks_memory
from aiosync.tensors.copying import copy_tensors
from aiosync.transports.base import Transport
from aiosync.types import SendReport
from aiosync.wire import NO_LIMITS, Manifest

__all__ = ["NoWeightSyncScheme"]

_NOTHING = SendReport(epoch=0, version=0, acked=frozenset())


class _NoFabric(Fabric[WeightSyncScheme]):
    """A fabric whose sides never meet."""

    async def meet(
        self, scheme: WeightSyncScheme, timeout: float | None, arguments: ConnectArguments
    ) -> None:
        """Prepare a worker's model, and raise if it has no memory: no weights will come."""
        if isinstance(self.life.side, Worker):
            await self.life.side.prepare(scheme, scheme.model)
            if lacks_memory(scheme.model):
                raise ConfigError(
                    "NoWeightSyncScheme never sends weights, but the worker's model is on the meta "
                    "device: materialise it in the worker, or use a scheme that sends weights"
                )


class NoWeightSyncScheme(WeightSyncScheme):
    """A scheme that does nothing: the workers' models are updated by other means, or never.

    ``send()`` reports version 0 and no workers; ``receive()`` returns ``None``.
    """

    _fabric_type = _NoFabric

    def carry(self, model: object) -> None:
        """Carry a copy of a model's weights in pickles of this object.

        A worker that is given the model on the meta device, without memory, as TorchRL's collectors
        do, begins with them.

        Args:
            model: Module whose weights are copied; an object that is no module has none.
        """
        unpack = None
        if isinstance(model, nn.Module):
            try:
                leaves = collect(model)
            except ConfigError as exc:
                # Only workers whose model has no memory need the weights, and refuse then.
                unpack = functools.partial(_refuse, str(exc))
            else:
                layout = Layout.plan(leaves.leaves, NO_LIMITS)
                flat = FlatBuffer(layout.nbytes)
                # The memory is not zeroed, and the gaps between tensors are pickled, too.
                flat.array[:] = 0
                copy_tensors(
                    zip(flat.views(layout), (leaf.tensor for leaf in leaves.leaves), strict=True)
                )
                data = bytes(flat.memoryview())
                unpack = functools.partial(_unpack, layout.manifest, data, dict(leaves.values))
        hooks = dataclasses.replace(self._terms.hooks, prepare_model=unpack)
        self._terms = dataclasses.replace(self._terms, hooks=hooks)

    async def send(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
        max_lag: int | None = None,
    ) -> SendReport:
        """Send nothing."""
        del weights, worker_ids
        # Mistakes are refused as by the other schemes.
        self._require("send", "sender")
        self._limit(timeout)
        # This lets other tasks run.
        await self.wait_lag_below(1 if max_lag is None else max_lag)
        return _NOTHING

    def send_nowait(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> SendHandle:
        """Send nothing."""
        del weights, worker_ids
        self._require("send_nowait", "sender")
        self._limit(timeout)
        future = asyncio.get_running_loop().create_future()
        future.set_result(_NOTHING)
        return SendHandle(0, future)

    async def receive(self, timeout: float | None = None) -> AppliedUpdate | None:
        """Wait for the timeout, and return ``None``.

        Args:
            timeout: Seconds; ``None`` returns at once, as the trainer never sends anything.

        Raises:
            ConfigError: The timeout is not a number.
            LocalProtocolError: Not a connected receiver.
            TransportClosed: This object was closed, possibly meanwhile.

        Cancellation:
            Class A.
        """
        self._require("receive", "receiver")
        limit = self._limit(timeout)
        if timeout is None or timeout <= 0:
            # A task that receives in a loop has to let others run.
            await asyncio.sleep(0)
            return None
        try:
            async with asyncio.timeout(limit):
                await self._life.ended.wait()
        except TimeoutError:
            return None
        raise TransportClosed("this scheme was closed")

    async def wait_for_version(self, version: int, *, timeout: float | None = None) -> int:
        """Return 0, the only version there is.

        Raises:
            ConfigError: A version above 0 is asked for, which never arrives, or the timeout is
                not a number.
            LocalProtocolError: Not connected.
        """
        self._require("wait_for_version")
        self._limit(timeout)
        if as_version("version", version):
            raise ConfigError(
                f"NoWeightSyncScheme sends nothing: version {version} will never arrive"
            )
        await asyncio.sleep(0)
        return 0

    async def wait_lag_below(self, limit: int, *, timeout: float | None = None) -> int:
        """Return 0: no worker is ever behind."""
        self._require("wait_lag_below", self._life.role or "receiver")
        as_version("a lag", limit, 1)
        return await self.wait_for_version(0, timeout=timeout)

    async def pull(self, *, min_version: int | None = None, timeout: float | None = None) -> int:
        """Return as :meth:`wait_for_version` does: there is nothing to ask for."""
        self._require("pull", "receiver")
        least = 0 if min_version is None else min_version
        return await self.wait_for_version(least, timeout=timeout)

    async def wait_staged(self, version: int = 1, *, timeout: float | None = None) -> int:
        """Return as :meth:`wait_for_version` does: nothing is ever staged."""
        return await self.wait_for_version(version, timeout=timeout)

    def apply_pending(self) -> int | None:
        """Return ``None``: nothing is ever staged."""
        return None

    def _is_ready(self) -> bool:
        # No version has to come.
        return self._life.connected

    async def _wait_until_ready(self, timeout: float | None) -> None:
        """Return at once if the scheme is connected; raise if it is not."""
        self._require("ready")
        self._limit(timeout)

    def create_transport(self, pipe_or_context: Any) -> Transport:
        """Refuse: there is no link.

        Raises:
            LocalProtocolError: Always.
        """
        raise LocalProtocolError("NoWeightSyncScheme has no transport")


def _unpack(manifest: Manifest, data: bytes, values: dict[str, Any], model: Any) -> None:
    """Give a model without memory the pickled weights; a hook of the worker's ``connect()``."""
    if lacks_memory(model):
        layout = Layout(manifest)
        flat = FlatBuffer(layout.nbytes)
        flat.memoryview()[:] = data
        Target(model).apply_tensors(layout, flat.views(layout), values)


def _refuse(why: str, model: Any) -> None:
    """Raise if a model has no memory, as there are no pickled weights; a hook of ``connect()``."""
    if lacks_memory(model):
        raise ConfigError(f"the worker's model is on the meta device, and {why}")
