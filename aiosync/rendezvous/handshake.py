"""The handshake of a sender and a receiver: Hello, and Welcome or Refuse. Must not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aiosync.errors import (
    AiosyncError,
    AuthError,
    ConfigError,
    ConnectError,
    ConnectTimeout,
    PeerClosed,
    RecvTimeout,
    RemoteProtocolError,
    TransportBroken,
)
from aiosync.protocol import seconds_text
from aiosync.transports.address import Address
from aiosync.transports.base import Transport
from aiosync.wire import Hello, Refuse, Welcome

__all__ = [
    "ANY_STRATEGY",
    "HANDSHAKE_SECONDS",
    "Refused",
    "SentOn",
    "admit",
    "greet",
    "is_same_strategy",
]

HANDSHAKE_SECONDS = 30.0
ANY_STRATEGY = "any"
"""Name of the strategy of a peer that takes or gives weights of any strategy, such as a file."""


def is_same_strategy(one: str, other: str) -> bool:
    """Return True if two peers have the same strategy, or one of them takes any."""
    return one == other or ANY_STRATEGY in (one, other)


async def admit(
    transport: Transport,
    *,
    model_id: str,
    strategy: str,
    epoch: int,
    num_workers: int | None,
    worker_idx: int | None,
    indices: Callable[[Hello], Iterable[int]],
    holder: Callable[[int, Hello], int | None],
    reserve: Callable[[int, Hello], int],
    hello: Hello | None = None,
    from_user: bool = False,
    note: Callable[[], str] = str,
    path: Callable[[], tuple[bytes, ...]] = tuple,
) -> tuple[Hello, int]:
    """Do the sender's half of the handshake: read Hello, and answer Welcome or Refuse.

    Args:
        transport: The link to the worker.
        model_id: The model that this sender serves.
        strategy: Name of the sender's strategy.
        epoch: Epoch of the sender.
        num_workers: Number of workers that the sender expects; ``None`` for any number.
        worker_idx: Index that belongs to this link; ``None`` if the link decides nothing.
        indices: Returns the indices to try in turn for a worker whose Hello asks for none.
        holder: Returns the id of the other live process that has an index, or ``None``.
        reserve: Called with the index and the Hello before the answer is sent, so that a worker
            that asks meanwhile gets another index. Returns the version that this worker is sent
            first, or 0 for none.
        hello: The Hello, if the caller has read it already.
        from_user: True if the user gave this link, so that nobody dialled. The worker's process may
            not even have been started, so the wait for its Hello has no limit.
        note: Returns a hint for the worker, which is sent if there is no version yet.
        path: Returns :attr:`Welcome.path`.

    Returns:
        The Hello, and the index that the worker has from now on.

    Raises:
        ConnectError: This side refused the worker, and told it the reason; or the other side, which
            this one dialled, refused it.
        ConfigError: The other side refused this one because the two are configured differently.
        AuthError: The other side refused this one because it has no right to push.
        AiosyncError: The link failed.
    """
    limit = None if from_user else HANDSHAKE_SECONDS
    message = hello or (await transport.recv(timeout=limit)).message
    if isinstance(message, Refuse):
        raise _refusal("the other side refused this trainer", message)
    try:
        if not isinstance(message, Hello) or message.role != "receiver":
            raise RemoteProtocolError("expected the Hello of a receiver")
        _check_same(message, model_id, strategy)
        idx = _choose_idx(message, worker_idx, num_workers, indices, holder)
    except AiosyncError as exc:
        await transport.send(Refuse(type(exc).__name__, str(exc)), timeout=HANDSHAKE_SECONDS)
        raise ConnectError(f"a worker was refused: {exc}") from exc
    first = reserve(idx, message)
    welcome = Welcome(epoch, first, idx, num_workers, "" if first else note(), path())
    await transport.send(welcome, timeout=HANDSHAKE_SECONDS)
    return message, idx


def _check_same(hello: Hello, model_id: str, strategy: str) -> None:
    """Raise ConfigError if the worker asks for another model, or has another strategy."""
    if hello.model_id != model_id:
        raise ConfigError(
            f"this sender serves model {model_id!r}, the worker asked for {hello.model_id!r}: "
            "pass the same model_id on both sides"
        )
    if not is_same_strategy(hello.strategy, strategy):
        raise ConfigError(
            f"the sender's strategy is {strategy!r}, the worker's {hello.strategy!r}: construct "
            "both schemes with the same strategy"
        )


def _choose_idx(
    hello: Hello,
    expected: int | None,
    num_workers: int | None,
    indices: Callable[[Hello], Iterable[int]],
    holder: Callable[[int, Hello], int | None],
) -> int:
    """Return ``expected``, the link's index; or the one the worker asks for, or the first free one.

    Raises:
        ConfigError: The index does not belong to this link, or is not below ``num_workers``.
        ConnectError: Another live process has the index, or no index is free.
    """
    asked = hello.worker_idx
    if expected is not None and asked not in (None, expected):
        raise ConfigError(f"worker {asked} connected through the pipe of worker {expected}")
    wanted = asked if expected is None else expected
    if wanted is None:
        return _first_free(hello, num_workers, indices, holder)
    if expected is None and num_workers is not None and wanted >= num_workers:
        raise ConfigError(
            f"Worker {wanted} not registered: the sender expects {num_workers} workers, with "
            f"worker_idx 0 to {num_workers - 1}"
        )
    has = holder(wanted, hello)
    if has is not None:
        raise ConnectError(
            f"worker_idx {wanted} is taken: process {has} has it. Give each worker its own index, "
            "or none, so that the sender chooses one; or end that worker first"
        )
    return wanted


def _first_free(
    hello: Hello,
    num_workers: int | None,
    indices: Callable[[Hello], Iterable[int]],
    holder: Callable[[int, Hello], int | None],
) -> int:
    """Return the first index that nobody has, or raise :class:`ConnectError`."""
    free = next((idx for idx in indices(hello) if holder(idx, hello) is None), None)
    if free is not None:
        return free
    raise ConnectError(
        f"the sender expects {num_workers} workers, and all of them are connected: set "
        "num_workers=None in init_on_sender() for any number, or end one of them first"
    )


class Refused(ConnectError):
    """A refusal by the other side that may be temporary, so that this side may try again."""


class SentOn(Refused):
    """A refusal by a server that names others which may admit this side.

    Args:
        text: The reason.
        addresses: Addresses to try, in this order.

    Attributes:
        addresses: As given.
    """

    def __init__(self, text: str, addresses: tuple[Address, ...] = ()) -> None:
        super().__init__(text)
        self.addresses: tuple[Address, ...] = addresses


def _refusal(what: str, message: Refuse) -> AiosyncError:
    """Return the error for a Refuse that this side received; its text begins with ``what``."""
    if message.elsewhere:
        try:
            addresses = tuple(map(Address.parse, message.elsewhere))
        except ConfigError as exc:
            return RemoteProtocolError(f"{what}, and sent it on to an illegal address: {exc}")
        return SentOn(f"{what}: {message.error_text}", addresses)
    kind = {"ConfigError": ConfigError, "AuthError": AuthError}.get(message.error_type, Refused)
    return kind(f"{what}: {message.error_text}")


async def greet(transport: Transport, hello: Hello, *, timeout: float | None) -> Welcome:
    """Do the receiver's half of the handshake: send Hello, and read the answer.

    Args:
        transport: The link to the trainer.
        hello: The message to send.
        timeout: Seconds to send it, and as many to read the answer; ``None`` for no limit.

    Returns:
        The trainer's answer.

    Raises:
        ConfigError: The trainer refused because the two sides are configured differently.
        AuthError: The trainer refused because this side is not authorised.
        ConnectError: The trainer refused for another reason, or closed the link.
        ConnectTimeout: The trainer did not answer in time.
        RemoteProtocolError: The trainer sent something other than an answer.
    """
    peer = "the trainer" if transport.channel is None else transport.channel.name
    try:
        await transport.send(hello, timeout=timeout)
        message = (await transport.recv(timeout=timeout)).message
    except (PeerClosed, TransportBroken) as exc:
        raise ConnectError(f"{peer} disconnected before it answered") from exc
    except RecvTimeout as exc:
        raise ConnectTimeout(
            f"{peer} did not answer within {seconds_text(timeout)}: a trainer must call connect() "
            "as well; several schemes connect in any order with aiosync.connect_all()"
        ) from exc
    if isinstance(message, Refuse):
        raise _refusal("the trainer refused this worker", message)
    if not isinstance(message, Welcome):
        raise RemoteProtocolError(f"expected Welcome, got {type(message).__name__}")
    channel = transport.channel
    if channel is not None:
        # Payloads are allowed before anything else is read, as updates may follow at once.
        channel.allow_payloads()
    return message
