"""One end of a pipe that carries whole updates of named models; for blocking callers a link.

A pipe begins with the process that is at each end. Then manifests, updates and acknowledgements
follow, in the wire format: nothing is pickled. Endpoints belong to the portal's loop. Must not
import schemes.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import functools
import os
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from multiprocessing import active_children
from typing import Any, TypeVar

from aiosync import transports as aio
from aiosync._tasks import Notifier, TaskOwner
from aiosync.errors import (
    AckTimeout,
    AiosyncError,
    ConfigError,
    ConnectError,
    LocalProtocolError,
    PeerClosed,
    RecvTimeout,
    RemoteProtocolError,
    SendTimeout,
    TransportClosed,
)
from aiosync.protocol import VersionClock
from aiosync.receiver.updates import Buffers, UpdateReader
from aiosync.sync._portal import Lease, lease, refuse_inside_loop
from aiosync.tensors import FlatBuffer, Flattener, Layout
from aiosync.tensors.tensordicts import is_tensordict
from aiosync.transports._processes import is_gone
from aiosync.transports.base import LinkError, Received, again, make_ack, without_frames
from aiosync.types import AckStatus
from aiosync.wire import Ack, ManifestMessage, Setup, Update, encode_frame

__all__ = ["Copier", "Endpoint", "Link", "Weights"]

_T = TypeVar("_T")

_PROCESS = "process"  # what a Setup names
_MAX_WAITING = 8  # updates that nobody has asked for yet, or that the link has not taken yet
_KEPT_ACKS = 256
_ANSWER_SECONDS = 2.0  # that an answer may take to leave
_EXIT_SECONDS = 5.0
_LOOK_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class Weights:
    """A copy of weights that travels, or that has arrived."""

    form: str  # what they are to be again: "tensordict" or "state_dict"
    layout: Layout
    flat: FlatBuffer
    values: Mapping[str, Any]
    give_back: Callable[[], None]  # their memory, once nothing views it
    model_id: str = ""
    epoch: int = 0
    version: int = 0

    @property
    def payload(self) -> memoryview:
        """The bytes of the tensors."""
        return self.flat.memoryview()[: self.layout.nbytes]

    def update(self, model_id: str, epoch: int, version: int) -> Update:
        """The message that they travel with, behind their manifest."""
        named = {"model_id": model_id, "form": self.form, "values": self.values}
        return Update(epoch, version, self.layout.digest, values=named)

    @classmethod
    def arrived(
        cls,
        message: Mapping[str, Any],
        epoch: int,
        version: int,
        layout: Layout,
        flat: FlatBuffer,
        give_back: Callable[[], None] = lambda: None,
    ) -> Weights:
        """What came with the values of such a message.

        Raises:
            RemoteProtocolError: It is none.
        """
        if message.keys() != {"model_id", "form", "values"}:
            raise RemoteProtocolError("the peer sent an update that is not of this generation")
        form, values, model_id = message["form"], message["values"], message["model_id"]
        return cls(form, layout, flat, values, give_back, model_id, epoch, version)

    def rebuild(self) -> Any:
        """A nested TensorDict, or a state dict with dotted names, as views of the memory."""
        tensors: dict[str, Any] = {}
        views = self.flat.views(self.layout)
        for leaf, view in zip(self.layout.manifest.leaves, views, strict=True):
            tensors.update(dict.fromkeys((leaf.name, *leaf.aliases), view))
        if self.form == "state_dict":
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


class Endpoint:
    """Sends updates and acknowledgements in order, and keeps what arrives until it is taken.

    Args:
        sock: The pipe; owned from now on.
        patient: Let no update leave before the other end was used, and keep only the newest of
            those that have not left.
        settles: Keep only the newest update of each model that arrives, and say at once that it
            is here; otherwise keep each until it is acknowledged or taken.
        changed: Wakes whoever waits for this or for another endpoint.

    Attributes:
        error: What ended the link; ``None`` while it has not.
        heard: The other end was used.
        arrived: Updates that are here.
        tasks: Owner of what runs for as long as the link.
    """

    def __init__(
        self, sock: socket.socket, *, patient: bool, settles: bool, changed: Notifier
    ) -> None:
        self._sock = sock
        self._transport = aio.MPTransport(sock, name="the other end of the pipe")
        self._patient = patient
        self._settles = settles
        self._changed = changed
        self._clock = VersionClock()
        self._digest: bytes | None = None  # of the manifest that the other end has
        self._updates = UpdateReader(self._transport)
        self._acks: dict[int, Ack] = {}
        self._answered = 0
        self._turn = asyncio.Lock()  # to write
        self._leaving: set[asyncio.Task[None]] = set()
        self._quiet: float | None = None  # seconds after which a peer that has ended sends no more
        self.arrived: deque[Weights] = deque()
        self.error: BaseException | None = None
        self.heard: bool = False
        self.tasks: TaskOwner = TaskOwner(self._fail)
        self.tasks.start(self._read(), "aiosync legacy read")
        self.tasks.start(self._watch_creator(), "aiosync legacy watch")

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = without_frames(error)
            _say_goodbye(self._sock)
            self._transport.abort()
            self._updates.close()
        self._changed.notify()

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
                    await self._changed.wait()
        return bool(condition())

    def notify(self) -> None:
        """Something has changed that :meth:`until` waits for."""
        self._changed.notify()

    async def _watch_creator(self) -> None:
        # Whoever was forked meanwhile has a copy of the other end, which does not end then. Who
        # is there says so first; before that, it is as a rule the one that made the pipe.
        creator = _creator_of(self._sock)
        while creator and not await self.until(lambda: self.heard, _LOOK_SECONDS):
            if is_gone(creator):
                self._fail(PeerClosed(f"process {creator}, which made the pipe, has ended"))

    # -- sending -------------------------------------------------------------------------------

    async def post(self, model_id: str, weights: Weights, timeout: float | None) -> int:
        """Send a copy in the background; returns its version.

        Raises:
            SendTimeout: Others have not left, and do not within ``timeout`` seconds.
        """

        def is_room() -> bool:
            return self.error is None and (self._patient or len(self._leaving) < _MAX_WAITING)

        if not await self.until(is_room, timeout):
            raise SendTimeout(f"the other end of the pipe took nothing for {timeout or 0:g} s")
        version = self._clock.next()
        self._leave(self._write(model_id, weights, version))
        if self._patient:
            self.notify()  # of those that it overtakes
        return version

    def _leave(self, writing: Coroutine[Any, Any, None]) -> None:
        task = self.tasks.start(writing, "aiosync legacy write")
        self._leaving.add(task)
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._leaving.discard(task)
        self.notify()

    async def _write(self, model_id: str, weights: Weights, version: int) -> None:
        def is_overtaken() -> bool:
            return self._patient and version < self._clock.current

        await self.until(lambda: self.heard or not self._patient or is_overtaken())
        async with self._turn:
            if is_overtaken():
                return
            if self._digest != weights.layout.digest:
                self._digest = weights.layout.digest
                await self._transport.send(ManifestMessage(weights.layout.manifest))
            update = weights.update(model_id, self._clock.epoch, version)
            payload = [weights.payload]
            if not self._transport.send_nowait(update, payload):
                await self._transport.send(update, payload)

    async def _write_ack(self, ack: Ack) -> None:
        async with self._turn:
            await self._transport.send(ack)

    async def _all_left(self, timeout: float) -> None:
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=timeout)

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

    @property
    def awaits_answer(self) -> bool:
        """Whether the newest update was not answered, and may be."""
        return self.error is None and self._answered < self._clock.current

    # -- receiving -----------------------------------------------------------------------------

    async def peek(self, timeout: float | None) -> Weights | None:
        """The oldest update that is here, which stays; ``None`` when none comes in time."""
        return self.arrived[0] if await self.until(lambda: self.arrived, timeout) else None

    async def take(self, timeout: float | None) -> Weights | None:
        """The same, and it is gone."""
        weights = await self.peek(timeout)
        if weights is not None:
            self.arrived.popleft()
            self.notify()
            if self._settles:
                await self._all_left(_ANSWER_SECONDS)  # this process may end with it
        return weights

    async def acknowledge(self, weights: Weights, error: BaseException | None = None) -> None:
        """Say that an update was applied, or why it was not, and keep it no longer.

        Returns when it has left, so that this process may end; after two seconds in any case.
        """
        if weights in self.arrived:
            self.arrived.remove(weights)
            self.notify()
        status = AckStatus.APPLIED if error is None else AckStatus.NACK
        ack = make_ack(weights.epoch, weights.version, status, error)
        with contextlib.suppress(AiosyncError):  # the link has ended: nobody is left to be told
            if not self._leaving and self._transport.send_nowait(ack):
                return
        self._leave(self._write_ack(ack))
        await self._all_left(_ANSWER_SECONDS)

    async def _read(self) -> None:
        lender, transport = self._updates.lender, self._transport
        while True:
            # Of the newest only, there is one for each model, and none may hold up another.
            await self.until(lambda: self._settles or len(self.arrived) < _MAX_WAITING)
            try:
                self._on_message(await transport.recv(into=lender, timeout=self._quiet))
            except RecvTimeout:
                raise PeerClosed("the process at the other end of the pipe has ended") from None
            self.notify()

    def _on_message(self, received: Received) -> None:
        message = received.message
        if isinstance(message, Setup) and message.kind == _PROCESS and message.key.isdecimal():
            self.heard = True
            try:
                self._transport.watch_process(int(message.key))
            except ConnectError:  # it is gone, and what it wrote still counts
                self._quiet = _LOOK_SECONDS
        elif isinstance(message, Ack):
            self._answered = max(self._answered, message.version)
            self._acks[message.version] = message
            while len(self._acks) > _KEPT_ACKS:
                del self._acks[next(iter(self._acks))]
        else:
            staged = self._updates.read(received)
            if staged is not None:
                at = (staged.epoch, staged.version, staged.layout, staged.flat, staged.give_back)
                self._on_update(Weights.arrived(staged.values, *at))

    def _on_update(self, weights: Weights) -> None:
        if self._settles:
            named = weights.model_id
            self.arrived = deque(each for each in self.arrived if each.model_id != named)
            ack = make_ack(weights.epoch, weights.version, AckStatus.APPLIED, None)
            self._leave(self._write_ack(ack))
        self.arrived.append(weights)

    # -- closing -------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Send what waits to be sent, for a second at most, and close the link. Idempotent."""
        if self.heard or not self._patient:
            await self._all_left(1.0)
        self.abort()
        await self.tasks.aclose()

    def abort(self) -> None:
        """Close at once."""
        self._fail(TransportClosed("this transport was closed"))
        self.tasks.abort()


