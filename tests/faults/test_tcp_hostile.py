"""Strangers, liars and floods, while one healthy worker goes on as if nobody else were there.

Each attack runs against a sender that listens and against a weight server, both with a token.
Meanwhile updates go on to a worker that behaves; afterwards nobody hangs, memory has not grown,
and (see ``conftest.py``) nothing is left and no error was seen by the loop alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import pickle
import secrets
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from torch import nn

import aiosync
from aiosync.server import WeightServer
from aiosync.transports.credentials import TLS, Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.types import AckStatus, Limits
from aiosync.wire import (
    Ack,
    Challenge,
    Current,
    Fetch,
    Hello,
    LeafSpec,
    Manifest,
    ManifestMessage,
    Message,
    Update,
    Welcome,
    answer_challenge,
    checksum,
    encode_frame,
    verify_listener,
)
from tests._certificates import Certificates, certificates
from tests.schemes._harness import PATIENCE, twin, until
from tests.schemes._models import fill, holds, linear
from tests.support.waiting import resident_nbytes

TOKEN = "the-token-that-nobody-guesses"
OTHER = "another-token-of-somebody-else"
SOON = 0.3
"""Seconds of ``handshake_timeout``."""

GROWTH = 48 * 2**20
"""Bytes that the process may have grown by after an attack; each attack promises far more."""

WIDE = Limits(max_payload_nbytes=2**60)
"""Of somebody who announces anything."""

both = pytest.mark.parametrize("kind", ["scheme", "server"])
pytestmark = [pytest.mark.slow, pytest.mark.one_loop]


class Scene:
    """Something that listens, and one worker that gets updates from it all the time."""

    url = ""
    value = 0.0
    server: WeightServer | None = None
    trainer: aiosync.TCPWeightSyncScheme
    worker: aiosync.TCPWeightSyncScheme
    pump: asyncio.Task[None]

    async def send_on(self) -> None:
        while True:
            self.value += 1
            fill(self.trainer.model, self.value)
            async with asyncio.timeout(PATIENCE):
                report = await self.trainer.send(worker_ids=0)
                assert report.acked == {0}
                await self.worker.wait_for_version(report.version)
            assert holds(self.worker, self.value)
            await asyncio.sleep(0.005)

    async def goes_on(self, updates: int = 3) -> None:
        """Wait until that many more updates have arrived."""
        wanted = self.value + updates
        await until(lambda: self.value >= wanted or self.pump.done())
        if self.pump.done():
            self.pump.result()

    @contextlib.asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        self.pump = asyncio.create_task(self.send_on())
        try:
            yield
            await self.goes_on()
        finally:
            self.pump.cancel()
            await asyncio.wait({self.pump})

    @property
    def refused(self) -> dict[str, int]:
        return self.trainer.refused if self.server is None else self.server.status()["refused"]

    async def is_refused(self, **wanted: int) -> None:
        """Wait until so many were refused, each for one of these reasons."""
        await until(lambda: sum(self.refused.values()) >= sum(wanted.values()))
        assert self.refused == wanted

    async def join(self, **options: Any) -> Peer:
        """A peer whose Hello was answered with a Welcome."""
        peer = await Peer.proven(self.url)
        await peer.send(hello(**options))
        peer.welcome = (await peer.recv(timeout=PATIENCE)).message
        assert isinstance(peer.welcome, Welcome)
        return peer


@contextlib.asynccontextmanager
async def scene(
    kind: str, *, token: str | None = TOKEN, tls: Any = None, dialling: Any = None, **options: Any
) -> AsyncIterator[Scene]:
    options = {"handshake_timeout": SOON, "token": token, "tls": tls, **options}
    common: dict[str, Any] = {"dial": "both", "token": token, "tls": dialling, "timeout": PATIENCE}
    stage = Scene()
    async with contextlib.AsyncExitStack() as stack:
        if kind == "server":
            stage.server = WeightServer("tcp://127.0.0.1:0", **options)
            stack.push_async_callback(stage.server.wait_closed)  # raises what was a crash
            await stack.enter_async_context(stage.server)
            stage.url = stage.server.url
            stage.trainer = aiosync.TCPWeightSyncScheme(stage.url, **common)
        else:
            stage.trainer = aiosync.TCPWeightSyncScheme(**options, timeout=PATIENCE)
        await stack.enter_async_context(stage.trainer)
        workers = {} if kind == "server" else {"num_workers": None}
        stage.trainer.init_on_sender("policy", model=linear(), **workers)
        await stage.trainer.connect()
        stage.url = stage.url or stage.trainer.address
        stage.worker = aiosync.TCPWeightSyncScheme(stage.url, reconnect=0, **common)
        await stack.enter_async_context(stage.worker)
        stage.worker.init_on_receiver("policy", worker_idx=0, model=linear())
        await stage.worker.connect()
        before = resident_nbytes()
        async with stage.going_on():
            yield stage
        assert resident_nbytes() - before < GROWTH


class Peer(TCPTransport):
    """Somebody who has the token, and at any time the socket to write anything to."""

    welcome: Any = None

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, limits=WIDE)
        self.sock = sock

    @classmethod
    async def proven(cls, url: str) -> Peer:
        peer = cls(await dial(url))
        await peer.send(Challenge(secrets.token_bytes(32)))
        token = TOKEN.encode()
        challenge, answer = answer_challenge((await peer.recv(timeout=PATIENCE)).message, token)
        await peer.send(answer)
        verify_listener(challenge, answer, (await peer.recv(timeout=PATIENCE)).message, token=token)
        return peer


def hello(**options: Any) -> Hello:
    return Hello(**{"role": "receiver", "model_id": "policy", "pid": os.getpid(), **options})


async def dial(url: str) -> socket.socket:
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # what is not read waits over there
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return sock


async def read_all(sock: socket.socket) -> bytes:
    """What comes until the other end has closed, which has to be soon."""
    got = bytearray()
    async with asyncio.timeout(PATIENCE):
        with contextlib.suppress(ConnectionError):
            while block := await asyncio.get_running_loop().sock_recv(sock, 2**16):
                got += block
    return bytes(got)


async def ends(link: TCPTransport) -> None:
    """Wait until a link is ended by the other side, which has to be soon."""
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(aiosync.TransportError):
            while True:
                await link.recv(into=lambda _message, nbytes: [bytearray(nbytes)])
    link.abort()


def hidden(*shown: object) -> None:
    """Nothing that is shown has a token in it."""
    for thing in shown:
        text = thing if isinstance(thing, bytes) else f"{thing} {thing!r}".encode()
        for secret in (TOKEN, OTHER):
            for form in (secret, secret[4:-4], secret.encode().hex()):
                assert form.encode() not in text, text


# -- who has no business here -------------------------------------------------------------------


def named(files: Certificates) -> TLS:
    return TLS(ca=files.dialling.ca, hostname="somebody.else")


def of_nobody(files: Certificates) -> TLS:
    return TLS(cert=files.foreign.cert, ca=files.dialling.ca)


def none(files: Certificates) -> None:
    """No TLS."""


WRONG: list[tuple[str | None, str | None, str | None, Callable[..., Any], type[Exception], str]] = [
    # The listener's TLS and token; the dialer's token and TLS; what it is told.
    (None, TOKEN, OTHER, none, aiosync.AuthError, "not the same"),
    (None, TOKEN, None, none, aiosync.AuthError, "give the dialer token="),
    (None, None, TOKEN, none, aiosync.AuthError, "give the listener token="),
    (None, TOKEN, TOKEN, lambda files: files.dialling, aiosync.ConfigError, "not use TLS"),
    ("listening", TOKEN, TOKEN, none, aiosync.ConfigError, "tls="),
    ("listening", TOKEN, TOKEN, lambda files: files.foreign, aiosync.AuthError, "certificate"),
    ("listening", TOKEN, TOKEN, named, aiosync.AuthError, "(?i)hostname"),
    ("both", TOKEN, TOKEN, lambda files: files.dialling, aiosync.AuthError, "certificate|unknown"),
    ("both", TOKEN, TOKEN, of_nobody, aiosync.AuthError, "certificate|unknown"),
]


@both
@pytest.mark.parametrize(("which", "token", "given", "tls", "error", "text"), WRONG)
@pytest.mark.asyncio
async def test_who_does_not_fit_is_told_at_once(
    kind: str, which: Any, token: Any, given: Any, tls: Any, error: Any, text: str
) -> None:
    files = certificates()
    listening = getattr(files, which) if which else None
    dialling = files.both if which == "both" else files.dialling if which else None
    async with scene(kind, token=token, tls=listening, dialling=dialling) as stage:
        began = time.monotonic()
        with pytest.raises(error, match=text) as caught:
            credentials = Credentials(token=given, tls=tls(files))
            await TCPTransport.connect(stage.url, credentials=credentials, timeout=PATIENCE)
        hidden(caught.value)
        # A scheme gives up at once: trying again would not help.
        other = aiosync.TCPWeightSyncScheme(stage.url, dial="both", token=given, tls=tls(files))
        async with other:
            other.init_on_receiver("policy", model=nn.Linear(4, 2))
            with pytest.raises(error, match=text):
                await other.connect()
        assert time.monotonic() - began < PATIENCE / 2
        await until(lambda: sum(stage.refused.values()) == 2)


# -- who does not speak our language --------------------------------------------------------------


@both
@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.asyncio
async def test_other_protocols_and_noise(kind: str, tls: bool) -> None:
    said = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x16\x03\x01\x02\x00" + bytes(512),
        b"\n",
        bytes(70_000),
        *(secrets.token_bytes(size) for size in (1, 24, 100, 100_000)),
    ]
    async with secured(kind, tls) as stage:
        for data in said:
            with await dial(stage.url) as sock:
                with contextlib.suppress(ConnectionError):
                    await asyncio.get_running_loop().sock_sendall(sock, data)
                    sock.shutdown(socket.SHUT_WR)
                hidden(await read_all(sock))
        await until(lambda: sum(stage.refused.values()) == len(said))


def secured(kind: str, tls: bool, **options: Any) -> contextlib.AbstractAsyncContextManager[Scene]:
    files = certificates()
    if tls:
        options |= {"tls": files.listening, "dialling": files.dialling}
    return scene(kind, **options)


def promising(message: Message, *, header: int | None = None, payload: int = 0) -> bytes:
    """A frame whose prefix promises other sizes."""
    frame = bytearray(encode_frame(message))
    struct.pack_into("<I", frame, 8, header or len(frame) - 24)
    struct.pack_into("<Q", frame, 16, payload)
    return bytes(frame)


@both
@pytest.mark.parametrize(
    ("of_stranger", "sizes"),
    [({"header": 4097}, {"header": 2**32 - 1}), ({"payload": 1}, {"payload": 2**40})],
)
@pytest.mark.asyncio
async def test_sizes_beyond_the_limits(kind: str, of_stranger: Any, sizes: Any) -> None:
    async with scene(kind, handshake_timeout=PATIENCE) as stage:
        with await dial(stage.url) as sock:
            sock.send(promising(Challenge(secrets.token_bytes(32)), **of_stranger))
            began = time.monotonic()
            await read_all(sock)
            assert time.monotonic() - began < PATIENCE / 4  # not the handshake's deadline
        await stage.is_refused(FrameTooLarge=1)
        for peer, message in (
            (await Peer.proven(stage.url), hello()),
            (await stage.join(), Fetch(0)),
        ):
            peer.sock.send(promising(message, **sizes))
            await ends(peer)


# -- who takes long -------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("how", ["silent", "slow"])
@pytest.mark.asyncio
async def test_slow_loris(kind: str, tls: bool, how: str) -> None:
    async with secured(kind, tls) as stage:
        began = time.monotonic()
        data = b"\x16\x03\x01\x02\x00" if tls else encode_frame(Challenge(bytes(32)))
        with await dial(stage.url) as sock:
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


@both
@pytest.mark.asyncio
async def test_strangers_crowd_out_one_another_and_nobody_else(kind: str) -> None:
    async with (
        scene(kind, handshake_timeout=PATIENCE) as stage,
        contextlib.AsyncExitStack() as stack,
    ):
        host, _, port = stage.url.removeprefix("tcp://").rpartition(":")
        idle = [stack.enter_context(await dial(stage.url)) for _ in range(100)]
        await stage.goes_on(1)
        for _ in range(400):  # all of them in the backlog before the loop turns once
            stack.enter_context(socket.create_connection((host, int(port))))
        await stage.is_refused(**{"crowded out": 244})  # 256 stay
        for sock in idle:  # those that had taken longest
            await read_all(sock)
        (await stage.join()).abort()  # the next one makes room for it


@both
@pytest.mark.asyncio
async def test_at_max_connections_members_stay_and_the_next_is_refused(kind: str) -> None:
    # The trainer of a server and the healthy worker are two, and one.
    own = 2 if kind == "server" else 1
    async with scene(kind, max_connections=own + 3, handshake_timeout=PATIENCE) as stage:
        with contextlib.ExitStack() as stack:
            for _ in range(20):  # strangers do not count
                stack.enter_context(await dial(stage.url))
            members = [await stage.join() for _ in range(3)]
        crowd = stage.refused
        with pytest.raises(aiosync.ConnectError, match="limit"):
            await TCPTransport.connect(stage.url, credentials=Credentials(token=TOKEN))
        await until(lambda: stage.refused == {**crowd, "full": 1})
        members.pop().abort()
        async with asyncio.timeout(PATIENCE):
            while len(members) < 3:  # it takes a moment until its end is seen
                with contextlib.suppress(aiosync.AiosyncError):
                    members.append(await stage.join())
        for member in members:
            member.abort()


# -- who has the token and means harm -------------------------------------------------------------


@both
@pytest.mark.asyncio
async def test_peers_that_say_nothing_keep_no_place(kind: str) -> None:
    """They are strangers until they have said what they want, and make room for who says it."""
    own = 2 if kind == "server" else 1
    options: dict[str, Any] = {"handshake_timeout": PATIENCE, "max_connections": own + 8}
    async with scene(kind, **options) as stage:
        silent = [await Peer.proven(stage.url) for _ in range(8)]
        began = time.monotonic()
        (await stage.join()).abort()
        assert time.monotonic() - began < PATIENCE / 4
        await ends(silent.pop(0))  # it had taken longest
        for peer in silent:
            peer.abort()


@both
@pytest.mark.parametrize(
    "first",
    [None, Challenge(bytes(32)), Welcome(1, 1, 0), Ack(1, 1, AckStatus.APPLIED), "payload"],
)
@pytest.mark.asyncio
async def test_anything_but_a_hello(kind: str, first: Any) -> None:
    """Not even that; nor is anything allocated for a payload before it is known who sends it."""
    async with scene(kind) as stage:
        peer = await Peer.proven(stage.url)
        with contextlib.suppress(aiosync.TransportError):
            if first == "payload":
                await peer.send(Fetch(0), [bytes(2**20)])
            elif first is not None:
                await peer.send(first)
        await ends(peer)  # handshake_timeout counts for this as well


# -- who comes in a crowd -------------------------------------------------------------------------


@both
@pytest.mark.asyncio
async def test_a_worker_that_says_it_has_a_version_of_the_future(kind: str) -> None:
    """The epoch is in every Welcome. Nothing that a worker says may make send() fail."""
    async with scene(kind) as stage:
        first = await stage.join()
        peer = await stage.join(epoch=first.welcome.epoch, version=2**62, worker_idx=7)
        first.abort()
        message = None
        async with asyncio.timeout(PATIENCE):
            # It gets what there is, as if it had nothing.
            while not isinstance(message, Update):
                message = (await peer.recv(into=lambda _, nbytes: [bytearray(nbytes)])).message
        if kind == "scheme":
            with contextlib.suppress(aiosync.PartialSyncError):
                await stage.trainer.send(timeout=SOON)  # to everybody
        await stage.goes_on()
        peer.abort()


async def flood(sock: socket.socket, frame: bytes, nbytes: int) -> None:
    """Write the same frame until so much of it was taken, or nothing more is for a while."""
    block = memoryview(frame * (2**16 // len(frame)))
    rest, taken, refused = block, 0, 0
    with contextlib.suppress(OSError):
        while taken < nbytes and refused < 500:
            try:
                count = sock.send(rest)
            except BlockingIOError:
                refused += 1
                await asyncio.sleep(0.001)
                continue
            taken, refused = taken + count, 0
            rest = rest[count:] or block
            await asyncio.sleep(0)


@both
@pytest.mark.asyncio
async def test_fetches_for_ever_that_nobody_reads_the_answers_to(kind: str) -> None:
    """Nobody calls recv() of the peer, so that the link reads no further than a message."""
    async with scene(kind) as stage:
        peer = await stage.join(subscribe=False)
        await flood(peer.sock, encode_frame(Fetch(0)), 4 * 2**20)
        await stage.goes_on()
        waiting = [each for each in gc.get_objects() if type(each) is Current]
        assert len(waiting) < 16  # what has to be said does not pile up
        del waiting
        peer.abort()


async def promise(link: TCPTransport, nbytes: int) -> None:
    """Announce one tensor of so many bytes, and send what would be a part of it."""
    manifest = Manifest((LeafSpec("a", "uint8", (nbytes,), 0, nbytes),), nbytes)
    update = Update(5, 1, manifest.digest, chunk=(0, 2**31), checksum=bytes(16))
    await link.send(Welcome(5, 1, 0))
    await link.send(ManifestMessage(manifest))
    with contextlib.suppress(aiosync.TransportError):
        await link.send(update, [bytes(nbytes // 2**31)])
    await ends(link)


# Beyond the limits; and where the limits allow it, but there is no such memory.
terabytes = pytest.mark.parametrize(
    ("nbytes", "limits"), [(2**40, None), (2**49, Limits(max_payload_nbytes=2**50))]
)


@terabytes
@pytest.mark.asyncio
async def test_a_trainer_that_promises_a_terabyte_to_the_server(nbytes: int, limits: Any) -> None:
    async with scene("server", limits=limits) as stage:
        peer = await Peer.proven(stage.url)
        await peer.send(hello(role="sender", model_id="other", epoch=5))
        assert isinstance((await peer.recv(timeout=PATIENCE)).message, Hello)
        await promise(peer, nbytes)


@contextlib.asynccontextmanager
async def liar(model: nn.Module, **options: Any) -> AsyncIterator[tuple[Any, Any, Any]]:
    """A worker that connects, and the link and the socket of a trainer that means harm."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        url = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        async with aiosync.TCPWeightSyncScheme(url, token=TOKEN, reconnect=0, **options) as scheme:
            scheme.init_on_receiver("policy", worker_idx=0, model=model)
            connecting = asyncio.ensure_future(scheme.connect(timeout=PATIENCE))
            sock, _ = await loop.sock_accept(listening)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            credentials = Credentials(token=TOKEN)
            async with await TCPTransport.accept(sock, credentials=credentials) as link:
                assert isinstance((await link.recv()).message, Hello)
                scheme.connecting = connecting
                yield scheme, link, sock


