"""Lets pytest say more about the asserts of modules that do not know it."""

from multiprocessing import forkserver as server
from pathlib import Path

import pytest

pytest.register_assert_rewrite(
    *(
        f"tests.contract.{path.stem}"
        for path in Path(__file__).parent.glob("*.py")
        if path.stem not in ("__init__", "conftest")
    )
)

from tests.schemes import _harness as harness  # noqa: E402  # rewritten from here on


@pytest.fixture(scope="session", name="forkserver")
def _forkserver() -> None:
    """Checks look for processes that are left: this one is not theirs."""
    harness.context("forkserver")
    server.ensure_running()
