"""One switch of the weights at an admission gate. Must not import torch, schemes or transports."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiosync.errors import LocalProtocolError, SwapTimeout
from aiosync.serving.admission import blocks_here, limit_of

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from aiosync.serving.gate import AdmissionGate

__all__ = ["Swap"]


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
        if blocks_here(gate):
            raise LocalProtocolError("a switch inside a request would wait for itself")
        limit = limit_of(self._timeout, gate.swap_timeout)
        try:
            async with asyncio.timeout(limit):
                if limit != 0:
                    await asyncio.sleep(0)  # whoever waited for the last switch goes first
                while gate._swap is not None:
                    gate._check_open()
                    await gate._changed.wait()
                    await asyncio.sleep(0)
                gate._swap = self
                while True:
                    gate._check_open()
                    if gate._running == 0:
                        break
                    await gate._idle.wait()
        except TimeoutError as exc:
            waited = gate._swap is self
            self._over()
            what = f"{gate._running} requests that were running" if waited else "another switch"
            raise SwapTimeout(
                f"{what} did not end within {limit or 0:g} s", running=gate._running
            ) from exc
        except BaseException:  # cancelled, or closed: raised again
            self._over()
            raise
        return self

    def _over(self) -> None:
        if self._gate._swap is self:
            self._gate._swap = None
            self._gate._changed.notify()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        gate = self._gate
        try:
            if exc_type is None:
                version = gate._version + 1 if self.version is None else self.version
                if version < 1 and version != gate._version:
                    raise LocalProtocolError(f"a version is at least 1, got {version}")
                gate._activate(version, gate._epoch if self.epoch is None else self.epoch)
        finally:
            self._over()
