"""Variables of functions that end in another thread than they began in, as torch's must not."""

from __future__ import annotations

import threading

__all__ = ["Local"]


class Local:
    """A variable of a function; notes if it ends in another thread than it began in."""

    strays = 0

    def __init__(self) -> None:
        self._began_in = threading.get_ident()

    def __del__(self) -> None:
        Local.strays += threading.get_ident() != self._began_in
