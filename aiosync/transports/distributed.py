"""Links over ``torch.distributed``: messages over a stream, large payloads over a group of Gloo.

Payloads move point-to-point, in pipelined chunks. Each link has a process group of its own with two
ranks, which find each other through the control stream instead of a store on a port. Only a
blocking call can wait for work of Gloo, so each direction that is in use has one thread that waits.
This module imports torch; it must not import schemes. See ``docs/topics/torch-distributed.md``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import sys
import threading
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from datetime import timedelta
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from torch import distributed as dist

from aiosync.errors import AiosyncError, ConfigError, RemoteProtocolError, TransportBroken
from aiosync.transports._forks import close_in_child
from aiosync.transports.data_plane import (
    INLINE_NBYTES,
    DataPlaneTransport,
    PayloadState,
    Progress,
    Threads,
    copy_bytes,
    cut,
    first_line,
)
from aiosync.transports.framed_link import FramedTransport
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Cancellation, Capabilities, Limits
from aiosync.wire import ExtValue, Setup

__all__ = ["DistributedTransport", "check_backend"]

# A few chunks of this size under way are faster than one big chunk, and than many small ones: see
# docs/benchmarks.md.
_CHUNK_NBYTES = 4 * 2**20
# Number of chunks under way at a time.
_WINDOW = 8
_CLOSE_SECONDS = 1.0
_MEET_SECONDS = 30.0
_MAX_KEYS = 64
# Time for the connection, once the peer has sent its address. Linux sends no SYN again within 2 s
# of this (it does 1, 3, 7 and 15 s after the first one, since Linux 6.5 also after 2, 4, 5, 11 and
# 19 s): a SYN that succeeded just as Gloo gives up would find memory that is being freed.
_CONNECT_SECONDS = 13.0
# Gloo counts a connection as failed after this many times the timeout of its group.
_GLOO_WAITS = 5
# Once one wait on a connection has failed, Gloo closes the connection and touches no memory any
# more, but ends only some of the other waits. So these get only this time.
_CLOSED = timedelta(milliseconds=10)
_GO, _NOW, _GOT, _HAVE = "go", "now", "got", "have"
"""Keys of Setup messages: this side is ready to receive, sends now, has received the whole payload,
or has a key of the store. Torch never uses these names as keys of a store."""

_PORTS = (
    "hosts must reach each other on any port, in both directions, so open these in firewalls "
    "between them, or use TCPWeightSyncScheme, which needs one port of the trainer only"
)

_Wait: TypeAlias = "Callable[[timedelta], object]"
"""Waits for a chunk; raises RuntimeError if it was not moved in that time. It has to be called."""

_Post: TypeAlias = "Callable[[list[memoryview]], _Wait]"
"""Begins to send or to receive the chunk in these buffers."""

_of_parents: list[Any] = []
"""Groups of the process from which this one was forked.

