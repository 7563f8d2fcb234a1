"""Transport and updater for TorchRL's ``DistributedCollector``, in the protocol of its workers.

The loop of a worker takes orders from a store, and weights from the default process group of
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

_STORE_PAUSE_SECONDS = (0.0005, 0.01)  # poll interval (first, longest) of the store
_PAUSE_SECONDS = 0.005  # poll interval for workers that can take an order


class _Order:
    """An order to a worker to receive a snapshot, and its outcome.

    Attributes:
        memory: The snapshot, and the futures of its sends: the worker may read them until it
            answers.
        error: The worker's refusal.
    """

    def __init__(self, snapshot: Any) -> None:
        self.memory: list[Any] = [snapshot]
        self.error: ApplyError | None = None


class DistributedTransport(Answered):
    """Transport to a worker of TorchRL's ``DistributedCollector``, in the worker's own protocol.

    When the worker has collected its batch, it takes an order from a key of a store, receives one
    tensor after the other in the default process group, and answers by another key. An order is
    given only when the worker has taken the last one, because it would overwrite that. Between
    processes of your own use :class:`aiosync.sync.DistributedWeightSyncScheme` and ``connect()``.

    Args:
        store: The store of the collector; not closed.
        rank: Rank of the worker.
        sync: True if ``send_weights()`` waits until the worker has answered.
        timeout: Seconds to wait for an answer; ``None`` for ever.

    Attributes:
        is_alive: Returns False if the worker's process is known to have ended.
    """

    def __init__(
        self, store: Any, rank: int, sync: bool = True, *, timeout: float | None = 120.0
    ) -> None:
        super().__init__(timeout)
        self._store = store
        self.rank = rank
        self.sync = sync
        self.is_alive: Callable[[], bool] = lambda: True
        # Keys of the store.
        self._order, self._answer = f"NODE_{rank}_in", f"NODE_{rank}_out"
        self._unanswered: _Order | None = None

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send weights, and with ``sync`` wait until the worker has answered that it applied them.

        Raises the errors of :class:`MPTransport`, and ``TransportBroken`` if the store fails.
        """
        finish = self.begin(model_id, weights)
        if self.sync:
            finish(self.timeout)

    def begin(self, model_id: str, weights: Any) -> Finish:
        """Copy weights and order the worker to receive them; see :class:`Answered`.

        The weights must have the names that the worker's weights have.
        """
        del model_id  # a worker has one model
        return self.order(Copier().copy(weights).rebuild("tensordict"))

    def order(self, snapshot: Any) -> Finish:
        """Order the worker to receive a TensorDict, which must not change from now on.

        Returns:
            A function that waits for the answer.
        """
        self._wait(self._is_settled, self.timeout)
        if self._unanswered is not None:
            # The wait for this answer comes later, or was given up.
            self._take_answer(self._unanswered)
        self._unanswered = order = _Order(snapshot)
        with _reaching():
            self._store.set(self._order, b"update_weights")
            order.memory += snapshot.isend(self.rank, return_early=True)
        return functools.partial(self._finish, order)

    def is_free(self) -> bool:
        """Return True if :meth:`order` need not wait.

        That is so if the worker has taken and answered the last order, or if the order will fail.
        """
        try:
            return not self.is_alive() or self._is_settled()
        except RuntimeError:
            return True  # order() raises the error of the store

    def _is_settled(self) -> bool:
        """Return True if the worker has answered this object's last order, or taken another's."""
        if self._unanswered is not None:
            return bool(self._store.check([self._answer]))
        return not self._store.check([self._order])

    def _finish(self, order: _Order, timeout: float | None) -> None:
        """Wait for the worker's answer to an order, unless the next order has taken it already."""
        if order is self._unanswered:
            self._wait(lambda: self._store.check([self._answer]), timeout)
            self._take_answer(order)
        if order.error is not None:
            raise order.error

    def _take_answer(self, order: _Order) -> None:
        """Take the worker's answer to the last order from the store, and keep it in the order."""
        with _reaching():
            status = self._store.get(self._answer)
            self._store.delete_key(self._answer)
            _, *futures = order.memory
            # Another answer may come from a worker that has not received everything. To wait would
            # block then, and to keep the sends would give it these weights for the next ones. Gloo
            # drops a send with its future, and reads no memory of it from then on.
            self._unanswered, order.memory = None, []
            if status != b"updated":
                text = f"rank {self.rank} answered {status!r}, and not 'updated'"
                order.error = ApplyError(text)
                return
            for future in futures:
                future.wait()  # does not block: the worker has received everything

    def _wait(self, condition: Callable[[], bool], timeout: float | None) -> None:
        """Wait until a condition holds; raise if the worker's process or the time is over."""
        give_up = None if timeout is None else time.monotonic() + timeout
        pause = _STORE_PAUSE_SECONDS[0]
        # The store is polled, because its own wait writes to stderr when it ends without success,
        # and lets no Ctrl-C through.
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
        """Return True if the store answers and the worker's process is not known to have ended."""
        try:
            self._store.check([self._answer])
        except RuntimeError:
            return False
        return self.is_alive()


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    """Translate errors of the store and of the process group.

    Raises:
        TransportBroken: The store or the process group failed.
    """
    try:
        yield
    except RuntimeError as exc:
        text = str(exc).partition("\n")[0]
        raise TransportBroken(f"the store or the process group failed: {text}") from exc


