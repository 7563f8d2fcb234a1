"""Results as tables on a console."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from aiosync.bench._results import LIMIT, Case, Results, Timing
from aiosync.bench._work import WORKLOADS

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["limit_of", "show"]

_WIDE = 90  # columns from which there is room for a second line in each cell
_LEGEND = (
    "\nA cell: from the call of send() until every worker has applied the weights; the median, and "
    "below it, where there is room, the 10th and the 90th percentile."
    "\nwork: 4x2 is one layer of 40 bytes, 1MB a policy, 1000x4KiB a thousand tensors of 4 KiB."
    "\naiosync/facade: the blocking API, aiosync.sync. aiosync/asyncio: without uvloop."
    "\nlimit: the least that this machine needs for the same bytes. of the limit: 1.00 is as fast "
    "as that, 0.10 takes ten times as long."
)
_MIN_NBYTES_FOR_SPEED = 10**6  # below it a send is latency, and bytes per second say nothing


def limit_of(results: Results, case: Case) -> Timing | None:
    """Find the limit that a case is compared with: the one that takes longest.

    Each of them is work that cannot be left out; none is measured with busy workers.
    """
    quiet = Case(case.transport, case.workload, case.workers)
    limits = [
        timing
        for timing in results.timings
        if timing.case == quiet and timing.contender.startswith(LIMIT)
    ]
    return max(limits, key=lambda limit: limit.median, default=None)


def show(results: Results, console: Console) -> None:
    """Print a table for each transport, and what is missing."""
    machine = results.machine
    console.print(
        f"Profile {results.profile}, {results.elapsed:.0f} s, on {machine.cores} cores with "
        f"{machine.memory_gib:g} GiB, {machine.system}",
        ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        sep="\n",
        markup=False,
    )
    for transport in dict.fromkeys(timing.case.transport for timing in results.timings):
        console.print()
        console.print(_transport_table(results, transport, console.width < _WIDE))
    console.print(_LEGEND if results.timings else "Nothing was measured.")
    for missing in results.missing:
        # The error of a traceback; lines of it that go on are of no use without the rest.
        lines = missing.why.splitlines()
        errors = [each for each in lines if re.match(r"[\w.]+(Error|Exception|Exit)\b", each)]
        text = (errors or lines or [""])[-1].strip()
        console.print(f"Not measured: {missing.what}: {text}", markup=False)


def _transport_table(results: Results, transport: str, narrow: bool) -> Table:
    """A row for each case; where it is narrow, with the first line of each cell."""
    timings = [timing for timing in results.timings if timing.case.transport == transport]
    names = dict.fromkeys(each.contender for each in timings if LIMIT not in each.contender)
    table = Table(title=f"Transport {transport}: send to applied", title_justify="left")
    if narrow:
        table.box, table.padding, table.pad_edge = None, (0, 1, 0, 0), False
    for heading in ("work", "workers", *names, "limit", "of the limit"):
        # Broken a heading is as narrow as the numbers below it.
        words = heading in ("work", "workers")
        table.add_column(
            heading.replace("/", "/\n").replace("the ", "the\n"),
            justify="left" if words else "right",
        )
    for case in dict.fromkeys(timing.case for timing in timings):
        limit = limit_of(results, case)
        ours = results.timing(case, "aiosync")
        cells = [_range(results.timing(case, name)) for name in names]
        cells.append(Text("-") if limit is None else _limit(limit))
        cells.append(Text("-") if limit is None or ours is None else _share(case, ours, limit))
        if narrow:
            cells = [Text(cell.plain.partition("\n")[0]) for cell in cells]
        busy = " busy" if case.busy else ""
        table.add_row(case.workload, f"{case.workers}{busy}", *cells)
    return table


def _range(timing: Timing | None) -> Text:
    """The median, and below it the 10th and the 90th percentile in the same unit."""
    if timing is None:
        return Text("-")
    unit, factor = ("µs", 1e6) if timing.median < 1e-3 else ("ms", 1e3)
    low, high = (_digits(timing.percentile(percent) * factor) for percent in (10, 90))
    return _cell(f"{_digits(timing.median * factor)} {unit}", f"{low} - {high}")


def _limit(limit: Timing) -> Text:
    return _cell(_range(limit).plain.partition("\n")[0], limit.contender.removeprefix(LIMIT))


def _share(case: Case, ours: Timing, limit: Timing) -> Text:
    nbytes = WORKLOADS[case.workload].nbytes if case.workload in WORKLOADS else 0
    speed = f"{nbytes / ours.median / 1e9:.2f} GB/s" if nbytes >= _MIN_NBYTES_FOR_SPEED else ""
    return _cell(f"{limit.median / ours.median:.2f}", speed)


def _digits(value: float) -> str:
    """Three digits at least, and never an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _cell(text: str, below: str) -> Text:
    return Text(text).append(f"\n{below}", style="dim")
