"""The admission gate: requests on one side, the switch to other weights on the other.

Bookkeeping and waiting only: what a switch does is its caller's business. Everything happens on
one event loop; nothing here is thread-safe. Must not import torch or transports.
"""

from __future__ import annotations

import asyncio
from typing import Literal, TypeAlias

from aiosync._tasks import Notifier
from aiosync.errors import ConfigError, LocalProtocolError, RecvTimeout
from aiosync.protocol import validate_seconds
from aiosync.schemes.handles import Ready
from aiosync.serving.admission import Admission, limit_of
from aiosync.serving.swapping import Swap

__all__ = ["AdmissionGate", "Mode"]

Mode: TypeAlias = Literal["between_requests", "immediate"]
"""When weights are switched: while no request runs, or while no batch is being computed."""


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
        if initial_version is not None and initial_version < 1:
            raise ConfigError(f"initial_version must be at least 1, got {initial_version!r}")
        self.mode: Mode = mode
        self.timeout = timeout
        self.swap_timeout = swap_timeout
        self.swaps: int = 0
        """Switches that were made."""
        self._version = initial_version or 0
        self._epoch: int | None = None
        self._running = 0  # what a switch has to wait for
        self._waiting = 0
        self._open: set[Admission] = set()  # requests that a switch does not wait for
        self._swap: Swap | None = None  # the one that waits, or is under way
        self._closed = False
        self._changed = Notifier()  # a version, the end of a switch, or of the gate
        self._idle = Notifier()  # nothing runs any more that a switch has to wait for

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
    def ready(self) -> Ready:
        """The condition that there is a complete version and the gate is open."""
        return Ready(self._is_ready, self._wait_until_ready)

    def _is_ready(self) -> bool:
        return self._version > 0 and not self._closed

    async def _wait_until_ready(self, timeout: float | None) -> None:
        limit = limit_of(timeout, self.timeout)
        try:
            async with asyncio.timeout(limit):
                while not self._is_ready():
                    self._check_open()
                    await self._changed.wait()
        except TimeoutError as exc:
            raise RecvTimeout(f"no complete version after {limit or 0:g} s") from exc

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
        if self._version == 0 or (admission.blocks and self._swap is not None):
            return False
        return self._satisfies(admission.min_version, admission.wanted_epoch)

    def _satisfies(self, min_version: int, epoch: int | None) -> bool:
        return self._version >= min_version and epoch in (None, self._epoch)

    def _enter(self, admission: Admission) -> None:
        if admission.blocks:
            self._running += 1
        else:
            self._open.add(admission)

    def _leave(self, admission: Admission) -> None:
        if admission.blocks:
            self._running -= 1
            if self._running == 0:
                self._idle.notify()
        else:
            self._open.discard(admission)

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
        self._idle.notify()
        self._changed.notify()

    def _check_open(self) -> None:
        if self._closed:
            raise LocalProtocolError("the gate is closed: this server is shutting down")

    def _activate(self, version: int, epoch: int | None) -> None:
        if (version, epoch) != (self._version, self._epoch):
            self.swaps += 1
            self._version, self._epoch = version, epoch
            for admission in self._open:
                admission._saw(version)
            self._changed.notify()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._version else "not ready"
        return (
            f"<AdmissionGate {state}: version {self._version}, {self._running} running, "
            f"{self._waiting} waiting>"
        )
