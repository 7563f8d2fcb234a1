"""The updater of distributed collectors.

The loop of a worker is TorchRL's: it takes ``b"update_weights"`` from a key of a store, receives
one tensor after the other in the default process group, and answers by another key. There is no
place for a receiver of ours, so this speaks that protocol: from a snapshot, to all workers at the
same time, with deadlines, and looking whether the workers live. An order is given only when the
last one was taken, as it would overwrite it. Must not import torchrl.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import nn

from aiosync.errors import (
    AckTimeout,
    AiosyncError,
    ApplyError,
    ConfigError,
    LocalProtocolError,
    PartialSyncError,
    PeerClosed,
    TransportBroken,
)
from aiosync.legacy.updaters.base import AtOnceWeightUpdater, copy_weights
from aiosync.legacy.updaters.worker import make_private

__all__ = ["DistributedWeightUpdater"]

_PAUSE_SECONDS = (0.0005, 0.01)  # first and last


class DistributedWeightUpdater(AtOnceWeightUpdater):
    """Sends weights to the workers of a ``DistributedCollector``.

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
        self._owed: dict[int, list[Any]] = {}  # workers that did not answer, and what they read

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

    def all_worker_ids(self) -> Iterable[int]:
        """Indices of the workers, from 0."""
        if self.num_workers is not None:
            return range(self.num_workers)
        return range(getattr(self.collector, "num_workers", 0))

    def _get_server_weights(self) -> Any:
        return self._known("policy_weights", self.policy_weights)

    def _resolve_workers(self, worker_ids: Any) -> list[int]:
        # TorchRL's collectors pass a rank, which counts from 1; lists are of indices from 0.
        if isinstance(worker_ids, int):
            if worker_ids < 1:
                raise LocalProtocolError(f"a worker's rank is at least 1, got {worker_ids}")
            worker_ids = [worker_ids - 1]
        every = list(self.all_worker_ids())
        chosen = every if worker_ids is None else [int(each) for each in worker_ids]
        if wrong := [idx for idx in chosen if idx not in every]:
            raise ConfigError(f"there are no workers {wrong}: there are {len(every)}")
        return chosen

    def _send(self, weights: Any, workers: list[int]) -> None:
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
        store = self._known("_store", self._store)
        give_up = None if self.timeout is None else time.monotonic() + self.timeout
        calls = {idx: self._call(store, idx, snapshot) for idx in workers}
        acked: set[int] = set()
        failed: dict[int, AiosyncError] = {}
        pause = _PAUSE_SECONDS[0]
        while calls:
            for idx in list(calls):
                try:
                    next(calls[idx])
                    self._check_alive(idx, give_up)
                    continue
                except StopIteration:
                    acked.add(idx)
                except AiosyncError as exc:
                    failed[idx] = exc
                except RuntimeError as exc:  # also what torch.distributed raises
                    text = str(exc).partition("\n")[0]
                    failed[idx] = TransportBroken(f"the link to worker {idx} failed: {text}")
                del calls[idx]
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS[1])
        if failed:
            raise PartialSyncError(acked=acked, failed=failed)

    def _call(self, store: Any, idx: int, snapshot: Any) -> Iterator[None]:
        """One update of one worker: free the way, order and send, wait for the answer.

        Yields where it has to wait.

        Raises:
            RuntimeError: The store or the group failed.
            ApplyError: The worker answered something else.
        """
        order, answer = f"NODE_{idx + 1}_in", f"NODE_{idx + 1}_out"
        if idx in self._owed:  # the answer to an update that was given up
            while not store.check([answer]):
                yield
            store.delete_key(answer)
            del self._owed[idx]
        while store.check([order]):
            yield
        # Until the answer is there, somebody may read the snapshot.
        self._owed[idx] = [snapshot]
        store.set(order, b"update_weights")
        self._owed[idx] += snapshot.isend(idx + 1, return_early=True)
        while not store.check([answer]):
            yield
        status = store.get(answer)
        store.delete_key(answer)
        _, *futures = self._owed.pop(idx)
        if status != b"updated":
            raise ApplyError(f"Expected 'updated' but got status {status!r}.", worker_idx=idx)
        for future in futures:
            future.wait()  # everything was received

    def _check_alive(self, idx: int, give_up: float | None) -> None:
        jobs = getattr(self.collector, "jobs", ())
        is_alive = getattr(jobs[idx], "is_alive", None) if idx < len(jobs) else None
        if is_alive is not None and not is_alive():
            raise PeerClosed(f"the process of worker {idx} (rank {idx + 1}) has ended")
        if give_up is not None and time.monotonic() > give_up:
            raise AckTimeout(
                f"worker {idx} (rank {idx + 1}) did not answer within {self.timeout:g} s",
                worker_ids=[idx],
            )


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