@terabytes
@pytest.mark.asyncio
async def test_a_trainer_that_promises_a_terabyte_to_a_receiver(nbytes: int, limits: Any) -> None:
    before, model = resident_nbytes(), linear()
    async with liar(model, limits=limits) as (scheme, link, _):
        await promise(link, nbytes)
        with pytest.raises(aiosync.AiosyncError):
            await scheme.connecting
        assert holds(scheme, -1.0)
    assert resident_nbytes() - before < GROWTH


@pytest.mark.asyncio
async def test_a_trainer_that_floods_and_reads_no_answers() -> None:
    """Each of its empty updates asks for an answer; they must not pile up at the worker."""
    async with liar(nn.Module()) as (scheme, link, sock):
        await link.send(Welcome(5, 0, 0))
        await scheme.connecting
        empty = Manifest((), 0)
        await link.send(ManifestMessage(empty))
        await link.send(Update(5, 3, empty.digest, checksum=checksum(b"")))
        await scheme.wait_for_version(3)
        stale = Update(5, 2, empty.digest, checksum=checksum(b""))
        await flood(sock, encode_frame(stale), 32 * 2**20)  # the kernel's buffers are full soon
        await until(lambda: scheme.link_lost is not None)
        assert "without reading the replies" in str(scheme.link_lost)  # that trainer was left


@both
@pytest.mark.asyncio
async def test_tokens_are_shown_nowhere(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with scene(kind) as stage:
        peer = await stage.join()
        hidden(peer, stage.trainer, stage.worker, stage.server, stage.refused)
        hidden(stage.server and stage.server.status(), pickle.dumps(stage.worker))
        peer.abort()
        # What a worker process gets has the token all the same.
        async with twin(stage.worker) as other:
            other.init_on_receiver("policy", worker_idx=1, model=linear())
            await other.connect()
    hidden(*(record.getMessage() for record in caplog.records))
