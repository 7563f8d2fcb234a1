"""Connecting several blocking schemes at the same time. Must not import torch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import aiosync.schemes as aio
from aiosync.protocol import validate_schemes
from aiosync.sync._schemes import WeightSyncScheme, core_of, entered, run_on_loop

__all__ = ["connect_all"]


def connect_all(
    *schemes: WeightSyncScheme, timeout: float | None = None, processes: Sequence[Any] = ()
) -> None:
    """Blocking twin of :func:`aiosync.connect_all`; same arguments and errors."""
    validate_schemes(schemes, "_scheme", "connect_all() takes blocking schemes one by one")
    with contextlib.ExitStack() as stack:
        for scheme in schemes:
            stack.enter_context(entered(scheme, "connect_all"))
        if schemes:
            cores = map(core_of, schemes)
            connecting = aio.connect_all(*cores, timeout=timeout, processes=processes)
            run_on_loop(schemes[0], connecting)
