"""Weights for the workers of TorchRL's ``DistributedCollector``, in the way of their loop.

That takes orders from a store, and weights from the default process group of
``torch.distributed``. Must not import torchrl.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import nn

from aiosync.errors import (
    AckTimeout,
    ApplyError,
    ConfigError,
    LocalProtocolError,
    PeerClosed,
    TransportBroken,
)
from aiosync.legacy.endpoint import Copier
from aiosync.legacy.transports import Answered, Deliveries, Finish
from aiosync.legacy.updaters.base import AtOnceWeightUpdater, copy_weights
from aiosync.legacy.updaters.worker import make_private

__all__ = ["DistributedTransport", "DistributedWeightUpdater"]

_STORE_PAUSE_SECONDS = (0.0005, 0.01)  # first and last, between two looks at the store
_PAUSE_SECONDS = 0.005  # between two looks at who may be given an order


class DistributedTransport(Answered):
    """Sends weights to a worker of TorchRL's ``DistributedCollector``, in the way of its loop.

    That takes an order from a key of a store, receives one tensor after the other in the default
    process group, and answers by another key; it does so when it has collected its batch. An order
    is given only when the last one was taken, as it would overwrite it. Between processes of your
    own use :class:`aiosync.sync.DistributedWeightSyncScheme` and ``connect()``.

    Args:
        store: The store of the collector; not closed.
        rank: Rank of the worker.
        sync: ``send_weights()`` waits until the worker answered.
        timeout: Seconds that answers are waited for; ``None`` for ever.

    Attributes:
        is_alive: Says whether the worker's process lives, if somebody knows.
    """

    def __init__(
        self, store: Any, rank: int, sync: bool = True, *, timeout: float | None = 120.0
    ) -> None:
        super().__init__(timeout)
        self._store = store
        self.rank = rank
        self.sync = sync
        self.is_alive: Callable[[], bool] = lambda: True
        self._order, self._answer = f"NODE_{rank}_in", f"NODE_{rank}_out"
        self._owed: list[Any] = []  # what a worker that did not answer may still read

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send weights, and with ``sync`` wait until the worker said that it applied them.

        See :class:`MPTransport`; the store may be gone, too (``TransportBroken``).
        """
        finish = self.begin(model_id, weights)
        if self.sync:
            finish(self.timeout)

    def begin(self, model_id: str, weights: Any) -> Finish:
        """As for :class:`Answered`; the weights have the names that the worker has."""
        del model_id  # a worker has one
        return self.order(Copier().copy(weights).rebuild("tensordict"))

    def order(self, snapshot: Any) -> Finish:
        """The same of a TensorDict that nobody changes any more."""
        self._wait(self._is_settled, self.timeout)
        if self._owed:
            self._finish(self.timeout)  # what was given up
        self._owed = [snapshot]
        with _reaching():
            self._store.set(self._order, b"update_weights")
            self._owed += snapshot.isend(self.rank, return_early=True)
        return self._finish

    def is_free(self) -> bool:
        """Whether an order may be given, or cannot: the last one was taken, and answered."""
        try:
            return not self.is_alive() or self._is_settled()
        except RuntimeError:
            return True  # order() raises it

    def _is_settled(self) -> bool:
        if self._owed:
            return bool(self._store.check([self._answer]))
        return not self._store.check([self._order])

    def _finish(self, timeout: float | None) -> None:
        self._wait(lambda: self._store.check([self._answer]), timeout)
        with _reaching():
            status = self._store.get(self._answer)
            self._store.delete_key(self._answer)
            _, *futures = self._owed
            self._owed = []
            if status != b"updated":
                raise ApplyError(f"rank {self.rank} answered {status!r}, and not 'updated'")
            for future in futures:
                future.wait()  # everything was received

    def _wait(self, condition: Callable[[], bool], timeout: float | None) -> None:
        give_up = None if timeout is None else time.monotonic() + timeout
        pause = _STORE_PAUSE_SECONDS[0]
        # A wait in the store would write to stderr when it ends without success, and keep
        # Ctrl-C from being seen.
        with _reaching():
            while not condition():
                if not self.is_alive():
                    raise PeerClosed(f"the process of rank {self.rank} has ended")
                if give_up is not None and time.monotonic() >= give_up:
                    within = f"within {timeout:.3g} s" if timeout else "in time"
                    raise AckTimeout(f"rank {self.rank} did not answer {within}")
                time.sleep(pause)
                pause = min(2 * pause, _STORE_PAUSE_SECONDS[1])

    def check_connection(self) -> bool:
        """Whether the store answers, and the worker's process lives, if somebody knows."""
        try:
            self._store.check([self._answer])
        except RuntimeError:
            return False
        return self.is_alive()


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    """Say what it means that the store, or the group, raised something."""
    try:
        yield
    except RuntimeError as exc:
        text = str(exc).partition("\n")[0]
        raise TransportBroken(f"the store or the process group failed: {text}") from exc


