"""The state of the weights of a server, and why they may not be the newest ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from aiosync.receiver.receiver import WeightReceiver
    from aiosync.serving.gate import AdmissionGate

__all__ = ["Cause", "Ended", "FeedStatus", "causes_of", "is_connected", "status_of"]

Cause: TypeAlias = tuple[float, str]
"""Time since when weights may not be the newest ones, by ``time.monotonic()``, and the reason."""

Ended: TypeAlias = tuple[Literal["failed", "closed"], str]
"""State of a feed that is not running, and the reason."""


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """The state of a weight feed and its link to the source.

    Attributes:
        state: ``"starting"`` before the feed has the version that it joins with; ``"live"``;
            ``"stale"`` when the source is lost, or its newest version could not be put to use;
            ``"failed"`` when the feed itself has ended with an error; ``"closed"`` when it is not
            running.
        reason: Text with the reason why the feed is not live; empty when it is.
        epoch: Epoch of the version that is served; ``None`` before the first.
        version: Version that requests are answered with; 0 before the first.
        newest: Newest version of the newest epoch that the feed knows of.
        connected: True if there is a link to the source.
        age: Seconds since :attr:`version` was put to use; ``None`` before the first.
        stale_for: Seconds since the feed stopped being live; 0 when it is. A new link ends this
            only once an update has come, or the feed knows that there is nothing newer.
        refused: The last version that could not be put to use, ``None`` if a newer one could.
        reconnects: Number of times that a lost link was restored.
        swaps: Number of versions that were put to use.
        waits_for: Version that the feed needs before it answers requests; 0 once it had it.
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
    waits_for: int

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes as plain values for JSON; the epoch is in hexadecimal."""
        values = asdict(self)
        values["epoch"] = None if self.epoch is None else f"{self.epoch:016x}"
        for name in ("age", "stale_for"):
            if values[name] is not None:
                values[name] = round(values[name], 3)
        return values


def causes_of(receiver: WeightReceiver, lost: str, last: str = "") -> list[Cause]:
    """Return why the weights of a receiver may not be the newest ones.

    Args:
        receiver: The receiver.
        lost: Text for a link that is lost.
        last: Text about the last attempt to restore it, for the end of that reason.
    """
    found: list[Cause] = []
    if (cut_off := receiver.outage.cut_off) is not None:
        since, error = cut_off
        if receiver.outage.lost_link is None:
            # The new link has brought neither an update, nor the word that there is none newer.
            lost = "what is newer has not come since the link was lost"
        found.append((since, f"{lost}: {error}{last}"))
    if (refusing := receiver.ledger.refusing) is not None:
        text = f"version {refusing.version} was refused: {refusing.text}"
        found.append((refusing.since, text))
    return found


def is_connected(receiver: WeightReceiver | None) -> bool:
    """Return True if there is a link to the trainer."""
    return receiver is not None and receiver.outage.lost_link is None and receiver.error is None


def _state_of(gate: AdmissionGate, causes: Sequence[Cause]) -> Literal["starting", "live", "stale"]:
    if gate.waits_for:
        return "starting"
    return "stale" if causes else "live"


def status_of(
    gate: AdmissionGate,
    receiver: WeightReceiver | None,
    causes: Sequence[Cause],
    activated_at: float | None,
    reconnects: int,
    ended: Ended | None = None,
) -> FeedStatus:
    """Return the status of the weights behind a gate.

    Args:
        gate: The gate.
        receiver: The receiver of its updates, if there is one.
        causes: The reasons why the weights may not be the newest ones.
        activated_at: Time of the last switch, by ``time.monotonic()``; ``None`` before any.
        reconnects: Number of times that a lost link was restored.
        ended: State and reason of a feed that is not running.
    """
    now, version = time.monotonic(), gate.version
    refusing = None if receiver is None else receiver.ledger.refusing
    state, reason = ended or (_state_of(gate, causes), "; ".join(text for _, text in causes))
    return FeedStatus(
        state=state,
        reason=reason,
        epoch=gate.epoch,
        version=version,
        newest=version if receiver is None else receiver.ledger.inbox.newest or version,
        connected=is_connected(receiver),
        age=None if activated_at is None else now - activated_at,
        stale_for=max((now - since for since, _ in causes), default=0.0),
        refused=None if refusing is None else refusing.version,
        reconnects=reconnects,
        swaps=gate.swaps,
        waits_for=gate.waits_for,
    )
