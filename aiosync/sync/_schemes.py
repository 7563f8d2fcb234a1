"""The blocking twins of the schemes. Their behaviour is the async classes' own.

Must not import torch.
"""

from __future__ import annotations

import copy
import os
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias, TypeVar

import aiosync.schemes as aio
from aiosync.errors import LocalProtocolError, TransportClosed
from aiosync.schemes._reading import on_behalf_of_reader
from aiosync.strategy import WeightStrategy
from aiosync.sync._attributes import Attributes
from aiosync.sync._blocking import blocking, direct, initialising, on_loop, option
from aiosync.sync._discovery import Owner, discover, owner_of, rpc_runs
from aiosync.sync._handles import Ready
from aiosync.sync._pending import PendingSends
from aiosync.sync._portal import Lease, lease, refuse_inside_loop
from aiosync.tensors import Dtypes
from aiosync.types import Require, SendReport

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["WeightSyncScheme"]

_T = TypeVar("_T")
_AsyncClass: TypeAlias = type[aio.WeightSyncScheme]


class _Tenant:
    """An async scheme on the portal. Refers to no facade, so that one can be collected."""

    def __init__(self, scheme: aio.WeightSyncScheme, owner: Owner | None) -> None:
        self._scheme = scheme
        self.owner = owner

    def forgotten(self) -> None:
        if self.owner is not None:
            return  # its collector or server closes no scheme: no mistake of the user's
        if not self._scheme._closed and _has_runtime(self._scheme):
            warnings.warn(
                f"{self._scheme!r} was never closed: use `with scheme:` or `scheme.shutdown()`",
                ResourceWarning,
                stacklevel=4,
                source=self._scheme,
            )

    def abort(self) -> None:
        self._scheme.abort()


def _has_runtime(scheme: aio.WeightSyncScheme) -> bool:
    return scheme._sender is not None or scheme._receiver is not None


