"""What other packages of aiosync may know of a scheme, and do with it. Not for users.

Must not import a concrete scheme.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from aiosync.receiver.guard import Guard
from aiosync.receiver.hooks import SchemeHooks
from aiosync.receiver.receiver import WeightReceiver
from aiosync.rendezvous.dialer import KeptLink
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.roles import Life
from aiosync.schemes.sources import Sources
from aiosync.schemes.tcp import StreamScheme
from aiosync.sender import WeightSender
from aiosync.transports.base import Transport
from aiosync.types import SendReport
from aiosync.wire import Welcome

__all__ = [
    "belongs_to_torchrl",
    "bind_early",
    "change_hooks",
    "check_open",
    "follow",
    "guard_of",
    "life_of",
    "link_of",
    "meet_at",
    "meeting_point",
    "publish_with",
    "receiver_of",
    "runs",
    "sender_of",
    "separate",
    "sources_of",
]


def life_of(scheme: WeightSyncScheme) -> Life:
    """Its role, its process and its loop, and whether it was closed."""
    return scheme._life


def guard_of(scheme: WeightSyncScheme) -> Guard:
    """What keeps reads and updates apart."""
    return scheme._guard_object


def sender_of(scheme: WeightSyncScheme) -> WeightSender | None:
    """What sends, once a sender connects."""
    return scheme._sender


def receiver_of(scheme: WeightSyncScheme) -> WeightReceiver | None:
    """What receives, once a receiver is connected."""
    return scheme._receiver


def sources_of(scheme: WeightSyncScheme) -> Sources:
    """What a sender sends, and to how many workers."""
    return scheme._given.sources


def link_of(scheme: WeightSyncScheme) -> KeptLink[Transport, Welcome] | None:
    """The link of a receiver that it dials; what answered it, or why nothing did."""
    return None if scheme._worker is None else scheme._worker.link


def runs(scheme: WeightSyncScheme) -> bool:
    """Whether there is something to close."""
    life = scheme._life
    return not life.closed and (scheme._runtime is not None or life.connected)


def publish_with(
    scheme: WeightSyncScheme,
) -> Callable[..., tuple[SendReport | None, Callable[[], None] | None]] | None:
    """``send()`` where it waits for nobody; ``None`` if the scheme has a ``send()`` of its own."""
    if scheme._trainer is None or type(scheme).send is not WeightSyncScheme.send:
        return None
    return scheme._trainer.publish


def check_open(scheme: WeightSyncScheme) -> None:
    """Raise if it was closed, or had a role before this process was forked."""
    scheme._life.check_open()
    scheme._life.check_process()


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


def bind_early(scheme: WeightSyncScheme) -> None:
    """Have copies made before ``init_on_sender()`` know where the sender will be."""
    scheme._bind_early()


def separate(scheme: WeightSyncScheme) -> None:
    """Have this copy meet only copies that are made of it from now on."""
    scheme._separate()


def meeting_point(scheme: WeightSyncScheme) -> tuple[str, int]:
    """The Unix socket where workers find a sender of this host, and its process."""
    return scheme._address, scheme._life.pid


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
    if carried or scheme._worker is None:
        changed = scheme._carried_hooks = dataclasses.replace(scheme._carried_hooks, **hooks)
    else:
        changed = scheme._worker.change_hooks(**hooks)
    return changed
