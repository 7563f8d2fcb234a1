"""Every transport against every check of the published suite, on every loop.

Without ``--heavy`` each combination of both runs on one of the two loops, but every transport and
every check run on both.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from aiosync.errors import ConfigError, PeerClosed, RecvTimeout
from aiosync.testing import (
    CONFORMANCE_CHECKS,
    Check,
    ConformanceError,
    Hooks,
    TransportFactory,
    check_transport,
)
from aiosync.testing.sim import simulate
from aiosync.transports.address import Address, bind
from aiosync.transports.base import Transport
from aiosync.transports.credentials import Credentials
from aiosync.transports.distributed import DistributedTransport
from aiosync.transports.framed_link import MPTransport
from aiosync.transports.shared_memory import SharedMemTransport
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Capabilities
from aiosync.wire import Fetch, Update
from tests._certificates import certificates
from tests.support.waiting import until

Pair = tuple[Transport, Transport]


def cut_stream(transport: MPTransport | SharedMemTransport | TCPTransport) -> None:
    """End the byte stream below a transport without telling the transport."""
    with socket.socket(fileno=os.dup(transport.channel.io.fd)) as sock:
        sock.shutdown(socket.SHUT_RDWR)


# -- ends of byte streams ---------------------------------------------------------------------


def duplex_ends() -> tuple[Connection, Connection]:
    return Pipe(duplex=True)


def tcp_ends() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        left = socket.create_connection(listening.getsockname())
        right, _ = listening.accept()
    for sock in (left, right):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return left, right


# -- links ------------------------------------------------------------------------------------


@asynccontextmanager
async def pair(build, make_ends, sender=None, receiver=None) -> AsyncIterator[Pair]:
    left, right = make_ends()
    async with build(left, limits=sender) as one, build(right, limits=receiver) as two:
        yield one, two


@asynccontextmanager
async def tls_pair(url: str, sender=None, receiver=None) -> AsyncIterator[Pair]:
    files, loop = certificates(), asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(prefix="aiosync-tests-") as folder:
        listening, address = bind(Address.parse(url.format(folder)))
        with listening:
            dialling = Credentials(tls=files.dialling)
            dialled = asyncio.create_task(
                TCPTransport.connect(address, credentials=dialling, limits=receiver)
            )
            sock, _ = await loop.sock_accept(listening)
        credentials = Credentials(tls=files.listening)
        async with (
            await TCPTransport.accept(sock, credentials=credentials, limits=sender) as one,
            await dialled as two,
        ):
            yield one, two


@asynccontextmanager
async def gloo_pair(sender=None, receiver=None) -> AsyncIterator[Pair]:
    """A link whose payloads above 128 KiB go over the group, others in the control stream."""
    left, right = tcp_ends()
    async with (
        TCPTransport(left, limits=sender) as one,
        TCPTransport(right, limits=receiver) as two,
        DistributedTransport(one, rank=0) as a,
        DistributedTransport(two, rank=1) as b,
    ):
        yield a, b

    def meets_nobody() -> bool:
        return not any(each.name.startswith("aiosync-gloo") for each in threading.enumerate())

    # abort() may leave a thread that still meets the peer, for three seconds at most.
    await until(meets_nobody, 5)


@dataclass(frozen=True)
class Subject:
    """A transport under test."""

    name: str
    factory: TransportFactory
    hooks: Hooks
    capabilities: Capabilities


def subject(name: str, transport, links) -> Subject:
    """Return a transport with the factory of its links, which may have limits."""
    return Subject(name, links, Hooks(cut=cut_stream, limited=links), transport.capabilities)


def over(name: str, transport, make_ends) -> Subject:
    """Return a transport whose links go over ends of byte streams."""
    return subject(name, transport, partial(pair, transport, make_ends))


SUBJECTS = [
    replace(over("pipe", MPTransport, socket.socketpair), factory=MPTransport.pair),
    over("mp-duplex", MPTransport, duplex_ends),
    replace(over("shm", SharedMemTransport, socket.socketpair), factory=SharedMemTransport.pair),
    over("tcp", TCPTransport, tcp_ends),
    over("unix", TCPTransport, socket.socketpair),
    subject("tcp-tls", TCPTransport, partial(tls_pair, "tcp://127.0.0.1:0")),
    subject("unix-tls", TCPTransport, partial(tls_pair, "unix://{}/socket")),
    subject("distributed", DistributedTransport, gloo_pair),
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


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_more_buffers_than_one_write_takes(subject: Subject) -> None:
    """``send_nowait()`` takes a small payload, or refuses it; the link goes on."""
    pieces = [b"%04d" % number for number in range(2000)]
    update = Update(1, 1, bytes(16))
    async with subject.factory() as (sender, receiver):
        if sender.send_nowait(update, pieces):
            received = await receiver.recv(timeout=5)
        else:
            sending = sender.send(update, pieces, timeout=5)
            _, received = await asyncio.gather(sending, receiver.recv(timeout=5))
        assert b"".join(received.payload) == b"".join(pieces)


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_messages_before_the_end_count_although_a_send_finds_the_link_closed(
    subject: Subject,
) -> None:
    """They have arrived, and wait for ``recv()``."""
    async with subject.factory() as (sender, receiver):
        await sender.send(Fetch(1))
        await sender.send(Update(1, 2, bytes(16)), [b"payload"])
        await sender.send(Fetch(3))
        await asyncio.sleep(0.1)
        await sender.aclose()
        with pytest.raises(PeerClosed):
            async with asyncio.timeout(5):
                while True:
                    await receiver.send(Fetch(9))
                    await asyncio.sleep(0.01)
        assert (await receiver.recv(timeout=5)).message == Fetch(1)
        received = await receiver.recv(timeout=5)
        assert b"".join(received.payload) == b"payload"
        assert (await receiver.recv(timeout=5)).message == Fetch(3)
        with pytest.raises(PeerClosed):
            await receiver.recv(timeout=5)


# -- the suite itself: it must fail for a wrong transport ------------------------------------------


class LosesOnCancel(MPTransport):
    """Transport that takes a message before its checkpoint, where a cancellation loses it."""

    async def recv(self, *, into=None, timeout=None):
        received = await super().recv(into=into, timeout=timeout)
        await asyncio.sleep(0)
        return received


class LosesAtDeadline(MPTransport):
    """Transport that loses a message that arrives at the deadline of a recv()."""

    async def recv(self, *, into=None, timeout=None):
        if timeout is None:
            return await super().recv(into=into)
        receiving = asyncio.ensure_future(super().recv(into=into))
        try:
            await asyncio.wait({receiving}, timeout=max(timeout, 0.01))
            if receiving.done():
                return receiving.result()
            await asyncio.sleep(0.002)
            raise RecvTimeout("late")
        finally:
            receiving.cancel()
            await asyncio.wait({receiving})


class NeverYields(MPTransport):
    """Transport whose send() has no checkpoint if the message need not wait."""

    async def send(self, message, payload=(), *, timeout=None):
        if not self.send_nowait(message, payload):
            await super().send(message, payload, timeout=timeout)


class SendsTheFirstBuffer(MPTransport):
    """Transport that sends only the first buffer of a payload."""

    async def send(self, message, payload=(), *, timeout=None):
        await super().send(message, payload[:1], timeout=timeout)


class NeverBlocks(MPTransport):
    """Transport that loses a message that would have to wait."""

    async def send(self, message, payload=(), *, timeout=None):
        await asyncio.sleep(0)
        self.send_nowait(message, payload)


class ShowsPayloads(MPTransport):
    """Transport whose repr() shows the payload that it sends."""

    _sent: object = None

    async def send(self, message, payload=(), *, timeout=None):
        self._sent = payload[0][:9]
        await super().send(message, payload, timeout=timeout)

    def __repr__(self):
        return f"<ShowsPayloads {self._sent}>"


WRONG = {
    "repr": ShowsPayloads,
    "cancel_recv_loses_nothing": LosesOnCancel,
    "recv_timeout_loses_nothing": LosesAtDeadline,
    "checkpoints": NeverYields,
    "payloads": SendsTheFirstBuffer,
    "backpressure": NeverBlocks,
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.asyncio
async def test_a_wrong_transport_fails(name: str) -> None:
    check = next(check for check in CONFORMANCE_CHECKS if check.name == name)
    with pytest.raises(ConformanceError) as caught:
        await check.run(WRONG[name].pair, patience=0.05)
    assert check.description in "".join(caught.value.__notes__)


@pytest.mark.parametrize("name", ["limits_of_sender", "cut_mid_message"])
@pytest.mark.asyncio
async def test_a_check_without_its_hooks_fails_no_transport(name: str) -> None:
    check = next(check for check in CONFORMANCE_CHECKS if check.name == name)
    with pytest.raises(ConfigError, match=f"the check {name} needs the hook"):
        await check.run(MPTransport.pair)


@pytest.mark.asyncio
async def test_check_transport_reports_what_it_ran_and_names_every_failure() -> None:
    names = ("payloads", "payload_stays", "lent_buffers", "cut_mid_message")
    some = [check for check in CONFORMANCE_CHECKS if check.name in names]
    assert len(some) == 4
    declared = Capabilities(name="x", exceptions=dict.fromkeys(names[::2], "only one"))
    report = await check_transport(SendsTheFirstBuffer.pair, capabilities=declared, checks=some)
    assert report.passed == ("payload_stays",)
    assert report.skipped == {
        "payloads": "declared exception: only one",
        "lent_buffers": "declared exception: only one",
        "cut_mid_message": "needs the hook cut",
    }
    nothing = Capabilities(name="x", exceptions={"*": "a single end"})
    report = await check_transport(SendsTheFirstBuffer.pair, capabilities=nothing, checks=some)
    assert report.skipped == dict.fromkeys(names, "declared exception: a single end")
    with pytest.raises(ConformanceError, match="2 of 3") as caught:
        await check_transport(SendsTheFirstBuffer.pair, checks=some)
    assert "payloads" in str(caught.value)
    assert "lent_buffers" in str(caught.value)


def test_more_patience_gives_the_whole_check_more_time() -> None:
    async def body(_: object) -> None:
        await asyncio.sleep(100)

    slow = Check("slow", "It takes long.", frozenset(), body)
    simulate(lambda _: slow.run(MPTransport.pair, leaks=(), patience=20.0), seed=1)


def test_check_names_are_unique_and_described() -> None:
    names = [check.name for check in CONFORMANCE_CHECKS]
    assert len(set(names)) == len(names)
    assert all(check.description.endswith(".") for check in CONFORMANCE_CHECKS)
