"""What blocking schemes hand out that can be waited for. Must not import torch."""

from __future__ import annotations

from collections.abc import Callable

import aiosync.schemes as aio
from aiosync.sync._blocking import Facade

__all__ = ["Ready"]


class Ready:
    """The condition that there is a complete version: ``if scheme.ready``, or :meth:`wait`.

    See :class:`aiosync.Ready`.
    """

    def __init__(self, facade: Facade, ready: Callable[[], aio.Ready]) -> None:
        self._facade = facade
        self._ready = ready

    def is_set(self) -> bool:
        """Whether the condition holds now."""
        return self._ready().is_set()

    def __bool__(self) -> bool:
        return self.is_set()

    def wait(self, *, timeout: float | None = None) -> None:
        """Wait until the condition holds; see :meth:`aiosync.Ready.wait`."""
        self._facade._check("ready.wait")
        self._facade._call(self._ready().wait(timeout=timeout))

    def __repr__(self) -> str:
        return repr(self._ready())
