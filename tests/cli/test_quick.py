"""What answers without torch, which takes seconds to import: version, help, completion, status."""

from __future__ import annotations

import asyncio
import re
import resource
import subprocess
import sys

import pytest

import aiosync
from aiosync.server import WeightServer
from tests.cli._serving import environment

HELP_SECONDS = 0.4


def _imported(*args: str, **variables: str) -> tuple[str, set[str]]:
    """What a command prints, and the names of everything that it imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "aiosync", *args],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
        env=environment(**variables),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.rpartition("|") for line in done.stderr.splitlines()]
    plain = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)  # where the environment asks for colours
    return plain, {name.strip() for before, _, name in lines if before}


@pytest.mark.parametrize(
    ("args", "variables", "shown"),
    [
        (["--version"], {}, "aiosync "),
        (["--help"], {}, "push"),
        (["push", "--help"], {}, "--model-id"),
        (["bench", "--help"], {}, "--workload"),
        (["demo", "--help"], {}, "--transport"),
        (
            [],
            {
                "_AIOSYNC_COMPLETE": "complete_bash",
                "COMP_WORDS": "aiosync st",
                "COMP_CWORD": "1",
                "_TYPER_COMPLETE_ARGS": "aiosync st",
            },
            "status",
        ),
    ],
    ids=["version", "help", "help-of-push", "help-of-bench", "help-of-demo", "completion"],
)
def test_torch_is_not_imported(args: list[str], variables: dict[str, str], shown: str) -> None:
    out, names = _imported(*args, **variables)
    assert shown in out
    assert "aiosync.cli" in names
    assert {"torch", "numpy", "tensordict"} & names == set()


@pytest.mark.parametrize(
    ("args", "shown"),
    [(("status", "--json"), '"models": []'), (("top", "--interval", "0.1"), "No models yet.")],
    ids=["status", "top"],
)
def test_who_asks_does_not_import_torch(args: tuple[str, ...], shown: str) -> None:
    async def ask() -> tuple[str, set[str]]:
        async with WeightServer("tcp://127.0.0.1:0") as server:
            return await asyncio.to_thread(_imported, *args, server.url)

    out, names = aiosync.run(ask())
    assert shown in out
    assert {"torch", "tensordict"} & names == set()


@pytest.mark.slow
def test_help_is_quick() -> None:
    """CPU time, the least of three: a busy machine can spoil one measurement, and hardly three."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        _imported("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(seconds) < HELP_SECONDS
