"""One end of a pipe that carries whole updates of named models; for blocking callers a link.

A pipe begins with the process that is at each end. Then a ``Setup`` message names the model, a
manifest its tensors, and updates and acknowledgements follow, in the wire format: nothing is
pickled. Endpoints belong to the portal's loop. Must not import schemes.
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
    RemoteProtocolError,
    SendTimeout,
    TransportClosed,
)
from aiosync.protocol import VersionClock
from aiosync.receiver.updates import Buffers, Staged, UpdateReader
from aiosync.sync._portal import Lease, lease, refuse_inside_loop
from aiosync.tensors import FlatBuffer, Flattener, Layout
from aiosync.tensors.tensordicts import is_tensordict
from aiosync.transports._kept_errors import LinkError, again, without_frames
from aiosync.transports._pidfd import is_gone
from aiosync.transports.base import Received, make_ack
from aiosync.types import AckStatus
from aiosync.wire import Ack, ManifestMessage, Setup, Update, encode_frame

__all__ = ["Arrived", "Copier", "Endpoint", "Link", "Snapshot", "naming", "rebuild"]

_T = TypeVar("_T")

_MODEL, _PROCESS = "model", "process"  # what a Setup names
_MAX_WAITING = 8  # updates that nobody has asked for yet, or that the link has not taken yet
_KEPT_ACKS = 256
_ANSWER_SECONDS = 2.0  # that an answer may take to leave
_EXIT_SECONDS = 5.0
_LOOK_SECONDS = 0.5


def naming(model_id: str, form: str) -> Setup:
    """What says which model the updates behind it are of.

    Args:
        model_id: Name of the model.
        form: ``"tensordict"`` or ``"state_dict"``: what its weights are to be again.
    """
    return Setup(_MODEL, model_id, form.encode())


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A copy of weights as they travel."""

    form: str
    layout: Layout
    flat: FlatBuffer
    values: Mapping[str, Any]

    @property
    def payload(self) -> memoryview:
        """The bytes of the tensors."""
        return self.flat.memoryview()[: self.layout.nbytes]


class Copier:
    """Takes snapshots, in memory that is used again."""

    def __init__(self) -> None:
        self._flattener = Flattener()
        self._buffers = Buffers()

    def copy(self, weights: Any) -> Snapshot:
        """Copy a TensorDict, a state dict or a module.

        Raises:
            ConfigError: Something in it cannot travel.
        """
        prepared = self._flattener.prepare(weights)
        flat = self._buffers.take(prepared.layout.nbytes)
        self._flattener.copy_into(prepared, flat)
        form = "tensordict" if is_tensordict(weights) else "state_dict"
        return Snapshot(form, prepared.layout, flat, copy.deepcopy(prepared.values))

    def free(self, snapshot: Snapshot) -> None:
        """No link reads a snapshot any more."""
        self._buffers.put_back(snapshot.flat)


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """An update that arrived, in memory of its own."""

    model_id: str
    form: str
    epoch: int
    version: int
    layout: Layout
    flat: FlatBuffer
    values: Mapping[str, Any]
    give_back: Callable[[], None]  # once no tensor views it

    @property
    def weights(self) -> Any:
        """A nested TensorDict, or a state dict with dotted names, as the sender had it."""
        return rebuild(self.layout, self.flat, self.values, self.form)


