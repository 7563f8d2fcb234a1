"""The admission gate: lets requests and switches of the weights take turns.

The gate only counts and waits: its caller changes the weights. Everything happens on one event
loop; nothing here is thread-safe. For single forwards there is a guard, in ``receiver.guard``. Must
not import torch or transports.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Literal, Self, TypeAlias

from aiosync._log import log
from aiosync._repr import in_every_state
from aiosync._tasks import Notifier
from aiosync.errors import (
    AdmissionTimeout,
    ConfigError,
    LocalProtocolError,
    RecvTimeout,
    SwapTimeout,
)
from aiosync.protocol import as_version, validate_seconds, validate_timeout
from aiosync.schemes import Ready
from aiosync.spans import VersionSpan

__all__ = ["Admission", "AdmissionGate", "Mode", "Swap"]

Mode: TypeAlias = Literal["between_requests", "immediate"]
"""Mode of a gate: weights are switched while no request runs, or while no batch is computed."""

_RETRY_SECONDS = 1.0

# The requests and batches that this context is inside of, outermost first; child tasks inherit it.
_inside: ContextVar[tuple[Admission, ...]] = ContextVar("aiosync admissions", default=())


def _admissions_here(gate: AdmissionGate) -> list[Admission]:
    """Return this context's running admissions at a gate, outermost first."""
    return [each for each in _inside.get() if each._gate is gate and each._whole.active]


def _add(runs: list[tuple[int, int]], version: int, number: int) -> None:
    """Add ``number`` to the last run if that has this version, or else append a new run."""
    if runs and runs[-1][0] == version:
        number += runs.pop()[1]
    runs.append((version, number))


def _limit_of(timeout: float | None, default: float | None) -> float | None:
    """Return the seconds to wait: the call's timeout, or else the default; ``None`` for no limit.

    Raises:
        ConfigError: The call's timeout is no valid number.
    """
    validate_timeout(timeout)
    limit = default if timeout is None else timeout
    return None if limit is None or limit == math.inf else limit


