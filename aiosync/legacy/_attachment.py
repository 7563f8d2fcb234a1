"""The worker's pipe on the portal's loop: attaching in the background, and looking for updates.

Must not import the blocking classes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import weakref
from collections.abc import Callable
from typing import Any

import aiosync.schemes as aio
from aiosync.errors import (
    AiosyncError,
    ConfigError,
    ConnectError,
    LocalProtocolError,
    PeerClosed,
    SyncTimeout,
    TransportBroken,
)
from aiosync.legacy._pipes import creator_of, hear_writer, say_goodbye
from aiosync.schemes._liveness import watch_process
from aiosync.schemes._receiving import _apply_error
from aiosync.schemes._tasks import TaskOwner
from aiosync.schemes.receiver import WeightReceiver
from aiosync.transports._link import without_frames

__all__ = ["Attachment"]


class Attachment:
    """How far a receiver is. Its coroutines belong to the portal's loop.

    The scheme gets its model once the link is there: neither may weights that do not fit end
    the link, nor ``apply="manual"`` change anything before :meth:`receive`.

    Args:
        scheme: The async scheme, which has the role of a receiver and no model.
        sock: What it receives from; the scheme's own.
        model: With ``apply="auto"``, what updates are applied to.
        context_ref: With ``apply="auto"``, where the model is found otherwise.
    """

    def __init__(
        self,
        scheme: aio.WeightSyncScheme,
        sock: socket.socket,
        *,
        model: Any = None,
        context_ref: weakref.ref[Any] | None = None,
    ) -> None:
        self._scheme = scheme
        self._sock = sock
        self._model = model
        self._context_ref = context_ref
        self._task: asyncio.Task[None] | None = None
        self.error: BaseException | None = None  # why there never was a link
        self._seen: tuple[int | None, int] = (None, 0)
        self._told: tuple[int, BaseException] | None = None  # an update that was refused
        self._tasks = TaskOwner(self._failed)

    def _failed(self, error: BaseException) -> None:
        self.error = error

    async def start(self) -> None:
        """Begin to attach; returns before the trainer has answered."""
        self._task = self._tasks.start(self._attach(), "aiosync legacy attach")
        await asyncio.sleep(0)  # its first step: from then on the scheme has something to close
        receiver, trainer = self._scheme._receiver, self._scheme._sender_pid
        if receiver is not None and trainer is not None:
            watch_process(receiver.transport, trainer)
        elif receiver is not None:  # it has said nothing; as a rule it made the pipe
            self._watch(creator_of(self._sock))

    def _heard(self, trainer: int) -> None:
        # Not at once: this is in the midst of a read, perhaps the last one, as the link closes.
        if self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._task.get_loop().call_soon_threadsafe(self._watch, trainer)

    def _watch(self, trainer: int) -> None:
        """Notice the end of this process, and of no other.

        The end of the pipe does not tell: whoever was forked meanwhile has a copy of its end.
        """
        receiver = self._scheme._receiver
        channel = None if receiver is None else getattr(receiver.transport, "channel", None)
        if channel is None or channel.closed or trainer <= 0:
            return
        if channel.pidfd >= 0:
            os.close(channel.take_pidfd())
        try:
            channel.watch_process(trainer)
        except ConnectError:  # too late: it has ended; what it said still counts
            channel._on_process_end()

    async def _attach(self) -> None:
        scheme = self._scheme
        try:
            scheme._pipe = transport = scheme.create_transport(self._sock)
            if (channel := getattr(transport, "channel", None)) is not None:
                hear_writer(self._sock, channel.io, self._heard)
            # The trainer answers with its first send, whenever that is.
            await scheme.connect(timeout=math.inf)
            if scheme.apply == "auto":
                scheme._context_ref = self._context_ref
                self._use(self._model)
        except AiosyncError as exc:
            self.error = without_frames(exc)
            if isinstance(exc.__cause__, (PeerClosed, TransportBroken)):
                self.error = PeerClosed(str(exc))
            scheme.abort()

    @property
    def _receiver(self) -> WeightReceiver:
        receiver = self._scheme._receiver
        assert receiver is not None
        return receiver

    def _use(self, model: Any) -> None:
        """Apply to this model from now on, and what is staged, too."""
        scheme, receiver = self._scheme, self._receiver
        if scheme._model is not None:
            scheme.model = model
            return
        scheme._model = model
        if not receiver.has_staged:
            receiver.prepare_target()
        elif scheme.apply == "auto" and scheme._resolve_target() is not None:
            receiver.apply_soon()  # what does not fit is refused, and the trainer told

    async def receive(self, model: Any, timeout: float | None) -> bool:
        """Look for a version that was not reported before, and wait for it a while.

        Args:
            model: What it is applied to from now on; ``None`` for what the scheme has.
            timeout: Seconds; ``None`` waits until the trainer goes away.

        Raises:
            ConfigError: Weights have come, but there is no model.
            ApplyError: They do not fit it.
            PeerClosed: The trainer went away.
        """
        loop = asyncio.get_running_loop()
        give_up = None if timeout is None else loop.time() + timeout
        scheme = self._scheme
        if not await self._has_attached(timeout):
            return False
        if model is not None and model is not scheme._model:
            self._use(model)
        left = None if give_up is None else max(0.0, give_up - loop.time())
        if scheme._resolve_target() is None:
            if await self._until(lambda: self._receiver.has_staged, left):
                raise ConfigError("No model registered")
            return False
        if scheme.apply == "auto":
            if not await self._until(self._has_news, left):
                return False
        elif await scheme.receive(timeout=left) is None:
            return False
        self._seen = (self._receiver.inbox.epoch, self._receiver.inbox.version)
        return True

    def _has_news(self) -> bool:
        refused = self._receiver.refused
        if refused is not None and refused is not self._told:
            self._told = refused
            raise _apply_error(*refused) from refused[1]
        inbox = self._receiver.inbox
        return inbox.version > 0 and (inbox.epoch, inbox.version) != self._seen

    async def _has_attached(self, timeout: float | None) -> bool:
        if self._task is None:
            raise LocalProtocolError("receive() needs init_on_worker()")
        if not self._task.done():
            await asyncio.wait({self._task}, timeout=timeout)
        if self.error is not None:
            raise self.error
        return self._task.done()

    async def _until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        with contextlib.suppress(_Late):
            await self._receiver.wait_until(condition, timeout=timeout, late=_Late())
            return True
        return False

    def say_goodbye(self) -> None:
        """Let the trainer see the end even if another process has a copy of the pipe."""
        say_goodbye(self._sock)


class _Late(SyncTimeout):
    """Nothing came in time."""
