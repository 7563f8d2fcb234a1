"""The scheme: what a user configures, pickles into workers, and calls.

A scheme is plain configuration until ``init_on_sender()`` or ``init_on_receiver()`` gives it a
role; ``connect()`` makes the runtime (:class:`WeightSender` or :class:`WeightReceiver`), which
never travels in a pickle. May import everything below ``schemes``.
"""

from __future__ import annotations

import abc
import asyncio
import socket
from collections.abc import Sequence
from typing import Any

from aiosync._tasks import running_loop
from aiosync.errors import (
    ConnectTimeout,
    LocalProtocolError,
    PartialSyncError,
    RecvTimeout,
    TransportClosed,
)
from aiosync.schemes._closing import ClosingScheme
from aiosync.schemes._receiving import ReceivingScheme
from aiosync.schemes._sending import SendingScheme
from aiosync.schemes.handles import Ready
from aiosync.transports.base import Transport

__all__ = ["WeightSyncScheme"]


class WeightSyncScheme(SendingScheme, ReceivingScheme, ClosingScheme, abc.ABC):
    """Keeps the weights of one model the same in a trainer and its workers.

    One object is a sender (in the trainer) or a receiver (in a worker), never both; pickle it,
    or ``copy.copy`` it, to get the other side. One scheme per model; several may run side by
    side. Not thread-safe: use it on the loop that called :meth:`connect`. Any thread may use
    :meth:`reading`, :meth:`apply_pending`, :attr:`version` and :attr:`lag`, and assign a
    receiver's ``model``, ``context`` and ``weights``.

    Args:
        strategy: Which leaves of a module travel: ``"tensordict"`` (parameters and all
            buffers) or ``"state_dict"`` (what ``state_dict()`` has). The same on both sides.
        sync: Kept for TorchRL's signature: ``send()`` always waits for the workers, and
            ``send_nowait()`` never does.
        per_worker_weights: ``send({0: ..., 1: ...})`` gives each worker its own weights.
        apply: ``"auto"`` applies each update as soon as no forward pass is running;
            ``"manual"`` only in :meth:`apply_pending`, and while a call waits for an update:
            :meth:`receive`, :meth:`wait_for_version`, :meth:`pull`, and :meth:`connect` for the
            initial weights.
        apply_copy: Copy updates into the parameters' memory instead of pointing the parameters
            at the received memory. Slower, but addresses stay the same.
        guard: ``"forward"`` keeps updates out of forward passes of the model by hooks;
            ``"reading"`` leaves it to ``with scheme.reading():``.
        strict: Every name and dtype must match; otherwise the declared subset is applied and
            floating dtypes are cast. Buffers that are not persistent may be missing, or be rounded,
            in any case. A subset never replaces, on its way to a slow worker, an
            update that holds other names: it comes after it. A worker that joins later gets
            the newest update of each name, one after the other.
        require: How many workers must apply an update for ``send()`` to succeed: ``"all"``,
            a number, or a fraction of them. With less than ``"all"``, ``send()`` returns as
            soon as that many have. Like ``timeout`` it may be assigned between two sends; the
            other options count as they are when ``connect()`` is called. An option that is
            assigned is checked as here.
        timeout: Seconds that ``connect()`` and ``send()`` wait unless the call says otherwise;
            ``None`` waits for ever.
        wire_dtype: A floating-point dtype to which the sender casts the weights on their way, or
            one for each name pattern; see ``docs/topics/mapping.md``. Only the sender needs it.
            A single dtype does not round buffers that are not persistent.

    Raises:
        ConfigError: An option has an illegal value.
    """

    @classmethod
    def from_backend(cls, backend: str, **options: Any) -> WeightSyncScheme:
        """The scheme of a back-end name, such as ``"shared"``, ``"process"`` or ``"none"``.

        Args:
            backend: The name.
            **options: For the scheme's constructor.

        Raises:
            ConfigError: There is none with that name.
        """
        from aiosync.schemes.registry import scheme_from_backend  # which imports this module

        return scheme_from_backend(backend, **options)

    # -- what subclasses decide ----------------------------------------------------------------

    @abc.abstractmethod
    def _transport_over(self, sock: socket.socket, name: str) -> Transport:
        """A link over a connected Unix socket."""

    @abc.abstractmethod
    def create_transport(self, pipe_or_context: Any) -> Transport:
        """A link over a ``multiprocessing`` connection or a socket. Needs a running loop."""

    # -- connecting ----------------------------------------------------------------------------

    async def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        timeout: float | None = None,
        processes: Sequence[Any] = (),
    ) -> None:
        """Meet the other side and bring the workers to the initial weights.

        On the sender: answer workers, send them the initial weights if there are any, and wait
        until all ``num_workers`` have applied them. Workers may also come later. On a receiver:
        reach the sender, apply the initial weights, and receive in the background from then on.

        Args:
            worker_idx: Receiver only: index of this worker.
            weights: Sender only: the initial weights.
            timeout: Seconds for the whole call; ``None`` takes the scheme's ``timeout``,
                ``math.inf`` waits for ever.
            processes: Sender only: the workers' processes, by index (anything with a ``pid``,
                or process ids), so that one that dies before it connects is noticed at once.

        Raises:
            ConnectTimeout: A peer did not connect in time; the message says which. Or a live worker
                has the index, and kept it until then.
            ConnectError: The other side refused, or has ended.
            ConfigError: The two sides are set up differently, the timeout is not a number, or the
                context's model takes no forward hooks.
            PartialSyncError: Sender: some worker could not apply the initial weights, or died.
                The others are connected.
            ApplyError: Receiver: the initial weights do not fit the model.
            LocalProtocolError: Called twice, or before ``init_on_*``, or in a child that was
                forked after it; or without an asyncio event loop, as under trio.

        Cancellation:
            Breaks the attempt: the scheme is closed.
        """
        self._check_open()
        self._check_has_role()
        self._check_process()
        if self._connected or self._loop is not None:
            raise LocalProtocolError(f"Cannot synchronize weights on {self._role} twice.")
        if self._role == "sender" and worker_idx is not None:
            raise LocalProtocolError(
                "Cannot specify worker_idx on sender side during synchronization."
            )
        if self._role == "receiver" and weights is not None:
            raise LocalProtocolError(
                "Cannot specify weights on receiver side during synchronization."
            )
        limit = self._limit(timeout)
        self._loop = running_loop()
        self._connecting = task = asyncio.current_task()
        assert task is not None
        cancelled_before = task.cancelling()
        try:
            if self._role == "sender":
                await self._connect_sender(weights, limit, processes)
            else:
                await self._connect_receiver(worker_idx, limit)
        except BaseException as exc:  # raised again: the caller sees it
            # A sender that reached some of its workers goes on with those.
            survives = isinstance(exc, (ConnectTimeout, PartialSyncError))
            closed = self._closed
            if not (survives and self._sender is not None and self._sender.peers):
                self._connecting = None
                self.abort()
                self._abort_runtime()  # made after it was closed
            if closed and isinstance(exc, asyncio.CancelledError):
                if task.uncancel() > cancelled_before:
                    raise  # the caller cancelled it, too
                # It was aiosync that cancelled it.
                raise TransportClosed("this scheme was closed while it connected") from None
            raise
        finally:
            self._connecting = None
        self._connected = True

    # -- versions ------------------------------------------------------------------------------

    async def wait_for_version(self, version: int, *, timeout: float | None = None) -> int:
        """Wait until the model has at least ``version`` (sender: until every subscriber has).

        Args:
            version: Version of the current epoch.
            timeout: Seconds; ``None`` takes the scheme's ``timeout``, ``math.inf`` waits for
                ever.

        Returns:
            The version that it has.

        Raises:
            RecvTimeout: Not in time.
            PeerClosed: The trainer went away.
            ApplyError: Receiver: the update was refused by the model.
            PartialSyncError: Sender: a worker refused it, and has nothing newer on its way.
            ConfigError: The timeout is not a number.
            LocalProtocolError: Not connected; or a receiver's update cannot be applied, as this
                is called inside a :meth:`reading` block or a forward pass.

        Cancellation:
            Class A.
        """
        limit = self._limit(timeout)
        late = RecvTimeout(f"version {version} was not applied within {limit or 0:g} s")
        if self._role == "receiver":
            return await self._wait_until_applied(version, limit, late)
        self._check_has_role()
        sender = self._require_sender("wait_for_version")
        return await sender.progress.wait_applied(version, timeout=limit, late=late)

    async def wait_staged(self, version: int = 1, *, timeout: float | None = None) -> int:
        """Wait until ``version`` is complete at the receiver, whether or not it is applied yet.

        With ``apply="manual"`` a worker waits with this for what :meth:`apply_pending` is to
        apply, and a trainer, after :meth:`send_nowait`, for the moment at which all workers
        need no more than to switch.

        An update of some names, with ``strict=False``, that lacks a part of one before it is
        staged only when that one is applied.

        Args:
            version: Version of the current epoch, or a newer one.
            timeout: Seconds; ``None`` takes the scheme's ``timeout``, ``math.inf`` waits for
                ever.

        Returns:
            The newest version that is staged or applied (sender: at every subscriber).

        Raises:
            RecvTimeout: Not in time.
            PeerClosed: The trainer went away.
            ApplyError: Receiver: the update was refused.
            PartialSyncError: Sender: a worker refused ``version``, or died before it had it.
            ConfigError: The timeout is not a number.

        Cancellation:
            Class A.
        """
        limit = self._limit(timeout)
        late = RecvTimeout(f"version {version} was not complete within {limit or 0:g} s")
        if self._role == "receiver":
            return await self._wait_until_staged(version, limit, late)
        self._check_has_role()
        sender = self._require_sender("wait_staged")
        return await sender.progress.wait_staged(version, timeout=limit, late=late)

    @property
    def ready(self) -> Ready:
        """The condition that there is a complete version, to look at or to wait for."""
        return Ready(self._is_ready, self._wait_until_ready)

    def _is_ready(self) -> bool:
        if self._receiver is not None:
            waits = self._receiver.has_staged and self._resolve_target() is None
            return self._receiver.inbox.version > 0 or waits
        if self._sender is None:
            return False
        enough = len(self._sender.peers) >= max(1, self._sources.num_workers or 0)
        return enough and all(peer.visible for peer in self._sender.workers.subscribers)

    async def _wait_until_ready(self, timeout: float | None) -> None:
        limit = self._limit(timeout)
        late = RecvTimeout(f"no complete version after {limit or 0:g} s")
        if self._role == "receiver":
            receiver = self._require_receiver("ready")
            await receiver.wait_until(self._is_ready, timeout=limit, late=late)
        else:
            self._check_has_role()
            sender = self._require_sender("ready")
            await sender.progress.wait_until(self._is_ready, timeout=limit, late=late)
