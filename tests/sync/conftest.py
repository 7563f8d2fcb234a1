"""What the tests of the facade share that has to outlive one of them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.sync import _tools as tools

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def fresh() -> Iterator[tools.Fresh]:
    """Runs scripts in forks of an interpreter that has nothing but torch."""
    with contextlib.closing(tools.Fresh()) as interpreter:
        yield interpreter
