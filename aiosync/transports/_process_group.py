"""Payloads over a process group of ``torch.distributed``: point-to-point, in pipelined chunks.

Each link has a group of two ranks of its own, which meet through the control stream instead of a
store on a port; or uses a group that it was given. Point-to-point work of Gloo can only be waited
for by blocking, so each direction that is in use has one thread that waits. Drives torch;
must not import schemes. See ``docs/topics/clusters.md``.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import distributed as dist

from aiosync.errors import ConfigError, RemoteProtocolError, TransportBroken
from aiosync.transports._buffers import chunks_of
from aiosync.transports._carrier import COPYING, Carrier, Fetched, Progress, handed_over, outlast
from aiosync.transports._fork import close_in_child
from aiosync.transports._group_chunks import CHUNK_NBYTES, Chunk, tensor_of
from aiosync.transports._link_store import PORTS, LinkStore, gloo_group
from aiosync.wire import ExtValue, Setup

__all__ = ["GroupCarrier", "GroupMember"]

_WINDOW = 8  # chunks on their way at a time
_PATIENCE_SECONDS = 10.0
_NCCL_SECONDS = 3.0  # to connect, once the peer said where it is
_CLOSE_SECONDS = 1.0
# Gloo closes a connection on which one wait failed, and touches no memory any more, but tells only
# some of those who wait.
_CLOSED = timedelta(milliseconds=10)
_GO, _NOW, _GOT, _HAVE = "go", "now", "got", "have"
"""Keys of the messages of a side that is ready to receive, that sends now, that has received all,
or that has a key of the store; never keys of a store themselves."""

_of_parents: list[Any] = []
"""Groups of the process that this one was forked from. Their destructors would wait for ever."""


class GroupMember:
    """What a link needs to know about a process group that it was given.

    Args:
        group: The group; used for point-to-point calls only, and never closed.

    Raises:
        ConfigError: This process is not a member of it, or it is not one of Gloo.
    """

    def __init__(self, group: Any) -> None:
        self.group: Any = group
        self.rank: int = dist.get_rank(group)
        if self.rank < 0:
            raise ConfigError("this process is not a member of the given group")
        if dist.get_backend(group) != "gloo":
            raise ConfigError(
                f"the given group uses {dist.get_backend(group)}; only gloo groups can be shared"
            )


class GroupCarrier(Carrier):
    """Moves payloads between the two ranks of a process group.

    Args:
        rank: 0 at the side that listened, 1 at the side that dialled.
        host: Address of this host that the peer can reach.
        backend: ``"gloo"``, or ``"nccl"`` through memory of the current CUDA device.
        member: A group to use instead of one of its own.
        tag: Distinguishes links within a given group; the same at both ends.
        patience: Seconds without any progress, which is a chunk of 4 MiB, after which a transfer is
            given up.
    """

    follows_copies = True

    def __init__(
        self,
        rank: int,
        host: str,
        *,
        backend: Literal["gloo", "nccl"] = "gloo",
        member: GroupMember | None = None,
        tag: int = 0,
        patience: float = _PATIENCE_SECONDS,
    ) -> None:
        self.kind = backend
        self._loop = asyncio.get_running_loop()
        self._rank = rank
        self._host = host
        self._member = member
        self._tag = tag
        self._patience = timedelta(seconds=patience)
        self._peer = 1 - rank
        self._peer_known = asyncio.Event()
        self._group: Any = None if member is None else member.group
        self._making: asyncio.Future[None] | None = None
        self._store = LinkStore(self._say_from_thread)
        self._threads: ThreadPoolExecutor | None = None
        self._running: set[asyncio.Future[None]] = set()
        self._ending: asyncio.Future[None] | None = None
        self._stop = False
        close_in_child(self)
        self._said_rank = False
        self._nonce = secrets.token_hex(8)
        self._copying: Progress | None = None
        # Until the peer begins to take a payload, and until it has all of it.
        self._going: asyncio.Future[None] | None = None
        self._taken: asyncio.Future[None] | None = None
        self._coming: asyncio.Future[None] | None = None  # until the peer begins to send one

    # -- meeting -------------------------------------------------------------------------------

    def _say_from_thread(self, key: str, value: bytes) -> None:
        self._loop.call_soon_threadsafe(self.say, key, value)

    def hear(self, message: Setup) -> None:
        """See :class:`Carrier`."""
        if message.key in (_GO, _NOW, _GOT):
            waiter = {_GO: self._going, _NOW: self._coming, _GOT: self._taken}[message.key]
            if waiter is not None and waiter.cancelled():
                return  # this side has just called it off
            if waiter is None or waiter.done():
                raise RemoteProtocolError(f"unexpected {message.key!r} from the peer")
            waiter.set_result(None)
            return
        if self._member is None:
            if message.key == _HAVE:
                self._store.acknowledged(message.value.decode("utf-8", "replace"))
                return
            self._store.learn(message.key, message.value)
            self.say(_HAVE, message.key.encode())
            self._begin()
            return
        text, _, nonce = message.value.decode("ascii", "replace").partition(" ")
        if message.key != "rank" or not text.isdigit() or len(text) > 9 or len(nonce) != 16:
            raise RemoteProtocolError(
                "the peer has no rank in a process group: pass group= on both sides or on neither"
            )
        if self._peer_known.is_set():
            raise RemoteProtocolError("the peer announced its rank twice")
        rank, size = int(text), dist.get_world_size(self._member.group)
        if rank >= size or rank == self._member.rank:
            raise RemoteProtocolError(
                f"the peer announced rank {rank} of {size}, which is invalid or the rank of this "
                "side"
            )
        self._peer = rank
        # Gloo matches chunks by rank and tag: what another link of the two processes left, or has
        # under way, must not be taken for a part of this one's payloads.
        nonces = [self._nonce, nonce] if self._rank == 0 else [nonce, self._nonce]
        self._tag = zlib.crc32("/".join([str(self._tag), *nonces]).encode()) >> 2
        self._peer_known.set()
        self._begin()

    def _begin(self) -> None:
        """Do this side's part of the meeting."""
        if self._member is None:
            if self._making is None and not self._stop:
                self._making = self._start(self._make_group)
        elif not self._said_rank:
            self._said_rank = True
            self.say("rank", f"{self._member.rank} {self._nonce}".encode())

    async def _meet(self) -> None:
        """Have a group with the peer. The sender of a payload begins, before it tells of it.

        Cutting a transfer does not cut this: the two sides would wait for each other.
        """
        self._begin()
        if self._member is not None:
            await self._peer_known.wait()
        elif self._making is not None:
            await asyncio.shield(self._making)
        if self._stop:
            raise TransportBroken("the link has ended")

    async def settle(self) -> None:
        """See :class:`Carrier`."""
        if self._making is not None and not self._making.done() and not self._stop:
            await asyncio.wait({self._making}, timeout=_CLOSE_SECONDS)

    def hint(self) -> str:
        """See :class:`Carrier`."""
        making = self._making
        if making is None or self.kind != "gloo" or not self._store.met:
            return ""
        if making.done() and (making.cancelled() or making.exception() is None):
            return ""
        return f"Gloo had not connected the two hosts: {PORTS}"

    def _make_group(self) -> None:
        if self.kind == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timedelta(seconds=_NCCL_SECONDS)
            self._group = dist.ProcessGroupNCCL(self._store, self._rank, 2, nccl)
            return
        try:
            self._group = gloo_group(self._store, self._rank, self._host)
        except RuntimeError as exc:
            if not self._store.met:
                raise
            raise TransportBroken(
                f"Gloo could not connect {self._host} and the peer's host, although the control "
                f"stream stands: {PORTS}. It said: {_first_line(exc)}"
            ) from exc

    # -- moving --------------------------------------------------------------------------------

    async def offer(
        self, payload: list[memoryview], nbytes: int, memo: dict[Any, Any]
    ) -> Mapping[str, ExtValue]:
        """See :class:`Carrier`."""
        await self._meet()
        self._copying = memo.get(COPYING)
        self._going, self._taken = self._loop.create_future(), self._loop.create_future()
        return {}

    async def push(self, payload: list[memoryview], nbytes: int) -> None:
        """See :class:`Carrier`."""
        # A thread that waits for a peer that does not receive could not be called off.
        assert self._going is not None
        assert self._taken is not None
        await self._going
        self.say(_NOW)
        copying, self._copying = self._copying, None
        await self._in_thread(lambda: self._move(payload, self._post_send, copying))
        await self._taken

    async def fetch(
        self, ext: Mapping[str, ExtValue], nbytes: int, lend: Callable[[], list[memoryview]] | None
    ) -> Fetched:
        """See :class:`Carrier`."""
        assert lend is not None
        buffers = lend()
        await self._meet()
        self._coming = self._loop.create_future()
        self.say(_GO)
        await self._coming  # the peer's loop may be busy for long: no thread waits for that
        await self._in_thread(lambda: self._move(buffers, self._post_recv))
        self.say(_GOT)
        return Fetched(buffers)

    def _start(self, call: Callable[[], None]) -> asyncio.Future[None]:
        """Run in a thread."""
        if self._stop:
            raise TransportBroken("the link has ended")
        if self._threads is None:
            self._threads = ThreadPoolExecutor(2, f"aiosync-{self.kind}")
        once = handed_over(functools.partial(self._call, call))
        running = self._loop.run_in_executor(self._threads, once)
        self._running.add(running)
        running.add_done_callback(self._on_done)
        return running

    async def _in_thread(self, call: Callable[[], None]) -> None:
        """Run in a thread; when cancelled, still wait until it has ended."""
        running = self._start(call)
        cancelled = await outlast(running, self._stop_soon)
        if cancelled is not None:
            raise cancelled
        running.result()

    def _stop_soon(self) -> None:
        self._stop = True

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except RuntimeError as exc:  # of torch: the peer is gone, stopped or never came
            text = _first_line(exc)
            raise TransportBroken(f"the transfer over {self.kind} failed: {text}") from exc

    def _on_done(self, running: asyncio.Future[None]) -> None:
        self._running.discard(running)
        if not running.cancelled():
            running.exception()  # whoever waits for it raises it; when cut, the cut is the news
        if self._stop:
            self._let_go()

    def _move(
        self,
        pieces: list[memoryview],
        post: Callable[[list[memoryview]], Chunk],
        copying: Progress | None = None,
    ) -> None:
        waiting: deque[Chunk] = deque()
        sent, patience = 0, self._patience
        try:
            for chunk in chunks_of(pieces, CHUNK_NBYTES):
                if self._stop:
                    break
                if copying is not None:
                    sent += sum(view.nbytes for view in chunk)
                    copying.wait(sent)
                if len(waiting) >= _WINDOW:
                    waiting.popleft().wait(self._patience)
                waiting.append(post(chunk))
            while waiting:
                waiting.popleft().wait(self._patience)
        except RuntimeError:
            patience = _CLOSED
            raise
        finally:  # the memory is theirs until then
            for each in waiting:
                try:
                    each.wait(patience)
                except RuntimeError:
                    patience = _CLOSED
        if self._stop:
            raise TransportBroken("the link has ended")

    def _post_send(self, chunk: list[memoryview]) -> Chunk:
        tensor = tensor_of(chunk)
        if self.kind == "nccl":
            tensor = tensor.cuda()
        return Chunk(self._group.send([tensor], self._peer, self._tag), tensor, None)

    def _post_recv(self, chunk: list[memoryview]) -> Chunk:
        whole = len(chunk) == 1 and self.kind == "gloo"
        target = chunk if not whole else None
        if whole:
            tensor = tensor_of(chunk)
        else:
            size = sum(view.nbytes for view in chunk)
            device = "cuda" if self.kind == "nccl" else "cpu"
            tensor = torch.empty(size, dtype=torch.uint8, device=device)
        return Chunk(self._group.recv([tensor], self._peer, self._tag), tensor, target)

    # -- closing -------------------------------------------------------------------------------

    def end(self) -> None:
        """See :class:`Carrier`."""
        self._stop = True
        self._store.close()
        if self._loop.is_closed():
            self._let_go()
            return
        self._peer_known.set()
        for waiter in (self._going, self._coming, self._taken):
            if waiter is not None and not waiter.done():
                waiter.set_exception(TransportBroken("the link has ended"))
                waiter.exception()  # whoever waits for it raises it
        self._let_go()

    def _let_go(self) -> None:
        """Drop the group once no thread uses it: that closes its sockets, and tells the peer."""
        if self._running or self._ending is not None:
            return
        if self._threads is None or self._loop.is_closed():
            self._group = None
            return
        # Its destructor waits for torch's own threads.
        self._ending = self._loop.run_in_executor(self._threads, self._drop_group)
        self._threads.shutdown(wait=False)

    def _drop_group(self) -> None:
        self._group = None

    def close_after_fork(self) -> None:
        """In a forked child: never touch the group, whose threads are the parent's."""
        if self._group is not None:
            _of_parents.append(self._group)
        self._group, self._threads, self._stop = None, None, True
        self._running.clear()

    async def aclose(self) -> None:
        """See :class:`Carrier`.

        A thread that waits for a peer that stalls is left to end by itself, after
        ``patience``.
        """
        self.end()
        if self._running:
            await asyncio.wait(set(self._running), timeout=_CLOSE_SECONDS)
            await asyncio.sleep(0)  # _on_done()
        if self._ending is not None and self._threads is not None:
            await asyncio.wait({self._ending}, timeout=_CLOSE_SECONDS)
            if self._ending.done():
                self._threads.shutdown(wait=True)


def _first_line(exc: BaseException) -> str:
    return str(exc).partition("\n")[0]
