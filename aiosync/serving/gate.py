"""The admission gate: requests on one side, the switch to other weights on the other.

Bookkeeping and waiting only: what a switch does is its caller's business. Everything happens on
one event loop; nothing here is thread-safe. Single forwards have a guard: ``receiver.guard``. Must
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
"""When weights are switched: while no request runs, or while no batch is being computed."""

_RETRY_SECONDS = 1.0

# What this context is inside of, outermost first; child tasks inherit it.
_inside: ContextVar[tuple[Admission, ...]] = ContextVar("aiosync admissions", default=())


def _around(gate: AdmissionGate) -> list[Admission]:
    """What this context is inside of at a gate, outermost first, without what is over."""
    return [each for each in _inside.get() if each._gate is gate and each._holder.active]


def _add(runs: list[tuple[int, int]], version: int, number: int) -> None:
    """Lengthen the last run, or begin one."""
    if runs and runs[-1][0] == version:
        number += runs.pop()[1]
    runs.append((version, number))


def _limit_of(timeout: float | None, default: float | None) -> float | None:
    """Seconds to wait: what a call says, or else the default; ``None`` for no limit.

    Raises:
        ConfigError: The call says what is no number.
    """
    validate_timeout(timeout)
    limit = default if timeout is None else timeout
    return None if limit is None or limit == math.inf else limit


class AdmissionGate:
    """Lets requests in, and switches of the weights between them.

    ::

        async with gate.request(min_version=7) as version:
            answer = await compute(...)       # all of it with the weights of `version`

        async with gate.swap() as swap:       # nothing is being computed in here
            swap.version = put_in_new_weights()

    In the mode ``"between_requests"`` a switch waits for the requests that are running, while
    new ones wait for it. In the mode ``"immediate"`` it waits only for what is inside
    ``async with gate.batch():``, so that a long request may be answered by several versions,
    which its :attr:`Admission.versions` name; a batch still sees one.

    Belongs to one event loop at a time; not thread-safe. What a request computes in other
    threads counts as a part of it for as long as its ``async with`` block lasts.

    Args:
        mode: ``"between_requests"`` or ``"immediate"``.
        timeout: Seconds that a request waits to be admitted unless it says otherwise; ``None``
            for ever.
        swap_timeout: Seconds that a switch waits for running requests, and so the most that it
            keeps new ones waiting; ``None`` for ever.
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
        """Switches that were made."""
        self.on_admission: Callable[[float], object] | None = None
        """Called with the seconds that a request or batch waited, once it is let in or given up."""
        self._version = initial_version or 0
        self._epoch: int | None = None
        self._required: tuple[int, int | None] = (0, None)
        self._running = 0  # what a switch has to wait for
        self._waiting = 0
        self._open: set[Admission] = set()  # requests that a switch does not wait for
        self._swap: Swap | None = None  # the one that waits, or is under way
        self._closed = False
        # A version, the end of a switch, of the last request that one waits for, or of the gate.
        self._changed = Notifier()

    # -- looking -------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the weights that requests are answered with; 0 before the first."""
        return self._version

    @property
    def epoch(self) -> int | None:
        """Epoch of :attr:`version`; ``None`` if none was named."""
        return self._epoch

    @property
    def running(self) -> int:
        """Requests (mode ``"immediate"``: batches) that a switch would have to wait for."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests and batches that wait to be admitted."""
        return self._waiting

    @property
    def waits_for(self) -> int:
        """The least version to let requests in with, until it is there; 0 from then on."""
        return self._required[0] or int(self._version == 0)

    def require(self, version: int, epoch: int | None = None) -> None:
        """Let nobody in until there is this version, or a newer one of its epoch.

        For a server that joins, whose weights are older than those of the others. What is inside
        already goes on. Once there was such a version it is required no more: what comes later may
        be of a restarted trainer, which counts from 1 again. Another call replaces it.

        Args:
            version: The version; 0 for none.
            epoch: Its epoch; ``None`` for whatever epoch there is.
        """
        as_version("version", version)
        self._required = (0, None) if self._satisfies(version, epoch) else (version, epoch)
        self._changed.notify()

    @property
    def ready(self) -> Ready:
        """The condition that there is a complete and required version, and the gate is open."""
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
        """Wait until it holds, or the gate is closed, which raises, or ``limit`` seconds are up."""
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
        """``async with gate.request() as version:`` around what answers one request.

        Inside another request of this gate, or in a task that it
        starts, it is part of that one: it is admitted at once, and a switch waits for both.

        Args:
            min_version: The lowest version to be answered with.
            epoch: Epoch that ``min_version`` belongs to; ``None`` for whatever epoch there is.
            timeout: Seconds to wait to be admitted; ``None`` takes the gate's, ``math.inf`` waits
                for ever, 0 not at all.

        Returns:
            An async context manager; entering it gives the version, an ``int``.

        Raises:
            AdmissionTimeout: On entering: no such version arrived in time, or a switch took
                too long. Nothing was computed, so that it may be tried again.
            LocalProtocolError: On entering: the gate is closed.

        Cancellation:
            Class A.
        """
        as_version("min_version", min_version)
        return Admission(self, self.mode == "between_requests", min_version, epoch, timeout)

    def batch(self, *, timeout: float | None = None) -> Admission:
        """``async with gate.batch() as version:`` around what must see one version.

        For the mode ``"immediate"``, around each step of a longer request or of an engine. In
        the other mode it is a part of the request around it, or a request of its own.

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
        if self.waits_for or (admission.blocks and self._swap is not None):
            return False
        return self._satisfies(admission.min_version, admission.wanted_epoch)

    def _satisfies(self, min_version: int, epoch: int | None) -> bool:
        return self._version >= min_version and epoch in (None, self._epoch)

    def _tell(self, seconds: float) -> None:
        """Tell of an admission; whoever raises is told no more, and costs no request."""
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
        """``async with gate.swap() as swap:`` around the switch to other weights.

        Nothing is being computed inside. If the block raises, the version stays. Several
        switches take turns.

        Args:
            version: The version afterwards; ``None`` for the next number. The block
                may set ``swap.version`` and ``swap.epoch`` instead.
            epoch: Its epoch; ``None`` for the same as before.
            timeout: Seconds to wait for running requests; ``None`` takes the gate's
                ``swap_timeout``, ``math.inf`` waits for ever.

        Raises:
            SwapTimeout: On entering: they did not end. They go on, and those that waited are
                admitted.
            LocalProtocolError: On entering: the gate is closed, or this is inside a request,
                which would wait for itself. On leaving: ``swap.version`` is below 1.

        Cancellation:
            Class A.
        """
        return Swap(self, version, epoch, timeout)

    def close(self) -> None:
        """Admit nothing any more; waiting requests get ``LocalProtocolError``. Idempotent."""
        self._closed = True
        self._changed.notify()

    def _activate(self, version: int, epoch: int | None) -> None:
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
        min_version: The lowest version that it asked for.
        wanted_epoch: The epoch that it asked for, or ``None``.
        version: Version with which it was admitted; 0 before.
        epoch: Epoch of that version.
        blocks: Whether a switch waits for it.
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
        self._seen: list[tuple[int, int | None]] = []  # versions and epochs since it was let in
        self._steps: list[tuple[int, int]] = []  # of its batches: versions, and how many
        self._counted: list[tuple[int, int]] = []  # the same, as count() was told
        self._parts = 0  # this and what joined it; it is over when none is left
        self._holder: Admission = self  # the one that it is a part of

    @property
    def active(self) -> bool:
        """Whether a part of it is still running."""
        return self._parts > 0

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that may have contributed so far, in the order in which they came.

        One, where a switch waits for the request. In the mode ``"immediate"`` those of its
        batches, or of what was counted, or, without any, all that there were since it was
        admitted.
        """
        runs = self._counted or self._steps or self._seen
        return tuple(dict.fromkeys(version for version, _ in runs))

    @property
    def span(self) -> VersionSpan:
        """The versions that answer this request, from when it was let in until now, or its end.

        Its ``runs`` are what :meth:`count` was told; or else, in the mode ``"immediate"``, its
        batches, each of which counts as 1. Where versions of several epochs followed each other
        its ``first`` is 0: such versions cannot be compared.

        Raises:
            LocalProtocolError: It was not let in yet.
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
        """Note that so many tokens, or steps, of the answer are of a version.

        For an engine that computes steps of many requests at a time, outside of each of them;
        :attr:`versions` and :attr:`span` say from then on what was counted, and nothing else.

        Args:
            version: What ``async with gate.batch() as version:`` gave for the step.
            tokens: How many.
        """
        _add(self._counted, version, tokens)

    async def __aenter__(self) -> int:
        if self.version:
            raise LocalProtocolError("an admission can be entered only once: call request() again")
        gate, self._task = self._gate, asyncio.current_task()
        around = _around(gate)
        if around and around[-1]._holder.blocks:
            if not gate._satisfies(self.min_version, self.wanted_epoch):
                raise self._too_late(None)
            self._holder = around[-1]._holder
        else:
            if gate._closed or not gate._may_enter(self):
                await self._wait()
            else:
                gate._tell(0.0)
            self.version, self.epoch = gate._version, gate._epoch
            if self.blocks:
                gate._running += 1
                for each in _around(gate):  # none of them blocks
                    _add(each._steps, self.version, 1)
            else:
                gate._open.add(self)
        self._holder._parts += 1
        self.version, self.epoch = self._holder.version, self._holder.epoch
        self._seen.append((self.version, self.epoch))
        # Without those that are over: another task may have left them, as middleware does.
        _inside.set((*(each for each in _inside.get() if each._holder.active), self))
        return self.version

    async def _wait(self) -> None:
        gate, began = self._gate, time.monotonic()
        limit = _limit_of(self._timeout, gate.timeout)
        gate._waiting += 1
        try:
            await gate._until(lambda: gate._may_enter(self), limit, lambda: self._too_late(limit))
        finally:
            gate._waiting -= 1
            gate._tell(time.monotonic() - began)

    def _too_late(self, limit: float | None) -> AdmissionTimeout:
        """The error after ``limit`` seconds; at once, in a part of another request, with none."""
        gate, has = self._gate, f"this server has version {self._gate._version}"
        when = "and cannot become newer inside another request"
        if limit is not None:
            when = f"after {limit:g} s"
        if gate._version == 0:
            text = f"there is no complete version of the weights {when}"
        elif gate.waits_for:
            text = f"{has} and answers from version {gate.waits_for} on, which is not here {when}"
        elif not gate._satisfies(self.min_version, self.wanted_epoch):
            epoch = "" if self.wanted_epoch is None else f" of epoch {self.wanted_epoch:016x}"
            asked = f"version {self.min_version}" if self.min_version else "a version"
            text = f"{asked}{epoch} was requested; {has} {when}"
        else:
            text = f"a switch of the weights took longer than {limit or 0:g} s"
        return AdmissionTimeout(
            f"{text}; try again, or another server",
            version=gate._version,
            min_version=self.min_version,
            retry_after=_RETRY_SECONDS,
        )

    async def __aexit__(self, *exc_info: object) -> None:
        _inside.set(tuple(each for each in _inside.get() if each is not self))
        holder = self._holder
        holder._parts -= 1
        if holder._parts:
            return
        gate = self._gate
        gate._open.discard(holder)
        if holder.blocks:
            gate._running -= 1
            if gate._running == 0:
                gate._changed.notify()


class Swap:
    """One switch of the weights; see :meth:`AdmissionGate.swap`. Enter it once.

    Attributes:
        version: The version afterwards; ``None`` for the next number. The version
            that the gate has already means that nothing changed.
        epoch: Its epoch; ``None`` for the same as before.
    """

    def __init__(
        self, gate: AdmissionGate, version: int | None, epoch: int | None, timeout: float | None
    ) -> None:
        self.version: int | None = version
        self.epoch: int | None = epoch
        self._gate = gate
        self._timeout = timeout

    def activate(self, version: int, epoch: int | None = None) -> None:
        """Say inside the block that the weights are those of ``version`` from now on.

        For a block that may still raise afterwards; the version then is this one all the same.
        """
        self.version, self.epoch = version, epoch
        self._gate._activate(version, self._gate._epoch if epoch is None else epoch)

    async def __aenter__(self) -> Self:
        gate = self._gate
        task = asyncio.current_task()
        if any(each._task is task and each._holder.blocks for each in _around(gate)):
            raise LocalProtocolError("a switch inside a request would wait for itself")
        limit = _limit_of(self._timeout, gate.swap_timeout)
        try:
            async with asyncio.timeout(limit):
                if limit != 0:
                    await asyncio.sleep(0)  # whoever waited for the last switch goes first
                while gate._swap is not None:
                    await gate._until(lambda: gate._swap is None)
                    await asyncio.sleep(0)
                gate._swap = self
                await gate._until(lambda: gate._running == 0)
        except BaseException as exc:  # goes on, as SwapTimeout where it came too late
            requests = f"{gate._running} requests that were running"
            what = requests if gate._swap is self else "another switch"
            self._over()
            if not isinstance(exc, TimeoutError):
                raise  # cancelled, or closed
            text = f"{what} did not end within {limit or 0:g} s"
            raise SwapTimeout(text, running=gate._running) from exc
        return self

    def _over(self) -> None:
        if self._gate._swap is self:
            self._gate._swap = None
            self._gate._changed.notify()

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        gate = self._gate
        try:
            if exc_type is None:
                version = gate._version + 1 if self.version is None else self.version
                if version < 1 and version != gate._version:
                    raise LocalProtocolError(f"a version is at least 1, got {version}")
                gate._activate(version, gate._epoch if self.epoch is None else self.epoch)
        finally:
            self._over()
