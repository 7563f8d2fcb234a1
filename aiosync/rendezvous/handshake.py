"""The first messages of a link: who is there, for which model, with what. Must not import torch."""

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
from aiosync.transports.base import Transport
from aiosync.wire import Hello, Refuse, Welcome

__all__ = ["ANY_STRATEGY", "HANDSHAKE_SECONDS", "Refused", "admit", "greet"]

HANDSHAKE_SECONDS = 30.0
ANY_STRATEGY = "any"
"""Of a peer that takes or gives what comes, such as a file."""


async def admit(
    transport: Transport,
    *,
    model_id: str,
    strategy: str,
    epoch: int,
    num_workers: int | None,
    worker_idx: int | None,
    indices: Callable[[], Iterable[int]],
    holder: Callable[[int, Hello], int | None],
    reserve: Callable[[int, Hello], int],
    hello: Hello | None = None,
    given: bool = False,
    note: Callable[[], str] = str,
) -> tuple[Hello, int]:
    """Sender's half: read Hello, unless it is given, and answer Welcome or Refuse.

    ``given``: nobody dialled, so the worker's process may not even have been started, and there
    is no hurry. ``indices`` are tried in turn for a worker that has none. ``holder`` tells which
    other live process has an index, or ``None``. ``reserve`` is told the index and the Hello before
    the answer leaves, so that the next worker, who may ask meanwhile, gets another one; it returns
    the version that this worker is sent first, or 0: then the worker is told the ``note``.

    Returns:
        The Hello, and the index that the worker has from now on.

    Raises:
        ConnectError: The worker was refused, with the reason it was told; or a side that was
            dialled refused this one.
        ConfigError: It did so because the two are set up differently.
        AuthError: It did so because this one may not.
        AiosyncError: The link failed.
    """
    limit = None if given else HANDSHAKE_SECONDS
    message = hello or (await transport.recv(timeout=limit)).message
    if isinstance(message, Refuse):
        raise _refusal("the other side refused this trainer", message)
    try:
        if not isinstance(message, Hello) or message.role != "receiver":
            raise RemoteProtocolError("expected the Hello of a receiver")
        if message.model_id != model_id:
            raise ConfigError(
                f"this sender serves model {model_id!r}, the worker asked for "
                f"{message.model_id!r}: pass the same model_id on both sides"
            )
        if message.strategy != strategy and ANY_STRATEGY not in (message.strategy, strategy):
            raise ConfigError(
                f"the sender's strategy is {strategy!r}, the worker's {message.strategy!r}: "
                "construct both schemes with the same strategy"
            )
        idx = _choose(message, worker_idx, num_workers, indices, holder)
    except AiosyncError as exc:
        await transport.send(Refuse(type(exc).__name__, str(exc)), timeout=HANDSHAKE_SECONDS)
        raise ConnectError(f"a worker was refused: {exc}") from exc
    first = reserve(idx, message)
    welcome = Welcome(epoch, first, idx, num_workers, "" if first else note())
    await transport.send(welcome, timeout=HANDSHAKE_SECONDS)
    return message, idx


def _choose(
    hello: Hello,
    expected: int | None,
    num_workers: int | None,
    indices: Callable[[], Iterable[int]],
    holder: Callable[[int, Hello], int | None],
) -> int:
    """A free index: the one of the pipe, or that was asked for, else the first."""
    asked = hello.worker_idx
    if expected is not None and asked not in (None, expected):
        raise ConfigError(f"worker {asked} connected through the pipe of worker {expected}")
    wanted = asked if expected is None else expected
    if wanted is None:
        for idx in indices():
            if holder(idx, hello) is None:
                return idx
        raise ConnectError(
            f"the sender expects {num_workers} workers, and all of them are connected: set "
            "num_workers=None in init_on_sender() for any number, or end one of them first"
        )
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


class Refused(ConnectError):
    """The sender has no place for this worker as things are; it may try again."""


def _refusal(what: str, message: Refuse) -> AiosyncError:
    kind = {"ConfigError": ConfigError, "AuthError": AuthError}.get(message.error_type, Refused)
    return kind(f"{what}: {message.error_text}")


async def greet(transport: Transport, hello: Hello, *, timeout: float | None) -> Welcome:
    """Receiver's half: send Hello, read the answer.

    Raises:
        ConfigError: The sender refused because the two sides are set up differently.
        ConnectError: The sender refused for another reason.
        ConnectTimeout: It did not answer in time.
    """
    try:
        await transport.send(hello, timeout=timeout)
        message = (await transport.recv(timeout=timeout)).message
    except (PeerClosed, TransportBroken) as exc:
        raise ConnectError("the trainer disconnected before it answered") from exc
    except RecvTimeout as exc:
        raise ConnectTimeout(
            f"the trainer did not answer within {seconds_text(timeout)}: it must call connect() as "
            "well; several schemes connect in any order with aiosync.connect_all()"
        ) from exc
    if isinstance(message, Refuse):
        raise _refusal("the trainer refused this worker", message)
    if not isinstance(message, Welcome):
        raise RemoteProtocolError(f"expected Welcome, got {type(message).__name__}")
    channel = transport.channel
    if channel is not None:  # before anything else is read: updates may follow at once
        channel.allow_payloads()
    return message
