"""Local variables that record their end in a foreign thread, where torch's objects must not end."""

from __future__ import annotations

import threading

__all__ = ["Local"]


class Local:
    """Variable of a function; adds to ``strays`` if it ends in another thread than it began in."""

    strays = 0

    def __init__(self) -> None:
        self._began_in = threading.get_ident()

    def __del__(self) -> None:
        Local.strays += threading.get_ident() != self._began_in
