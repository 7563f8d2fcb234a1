"""``aiosync serve`` as a process, and the other commands, for tests.

Most of them are forks of a process that has imported torch, which takes seconds; where the start
or the end of the interpreter counts, tests ask for a fresh one.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from multiprocessing import reduction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import aiosync.cli
from aiosync.cli.files import load_weights
from tests.schemes import _harness as harness
from tests.schemes._harness import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

SECRET = "correct horse battery staple"


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "aiosync", *args]


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


class _Fd:
    """A file descriptor that travels to the process that a process starts."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.fd)

    def __setstate__(self, copy: Any) -> None:
        self.fd = copy.detach()


def _main(fds: list[_Fd], variables: dict[str, str], args: tuple[str, ...]) -> None:
    for number, fd in enumerate(fds):
        os.dup2(fd.fd, number)
        os.close(fd.fd)
    sys.stdout = open(1, "w", 1 if os.isatty(1) else -1, closefd=False)
    sys.stderr = open(2, "w", 1, closefd=False)
    os.environ.clear()
    os.environ.update(variables)
    sys.exit(aiosync.cli.main(args))


class Forked:
    """A command in a fork; what tests need of ``subprocess.Popen``."""

    def __init__(
        self, *args: str, env: dict[str, str], stdout: int, stderr: int, stdin: int | None = None
    ) -> None:
        """Give descriptors, or ``subprocess.PIPE`` for stdout or stderr."""
        theirs, pipes = [], []
        with contextlib.ExitStack() as stack:
            if stdin is None:
                stdin = stack.enter_context(open(os.devnull)).fileno()
            for fd in (stdout, stderr):
                mine = None
                if fd == subprocess.PIPE:
                    end, fd = os.pipe()
                    mine = open(end)
                    stack.callback(os.close, fd)
                pipes.append(mine)
                theirs.append(_Fd(fd))
            self.stdout, self.stderr = pipes
            self._process = harness.context("forkserver").Process(
                target=_main, args=([_Fd(stdin), *theirs], env, args)
            )
            self._process.start()
        self._returncode: int | None = None

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def poll(self) -> int | None:
        if self._returncode is None:
            self._returncode = self._process.exitcode
        return self._returncode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float = PATIENCE) -> int:
        if self._returncode is None:
            self._process.join(timeout)
        status = self.poll()
        assert status is not None, "it does not end"
        return status

    def communicate(self, timeout: float = PATIENCE) -> tuple[str, str]:
        """Exit status and what fits into pipes; both are closed then."""
        self.wait(timeout)
        shown = []
        for pipe in (self.stdout, self.stderr):
            shown.append("" if pipe is None else pipe.read())
            if pipe is not None:
                pipe.close()
        return shown[0], shown[1]

    def kill(self) -> None:
        """End it, if it has not ended, and let go of everything."""
        if self._returncode is None:
            self._process.kill()
            self.wait()
        with contextlib.suppress(ValueError):  # closed already
            self._process.close()
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()

    close = kill


def wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


class Served:
    """``aiosync serve`` as a process."""

    def __init__(
        self, folder: Path, *args: str, program: list[str] | None = None, fresh: bool = False
    ) -> None:
        self.log = folder / "stderr"
        self._url = ""
        variables = environment()
        if "--with-token" in args:
            variables = environment(AIOSYNC_TOKEN=SECRET)
            args = tuple(arg for arg in args if arg != "--with-token")
        self.process: Forked | subprocess.Popen[str]
        with self.log.open("ab") as stderr:
            if program is None and not fresh:
                self.process = Forked(
                    *("serve", *args),
                    env=variables,
                    stdout=subprocess.PIPE,
                    stderr=stderr.fileno(),
                )
                return
            self.process = subprocess.Popen(
                [*(program or command()), "serve", *args],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=variables,
            )

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
def serving(
    folder: Path, *args: str, program: list[str] | None = None, fresh: bool = False
) -> Iterator[Served]:
    """A server in a fork, unless it is a program of its own or wants a fresh interpreter."""
    folder.mkdir(exist_ok=True)
    server = Served(folder, *args, program=program, fresh=fresh)
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