class AdmissionGate:
    """Gate that admits requests, and admits switches of the weights between them.

    ::

        async with gate.request(min_version=7) as version:
            answer = await compute(...)       # all of it with the weights of `version`

        async with gate.swap() as swap:       # nothing is being computed in here
            swap.version = put_in_new_weights()

    In the mode ``"between_requests"`` a switch waits for the running requests, while new requests
    wait for the switch. In the mode ``"immediate"`` a switch waits only for code inside
    ``async with gate.batch():``. A long request may then be answered by several versions, which
    its :attr:`Admission.versions` name; a batch still sees one version.

    A gate belongs to one event loop at a time; it is not thread-safe. Computations of a request in
    other threads count as a part of it for as long as its ``async with`` block lasts.

    Args:
        mode: ``"between_requests"`` or ``"immediate"``.
        timeout: Seconds that a request waits to be admitted, unless it has a timeout of its own;
            ``None`` for ever.
        swap_timeout: Seconds that a switch waits for running requests, which is also the longest
            time that it keeps new requests waiting; ``None`` for ever.
        initial_version: Version of the weights that are already loaded; ``None`` admits
            nothing before the first switch.

    Raises:
        ConfigError: An option has an illegal value.
    """

    def __init__(
        self,
        *,
        mode: Mode = "between_requests",
        timeout: float | None = 30.0,
        swap_timeout: float | None = 5.0,
        initial_version: int | None = None,
    ) -> None:
        if mode not in ("between_requests", "immediate"):
            raise ConfigError(f"mode must be 'between_requests' or 'immediate', got {mode!r}")
        for name, value in (("timeout", timeout), ("swap_timeout", swap_timeout)):
            validate_seconds(name, value, endless=True, none=True)
        if initial_version is not None:
            as_version("initial_version", initial_version, 1)
        self.mode: Mode = mode
        self.timeout = timeout
        self.swap_timeout = swap_timeout
        self.swaps: int = 0
        """Number of switches to another version."""
        self.on_admission: Callable[[float], object] | None = None
        """Called when a request or batch ends its wait, with the seconds that it waited."""
        self._version = initial_version or 0
        self._epoch: int | None = None
        # Version and epoch of require(), until the gate has had them.
        self._required: tuple[int, int | None] = (0, None)
        self._running = 0  # admissions that a switch has to wait for
        self._waiting = 0
        self._open: set[Admission] = set()  # running requests that a switch does not wait for
        self._swap: Swap | None = None  # the switch that waits for requests, or is under way
        self._closed = False
        # Notified at a new version, a new requirement, the end of a switch, the end of the last
        # request that a switch waits for, and the close of the gate.
        self._changed = Notifier()

    # -- state ---------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the weights that requests are answered with; 0 before the first."""
        return self._version

    @property
    def epoch(self) -> int | None:
        """Epoch of :attr:`version`; ``None`` if no switch named one."""
        return self._epoch

    @property
    def running(self) -> int:
        """Number of requests (mode ``"immediate"``: batches) that a switch would wait for."""
        return self._running

    @property
    def waiting(self) -> int:
        """Number of requests and batches that wait to be admitted."""
        return self._waiting

    @property
    def closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._closed

    @property
    def waits_for(self) -> int:
        """Lowest version that admits requests, until the gate has it; 0 from then on."""
        return self._required[0] or int(self._version == 0)

    def require(self, version: int, epoch: int | None = None) -> None:
        """Admit nothing until the gate has this version, or a newer one of its epoch.

        It is for a new server whose weights are older than those of the running servers. Requests
        that are admitted already go on. Once the gate had such a version the requirement ends,
        because a later version may be from a restarted trainer, which counts from 1 again. Another
        call replaces the requirement.

        Args:
            version: The version; 0 for no requirement.
            epoch: Epoch of the version; ``None`` for any epoch.
        """
        as_version("version", version)
        self._required = (0, None) if self._satisfies(version, epoch) else (version, epoch)
        self._changed.notify()

    @property
    def ready(self) -> Ready:
        """Condition that the gate is open and has a complete version that meets the requirement."""
        return Ready(self._is_ready, self._wait_until_ready)

    def _is_ready(self) -> bool:
        return not self.waits_for and not self._closed

    async def _wait_until_ready(self, timeout: float | None) -> None:
        limit = _limit_of(timeout, self.timeout)

        def late() -> RecvTimeout:
            waited = f"no complete version after {limit or 0:g} s"
            return RecvTimeout(f"{waited}; waits for version {self.waits_for}")

        await self._until(self._is_ready, limit, late)

    async def _until(
        self,
        condition: Callable[[], bool],
        limit: float | None = None,
        late: Callable[[], Exception] = TimeoutError,
    ) -> None:
        """Wait until a condition holds.

        Raises:
            LocalProtocolError: The gate is closed.
            Exception: The result of ``late()``, if the condition does not hold within ``limit``
                seconds.
        """
        try:
            async with asyncio.timeout(limit):
                while self._closed or not condition():
                    if self._closed:
                        raise LocalProtocolError("the gate is closed: this server is shutting down")
                    await self._changed.wait()
        except TimeoutError as exc:
            raise late() from exc

    # -- requests ------------------------------------------------------------------------------

    def request(
        self, *, min_version: int = 0, epoch: int | None = None, timeout: float | None = None
    ) -> Admission:
        """Make an admission for one request: ``async with gate.request() as version:``.

        The block contains the code that answers the request. Inside another request of this gate,
        or in a task that the other request started, the block is part of that request: it is
        admitted at once, and a switch waits for both. In the mode ``"immediate"`` it is admitted
        by itself.

        Args:
            min_version: The lowest version that may answer the request.
            epoch: Epoch that ``min_version`` belongs to; ``None`` for any epoch.
            timeout: Seconds to wait to be admitted; ``None`` takes the gate's, ``math.inf`` waits
                for ever, 0 not at all.

        Returns:
            An async context manager; entering it gives the version, an ``int``.

        Raises:
            AdmissionTimeout: On entering: no such version arrived in time, or a switch took
                too long. Nothing was computed, so the request may be tried again.
            LocalProtocolError: On entering: the gate is closed.

        Cancellation:
            Class A.
        """
        as_version("min_version", min_version)
        return Admission(self, self.mode == "between_requests", min_version, epoch, timeout)

    def batch(self, *, timeout: float | None = None) -> Admission:
        """Make an admission for one batch: ``async with gate.batch() as version:``.

        The code in the block sees one version of the weights. A batch is for the mode
        ``"immediate"``, around each step of a longer request or of an engine. In
        the other mode the block is a part of the request around it, or a request of its own.

        Args:
            timeout: As for :meth:`request`.

        Raises:
            AdmissionTimeout: On entering, as for :meth:`request`.
            LocalProtocolError: On entering: the gate is closed.

        Cancellation:
            Class A.
        """
        return Admission(self, True, 0, None, timeout)

    def _may_enter(self, admission: Admission) -> bool:
        """Return True if the gate has the version for an admission, and no switch keeps it out."""
        if self.waits_for or (admission.blocks and self._swap is not None):
            return False
        return self._satisfies(admission.min_version, admission.wanted_epoch)

    def _satisfies(self, min_version: int, epoch: int | None) -> bool:
        """Return True if the gate's version is new enough, and of this epoch, if one is given."""
        return self._version >= min_version and epoch in (None, self._epoch)

    def _call_on_admission(self, seconds: float) -> None:
        """Call :attr:`on_admission`; if that raises, log the error and never call it again.

        So an error of the callback fails no request.
        """
        if self.on_admission is not None:
            try:
                self.on_admission(seconds)
            except Exception as exc:  # noqa: BLE001 - the log has it
                self.on_admission = None
                text = "on_admission raised, and is not called any more"
                log(logging.WARNING, "observer", text, model=None, error=exc)

    # -- switching -----------------------------------------------------------------------------

    def swap(
        self,
        *,
        version: int | None = None,
        epoch: int | None = None,
        timeout: float | None = None,
    ) -> Swap:
        """Make a switch to other weights: ``async with gate.swap() as swap:``.

        While the block runs, no request (mode ``"immediate"``: no batch) computes. If the block
        raises, the version stays. Several switches take turns.

        Args:
            version: The version after the block; ``None`` for the next number. The block
                may set ``swap.version`` and ``swap.epoch`` instead.
            epoch: Epoch of that version; ``None`` for the same as before.
            timeout: Seconds to wait for running requests; ``None`` takes the gate's
                ``swap_timeout``, ``math.inf`` waits for ever.

        Raises:
            SwapTimeout: On entering: the running requests did not end in time. They go on, and
                the waiting requests are admitted.
            LocalProtocolError: On entering: the gate is closed, or this is the task of a request,
                which would wait for itself; another task that the request waits for gets
                SwapTimeout. On leaving: ``swap.version`` is below 1.

        Cancellation:
            Class A.
        """
        return Swap(self, version, epoch, timeout)

    def close(self) -> None:
        """Admit no more requests; waiting requests get ``LocalProtocolError``. Idempotent.

        A feed of this gate leaves its source at the next update.
        """
        self._closed = True
        self._changed.notify()

    def _activate(self, version: int, epoch: int | None) -> None:
        """Note another version of the weights, also for each request that no switch waits for."""
        if (version, epoch) != (self._version, self._epoch):
            self.swaps += 1
            self._version, self._epoch = version, epoch
            if self._satisfies(*self._required):
                self._required = (0, None)
            for admission in self._open:
                admission._seen.append((version, epoch))
            self._changed.notify()

    @in_every_state
    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._version else "not ready"
        return (
            f"<AdmissionGate {state}: version {self._version}, {self._running} running, "
            f"{self._waiting} waiting>"
        )


