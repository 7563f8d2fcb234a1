"""Properties of a scheme, and its calls that never wait.

The blocking twins of schemes have the same. Must not import a concrete scheme.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeVar

from aiosync.errors import AiosyncError, ConfigError, LocalProtocolError
from aiosync.events import Observer, SyncStats
from aiosync.protocol import as_index, validate_timeout
from aiosync.receiver.reads import Guarded, Reading
from aiosync.schemes.lifecycle import Life
from aiosync.schemes.options import SchemeOptions
from aiosync.schemes.results import weights_to_apply
from aiosync.schemes.sources import Sources, as_model_id, is_per_worker
from aiosync.spans import LastRead, VersionSpan, epoch_text, staleness
from aiosync.strategy import WeightStrategy, get_strategy
from aiosync.transports.base import Transport

__all__ = ["SchemeState"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class SchemeState(SchemeOptions):
    """Options and state of a scheme, for any thread; see :class:`aiosync.WeightSyncScheme`."""

    _life: Life
    _strategy: WeightStrategy

    # Type checkers refuse the mistakes that these methods explain.
    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            """Raise an error that says what to write; the blocking schemes override this."""
            raise LocalProtocolError(
                "this scheme is of `aiosync`: write `async with scheme:`, or use a scheme of "
                "`aiosync.sync` in code without an event loop, such as aiosync.sync.twin(scheme)"
            )

        def __aenter__(self) -> NoReturn:
            """Raise an error that says what to write; the async schemes override this."""
            raise LocalProtocolError(
                "this scheme is of `aiosync.sync`: write `with scheme:` where no event loop runs, "
                "or use a scheme of `aiosync` in async code, such as aiosync.sync.twin(scheme)"
            )

        __exit__, __aexit__ = __enter__, __aenter__

    # -- the model -----------------------------------------------------------------------------

    @property
    def strategy(self) -> WeightStrategy:
        """The strategy that extracts and applies weights."""
        return self._strategy

    @strategy.setter
    def strategy(self, value: WeightStrategy | Literal["tensordict", "state_dict"]) -> None:
        self._strategy = get_strategy(value)
        self.strategy_str = self._strategy.extract_as

    @property
    def model_id(self) -> str | None:
        """Name of the model."""
        return self._life.given.model_id

    @model_id.setter
    def model_id(self, value: str) -> None:
        if self._life.connected:
            raise LocalProtocolError("model_id cannot be changed once connected")
        self._life.given.model_id = as_model_id(value)

    @property
    def worker_idx(self) -> int | None:
        """Index of this worker; ``None`` on the sender or before the sender chose one."""
        return self._life.worker_idx

    @worker_idx.setter
    def worker_idx(self, value: int | None) -> None:
        life = self._life
        if life.role == "sender" and value is not None:
            raise LocalProtocolError("Worker index cannot be set after initialization on sender")
        if life.connected and value != life.worker_idx:
            raise LocalProtocolError(
                "worker_idx cannot be changed once connected: the trainer knows this worker by it"
            )
        life.worker_idx = None if value is None else as_index("worker_idx", value)

    @property
    def context(self) -> Any:
        """Owner of the model; ``None`` if there is none or it is gone."""
        return self._life.given.context

    @context.setter
    def context(self, value: Any) -> None:
        self._assign("context", value)

    @property
    def model(self) -> Any:
        """The model as it is now: as given, or found in the context; ``None`` without one.

        Assigning another one, or another :attr:`context` or :attr:`weights`, to a connected
        receiver, also with ``apply="manual"``, guards the new model and gives it the weights of
        :attr:`version` before it returns. The old model keeps its values in memory of its own,
        and loses its hooks. If the weights do not fit, the assignment raises
        :class:`~aiosync.ApplyError`, in whatever thread it is made, and nothing changes; if the
        model cannot be guarded, it raises :class:`~aiosync.ConfigError`. A context that gets such
        a model by itself has updates refused. While a forward pass runs in another thread, the
        hooks and the check are made at once, and the new model gets the weights when that pass
        ends: reads have version 0 until then.
        ``model = None`` drops the model, also when that pass ends: the version is 0 then, and the
        next model, which may have other shapes, gets the next update.
        """
        return self._life.given.find()

    @model.setter
    def model(self, value: Any) -> None:
        self._assign("model", value)

    @property
    def weights(self) -> Any:
        """The weights as given, or as the strategy extracts them from the model."""
        if self._life.given.weights is not None:
            return self._life.given.weights
        model = self.model
        return None if model is None else self._strategy.extract_weights(model)

    @weights.setter
    def weights(self, value: Any) -> None:
        self._assign("weights", value)

    def _read_weights(self) -> Any:
        """Return the weights of the model, for an update that receive() returned."""
        return self.weights

    def _assign(self, name: str, value: Any) -> None:
        """Set the model, the weights or the context, by the rules of the role if there is one."""
        if self._life.side is not None:
            self._life.side.assign(self, self._life, name, value)
        else:
            setattr(self._life.given, name, value)

    @property
    def initialized_on_sender(self) -> bool:
        """True if this object is a sender."""
        return self._life.is_a("sender")

    @property
    def initialized_on_receiver(self) -> bool:
        """True if this object is a receiver."""
        return self._life.is_a("receiver")

    @property
    def synchronized_on_sender(self) -> bool:
        """True if ``connect()`` succeeded on this sender."""
        return self._life.is_a("sender") and self._life.connected

    @property
    def synchronized_on_receiver(self) -> bool:
        """True if ``connect()`` succeeded on this receiver."""
        return self._life.is_a("receiver") and self._life.connected

    @property
    def version(self) -> int:
        """Sender: newest version drawn. Receiver: newest one that the model took. 0 before any."""
        runtime = self._life.runtime
        return 0 if runtime is None else runtime.version

    @property
    def epoch(self) -> int:
        """The run of a trainer that :attr:`version` belongs to; 0 before any version."""
        if self._life.sender is not None:
            return self._life.sender.workers.epoch if self._life.sender.version else 0
        return 0 if self._life.receiver is None else self._life.receiver.ledger.inbox.epoch or 0

    @property
    def lag(self) -> int:
        """Number of versions that this receiver, or the sender's slowest worker, is behind.

        A sender's workers count by what they were sent, as for :meth:`wait_lag_below`: not one that
        refused it, or that only pulls.
        """
        runtime = self._life.runtime
        return 0 if runtime is None else runtime.lag

    def stats(self) -> SyncStats:
        """Return the counts so far and the present state. Never waits.

        May be called on any thread, also after closing.

        Raises:
            LocalProtocolError: The object is neither a sender nor a receiver yet.
            TransportClosed: It was closed before it was one.
        """
        life = self._life
        if life.runtime is not None:
            return life.runtime.stats()
        # Not called if there is a role, as it would refuse a scheme closed before it connected.
        if life.side is None:
            life.check_has_role()
        life.meter.role, life.meter.model = life.role or "sender", self.model_id or "policy"
        return life.meter.stats()

    def add_observer(self, observer: Observer) -> None:
        """Tell an observer of each later send of this trainer, or version of this worker.

        The observer is called on the event loop of this object, soon after the send or version has
        ended. Copies of this object have no observers.

        Args:
            observer: Has ``on_sync(event)``, which gets a :class:`aiosync.SyncEvent`.

        Raises:
            ConfigError: It has no such method.
        """
        self._life.meter.add(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Tell an observer no more. Does nothing if it is not told of syncs."""
        self._life.meter.remove(observer)

    @property
    def worker_versions(self) -> dict[int, int]:
        """Sender: the version that each connected worker is known to have applied."""
        links = {} if self._life.sender is None else self._life.sender.workers.links
        return {idx: link.applied for idx, link in links.items()}

    @property
    def staged_version(self) -> int:
        """Receiver: version that is complete and waiting to be applied; 0 if there is none."""
        return 0 if self._life.receiver is None else self._life.receiver.applier.staged_version

    @property
    def link_lost(self) -> AiosyncError | None:
        """Receiver: the reason why there is no link to the trainer; ``None`` while there is one.

        The scheme may be reconnecting at this moment. Once it has given up, this is the reason for
        that, and :meth:`receive` raises it.
        """
        return None if self._life.receiver is None else self._life.receiver.outage.lost_link

    @property
    def sender_transports(self) -> dict[int, Transport]:
        """The link to each connected worker, by index; empty on a receiver.

        For inspection only: the scheme sends and receives on them, on its event loop.
        """
        links = {} if self._life.sender is None else self._life.sender.workers.links
        return {idx: link.transport for idx, link in links.items()}

    @property
    def shared_transport(self) -> Transport | None:
        """``None``: each worker has a link of its own. For programs written for TorchRL."""
        return None

    @property
    def receiver_transport(self) -> Transport | None:
        """The link to the trainer, the last one if it was lost; ``None`` if there was none.

        For inspection only: the scheme sends and receives on it, on its event loop.
        """
        return None if self._life.receiver is None else self._life.receiver.transport

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
            strategy: Strategy that extracts the weights; this scheme's by default.
            context: Object in which names are looked up; this scheme's by default.

        Returns:
            A TensorDict or a state dict on the memory of the source, or ``None``.
        """
        weights = self._resolve_weights(weights, model_id, context)
        if weights is None or is_per_worker(weights):
            return weights
        return (strategy or self._strategy).extract_weights(weights)

    def _resolve_weights(self, weights: Any, model_id: str | None, context: Any) -> Any:
        """Return the weights that a call gives or names, or else those of the model."""
        given = self._life.given
        # The registered weights are those of this scheme's own model in its own context.
        own = context is None or context is given.context
        own = own and model_id in (None, self.model_id)
        sources = given.sources if own else Sources()
        if weights is None and own:
            # Beside a model, weights are a buffer of a user's scheme, which may be older.
            weights = given.weights if given.model is None else given.model
        context = given.context if context is None else context
        return sources.resolve(weights, context, model_id or self.model_id or "policy")

    # -- reads ---------------------------------------------------------------------------------

    def reading(self) -> Reading:
        """Return a context manager: computations inside see one version of the weights.

        Forward passes of the model itself do not need it. ``with`` in threads and in code without
        awaits, ``async with`` in coroutines that await inside. ``with scheme.reading() as read:``
        gives ``read.version`` inside, and ``read.span`` after the block.
        """
        return Reading(self._life.guard)

    @property
    def last_read(self) -> LastRead | None:
        """The version that the last read of this task, or else of this thread, used.

        ``None`` before any read. It labels a computed result, also inside of the read.
        :attr:`version` right after a forward may be newer already. Reads are as for :meth:`span`,
        one inside of another included. A read in another thread, as by ``asyncio.to_thread()``, is
        none of this thread's: ask there, or use :meth:`reading`.
        """
        held = self._life.guard.read_versions.last()
        return None if held is None else LastRead(*held)

    def span(self) -> VersionSpan | None:
        """Return the versions that this thread, or this task, has read since the last call.

        Reads are forward passes, :meth:`reading` blocks and guarded methods of a receiver; a read
        inside of another is part of that. They count once they have ended, from the first call in
        any thread on: call it once before. With ``strict=False`` the version is that of the newest
        update, whatever names it held. Memory is bounded: of more than 256 versions that no call
        asked for, the oldest count as still older ones.

        Returns:
            The span, with the number of reads of each version; ``None`` if there was no read. Its
            ``first`` is 0 if a version was of another run of the trainer than the newest, or there
            was none.
        """
        return self._life.guard.read_versions.span()

    def staleness(
        self, span: VersionSpan | None, weight: Literal["sample", "token"] = "sample"
    ) -> float | None:
        """Return how many versions older than this trainer's newest a sample is.

        See :func:`aiosync.staleness`. Spans of another run of the trainer are comparable up to
        ``first_version``, and unknown otherwise.

        Raises:
            LocalProtocolError: Not a sender.
            ConfigError: There is no such weight.
        """
        if self._life.role != "sender":
            raise LocalProtocolError(
                "staleness() is the trainer's: elsewhere call aiosync.staleness(newest, span)"
            )
        epoch, first_version = epoch_text(self.epoch), self.first_version
        return staleness(self.version, span, weight, epoch=epoch, first_version=first_version)

    def guarded(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Return the function, or coroutine function, so that each call of it sees one version.

        Args:
            function: Function that computes with the model beside its forward passes. No generator.

        Raises:
            ConfigError: It cannot be called, or is a generator: generators need :meth:`reading`. A
                call that returns a future or a task raises this, too.
        """
        return Guarded(self._life.guard, function, getattr(function, "__name__", "function"))

    def apply_pending(self) -> int | None:
        """Apply the staged update now, on this thread. For ``apply="manual"``.

        Returns:
            The version that was applied, or ``None`` when nothing was staged, or there is no
            model yet.

        Raises:
            ApplyError: It does not fit the model, which kept its version; or the hook ``applied``
                raised, and the model has the new one.
            LocalProtocolError: Not a connected receiver, or called inside a forward pass.
            SyncTimeout: A forward pass of another thread did not end within 30 seconds; on an
                event loop it is not waited for.
        """
        receiver = self._life.receiver
        if receiver is None or self._life.closed:
            self._life.check_open()
            raise LocalProtocolError("apply_pending() needs a connected receiver")
        return receiver.applier.apply_pending()

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Put weights into this receiver's model by hand, between two forward passes.

        Reads have version 0 from then on, until the next update. :attr:`version` stays.

        Args:
            weights: TensorDict or state dict; copied, never aliased. ``None``, or a result of this
                receiver's :meth:`receive`, which the model has already, does nothing.
            inplace: Keep the parameter objects; otherwise replace them.

        Raises:
            ManifestMismatch: They do not fit; nothing was changed.
            ApplyError: A version that was sent before, and that the model takes first, does not
                fit; nothing was changed.
            LocalProtocolError: Not a receiver, or called inside a forward pass or a
                :meth:`reading` block, which would see two versions.
            ConfigError: There is no model.
            SyncTimeout: Another thread's forward pass did not end within 30 seconds; on an
                event loop it is not waited for.
        """
        self._life.check_open()
        if self._life.role != "receiver":
            no_role = self._life.role is None
            when = "before init_on_receiver has been called" if no_role else "on a sender side"
            raise LocalProtocolError(f"apply_weights() called {when}.")
        target = self._life.given.target()
        if target is None:
            raise ConfigError("No model registered")
        guard = self._life.guard
        guard.refuse_inside_read("apply_weights")
        weights = weights_to_apply(weights, self._read_weights)
        if weights is None:
            return
        # A version that was sent before this call must not overwrite the weights later.
        guard.take()

        def apply() -> None:
            self._strategy.apply_weights(target, weights, inplace=inplace)
            # The trainer never sent these weights.
            guard.held = 0, 0

        guard.between_reads(apply, method="apply_weights")

    # -- checks --------------------------------------------------------------------------------

    def _limit(self, timeout: float | None) -> float | None:
        """Return the seconds that a call waits, the scheme's by default; ``None`` for ever.

        Raises:
            ConfigError: The timeout is not a number.
        """
        if timeout is None:
            return self.timeout
        validate_timeout(timeout)
        return None if timeout == math.inf else timeout

    def _require(self, method: str, role: str | None = None) -> Any:
        """Return the role of a scheme that is connected in this process, on the running loop.

        Raises:
            LocalProtocolError: It is not connected so, or has another role than ``role``.
        """
        life, side = self._life, self._life.side
        here = life.loop is asyncio._get_running_loop() and life.pid == os.getpid()
        usable = here and life.connected and not life.closed
        if not usable or side is None or role not in (None, side.role):
            life.why_not_here(method, role)
        return side
