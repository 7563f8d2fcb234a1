"""``aiosync serve`` and the other commands as processes, for tests.

Most of them are forks of a process that has imported torch, which takes seconds. A test asks for a
fresh interpreter if the start or the end of the interpreter counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import aiosync.cli
from tests.schemes import _harness as harness
from tests.schemes._harness import PATIENCE
from tests.support.waiting import wait_until
from tests.tensors._models import bits

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

SECRET = "correct horse battery staple"


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "aiosync", *args]


def environment(**changes: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if key != "AIOSYNC_TOKEN"}
    return {**clean, **changes}


def run(
    *args: str, timeout: float = PATIENCE, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command as a process of its own, until it ends."""
    return subprocess.run(
        command(*args),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=environment(**variables),
    )


def _main(
    files: tuple[str, str], variables: dict[str, str], program: list[str], args: tuple[str, ...]
) -> None:
    for number, path in enumerate((os.devnull, *files)):
        fd = os.open(path, os.O_RDWR | os.O_APPEND)
        os.dup2(fd, number)
        os.close(fd)
    if program:
        os.execve(program[0], [*program, *args], variables)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", 1, closefd=False)
    os.environ.clear()
    os.environ.update(variables)
    sys.exit(aiosync.cli.main(args))


class Command:
    """A command in a fork, or a program of its own; it writes to files of a folder."""

    def __init__(self, folder: Path, *args: str, program: list[str] | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.out, self.log = folder / "stdout", folder / "stderr"
        for path in (self.out, self.log):
            path.touch()
        token = {"AIOSYNC_TOKEN": SECRET} if "--with-token" in args else {}
        args = tuple(arg for arg in args if arg != "--with-token")
        self._process = harness.context("forkserver").Process(
            target=_main,
            args=((str(self.out), str(self.log)), environment(**token), program or [], args),
        )
        self._process.start()

    @property
    def url(self) -> str:
        """The first line that a server prints, which is its address."""
        wait_until(lambda: "\n" in self.out.read_text() or self.poll() is not None)
        assert self.poll() is None, self.log.read_text()
        return self.out.read_text().partition("\n")[0]

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self) -> int:
        self._process.join(PATIENCE)
        status = self.poll()
        assert status is not None, "it does not end"
        return status

    def ended(self) -> tuple[int, str, str]:
        """Wait for the end; return the exit status and all that the command wrote."""
        return self.wait(), self.out.read_text(), self.log.read_text()

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal to a server; return its exit status and its output after its address."""
        # After its first line, a server has its signal handlers.
        assert self.url
        self.send_signal(number)
        status, out, _ = self.ended()
        return status, out.partition("\n")[2]

    def close(self) -> None:
        """Kill the command if it has not ended, and release its process."""
        # The process was closed before.
        with contextlib.suppress(ValueError):
            self._process.kill()
            self._process.join()
            self._process.close()


class Terminal:
    """A pseudo terminal on which commands run; the end of ``with`` kills them."""

    def __init__(self, columns: int) -> None:
        self.raw = bytearray()
        self._mine, self._theirs = pty.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._cleanup = contextlib.ExitStack()
        for fd in (self._mine, self._theirs):
            self._cleanup.callback(os.close, fd)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def start(self, *args: str, quiet: bool = False, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command on the terminal; discard its stdout if ``quiet``."""
        unset = {"COLUMNS", "NO_COLOR"}
        given = {name: each for name, each in environment().items() if name not in unset}
        process = subprocess.Popen(
            command(*args),
            stdin=self._theirs,
            stdout=subprocess.DEVNULL if quiet else self._theirs,
            stderr=self._theirs,
            env={**given, "TERM": "xterm", **variables},
        )
        self._cleanup.callback(process.wait)
        self._cleanup.callback(process.kill)
        return process

    @property
    def shown(self) -> str:
        """The text that was written to the terminal, without moves and colours."""
        return re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", self.raw).decode(errors="replace")

    def read_until(self, condition: Callable[[str], bool]) -> None:
        """Read from the terminal until ``condition`` holds for the text that it shows."""
        give_up = time.monotonic() + PATIENCE
        while not condition(self.shown):
            assert time.monotonic() < give_up, self.raw
            if select.select([self._mine], [], [], 0.1)[0]:
                self.raw += os.read(self._mine, 65536)


def serving(
    folder: Path, *args: str, program: list[str] | None = None, fresh: bool = False
) -> contextlib.closing[Command]:
    """Start a server in a fork, unless it is a program of its own or wants a fresh interpreter."""
    program = command() if fresh else program
    return contextlib.closing(Command(folder, "serve", *args, program=program))


def assert_same(found: dict[str, Any], saved: dict[str, Any]) -> None:
    """Check that the tensors and values of a file equal the saved ones, bit for bit and in type."""
    assert set(found) == set(saved)
    for name, value in saved.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert found[name].shape == value.shape
            assert bits(found[name]) == bits(value)
        else:
            assert found[name] == value
            assert type(found[name]) is type(value)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """Return exit status and stderr of a command that fails, which is one line without a secret."""
    capsys.readouterr()
    status = aiosync.cli.main(args)
    shown = capsys.readouterr()
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.err)
    assert shown.out == ""
    assert text.count("\n") == 1, text
    assert text.count("See reference/") <= 1
    assert "Traceback" not in text
    assert SECRET not in text
    return status, text


def written(path: Path, text: str, mode: int = 0o600) -> str:
    """Write a token file with the given permissions; return its path."""
    path.touch(mode)
    path.write_text(text)
    return str(path)


def write_weights(folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """Write a weights file; return its path and its tensors.

    The tensors have tied names, an integer, and an odd number of bytes.
    """
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
