"""Connecting several schemes at the same time, so that their order does not matter."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aiosync._tasks import running_loop
from aiosync.errors import AiosyncError
from aiosync.protocol import validate_schemes
from aiosync.schemes.base import WeightSyncScheme

__all__ = ["connect_all"]


async def connect_all(
    *schemes: WeightSyncScheme, timeout: float | None = None, processes: Sequence[Any] = ()
) -> None:
    """Connect several schemes at the same time, each as its ``connect()`` does.

    With one scheme for each model, two sides that connect them one after the other in different
    orders wait for each other. It is enough that one side uses this.

    Args:
        *schemes: Senders, receivers or both, which have their role.
        timeout: Seconds for each; ``None`` takes its own, ``math.inf`` waits for ever.
        processes: As for :meth:`WeightSyncScheme.connect`, if every sender has the same workers.

    Raises:
        ConfigError: An argument is no scheme: a list of schemes is passed as ``*schemes``.
        AiosyncError: The error of the first ``connect()`` that failed; its notes have the errors of
            the others. Schemes that have not connected are closed.

    Cancellation:
        Breaks the attempt: schemes that have not connected are closed.
    """

    async def connect(scheme: WeightSyncScheme) -> None:
        await scheme.connect(timeout=timeout, processes=processes)

    validate_schemes(schemes, "connect", "connect_all() takes schemes one by one")
    loop = running_loop()
    tasks = [loop.create_task(connect(scheme)) for scheme in schemes]
    try:
        await asyncio.gather(*tasks)
    except BaseException as exc:  # The error is raised again for the caller.
        await _end_others(tasks, exc)
        raise


async def _end_others(tasks: Sequence[asyncio.Task[None]], error: BaseException) -> None:
    """Cancel the calls that still connect, and note the errors of the others on the first one."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, AiosyncError) and outcome is not error:
            error.add_note(f"{type(outcome).__name__}: {outcome}")
