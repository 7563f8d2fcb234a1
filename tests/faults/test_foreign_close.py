"""Workers in which foreign code closes descriptors, so that other files may get their numbers."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
import aiosync.sync
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.sync import _tools as tools

BOTH = pytest.mark.parametrize(
    "make", [aiosync.SharedMemWeightSyncScheme, aiosync.sync.SharedMemWeightSyncScheme]
)


class Slow(nn.Module):
    """A model whose forward reads its weights again and again, and returns all values it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))
        self.end: Callable[[], bool] = lambda: True

    def forward(self) -> list[float]:
        seen = set[float]()
        while True:
            seen.update(self.weight.detach()[::100].tolist())
            if self.end():
                return sorted(seen)


class Folder:
    """Messages between two processes as files, without a descriptor that stays open."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def say(self, name: str, text: str = "") -> None:
        part = self.path / f"{name}.part"
        part.write_text(text)
        part.rename(self.path / name)

    def said(self, name: str) -> bool:
        return (self.path / name).exists()

    def wait(self, name: str) -> str:
        tools.until(lambda: self.said(name))
        return (self.path / name).read_text()


class Ends:
    """Blocking calls of a scheme of either API."""

    def __init__(self, scheme: Any) -> None:
        self.scheme = scheme
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = getattr(self.scheme, name)(*args, **kwargs)
            if not inspect.isawaitable(result):
                return result

            async def wait() -> Any:
                return await result

            return self._runner.run(wait())

        return call

    def close(self) -> None:
        blocking = isinstance(self.scheme, aiosync.sync.WeightSyncScheme)
        (self.shutdown if blocking else self.aclose)()
        self._runner.close()


def _compute(scheme: Any, folder: Folder, idx: int, close: Callable[[Folder], None]) -> None:
    torch.set_num_threads(1)
    ends, model = Ends(scheme), Slow()
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
    ends.connect(timeout=harness.PATIENCE)
    # A worker promises to take versions only if it reads, so it reads until all have joined.
    while not folder.said("joined"):
        ends.receive(timeout=0.01)
        model()
    close(folder)
    if idx == 0:
        _answer(ends, folder, model)
    else:
        while not folder.said("over"):
            ends.receive(timeout=0.01)
            model()
        ends.close()


def _nothing(_: Folder) -> None:
    pass


def _daemonize(_: Folder) -> None:
    """Close all descriptors, as a library does that makes a daemon of this process."""
    os.closerange(3, 256)


def _locked() -> list[int]:
    """Descriptors whose file descriptions have locks, as ``/proc`` shows them."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "OFDLCK" in Path(f"/proc/self/fdinfo/{name}").read_text():
                found.append(int(name))
    return found


def _close_locks(_: Folder) -> None:
    for fd in _locked():
        os.close(fd)


def _replace_locks(folder: Folder) -> None:
    """Close the locked descriptors, and give their numbers to other files."""
    assert _locked()
    for fd in _locked():
        other = os.open(folder.path / f"file-{fd}", os.O_RDWR | os.O_CREAT)
        os.dup2(other, fd)
        os.close(other)


def _answer(ends: Ends, folder: Folder, model: Slow) -> None:
    if folder.said("daemonize"):
        model.end = lambda: folder.said("sent") or _close(folder)
        folder.say("seen", str(model()))
        os._exit(0)
    files = {int(path.name[5:]): path.stat().st_ino for path in folder.path.glob("file-*")}
    folder.say("closed")
    folder.wait("sent")
    told = []
    for _ in range(3):
        try:
            told.append(str(model()))
        except aiosync.ApplyError as exc:
            told.append(f"ApplyError {exc}")
    with contextlib.suppress(aiosync.AiosyncError):
        ends.close()
    # The scheme must not close the other files, which have the numbers of its descriptors.
    assert {fd: os.fstat(fd).st_ino for fd in files} == files
    folder.say("seen", "\n".join(told))


def _close(folder: Folder) -> bool:
    """Close all descriptors once, inside a forward; return False so that the forward goes on."""
    if not folder.said("closed"):
        _daemonize(folder)
        folder.say("closed")
    return False


@contextlib.contextmanager
def _crew(
    make: Any, folder: Folder, close: Callable[[Folder], None], **options: Any
) -> Iterator[tuple[Ends, Slow]]:
    scheme, source = make(timeout=harness.PATIENCE, **options), Slow()
    models.fill(source, 1.0)
    scheme.init_on_sender(model=source, num_workers=2)
    processes: list[BaseProcess] = []
    for idx, what in enumerate((close, _nothing)):
        args = (scheme, folder, idx, what)
        processes.append(harness.context("forkserver").Process(target=_compute, args=args))
        processes[-1].start()
    ends = Ends(scheme)
    try:
        ends.connect(timeout=harness.PATIENCE)
        for value in (0.0, 1.0):
            models.fill(source, value)
            ends.send()
        folder.say("joined")
        yield ends, source
        assert folder.wait("seen")
    finally:
        folder.say("over")
        for process in processes:
            process.join(harness.PATIENCE)
            harness.end(process)
        ends.close()


@BOTH
@pytest.mark.slow
def test_a_worker_whose_descriptors_are_all_closed_keeps_one_version(
    make: Any, tmp_path: Path
) -> None:
    folder = Folder(tmp_path)
    folder.say("daemonize")
    with _crew(make, folder, _nothing) as (sender, source):
        folder.wait("closed")
        for value in range(2, 202):
            models.fill(source, float(value))
            try:
                assert sender.send().acked == {1}
            except aiosync.PartialSyncError as exc:
                assert exc.acked == {1}
        folder.say("sent")
        assert folder.wait("seen") == "[1.0]"


@BOTH
@pytest.mark.slow
@pytest.mark.parametrize("close", [_close_locks, _replace_locks])
def test_a_slot_that_is_not_locked_is_not_taken(make: Any, close: Any, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with _crew(make, folder, close) as (sender, source):
        folder.wait("closed")
        for value in range(2, 12):
            models.fill(source, float(value))
            with contextlib.suppress(aiosync.PartialSyncError):
                sender.send()
        folder.say("sent")
        for told in folder.wait("seen").splitlines():
            assert told.startswith("ApplyError") and "closed" in told


def _lose_the_loop(scheme: Any, folder: Folder) -> None:
    model = Slow()
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=0)
    scheme.connect(timeout=harness.PATIENCE)
    model()
    folder.wait("joined")
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                os.close(int(name))
    told = []
    for call in (lambda: scheme.receive(timeout=30), model, model, scheme.receive):
        try:
            call()
        except aiosync.TransportClosed as exc:
            told.append(str(exc))
    scheme.shutdown()
    # After shutdown() the model belongs to no scheme, so a forward raises nothing.
    model()
    folder.say("seen", str(len(told)))


@pytest.mark.slow
@pytest.mark.parametrize("make", tools.SCHEMES)
def test_reads_raise_once_the_thread_of_the_loop_has_died(make: Any, tmp_path: Path) -> None:
    folder, scheme = Folder(tmp_path), make(timeout=harness.PATIENCE)
    scheme.init_on_sender(model=Slow(), num_workers=1)
    process = harness.context("forkserver").Process(target=_lose_the_loop, args=(scheme, folder))
    process.start()
    try:
        scheme.connect(timeout=harness.PATIENCE)
        folder.say("joined")
        assert folder.wait("seen") == "4"
    finally:
        process.join(harness.PATIENCE)
        harness.end(process)
        scheme.shutdown()
