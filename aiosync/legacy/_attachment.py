"""The worker's pipe on the portal's loop: attaching in the background, and looking for updates.

Must not import the blocking classes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any

import aiosync.schemes as aio
from aiosync._tasks import TaskOwner
from aiosync.errors import (
    AiosyncError,
    ConfigError,
    LocalProtocolError,
    PeerClosed,
    SyncTimeout,
    TransportBroken,
)
from aiosync.legacy._endpoint import rebuild
from aiosync.legacy._greeting import ask_who_writes, greet, hear
from aiosync.legacy._pipes import ProcessWatch, creator_of, say_goodbye
from aiosync.legacy._relay import Relay
from aiosync.receiver.receiver import Refusal, WeightReceiver
from aiosync.tensors import FlatBuffer
from aiosync.transports._kept_errors import without_frames

__all__ = ["Attachment"]

_ANSWER_SECONDS = 2.0  # that an answer may take to leave


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
        self._ended = threading.Event()  # attaching, in whatever way
        self.error: BaseException | None = None  # why there never was a link
        self._seen: tuple[int | None, int] = (None, 0)
        self._told: Refusal | None = None  # an update that was refused
        self._tasks = TaskOwner(self._failed)
        self._process: ProcessWatch | None = None
        self._relay: Relay | None = None

    def _failed(self, error: BaseException) -> None:
        self.error = error

    async def start(self) -> None:
        """Begin to attach; returns before the trainer has answered."""
        self._process = ProcessWatch(asyncio.get_running_loop(), self._sock)
        ask_who_writes(self._sock)
        greet(self._sock, "worker")
        self._process.watch(creator_of(self._sock))  # it has said nothing; as a rule it made it
        self._task = self._tasks.start(self._attach(), "aiosync legacy attach")
        self._task.add_done_callback(lambda _: self._ended.set())

    def why_closed(self) -> BaseException | None:
        """Why there is no link although the scheme was closed; waits for who closed it to say so.

        Blocks; not for the portal's loop.
        """
        if self._task is not None:
            self._ended.wait(_ANSWER_SECONDS)
        return self.error

    @property
    def goes_on(self) -> bool:
        """Whether it waits for the trainer."""
        return self._task is not None and not self._task.done()

    @property
    def is_up(self) -> bool:
        """Whether the link is not known to have ended."""
        receiver = self._scheme._receiver
        return self.error is None and (receiver is None or receiver.error is None)

    async def _attach(self) -> None:
        scheme, process = self._scheme, self._process
        assert process is not None
        try:
            greeting = await hear(self._sock)
            if greeting.sure:  # the process that made the pipe need not be the one that sends
                process.watch(greeting.sure)
            if greeting.speaks == "worker":
                raise ConfigError(
                    "both ends of this pipe are workers: use init_on_sender() on one of them"
                )
            if greeting.speaks == "scheme":
                scheme._pipe = scheme.create_transport(self._sock)
            else:
                self._relay = Relay(
                    self._sock, greeting, scheme.model_id, self._tasks, self._on_relay_end
                )
                scheme._pipe = self._relay.transport
            # The trainer answers with its first send, whenever that is.
            await scheme.connect(timeout=math.inf)
            self._on_relay_end()  # it may have ended meanwhile
            if scheme.apply == "auto":
                scheme._context_ref = self._context_ref
                self._use(self._model)
        except AiosyncError as exc:
            self.error = without_frames(exc)
            if isinstance(exc.__cause__, (PeerClosed, TransportBroken)):
                self.error = PeerClosed(str(exc))
            if self._relay_error is not None:
                self.error = self._relay_error
            scheme.abort()
            if self._relay is not None:
                self._relay.abort()
            self._close()

    @property
    def _relay_error(self) -> AiosyncError | None:
        # The scheme itself sees an end, and this says what it was unless it was just that.
        error = None if self._relay is None else self._relay.error
        return None if isinstance(error, PeerClosed) else error

    def _on_relay_end(self) -> None:
        error, receiver = self._relay_error, self._scheme._receiver
        if error is not None and receiver is not None:
            receiver.fail(error)

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
            receiver.applier.prepare()
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
        if self._relay is not None:
            await self._relay.until_settled(_ANSWER_SECONDS)
        return True

    async def poll(self, timeout: float | None) -> bool:
        """Whether weights wait to be applied, or the link has ended, within ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                if await self._has_attached(None):
                    await self._until(lambda: self._receiver.has_staged, None)
        except TimeoutError:
            return False
        except AiosyncError:
            return True  # peek() raises it
        return True

    async def peek(self) -> tuple[str, Any]:
        """Wait for weights that are to be applied; returns the model's name and a copy of them.

        Raises:
            PeerClosed: The trainer went away.
        """
        await self._has_attached(None)
        await self._until(lambda: self._receiver.has_staged, None)
        staged, model_id = self._receiver.applier.waiting, self._scheme.model_id
        assert staged is not None
        flat = FlatBuffer(staged.layout.nbytes)
        flat.memoryview()[:] = staged.flat.memoryview()[: staged.layout.nbytes]
        form = self._scheme.strategy.extract_as
        return model_id or "policy", rebuild(staged.layout, flat, staged.values, form)

    def _has_news(self) -> bool:
        told, self._told = self._told, self._receiver.refused
        self._receiver.check_refused(beside=told)
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

    async def aclose(self) -> None:
        """Stop attaching and handing on. Idempotent; the scheme is closed by its owner."""
        await self._tasks.aclose()
        if self._relay is not None:
            await self._relay.aclose()
        self._close()

    def abort(self) -> None:
        """The same, at once."""
        self._tasks.abort()
        if self._relay is not None:
            self._relay.abort()
        self._close()

    def forget(self) -> None:
        """In a forked child: close what is the parent's."""
        if self._process is not None:
            self._process.close()

    def _close(self) -> None:
        if self._process is not None:
            self._process.close()
        if self._scheme._pipe is self._sock:  # nobody has taken it over
            self._sock.close()

    def say_goodbye(self) -> None:
        """Let the trainer see the end even if another process has a copy of the pipe."""
        say_goodbye(self._sock)


class _Late(SyncTimeout):
    """Nothing came in time."""
