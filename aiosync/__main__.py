"""``python -m aiosync``: the ``aiosync`` command, also where its script is not on the path."""

from __future__ import annotations

import sys

from aiosync.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
