"""The targets of aiosync, as data, and the verdict of a run on each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from aiosync.bench import LIMIT, WORKLOADS, Case, Results, Timing, cases_of

__all__ = [
    "TARGETS",
    "Verdict",
    "judge",
    "ratio",
    "share_of_limit",
    "show_ratio",
    "throughput",
]


# -- reading results ----------------------------------------------------------------------------


def ratio(
    results: Results, case: Case, contender: str = "aiosync", base: str = "torchrl"
) -> float | None:
    """Return how many times as long ``base`` takes as a contender; ``None`` if one is missing."""
    ours, theirs = results.timing(case, contender), results.timing(case, base)
    if ours is None or theirs is None:
        return None
    return theirs.median / ours.median


def show_ratio(value: float) -> str:
    """Return a ratio with three digits, or with all digits from 100 on."""
    return f"{value:.0f}x" if value >= 100 else f"{value:.3g}x"


def share_of_limit(results: Results, case: Case, limit: Timing | None) -> float | None:
    """Return the share of a limit's speed that aiosync reaches; 1 is all of it."""
    ours = results.timing(case, "aiosync")
    return None if ours is None or limit is None else limit.median / ours.median


def throughput(timing: Timing) -> float | None:
    """Return the model's bytes per second, for any number of workers; ``None`` without a size."""
    workload = WORKLOADS.get(timing.case.workload)
    return None if workload is None else workload.nbytes / timing.median


# -- targets ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict of a run on one target.

    Attributes:
        text: The comparison.
        wanted: The target, with its unit.
        found: The result, with its unit; ``None`` if it was not measured.
        met: True if the result is good enough; ``None`` if it was not measured.
    """

    text: str
    wanted: str
    found: str | None
    met: bool | None


@dataclass(frozen=True, slots=True)
class _Faster:
    """Target: TorchRL takes at least ``times`` times as long."""

    case: Case
    times: float
    contender: str = "aiosync"
    note: str = ""

    def judge(self, results: Results) -> Verdict:
        name = "" if self.contender == "aiosync" else f", {self.contender}"
        note = f" ({self.note})" if self.note else ""
        text = f"{self.case}{name}: TorchRL / aiosync{note}"
        found = ratio(results, self.case, self.contender)
        shown = None if found is None else show_ratio(found)
        met = None if found is None else found >= self.times
        return Verdict(text, f"at least {self.times:g}x", shown, met)


@dataclass(frozen=True, slots=True)
class _OfLimit:
    """Target: aiosync reaches this share of the first of ``limits`` that was measured."""

    case: Case
    share: float
    limits: tuple[str, ...]

    def judge(self, results: Results) -> Verdict:
        text = f"{self.case}: speed, of that of {self.limits[0]}"
        for name in self.limits:
            limit = results.timing(self.case, f"{LIMIT}{name}")
            found = share_of_limit(results, self.case, limit)
            if found is not None:
                text = f"{self.case}: speed, of that of {name}"
                break
        else:
            found = None
        shown = None if found is None else f"{found:.2f}"
        met = None if found is None else found >= self.share
        return Verdict(text, f"at least {self.share:g}", shown, met)


@dataclass(frozen=True, slots=True)
class _Delivered:
    """Target: updates reach the worker at this share of a limit's speed; send() may take longer."""

    case: Case
    share: float
    limit: str

    def judge(self, results: Results) -> Verdict:
        text = f"{self.case}, until delivered: speed, of that of {self.limit}"
        limit = results.timing(self.case, f"{LIMIT}{self.limit}")
        case = self.case
        place = ("delivery", case.transport, case.workload, case.workers, "aiosync")
        ours = [
            each.value / 1e3
            for each in results.figures
            if (each.name, each.transport, each.workload, each.workers, each.contender) == place
        ]
        found = limit.median / ours[0] if ours and limit is not None else None
        shown = None if found is None else f"{found:.2f}"
        met = None if found is None else found >= self.share
        return Verdict(text, f"at least {self.share:g}", shown, met)


@dataclass(frozen=True, slots=True)
class _AtMost:
    """Target: a figure of aiosync is nowhere larger than ``most``."""

    figure: str
    most: float
    wanted: str
    transport: str = ""
    # The target holds wherever the figure is measured.
    case: None = None

    def judge(self, results: Results) -> Verdict:
        found = [
            figure
            for figure in results.figures
            if figure.name == self.figure
            and figure.contender == "aiosync"
            and self.transport in ("", figure.transport)
        ]
        where = f", {self.transport}" if self.transport else ""
        if not found:
            return Verdict(f"{self.figure}{where}", self.wanted, None, None)
        worst = max(found, key=lambda figure: figure.value)
        text = f"{self.figure}, {worst.transport} {worst.workload}"
        if len(found) > 1:
            text += f" (the worst of {len(found)})"
        shown = f"{worst.value:.3g} {worst.unit}".strip()
        return Verdict(text, self.wanted, shown, worst.value <= self.most)


