"""Shell blocks of the pages: each runs, in the order of its page, in a folder like a checkout."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.pages import PAGES, ROOT, name_of, shell_blocks, typed_lines
from tests.support.waiting import free_port, wait_until

ELSEWHERE = {
    r"docker |kubectl |sudo |journalctl": "test_examples.py starts what is in these files",
    r"bin/pytest$": ".ci/run",
    r"bin/python (train|act)\.py": "test_pages.py runs the two programs together",
    r"jupyter notebook": "test_notebook.py",
    r"vllm\.entrypoints": "tests/integrations/vllm",
    r"aiosync bench": "tests/cli; it takes minutes, as the next: see test_pages.py",
    r"python -m tests\.bench": "tests/bench itself, by hand",
}
"""Commands that this module does not run, each with the test of what it starts."""

GOES_ON = re.compile(r"aiosync serve |aiosync top .*--html |two_machines\.py train")
SESSIONS = {
    page: lines
    for page in PAGES
    if (
        lines := [
            line
            for block in shell_blocks(page)
            for line in typed_lines(block)
            if not any(re.search(each, line) for each in ELSEWHERE)
        ]
    )
}
PREPARED = "token", "pull-token"
installed = set[str]()
"""Install commands that have passed once; pages repeat them."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a writable folder with the files of the checkout, and with weights."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for each in ("aiosync", "docs", "examples", "tests", "pyproject.toml", "README.md", "LICENSE"):
        (folder / each).symlink_to(ROOT / each)
    weights = torch.nn.Linear(4, 2).state_dict()
    torch.save(weights, folder / "policy.pt")
    pytest.importorskip("safetensors.torch").save_file(weights, folder / "policy.safetensors")
    return folder


def _here(lines: list[str], folder: Path) -> list[str]:
    """Return the commands with ports, hosts and folders of this test, and with this environment."""
    text = "\0".join(lines).replace(":7000", f":{free_port()}")
    text = re.sub(r":(8080|9464)\b", ":0", text)
    text = re.sub(r"\b(trainer|server)\.example\b|\b0\.0\.0\.0\b", "127.0.0.1", text)
    text = text.replace("/var/lib/weights", str(folder / "store"))
    text = re.sub(r"python3 -m venv \.venv && |\.venv/bin/", "", text)
    text = re.sub(r"\bpip install", "python -m pip install --dry-run --quiet", text)
    return text.split("\0")


@contextmanager
def _going_on(line: str, folder: Path, env: dict[str, str]) -> Iterator[None]:
    """Run a command beside the block: until Ctrl-C, or a trainer until it ends by itself."""
    output = folder / "output"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    with process:
        try:
            if "train" in line:
                yield
            else:
                wait_until(lambda: bool(output.read_bytes()) or process.poll() is not None)
                yield
                assert process.poll() is None, output.read_text()
                process.send_signal(signal.SIGINT)
            assert process.wait(60) in {0, 128 + signal.SIGINT, -signal.SIGINT}, output.read_text()
        finally:
            process.kill()


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", SESSIONS, ids=name_of)
def test_the_shell_blocks_of_a_page_run(page: Path, checkout: Path) -> None:
    pytest.importorskip("typer")
    # `aiosync top` comes last, when there is a server.
    lines = sorted(SESSIONS[page], key=lambda line: "aiosync top" in line)
    for name in PREPARED:
        if not re.search(rf"> {name}\b|aiosync token {name}\b", "\n".join(lines)):
            (checkout / name).touch(0o600)
            (checkout / name).write_text("a token of this test, long enough\n")
    env = {key: value for key, value in os.environ.items() if key != "AIOSYNC_TOKEN"}
    path = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    env |= {"PATH": path, "HOME": str(checkout), "PYTHONPATH": str(ROOT), "SHELL": "/bin/bash"}
    with ExitStack() as server:
        for line in _here(lines, checkout):
            if GOES_ON.search(line):
                if "aiosync top" not in line:
                    server.close()
                server.enter_context(_going_on(line, checkout, env))
                continue
            if line in installed:
                continue
            done = subprocess.run(
                # The second command keeps Bash as the parent: shell completion asks for the shell.
                ["bash", "-ec", f"{line}\n:"],
                cwd=checkout,
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            if "--dry-run" in line:
                installed.add(line)


def test_what_is_tested_elsewhere_is_there() -> None:
    typed = [line for page in PAGES for block in shell_blocks(page) for line in typed_lines(block)]
    assert [each for each in ELSEWHERE if not any(re.search(each, line) for line in typed)] == []
