"""Models that are sharded over several ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_trainers_of_two_ranks_send_whole_tensors() -> None:
    command = [sys.executable, "-m", "tests.schemes._fsdp_trainer"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for text in (
        "the worker has the values of the whole model",
        "the root was not sharded after a forward",
        "rank 0 has seen every form",
        "rank 1 has seen every form",
        "alone: SyncTimeout: not all 2 ranks",
        "alone: TransportBroken: the ranks of the mesh could not meet",
    ):
        assert text in done.stdout
