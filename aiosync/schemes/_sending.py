"""The sender's half of a scheme: ``init_on_sender``, ``send`` and what they need.

Must not import the receiver's half.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from aiosync.errors import ConfigError, ConnectError, LocalProtocolError
from aiosync.protocol.indices import as_index
from aiosync.rendezvous.listener import AnyListener
from aiosync.rendezvous.unix import UnixListener
from aiosync.schemes._context import (
    as_model_id,
    resolve_model,
    resolve_path,
)
from aiosync.schemes._core import SchemeCore
from aiosync.schemes._sources import DeviceMap, Sources, is_per_worker, resolve_sources
from aiosync.schemes._streaming import Streaming
from aiosync.schemes.handles import SendHandle
from aiosync.schemes.sender import WeightSender
from aiosync.sender.snapshots import Planned, SnapshotCopier
from aiosync.strategy import WeightStrategy
from aiosync.tensors import check_wire_dtype
from aiosync.transports.base import Transport
from aiosync.transports.shared_memory import Arena
from aiosync.types import Limits, SendReport

__all__ = ["SendingScheme"]


class SendingScheme(SchemeCore):
    """Methods of a sender; see :class:`aiosync.WeightSyncScheme`."""

    def _make_arena(self) -> Arena | None:
        """The slots that workers read the sender's snapshots in; ``None`` for none."""
        return None

    def _planning_limits(self) -> Limits | None:
        """Bounds that the receivers are expected to have; ``None`` for the defaults."""
        return None

    def _make_listener(self, sources: Sources) -> AnyListener | None:
        """A socket of this scheme that workers may dial, bound now; ``None`` for none."""
        del sources
        return UnixListener(self._address)

    def _start_listening(self, sender: WeightSender) -> None:
        """Let workers in from now on. Called on the loop."""
        if isinstance(self._listener, UnixListener):
            self._listener.start(self._on_connection, sender.workers.not_let_in)

    # Whether what carries large payloads takes them from the tensors at once.
    _borrows = False
    # Whether it waits for the part of a snapshot that it sends.
    _copies_ahead = False

    def _streaming(self) -> Streaming | None:
        """How payloads travel; ``None`` where links neither damage nor lose them."""
        return None

    def init_on_sender(
        self,
        model_id: str | None = None,
        context: Any = None,
        *,
        params_map: Mapping[int, Any] | None = None,
        weights: Any = None,
        model: Any = None,
        devices: Sequence[Any] | None = None,
        device_map_fn: DeviceMap | None = None,
        num_workers: int | None = None,
        pipes: Sequence[Any] | None = None,
        transports: Mapping[int, Transport] | None = None,
        ctx: Any = None,
    ) -> None:
        """Make this object the sender. Local only: it sends nothing and waits for nothing.

        Give the weights as one of: ``model`` or ``weights``; a ``context`` that owns the model;
        ``params_map``; or nothing, and every ``send()`` brings them. Workers may connect from
        now on; they are answered once :meth:`connect` runs.

        Args:
            model_id: Name of the model, the same on both sides; ``"policy"`` by default. With a
                ``context``, also the path to the model in it.
            context: Owner of the model (kept as a weak reference). May offer
                ``get_model(model_id)`` and ``num_workers``.
            params_map: Worker index -> its weights.
            weights: Weights for every worker: TensorDict or state dict, nested or dotted.
            model: Module whose weights every worker gets.
            devices: One device for each worker. Receivers put weights where their model is; the
                list only says how many workers there are.
            device_map_fn: Called with (worker index, weights) for each worker and send.
            num_workers: How many workers ``connect()`` waits for; ``None`` for any number.
            pipes: Connections to the workers, by index, instead of the scheme's own socket.
            transports: Links to the workers, by index, instead of the scheme's own socket. Only
                these workers are expected.
            ctx: Ignored; TorchRL passes its multiprocessing context.

        Raises:
            ConfigError: The arguments exclude each other, or that many workers can never connect.
            LocalProtocolError: This object already has a role.
        """
        del ctx
        self._check_role("init_on_sender")
        name = as_model_id(model_id or self._model_id or "policy")
        sources = resolve_sources(
            context=context,
            model_id=model_id,
            params_map=params_map,
            weights=weights,
            model=model,
            devices=devices,
            device_map_fn=device_map_fn,
            num_workers=num_workers,
            pipes=pipes,
        )
        self.context = context
        if transports is not None:
            self._links = sources.link(transports)
        if sources.pipes is None and transports is None:
            self._listener = self._make_listener(sources)
        self._model_id = name
        self._sources = sources
        self._model, self._weights = model, weights
        self._role = "sender"

    async def _connect_sender(
        self, weights: Any, timeout: float | None, processes: Sequence[Any]
    ) -> None:
        self._maker = SnapshotCopier(
            self._make_arena(),
            self._strategy.extract_as,
            check_wire_dtype(self.wire_dtype),  # a mapping may have been changed since
            self._planning_limits(),
        )
        self._sender = WeightSender(
            model_id=self._model_id or "policy",
            strategy=self.strategy_str,
            num_workers=self._sources.num_workers,
            expected=self._sources.expected,
            require=self.require,
            maker=self._maker,
            clock=self._clock,
            parts=not self.strict,
            streaming=self._streaming(),
            borrows=self._borrows,
            copies_ahead=self._copies_ahead,
        )
        planned = self._plan(weights, None, initial=True)
        for idx, link in self._links.items():
            self._sender.workers.welcome(link, idx, given=True)
        for idx, pipe in enumerate(self._sources.pipes or ()):
            self._sender.workers.welcome(self.create_transport(pipe), idx, given=True)
        self._start_listening(self._sender)
        await self._sender.connect(planned, timeout=timeout, processes=processes)

    def _on_connection(self, sock: socket.socket, pid: int) -> None:
        transport = self._transport_over(sock, f"worker process {pid}")
        channel = transport.channel
        if channel is not None:
            with contextlib.suppress(ConnectError):  # gone already: the handshake will see it
                channel.watch_process(pid)
        assert self._sender is not None
        self._sender.workers.welcome(transport)

    async def send(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> SendReport:
        """Send a snapshot of the weights to the workers, and wait until they have applied it.

        Through shared memory it is enough that what a worker computes next uses it, for those that
        look by themselves. Workers are served at the same time; a slow one does not delay the
        others. A worker that died since the last send is named in one :class:`PartialSyncError`,
        and listed as ``lost`` in the reports of later sends.

        Args:
            weights: ``None`` for the registered model; or a module, a TensorDict, a state dict,
                ``{worker_idx: weights}`` (with ``per_worker_weights=True``), or a dotted name
                in the context. Must not change until the call returns; never changed by it.
            worker_ids: Only these workers change; ``None`` for all.
            timeout: Seconds for the whole call; ``None`` takes the scheme's ``timeout``,
                ``math.inf`` waits for ever.

        Returns:
            Which workers have which version.

        Raises:
            PartialSyncError: Fewer workers than ``require`` asks for applied it; ``failed``
                says why for each: ``ApplyError`` with the worker's own words, ``PeerClosed`` or
                ``TransportBroken`` when it died, ``AckTimeout`` when it did not answer. The
                others have the new version.
            ConfigError: A worker is named that never connected, the weights cannot travel, or
                the timeout is not a number.
            LocalProtocolError: Not a connected sender.

        Cancellation:
            Class C: the transfer goes on in the background, from the sender's own snapshot.
        """
        sender, limit = self._require_sender("send"), self._limit(timeout)
        planned = self._plan(weights, worker_ids)
        if weights is not None and worker_ids is None and is_per_worker(weights):
            worker_ids = [idx for idx in planned if idx is not None]
        return await sender.send(planned, worker_ids, limit)

    def _send_at_once(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> tuple[SendReport | None, Callable[[], None] | None]:
        """What :meth:`send` does where it waits for nobody, on a thread that keeps the loop idle.

        Returns:
            The report, or ``None`` with nothing done if somebody has to be waited for; and what is
            to be called on the loop, if anything is.
        """
        started, sender = time.perf_counter(), self._sender
        if sender is None or not self._connected or self._closed or not sender.is_quiet():
            return None, None
        self._limit(timeout)
        if self._sources.device_map is not None or self._sources.per_worker:
            return None, None  # a map is asked once for each send
        report = sender.publish(self._plan(weights, worker_ids), worker_ids, started)
        return report, sender.tell if report is not None and sender.has_to_tell() else None

    def send_nowait(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> SendHandle:
        """Take a snapshot now and send it in the background.

        The copy is made on the calling thread before this returns, so the weights may change
        right after. A worker that is still busy with an older version gets only the newest one;
        the report says which workers skipped this version, and which version overtook it.

        Args:
            weights: As for :meth:`send`.
            worker_ids: As for :meth:`send`.
            timeout: As for :meth:`send`.

        Returns:
            Await it for the report; it raises what :meth:`send` raises. A failure that is
            never awaited is printed by the event loop's exception handler.

        Raises:
            LocalProtocolError: Not a connected sender; or :meth:`connect` is still copying the
                initial weights.
            ConfigError: As for :meth:`send`. What happens in the workers is raised by the handle.
        """
        sender, limit = self._require_sender("send_nowait"), self._limit(timeout)
        planned = self._plan(weights, worker_ids)
        if worker_ids is None and is_per_worker(weights):
            worker_ids = [idx for idx in planned if idx is not None]
        return sender.send_nowait(planned, worker_ids, limit)

    def _plan(
        self, weights: Any, worker_ids: int | Iterable[int] | None, *, initial: bool = False
    ) -> dict[int | None, Planned]:
        maker = self._maker
        assert maker is not None
        sources = self._sources
        if weights is None and sources.weights is not None:
            if not sources.per_worker and sources.device_map is None:
                return {None: maker.prepare(sources.weights)}
        if isinstance(weights, str):
            context = self.context
            if context is None:
                raise ConfigError(f"Cannot resolve string reference {weights!r} without context")
            weights = resolve_path(context, weights)
        if is_per_worker(weights):
            if not (self.per_worker_weights or self._sources.per_worker):
                raise ConfigError(
                    "Per-worker weights dict provided but scheme was not initialized with "
                    "per_worker_weights=True"
                )
            weights = {as_index("a worker's index", idx): each for idx, each in weights.items()}
            return {idx: maker.prepare(value, idx) for idx, value in weights.items()}
        if weights is None:
            if self._sources.per_worker:
                return {
                    idx: maker.prepare(value, idx)
                    for idx, value in self._sources.per_worker.items()
                }
            weights = self._default_weights()
        if weights is None:
            if initial:
                return {}
            raise ConfigError(f"there is nothing to send: {self._why_nothing()}")
        if self._sources.device_map is not None:
            given = weights
            # A module is changed itself by .to() and such, and a state dict has no such methods.
            if hasattr(weights, "register_forward_hook") or isinstance(weights, dict):
                given = self._strategy.extract_weights(weights)
            mapped = {idx: self._sources.device_map(idx, given) for idx in self._sources.expected}
            if all(value is given for value in mapped.values()):
                return {None: maker.prepare(weights)}
            return {idx: maker.prepare(value, idx) for idx, value in mapped.items()}
        return {None: maker.prepare(weights)}

    def _default_weights(self) -> Any:
        if self._sources.weights is not None:
            return self._sources.weights
        if self._model is not None:
            return self._model
        context = self.context
        return None if context is None else _model_of(context, self._model_id or "policy")

    def _why_nothing(self) -> str:
        """Why there are no weights, and what to do."""
        lacks = self._why_no_model()
        if lacks is None:
            return "pass weights to send(), or model=, weights= or context= to init_on_sender()"
        if self.context is None:
            return f"{lacks}: keep it, or pass model= or weights= instead"
        return (
            f"{lacks}: pass model= for the module itself, model_id= with the path to it in the "
            "context, or weights to send()"
        )

    def prepare_weights(
        self,
        weights: Any,
        model_id: str | None = None,
        strategy: WeightStrategy | None = None,
        context: Any = None,
    ) -> Any:
        """Resolve and extract weights as :meth:`send` would, without sending them.

        Args:
            weights: As for :meth:`send`.
            model_id: Model to look up when ``weights`` is ``None``; this scheme's by default.
            strategy: Extracts the weights; this scheme's by default.
            context: Where names are looked up; this scheme's by default.

        Returns:
            A TensorDict or a state dict on the memory of the source, or ``None``.
        """
        context = context if context is not None else self.context
        strategy = strategy or self._strategy
        if weights is None:
            if context is self.context and model_id in (None, self._model_id):
                weights = self._default_weights()
            elif context is not None:
                weights = _model_of(context, model_id or self._model_id or "policy")
        elif isinstance(weights, str):
            if context is None:
                raise ConfigError(f"Cannot resolve string reference {weights!r} without context")
            weights = resolve_path(context, weights)
        if weights is None or is_per_worker(weights):
            return weights
        return strategy.extract_weights(weights)

    @property
    def sender_transports(self) -> dict[int, Transport]:
        """The link to each connected worker, by index; empty on a receiver.

        For inspection only: the scheme sends and receives on them, on its event loop.
        """
        peers = {} if self._sender is None else self._sender.peers
        return {idx: peer.transport for idx, peer in sorted(peers.items())}

    @property
    def shared_transport(self) -> Transport | None:
        """``None``: each worker has a link of its own. For what was written for TorchRL."""
        return None

    def _require_sender(self, method: str) -> WeightSender:
        sender = self._sender
        if (
            sender is not None
            and self._connected
            and not self._closed
            and self._loop is asyncio._get_running_loop()
            and self._pid == os.getpid()  # else it was forked
        ):
            sender.require = self.require  # it may have been assigned since
            return sender
        self._check_open()
        if self._role != "sender":
            raise LocalProtocolError(
                f"{method}(): Must be initialized on sender before sending weights: call "
                "init_on_sender() and connect() first"
            )
        if self._sender is None or not (self._connected or self._sender.peers):
            raise LocalProtocolError(
                f"{method}(): Must be synchronized on sender before sending weights: "
                "call scheme.connect() first, with `await` unless it is of aiosync.sync"
            )
        self._check_loop()
        return self._sender


def _model_of(context: object, model_id: str) -> Any:
    """The model of that id in ``context``, or what a collector has in its place; or ``None``."""
    try:
        return resolve_model(context, model_id)
    except AttributeError:
        return getattr(context, "_fallback_policy", None) if model_id == "policy" else None
