"""The older generation's transports that are no pipes: calls of remote collectors, and a store.

What travels in a call, and how, is Ray's or RPC's own business; both are loaded when they are
needed. In a store are messages of the wire format: nothing is pickled, and no process group is
touched. Must not import schemes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch.distributed import DistError

from aiosync.errors import (
    AckTimeout,
    ApplyError,
    ConfigError,
    LocalProtocolError,
    PeerClosed,
    RemoteProtocolError,
    TransportBroken,
)
from aiosync.legacy.endpoint import Copier, Weights
from aiosync.legacy.transports import Answered, Finish
from aiosync.protocol import VersionClock
from aiosync.strategy import WeightStrategy
from aiosync.tensors import FlatBuffer, Layout
from aiosync.tensors.tensordicts import is_tensordict
from aiosync.transports._ray_store import need_cluster
from aiosync.wire import ManifestMessage, Update, decode_header, encode_header

__all__ = ["DistributedTransport", "RPCTransport", "RayActorTransport", "RayTransport"]

_PART_NBYTES = 4 * 2**20  # a TCPStore hangs at values above 8 MiB
_PAUSE_SECONDS = (0.001, 0.05)  # first and last, between two looks at the store


# -- calls ----------------------------------------------------------------------------------------


class _ByCall(Answered):
    """The other side gets its weights by a call of a method that it has."""

    def receive_weights(self, timeout: float | None = 1.0) -> None:
        """Return ``None``: the remote object gets its weights by the call."""
        del timeout


class RayTransport(_ByCall):
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
        return functools.partial(_finish_call, self._call(model_id, weights))

    def _call(self, model_id: str, weights: Any) -> Any:
        return self._actor.update_policy_weights_.remote(self._put(weights), **_named(model_id))

    def _put(self, weights: Any) -> Any:
        stored = self.tensor_transport == "object_store"
        options = {} if stored else {"_tensor_transport": self.tensor_transport}
        return need_cluster().put(weights, **options)

    def check_connection(self) -> bool:
        """Whether the actor is alive; one that is busy counts as alive."""
        ray = need_cluster()
        ready = self._actor.__ray_ready__.remote()
        done, _ = ray.wait([ready], timeout=1.0)
        try:
            ray.get(done)
        except ray.exceptions.RayActorError:
            return False
        return True


def _finish_call(sent: Any, timeout: float | None) -> None:
    ray = need_cluster()
    try:
        ray.get(sent, timeout=timeout)
    except ray.exceptions.GetTimeoutError as exc:
        raise AckTimeout(f"the actor did not answer within {timeout:g} s") from exc
    except ray.exceptions.RayActorError as exc:
        raise PeerClosed(f"the actor is gone: {exc}") from exc
    except ray.exceptions.RayError as exc:
        cause = getattr(exc, "cause", None) or exc
        raise ApplyError(
            f"the actor could not apply the weights: {cause}", remote_type=type(cause).__name__
        ) from exc


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


class RPCTransport(_ByCall):
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

        def finish(timeout: float | None) -> None:
            del timeout
            try:
                sent.wait()
            except Exception as exc:  # whoever waits for the send sees it
                name = getattr(self.collector_info, "name", self.collector_info)
                if isinstance(exc, RuntimeError) and "timeout" in str(exc):
                    raise AckTimeout(f"{name} did not answer within {self.timeout:g} s") from exc
                raise ApplyError(
                    f"{name} could not apply the weights: {exc}", remote_type=type(exc).__name__
                ) from exc

        return finish

    def check_connection(self) -> bool:
        """Whether the worker answers within a second."""
        from torch.distributed import rpc  # not before it is needed

        try:
            rpc.rpc_sync(self.collector_info, os.getpid, timeout=1.0)
        except RuntimeError:
            return False
        return True


def _named(model_id: str) -> dict[str, str]:
    return {} if model_id == "policy" else {"model_id": model_id}


def _copied(weights: Any) -> Any:
    if isinstance(weights, Mapping) and not is_tensordict(weights):
        return {name: _copied(value) for name, value in weights.items()}
    return weights.detach().clone() if hasattr(weights, "detach") else weights


# -- a store --------------------------------------------------------------------------------------


class DistributedTransport(Answered):
    """Weights for one worker through a store of ``torch.distributed``.

    Both sides make one with the same rank, on stores of their own that are connected. Weights
    travel through the process that has the store: for large models prefer the links of
    :class:`aiosync.sync.DistributedWeightSyncScheme`.

    Args:
        store: A ``torch.distributed`` store; the program's own, not closed.
        rank: Rank of the worker.
        sync: ``send_weights()`` waits until the worker answered.
        timeout: Seconds that answers are waited for.
    """

    def __init__(self, store: Any, rank: int, sync: bool = True, *, timeout: float = 120.0) -> None:
        super().__init__(timeout)
        self._store = store
        self.rank = rank
        self.sync = sync
        self._clock = VersionClock()
        self._copier = Copier()
        self._received = 0
        self._unanswered: deque[int] = deque()

    # One side sets a key, the other one reads and deletes it.

    def _key(self, version: int, what: str) -> str:
        return f"aiosync/legacy/{self.rank}/{version}/{what}"

    def _set(self, version: int, what: str, value: bytes | str) -> None:
        with _reaching():
            self._store.set(self._key(version, what), value)

    def _take(self, version: int, what: str) -> bytes:
        with _reaching():
            data = bytes(self._store.get(self._key(version, what)))
            self._store.delete_key(self._key(version, what))
        return data

    def _wait(self, version: int, what: str, timeout: float | None) -> bytes | None:
        give_up = None if timeout is None else time.monotonic() + timeout
        pause = _PAUSE_SECONDS[0]
        # A wait in the store would write to stderr when it ends without success, and keep
        # Ctrl-C from being seen.
        while not self._is_there(version, what):
            if give_up is not None and time.monotonic() >= give_up:
                return None
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS[1])
        return self._take(version, what)

    def _is_there(self, version: int, what: str) -> bool:
        with _reaching():
            return bool(self._store.check([self._key(version, what)]))

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send weights, and with ``sync`` wait until the worker said that it applied them.

        See :class:`MPTransport`; the store may be gone, too (``TransportBroken``).
        """
        finish = self.begin(model_id, weights)
        if self.sync:
            finish(self.timeout)

    def begin(self, model_id: str, weights: Any) -> Finish:
        """As for :class:`Answered`."""
        copied, version = self._copier.copy(weights), self._clock.next()
        update = copied.update(model_id, self._clock.epoch, version)
        self._set(version, "manifest", encode_header(ManifestMessage(copied.layout.manifest)))
        self._set(version, "update", encode_header(update))
        for start in range(0, copied.layout.nbytes, _PART_NBYTES):
            part = bytes(copied.payload[start : start + _PART_NBYTES])
            self._set(version, f"part{start}", part)
        self._set(version, "in", b"all")
        copied.give_back()
        return functools.partial(self._finish, version)

    def _finish(self, sent: int, timeout: float | None) -> None:
        said = self._wait(sent, "out", timeout)
        if said is None:
            raise AckTimeout(
                f"rank {self.rank} did not answer within {timeout or 0:g} s", version=sent
            )
        if said != b"updated":
            text = said.decode(errors="replace")
            raise LocalProtocolError(f"Expected acknowledgment 'updated', got {text!r}")

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """Wait for the next weights, in the order in which they were sent.

        Args:
            timeout: Seconds; ``None`` waits until the store is gone.

        Returns:
            ``(model_id, weights)`` on memory of their own; ``None`` when none came in time.

        Raises:
            TransportBroken: The store is gone.
            RemoteProtocolError: What came is not of this format.
        """
        version = self._received + 1
        if self._wait(version, "in", timeout) is None:
            return None
        self._received = version
        try:
            found = self._read(version)
        except RemoteProtocolError as exc:
            self._set(version, "out", f"{type(exc).__name__}: {exc}")
            raise
        self._unanswered.append(version)
        return found.model_id, found.rebuild()

    def _read(self, version: int) -> Weights:
        messages = [decode_header(self._take(version, name))[0] for name in ("manifest", "update")]
        manifest, update = messages
        if not (isinstance(manifest, ManifestMessage) and isinstance(update, Update)):
            raise RemoteProtocolError("the store holds something other than weights")
        layout = Layout(manifest.manifest)
        starts = range(0, layout.nbytes, _PART_NBYTES)
        payload = b"".join(self._take(version, f"part{start}") for start in starts)
        if len(payload) != layout.nbytes or update.digest != layout.digest:
            raise RemoteProtocolError("weights do not fit their manifest")
        flat = FlatBuffer(layout.nbytes)
        flat.memoryview()[:] = payload
        return Weights.arrived(update.values, update.epoch, update.version, layout, flat)

    def send_ack(self, message: str = "updated") -> None:
        """Answer the oldest weights that were received and not answered.

        Args:
            message: ``"updated"`` for success; anything else is an error to the other side.

        Raises:
            LocalProtocolError: There are none (a ``RuntimeError``).
            TransportBroken: The store is gone.
        """
        if not self._unanswered:
            raise LocalProtocolError("there is nothing to acknowledge: call receive_weights()")
        self._set(self._unanswered.popleft(), "out", message)

    def check_connection(self) -> bool:
        """Whether the store answers."""
        try:
            self._is_there(0, "in")
        except TransportBroken:
            return False
        return True


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    """Say what it means that the store raised something."""
    try:
        yield
    except (DistError, RuntimeError) as exc:
        raise TransportBroken(f"the store is gone: {exc}") from exc
