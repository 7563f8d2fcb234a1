"""The older generation's transports to collectors elsewhere, which take weights themselves.

What travels, and how, is the business of Ray, RPC or ``torch.distributed``. Ray and RPC are loaded
when they are needed. Must not import schemes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from aiosync.errors import (
    AckTimeout,
    ApplyError,
    ConfigError,
    PeerClosed,
    TransportBroken,
)
from aiosync.legacy.endpoint import Copier
from aiosync.legacy.transports import Answered, Finish
from aiosync.strategy import WeightStrategy
from aiosync.tensors.values import is_tensordict
from aiosync.transports.ray import need_cluster

__all__ = [
    "DistributedTransport",
    "RPCTransport",
    "RayActorTransport",
    "RayTransport",
    "finish_ray_call",
    "finish_rpc_call",
]

_PAUSE_SECONDS = (0.0005, 0.01)  # first and last, between two looks at the store


# -- calls ----------------------------------------------------------------------------------------


class RayTransport(Answered):
    """Sends weights to a Ray actor that has ``update_policy_weights_(weights)``.

    Args:
        remote_collector: Handle of the actor.
        tensor_transport: ``"object_store"``, or what else Ray's ``put()`` offers: ``"nixl"``.
        timeout: Seconds that an answer is waited for.

    Raises:
        ConfigError: ``tensor_transport`` is something else (a ``ValueError``).
    """

    def __init__(
        self,
        remote_collector: Any,
        tensor_transport: Literal["object_store", "nixl"] = "object_store",
        *,
        timeout: float = 120.0,
    ) -> None:
        super().__init__(timeout)
        if tensor_transport not in ("object_store", "nixl"):
            raise ConfigError(
                f"tensor_transport must be 'object_store' or 'nixl', got {tensor_transport!r}"
            )
        self._actor = remote_collector
        self.tensor_transport = tensor_transport

    def begin(self, model_id: str, weights: Any) -> Finish:
        """As for :class:`Answered`."""
        return functools.partial(finish_ray_call, self._call(model_id, weights))

    def _call(self, model_id: str, weights: Any) -> Any:
        return self._actor.update_policy_weights_.remote(self._put(weights), **_named(model_id))

    def _put(self, weights: Any) -> Any:
        stored = self.tensor_transport == "object_store"
        options = {} if stored else {"_tensor_transport": self.tensor_transport}
        return need_cluster().put(weights, **options)

    def check_connection(self) -> bool:
        """Whether the actor is alive; one that is busy counts as alive."""
        ray = need_cluster()
        try:
            ray.get(self._actor.__ray_ready__.remote(), timeout=1.0)
        except ray.exceptions.GetTimeoutError:
            return True
        except ray.exceptions.RayActorError:
            return False
        return True


def finish_ray_call(sent: Any, timeout: float | None) -> None:
    """Wait for a call of an actor, and raise what went wrong."""
    ray = need_cluster()
    try:
        ray.get(sent, timeout=timeout)
    except ray.exceptions.GetTimeoutError as exc:
        raise AckTimeout(f"the actor did not answer within {timeout:g} s") from exc
    except ray.exceptions.RayActorError as exc:
        raise PeerClosed(f"the actor is gone: {exc}") from exc
    except ray.exceptions.RayError as exc:
        cause = getattr(exc, "cause", None) or exc
        raise ApplyError(f"the actor failed: {cause}", remote_type=type(cause).__name__) from exc


class RayActorTransport(RayTransport):
    """Sends weights to a Ray actor that wraps a module, such as one of ``RayModuleTransform``.

    Args:
        actor_ref: Handle of the actor.
        update_method: ``"tensordict"`` calls ``_update_weights_tensordict(params=...)``,
            ``"state_dict"`` calls ``_update_weights_state_dict(state_dict=...)``.
        tensor_transport: As for :class:`RayTransport`.
        timeout: Seconds that an answer is waited for.

    Raises:
        ConfigError: An argument is something else (a ``ValueError``).
    """

    def __init__(
        self,
        actor_ref: Any,
        update_method: Literal["tensordict", "state_dict"] = "tensordict",
        tensor_transport: Literal["object_store", "nixl"] = "object_store",
        *,
        timeout: float = 120.0,
    ) -> None:
        super().__init__(actor_ref, tensor_transport, timeout=timeout)
        self._strategy = WeightStrategy(update_method)
        self.update_method = update_method

    def _call(self, model_id: str, weights: Any) -> Any:
        del model_id  # an actor has one module
        put = self._put(self._strategy.extract_weights(weights))
        if self.update_method == "tensordict":
            return self._actor._update_weights_tensordict.remote(params=put)
        return self._actor._update_weights_state_dict.remote(state_dict=put)


class RPCTransport(Answered):
    """Sends weights to a remote object of ``torch.distributed.rpc``.

    Args:
        collector_info: The worker that has it, as ``rpc.get_worker_info()`` says.
        collector_rref: Reference to the object, which has ``update_policy_weights_(weights)``.
        collector_class: Its class.
        timeout: Seconds that an answer is waited for.
    """

    def __init__(
        self,
        collector_info: Any,
        collector_rref: Any,
        collector_class: Any,
        *,
        timeout: float = 120.0,
    ) -> None:
        super().__init__(timeout)
        self.collector_info = collector_info
        self.collector_rref = collector_rref
        self.collector_class = collector_class

    def begin(self, model_id: str, weights: Any) -> Finish:
        """As for :class:`Answered`; the deadline is that of the call."""
        remote = self.collector_rref.rpc_async(timeout=self.timeout)
        # RPC sends from the memory of the tensors, some time later.
        sent = remote.update_policy_weights_(_copied(weights), **_named(model_id))
        return functools.partial(finish_rpc_call, sent)

    def check_connection(self) -> bool:
        """Whether the worker answers within a second."""
        from torch.distributed import rpc  # not before it is needed

        try:
            rpc.rpc_sync(self.collector_info, os.getpid, timeout=1.0)
        except RuntimeError:
            return False
        return True


def finish_rpc_call(sent: Any, timeout: float | None = None) -> None:
    """Wait for a call by RPC, which has a deadline of its own, and raise what went wrong."""
    del timeout
    try:
        sent.wait()
    except Exception as exc:  # of any type: RPC raises what was raised there
        if isinstance(exc, RuntimeError) and "timeout" in str(exc):
            raise AckTimeout(f"the RPC worker did not answer in time: {exc}") from exc
        raise ApplyError(f"the RPC worker failed: {exc}", remote_type=type(exc).__name__) from exc


def _named(model_id: str) -> dict[str, str]:
    return {} if model_id == "policy" else {"model_id": model_id}


def _copied(weights: Any) -> Any:
    if isinstance(weights, Mapping) and not is_tensordict(weights):
        return {name: _copied(value) for name, value in weights.items()}
    return weights.detach().clone() if hasattr(weights, "detach") else weights


# -- a store, and a process group -----------------------------------------------------------------


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
        pause = _PAUSE_SECONDS[0]
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
                pause = min(2 * pause, _PAUSE_SECONDS[1])

    def check_connection(self) -> bool:
        """Whether the store answers, and the worker's process lives, if somebody knows."""
        try:
            with _reaching():
                self._store.check([self._answer])
        except TransportBroken:
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
