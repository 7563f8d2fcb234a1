"""Links between one sender and its receivers of buckets, which outlive a sync.

A sync is a round. A receiver says in a Hello that it is ready for one, over the link that it has
or over a new one. The sender begins with a Welcome once the member is ready, which answers with a
Hello that says it is not ready for another round; a member whose link ends before may dial again.
The sender then sends each bucket to all members at the same time, and after the last one a Current
with the number of frames. A member answers with one Ack once its consumer has taken all tensors.

===================  ==============================  ==========================================
state of a member    event                           what follows
===================  ==============================  ==========================================
connected            Hello: ready                    ready
ready                the sender begins               Welcome: asked
asked                Hello: not ready                in the round
ready, asked         end of link                     it has time to dial again
in the round         a frame is due                  the frame is sent
in the round         Ack APPLIED after the Current   connected: the link stays
any                  NACK, end of link, or deadline  failed: the link is closed, others go on
in the round, ready  the sender gives the round up   NACK with the cause; the link is closed
connected, ready     NACK of a round that it took    the member closes the link, and dials anew
===================  ==============================  ==========================================

Everything here runs on the event loop of :mod:`aiosync.sync`, so that links live on while a
framework blocks its own loop, or makes a new one for each call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiosync._log import log
from aiosync._repr import text_of
from aiosync._tasks import Notifier, TaskOwner
from aiosync.errors import (
    AckTimeout,
    AiosyncError,
    ApplyError,
    ConnectTimeout,
    LocalProtocolError,
    PartialSyncError,
    PeerClosed,
    RemoteProtocolError,
    TransportBroken,
    TransportClosed,
)
from aiosync.integrations._buckets import (
    Frame,
    Landing,
    NamedTensor,
    Room,
    Weights,
    bucket_nbytes,
    each_of,
    pack,
)
from aiosync.protocol import seconds_text, validate_seconds
from aiosync.rendezvous.listener import StreamListener
from aiosync.sync._portal import lease
from aiosync.transports import TLS, Credentials, Received, TCPTransport
from aiosync.transports.base import make_ack
from aiosync.transports.credentials import Secret, read_token
from aiosync.types import AckStatus
from aiosync.wire import (
    Ack,
    Current,
    Hello,
    ManifestMessage,
    Message,
    Refuse,
    Update,
    Welcome,
    checksum,
)

__all__ = ["BucketReceiver", "BucketSender", "Options", "Source", "process_name"]

_T = TypeVar("_T")

_MODEL = "buckets"
# Time for the farewell to a member, and for a NACK to arrive after its link has failed.
_FAREWELL_SECONDS = 1.0
# Time for a member whose link has ended to dial again.
_RETURN_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of both ends of the links.

    Attributes:
        address: Address that a sender listens at: ``tcp://host:port``, by default a free port of
            the address that Ray has for this host.
        token: The shared token. Without one here, in ``token_file`` or in the environment variable
            ``AIOSYNC_TOKEN``, the sender makes one, and the framework carries it to the receivers.
        token_file: File with the token.
        tls: Arguments of :class:`aiosync.TLS`, the same on both sides; ``None`` does not encrypt.
        timeout: Seconds to connect, and for each bucket to be made, to travel and to be consumed.
            A receiver waits twice as long, as the sender may have to wait for other receivers.

    Raises:
        ConfigError: An option has an illegal value.
    """

    address: str | None = None
    token: str | bytes | Secret | None = field(default=None, repr=False)
    token_file: str | None = None
    tls: Mapping[str, Any] | None = None
    timeout: float = 300.0

    def __post_init__(self) -> None:
        validate_seconds("timeout", self.timeout)

    def credentials(self, made: Secret | None) -> Credentials:
        """Return this end's credentials, with the token that the sender made if there is no other.

        Raises:
            ConfigError: The token file or a certificate cannot be used.
        """
        token = self.token
        if token is None:
            token = read_token(self.token_file, "token_file") or made
        return Credentials(token=token, tls=None if self.tls is None else TLS(**self.tls))


