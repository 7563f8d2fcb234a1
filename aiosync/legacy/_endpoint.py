"""One end of a link that carries whole updates of named models, on the portal's loop.

What the transports of this generation are made of. Both ends speak the wire format: a ``Setup``
message names the model, a manifest its tensors, and updates follow. Nothing is pickled. Must not
import the blocking classes.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiosync._tasks import Notifier, TaskOwner
from aiosync.errors import (
    AckTimeout,
    AiosyncError,
    RemoteProtocolError,
    TransportClosed,
)
from aiosync.legacy._greeting import Speaks, greet, understand
from aiosync.legacy._pipes import say_goodbye
from aiosync.protocol import VersionClock
from aiosync.receiver.updates import Staged, UpdateReader
from aiosync.sender.workers import watch_process
from aiosync.tensors import FlatBuffer, Flattener, Layout
from aiosync.tensors.tensordicts import is_tensordict
from aiosync.transports._kept_errors import without_frames
from aiosync.transports.base import Received, Transport, make_ack
from aiosync.types import AckStatus
from aiosync.wire import Ack, ManifestMessage, Message, Setup, Update, Welcome

__all__ = ["Arrived", "Endpoint", "naming", "rebuild"]

_KIND = "model"
_MAX_WAITING = 8  # updates that nobody has asked for yet; the sender waits then
_WRITE_SECONDS = 2.0  # that an answer may take to leave
_KEPT_ACKS = 256


def naming(model_id: str, form: str) -> Setup:
    """What says which model the updates behind it are of.

    Args:
        model_id: Name of the model.
        form: ``"tensordict"`` or ``"state_dict"``: what its weights are to be again.
    """
    return Setup(_KIND, model_id, form.encode())


@dataclass(slots=True)
class Arrived:
    """An update that arrived.

    Attributes:
        model_id: Which model.
        weights: A nested TensorDict, or a state dict with dotted names, as the sender had it.
        epoch: Epoch of the sender.
        version: Version of the update.
    """

    model_id: str
    weights: Any
    epoch: int
    version: int


class Endpoint:
    """Sends updates and acknowledgements in order, and keeps what arrives until it is taken.

    Args:
        transport: The link; owned from now on.
        sock: What it is made of.
        newest_only: Keep only the newest update of each model, and say at once that it is here;
            otherwise keep each until :meth:`take`, and say so in :meth:`acknowledge`.
        speaks: What it says that it is, before anything else and no earlier than it is used to
            send or to receive; ``None`` when that was said already.
    """

    def __init__(
        self,
        transport: Transport,
        sock: socket.socket,
        *,
        newest_only: bool,
        speaks: Speaks | None,
    ) -> None:
        self._transport = transport
        self._sock = sock
        self._newest_only = newest_only
        self._clock = VersionClock()
        self._flatteners: dict[str, Flattener] = {}
        self._told: tuple[str, str] | None = None
        self._digest: bytes | None = None
        self._named: tuple[str, str] | None = None
        self._updates = UpdateReader(transport)
        self._arrived: deque[Arrived] = deque()
        self._acks: dict[int, Ack] = {}
        self._out: deque[tuple[Message, Sequence[memoryview]]] = deque()
        self._written = 0
        self.error: BaseException | None = None
        self._changed = Notifier()
        self._tasks = TaskOwner(self._fail)
        self._speaks = self._to_say = speaks
        self._tasks.start(self._read(), "aiosync legacy read")
        self._tasks.start(self._write(), "aiosync legacy write")

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = without_frames(error) if isinstance(error, AiosyncError) else error
            say_goodbye(self._sock)
            self._transport.abort()
            self._updates.close()
        self._changed.notify()

    async def _until(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait for something that the two tasks change; False when it took too long."""
        try:
            async with asyncio.timeout(timeout):
                while not condition():
                    self.check()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def check(self) -> None:
        """Raise what ended the link, if it has ended."""
        if self.error is not None:
            raise self.error

    # -- sending -------------------------------------------------------------------------------

    def post(self, model_id: str, weights: Any) -> int:
        """Copy weights and send them in the background.

        Returns:
            Their version.

        Raises:
            ConfigError: They cannot travel.
        """
        self.check()
        form = "tensordict" if is_tensordict(weights) else "state_dict"
        flattener = self._flatteners.setdefault(model_id, Flattener())
        prepared = flattener.prepare(weights)
        layout = prepared.layout
        flat = FlatBuffer(layout.nbytes)
        flattener.copy_into(prepared, flat)
        flattener.release()
        version = self._clock.next()
        self._introduce()
        if self._told != (model_id, form):
            self._told = (model_id, form)
            self._out.append((naming(model_id, form), ()))
        if self._digest != layout.digest:
            self._digest = layout.digest
            self._out.append((ManifestMessage(layout.manifest), ()))
        values = copy.deepcopy(prepared.values)
        update = Update(self._clock.epoch, version, layout.digest, values=values)
        self._out.append((update, [flat.memoryview()[: layout.nbytes]]))
        self._changed.notify()
        return version

    async def wait_for_ack(self, version: int, timeout: float | None) -> Ack:
        """What the peer says about a version.

        Raises:
            AckTimeout: Nothing, within ``timeout`` seconds.
            PeerClosed: The peer went away before.
        """
        if not await self._until(lambda: version in self._acks, timeout):
            raise AckTimeout(
                f"version {version} was not acknowledged within {timeout or 0:g} s",
                version=version,
            )
        return self._acks.pop(version)

    async def _write(self) -> None:
        try:
            while True:
                await self._until(lambda: bool(self._out))
                message, payload = self._out[0]
                await self._transport.send(message, payload)
                self._out.popleft()
                self._written += 1
                self._changed.notify()
        except AiosyncError as exc:
            self._fail(exc)

    # -- receiving -----------------------------------------------------------------------------

    async def take(self, timeout: float | None, model_id: str | None = None) -> Arrived | None:
        """The oldest update that was not taken, or ``None`` when none comes in time."""
        self._introduce()

        def found() -> Arrived | None:
            for each in self._arrived:
                if model_id in (None, each.model_id):
                    return each
            return None

        if not await self._until(lambda: found() is not None, timeout):
            return None
        arrived = found()
        assert arrived is not None
        self._arrived.remove(arrived)
        self._changed.notify()
        if self._newest_only:
            await self._until_written(_WRITE_SECONDS)  # this process may end as soon as it has it
        return arrived

    async def until_ready(self) -> None:
        """Wait until :meth:`take` would return an update, or raise, at once."""
        self._introduce()
        with contextlib.suppress(AiosyncError):  # take() raises it
            await self._until(lambda: bool(self._arrived))

    async def acknowledge(self, arrived: Arrived, error: BaseException | None = None) -> None:
        """Say that an update was applied, or why it was not.

        Returns when it has left, so that this process may end; after two seconds in any case.
        """
        self.check()
        status = AckStatus.APPLIED if error is None else AckStatus.NACK
        self._say(make_ack(arrived.epoch, arrived.version, status, error))
        await self._until_written(_WRITE_SECONDS)

    def _introduce(self) -> None:
        # A pipe that other processes have copies of does not end when the peer dies, and a
        # scheme at the other end has to know what it talks to.
        if self._to_say is not None:
            greet(self._sock, self._to_say)
            self._to_say = None

    def _say(self, ack: Ack) -> None:
        self._introduce()
        self._out.append((ack, ()))
        self._changed.notify()

    async def _read(self) -> None:
        try:
            while True:
                # Of the newest only, there is one for each model, and none may hold up another.
                await self._until(lambda: self._newest_only or len(self._arrived) < _MAX_WAITING)
                self._on_message(await self._transport.recv(into=self._updates.lender))
                self._changed.notify()
        except AiosyncError as exc:
            self._fail(exc)

    def _on_message(self, received: Received) -> None:
        message = received.message
        if isinstance(message, Setup) and message.kind == _KIND:
            self._named = (message.key, message.value.decode(errors="replace"))
        elif (greeting := understand(message)) is not None:
            self._on_greeting(greeting.pid, greeting.speaks)
        elif isinstance(message, ManifestMessage | Update):
            staged = self._updates.read(received)
            if staged is not None:
                self._on_update(staged)
        elif isinstance(message, Welcome):
            return  # of a scheme, which asked nothing
        elif isinstance(message, Ack):
            if message.epoch == self._clock.epoch:
                self._acks[message.version] = message
                while len(self._acks) > _KEPT_ACKS:
                    del self._acks[next(iter(self._acks))]
        else:
            raise RemoteProtocolError(f"the peer sent an unexpected {type(message).__name__}")

    def _on_greeting(self, pid: int, speaks: Speaks) -> None:
        if speaks not in ("scheme", "worker", self._speaks or speaks):
            raise RemoteProtocolError(
                "one end of the pipe is an MPTransport, the other a SharedMemTransport: use the "
                "same on both sides"
            )
        watch_process(self._transport, pid)

    def _on_update(self, staged: Staged) -> None:
        if self._named is None:
            raise RemoteProtocolError("an update came for a model that was never named")
        model_id, form = self._named
        weights = rebuild(staged.layout, staged.flat, staged.values, form)
        arrived = Arrived(model_id, weights, staged.epoch, staged.version)
        if self._newest_only:
            self._arrived = deque(each for each in self._arrived if each.model_id != model_id)
            # A scheme waits until its weights were applied; for this end they are, now.
            self._say(make_ack(staged.epoch, staged.version, AckStatus.APPLIED, None))
        self._arrived.append(arrived)

    # -- closing -------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Send what waits to be sent, for a second at most, and close the link. Idempotent."""
        if self.error is None:
            await self._until_written(1.0)
            self._fail(TransportClosed("this transport was closed"))
        await self._tasks.aclose()
        await self._transport.aclose()

    async def _until_written(self, timeout: float) -> None:
        last = self._written + len(self._out)  # what comes behind it is not waited for
        with contextlib.suppress(AiosyncError):  # the link has ended: nobody is left to be told
            await self._until(lambda: self._written >= last, timeout)

    def abort(self) -> None:
        """Close at once."""
        self._fail(TransportClosed("this transport was closed"))
        self._tasks.abort()


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
