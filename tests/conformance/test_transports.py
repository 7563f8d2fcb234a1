"""Every transport against every check of the published suite, on every loop.

Without ``--heavy`` each of them runs on one of the loops, but every transport and every check meet
both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from aiosync.testing import (
    CONFORMANCE_CHECKS,
    Check,
    ConformanceError,
    Hooks,
    LeakError,
    TransportFactory,
    check_transport,
)
from aiosync.transports._tls import TlsIo
from aiosync.transports.base import Transport
from aiosync.transports.memory import MemoryTransport
from aiosync.transports.pipe import MPTransport
from aiosync.transports.shared_memory import SharedMemTransport
from aiosync.transports.tcp import TCPTransport
from aiosync.types import AckStatus, Capabilities, Limits
from tests._certificates import certificates

Pair = tuple[Transport, Transport]


class FdPeer:
    """The raw far end of a byte stream."""

    def __init__(self, *ends: Connection | socket.socket) -> None:
        self._ends = ends
        self._fd = ends[-1].fileno()
        os.set_blocking(self._fd, False)

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:
                await asyncio.sleep(0)

    def close(self) -> None:
        for end in self._ends:
            end.close()


# -- memory -----------------------------------------------------------------------------------


@asynccontextmanager
async def memory_pair(sender: Limits, receiver: Limits) -> AsyncIterator[Pair]:
    left, right = MemoryTransport.connected_pair(limits=sender)
    right._limits = receiver  # a real memory link has one configuration; here both are under test
    async with left, right:
        yield left, right


# -- pipes ------------------------------------------------------------------------------------


def duplex_ends() -> tuple[list[Connection], list[Connection]]:
    left, right = Pipe(duplex=True)
    return [left], [right]


def socket_ends() -> tuple[list[socket.socket], list[socket.socket]]:
    left, right = socket.socketpair()
    return [left], [right]


def oneway_ends() -> tuple[list[Connection], list[Connection]]:
    left_reader, right_writer = Pipe(duplex=False)
    right_reader, left_writer = Pipe(duplex=False)
    return [left_reader, left_writer], [right_reader, right_writer]


def pipe_transport(ends: list, limits: Limits | None) -> MPTransport:
    if len(ends) == 1:
        return MPTransport(ends[0], limits=limits)
    reader, writer = ends
    return MPTransport(reader=reader, writer=writer, limits=limits)


@asynccontextmanager
async def pipe_pair(make_ends, sender=None, receiver=None) -> AsyncIterator[Pair]:
    left, right = make_ends()
    async with pipe_transport(left, sender) as one, pipe_transport(right, receiver) as two:
        yield one, two


@asynccontextmanager
async def raw_pipe(make_ends) -> AsyncIterator[tuple[FdPeer, Transport]]:
    left, right = make_ends()
    with contextlib.closing(FdPeer(*left)) as peer:
        async with pipe_transport(right, None) as transport:
            yield peer, transport


def cut_stream(transport: MPTransport | SharedMemTransport | TCPTransport) -> None:
    """End the byte stream below without a word to the transport on it."""
    with socket.socket(fileno=os.dup(transport.channel.io.write_fd)) as sock:
        sock.shutdown(socket.SHUT_RDWR)


# -- shared memory ----------------------------------------------------------------------------


@asynccontextmanager
async def shm_pair(sender: Limits, receiver: Limits) -> AsyncIterator[Pair]:
    left, right = socket.socketpair()
    async with (
        SharedMemTransport(left, limits=sender) as one,
        SharedMemTransport(right, limits=receiver) as two,
    ):
        yield one, two


@asynccontextmanager
async def raw_shm() -> AsyncIterator[tuple[FdPeer, Transport]]:
    left, right = socket.socketpair()
    with contextlib.closing(FdPeer(left)) as peer:
        async with SharedMemTransport(right) as transport:
            yield peer, transport


# -- streams: TCP and Unix sockets, plain and with TLS ------------------------------------------


def tcp_ends() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        left = socket.create_connection(listening.getsockname())
        right, _ = listening.accept()
    for sock in (left, right):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return left, right


@asynccontextmanager
async def stream_pair(make_ends, sender=None, receiver=None) -> AsyncIterator[Pair]:
    left, right = make_ends()
    async with (
        TCPTransport(left, limits=sender) as one,
        TCPTransport(right, limits=receiver) as two,
    ):
        yield one, two


@asynccontextmanager
async def tls_pair(make_ends, sender=None, receiver=None) -> AsyncIterator[Pair]:
    files = certificates()
    left, right = make_ends()
    one = TlsIo(left, files.listening.listening_context(), server_side=True)
    two = TlsIo(right, files.dialling.dialling_context(), server_side=False, hostname="localhost")
    await asyncio.gather(one.handshake(), two.handshake())
    async with TCPTransport(one, limits=sender) as a, TCPTransport(two, limits=receiver) as b:
        yield a, b


@asynccontextmanager
async def raw_stream(make_ends) -> AsyncIterator[tuple[FdPeer, Transport]]:
    left, right = make_ends()
    with contextlib.closing(FdPeer(left)) as peer:
        async with TCPTransport(right) as transport:
            yield peer, transport


def stream_subject(name: str, make_ends, pair=stream_pair) -> Subject:
    raw = partial(raw_stream, make_ends) if pair is stream_pair else None
    return Subject(
        name,
        partial(pair, make_ends),
        Hooks(cut=cut_stream, limited=partial(pair, make_ends), raw=raw),
        TCPTransport.capabilities,
    )


@dataclass(frozen=True)
class Subject:
    """A transport under test."""

    name: str
    factory: TransportFactory
    hooks: Hooks
    capabilities: Capabilities


def pipe_subject(name: str, make_ends, cut) -> Subject:
    return Subject(
        name,
        partial(pipe_pair, make_ends),
        Hooks(cut=cut, limited=partial(pipe_pair, make_ends), raw=partial(raw_pipe, make_ends)),
        MPTransport.capabilities,
    )


SUBJECTS = [
    Subject(
        "memory",
        MemoryTransport.pair,
        Hooks(cut=MemoryTransport.abort, limited=memory_pair),
        replace(
            MemoryTransport.capabilities,
            exceptions={"header_limit_of_receiver": "headers are checked where they are sent"},
        ),
    ),
    Subject(
        "pipe",
        MPTransport.pair,
        Hooks(
            cut=cut_stream,
            limited=partial(pipe_pair, socket_ends),
            raw=partial(raw_pipe, socket_ends),
        ),
        MPTransport.capabilities,
    ),
    pipe_subject("mp-duplex", duplex_ends, cut_stream),
    pipe_subject("mp-oneway", oneway_ends, MPTransport.abort),  # a pipe(2) cannot be shut down
    Subject(
        "shm",
        SharedMemTransport.pair,
        Hooks(cut=cut_stream, limited=shm_pair, raw=raw_shm, raw_payload_nbytes=4096),
        SharedMemTransport.capabilities,
    ),
    stream_subject("tcp", tcp_ends),
    stream_subject("unix", socket.socketpair),
    stream_subject("tcp-tls", tcp_ends, tls_pair),
    stream_subject("unix-tls", socket.socketpair, tls_pair),
]


@pytest.mark.parametrize("check", CONFORMANCE_CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_conformance(subject: Subject, check: Check) -> None:
    reason = check.skip_reason(subject.hooks, subject.capabilities)
    if reason is not None:
        pytest.skip(reason)
    await check.run(subject.factory, hooks=subject.hooks)


# -- the suite itself: it must fail for a transport that is wrong --------------------------------


class LosesOnCancel(MemoryTransport):
    """Takes the message before its checkpoint, so that a cancellation there loses it."""

    async def recv(self, *, into=None, timeout=None):
        received = await super().recv(into=into, timeout=timeout)
        await asyncio.sleep(0)
        return received


class NeverYields(MemoryTransport):
    """Returns at once when it can."""

    async def send(self, message, payload=(), *, timeout=None):
        if not self.send_nowait(message, payload):
            await super().send(message, payload, timeout=timeout)


class SendsTheFirstBuffer(MemoryTransport):
    """Forgets all buffers but one."""

    async def send(self, message, payload=(), *, timeout=None):
        await super().send(message, payload[:1], timeout=timeout)


class NeverBlocks(MemoryTransport):
    """Queues without bound."""

    def _has_room(self, nbytes: int) -> bool:
        return True


class ReversesBatches(MemoryTransport):
    """Writes the last message of a batch first."""

    def send_batch_nowait(self, messages) -> bool:
        return all(self.send_nowait(message) for message in reversed(messages))


class AlwaysApplied(MemoryTransport):
    """Acknowledges what it was not asked to."""

    def ack_nowait(self, epoch, version, status) -> bool:
        return super().ack_nowait(epoch, version, AckStatus.APPLIED)


class HandsOutTwice(MemoryTransport):
    """Gives to recv() what the handler has seen."""

    handler = None

    def subscribe(self, handler) -> bool:
        self.handler = handler
        return True

    async def recv(self, *, into=None, timeout=None):
        received = await super().recv(into=into, timeout=timeout)
        if self.handler is not None:
            self.handler(received)
        return received


class ClosesWithoutAWord(MemoryTransport):
    """aclose() wakes nobody."""

    async def aclose(self) -> None:
        self._closed = True


class ShowsPayload(MemoryTransport):
    """Puts what it holds into its repr."""

    def __repr__(self) -> str:
        return f"<{[bytes(view) for parcel in self._inbox for view in parcel.views]}>"


class LeaksATask(MemoryTransport):
    """Leaves a background task behind."""

    async def recv(self, *, into=None, timeout=None):
        tasks.append(asyncio.ensure_future(asyncio.Event().wait()))
        return await super().recv(into=into, timeout=timeout)


tasks: list[asyncio.Task] = []

WRONG = {
    "cancel_recv_loses_nothing": LosesOnCancel,
    "checkpoints": NeverYields,
    "several_buffers": SendsTheFirstBuffer,
    "backpressure": NeverBlocks,
    "batch_nowait": ReversesBatches,
    "ack_nowait": AlwaysApplied,
    "subscribe": HandsOutTwice,
    "close_wakes_recv": ClosesWithoutAWord,
    "repr": ShowsPayload,
    "leaves_nothing": LeaksATask,
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.asyncio
async def test_a_wrong_transport_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check = next(check for check in CONFORMANCE_CHECKS if check.name == name)
    monkeypatch.setattr("aiosync.testing._tools.PATIENCE", 0.05)
    try:
        with pytest.raises((ConformanceError, LeakError)) as caught:
            await check.run(WRONG[name].pair)
    finally:
        while tasks:
            tasks[-1].cancel()
            await asyncio.wait({tasks.pop()})
    assert check.description in "".join(caught.value.__notes__)


@pytest.mark.asyncio
async def test_check_transport_reports_what_it_ran() -> None:
    some = [check for check in CONFORMANCE_CHECKS if check.name in ("empty_payload", "raw_cut")]
    report = await check_transport(MemoryTransport.pair, checks=some)
    assert report.passed == ("empty_payload",)
    assert report.skipped == {"raw_cut": "needs the hook raw"}


@pytest.mark.asyncio
async def test_check_transport_honours_declared_exceptions() -> None:
    declared = Capabilities(name="x", exceptions={"several_buffers": "only one"})
    some = [check for check in CONFORMANCE_CHECKS if check.name == "several_buffers"]
    report = await check_transport(SendsTheFirstBuffer.pair, capabilities=declared, checks=some)
    assert report.skipped == {"several_buffers": "declared exception: only one"}


@pytest.mark.asyncio
async def test_check_transport_names_every_failure() -> None:
    some = [
        check
        for check in CONFORMANCE_CHECKS
        if check.name in ("several_buffers", "one_byte_payload", "lent_buffers")
    ]
    with pytest.raises(ConformanceError, match="2 of 3") as caught:
        await check_transport(SendsTheFirstBuffer.pair, checks=some)
    assert "several_buffers" in str(caught.value)
    assert "lent_buffers" in str(caught.value)


def test_check_names_are_unique_and_described() -> None:
    names = [check.name for check in CONFORMANCE_CHECKS]
    assert len(set(names)) == len(names)
    assert all(check.description.endswith(".") for check in CONFORMANCE_CHECKS)