# -- for blocking callers -------------------------------------------------------------------------


class _Tenant:
    """What a link leaves on the portal. Refers to no link, so that one can be collected."""

    endpoint: Endpoint | None = None

    def forgotten(self) -> None:
        return None  # nobody closes transports of this generation

    def abort(self) -> None:
        if self.endpoint is not None:
            self.endpoint.abort()


class Link:
    """An endpoint, made by the first use of it, and the right to use the portal.

    Args:
        pipe: ``multiprocessing`` connection of a two-way pipe, or a connected Unix socket.
        settles: As for :class:`Endpoint`, like the next one.
        changed: One of its own by default.

    Attributes:
        patient: As for :class:`Endpoint`; may be changed until it is used.

    Raises:
        ConfigError: The pipe is neither; nothing was closed.
    """

    def __init__(
        self, pipe: Any, *, settles: bool = False, changed: Notifier | None = None
    ) -> None:
        self._sock = _take_socket(pipe)
        self._settles = settles
        self._changed = Notifier() if changed is None else changed
        self._pid = 0  # of its user
        self._lease: Lease | None = None
        self._tenant = _Tenant()
        self._closed = False
        self.patient: bool = False

    @property
    def endpoint(self) -> Endpoint | None:
        """What is below, once it was used; to be looked at."""
        return self._tenant.endpoint

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
            flags = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
            with contextlib.suppress(OSError):
                self._sock.send(greeting, flags)

    def call(self, what: str, function: Callable[[Endpoint], Coroutine[Any, Any, _T]], /) -> _T:
        """Run a coroutine with the endpoint on the portal's loop."""
        refuse_inside_loop(what, "the transports of aiosync.transports")
        if self._closed:
            raise TransportClosed("this transport was closed")
        if self.inherited:
            raise LocalProtocolError(f"{what}(): this transport was used before the process forked")
        self.greet()
        if self._lease is None:
            self._lease = lease(self._tenant)
            _hook()
            _links.add(self)

        async def run() -> _T:
            endpoint = self._tenant.endpoint
            if endpoint is None:
                options = {"patient": self.patient, "settles": self._settles}
                endpoint = Endpoint(self._sock, changed=self._changed, **options)
                self._tenant.endpoint = endpoint
            return await function(endpoint)

        return self._lease.call(run())

    @property
    def is_up(self) -> bool:
        """Whether it is open and the other side has not closed it."""

        async def look(endpoint: Endpoint) -> bool:
            return endpoint.error is None

        try:
            return not self.inherited and self.call("check_connection", look)
        except TransportClosed:
            return False

    @property
    def is_ready(self) -> bool:
        """Whether an update, or the end of the link, is there; looks, and does not wait."""
        endpoint = self.endpoint
        return endpoint is not None and (bool(endpoint.arrived) or endpoint.error is not None)

    @property
    def awaits_answer(self) -> bool:
        """Whether a worker that may come late has not answered the newest update."""
        return self.patient and self.endpoint is not None and self.endpoint.awaits_answer

    def close(self) -> None:
        """Close the link. Idempotent; in a forked child the parent's goes on."""
        held, self._lease, self._closed = self._lease, None, True
        try:
            if held is not None and held.valid and self.endpoint is not None:
                held.call(self.endpoint.aclose())
        finally:
            if held is not None:
                held.release()
            if not self.inherited:
                _say_goodbye(self._sock)
            self._sock.close()

    def abort(self) -> None:
        """The same at once, for destructors and signal handlers."""
        self._closed = True
        held: Lease | None = getattr(self, "_lease", None)
        if held is not None:
            held.abort()
        elif hasattr(self, "_sock"):
            self._sock.close()

    __del__ = abort


