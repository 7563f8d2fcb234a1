"""The command itself: missing packages, wrong usage, and subcommands that do not import torch."""

from __future__ import annotations

import asyncio
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("gymnasium")

import aiosync
import aiosync.cli
from aiosync.bench import Results, machine
from aiosync.server import WeightServer
from tests.cli._serving import environment

HELP_SECONDS = 0.4


def _imported(*args: str, **variables: str) -> tuple[str, set[str]]:
    """Return the output of a command, and the names of all modules that it imported."""
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
    # The environment may ask for colours.
    plain = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)
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


def _cpu_seconds(run: Callable[[], object]) -> float:
    """Return the least CPU time of three runs, since a busy machine can hardly spoil all three."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(seconds)


@pytest.mark.slow
def test_help_is_quick() -> None:
    """On a slow machine the help takes at most twice as long as the libraries that show it."""
    shows = [sys.executable, "-X", "importtime", "-c", "import typer.rich_utils, rich.markdown"]
    needed = _cpu_seconds(lambda: subprocess.run(shows, check=True, capture_output=True))
    assert _cpu_seconds(lambda: _imported("--help")) < max(HELP_SECONDS, 2 * needed)


# -- missing packages and wrong usage ---------------------------------------------------------


@pytest.mark.parametrize("package", ["typer", "rich", "gymnasium"])
def test_a_missing_package_ends_in_advice(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [package, *sys.modules]:
        if name.partition(".")[0] == package:
            monkeypatch.setitem(sys.modules, name, None)
        elif name.startswith("aiosync.cli."):
            monkeypatch.delitem(sys.modules, name)
    assert aiosync.cli.main(["demo"]) == 1
    shown = capsys.readouterr().err
    assert "pip install 'aiosync[demo]'" in shown
    assert package in shown


@pytest.mark.parametrize("args", [[], ["--help"], ["doctor"], ["pull"]])
def test_without_typer_the_small_extra_is_enough(
    args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("aiosync.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    assert aiosync.cli.main(args) == 1
    assert "pip install 'aiosync[cli]'" in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_full_disk_under_stdout_is_status_1(as_json: bool, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(Results(machine(), "quick", 3.0).to_json())
    args = ["bench", "--from", str(path), "--json", "-"] if as_json else ["--version"]
    with open("/dev/full", "w", encoding="ascii") as full:
        done = subprocess.run(
            [sys.executable, "-m", "aiosync", *args],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60.0,
            check=False,
            # Python's own buffer has to hold the text.
            env=environment(PYTHONUNBUFFERED=""),
        )
    assert (done.returncode, "No space left on device" in done.stderr) == (1, True), done.stderr
    assert "Exception ignored" not in done.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert aiosync.cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"aiosync {aiosync.__version__}\n"


PULL = ["pull", "tcp://127.0.0.1:1", "copy.pt"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["dance"], "dance"),
        (["demo", "--transport", "pigeon"], "pigeon"),
        (["demo", "--workers", "0"], "--workers"),
        (["demo", "--json", "/no/such/folder/x.json"], "/no/such/folder"),
        (["bench", "--profile", "slow"], "there is no slow; there is: quick, full"),
        (["bench", "--transport", "pigeon"], "there is no pigeon; there is: shm, pipe, tcp"),
        (["bench", "--workload", "9x9"], "there is no 9x9; there is: 4x2, 1MB"),
        (["bench", "--workers", "0"], "--workers"),
        (
            ["bench", "--workers", "3"],
            "select nothing in the profile quick, which contains: shm",
        ),
        (["bench", "--json", "/no/such/folder/x.json"], "/no/such/folder"),
        (["bench", "--from", "/no/such/file"], "cannot be read"),
        (["bench", "--from", __file__], "holds no results"),
        (["bench", "--from", __file__, "--transport", "shm"], "--from"),
        (["serve"], "--listen"),
        (["serve", "--listen", "tcp://127.0.0.1:0", "--max-connections", "0"], "--max-connections"),
        (["push", "x.pt"], "URL"),
        (["push", "x.pt", "tcp://127.0.0.1:1", "--token", "no option is a secret"], "--token"),
        ([*PULL, "--min-version", "-1"], "--min-version"),
        ([*PULL, "--min-version", str(2**63)], "--min-version"),
        ([*PULL, "--timeout", "0"], "--timeout"),
        (["status"], "URL"),
    ],
)
def test_wrong_usage_is_refused_before_anything_starts(
    args: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert aiosync.cli.main(args) == 2
    shown = capsys.readouterr()
    # Some terminals and CI get styles.
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.err)
    assert text in plain
    assert "no option is a secret" not in plain
    assert "Traceback" not in plain
    assert shown.out == ""
