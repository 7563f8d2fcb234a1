"""Shared tools for tests of the facade: pairs in one process, and processes to interrupt."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import aiosync
import aiosync.sync
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

PATIENCE = 40.0
"""Seconds that anything may take on a busy machine before a test fails."""

ROOT = Path(__file__).parents[2]
NOISE = ("Traceback", "Task was destroyed", "never awaited", "Exception ignored", "Fatal")
"""Texts that must not be on stderr."""
SHM = aiosync.sync.SharedMemWeightSyncScheme
PIPE = aiosync.sync.MultiProcessWeightSyncScheme
SCHEMES = [PIPE, SHM]
filled, fill = models.linear, models.fill
until = wait_until


def value_of(model: torch.nn.Module) -> float:
    """Return the one value that every element of every parameter has."""
    values = {v for parameter in model.parameters() for v in parameter.detach().flatten().tolist()}
    assert len(values) == 1, values
    return values.pop()


def value_at(receiver: aiosync.sync.WeightSyncScheme) -> float:
    """Return the one value that a read of a receiver's model, such as a forward, finds."""
    with receiver.reading():
        return value_of(receiver.model)


class Spread(torch.nn.Module):
    """A model of flipped and of copied tensors, whose forward returns the versions that it saw."""

    def __init__(self, value: float) -> None:
        super().__init__()
        for number in range(100):
            self.register_parameter(f"p{number}", torch.nn.Parameter(torch.full((4,), value)))
            self.register_buffer(f"b{number}", torch.full((40, 40), value))

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.fill_(value)

    def forward(self) -> set[float]:
        # An update that arrives meanwhile is applied by this thread.
        time.sleep(5e-4)
        tensors = [tensor.detach() for tensor in (*self.parameters(), *self.buffers())]
        return {float(tensor.flatten()[-1]) for tensor in tensors}


def portal_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "aiosync-portal"]


def in_thread(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def threads(*functions: Callable[[], Any]) -> Iterator[list[threading.Thread]]:
    """Run functions in threads during a block; they have to end by themselves after it."""
    started = [in_thread(function) for function in functions]
    yield started
    for thread in started:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "it hangs"


def roles(
    make: Callable[..., Any],
    source: Any,
    target: Any,
    *,
    num_workers: int | None = 1,
    **options: Any,
) -> tuple[aiosync.sync.WeightSyncScheme, aiosync.sync.WeightSyncScheme]:
    """Return a sender and a receiver that are not connected yet."""
    sender = make(timeout=PATIENCE, **options)
    sender.init_on_sender(model_id="policy", model=source, num_workers=num_workers)
    # Some schemes know their address only after init_on_sender().
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model_id="policy", model=target, worker_idx=0)
    return sender, receiver


def join(sender: aiosync.sync.WeightSyncScheme, receiver: aiosync.sync.WeightSyncScheme) -> None:
    thread = in_thread(receiver.connect)
    sender.connect()
    thread.join(PATIENCE)
    assert receiver.synchronized_on_receiver


@contextlib.contextmanager
def pair(
    make: Callable[..., Any], source: Any, target: Any, **options: Any
) -> Iterator[tuple[aiosync.sync.WeightSyncScheme, aiosync.sync.WeightSyncScheme]]:
    """A connected sender and receiver in this process."""
    sender, receiver = roles(make, source, target, **options)
    with sender, receiver:
        join(sender, receiver)
        yield sender, receiver


def recv(conn: Connection) -> Any:
    """Return the next message of a worker process; fail if there is none in time."""
    assert conn.poll(PATIENCE), "the worker said nothing"
    return conn.recv()


# -- other processes --------------------------------------------------------------------------


def _main(conn: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        conn.send((True, function(*args)))
    except BaseException:  # noqa: BLE001 - the test shows it
        conn.send((False, traceback.format_exc()))


def in_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of an importable module in the main thread of a process of its own."""
    ctx = harness.context("forkserver")
    mine, theirs = ctx.Pipe()
    process = ctx.Process(target=_main, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        good, result = recv(mine)
        process.join(PATIENCE)
        assert process.exitcode == 0, f"exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
        process.close()
        mine.close()
    assert good, result
    return result


_FRESH = """
import json, os, sys, warnings
import torch  # takes seconds; nothing of aiosync, which scripts import for themselves
print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if not pid:
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
for fd, path in enumerate((os.devnull, job["stdout"], job["stderr"])):
    os.dup2(os.open(path, os.O_RDWR), fd)
if job["resource_warnings"]:
    warnings.simplefilter("default", ResourceWarning)
exec(job["text"])
"""


class Fresh:
    """An interpreter that has imported torch and runs each script in a fork of itself.

    A fork ends as an interpreter does, with its whole teardown. A worker of multiprocessing does
    not.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FRESH],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._ready = False

    def _line(self) -> str:
        stdout = self._process.stdout
        assert stdout is not None
        assert select.select([stdout], [], [], PATIENCE)[0], "it does not end"
        return stdout.readline().decode().strip()

    def script(
        self, text: str, *, resource_warnings: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a script to its end; return its exit status and its output."""
        if not self._ready:
            assert self._line() == "ready"
            self._ready = True
        with tempfile.TemporaryDirectory() as folder:
            files = {name: Path(folder) / name for name in ("stdout", "stderr")}
            job: dict[str, Any] = {"text": text, "resource_warnings": resource_warnings}
            for name, path in files.items():
                path.touch()
                job[name] = str(path)
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            pid = int(self._line())
            try:
                status = int(self._line())
            except BaseException:  # also pytest's time limit: the next script would get this status
                os.kill(pid, signal.SIGKILL)
                self._line()
                raise
            out, err = (path.read_text() for path in files.values())
        return subprocess.CompletedProcess([text], status, out, err)

    def close(self) -> None:
        with self._process:
            self._process.kill()


def is_asleep(thread: threading.Thread) -> bool:
    """Return True if a thread of this process sleeps in the kernel."""
    # A forked child's main thread does not know its own number.
    number = os.getpid() if thread is threading.main_thread() else thread.native_id
    stat = Path(f"/proc/self/task/{number}/stat").read_text()
    return stat.rpartition(") ")[2].startswith("S")


def interrupt_when_blocked() -> list[float]:
    """Send Ctrl-C to this process once its main thread has slept for a while.

    Returns:
        A list that gets the time of the signal.
    """
    sent: list[float] = []

    def interrupt() -> None:
        asleep = 0
        while asleep < 25:
            asleep = asleep + 1 if is_asleep(threading.main_thread()) else 0
            threading.Event().wait(0.002)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    in_thread(interrupt)
    return sent
