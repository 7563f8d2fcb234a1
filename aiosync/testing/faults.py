"""A transport that misbehaves on cue: delays, drops, cuts, duplicates and corrupts messages.

:class:`FaultyTransport` wraps any transport and applies a script of faults to the messages that it
sends, so that a test of a scheme can say exactly what goes wrong when. Nothing is random.

This module must never import pytest, torch or schemes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass

from aiosync.errors import SendTimeout, TransportBroken, TransportBusy, TransportClosed
from aiosync.transports.base import Lender, Payload, Received, Transport
from aiosync.types import Capabilities
from aiosync.wire import Message

__all__ = ["Fault", "FaultyTransport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one message, in this order.

    Attributes:
        delay: The message is late by so many seconds of the loop's time, which count against the
            timeout of the operation.
        cut: The link breaks instead: ``TransportBroken`` here, the end of the link at the peer.
        corrupt_at: Position of a byte of the payload that arrives changed; negative from its end.
            Without such a byte the operation raises ``IndexError``.
        copies: How often it arrives; 0 makes it vanish, and its sender is not told.
    """

    delay: float = 0.0
    cut: bool = False
    corrupt_at: int | None = None
    copies: int = 1


class FaultyTransport(Transport):
    """A transport that does to some messages what its script says; the others pass untouched.

    It harms what it sends, acknowledgements included; wrap both ends to harm both directions.
    Otherwise it behaves as the transport inside, whose capabilities it shares, but that it takes
    nothing without waiting.

    Args:
        inner: The transport to wrap; owned from now on. It must not be used directly.
        script: Gives the fault of a message, if any, from its number, from 1, and itself.

    Attributes:
        inner: The transport inside.
        sent: Messages that ``send()`` and ``ack()`` have done with.
    """

    def __init__(
        self,
        inner: Transport,
        script: Callable[[int, Message], Fault | None] = lambda number, message: None,
    ) -> None:
        self.inner = inner
        self.capabilities: Capabilities = inner.capabilities  # type: ignore[misc]  # of the link, not of the class
        self.sent: int = 0
        self._script = script
        self._sending = self._cut = False
        self._ended = asyncio.Event()

    async def send(
        self, message: Message, payload: Payload = (), *, timeout: float | None = None
    ) -> None:
        """Send, unless the script says otherwise; the contract is that of the link inside.

        Cancellation:
            As the link inside; safe during a scripted delay.
        """
        if self._sending:
            raise TransportBusy("another send() is running on this link")
        self._sending = True
        try:
            with self._cut_is_no_close():
                fault = self._script(self.sent + 1, message) or Fault()
                if fault.delay:
                    timeout = await self._late(fault.delay, timeout)
                if fault.cut:
                    self.cut()
                if fault.corrupt_at is not None:
                    changed = bytearray(b"".join(payload))
                    changed[fault.corrupt_at] ^= 0xFF
                    payload = [changed]
                await asyncio.sleep(0)
                for _ in range(fault.copies):
                    await self.inner.send(message, payload, timeout=timeout)
            self.sent += 1
        finally:
            self._sending = False

    async def _late(self, delay: float, timeout: float | None) -> float | None:
        """Wait, unless the link ends before; what is left of the timeout."""
        patience = delay if timeout is None else min(delay, timeout)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), patience)
        if patience < delay and not self._ended.is_set():
            raise SendTimeout(f"the link did not take the message within {timeout} s")
        return timeout if timeout is None else max(0.0, timeout - delay)

    async def recv(self, *, into: Lender | None = None, timeout: float | None = None) -> Received:
        """As the link inside."""
        with self._cut_is_no_close():
            return await self.inner.recv(into=into, timeout=timeout)

    def cut(self) -> None:
        """Break the link now, as a scripted cut would."""
        if not self._ended.is_set():
            self.abort()
            self._cut = True

    @contextlib.contextmanager
    def _cut_is_no_close(self) -> Generator[None, None, None]:
        try:
            yield
        except TransportClosed as exc:
            if self._cut:
                raise TransportBroken("the link was cut by a scripted fault") from exc
            raise

    async def aclose(self) -> None:
        """Close the link inside; wakes every waiter."""
        self._cut = False
        self._ended.set()
        await self.inner.aclose()

    def abort(self) -> None:
        """Close the link inside at once."""
        self._cut = False
        self._ended.set()
        self.inner.abort()
