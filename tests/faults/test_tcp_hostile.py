"""Strangers, liars and floods, which disturb neither a healthy worker nor its updates.

Each attack runs against a sender that listens and against a weight server, both with a token.
Meanwhile a healthy worker goes on to get updates. Afterwards no call hangs, memory has not grown,
and (see ``conftest.py``) nothing is left and no error reached the event loop alone.
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
SOON = 1.0
"""Seconds of ``handshake_timeout``."""

GROWTH = 48 * 2**20
"""Bytes that the process may have grown by after an attack; each attack promises far more."""

WIDE = Limits(max_payload_nbytes=2**60)
"""Limits of a hostile peer, which announces payloads of any size."""

both = pytest.mark.parametrize("kind", ["scheme", "server"])
pytestmark = [pytest.mark.slow, pytest.mark.one_loop]


class Scene:
    """A listening trainer or weight server, and a healthy worker that gets updates all the time."""

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
        """Wait until ``updates`` more updates have arrived at the healthy worker."""
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
        """Wait for the wanted number of refusals, and check their number by reason."""
        await until(lambda: sum(self.refused.values()) >= sum(wanted.values()))
        assert self.refused == wanted

    async def join(self, **options: Any) -> Peer:
        """Return a peer whose Hello was answered with a Welcome."""
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
            # If the server crashed, wait_closed() raises the error.
            stack.push_async_callback(stage.server.wait_closed)
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
    """A peer that has the token, and can write any bytes to its socket at any time."""

    welcome: Any = None

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, limits=WIDE)
        self.sock = sock

    @classmethod
    async def proven(cls, url: str, sock: socket.socket | None = None) -> Peer:
        peer = cls(sock or await dial(url))
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
    # With a small buffer here, data that is not read waits at the listener.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return sock


async def read_all(sock: socket.socket) -> bytes:
    """Return the bytes that arrive until the other end closes, which must be soon."""
    got = bytearray()
    async with asyncio.timeout(PATIENCE):
        with contextlib.suppress(ConnectionError):
            while block := await asyncio.get_running_loop().sock_recv(sock, 2**16):
                got += block
    return bytes(got)


async def ends(link: TCPTransport) -> None:
    """Wait until the other side ends a link, which must be soon."""
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(aiosync.TransportError):
            while True:
                await link.recv(into=lambda _message, nbytes: [bytearray(nbytes)])
    link.abort()


def hidden(*shown: object) -> None:
    """Check that no text or bytes of these objects contain a token."""
    for thing in shown:
        text = thing if isinstance(thing, bytes) else f"{thing} {thing!r}".encode()
        for secret in (TOKEN, OTHER):
            for form in (secret, secret[4:-4], secret.encode().hex()):
                assert form.encode() not in text, text


# -- peers with wrong credentials ---------------------------------------------------------------


def named(files: Certificates) -> TLS:
    return TLS(ca=files.dialling.ca, hostname="somebody.else")


def of_nobody(files: Certificates) -> TLS:
    return TLS(cert=files.foreign.cert, ca=files.dialling.ca)


def none(files: Certificates) -> None:
    """Use no TLS."""


WRONG: list[tuple[str | None, str | None, str | None, Callable[..., Any], type[Exception], str]] = [
    # A row has the listener's TLS and token, the dialer's token and TLS, and the dialer's error.
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
        # A scheme raises at once, because another try would not help.
        other = aiosync.TCPWeightSyncScheme(stage.url, dial="both", token=given, tls=tls(files))
        async with other:
            other.init_on_receiver("policy", model=nn.Linear(4, 2))
            with pytest.raises(error, match=text):
                await other.connect()
        assert time.monotonic() - began < PATIENCE / 2
        await until(lambda: sum(stage.refused.values()) == 2)


# -- peers with other protocols and sizes ---------------------------------------------------------


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
    """Return a frame whose prefix announces other sizes than the frame has."""
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
            # The size itself is refused, long before the deadline of the handshake.
            assert time.monotonic() - began < PATIENCE / 4
        await stage.is_refused(FrameTooLarge=1)
        for peer, message in (
            (await Peer.proven(stage.url), hello()),
            (await stage.join(), Fetch(0)),
        ):
            peer.sock.send(promising(message, **sizes))
            await ends(peer)


# -- slow strangers, and too many of them ---------------------------------------------------------


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
        # Sending all the data would take 20 times the deadline.
        assert took < 10 * SOON
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
        # All of these connections are in the backlog before the event loop turns once.
        for _ in range(400):
            stack.enter_context(socket.create_connection((host, int(port))))
        # Of the 500 strangers 256 may stay.
        await stage.is_refused(**{"crowded out": 244})
        # The idle strangers had taken longest, so they were the first to be dropped.
        for sock in idle:
            await read_all(sock)
        # Another stranger is dropped to make room for this peer.
        (await stage.join()).abort()


@both
@pytest.mark.asyncio
async def test_at_max_connections_members_stay_and_the_next_is_refused(kind: str) -> None:
    # A server has links to its trainer and to the healthy worker, a trainer only to the worker.
    own = 2 if kind == "server" else 1
    async with scene(kind, max_connections=own + 3, handshake_timeout=PATIENCE) as stage:
        with contextlib.ExitStack() as stack:
            # Strangers take no place away from members.
            for _ in range(20):
                stack.enter_context(await dial(stage.url))
            members = [await stage.join() for _ in range(3)]
        crowd = stage.refused
        with pytest.raises(aiosync.ConnectError, match="limit"):
            await TCPTransport.connect(stage.url, credentials=Credentials(token=TOKEN))
        await until(lambda: stage.refused == {**crowd, "full": 1})
        members.pop().abort()
        async with asyncio.timeout(PATIENCE):
            # The listener notices the end of the aborted link only after a moment.
            while len(members) < 3:
                with contextlib.suppress(aiosync.AiosyncError):
                    members.append(await stage.join())
        for member in members:
            member.abort()


@pytest.mark.parametrize("half_turns", range(6))
@pytest.mark.asyncio
async def test_a_link_that_is_made_just_before_another_peer_connects_is_counted(
    half_turns: int,
) -> None:
    """The loop turns a few times between the last frame of a handshake and the next connection.

    Two cases have the same number of turns, one on asyncio and the other on uvloop.
    """
    async with WeightServer("tcp://127.0.0.1:0", token=TOKEN, max_connections=3) as server:
        host, _, port = server.url.removeprefix("tcp://").rpartition(":")
        last = encode_frame(hello())
        peers = [await Peer.proven(server.url) for _ in range(3)]
        peers[0].sock.send(last)
        await until(lambda: server.status()["accepted"] == 1)
        peers[1].sock.send(last)
        for _ in range(half_turns // 2):
            await asyncio.sleep(0)
        late = socket.create_connection((host, int(port)))
        peers.append(await Peer.proven(server.url, late))
        for peer in peers[2:]:
            with contextlib.suppress(OSError):
                # One of the strangers was dropped to make room.
                peer.sock.send(last)
        await until(lambda: server.status()["accepted"] >= 3)
        with await dial(server.url) as another:
            assert await read_all(another) == b""
        told = server.status()
        assert (told["accepted"], told["connections"], told["refused"]["full"]) == (3, 3, 1)
        for peer in peers:
            peer.abort()


# -- peers with the token that send no Hello ------------------------------------------------------


@both
@pytest.mark.asyncio
async def test_peers_that_say_nothing_keep_no_place(kind: str) -> None:
    """Peers are strangers until they send a Hello, and make room for a peer that sends one."""
    own = 2 if kind == "server" else 1
    options: dict[str, Any] = {"handshake_timeout": PATIENCE, "max_connections": own + 8}
    async with scene(kind, **options) as stage:
        silent = [await Peer.proven(stage.url) for _ in range(8)]
        began = time.monotonic()
        (await stage.join()).abort()
        assert time.monotonic() - began < PATIENCE / 4
        # The first silent peer had taken longest, so it is the one that is dropped.
        await ends(silent.pop(0))
        for peer in silent:
            peer.abort()


@both
@pytest.mark.parametrize(
    "first",
    [None, Challenge(bytes(32)), Welcome(1, 1, 0), Ack(1, 1, AckStatus.APPLIED), "payload"],
)
@pytest.mark.asyncio
async def test_anything_but_a_hello(kind: str, first: Any) -> None:
    """A peer that sends another message first, or none, loses its link.

    Nothing is allocated for a payload before a Hello says who sends it.
    """
    async with scene(kind) as stage:
        peer = await Peer.proven(stage.url)
        with contextlib.suppress(aiosync.TransportError):
            if first == "payload":
                await peer.send(Fetch(0), [bytes(2**20)])
            elif first is not None:
                await peer.send(first)
        # A peer that sends nothing loses its link after handshake_timeout.
        await ends(peer)


# -- members that lie or flood --------------------------------------------------------------------


@both
@pytest.mark.asyncio
async def test_a_worker_that_says_it_has_a_version_of_the_future(kind: str) -> None:
    """A worker learns the epoch from its Welcome, and can then claim any version of it.

    No message of a worker may break send().
    """
    async with scene(kind) as stage:
        first = await stage.join()
        peer = await stage.join(epoch=first.welcome.epoch, version=2**62, worker_idx=7)
        first.abort()
        message = None
        async with asyncio.timeout(PATIENCE):
            # The peer gets the current version, as if it had none.
            while not isinstance(message, Update):
                message = (await peer.recv(into=lambda _, nbytes: [bytearray(nbytes)])).message
        if kind == "scheme":
            with contextlib.suppress(aiosync.PartialSyncError):
                # Other than those of the scene, this send addresses the peer, too.
                await stage.trainer.send(timeout=SOON)
        await stage.goes_on()
        peer.abort()


@both
@pytest.mark.asyncio
async def test_a_worker_that_claims_more_workers_behind_it_than_there_are_numbers(
    kind: str,
) -> None:
    """No number of a worker, nor their sum, ends a weight server or the link to its trainer."""
    async with scene(kind) as stage:
        peers = [await stage.join() for _ in range(3)]
        most = Ack(peers[0].welcome.epoch, 2**62, AckStatus.RECEIVED, behind=(2**32 - 1, 1))
        for peer in peers[:2]:
            await peer.send(most)
        if kind == "server":
            await until(lambda: stage.trainer.stats().workers[0].behind == 2**32 - 1)
        too_much = encode_frame(
            Ack(most.epoch, most.version, most.status),
            ext={"behind": struct.pack("<QQ", 2**64 - 1, 1)},
        )
        await asyncio.get_running_loop().sock_sendall(peers[2].sock, too_much)
        await ends(peers[2])
        await stage.goes_on()
        for peer in peers[:2]:
            peer.abort()


async def flood(sock: socket.socket, frame: bytes, nbytes: int) -> None:
    """Repeat a frame until the kernel has taken ``nbytes`` bytes, or takes none for a while."""
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
    """Answers do not pile up for a peer that never calls recv().

    The link of such a peer reads no further than one message.
    """
    async with scene(kind) as stage:
        peer = await stage.join(subscribe=False)
        await flood(peer.sock, encode_frame(Fetch(0)), 4 * 2**20)
        await stage.goes_on()
        waiting = [each for each in gc.get_objects() if type(each) is Current]
        assert len(waiting) < 16
        del waiting
        peer.abort()


@both
@pytest.mark.asyncio
async def test_a_worker_that_only_asks_and_never_answers_an_update_is_dropped(kind: str) -> None:
    """The answers to its questions are no progress of the update that it owes an answer to."""
    async with scene(kind, stall_timeout=0.5) as stage:
        peer = await stage.join(worker_idx=7)
        with pytest.raises(aiosync.TransportError):
            async with asyncio.timeout(PATIENCE):
                while True:
                    await peer.send(Fetch(0))
                    with contextlib.suppress(aiosync.RecvTimeout):
                        await peer.recv(timeout=0.1)


async def promise(link: TCPTransport, nbytes: int) -> None:
    """Announce a tensor of ``nbytes`` bytes, send one chunk of it, and wait for the link's end."""
    manifest = Manifest((LeafSpec("a", "uint8", (nbytes,), 0, nbytes),), nbytes)
    update = Update(5, 1, manifest.digest, chunk=(0, 2**31), checksum=bytes(16))
    await link.send(Welcome(5, 1, 0))
    await link.send(ManifestMessage(manifest))
    with contextlib.suppress(aiosync.TransportError):
        await link.send(update, [bytes(nbytes // 2**31)])
    await ends(link)


# The first size is beyond the limits. The second is within its limits, but no host has the memory.
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
    """A worker that connects to a hostile trainer, and the link and the socket of that trainer."""
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
    """Each empty update asks for an answer, and these answers must not pile up at the worker."""
    async with liar(nn.Module()) as (scheme, link, sock):
        await link.send(Welcome(5, 0, 0))
        await scheme.connecting
        empty = Manifest((), 0)
        await link.send(ManifestMessage(empty))
        await link.send(Update(5, 3, empty.digest, checksum=checksum(b"")))
        await scheme.wait_for_version(3)
        stale = Update(5, 2, empty.digest, checksum=checksum(b""))
        # The kernel's buffers are soon full of answers that the trainer does not read.
        await flood(sock, encode_frame(stale), 32 * 2**20)
        await until(lambda: scheme.link_lost is not None)
        assert "without reading the replies" in str(scheme.link_lost)


@both
@pytest.mark.asyncio
async def test_tokens_are_shown_nowhere(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with scene(kind) as stage:
        peer = await stage.join()
        hidden(peer, stage.trainer, stage.worker, stage.server, stage.refused)
        hidden(stage.server and stage.server.status(), pickle.dumps(stage.worker))
        peer.abort()
        # A pickle for a worker process shows no token, but the worker can connect with it.
        async with twin(stage.worker) as other:
            other.init_on_receiver("policy", worker_idx=1, model=linear())
            await other.connect()
    hidden(*(record.getMessage() for record in caplog.records))
