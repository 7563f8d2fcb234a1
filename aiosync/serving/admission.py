"""One request at an admission gate: waiting to be admitted, and what it is a part of.

Must not import torch, schemes or transports.
"""

from __future__ import annotations

import asyncio
import math
from contextvars import ContextVar
from typing import TYPE_CHECKING

from aiosync.errors import AdmissionTimeout, LocalProtocolError
from aiosync.protocol import validate_timeout

if TYPE_CHECKING:
    from types import TracebackType

    from aiosync.serving.gate import AdmissionGate

__all__ = ["Admission", "blocks_here", "limit_of"]

_RETRY_SECONDS = 1.0

# What this context is inside of, outermost first; child tasks inherit it.
_inside: ContextVar[tuple[Admission, ...]] = ContextVar("aiosync admissions", default=())


def blocks_here(gate: AdmissionGate) -> bool:
    """Whether this task is inside something that a switch of ``gate`` waits for."""
    task = asyncio.current_task()
    return any(
        each._gate is gate and each._task is task and each._holder.active and each._holder.blocks
        for each in _inside.get()
    )


def limit_of(timeout: float | None, default: float | None) -> float | None:
    """Seconds to wait: what a call says, or else the default; ``None`` for no limit.

    Raises:
        ConfigError: The call says what is no number.
    """
    validate_timeout(timeout)
    limit = default if timeout is None else timeout
    return None if limit is None or limit == math.inf else limit


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
        self._seen: list[int] = []  # since it was let in
        self._computed: list[int] = []  # in its batches
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
        batches, or, without any, all that there were since it was admitted.
        """
        return tuple(self._computed or self._seen)

    def _saw(self, version: int) -> None:
        if version not in self._seen:
            self._seen.append(version)

    async def __aenter__(self) -> int:
        if self.version:
            raise LocalProtocolError("an admission can be entered only once: call request() again")
        gate = self._gate
        self._task = asyncio.current_task()
        outer = self._find_outer()
        if outer is not None and self._joins(outer):
            self._holder = outer
            outer._parts += 1
            self.version, self.epoch = outer.version, outer.epoch
        else:
            if not (gate._may_enter(self) and not gate._closed):
                await self._wait()
            gate._enter(self)
            self._parts = 1
            self.version, self.epoch = gate._version, gate._epoch
            if self.blocks:
                self._tell_those_around()
        self._saw(self.version)
        # Without those that are over: another task may have left them, as middleware does.
        _inside.set((*(each for each in _inside.get() if each._holder.active), self))
        return self.version

    def _tell_those_around(self) -> None:
        for each in _inside.get():
            open_ = each._gate is self._gate and each._holder.active and not each.blocks
            if open_ and self.version not in each._computed:
                each._computed.append(self.version)

    def _find_outer(self) -> Admission | None:
        """The innermost request or batch of this gate around this one, if it is not over."""
        for each in reversed(_inside.get()):
            if each._gate is self._gate and each._holder.active:
                return each._holder
        return None

    def _joins(self, outer: Admission) -> bool:
        if not outer.blocks:
            return False
        if self._gate._satisfies(self.min_version, self.wanted_epoch):
            return True
        if blocks_here(self._gate):
            raise self._too_late(0.0, "and cannot become newer inside another request")
        return False  # a task that goes on by itself may wait for what comes later

    async def _wait(self) -> None:
        gate = self._gate
        limit = limit_of(self._timeout, gate.timeout)
        gate._waiting += 1
        try:
            async with asyncio.timeout(limit):
                while True:
                    gate._check_open()
                    if gate._may_enter(self):
                        return
                    await gate._changed.wait()
        except TimeoutError as exc:
            raise self._too_late(limit or 0.0, "") from exc
        finally:
            gate._waiting -= 1

    def _too_late(self, limit: float, detail: str) -> AdmissionTimeout:
        gate = self._gate
        if gate._version == 0:
            text = f"there is no complete version of the weights after {limit:g} s"
        elif not gate._satisfies(self.min_version, self.wanted_epoch):
            asked = f"version {self.min_version}" if self.min_version else "a version"
            if self.wanted_epoch is not None:
                asked += f" of epoch {self.wanted_epoch:016x}"
            after = f" after {limit:g} s" if limit else ""
            text = f"{asked} was requested; this server has version {gate._version}{after} {detail}"
        else:
            text = f"a switch of the weights took longer than {limit:g} s"
        return AdmissionTimeout(
            f"{text.rstrip()}; try again, or another server",
            version=gate._version,
            min_version=self.min_version,
            retry_after=_RETRY_SECONDS,
        )

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _inside.set(tuple(each for each in _inside.get() if each is not self))
        holder = self._holder
        holder._parts -= 1
        if holder._parts == 0:
            holder._gate._leave(holder)

    def __repr__(self) -> str:
        return f"<Admission version {self.version}: {'active' if self.active else 'not active'}>"
