"""One end of a pipe that carries whole updates of named models.

A pipe begins with the process that is at each end. Then manifests, updates and acknowledgements
follow, in the wire format: nothing is pickled. Coroutines run on the portal's loop. Must not
import schemes.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from aiosync import transports as aio
from aiosync._tasks import Notifier, TaskOwner
from aiosync.errors import (
    AckTimeout,
    AiosyncError,
    ApplyError,
    LocalProtocolError,
    PeerClosed,
    RemoteProtocolError,
    SendTimeout,
    TransportClosed,
)
from aiosync.protocol import draw_epoch
from aiosync.receiver.updates import Buffers, UpdateReader
from aiosync.rendezvous.same_host import peer_pid
from aiosync.tensors import FlatBuffer, Flattener, Layout
from aiosync.tensors.values import is_tensordict
from aiosync.transports._processes import is_gone
from aiosync.transports.base import LinkError, Received, again, make_ack, without_frames
from aiosync.transports.stream import ByteStream
from aiosync.types import AckStatus
from aiosync.wire import Ack, ManifestMessage, Setup, Update

__all__ = ["PROCESS", "Copier", "Endpoint", "Weights"]

_T = TypeVar("_T")

PROCESS = "process"  # what a Setup names
_MAX_WAITING = 8  # updates that nobody has asked for yet, or that the link has not taken yet
_KEPT_ACKS = 256
_ANSWER_SECONDS = 2.0  # that an answer may take to leave
_LOOK_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class Weights:
    """A copy of weights that travels, or that has arrived.

    Once it is gone, its memory is used again, unless a tensor views it.
    """

    form: str  # what they are to be again: "tensordict" or "state_dict"
    layout: Layout
    flat: FlatBuffer
    values: Mapping[str, Any]
    give_back: Callable[[], None]
    model_id: str = ""  # like the rest, of what has arrived
    epoch: int = 0
    version: int = 0

    def __del__(self) -> None:
        self.give_back()

    def rebuild(self, form: str | None = None) -> Any:
        """A nested TensorDict, or a state dict with dotted names, as views of the memory."""
        tensors = dict(self.flat.named_views(self.layout))
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


class Endpoint:
    """Sends updates and acknowledgements in order, and keeps what arrives until it is taken.

    All of it runs on the portal's loop.

    Args:
        stream: Over a two-way pipe; owned from now on.

    Attributes:
        patient: Let no update leave before the other end was used, and keep only the newest of
            those that have not left. May be changed until it is used, like the next two.
        newest: Where to keep the newest update of each model that arrives, each of which is
            answered at once; ``None`` keeps all, until they are acknowledged or taken.
        changed: Wakes whoever waits for this.
        error: What ended the link; ``None`` while it has not.
        heard: The other end was used.
        arrived: Updates that are here.
        tasks: Owner of what runs for as long as the link.
    """

    def __init__(self, stream: ByteStream) -> None:
        self.sock: socket.socket = stream.sock
        self._stream = stream
        self.patient: bool = False
        self.newest: dict[str, Weights] | None = None
        self.changed: Notifier = Notifier()
        self.arrived: deque[Weights] = deque()
        self.error: BaseException | None = None
        self.heard: bool = False
        self.tasks: TaskOwner = TaskOwner(self._fail)
        self._transport: aio.MPTransport | None = None
        self._updates = UpdateReader()
        self._epoch, self._version = draw_epoch(), 0
        self._leaving: deque[tuple[Ack | Update, Weights | None]] = deque()
        self._writes = False
        self._acks: dict[int, Ack] = {}
        # The process at the other end, as far as anybody knows: at first who made the pipe.
        self._peer = (peer_pid(self.sock) or 0) if hasattr(socket, "SO_PEERCRED") else 0

    async def run(self, function: Callable[..., Coroutine[Any, Any, _T]], *args: Any) -> _T:
        """Call one of the others, with the link below."""
        if self._transport is None:
            transport = aio.MPTransport(self._stream, name="the other end of the pipe")
            self._transport = transport
            self._updates.use_link(transport)
            for task in (self._read(transport), self._write(transport), self._watch_process()):
                self.tasks.start(task, "aiosync legacy link")
        return await function(*args)

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
                    if (error := self.error) is not None:
                        raise again(error) if isinstance(error, LinkError) else error
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
            self._leaving = deque(each for each in self._leaving if each[1] is None)
        self._version = version = self._version + 1
        digest = weights.layout.digest
        named = {"model_id": model_id, "form": weights.form, "values": weights.values}
        self._leave(Update(self._epoch, version, digest, values=named), weights)
        return version

    def _leave(self, message: Ack | Update, weights: Weights | None = None) -> None:
        self._leaving.append((message, weights))
        self.changed.notify()

    async def _write(self, transport: aio.MPTransport) -> None:
        digest = b""  # of the manifest that the other end has
        while True:
            await self.until(lambda: self._leaving and (self.heard or not self.patient))
            message, weights = self._leaving.popleft()
            self._writes, payload = True, []
            if weights is not None:
                layout = weights.layout
                payload = [weights.flat.memoryview()[: layout.nbytes]]
                if digest != layout.digest:
                    digest = layout.digest
                    await transport.send(ManifestMessage(layout.manifest))
            await transport.send(message, payload)
            weights, self._writes = None, False  # whose memory is used again
            self.changed.notify()

    async def all_left(self, seconds: float = _ANSWER_SECONDS) -> None:
        """Wait until everything has left; so long at most, and for nothing once the link ends."""
        with contextlib.suppress(AiosyncError):  # nobody is left to be told
            await self.until(lambda: not (self._leaving or self._writes), seconds)

    async def wait_for_ack(self, version: int, timeout: float | None) -> None:
        """Wait until the peer says that it applied a version.

        Raises:
            AckTimeout: It says nothing, within ``timeout`` seconds.
            LocalProtocolError: It says something else.
            PeerClosed: It went away before.
        """
        if not await self.until(lambda: version in self._acks, timeout):
            raise AckTimeout(
                f"version {version} was not acknowledged within {round(timeout or 0, 1):g} s",
                version=version,
            )
        ack = self._acks.pop(version)
        if ack.status is AckStatus.NACK:
            by_hand = ack.error_type == LocalProtocolError.__name__  # of send_ack(message)
            said = ack.error_text if by_hand else f"{ack.error_type}: {ack.error_text}"
            cause = ApplyError(ack.error_text, version=version, remote_type=ack.error_type)
            raise LocalProtocolError(f"Expected acknowledgment 'updated', got {said!r}") from cause

    # -- receiving -----------------------------------------------------------------------------

    async def take(self, timeout: float | None) -> Weights | None:
        """The oldest update that is here, and no longer then; ``None`` when none comes in time."""
        if not await self.until(lambda: self.arrived, timeout):
            return None
        weights = self.arrived.popleft()
        self.changed.notify()
        return weights

    async def acknowledge(self, weights: Weights, error: BaseException | None = None) -> None:
        """Say that an update was applied, or why it was not, and keep it no longer.

        Returns when it has left, so that this process may end; after two seconds in any case.
        """
        if weights in self.arrived:
            self.arrived.remove(weights)
        self._answer(weights, error)
        await self.all_left()

    def _answer(self, weights: Weights, error: BaseException | None = None) -> None:
        status = AckStatus.APPLIED if error is None else AckStatus.NACK
        self._leave(make_ack(weights.epoch, weights.version, status, error))

    async def _read(self, transport: aio.MPTransport) -> None:
        while True:
            await self.until(lambda: len(self.arrived) < _MAX_WAITING)
            self._on_message(await transport.recv(into=self._updates.lender))
            self.changed.notify()

    def _on_message(self, received: Received) -> None:
        message = received.message
        if isinstance(message, Setup) and message.kind == PROCESS and message.key.isdecimal():
            self.heard, self._peer = True, int(message.key)
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
            if self.newest is None:
                self.arrived.append(weights)
            else:
                self.newest[weights.model_id] = weights
                self._answer(weights)

    # -- closing -------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = without_frames(error)
            self.say_goodbye()
            if self._transport is not None:
                self._transport.abort()
            self._updates.close()
        self.changed.notify()

    async def aclose(self) -> None:
        """Send what waits to be sent, for a second at most, and close the link. Idempotent."""
        if self.heard or not self.patient:
            await self.all_left(1.0)
        self.abort()
        await self.tasks.aclose()

    def abort(self) -> None:
        """Close at once. Called on the loop."""
        self._fail(TransportClosed("this transport was closed"))
        self.tasks.abort()

    def forgotten(self) -> None:
        """Say nothing: nobody closes transports of this generation."""

    def say_goodbye(self) -> None:
        """End what is written; closing is not enough where forked processes have copies."""
        with contextlib.suppress(OSError):  # closed already, or the other end is
            self.sock.shutdown(socket.SHUT_WR)
