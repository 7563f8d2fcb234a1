"""No synchronization at all, behind the interface of a scheme.

Must not import a concrete transport, nor another concrete scheme.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from aiosync._tasks import running_loop
from aiosync.errors import ConfigError, LocalProtocolError, TransportClosed
from aiosync.protocol.indices import as_index
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.handles import AppliedUpdate, SendHandle
from aiosync.schemes.sources import Sources
from aiosync.tensors import FlatBuffer, Layout, Target, collect, lacks_memory
from aiosync.transports.base import Transport
from aiosync.types import SendReport
from aiosync.wire import NO_LIMITS, Manifest

__all__ = ["NoWeightSyncScheme"]


class NoWeightSyncScheme(WeightSyncScheme):
    """A scheme that does nothing: the workers' models are updated by other means, or never.

    ``send()`` reports version 0 and no workers; ``receive()`` returns ``None``.
    """

    # Of carry(), and unlike what _reset() sets, in pickles.
    _carried: tuple[Manifest, bytes, dict[str, Any]] | None = None
    _not_carried = ""

    def _reset(self) -> None:
        super()._reset()
        self._closing: asyncio.Event | None = None  # for who waits

    def _abort_unused_links(self) -> None:
        super()._abort_unused_links()
        if self._closing is not None:
            self._closing.set()

    def carry(self, model: object) -> None:
        """Take along a copy of a model's weights, in pickles of this object.

        A worker that is given the model on the meta device, without memory, as TorchRL's
        collectors do, begins with them.

        Args:
            model: What to copy; nothing, if it is not a module.
        """
        self._carried = None
        self._not_carried = ""
        if not isinstance(model, nn.Module):
            return
        try:
            leaves = collect(model)
        except ConfigError as exc:  # of no concern to workers that have a model of their own
            self._not_carried = str(exc)
            return
        layout = Layout.plan(leaves, NO_LIMITS)
        flat = FlatBuffer(layout.nbytes)
        flat.array[:] = 0
        for view, leaf in zip(flat.views(layout), leaves.leaves, strict=True):
            view.copy_(leaf.tensor.detach())
        self._carried = (layout.manifest, bytes(flat.memoryview()), dict(leaves.values))

    def _unpack(self, model: Any) -> None:
        """Give a model without memory the weights that were taken along."""
        if not lacks_memory(model):
            return
        if self._carried is None and self._not_carried:
            raise ConfigError(f"the worker's model is on the meta device, and {self._not_carried}")
        if self._carried is None:
            raise ConfigError(
                "NoWeightSyncScheme never sends weights, but the worker's model is on the meta "
                "device: materialise it in the worker, or use a scheme that sends weights"
            )
        manifest, data, values = self._carried
        layout = Layout(manifest)
        flat = FlatBuffer(layout.nbytes)
        flat.memoryview()[:] = data
        Target(model).apply_tensors(layout, flat.views(layout), values)

    def _make_listener(self, sources: Sources) -> None:
        del sources  # nobody comes

    async def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        timeout: float | None = None,
        processes: Sequence[Any] = (),
    ) -> None:
        """Connect nothing.

        Raises:
            ConfigError: A receiver's model is on the meta
                device: nothing would ever give it memory. Or the timeout is not a number.
            LocalProtocolError: Before ``init_on_*``.
        """
        del weights, processes
        self._limit(timeout)  # mistakes are refused as by the schemes that wait
        self._check_open()
        self._check_has_role()
        if self._role == "receiver":
            self._unpack(self.model)
        if worker_idx is not None:
            self._worker_idx = as_index("worker_idx", worker_idx)
        self._loop = running_loop()
        self._connected = True

    async def send(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> SendReport:
        """Send nothing."""
        del weights, worker_ids
        self._limit(timeout)
        self._check_connected("send", "sender")
        await asyncio.sleep(0)  # who sends in a loop lets others run
        return SendReport(epoch=0, version=0, acked=frozenset())

    def send_nowait(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> SendHandle:
        """Send nothing."""
        del weights, worker_ids
        self._limit(timeout)
        self._check_connected("send_nowait", "sender")
        future = asyncio.get_running_loop().create_future()
        future.set_result(SendReport(epoch=0, version=0, acked=frozenset()))
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
        limit = None if timeout is None else self._limit(timeout)
        self._check_connected("receive", "receiver")
        if timeout is None or timeout <= 0:
            await asyncio.sleep(0)  # who receives in a loop lets others run
            return None
        self._closing = self._closing or asyncio.Event()
        try:
            async with asyncio.timeout(limit):
                await self._closing.wait()
        except TimeoutError:
            return None
        raise TransportClosed("this scheme was closed")

    async def wait_for_version(self, version: int, *, timeout: float | None = None) -> int:
        """Return 0, the only version there is.

        Raises:
            ConfigError: A version above 0 is asked for, which never arrives, or the timeout is
                not a number.
        """
        self._limit(timeout)
        if version > 0:
            raise ConfigError(
                f"NoWeightSyncScheme sends nothing: version {version} will never arrive"
            )
        await asyncio.sleep(0)
        return 0

    async def pull(self, *, min_version: int | None = None, timeout: float | None = None) -> int:
        """As :meth:`wait_for_version`: there is nothing to ask for."""
        self._check_connected("pull", "receiver")
        return await self.wait_for_version(min_version or 0, timeout=timeout)

    def _is_ready(self) -> bool:
        return self._connected  # there is nothing to wait for

    async def _wait_until_ready(self, timeout: float | None) -> None:
        self._limit(timeout)
        self._check_has_role()
        self._check_connected("ready", self._role or "receiver")

    async def wait_staged(self, version: int = 1, *, timeout: float | None = None) -> int:
        """As :meth:`wait_for_version`: nothing is ever staged."""
        return await self.wait_for_version(version, timeout=timeout)

    def apply_pending(self) -> int | None:
        """Return ``None``: nothing is ever staged."""
        return None

    def _check_connected(self, method: str, role: str) -> None:
        self._check_open()
        if self._role != role or not self._connected:
            raise LocalProtocolError(
                f"{method}(): call init_on_{role}() and scheme.connect() first, this with `await` "
                "unless it is of aiosync.sync"
            )

    def create_transport(self, pipe_or_context: Any) -> Transport:
        """There is no link.

        Raises:
            LocalProtocolError: Always.
        """
        raise LocalProtocolError("NoWeightSyncScheme has no transport")

    def _transport_over(self, sock: socket.socket, name: str) -> Transport:
        sock.close()
        raise LocalProtocolError(f"NoWeightSyncScheme has no transport for {name}")
