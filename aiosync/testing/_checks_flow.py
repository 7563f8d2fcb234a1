"""Conformance checks: backpressure, checkpoints, deadlines and ``send_nowait``.

This module must never import pytest or torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from aiosync.errors import LocalProtocolError, RecvTimeout, SendTimeout, TransportBroken
from aiosync.testing._registry import Bench, check
from aiosync.testing._tools import (
    CLOG_NBYTES,
    EPOCH,
    KIB,
    MIB,
    Tasks,
    arrives,
    clog,
    deliver,
    drain,
    expect,
    gets_cut,
    is_blocked,
    pattern,
    require,
    settle,
    text_of,
    update,
    verify,
    within,
)
from aiosync.types import AckStatus
from aiosync.wire import Update

if TYPE_CHECKING:
    from aiosync.transports.base import Transport

__all__ = ["CHECKS"]

_SHORT = 0.02  # seconds; a deadline that should pass


@check()
async def check_backpressure(bench: Bench) -> None:
    """A peer that does not read makes send() wait, and reading lets it go on."""
    async with bench.pair() as (sender, receiver), Tasks() as tasks:
        last, blocked = await clog(tasks, sender)
        await drain(receiver, 1, last)
        await within(blocked, "a blocked send() after the peer has read everything")
        await deliver(sender, receiver, last + 1, b"after")


@check()
async def check_backpressure_small_messages(bench: Bench) -> None:
    """Small messages that no process reads are bounded as well."""
    nbytes = 64 * KIB
    async with bench.pair() as (sender, receiver), Tasks() as tasks:

        async def send_for_ever() -> None:
            while True:
                counts[0] += 1
                await sender.send(update(counts[0]), [pattern(nbytes, counts[0])])

        counts = [0]
        sending = tasks.start(send_for_ever())
        seen = -1
        while counts[0] != seen:
            seen = counts[0]
            require(seen < 4096, f"the link took {seen} messages of {nbytes} bytes unread")
            await is_blocked(sending)
        last = counts[0]
        await drain(receiver, 1, last, nbytes=nbytes)
        await settle()
        require(counts[0] > last, "send() stays blocked although the peer has read everything")


@check()
async def check_clogged_direction_is_alone(bench: Bench) -> None:
    """While one direction is clogged, the other one works."""
    async with bench.pair() as (sender, receiver), Tasks() as tasks:
        last, blocked = await clog(tasks, sender)
        await within(receiver.ack(EPOCH, 1, AckStatus.RECEIVED), "ack() against the stream")
        await within(sender.recv(), "recv() while send() is blocked")
        await drain(receiver, 1, last)
        await within(blocked, "a blocked send() after the peer has read everything")


@check()
async def check_checkpoints(bench: Bench) -> None:
    """send(), recv() and ack() let other tasks run at least once, even when all is ready."""
    async with bench.pair() as (sender, receiver):
        for version in range(1, 4):
            payload = [pattern(64)] if version == 2 else []
            await _yields(sender.send(update(version), payload), "send() on a free link")
            await settle()
            await _yields(receiver.recv(), "recv() of a ready message")
            await _yields(receiver.ack(EPOCH, version, AckStatus.APPLIED), "ack() on a free link")
            await settle()
            await _yields(sender.recv(timeout=0), "recv(timeout=0) of a ready ack")


async def _yields(operation: Coroutine[Any, Any, Any], what: str) -> None:
    ran: list[bool] = []
    asyncio.get_running_loop().call_soon(ran.append, True)
    await operation
    require(bool(ran), f"{what} returned without letting the loop run: it is no checkpoint")


@check()
async def check_recv_timeout(bench: Bench) -> None:
    """RecvTimeout leaves the link intact: the next message arrives."""
    async with bench.pair() as (sender, receiver):
        for version in (1, 2):
            await expect(RecvTimeout, receiver.recv(timeout=_SHORT), "recv() on a silent link")
            await expect(RecvTimeout, receiver.recv(timeout=0), "recv(timeout=0) on a silent link")
            await deliver(sender, receiver, version, pattern(1000, version))


@check()
async def check_recv_timeout_loses_nothing(bench: Bench) -> None:
    """Deadlines that race with messages neither lose nor repeat one."""
    async with bench.pair() as (sender, receiver), Tasks() as tasks:

        async def trickle() -> None:
            for version in range(1, 61):
                await sender.send(update(version), [b"x" * version] if version % 2 else [])
                await asyncio.sleep(0.0005 * (version % 4))

        sending = tasks.start(trickle())
        version = 1
        misses = 0
        while version <= 60:
            try:
                received = await within(receiver.recv(timeout=0.0004), "recv(timeout=0.4 ms)")
            except RecvTimeout:
                misses += 1
                require(misses < 5000, f"message {version} never arrived")
                continue
            verify(received, version, b"x" * version if version % 2 else b"")
            received.release()
            version += 1
        await within(sending, "the sender")


@check()
async def check_recv_poll(bench: Bench) -> None:
    """recv(timeout=0) returns a ready message, and raises RecvTimeout without one."""
    async with bench.pair() as (sender, receiver):
        await expect(RecvTimeout, receiver.recv(timeout=0), "recv(timeout=0) without a message")
        for version in (1, 2):
            payload = pattern(100 * (version - 1))
            await within(sender.send(update(version), [payload]), "send()")
            await settle()
            await arrives(
                receiver.recv(timeout=0), "recv(timeout=0) with a message", version, payload
            )
        await expect(RecvTimeout, receiver.recv(timeout=0), "recv(timeout=0) after the last one")


@check()
async def check_send_timeout(bench: Bench) -> None:
    """A send() that the link does not take in time raises SendTimeout and tears nothing."""
    for timeout in (_SHORT, 0.0):
        async with bench.pair() as (sender, receiver), Tasks() as tasks:
            taken = 0
            error: SendTimeout | None = None
            while error is None:
                require(taken < 128, "the link took 128 messages of 2 MiB unread")
                version = taken + 1
                sending = sender.send(
                    update(version), [pattern(CLOG_NBYTES, version)], timeout=timeout
                )
                try:
                    await within(sending, "send() with a deadline")
                    taken += 1
                except SendTimeout as exc:
                    error = exc
            await _intact_or_broken(tasks, sender, receiver, taken)


async def _intact_or_broken(
    tasks: Tasks, sender: Transport, receiver: Transport, taken: int
) -> None:
    """After a send that failed: whole messages, then either a working or a broken link."""
    sending = tasks.start(sender.send(update(taken + 1), [pattern(CLOG_NBYTES, taken + 1)]))
    if await is_blocked(sending) or sending.exception() is None:
        await drain(receiver, 1, taken + 1)
        await within(sending, "send() after SendTimeout, while the peer reads")
        return
    error = sending.exception()
    assert error is not None
    require(
        isinstance(error, TransportBroken),
        f"after SendTimeout in mid-message expected TransportBroken, got {text_of(error)}",
    )
    await within(sender.aclose(), "aclose() of a broken link")
    await gets_cut(receiver)


@check()
async def check_send_poll(bench: Bench) -> None:
    """send(timeout=0) on a free link delivers."""
    async with bench.pair() as (sender, receiver):
        for version in (1, 2):
            payload = pattern(100 * (version - 1))
            await within(sender.send(update(version), [payload], timeout=0), "send(timeout=0)")
            await arrives(receiver.recv(), "recv()", version, payload)


@check()
async def check_send_nowait(bench: Bench) -> None:
    """What send_nowait() took arrives once and in order; what it did not take left no trace."""
    nbytes = 64 * KIB
    async with bench.pair() as (sender, receiver), Tasks() as tasks:
        taken: list[tuple[int, bytes]] = []

        def offer(version: int, payload: bytes) -> bool:
            if sender.send_nowait(update(version), [payload] if payload else []):
                taken.append((version, payload))
                return True
            return False

        while offer(len(taken) + 1, pattern(nbytes, len(taken))):
            require(
                len(taken) < 4096,
                f"send_nowait() took {len(taken)} messages of {nbytes} bytes unread",
            )
        for version in range(5001, 5004):
            offer(version, b"")  # there may be room for these
        sending = tasks.start(sender.send(update(9000), [pattern(nbytes)]))
        for version, payload in [*taken, (9000, pattern(nbytes))]:
            await arrives(receiver.recv(), f"recv() of update {version}", version, payload)
        await within(sending, "send() after send_nowait() returned False")
        await deliver(sender, receiver, 9001, b"last")


@check()
async def check_oversize_header_refused(bench: Bench) -> None:
    """A header over the limit is LocalProtocolError at the sender and leaves the link intact."""
    message = Update(epoch=EPOCH, version=1, digest=bytes(16), values={"blob": bytes(17 * MIB)})
    async with bench.pair() as (sender, receiver):
        await expect(LocalProtocolError, sender.send(message), "send() of a 17 MiB header")
        with suppress(LocalProtocolError):
            require(not sender.send_nowait(message), "send_nowait() took a 17 MiB header")
        await deliver(sender, receiver, 2, b"after")


CHECKS = (
    check_backpressure,
    check_backpressure_small_messages,
    check_clogged_direction_is_alone,
    check_checkpoints,
    check_recv_timeout,
    check_recv_timeout_loses_nothing,
    check_recv_poll,
    check_send_timeout,
    check_send_poll,
    check_send_nowait,
    check_oversize_header_refused,
)
