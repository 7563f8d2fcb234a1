"""The phases: the link to the trainer, the update that was begun, the switch and the pause."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final, Self

from aiosync._log import log
from aiosync.errors import ConnectError, LocalProtocolError, RecvTimeout, SyncTimeout
from aiosync.integrations.four_phase._bodies import (
    INIT_FIELDS,
    MAX_TEXT,
    MAX_WAIT_SECONDS,
    UPDATE_FIELDS,
    Body,
    Refused,
    fields_of,
    text_of,
)
from aiosync.integrations.vllm import AiosyncInitInfo, AiosyncUpdateInfo
from aiosync.protocol import MAX_VERSION
from aiosync.receiver.applier import not_applied
from aiosync.receiver.guard import PATIENCE_SECONDS
from aiosync.receiver.scheme_hooks import SchemeHooks
from aiosync.schemes.internal import life_of
from aiosync.serving import Admission, AdmissionGate, FeedStatus, Swap
from aiosync.serving.status import Cause, Ended, causes_of, status_of
from aiosync.sync._schemes import core_of

if TYPE_CHECKING:
    from aiosync.receiver.receiver import WeightReceiver
    from aiosync.schemes import Ready, WeightSyncScheme

__all__ = ["Phases"]

_LINK_SECONDS: Final = 5.0  # without a link until a phase gives the trainer up
_POLL_SECONDS: Final = 0.25
_MODES: Final = ("abort", "wait", "keep")


class Phases:
    """The link to the trainer, the update that was begun, and the pause.

    An update goes from ``None`` to ``begun`` (0), to the version that has arrived, and back to
    ``None``: with :meth:`finish`, with an error of :meth:`await_version`, or when the trainer is
    left. The class also has the attributes and methods of a feed that ``WeightsMiddleware`` uses.

    Args:
        gate: The gate of requests and switches.
        target: Arguments of ``init_on_receiver()`` that say where the weights go.
        max_pause: Seconds after which a pause ends by itself.
    """

    def __init__(self, gate: AdmissionGate, target: dict[str, Any], max_pause: float) -> None:
        self.gate = gate
        self._target = target
        self._max_pause = max_pause
        self._label = "default"  # vLLM's own, before the first update
        self._scheme: WeightSyncScheme | None = None
        # Since when the model is stale without a trainer, and why; None with one, and before any.
        self._no_trainer: Cause | None = None
        # Since when the newest version waits for a switch that has failed, and why.
        self._blocked: Cause | None = None
        self._update: int | None = None
        self._pause: Swap | None = None  # the switch that keeps requests waiting until resume()
        self._pause_end: asyncio.TimerHandle | None = None
        self._swap: Swap | None = None  # the switch that is under way, and its task
        self._switching: asyncio.Task[Any] | None = None
        self._activated_at: float | None = None
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[Body]] = set()

    async def run(self, call: Coroutine[Any, Any, Body]) -> Body:
        """Run a call to its end, also if its request is cancelled; calls take turns."""
        return await asyncio.shield(self._start(call))

    def _start(self, call: Coroutine[Any, Any, Body]) -> asyncio.Task[Body]:
        """Start a call in a task of its own, which waits for its turn first."""

        async def in_turn() -> Body:
            try:
                async with self._turn:
                    return await call
            finally:
                call.close()  # it has not begun if its turn never came

        task = asyncio.ensure_future(in_turn())
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Body]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # asyncio would log the error if the request was cancelled meanwhile

    # -- the trainer -----------------------------------------------------------------------------

    async def init(self, body: Body, query: Mapping[str, str]) -> Body:
        """Leave the previous trainer, and connect to the one that the body names."""
        fields = fields_of(body.get("init_info"), "init_info", INIT_FIELDS, needed="address")
        hooks = SchemeHooks(applied=self._on_flip)
        try:
            info = AiosyncInitInfo(**fields)
            scheme, index = core_of(info.receiving_scheme()), info.first_worker
            scheme.init_on_receiver(info.model_id, worker_idx=index, hooks=hooks, **self._target)
        except (TypeError, ValueError) as exc:  # TypeError: an unknown field of `tls`
            raise Refused(400, f"init_info: {exc}"[:MAX_TEXT]) from exc
        # Only now, so that an illegal body leaves the present trainer and its update as they are.
        await self._disconnect()
        self._loop = asyncio.get_running_loop()
        try:
            await scheme.connect(timeout=min(info.timeout, MAX_WAIT_SECONDS), initial=False)
        except BaseException as exc:  # raised again: the caller gets it
            self._note_no_trainer(f"{type(exc).__name__}: {exc}")
            await scheme.aclose()
            raise
        self._scheme, self._no_trainer = scheme, None
        return {"message": "Weight transfer initialized"}

    async def leave(self, body: Body, query: Mapping[str, str]) -> Body:
        """Disconnect from the trainer; the model keeps its version."""
        if self._update is not None:
            raise LocalProtocolError("an update is active: finish it first")
        await self._disconnect()
        return {"message": "Weight transfer shut down"}

    async def _disconnect(self) -> None:
        """Close the link to the trainer, if there is one, and end its update."""
        if self._scheme is not None:
            self._note_no_trainer("the server has left it")
        scheme, self._scheme, self._update = self._scheme, None, None
        self._blocked = None
        if scheme is not None:
            await scheme.aclose()

    def _note_no_trainer(self, why: str) -> None:
        """Register why there is no trainer; a model that is stale already stays so since then."""
        since = min((since for since, _ in self._causes()), default=time.monotonic())
        self._no_trainer = (since, f"no trainer: {why}")

    def _require(self) -> WeightSyncScheme:
        """Return the scheme of the trainer, or raise if there is no trainer."""
        if self._scheme is None:
            raise LocalProtocolError(
                "this server has no trainer: call init_weight_transfer_engine first"
            )
        return self._scheme

    # -- one update ------------------------------------------------------------------------------

    async def begin(self, body: Body, query: Mapping[str, str]) -> Body:
        """Begin an update; the model stays as it is until :meth:`finish`."""
        self._require()
        if self._update is not None:
            raise LocalProtocolError("an update is active already: finish it first")
        self._update = 0
        return {"message": "Weight update started"}

    async def await_version(self, body: Body, query: Mapping[str, str]) -> Body:
        """Wait until the version has arrived that the body names."""
        scheme = self._require()
        if self._update is None:
            raise LocalProtocolError("no update is active: call start_weight_update first")
        given = body.get("update_info")
        if isinstance(given, list) and len(given) == 1:  # one for each worker
            given = given[0]
        try:
            fields = fields_of(given, "update_info", UPDATE_FIELDS, needed="version")
            info = AiosyncUpdateInfo(**fields)
            # The model switches in finish() only, so after an undo finish() has nothing to do.
            self._update = 0 if info.undo else await self._staged(scheme, info)
        except BaseException:  # raised again; as in vLLM, an error ends the update
            self._update = None
            raise
        return {"message": "Weights updated"}

    async def _staged(self, scheme: WeightSyncScheme, info: AiosyncUpdateInfo) -> int:
        """Wait until the version is staged, and return it; raise if another version is."""
        if not 1 <= info.version <= MAX_VERSION:
            raise Refused(400, f"update_info: version must be from 1 to {MAX_VERSION}")
        timeout = min(info.timeout, MAX_WAIT_SECONDS)
        arriving = asyncio.ensure_future(scheme.wait_staged(info.version, timeout=timeout))
        try:
            await _wait_while_linked(scheme, arriving)
            arriving.result()
        except RecvTimeout as exc:
            if (lost := scheme.link_lost) is not None:
                gone = f"version {info.version} is not here, and the trainer is gone: {lost}"
                raise ConnectError(gone) from exc
            raise
        finally:
            arriving.cancel()
            await asyncio.wait({arriving})
        # If none is staged, the model may have it already: a trainer that missed the last answer
        # asks once more.
        staged = scheme.staged_version or scheme.version
        if staged != info.version:
            text = f"version {info.version} was asked for, and version {staged} is here"
            raise LocalProtocolError(text)
        return info.version

    async def finish(self, body: Body, query: Mapping[str, str]) -> Body:
        """Switch the model to the version that has arrived, and set the label."""
        label = text_of(body, "weight_version", optional=True)
        version, self._update = self._update, None
        if version is None:
            raise LocalProtocolError("no update is active: call start_weight_update first")
        scheme = self._require()
        # If none is staged, the model may have the version already.
        if version and (scheme.staged_version or scheme.version != version):
            await self._switch_at_gate(scheme, version)
        self._label = self._label if label is None else label
        return {"message": "Weight update finished"}

    async def _switch_at_gate(self, scheme: WeightSyncScheme, version: int) -> None:
        """Switch the model inside the pause, or else with a turn at the gate of its own."""
        try:
            if self._pause is not None:
                await self._switch(scheme, self._pause, version)
                return
            async with self.gate.swap() as swap:
                swap.version = self.gate.version  # the gate keeps it unless _activate() is called
                await self._switch(scheme, swap, version)
        # The gate raises it for a request, and the model for a forward outside every request.
        except SyncTimeout as exc:
            since = time.monotonic() if self._blocked is None else self._blocked[0]
            self._blocked = (since, f"version {version} was not switched to: {exc}")
            raise

    async def _switch(self, scheme: WeightSyncScheme, swap: Swap, version: int) -> None:
        """Apply the staged version in a thread; raise if that is not ``version``."""
        if (staged := scheme.staged_version) != version:
            here = f"version {staged} is here" if staged else "it is not here any more"
            raise LocalProtocolError(f"version {version} was asked for, and {here}")
        receiver = life_of(scheme).receiver
        assert receiver is not None
        # The end of the server waits for the thread, so the wait for forwards is always bounded.
        patience = min(self.gate.swap_timeout or math.inf, PATIENCE_SECONDS)

        def apply() -> int | None:
            try:
                return receiver.applier.apply_pending(patience=patience)
            except Exception:  # the caller gets it
                raise
            except BaseException as exc:  # a SystemExit of the user's must not end the server
                raise not_applied(version, exc) from exc

        self._swap, self._switching = swap, asyncio.current_task()
        try:
            applied = await asyncio.to_thread(apply)
        finally:
            self._swap = self._switching = None
        # Another version may have arrived while the thread waited for the forwards to end.
        if applied != version:
            text = f"version {applied} was applied in place of version {version}"
            raise LocalProtocolError(text)

    def _on_flip(self, epoch: int, version: int) -> None:
        """Activate the version at the gate, before the trainer gets its ack. On any thread."""
        self._loop.call_soon_threadsafe(self._activate, epoch, version)

    def _activate(self, epoch: int, version: int) -> None:
        """Give the gate the version that the model has now."""
        if self._swap is not None:
            self._swap.activate(version, epoch)
            self._activated_at, self._blocked = time.monotonic(), None

    # -- the pause -------------------------------------------------------------------------------

    async def pause(self, body: Body, query: Mapping[str, str]) -> Body:
        """Wait for the running requests, and keep new ones waiting; idempotent."""
        mode = query.get("mode", "abort")
        if mode not in _MODES:
            raise Refused(400, f"mode must be one of {', '.join(_MODES)}")
        if self._pause is None:
            swap = await self.gate.swap().__aenter__()
            # The gate keeps its version unless the pause is used for a switch. The version is read
            # only now, because another switch may have come before this turn.
            swap.version = self.gate.version
            self._pause = swap
        if self._pause_end is not None:
            self._pause_end.cancel()
        if self._max_pause != math.inf:
            loop = asyncio.get_running_loop()
            self._pause_end = loop.call_later(self._max_pause, self._end_late_pause)
        return {"status": "paused"}

    async def resume(self, body: Body, query: Mapping[str, str]) -> Body:
        """Let requests in again; idempotent."""
        swap, self._pause = self._pause, None
        end, self._pause_end = self._pause_end, None
        if end is not None:
            end.cancel()
        if swap is not None:
            await swap.__aexit__(None, None, None)
        return {"status": "resumed"}

    def _end_late_pause(self) -> None:
        """End a pause that has lasted too long, because its trainer may have died."""
        self._start(self._resume_late(self._pause_end))

    async def _resume_late(self, end: asyncio.TimerHandle | None) -> Body:
        """Let requests in again, unless the pause with this end is over or was renewed."""
        if self._pause_end is not end:
            return {}
        text = f"no /resume came within {self._max_pause:g} s of /pause, so the pause was ended"
        log(logging.WARNING, "pause", text, model=None)
        return await self.resume({}, {})

    async def drop_caches(self, body: Body, query: Mapping[str, str]) -> Body:
        """Report success: no prefixes are kept here that old weights computed."""
        return {"success": True}

    # -- what callers ask ------------------------------------------------------------------------

    async def set_label(self, body: Body, query: Mapping[str, str]) -> Body:
        """Set the label of the weights without an update."""
        label = text_of(body, "new_version")
        assert label is not None
        self._label = label
        return {"success": True, "new_version": label}

    async def weight_info(self, body: Body, query: Mapping[str, str]) -> Body:
        """Return the label of the weights."""
        return {"weight_version": self._label}

    async def world_size(self, body: Body, query: Mapping[str, str]) -> Body:
        """Return the number of workers: this process is one."""
        return {"world_size": 1}

    async def is_paused(self, body: Body, query: Mapping[str, str]) -> Body:
        """Return True in a pause."""
        return {"is_paused": self._pause is not None}

    async def health(self, body: Body, query: Mapping[str, str]) -> Body:
        """Return an empty body: an answer is enough to show that the server runs."""
        return {}

    # -- what WeightsMiddleware asks of a feed ---------------------------------------------------

    @property
    def version(self) -> int:
        return self.gate.version

    @property
    def epoch(self) -> int | None:
        return self.gate.epoch

    @property
    def ready(self) -> Ready:
        return self.gate.ready

    def request(self, **wanted: Any) -> Admission:
        return self.gate.request(**wanted)

    @property
    def status(self) -> FeedStatus:
        ended: Ended = "closed", "its gate was closed"
        receiver = self._receiver
        return status_of(
            self.gate,
            receiver,
            self._causes(),
            self._activated_at,
            0 if receiver is None else receiver.meter.reconnects,
            ended if self.gate.closed else None,
        )

    @property
    def _receiver(self) -> WeightReceiver | None:
        """The receiver of the trainer's updates; ``None`` without a trainer."""
        return None if self._scheme is None else life_of(self._scheme).receiver

    def _causes(self) -> list[Cause]:
        """Return why the model may not be on the newest version."""
        receiver = self._receiver
        found = [] if receiver is None else causes_of(receiver, "the trainer is gone")
        return found + [each for each in (self._no_trainer, self._blocked) if each is not None]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._running - {self._switching}:
            task.cancel()  # but a switch that has begun must end
        if self._running:
            await asyncio.wait(self._running)
        async with self._turn:
            await self.resume({}, {})
            await self._disconnect()


async def _wait_while_linked(scheme: WeightSyncScheme, arriving: asyncio.Future[Any]) -> None:
    """Wait until a version has arrived, or its wait has failed.

    Raises:
        RecvTimeout: The link to the trainer is lost, and has not come back in time.
    """
    linked_at = time.monotonic()
    # A lost link may come back. But a phase that waits holds up the end of a pause, and the next
    # trainer.
    while not (await asyncio.wait({arriving}, timeout=_POLL_SECONDS))[0]:
        if scheme.link_lost is None:
            linked_at = time.monotonic()
        elif time.monotonic() - linked_at > _LINK_SECONDS:
            raise RecvTimeout
