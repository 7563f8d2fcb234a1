"""Every example runs by itself, shows what its first line says, and is quick."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str) -> str:
    pytest.importorskip("gymnasium")
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_every_example_is_tested_and_says_what_it_shows() -> None:
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert names == ["async_trainer.py", "bare_schemes.py", "classic_trainer.py"]
    for name in names:
        first_line = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()[0]
        assert first_line.startswith('"""Shows ')


@pytest.mark.slow
@pytest.mark.parametrize("name", ["async_trainer.py", "classic_trainer.py"])
def test_trainer(name: str) -> None:
    out = run(name)
    versions = re.search(r"^(\d+) versions", out)
    assert versions is not None
    assert int(versions[1]) > 10
    rise = re.search(r"mean return (\d+) -> (\d+)", out)
    assert rise is not None
    assert int(rise[2]) > int(rise[1])


@pytest.mark.slow
def test_bare_schemes() -> None:
    out = run("bare_schemes.py")  # three processes write to it: lines may be mixed
    assert re.findall(r"trainer: (\w+) version (\d+) applied by \[0, 1\]", out) == [
        ("policy", "2"),
        ("policy", "3"),
        ("value", "2"),
    ]
    number = r"-?\d+\.\d{4}"
    pattern = rf"worker (\d): (policy version 3 sum {number}, value version 2 sum {number})"
    matches = re.findall(pattern, out)
    assert sorted(worker for worker, _ in matches) == ["0", "1"]
    assert len({text for _, text in matches}) == 1  # the same weights in both
