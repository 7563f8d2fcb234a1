"""What other packages of aiosync may know of a scheme, and do with it. Not for users.

Must not import a concrete scheme.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from aiosync.receiver.guard import Guard
from aiosync.receiver.hooks import SchemeHooks
from aiosync.receiver.receiver import WeightReceiver
from aiosync.schemes._stream import StreamScheme
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.sources import Sources
from aiosync.sender import WeightSender
from aiosync.types import SendReport
from aiosync.wire import Welcome

__all__ = [
    "belongs_to_torchrl",
    "bind_early",
    "change_hooks",
    "check_open",
    "follow",
    "guard_of",
    "is_closed",
    "is_inherited",
    "loop_of",
    "meet_at",
    "meeting_point",
    "met",
    "not_met",
    "receiver_of",
    "runs",
    "sender_at_once",
    "sender_of",
    "separate",
    "sources_of",
]


def receiver_of(scheme: WeightSyncScheme) -> WeightReceiver | None:
    """What receives, once a receiver is connected."""
    return scheme._receiver


def sender_of(scheme: WeightSyncScheme) -> WeightSender | None:
    """What sends, once a sender connects."""
    return scheme._sender


def guard_of(scheme: WeightSyncScheme) -> Guard:
    """What keeps reads and updates apart."""
    return scheme._guard_object


def sources_of(scheme: WeightSyncScheme) -> Sources:
    """What a sender sends, and to how many workers."""
    return scheme._sources


def loop_of(scheme: WeightSyncScheme) -> asyncio.AbstractEventLoop | None:
    """The event loop of a scheme that connects or has connected."""
    return scheme._loop


def is_closed(scheme: WeightSyncScheme) -> bool:
    """Whether it was closed."""
    return scheme._closed


def is_inherited(scheme: WeightSyncScheme) -> bool:
    """Whether it had a role before this process was forked."""
    return scheme._role is not None and scheme._inherited


def runs(scheme: WeightSyncScheme) -> bool:
    """Whether there is something to close."""
    return not scheme._closed and (scheme._runtime is not None or scheme._connected)


def sender_at_once(
    scheme: WeightSyncScheme,
) -> Callable[..., tuple[SendReport | None, Callable[[], None] | None]] | None:
    """``send()`` where it waits for nobody; ``None`` if the scheme has a ``send()`` of its own."""
    return scheme._send_at_once if type(scheme).send is WeightSyncScheme.send else None


def follow(scheme: WeightSyncScheme, *, longest_pause: float) -> None:
    """Have a receiver look for its sender for ever.

    No error ends that, and each lost link is replaced: there is one receiver for all of them.
    """
    scheme._gives_up = False
    scheme._longest_pause = longest_pause
    if isinstance(scheme, StreamScheme):
        scheme.reconnect = None


def belongs_to_torchrl(scheme: WeightSyncScheme) -> None:
    """Note that the context is TorchRL's: its owner passes versions on where that is needed.

    What TorchRL sends may lack a module's extra state: that is warned of, and not refused.
    """
    scheme._strictly, scheme._cascades = "warn", False


def met(scheme: WeightSyncScheme) -> Welcome | None:
    """What the sender said when a receiver met it last, such as its newest version then."""
    return None if scheme._trainer is None else scheme._trainer.answer


def not_met(scheme: WeightSyncScheme) -> BaseException | None:
    """Why the last attempt of a receiver to meet its sender failed, if it did."""
    return None if scheme._trainer is None else scheme._trainer.why


def bind_early(scheme: WeightSyncScheme) -> None:
    """Have copies made before ``init_on_sender()`` know where the sender will be."""
    scheme._bind_early()


def check_open(scheme: WeightSyncScheme) -> None:
    """Raise if it was closed, or had a role before this process was forked."""
    scheme._check_open()
    if scheme._role is not None:
        scheme._check_process()


def separate(scheme: WeightSyncScheme) -> None:
    """Have this copy meet only copies that are made of it from now on."""
    scheme._separate()


def meeting_point(scheme: WeightSyncScheme) -> tuple[str, int]:
    """The Unix socket where workers find a sender of this host, and its process."""
    return scheme._address, scheme._pid


def meet_at(scheme: WeightSyncScheme, address: str, pid: int | None) -> None:
    """Have a receiver find its sender there."""
    scheme._address, scheme._sender_pid = address, pid


def change_hooks(scheme: WeightSyncScheme, *, carried: bool = False, **hooks: Any) -> SchemeHooks:
    """Have a receiver, or copies of a scheme that become receivers, call other hooks as well.

    Args:
        scheme: A scheme.
        carried: Of copies and pickles that are made from now on, where they get no hooks.
        **hooks: Fields of :class:`SchemeHooks`.

    Returns:
        Those that it has now.
    """
    name = "_carried_hooks" if carried else "_hooks"
    changed: SchemeHooks = dataclasses.replace(getattr(scheme, name), **hooks)
    setattr(scheme, name, changed)
    return changed
