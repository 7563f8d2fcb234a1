"""What every scheme is before and beside its role: options, pickling, the model, the versions.

Must not import the sender's or the receiver's half of the scheme.
"""

from __future__ import annotations

import asyncio
import os
import socket
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Self

from aiosync._tasks import run_on_loop
from aiosync.errors import ConfigError, LocalProtocolError, TransportClosed
from aiosync.protocol import VersionClock, validate_timeout
from aiosync.protocol.indices import as_index
from aiosync.receiver.guard import Guard, has_own_call, why_unguarded
from aiosync.rendezvous.unix import new_address
from aiosync.schemes._context import NoWeakReference, as_model_id, resolve_model
from aiosync.schemes._relaying import Relay
from aiosync.schemes._sources import Sources
from aiosync.schemes.options import SchemeOptions
from aiosync.strategy import WeightStrategy, get_strategy
from aiosync.tensors import Dtypes
from aiosync.transports.base import Transport
from aiosync.types import Require

if TYPE_CHECKING:
    from aiosync.rendezvous.listener import AnyListener
    from aiosync.schemes._transforming import Transform
    from aiosync.schemes.receiver import WeightReceiver
    from aiosync.schemes.sender import WeightSender
    from aiosync.sender.snapshots import SnapshotCopier
    from aiosync.tensors.apply import LoadTarget

__all__ = ["SchemeCore"]


