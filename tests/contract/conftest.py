"""A fixture of the contract suite."""

from __future__ import annotations

from multiprocessing import forkserver as server

import pytest

from tests.schemes import _harness as harness


@pytest.fixture(scope="session", name="forkserver")
def _forkserver() -> None:
    """Start the fork server before the checks, so that none of them finds it as a leak."""
    harness.context("forkserver")
    server.ensure_running()
