"""Fixtures for the tests of more than one integration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def forked() -> Iterator[None]:
    """Fork the workers, which takes a tenth of a second, while spawning them takes five."""
    from tests.integrations import _multi_workers as workers

    with workers.start_method("fork"):
        yield
