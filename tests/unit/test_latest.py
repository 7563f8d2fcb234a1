"""What is kept for workers that join later."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiosync.schemes._latest import Latest
from aiosync.schemes._snapshots import Snapshot
from aiosync.tensors import FlatBuffer, Layout, collect

_LAYOUTS: dict[frozenset[str], Layout] = {}


class Sent:
    """Snapshots, and how many of them nobody gave back."""

    def __init__(self) -> None:
        self.version = 0
        self.held = set[tuple[int, Any]]()

    def make(self, names: Any, version: int | None = None, **values: object) -> Snapshot:
        if version is None:
            self.version += 1
        names = frozenset(names)
        if names not in _LAYOUTS:
            weights = {name: torch.zeros(1) for name in sorted(names)}
            _LAYOUTS[names] = Layout.plan(collect(weights))
        key = (self.version if version is None else version, names)
        self.held.add(key)
        snapshot = Snapshot(FlatBuffer(64), slot=None, release=lambda: self.held.discard(key))
        snapshot.layout, snapshot.version, snapshot.values = _LAYOUTS[names], key[0], dict(values)
        return snapshot


def versions(latest: Latest, idx: int = 0) -> list[int]:
    return [each.version for each in latest.for_worker(idx)]


def test_one_update_replaces_the_other() -> None:
    sent, latest = Sent(), Latest(None)
    assert latest.newest_for(0) is None
    for _ in range(3):
        latest.add(None, sent.make("ab"))
    assert versions(latest) == [3]
    assert len(sent.held) == 1
    latest.clear()
    assert not sent.held
    assert versions(latest) == []


def test_a_part_is_kept_with_what_it_lacks() -> None:
    sent, latest = Sent(), Latest(None)
    for names in ("ab", "b", "b", "a"):
        latest.add(None, sent.make(names))
    assert versions(latest) == [3, 4]  # which hold all that the first had
    newest = latest.newest_for(7)
    assert newest is not None
    assert newest.version == 4
    assert len(sent.held) == 2


def test_values_are_names_too() -> None:
    sent, latest = Sent(), Latest(None)
    latest.add(None, sent.make("a", step=1))
    latest.add(None, sent.make("a"))
    assert versions(latest) == [1, 2]
    latest.add(None, sent.make("a", step=2))
    assert versions(latest) == [3]


def test_some_workers_got_others() -> None:
    sent, latest = Sent(), Latest(3)
    latest.add(None, sent.make("ab"))
    latest.add(1, sent.make("b"))
    assert [versions(latest, idx) for idx in range(3)] == [[1], [1, 2], [1]]
    latest.add(None, sent.make("b"))
    assert [versions(latest, idx) for idx in range(3)] == [[1, 3], [1, 3], [1, 3]]
    latest.add(None, sent.make("ab"))
    assert [versions(latest, idx) for idx in range(3)] == [[4], [4], [4]]
    assert len(sent.held) == 1
    assert not latest._own


def test_what_one_worker_got_replaces_nothing_of_the_others() -> None:
    sent, latest = Sent(), Latest(2)
    latest.add(0, sent.make("ab"))
    latest.add(1, sent.make("ab", version=1))
    latest.add(0, sent.make("ab"))
    assert [versions(latest, idx) for idx in range(2)] == [[2], [1]]


def test_weights_for_all_and_others_for_one_have_one_version() -> None:
    for keys in ((None, 1), (1, None)):
        sent, latest = Sent(), Latest(None)
        latest.add(None, sent.make("ab"))
        sent.version = 2
        snapshots = {None: sent.make("ab", version=2), 1: sent.make("b", version=2)}
        for key in keys:
            latest.add(key, snapshots[key])
        assert versions(latest, 0) == [2]
        assert latest.for_worker(1)[-1] is snapshots[1]


def test_nothing_is_kept_that_nobody_can_get() -> None:
    sent, latest = Sent(), Latest(2)
    latest.add(None, sent.make("ab"))
    for idx in range(2):
        latest.add(idx, sent.make("ab"))
    assert len(sent.held) == 2


_names = st.frozensets(st.sampled_from("abcd"), min_size=1)
_keys = st.none() | st.integers(0, 2)


def test_names_that_were_never_sent_begin_anew_without_parts() -> None:
    for parts, expected in ((False, [[1], [2], [3]]), (True, [[1], [1, 2], [2, 3]])):
        sent, latest, seen = Sent(), Latest(None, parts=parts), []
        for names in ("ab", "x", "ab"):
            latest.add(None, sent.make(names))
            seen.append(versions(latest))
        assert seen == expected
        assert len(sent.held) == len(expected[-1])


@settings(deadline=None)
@given(st.lists(st.tuples(_keys, _names), max_size=30))
def test_a_late_worker_gets_the_newest_of_each_name(steps: list[Any]) -> None:
    sent, latest = Sent(), Latest(3, parts=True)
    newest: list[dict[str, int]] = [{}, {}, {}]
    for key, names in steps:
        snapshot = sent.make(names)
        latest.add(key, snapshot)
        for idx in range(3):
            if key in (None, idx):
                newest[idx] |= dict.fromkeys(names, snapshot.version)
        for idx in range(3):
            got: dict[str, int] = {}
            for each in latest.for_worker(idx):
                got |= dict.fromkeys(
                    (leaf.name for leaf in each.layout.manifest.leaves), each.version
                )
            assert got == newest[idx]
            assert len(latest.for_worker(idx)) <= 4
            assert versions(latest, idx) == sorted(set(versions(latest, idx)))
    latest.clear()
    assert not sent.held
