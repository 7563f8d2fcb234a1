"""One send that is under way. Must not import torch."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aiosync.errors import AckTimeout, AiosyncError
from aiosync.protocol import SendTracker
from aiosync.schemes._snapshots import Snapshot
from aiosync.types import SendReport

__all__ = ["Send"]


@dataclass(slots=True, eq=False)
class Send:
    """Who has answered to one version, who waits for that, and until when."""

    tracker: SendTracker
    future: asyncio.Future[SendReport]
    started: float
    nbytes: int
    lost: Mapping[int, AiosyncError]
    borrowed: Sequence[Snapshot] = ()  # whose bytes are still the caller's
    timeout: float = math.inf
    deadline: float = math.inf  # on the loop's clock

    def time_out(self) -> None:
        """Give up on the workers that have not answered."""
        version, timeout = self.tracker.version, self.timeout

        def too_late(idx: frozenset[int]) -> AckTimeout:
            return AckTimeout(
                f"no answer to version {version} within {timeout:g} s; the worker may be busy, "
                "stopped, or waiting for apply_pending()",
                worker_ids=idx,
                version=version,
            )

        self.tracker.timed_out(too_late)
