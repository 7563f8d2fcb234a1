"""The promised API, which changes on purpose only: see ``tests.api.snapshot``."""

from __future__ import annotations

import pytest

from tests.api import snapshot


@pytest.mark.parametrize("module", snapshot.MODULES)
def test_the_api_is_the_one_that_was_promised(module: str) -> None:
    if snapshot.lacks_framework(module):
        pytest.skip("its framework is not installed")
    promised = (snapshot.FOLDER / f"{module}.txt").read_text()
    assert snapshot.describe(module).splitlines() == promised.splitlines()


def test_each_file_is_of_a_module() -> None:
    files = {path.stem for path in snapshot.FOLDER.glob("*.txt")}
    assert files == set(snapshot.MODULES)
