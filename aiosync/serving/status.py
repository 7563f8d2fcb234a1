"""What a weight feed says about itself, for probes and people. Must not import torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["FeedStatus"]


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """The state of a served model with respect to its source.

    Attributes:
        state: ``"starting"`` before the first version; ``"live"``; ``"stale"`` when the source
            is lost, or its newest version could not be put to use; ``"failed"`` when the feed
            itself has ended with an error; ``"closed"`` when it is not running.
        reason: Why it is not live, as text; empty when it is.
        epoch: Epoch of the version that is served; ``None`` before the first.
        version: Version that requests are answered with; 0 before the first.
        newest: Newest version that is known of, of the newest epoch.
        connected: Whether there is a link to the source.
        age: Seconds since :attr:`version` was put to use; ``None`` before the first.
        stale_for: Seconds since it stopped being live; 0 when it is. A new link ends this only
            once an update has come, or it is known that there is nothing newer.
        refused: The last version that could not be put to use, ``None`` if a newer one could.
        reconnects: How often a lost link was restored.
        swaps: How many versions were put to use.
    """

    state: Literal["starting", "live", "stale", "failed", "closed"]
    reason: str
    epoch: int | None
    version: int
    newest: int
    connected: bool
    age: float | None
    stale_for: float
    refused: int | None
    reconnects: int
    swaps: int

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON; the epoch in hexadecimal, as in headers."""
        values = asdict(self)
        values["epoch"] = None if self.epoch is None else f"{self.epoch:016x}"
        for name in ("age", "stale_for"):
            if values[name] is not None:
                values[name] = round(values[name], 3)
        return values
