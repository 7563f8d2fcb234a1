"""The older generation's transports to remote collectors, by calls of Ray and RPC.

Ray and RPC are loaded only when they are needed. Must not import schemes.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Literal

from aiosync.errors import AckTimeout, ApplyError, ConfigError, PeerClosed
from aiosync.legacy.endpoint import clone_tensors
from aiosync.legacy.transports import Answered, Finish
from aiosync.protocol import finite_or_none
from aiosync.strategy import WeightStrategy
from aiosync.transports.ray import error_of_cluster, need_cluster

__all__ = [
    "RPCTransport",
    "RayActorTransport",
    "RayTransport",
    "finish_ray_call",
    "finish_rpc_call",
]

_RPC_TIMEOUT = "RPCErr:1:"  # how the text of a timeout of torch's RPC begins


class RayTransport(Answered):
    """Transport to a Ray actor that has ``update_policy_weights_(weights)``.

    Args:
        remote_collector: Handle of the actor.
        tensor_transport: ``"object_store"`` or ``"nixl"``, as Ray's ``put()`` offers them.
        timeout: Seconds to wait for an answer.

    Raises:
        ConfigError: ``tensor_transport`` has another value (a ``ValueError``).
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

    @property
    def _takes_snapshot(self) -> bool:
        """True if Ray copies the weights; NIXL reads the tensors themselves, some time later."""
        return self.tensor_transport == "object_store"

    def begin(self, model_id: str, weights: Any) -> Finish:
        """Put the weights into Ray and call the actor; see :class:`Answered`."""
        return functools.partial(finish_ray_call, self._call(model_id, weights))

    def _call(self, model_id: str, weights: Any) -> Any:
        """Call the actor's method with the weights; return Ray's reference to the result."""
        arguments = _arguments_of(model_id)
        return self._actor.update_policy_weights_.remote(self._put(weights), **arguments)

    def _put(self, weights: Any) -> Any:
        """Put weights into Ray in the way of ``tensor_transport``; return the reference to them."""
        stored = self.tensor_transport == "object_store"
        options = {} if stored else {"_tensor_transport": self.tensor_transport}
        return need_cluster().put(weights, **options)

    def check_connection(self) -> bool:
        """Return True if the actor is alive; a busy actor counts as alive."""
        ray = need_cluster()
        try:
            ray.get(self._actor.__ray_ready__.remote(), timeout=1.0)
        except ray.exceptions.GetTimeoutError:
            return True
        except ray.exceptions.RayActorError:
            return False
        return True


def finish_ray_call(sent: Any, timeout: float | None) -> None:
    """Wait for the end of a call of an actor; ``sent`` is Ray's reference to its result.

    Raises:
        AckTimeout: The actor did not answer within ``timeout`` seconds.
        PeerClosed: The actor has ended.
        ApplyError: The call raised an error in the actor.
    """
    ray = need_cluster()
    try:
        ray.get(sent, timeout=finite_or_none(timeout))
    except ray.exceptions.RayError as exc:
        failure = error_of_cluster(exc)
        if isinstance(failure, ray.exceptions.GetTimeoutError):
            raise AckTimeout(f"the actor did not answer within {timeout:g} s") from exc
        if isinstance(failure, ray.exceptions.RayActorError):
            raise PeerClosed(f"the actor is gone: {exc}") from exc
        cause = getattr(exc, "cause", None) or exc
        raise ApplyError(f"the actor failed: {cause}", remote_type=type(cause).__name__) from exc


class RayActorTransport(RayTransport):
    """Transport to a Ray actor that wraps a module, such as one of ``RayModuleTransform``.

    Args:
        actor_ref: Handle of the actor.
        update_method: ``"tensordict"`` calls ``_update_weights_tensordict(params=...)``,
            ``"state_dict"`` calls ``_update_weights_state_dict(state_dict=...)``.
        tensor_transport: As for :class:`RayTransport`.
        timeout: Seconds to wait for an answer.

    Raises:
        ConfigError: An argument has another value (a ``ValueError``).
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
    """Transport to a remote object of ``torch.distributed.rpc``.

    Args:
        collector_info: The worker that has the object, as ``rpc.get_worker_info()`` returns it.
        collector_rref: Reference to the object, which has ``update_policy_weights_(weights)``.
        collector_class: Class of the object.
        timeout: Seconds to wait for an answer.
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
        """Copy the weights and call the remote object; see :class:`Answered`.

        The call itself has the deadline, which starts here.
        """
        limit = finite_or_none(self.timeout) or 0.0  # RPC waits for ever with a timeout of zero
        remote = self.collector_rref.rpc_async(timeout=limit)
        # The weights are copied, because RPC reads the memory of the tensors some time later.
        sent = remote.update_policy_weights_(clone_tensors(weights), **_arguments_of(model_id))
        return functools.partial(finish_rpc_call, sent)

    def check_connection(self) -> bool:
        """Return True if the worker answers within a second."""
        from torch.distributed import rpc  # loaded only when it is needed

        try:
            rpc.rpc_sync(self.collector_info, os.getpid, timeout=1.0)
        except RuntimeError:
            return False
        return True


def finish_rpc_call(sent: Any, timeout: float | None = None) -> None:
    """Wait for the end of the RPC call ``sent``; ``timeout`` is ignored, as the call has its own.

    Raises:
        AckTimeout: The worker did not answer in time.
        ApplyError: The call failed, or raised an error in the worker.
    """
    del timeout
    try:
        sent.wait()
    except Exception as exc:  # RPC raises the worker's error, of any type; the caller gets it
        # Only RPC's own error begins so: the text of a remote error has the error's source lines.
        if isinstance(exc, RuntimeError) and str(exc).startswith(_RPC_TIMEOUT):
            raise AckTimeout(f"the RPC worker did not answer in time: {exc}") from exc
        raise ApplyError(f"the RPC worker failed: {exc}", remote_type=type(exc).__name__) from exc


def _arguments_of(model_id: str) -> dict[str, str]:
    """Return the keyword argument that names a model; none for the default model."""
    return {} if model_id == "policy" else {"model_id": model_id}
