"""aiosync beside TorchRL, over RPC and Ray too, with figures, targets and pictures.

python -m tests.bench                                       # minutes
python -m tests.bench --profile targets                     # what aiosync wants to reach
python -m tests.bench --profile full --json results.json --plot pictures
python -m tests.bench --from results.json --markdown        # show it again
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from aiosync.bench import LIMIT, Missing, machine, profiles
from aiosync.errors import ConfigError
from tests.bench.compare.figures import figures_of
from tests.bench.compare.tables import show, to_markdown
from tests.bench.compare.targets import TARGETS
from tests.bench.contenders import CONTENDERS, Plan, choose
from tests.bench.processes import Comparison, run


def plans() -> dict[str, Plan]:
    """Return plans by name: those of ``aiosync bench``, with all contenders, and the targets'."""
    quick, full = (
        Plan(each.name, each.cases, each.blocks, each.scale)
        for each in profiles(["rpc", "ray"]).values()
    )
    names = {each.name for some in CONTENDERS.values() for each in some}
    main = {name for name in names if name.startswith(LIMIT)}
    main |= {"aiosync", "aiosync/facade", "aiosync/network", "torchrl"}
    judged = {target.case for target in TARGETS}
    cases = [case for case in full.cases if case in judged]
    return {
        "quick": replace(quick, contenders=main, surfaces_upto=1),
        "targets": Plan("targets", cases, blocks=5, scale=0.5, contenders=main),
        "full": full,
    }


def measure(plan: Plan, json_to: str | None, figures: bool) -> Comparison:
    """Run a plan until its end or Ctrl-C; write the file before every case, too."""
    results = Comparison(machine(), plan.name)

    def note(done: int, total: int, what: str) -> None:
        if json_to is not None:
            Path(json_to).write_text(results.to_json(), encoding="utf-8")
        print(f"{results.elapsed:6.1f} s  {done} of {total} cases  {what}", file=sys.stderr)

    try:
        run(plan, results, note, figures_of if figures else None)
    except KeyboardInterrupt:
        results.missing.append(Missing("the rest of the run", "stopped by Ctrl-C"))
    return results


def main() -> None:
    """Measure or read results, and show them."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--profile", choices=("quick", "targets", "full"), default="quick")
    for name in ("transport", "workload", "contender"):
        parser.add_argument(f"--{name}", action="append", default=[])
    parser.add_argument("--workers", action="append", default=[], type=int)
    parser.add_argument("--no-figures", action="store_true", help="latencies only")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="DIR", type=Path)
    parser.add_argument("--from", dest="source", metavar="FILE", type=Path)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    if args.source:
        results = Comparison.from_json(args.source.read_text(encoding="utf-8"))
    else:
        try:
            plan = choose(
                plans()[args.profile],
                transports=args.transport,
                workloads=args.workload,
                workers=args.workers,
                contenders=args.contender,
            )
        except ConfigError as exc:
            parser.error(str(exc))
        results = measure(plan, args.json, not args.no_figures)
    if args.markdown:
        print(to_markdown(results))
    else:
        show(results, Console(highlight=False, width=None if sys.stdout.isatty() else 200))
    if args.json:
        Path(args.json).write_text(results.to_json(), encoding="utf-8")
    if args.plot:
        from tests.bench.compare.plots import save_plots

        for path in save_plots(results, args.plot):
            print(f"Picture: {path}")
    sys.exit(results.failed)


if __name__ == "__main__":
    main()
