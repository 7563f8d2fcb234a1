"""Strangers, liars and floods, while one healthy worker goes on as if nobody else were there.

Each attack runs against a sender that listens and against a weight server, both with a token.
Meanwhile updates go on to a worker that behaves; afterwards nobody hangs, memory has not grown,
and (see ``conftest.py``) nothing is left and no error was seen by the loop alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import secrets
import socket
import struct
import time
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import aiosync
from aiosync.schemes.listening import StreamListener
from aiosync.server import WeightServer
from aiosync.transports.credentials import TLS, Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.types import AckStatus, Limits
from aiosync.wire import (
    Ack,
    Challenge,
    Fetch,
    Hello,
    LeafSpec,
    Manifest,
    ManifestMessage,
    Message,
    Proof,
    Refuse,
    Resend,
    Update,
    Welcome,
    checksum,
    encode_frame,
)
from tests._certificates import certificates
from tests.schemes._harness import PATIENCE, twin, until
from tests.schemes._models import fill, filled

TOKEN = "the-token-that-nobody-guesses"
OTHER = "another-token-of-somebody-else"
SOON = 0.3
"""Seconds of ``handshake_timeout``."""

GROWTH = 48 * 2**20
"""Bytes that the process may have grown by after an attack; each attack promises far more."""

both = pytest.mark.parametrize("kind", ["scheme", "server"])
pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.one_loop]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Scene:
    """Something that listens, and one worker that gets updates from it all the time."""

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        self.kind = kind
        self.token = options.get("token")
        self.tls = options.pop("dialling", options.get("tls"))
        self.model, self.target = nn.Linear(4, 2), nn.Linear(4, 2)
        self.value = 0.0
        self.url = ""
        self.server: WeightServer | None = None
        self._options = options

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Scene]:
        options = {"handshake_timeout": SOON, **self._options}
        fill(self.model, 0.0)
        async with contextlib.AsyncExitStack() as stack:
            common = {"token": self.token, "timeout": PATIENCE}
            if self.kind == "server":
                self.server = WeightServer("tcp://127.0.0.1:0", **options)
                await stack.enter_async_context(self.server)
                self.url = self.server.url
                self.trainer = aiosync.TCPWeightSyncScheme(
                    self.url, dial="both", tls=self.tls, **common
                )
            else:
                self.trainer = aiosync.TCPWeightSyncScheme(
                    "tcp://127.0.0.1:0", **{**options, **common}
                )
            stack.push_async_callback(self.trainer.aclose)
            workers = {} if self.kind == "server" else {"num_workers": None}
            self.trainer.init_on_sender("policy", model=self.model, **workers)
            await self.trainer.connect()
            if self.kind == "scheme":
                self.url = self.trainer.address
            self.worker = aiosync.TCPWeightSyncScheme(
                self.url, dial="both", tls=self.tls, reconnect=0, **common
            )
            stack.push_async_callback(self.worker.aclose)
            self.worker.init_on_receiver("policy", worker_idx=0, model=self.target)
            await self.worker.connect()
            self._stop = asyncio.Event()
            self._pump = asyncio.create_task(self._send_on())
            before = resident()
            try:
                yield self
                await self.goes_on()
            finally:
                self._stop.set()
                await self._pump
            assert resident() - before < GROWTH

    async def _send_on(self) -> None:
        while not self._stop.is_set():
            self.value += 1
            fill(self.model, self.value)
            async with asyncio.timeout(PATIENCE):
                report = await self.trainer.send(worker_ids=0)
                assert report.acked == {0}
                await self.worker.wait_for_version(report.version)
            assert filled(self.target, self.value)
            await asyncio.sleep(0.005)

    async def goes_on(self, updates: int = 3) -> None:
        """Wait until that many more updates have arrived."""
        wanted = self.value + updates
        await until(lambda: self.value >= wanted or self._pump.done())
        if self._pump.done():
            self._pump.result()

    @property
    def refused(self) -> dict[str, int]:
        return self.trainer.refused if self.server is None else self.server.status()["refused"]

    @property
    def listener(self) -> StreamListener:
        listener = self.trainer._listener if self.server is None else self.server._listener
        assert isinstance(listener, StreamListener)
        return listener

    async def is_refused(self, name: str, number: int = 1) -> None:
        """Wait until that many were refused for this reason, and nobody for another."""
        await until(lambda: sum(self.refused.values()) >= number)
        assert self.refused == {name: number}

    async def raw(self) -> socket.socket:
        return await dial(self.url)

    async def link(self, **options: Any) -> TCPTransport:
        """A link whose peer has the token."""
        credentials = Credentials(token=self.token, tls=self.tls)
        return await TCPTransport.connect(self.url, credentials=credentials, **options)

    async def join(self, **options: Any) -> TCPTransport:
        """The same, with a Hello that was answered with a Welcome."""
        link = await self.link()
        await link.send(hello(**options))
        assert isinstance((await link.recv(timeout=PATIENCE)).message, Welcome)
        return link


def scene(kind: str, **options: Any) -> contextlib.AbstractAsyncContextManager[Scene]:
    return Scene(kind, {"token": TOKEN, **options}).open()


def hello(**options: Any) -> Hello:
    return Hello(**{"role": "receiver", "model_id": "policy", "pid": os.getpid(), **options})


async def dial(url: str) -> socket.socket:
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return sock


async def read_all(sock: socket.socket, limit: float = PATIENCE) -> bytes:
    """What comes until the other end has closed, which has to be soon."""
    got = bytearray()
    async with asyncio.timeout(limit):
        with contextlib.suppress(ConnectionError):
            while block := await asyncio.get_running_loop().sock_recv(sock, 2**16):
                got += block
    return bytes(got)


async def ends(link: TCPTransport) -> aiosync.AiosyncError:
    """What ended a link, which has to end soon."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await link.recv(into=lambda _message, nbytes: [bytearray(nbytes)])
            except aiosync.AiosyncError as exc:
                link.abort()
                return exc


