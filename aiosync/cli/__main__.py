"""Run the ``aiosync`` command as ``python -m aiosync.cli``."""

from __future__ import annotations

import sys

from aiosync.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
