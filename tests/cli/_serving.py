"""``aiosync serve`` as a process, and the other commands, for tests.

Most of them are forks of a process that has imported torch, which takes seconds; where the start
or the end of the interpreter counts, tests ask for a fresh one.
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
    """A command as a process of its own."""
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
        """The first line that a server prints."""
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
        """Its exit status, and all that it wrote."""
        return self.wait(), self.out.read_text(), self.log.read_text()

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal to a server; exit status, and what it printed after its address."""
        assert self.url  # the handlers are there
        self.send_signal(number)
        status, out, _ = self.ended()
        return status, out.partition("\n")[2]

    def close(self) -> None:
        """End it, if it has not ended, and let go of everything."""
        with contextlib.suppress(ValueError):  # that was done already
            self._process.kill()
            self._process.join()
            self._process.close()


class Terminal:
    """A pseudo terminal on which commands run; ``with`` ends them."""

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
        """A command on it, with nothing of its stdout if ``quiet``."""
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
        """What was written to it, without moves and colours."""
        return re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", self.raw).decode(errors="replace")

    def read_until(self, condition: Callable[[str], bool]) -> None:
        """Read until what is shown is as it should be."""
        give_up = time.monotonic() + PATIENCE
        while not condition(self.shown):
            assert time.monotonic() < give_up, self.raw
            if select.select([self._mine], [], [], 0.1)[0]:
                self.raw += os.read(self._mine, 65536)


def serving(
    folder: Path, *args: str, program: list[str] | None = None, fresh: bool = False
) -> contextlib.closing[Command]:
    """A server in a fork, unless it is a program of its own or wants a fresh interpreter."""
    program = command() if fresh else program
    return contextlib.closing(Command(folder, "serve", *args, program=program))


def assert_same(found: dict[str, Any], saved: dict[str, Any]) -> None:
    """What was found in a file is what was saved, bit for bit and of the same types."""
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
    """Exit status and stderr of a command that fails, which is one line without a secret."""
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
    """A file of a token, and who may read it."""
    path.touch(mode)
    path.write_text(text)
    return str(path)


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