They are kept because their destructors would wait for ever.
"""


def check_backend(backend: str) -> Literal["gloo", "nccl"]:
    """Return the name of a back-end, if it can be used here.

    Raises:
        ConfigError: The back-end is unknown or not supported, or this build of torch lacks it.
    """
    if backend == "nccl":
        raise ConfigError("backend='nccl' was never tested, and is not supported: use 'gloo'")
    if backend != "gloo":
        raise ConfigError(f"backend must be 'gloo', got {backend!r}")
    if not dist.is_available() or not dist.is_gloo_available():
        raise ConfigError("this build of torch has no torch.distributed with gloo")
    return "gloo"


# Not every build of torch has a store.
_Store: Any = getattr(dist, "Store", object)


class _LinkStore(_Store):  # type: ignore[misc]  # a class of torch's
    """A store of keys and values that two processes keep equal over their control stream.

    Args:
        say: Sends the other side a key and its value; called on torch's threads.
    """

    def __init__(self, say: Callable[[str, bytes], object]) -> None:
        super().__init__()
        self._say = say
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        # Names under which the other side confirms each key that this side has set.
        self._acks: list[str] = []
        # The value that this side has set last.
        self._own = b""
        self._closed = False

    def learn(self, key: str, value: bytes) -> None:
        """Take over a key that the other side set, or its confirmation of a key."""
        with self._changed:
            # Gloo may have read the first value, and this side answers each key.
            if key in self._values:
                raise RemoteProtocolError(f"the peer's process group sets {key[:40]!a} twice")
            if len(self._values) >= _MAX_KEYS:
                raise RemoteProtocolError("the peer's process group sets too many keys")
            self._values[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Make every wait for a key fail, as the link has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # Torch calls the following methods, on its threads.

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key here and on the other side, which will confirm it."""
        value = value.encode() if isinstance(value, str) else bytes(value)
        self._own = value
        self._acks.append(f"{_HAVE} {key}")
        self.learn(key, value)
        self._say(key, value)

    def get(self, key: str) -> bytes:
        """Wait for the value of a key, and return it if it has the sizes of this side's own."""
        self.wait([key])
        value = self._values[key]
        # Gloo reads what these sizes promise, also behind the end of the value.
        if _sizes_in(value) != _sizes_in(self._own):
            raise RemoteProtocolError(
                f"the {len(value)} bytes that the peer set for {key[:40]!a} are no address of Gloo "
                "as this side writes it: install the same release of torch on both sides"
            )
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until the keys are set, and the other side has confirmed those of this side."""
        # The timeout is meant for the connection, which comes after this.
        del timeout

        def settled() -> bool:
            # Connecting, which follows, has a short deadline. So both sides must have reached this
            # point, which the confirmations show.
            return self._closed or all(key in self._values for key in (*keys, *self._acks))

        with self._changed:
            if not self._changed.wait_for(settled, _MEET_SECONDS) or self._closed:
                raise TransportBroken(
                    f"the peer did not join the process group within {_MEET_SECONDS:g} s: its "
                    "event loop, or this one, was busy"
                )


def _sizes_in(value: bytes) -> tuple[int, int]:
    """Return the sizes of an address and of the numbers behind it, in a value that Gloo sets.

    The host's name comes first. It and the address follow their sizes, in 8 bytes each.
    """
    at = 8 + int.from_bytes(value[:8], sys.byteorder)
    nbytes = int.from_bytes(value[at : at + 8], sys.byteorder)
    return nbytes, len(value) - (at + 8 + nbytes)


class DistributedTransport(DataPlaneTransport):
    """A link whose large payloads travel over a process group. Takes ownership of ``control``.

    Messages and small payloads travel in the control stream. With the first large payload the two
    ends make a process group of two ranks, which never touches the default group.

    Args:
        control: Connected link for messages.
        rank: 0 at one end, 1 at the other; ``None`` at both ends if only one of them sends large
            payloads, which becomes rank 0.
        inline_nbytes: Payloads up to this size travel in the control stream.
        patience: Seconds that a transfer may stall before the link breaks.

    Raises:
        ConfigError: The back-end cannot be used here.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        name="distributed",
        cross_host=True,
        whole_payloads=True,
        send_cancellation=Cancellation.BREAKS_LINK,
        recv_cancellation=Cancellation.BREAKS_LINK,
    )

    _kind = "gloo"

    def __init__(
        self,
        control: FramedTransport,
        *,
        rank: int | None = None,
        inline_nbytes: int = INLINE_NBYTES,
        patience: float = 10.0,
    ) -> None:
        check_backend("gloo")
        if rank not in (0, 1, None):
            raise ConfigError(f"rank must be 0 or 1, got {rank!r}: one for each end of the link")
        sock = control.io.sock
        local = control.ended or sock.family == socket.AF_UNIX
        self._host: str = "127.0.0.1" if local else _host_of(sock)
        self.follows_copies_above: int | None = inline_nbytes
        # The peer's rank; ``None`` until the group is begun, if none was given.
        self._peer = None if rank is None else 1 - rank
        self._patience = timedelta(seconds=patience)
        self._group: Any = None
        # The call that makes the group with the peer; ``None`` before it was started.
        self._met: asyncio.Future[None] | None = None
        self._store = _LinkStore(self._say_soon)
        self._threads = Threads("aiosync-gloo", 2)
        # True once no transfer can go on: the link has ended, or a transfer was cancelled.
        self._stop = False
        close_in_child(self)
        super().__init__(control, inline_nbytes)

    @classmethod
    @contextlib.asynccontextmanager
    async def pair(
        cls, *, limits: Limits | None = None
    ) -> AsyncIterator[tuple[DistributedTransport, DistributedTransport]]:
        """Make two connected ends in this process, which are closed when the context ends."""
        async with TCPTransport.pair(limits=limits) as (left, right):
            async with cls(left, rank=0) as one, cls(right, rank=1) as two:
                yield one, two

    # -- meeting -------------------------------------------------------------------------------

    def _hear(self, message: Setup) -> None:
        """See :class:`DataPlaneTransport`; the other keys are those of the group's store.

        A key that the peer has set is confirmed, and starts this side's part of the group.
        """
        key = message.key
        if key in (_GO, _NOW, _GOT):
            super()._hear(message)
        elif key == _HAVE:
            self._store.learn(f"{_HAVE} {message.value.decode('utf-8', 'replace')}", b"")
        else:
            self._store.learn(key, message.value)
            self._say(_HAVE, key.encode())
            if not self._stop:
                self._start_group(peer=0)

    def _start_group(self, peer: int) -> asyncio.Future[None]:
        """Start to make this side's part of the group, once. Return the future of that.

        ``peer`` is the peer's rank if none was given.
        """
        if self._met is None:
            self._peer = peer if self._peer is None else self._peer
            self._met = self._threads.start(self._make_group)
        return self._met

    async def _meet(self, peer: int) -> None:
        """Wait until there is a group with the peer; ``peer`` is its rank if none was given.

        The sender of a payload begins to make the group before it announces the payload. A transfer
        that is cut does not end this work, because the other side would wait for it in vain.

        Raises:
            TransportBroken: The link has ended, or the group could not be made.
        """
        if not self._stop:
            await asyncio.shield(self._start_group(peer))
        if self._stop:
            raise TransportBroken("the link has ended")

    def _say_soon(self, key: str, value: bytes) -> None:
        """Send the peer a Setup message, from a thread."""
        self._loop.call_soon_threadsafe(self._say, key, value)

    def _make_group(self) -> None:
        """Make a group of two ranks. If that fails, nothing of Gloo is left when this raises.

        As long as its device lives, Gloo goes on to listen and to connect in a thread, even for a
        group that it has freed, and a late connection then ends the process. So no reference to the
        device is kept.
        """
        assert self._peer is not None
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # as new_group()
        try:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
            options._timeout = timedelta(seconds=_CONNECT_SECONDS / _GLOO_WAITS)
            options._threads = 1
            self._group = dist.ProcessGroupGloo(self._store, 1 - self._peer, 2, options)
        except AiosyncError:
            raise
        except Exception as exc:  # Gloo raises errors of many types. The link ends with this one.
            raise TransportBroken(
                f"Gloo could not connect {self._host} and the peer's host: {_PORTS}. It said: "
                f"{first_line(exc)}"
            ) from exc
        finally:
            # The traceback of an error would keep the options, and with them the device.
            del options

    # -- moving --------------------------------------------------------------------------------

    async def _offer(
        self, payload: list[memoryview], state: PayloadState
    ) -> tuple[Mapping[str, ExtValue], Callable[[], Awaitable[None]]]:
        """See :class:`DataPlaneTransport`. Makes the group; the sending waits for the peer."""
        await self._meet(peer=1)
        going, taken = self._until_told(_GO), self._until_told(_GOT)

        async def push() -> None:
            # The peer has to be ready first: a thread that waits for Gloo cannot be cancelled.
            await self._outcome(going)
            self._say(_NOW)
            await self._move(payload, self._send, state.progress)
            await self._outcome(taken)

        return {}, push

    async def _fetch(
        self, ext: Mapping[str, ExtValue], nbytes: int, lend: Callable[[], list[memoryview]] | None
    ) -> tuple[Sequence[memoryview], Hashable]:
        """See :class:`DataPlaneTransport`. Makes the group, then says that this side is ready."""
        assert lend is not None
        buffers = lend()
        await self._meet(peer=0)
        coming = self._until_told(_NOW)
        self._say(_GO)
        # The peer's loop may be busy for long. This task waits for it, so that no thread has to.
        await self._outcome(coming)
        await self._move(buffers, self._receive)
        self._say(_GOT)
        return buffers, None

    async def _move(
        self, pieces: list[memoryview], post: _Post, copying: Progress | None = None
    ) -> None:
        """Move a payload by ``post`` on a thread; ``copying`` is the copy that still fills it."""

        def stop() -> None:
            self._stop = True

        try:
            await self._threads.run(lambda: self._move_here(pieces, post, copying), stop)
        except RuntimeError as exc:
            # torch raises this if the peer is gone, stopped or never connected.
            # The frames of the error would keep the weights alive.
            exc.__traceback__ = None
            raise TransportBroken(f"the transfer over Gloo failed: {first_line(exc)}") from exc

    def _move_here(self, pieces: list[memoryview], post: _Post, copying: Progress | None) -> None:
        """Move a payload on this thread, with several chunks under way at a time."""
        waits: deque[_Wait] = deque()
        nbytes = sum(view.nbytes for view in pieces)
        sizes = [min(_CHUNK_NBYTES, nbytes - at) for at in range(0, nbytes, _CHUNK_NBYTES)]
        sent, patience = 0, self._patience
        try:
            for size, chunk in zip(sizes, cut(pieces, sizes), strict=True):
                if self._stop:
                    break
                if copying is not None:
                    sent += size
                    copying.wait(sent)
                if len(waits) >= _WINDOW:
                    waits.popleft()(patience)
                waits.append(post(chunk))
            while waits:
                waits.popleft()(patience)
        except RuntimeError:
            patience = _CLOSED
            raise
        finally:
            _end_all(waits, patience)
        if self._stop:
            raise TransportBroken("the link has ended")

    def _send(self, chunk: list[memoryview]) -> _Wait:
        """Begin to send a chunk; return the call that waits for its end."""
        arrays = [np.frombuffer(view, np.uint8) for view in chunk]
        array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        # Torch warns if the memory of a tensor is read-only, so such memory is copied.
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        wait: _Wait = self._group.send([tensor], self._peer, 0).wait
        return wait

    def _receive(self, chunk: list[memoryview]) -> _Wait:
        """Begin to receive a chunk; return the call that waits for its end."""
        whole = len(chunk) == 1
        size = sum(view.nbytes for view in chunk)
        array = np.frombuffer(chunk[0], np.uint8) if whole else np.empty(size, np.uint8)
        work = self._group.recv([torch.from_numpy(array)], self._peer, 0)

        def wait(patience: timedelta) -> None:
            work.wait(patience)
            if not whole:
                copy_bytes([array], chunk)

        return wait

    # -- closing -------------------------------------------------------------------------------

    def _end(self) -> None:
        """Make transfers fail soon, and drop the group, as the link has ended. Never waits."""
        super()._end()
        self._stop = True
        self._store.close()
        # Dropping the group closes its sockets, which the peer notices. It is done on a thread,
        # because the group's destructor waits for torch's own threads.
        self._threads.end(self._drop_group)

    def _drop_group(self) -> None:
        self._group = None

    def close_after_fork(self) -> None:
        """Set the group aside in a forked child, as only the parent has its threads."""
        _of_parents.append(self._group)
        self._group, self._stop = None, True

    async def aclose(self) -> None:
        """Close the link and the group; waiters get ``TransportClosed``.

        A thread that waits for a peer that has stalled ends by itself, after ``patience``.
        """
        try:
            # The group can only be finished while messages of the peer still arrive.
            if self._met is not None and not self._stop:
                await asyncio.wait({self._met}, timeout=_CLOSE_SECONDS)
        finally:
            self.abort()
        await self._threads.aclose(_CLOSE_SECONDS)


def _host_of(sock: socket.socket) -> str:
    """Return the address of this end of a connection, as Gloo looks for it among interfaces."""
    host: str = sock.getsockname()[0]
    # A socket of IPv6 that takes connections over IPv4 has a mapped address, as no interface has.
    mapped = getattr(ipaddress.ip_address(host), "ipv4_mapped", None)
    return host if mapped is None else str(mapped)


def _end_all(waits: Iterable[_Wait], patience: timedelta) -> None:
    """End the waits of chunks: Gloo uses the memory of each until its wait has ended."""
    for each in waits:
        try:
            each(patience)
        except RuntimeError:
            patience = _CLOSED