@dataclass(frozen=True, slots=True)
class Source:
    """A sender, for its receivers. Frameworks carry it; it may be pickled.

    Attributes:
        url: Address to dial.
        token: The token that the sender made; ``None`` if the user gave one to both sides.
        name: Name of the sender in errors.
    """

    url: str
    token: Secret | None
    name: str


def process_name(role: str) -> str:
    """Return the name of this process in errors of other processes."""
    return f"{role} ({socket.gethostname()}, process {os.getpid()})"


class _Home:
    """The part of the loop of :mod:`aiosync.sync` that one sender or receiver uses.

    Args:
        drop: Drops the links of that sender or receiver. Called on the loop.

    Attributes:
        tasks: Tasks on the loop; an error of one that is no failure of a link is logged.
        close: Ends every task and link at once. For any thread.
    """

    def __init__(self, drop: Callable[[], None]) -> None:
        self._drop = drop
        self._lease = lease(self)
        self.tasks: TaskOwner = TaskOwner(_log_crash)
        self.close: Callable[[], None] = self._lease.abort

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the loop, and block this thread until it ends."""
        return self._lease.call(coroutine)

    def start(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine on the loop in the background."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._lease.loop)

    def forgotten(self) -> None:
        """Give no warning that the engine was never closed: frameworks close none."""

    def abort(self) -> None:
        """End every task and link. Called on the loop."""
        self.tasks.abort()
        self._drop()


def _log_crash(error: BaseException) -> None:
    """Log an unexpected error of a link's task; the round of the link then ends by its deadline."""
    log(logging.ERROR, "failed", "a link of buckets ended", model=None, error=error)


# -- the side that sends --------------------------------------------------------------------------


class _Peer:
    """The sender's end of a link to one receiver.

    Attributes:
        link: The link.
        rank: Rank of the receiver; -1 until a round lets it in.
        is_ready: True if the receiver waits for the next round.
        round_number: Number of the newest round that the receiver was asked into; 0 before.
        answer: Ack of the receiver to this round; ``None`` while it has sent none.
        error: Reason why the link was closed; ``None`` while it is open.
    """

    def __init__(self, link: TCPTransport) -> None:
        self.link = link
        self.rank = -1
        self.is_ready = False
        self.round_number = 0
        self.answer: Ack | None = None
        self.error: AiosyncError | None = None

    def fail(self, error: AiosyncError) -> None:
        """Close the link, with this error as the reason unless it has one already."""
        self.error = self.error or error
        self.is_ready = False
        self.link.abort()


