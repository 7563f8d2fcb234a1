"""Tables for the documentation: aiosync on a GPU, and the abilities of the GPU itself.

python -m tests.gpu                     # all sections, five minutes at most
python -m tests.gpu times torchrl       # some of them

Each section runs in a process of its own with a time limit. A section that fails does not stop the
others. Without a GPU the program ends with status 2.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable


def _driver() -> None:
    from tests.gpu.facts import run

    run()


def _bandwidth() -> None:
    from tests.gpu.bandwidth import run

    run()


def _times() -> None:
    from tests.gpu.times import run

    run()


def _torchrl() -> None:
    from tests.gpu.times import run_torchrl

    run_torchrl()


def _device_memory() -> None:
    from tests.gpu.device_memory import run

    run()


SECTIONS: dict[str, tuple[Callable[[], None], int]] = {
    "times": (_times, 90),
    "driver": (_driver, 50),
    "bandwidth": (_bandwidth, 55),
    "device_memory": (_device_memory, 60),
    "torchrl": (_torchrl, 50),
}
"""The function that prints a section, and the seconds after which it is ended, by name."""


def main() -> None:
    """Run the named sections, or all of them."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sections", nargs="*", metavar="section", help=", ".join(SECTIONS))
    parser.add_argument("--here", action="store_true", help="in this process, without a limit")
    args = parser.parse_args()
    names = args.sections or list(SECTIONS)
    if unknown := set(names) - SECTIONS.keys():
        parser.error(f"there is no section {', '.join(sorted(unknown))}")
    if args.here:
        for name in names:
            SECTIONS[name][0]()
        return
    asked = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", asked], check=False).returncode:
        print("There is no GPU here that torch can use.", file=sys.stderr)
        sys.exit(2)
    failed = 0
    for name in names:
        command = [sys.executable, "-m", "tests.gpu", "--here", name]
        start = time.monotonic()
        try:
            status = subprocess.run(command, check=False, timeout=SECTIONS[name][1]).returncode
        except subprocess.TimeoutExpired:
            status = "its time is over"
        if status:
            failed += 1
            print(f"\n{name} ended early: {status}", flush=True)
        print(f"\n({name}: {time.monotonic() - start:.0f} s)", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
