"""The blocking twins of the schemes. Their behaviour is the async classes' own.

Their methods call those of the async scheme, on the portal if they wait. Must not import torch.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import copy
import functools
import importlib
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Final,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

import aiosync.schemes as aio
from aiosync._repr import in_every_state
from aiosync.errors import ConfigError, LocalProtocolError, TransportClosed
from aiosync.receiver.reads import on_behalf_of_reader
from aiosync.schemes import options as option_sets
from aiosync.schemes.internal import bind_early, life_of, publish_with
from aiosync.schemes.lifecycle import Life
from aiosync.schemes.properties import SchemeState
from aiosync.schemes.results import has_failed, still_waiting
from aiosync.sender.steps import STEPS
from aiosync.strategy import WeightStrategy
from aiosync.sync._interfaces import InitialSyncTransport, Owner
from aiosync.sync._portal import Lease, lease, refuse_inside_loop
from aiosync.sync.twins import (
    attribute,
    blocking,
    direct,
    follow_overrides,
    initialising,
    mirror_options,
    on_loop,
)
from aiosync.types import SendReport

__all__ = [
    "Adapter",
    "AsyncClass",
    "DistributedWeightSyncScheme",
    "InitialSyncTransport",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "Owner",
    "RPCWeightSyncScheme",
    "RayModuleTransformScheme",
    "RayWeightSyncScheme",
    "Ready",
    "SharedMemWeightSyncScheme",
    "StreamTwin",
    "TCPWeightSyncScheme",
    "WeightSyncScheme",
    "core_of",
    "entered",
    "facade_of",
    "is_copy",
    "rpc_runs",
    "run_on_loop",
    "twin",
    "twin_of",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")
AsyncClass: TypeAlias = type[aio.WeightSyncScheme]
_TWINS: dict[type, type[WeightSyncScheme]] = {}
# Collectors and servers of other libraries call schemes in ways of their own. The code for one of
# them is in aiosync.integrations, which is loaded when an object of that library is seen, and never
# before: these names are all that this layer knows of them.
_LIBRARY = "torchrl"
_SEEN = "torchrl.weight_update.weight_sync_schemes"  # All users of schemes have imported it.
_INTEGRATION = "aiosync.integrations.torchrl"
# Methods that schemes written for TorchRL override, and that no scheme of aiosync calls here.
_HOOKS = ("_init_on_sender_impl", "_init_on_receiver_impl", "create_transport")
_INSTEAD = (
    "a scheme of aiosync.sync only calls one of aiosync. With blocking transports, as TorchRL has "
    "them, derive the class from aiosync.legacy.WeightSyncScheme; with those of aiosync derive it "
    "from aiosync.WeightSyncScheme, and write `class Blocking(aiosync.sync.WeightSyncScheme, "
    "twin_of=...)`"
)
_FAILURES_KEPT = 16  # For wait_async(); if that is never called, the loop logs older ones.


def constructor(
    cls: Callable[_P, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _P], None]]:
    """Return a decorator that gives a stub ``__init__`` the arguments of the async class ``cls``.

    The method makes the async scheme, of its object's ``_async_class``, and adopts it.
    """
    original: Any = cls

    @functools.wraps(original.__init__)
    def construct(self: Any, *args: Any, **options: Any) -> None:
        if type(self) is not WeightSyncScheme and inspect.isabstract(self._async_class):
            raise ConfigError(f"{type(self).__name__} has no link: {_INSTEAD}")
        self._adopt(self._async_class(*args, **options))

    return lambda stub: cast("Callable[Concatenate[Any, _P], None]", construct)


# -- the scheme ------------------------------------------------------------------------------------


class _Tenant:
    """An async scheme on the portal. Refers to no facade, so that the facade can be collected."""

    def __init__(self, scheme: aio.WeightSyncScheme) -> None:
        self._scheme = scheme
        # Set if a collector or a server of another library calls the scheme.
        self.owner: Owner | None = None

    def forgotten(self) -> None:
        if self.owner is not None:
            # The collector or server closes no scheme: that is no mistake of the user's.
            return
        life = life_of(self._scheme)
        if life.runtime is not None and not life.closed:
            life.log("closed", "closed: nothing refers to this scheme, or the program ends")
            warnings.warn(
                f"{self._scheme!r} was never closed: use `with scheme:` or `scheme.shutdown()`",
                ResourceWarning,
                stacklevel=4,
                source=self._scheme,
            )

    def abort(self) -> None:
        self._scheme.abort()


class Ready(aio.Ready):
    """The condition that there is a complete version: ``if scheme.ready``, or :meth:`wait`.

    See :class:`aiosync.Ready`.
    """

    def wait(self, *, timeout: float | None = None) -> None:  # type: ignore[override]  # it blocks
        """Wait until the condition holds; see :meth:`aiosync.Ready.wait`."""
        self._wait(timeout)

    if TYPE_CHECKING:
        __await__: None  # type: ignore[assignment]  # it raises what wait() does inside of a loop


class WeightSyncScheme(SchemeState, abc.ABC):
    """Blocking twin of :class:`aiosync.WeightSyncScheme`; same arguments, no ``await``.

    The event loop runs in one background thread of the process, which all schemes share; it is
    started by the first call that waits, and ends when the last scheme is shut down. Methods may be
    called from any thread that runs no event loop. Ctrl-C in a blocking call ends it at once.

    Use :class:`SharedMemWeightSyncScheme` or another concrete class.

    Args:
        strategy: As for :class:`aiosync.WeightSyncScheme`, like all the others.
        sync: If false, ``send()`` takes its snapshot and returns without waiting; the report's
            ``waiting`` are those that have not answered yet. A later failure is raised by the next
            ``send()``, which then sends nothing, or by :meth:`wait_async`.
        per_worker_weights: ``send({0: ..., 1: ...})`` gives each worker its own weights.
        apply: ``"auto"``, or ``"manual"`` to apply only in calls that ask for it.
        apply_copy: Copy updates into the parameters' memory.
        buffers: ``"persistent"`` keeps updates out of other buffers of a worker's module.
        guard: ``"forward"``, or ``"reading"`` for ``with scheme.reading():``.
        strict: Every name and dtype must match.
        require: Number of workers that must apply an update for ``send()`` to succeed.
        timeout: Default timeout of calls in seconds; ``None`` for ever.
        wire_dtype: Dtype to which the sender casts floating-point weights on their way.
        first_version: A sender's first version; a trainer that resumes continues with it.

    Raises:
        ConfigError: An option has an illegal value.
    """

    # The class is abstract, as this one is: calling it raises.
    _async_class: ClassVar[AsyncClass] = aio.WeightSyncScheme  # type: ignore[type-abstract]

    def __init_subclass__(cls, twin_of: AsyncClass | None = None) -> None:
        """Make options and methods those of the async class; refuse hooks that are never called."""
        super().__init_subclass__()
        uncalled = [name for name in _HOOKS if name in vars(cls)]
        if uncalled and twin_of is None:
            raise ConfigError(f"{cls.__name__}.{uncalled[0]}() would not be called: {_INSTEAD}")
        mirror_options(cls)
        if twin_of is not None:
            cls._async_class, _TWINS[twin_of] = twin_of, cls
            follow_overrides(cls, WeightSyncScheme, twin_of)

    @constructor(aio.WeightSyncScheme)
    def __init__(self) -> None:
        """Make the async scheme."""

    _is_copy = False  # True after unpickling.
    _always_waits = False  # True if send() waits with sync=False, too.

    def _adopt(self, scheme: aio.WeightSyncScheme) -> None:
        """Stand on an async scheme from now on, as a new object: with no lease and no sends."""
        self._scheme = scheme
        self._lease: Lease | None = None
        self._tenant = _Tenant(scheme)
        self._lock = threading.RLock()  # Guards _lease and _calls.
        self._calls = 0  # Calls under way, which keep the lease.
        self._closing = threading.RLock()  # Held by the shutdown() that is under way.
        self._handles: list[aio.SendHandle] = []  # wait_async() waits for these.
        self._pid = os.getpid()
        _discover()

    def _find_owner(self, context: Any) -> None:
        """Find the owner for an object of TorchRL's; ``None`` keeps the present owner."""
        self._after_fork()
        owner = self._tenant.owner
        if context is not None and not (owner and owner.stands_for(context)):
            self._tenant.owner = _owner_of(context, self)

    @classmethod
    def from_backend(cls, backend: str, **options: Any) -> WeightSyncScheme:
        """Make the scheme of a back-end name, such as ``"shared"``, ``"process"`` or ``"none"``.

        Raises:
            ConfigError: There is none with that name.
        """
        return _facade_on(aio.WeightSyncScheme.from_backend(backend, **options))

    # -- the portal ----------------------------------------------------------------------------

    def _check(self, what: str, instead: str | None = None) -> None:
        """Raise if ``what()`` would block a loop, or the scheme is closed or the parent's."""
        refuse_inside_loop(what, instead, may_block=self._may_block)
        self._after_fork()
        life_of(self._scheme).check_here()

    @property
    def _may_block(self) -> bool:
        """True if calls may block the caller's event loop, as the owner's object does so anyway."""
        return self._tenant.owner is not None and self._tenant.owner.blocks_loops

    def _after_fork(self) -> None:
        # In a forked child all of it is made anew: other threads of the parent may have held the
        # locks, and the parent's sends are not this process's.
        if self._pid != os.getpid():
            self._adopt(self._scheme)

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the portal's loop, and wait for it; start the portal if need be."""
        try:
            held = self._enter()
        except BaseException:  # The error goes on to the caller.
            coroutine.close()
            raise
        guard = self._life.guard
        # Reads that began by themselves must not hold back the update that this call waits for.
        guard.end_automatic()
        # A wait for an update has to know that its caller reads: it then raises, as it would never
        # end.
        reads = on_behalf_of_reader(guard) if guard.reading_here else contextlib.nullcontext()
        # A copy must not wait for an optimizer's step that waits here.
        step = STEPS.pause() if STEPS.open else None
        try:
            with reads:
                return held.call(coroutine)
        finally:
            if step is not None:
                STEPS.begin_or_resume(step)
            self._after_call(held)

    def _enter(self) -> Lease:
        """Return a valid lease for a call, and count the call until :meth:`_after_call`."""
        with self._lock:
            held = self._lease
            if held is not None and not held.valid:
                if self._life.runs:  # Its loop's thread is ending.
                    raise TransportClosed(
                        "this scheme is being closed because the interpreter is ending"
                    )
                # A scheme without links may move to another portal.
                held = None
            if held is None:
                self._lease = held = lease(self._tenant, self._life.guard.refuse_reads)
            self._calls += 1
        return held

    def _after_call(self, held: Lease) -> None:
        """Count a call as over, and give the lease back if there is nothing to close."""
        with self._lock:
            self._calls -= 1
            # A call that failed must not leave a thread behind that no call would ever end.
            idle = self._calls == 0 and not self._life.runs
            if idle and self._lease is held:
                self._lease = None  # Another thread may call meanwhile.
        if idle:
            held.release()

    # -- ways to call the async methods ---------------------------------------------------------

    def _initialise(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Give the async scheme its role, through the owner if the context is TorchRL's."""
        self._find_owner(kwargs.get("context", args[1] if len(args) > 1 else None))
        proceed, owner = getattr(self._scheme, name), self._tenant.owner
        if owner is None:
            return proceed(*args, **kwargs)
        return owner.call(name, proceed, args, kwargs)

    def _call_there(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a plain method of the async scheme on the portal's loop."""
        self._check(name)
        return self._call(_there(getattr(self._scheme, name), *args, **kwargs))

    def _wait_for(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a coroutine method of the async scheme; an owner carries out the call in its way."""
        if name == "send" and (len(args) > 1 or "worker_ids" in kwargs):
            # Several calls below read the indices.
            args = tuple(_listed(each) for each in args)
            kwargs = {key: _listed(each) for key, each in kwargs.items()}
        owner = self._tenant.owner
        if owner is None:
            return self._proceed(name, *args, **kwargs)
        return owner.call(name, functools.partial(self._proceed, name), args, kwargs)

    def _proceed(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a coroutine method of the async scheme and wait, without asking the owner."""
        self._check(name)
        if name == "send" and not self._scheme.sync and not self._always_waits:
            return self._send_unawaited(*args, **kwargs)
        # A send that has to wait for no worker is made on this thread, without the loop.
        held, publish = self._lease, publish_with(self._scheme) if name == "send" else None
        # A hook of an optimizer's step goes the other way, which leaves the step: the loop may be
        # waiting for it.
        if publish is not None and held is not None and held.valid and not STEPS.open:
            report = held.at_once(functools.partial(publish, *args, **kwargs))
            if report is not None:
                return report
        return self._call(getattr(self._scheme, name)(*args, **kwargs))

    def _send_unawaited(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
        max_lag: int | None = None,
    ) -> SendReport:
        """Send in the background; but if an earlier send has failed, only raise that failure."""
        ended = [each for each in self._handles if each.done()]
        if any(map(has_failed, ended)):
            self._settle(ended)
        if max_lag is not None:
            self.wait_lag_below(max_lag, timeout=timeout)
        # As in the async send(), a timeout of 0 is for the wait for the lag only.
        limit = None if max_lag is not None and timeout == 0 else timeout
        handle = self._begin(weights, worker_ids, limit)
        if handle.done() and not has_failed(handle):  # The next call raises a failure.
            return self._call(_result(handle))
        waiting = still_waiting(handle)
        return SendReport(self.epoch, handle.version, acked=frozenset(), waiting=waiting)

    # -- state -----------------------------------------------------------------------------------

    @property
    def _life(self) -> Life:  # type: ignore[override]  # the async scheme's
        return life_of(self._scheme)

    _strategy: attribute[WeightStrategy] = attribute(aio.WeightSyncScheme.strategy)

    def _assign(self, name: str, value: Any) -> None:
        """Assign the model, the weights or the context; a context may bring an owner."""
        if name == "context":
            self._find_owner(value)
        super()._assign(name, value)

    @property
    def initialized_on_sender(self) -> bool:
        """True if this object is a sender."""
        # Collectors ask this first of a scheme that was set up elsewhere, and need the integration.
        _discover()
        return self._life.is_a("sender")

    # -- methods that wait ---------------------------------------------------------------------

    connect: Final = blocking(aio.WeightSyncScheme.connect)
    send: Final = blocking(aio.WeightSyncScheme.send)
    receive: Final = blocking(aio.WeightSyncScheme.receive)
    pull: Final = blocking(aio.WeightSyncScheme.pull)
    wait_for_version: Final = blocking(aio.WeightSyncScheme.wait_for_version)
    wait_staged: Final = blocking(aio.WeightSyncScheme.wait_staged)
    wait_lag_below: Final = blocking(aio.WeightSyncScheme.wait_lag_below)

    # -- methods that do not wait for workers --------------------------------------------------

    init_on_sender: Final = initialising(aio.WeightSyncScheme.init_on_sender)
    init_on_receiver: Final = initialising(aio.WeightSyncScheme.init_on_receiver)
    init_on_worker: Final = initialising(aio.WeightSyncScheme.init_on_worker)
    create_transport: Final = on_loop(aio.WeightSyncScheme.create_transport)
    apply_weights: Final = direct(aio.WeightSyncScheme.apply_weights)

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
        return self._begin(weights, worker_ids, timeout).version

    def _begin(self, weights: Any, worker_ids: Any, timeout: float | None) -> aio.SendHandle:
        """Send in the background; keep its handle, and those of unfinished and failed sends."""
        handle = self._call(_there(self._scheme.send_nowait, weights, worker_ids, timeout=timeout))
        with self._lock:
            failed = [each for each in self._handles if has_failed(each)][-_FAILURES_KEPT:]
            kept = [each for each in self._handles if not each.done() or each in failed]
            self._handles = [*kept, handle]
        return handle

    def wait_async(self) -> SendReport:
        """Wait for every send that is under way: by :meth:`send_async`, or with ``sync=False``.

        Returns:
            The report of the newest send; workers that it skipped, or that a newer version
            overtook, are named.

        Raises:
            LocalProtocolError: No :meth:`send_async` is pending.
            PartialSyncError: As :meth:`aiosync.WeightSyncScheme.send` raises it, for the newest
                send that failed since the last call; its notes tell of older ones.
        """
        self._check("wait_async", "await handle")
        handles = list(self._handles)
        if not handles:
            raise LocalProtocolError("No async send is pending: call send_async() first.")
        return self._settle(handles)

    def _settle(self, handles: Sequence[aio.SendHandle]) -> SendReport:
        """Wait for these sends; raise the newest failure, or return the newest report."""

        async def settle() -> list[SendReport | BaseException]:
            return await asyncio.gather(*handles, return_exceptions=True)

        # If Ctrl-C ends the wait, the sends go on.
        outcomes = self._call(settle())
        with self._lock:
            self._handles = [each for each in self._handles if each not in handles]
        failures = [each for each in outcomes if isinstance(each, BaseException)]
        newest = outcomes[-1] if not failures else failures.pop()
        if not isinstance(newest, BaseException):
            return newest
        for older in failures:
            newest.add_note(f"before it failed: {type(older).__name__}: {older}")
        del failures[:], outcomes[:]
        try:
            raise newest
        finally:
            del newest  # The traceback refers to this frame: leave no cycle.

    @property
    def ready(self) -> Ready:
        """The condition that there is a complete version, to check or to wait for."""
        return Ready(
            self._scheme.ready.is_set,
            self._wait_until_ready,  # type: ignore[arg-type]  # it blocks
        )

    def _wait_until_ready(self, timeout: float | None) -> None:
        self._check("ready.wait")
        self._call(self._scheme.ready.wait(timeout=timeout))

    # -- closing -------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Close every link, task, socket and buffer of this object. Idempotent, bounded.

        See :meth:`aiosync.WeightSyncScheme.aclose`. Ends the background thread when no other
        scheme uses it. In a forked child it does nothing: the links are the parent's.
        """
        if (held := self._to_be_closed()) is None:
            return
        refuse_inside_loop("shutdown", "await scheme.aclose()", may_block=self._may_block)
        self._life.guard.end_automatic()
        with self._closing:  # Another thread's shutdown() is over when this one returns.
            with self._lock:
                if not held.valid:  # Or another thread's last call gave it back.
                    self._to_be_closed()
                    return
                self._calls += 1  # The end of another thread's call leaves the lease to this one.
            try:
                held.call(self._scheme.aclose())
            except TransportClosed:
                if held.valid:  # Otherwise the portal has ended, and the scheme with it.
                    raise
            finally:
                self._after_call(held)
                held.release()

    def abort(self) -> None:
        """Close at once from synchronous code, for destructors and signal handlers."""
        held = self._to_be_closed()
        if held is not None:
            held.abort()

    def _to_be_closed(self) -> Lease | None:
        """Return the lease of a scheme on the portal; close any other one now, for ``None``."""
        self._after_fork()
        held = self._lease
        if held is not None and held.valid:
            return held
        # In a forked child the links are the parent's.
        if self._life.role is None or not self._life.inherited:
            self._scheme.abort()
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is None:
            self._life.warn_if_unconnected("with", "scheme.connect()")
        self.shutdown()

    def __del__(self) -> None:
        held: Lease | None = getattr(self, "_lease", None)
        if held is not None:
            held.forgotten()

    # -- pickling ------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if rpc_runs():
            # Remote calls carry copies away before init_on_sender(): they need the address now.
            bind_early(self._scheme)
        # Copies share no role: keep the configuration, and the attributes that a subclass has set,
        # which a blank object lacks.
        blank = object.__new__(type(self))
        blank._adopt(self._scheme)
        own = {name: value for name, value in vars(self).items() if name not in vars(blank)}
        return {**own, "_scheme": copy.copy(self._scheme)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._adopt(state["_scheme"])
        self._is_copy = True

    @in_every_state
    def __repr__(self) -> str:
        return f"<aiosync.sync twin of {self._scheme!r}>"


def _listed(value: object) -> object:
    """Return what an iterator gives, as a list; anything else itself."""
    return list(value) if isinstance(value, Iterator) else value


async def _there(function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call a plain function on the loop that runs this."""
    return function(*args, **kwargs)


async def _result(handle: aio.SendHandle) -> SendReport:
    """Return the report of a send, or raise its error."""
    return await handle


class Adapter(Protocol):
    """A scheme with another interface, which stands on a blocking one."""

    _scheme: WeightSyncScheme


def facade_of(scheme: WeightSyncScheme | Adapter) -> WeightSyncScheme:
    """Return the blocking scheme that an adapter stands on; any other scheme itself."""
    below: object = scheme._scheme
    return below if isinstance(below, WeightSyncScheme) else cast("WeightSyncScheme", scheme)


def core_of(scheme: WeightSyncScheme | Adapter) -> aio.WeightSyncScheme:
    """Return the async scheme of a blocking one."""
    return facade_of(scheme)._scheme


def _facade_on(scheme: aio.WeightSyncScheme) -> WeightSyncScheme:
    """Return a new blocking scheme that stands on this async one."""
    # A class of the user's own has the twin of the nearest base that has one.
    nearest = next(
        (twin_of(each) for each in type(scheme).__mro__ if each in _TWINS), WeightSyncScheme
    )
    facade: WeightSyncScheme = object.__new__(nearest)
    facade._adopt(scheme)
    return facade


@overload
def twin(scheme: aio.WeightSyncScheme) -> WeightSyncScheme: ...


@overload
def twin(scheme: WeightSyncScheme) -> aio.WeightSyncScheme: ...


def twin(
    scheme: aio.WeightSyncScheme | WeightSyncScheme,
) -> WeightSyncScheme | aio.WeightSyncScheme:
    """Return a copy of a scheme for the other API, without a role: for workers that use that one.

    The copy of an async scheme is blocking, and the other way round; it meets the same trainer and
    has the same options, and a pickle of it is of its own kind. Call it after ``init_on_sender()``
    and pass the result to the worker, or call it in the worker. The scheme itself stays as it is,
    and each of the two is closed by itself.

    Args:
        scheme: A scheme of :mod:`aiosync` or of :mod:`aiosync.sync`.

    Raises:
        ConfigError: It is no scheme.
    """
    if isinstance(scheme, aio.WeightSyncScheme):
        return _facade_on(copy.copy(scheme))
    if not isinstance(scheme, WeightSyncScheme):
        raise ConfigError(f"twin() takes a scheme of aiosync or of aiosync.sync, not {scheme!r}")
    return copy.copy(facade_of(scheme))._scheme


def is_copy(facade: WeightSyncScheme) -> bool:
    """Return True if the facade was unpickled."""
    return facade._is_copy


@contextlib.contextmanager
def entered(scheme: WeightSyncScheme | Adapter, call: str) -> Iterator[None]:
    """Hold a blocking scheme's lease during a call; end it afterwards if the scheme is idle."""
    facade = facade_of(scheme)
    facade._check(call, f"await aiosync.{call}()")
    held = facade._enter()
    try:
        yield
    finally:
        facade._after_call(held)


def run_on_loop(scheme: WeightSyncScheme | Adapter, coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on the loop of a blocking scheme, and wait for it."""
    return facade_of(scheme)._call(coroutine)


def twin_of(cls: AsyncClass) -> type[WeightSyncScheme]:
    """Return the blocking class of an async one; the base class if it has none of its own."""
    return _TWINS.get(cls, WeightSyncScheme)


def _discover() -> None:
    """Load the integration, by which TorchRL accepts schemes, if TorchRL is imported already."""
    # Not while TorchRL is still being imported: its classes are not there yet.
    if _INTEGRATION not in sys.modules and hasattr(sys.modules.get(_SEEN), "WeightSyncScheme"):
        importlib.import_module(_INTEGRATION)


def _owner_of(context: object, scheme: WeightSyncScheme) -> Owner | None:
    """Return an owner for an object of TorchRL's that calls ``scheme``; ``None`` for any other."""
    packages = {cls.__module__.partition(".")[0] for cls in type(context).__mro__}
    # TorchRL's code that calls schemes has imported TorchRL's module of schemes.
    if _LIBRARY not in packages or _SEEN not in sys.modules:
        return None
    found: Owner | None = importlib.import_module(_INTEGRATION).owner_of(context, scheme)
    return found


def rpc_runs() -> bool:
    """Return True if this process has joined ``torch.distributed.rpc``."""
    rpc = sys.modules.get("torch.distributed.rpc")
    return rpc is not None and getattr(rpc, "_is_current_rpc_agent_set", lambda: False)()


mirror_options(WeightSyncScheme)


class SharedMemWeightSyncScheme(
    option_sets.SharedMemOptions, WeightSyncScheme, twin_of=aio.SharedMemWeightSyncScheme
):
    """Blocking twin of :class:`aiosync.SharedMemWeightSyncScheme`; same arguments."""

    @constructor(aio.SharedMemWeightSyncScheme)
    def __init__(self) -> None:
        """Make the async scheme."""


class MultiProcessWeightSyncScheme(WeightSyncScheme, twin_of=aio.MultiProcessWeightSyncScheme):
    """Blocking twin of :class:`aiosync.MultiProcessWeightSyncScheme`."""


class NoWeightSyncScheme(WeightSyncScheme, twin_of=aio.NoWeightSyncScheme):
    """Blocking twin of :class:`aiosync.NoWeightSyncScheme`."""

    carry: Final = direct(aio.NoWeightSyncScheme.carry)
    apply_pending: Final = direct(aio.NoWeightSyncScheme.apply_pending)


class StreamTwin(option_sets.StreamOptions):
    """Members that only the schemes over streams have."""

    address: Final = attribute[str](aio.TCPWeightSyncScheme.address)
    reconnects: Final = attribute[int](aio.TCPWeightSyncScheme.reconnects)


class TCPWeightSyncScheme(
    option_sets.TCPOptions, StreamTwin, WeightSyncScheme, twin_of=aio.TCPWeightSyncScheme
):
    """Blocking twin of :class:`aiosync.TCPWeightSyncScheme`; same arguments."""

    refused: Final = attribute[dict[str, int]](aio.TCPWeightSyncScheme.refused)

    @constructor(aio.TCPWeightSyncScheme)
    def __init__(self) -> None:
        """Make the async scheme."""


class DistributedWeightSyncScheme(
    option_sets.DistributedOptions,
    StreamTwin,
    WeightSyncScheme,
    twin_of=aio.DistributedWeightSyncScheme,
):
    """Blocking twin of :class:`aiosync.DistributedWeightSyncScheme`; same arguments."""

    # TorchRL's waits for every worker with sync=False, too, and its collectors build on that.
    _always_waits = True

    @constructor(aio.DistributedWeightSyncScheme)
    def __init__(self) -> None:
        """Make the async scheme."""


class RPCWeightSyncScheme(
    option_sets.RPCOptions, StreamTwin, WeightSyncScheme, twin_of=aio.RPCWeightSyncScheme
):
    """Blocking twin of :class:`aiosync.RPCWeightSyncScheme`; same arguments."""

    init_on_sender: Final = initialising(  # type: ignore[misc]  # the override has one argument more
        aio.RPCWeightSyncScheme.init_on_sender
    )

    @constructor(aio.RPCWeightSyncScheme)
    def __init__(self) -> None:
        """Make the async scheme."""


class RayWeightSyncScheme(
    option_sets.RayOptions, StreamTwin, WeightSyncScheme, twin_of=aio.RayWeightSyncScheme
):
    """Blocking twin of :class:`aiosync.RayWeightSyncScheme`; same arguments."""

    connection_info_name: Final = attribute[str](aio.RayWeightSyncScheme.connection_info_name)
    init_on_sender: Final = initialising(  # type: ignore[misc]  # the override has one argument more
        aio.RayWeightSyncScheme.init_on_sender
    )

    @constructor(aio.RayWeightSyncScheme)
    def __init__(self) -> None:
        """Make the async scheme."""


class RayModuleTransformScheme(RayWeightSyncScheme, twin_of=aio.RayModuleTransformScheme):
    """Blocking twin of :class:`aiosync.RayModuleTransformScheme`; same arguments."""

    init_on_sender: Final = initialising(  # type: ignore[misc]  # the override has one argument more
        aio.RayModuleTransformScheme.init_on_sender
    )
    create_sender: Final = direct(aio.RayModuleTransformScheme.create_sender)
    _set_transform: Final = direct(aio.RayModuleTransformScheme._set_transform)
