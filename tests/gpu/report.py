"""Rows of a Markdown table, printed one by one, and clocks that wait for the GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def begin(title: str, *columns: str) -> None:
    """Print the head of a table."""
    print(f"\n### {title}\n\n| {' | '.join(columns)} |")
    print(f"|---|{'---:|' * (len(columns) - 1)}", flush=True)


def row(*cells: object) -> None:
    """Print one row of the table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def attempt(what: str, measure: Callable[[], object]) -> None:
    """Print the result of a function as a row, or the error that it raises."""
    try:
        row(what, measure())
    except Exception as exc:  # noqa: BLE001 - the table shows it, and the other rows go on
        row(what, f"{type(exc).__name__}: {' '.join(str(exc).split())[:200]}")


def median_ms(call: Callable[[], object], repeats: int = 7) -> float:
    """Return the median time in milliseconds of a call and of the work that it starts on the GPU.

    The first call is not counted.
    """
    taken = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken[1:])


def once_ms(call: Callable[[], object]) -> float:
    """Return the time in milliseconds of one call, the first."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
