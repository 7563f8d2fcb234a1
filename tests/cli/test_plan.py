"""``aiosync plan``: its arithmetic, and what it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("typer")

from tests.cli._serving import environment


def plan(*args: str) -> tuple[int, str]:
    """Run the command; return its status and its output."""
    done = subprocess.run(
        [sys.executable, "-m", "aiosync", "plan", *args],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
        env=environment(),
    )
    return done.returncode, done.stdout + done.stderr


def rows(text: str) -> dict[str, list[str]]:
    """Return the columns of each way."""
    found = [line.split("  ") for line in text.splitlines() if "  " in line]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in found]
    return {line[0]: line[1:] for line in cells if len(line) == 4}


def test_one_worker_far_away_takes_deltas() -> None:
    status, text = plan("--size", "16GB", "--bandwidth", "1Gbit", "--density", "1%")
    assert status == 0
    ways = rows(text)
    assert ways["whole, to each worker"][:2] == ["16.0 GB", "128"]
    # 1.4 bytes for each of 80 million weights, which takes longer to encode than to send.
    assert ways['delta="auto", to each worker'][:2] == ["112.0 MB", "11.2"]
    assert 'The soonest: delta="auto"' in text


def test_many_workers_take_whole_updates_from_a_server() -> None:
    status, text = plan(
        *("--size", "16GB", "--bandwidth", "1Gbit", "--density", "60%", "--workers", "64")
    )
    assert status == 0
    assert rows(text)["whole, to each worker"][0] == "1.0 TB"
    assert "The soonest: whole, by `aiosync serve` near them." in text


def test_float32_has_no_delta() -> None:
    status, text = plan("--size", "512MiB", "--bandwidth", "10Gbit", "--dtype", "fp32")
    assert status == 0
    assert rows(text)["whole, to each worker"][1] == "0.429"
    assert "delta=" not in text and "Nearly every weight in fp32 changes" in text


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--size", "16", "--bandwidth", "1Gbit"], "no such quantity"),
        (["--size", "0GB", "--bandwidth", "1Gbit"], "no such quantity"),
        (["--size", "1GB", "--bandwidth", "1GB"], "no such quantity"),
        (["--size", "1GB", "--bandwidth", "1Gbit", "--density", "101%"], "is no share"),
        (["--size", "1GB", "--bandwidth", "1Gbit", "--dtype", "int8"], "write bf16, fp16 or fp32"),
        (["--size", "1GB"], "Missing option"),
    ],
)
def test_refusals(args: list[str], says: str) -> None:
    status, text = plan(*args)
    assert status == 2
    assert says in " ".join(text.replace("│", " ").split())
