"""TLS under the frames: bytes that wait inside OpenSSL, and how streams end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import ssl
from collections.abc import AsyncIterator

import pytest

from aiosync.errors import ConfigError, PeerClosed, RemoteProtocolError, TransportBroken
from aiosync.transports._tls import TlsIo
from aiosync.transports.credentials import Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.wire import Fetch, Update
from tests._certificates import certificates

pytestmark = pytest.mark.asyncio

UPDATE = Update(1, 1, bytes(16))
PATIENCE = 20


def ends(small: bool = False) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        left = socket.create_connection(listening.getsockname())
        right, _ = listening.accept()
    for sock in (left, right):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if small:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**15)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
    return left, right


async def ios(small: bool = False, version: ssl.TLSVersion | None = None) -> tuple[TlsIo, TlsIo]:
    left, right = ends(small)
    files = certificates()
    contexts = files.listening.listening_context(), files.dialling.dialling_context()
    if version is not None:
        contexts[0].maximum_version = version
    one = TlsIo(left, contexts[0], server_side=True)
    two = TlsIo(right, contexts[1], server_side=False, hostname="localhost")
    await asyncio.gather(one.handshake(), two.handshake())
    return one, two


@contextlib.asynccontextmanager
async def pair(
    small: bool = False, version: ssl.TLSVersion | None = None
) -> AsyncIterator[tuple[TCPTransport, TCPTransport]]:
    one, two = await ios(small, version)
    async with asyncio.timeout(PATIENCE), TCPTransport(one) as left, TCPTransport(two) as right:
        yield left, right


@pytest.mark.slow
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("small", [False, True])
async def test_large_payloads_in_both_directions_at_once(
    version: ssl.TLSVersion, small: bool
) -> None:
    nbytes = 2**20 if small else 24 * 2**20
    data = [random.Random(seed).randbytes(nbytes) for seed in (1, 2)]
    async with pair(small, version) as (left, right):
        *_, at_right, at_left = await asyncio.gather(
            left.send(UPDATE, [data[0]]),
            right.send(UPDATE, [data[1]]),
            right.recv(into=lambda _, nbytes: [bytearray(nbytes)]),
            left.recv(into=lambda _, nbytes: [bytearray(nbytes)]),
        )
        assert bytes(at_right.payload[0]) == data[0]
        assert bytes(at_left.payload[0]) == data[1]


@pytest.mark.parametrize("sizes", [(1, 2, 3), (100,) * 50, (16_385, 70_000, 5), (300_000, 1)])
async def test_what_openssl_read_ahead_is_not_forgotten(sizes: tuple[int, ...]) -> None:
    """Several messages and lent buffers come out of one record; no event announces the rest."""
    async with pair() as (left, right):
        for turn in range(3):
            for size in sizes:
                piece = bytes([turn]) * size
                await left.send(UPDATE, [piece])
                await left.send(Fetch(size))
            for size in sizes:
                got = await right.recv(
                    into=lambda _, nbytes: [bytearray(nbytes // 2), bytearray(nbytes - nbytes // 2)]
                )
                assert b"".join(got.payload) == bytes([turn]) * size
                assert (await right.recv()).message == Fetch(size)


async def test_many_small_messages_in_one_record_come_with_no_further_event() -> None:
    async with pair() as (left, right):
        assert left.send_batch_nowait([Fetch(number) for number in range(500)])
        for number in range(500):
            assert (await right.recv()).message == Fetch(number)


async def test_close_is_said() -> None:
    one, two = await ios()
    one.close()
    one.close()
    buffer = memoryview(bytearray(10))
    while True:
        try:
            assert two.recv_into(buffer) == 0
            break
        except BlockingIOError:
            await asyncio.sleep(0.001)
    two.close()


async def test_a_close_between_two_messages() -> None:
    async with pair() as (left, right):
        await left.send(Fetch(1))
        await left.aclose()
        assert (await right.recv()).message == Fetch(1)
        with pytest.raises(PeerClosed):
            await right.recv()


@pytest.mark.parametrize("how", ["cut", "forged"])
async def test_truncation_in_mid_message(how: str) -> None:
    """Somebody on the way ends the stream, or changes it: never taken for a whole message."""
    near, far = ends()
    middle_near, middle_far = ends()
    files = certificates()
    one = TlsIo(near, files.listening.listening_context(), server_side=True)
    two = TlsIo(
        middle_far, files.dialling.dialling_context(), server_side=False, hostname="localhost"
    )
    for sock in (far, middle_near):
        sock.setblocking(False)
    loop = asyncio.get_running_loop()
    harm = asyncio.Event()

    async def relay(source: socket.socket, target: socket.socket, harmed: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(source, 50_000):
                if harmed and harm.is_set():
                    if how == "cut":
                        await loop.sock_sendall(target, data[: len(data) // 2])
                        target.shutdown(socket.SHUT_WR)
                        return
                    data = data[:100] + bytes([data[100] ^ 1]) + data[101:]
                await loop.sock_sendall(target, data)

    relays = [
        asyncio.ensure_future(relay(far, middle_near, True)),
        asyncio.ensure_future(relay(middle_near, far, False)),
    ]
    with far, middle_near:
        await asyncio.gather(one.handshake(), two.handshake())
        async with TCPTransport(one) as left, TCPTransport(two) as right:
            await left.send(Fetch(1))
            assert (await right.recv()).message == Fetch(1)
            harm.set()
            sending = asyncio.ensure_future(left.send(UPDATE, [bytes(400_000)]))
            async with asyncio.timeout(PATIENCE):
                with pytest.raises(TransportBroken):
                    await right.recv(into=lambda _, nbytes: [bytearray(nbytes)])
            sending.cancel()
            await asyncio.wait({sending})
        for each in relays:
            each.cancel()
        await asyncio.wait(relays)


async def test_an_abort_wakes_both_ends() -> None:
    async with pair() as (left, right):
        waiting = asyncio.ensure_future(right.recv())
        await asyncio.sleep(0)
        left.abort()
        with pytest.raises(PeerClosed):
            await waiting


@pytest.mark.slow
async def test_a_slow_reader_holds_the_sender_up() -> None:
    async with pair() as (left, right):
        data = random.Random(3).randbytes(48 * 2**20)
        sending = asyncio.ensure_future(left.send(UPDATE, [data]))
        await asyncio.wait({sending}, timeout=0.2)
        assert not sending.done()
        assert left.channel.written_nbytes < len(data)
        # What is encrypted already stays small.
        assert len(left.channel.io._unsent) + left.channel.io._out.pending < 2**20
        got = await right.recv(into=lambda _, nbytes: [bytearray(nbytes)])
        assert bytes(got.payload[0]) == data
        await sending


async def test_a_cancelled_send_breaks_the_link_in_mid_message() -> None:
    async with pair() as (left, right):
        sending = asyncio.ensure_future(left.send(UPDATE, [bytes(48 * 2**20)]))
        await asyncio.wait({sending}, timeout=0.1)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        with pytest.raises(TransportBroken):
            await left.send(Fetch(0))
        with pytest.raises(TransportBroken):
            await right.recv(into=lambda _, nbytes: [bytearray(nbytes)])


async def test_an_idle_link_with_half_a_record_does_not_spin() -> None:
    """Part of a record is no reason to look again before more of it comes."""
    one, two = await ios()
    async with TCPTransport(two) as right:
        one._ssl.write(bytes(16_000))
        record = one._out.read()
        one.sock.send(record[:8000])
        waiting = asyncio.ensure_future(right.recv())
        await asyncio.wait({waiting}, timeout=0.02)
        calls = 0
        original = right.channel.io.recv_into

        def counted(buffer: memoryview) -> int:
            nonlocal calls
            calls += 1
            return original(buffer)

        right.channel.io.recv_into = counted  # type: ignore[method-assign]
        await asyncio.wait({waiting}, timeout=0.05)
        assert calls <= 2
        waiting.cancel()
        await asyncio.wait({waiting})
    one.close()


@pytest.mark.asyncio
async def test_tls_on_the_dialling_side_only_is_told_at_once() -> None:
    """Whatever comes first, the ClientHello or the challenge."""
    for _ in range(5):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            dialling = asyncio.create_task(
                TCPTransport.connect(
                    f"tcp://127.0.0.1:{port}", credentials=Credentials(tls=certificates().dialling)
                )
            )
            sock, _ = await asyncio.to_thread(listening.accept)
        with pytest.raises(RemoteProtocolError):
            await TCPTransport.accept(sock)
        with pytest.raises(ConfigError, match="does not use TLS"):
            await dialling


@pytest.mark.asyncio
async def test_a_forked_child_ends_no_stream_of_its_parent() -> None:
    """Its copy of the socket is closed without a word: a close_notify would be the parent's."""
    async with pair() as (one, two):
        pid = os.fork()
        if pid == 0:
            os._exit(0)  # what is closed in a child was closed by fork() already
        await asyncio.to_thread(os.waitpid, pid, 0)
        await one.send(Fetch(1))
        assert (await two.recv(timeout=PATIENCE)).message == Fetch(1)
        await two.send(Fetch(2))
        assert (await one.recv(timeout=PATIENCE)).message == Fetch(2)
