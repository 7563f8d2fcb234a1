"""The protocol of shared memory as a model: every order of its steps, and what each rule is for."""

from __future__ import annotations

import itertools

import pytest

from tests.unit._publishing_model import RULES, explore, start

SCENES = {
    "two sends, two workers": {},
    "a worker joins": {"workers": 1, "joiners": 1},
    "a worker is killed": {"kills": 1},
    "an interrupt anywhere, two sends": {"workers": 1, "reads": 2, "interrupts": 1},
    "an interrupt anywhere, two workers": {"sends": 1, "interrupts": 1},
    "a part": {"parts": 1, "sends": 1},
    "a part between two sends": {"parts": 1, "workers": 1},
    "two threads of a worker": {"workers": 1, "threads": 2, "interrupts": 1},
    "all at once": {"sends": 1, "workers": 1, "joiners": 1, "kills": 1, "interrupts": 1},
    "a promise is taken back": {"workers": 1, "reads": 2, "withdrawals": 1},
    "a promise of two is taken back": {"sends": 1, "withdrawals": 1, "interrupts": 1},
    "three sends through three slots": {"sends": 3, "workers": 1, "slots": 3, "reads": 2},
}
WITHOUT = {
    "exclusive take": ("two threads of a worker", "a forward saw"),
    "label last": ("an interrupt anywhere, two sends", "with what"),
    "look once more": ("a promise is taken back", "is older than"),
    "lock": ("two sends, two workers", "written while it is read"),
    "look again": ("a worker joins", "with what"),
    "named": ("an interrupt anywhere, two sends", "with what"),
    "newest": ("all at once", "with what"),
    "overtaken": ("two sends, two workers", "is older than"),
    "parts after takes": ("a part", "with what"),
    "parts wait": ("a part", "with what"),
    "store together": ("two sends, two workers", "is older than"),
    "taken": ("two sends, two workers", "with what"),
    "unlock first": ("two sends, two workers", "without the sender"),
}


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_no_order_of_steps_breaks_a_promise(scene: str) -> None:
    assert explore(start(**SCENES[scene])) > 1000


def test_every_rule_has_its_counterexample() -> None:
    assert WITHOUT.keys() == RULES


@pytest.mark.slow
@pytest.mark.parametrize("rule", WITHOUT)
def test_a_promise_breaks_without_the_rule(rule: str) -> None:
    scene, what = WITHOUT[rule]
    with pytest.raises(AssertionError, match=what):
        explore(start(**SCENES[scene]), RULES - {rule})


# A store becomes visible to the other process some time later, when its processor writes it back.
SENDER = ("store word", "word visible", "look at bell")
WORKER = ("store bell", "bell visible", "look at word", "look later")


def rings_lost(worker: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The orders in which a worker waits for a ring, and none comes though its word changed."""
    lost = []
    for order in set(itertools.permutations((*SENDER, *worker))):
        at = {step: place for place, step in enumerate(order)}
        legal = (
            at["store word"] < at["word visible"]
            and at["store word"] < at["look at bell"]
            and at["store bell"] < min(at["bell visible"], at["look at word"])
            # A millisecond later both stores are visible.
            and at.get("look later", 99) > max(at["bell visible"], at["look at word"])
            and not at["store word"] < at.get("look later", 99) < at["word visible"]
        )
        rung = at["bell visible"] < at["look at bell"]
        seen = at["word visible"] < max(at["look at word"], at.get("look later", -1))
        if legal and not rung and not seen:
            lost.append(order)
    return lost


def test_a_worker_that_looks_at_its_word_once_more_later_misses_no_ring() -> None:
    assert rings_lost(WORKER) == []
    assert rings_lost(WORKER[:-1])
