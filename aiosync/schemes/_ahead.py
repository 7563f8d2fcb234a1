"""A word ahead of an update, so that the worker looks at its model while the trainer copies.

With a thousand tensors that look takes a sixth of a send, as does the trainer's own. Over shared
memory only, where both sides have a core of the same host. Must not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping

from aiosync._cores import usable_cores
from aiosync.schemes._making import INLINE_NBYTES, Planned
from aiosync.schemes._peer import Peer
from aiosync.tensors import Target
from aiosync.transports.base import Transport
from aiosync.transports.shared_memory import SharedMemTransport

__all__ = ["Foresight", "tell_ahead"]

# With fewer tensors the word costs as much as the look.
_LEAST_TENSORS = 256
# The copy of the largest update that has a word takes a millisecond.
_WAIT_SECONDS = 2e-3
# After a word that no update followed in time: these are not waited for.
_IGNORED = 32


def tell_ahead(
    planned: Mapping[int | None, Planned], workers: Collection[int], peers: Mapping[int, Peer]
) -> None:
    """Tell those of these workers that are idle that an update follows, if that is worth it."""
    if len(planned) != 1:
        return
    [plan] = planned.values()
    layout = plan.prepared.layout
    if len(layout.manifest.leaves) < _LEAST_TENSORS or layout.nbytes > INLINE_NBYTES:
        return
    if len(workers) >= usable_cores():
        return  # without a core of its own a worker's look would delay the copy
    for peer in map(peers.get, workers):
        if peer is not None and peer.has_target and not peer.outbox.in_flight:
            link = peer.transport
            if isinstance(link, SharedMemTransport):
                link.publisher.tell_ahead()


class Foresight:
    """What a worker does at such a word.

    Args:
        target: Returns what the next update goes into, if it would be applied as it comes.
    """

    def __init__(self, target: Callable[[], object]) -> None:
        self._target = target
        self._ignored = 0

    def listen(self, transport: Transport) -> None:
        """Hear what is said on this link."""
        if isinstance(transport, SharedMemTransport):
            transport.on_ahead = self._on_word

    def _on_word(self, read_next: Callable[[float], None]) -> None:
        if self._ignored:
            self._ignored -= 1
            return
        # Another thread could change the model after the look; this one runs nothing else.
        if len(sys._current_frames()) > 1:
            return
        target = self._target()
        if not isinstance(target, Target):
            return
        with target.foreseeing():
            if target.foresees:
                read_next(_WAIT_SECONDS)
                if target.foresees:
                    self._ignored = _IGNORED
