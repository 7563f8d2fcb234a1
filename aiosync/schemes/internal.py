"""Internal access to schemes for other packages of aiosync, such as ``sync``. Not for users.

Must not import a concrete scheme.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from aiosync.receiver.scheme_hooks import SchemeHooks
from aiosync.rendezvous.dialer import KeptLink
from aiosync.rendezvous.same_host import new_address
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.lifecycle import Life
from aiosync.schemes.stream import StreamScheme
from aiosync.schemes.trainer import Trainer
from aiosync.schemes.worker import Worker
from aiosync.transports.base import Transport
from aiosync.types import SendReport
from aiosync.wire import Welcome

__all__ = [
    "belongs_to_torchrl",
    "bind_early",
    "change_hooks",
    "follow",
    "is_ranked",
    "leave_applying",
    "life_of",
    "link_to_trainer",
    "meet_at",
    "meeting_point",
    "name_by_rank",
    "publish_with",
    "separate",
]


def life_of(scheme: WeightSyncScheme) -> Life:
    """Return the scheme's life in this process."""
    return scheme._life


def link_to_trainer(scheme: WeightSyncScheme) -> KeptLink[Transport, Welcome] | None:
    """Return the link that a worker dials, with the trainer's answer or the last failure."""
    return scheme._life.side.link if isinstance(scheme._life.side, Worker) else None


def publish_with(
    scheme: WeightSyncScheme,
) -> Callable[..., tuple[SendReport | None, Callable[[], None] | None]] | None:
    """Return the send that never waits; ``None`` in a worker, or if ``send()`` is overridden."""
    side = scheme._life.side
    if not isinstance(side, Trainer) or type(scheme).send is not WeightSyncScheme.send:
        return None
    return functools.partial(side.publish, scheme, scheme._life)


def follow(scheme: WeightSyncScheme, *, longest_pause: float) -> None:
    """Have a receiver look for its sender for ever, and leave each update to its integration.

    No error ends the search, and each lost link is replaced: there is one receiver for all links.
    """
    leave_applying(scheme)
    _change_terms(scheme, gives_up=False, longest_pause=longest_pause)
    if isinstance(scheme, StreamScheme):
        scheme.reconnect = None


def leave_applying(scheme: WeightSyncScheme) -> None:
    """Have the user's calls that wait for a version apply none: the integration does that."""
    _change_terms(scheme, waits_apply=False)
    if (receiver := scheme._life.receiver) is not None:
        receiver.waits.may_apply = False


def belongs_to_torchrl(scheme: WeightSyncScheme) -> None:
    """Mark the context of a scheme as TorchRL's, whose owner passes versions on if that is needed.

    Weights that TorchRL sends may lack a module's extra state: the scheme warns of that, and does
    not refuse them.
    """
    _change_terms(scheme, strict="warn", cascades=False)


def name_by_rank(scheme: WeightSyncScheme, ranked: bool) -> None:
    """Have copies of a scheme know whether their workers are named by ranks, from 1."""
    _change_terms(scheme, ranked=ranked)


def is_ranked(scheme: WeightSyncScheme) -> bool:
    """Return True if the workers of a scheme are named by their ranks."""
    return scheme._terms.ranked


def _change_terms(scheme: WeightSyncScheme, **changes: Any) -> None:
    """Change terms of a scheme, also in its role if it is a worker already."""
    scheme._terms = dataclasses.replace(scheme._terms, **changes)
    if isinstance(scheme._life.side, Worker):
        scheme._life.side.terms = dataclasses.replace(scheme._life.side.terms, **changes)


def bind_early(scheme: WeightSyncScheme) -> None:
    """Bind the sender's address early, for copies that are made before ``init_on_sender()``."""
    if isinstance(scheme, StreamScheme):
        scheme._fabric.bind_early(scheme)


def separate(scheme: WeightSyncScheme) -> None:
    """Give this copy a meeting point of its own, for copies that are made of it from now on."""
    scheme._fabric.meeting = new_address()


def meeting_point(scheme: WeightSyncScheme) -> tuple[str, int]:
    """Return the Unix socket where workers find a sender of this host, and its process."""
    return scheme._fabric.meeting, scheme._life.pid


def meet_at(scheme: WeightSyncScheme, address: str, pid: int | None) -> None:
    """Set the meeting point where a receiver finds its sender."""
    scheme._fabric.meeting, scheme._fabric.sender_pid = address, pid


def change_hooks(scheme: WeightSyncScheme, **hooks: Any) -> SchemeHooks:
    """Set hooks of a receiver, or of a scheme that becomes one; keep the others and return all.

    An older program calls ``init_on_worker()`` before the collector gives the scheme its context.

    Args:
        scheme: A scheme.
        **hooks: Fields of :class:`SchemeHooks`.
    """
    side = scheme._life.side
    if isinstance(side, Worker):
        return side.change_hooks(**hooks)
    carried_hooks = dataclasses.replace(scheme._terms.hooks, **hooks)
    scheme._terms = dataclasses.replace(scheme._terms, hooks=carried_hooks)
    return carried_hooks
