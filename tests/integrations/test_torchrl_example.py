"""PPO with a collector of TorchRL: short runs of each scheme, and one that learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("torchrl")

PROGRAM = Path(__file__).parents[1] / "bench" / "torchrl_ppo.py"
UPDATE = re.compile(r"^update (\d+): version (\d+) played, mean return (\d+)$", re.MULTILINE)

pytestmark = [pytest.mark.slow, pytest.mark.apart]


def updates(*args: str, seconds: float = 55.0) -> tuple[list[tuple[int, ...]], str]:
    """Return the numbers of each update that the program reported, and its whole output."""
    command = [sys.executable, PROGRAM, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^an update of the workers took \d+\.\d\d ms$", done.stdout, re.MULTILINE)
    return [tuple(map(int, found)) for found in UPDATE.findall(done.stdout)], done.stdout


@pytest.mark.parametrize(
    "scheme",
    [
        "shm",
        pytest.param("process", marks=pytest.mark.heavy),
        pytest.param("tcp", marks=pytest.mark.heavy),
    ],
)
def test_every_batch_is_played_with_the_version_before(scheme: str) -> None:
    seen, _ = updates("--updates", "2", "--fork", "--scheme", scheme)
    assert [(update, version) for update, version, _ in seen] == [(1, 0), (2, 1)]


@pytest.mark.heavy
@pytest.mark.timeout(200)
def test_it_solves_cartpole() -> None:
    seen, out = updates(seconds=180.0)
    assert "\nsolved\n" in out
    assert seen[-1][2] >= 400
    assert seen[0][2] < 100
