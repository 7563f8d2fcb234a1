"""Options of schemes, async and blocking, which are checked whenever they are set.

The classes name the options of each kind of scheme, once for both; those of every scheme stand in
one class. A new option also goes into the constructors, here and in ``sync``. The defaults are
those of the async constructors, which the blocking ones have, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, cast, overload

from aiosync.errors import ConfigError
from aiosync.protocol import (
    MAX_VERSION,
    as_chunk_nbytes,
    as_count,
    as_version,
    finite_or_none,
    validate_require,
    validate_seconds,
)
from aiosync.tensors import Dtypes, check_dtypes
from aiosync.transports.distributed import check_backend
from aiosync.types import Limits, Require
from aiosync.wire import MAX_STREAMS

__all__ = [
    "DistributedOptions",
    "EngineOptions",
    "Option",
    "RPCOptions",
    "RayOptions",
    "SchemeOptions",
    "SharedMemOptions",
    "StreamOptions",
    "TCPOptions",
    "refuse",
]

_T = TypeVar("_T")


class Option(Generic[_T]):
    """An option that may be assigned.

    It is kept in the object's own dict, under the same name, where pickles find it.

    Args:
        check: Called with the name and the value; returns the value to keep, or raises.
        doc: Docstring of the option.
    """

    def __init__(
        self, check: Callable[[str, Any], _T] = lambda _, value: value, doc: str = ""
    ) -> None:
        self._check = check
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        # The blocking twin of the scheme has a property of the same type.
        self.annotation: str = owner.__annotations__[name].removeprefix("Option[").removesuffix("]")

    if TYPE_CHECKING:
        # Only for type checkers. Without it Python reads the object's dict itself, and a send reads
        # options.
        @overload
        def __get__(self, instance: None, owner: type) -> Self: ...

        @overload
        def __get__(self, instance: object, owner: type) -> _T: ...

        def __get__(self, instance: object, owner: type) -> Self | _T: ...

    def __set__(self, instance: object, value: _T) -> None:
        vars(instance)[self.name] = self._check(self.name, value)


class Fixed:
    """An option that only the constructor takes: an assignment would have no effect.

    It cannot be read either: some of these options are secrets.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        raise AttributeError(
            f"{self._name} cannot be read back: it is only passed to {owner.__name__}()"
        )

    def __set__(self, instance: object, value: Any) -> None:
        raise ConfigError(
            f"{self._name} cannot be assigned: pass it to {type(instance).__name__}()"
        )


def refuse(*cases: tuple[object, str]) -> None:
    """Refuse arguments that exclude each other, or make no sense.

    Args:
        *cases: A condition that is true of wrong arguments, and the text of the error; the first
            true one counts.

    Raises:
        ConfigError: A condition is true.
    """
    for wrong, text in cases:
        if wrong:
            raise ConfigError(text)


def one_of(*values: _T) -> Callable[[str, Any], _T]:
    """Return a check that accepts these values only."""
    listed = " or ".join(map(repr, values))

    def check(name: str, value: Any) -> _T:
        if value not in values:
            raise ConfigError(f"{name} must be {listed}, got {value!r}")
        return cast("_T", value)

    return check


def flag(name: str, value: Any) -> bool:
    """Check a truth value, and return it as a bool. ``"no"`` and ``None`` are refused.

    0, 1 and numpy's truth values are accepted.
    """
    if isinstance(value, str) or value not in (True, False):
        raise ConfigError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def seconds(
    *, zero: bool = False, endless: bool = False, none: bool = False
) -> Callable[[str, Any], Any]:
    """Return a check of positive seconds; each flag makes 0, infinity or ``None`` legal, too."""

    def check(name: str, value: Any) -> Any:
        validate_seconds(name, value, zero=zero, endless=endless, none=none)
        return value

    return check


def _timeout(name: str, value: Any) -> float | None:
    """Check a timeout, and return it; infinity becomes ``None``, which waits for ever."""
    validate_seconds(name, value, endless=True, none=True)
    return finite_or_none(cast("float | None", value))


def count(least: int, most: int | None = None) -> Callable[[str, Any], int]:
    """Return a check of an integer of at least ``least``, and at most ``most``."""
    return lambda name, value: as_count(name, value, least, most)


