"""One end of a pipe that carries whole updates of named models, for blocking callers.

A pipe begins with the process that is at each end. Then manifests, updates and acknowledgements
follow, in the wire format: nothing is pickled. Coroutines run on the portal's loop. Must not
import schemes.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from aiosync import transports as aio
from aiosync._tasks import Notifier, TaskOwner
from aiosync.errors import (
    AckTimeout,
    AiosyncError,
    ConfigError,
    LocalProtocolError,
    PeerClosed,
    RemoteProtocolError,
    SendTimeout,
    TransportClosed,
)
from aiosync.protocol import VersionClock
from aiosync.receiver.updates import Buffers, UpdateReader
from aiosync.sync._portal import Lease, lease, refuse_inside_loop
from aiosync.tensors import FlatBuffer, Flattener, Layout
from aiosync.tensors.values import is_tensordict
from aiosync.transports._processes import is_gone
from aiosync.transports.base import LinkError, Received, again, make_ack, without_frames
from aiosync.types import AckStatus
from aiosync.wire import Ack, ManifestMessage, Setup, Update, encode_frame

__all__ = ["Copier", "Endpoint", "Weights"]

_T = TypeVar("_T")

_PROCESS = "process"  # what a Setup names
_MAX_WAITING = 8  # updates that nobody has asked for yet, or that the link has not taken yet
_KEPT_ACKS = 256
_ANSWER_SECONDS = 2.0  # that an answer may take to leave
_LOOK_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class Weights:
    """A copy of weights that travels, or that has arrived."""

    form: str  # what they are to be again: "tensordict" or "state_dict"
    layout: Layout
    flat: FlatBuffer
    values: Mapping[str, Any]
    give_back: Callable[[], None]  # their memory, once nothing views it
    model_id: str = ""  # like the rest, of what has arrived
    epoch: int = 0
    version: int = 0

    def rebuild(self, form: str | None = None) -> Any:
        """A nested TensorDict, or a state dict with dotted names, as views of the memory."""
        tensors: dict[str, Any] = {}
        views = self.flat.views(self.layout)
        for leaf, view in zip(self.layout.manifest.leaves, views, strict=True):
            tensors.update(dict.fromkeys((leaf.name, *leaf.aliases), view))
        if (form or self.form) == "state_dict":
            return {**tensors, **self.values}
        from tensordict import TensorDict  # not before it is needed

        weights = TensorDict({}, batch_size=[])
        for name, tensor in tensors.items():
            weights.set(tuple(name.split(".")), tensor)
        for name, value in self.values.items():
            weights.set_non_tensor(tuple(name.split(".")), value)
        return weights


class Copier:
    """Takes copies, in memory that is used again."""

    def __init__(self) -> None:
        self._flattener = Flattener()
        self._buffers = Buffers()

    def copy(self, weights: Any) -> Weights:
        """Copy a TensorDict, a state dict or a module.

        Raises:
            ConfigError: Something in it cannot travel.
        """
        prepared = self._flattener.prepare(weights)
        flat = self._buffers.take(prepared.layout.nbytes)
        prepared.copy_into(flat)
        form = "tensordict" if is_tensordict(weights) else "state_dict"
        values, give_back = copy.deepcopy(prepared.values), self._buffers.put_back
        return Weights(form, prepared.layout, flat, values, functools.partial(give_back, flat))


_Leaving: TypeAlias = "Ack | tuple[str, Weights, int]"


class Endpoint:
    """Sends updates and acknowledgements in order, and keeps what arrives until it is taken.

    Its link is made by the first :meth:`call`, which also gets the right to use the portal. Other
    coroutines are to be run by that.

    Args:
        pipe: ``multiprocessing`` connection of a two-way pipe; owned from now on.

    Attributes:
        patient: Let no update leave before the other end was used, and keep only the newest of
            those that have not left. May be changed until it is used, like the next two.
        settles: Keep only the newest update of each model that arrives, and say at once that it
            is here; otherwise keep each until it is acknowledged or taken.
        changed: Wakes whoever waits for this, or for another endpoint.
        error: What ended the link; ``None`` while it has not.
        heard: The other end was used.
        arrived: Updates that are here.
        tasks: Owner of what runs for as long as the link.

    Raises:
        ConfigError: It is no such pipe; nothing was closed.
    """

    def __init__(self, pipe: Any) -> None:
        self._sock = _take_socket(pipe)
        self.patient: bool = False
        self.settles: bool = False
        self.changed: Notifier = Notifier()
        self.arrived: deque[Weights] = deque()
        self.error: BaseException | None = None
        self.heard: bool = False
        self.tasks: TaskOwner = TaskOwner(self._fail)
        self._transport: aio.MPTransport | None = None
        self._updates = UpdateReader()
        self._clock = VersionClock()
        self._leaving: deque[_Leaving] = deque()
        self._writes = False
        self._acks: dict[int, Ack] = {}
        self._peer = 0  # process at the other end
        self._pid = 0  # of its user
        self._lease: Lease | None = None
        self._closed = False

    # -- for blocking callers ------------------------------------------------------------------

    @property
    def inherited(self) -> bool:
        """Whether it was used by the process that this one was forked from."""
        return self._pid not in (0, os.getpid())

    def greet(self) -> None:
        """Say which process is at this end. Never waits; idempotent.

        Where the other end is gone nothing is said: what it wrote before is to be read.
        """
        if not self._pid:
            self._pid = os.getpid()
            greeting = encode_frame(Setup(_PROCESS, str(self._pid)))
            with contextlib.suppress(OSError):
                self._sock.send(greeting, socket.MSG_DONTWAIT)

    def call(self, what: str, function: Callable[[], Coroutine[Any, Any, _T]], /) -> _T:
        """Run a coroutine on the portal's loop, with the link below."""
        refuse_inside_loop(what, "the transports of aiosync.transports")
        if self._closed:
            raise TransportClosed("this transport was closed")
        if self.inherited:
            raise LocalProtocolError(f"{what}(): this transport was used before the process forked")
        self.greet()
        if self._lease is None:
            self._lease = lease(self)

        async def run() -> _T:
            if self._transport is None:
                self._open()
            return await function()

        return self._lease.call(run())

    def _open(self) -> None:
        transport = self._transport = aio.MPTransport(self._sock, name="the other end of the pipe")
        self._updates.use_link(transport)
        self._peer = _creator_of(self._sock)
        for task in (self._read(transport), self._write(transport), self._watch_process()):
            self.tasks.start(task, "aiosync legacy link")

    @property
    def is_up(self) -> bool:
        """Whether it is open and the other side has not closed it."""
        if self._closed or self.inherited:
            return False
        with contextlib.suppress(AiosyncError):
            self.call("check_connection", lambda: self.until(lambda: True))
        return self.error is None

    @property
    def is_ready(self) -> bool:
        """Whether an update, or the end of the link, is there; looks, and does not wait."""
        return bool(self.arrived) or self.error is not None

    def close(self) -> None:
        """Close the link. Idempotent; in a forked child the parent's goes on."""
        held, self._lease, self._closed = self._lease, None, True
        try:
            if held is not None and held.valid:
                held.call(self._aclose())
        finally:
            if held is not None:
                held.release()
            if not self.inherited:
                self._say_goodbye()
            self._sock.close()

    def abandon(self) -> None:
        """The same at once, for destructors and signal handlers."""
        self._closed = True
        if self._lease is not None:
            self._lease.abort()
        else:
            self._sock.close()

    # -- the link ------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = without_frames(error)
            self._say_goodbye()
            if self._transport is not None:
                self._transport.abort()
            self._updates.close()
        self.changed.notify()

    async def until(self, condition: Callable[[], object], timeout: float | None = None) -> bool:
        """Wait for something to change; False when it took too long.

        Raises:
            AiosyncError: The link ended before.
        """
        if condition():
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not condition():
                    if self.error is not None:
                        known = isinstance(self.error, LinkError)
                        raise again(self.error) if known else self.error
                    await self.changed.wait()
        return bool(condition())

    async def _watch_process(self) -> None:
        # Whoever was forked meanwhile has a copy of the other end, which does not end then. Who
        # is there says so first; before that, it is as a rule the one that made the pipe.
        while not (self._peer and is_gone(self._peer)):  # noqa: ASYNC110 - the kernel tells no loop
            await asyncio.sleep(_LOOK_SECONDS)
        await asyncio.sleep(_LOOK_SECONDS)  # what it wrote still counts
        raise PeerClosed(f"process {self._peer} at the other end of the pipe has ended")

    # -- sending -------------------------------------------------------------------------------

    async def post(self, model_id: str, weights: Weights, timeout: float | None) -> int:
        """Send a copy in the background; returns its version.

        Raises:
            SendTimeout: Others have not left, and do not within ``timeout`` seconds.
        """

        def is_room() -> bool:
            return self.error is None and (self.patient or len(self._leaving) < _MAX_WAITING)

        if not await self.until(is_room, timeout):
            raise SendTimeout(f"the other end of the pipe took nothing for {timeout or 0:g} s")
        if self.patient:  # it overtakes others
            self._leaving = deque(each for each in self._leaving if isinstance(each, Ack))
        version = self._clock.next()
        self._leave((model_id, weights, version))
        return version

    def _leave(self, message: _Leaving) -> None:
        self._leaving.append(message)
        self.changed.notify()

    async def _write(self, transport: aio.MPTransport) -> None:
        digest = b""  # of the manifest that the other end has
        while True:
            await self.until(lambda: self._leaving and (self.heard or not self.patient))
            message, self._writes = self._leaving.popleft(), True
            if isinstance(message, Ack):
                await transport.send(message)
            else:
                model_id, weights, version = message
                layout = weights.layout
                if digest != layout.digest:
                    digest = layout.digest
                    await transport.send(ManifestMessage(layout.manifest))
                named = {"model_id": model_id, "form": weights.form, "values": weights.values}
                update = Update(self._clock.epoch, version, digest, values=named)
                await transport.send(update, [weights.flat.memoryview()[: layout.nbytes]])
            self._writes = False
            self.changed.notify()

    async def _all_left(self, seconds: float) -> None:
        with contextlib.suppress(AiosyncError):  # the link has ended: nobody is left to be told
            await self.until(lambda: not (self._leaving or self._writes), seconds)

    async def wait_for_ack(self, version: int, timeout: float | None) -> Ack:
        """What the peer says about a version.

        Raises:
            AckTimeout: Nothing, within ``timeout`` seconds.
            PeerClosed: The peer went away before.
        """
        if not await self.until(lambda: version in self._acks, timeout):
            raise AckTimeout(
                f"version {version} was not acknowledged within {round(timeout or 0, 1):g} s",
                version=version,
            )
        return self._acks.pop(version)

    # -- receiving -----------------------------------------------------------------------------

    async def peek(self, timeout: float | None) -> Weights | None:
        """The oldest update that is here, which stays; ``None`` when none comes in time."""
        return self.arrived[0] if await self.until(lambda: self.arrived, timeout) else None

    async def take(self, timeout: float | None) -> Weights | None:
        """The same, and it is gone."""
        weights = await self.peek(timeout)
        if weights is not None:
            self.arrived.popleft()
            self.changed.notify()
            if self.settles:
                await self._all_left(_ANSWER_SECONDS)  # this process may end with it
        return weights

    async def acknowledge(self, weights: Weights, error: BaseException | None = None) -> None:
        """Say that an update was applied, or why it was not, and keep it no longer.

        Returns when it has left, so that this process may end; after two seconds in any case.
        """
        if weights in self.arrived:
            self.arrived.remove(weights)
        self._answer(weights, error)
        await self._all_left(_ANSWER_SECONDS)

    def _answer(self, weights: Weights, error: BaseException | None = None) -> None:
        status = AckStatus.APPLIED if error is None else AckStatus.NACK
        self._leave(make_ack(weights.epoch, weights.version, status, error))

    async def _read(self, transport: aio.MPTransport) -> None:
        while True:
            # Of the newest only, there is one for each model, and none may hold up another.
            await self.until(lambda: self.settles or len(self.arrived) < _MAX_WAITING)
            self._on_message(await transport.recv(into=self._updates.lender))
            self.changed.notify()

    def _on_message(self, received: Received) -> None:
        message = received.message
        if isinstance(message, Setup) and message.kind == _PROCESS and message.key.isdecimal():
            self.heard = True
            self._peer = 0 if int(message.key) == os.getpid() else int(message.key)
        elif isinstance(message, Ack):
            self._acks[message.version] = message
            while len(self._acks) > _KEPT_ACKS:
                del self._acks[next(iter(self._acks))]
        elif (staged := self._updates.read(received)) is not None:
            named = staged.values
            if named.keys() != {"model_id", "form", "values"}:
                raise RemoteProtocolError("the peer sent an update that is not of this generation")
            weights = Weights(
                named["form"],
                staged.layout,
                staged.flat,
                named["values"],
                staged.give_back,
                named["model_id"],
                staged.epoch,
                staged.version,
            )
            if self.settles:
                others = (each for each in self.arrived if each.model_id != weights.model_id)
                self.arrived = deque(others)
                self._answer(weights)
            self.arrived.append(weights)

    # -- closing -------------------------------------------------------------------------------

    async def _aclose(self) -> None:
        """Send what waits to be sent, for a second at most, and close the link. Idempotent."""
        if self.heard or not self.patient:
            await self._all_left(1.0)
        self.abort()
        await self.tasks.aclose()

    def abort(self) -> None:
        """Close at once. Called on the loop."""
        self._fail(TransportClosed("this transport was closed"))
        self.tasks.abort()

    def forgotten(self) -> None:
        """Say nothing: nobody closes transports of this generation."""

    def _say_goodbye(self) -> None:
        """End what is written; closing is not enough where forked processes have copies."""
        with contextlib.suppress(OSError):  # closed already, or the other end is
            self._sock.shutdown(socket.SHUT_WR)


# -- pipes ----------------------------------------------------------------------------------------


def _take_socket(pipe: Any) -> socket.socket:
    """The socket below one end of a two-way pipe, whose connection object is closed.

    The program may close its own end afterwards or not: it makes no difference any more.
    """
    try:
        found = socket.socket(fileno=pipe.fileno())
    except (AttributeError, OSError, ValueError) as exc:
        raise ConfigError(
            f"{pipe!r} is no open end of a two-way pipe, multiprocessing.Pipe(duplex=True): {exc}"
        ) from exc
    sock = found.dup()
    found.detach()  # which is the connection's
    pipe.close()
    return sock


def _creator_of(sock: socket.socket) -> int:
    """The process that made a pipe, if it is another one; 0 where the kernel does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid = int(struct.unpack("3i", found)[0])
    return 0 if pid == os.getpid() else pid