# -- who has no business here -------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("token", "text"),
    [(OTHER, "not the same"), (None, "give the dialer token=")],
)
async def test_a_wrong_token_or_none(kind: str, token: str | None, text: str) -> None:
    async with scene(kind) as stage:
        began = time.monotonic()
        with pytest.raises(aiosync.AuthError, match=text) as caught:
            await TCPTransport.connect(stage.url, credentials=Credentials(token=token))
        assert time.monotonic() - began < PATIENCE / 4
        await stage.is_refused("AuthError")
        assert TOKEN not in str(caught.value) and OTHER not in str(caught.value)
        # A scheme gives up at once: trying again would not help.
        other = aiosync.TCPWeightSyncScheme(stage.url, dial="both", token=token)
        other.init_on_receiver("policy", model=nn.Linear(4, 2))
        with pytest.raises(aiosync.AuthError, match=text):
            await other.connect()
        await other.aclose()
        await stage.is_refused("AuthError", 2)


@both
async def test_a_token_where_none_is_wanted(kind: str) -> None:
    async with scene(kind, token=None) as stage:
        with pytest.raises(aiosync.AuthError, match="give the listener token="):
            await TCPTransport.connect(stage.url, credentials=Credentials(token=TOKEN))
        await stage.is_refused("AuthError")


def tls_scene(kind: str, which: str, **options: Any) -> Any:
    files = certificates()
    dialling = files.both if which == "both" else files.dialling
    return scene(kind, tls=getattr(files, which), dialling=dialling, **options)


async def refuses(stage: Scene, tls: TLS | None, error: type[Exception], text: str) -> None:
    began = time.monotonic()
    credentials = Credentials(token=TOKEN, tls=tls)
    with pytest.raises(error, match=text):
        await TCPTransport.connect(stage.url, credentials=credentials, timeout=PATIENCE)
    assert time.monotonic() - began < PATIENCE / 4


