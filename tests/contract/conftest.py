"""A fixture of the contract suite."""

from __future__ import annotations

from multiprocessing import forkserver as server

import pytest

from tests.schemes import _harness as harness


@pytest.fixture(scope="session", name="forkserver")
def _forkserver() -> None:
    """Checks look for processes that are left: this one is not theirs."""
    harness.context("forkserver")
    server.ensure_running()
