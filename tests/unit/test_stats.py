"""Statistics in a status: they arrive as they were sent, and wrong ones are refused."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiosync.errors import RemoteProtocolError
from aiosync.events import SyncStats, WorkerState, WorkerStats
from aiosync.wire import Status, decode_header, encode_header, stats_from, stats_values

WORKERS = tuple(
    WorkerStats(idx, 100 + idx, 7, idx, state, 1.5 * idx)
    for idx, state in enumerate(typing.get_args(WorkerState))
)
STATS = SyncStats(
    *("sender", "a model", "tcp", 2**63 - 1, 7, 9, 2, 0.25, 12, {"ok": 7, "timeout": 1}),
    *(10**9, 2 * 10**9, 3, 4, 5, {"wire": 0.125, "pause": 1e-4}, WORKERS),
)


FIELDS = [each.name for cls in (SyncStats, WorkerStats) for each in dataclasses.fields(cls)]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(FIELDS) | st.text(), inner, max_size=4)
    ),
)


def travelled(values: Any) -> Any:
    """Return the values of a status as they arrive."""
    message, _ = decode_header(encode_header(Status({"stats": values})))
    assert isinstance(message, Status)
    return message.values["stats"]


def test_what_comes_is_what_went() -> None:
    assert not any(
        getattr(STATS, each.name) == each.default for each in dataclasses.fields(SyncStats)
    ), "a field that nobody looks at"
    least = SyncStats("server", "", "")
    assert stats_from(travelled(stats_values([STATS, least]))) == (STATS, least)
    assert stats_from(travelled(stats_values([]))) == ()


def test_fields_of_newer_releases_are_left_out() -> None:
    (values,) = stats_values([STATS])
    values["mood"] = {"a": [1]}
    values["workers"][0]["mood"] = "good"
    assert stats_from(travelled([values])) == (STATS,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("role", "boss"),
        ("role", None),
        ("model", b"policy"),
        ("version", "1"),
        ("version", -1),
        ("version", True),
        ("lag", 1.0),
        ("age", math.nan),
        ("age", math.inf),
        ("age", -0.5),
        ("age", "old"),
        ("seconds", [1.0]),
        ("seconds", {"wire": None}),
        ("finished", {"perhaps": 1}),
        ("finished", 3),
        ("workers", {}),
        ("workers", "ab"),
        ("workers", 1),
        ("workers", [[]]),
        ("workers", [{"index": 0}]),
        ("workers", [{**dataclasses.asdict(WORKERS[0]), "state": "asleep"}]),
        ("workers", [{**dataclasses.asdict(WORKERS[0]), "state": []}]),
    ],
)
def test_what_is_wrong_is_refused(field: str, value: Any) -> None:
    (values,) = stats_values([STATS])
    with pytest.raises(RemoteProtocolError, match="illegal statistics"):
        stats_from(travelled([{**values, field: value}]))


@pytest.mark.parametrize("values", [None, 1, "abc", [1], {"a": 1}, [{}], [[]]])
def test_what_is_no_list_of_them_is_refused(values: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="illegal statistics"):
        stats_from(values)


@given(ANYTHING, st.sampled_from(FIELDS), st.booleans())
def test_whatever_comes_is_statistics_or_refused(values: Any, field: str, whole: bool) -> None:
    if not whole:
        (good,) = stats_values([STATS])
        values = [{**good, field: values}]
    try:
        found = stats_from(values)
    except RemoteProtocolError:
        return
    assert all(type(each) is SyncStats for each in found)
    assert all(type(worker) is WorkerStats for each in found for worker in each.workers)
    assert all(each.age >= 0 and each.version >= 0 for each in found)
