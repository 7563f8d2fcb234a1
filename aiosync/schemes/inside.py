"""What other packages of aiosync may know of a scheme, and do with it. Not for users.

Must not import a concrete scheme.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from aiosync.receiver.hooks import SchemeHooks
from aiosync.rendezvous.same_host import new_address
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.roles import Life, Trainer, Worker
from aiosync.schemes.tcp import StreamScheme
from aiosync.types import SendReport

__all__ = [
    "belongs_to_torchrl",
    "bind_early",
    "change_hooks",
    "follow",
    "life_of",
    "meet_at",
    "meeting_point",
    "publish_with",
    "separate",
]


def life_of(scheme: WeightSyncScheme) -> Life:
    """What it is and has in this process."""
    return scheme._life


def publish_with(
    scheme: WeightSyncScheme,
) -> Callable[..., tuple[SendReport | None, Callable[[], None] | None]] | None:
    """``send()`` where it waits for nobody; ``None`` if the scheme has a ``send()`` of its own."""
    side = scheme._life.side
    if not isinstance(side, Trainer) or type(scheme).send is not WeightSyncScheme.send:
        return None
    return side.publish


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
    if isinstance(scheme, StreamScheme):
        scheme._bind_early()


def separate(scheme: WeightSyncScheme) -> None:
    """Have this copy meet only copies that are made of it from now on."""
    scheme._meeting = new_address()


def meeting_point(scheme: WeightSyncScheme) -> tuple[str, int]:
    """The Unix socket where workers find a sender of this host, and its process."""
    return scheme._meeting, scheme._life.pid


def meet_at(scheme: WeightSyncScheme, address: str, pid: int | None) -> None:
    """Have a receiver find its sender there."""
    scheme._meeting, scheme._sender_pid = address, pid


def change_hooks(scheme: WeightSyncScheme, *, carried: bool = False, **hooks: Any) -> SchemeHooks:
    """Have a receiver, or copies of a scheme that become receivers, call other hooks as well.

    Args:
        scheme: A scheme.
        carried: Of copies and pickles that are made from now on, where they get no hooks.
        **hooks: Fields of :class:`SchemeHooks`.

    Returns:
        Those that it has now.
    """
    side = scheme._life.side
    if isinstance(side, Worker) and not carried:
        return side.change_hooks(**hooks)
    scheme._carried_hooks = dataclasses.replace(scheme._carried_hooks, **hooks)
    return scheme._carried_hooks