class DistributedWeightUpdater(AtOnceWeightUpdater):
    """Sends weights to the workers of a ``DistributedCollector``, whose loop is TorchRL's.

    So it sends by the older generation's transport, which speaks with that loop: from a snapshot,
    to all workers at the same time.

    Pass it to the collector's constructor, and leave out what the collector will know; or assign
    it to ``collector.weight_updater``. Only in the constructor can it see to it that policies of
    workers on this host share no memory with the trainer's. A worker takes an update when it has
    collected its batch.

    Args:
        store: The store of the collector.
        policy_weights: Live weights of updates that bring none, with the names that the workers
            have; of the collector's policy, if omitted.
        num_workers: How many workers there are.
        sync: Kept for TorchRL's signature: an update always waits for the workers.
        timeout: Seconds for each update; ``None`` waits for ever.

    Raises:
        ConfigError: The timeout is not positive.

    An update raises :class:`~aiosync.PartialSyncError`, which names each worker that died or did
    not answer in time. Nothing is known of how workers of a cluster's scheduler live: those are
    only waited for.
    """

    def __init__(
        self,
        store: Any = None,
        policy_weights: Any = None,
        num_workers: int | None = None,
        sync: bool = True,
        *,
        timeout: float | None = 60.0,
    ) -> None:
        del sync
        super().__init__(timeout)
        self._store = store
        self.policy_weights = policy_weights
        self.num_workers = num_workers
        self._transports: dict[int, DistributedTransport] = {}

    def register_collector(self, collector: Any) -> None:
        """Remember the collector, and have its workers get policies of their own.

        Args:
            collector: The collector.

        Raises:
            ConfigError: There is a collector already.
        """
        super().register_collector(collector)
        policy = getattr(collector, "_policy_to_send", None)
        if isinstance(policy, nn.Module) and not hasattr(collector, "jobs"):
            collector._policy_to_send = _private_when_unpickled(policy)

    def _num_workers(self) -> int:
        return int(self._known("num_workers", self.num_workers))

    def _get_server_weights(self) -> Any:
        return self._known("policy_weights", self.policy_weights)

    def _resolve_workers(self, worker_ids: Any) -> list[int]:
        # TorchRL's collectors pass a rank, which counts from 1; lists are of indices from 0.
        if isinstance(worker_ids, int):
            if worker_ids < 1:
                raise LocalProtocolError(f"a worker's rank is at least 1, got {worker_ids}")
            worker_ids = [worker_ids - 1]
        return self._indices(super()._resolve_workers(worker_ids) or [])

    def _sync_workers(self, weights: Any, worker_ids: list[int]) -> None:
        # Workers receive what their policy has, in an order of TorchRL's: so a part of the
        # weights, or another order, is brought into that form first.
        factories = getattr(self.collector, "policy_factory", None) or ()
        if any(factory is not None for factory in factories):
            raise ConfigError(
                "workers that make their policy with policy_factory= receive nothing from a "
                "DistributedWeightUpdater: use weight_sync_schemes= instead"
            )
        snapshot = self._known("policy_weights", self.policy_weights).detach().clone()
        copy_weights(snapshot, weights)
        sending, waiting = Deliveries(), {idx: self._transport(idx) for idx in worker_ids}
        while waiting:
            left = math.inf
            if self.timeout is not None:
                left = sending.began + self.timeout - time.monotonic()
            # Nobody waits for another one, who may never take the last order.
            for idx in [idx for idx, each in waiting.items() if each.is_free() or left <= 0]:
                transport = waiting.pop(idx)
                transport.timeout = None if self.timeout is None else max(0.0, left)
                sending.begin(idx, functools.partial(transport.order, snapshot))
            if waiting:
                time.sleep(_PAUSE_SECONDS)
        sending.finish_all(self.timeout)
        sending.raise_failures()

    def _transport(self, idx: int) -> DistributedTransport:
        if idx not in self._transports:
            store, jobs = self._known("_store", self._store), getattr(self.collector, "jobs", ())
            made = DistributedTransport(store, idx + 1, timeout=self.timeout)
            if idx < len(jobs):
                made.is_alive = getattr(jobs[idx], "is_alive", made.is_alive)
            self._transports[idx] = made
        return self._transports[idx]


def _private_when_unpickled(policy: nn.Module) -> nn.Module:
    """A copy of a policy, each unpickled copy of which has memory of its own.

    torch pickles tensors for a process of this host as references to memory that all share.
    """
    twin = make_private(copy.deepcopy(policy))
    twin.__dict__["__reduce_ex__"] = functools.partial(_reduced, twin)
    return cast("nn.Module", twin)


def _reduced(twin: nn.Module, protocol: int) -> tuple[Any, ...]:
    del protocol
    plain = object.__new__(type(twin))
    plain.__dict__.update(twin.__dict__)
    del plain.__dict__["__reduce_ex__"]
    return make_private, (plain,)