@dataclass(frozen=True, slots=True, eq=False)
class _Post:
    """An update that has not left."""

    model_id: str
    version: int
    snapshot: Snapshot


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
        tasks: Owner of what runs for as long as the link.
    """

    def __init__(
        self, sock: socket.socket, *, patient: bool, settles: bool, changed: Notifier
    ) -> None:
        self._sock = sock
        self._transport = aio.MPTransport(sock, name="the other end of the pipe")
        self._patient = patient
        self._settles = settles
        self._clock = VersionClock()
        self._told: tuple[str, str] | None = None
        self._digest: bytes | None = None
        self._named: tuple[str, str] | None = None
        self._updates = UpdateReader(self._transport)
        self._arrived: deque[Arrived] = deque()
        self._acks: dict[int, Ack] = {}
        self._owed: set[int] = set()  # versions that were not acknowledged
        self._out: deque[_Post | Ack] = deque()
        self._leaving: _Post | Ack | None = None
        self._written = 0
        self.error: BaseException | None = None
        self.heard: bool = False
        self._changed = changed
        self.tasks: TaskOwner = TaskOwner(self._fail)
        self.tasks.start(self._read(), "aiosync legacy read")
        self.tasks.start(self._write(), "aiosync legacy write")
        self.tasks.start(self._watch_creator(), "aiosync legacy watch")

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = without_frames(error)
            _say_goodbye(self._sock)
            self._transport.abort()
            self._updates.close()
        self._changed.notify()

    def check(self) -> None:
        """Raise what ended the link, if it has ended."""
        if self.error is not None:
            raise again(self.error) if isinstance(self.error, LinkError) else self.error

    def notify(self) -> None:
        """Something has changed that :meth:`until` waits for."""
        self._changed.notify()

    async def until(self, condition: Callable[[], object], timeout: float | None = None) -> bool:
        """Wait for something to change; False when it took too long.

        Raises:
            AiosyncError: The link ended before.
        """
        try:
            async with asyncio.timeout(timeout):
                while not condition():
                    self.check()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _watch_creator(self) -> None:
        # Whoever was forked meanwhile has a copy of the other end, which does not end then. Who
        # is there says so at once; before that, it is as a rule the one that made the pipe.
        creator = _creator_of(self._sock)
        while creator and not self.heard and self.error is None:
            if is_gone(creator):
                self._fail(PeerClosed(f"process {creator}, which made the pipe, has ended"))
            with contextlib.suppress(AiosyncError):
                await self.until(lambda: self.heard, _LOOK_SECONDS)

    # -- sending -------------------------------------------------------------------------------

    async def post(self, model_id: str, snapshot: Snapshot, timeout: float | None) -> int:
        """Send a snapshot in the background; returns its version.

        Raises:
            SendTimeout: Others have not left, and do not within ``timeout`` seconds.
        """
        self.check()
        if self._patient:
            old = [e for e in self._out if isinstance(e, _Post) and e is not self._leaving]
            self._out = deque(each for each in self._out if each not in old)
            self._owed.difference_update(each.version for each in old)
        elif not await self.until(lambda: len(self._out) < _MAX_WAITING, timeout):
            raise SendTimeout(f"the other end of the pipe took nothing for {timeout or 0:g} s")
        version = self._clock.next()
        self._owed.add(version)
        self._out.append(_Post(model_id, version, snapshot))
        self.notify()
        return version

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

    async def _write(self) -> None:
        with contextlib.suppress(AiosyncError):  # the link has ended, and the reader says so
            while True:
                await self.until(lambda: self._out and (self.heard or not self._patient))
                leaving = self._leaving = self._out[0]
                if isinstance(leaving, Ack):
                    await self._transport.send(leaving)
                else:
                    await self._write_update(leaving)
                self._out.popleft()
                self._written += 1
                self.notify()

    async def _write_update(self, post: _Post) -> None:
        snapshot, send = post.snapshot, self._transport.send
        if self._told != (post.model_id, snapshot.form):
            self._told = (post.model_id, snapshot.form)
            await send(naming(*self._told))
        if self._digest != snapshot.layout.digest:
            self._digest = snapshot.layout.digest
            await send(ManifestMessage(snapshot.layout.manifest))
        update = Update(self._clock.epoch, post.version, self._digest, values=snapshot.values)
        await send(update, [snapshot.payload])

    async def until_answered(self, seconds: float) -> None:
        """Wait for answers to all that was sent, as long as there are processes to give them."""
        give_up = asyncio.get_running_loop().time() + seconds
        # Those that the interpreter waits for when it ends; it kills the others.
        while self._owed and any(not child.daemon for child in active_children()):
            left = give_up - asyncio.get_running_loop().time()
            if left <= 0 or await self.until(lambda: not self._owed, min(left, 0.1)):
                return

    # -- receiving -----------------------------------------------------------------------------

    @property
    def has_arrived(self) -> bool:
        """Whether an update is here."""
        return bool(self._arrived)

    async def peek(self, timeout: float | None) -> Arrived | None:
        """The oldest update that is here, which stays; ``None`` when none comes in time."""
        return self._arrived[0] if await self.until(lambda: self._arrived, timeout) else None

    async def take(self, timeout: float | None) -> Arrived | None:
        """The same, and it is gone."""
        arrived = await self.peek(timeout)
        if arrived is not None:
            self._arrived.popleft()
            self.notify()
            if self._settles:
                await self._until_written(_ANSWER_SECONDS)  # this process may end with it
        return arrived

    async def acknowledge(self, arrived: Arrived, error: BaseException | None = None) -> None:
        """Say that an update was applied, or why it was not, and keep it no longer.

        Returns when it has left, so that this process may end; after two seconds in any case.
        """
        if arrived in self._arrived:
            self._arrived.remove(arrived)
        status = AckStatus.APPLIED if error is None else AckStatus.NACK
        ack = make_ack(arrived.epoch, arrived.version, status, error)
        with contextlib.suppress(AiosyncError):  # the link has ended: nobody is left to be told
            if not self._out and self._transport.send_nowait(ack):
                return
        self._out.append(ack)
        self.notify()
        await self._until_written(_ANSWER_SECONDS)

    async def _read(self) -> None:
        try:
            while True:
                # Of the newest only, there is one for each model, and none may hold up another.
                await self.until(lambda: self._settles or len(self._arrived) < _MAX_WAITING)
                self._on_message(await self._transport.recv(into=self._updates.lender))
                self.notify()
        except AiosyncError as exc:
            self._fail(exc)

    def _on_message(self, received: Received) -> None:
        message = received.message
        if isinstance(message, Setup) and message.kind == _PROCESS and message.key.isdecimal():
            self.heard = True
            with contextlib.suppress(ConnectError):  # it is gone, and what it wrote still counts
                self._transport.watch_process(int(message.key))
        elif isinstance(message, Setup) and message.kind == _MODEL:
            self._named = (message.key, message.value.decode(errors="replace"))
        elif isinstance(message, ManifestMessage | Update):
            staged = self._updates.read(received)
            if staged is not None:
                self._on_update(staged)
        elif isinstance(message, Ack):
            self._owed.discard(message.version)
            self._acks[message.version] = message
            while len(self._acks) > _KEPT_ACKS:
                del self._acks[next(iter(self._acks))]
        else:
            raise RemoteProtocolError(f"the peer sent an unexpected {type(message).__name__}")

    def _on_update(self, staged: Staged) -> None:
        if self._named is None:
            raise RemoteProtocolError("an update came for a model that was never named")
        (model_id, form), epoch, version = self._named, staged.epoch, staged.version
        at = (staged.layout, staged.flat)
        arrived = Arrived(model_id, form, epoch, version, *at, staged.values, staged.give_back)
        if self._settles:
            self._arrived = deque(each for each in self._arrived if each.model_id != model_id)
            self._out.append(make_ack(epoch, version, AckStatus.APPLIED, None))
        self._arrived.append(arrived)

    # -- closing -------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Send what waits to be sent, for a second at most, and close the link. Idempotent."""
        if self.heard or not self._patient:
            await self._until_written(1.0)
        self.abort()
        await self.tasks.aclose()

    async def _until_written(self, timeout: float) -> None:
        last = self._written + len(self._out)  # what comes behind it is not waited for
        with contextlib.suppress(AiosyncError):  # the link has ended: nobody is left to be told
            await self.until(lambda: self._written >= last, timeout)

    def abort(self) -> None:
        """Close at once."""
        self._fail(TransportClosed("this transport was closed"))
        self.tasks.abort()