class BucketSender:
    """The side that sends: it listens, and sends each round to its members.

    Args:
        bucket_size: Size of a bucket in bytes. Two of them are in host memory during a sync.
        options: Options of the links.
        role: Role of this process in errors of the receivers.

    Attributes:
        source: This sender, for its receivers.

    Raises:
        ConfigError: An option cannot be used.
    """

    def __init__(self, bucket_size: int, options: Options, role: str) -> None:
        self._nbytes, self._seconds = bucket_nbytes(bucket_size), options.timeout
        made = Secret(secrets.token_bytes(32))
        credentials = options.credentials(made)
        url = options.address or f"tcp://{_this_host()}:0"
        self._listener = StreamListener(url, credentials=credentials, untaken=options.timeout)
        token = made if credentials.token == made else None
        self.source: Source = Source(self._listener.url, token, process_name(role))
        # Rank and name of each member, and the newest link of each receiver, by session.
        self._members: Mapping[bytes, tuple[int, str]] = {}
        self._peers: dict[bytes, _Peer] = {}
        # The round: its number, its members, and the errors of those that were not ready.
        self._number = 0
        self._round: list[_Peer] = []
        self._absent: dict[int, AiosyncError] = {}
        # The NACK of a failed round, for members that were not ready when it failed.
        self._owed: dict[bytes, Message] = {}
        # Notified when a receiver has connected, has sent a message or has lost its link.
        self._changed = Notifier()
        self._home = _Home(self._drop)
        self.close = self._home.close
        self._home.call(self._listen())

    async def _listen(self) -> None:
        self._listener.start(self._on_link, _log_crash)

    def _drop(self) -> None:
        """Stop listening, and close every link."""
        self._listener.close()
        for peer in self._peers.values():
            peer.fail(TransportClosed("this side was closed"))

    def _on_link(self, link: TCPTransport, hello: Hello) -> None:
        """Take the link of a receiver in place of its earlier one, and listen to it."""
        session = hello.session or b""
        if session in self._peers:
            self._peers[session].fail(TransportClosed("it dialled again"))
        peer = self._peers[session] = _Peer(link)
        listening = self._listen_to(peer, session, hello)
        self._home.tasks.start(listening, "aiosync link to a receiver")

    async def _listen_to(self, peer: _Peer, session: bytes, message: Message) -> None:
        """Handle the messages of a receiver, its first Hello included, until its link ends."""
        link = peer.link
        try:
            while True:
                if isinstance(message, Hello) and message.model_id == _MODEL:
                    peer.is_ready = message.subscribe
                    if peer.is_ready:
                        await self._refuse_if_left_out(peer, session)
                elif isinstance(message, Ack) and message.epoch == self._number:
                    self._take_answer(peer, message)
                else:
                    raise RemoteProtocolError(f"{link.name} sent {type(message).__name__}")
                self._changed.notify()
                message = (await link.recv()).message
        except AiosyncError as exc:
            peer.fail(exc)
        finally:
            link.abort()
            self._changed.notify()

    async def _refuse_if_left_out(self, peer: _Peer, session: bytes) -> None:
        """Refuse a receiver that is no member any more, or has yet to hear why a round failed."""
        if session not in self._members:
            text = "this process is no member of it any more"
            await self._refuse(peer, Refuse(PeerClosed.__name__, text))
        elif session in self._owed:
            await self._refuse(peer, self._owed.pop(session))

    def _take_answer(self, peer: _Peer, ack: Ack) -> None:
        """Keep a member's answer to this round; a NACK is the reason to close its link."""
        peer.answer = ack
        if ack.status is AckStatus.NACK:
            text = f"{peer.link.name}: {ack.error_text}"
            peer.fail(ApplyError(text, worker_idx=peer.rank, remote_type=ack.error_type))

    def expect(self, members: Mapping[bytes, tuple[int, str]]) -> None:
        """Set the members of the next rounds, and close the links to all others.

        Args:
            members: Session of each member: its rank, and its name in errors.
        """
        self._home.call(self._expect(members))

    async def _expect(self, members: Mapping[bytes, tuple[int, str]]) -> None:
        self._members, self._owed = members, {}
        for session in self._peers.keys() - members.keys():
            self._peers.pop(session).fail(TransportClosed("it is no member any more"))

    async def send(self, weights: Weights, version: int | None = None) -> dict[str, float]:
        """Send one round to its members, and wait until all of them have taken it.

        The weights are iterated to their end even if every member has failed, because all ranks of
        a trainer may have to gather each tensor together.

        Args:
            weights: Names and tensors. Each tensor is copied before the next one is asked for.
            version: Version for errors; by default the number of the round.

        Returns:
            Seconds, bytes and members of the round.

        Raises:
            PartialSyncError: Some members did not take it; the others have it.
            ConfigError: A tensor cannot travel. No member has the whole round.

        Cancellation:
            Ends the round: members that have not taken it raise, and their links are closed.
        """
        began, nbytes, count = time.perf_counter(), 0, 0
        source = each_of(weights)
        # The step of the round that runs on the loop of the links; the next one waits for its end.
        busy: Future[Any] = self._home.start(self._begin())
        try:
            async for frame in pack(source, self._nbytes):
                count, nbytes = count + 1, nbytes + len(frame.payload)
                # The buffer is read once here, while the frame before it is on its way.
                sum_of_frame = checksum(frame.payload)
                await asyncio.wrap_future(busy)
                busy = self._home.start(self._deliver(frame, count, sum_of_frame))
            await asyncio.wrap_future(busy)
            busy = self._home.start(self._finish(count, version))
            outcome = await asyncio.wrap_future(busy)
        except BaseException as exc:  # raised again: the members are told first
            if count == 0:
                busy.cancel()  # no member need get ready any more
            self._home.start(self._give_up(busy, f"{type(exc).__name__}: {text_of(exc)}"))
            if isinstance(exc, Exception):
                async for _ in source:
                    pass
            raise
        if isinstance(outcome, PartialSyncError):
            raise outcome
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "nbytes": float(nbytes), "members": float(outcome)}

    async def _begin(self) -> None:
        """Let each member into a new round once it is ready; note why one does not get ready."""
        for peer in self._round:
            peer.fail(TransportClosed("the next sync began before this one had ended"))
        self._number, self._round, self._absent, self._owed = self._number + 1, [], {}, {}

        async def welcome(session: bytes, rank: int, name: str) -> None:
            try:
                peer = await self._let_in(session, rank, name)
                # The list may have become another one meanwhile.
                self._round.append(peer)
            except AiosyncError as exc:
                self._absent[rank] = exc

        await asyncio.gather(*(welcome(each, *known) for each, known in self._members.items()))

    async def _let_in(self, session: bytes, rank: int, name: str) -> _Peer:
        """Let a member into the round once it asks for weights, and return its link.

        This begins anew if the member's link ends before it knows that it is in.
        """
        awaited, lost = "connect", None
        grace = min(_RETURN_SECONDS, self._seconds)
        try:
            async with asyncio.timeout(self._seconds) as whole:
                while True:
                    awaited = "connect"
                    # A member that was killed does not come back: a shorter time is enough.
                    async with asyncio.timeout(grace):
                        peer = await self._linked_peer(session)
                    awaited = "ask for weights"
                    while not peer.error and not peer.is_ready:
                        await self._changed.wait()
                    peer.rank, peer.link.name, peer.answer = rank, name, None
                    awaited = "answer"
                    await self._welcome(peer)
                    if not peer.error:
                        return peer
                    lost = peer.error
        except TimeoutError as exc:
            why = "; ".join(self._listener.refusals())
            within = seconds_text(self._seconds if whole.expired() else grace)
            late = ConnectTimeout(
                f"{name} did not {awaited} within {within}" + (f" (refused: {why})" if why else "")
            )
            if awaited == "answer":
                # Its answer to this Welcome would be taken for the one to the next Welcome.
                peer.fail(late)
            raise late from (lost or exc)

    async def _linked_peer(self, session: bytes) -> _Peer:
        """Wait until a member has a link that has not failed, and return its end here."""
        while (peer := self._peers.get(session)) is None or peer.error:
            await self._changed.wait()
        return peer

    async def _welcome(self, peer: _Peer) -> None:
        """Tell a member that it is in the round, and wait until it knows or its link has ended."""
        peer.round_number = self._number
        # The link may have ended while the member waited; the loop below then sees the error.
        with contextlib.suppress(AiosyncError):
            await peer.link.send(Welcome(self._number, 0, peer.rank), timeout=self._seconds)
        while not peer.error and peer.is_ready:
            await self._changed.wait()

    async def _deliver(self, frame: Frame, count: int, sum_of_frame: bytes) -> None:
        """Send frame number ``count`` to all members that have not failed, at the same time."""
        digest = frame.manifest.digest
        update = Update(self._number, count, digest, chunk=frame.chunk, checksum=sum_of_frame)
        messages: list[tuple[Message, list[memoryview]]] = [(update, [frame.payload])]
        # The manifest of a bucket goes before the first frame of it.
        if frame.chunk[0] == 0:
            messages.insert(0, (ManifestMessage(frame.manifest), []))

        async def send(peer: _Peer) -> None:
            try:
                for message, payload in messages:
                    await peer.link.send(message, payload, timeout=self._seconds)
            except AiosyncError as exc:
                await self._await_reason(peer)
                peer.fail(exc)

        await asyncio.gather(*(send(peer) for peer in self._round if peer.error is None))

    async def _await_reason(self, peer: _Peer) -> None:
        """Wait a second for the member's own reason: it may arrive after the error of the link."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_SECONDS):
                while peer.error is None:
                    await self._changed.wait()

    async def _finish(self, count: int, version: int | None) -> int | PartialSyncError:
        """End the round, wait for all answers; return their number, or the error if one failed."""
        members, self._round = self._round, []
        number, seconds = self._number, self._seconds

        async def await_answer(peer: _Peer) -> None:
            try:
                if peer.error is None:
                    await peer.link.send(Current(number, count), timeout=seconds)
                async with asyncio.timeout(seconds):
                    while peer.error is None and peer.answer is None:
                        await self._changed.wait()
            except AiosyncError as exc:
                await self._await_reason(peer)
                peer.fail(exc)
            except TimeoutError:
                late = f"{peer.link.name} did not take all weights within {seconds_text(seconds)}"
                peer.fail(AckTimeout(late, worker_ids=[peer.rank], version=number))

        await asyncio.gather(*map(await_answer, members))
        failed = {peer.rank: peer.error for peer in members if peer.error is not None}
        failed |= self._absent
        if failed:
            acked = [peer.rank for peer in members if peer.error is None]
            # It is returned, as the weights themselves may raise an error of this type.
            return PartialSyncError(acked=acked, failed=failed, version=version or number)
        return len(members)

    async def _give_up(self, busy: Future[Any], cause: str) -> None:
        """Tell the members why the round failed, once its step that runs (``busy``) has ended."""
        # All of this is noted at once, because the next round may begin while the step still runs.
        done = {
            session
            for session, peer in self._peers.items()
            if peer.answer is not None and peer.answer.epoch == self._number
        }
        refused = {
            session: peer
            for session, peer in self._peers.items()
            if session not in done and (peer.is_ready or peer.round_number == self._number)
        }
        # It names the round, because a member's answer to that may be on its way here.
        nack = make_ack(self._number, 1, AckStatus.NACK, PeerClosed(cause))
        # The other members are told when they next get ready; those that have answered are not.
        others = self._members.keys() - done - refused.keys()
        self._round, self._owed = [], dict.fromkeys(others, nack)
        for peer in refused.values():
            peer.is_ready = False
        await asyncio.wait([asyncio.wrap_future(busy)])
        await asyncio.gather(*(self._refuse(peer, nack) for peer in refused.values()))

    async def _refuse(self, peer: _Peer, message: Message) -> None:
        # A member that does not take it sees the end of its link.
        with contextlib.suppress(AiosyncError):
            await peer.link.send(message, timeout=_FAREWELL_SECONDS)
        peer.fail(TransportClosed("this sync failed"))


def _this_host() -> str:
    """Return the address that Ray has for this host, in brackets if it is one of IPv6."""
    import ray

    address: Any = ray.util
    host = str(address.get_node_ip_address()).strip("[]")
    return f"[{host}]" if ":" in host else host


# -- the side that receives -----------------------------------------------------------------------


class BucketReceiver:
    """The side that receives: it dials the sender, and keeps the link from round to round.

    Args:
        bucket_size: Size of a bucket in bytes, the same as at the sender. Three of them may be in
            host memory during a sync, and more while the consumer keeps tensors.
        options: Options of the links.

    Attributes:
        session: Identifies this object to the sender.
    """

    def __init__(self, bucket_size: int, options: Options) -> None:
        self.session: bytes = uuid.uuid4().bytes
        self._options, self._seconds = options, options.timeout
        # The sender may wait for slower members before it goes on with this one.
        self._patience = 2 * options.timeout
        self._room = Room(bucket_nbytes(bucket_size))
        self._source: Source | None = None
        self._rank = 0
        # Number of the newest round of this sender that was taken; 0 before.
        self._taken = 0
        self._link: TCPTransport | None = None
        # True while a round is under way on the link, which then cannot be kept for another one.
        self._is_reading = False
        self._home = _Home(self._drop)
        self.close = self._home.close

    def connect(self, source: Source, rank: int) -> None:
        """Connect to a sender, unless the link to it is still there.

        Args:
            source: The sender.
            rank: Rank of this receiver.

        Raises:
            ConnectError: The sender cannot be reached, or refused this side.
            ConnectTimeout: The sender did not answer in time.
        """
        self._home.call(self._connect(source, rank))

    async def _connect(self, source: Source, rank: int) -> None:
        if source != self._source:
            self._drop()
            self._taken = 0
        self._source, self._rank = source, rank
        await self._reach(is_ready=False)

    async def _reach(self, *, is_ready: bool) -> TCPTransport:
        """Return the kept link or a new one; the sender then knows whether this side is ready."""
        source = self._source
        assert source is not None
        # A consumer that failed in the middle of a round has left the rest of it in the link.
        if self._link is not None and (self._link.ended or self._is_reading):
            self._drop()
        link, is_new = self._link, self._link is None
        if link is None:
            link = self._link = await TCPTransport.connect(
                source.url,
                credentials=self._options.credentials(source.token),
                name=source.name,
                untaken=self._seconds,
                timeout=self._seconds,
            )
        if is_new or is_ready:
            self._is_reading = is_ready
            await self._hello(link, is_ready=is_ready)
        return link

    async def _hello(self, link: TCPTransport, *, is_ready: bool) -> None:
        """Tell the sender that this side is ready for a round, or that it is not."""
        hello = Hello(
            "receiver", _MODEL, os.getpid(), self._rank, session=self.session, subscribe=is_ready
        )
        await link.send(hello, timeout=self._seconds)

    def _drop(self) -> None:
        """Close the link, if there is one."""
        link, self._link, self._is_reading = self._link, None, False
        if link is not None:
            link.abort()

    async def _begin(self) -> _Reader:
        """Say that this side is ready, and wait until the sender begins."""
        if self._source is None:
            raise LocalProtocolError("there is no sender to receive from: call connect() first")
        was_kept = self._link is not None and not self._is_reading
        try:
            link, welcome = await self._hail()
        except (PeerClosed, TransportBroken):
            if not was_kept:
                raise
            # The sender had closed the link meanwhile, and this side did not know yet.
            self._drop()
            link, welcome = await self._hail()
        reader = _Reader(link, welcome, self._room, self._patience)
        # The sender waits for this answer to its Welcome.
        await self._hello(link, is_ready=False)
        return reader

    async def _hail(self) -> tuple[TCPTransport, Message]:
        """Say that this side is ready; return the link, and the sender's message that begins."""
        link = await self._reach(is_ready=True)
        first = (await link.recv(timeout=self._patience)).message
        if isinstance(first, Ack) and first.epoch == self._taken:
            # The sender gave the last round up while the answer of this side was on its way.
            raise PeerClosed(f"{link.name} closed the link after the last sync")
        return link, first

    async def buckets(self) -> AsyncGenerator[list[NamedTensor], None]:
        """Yield the tensors of a round, bucket by bucket, while the next bucket arrives.

        The tensors are on the CPU, and the consumer's: their memory is used again only when no
        tensor refers to it any more.

        Raises:
            PeerClosed: The sender ended, or gave this round up; the text says why.
            RecvTimeout: The sender made no progress in time.
            RemoteProtocolError: The bytes changed on the way, or the two sides have different
                bucket sizes.
            LocalProtocolError: There was no :meth:`connect`.

        Cancellation:
            Leaves the round: the sender is told, and the link is closed.
        """
        start = self._home.start
        reader: _Reader | None = None
        is_complete = False
        coming: Future[Any] = start(self._begin())
        try:
            reading: _Reader = await asyncio.wrap_future(coming)
            reader = reading
            coming = start(reading.next_bucket())
            while (bucket := await asyncio.wrap_future(coming)) is not None:
                coming = start(reading.next_bucket())
                yield bucket
                del bucket
            await asyncio.wrap_future(start(reading.confirm()))
            self._taken = reading.number
            is_complete = True
        finally:
            coming.cancel()
            start(self._end(reader, is_complete=is_complete))

    def stage(self) -> list[NamedTensor]:
        """Receive a whole round, and return its tensors. Blocks; raises as :meth:`buckets`."""
        return self._home.call(self._stage())

    async def _stage(self) -> list[NamedTensor]:
        return [item async for bucket in self.buckets() for item in bucket]

    async def _end(self, reader: _Reader | None, *, is_complete: bool) -> None:
        """End the round of a reader; if it is not complete, tell the sender and close the link."""
        # The link may belong to the next round already, if a consumer was slow to fail.
        if reader is not None and not is_complete:
            reader.leave()
        if reader is None or reader.link is self._link:
            self._is_reading = False
            if not is_complete:
                self._drop()
            elif self._link is not None:
                self._link.subscribe(self._on_message)

    def _on_message(self, received: Received) -> bool:
        """Close the link at a message between two rounds; return False in a round."""
        is_between = not self._is_reading
        # The sender may give a round up before it has the answer of this side. Its NACK would
        # be taken for the begin of the next round.
        if is_between:
            self._drop()
        return is_between

    def clear(self) -> None:
        """Give the memory of buckets back; tensors that are in use keep theirs."""
        self._room.clear()


