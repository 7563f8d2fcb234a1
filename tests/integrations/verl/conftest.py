"""One run of syncs through verl's manager, whose findings the tests look at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SECONDS = 540.0
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the findings of a run on a Ray cluster of this host."""
    if not find_spec("verl"):
        pytest.skip("needs verl in this environment: `pip install verl==0.9.1`")
    log = tmp_path_factory.mktemp("verl") / "log"
    # The paths of Ray's sockets must be short.
    with log.open("wb") as file, tempfile.TemporaryDirectory(prefix="verl-") as folder:
        run = subprocess.run(
            [sys.executable, "-m", "tests.integrations.verl._scenario"],
            cwd=ROOT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "RAY_raylet_start_wait_time_s": "300",
                "RAY_TMPDIR": folder,
                "RAY_USAGE_STATS_ENABLED": "0",
                # Workers would get no time on a busy machine.
                "RAY_worker_niceness": "0",
            },
            stdout=subprocess.PIPE,
            stderr=file,
            timeout=SECONDS,
            check=False,
        )
    lines = [line for line in run.stdout.decode().splitlines() if line.startswith("SEEN ")]
    assert run.returncode == 0 and lines, log.read_text()[-8000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("SEEN "))
    return found