class WeightSyncScheme(Attributes):
    """Blocking twin of :class:`aiosync.WeightSyncScheme`; same arguments, no ``await``.

    The event loop runs in one background thread of the process, which all schemes share; it is
    started by the first call that waits, and ends when the last scheme is shut down. Methods
    may be called from any thread that runs no event loop. Ctrl-C in a blocking call ends it at
    once.

    Use :class:`SharedMemWeightSyncScheme` or another concrete class.

    Args:
        strategy: As for :class:`aiosync.WeightSyncScheme`, like all the others.
        sync: Kept for TorchRL's signature.
        per_worker_weights: ``send({0: ..., 1: ...})`` gives each worker its own weights.
        apply: ``"auto"``, or ``"manual"`` to apply only in calls that ask for it.
        apply_copy: Copy updates into the parameters' memory.
        guard: ``"forward"``, or ``"reading"`` for ``with scheme.reading():``.
        strict: Every name and dtype must match.
        require: How many workers must apply an update for ``send()`` to succeed.
        timeout: Default timeout of calls in seconds; ``None`` for ever.
        wire_dtype: What the sender casts floating-point weights to on their way.

    Raises:
        ConfigError: An option has an illegal value.
    """

    wire_dtype: option[Dtypes | None] = option("What weights are cast to on their way.")

    # Abstract, as this class is: calling it raises.
    _async_class: ClassVar[_AsyncClass] = aio.WeightSyncScheme  # type: ignore[type-abstract]

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
        self._adopt(
            self._async_class(
                strategy,
                sync=sync,
                per_worker_weights=per_worker_weights,
                apply=apply,
                apply_copy=apply_copy,
                guard=guard,
                strict=strict,
                require=require,
                timeout=timeout,
                wire_dtype=wire_dtype,
            )
        )

    _is_copy = False

    def _adopt(self, scheme: aio.WeightSyncScheme) -> None:
        self._scheme = scheme
        self._lease: Lease | None = None
        self._tenant: _Tenant | None = None
        self._lock = threading.RLock()  # for _lease and _calls
        self._calls = 0
        self._closing = threading.RLock()
        self._sends = PendingSends()
        self._pid = os.getpid()
        self._owner: Owner | None = None
        discover()

    def _find_owner(self, context: Any) -> None:
        self._after_fork()
        if context is not None and not (self._owner and self._owner.stands_for(context)):
            self._owner = owner_of(context, self)
            if self._tenant is not None:
                self._tenant.owner = self._owner

    @classmethod
    def from_backend(cls, backend: str, **options: Any) -> WeightSyncScheme:
        """The scheme of a back-end name, such as ``"shared"``, ``"process"`` or ``"none"``.

        Raises:
            ConfigError: There is none with that name.
        """
        scheme = aio.scheme_from_backend(backend, **options)
        facade: WeightSyncScheme = object.__new__(twin_of(type(scheme)))
        facade._adopt(scheme)
        return facade

    # -- the portal ----------------------------------------------------------------------------

    def _check(self, what: str, instead: str | None = None) -> None:
        refuse_inside_loop(what, instead, may_block=self._may_block)
        self._after_fork()
        self._scheme._check_open()
        if self._is_inherited:
            raise LocalProtocolError(
                f"{what}(): this scheme was set up before the process forked; call "
                "init_on_receiver() and connect() in the child"
            )

    @property
    def _may_block(self) -> bool:
        return self._owner is not None and self._owner.blocks_loops

    def _after_fork(self) -> None:
        # The parent's other threads may have held the locks, and its sends are not ours.
        if self._pid != os.getpid():
            self._adopt(self._scheme)

    @property
    def _is_inherited(self) -> bool:
        return self._scheme._role is not None and self._scheme._inherited

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        try:
            held = self._enter()
        except BaseException:  # goes on to the caller
            coroutine.close()
            raise
        guard = self._scheme._guard_object
        try:
            if guard.reading_here:  # what waits for an update has to know
                with on_behalf_of_reader(guard):
                    return held.call(coroutine)
            return held.call(coroutine)
        finally:
            self._after_call(held)

    def _at_once(self, function: Callable[[], tuple[_T, Callable[[], None] | None]]) -> _T | None:
        """What a function returns that is called while the portal's loop waits, if it is there."""
        held = self._lease
        if held is None or not held.valid:
            return None
        return held.at_once(function)

    def _enter(self) -> Lease:
        with self._lock:
            held = self._lease
            if held is not None and not held.valid:
                if self._lives:  # on the loop of a thread that is ending
                    raise TransportClosed(
                        "this scheme is being closed because the interpreter is ending"
                    )
                held = None
            if held is None:
                self._tenant = _Tenant(self._scheme, self._owner)
                self._lease = held = lease(self._tenant)
            self._calls += 1
        return held

    def _after_call(self, held: Lease) -> None:
        with self._lock:
            self._calls -= 1
            # A call that failed must not leave a thread behind that nobody would ever end.
            idle = self._calls == 0 and not self._lives
            if idle and self._lease is held:
                self._lease = None  # another thread may call meanwhile
        if idle:
            held.release()

    @property
    def _lives(self) -> bool:
        scheme = self._scheme
        return not scheme._closed and (scheme._connected or _has_runtime(scheme))

    # -- the same methods, waiting -------------------------------------------------------------

    connect: Final = blocking(aio.WeightSyncScheme.connect)
    send: Final = blocking(aio.WeightSyncScheme.send, at_once=aio.WeightSyncScheme._send_at_once)
    receive: Final = blocking(aio.WeightSyncScheme.receive)
    pull: Final = blocking(aio.WeightSyncScheme.pull)
    wait_for_version: Final = blocking(aio.WeightSyncScheme.wait_for_version)
    wait_staged: Final = blocking(aio.WeightSyncScheme.wait_staged)

    # -- the same methods, which never waited --------------------------------------------------

    init_on_sender: Final = initialising(aio.WeightSyncScheme.init_on_sender)
    init_on_receiver: Final = initialising(aio.WeightSyncScheme.init_on_receiver)
    init_on_worker: Final = initialising(aio.WeightSyncScheme.init_on_worker)
    create_transport: Final = on_loop(aio.WeightSyncScheme.create_transport)
    prepare_weights: Final = direct(aio.WeightSyncScheme.prepare_weights)
    apply_weights: Final = direct(aio.WeightSyncScheme.apply_weights)
    apply_pending: Final = direct(aio.WeightSyncScheme.apply_pending)
    reading: Final = direct(aio.WeightSyncScheme.reading)

    def send_async(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> int:
        """Take a snapshot now and send it in the background; :meth:`wait_async` waits for it.

        Arguments and errors as for :meth:`aiosync.WeightSyncScheme.send_nowait`.

        Returns:
            The version that is being sent.
        """
        self._check("send_async", "scheme.send_nowait()")

        async def start() -> aio.SendHandle:
            self._scheme._require_sender("send_async")  # or an error names what is not here
            return self._scheme.send_nowait(weights, worker_ids, timeout=timeout)

        handle = self._call(start())
        self._sends.add(handle)
        return handle.version

    def wait_async(self) -> SendReport:
        """Wait for every :meth:`send_async` that is under way.

        Returns:
            The report of the newest; workers that it skipped, or that a newer version overtook,
            are named.

        Raises:
            LocalProtocolError: No :meth:`send_async` is pending.
            PartialSyncError: As :meth:`aiosync.WeightSyncScheme.send` raises it, for the newest
                one that failed since the last call; its notes tell of older ones.
        """
        self._check("wait_async", "await handle")
        return self._sends.wait(self._call)

    @property
    def ready(self) -> Ready:
        """The condition that there is a complete version, to look at or to wait for."""
        return Ready(self, lambda: self._scheme.ready)

    # -- closing -------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Close every link, task, socket and buffer of this object. Idempotent, bounded.

        See :meth:`aiosync.WeightSyncScheme.aclose`. Ends the background thread when no other
        scheme uses it. In a forked child it does nothing: the links are the parent's.
        """
        self._after_fork()
        if self._is_inherited:
            return
        held = self._lease
        if held is None or not held.valid:
            self._scheme.abort()
            return
        refuse_inside_loop("shutdown", "await scheme.aclose()", may_block=self._may_block)
        with self._closing:  # another thread's shutdown has to be over when this one returns
            if not held.valid:
                return
            try:
                held.call(self._scheme.aclose())
            except TransportClosed:
                if held.valid:  # otherwise its owner has closed it, and the loop with it
                    raise
            finally:
                held.release()

    def abort(self) -> None:
        """Close at once from synchronous code, for destructors and signal handlers."""
        self._after_fork()
        if self._is_inherited:
            return
        held = self._lease
        if held is None or not held.valid:
            self._scheme.abort()
        else:
            held.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def __del__(self) -> None:
        held: Lease | None = getattr(self, "_lease", None)
        if held is not None:
            held.forgotten()

    # -- pickling ------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if rpc_runs():
            self._scheme._bind_early()  # calls carry copies away before anything has begun
        return {"_scheme": copy.copy(self._scheme)}  # configuration only: copies share no role

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._adopt(state["_scheme"])
        self._is_copy = True

    def __repr__(self) -> str:
        return f"<aiosync.sync twin of {self._scheme!r}>"


def twin_of(cls: _AsyncClass) -> type[WeightSyncScheme]:
    """The blocking class of an async one; the base class where it has none of its own."""
    twins = {twin._async_class: twin for twin in _TWINS}
    return twins.get(cls, WeightSyncScheme)


_TWINS: list[type[WeightSyncScheme]] = []
