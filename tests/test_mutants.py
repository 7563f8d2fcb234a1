"""Faults of ``python -m tests.bench.mutants``: each can be put into the package as it is now."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.bench.mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_it_fits(mutant: Mutant) -> None:
    assert mutant.fits(), f"its old text has to occur once in aiosync/{mutant.file}"
    assert mutant.new != mutant.old
    paths = [word for word in shlex.split(mutant.tests) if word.startswith("tests/")]
    assert paths
    assert all(Path(__file__).parents[1].joinpath(path).exists() for path in paths)


def test_there_are_thirty() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30