class Admission:
    """One request or batch at a gate; see :meth:`AdmissionGate.request`. Enter it once.

    Attributes:
        min_version: The lowest version that the request asked for.
        wanted_epoch: The epoch that the request asked for, or ``None``.
        version: Version with which the request was admitted; 0 before.
        epoch: Epoch of that version.
        blocks: True if a switch waits for this admission.
    """

    def __init__(
        self,
        gate: AdmissionGate,
        blocks: bool,
        min_version: int,
        epoch: int | None,
        timeout: float | None,
    ) -> None:
        self.min_version = min_version
        self.wanted_epoch = epoch
        self.version: int = 0
        self.epoch: int | None = None
        self.blocks = blocks
        self._gate = gate
        self._timeout = timeout
        self._task: asyncio.Task[object] | None = None
        # Versions and epochs since this was admitted.
        self._seen: list[tuple[int, int | None]] = []
        # Runs of its batches: a version, and the number of batches that it computed.
        self._steps: list[tuple[int, int]] = []
        # Runs as count() was told: a version, and a number of tokens.
        self._counted: list[tuple[int, int]] = []
        # Number of blocks that run as a part of this, its own included; at 0 it has ended.
        self._parts = 0
        # The admission that this is a part of; this one itself unless it joined another.
        self._whole: Admission = self

    @property
    def active(self) -> bool:
        """True if a part of this admission is still running."""
        return self._parts > 0

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that may have contributed so far, in the order in which they came.

        It is one version if a switch waits for the request. In the mode ``"immediate"`` they are
        the versions that :meth:`count` was told; without these, the versions of its batches;
        without batches, all versions since it was admitted.
        """
        runs = self._counted or self._steps or self._seen
        return tuple(dict.fromkeys(version for version, _ in runs))

    @property
    def span(self) -> VersionSpan:
        """Span of the versions that answer this request, from its admission until now or its end.

        The span's ``runs`` are those that :meth:`count` was told; or else, in the mode
        ``"immediate"``, the batches, each of which counts as 1. If versions of several epochs
        followed each other, its ``first`` is 0, because such versions cannot be compared.

        Raises:
            LocalProtocolError: The request was not admitted yet.
        """
        if not self._seen:
            raise LocalProtocolError("a request has no versions before it is let in")
        if any(epoch != self.epoch for _, epoch in self._seen):
            return VersionSpan(0, self.versions[-1])
        epoch = None if self.epoch is None else f"{self.epoch:016x}"
        runs = self._counted or self._steps
        if runs:
            return VersionSpan.from_runs(runs, epoch)
        return VersionSpan(min(self.versions), max(self.versions), epoch)

    def count(self, version: int, tokens: int = 1) -> None:
        """Record that a version computed ``tokens`` tokens, or steps, of the answer.

        It is for an engine that computes steps of many requests at a time, outside of the requests'
        blocks. From the first call on :attr:`versions` and :attr:`span` show only the counts.

        Args:
            version: Version that ``async with gate.batch() as version:`` gave for the step.
            tokens: Number of tokens or steps.
        """
        _add(self._counted, version, tokens)

    async def __aenter__(self) -> int:
        """Join the admission around this one if a switch waits for that; else wait to enter."""
        if self.version:
            raise LocalProtocolError("an admission can be entered only once: call request() again")
        self._task = asyncio.current_task()
        outer = _admissions_here(self._gate)
        if outer and outer[-1]._whole.blocks:
            self._join(outer[-1]._whole)
        else:
            await self._enter()
        self._whole._parts += 1
        self.version, self.epoch = self._whole.version, self._whole.epoch
        self._seen.append((self.version, self.epoch))
        # Drop the admissions that have ended: another task may have left them, as middleware does.
        _inside.set((*(each for each in _inside.get() if each._whole.active), self))
        return self.version

    def _join(self, whole: Admission) -> None:
        """Become a part of a running admission, whose version is the gate's until it ends."""
        if not self._gate._satisfies(self.min_version, self.wanted_epoch):
            raise self._too_late(None)
        self._whole = whole

    async def _enter(self) -> None:
        """Wait until the gate admits this one by itself, and take the gate's version."""
        gate = self._gate
        if gate._closed or not gate._may_enter(self):
            await self._wait()
        else:
            gate._call_on_admission(0.0)
        self.version, self.epoch = gate._version, gate._epoch
        if self.blocks:
            gate._running += 1
            # No switch waits for the requests around this batch, so each of them counts batches.
            for each in _admissions_here(gate):
                _add(each._steps, self.version, 1)
        else:
            gate._open.add(self)

    async def _wait(self) -> None:
        """Wait until the gate may admit this, or raise the error that says why it does not."""
        gate, began = self._gate, time.monotonic()
        limit = _limit_of(self._timeout, gate.timeout)
        gate._waiting += 1
        try:
            await gate._until(lambda: gate._may_enter(self), limit, lambda: self._too_late(limit))
        finally:
            gate._waiting -= 1
            gate._call_on_admission(time.monotonic() - began)

    def _too_late(self, limit: float | None) -> AdmissionTimeout:
        """Return the error for an admission that waited ``limit`` seconds.

        ``limit`` is ``None`` for a part of another request, which cannot wait for a version.
        """
        return AdmissionTimeout(
            f"{self._why_too_late(limit)}; try again, or another server",
            version=self._gate._version,
            min_version=self.min_version,
            retry_after=_RETRY_SECONDS,
        )

    def _why_too_late(self, limit: float | None) -> str:
        """Return the reason why the gate did not admit this request in time."""
        gate, has = self._gate, f"this server has version {self._gate._version}"
        when = "and cannot become newer inside another request"
        if limit is not None:
            when = f"after {limit:g} s"
        if gate._version == 0:
            return f"there is no complete version of the weights {when}"
        if gate.waits_for:
            return f"{has} and answers from version {gate.waits_for} on, which is not here {when}"
        if not gate._satisfies(self.min_version, self.wanted_epoch):
            epoch = "" if self.wanted_epoch is None else f" of epoch {self.wanted_epoch:016x}"
            asked = f"version {self.min_version}" if self.min_version else "a version"
            return f"{asked}{epoch} was requested; {has} {when}"
        return f"a switch of the weights took longer than {limit or 0:g} s"

    async def __aexit__(self, *exc_info: object) -> None:
        _inside.set(tuple(each for each in _inside.get() if each is not self))
        whole = self._whole
        whole._parts -= 1
        # The admission goes on as long as any block of it runs, in whatever order they end.
        if whole._parts:
            return
        gate = self._gate
        gate._open.discard(whole)
        if whole.blocks:
            gate._running -= 1
            if gate._running == 0:
                gate._changed.notify()