@both
async def test_certificates_that_do_not_fit(kind: str) -> None:
    """A dialler refuses the listener of another authority, or with another name."""
    files = certificates()
    async with tls_scene(kind, "listening") as stage:
        await refuses(stage, files.foreign, aiosync.AuthError, "certificate")
        await stage.is_refused("AuthError")
        named = TLS(ca=files.dialling.ca, hostname="somebody.else")
        await refuses(stage, named, aiosync.AuthError, "(?i)hostname")
        await until(lambda: sum(stage.refused.values()) == 2)


async def test_an_expired_certificate() -> None:
    files = certificates()
    listener = StreamListener(
        "tcp://127.0.0.1:0", credentials=Credentials(token=TOKEN, tls=files.expired)
    )
    listener.start(lambda link: link.abort(), lambda error: None)
    try:
        with pytest.raises(aiosync.AuthError, match="expired"):
            await TCPTransport.connect(
                listener.url, credentials=Credentials(token=TOKEN, tls=files.dialling)
            )
        await until(lambda: listener.counts.refused == {"AuthError": 1})
    finally:
        await listener.aclose()


@both
@pytest.mark.parametrize("client", ["none", "foreign"])
async def test_a_client_without_a_certificate_that_fits(kind: str, client: str) -> None:
    files = certificates()
    async with tls_scene(kind, "both") as stage:
        tls = files.dialling
        if client == "foreign":
            tls = TLS(cert=files.foreign.cert, ca=files.dialling.ca)
        await refuses(stage, tls, aiosync.AuthError, "(?i)certificate|unknown")
        await stage.is_refused("AuthError")


@both
async def test_a_plain_client_is_told_at_once_that_this_port_speaks_tls(kind: str) -> None:
    async with tls_scene(kind, "listening") as stage:
        await refuses(stage, None, aiosync.ConfigError, "tls=")
        assert sum(stage.refused.values()) == 1
        other = aiosync.TCPWeightSyncScheme(stage.url, dial="both", token=TOKEN)
        other.init_on_receiver("policy", model=nn.Linear(4, 2))
        with pytest.raises(aiosync.ConfigError, match="tls="):
            await other.connect()
        await other.aclose()


@both
async def test_a_tls_client_on_a_plain_port(kind: str) -> None:
    async with scene(kind) as stage:
        await refuses(stage, certificates().dialling, aiosync.AiosyncError, "not use TLS")
        await until(lambda: sum(stage.refused.values()) == 1)


# -- who does not speak our language --------------------------------------------------------------


@both
@pytest.mark.parametrize("tls", [False, True])
async def test_other_protocols_and_noise(kind: str, tls: bool) -> None:
    said = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x16\x03\x01\x02\x00" + bytes(512),
        b"\n",
        bytes(70_000),
        *(secrets.token_bytes(size) for size in (1, 24, 100, 100_000)),
    ]
    async with tls_scene(kind, "listening") if tls else scene(kind) as stage:
        for data in said:
            with await stage.raw() as sock:
                with contextlib.suppress(ConnectionError):
                    await asyncio.get_running_loop().sock_sendall(sock, data)
                    sock.shutdown(socket.SHUT_WR)
                assert TOKEN.encode() not in await read_all(sock)
        await until(lambda: sum(stage.refused.values()) == len(said))


def promising(message: Message, *, header: int | None = None, payload: int | None = None) -> bytes:
    """A frame whose prefix promises other sizes; the checksum over prefix and header is right."""
    frame = bytearray(encode_frame(message))
    magic_version, old_header, _old_payload = struct.unpack_from("<8sIQ", frame)
    struct.pack_into("<8sIQ", frame, 0, magic_version, header or old_header, payload or 0)
    crc = zlib.crc32(frame[24:], zlib.crc32(frame[:20]))
    struct.pack_into("<I", frame, 20, crc)
    return bytes(frame)


