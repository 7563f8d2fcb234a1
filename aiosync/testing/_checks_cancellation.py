"""Conformance checks: cancelling an operation does what its declared class says.

This module must never import pytest or torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiosync.errors import AiosyncError, PeerClosed, RecvTimeout, TransportBroken
from aiosync.testing._registry import Bench, check
from aiosync.testing._tools import (
    CLOG_NBYTES,
    EPOCH,
    KIB,
    MIB,
    ConformanceError,
    Tasks,
    cancel,
    clog,
    deliver,
    drain,
    expect,
    gets_cut,
    is_blocked,
    lend_after,
    lend_new,
    pattern,
    require,
    settle,
    stays_broken,
    update,
    verify,
    within,
)
from aiosync.testing.cancellation import CancelOutcome, cancel_at_every_await
from aiosync.types import AckStatus, Cancellation
from aiosync.wire import Ack, Message, Update

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from typing_extensions import Buffer

    from aiosync.transports.base import Received, Transport

__all__ = ["CHECKS"]


class _Receiver:
    """Runs ``recv()`` so that a result is never lost to a cancellation of the task around it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.received: Received | None = None
        self.lent = 0

    async def run(self, *, lend: bool) -> None:
        self.received = await self.transport.recv(into=self._lend if lend else None)

    def _lend(self, message: Message, nbytes: int) -> Sequence[Buffer]:
        self.lent += 1
        return lend_new(message, nbytes)


@check()
async def check_cancel_idle_recv(bench: Bench) -> None:
    """Cancelling recv() on a silent link loses nothing: the next recv() gets the next message."""
    async with bench.pair() as (sender, receiver), Tasks() as tasks:
        for version in range(1, 4):
            receiving = _Receiver(receiver)
            task = tasks.start(receiving.run(lend=version == 2))
            await is_blocked(task, 0)
            await cancel(task, "an idle recv()")
            await deliver(sender, receiver, version, pattern(5000 * (version - 1), version))


@check()
async def check_cancel_recv_loses_nothing(bench: Bench) -> None:
    """A recv() that is cancelled as a message arrives, or while one is ready, does not lose it."""
    for ready in (True, False):
        for nbytes in (0, 100):
            await _cancel_recv_everywhere(bench, nbytes=nbytes, ready=ready, lend=False)


@check()
async def check_cancel_recv_mid_payload(bench: Bench) -> None:
    """A recv() that is cancelled at any await of a large payload behaves as its class says."""
    await _cancel_recv_everywhere(bench, nbytes=3 * MIB + 5, ready=False, lend=True)
    await _cancel_recv_everywhere(bench, nbytes=200 * KIB, ready=True, lend=True)


async def _cancel_recv_everywhere(bench: Bench, *, nbytes: int, ready: bool, lend: bool) -> None:
    payload = pattern(nbytes)
    state: list[tuple[Transport, _Receiver, asyncio.Task[None]]] = []

    async def send_two(sender: Transport) -> None:
        if not ready:
            await settle(3)
        await sender.send(update(1), [payload] if payload else [])
        await sender.send(update(2))

    @asynccontextmanager
    async def link() -> AsyncGenerator[None, None]:
        async with bench.pair() as (sender, receiver), Tasks() as tasks:
            sending = tasks.start(send_two(sender))
            if ready:
                await settle()
            state[:] = [(receiver, _Receiver(receiver), sending)]
            yield

    async def look(outcome: CancelOutcome[None]) -> None:
        receiver, receiving, sending = state[0]
        what = f"recv() cancelled {outcome.when.value} at await {outcome.point}"
        if receiving.received is not None:
            verify(receiving.received, 1, payload)
            receiving.received.release()
        else:
            require(outcome.cancelled, f"{what} raised {outcome.error!r}")
            try:
                received = await within(receiver.recv(), f"recv() after {what}")
            except TransportBroken:
                declared = bench.capabilities(receiver).recv_cancellation
                require(
                    declared is not Cancellation.SAFE,
                    f"{what} broke the link, but its class is declared SAFE",
                )
                require(receiving.lent > 0, f"{what} broke the link before it asked for memory")
                await stays_broken(receiver, what)
                return
            require(received.message != update(2), f"{what} lost the message that had arrived")
            verify(received, 1, payload)
            received.release()
        verify(await within(receiver.recv(), f"second recv() after {what}"), 2, b"")
        await within(sending, "the sender")

    await cancel_at_every_await(
        lambda: state[0][1].run(lend=lend), look, around=link, max_points=30
    )


