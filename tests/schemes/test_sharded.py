"""Models that are sharded over several ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_trainers_of_two_ranks_send_whole_tensors() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.schemes._fsdp_trainer"],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "the worker has the values of the whole model" in done.stdout
    assert "the root was not sharded after a forward" in done.stdout
    assert "rank 0 has seen every form" in done.stdout
    assert "rank 1 has seen every form" in done.stdout
    assert "alone: SyncTimeout: not all 2 ranks" in done.stdout
    assert "alone: TransportBroken: the ranks of the mesh could not meet" in done.stdout