@both
@pytest.mark.parametrize("sizes", [{"header": 2**32 - 1}, {"payload": 2**40}])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_sizes_beyond_the_limits(kind: str, sizes: dict[str, int], when: str) -> None:
    async with scene(kind, handshake_timeout=PATIENCE) as stage:
        if when == "before":
            with await stage.raw() as sock:
                frame = promising(Challenge(secrets.token_bytes(32)), **sizes)
                await asyncio.get_running_loop().sock_sendall(sock, frame)
                began = time.monotonic()
                await read_all(sock)
                assert time.monotonic() - began < PATIENCE / 4  # not the handshake's deadline
            await stage.is_refused("FrameTooLarge")
            return
        link = await stage.link()
        link.channel.io.send(promising(hello(), **sizes))
        assert isinstance(await ends(link), aiosync.TransportError)
        member = await stage.join()
        member.channel.io.send(promising(Fetch(0), **sizes))
        assert isinstance(await ends(member), aiosync.TransportError)


# -- who takes long -------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("how", ["silent", "slow"])
async def test_slow_loris(kind: str, tls: bool, how: str) -> None:
    async with tls_scene(kind, "listening") if tls else scene(kind) as stage:
        began = time.monotonic()
        data = b"\x16\x03\x01\x02\x00" if tls else encode_frame(Challenge(bytes(32)))
        with await stage.raw() as sock:
            reading = asyncio.ensure_future(read_all(sock))
            for byte in data * 20 if how == "slow" else b"":
                if reading.done():
                    break
                with contextlib.suppress(ConnectionError):
                    sock.send(bytes([byte]))
                await asyncio.wait({reading}, timeout=SOON / len(data))
            await reading
        took = time.monotonic() - began
        if how == "silent" or not tls:
            assert took > 0.9 * SOON
        assert took < 10 * SOON  # of 20 that it would take
        await until(lambda: sum(stage.refused.values()) == 1)


async def test_one_byte_at_a_time_is_slow_but_right() -> None:
    """A peer that has the token gets in, however small its pieces are."""
    async with scene("scheme", handshake_timeout=PATIENCE) as stage:
        with socket.create_server(("127.0.0.1", 0)) as between:
            between.setblocking(False)
            port = between.getsockname()[1]
            relaying = asyncio.create_task(_relay_bytewise(between, stage.url))
            link = await TCPTransport.connect(
                f"tcp://127.0.0.1:{port}", credentials=Credentials(token=TOKEN)
            )
            await link.aclose()
            await relaying
        assert stage.refused == {}


async def _relay_bytewise(between: socket.socket, url: str) -> None:
    loop = asyncio.get_running_loop()
    near, _ = await loop.sock_accept(between)
    near.setblocking(False)
    far = await dial(url)

    async def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            while byte := await loop.sock_recv(source, 1):
                await loop.sock_sendall(target, byte)
            target.shutdown(socket.SHUT_WR)

    with near, far:
        await asyncio.gather(copy(near, far), copy(far, near))


@both
async def test_300_idle_connections_do_not_keep_others_out(kind: str) -> None:
    async with (
        scene(kind, handshake_timeout=PATIENCE) as stage,
        contextlib.AsyncExitStack() as stack,
    ):
        idle = [stack.enter_context(await stage.raw()) for _ in range(300)]
        await until(lambda: stage.refused.get("crowded out", 0) >= 44)
        assert stage.refused == {"crowded out": 44}
        assert len(stage.listener._strangers) == 256
        for sock in idle[:44]:  # those that had taken longest
            await read_all(sock)
        (await stage.join()).abort()  # the 45th that has to go makes room for it


