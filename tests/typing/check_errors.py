"""Types of the exceptions and small dataclasses; checked by mypy and pyright, never run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_type

from aiosync.errors import AckTimeout, AiosyncError, ApplyError, ManifestMismatch, PartialSyncError
from aiosync.types import AckStatus, Cancellation, Capabilities, Limits, Require, SendReport


def partial(error: PartialSyncError) -> None:
    assert_type(error.acked, frozenset[int])
    assert_type(error.failed, Mapping[int, AiosyncError])
    assert_type(error.version, int | None)


def others(timeout: AckTimeout, mismatch: ManifestMismatch, refused: ApplyError) -> None:
    assert_type(timeout.worker_ids, frozenset[int])
    assert_type(mismatch.missing, tuple[str, ...])
    assert_type(mismatch.mismatched, Mapping[str, str])
    assert_type(refused.worker_idx, int | None)
    as_builtin: list[Exception] = [timeout, mismatch, refused]
    timeouts: list[TimeoutError] = [timeout]
    values: list[ValueError] = [mismatch]
    print(as_builtin, timeouts, values)


def report(value: SendReport) -> None:
    assert_type(value.acked, frozenset[int])
    assert_type(value.skipped, Mapping[int, int])
    assert_type(value.elapsed, float)
    value.version = 2  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]  # frozen


def small(limits: Limits, capabilities: Capabilities) -> None:
    assert_type(limits.max_payload_nbytes, int)
    assert_type(capabilities.send_cancellation, Cancellation)
    assert_type(AckStatus(1), AckStatus)
    policies: list[Require] = ["all", 2, 0.5]
    wrong: Require = "some"  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    print(policies, wrong)
