"""TLS under the frames: bytes that OpenSSL has read ahead, and the ends of streams."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import itertools
import os
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from aiosync.errors import (
    ConnectError,
    PeerClosed,
    RemoteProtocolError,
    SendTimeout,
    TransportBroken,
)
from aiosync.testing import FaultProxy, Faults, Plan
from aiosync.transports.credentials import Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.wire import Fetch, Update
from tests._certificates import certificates

pytestmark = pytest.mark.asyncio

UPDATE = Update(1, 1, bytes(16))
PATIENCE = 20


@contextlib.asynccontextmanager
async def pair(
    faults: Faults | None = None, version: ssl.TLSVersion | None = None
) -> AsyncIterator[tuple[TCPTransport, TCPTransport]]:
    """The links of the listener and of the dialer, in this order.

    If a version of TLS is given, the buffers of their sockets are small.
    """
    files = certificates()
    context = files.listening.listening_context()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(PATIENCE))
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.setblocking(False)
        if version is not None:
            context.maximum_version = version
            # Accepted sockets inherit the sizes of the listening socket.
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                listening.setsockopt(socket.SOL_SOCKET, option, 2**15)
        url = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        if faults is not None:
            proxy = await stack.enter_async_context(FaultProxy(url))
            proxy.plan, url = Plan(back=faults), proxy.url
        credentials = Credentials(tls=files.dialling)
        dialling = asyncio.ensure_future(TCPTransport.connect(url, credentials=credentials))
        sock, _ = await asyncio.get_running_loop().sock_accept(listening)
        left = await TCPTransport.accept(sock, credentials=Credentials(tls=context))
        await stack.enter_async_context(left)
        yield left, await stack.enter_async_context(await dialling)


@pytest.mark.parametrize("sizes", [(1, 2, 3), (100,) * 50, (16_385, 70_000, 5), (300_000, 1)])
async def test_what_openssl_read_ahead_is_not_forgotten(sizes: tuple[int, ...]) -> None:
    """One TLS record may fill several messages and lent buffers.

    The socket is not readable for the rest of the record, which OpenSSL has read ahead.
    """
    async with pair() as (left, right):
        for turn in range(3):
            for size in sizes:
                await left.send(UPDATE, [bytes([turn]) * size])
                await left.send(Fetch(size))
            for size in sizes:
                got = await right.recv(
                    into=lambda _, nbytes: [bytearray(nbytes // 2), bytearray(nbytes - nbytes // 2)]
                )
                assert b"".join(got.payload) == bytes([turn]) * size
                assert (await right.recv()).message == Fetch(size)
        assert left.send_batch_nowait([Fetch(number) for number in range(500)])
        for number in range(500):
            assert (await right.recv()).message == Fetch(number)


async def test_a_send_that_times_out_leaves_those_before_it() -> None:
    """OpenSSL has encrypted all of an earlier message, of which the kernel has taken a part."""
    async with pair(version=ssl.TLSVersion.TLSv1_3) as (left, right):
        count = refused = 0
        # The other end reads ahead before the kernel's buffers stay full.
        while refused < 10:
            while left.send_nowait(Update(1, count + 1, bytes(16)), [bytes(60_000)]):
                count, refused = count + 1, 0
            refused += 1
            await asyncio.sleep(0.05)
        with pytest.raises(SendTimeout):
            await left.send(Update(1, count + 1, bytes(16)), [bytes(60_000)], timeout=0.1)
        for version in range(1, count + 1):
            received = await right.recv(timeout=5)
            assert received.message == Update(1, version, bytes(16))


async def test_what_a_peer_said_before_it_reset_the_link_is_read() -> None:
    """A message is read though this end is writing, which is when refusals arrive."""
    async with pair(version=ssl.TLSVersion.TLSv1_2) as (left, right):
        sending = asyncio.ensure_future(left.send(UPDATE, [bytes(2**23)]))
        await asyncio.sleep(0.2)
        # The other end does not read, so that this end cannot finish its write.
        assert not sending.done()
        await right.send(Fetch(7))
        right.abort()
        time.sleep(0.05)  # noqa: ASYNC251 - the message and the reset arrive before this end reads
        assert (await left.recv()).message == Fetch(7)
        with pytest.raises(TransportBroken):
            await sending


async def test_what_arrived_together_with_a_reset_is_read_before_the_error() -> None:
    async with pair() as (left, right):
        receiving = asyncio.ensure_future(left.recv())
        await asyncio.sleep(0.05)
        await right.send(Fetch(7))
        right.io.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        asyncio.get_running_loop().remove_reader(right.io.fd)
        # The end of a process closes its sockets without a close_notify of TLS.
        right.io.close(farewell=False)
        time.sleep(0.05)  # noqa: ASYNC251 - the message and the reset arrive before this end reads
        assert (await receiving).message == Fetch(7)
        with pytest.raises(PeerClosed) as caught:
            await left.recv()
        assert isinstance(caught.value.__cause__, ConnectionResetError)


@pytest.mark.parametrize("faults", [Faults(cut_at=200_000), Faults(corrupt_at=200_000)], ids=str)
async def test_truncation_in_mid_message(faults: Faults) -> None:
    """A stream that is cut or changed on its way is never taken for a whole message."""
    async with pair(faults) as (left, right):
        await left.send(Fetch(1))
        assert (await right.recv()).message == Fetch(1)
        sending = asyncio.ensure_future(left.send(UPDATE, [bytes(400_000)]))
        with pytest.raises(TransportBroken):
            await right.recv(into=lambda _, nbytes: [bytearray(nbytes)])
        sending.cancel()
        await asyncio.wait({sending})


async def test_a_forked_child_ends_no_stream_of_its_parent() -> None:
    """The child closes its copy of the socket without a close_notify.

    The peer would take a close_notify for the parent's.
    """
    async with pair() as (one, two):
        pid = os.fork()
        if pid == 0:
            # Hooks of fork() have already closed everything that a child closes.
            os._exit(0)
        await asyncio.to_thread(os.waitpid, pid, 0)
        await one.send(Fetch(1))
        assert (await two.recv(timeout=PATIENCE)).message == Fetch(1)
        await two.send(Fetch(2))
        assert (await one.recv(timeout=PATIENCE)).message == Fetch(2)


class RawPeer:
    """A peer of a listener that encrypts its records by itself, so that they may be any."""

    def __init__(self, sock: socket.socket, keys: Path) -> None:
        self.sock, self._keys = sock, keys

    async def handshake(self) -> None:
        loop = asyncio.get_running_loop()
        context = certificates().dialling.dialling_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.keylog_filename = str(self._keys)
        received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(received, to_send, server_hostname="localhost")
        done = False
        while not done:
            with contextlib.suppress(ssl.SSLWantReadError):
                tls.do_handshake()
                done = True
            await loop.sock_sendall(self.sock, to_send.read())
            if not done:
                received.write(await loop.sock_recv(self.sock, 65536))
        assert tls.cipher() == ("TLS_AES_256_GCM_SHA384", "TLSv1.3", 256)
        (line,) = [each for each in self._keys.read_text().splitlines() if "CLIENT_TRAFFIC" in each]
        self._begin(bytes.fromhex(line.split()[-1]))

    def _begin(self, secret: bytes) -> None:
        """Take new keys, as RFC 8446 derives them."""
        self._secret, self._number = secret, 0
        self._aead, self._iv = AESGCM(self._expand(b"key", 32)), self._expand(b"iv", 12)

    def _expand(self, label: bytes, nbytes: int) -> bytes:
        info = bytes([0, nbytes, 6 + len(label)]) + b"tls13 " + label + b"\0\1"
        return hmac.digest(self._secret, info, hashlib.sha384)[:nbytes]

    def record(self, content: bytes, kind: int = 23) -> bytes:
        head = bytes([23, 3, 3]) + (len(content) + 17).to_bytes(2, "big")
        nonce = int.from_bytes(self._iv, "big") ^ self._number
        self._number += 1
        inner = content + bytes([kind])
        return head + self._aead.encrypt(nonce.to_bytes(12, "big"), inner, head)

    def key_update(self, *, asks: bool = False) -> bytes:
        made = self.record(bytes([24, 0, 0, 1, asks]), kind=22)
        self._begin(self._expand(b"traffic upd", 48))
        return made


@contextlib.asynccontextmanager
async def stranger(keys: Path) -> AsyncIterator[tuple[RawPeer, asyncio.Task[TCPTransport]]]:
    """A peer after the handshake of TLS, and the call that accepts it."""
    credentials = Credentials(tls=certificates().listening.listening_context())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        # Accepted sockets inherit the sizes: a flood fits in, and few answers fit out.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**21)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.create_connection(listening.getsockname()) as sock:
            sock.setblocking(False)
            accepted = listening.accept()[0]
            accepting = asyncio.create_task(TCPTransport.accept(accepted, credentials=credentials))
            try:
                peer = RawPeer(sock, keys)
                await peer.handshake()
                # The listener's challenge has arrived, so it reads frames now.
                await asyncio.get_running_loop().sock_recv(sock, 65536)
                await asyncio.sleep(0.1)
                yield peer, accepting
            finally:
                accepting.cancel()
                await asyncio.wait({accepting})


@pytest.mark.parametrize("kind", ["changes of keys", "changes and data"])
async def test_records_without_data_leave_the_loop_its_turns(kind: str, tmp_path: Path) -> None:
    async with stranger(tmp_path / "keys") as (peer, accepting):
        # The prefix of a frame that announces a header of 2,000 bytes.
        records = [peer.record(struct.pack("<4sBBHIIQ", b"AIOS", 2, 0, 0, 2_000, 0, 0))]
        for number in range(20_000):
            records.append(peer.key_update())
            if kind == "changes and data" and number % 10 == 0 and number < 19_000:
                records.append(peer.record(b"x"))
        flood = b"".join([*records, peer.record(bytes(2_000))])
        assert peer.sock.send(flood) == len(flood)
        # Time of this thread: a busy machine may stop it in the middle of any turn.
        turns = [time.thread_time()]
        while not accepting.done():
            await asyncio.sleep(0)
            turns.append(time.thread_time())
        with pytest.raises(RemoteProtocolError):
            accepting.result()
    longest = max(after - before for before, after in itertools.pairwise(turns))
    assert longest < (turns[-1] - turns[0]) / 2


async def test_answers_that_the_peer_does_not_read_are_not_kept_for_ever(tmp_path: Path) -> None:
    """OpenSSL answers each change of keys that asks for one."""
    async with stranger(tmp_path / "keys") as (peer, accepting):
        flood = b"".join(peer.key_update(asks=True) for _ in range(20_000))
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(peer.sock, flood)
        with pytest.raises(ConnectError):
            await asyncio.wait_for(accepting, 5)
