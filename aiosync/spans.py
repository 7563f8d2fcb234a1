"""Version spans: the versions of the weights that made a sample, and their staleness.

Plain values, for code that makes samples and code that learns from them. Must not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Literal

from aiosync.errors import ConfigError

__all__ = ["LastRead", "VersionSpan", "epoch_text", "staleness"]


def epoch_text(epoch: int) -> str | None:
    """Return an epoch as users see it; ``None`` for 0, which is no epoch."""
    return f"{epoch:016x}" if epoch else None


def _check_epoch(epoch: object) -> None:
    """Refuse ``scheme.epoch``, a number: compared with the text of a span it never matches."""
    if epoch is not None and not isinstance(epoch, str):
        raise ConfigError(
            "an epoch must be a text of 16 hexadecimal digits, such as f'{scheme.epoch:016x}', "
            f"got {epoch!r}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class LastRead:
    """The weights that a read used, as ``scheme.last_read`` returns them.

    Attributes:
        epoch: The run of a trainer that sent them, as ``scheme.epoch``; 0 if they have no version.
        version: Their version; 0 for weights that the trainer never sent.
    """

    epoch: int
    version: int


@dataclasses.dataclass(frozen=True, slots=True)
class VersionSpan:
    """The versions that a sample, a request or a batch was computed with.

    Attributes:
        first: The oldest one; 0 if a part was computed with weights that have no version.
        last: The newest one.
        epoch: The run of a trainer that sent them, 16 hexadecimal digits as in the headers of a
            server; ``None`` if that is not known.
        runs: The number of tokens, steps or reads that each version made, as pairs (version,
            count), in the order in which they came; empty if nothing was counted.

    Raises:
        ConfigError: The epoch is no text.
    """

    first: int
    last: int
    epoch: str | None = None
    runs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        _check_epoch(self.epoch)

    @classmethod
    def from_runs(cls, runs: Iterable[tuple[int, int]], epoch: str | None = None) -> VersionSpan:
        """Return the span of pairs (version, count).

        Args:
            runs: Pairs (version, count), at least one; neighbours of one version become one.
            epoch: The run of a trainer that sent the versions, 16 hexadecimal digits:
                ``f"{scheme.epoch:016x}"``.

        Raises:
            ConfigError: There are no pairs, or the epoch is no text.
        """
        merged = _merge(runs)
        if not merged:
            raise ConfigError("a span has at least one version: pass pairs (version, count)")
        versions = [version for version, _ in merged]
        return cls(min(versions), max(versions), epoch, tuple(merged))


def _merge(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the runs; neighbours of the same version are one run with both counts."""
    merged: list[tuple[int, int]] = []
    for version, count in runs:
        if merged and merged[-1][0] == version:
            count += merged.pop()[1]
        merged.append((version, count))
    return merged


def staleness(
    now: int,
    span: VersionSpan | None,
    weight: Literal["sample", "token"] = "sample",
    *,
    epoch: str | None = None,
    first_version: int = 1,
) -> float | None:
    """Return the age of a sample in versions, or ``None`` if it is unknown.

    The age is never negative, and an unknown one is never 0. ``scheme.staleness(span)`` of a
    trainer fills in all arguments but the weight.

    Args:
        now: The trainer's newest version.
        span: The versions that the sample was computed with, if they are known.
        weight: ``"sample"`` counts from the oldest weights in it; ``"token"`` takes the mean over
            the counts in :attr:`VersionSpan.runs`.
        epoch: The trainer's own run, as in a span; ``None`` if all spans are of one run.
        first_version: The version with which the trainer's run began. From 2 on the run continues
            the count of the run before, and versions below are comparable.

    Returns:
        Versions; ``None`` if the age is unknown: there is no span, or no version in it, or one
        of another run whose count was not continued, or one newer than ``now``; with ``"token"``
        also if several versions were not counted.

    Raises:
        ConfigError: There is no such weight, or the epoch is no text.
    """
    if weight not in ("sample", "token"):
        raise ConfigError(f"weight must be 'sample' or 'token', got {weight!r}")
    _check_epoch(epoch)
    if span is None or not 1 <= span.first <= span.last <= now:
        return None
    if epoch is not None and span.epoch not in (None, epoch) and span.last >= first_version:
        return None
    if weight == "sample" or span.first == span.last:
        return float(now - span.first)
    return _mean_age(now, span.runs)


def _mean_age(now: int, runs: Collection[tuple[int, int]]) -> float | None:
    """Return the mean age of the tokens of runs in versions; ``None`` without tokens."""
    total = sum(count for _, count in runs)
    return sum(count * (now - version) for version, count in runs) / total if total else None