def _version(name: str, value: Any) -> int:
    """Check a first version, and return it; half of all numbers stay for the versions after it."""
    return as_version(name, value, 1, MAX_VERSION // 2)


def _limits(name: str, value: Any) -> Limits | None:
    """Check limits, and return them; ``None`` stands for the defaults."""
    if value is None or isinstance(value, Limits):
        return value
    raise ConfigError(f"{name} must be aiosync.Limits(...) or None, got {value!r}")


def _require(name: str, value: Any) -> Require:
    """Check how many workers have to apply an update, and return it."""
    del name
    validate_require(value)
    return cast("Require", value)


class SchemeOptions:
    """Options of every scheme; see :class:`aiosync.WeightSyncScheme`."""

    sync: Option[bool] = Option(doc="Whether ``send()`` of :mod:`aiosync.sync` waits.")
    per_worker_weights: Option[bool] = Option(flag, "Whether each worker gets its own weights.")
    apply: Option[Literal["auto", "manual"]] = Option(
        one_of("auto", "manual"),
        """When a receiver applies updates.

        ``"auto"``: each as soon as no forward pass is running. ``"manual"``: only in
        :meth:`apply_pending`, and while a call waits for an update: :meth:`receive`,
        :meth:`wait_for_version`, :meth:`wait_lag_below`, :meth:`pull`, and :meth:`connect` for the
        initial weights.
        """,
    )
    apply_copy: Option[bool] = Option(
        flag,
        """Whether updates are copied into the parameters' memory.

        Otherwise the parameters point at the received memory. Copying is slower, but addresses
        stay the same.
        """,
    )
    buffers: Option[Literal["all", "persistent"]] = Option(
        one_of("all", "persistent"),
        """Which buffers of its module a worker has updated.

        With ``"persistent"`` those that are no part of ``state_dict()``, such as hidden states and
        caches, stay what the worker makes of them; only on the meta device they get values.
        ``"all"`` overwrites them, but not in another shape, and warns once where the worker has
        written to them. Only the worker needs it.
        """,
    )
    guard: Option[Literal["forward", "reading"]] = Option(
        one_of("forward", "reading"), "What keeps updates out of reads."
    )
    strict: Option[bool] = Option(
        flag,
        """Whether every name and dtype must match, and a module's extra state be there.

        Otherwise the declared subset is applied and floating dtypes are cast. In any case a module
        rounds buffers that it has in less precision, and either side may lack those that are not
        persistent. A subset never replaces, on its way
        to a slow worker, an update that holds other names: it comes after it, or together with it.
        A worker that joins later gets the newest of each name. Neither has what the trainer never
        had.
        """,
    )
    require: Option[Require] = Option(
        _require,
        """How many workers must apply an update: ``"all"``, a number, or a fraction of them.

        With less than ``"all"``, ``send()`` returns as soon as that many have.
        """,
    )
    strategy_str: Option[str] = Option(doc="Name of the strategy.")
    timeout: Option[float | None] = Option(
        _timeout, "Default timeout of calls in seconds; ``None``, which ``inf`` becomes, for ever."
    )
    wire_dtype: Option[Dtypes | None] = Option(
        lambda name, value: check_dtypes(value, name),
        """What weights are cast to on their way: a dtype, or one for each name pattern.

        A single dtype does not round buffers of a module that are not persistent, or in float64.
        """,
    )
    first_version: Option[int] = Option(
        _version,
        """What a sender counts versions from.

        A trainer that resumes from a checkpoint passes the :attr:`version` that it saved there
        plus one: samples that were made up to then stay comparable. Only the sender needs it.
        """,
    )

    def _set_options(self, **options: Any) -> None:
        """Check and keep the options of a constructor, in this order."""
        for name, value in options.items():
            setattr(self, name, value)


class SharedMemOptions:
    """Options of :class:`aiosync.SharedMemWeightSyncScheme`."""

    memory: Option[Literal["host", "device"]] = Option(
        one_of("host", "device"), "Where the slots are: in memory of the host, or of the GPU."
    )


class StreamOptions:
    """Options of schemes over streams."""

    token: Fixed = Fixed()
    reconnect: Option[float | None] = Option(
        seconds(zero=True, endless=True, none=True),
        "Seconds to keep trying to restore a link.",
    )
    handshake_timeout: Option[float] = Option(
        seconds(), "Seconds that a peer has to prove its identity."
    )
    limits: Option[Limits | None] = Option(_limits, "What a peer may announce.")


class TCPOptions:
    """Options of :class:`aiosync.TCPWeightSyncScheme`."""

    tls: Fixed = Fixed()
    dial: Fixed = Fixed()
    subscribe: Option[bool] = Option(flag, "Whether a worker gets every update.")
    stall_timeout: Option[float | None] = Option(
        seconds(endless=True, none=True), "Seconds without progress until a drop."
    )
    take_over: Option[bool] = Option(
        flag, "Whether a trainer returns to a weight server at which another run has replaced it."
    )
    chunk_nbytes: Option[int] = Option(as_chunk_nbytes, "Bytes that share one checksum.")
    delta: Option[Literal["auto", "off", "always"]] = Option(
        one_of("auto", "off", "always"),
        """Which updates travel as changes to an older one, if both sides say so; experimental.

        ``"auto"``: those that then arrive sooner over the link, as far as it was measured.
        ``"always"``: all above 64 KiB. Each side keeps one more copy of the weights, and the
        sender another one while workers skip versions.
        """,
    )
    streams: Option[int] = Option(
        count(1, MAX_STREAMS), "Connections of each link that this side dials."
    )
    keepalive: Option[float | None] = Option(
        seconds(none=True), "Seconds after which a silent peer is probed."
    )
    max_connections: Option[int] = Option(
        count(1), "Links that a listening side accepts at a time."
    )


class EngineOptions:
    """Options of schemes with a control stream and payloads beside it."""

    shared_memory: Option[bool] = Option(
        flag, "Whether workers on the sender's host read shared memory."
    )


class DistributedOptions(EngineOptions):
    """Options of :class:`aiosync.DistributedWeightSyncScheme`."""

    store: Fixed = Fixed()
    backend: Option[Literal["gloo", "nccl"]] = Option(
        lambda _, value: check_backend(value), "What moves large updates."
    )
    inline_nbytes: Option[int] = Option(
        count(0), "Updates up to this size travel in the control stream."
    )
    patience: Option[float] = Option(seconds(), "Seconds that a transfer may stall.")


class RPCOptions(EngineOptions):
    """Options of :class:`aiosync.RPCWeightSyncScheme`."""

    patience: Option[float] = Option(seconds(), "Seconds without progress until a drop.")


class RayOptions(EngineOptions):
    """Options of :class:`aiosync.RayWeightSyncScheme`."""

    backend: Option[str] = Option(doc="Kept for TorchRL's signature.")
    inline_nbytes: Option[int] = Option(
        count(0), "Updates up to this size travel in the control stream."
    )
