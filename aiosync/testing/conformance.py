"""The published conformance suite: what every transport must do, as a list of checks.

Works with any test-runner. With pytest, parametrize a test over :data:`CONFORMANCE_CHECKS` and
await ``check.run(factory)``; without one, await :func:`check_transport`, which runs them all.
The checks open real links, use no mocks, and wait for conditions rather than for time.

This module must never import pytest or torch. The contract is
:class:`aiosync.transports.base.Transport`; see ``docs/topics/transports.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from aiosync.testing import _checks
from aiosync.testing._tools import (
    Check,
    ConformanceError,
    Hooks,
    TransportFactory,
)
from aiosync.types import Capabilities

__all__ = [
    "CONFORMANCE_CHECKS",
    "Check",
    "ConformanceError",
    "ConformanceReport",
    "Hooks",
    "TransportFactory",
    "check_transport",
]

CONFORMANCE_CHECKS: tuple[Check, ...] = tuple(
    check for check in vars(_checks).values() if isinstance(check, Check)
)
"""Every check of the suite, in the order in which to read it."""


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """What :func:`check_transport` found.

    Attributes:
        passed: Names of the checks that hold.
        skipped: For each check that was not run, why.
    """

    passed: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])


async def check_transport(
    pair_factory: TransportFactory,
    *,
    capabilities: Capabilities | None = None,
    hooks: Hooks | None = None,
    checks: Iterable[Check] = CONFORMANCE_CHECKS,
) -> ConformanceReport:
    """Run the suite on one transport, on the running loop.

    Args:
        pair_factory: Makes a link; see :class:`TransportFactory`. Called many times.
        capabilities: Checks named in its ``exceptions`` are skipped; the transport's own when
            omitted.
        hooks: What else the suite may use; checks whose hooks are missing are skipped.
        checks: Which checks to run.

    Returns:
        What was checked and what was not.

    Raises:
        ConformanceError: Some checks fail; the text names them all, with their reasons. The
            error of the first one is the cause.
    """
    if capabilities is None:
        async with pair_factory() as (sender, _):
            capabilities = sender.capabilities
    passed: list[str] = []
    skipped: dict[str, str] = {}
    failed: dict[str, Exception] = {}
    for check in checks:
        reason = check.skip_reason(hooks, capabilities)
        if reason is not None:
            skipped[check.name] = reason
        else:
            try:
                await check.run(pair_factory, hooks=hooks)
                passed.append(check.name)
            except Exception as exc:  # noqa: BLE001  # raised below, with all others
                failed[check.name] = exc
    if failed:
        text = "\n".join(f"  {name}: {error!r}" for name, error in failed.items())
        raise ConformanceError(
            f"{capabilities.name}: {len(failed)} of {len(failed) + len(passed)} conformance "
            f"checks fail:\n{text}"
        ) from next(iter(failed.values()))
    return ConformanceReport(tuple(passed), skipped)
