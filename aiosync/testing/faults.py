"""A transport that misbehaves on cue: delays, drops, cuts, duplicates and corrupts messages.

:class:`FaultyTransport` wraps any transport and applies a script of faults, message by message
and direction by direction, so that a test of a scheme can say exactly what goes wrong when.
Nothing is random.

This module must never import pytest, torch or schemes.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from aiosync.errors import (
    ConfigError,
    RecvTimeout,
    SendTimeout,
    TransportBroken,
    TransportBusy,
    TransportClosed,
)
from aiosync.transports.base import Lender, Payload, Received, Transport
from aiosync.types import Capabilities
from aiosync.wire import Message

__all__ = ["Fault", "FaultKind", "FaultScript", "FaultyTransport"]


class FaultKind(enum.Enum):
    """What happens to one message."""

    DELAY = "delay"
    DROP = "drop"
    CUT = "cut"
    DUPLICATE = "duplicate"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. Make it with one of the class methods.

    Attributes:
        kind: What happens.
        seconds: For DELAY, how long, in seconds of the loop's time.
        offset: For CORRUPT, the position of the byte in the payload; negative from its end.
        mask: For CORRUPT, the bits of that byte that flip.
    """

    kind: FaultKind
    seconds: float = 0.0
    offset: int = 0
    mask: int = 0xFF

    @classmethod
    def delay(cls, seconds: float) -> Fault:
        """The message is late. The delay counts against the timeout of the operation."""
        return cls(FaultKind.DELAY, seconds=seconds)

    @classmethod
    def drop(cls) -> Fault:
        """The message vanishes; its sender is not told."""
        return cls(FaultKind.DROP)

    @classmethod
    def cut(cls) -> Fault:
        """The link breaks instead: ``TransportBroken`` here, the end of the link at the peer."""
        return cls(FaultKind.CUT)

    @classmethod
    def duplicate(cls) -> Fault:
        """The message arrives twice."""
        return cls(FaultKind.DUPLICATE)

    @classmethod
    def corrupt(cls, offset: int = 0, mask: int = 0xFF) -> Fault:
        """One byte of the payload arrives with some bits flipped.

        A message without such a byte makes the operation raise ``ConfigError``.
        """
        return cls(FaultKind.CORRUPT, offset=offset, mask=mask)


FaultScript: TypeAlias = "Mapping[int, Fault] | Callable[[int, Message], Fault | None]"
"""Which messages of one direction get a fault: by number, from 1, or as a function decides."""