class SchemeCore(SchemeOptions):
    """Options and state of a scheme; see :class:`aiosync.WeightSyncScheme`."""

    def __init__(
        self,
        strategy: Literal["tensordict", "state_dict"] | WeightStrategy = "tensordict",
        sync: bool = True,
        per_worker_weights: bool = False,
        *,
        apply: Literal["auto", "manual"] = "auto",
        apply_copy: bool = False,
        guard: Literal["forward", "reading"] = "forward",
        strict: bool = True,
        require: Require = "all",
        timeout: float | None = 120.0,
        wire_dtype: Dtypes | None = None,
    ) -> None:
        self._strategy = get_strategy(strategy)
        self.strategy_str = self._strategy.extract_as
        self.sync = sync
        self.per_worker_weights = per_worker_weights
        self.apply = apply
        self.apply_copy = apply_copy
        self.guard = guard
        self.strict = strict
        self.require = require
        self.timeout = timeout
        self.wire_dtype = wire_dtype
        self._address = new_address()
        self._model_id: str | None = None
        self._sender_pid: int | None = None
        self._reset()

    # Called with what a receiver is given to keep up to date, before it is. Unlike what _reset()
    # sets, one that an integration puts here travels in copies and pickles.
    _prepare_model: Callable[[Any], None] | None = None
    # Whether workers may take what they were named in a forward, and say nothing.
    _promises: bool = True

    def _reset(self) -> None:
        """Everything that a pickle does not carry; all else that an object has, it does."""
        self._role: Literal["sender", "receiver"] | None = None
        self._connected = False
        self._closed = False
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting: asyncio.Task[Any] | None = None  # the one inside connect()
        self._worker_idx: int | None = None
        self._context_ref: weakref.ref[Any] | None = None
        self._model: Any = None
        self._weights: Any = None
        self._loader: LoadTarget | None = None
        self._transform: Transform | None = None
        self._sources = Sources()
        self._listener: AnyListener | None = None
        self._links: dict[int, Transport] = {}
        self._pipe: Any = None
        self._clock = VersionClock()
        self._maker: SnapshotCopier | None = None
        self._guard_object = Guard()
        self._sender: WeightSender | None = None
        self._receiver: WeightReceiver | None = None
        self._reported = 0
        # What the owner of the model wants to know, and do, when it has another version.
        self._flipped: Callable[[int, int], None] | None = None
        self._relay: Relay | None = None

    # -- pickling ------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        fresh = object.__new__(type(self))
        fresh._reset()
        state = {name: value for name, value in vars(self).items() if name not in vars(fresh)}
        vars(fresh).clear()  # it may refer to itself, and there is nothing to close
        state["_sender_pid"] = self._pid if self._role == "sender" else self._sender_pid
        return state

    def _bind_early(self) -> None:
        """Have copies made before ``init_on_sender()`` know where the sender will be."""

    def _separate(self) -> None:
        """Have this copy meet only copies that are made of it from now on."""
        self._address = new_address()

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        other.__setstate__(self.__getstate__())
        return other

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "connected" if self._connected else "not connected"
        role = self._role or "no role yet"
        return f"<{type(self).__name__} for {self._model_id or 'no model'}: {role}, {state}>"

    # -- links, which subclasses make ----------------------------------------------------------

    def _transport_over(self, sock: socket.socket, name: str) -> Transport:
        """A link over a connected Unix socket."""
        raise LocalProtocolError(f"{type(self).__name__} has no link to {name}")

    def create_transport(self, pipe_or_context: Any) -> Transport:
        """A link over a ``multiprocessing`` connection or a socket. Needs a running loop."""
        raise LocalProtocolError(f"{type(self).__name__} has no transport")

    # -- the model -----------------------------------------------------------------------------

    @property
    def strategy(self) -> WeightStrategy:
        """How weights are extracted and applied."""
        return self._strategy

    @strategy.setter
    def strategy(self, value: WeightStrategy | Literal["tensordict", "state_dict"]) -> None:
        self._strategy = get_strategy(value)
        self.strategy_str = self._strategy.extract_as

    @property
    def model_id(self) -> str | None:
        """Name of the model."""
        return self._model_id

    @model_id.setter
    def model_id(self, value: str) -> None:
        if self._connected:
            raise LocalProtocolError("model_id cannot be changed once connected")
        self._model_id = as_model_id(value)

    @property
    def worker_idx(self) -> int | None:
        """Index of this worker; ``None`` on the sender or before the sender chose one."""
        return self._worker_idx

    @worker_idx.setter
    def worker_idx(self, value: int | None) -> None:
        if self._role == "sender" and value is not None:
            raise LocalProtocolError("Worker index cannot be set after initialization on sender")
        if self._connected and value != self._worker_idx:
            raise LocalProtocolError(
                "worker_idx cannot be changed once connected: the trainer knows this worker by it"
            )
        self._worker_idx = None if value is None else as_index("worker_idx", value)

    @property
    def context(self) -> Any:
        """Owner of the model, or ``None`` when there is none or it is gone."""
        return None if self._context_ref is None else self._context_ref()

    @context.setter
    def context(self, value: Any) -> None:
        try:
            reference = None if value is None else weakref.ref(value)
        except TypeError as exc:
            raise NoWeakReference(
                f"a context is kept as a weak reference, which a {type(value).__name__} cannot "
                "have: pass the model itself (model=, and num_workers= on the sender)"
            ) from exc
        self._replace("_context_ref", reference)

    @property
    def model(self) -> Any:
        """The model as it is now: as given, or found in the context; ``None`` without one."""
        if self._model is not None:
            return self._model
        context = self.context
        if context is None or self._model_id is None:
            return None
        return resolve_model(context, self._model_id)

    @model.setter
    def model(self, value: Any) -> None:
        if self._role == "receiver":
            self._check_guard(value)
        if self._role == "sender":
            self._sources.replace(value)
            self._weights = None
        self._replace("_model", value)

    def _replace(self, name: str, value: Any) -> None:
        """Set what the target is found by, and tell the receiver; all of it or nothing."""
        before, receiver = getattr(self, name), self._receiver
        if receiver is None or self._closed or self._inherited:
            setattr(self, name, value)
            return
        with receiver.assigning():
            setattr(self, name, value)
            try:
                run_on_loop(self._loop, receiver.model_changed)
            except BaseException:  # raised again: the caller sees it
                setattr(self, name, before)
                raise

    @property
    def weights(self) -> Any:
        """The weights as given, or as the strategy extracts them from the model."""
        if self._weights is not None:
            return self._weights
        model = self.model
        return None if model is None else self._strategy.extract_weights(model)

    @weights.setter
    def weights(self, value: Any) -> None:
        if self._role == "receiver":
            self._check_guard(value)
        if self._role == "sender":
            self._sources.replace(value)
        self._replace("_weights", value)

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this object is a sender."""
        return self._role == "sender" and not self._inherited

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether this object is a receiver."""
        return self._role == "receiver" and not self._inherited

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether ``connect()`` succeeded on this sender."""
        return self.initialized_on_sender and self._connected

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether ``connect()`` succeeded on this receiver."""
        return self.initialized_on_receiver and self._connected

    def _why_no_model(self) -> str | None:
        """What the context lacks; ``None`` if the model is there, or not looked for in one."""
        given = (self._model, self._weights, self._loader)
        if self._context_ref is None or any(each is not None for each in given):
            return None
        context = self.context
        if context is None:
            return "the context is gone, as only a weak reference is kept"
        model_id = self._model_id or "policy"
        try:
            resolve_model(context, model_id)
        except AttributeError:
            return f"the context, a {type(context).__name__}, has no model {model_id!r}"
        return None

    # -- versions ------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Sender: newest version drawn. Receiver: version that the model has. 0 before any."""
        if self._receiver is not None:
            return self._receiver.inbox.version
        return self._clock.current if self._role == "sender" else 0

    @property
    def lag(self) -> int:
        """How far behind: of this receiver, or of the sender's slowest worker; in versions."""
        if self._receiver is not None:
            return self._receiver.lag
        versions = self.worker_versions.values()
        return max((self._clock.current - version for version in versions), default=0)

    @property
    def worker_versions(self) -> dict[int, int]:
        """Sender: the version that each connected worker has applied, as far as it is known."""
        if self._sender is None:
            return {}
        return {idx: peer.applied for idx, peer in sorted(self._sender.peers.items())}

    # -- checks --------------------------------------------------------------------------------

    def _limit(self, timeout: float | None) -> float | None:
        if timeout is not None:
            validate_timeout(timeout)
        else:
            timeout = self.timeout
        return None if timeout is None or timeout == float("inf") else timeout

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosed(
                "this scheme was closed; make a new one, or copy.copy(scheme), to connect again"
            )

    @property
    def _inherited(self) -> bool:
        return self._pid != os.getpid()  # forked: what runs and what is open is the parent's

    def _check_process(self) -> None:
        if self._inherited:
            done = "set up" if self._loop is None else "connected"
            raise LocalProtocolError(
                f"this scheme was {done} before the process forked; call init_on_receiver() and "
                "connect() in the child"
            )

    def _check_loop(self) -> None:
        self._check_process()
        if self._loop is not asyncio._get_running_loop():
            raise LocalProtocolError(
                "this scheme belongs to another event loop; connect and use it on one loop, or "
                "use aiosync.sync from threads"
            )

    def _check_role(self, method: str) -> None:
        if self._inherited:
            # The role, the context and the links are not ours.
            if self._role == "sender":
                self._sender_pid = self._pid
            self._reset()
        self._check_open()
        if self._role is not None:
            raise LocalProtocolError(
                f"{method}(): this object is already a {self._role}; pickle it or use "
                "copy.copy(scheme) for the other side"
            )

    def _check_has_role(self) -> None:
        if self._role is None:
            self._check_open()
            raise LocalProtocolError(
                "Neither init_on_sender nor init_on_receiver have been called. Call "
                "init_on_sender() in the trainer and init_on_receiver() in a worker first"
            )

    def _check_guard(self, target: Any) -> None:
        lacks = None if target is None else why_unguarded(target)
        if lacks is not None and self.apply == "auto" and self.guard == "forward":
            raise ConfigError(
                f"a {type(target).__name__} {lacks}: construct the scheme "
                "with guard='reading' and read inside `with scheme.reading():`, or with "
                "apply='manual' and call apply_pending()"
            )
        if self.apply == "auto" and self.guard == "forward" and has_own_call(target):
            warnings.warn(
                f"a {type(target).__name__} has a __call__ of its own: unless that calls "
                "nn.Module's, no hook guards it, and guard='reading' is needed",
                stacklevel=3,
            )