@check()
async def check_cancel_recv_at_the_lender(bench: Bench) -> None:
    """A cancellation that comes as the buffers are lent, too, behaves as the class says."""
    payload = pattern(16 * MIB)
    async with bench.pair() as (sender, receiver), Tasks() as tasks:
        box: list[Received] = []

        async def receive() -> None:
            box.append(await receiver.recv(into=lend_after(lambda: receiving.cancel())))

        sending = tasks.start(sender.send(update(1), [payload]))
        receiving = tasks.start(receive())
        await asyncio.wait({receiving}, timeout=5.0)
        if box:
            verify(box[0], 1, payload)
            return
        require(receiving.done() and receiving.cancelled(), "recv() swallowed its cancellation")
        declared = bench.capabilities(receiver).recv_cancellation
        if declared is Cancellation.SAFE:
            verify(await within(receiver.recv(), "recv() after a cancelled one"), 1, payload)
            await within(sending, "the sender of a message whose first recv() was cancelled")
            return
        await stays_broken(receiver, "a recv() cancelled in mid-payload")
        await expect(
            (PeerClosed, TransportBroken), sending, "a blocked send() whose receiver has gone"
        )


@check()
async def check_cancel_blocked_send(bench: Bench) -> None:
    """Cancelling a send() that waits for the peer behaves as its class says; nothing is torn."""
    async with bench.pair() as (sender, receiver), Tasks() as tasks:
        last, blocked = await clog(tasks, sender)
        await cancel(blocked, "a blocked send()")
        after = tasks.start(sender.send(update(last), [pattern(CLOG_NBYTES, last)]))
        if await is_blocked(after) or after.exception() is None:
            # Nothing of the cancelled one was written, so this one takes its place.
            await drain(receiver, 1, last)
            await within(after, "send() after a cancelled one, while the peer reads")
            await deliver(sender, receiver, last + 1, b"after")
            return
        require(
            bench.capabilities(sender).send_cancellation is not Cancellation.SAFE,
            f"send() after a cancelled one raised {after.exception()!r}, but the class is SAFE",
        )
        await expect(TransportBroken, after, "send() after one cancelled in mid-message")
        await stays_broken(sender, "a send() cancelled in mid-message")
        await gets_cut(receiver)


@check()
async def check_break_reaches_the_peer(bench: Bench) -> None:
    """A link that a cancellation broke ends for the peer as well, before it is closed."""
    async with bench.pair() as (sender, receiver), Tasks() as tasks:
        _, blocked = await clog(tasks, sender)
        await cancel(blocked, "a blocked send()")
        try:
            await within(sender.recv(timeout=0), "recv() after a cancelled send()")
        except RecvTimeout:
            pass  # nothing of the message was written, so the link works
        except TransportBroken:
            await gets_cut(receiver)
    async with bench.pair() as (sender, receiver), Tasks() as tasks:
        receiving = tasks.start(receiver.recv(into=lend_after(lambda: receiving.cancel())))
        sending = tasks.start(sender.send(update(1), [pattern(16 * MIB)]))
        await asyncio.wait({receiving}, timeout=5.0)
        try:
            await within(receiver.send(update(1)), "send() after a cancelled recv()")
        except TransportBroken:
            await expect(
                (PeerClosed, TransportBroken), sending, "a send() whose receiver broke the link"
            )


@check()
async def check_cancel_send(bench: Bench) -> None:
    """A send() that is cancelled at any await is sent whole, or not at all, or breaks the link."""
    for nbytes in (0, 100, 6 * MIB):
        await _cancel_send_everywhere(bench, nbytes)


