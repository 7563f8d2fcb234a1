"""The weight feed: a receiver that lives in a server, and switches weights under its gate.

Must not import a web framework, nor a concrete scheme.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from aiosync.errors import AiosyncError, ApplyError, ConfigError, SwapTimeout
from aiosync.schemes import NoWeightSyncScheme, WeightSyncScheme
from aiosync.schemes._tasks import TaskOwner
from aiosync.serving.admission import Admission
from aiosync.serving.gate import AdmissionGate
from aiosync.serving.status import FeedStatus

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from aiosync.schemes import Ready
    from aiosync.schemes._transforming import Transform
    from aiosync.schemes.receiver import WeightReceiver
    from aiosync.tensors.loading import Loader

__all__ = ["WeightFeed"]

_FIRST_PAUSE_SECONDS = 0.05
# To reach the source, before the status says why it does not work; the first and the last one.
_ATTEMPT_SECONDS = (1.0, 16.0)
_STALL_SECONDS = 5.0  # without a byte in the middle of an update


class WeightFeed:
    """Keeps the model of a server on the newest version.

    Updates arrive in the background, on the server's own event loop, and are complete and
    verified before anything waits for them. Then they are switched to under the gate. When the
    source is lost, the server goes on with what it has; :attr:`status` says so, and the feed
    looks for the source until it is found.

    ::

        feed = WeightFeed(aiosync.TCPWeightSyncScheme("tcp://trainer:5555"), model=model)
        async with feed:                      # does not wait for the trainer
            await feed.ready                  # but this does
            async with feed.request() as version:
                answer = model(observation)

    Belongs to the event loop that it was started on; not thread-safe.

    Args:
        scheme: A scheme without a role: how the source is reached. The feed works on copies of
            it, with ``apply="manual"`` and, over streams, ``reconnect=None``.
        model: Module to keep up to date.
        weights: TensorDict or dict of tensors to keep up to date instead.
        load: Function that puts versions where they belong, instead; see
            :meth:`aiosync.WeightSyncScheme.init_on_receiver`. It runs in a thread of its own,
            while the gate keeps requests out.
        transform: What to do with updates before; see there.
        model_id: Name of the model, as the sender calls it.
        worker_idx: Index of this server among the workers; ``None`` lets the sender choose.
        gate: The gate; one of its own if ``None``.
        max_pause: Seconds between two attempts to reach the source, at most.

    Raises:
        ConfigError: The arguments exclude each other, or the scheme has a role already.
    """

    def __init__(
        self,
        scheme: WeightSyncScheme,
        *,
        model: Any = None,
        weights: Any = None,
        load: Loader | None = None,
        transform: Transform | None = None,
        model_id: str | None = None,
        worker_idx: int | None = None,
        gate: AdmissionGate | None = None,
        max_pause: float = 5.0,
    ) -> None:
        if not isinstance(scheme, WeightSyncScheme) or isinstance(scheme, NoWeightSyncScheme):
            raise ConfigError(
                "a feed lives on an event loop and needs an async scheme that brings weights, such "
                f"as aiosync.TCPWeightSyncScheme, not {type(scheme).__module__}."
                f"{type(scheme).__name__}"
            )
        if scheme.initialized_on_sender or scheme.initialized_on_receiver:
            raise ConfigError("the scheme of a feed has no role yet: pass one that is only made")
        if sum(each is not None for each in (model, weights, load)) != 1:
            raise ConfigError("a feed needs one of model, weights and load")
        if not max_pause > 0:
            raise ConfigError(f"max_pause must be positive seconds, got {max_pause!r}")
        self.gate: AdmissionGate = AdmissionGate() if gate is None else gate
        self.max_pause = max_pause
        self._init: dict[str, Any] = {
            "model": model,
            "weights": weights,
            "load": load,
            "transform": transform,
            "model_id": model_id,
            "worker_idx": worker_idx,
        }
        self._config = copy.copy(scheme)
        # What is more than a change of pointers must not hold the loop.
        self._in_thread = load is not None or scheme.apply_copy or not scheme.strict
        self._make().abort()  # says now what is wrong with the arguments
        self._users = 0
        self._reset()

    def _reset(self) -> None:
        self._tasks = TaskOwner(self._crashed)
        self._task: asyncio.Task[None] | None = None
        self._scheme: WeightSyncScheme | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._crash: BaseException | None = None
        self._activated_at: float | None = None
        self._lost: tuple[float, str] | None = None  # since when, and why
        self._blocked: tuple[float, str] | None = None
        self._refused: tuple[float, int, str] | None = None
        self._reconnects = 0

    def _make(self) -> WeightSyncScheme:
        scheme = copy.copy(self._config)
        scheme.apply = "manual"
        scheme._waits_for_first = False
        if hasattr(scheme, "reconnect"):
            scheme.reconnect = None
        scheme.init_on_receiver(**self._init)
        return scheme

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to receive in the background. Does not wait for the source.

        Counted: each call needs its own :meth:`aclose`, and the last one ends the feed, which
        may then be started again.
        """
        self._users += 1
        if self._users == 1:
            self._reset()
            self._task = self._tasks.start(self._run(), "aiosync weight feed")

    async def aclose(self) -> None:
        """End it, unless others have started it, too. Bounded; the model keeps its weights."""
        if self._users == 0:
            return
        self._users -= 1
        if self._users:
            return
        try:
            await self._tasks.aclose()
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def _crashed(self, error: BaseException) -> None:
        # A bug, or a function of the user's that raised what is no Exception.
        self._crash = error
        asyncio.get_running_loop().call_exception_handler(
            {"message": "the weight feed ended with an error", "exception": error}
        )

    # -- looking -------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version that requests are answered with; 0 before the first."""
        return self.gate.version

    @property
    def epoch(self) -> int | None:
        """Epoch of :attr:`version`."""
        return self.gate.epoch

    @property
    def ready(self) -> Ready:
        """The condition that there is a complete version, to look at or to await."""
        return self.gate.ready

    def request(
        self, *, min_version: int = 0, epoch: int | None = None, timeout: float | None = None
    ) -> Admission:
        """:meth:`AdmissionGate.request` of the feed's gate."""
        return self.gate.request(min_version=min_version, epoch=epoch, timeout=timeout)

    def batch(self, *, timeout: float | None = None) -> Admission:
        """:meth:`AdmissionGate.batch` of the feed's gate."""
        return self.gate.batch(timeout=timeout)

    @property
    def status(self) -> FeedStatus:
        """How it stands with the source, at this moment."""
        now = time.monotonic()
        receiver = None if self._scheme is None else self._scheme._receiver
        lost = self._lost
        if lost is None and receiver is not None and receiver.lost is not None:
            lost = (receiver.lost_at, f"the link to the source was lost: {receiver.lost}")
        causes = [each for each in (lost, self._blocked) if each is not None]
        if receiver is not None and lost is None and receiver.resume() is not None:
            still = now - receiver.progress_at
            if still > _STALL_SECONDS:
                text = f"the source has been silent for {still:.0f} s in the middle of an update"
                causes.append((receiver.progress_at, text))
        if self._refused is not None:
            causes.append((self._refused[0], self._refused[2]))
        version = self.gate.version
        stale_for = max((now - since for since, _ in causes), default=0.0)
        reason = "; ".join(text for _, text in causes)
        state: Any = "starting" if version == 0 else "stale" if causes else "live"
        if self._crash is not None:
            state, reason = "failed", f"{type(self._crash).__name__}: {self._crash}"
        elif self._users == 0:
            state, reason = "closed", "the feed is not running"
        newest = version if receiver is None else max(receiver.inbox.newest, 0) or version
        return FeedStatus(
            state=state,
            reason=reason,
            epoch=self.gate.epoch,
            version=version,
            newest=newest,
            connected=receiver is not None and receiver.lost is None and self._lost is None,
            age=None if self._activated_at is None else now - self._activated_at,
            stale_for=stale_for,
            refused=None if self._refused is None else self._refused[1],
            reconnects=self._reconnects + (0 if receiver is None else receiver.reconnects),
            swaps=self.gate.swaps,
        )

    # -- receiving -----------------------------------------------------------------------------

    async def _run(self) -> None:
        pause, (patience, longest) = _FIRST_PAUSE_SECONDS, _ATTEMPT_SECONDS
        self._lost = (time.monotonic(), "the source was not reached yet")
        while True:
            scheme = self._scheme = self._make()
            try:
                await scheme.connect(timeout=patience)
                pause, patience = _FIRST_PAUSE_SECONDS, _ATTEMPT_SECONDS[0]
                self._reconnects += self.gate.version > 0
                self._lost = None
                await self._follow(scheme)
            except AiosyncError as exc:  # the status says it
                since = time.monotonic() if self._lost is None else self._lost[0]
                self._lost = (since, f"{type(exc).__name__}: {exc}")
            finally:
                await self._drop(scheme)
            await asyncio.sleep(pause)
            pause, patience = min(2 * pause, self.max_pause), min(2 * patience, longest)

    async def _drop(self, scheme: WeightSyncScheme) -> None:
        receiver = scheme._receiver
        if receiver is not None:
            self._reconnects += receiver.reconnects
            receiver.leave_memory()  # copying a large model would hold the loop
        self._scheme = None
        await scheme.aclose()

    async def _follow(self, scheme: WeightSyncScheme) -> None:
        """Switch to each version that is complete, until the link ends, which raises why."""
        receiver = scheme._receiver
        assert receiver is not None
        pause = _FIRST_PAUSE_SECONDS
        while True:
            receiver.refused = None
            await receiver.wait_until(
                lambda: receiver.has_staged or receiver.refused is not None,
                timeout=None,
                late=SwapTimeout("never"),
            )
            if receiver.refused is not None:  # by a transform
                self._note_refused(*receiver.refused)
            if not receiver.has_staged:
                continue
            try:
                await self._switch(scheme, receiver)
            except ApplyError as exc:
                self._note_refused(exc.version or receiver.inbox.newest, exc)
            except SwapTimeout as exc:
                since = time.monotonic() if self._blocked is None else self._blocked[0]
                waits = f"version {receiver.staged_version} waits to be switched to"
                self._blocked = (since, f"{waits}: {exc}")
                # Requests must be let in for longer than they were kept waiting.
                pause = min(2 * pause, self.max_pause)
                await asyncio.sleep(max(pause, 2 * (self.gate.swap_timeout or 0.0)))
            else:
                self._blocked = self._refused = None
                pause = _FIRST_PAUSE_SECONDS

    def _note_refused(self, version: int, error: BaseException) -> None:
        self._refused = (time.monotonic(), version, f"version {version} was refused: {error}")

    async def _switch(self, scheme: WeightSyncScheme, receiver: WeightReceiver) -> None:
        old = self._memory() if receiver.inbox.version == 0 else []
        loop = asyncio.get_running_loop()
        async with self.gate.swap() as swap:

            def flipped(epoch: int, version: int) -> None:
                # Before the trainer is told, so that it never knows more than the gate does.
                if asyncio._get_running_loop() is loop:
                    swap.activate(version, epoch)
                else:
                    loop.call_soon_threadsafe(swap.activate, version, epoch)

            swap.version = self.gate.version  # nothing has changed so far
            scheme._flipped = flipped
            try:
                if self._in_thread:
                    await self._apply_in_thread(scheme)
                else:
                    await self._apply(scheme, receiver)
            finally:
                scheme._flipped = None
        self._activated_at = time.monotonic()
        if old:
            # What the model had of its own goes back to the system, which takes its time.
            loop.run_in_executor(self._worker(), old.clear)

    def _memory(self) -> list[Any]:
        """What keeps the memory alive that the model has now."""
        model, weights = self._init["model"], self._init["weights"]
        if model is None or not hasattr(model, "parameters"):
            return list(weights.values()) if isinstance(weights, dict) else []
        return [tensor.data for tensor in (*model.parameters(), *model.buffers())]

    def _worker(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="aiosync-apply")
        return self._thread

    async def _apply(self, scheme: WeightSyncScheme, receiver: WeightReceiver) -> None:
        """Change the pointers on the loop; or, with a forward in another thread, there."""
        limit = self.gate.swap_timeout or math.inf
        while await scheme.receive(timeout=limit) is None:
            if receiver.guard.withdraw():
                raise SwapTimeout(f"a forward pass in another thread went on for {limit:g} s")

    async def _apply_in_thread(self, scheme: WeightSyncScheme) -> None:
        loop = asyncio.get_running_loop()
        working = loop.run_in_executor(self._worker(), scheme.apply_pending)
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            # What has begun ends: nobody may compute on weights that are half in place.
            with contextlib.suppress(AiosyncError):  # nobody waits for it any more
                await working
            raise
