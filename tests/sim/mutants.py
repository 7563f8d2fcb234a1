"""Faults of the kinds that this repository's history mended, each found by some seeds.

``python -m tests.sim.mutants`` puts each fault into a copy of the package, and runs its seed there.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mutant(NamedTuple):
    """A fault.

    Attributes:
        name: The fault in a few words.
        file: File of the fault, below ``aiosync/``.
        old: Text that the fault replaces; it occurs once in the file.
        new: Text that the fault puts there.
        seed: A seed that finds the fault.
    """

    name: str
    file: str
    old: str
    new: str
    seed: int

    def fits(self) -> bool:
        """Return True if the fault can be put in, and leaves Python that can be read."""
        text = (ROOT / "aiosync" / self.file).read_text()
        with contextlib.suppress(SyntaxError):
            ast.parse(text.replace(self.old, self.new))
            return text.count(self.old) == 1
        return False


MUTANTS = [
    Mutant(
        "the answers to questions count as progress of an update",
        "sender/worker_link.py",
        "                self._said_nbytes += self._written_nbytes - before\n",
        "",
        10129,
    ),
    Mutant(
        "versions of another trainer are compared",
        "protocol/version_order.py",
        "if epoch == self.newest_epoch and version <= self.newest:",
        "if version <= self.newest:",
        4,
    ),
    Mutant(
        "a send has no deadline",
        "sender/sender.py",
        "                send.time_out()\n",
        "                return\n",
        4,
    ),
    Mutant(
        "a part takes the place of another that waits",
        "sender/update_queue.py",
        "        needed = still_needed(older, group)\n",
        "        needed = list[Snapshot]()\n",
        5,
    ),
    Mutant(
        "an update that waits is forgotten when the one before is answered",
        "sender/worker_link.py",
        "            if self.outbox.queue.groups:\n                self._pump()\n",
        "            if self.outbox.queue.groups:\n                pass\n",
        134,
    ),
    Mutant(
        "a slot is written to while a worker computes with it",
        "transports/shared_memory/slots.py",
        "        except BlockingIOError:\n            return False\n        self.locked = True\n",
        "        except BlockingIOError:\n            pass\n        self.locked = True\n",
        3,
    ),
    Mutant(
        "an update counts as taken by a worker that promised nothing",
        "sender/worker_link.py",
        "            and publisher.promised == digest\n",
        "",
        13,
    ),
]


def run(mutant: Mutant, arguments: Iterable[str], seconds: float = 300.0) -> tuple[int, str]:
    """Run seeds with a fault; return the exit status and the output."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("aiosync", "tests/sim"):
            shutil.copytree(ROOT / part, Path(folder) / part)
        shutil.copy(ROOT / "tests" / "__init__.py", Path(folder, "tests"))
        path = Path(folder, "aiosync", mutant.file)
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        ended = subprocess.run(
            [sys.executable, "-m", "tests.sim", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        return ended.returncode, ended.stdout + ended.stderr


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutants", description=__doc__)
    parser.add_argument("--only", help="the name of one fault, or a part of it")
    parser.add_argument("--seeds", type=int, help="look for seeds that find the fault")
    given = parser.parse_args()
    missed = 0
    for mutant in MUTANTS:
        if given.only and given.only not in mutant.name:
            continue
        began = time.perf_counter()
        if given.seeds:
            status, text = run(mutant, ["--until-failed", "--seeds", str(given.seeds)])
        else:
            status, text = run(mutant, ["--seed", str(mutant.seed)])
        missed += not status
        lines = text.splitlines() or [""]
        took = time.perf_counter() - began
        print(f"{'found' if status else 'MISSED'} in {took:.0f} s: {mutant.name}")
        for line in lines[:3]:
            print(f"    {line[:200]}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
