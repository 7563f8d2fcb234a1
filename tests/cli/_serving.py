"""``aiosync serve`` as a process, and the other commands, for tests."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import aiosync.cli
from aiosync.cli._files import load_weights
from tests.schemes._harness import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

SECRET = "correct horse battery staple"


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "aiosync.cli", *args]


def environment(**changes: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if key != "AIOSYNC_TOKEN"}
    return {**clean, **changes}


def run(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command as a process of its own."""
    return subprocess.run(
        command(*args),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env=environment(**variables),
    )


def wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


class Served:
    """``aiosync serve`` as a process."""

    def __init__(self, folder: Path, *args: str, program: list[str] | None = None) -> None:
        self.log = folder / "stderr"
        variables = environment()
        if "--with-token" in args:
            variables = environment(AIOSYNC_TOKEN=SECRET)
            args = tuple(arg for arg in args if arg != "--with-token")
        with self.log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [*(program or command()), "serve", *args],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=variables,
            )
        self._url = ""

    @property
    def url(self) -> str:
        """The first line that it prints."""
        if not self._url:
            assert self.process.stdout is not None
            ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
            self._url = self.process.stdout.readline().strip() if ready else ""
            assert self._url, self.log.read_text()
        return self._url

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; exit status, and what it printed after its address."""
        assert self.url  # the handlers are there
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def serving(folder: Path, *args: str, program: list[str] | None = None) -> Iterator[Served]:
    folder.mkdir(exist_ok=True)
    server = Served(folder, *args, program=program)
    try:
        yield server
    finally:
        server.kill()


def assert_same(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    found = load_weights(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """Exit status and stderr of a command that fails, which is one line without a secret."""
    capsys.readouterr()
    status = aiosync.cli.main(args)
    shown = capsys.readouterr()
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.err)
    assert shown.out == ""
    assert text.count("\n") == 1, text
    assert "Traceback" not in text
    assert SECRET not in text
    return status, text


def write_weights(folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """A file, and what is in it: tied names, an integer, an odd number of bytes."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(5, 7, generator=generator)
    tensors = {
        "body.weight": torch.randn(300, 200, generator=generator),
        "body.steps": torch.tensor(11),
        "body.mask": torch.tensor([True, False, True]),
        "one": shared,
        "two": shared,
    }
    path = folder / "weights.pt"
    torch.save(tensors, path)
    return str(path), tensors
