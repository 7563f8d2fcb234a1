"""Updates of a part of the names, put together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import aiosync
from aiosync.server._merging import Part, merged
from aiosync.tensors import FlatBuffer, Flattener
from aiosync.types import Limits


def made(weights: Any) -> Part:
    flattener = Flattener("tensordict")
    prepared = flattener.prepare(weights)
    flat = FlatBuffer(prepared.layout.nbytes)
    flattener.copy_into(prepared, flat)
    return Part(prepared.layout, flat, prepared.values)


def content(whole: Part) -> dict[str, float]:
    leaves = whole.layout.manifest.leaves
    found = {}
    for leaf, view in zip(leaves, whole.buffer.views(whole.layout), strict=True):
        found |= dict.fromkeys((leaf.name, *leaf.aliases), view.item())
    return found


_step = st.dictionaries(st.sampled_from("abcde"), st.integers(0, 99), min_size=1)


@settings(deadline=None)
@given(st.lists(_step, min_size=1))
def test_the_newest_of_each_name(steps: list[dict[str, int]]) -> None:
    parts = [made({name: torch.tensor(float(v)) for name, v in step.items()}) for step in steps]
    expected: dict[str, float] = {}
    for step in steps:
        expected |= step
    whole = merged(parts, Limits())
    assert content(whole) == expected
    assert (whole is parts[-1]) == (expected.keys() == steps[-1].keys())


def test_tied_names_stay_tied() -> None:
    both, other = torch.tensor(1.0), torch.tensor(5.0)
    old = made({"a": both, "b": both, "c": other})
    whole = merged([old, made({"b": torch.tensor(2.0)})], Limits())
    assert content(whole) == {"a": 2.0, "b": 2.0, "c": 5.0}
    assert len(whole.layout.manifest.leaves) == 2
    whole = merged([old, made({"c": torch.tensor(6.0)})], Limits())
    assert content(whole) == {"a": 1.0, "b": 1.0, "c": 6.0}


def test_values_come_along_and_the_tensors_inside_of_replaced_ones_do_not() -> None:
    weights = {"a": torch.tensor(1.0), "l": [1, torch.tensor(3.0)], "k": [torch.tensor(4.0)]}
    whole = merged([made(weights), made({"a": torch.tensor(2.0), "l": [5]})], Limits())
    assert content(whole) == {"a": 2.0, "k.0": 4.0}
    assert whole.values["l"] == [5]
    assert whole.values.keys() == {"l", "k"}


def test_empty_tensors_and_limits() -> None:
    parts = [made({"a": torch.zeros(0), "b": torch.tensor(1.0)}), made({"b": torch.tensor(2.0)})]
    assert len(merged(parts, Limits()).layout.manifest.leaves) == 2
    with pytest.raises(aiosync.ConfigError):
        merged(parts, Limits(max_tensors=1))


def test_padding_is_zero() -> None:
    whole = merged([made({"a": torch.ones(3)}), made({"b": torch.ones(5)})], Limits())
    memory = whole.buffer.memoryview()
    assert all(not any(memory[start:stop]) for start, stop in whole.layout.padding())