class DistributedWeightUpdater(AtOnceWeightUpdater):
    """Updater for the workers of a ``DistributedCollector``, which run TorchRL's own loop.

    It sends by the older generation's transport, which has the protocol of that loop: a snapshot,
    to all workers at the same time.

    Pass it to the collector's constructor, and omit the arguments that the collector will have; or
    assign it to ``collector.weight_updater``. Only if it is passed to the constructor can it make
    sure that policies of workers on this host share no memory with the trainer's. A worker takes an
    update when it has collected its batch.

    Args:
        store: The store of the collector.
        policy_weights: Live weights for updates without weights, with the names that the workers'
            weights have; those of the collector's policy, if omitted.
        num_workers: Number of workers.
        sync: Kept for TorchRL's signature: an update always waits for the workers.
        timeout: Seconds for each update; ``None`` waits for ever.

    Raises:
        ConfigError: The timeout is not positive.

    An update raises :class:`~aiosync.PartialSyncError`, which names each worker that died or did
    not answer in time. The death of a worker of a cluster's scheduler cannot be seen, so the update
    waits for it until the timeout.
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
        """Remember the collector, and give its workers policies with memory of their own.

        Args:
            collector: The collector.

        Raises:
            ConfigError: A collector was registered before.
        """
        super().register_collector(collector)
        policy = getattr(collector, "_policy_to_send", None)
        # A collector that has jobs has sent its policy to them already.
        if isinstance(policy, nn.Module) and not hasattr(collector, "jobs"):
            collector._policy_to_send = _private_when_unpickled(policy)

    def _num_workers(self) -> int:
        return int(self._known("num_workers", self.num_workers))

    def _get_server_weights(self) -> Any:
        return self._known("policy_weights", self.policy_weights)

    def _resolve_workers(self, worker_ids: Any) -> list[int]:
        # TorchRL's collectors pass a rank, which counts from 1; lists hold indices from 0.
        if isinstance(worker_ids, int):
            if worker_ids < 1:
                raise LocalProtocolError(f"a worker's rank is at least 1, got {worker_ids}")
            worker_ids = [worker_ids - 1]
        # The base class returns None only without ids of workers, which this class always has.
        return self._indices(super()._resolve_workers(worker_ids) or [])

    def _refuse_policy_factories(self) -> None:
        """Raise if the collector's workers make their policies themselves."""
        factories = getattr(self.collector, "policy_factory", None) or ()
        if any(factory is not None for factory in factories):
            raise ConfigError(
                "workers that make their policy with policy_factory= receive nothing from a "
                "DistributedWeightUpdater: use weight_sync_schemes= instead"
            )

    def _send_at_once(self, weights: Any, worker_ids: list[int]) -> None:
        self._refuse_policy_factories()
        # Workers receive all tensors of their policy, in TorchRL's order. So the weights, which may
        # be a part or have another order, are first copied into a snapshot of all tensors.
        snapshot = self._known("policy_weights", self.policy_weights).detach().clone()
        copy_weights(snapshot, weights)
        sending, waiting = Deliveries(), {idx: self._transport(idx) for idx in worker_ids}
        while waiting:
            left = math.inf
            if self.timeout is not None:
                left = sending.began + self.timeout - time.monotonic()
            # Each worker gets its order as soon as it is free, as another one may be stuck. At the
            # deadline the rest get theirs with no time to wait, which fails with an AckTimeout.
            for idx in [idx for idx, each in waiting.items() if each.is_free() or left <= 0]:
                transport = waiting.pop(idx)
                transport.timeout = None if self.timeout is None else max(0.0, left)
                sending.begin(idx, functools.partial(transport.order, snapshot))
            if waiting:
                time.sleep(_PAUSE_SECONDS)
        sending.finish_all(self.timeout)
        sending.raise_failures()

    def _transport(self, idx: int) -> DistributedTransport:
        """Return a worker's transport; it sees the end of a worker that the collector started."""
        if idx not in self._transports:
            store, jobs = self._known("_store", self._store), getattr(self.collector, "jobs", ())
            made = DistributedTransport(store, idx + 1, timeout=self.timeout)
            if idx < len(jobs):
                made.is_alive = getattr(jobs[idx], "is_alive", made.is_alive)
            self._transports[idx] = made
        return self._transports[idx]


def _private_when_unpickled(policy: nn.Module) -> nn.Module:
    """Return a copy of a policy whose unpickled copies each have memory of their own.

    torch pickles tensors for a process of this host as references to shared memory.
    """
    twin = make_private(copy.deepcopy(policy))
    twin.__dict__["__reduce_ex__"] = functools.partial(_reduced, twin)
    return cast("nn.Module", twin)


def _reduced(twin: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Reduce a copy to a call of make_private(), in place of its ``__reduce_ex__()``."""
    del protocol
    # Without this method of its own the plain copy is pickled as any module is.
    plain = object.__new__(type(twin))
    plain.__dict__.update(twin.__dict__)
    del plain.__dict__["__reduce_ex__"]
    return make_private, (plain,)
