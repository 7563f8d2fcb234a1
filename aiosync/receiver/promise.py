"""The promise of a worker that its reads take the versions that a word of shared memory names.

A worker does not answer an update that it promised to take. So the promise may only rest on reads
that happen: a transform has a forward, too, but an environment reads its parameters and never
calls it.

==========  ====================================================  ==============================
state       ends with                                             an update is
==========  ====================================================  ==============================
answering   a read that computes with a version of the word       sent by message, and answered
promised    a refusal, another model, reads that overlap,         taken by the next read, and
            several versions in a row that no read took           not answered
==========  ====================================================  ==============================

Belongs to the loop of its receiver, except for :meth:`ReadPromise.end_at_overlap`. Must not import
transports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiosync._tasks import call_soon
from aiosync.receiver.guard import Guard, weakly
from aiosync.wire import Message, Promise

__all__ = ["ReadPromise"]

# After so many versions in a row that no read took, the promise is withdrawn.
_MOST_RUNG = 8


class ReadPromise:
    """Makes the promise of a worker to its trainer, and withdraws it.

    Args:
        guard: Sees the reads, and looks at the word for them.
        say: Sends a message to the trainer.
        offer: Calls :meth:`make` if the model can follow the word; called on the loop, when a read
            computes.
        allowed: False if this worker may promise nothing at all.

    Attributes:
        digest: Digest of the manifest whose versions the worker promises to take; ``None`` for
            none.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        say: Callable[[Message], object],
        offer: Callable[[], object],
        allowed: bool,
    ) -> None:
        self.digest: bytes | None = None
        self._guard = guard
        self._say = say
        self._allowed = allowed
        # On this link a promise is allowed until reads overlap.
        self._may = allowed
        # Number of versions in a row that no read took.
        self._num_rung = 0
        self._loop = asyncio.get_running_loop()
        self._offer = offer
        guard.on_compute = weakly(self, ReadPromise._note_compute)

    def begin_link(self) -> None:
        """Forget the promise of the last link."""
        self.digest, self._may = None, self._allowed
        self._guard.ignore_word()

    def end(self) -> None:
        """Promise nothing more, and send nothing more."""
        self.digest, self._may = None, False
        self._guard.on_compute = None

    def _note_compute(self) -> None:
        """Have the loop offer a promise, as a read computes and there is none. On any thread."""
        if self._may and self.digest is None:
            if asyncio._get_running_loop() is self._loop:
                self._offer()
            else:
                call_soon(self._loop, self._offer)

    @property
    def is_due(self) -> bool:
        """True if reads happen and do not overlap, so that the next version may be promised."""
        return self._may and self._guard.has_computed

    def make(self, digest: bytes, words: memoryview, take: Callable[[], object]) -> None:
        """Promise to take the versions of a manifest.

        Args:
            digest: Digest of the manifest.
            words: Memory whose first word names the version to take.
            take: Takes that version, under the guard; keeps no object alive.
        """
        self.digest, self._num_rung, self._guard.has_computed = digest, 0, False
        self._guard.watch_word(words, take, weakly(self, ReadPromise.end_at_overlap))
        self._say(Promise(digest))

    def withdraw(self) -> None:
        """Tell the trainer that reads may no longer take every version. Idempotent."""
        if self.digest is not None:
            # Reads go on looking at the word until the trainer has confirmed this.
            self.digest = None
            self._say(Promise(b""))

    def note_ring(self) -> None:
        """Count a version that the trainer rang for; withdraw after several that no read took."""
        reads = self._guard.has_computed or self._guard.is_read
        self._num_rung, self._guard.has_computed = 0 if reads else self._num_rung + 1, False
        if self._num_rung >= _MOST_RUNG:
            self.withdraw()

    def end_at_overlap(self) -> None:
        """Promise nothing more on this link, as reads overlap. On any thread."""
        if self._may:
            self._may = False
            call_soon(self._loop, self.withdraw)
