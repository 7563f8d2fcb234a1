"""What the machine needs for the same bytes: the contenders whose names begin with ``limit/``.

Each does the least that could move a model's bytes in its way; nothing is named, checked or
applied.
"""

from __future__ import annotations

import functools
import itertools
import socket
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from threading import Thread
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from aiosync._run import usable_cores
from aiosync.bench._work import PATIENCE, WORKLOADS, Case, Crew, Desk, Handle, fill

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Limit", "Memcpy", "Stream", "wake_up"]

_Bytes = NDArray[np.uint8]

_SMALL = 2**16  # bytes up to which a memoryview's copy costs less than a call of numpy
_WINDOW = 2**20
_IOV_MAX = 1024
_UNIX_BUFFER = 4 * 2**20


class Limit:
    """The trainer's half of a limit, for subclasses, which have ``send()``.

    Attributes:
        model: What is sent.
        sources: The memory of its parameters.
        crew: Worker processes, where some take part.
    """

    model: nn.Module

    def __init__(self) -> None:
        self.sources: list[_Bytes] = []
        self.crew: Crew = Crew()

    def open(self, case: Case) -> Sequence[Handle]:
        """Build the model and start what takes part."""
        self.model = WORKLOADS[case.workload].build()
        fill(self.model, 1.0)
        self.sources = [
            parameter.detach().view(-1).numpy().view(np.uint8)
            for parameter in self.model.parameters()
        ]
        return self.start(case)

    def start(self, case: Case) -> Sequence[Handle]:
        """Start workers, if there are any, and return their handles."""
        raise NotImplementedError

    def close(self) -> None:
        """End the workers and let go of the memory."""
        self.crew.stop()
        self.sources = []


class Memcpy(Limit):
    """One copy into memory that has been written before; however many workers would look at it.

    By as many threads as there are cores to use.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pool = ThreadPoolExecutor(usable_cores())
        self._small: list[tuple[memoryview, memoryview]] = []
        self._shares: list[list[tuple[_Bytes, _Bytes]]] = [[] for _ in range(usable_cores())]

    def start(self, case: Case) -> Sequence[Handle]:
        """Divide the copies of large tensors among the threads."""
        for source in self.sources:
            target = _written(len(source))
            if len(source) <= _SMALL:
                self._small.append((_view(target), _view(source)))
            else:
                bounds = np.linspace(0, len(source), len(self._shares) + 1, dtype=int)
                for share, (low, high) in zip(
                    self._shares, itertools.pairwise(bounds), strict=True
                ):
                    share.append((target[low:high], source[low:high]))
        return []

    def send(self) -> None:
        """Copy."""
        first, *others = self._shares
        running = [self._pool.submit(_copy, share) for share in others if share]
        for target, source in self._small:
            target[:] = source
        _copy(first)
        for share in running:
            share.result()

    def close(self) -> None:
        """Let go of the memory."""
        super().close()
        self._small.clear()
        for share in self._shares:
            share.clear()


def _copy(pairs: list[tuple[_Bytes, _Bytes]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)  # without the GIL


def _written(nbytes: int) -> _Bytes:
    return np.ones(nbytes, np.uint8)  # zeros alone would be memory that is not there yet


def _view(memory: _Bytes) -> memoryview:
    return memoryview(memory)  # type: ignore[arg-type]  # Buffer is only known from 3.12 on


class Stream(Limit):
    """All tensors to one worker after the other through blocking sockets; then a byte from each.

    Args:
        family: ``"tcp"`` or ``"unix"``.
        wake_up: Send a byte instead of the tensors.
    """

    def __init__(self, family: str = "unix", *, wake_up: bool = False) -> None:
        super().__init__()
        self._family = family
        self._wake_up = wake_up
        self._sockets: list[socket.socket] = []
        self._pieces: list[tuple[list[memoryview], int]] = []

    def start(self, case: Case) -> Sequence[Handle]:
        """Connect to as many processes as there are workers."""
        views = [memoryview(b"x")] if self._wake_up else [_view(each) for each in self.sources]
        cut = [views[at : at + _IOV_MAX] for at in range(0, len(views), _IOV_MAX)]
        self._pieces = [(piece, sum(map(len, piece))) for piece in cut]
        handles: Sequence[Handle] = []
        for _ in range(case.workers):
            ours, theirs = _pair(self._family)
            self._sockets.append(ours)
            handles = self.crew.start(_receive, 1, theirs, sum(map(len, views)))
            theirs.close()
        return handles

    def send(self) -> None:
        """Return when every worker has said that it has everything."""
        for sock in self._sockets:
            for views, nbytes in self._pieces:
                if sock.sendmsg(views) != nbytes:
                    raise RuntimeError(f"a worker took nothing for {PATIENCE:g} s")
        for sock in self._sockets:
            if not sock.recv(1):
                raise RuntimeError("a worker ended before it answered")

    def close(self) -> None:
        """End the workers and close the sockets."""
        super().close()
        for sock in self._sockets:
            sock.close()
        self._sockets, self._pieces = [], []


wake_up: Callable[..., Stream] = functools.partial(Stream, wake_up=True)
"""One byte to each worker, which sleeps, and one back."""


def _pair(family: str) -> tuple[socket.socket, socket.socket]:
    if family == "unix":
        ours, theirs = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname(), PATIENCE)
            theirs, _ = server.accept()
    for sock in (ours, theirs):
        sock.settimeout(None)  # Python's own timeouts would cost a poll() at every call
        if family == "unix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UNIX_BUFFER)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(PATIENCE), 0))
    return ours, theirs


def _receive(idx: int, pipe: Connection, sock: socket.socket, nbytes: int) -> None:
    def take() -> None:
        block = _view(_written(nbytes))
        got = 0
        while count := sock.recv_into(block[got : got + _WINDOW]):  # until the trainer closes it
            got += count
            if got == nbytes:
                got = 0
                sock.send(b"x")

    Thread(target=take, daemon=True).start()
    Desk().serve(pipe)
