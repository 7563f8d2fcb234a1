"""The list of all checks. This module imports neither pytest nor a private name."""

from __future__ import annotations

from tests.contract import cancelling, changing, costs, delivery, failures, lifetime, reading, spans
from tests.contract.bench import Bench, Check, Hooks, SchemeFactory, as_check

__all__ = ["ANYWHERE", "CONTRACT_CHECKS", "Bench", "Check", "Hooks", "SchemeFactory"]

CONTRACT_CHECKS: tuple[Check, ...] = tuple(
    as_check(body)
    for module in (delivery, failures, reading, spans, lifetime, cancelling, changing, costs)
    for body in module.CHECKS
)
"""Every check of the suite, in reading order."""

ANYWHERE = tuple(
    check
    for check in CONTRACT_CHECKS
    if check.body
    in (
        delivery.check_send_applies,
        delivery.check_several_workers,
        delivery.check_looks_without_a_read,
        delivery.check_late_joiner_gets_what_was_sent,
        delivery.check_no_first_weights,
        delivery.check_forms_of_weights,
        delivery.check_worker_ids,
        failures.check_dead_worker,
        lifetime.check_worker_comes_again,
        lifetime.check_leaving_is_not_dying,
    )
)
"""Checks that use only the coroutines of ``Worker``, so that a worker may be in any process."""