class _Collector:
    """Receives until the link ends, and notes what came."""

    def __init__(self, receiver: Transport) -> None:
        self.receiver = receiver
        self.versions: list[int] = []
        self.error: AiosyncError | None = None
        self.last = asyncio.Event()

    async def run(self, nbytes: int) -> None:
        while True:
            try:
                received = await self.receiver.recv()
            except AiosyncError as exc:
                self.error = exc
                self.last.set()
                return
            message = received.message
            assert isinstance(message, Update)
            verify(received, message.version, pattern(nbytes) if message.version == 1 else b"")
            received.release()
            self.versions.append(message.version)
            if message.version == 2:
                self.last.set()


async def _cancel_send_everywhere(bench: Bench, nbytes: int) -> None:
    payload = pattern(nbytes)
    state: list[tuple[Transport, _Collector, asyncio.Task[None]]] = []

    @asynccontextmanager
    async def link() -> AsyncGenerator[None, None]:
        async with bench.pair() as (sender, receiver), Tasks() as tasks:
            collector = _Collector(receiver)
            state[:] = [(sender, collector, tasks.start(collector.run(nbytes)))]
            yield

    async def look(outcome: CancelOutcome[None]) -> None:
        sender, collector, collecting = state[0]
        what = f"send() cancelled {outcome.when.value} at await {outcome.point}"
        require(outcome.finished or outcome.cancelled, f"{what} raised {outcome.error!r}")
        try:
            await within(sender.send(update(2)), f"send() after {what}")
        except TransportBroken:
            require(not outcome.finished, "the link is broken although send() returned")
            declared = bench.capabilities(sender).send_cancellation
            require(
                declared is not Cancellation.SAFE,
                f"{what} broke the link, but its class is declared SAFE",
            )
            await stays_broken(sender, what)
            await within(collecting, "the receiver of a cut message")
            # All bytes may have been written before the cancellation came.
            ended = TransportBroken if collector.versions == [] else PeerClosed
            require(
                isinstance(collector.error, ended) and collector.versions in ([], [1]),
                f"after {what} the receiver got {collector.versions}, then {collector.error!r}",
            )
            return
        await within(collector.last.wait(), f"the receiver after {what}")
        if collector.error is not None:
            await collecting  # shows a message that came torn
            raise ConformanceError(f"after {what} the receiver got {collector.error!r}")
        allowed = ([1, 2],) if outcome.finished else ([2], [1, 2])
        require(
            collector.versions in allowed,
            f"after {what} the receiver got updates {collector.versions}",
        )

    await cancel_at_every_await(
        lambda: state[0][0].send(update(1), [payload] if payload else []),
        look,
        around=link,
        max_points=30,
    )


@check()
async def check_cancel_ack(bench: Bench) -> None:
    """An ack() that is cancelled at any await is sent whole or not at all."""
    state: list[tuple[Transport, Transport]] = []

    @asynccontextmanager
    async def link() -> AsyncGenerator[None, None]:
        async with bench.pair() as pair:
            state[:] = [pair]
            yield

    async def look(outcome: CancelOutcome[None]) -> None:
        sender, receiver = state[0]
        await within(receiver.ack(EPOCH, 2, AckStatus.APPLIED), "ack() after a cancelled one")
        first = (await within(sender.recv(), "recv() of an ack")).message
        if first == Ack(EPOCH, 1, AckStatus.APPLIED):
            first = (await within(sender.recv(), "recv() of the second ack")).message
        else:
            require(not outcome.finished, "an ack() that returned was not sent")
        require(first == Ack(EPOCH, 2, AckStatus.APPLIED), f"expected the second ack, got {first}")

    await cancel_at_every_await(
        lambda: state[0][1].ack(EPOCH, 1, AckStatus.APPLIED), look, around=link
    )


CHECKS = (
    check_cancel_idle_recv,
    check_cancel_recv_loses_nothing,
    check_cancel_recv_mid_payload,
    check_cancel_recv_at_the_lender,
    check_cancel_blocked_send,
    check_break_reaches_the_peer,
    check_cancel_send,
    check_cancel_ack,
)
