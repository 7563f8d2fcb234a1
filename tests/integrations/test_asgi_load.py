"""The benchmark of an ASGI server under load, small: nothing fails, nothing is mixed."""

from __future__ import annotations

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

import aiosync
from tests.bench import asgi_under_load
from tests.schemes import _harness as harness

pytestmark = pytest.mark.apart


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_requests_while_updates_arrive_back_to_back() -> None:
    options = ["--mib", "64", "--tensors", "16", "--rate", "100", "--seconds", "2"]
    args = asgi_under_load.parse([*options, "--loop", "asyncio", "--blame"])
    found = aiosync.run(asgi_under_load.measure(args, harness.context("forkserver")))
    for name in ("without", "with"):
        part = found[name]
        assert part["requests"] == 200
        assert part["examples"] == []  # of what failed and of what was mixed
        assert part["failed"] == 0
    assert found["with"]["mixed"] == 0
    assert found["with"]["versions"] >= 2
    held = found["with"]["server"]["callbacks_ms"]
    assert held["count"] > 100
    # Of all callbacks, aiosync's among them: processor time, as the tests share the machine.
    assert held["busy"]["p99"] < 10.0
