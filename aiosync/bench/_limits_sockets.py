"""The limit of a stream: blocking sockets that carry the bytes and nothing else.

Must not import aiosync's schemes, torchrl, ray, typer or rich.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Literal

import numpy as np

from aiosync.bench._contender import PATIENCE, Handle
from aiosync.bench._limits_base import Answers, Bytes, Limit, Stub, view_of
from aiosync.bench._results import Case

__all__ = ["RawSocket"]

_WINDOW = 2**20
_SMALL = 2**16  # smaller tensors go out many at a time
_IOV_MAX = 1024
_UNIX_BUFFER = 4 * 2**20

_Piece = memoryview | list[memoryview]


class RawSocket(Limit):
    """All tensors to one worker after the other, from one thread; then a byte from each."""

    def __init__(self, family: Literal["tcp", "unix"]) -> None:
        super().__init__()
        self._family: Literal["tcp", "unix"] = family
        self._sockets: list[socket.socket] = []
        self._pieces: list[_Piece] = []
        self._answers = Answers()

    def start(self, case: Case) -> Sequence[Handle]:
        """Connect to as many processes as there are workers."""
        self._pieces = _cut(self.sources)
        handles: Sequence[Handle] = []
        for _ in range(case.workers):
            ours, theirs = _pair(self._family)
            self._sockets.append(ours)
            self._answers.add(ours)
            handles = self.crew.start(_receive, 1, theirs, sum(map(len, self.sources)))
            theirs.close()
        return handles

    def send(self) -> None:
        """Return when every worker has said that it has everything."""
        for sock in self._sockets:
            for piece in self._pieces:
                if isinstance(piece, memoryview):
                    sock.sendall(piece)
                else:
                    _send_many(sock, piece)
        self._answers.wait()

    def close(self) -> None:
        """End the workers and close the sockets."""
        super().close()
        self._answers.close()  # these are the sockets
        self._sockets = []
        self._pieces = []


def _pair(family: Literal["tcp", "unix"]) -> tuple[socket.socket, socket.socket]:
    if family == "unix":
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(PATIENCE)
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
            sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(PATIENCE), 0))
    return ours, theirs


def _cut(sources: Sequence[Bytes]) -> list[_Piece]:
    """Slices of the large tensors, and lists of small ones, in order."""
    pieces: list[_Piece] = []
    many: list[memoryview] = []
    for source in sources:
        view = view_of(source)
        if len(view) <= _SMALL:
            if not many or len(many) == _IOV_MAX:
                many = []
                pieces.append(many)
            many.append(view)
        else:
            many = []
            pieces += [view[at : at + _WINDOW] for at in range(0, len(view), _WINDOW)]
    return pieces


def _send_many(sock: socket.socket, views: list[memoryview]) -> None:
    sent = sock.sendmsg(views)
    for view in views:  # most often all of it went at once
        if sent < len(view):
            sock.sendall(view[sent:])
        sent = max(0, sent - len(view))


def _receive(idx: int, pipe: Connection, sock: socket.socket, nbytes: int) -> None:
    stub = Stub()
    array = np.zeros(nbytes, np.uint8)
    array.fill(1)  # zeros alone would be memory that is not there yet
    block = view_of(array)
    poller = select.poll()
    poller.register(pipe.fileno(), select.POLLIN)
    poller.register(sock.fileno(), select.POLLIN)
    while True:  # without a deadline: it ends with the trainer, whose pipe then says so
        for fd, _ in poller.poll():
            if fd == pipe.fileno():
                if not stub.serve_one(pipe):
                    return
                continue
            got = 0
            while got < nbytes:
                count = sock.recv_into(block[got : got + _WINDOW])
                if not count:
                    return
                got += count
            sock.send(b"x")
