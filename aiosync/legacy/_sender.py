"""What this generation sends with: the object that a scheme hands out.

It holds no link itself; the scheme does. Must not import torch or a transport.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiosync.errors import (
    AiosyncError,
    ConfigError,
    LocalProtocolError,
    PartialSyncError,
    TransportBroken,
)
from aiosync.legacy._links import Sending
from aiosync.legacy._receiver import OfScheme, close_transport
from aiosync.legacy._strategy import WeightStrategy

if TYPE_CHECKING:
    from aiosync.legacy._schemes import WeightSyncScheme

__all__ = ["WeightSender"]


@dataclass(slots=True)
class _Started:
    """A send over transports: who has yet to answer, who has the weights, who never will."""

    pending: dict[int, Any] = field(default_factory=dict)
    acked: set[int] = field(default_factory=set)
    failed: dict[int, Exception] = field(default_factory=dict)
    refused: Exception | None = None  # the caller's mistake, not a worker's

    def drop(self) -> None:
        """Let no later send take the answers to this one for its own."""
        while self.pending:
            getattr(self.pending.popitem()[1], "_drop_oldest", lambda: None)()

    def wait(self) -> None:
        """Wait for all, then raise what went wrong."""
        try:
            for idx in list(self.pending):
                transport = self.pending.pop(idx)
                try:
                    getattr(transport, "wait_ack", lambda: None)()
                    self.acked.add(idx)
                except Exception as exc:  # noqa: BLE001 - raised once all were waited for
                    self.failed[idx] = exc
        finally:
            self.drop()  # Ctrl-C: there are some left
        if self.refused is not None:
            raise self.refused
        if len(self.failed) == 1 and not self.acked:
            raise next(iter(self.failed.values()))
        if self.failed:
            failed = {idx: _own(error) for idx, error in self.failed.items()}
            raise PartialSyncError(acked=self.acked, failed=failed)


def _own(error: Exception) -> AiosyncError:
    # Transports of users raise what they like.
    return error if isinstance(error, AiosyncError) else TransportBroken(repr(error))


class WeightSender(OfScheme):
    """Sends weights for a scheme; ``scheme.get_sender()`` has one.

    Methods may be called from one thread at a time that runs no event loop. A pickle of it has
    the scheme's configuration only: neither links, nor the context, nor a pending send.

    Args:
        scheme: What it sends for.
    """

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme
        self._transports: dict[int, Any] = {}
        self._forget()

    def _forget(self) -> None:
        self._pending: Sending | _Started | None = None

    # -- what a scheme with links of its own tells it ------------------------------------------

    def _register_worker(self, worker_idx: int, pipe_or_context: Any) -> None:
        self._transports[worker_idx] = self._scheme.create_transport(pipe_or_context)

    def register_worker(self, worker_idx: int, pipe_or_context: Any) -> None:
        """Send to one more worker, over a transport of its own.

        For senders that :meth:`WeightSyncScheme.create_sender` made.

        Args:
            worker_idx: Its index.
            pipe_or_context: What the scheme's ``create_transport()`` takes.
        """
        self._register_worker(worker_idx, pipe_or_context)

    def _iterate_transports(self, worker_ids: int | Iterable[int] | None = None) -> Iterator[Any]:
        yield from self._chosen(worker_ids).values()

    def _chosen(self, worker_ids: int | Iterable[int] | None) -> dict[int, Any]:
        named = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        chosen = list(self._transports if named is None else named)
        for idx in chosen:
            if idx not in self._transports:
                raise ConfigError(f"Worker {idx} not registered")
        return {idx: self._transports[idx] for idx in chosen}

    @property
    def context(self) -> Any:
        """Owner of the model, or ``None`` when there is none or it is gone."""
        return self._scheme.context

    # -- sending -------------------------------------------------------------------------------

    def send(self, weights: Any = None, worker_ids: int | Iterable[int] | None = None) -> None:
        """Send a snapshot of the weights, and wait until the workers have applied it.

        Workers that have attached are waited for until the scheme's ``timeout``; a worker that
        never attached for about two seconds after the first send, once. It gets the newest
        weights when it attaches, and a warning names it until then.

        Args:
            weights: ``None`` for the registered model; or a module, a TensorDict, a state dict,
                or a dotted name in the context. Never changed, and not needed afterwards.
            worker_ids: Only these workers change; ``None`` for all.

        Raises:
            PartialSyncError: A worker died, did not answer, or could not apply the weights; the
                others have them. With transports and one worker: the error itself.
            ConfigError: There is no such worker, or the weights cannot travel (a
                ``ValueError``).
            KeyError: Shared memory without ``auto_register``: the model is not registered.
            LocalProtocolError: An async send is pending (a ``RuntimeError``).
        """
        if self._pending is not None:
            raise LocalProtocolError(
                "Cannot call send() while an async send is pending. Call wait_async() first."
            )
        if self._transports:
            self._start(weights, worker_ids).wait()
        else:
            self._warn(self._scheme._deliver(self._prepare(weights), worker_ids))

    def send_async(
        self, weights: Any = None, worker_ids: int | Iterable[int] | None = None
    ) -> None:
        """Take a snapshot now and send it in the background; :meth:`wait_async` waits for it.

        Args:
            weights: As for :meth:`send`; may change as soon as this returns.
            worker_ids: As for :meth:`send`.

        Raises:
            LocalProtocolError: An async send is pending already (a ``RuntimeError``).
            ConfigError: As for :meth:`send`. What is wrong with a worker, :meth:`wait_async`
                raises.
        """
        if self._pending is not None:
            raise LocalProtocolError(
                "Cannot call send_async() again while a send is pending. Call wait_async() first."
            )
        if self._transports:
            chosen = self._chosen(worker_ids)
            for transport in chosen.values():
                if not hasattr(transport, "send_weights_async"):
                    raise LocalProtocolError(
                        f"transport of type {type(transport)} does not support async send"
                    )
            started = self._start(weights, chosen)
            if started.refused is not None and not started.pending:
                raise started.refused
            self._pending = started
        else:
            self._pending = self._scheme._begin(self._prepare(weights), worker_ids)

    def wait_async(self) -> None:
        """Wait for the pending :meth:`send_async`.

        Raises:
            LocalProtocolError: None is pending (a ``RuntimeError``).
            PartialSyncError: As for :meth:`send`.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            raise LocalProtocolError("No async send is pending. Call send_async() first.")
        if isinstance(pending, _Started):
            pending.wait()
        else:
            self._warn(self._scheme._finish(pending))

    def update_weights(self, weights: Any) -> None:
        """The same as :meth:`send` to all workers."""
        self.send(weights)

    def _prepare(self, weights: Any) -> Any:
        scheme = self._scheme
        prepared = scheme.prepare_weights(
            weights, scheme.model_id, WeightStrategy(scheme.strategy), self.context
        )
        scheme._check_registered(prepared)
        return prepared

    def _warn(self, missing: Iterable[int]) -> None:
        listed = sorted(missing)
        if listed:
            warnings.warn(
                f"no worker has attached to the pipes of workers {listed} yet: they get the newest "
                "weights when they call init_on_worker()",
                stacklevel=3,
            )

    def _start(self, weights: Any, worker_ids: int | Iterable[int] | None) -> _Started:
        prepared, model_id = self._prepare(weights), self._scheme.model_id or "policy"
        started = _Started()
        for idx, transport in self._chosen(worker_ids).items():
            try:
                if hasattr(transport, "send_weights_async"):
                    transport.send_weights_async(model_id, prepared)
                    started.pending[idx] = transport
                else:
                    transport.send_weights(model_id, prepared)
                    started.acked.add(idx)
            except (ConfigError, KeyError, LocalProtocolError) as exc:
                started.refused = started.refused or exc
            except Exception as exc:  # noqa: BLE001 - raised once all were served
                started.failed[idx] = exc
            except BaseException:  # Ctrl-C goes on to the caller
                started.drop()
                raise
        return started

    def _close(self) -> None:
        for transport in self._transports.values():
            close_transport(transport)
