"""One end of a pipe that carries whole updates of named models.

Each end first sends the id of its process over the pipe. Then manifests, updates and
acknowledgements follow, in the wire format: nothing is pickled. Coroutines run on the portal's
loop. Must not import schemes.
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
from aiosync.receiver.update_reader import Buffers, Staged, UpdateReader
from aiosync.rendezvous.same_host import peer_pid
from aiosync.tensors import FlatBuffer, Flattener, Layout
from aiosync.tensors.values import is_tensordict
from aiosync.transports._process_end import is_gone
from aiosync.transports.base import LinkError, Received, again, make_ack, without_frames
from aiosync.transports.byte_stream import ByteStream
from aiosync.types import AckStatus
from aiosync.wire import Ack, ManifestMessage, Setup, Update

__all__ = ["PROCESS", "Copier", "Endpoint", "Weights", "clone_tensors"]

_T = TypeVar("_T")

PROCESS = "process"  # kind of the Setup that carries a process id
# Updates that wait for the program's receive(), or for the link to take them.
_MAX_WAITING = 8
_KEPT_ACKS = 256  # acks that wait_for_ack() has not taken; it need not be called for each
_ANSWER_SECONDS = 2.0  # longest time for an answer to be written
_POLL_SECONDS = 0.5  # time between two checks if the peer's process still runs


@dataclass(slots=True, eq=False)
class Weights:
    """A copy of weights that is being sent, or that has arrived.

    Once the object is deleted, its memory is used for other weights, unless a tensor views it.
    """

    form: str  # form of the original: "tensordict" or "state_dict"
    layout: Layout
    flat: FlatBuffer
    values: Mapping[str, Any]
    give_back: Callable[[], None]
    model_id: str = ""  # this and the next two are set only for weights that have arrived
    epoch: int = 0
    version: int = 0

    def __del__(self) -> None:
        self.give_back()

    def rebuild(self, form: str | None = None) -> Any:
        """Return a nested TensorDict, or a state dict with dotted names, as views of the memory.

        ``form`` is ``"tensordict"`` or ``"state_dict"``; ``None`` for the form of the original.
        """
        tensors = dict(self.flat.named_views(self.layout))
        if (form or self.form) == "state_dict":
            return {**tensors, **self.values}
        return _nested(tensors, self.values)


class Copier:
    """Copier of weights, which uses the memory of deleted copies for new ones."""

    def __init__(self) -> None:
        self._flattener = Flattener()
        self._buffers = Buffers()

    def copy(self, weights: Any) -> Weights:
        """Copy a TensorDict, a state dict or a module.

        Raises:
            ConfigError: A value or tensor in it cannot travel.
        """
        prepared = self._flattener.prepare(weights)
        flat = self._buffers.take(prepared.layout.nbytes)
        prepared.copy_into(flat)
        form = "tensordict" if is_tensordict(weights) else "state_dict"
        values, give_back = copy.deepcopy(prepared.values), self._buffers.put_back
        return Weights(form, prepared.layout, flat, values, functools.partial(give_back, flat))


def clone_tensors(weights: Any) -> Any:
    """Return weights with a copy of each tensor, on any level; other values stay the same.

    Unlike a :class:`Copier`, it keeps the devices and the form.
    """
    if isinstance(weights, Mapping) and not is_tensordict(weights):
        return {name: clone_tensors(value) for name, value in weights.items()}
    return weights.detach().clone() if hasattr(weights, "detach") else weights


class Endpoint:
    """One end of a link: sends updates and acks in order, and keeps updates that have arrived.

    All of its methods run on the portal's loop.

    Args:
        stream: Stream over a two-way pipe; owned from now on.

    Attributes:
        patient: True if no update leaves before the other end was used, and only the newest of the
            unsent updates is kept. May be changed until the first call of :meth:`run`, as may
            ``newest``.
        newest: Mapping that keeps the newest arrived update of each model; every update is
            acknowledged at once. ``None`` keeps all updates until they are acknowledged or taken.
        changed: Notified at each change of the state of this end.
        error: Error that ended the link; ``None`` while the link is open.
        peer_was_used: True if the other end was used.
        arrived: Updates that have arrived, oldest first.
        tasks: Owner of the tasks that run as long as the link.
    """

    def __init__(self, stream: ByteStream) -> None:
        self.sock: socket.socket = stream.sock
        self._stream = stream
        self.patient: bool = False
        self.newest: dict[str, Weights] | None = None
        self.changed: Notifier = Notifier()
        self.arrived: deque[Weights] = deque()
        self.error: BaseException | None = None
        self.peer_was_used: bool = False
        self.tasks: TaskOwner = TaskOwner(self._fail)
        self._transport: aio.MPTransport | None = None
        self._updates = UpdateReader()
        self._epoch, self._version = draw_epoch(), 0
        # Messages that are still to be written, with the weights of an update.
        self._leaving: deque[tuple[Ack | Update, Weights | None]] = deque()
        self._writes = False  # True while a message is being written
        self._acks: dict[int, Ack] = {}  # acks of the peer, by version, that no wait has taken
        # Process at the other end. Until it names itself, this is the process that made the pipe.
        self._peer = (peer_pid(self.sock) or 0) if hasattr(socket, "SO_PEERCRED") else 0

    async def run(self, function: Callable[..., Coroutine[Any, Any, _T]], *args: Any) -> _T:
        """Start the link if it is not running, then run a coroutine function."""
        if self._transport is None:
            transport = aio.MPTransport(self._stream, name="the other end of the pipe")
            self._transport = transport
            self._updates.use_link(transport)
            for task in (self._read(transport), self._write(transport), self._watch_process()):
                self.tasks.start(task, "aiosync legacy link")
        return await function(*args)

    async def until(self, condition: Callable[[], object], timeout: float | None = None) -> bool:
        """Wait until a condition holds; return False if it does not within ``timeout`` seconds.

        Raises:
            AiosyncError: The link ended before the condition held.
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
        """Wait for the end of the process at the other end, and raise: that ends the link."""
        # The pipe does not end with the peer's process if a process that was forked meanwhile has a
        # copy of the other end. So the process itself is watched. The peer's first message names
        # it; until then, it is as a rule the process that made the pipe.
        while not (self._peer and is_gone(self._peer)):  # noqa: ASYNC110 - no event tells its end
            await asyncio.sleep(_POLL_SECONDS)
        await asyncio.sleep(_POLL_SECONDS)  # time to read the bytes that the process wrote before
        raise PeerClosed(f"process {self._peer} at the other end of the pipe has ended")

    # -- sending -------------------------------------------------------------------------------

    async def post(self, model_id: str, weights: Weights, timeout: float | None) -> int:
        """Send a copy of weights in the background; return its version.

        Raises:
            SendTimeout: Too many earlier updates are unsent, and stay so for ``timeout`` seconds.
        """

        def is_room() -> bool:
            # After an error there is no room, so that until() raises it.
            return self.error is None and (self.patient or len(self._leaving) < _MAX_WAITING)

        if not await self.until(is_room, timeout):
            raise SendTimeout(f"the other end of the pipe took nothing for {timeout or 0:g} s")
        if self.patient:  # the newest update replaces the unsent ones; acks stay
            self._leaving = deque(each for each in self._leaving if each[1] is None)
        self._version = version = self._version + 1
        digest = weights.layout.digest
        values = {"model_id": model_id, "form": weights.form, "values": weights.values}
        self._enqueue(Update(self._epoch, version, digest, values=values), weights)
        return version

    def _enqueue(self, message: Ack | Update, weights: Weights | None = None) -> None:
        """Have a message written after those that wait already."""
        self._leaving.append((message, weights))
        self.changed.notify()

    async def _write(self, transport: aio.MPTransport) -> None:
        """Write the waiting messages, one after the other, as long as the link runs."""
        digest = b""  # digest of the manifest that the other end has
        while True:
            await self.until(lambda: self._leaving and (self.peer_was_used or not self.patient))
            message, weights = self._leaving.popleft()
            self._writes, payload = True, []
            if weights is not None:
                layout = weights.layout
                payload = [weights.flat.memoryview()[: layout.nbytes]]
                if digest != layout.digest:
                    digest = layout.digest
                    await transport.send(ManifestMessage(layout.manifest))
            await transport.send(message, payload)
            weights, self._writes = None, False  # dropped here so that the memory is free
            self.changed.notify()

    async def all_left(self, seconds: float = _ANSWER_SECONDS) -> None:
        """Wait until all messages are written, for ``seconds`` at most, or the link has ended."""
        with contextlib.suppress(AiosyncError):  # the link has ended: no message can be written
            await self.until(lambda: not (self._leaving or self._writes), seconds)

    async def wait_for_ack(self, version: int, timeout: float | None) -> None:
        """Wait until the peer acknowledges that it applied a version.

        Raises:
            AckTimeout: No ack came within ``timeout`` seconds.
            LocalProtocolError: The peer refused the version.
            PeerClosed: The peer closed its end, or its process ended.
        """
        if not await self.until(lambda: version in self._acks, timeout):
            raise AckTimeout(
                f"version {version} was not acknowledged within {round(timeout or 0, 1):g} s",
                version=version,
            )
        ack = self._acks.pop(version)
        if ack.status is AckStatus.NACK:
            cause = ApplyError(ack.error_text, version=version, remote_type=ack.error_type)
            raise _unexpected_answer(ack) from cause

    # -- receiving -----------------------------------------------------------------------------

    async def take(self, timeout: float | None) -> Weights | None:
        """Remove and return the oldest update that has arrived; ``None`` if none comes in time."""
        if not await self.until(lambda: self.arrived, timeout):
            return None
        weights = self.arrived.popleft()
        self.changed.notify()
        return weights

    async def acknowledge(self, weights: Weights, error: BaseException | None = None) -> None:
        """Answer an update: applied, or refused with ``error``; keep the update no longer.

        Returns when the answer is written, so that this process may end; after two seconds in any
        case.
        """
        if weights in self.arrived:
            self.arrived.remove(weights)
        self._answer(weights, error)
        await self.all_left()

    def _answer(self, weights: Weights, error: BaseException | None = None) -> None:
        """Have the ack of an update written, or its refusal with ``error``; do not wait."""
        status = AckStatus.APPLIED if error is None else AckStatus.NACK
        self._enqueue(make_ack(weights.epoch, weights.version, status, error))

    async def _read(self, transport: aio.MPTransport) -> None:
        """Read as long as the link runs; pause while too many updates wait for the program."""
        while True:
            await self.until(lambda: len(self.arrived) < _MAX_WAITING)
            self._on_message(await transport.recv(into=self._updates.lender))
            self.changed.notify()

    def _on_message(self, received: Received) -> None:
        """Keep what the peer sent: its process's id, an ack or an update."""
        message = received.message
        if isinstance(message, Setup) and message.kind == PROCESS and message.key.isdecimal():
            self.peer_was_used, self._peer = True, int(message.key)
        elif isinstance(message, Ack):
            self._acks[message.version] = message
            while len(self._acks) > _KEPT_ACKS:
                del self._acks[next(iter(self._acks))]
        elif (staged := self._updates.read(received)) is not None:
            weights = _weights_of(staged)
            if self.newest is None:
                # Every update is kept for the call that takes it, and answered there.
                self.arrived.append(weights)
            else:
                self.newest[weights.model_id] = weights
                self._answer(weights)

    # -- closing -------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """End the link with an error, which all waits raise; if it has one already, keep that."""
        if self.error is None:
            self.error = without_frames(error)
            self.say_goodbye()
            if self._transport is not None:
                self._transport.abort()
            self._updates.close()
        self.changed.notify()

    async def aclose(self) -> None:
        """Write the unsent messages, for a second at most, and close the link. Idempotent."""
        if self.peer_was_used or not self.patient:
            await self.all_left(1.0)
        self.abort()
        await self.tasks.aclose()

    def abort(self) -> None:
        """Close the link at once. Called on the loop."""
        self._fail(TransportClosed("this transport was closed"))
        self.tasks.abort()

    def forgotten(self) -> None:
        """Give no warning: programs of this generation do not close their transports."""

    def say_goodbye(self) -> None:
        """Shut down the writing side of the socket.

        A close alone would not end the stream while forked processes have copies of the socket.
        """
        with contextlib.suppress(OSError):  # this end or the other end is closed already
            self.sock.shutdown(socket.SHUT_WR)


def _weights_of(staged: Staged) -> Weights:
    """Return the weights of an update that has arrived."""
    values = staged.values
    if values.keys() != {"model_id", "form", "values"}:
        raise RemoteProtocolError("the peer sent an update that is not of this generation")
    return Weights(
        values["form"],
        staged.layout,
        staged.flat,
        values["values"],
        staged.give_back,
        values["model_id"],
        staged.epoch,
        staged.version,
    )


def _unexpected_answer(ack: Ack) -> LocalProtocolError:
    """Return the error for a worker's answer that is not ``"updated"``."""
    # A program's send_ack(message) comes as an error of this type.
    by_hand = ack.error_type == LocalProtocolError.__name__
    got = ack.error_text if by_hand else f"{ack.error_type}: {ack.error_text}"
    return LocalProtocolError(f"Expected acknowledgment 'updated', got {got!r}")


def _nested(tensors: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """Return a nested TensorDict of tensors and other values by dotted name."""
    from tensordict import TensorDict  # loaded only when it is needed

    weights = TensorDict({}, batch_size=[])
    for name, tensor in tensors.items():
        weights.set(tuple(name.split(".")), tensor)
    for name, value in values.items():
        weights.set_non_tensor(tuple(name.split(".")), value)
    return weights
