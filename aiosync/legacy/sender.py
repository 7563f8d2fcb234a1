"""The older generation's sender, which a scheme hands out. Must not import schemes."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from aiosync.errors import (
    ConfigError,
    LocalProtocolError,
)
from aiosync.legacy.endpoint import Copier
from aiosync.legacy.transports import Answered, Backend, Deliveries, Finish, MPTransport
from aiosync.schemes.sources import is_per_worker
from aiosync.strategy import WeightStrategy

if TYPE_CHECKING:
    from aiosync.legacy.schemes import WeightSyncScheme

from aiosync.legacy.scheme_end import SchemeEnd

__all__ = ["WeightSender"]

# Time from the first send on in which sends wait for workers that have not attached yet.
_GRACE_SECONDS = 2.0


class WeightSender(SchemeEnd):
    """Sender of a scheme; ``scheme.get_sender()`` returns it.

    One thread at a time, which runs no event loop, may call its methods. A pickle of it holds only
    the scheme's configuration: neither links, nor the context, nor a pending send.

    Args:
        scheme: The scheme to send for.
    """

    def __init__(self, scheme: WeightSyncScheme) -> None:
        super().__init__(scheme)
        self._copier = Copier()
        self._pending: Deliveries | None = None  # the deliveries of a pending send_async()
        self._give_up: float | None = None  # time from which on sends wait for no late workers
        self._lost: set[int] = set()  # workers whose end a send has reported

    def register_worker(self, worker_idx: int, pipe_or_context: Any) -> None:
        """Add a worker, with a transport of its own.

        It is for senders that :meth:`WeightSyncScheme.create_sender` made.

        Args:
            worker_idx: Index of the worker.
            pipe_or_context: Argument of the scheme's ``create_transport()``.
        """
        self.use(worker_idx, self._scheme.make_transport(pipe_or_context))

    def use(self, worker_idx: int, transport: Any) -> None:
        """Add a worker with an existing transport."""
        self._transports[worker_idx] = transport

    def meet(self, worker_idx: int | None = None) -> None:
        """Let transports that need a handshake meet their workers; all, or that of one worker."""
        for idx, transport in self._transports.items():
            if worker_idx in (None, idx) and isinstance(transport, Backend):
                transport.meet_worker()

    @property
    def context(self) -> Any:
        """Owner of the model; ``None`` without one, or if it was garbage-collected."""
        return self._scheme.context

    def send(self, weights: Any = None, worker_ids: int | Iterable[int] | None = None) -> None:
        """Send a snapshot of the weights, and wait until the workers have applied it.

        The call waits for attached workers until the scheme's ``timeout``. For a worker that has
        not attached yet it waits only once, for about two seconds after the first send. Such a
        worker gets the newest weights when it attaches, and a warning names it until then.

        Args:
            weights: ``None`` for the registered model; or a module, a TensorDict, a state dict,
                or a dotted name in the context. The call never changes them, and they are not
                needed afterwards.
            worker_ids: Indices of the workers to update; ``None`` for all.

        Raises:
            PartialSyncError: A worker died, did not answer, or could not apply the weights; the
                others have them.
            ConfigError: There is no such worker, or the weights cannot travel (a
                ``ValueError``).
            KeyError: Shared memory without ``auto_register``: the model is not registered.
            LocalProtocolError: An async send is pending, or no worker was registered (a
                ``RuntimeError``).
        """
        if self._pending is not None:
            raise LocalProtocolError(
                "Cannot call send() while an async send is pending. Call wait_async() first."
            )
        self._wait(self._start(self._prepare(weights), worker_ids))

    def send_async(
        self, weights: Any = None, worker_ids: int | Iterable[int] | None = None
    ) -> None:
        """Take a snapshot now and send it in the background; :meth:`wait_async` waits for it.

        Args:
            weights: As for :meth:`send`; may change as soon as the call returns.
            worker_ids: As for :meth:`send`.

        Raises:
            LocalProtocolError: An async send is pending already, or no worker was registered (a
                ``RuntimeError``).
            ConfigError: As for :meth:`send`. The errors of workers are raised by
                :meth:`wait_async`.
        """
        if self._pending is not None:
            raise LocalProtocolError(
                "Cannot call send_async() again while a send is pending. Call wait_async() first."
            )
        for transport in self.chosen(worker_ids).values():
            if not hasattr(transport, "send_weights_async"):
                raise LocalProtocolError(
                    f"transport of type {type(transport)} does not support async send"
                )
        self._pending = self._start(self._prepare(weights), worker_ids)

    def wait_async(self) -> None:
        """Wait for the pending :meth:`send_async`.

        Raises:
            LocalProtocolError: No send is pending (a ``RuntimeError``).
            PartialSyncError: As for :meth:`send`.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            raise LocalProtocolError("No async send is pending. Call send_async() first.")
        self._wait(pending)

    def update_weights(self, weights: Any) -> None:
        """Send weights to all workers, as :meth:`send` does."""
        self.send(weights)

    def offer(self, weights: Any) -> None:
        """Offer weights to the workers that attach before the first send."""
        self._start(weights, None)

    def _prepare(self, weights: Any) -> Any:
        scheme = self._scheme
        if not self._transports:
            raise LocalProtocolError("there is no worker yet: call register_worker()")
        if is_per_worker(weights):
            raise ConfigError(
                "weights by worker need a scheme without pipes or actors: send those of one worker "
                "with worker_ids="
            )
        strategy = WeightStrategy(scheme.strategy)
        prepared = scheme.prepare_weights(weights, scheme.model_id, strategy, self.context)
        scheme.register_sent(prepared)
        return prepared

    def chosen(self, worker_ids: int | Iterable[int] | None) -> dict[int, Any]:
        """Return the transports of these workers, by index.

        ``None`` stands for all workers without those that are known to be lost; if all are lost,
        for all.

        Raises:
            ConfigError: There is no such worker (a ``ValueError``).
        """
        named = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        chosen = list(self._transports if named is None else named)
        for idx in chosen:
            if idx not in self._transports:
                raise ConfigError(f"Worker {idx} not registered")
        there = [idx for idx in chosen if named is not None or idx not in self._lost]
        return {idx: self._transports[idx] for idx in there or chosen}

    def _start(self, weights: Any, worker_ids: int | Iterable[int] | None) -> Deliveries:
        chosen, model_id = self.chosen(worker_ids), self._scheme.model_id or "policy"
        if all(isinstance(transport, MPTransport) for transport in chosen.values()):
            if weights is None:
                raise ConfigError(
                    "there is nothing to send: pass weights to send(), or model=, weights= or "
                    "context= to init_on_sender()"
                )
            weights = self._copier.copy(weights)  # one copy for all transports
        sending = Deliveries()
        for idx, transport in chosen.items():
            sending.begin(idx, functools.partial(_begin, transport, model_id, weights))
        return sending

    def _wait(self, sending: Deliveries) -> None:
        """Wait for the answers of all workers, then raise their errors.

        A warning names the workers that have not attached yet.

        Raises:
            PartialSyncError: A worker failed.
        """
        late, sending.began = [], time.monotonic()
        if self._give_up is None:
            self._give_up = sending.began + _GRACE_SECONDS
        for idx in list(sending.pending):
            transport, grace = self._transports[idx], self._give_up - time.monotonic()
            if isinstance(transport, MPTransport) and not transport.wait_for_peer(max(0.0, grace)):
                late.append(idx)
                continue
            sending.finish(idx, transport.timeout if isinstance(transport, Answered) else None)
        for idx in sending.failed:
            transport = self._transports[idx]
            if isinstance(transport, MPTransport) and not transport.check_connection():
                self._lost.add(idx)
        sending.raise_failures()
        if late:
            warnings.warn(
                f"no worker has attached to the pipes of workers {late} yet: they get the newest "
                "weights when they call init_on_worker()",
                stacklevel=3,
            )


def _begin(transport: Any, model_id: str, weights: Any) -> Finish:
    if isinstance(transport, Answered):
        return transport.begin(model_id, weights)
    if not hasattr(transport, "send_weights_async"):
        transport.send_weights(model_id, weights)
        return lambda _: None
    transport.send_weights_async(model_id, weights)
    return lambda _: transport.wait_ack() if hasattr(transport, "wait_ack") else None
