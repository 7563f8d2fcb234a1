"""A worker's half of the stream scheme where trainers dial: who came, and who has the worker.

Must not import torch, nor a concrete scheme.
"""

from __future__ import annotations

import asyncio

from aiosync._tasks import TaskOwner
from aiosync.errors import AiosyncError, ConnectError, RemoteProtocolError, TransportBroken
from aiosync.rendezvous.handshake import HANDSHAKE_SECONDS
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.options import StreamOptions
from aiosync.transports.base import Transport
from aiosync.transports.tcp import TCPTransport
from aiosync.wire import Hello, Refuse

__all__ = ["TrainersArriving"]

_MAX_UNGREETED = 8
"""Links that have not said who they are yet; one more ends the oldest."""

_SILENT_SECONDS = 60.0
"""How long a trainer may owe an answer where ``keepalive`` says nothing of it."""


class TrainersArriving(StreamOptions, WeightSyncScheme):
    """Methods of a receiver that listens: one trainer has it at a time."""

    _keepalive: float | None

    def _reset(self) -> None:
        super()._reset()
        self._arrived: TCPTransport | None = None  # the newest trainer's link, not taken yet
        self._arrival = asyncio.Event()
        self._taken: TCPTransport | None = None  # the link of a trainer that was taken last
        self._greeted: Transport | None = None  # the last link whose handshake is over
        self._hellos: dict[TCPTransport, Hello] = {}  # of those two
        # Which trainer was asked to say something, what it had said before, and when it was.
        self._asked: tuple[tuple[TCPTransport, int, bool], float] | None = None
        self._ungreeted: dict[TCPTransport, asyncio.Task[None]] = {}
        self._greetings = TaskOwner(self._on_listener_crash)

    def _on_sender(self, link: TCPTransport) -> None:
        """Hear who dialled, whether or not anybody waits for a link."""
        if len(self._ungreeted) >= _MAX_UNGREETED:
            oldest = next(iter(self._ungreeted))
            self._greetings.cancel(self._ungreeted.pop(oldest))
            oldest.abort()  # a task that never ran does not
        task = self._greetings.start(self._hear(link), "aiosync greeting of a trainer")
        self._ungreeted[link] = task

    def _on_listener_crash(self, error: BaseException) -> None:
        if self._receiver is not None:
            self._receiver.fail(error)

    async def _hear(self, link: TCPTransport) -> None:
        try:
            hello = await self._check_sender(link)
            why_not = self._why_not(hello)
            if why_not is not None:
                await link.send(why_not, timeout=HANDSHAKE_SECONDS)
                await link.aclose()
                return
        except AiosyncError:
            link.abort()  # no trainer, or it has gone; the next one may be right
        except BaseException:  # cancelled, or a bug that _on_listener_crash() is told
            link.abort()
            raise
        else:
            self._take_newest(link, hello)
        finally:
            self._ungreeted.pop(link, None)

    async def _check_sender(self, link: Transport) -> Hello:
        message = (await link.recv(timeout=HANDSHAKE_SECONDS)).message
        if not isinstance(message, Hello) or message.role != "sender":
            raise RemoteProtocolError("expected the Hello of a sender")
        return message

    # -- one at a time -------------------------------------------------------------------------

    def _why_not(self, hello: Hello) -> Refuse | None:
        """Why a trainer cannot have this worker now, in words for it; ``None`` if it can.

        It is an error after which it tries again: the other one may leave.
        """
        holder = self._holder()
        if holder is None:
            return None
        has = self._hellos[holder]
        if hello.epoch is not None and hello.epoch == has.epoch:
            return None  # the same trainer: its old link broke, which nobody may have noticed
        limit = _SILENT_SECONDS if self._keepalive is None else 2 * self._keepalive
        silent = self._silent_for(holder)
        if silent > limit:
            return None
        what = f"another trainer has this worker: {holder.channel.name}, process {has.pid}"
        if silent > 1.0:
            what += f". It has not answered for {silent:.0f} s, and keeps its place for {limit:g} s"
        advice = "End one of the two; the one that is left gets the worker"
        return Refuse(ConnectError.__name__, f"{what}. {advice}")

    def _holder(self) -> TCPTransport | None:
        """The link of the trainer that has this worker, or waits for it to connect."""
        links = [self._arrived, self._taken]
        return next((each for each in links if each is not None and not each.channel.ended), None)

    def _silent_for(self, holder: TCPTransport) -> float:
        """Ask a trainer to say something; the seconds for which it has owed an answer."""
        receiver = self._receiver
        if holder is not self._taken or receiver is None or not self._subscribes:
            return 0.0  # it owes nothing; one that is asked by pull() only would bring weights
        can_ask = self._greeted is holder and receiver.transport is holder
        state = (holder, receiver.progress, can_ask)
        now = asyncio.get_running_loop().time()
        if self._asked is None or self._asked[0] != state:
            self._asked = state, now
            if can_ask:
                receiver.pulls.ask_for_a_word()
        return now - self._asked[1]

    def _take_newest(self, link: TCPTransport, hello: Hello) -> None:
        """The newest link of a trainer replaces those before it: they may have died unnoticed."""
        taken, waiting, receiver = self._taken, self._arrived, self._receiver
        in_use = taken is not None and not taken.channel.ended
        lost = receiver is not None and receiver.error is not None
        if self._closed or lost or link.channel.ended or (in_use and self.reconnect == 0):
            link.abort()  # nobody would ever take it
            return
        self._arrived = link
        self._hellos[link] = hello
        link.channel.call_on_end(lambda: self._on_arrived_end(link))
        self._arrival.set()
        if waiting is not None:
            waiting.abort()
        if taken is not None and in_use:
            # Whoever reads from it asks for another link, which is here already.
            taken.channel.fail(TransportBroken("the trainer opened a newer link"))

    def _on_arrived_end(self, link: TCPTransport) -> None:
        self._hellos.pop(link, None)
        if self._arrived is link:
            self._arrived = None
            asyncio.get_running_loop().call_soon(link.abort)  # it is in the middle of its end

    # -- closing -------------------------------------------------------------------------------

    def _abort_unused_links(self) -> None:
        super()._abort_unused_links()
        if not self._inherited:
            self._greetings.abort()
        waiting, self._arrived = self._arrived, None
        for link in [*self._ungreeted, *([] if waiting is None else [waiting])]:
            link.abort()
        self._ungreeted.clear()
