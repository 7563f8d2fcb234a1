"""TorchRL's time for a send through shared memory, as a multiple of aiosync's in the same run.

The sends go to one worker, with applied acknowledgements, and TorchRL's trainer has memory of its
own. The weights are one linear layer of 4x2, and 1,000 tensors of 4 KiB, in as many modules as
models have them and in one. This is ``python -m tests.bench`` for these cases alone. The program
ends with status 1 if aiosync is not at least 3 times as fast for 4x2, and 50 times for 1,000
modules.

    python -m tests.bench.shm_vs_torchrl
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from aiosync.bench import Case, Results
from tests.bench.compare.targets import ratio

_WANTED = {"4x2": 3, "1000-layers": 50, "1000x4KiB": None}


def main() -> None:
    """Measure, and write one JSON object."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.json")
        chosen = [f"--workload={name}" for name in _WANTED]
        only = ["--profile=targets", "--transport=shm", "--workers=1", "--json", str(path)]
        contenders = ["--contender=aiosync", "--contender=torchrl"]
        command = [sys.executable, "-m", "tests.bench", "--no-figures", *only, *chosen, *contenders]
        subprocess.run(command, check=True, stdout=sys.stderr)
        results = Results.from_json(path.read_text(encoding="utf-8"))
    good, found = True, {}
    for name, wanted in _WANTED.items():
        times = ratio(results, Case("shm", name, 1))
        found[name] = {"ratio": times, "wanted": wanted}
        good &= times is not None and times >= (wanted or 0)
    print(json.dumps(found))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