class FaultyTransport(Transport):
    """A transport that does to some messages what its scripts say; the others pass untouched.

    Without scripts it behaves as the transport inside, whose capabilities it shares.

    Args:
        inner: The transport to wrap; owned from now on. It must not be used directly.
        send: Faults of outgoing messages, acknowledgements included.
        recv: Faults of incoming messages.

    Attributes:
        inner: The transport inside.
        sent: Messages that were handed to ``send``, ``ack`` or a successful ``send_nowait``.
        arrived: Messages that came out of the transport inside.
    """

    def __init__(
        self,
        inner: Transport,
        *,
        send: FaultScript | None = None,
        recv: FaultScript | None = None,
    ) -> None:
        self.inner = inner
        self.capabilities: Capabilities = inner.capabilities  # type: ignore[misc]  # of the link, not of the class
        self.sent: int = 0
        self.arrived: int = 0
        self._send_script = send
        self._recv_script = recv
        self._sending = self._receiving = False
        self._held: deque[tuple[Received, float]] = deque()  # with the time to show it
        self._broken = self._closed = False
        self._ended: asyncio.Future[None] | None = None

    # -- sending -------------------------------------------------------------------------------

    async def send(
        self, message: Message, payload: Payload = (), *, timeout: float | None = None
    ) -> None:
        """Send, unless the script says otherwise; the contract is that of the link inside.

        Cancellation:
            As the link inside; safe during a scripted delay.
        """
        self._check()
        if self._sending:
            raise TransportBusy("another send() is running on this link")
        self._sending = True
        try:
            number = self.sent + 1
            fault = _look_up(self._send_script, number, message)
            with self._translating():
                if fault is None:
                    await self.inner.send(message, payload, timeout=timeout)
                else:
                    await self._send_faulty(fault, message, payload, timeout)
            self.sent = number
        finally:
            self._sending = False

    async def _send_faulty(
        self, fault: Fault, message: Message, payload: Payload, timeout: float | None
    ) -> None:
        if fault.kind is FaultKind.DELAY:
            if timeout is not None and timeout < fault.seconds:
                await self._sleep(timeout)
                raise SendTimeout(f"the link did not take the message within {timeout:g} s")
            await self._sleep(fault.seconds)
            timeout = timeout if timeout is None else timeout - fault.seconds
            await self.inner.send(message, payload, timeout=timeout)
        elif fault.kind is FaultKind.DROP:
            await self._sleep(0)
        elif fault.kind is FaultKind.CUT:
            await self._sleep(0)
            raise self._cut()
        elif fault.kind is FaultKind.DUPLICATE:
            await self.inner.send(message, payload, timeout=timeout)
            await self.inner.send(message, payload, timeout=timeout)
        else:
            await self.inner.send(message, [_flipped(payload, fault)], timeout=timeout)

    def send_nowait(self, message: Message, payload: Payload = ()) -> bool:
        """Send without waiting; False for a message whose fault needs :meth:`send`."""
        self._check()
        if self._sending or _look_up(self._send_script, self.sent + 1, message) is not None:
            return False
        if self.inner.send_nowait(message, payload):
            self.sent += 1
            return True
        return False

    # -- receiving -----------------------------------------------------------------------------

    async def recv(self, *, into: Lender | None = None, timeout: float | None = None) -> Received:
        """Receive, unless the script says otherwise; the contract is that of the link inside.

        A message under a scripted fault is received into memory of this object first, and copied
        into the lent buffers when it is shown.

        Cancellation:
            As the link inside; a delayed message is kept for the next ``recv()``.
        """
        self._check()
        if self._receiving:
            raise TransportBusy("another recv() is running on this link")
        self._receiving = True
        try:
            with self._translating():
                if self._recv_script is None:
                    received = await self.inner.recv(into=into, timeout=timeout)
                    self.arrived += 1
                    return received
                return await self._recv_scripted(into, timeout)
        finally:
            self._receiving = False

    async def _recv_scripted(self, into: Lender | None, timeout: float | None) -> Received:
        loop = asyncio.get_running_loop()
        give_up = None if timeout is None else loop.time() + timeout
        while True:
            left = None if give_up is None else max(0.0, give_up - loop.time())
            if self._held:
                held, due = self._held[0]
                wait = max(0.0, due - loop.time())
                if left is not None and left < wait:
                    await self._sleep(left)
                    raise RecvTimeout(f"no message within {timeout:g} s")
                await self._sleep(wait)
                return self._show(held, into)
            received = await self.inner.recv(timeout=left)
            self.arrived += 1
            self._keep(received)

    def _keep(self, received: Received) -> None:
        fault = _look_up(self._recv_script, self.arrived, received.message)
        payload: Sequence[memoryview]
        if fault is not None and fault.kind is FaultKind.CORRUPT:
            payload = [memoryview(_flipped(received.payload, fault))]
        else:
            payload = [memoryview(bytearray(view)) for view in received.payload]
        received.release()
        if fault is not None and fault.kind is FaultKind.DROP:
            return
        if fault is not None and fault.kind is FaultKind.CUT:
            raise self._cut()
        now = asyncio.get_running_loop().time()
        due = now + (fault.seconds if fault is not None else 0.0)
        copies = 2 if fault is not None and fault.kind is FaultKind.DUPLICATE else 1
        self._held.extend(
            (Received(received.message, payload, received.nbytes), due) for _ in range(copies)
        )

    def _show(self, held: Received, into: Lender | None) -> Received:
        if into is None or not held.nbytes:
            self._held.popleft()
            # A duplicate has memory of its own, whatever becomes of the first.
            payload = [memoryview(bytearray(view)) for view in held.payload]
            return Received(held.message, payload, held.nbytes)
        try:
            lent = [memoryview(buffer).cast("B") for buffer in into(held.message, held.nbytes)]
            if sum(view.nbytes for view in lent) != held.nbytes:
                raise ConfigError(f"lent the wrong size for a payload of {held.nbytes} bytes")
        except BaseException:  # goes on to the caller of recv()
            self._cut()
            raise
        self._held.popleft()
        data = b"".join(held.payload)
        at = 0
        for view in lent:
            view[:] = data[at : at + view.nbytes]
            at += view.nbytes
        return Received(held.message, lent, held.nbytes)

    # -- ending --------------------------------------------------------------------------------

    def cut(self) -> None:
        """Break the link now, as a scripted cut would."""
        self._cut()

    def _cut(self) -> TransportBroken:
        self._broken = True
        self._held.clear()
        self.inner.abort()
        self._wake()
        return TransportBroken("the link was cut by a scripted fault")

    def _check(self) -> None:
        if self._broken and not self._closed:
            raise TransportBroken("the link was cut by a scripted fault")

    @contextlib.contextmanager
    def _translating(self) -> Generator[None, None, None]:
        try:
            yield
        except TransportClosed:
            self._check()  # the link inside was aborted by a cut, which is no close to our user
            raise

    async def _sleep(self, seconds: float) -> None:
        """Wait, at least one turn of the loop, unless the link ends before."""
        if seconds <= 0:
            await asyncio.sleep(0)
        else:
            if self._ended is None:
                self._ended = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._ended}, timeout=seconds)
        self._check()
        if self._closed:
            raise TransportClosed("this end of the link was closed")

    def _wake(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def aclose(self) -> None:
        """Close the link inside; wakes every waiter."""
        self._closed = True
        self._held.clear()
        self._wake()
        await self.inner.aclose()

    def abort(self) -> None:
        """Close the link inside at once."""
        self._closed = True
        self._held.clear()
        self._wake()
        self.inner.abort()

    def __repr__(self) -> str:
        return f"<FaultyTransport of {self.inner!r}>"


def _look_up(script: FaultScript | None, number: int, message: Message) -> Fault | None:
    if script is None:
        return None
    if callable(script):
        return script(number, message)
    return script.get(number)


def _flipped(payload: Payload, fault: Fault) -> bytearray:
    data = bytearray(b"".join(payload))
    try:
        data[fault.offset] ^= fault.mask
    except IndexError:
        raise ConfigError(
            f"cannot corrupt byte {fault.offset} of a payload of {len(data)} bytes"
        ) from None
    return data
