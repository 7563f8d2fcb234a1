"""FaultyTransport does what its script says to the message that is meant, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiosync.errors import (
    PeerClosed,
    RecvTimeout,
    SendTimeout,
    TransportBroken,
    TransportBusy,
    TransportClosed,
)
from aiosync.testing import (
    CONFORMANCE_CHECKS,
    Check,
    Fault,
    FaultyTransport,
    Hooks,
    VirtualClock,
)
from aiosync.transports.base import Transport
from aiosync.transports.memory import MemoryTransport
from aiosync.types import AckStatus
from aiosync.wire import Ack, Update

Pair = tuple[FaultyTransport, FaultyTransport]


@asynccontextmanager
async def faulty(**faults: Fault) -> AsyncIterator[Pair]:
    """A link; the n-th message of its first end has the fault ``_n``."""
    left, right = MemoryTransport.connected_pair()
    script = {int(name[1:]): fault for name, fault in faults.items()}
    wrapped = FaultyTransport(left, lambda number, message: script.get(number))
    async with wrapped as one, FaultyTransport(right) as two:
        yield one, two


def update(version: int) -> Update:
    return Update(epoch=1, version=version, digest=bytes(16))


async def send(transport: Transport, *versions: int) -> None:
    for version in versions:
        await transport.send(update(version), [f"payload {version}".encode()])


async def arrivals(transport: Transport) -> list[tuple[int, bytes]]:
    """Everything that is there to be received."""
    found = []
    while True:
        try:
            received = await transport.recv(timeout=0)
        except RecvTimeout:
            return found
        found.append((received.message.version, b"".join(received.payload)))
        received.release()


@pytest.mark.parametrize("check", CONFORMANCE_CHECKS, ids=lambda check: check.name)
@pytest.mark.asyncio
async def test_without_faults_it_conforms(check: Check) -> None:
    hooks = Hooks(cut=lambda transport: transport.inner.abort())
    reason = check.skip_reason(hooks, MemoryTransport.capabilities)
    if reason is not None:
        pytest.skip(reason)
    await check.run(faulty, hooks=hooks)


@pytest.mark.asyncio
async def test_what_happens_to_a_message() -> None:
    faults = {
        "_2": Fault(copies=0),
        "_3": Fault(copies=2),
        "_4": Fault(corrupt_at=0),
        "_5": Fault(corrupt_at=-1, copies=2),
        "_6": Fault(corrupt_at=99),
    }
    async with faulty(**faults) as (sender, receiver):
        await send(sender, 1, 2, 3)
        mine = bytearray(b"mine")
        await sender.send(update(4), [mine])
        await send(sender, 5)
        assert await arrivals(receiver) == [
            (1, b"payload 1"),
            (3, b"payload 3"),
            (3, b"payload 3"),
            (4, b"\x92ine"),
            (5, b"payload \xca"),
            (5, b"payload \xca"),
        ]
        assert mine == b"mine"
        assert sender.sent == 5
        with pytest.raises(IndexError):
            await send(sender, 6)
        assert sender.capabilities is MemoryTransport.capabilities


@pytest.mark.asyncio
async def test_acks_are_messages_too_and_the_script_may_look_at_them() -> None:
    def drop_received(number: int, message: Ack) -> Fault | None:
        return Fault(copies=0) if message.status is AckStatus.RECEIVED else None

    left, right = MemoryTransport.connected_pair()
    async with FaultyTransport(left, drop_received) as receiver, right as sender:
        await receiver.ack(1, 1, AckStatus.RECEIVED)
        await receiver.ack(1, 1, AckStatus.APPLIED)
        assert (await sender.recv()).message == Ack(1, 1, AckStatus.APPLIED)


@pytest.mark.asyncio
async def test_a_cut_is_sticky_and_reaches_the_peer() -> None:
    async with faulty(_2=Fault(cut=True)) as (sender, receiver):
        await send(sender, 1)
        for operation in (lambda: send(sender, 2), sender.recv, lambda: send(sender, 3)):
            with pytest.raises(TransportBroken):
                await operation()
        assert (await receiver.recv()).message == update(1)
        with pytest.raises((PeerClosed, TransportBroken)):
            await receiver.recv()
        await sender.aclose()
        with pytest.raises(TransportClosed):
            await sender.recv()


@pytest.mark.asyncio
async def test_a_cut_from_outside_wakes_a_blocked_recv() -> None:
    async with faulty() as (sender, _):
        waiting = asyncio.ensure_future(sender.recv())
        await asyncio.sleep(0)
        sender.cut()
        with pytest.raises(TransportBroken):
            await waiting


def test_a_delay_counts_against_the_timeout_and_ends_with_the_link() -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with faulty(_1=Fault(delay=60), _2=Fault(delay=60)) as (sender, receiver):
            with pytest.raises(SendTimeout):
                await sender.send(update(1), timeout=5)
            assert clock.time() == 5
            sending = asyncio.ensure_future(sender.send(update(1), timeout=70))
            with pytest.raises(RecvTimeout):
                await receiver.recv(timeout=59)
            with pytest.raises(TransportBusy):
                await sender.send(update(2))
            await receiver.recv(timeout=2)
            await sending
            assert clock.time() == 65
            sending = asyncio.ensure_future(sender.send(update(2)))
            await asyncio.sleep(1)
            await sender.aclose()
            with pytest.raises(TransportClosed):
                await sending
            assert clock.time() == 66

    clock.run(main())