_links: weakref.WeakSet[Link] = weakref.WeakSet()


@functools.cache
def _hook() -> None:
    """Call it with the portal running: its own end has to come later."""
    atexit.register(_let_children_attach)


def _let_children_attach() -> None:
    """Before the program ends: child processes that start up get what was sent to them.

    Those that are no daemons: the interpreter waits for them when it ends, and kills the others.
    """
    give_up = time.monotonic() + _EXIT_SECONDS
    while any(link.awaits_answer for link in list(_links)) and time.monotonic() < give_up:
        if all(child.daemon for child in active_children()):
            return
        time.sleep(0.05)


# -- pipes ----------------------------------------------------------------------------------------


def _take_socket(pipe: Any) -> socket.socket:
    """The socket below one end of a two-way pipe, whose connection object is closed.

    The program may close its own end afterwards or not: it makes no difference any more.
    """
    if isinstance(pipe, socket.socket):
        return pipe
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
    try:
        found = sock.getsockopt(socket.SOL_SOCKET, getattr(socket, "SO_PEERCRED", -1), 12)
    except OSError:
        return 0
    pid = int(struct.unpack("3i", found)[0])
    return 0 if pid == os.getpid() else pid


def _say_goodbye(sock: socket.socket) -> None:
    """End what is written to a pipe; closing is not enough where forked processes have copies."""
    with contextlib.suppress(OSError):  # closed already, or the other end is
        sock.shutdown(socket.SHUT_WR)
