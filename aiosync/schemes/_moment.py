"""Moments at which a model may be changed, and waiting for one on a loop.

Must not import transports.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

from aiosync.schemes._guard_hooks import in_transform
from aiosync.tensors import Target

if TYPE_CHECKING:
    from aiosync.schemes.guard import Guard

__all__ = ["Moment", "keep_for_readers", "wait_for_readers"]

_PAUSE_SECONDS, _LOOKS = 0.005, 20


class Moment:
    """Sees what a guard does not see, around the forwards that it guards.

    ``functional_call()`` and ``to_module()`` put other tensors into a model before a forward, and
    take them out after it: they must not get the weights. Nor do updates belong into the
    transforms of ``torch.func``, or among fake tensors. Made in the thread of the event loop.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._thread = threading.get_ident()
        self._looks = 0  # in a row that found other tensors

    def pause(self, target: object) -> float | None:
        """Seconds after which the loop should try again; ``None`` if the update may be applied.

        Called under the guard by who is going to apply it.
        """
        module = target if isinstance(target, Target) else None
        if self._guard.at_read:
            unfit = in_transform() or (module is not None and module.has_other_tensors())
            return 0.0 if unfit else None
        if self._guard.readers - {self._thread} and module is not None:
            # Another thread may be about to call the model, or just have called it. Tensors that
            # are still there after some time were put there for good.
            self._looks = self._looks + 1 if module.has_other_tensors() else 0
            if 0 < self._looks < _LOOKS:
                return _PAUSE_SECONDS
        self._looks = 0
        return None


async def wait_for_readers(guard: Guard, seconds: float) -> None:
    """Let the reads of other threads end, for so long at most, while the loop goes on."""
    until = time.monotonic() + seconds
    with guard.claiming() as is_free:
        while not is_free() and time.monotonic() < until:  # noqa: ASYNC110 - threads tell nobody
            await asyncio.sleep(_PAUSE_SECONDS)


def keep_for_readers(guard: Guard, memory: object) -> None:
    """Keep something until the reads that there are have ended."""
    kept = [memory]
    guard.submit(kept.clear)