class _Reader:
    """The receiver's half of one round.

    Args:
        link: The link.
        first: The message with which the sender begins.
        room: Memory for the buckets.
        seconds: Time for each message.

    Attributes:
        link: As given.
        number: Number of the round.
    """

    def __init__(self, link: TCPTransport, first: Message, room: Room, seconds: float) -> None:
        self.link = link
        self._room, self._seconds = room, seconds
        self._check(first, Welcome)
        assert isinstance(first, Welcome)
        self.number, self._count = first.epoch, 0

    async def next_bucket(self) -> list[NamedTensor] | None:
        """Return the tensors of the next bucket; ``None`` after the last one."""
        message = (await self.link.recv(timeout=self._seconds)).message
        if message == Current(self.number, self._count):
            return None
        self._check(message, ManifestMessage)
        assert isinstance(message, ManifestMessage)
        landing = Landing(message.manifest, self._room.find(message.manifest))
        is_complete = False
        while not is_complete:
            received = await self.link.recv(into=landing, timeout=self._seconds)
            self._check(received.message, Update)
            is_complete = landing.take(received)
            self._count += 1
        return landing.tensors()

    def _check(self, message: Message, expected: type[Message]) -> None:
        """Raise unless a message has the expected type; Refuse and NACK name why it failed."""
        if isinstance(message, Refuse | Ack):
            raise PeerClosed(f"{self.link.name} gave this sync up: {message.error_text}")
        if not isinstance(message, expected):
            raise RemoteProtocolError(f"{self.link.name} sent an unexpected {message!r:.200}")

    async def confirm(self) -> None:
        """Tell the sender that the consumer has taken all tensors."""
        # The version of an ack is at least 1, also if there were no tensors.
        ack = make_ack(self.number, max(1, self._count), AckStatus.APPLIED, None)
        await self.link.send(ack, timeout=self._seconds)

    def leave(self) -> None:
        """Tell the sender that the consumer stopped before the end."""
        error = ApplyError("its consumer failed before it had taken all weights: see its log")
        with contextlib.suppress(AiosyncError):
            self.link.send_nowait(make_ack(self.number, 1, AckStatus.NACK, error))
