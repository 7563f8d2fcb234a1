"""Tools for testing transports and code on top of them: public, and free of any test-runner.

- :data:`CONFORMANCE_CHECKS` and :func:`check_transport`: the suite that every transport passes.
- :class:`FaultProxy`: a proxy that cuts, resets, stalls, slows or changes streams of bytes.
- :func:`cancel_at_every_await`: cancels an operation at each of its await points.
- :class:`assert_no_leaks`: finds resources that a block of code does not release.

This package must never import pytest, torch or schemes.
"""

from aiosync.testing.cancellation import CancelOutcome, cancel_at_every_await
from aiosync.testing.conformance import (
    CONFORMANCE_CHECKS,
    Check,
    ConformanceError,
    ConformanceReport,
    Hooks,
    TransportFactory,
    check_transport,
)
from aiosync.testing.leaks import LEAK_KINDS, LeakError, assert_no_leaks
from aiosync.testing.proxy import FaultProxy, Faults, Plan, PlanSource

__all__ = [
    "CONFORMANCE_CHECKS",
    "LEAK_KINDS",
    "CancelOutcome",
    "Check",
    "ConformanceError",
    "ConformanceReport",
    "FaultProxy",
    "Faults",
    "Hooks",
    "LeakError",
    "Plan",
    "PlanSource",
    "TransportFactory",
    "assert_no_leaks",
    "cancel_at_every_await",
    "check_transport",
]
