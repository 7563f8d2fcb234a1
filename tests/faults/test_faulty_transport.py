"""FaultyTransport does what its script says to the message that is meant, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from aiosync.errors import (
    ConfigError,
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
    FaultKind,
    FaultyTransport,
    Hooks,
    VirtualClock,
)
from aiosync.transports.base import Transport
from aiosync.transports.memory import MemoryTransport
from aiosync.types import AckStatus
from aiosync.wire import Ack, Update

Pair = tuple[FaultyTransport, MemoryTransport]


@asynccontextmanager
async def faulty(**scripts) -> AsyncIterator[Pair]:
    left, right = MemoryTransport.connected_pair()
    async with FaultyTransport(left, **scripts) as one, right as two:
        yield one, two


@asynccontextmanager
async def faultless_pair() -> AsyncIterator[tuple[Transport, Transport]]:
    left, right = MemoryTransport.connected_pair()
    async with FaultyTransport(left, send={}, recv={}) as one, FaultyTransport(right) as two:
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


def on_virtual_time(test: Callable[[VirtualClock], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        clock = VirtualClock()
        clock.run(test(clock))

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


@pytest.mark.parametrize("check", CONFORMANCE_CHECKS, ids=lambda check: check.name)
@pytest.mark.asyncio
async def test_without_faults_it_conforms(check: Check) -> None:
    hooks = Hooks(cut=lambda transport: transport.inner.abort())
    capabilities = MemoryTransport.capabilities
    # Without a script memory comes from the transport inside; with one, from this object.
    reason = check.skip_reason(hooks, capabilities)
    if reason is not None:
        pytest.skip(reason)
    await check.run(faultless_pair, hooks=hooks)


# -- sending ----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_send_drop() -> None:
    async with faulty(send={2: Fault.drop()}) as (sender, receiver):
        await send(sender, 1, 2, 3)
        assert await arrivals(receiver) == [(1, b"payload 1"), (3, b"payload 3")]
        assert sender.sent == 3


@pytest.mark.asyncio
async def test_send_duplicate() -> None:
    async with faulty(send={1: Fault.duplicate()}) as (sender, receiver):
        await send(sender, 1, 2)
        assert [version for version, _ in await arrivals(receiver)] == [1, 1, 2]


@pytest.mark.asyncio
async def test_send_corrupt() -> None:
    script = {1: Fault.corrupt(), 2: Fault.corrupt(offset=-1, mask=1), 3: Fault.corrupt(99)}
    async with faulty(send=script) as (sender, receiver):
        await send(sender, 1, 2)
        assert await arrivals(receiver) == [(1, b"\x8fayload 1"), (2, b"payload 3")]
        with pytest.raises(ConfigError, match="byte 99 of a payload of 9 bytes"):
            await send(sender, 3)


@pytest.mark.asyncio
async def test_send_corrupt_leaves_the_senders_buffer_alone() -> None:
    async with faulty(send={1: Fault.corrupt()}) as (sender, _):
        mine = bytearray(b"mine")
        await sender.send(update(1), [mine])
        assert mine == b"mine"


@pytest.mark.asyncio
async def test_send_cut_is_sticky_and_reaches_the_peer() -> None:
    async with faulty(send={2: Fault.cut()}) as (sender, receiver):
        await send(sender, 1)
        with pytest.raises(TransportBroken):
            await send(sender, 2)
        for operation in (sender.recv, lambda: send(sender, 3)):
            with pytest.raises(TransportBroken):
                await operation()
        assert await receiver.recv()
        with pytest.raises((PeerClosed, TransportBroken)):
            await receiver.recv()
        await sender.aclose()
        with pytest.raises(TransportClosed):
            await sender.recv()


@pytest.mark.asyncio
async def test_cut_from_outside_wakes_a_blocked_recv() -> None:
    async with faulty() as (sender, _):
        waiting = asyncio.ensure_future(sender.recv())
        await asyncio.sleep(0)
        sender.cut()
        with pytest.raises(TransportBroken):
            await waiting


@on_virtual_time
async def test_send_delay(clock: VirtualClock) -> None:
    async with faulty(send={1: Fault.delay(60)}) as (sender, receiver):
        sending = asyncio.ensure_future(send(sender, 1))
        with pytest.raises(RecvTimeout):
            await receiver.recv(timeout=59)
        await receiver.recv(timeout=2)
        await sending
        assert clock.time() == 60


@on_virtual_time
async def test_send_delay_counts_against_the_timeout(clock: VirtualClock) -> None:
    async with faulty(send={1: Fault.delay(60)}) as (sender, receiver):
        with pytest.raises(SendTimeout):
            await sender.send(update(1), timeout=5)
        assert clock.time() == 5
        assert await arrivals(receiver) == []


@on_virtual_time
async def test_close_ends_a_delayed_send(clock: VirtualClock) -> None:
    async with faulty(send={1: Fault.delay(60)}) as (sender, _):
        sending = asyncio.ensure_future(send(sender, 1))
        await asyncio.sleep(1)
        with pytest.raises(TransportBusy):
            await send(sender, 2)
        await sender.aclose()
        with pytest.raises(TransportClosed):
            await sending
        assert clock.time() == 1


@pytest.mark.asyncio
async def test_acks_are_messages_of_the_script_too() -> None:
    async with faulty(send={1: Fault.drop()}) as (receiver, sender):
        await receiver.ack(1, 1, AckStatus.RECEIVED)
        await receiver.ack(1, 1, AckStatus.APPLIED)
        assert (await sender.recv()).message == Ack(1, 1, AckStatus.APPLIED)


@pytest.mark.asyncio
async def test_send_nowait_leaves_faults_to_send() -> None:
    async with faulty(send={2: Fault.drop()}) as (sender, receiver):
        assert sender.send_nowait(update(1))
        assert not sender.send_nowait(update(2))
        await sender.send(update(2))
        assert sender.send_nowait(update(3))
        assert [version for version, _ in await arrivals(receiver)] == [1, 3]


@pytest.mark.asyncio
async def test_a_script_may_be_a_function() -> None:
    def drop_even(number: int, message: Update) -> Fault | None:
        return Fault(FaultKind.DROP) if message.version % 2 == 0 else None

    async with faulty(send=drop_even) as (sender, receiver):
        await send(sender, 1, 2, 3, 4)
        assert [version for version, _ in await arrivals(receiver)] == [1, 3]


# -- receiving --------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_recv_drop_and_duplicate() -> None:
    async with faulty(recv={1: Fault.drop(), 2: Fault.duplicate()}) as (receiver, sender):
        await send(sender, 1, 2, 3)
        assert [version for version, _ in await arrivals(receiver)] == [2, 2, 3]
        assert receiver.arrived == 3


@pytest.mark.asyncio
async def test_recv_duplicates_do_not_share_memory() -> None:
    async with faulty(recv={1: Fault.duplicate()}) as (receiver, sender):
        await send(sender, 1)
        first = await receiver.recv()
        first.payload[0][:] = b"x" * 9
        assert await arrivals(receiver) == [(1, b"payload 1")]


@pytest.mark.asyncio
async def test_recv_corrupt_lands_in_the_lent_buffer() -> None:
    async with faulty(recv={1: Fault.corrupt(offset=8, mask=3)}) as (receiver, sender):
        await send(sender, 1)
        lent = [bytearray(4), bytearray(5)]
        await receiver.recv(into=lambda message, nbytes: lent)
        assert b"".join(lent) == b"payload 2"


@pytest.mark.asyncio
async def test_recv_cut() -> None:
    async with faulty(recv={2: Fault.cut()}) as (receiver, sender):
        await send(sender, 1, 2)
        assert (await receiver.recv()).message == update(1)
        for _ in range(2):
            with pytest.raises(TransportBroken):
                await receiver.recv()
        with pytest.raises(PeerClosed):
            await send(sender, 3)


@on_virtual_time
async def test_recv_delay_keeps_order_and_survives_timeouts_and_cancellation(
    clock: VirtualClock,
) -> None:
    async with faulty(recv={1: Fault.delay(60)}) as (receiver, sender):
        await send(sender, 1, 2)
        with pytest.raises(RecvTimeout):
            await receiver.recv(timeout=10)
        waiting = asyncio.ensure_future(receiver.recv())
        await asyncio.sleep(10)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert (await receiver.recv()).message == update(1)
        assert clock.time() == 60
        assert (await receiver.recv(timeout=0)).message == update(2)


@on_virtual_time
async def test_close_ends_a_delayed_recv(clock: VirtualClock) -> None:
    async with faulty(recv={1: Fault.delay(60)}) as (receiver, sender):
        await send(sender, 1)
        waiting = asyncio.ensure_future(receiver.recv())
        await asyncio.sleep(1)
        receiver.abort()
        with pytest.raises(TransportClosed):
            await waiting
        assert clock.time() == 1


@pytest.mark.asyncio
async def test_it_shares_the_capabilities_and_shows_the_link_inside() -> None:
    async with faulty() as (sender, _):
        assert sender.capabilities is MemoryTransport.capabilities
        assert repr(sender) == f"<FaultyTransport of {sender.inner!r}>"