def rebuild(layout: Layout, flat: FlatBuffer, values: Mapping[str, Any], form: str) -> Any:
    """The weights of an update as views of ``flat``, in the form that they were sent in."""
    tensors: dict[str, Any] = {}
    for leaf, view in zip(layout.manifest.leaves, flat.views(layout), strict=True):
        for name in (leaf.name, *leaf.aliases):
            tensors[name] = view
    if form == "state_dict":
        return {**tensors, **values}
    if form != "tensordict":
        raise RemoteProtocolError(f"weights of an unknown form: {form!r}")
    from tensordict import TensorDict  # not before it is needed

    weights = TensorDict({}, batch_size=[])
    for name, tensor in tensors.items():
        weights.set(tuple(name.split(".")), tensor)
    for name, value in values.items():
        weights.set_non_tensor(tuple(name.split(".")), value)
    return weights


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
        self._sock: socket.socket | None = _take_socket(pipe)
        self._settles = settles
        self._changed = Notifier() if changed is None else changed
        self._pid = os.getpid()  # of its user, later on
        self._greeted = False
        self._lease: Lease | None = None
        self._tenant = _Tenant()
        self._closed = False
        self.patient: bool = False

    @property
    def inherited(self) -> bool:
        """Whether it was used by the process that this one was forked from."""
        return self._greeted and self._pid != os.getpid()

    def greet(self) -> None:
        """Say which process is at this end. Never waits; idempotent.

        Where the other end is gone nothing is said: what it wrote before is to be read.
        """
        if self._sock is not None and not self._greeted:
            self._greeted, self._pid = True, os.getpid()
            greeting = encode_frame(Setup(_PROCESS, str(os.getpid())))
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
        if self._lease is None or not self._lease.valid:
            self._lease = lease(self._tenant)
            _hook()
            _links.add(self)

        async def run() -> _T:
            if self._tenant.endpoint is None:
                assert self._sock is not None
                options = {"patient": self.patient, "settles": self._settles}
                self._tenant.endpoint = Endpoint(self._sock, changed=self._changed, **options)
                self._sock = None
            return await function(self._tenant.endpoint)

        return self._lease.call(run())

    @property
    def heard(self) -> bool:
        """Whether the other end was used; looks, and does not wait."""
        return self._tenant.endpoint is not None and self._tenant.endpoint.heard

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
        endpoint = self._tenant.endpoint
        return endpoint is not None and (endpoint.has_arrived or endpoint.error is not None)

    def finish(self, seconds: float) -> None:
        """Before the program ends: let child processes that start up get what was sent to them."""
        if self.patient and self._lease is not None and self._lease.valid:
            with contextlib.suppress(AiosyncError):  # nobody would see it
                self.call("finish", lambda endpoint: endpoint.until_answered(seconds))

    def close(self) -> None:
        """Close the link. Idempotent; in a forked child the parent's goes on."""
        self._closed = True
        held, self._lease = self._lease, None
        if self._sock is not None:
            if not self.inherited:
                _say_goodbye(self._sock)
            self._sock.close()
            self._sock = None
        if held is None or not held.valid:
            return
        try:
            if self._tenant.endpoint is not None:
                held.call(self._tenant.endpoint.aclose())
        finally:
            held.release()

    def abort(self) -> None:
        """The same at once, for destructors and signal handlers."""
        self._closed = True
        held: Lease | None = getattr(self, "_lease", None)
        if held is not None:
            held.abort()
        sock: socket.socket | None = getattr(self, "_sock", None)
        if sock is not None:
            sock.close()

    __del__ = abort


_links: weakref.WeakSet[Link] = weakref.WeakSet()


@functools.cache
def _hook() -> None:
    """Call it with the portal running: its own end has to come later."""
    atexit.register(_finish_all)


def _finish_all() -> None:
    give_up = time.monotonic() + _EXIT_SECONDS
    for link in list(_links):
        link.finish(give_up - time.monotonic())


# -- pipes ----------------------------------------------------------------------------------------


def _take_socket(pipe: Any) -> socket.socket:
    """The socket below one end of a two-way pipe, whose connection object is closed.

    The program may close its own end afterwards or not: it makes no difference any more.
    """
    if isinstance(pipe, socket.socket):
        return pipe
    if not hasattr(pipe, "fileno"):
        raise ConfigError(f"{pipe!r} is not a multiprocessing pipe connection")
    try:
        fd = os.dup(pipe.fileno())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"the pipe {pipe!r} is closed: {exc}") from exc
    try:
        sock = socket.socket(fileno=fd)
    except OSError as exc:
        os.close(fd)
        raise ConfigError("pipes have to be two-way: multiprocessing.Pipe(duplex=True)") from exc
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
