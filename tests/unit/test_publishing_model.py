"""The model of the shared memory protocol: every order of its steps, with and without each rule."""

from __future__ import annotations

import pytest

from tests.bench.publishing_model import (
    RULES,
    SCENES,
    WAITS,
    WITHOUT,
    WORKER,
    explore,
    mixed_copies,
    rings_lost,
    start,
)

pytestmark = pytest.mark.apart


@pytest.mark.parametrize("scene", SCENES)
def test_no_order_of_steps_breaks_a_promise(scene: str) -> None:
    assert explore(start(**SCENES[scene])) > 1000


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_promise_breaks_without_the_rule(rule: str) -> None:
    scene, what = WITHOUT[rule]
    with pytest.raises(AssertionError, match=what):
        explore(start(**SCENES[scene]), RULES - {rule})


def test_who_looks_once_more_misses_no_ring() -> None:
    assert not rings_lost(WORKER)
    assert rings_lost(WORKER[:-1])


def test_copies_that_end_later_do_not_mix() -> None:
    assert not mixed_copies()


@pytest.mark.parametrize("wait", sorted(WAITS))
def test_copies_mix_without_a_wait(wait: str) -> None:
    assert mixed_copies(WAITS - {wait})