@both
async def test_a_burst_crowds_out_as_many_as_it_has(kind: str) -> None:
    """All of them are in the backlog at once, before the first turn of the loop sees one."""
    async with (
        scene(kind, handshake_timeout=PATIENCE) as stage,
        contextlib.AsyncExitStack() as stack,
    ):
        host, _, port = stage.url.removeprefix("tcp://").rpartition(":")
        for _ in range(400):  # blocking: the loop does not run meanwhile
            stack.enter_context(socket.create_connection((host, int(port))))
        await until(lambda: sum(stage.refused.values()) >= 144)
        assert stage.refused == {"crowded out": 144}
        assert len(stage.listener._strangers) == 256


@both
async def test_at_max_connections_members_stay_and_the_next_is_refused(kind: str) -> None:
    # The trainer of a server and the healthy worker are two, and one.
    own = 2 if kind == "server" else 1
    async with scene(kind, max_connections=own + 3) as stage:
        members = [await stage.join() for _ in range(3)]
        with pytest.raises(aiosync.ConnectError, match="limit"):
            await stage.link()
        await stage.is_refused("full")
        members.pop().abort()
        await until(lambda: stage.listener.num_open == own + 2)
        members.append(await stage.join())
        for member in members:
            member.abort()


@both
async def test_strangers_do_not_use_up_max_connections(kind: str) -> None:
    async with (
        scene(kind, max_connections=8, handshake_timeout=PATIENCE) as stage,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(20):
            stack.enter_context(await stage.raw())
        (await stage.join()).abort()


@both
async def test_a_flood_of_resets(kind: str) -> None:
    async with scene(kind) as stage:
        for turn in range(300):
            sock = await stage.raw()
            if turn % 2:
                with contextlib.suppress(ConnectionError):
                    sock.send(encode_frame(Challenge(bytes(32)))[: turn % 60])
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
            if turn % 50 == 0:
                await stage.goes_on(1)
        await until(lambda: not stage.listener._strangers)
        assert sum(stage.refused.values()) <= 300
        # On a busy machine the deadline of a handshake may pass before its reset is seen.
        assert stage.refused.keys() <= {"ConnectError", "ConnectTimeout"}


# -- who has the token and means harm -------------------------------------------------------------


@both
async def test_a_peer_that_authenticates_and_says_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("schemes._handshake", "server._server"):
        monkeypatch.setattr(f"aiosync.{module}.HANDSHAKE_SECONDS", SOON)
    async with scene(kind) as stage:
        began = time.monotonic()
        await ends(await stage.link())
        assert time.monotonic() - began < 10 * SOON


@both
@pytest.mark.parametrize(
    "first", [Challenge(bytes(32)), Welcome(1, 1, 0), Fetch(0), Ack(1, 1, AckStatus.APPLIED)]
)
async def test_anything_but_a_hello(kind: str, first: Message) -> None:
    async with scene(kind) as stage:
        link = await stage.link()
        await link.send(first)
        assert isinstance(await ends(link), aiosync.TransportError)


@both
async def test_the_index_of_a_worker_that_is_connected(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiosync.schemes._handshake._GRACE_SECONDS", 0.2)
    async with scene(kind) as stage:
        link = await stage.link()
        await link.send(hello(worker_idx=0))
        answer = (await link.recv(timeout=PATIENCE)).message
        assert isinstance(answer, Refuse) and "taken" in answer.error_text
        link.abort()


@both
@pytest.mark.parametrize("status", list(AckStatus))
async def test_acks_for_versions_that_were_never_sent(kind: str, status: AckStatus) -> None:
    async with scene(kind) as stage:
        link = await stage.join(subscribe=False)
        epoch = stage.trainer._clock.epoch
        for version in [*range(1, 2000), 2**62, 2**63 - 1]:
            await link.send(Ack(epoch, version, status, "ValueError", "no"))
            await link.send(Ack(epoch % 1000 + 1, version, status))
        await stage.goes_on()
        link.abort()


@both
async def test_a_worker_that_says_it_has_a_version_of_the_future(kind: str) -> None:
    """The epoch is in every Welcome. Nothing that a worker says may make send() fail."""
    async with scene(kind) as stage:
        epoch = stage.trainer._clock.epoch
        link = await stage.join(epoch=epoch, version=2**62, worker_idx=7)
        seen = []
        async with asyncio.timeout(PATIENCE):
            # It gets what there is, as if it had nothing.
            while not any(isinstance(message, Update) for message in seen):
                received = await link.recv(into=lambda _, nbytes: [bytearray(nbytes)])
                seen.append(received.message)
        if stage.kind == "scheme":
            with contextlib.suppress(aiosync.PartialSyncError):
                await stage.trainer.send(timeout=SOON)  # to everybody
        await stage.goes_on()
        link.abort()


@both
@pytest.mark.parametrize("epoch_is_right", [True, False])
async def test_resends_for_ever(kind: str, epoch_is_right: bool) -> None:
    async with scene(kind) as stage:
        link = await stage.join(worker_idx=7)
        received = await link.recv()
        assert isinstance(received.message, ManifestMessage)
        first = (await link.recv(into=lambda _, nbytes: [bytearray(nbytes)])).message
        assert isinstance(first, Update)
        epoch = first.epoch if epoch_is_right else first.epoch - 1
        with contextlib.suppress(aiosync.TransportError):
            for _ in range(5000):
                await link.send(Resend(epoch, first.version, 0))
        if epoch_is_right:
            await ends(link)  # it was dropped
        await stage.goes_on()
        link.abort()


async def flood(link: TCPTransport, frame: bytes, nbytes: int = 6 * 2**20) -> None:
    """Write the same frame until so much of it was taken, or nothing more is for a while."""
    block = memoryview(frame * (2**16 // len(frame)))
    rest, taken, last = block, 0, time.monotonic()
    with contextlib.suppress(OSError):
        while taken < nbytes and time.monotonic() < last + 2 * SOON:
            try:
                count = link.channel.io.sock.send(rest)
            except BlockingIOError:
                await asyncio.sleep(0.001)
                continue
            taken, last = taken + count, time.monotonic()
            rest = rest[count:] or block
            await asyncio.sleep(0)


@both
async def test_fetches_for_ever_that_nobody_reads_the_answers_to(kind: str) -> None:
    async with scene(kind) as stage:
        link = await stage.join(subscribe=False, worker_idx=7)
        peers = (
            stage.trainer._sender.peers
            if stage.server is None
            else stage.server._models["policy"].workers.peers
        )
        await until(lambda: 7 in peers)
        peer = peers[7]
        peer.outbox.start_at(2**62)  # it has everything: each Fetch is answered with a word
        link.channel._reader._pause()  # nobody reads the answers
        await flood(link, encode_frame(Fetch(0)))
        await stage.goes_on()
        assert len(peer._words) <= 16  # what waits to be said does not grow
        link.abort()


TERABYTE = Manifest((LeafSpec("a", "uint8", (2**40,), 0, 2**40),), 2**40)


async def test_a_trainer_that_promises_a_terabyte_to_the_server() -> None:
    async with scene("server") as stage:
        await _promise(stage, TERABYTE)
        # The same where the limits allow it: there is no such memory.
    async with scene("server", limits=Limits(max_payload_nbytes=2**50)) as stage:
        huge = Manifest((LeafSpec("a", "uint8", (2**49,), 0, 2**49),), 2**49)
        await _promise(stage, huge)
        assert stage.server is not None and stage.server._crash is None


async def _promise(stage: Scene, manifest: Manifest) -> None:
    link = await stage.link()
    await link.send(hello(role="sender", model_id="other", epoch=5))
    answer = (await link.recv(timeout=PATIENCE)).message
    assert isinstance(answer, Hello)
    await link.send(Welcome(5, 1, 0))
    wide = Limits(max_payload_nbytes=2**60)
    link.channel.limits = wide
    await link.send(ManifestMessage(manifest))
    data = bytes(manifest.nbytes // 2**31)
    update = Update(5, 1, manifest.digest, chunk=(0, 2**31), checksum=bytes(8))
    with contextlib.suppress(aiosync.TransportError):
        await link.send(update, [data])
    assert isinstance(await ends(link), aiosync.TransportError)


@pytest.mark.parametrize("nbytes", [2**40, 2**49])
async def test_a_trainer_that_promises_a_terabyte_to_a_receiver(nbytes: int) -> None:
    manifest = Manifest((LeafSpec("a", "uint8", (nbytes,), 0, nbytes),), nbytes)
    limits = None if nbytes == 2**40 else Limits(max_payload_nbytes=2**50)
    loop = asyncio.get_running_loop()
    before = resident()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        url = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        scheme = aiosync.TCPWeightSyncScheme(url, token=TOKEN, limits=limits, reconnect=0)
        target = nn.Linear(4, 2)
        fill(target, 5.0)
        scheme.init_on_receiver("policy", worker_idx=0, model=target)
        connecting = asyncio.ensure_future(scheme.connect(timeout=PATIENCE))
        sock, _ = await loop.sock_accept(listening)
        link = await TCPTransport.accept(sock, credentials=Credentials(token=TOKEN))
        assert isinstance((await link.recv()).message, Hello)
        await link.send(Welcome(5, 1, 0))
        link.channel.limits = Limits(max_payload_nbytes=2**60)
        await link.send(ManifestMessage(manifest))
        update = Update(5, 1, manifest.digest, chunk=(0, 2**31), checksum=bytes(8))
        with contextlib.suppress(aiosync.TransportError):
            await link.send(update, [bytes(nbytes // 2**31)])
        await ends(link)
        with pytest.raises(aiosync.AiosyncError):
            await connecting
        assert filled(target, 5.0)
        await scheme.aclose()
    assert resident() - before < GROWTH


async def test_a_trainer_that_floods_and_reads_no_answers() -> None:
    """Each of its empty updates asks for an answer; they must not pile up at the worker."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        url = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        scheme = aiosync.TCPWeightSyncScheme(url, token=TOKEN, reconnect=0)
        scheme.init_on_receiver("policy", worker_idx=0, model=nn.Module())
        connecting = asyncio.ensure_future(scheme.connect(timeout=PATIENCE))
        sock, _ = await loop.sock_accept(listening)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link = await TCPTransport.accept(sock, credentials=Credentials(token=TOKEN))
        assert isinstance((await link.recv()).message, Hello)
        await link.send(Welcome(5, 0, 0))
        await connecting
        empty = Manifest((), 0)
        await link.send(ManifestMessage(empty))
        receiver = scheme._receiver
        update = Update(5, 3, empty.digest, checksum=checksum(b""))
        stale = Update(5, 2, empty.digest, checksum=checksum(b""))
        await link.send(update)
        await until(lambda: receiver.inbox.version == 3)
        link.channel._reader._pause()  # it does not read; the kernel's buffers are full soon
        await flood(link, encode_frame(stale), 32 * 2**20)
        await until(lambda: receiver.error is not None)
        assert len(receiver._outgoing._waiting) <= 2048
        assert "without reading the replies" in str(receiver.error)  # that trainer was left
        await scheme.aclose()
        link.abort()


# -- proofs ---------------------------------------------------------------------------------------


@both
async def test_our_own_challenge_and_proofs_are_worth_nothing(kind: str) -> None:
    async with scene(kind) as stage:
        # What the listener said, said back to it.
        link = TCPTransport(await stage.raw())
        challenge = (await link.recv()).message
        assert isinstance(challenge, Challenge)
        await link.send(challenge)
        await link.send(Proof(challenge.nonce, secrets.token_bytes(32)))
        answer = (await link.recv()).message
        assert isinstance(answer, Refuse) and answer.error_type == "AuthError"
        await ends(link)
        await stage.is_refused("AuthError")
        # Its challenge, answered by another link of an honest dialer that was lured here.
        link = TCPTransport(await stage.raw())
        await link.send(Challenge(secrets.token_bytes(32)))
        await link.send(challenge)
        await ends(link)
        await until(lambda: sum(stage.refused.values()) == 2)


async def test_a_listener_that_reflects_a_dialer_is_refused() -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        url = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        dialling = asyncio.ensure_future(
            TCPTransport.connect(url, credentials=Credentials(token=TOKEN))
        )
        sock, _ = await loop.sock_accept(listening)
        link = TCPTransport(sock)
        greeting = (await link.recv()).message
        await link.send(greeting)  # its own, as our challenge
        proof = (await link.recv()).message
        assert isinstance(proof, Proof)
        await link.send(Proof(greeting.nonce, proof.mac))
        with pytest.raises(aiosync.AuthError, match="does not have the token"):
            await dialling
        link.abort()


# -- what may listen, and what is never shown -----------------------------------------------------


@pytest.mark.parametrize("url", ["tcp://0.0.0.0:0", "tcp://[::]:0"])
async def test_beyond_this_host_only_with_credentials(url: str) -> None:
    for listen in (
        lambda: WeightServer(url),
        lambda: aiosync.TCPWeightSyncScheme(url).init_on_sender("p", model=nn.Linear(1, 1)),
    ):
        with pytest.raises(aiosync.ConfigError, match=r"token=.*tls="):
            listen()
    if "[" in url and not socket.has_ipv6:
        return
    server = WeightServer(url, token=TOKEN)
    await server.aclose()


def hidden(text: object) -> None:
    shown = text if isinstance(text, bytes) else str(text).encode()
    for secret in (TOKEN, OTHER):
        for form in (secret.encode(), secret[4:-4].encode(), secret.encode().hex().encode()):
            assert form not in shown, text


@both
async def test_tokens_are_shown_nowhere(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    asyncio.get_running_loop().set_debug(False)
    async with scene(kind) as stage:
        for token in (OTHER, None):
            with pytest.raises(aiosync.AuthError) as caught:
                await TCPTransport.connect(stage.url, credentials=Credentials(token=token))
            hidden(caught.value)
            hidden(repr(caught.value))
        link = await stage.link()
        for thing in (
            link,
            link.channel,
            stage.trainer,
            stage.worker,
            stage.server,
            stage.refused,
            stage.trainer._credentials,
            stage.trainer.__dict__ if stage.kind == "scheme" else "",
            vars(stage.listener),
            Credentials(token=TOKEN),
            Credentials(token=TOKEN).token,
        ):
            hidden(thing)
            hidden(repr(thing))
        hidden(pickle.dumps(twin_of(stage.worker)))
        if stage.server is not None:
            hidden(stage.server.status())
        link.abort()
    for record in caplog.records:
        hidden(record.getMessage())


def twin_of(scheme: Any) -> Any:
    """What a worker process gets; it still has the token."""
    copy = twin(scheme)
    assert copy._credentials.token_bytes == TOKEN.encode()
    return copy


async def test_a_password_of_a_key_is_not_shown() -> None:
    tls = TLS(cert="a.pem", password=TOKEN)
    hidden(repr(tls))
    hidden(pickle.dumps(tls))
    assert pickle.loads(pickle.dumps(tls)) == tls


@both
async def test_a_payload_before_anything_is_known_about_the_peer(kind: str) -> None:
    """It has the token, but said no Hello yet: nothing is allocated for what it announces."""
    async with scene(kind) as stage:
        link = await stage.link()
        with contextlib.suppress(aiosync.TransportError):
            await link.send(Fetch(0), [bytes(2**20)])
        assert isinstance(await ends(link), aiosync.TransportError)
        await stage.goes_on(1)
