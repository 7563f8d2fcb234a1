"""The worker's runtime: a background task that stages updates, acknowledges them, and waits.

A scheme owns one while it is a receiver. The task only stages; applying happens under the guard,
on the loop or on the thread of a forward, or when the worker calls ``apply_pending()``: that half
is in ``_applying``. Must not import the sender.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Literal

from aiosync._tasks import TaskOwner
from aiosync.errors import (
    AiosyncError,
    PeerClosed,
    RemoteProtocolError,
    StaleVersion,
    SyncTimeout,
    TransportClosed,
)
from aiosync.receiver.guard import Guard
from aiosync.schemes._answering import Answering
from aiosync.schemes._outgoing import Outgoing
from aiosync.schemes._relaying import Relay, Relaying
from aiosync.schemes._staging import Staged, Staging
from aiosync.schemes._transforming import Transform, Transforming
from aiosync.schemes._wishes import Wishes
from aiosync.transports._link import without_frames
from aiosync.transports.base import Received, Transport, make_ack
from aiosync.types import AckStatus
from aiosync.wire import Current, ManifestMessage, Promise, Take, Update

__all__ = ["WeightReceiver"]

_CLOSE_SECONDS = 1.0
_LOOK_SECONDS = 0.05
_BELL_SECONDS = 0.001


class WeightReceiver(Answering):
    """Receives versions of one model and puts them into it.

    Made by a scheme's ``connect()``; use the scheme's methods. Belongs to one event loop;
    ``apply_pending()`` and the guard may be used from any thread.

    Args:
        transport: The link, after the handshake; owned from now on.
        resolve: Returns the model to apply to as it is now, or ``None`` while there is none.
        apply: ``"auto"``, or ``"manual"`` to apply only in calls that ask for it.
        copy: Copy into the parameters instead of pointing them at the received memory.
        strict: Every name and dtype must match.
        guard: Keeps forwards and updates apart.
        install_hooks: Make the forwards of the model reads of the guard.
        on_applied: Called on the loop after each applied update.
        flipped: Called with epoch and version as the model gets them, under the guard, on
            whatever thread; must not wait. What it raises is told, and the model has the version.
        relay: Passes on what was applied before the trainer is told; asked for at each update.
        before_apply: Called on the loop before an update is applied; refuses it by what it raises.
        transform: Makes of an update, in a thread, what the model wants.
        relink: Finds another link, handshake included, after one was lost for the reason that
            it is given; ``None`` where a lost link is the end.
        promises: Over shared memory, forwards may take new versions before the trainer hears.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        resolve: Callable[[], Any],
        apply: Literal["auto", "manual"],
        copy: bool,
        strict: bool,
        guard: Guard,
        install_hooks: bool,
        on_applied: Callable[[int, int], None],
        flipped: Callable[[int, int], None] | None = None,
        relay: Callable[[], Relay | None] = lambda: None,
        before_apply: Callable[[int, int], object] | None = None,
        transform: Transform | None = None,
        relink: Callable[[AiosyncError], Awaitable[Transport]] | None = None,
        promises: bool = True,
    ) -> None:
        tasks = TaskOwner(self.fail)
        super().__init__(
            resolve=resolve,
            apply=apply,
            copy=copy,
            strict=strict,
            guard=guard,
            install_hooks=install_hooks,
            flipped=flipped,
            staging=Staging(transport),
            outgoing=Outgoing(transport, tasks),
            relaying=Relaying(tasks, self._relayed),
            relay=relay,
            on_applied=on_applied,
            promises=promises,
        )
        if transform is not None or before_apply is not None:
            self._transforming = Transforming(
                transform,
                before_apply,
                tasks=tasks,
                staging=self._staging,
                done=self._take_transformed,
                failed=self._untransformed,
            )
        self.transport: Transport = transport
        self.lost: AiosyncError | None = None  # why there is no link, while one is looked for
        # Since when, on time.monotonic()'s clock, no link was of use, and why the last one ended.
        self.cut_off: tuple[float, AiosyncError] | None = None
        self.error: BaseException | None = None
        self._error_traceback: TracebackType | None = None
        self.reconnects: int = 0
        self.progress: int = 0  # parts of updates that arrived, and answers
        self.progress_at: float = 0.0  # when the last part came, on time.monotonic()'s clock
        self.wishes: Wishes = Wishes(self._outgoing)
        self._relink = relink
        self._num_waiting = 0
        self._tasks = tasks

    def start(self) -> None:
        """Begin to receive in the background."""
        self._tasks.start(self._run(), "aiosync receiver")

    def fail(self, error: BaseException) -> None:
        """Nothing more will come, for this reason; whoever waits raises it."""
        if self.error is None and not self._closed:
            self.error = without_frames(error)
            self._error_traceback = error.__traceback__
            self.transport.abort()  # the sender sees it at once
        self._changed.notify()

    # -- staging -------------------------------------------------------------------------------

    async def _run(self) -> None:
        lost: AiosyncError
        while True:
            try:
                await self._receive()
            except AiosyncError as exc:
                lost = without_frames(exc)
            self.lost = lost
            self.cut_off = (self.cut_off[0] if self.cut_off else time.monotonic(), lost)
            if self._relink is None or self._closed:
                self.fail(lost)
                return
            self.transport.abort()
            try:
                link = await self._relink(lost)
            except AiosyncError as exc:
                self.fail(exc)
                return
            await self._take_last_word()
            self.use_link(link)
            self.reconnects += 1
            self.wishes.ask_again()

    async def _take_last_word(self) -> None:
        """Take what the last link named before it was lost: its trainer counts on that."""
        slots = self._staging.slots
        if slots is not None and slots.is_behind and self.looks:
            await self.guard.wait_free(_CLOSE_SECONDS)
            self.guard.exclusively(self._apply_staged, timeout=0.0)

    def use_link(self, transport: Transport) -> None:
        """Go on with another link, after its handshake."""
        self.lost = None
        self._staging.keep(self._current)
        self._staging.keep(self._taking)
        self._promise_versions_of(None)
        self._owe(0)
        self._forget_overlap()
        self._stop_looking()
        self.transport = transport
        self._staging.next_link(transport)
        self._outgoing.use_link(transport)

    async def _receive(self) -> None:
        """Take messages until the link ends, which raises why."""
        lender = self._staging.lender
        transport = self.transport
        transport.subscribe(self._on_message)
        while True:
            self._on_message(await transport.recv(into=lender))
            await self._outgoing.flush()

    def _on_message(self, received: Received) -> None:
        if self._closed:  # and the link is about to be
            received.release()
            return
        message = received.message
        self._outgoing.check()
        if isinstance(message, Update) and self._staging.checks:
            part = self._staging.take_part(received)
            self.progress, self.progress_at = self.progress + 1, time.monotonic()
            if part is not None:
                self._stage(part)
        elif isinstance(message, Update):
            self._stage(self._staging.take(received))
        elif isinstance(message, Take):
            self._on_take(message)
        elif isinstance(message, Promise):
            self.look_now()  # for what was named before the trainer heard of it
            self._on_promise_withdrawn()
        elif isinstance(message, ManifestMessage):
            self._staging.learn(message.manifest)
        elif isinstance(message, Current):
            self.progress += 1
            if self.looks:
                self.look_now()
            if self.wishes.on_current(message, self.inbox):
                self.cut_off = None
                self._has_come(message.epoch, message.version)
        else:
            raise RemoteProtocolError(f"the trainer sent an unexpected {type(message).__name__}")

    def look_now(self) -> None:
        """Apply what the word of the link names, if it is news, now or when the reads end."""
        slots = self._staging.slots
        if slots is not None and slots.is_behind and not self._manual:
            if not self.guard.submit(self._apply_when_fit) and self._look_timer is None:
                self._look_again(_LOOK_SECONDS)

    def _on_take(self, message: Take) -> None:
        """The trainer has named a slot, and waits for an answer unless the version is 0."""
        self.cut_off = None
        epoch, version = message.epoch, message.version
        if not version:
            self.look_now()
            return
        if self._staging.slots is None:
            raise RemoteProtocolError("the trainer named memory that it never announced")
        if epoch != self.inbox.newest_epoch:
            self._forget_refusal()  # of a trainer before
        self._staging.epoch = epoch
        if self._transforming is not None:
            staged = self._open_named()
            if staged is None:
                stale = StaleVersion(f"version {version} is older than what the model has")
                self._outgoing.say(self._answer_to_stale(epoch, version, stale))
            else:
                if self._staging.slots is not None and staged.slot is not None:
                    self._staging.slots.refuse(staged.slot)
                self._stage(staged)
            return
        older = self.owed
        try:
            self.inbox.offer(epoch, version)
        except StaleVersion as exc:
            self._outgoing.say(self._answer_to_stale(epoch, version, exc))
            self._has_come(epoch, version)
            return
        taking = self._taking
        if older and (taking is None or taking.slot is None or taking.version < older):
            self._outgoing.say(make_ack(epoch, older, AckStatus.SKIPPED, None))
        self._owe(version)
        if self._wishes_wait:
            self._has_come(epoch, version)
        if self._staged is not None:
            self.guard.withdraw()
        if not self._manual and self._resolve() is not None:
            self.apply_soon()
        if self._answered != (epoch, version) and self.owed:
            self._outgoing.say(make_ack(epoch, version, AckStatus.RECEIVED, None))
        self._changed.notify()

    def _stage(self, staged: Staged) -> None:
        self.cut_off = None
        if staged.epoch != self.inbox.newest_epoch:
            self._forget_refusal()  # of a trainer before
        try:
            self.inbox.offer(staged.epoch, staged.version)
        except StaleVersion as exc:
            staged.give_back()
            self._outgoing.say(self._answer_to_stale(staged.epoch, staged.version, exc))
            self._has_come(staged.epoch, staged.version)
            return
        if self._wishes_wait:
            self._has_come(staged.epoch, staged.version)
        if self._transforming is not None:
            self._transforming.begin(staged)
        else:
            self._take(staged)

    def _take(self, staged: Staged) -> None:
        """Have the model get this update, now or as soon as it can."""
        if self._staged is not None:
            self.guard.withdraw()
            self._drop_staged(self._exchange(staged), by=staged)
        else:
            self._exchange(staged)
        if not self._manual and self._resolve() is not None:
            self.apply_soon()
        if self._answered != (staged.epoch, staged.version):
            # It has to wait; APPLIED or NACK at once would have said that it was received.
            received = make_ack(staged.epoch, staged.version, AckStatus.RECEIVED, None)
            self._outgoing.say(received)
        self._changed.notify()

    def _take_transformed(self, staged: Staged) -> None:
        if staged.epoch == self.inbox.newest_epoch:
            self._take(staged)
        else:
            staged.give_back()  # of a trainer before the one that there is

    @property
    def _wishes_wait(self) -> bool:
        return bool(self.wishes.wanted) or self.wishes.is_promised

    def _has_come(self, epoch: int, version: int) -> None:
        """What pull() may have asked for is here, or the model refused it before."""
        self.wishes.has_come(epoch, version)
        if self._refusal is not None and self._refusal[:2] == (epoch, version):
            self._refuse(*self._refusal[1:])
        self._changed.notify()

    # -- asking --------------------------------------------------------------------------------

    @property
    def partial(self) -> tuple[int, int, int] | None:
        """Epoch, version and verified bytes of an update that is here in part."""
        return self._staging.partial

    @property
    def partial_since(self) -> float | None:
        """When the last part of an update came that is still incomplete; ``None`` without one.

        On ``time.monotonic()``'s clock.
        """
        return None if self.partial is None else self.progress_at

    @property
    def transforming_since(self) -> float | None:
        """When the transform began that is at work now; ``None`` if none is."""
        return None if self._transforming is None else self._transforming.since

    # -- waiting -------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what ended the link, if it has ended."""
        if self._closed:
            raise TransportClosed("this scheme was closed")
        if self.error is not None:
            if isinstance(self.error, PeerClosed):
                text = "the trainer closed the link, or its process ended"
                if self._relink is not None:
                    text = str(self.error)  # says for how long it was looked for
                raise PeerClosed(text) from self.error
            raise self.error.with_traceback(self._error_traceback)  # it would grow at each raise

    async def wait_until(
        self, condition: Callable[[], bool], *, timeout: float | None, late: SyncTimeout
    ) -> None:
        """Wait for something that updates change.

        Raises:
            SyncTimeout: ``late``, when the timeout passed.
            PeerClosed: The trainer went away before.
        """
        self.look_now()
        if condition():
            await asyncio.sleep(0)  # updates come on this loop, also where nobody has to wait
            return

        def rung() -> bool:
            self._ring_me()
            return condition()

        self._num_waiting += 1
        try:
            async with asyncio.timeout(timeout):
                await asyncio.sleep(0)
                while not condition():
                    self.check()
                    # Another thread may have taken it in between, and told nobody.
                    await self._changed.wait(unless=rung)
        except TimeoutError as exc:
            if isinstance(exc, SyncTimeout):
                raise
            raise late from exc
        finally:
            self._num_waiting -= 1
            slots = self._staging.slots
            if slots is not None and not self._num_waiting:
                slots.ring_me(False)

    def _ring_me(self) -> None:
        """Have the trainer tell of a new version at once, while somebody waits for one."""
        slots = self._staging.slots
        if slots is None or not self.looks:
            return
        slots.ring_me(True)
        self.look_now()
        # The trainer may have named one in between, and neither side have seen it of the other.
        self._loop.call_later(_BELL_SECONDS, self.look_now)

    # -- closing -------------------------------------------------------------------------------

    def leave_memory(self) -> None:
        """Have the model keep the memory that it views, if that is this process's own.

        Otherwise closing copies it. Call it right before.
        """
        current = self._current
        if current is not None and current.slot is None and not current.lent:
            self._current = None

    async def aclose(self) -> None:
        """Stop receiving, give the module memory of its own, close the link. Idempotent."""
        if self._closed:
            return
        try:
            await self.guard.wait_free(_CLOSE_SECONDS)
        except BaseException:  # goes on to the caller
            self.abort()
            raise
        self._end()
        try:
            await self._tasks.aclose()
        finally:
            self.transport.abort()

    def abort(self) -> None:
        """The same from synchronous code, without waiting for the tasks."""
        if self._closed:
            return
        self._end()
        self._tasks.abort()
        self.transport.abort()

    def _end(self) -> None:
        if self._closed:
            return  # meanwhile, by another call
        if self._adopts_late:
            self._adopts_late = False
            self.guard.withdraw()
        self._withdraw()
        if self._taking is not None:  # was cut short: the model keeps one version, not two
            self.guard.exclusively(self._apply_staged, timeout=0.0)
        self._report_outcomes()  # another thread may have applied something meanwhile
        self._closed = True
        if self._look_timer is not None:
            self._look_timer.cancel()
        if self._transforming is not None:
            self._transforming.close()
        if self._current is not None and not self._copy:
            # The memory goes back to the trainer, who writes the next version into it; but not
            # below a forward that does not end. To that the values stay the same.
            if self.guard.exclusively(self._detach, timeout=0.0):
                self._staging.retire(self._current)
            else:
                self._detach()
                self._staging.keep(self._current)
                self.guard.submit([self._current].clear)  # once the reads that there are end
        self._current = None
        self.guard.uninstall()
        self.guard.ignore_word()
        self._staging.close()
        self._target = self._target_of = None
        self._changed.notify()
