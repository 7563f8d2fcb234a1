"""Where the ``aiosync`` command starts: outside the package, whose import takes seconds.

A Ctrl-C during that import ends the command as a later one does, without a traceback.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line; see :func:`aiosync.cli.main`."""
    unchanged = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if unchanged:  # a shell's background commands ignore it
        signal.signal(signal.SIGINT, _stop)
    from aiosync.cli import main as run

    if unchanged:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def _stop(*_: object) -> None:
    # At once: an exception may be lost inside an import, and there is nothing to put in order.
    try:
        os.write(2, b"aiosync: stopped by Ctrl-C\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
