"""The first bytes on a pipe: which process is at this end, and what it speaks.

Schemes and transports of this generation may meet on one pipe, and each says at once what it is.
What comes next depends on both. Must not import torch or the blocking classes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from dataclasses import dataclass
from typing import Literal, TypeAlias

from aiosync.errors import PeerClosed, RemoteProtocolError, TransportBroken
from aiosync.wire import (
    MAGIC,
    FrameDecoder,
    FrameStart,
    Message,
    Setup,
    encode_frame,
    iter_events,
)

__all__ = ["GREETING", "Greeting", "Speaks", "ask_who_writes", "greet", "hear", "understand"]

GREETING = "process"
"""What greetings are called among the messages that set something up."""

Speaks: TypeAlias = Literal["scheme", "worker", "pipe", "memory"]
"""A sender's scheme, or a worker's, which begin with a handshake; or an ``MPTransport`` or
``SharedMemTransport``."""

_NAMES: dict[bytes, Speaks] = {
    b"scheme": "scheme",
    b"worker": "worker",
    b"pipe  ": "pipe",
    b"memory": "memory",
}
_MAX_PID = 2**31 - 1  # what the kernel can be asked about
_REST_SECONDS = 5.0  # that the rest of a greeting may take: all of it is written at once
_UCRED = struct.Struct("3i")  # process, user, group


@dataclass(frozen=True, slots=True)
class Greeting:
    """What the other end said first.

    Attributes:
        pid: Its process, as it says.
        speaks: What it is.
        sure: Its process, as the kernel says; 0 when that says nothing.
    """

    pid: int
    speaks: Speaks
    sure: int = 0


def _encode(speaks: Speaks) -> bytes:
    value = next(value for value, name in _NAMES.items() if name == speaks)
    return encode_frame(Setup(GREETING, f"{os.getpid():010d}", value))


_NBYTES = len(_encode("scheme"))  # all are of this size


def greet(sock: socket.socket, speaks: Speaks) -> None:
    """Say what this end is. Call it once, before anything else is written.

    Never waits. Where the other end is gone nothing is said: what it wrote before is to be read.
    """
    with contextlib.suppress(OSError):
        sock.send(_encode(speaks), socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0))


def understand(message: Message) -> Greeting | None:
    """The greeting that a message is, or ``None`` for anything else."""
    if not isinstance(message, Setup) or message.kind != GREETING:
        return None
    speaks, digits = _NAMES.get(message.value), message.key
    if speaks is None or len(digits) != 10 or not (digits.isdecimal() and digits.isascii()):
        raise RemoteProtocolError("the other end of the pipe sent an unknown greeting")
    pid = int(digits)
    if pid > _MAX_PID:
        raise RemoteProtocolError(f"the other end of the pipe says that it is process {pid}")
    return Greeting(pid, speaks)


def ask_who_writes(sock: socket.socket) -> bool:
    """Have the kernel say which process writes, for :attr:`Greeting.sure`, from now on.

    Call it before anything that the other end may answer. Returns whether the kernel can.
    """
    if not hasattr(socket, "SO_PASSCRED") or sock.family != socket.AF_UNIX:
        return False
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return True


async def hear(sock: socket.socket) -> Greeting:
    """Wait for the greeting, and read it and nothing more.

    The first byte may take as long as it likes, the others five seconds.

    Cancellation: safe until the first byte is there; what was read of a part is lost.

    Raises:
        PeerClosed: The other end was closed first.
        TransportBroken: Only a part of it came.
        RemoteProtocolError: It wrote something else.
    """
    loop = asyncio.get_running_loop()
    passes = ask_who_writes(sock)
    heard = asyncio.Event()
    loop.add_reader(sock, heard.set)
    data, sure = b"", 0
    try:
        # A process may die in the middle while another has a copy of its end.
        async with asyncio.timeout(None) as limit:
            while len(data) < _NBYTES:
                await heard.wait()
                heard.clear()
                more, pid = _read(sock, _NBYTES - len(data))
                data, sure = data + more, sure or pid
                if not data.startswith(MAGIC[: len(data)]):
                    break  # and never wait for more of it
                if data and limit.when() is None:
                    limit.reschedule(loop.time() + _REST_SECONDS)
    except TimeoutError as exc:
        raise TransportBroken(
            "the other end of the pipe stopped in the middle of its greeting"
        ) from exc
    finally:
        if sock.fileno() >= 0:  # otherwise close() was quicker
            loop.remove_reader(sock)
            if passes:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
    for event in iter_events(FrameDecoder(), data, lambda _: ()):
        found = understand(event.message) if isinstance(event, FrameStart) else None
        if found is not None:
            return Greeting(found.pid, found.speaks, sure)
    raise RemoteProtocolError("the pipe carries something other than weights")


def _read(sock: socket.socket, nbytes: int) -> tuple[bytes, int]:
    """Some bytes, if there are any, and the process that wrote them."""
    try:
        data, ancillary, _, _ = sock.recvmsg(
            nbytes, socket.CMSG_SPACE(_UCRED.size), socket.MSG_DONTWAIT
        )
    except BlockingIOError:
        return b"", 0
    except OSError as exc:
        raise PeerClosed("its end of the pipe was closed") from exc
    if not data:
        raise PeerClosed("its end of the pipe was closed")
    pid = 0
    for level, kind, found in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, getattr(socket, "SCM_CREDENTIALS", None)):
            pid = _UCRED.unpack_from(found)[0]
    return data, max(0, pid)