_Target = _Faster | _OfLimit | _Delivered | _AtMost


def _faster(
    transport: str,
    workload: str,
    times: Mapping[int, float],
    contender: str = "aiosync",
    note: str = "",
) -> Iterator[_Faster]:
    """Yield targets by number of workers."""
    for workers, least in times.items():
        yield _Faster(Case(transport, workload, workers), least, contender, note)


BUSY_CASES = cases_of(("shm", "pipe", "tcp", "gloo"), {"4x2": (1,), "1000x4KiB": (1,)}, busy=True)
_GLOO = "over Gloo"
_NETWORK = "aiosync/network"
_MEMCPY = ("memcpy all threads",)
_SPEED = (
    *_faster("shm", "4x2", {1: 3, 8: 12}),
    *_faster("shm", "4x2", {1: 1.2, 8: 5}, "aiosync/facade"),
    *_faster("shm", "1000x4KiB", {1: 60, 4: 180}),
    *_faster("shm", "1000-layers", {1: 50, 4: 50}),
    *_faster("shm", "512MiB", {1: 1.6, 4: 6}),
    *_faster("pipe", "4x2", {1: 8, 8: 25}),
    *_faster("pipe", "1000x4KiB", {1: 150, 4: 250}),
    *_faster("pipe", "512MiB", {1: 3, 4: 1.7}, note="fresh weights at each send"),
    *_faster("tcp", "4x2", {1: 5, 8: 20}, note=_GLOO),
    *_faster("tcp", "512MiB", {1: 2}, note=_GLOO),
    *_faster("gloo", "1000x4KiB", {1: 40, 4: 80}),
    *_faster("gloo", "1000-layers", {1: 40}),
    *_faster("gloo", "512MiB", {1: 1.5, 4: 1.25}),
    *_faster("gloo", "1000x4KiB", {1: 40, 4: 80}, _NETWORK),
    *_faster("gloo", "1000-layers", {1: 40}, _NETWORK),
    *_faster("gloo", "512MiB", {1: 1.5, 4: 1.25}, _NETWORK),
    *_faster("rpc", "1000x4KiB", {1: 20}),
    *_faster("rpc", "1000-layers", {1: 20}),
    *_faster("rpc", "512MiB", {4: 1.5}),
    *_faster("rpc", "1000x4KiB", {1: 20}, _NETWORK),
    *_faster("rpc", "1000-layers", {1: 20}, _NETWORK),
    *_faster("rpc", "512MiB", {4: 1.5}, _NETWORK),
    *_faster("ray", "4x2", {1: 1}),
    *_faster("ray", "1000x4KiB", {1: 10}),
    *_faster("ray", "1000-layers", {1: 10}),
    *_faster("ray", "512MiB", {1: 3, 4: 8}),
    *_faster("ray", "1000x4KiB", {1: 10}, _NETWORK),
    *_faster("ray", "1000-layers", {1: 10}, _NETWORK),
    *_faster("ray", "512MiB", {1: 3, 4: 8}, _NETWORK),
)
_BUSY = tuple(
    replace(target, case=busy, times=target.times / 2)
    for target in _SPEED
    if (busy := replace(target.case, busy=True)) in BUSY_CASES
)
TARGETS: tuple[_Target, ...] = (
    *_SPEED,
    *_BUSY,
    *(_OfLimit(Case("shm", "512MiB", workers), 0.8, _MEMCPY) for workers in (1, 4)),
    _OfLimit(Case("tcp", "512MiB", 1), 0.8, ("raw socket",)),
    _Delivered(Case("tcp", "512MiB", 1), 0.8, "raw socket"),
    _AtMost("idle wake-ups", 0.0, "none"),
    _AtMost("loop lag p99", 5.0, "at most 5 ms"),
    # A tenth is for what is in memory besides weights.
    _AtMost("extra memory on the host", 2.1, "at most 2 copies", "shm"),
)
"""All targets. Workers that compute all the time may cost half of the advantage."""


def judge(results: Results) -> list[Verdict]:
    """Return the verdict of a run on every target."""
    return [target.judge(results) for target in TARGETS]
