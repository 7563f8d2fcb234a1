"""The promise of a worker that its reads take what a word of shared memory names.

Nobody answers to an update that is promised to be taken. So the promise may only rest on reads that
happen: a transform has a forward, too, but an environment reads its parameters and never calls it.

==========  ====================================================  ==============================
state       ends with                                             an update is
==========  ====================================================  ==============================
answering   a read that computes with a version of the word       sent by message, and answered
promised    a refusal, another model, reads that overlap,         taken by the next read, and
            several versions in a row that no read took           nobody is told
==========  ====================================================  ==============================

Belongs to the loop of its receiver, but for :meth:`ReadPromise.end_at_overlap`. Must not import
transports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiosync._tasks import call_soon
from aiosync.receiver.guard import Guard, weakly
from aiosync.wire import Message, Promise

__all__ = ["ReadPromise"]

_MOST_RUNG = 8


class ReadPromise:
    """Promises, and withdraws what was promised.

    Args:
        guard: Sees the reads, and looks at the word for them.
        say: Sends a message to the trainer.
        offer: Calls :meth:`make` if the model can follow; on the loop, as reads happen.
        allowed: Whether anything may be promised at all.

    Attributes:
        digest: Of the manifest whose versions are promised to be taken; ``None`` for none.
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
        self._may = allowed  # on this link: reads have not overlapped yet
        self._num_rung = 0  # versions in a row that no read took
        self._loop = asyncio.get_running_loop()
        self._offer = offer
        guard.on_compute = weakly(self._note_compute)

    def begin_link(self) -> None:
        """Forget what was promised on the link before."""
        self.digest, self._may = None, self._allowed
        self._guard.ignore_word()

    def end(self) -> None:
        """Promise nothing more, and say nothing more."""
        self.digest, self._may = None, False
        self._guard.on_compute = None

    def _note_compute(self) -> None:
        if self._may and self.digest is None:
            if asyncio._get_running_loop() is self._loop:
                self._offer()
            else:
                call_soon(self._loop, self._offer)

    @property
    def is_due(self) -> bool:
        """Whether reads happen and do not overlap, so that the next version may be promised."""
        return self._may and self._guard.has_computed

    def make(self, digest: bytes, words: memoryview, take: Callable[[], object]) -> None:
        """Promise to take the versions of a manifest.

        Args:
            digest: Of the manifest.
            words: The first of these names the version to take.
            take: Takes it, under the guard; keeps nobody alive.
        """
        self.digest, self._num_rung, self._guard.has_computed = digest, 0, False
        self._guard.watch_word(words, take, weakly(self.end_at_overlap))
        self._say(Promise(digest))

    def withdraw(self) -> None:
        """Tell the trainer that reads are not sure to take versions any more. Idempotent."""
        if self.digest is not None:
            self.digest = None
            self._say(Promise(b""))

    def note_ring(self) -> None:
        """Withdraw where the trainer had to ring for several versions, and nothing computed."""
        reads = self._guard.has_computed or self._guard.is_read
        self._num_rung, self._guard.has_computed = 0 if reads else self._num_rung + 1, False
        if self._num_rung >= _MOST_RUNG:
            self.withdraw()

    def end_at_overlap(self) -> None:
        """Promise nothing more on this link, as reads overlap. On any thread."""
        if self._may:
            self._may = False
            call_soon(self._loop, self.withdraw)