class Swap:
    """One switch of the weights; see :meth:`AdmissionGate.swap`. Enter it once.

    Attributes:
        version: The version after the switch; ``None`` for the next number. The version that the
            gate has already means that nothing changed.
        epoch: Epoch of that version; ``None`` for the same as before.
    """

    def __init__(
        self, gate: AdmissionGate, version: int | None, epoch: int | None, timeout: float | None
    ) -> None:
        self.version: int | None = version
        self.epoch: int | None = epoch
        self._gate = gate
        self._timeout = timeout

    def activate(self, version: int, epoch: int | None = None) -> None:
        """Set the gate's version inside the block, as soon as the weights are those of ``version``.

        It is for a block that may still raise afterwards: the gate keeps this version all the same.
        """
        self.version, self.epoch = version, epoch
        self._gate._activate(version, self._gate._epoch if epoch is None else epoch)

    async def __aenter__(self) -> Self:
        gate = self._gate
        task = asyncio.current_task()
        if any(each._task is task and each._whole.blocks for each in _admissions_here(gate)):
            raise LocalProtocolError("a switch inside a request would wait for itself")
        limit = _limit_of(self._timeout, gate.swap_timeout)
        try:
            async with asyncio.timeout(limit):
                if limit != 0:
                    await asyncio.sleep(0)  # requests that waited for the last switch go first
                await self._close_gate()
        except BaseException as exc:  # raised again, a TimeoutError as SwapTimeout
            requests = f"{gate._running} requests that were running"
            what = requests if gate._swap is self else "another switch"
            self._over()
            if not isinstance(exc, TimeoutError):
                raise  # the task was cancelled, or the gate is closed
            text = f"{what} did not end within {limit or 0:g} s"
            raise SwapTimeout(text, running=gate._running) from exc
        return self

    async def _close_gate(self) -> None:
        """Wait for other switches to end, admit no more requests, and wait for the running ones."""
        gate = self._gate
        while gate._swap is not None:
            await gate._until(lambda: gate._swap is None)
            # Requests that waited for the other switch go first.
            await asyncio.sleep(0)
        gate._swap = self
        await gate._until(lambda: gate._running == 0)

    def _over(self) -> None:
        """End this switch, so that requests and other switches go on; nothing if it never began."""
        if self._gate._swap is self:
            self._gate._swap = None
            self._gate._changed.notify()

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        gate = self._gate
        try:
            if exc_type is None:
                version = gate._version + 1 if self.version is None else self.version
                # 0 is legal only for a gate without a version: nothing changes then.
                if version < 1 and version != gate._version:
                    raise LocalProtocolError(f"a version is at least 1, got {version}")
                gate._activate(version, gate._epoch if self.epoch is None else self.epoch)
        finally:
            self._over()
