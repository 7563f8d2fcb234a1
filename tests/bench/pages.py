"""Write the results of a run into the pages that show them.

``python -m tests.bench.pages RESULTS`` takes the file of ``python -m tests.bench --profile full
--json RESULTS``. It replaces the long tables of the benchmarks page, and cells of tables of README,
front page and performance page, which it finds by the first cell of their row.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from aiosync.bench import Case, limit_of
from tests.bench.compare.tables import to_markdown
from tests.bench.compare.targets import ratio, share_of_limit
from tests.bench.processes import Comparison

_ROOT = Path(__file__).parents[2]
_SMALL, _MANY, _LARGE = "4x2", "1000x4KiB", "512MiB"
_SCHEMES = {
    "[shared memory](reference/schemes/shared-memory.md), on the trainer's host": ("shm", ""),
    "[pipes](reference/schemes/pipes.md), on the trainer's host": ("pipe", ""),
    "[TCP](reference/schemes/tcp.md), on other hosts": ("tcp", ""),
    "[Gloo](reference/schemes/distributed.md), on other hosts": ("gloo", "/network"),
    "[Ray](reference/schemes/ray.md), on other hosts": ("ray", "/network"),
}


class Run:
    """Texts of a run's results."""

    def __init__(self, results: Comparison) -> None:
        self.results = results

    def ms(self, case: Case, contender: str = "aiosync") -> str:
        """Return a median in milliseconds, with two digits."""
        found = self.results.timing(case, contender)
        if found is None:
            return "-"
        value = found.median * 1e3
        return f"{value:.0f}" if value >= 10 else f"{value:.2g}"

    def times(self, case: Case) -> str:
        """Return how TorchRL compares."""
        return f"TorchRL takes {ratio(self.results, case) or 0:.0f} times as long"

    def share(self, case: Case) -> str:
        """Return the share of the limit's speed."""
        return f"{share_of_limit(self.results, case, limit_of(self.results, case)) or 0:.2f}"


def cells(run: Run) -> dict[str, dict[str, Sequence[str]]]:
    """Return by page and first cell of a row the cells that follow it."""
    eight, four = Case("shm", _SMALL, 8), Case("shm", _LARGE, 4)
    many, tcp = Case("shm", _MANY, 1), Case("tcp", _LARGE, 1)
    front = {
        "40 bytes to eight workers, shared memory": (
            f"{run.ms(eight)} ms",
            f"{run.ms(eight, 'torchrl')} ms",
        ),
        "512 MiB to four workers, shared memory": (
            f"{run.ms(four)} ms",
            f"{run.ms(four, 'torchrl')} ms",
        ),
    }
    performance: dict[str, Sequence[str]] = {
        "40 bytes, shared memory, eight workers": (f"{run.ms(eight)} ms", run.times(eight)),
        "1,000 tensors of 4 KiB, shared memory, one worker": (
            f"{run.ms(many)} ms",
            run.times(many),
        ),
        "512 MiB, shared memory, four workers": (
            f"{run.ms(four)} ms",
            f"{run.share(four)} of the speed of one bare copy",
        ),
        "512 MiB, TCP on one host, one worker": (
            f"{run.ms(tcp)} ms",
            f"{run.share(tcp)} of the speed of a bare socket",
        ),
    }
    for label, (transport, kind) in _SCHEMES.items():
        shown = [(_SMALL, 1), (_MANY, 1), (_LARGE, 1), (_LARGE, 4)]
        performance[label] = [
            run.ms(Case(transport, work, workers), f"aiosync{kind}") for work, workers in shown
        ]
    return {"README.md": front, "docs/index.md": front, "docs/performance.md": performance}


def with_cells(text: str, rows: Mapping[str, Sequence[str]]) -> str:
    """Return a page with other cells in some rows; a row that is not there is an error."""
    for label, new in rows.items():
        old = re.search(rf"^\| {re.escape(label)} \|.*$", text, re.M)
        if old is None:
            sys.exit(f"no table has a row {label!r}")
        # The page's own cells follow those of the run, such as the command.
        rest = [each.strip() for each in old[0].split(" | ")[1 + len(new) :]]
        line = " | ".join([f"| {label}", *new, *rest])
        text = text.replace(old[0], line if rest else f"{line} |")
    return text


def main(path: Path) -> None:
    """Rewrite the pages."""
    results = Comparison.from_json(path.read_text(encoding="utf-8"))
    for name, rows in cells(Run(results)).items():
        page = _ROOT / name
        page.write_text(with_cells(page.read_text(encoding="utf-8"), rows), encoding="utf-8")
    page = _ROOT / "docs/benchmarks.md"
    before, rest = page.read_text(encoding="utf-8").split("\nProfile full, ", 1)
    _, after = rest.split("\n### What holds it back", 1)
    tables = to_markdown(results)
    page.write_text(f"{before}\n{tables}\n### What holds it back{after}", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
