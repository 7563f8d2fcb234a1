"""Conformance checks: the ways that do not wait keep the promises of those that do.

This module must never import pytest or torch.
"""

from __future__ import annotations

import asyncio
import contextlib

from aiosync.errors import AiosyncError
from aiosync.testing._registry import Bench, check
from aiosync.testing._tools import EPOCH, Tasks, require, within
from aiosync.transports.base import Received, Transport
from aiosync.types import AckStatus
from aiosync.wire import Ack, Message

__all__ = ["CHECKS"]

_COMPLETE_SECONDS = 5.0
_SETTLE_SECONDS = 0.05


async def _gets(transport: Transport, expected: list[Message], what: str) -> None:
    """Check that these messages come, and nothing between or before them."""
    for message in expected:
        received = (await within(transport.recv(), f"recv() of {what}")).message
        require(received == message, f"{what}: sent {message!r:.200}, got {received!r:.200}")


@check()
async def check_batch_nowait(bench: Bench) -> None:
    """A batch that the link took arrives whole and in order; of a refused one nothing does."""
    batch: list[Message] = [Ack(EPOCH, version, AckStatus.RECEIVED) for version in (1, 2, 3)]
    last = Ack(EPOCH, 4, AckStatus.APPLIED)
    async with bench.pair() as (sender, receiver):
        taken = receiver.send_batch_nowait(batch)
        await within(receiver.send(last), "send() after send_batch_nowait()")
        await _gets(sender, [*batch, last] if taken else [last], "send_batch_nowait()")


@check()
async def check_ack_nowait(bench: Bench) -> None:
    """An acknowledgement that was taken without waiting arrives as it is, a refused one not."""
    async with bench.pair() as (sender, receiver):
        for version, status in enumerate(AckStatus, 1):
            ack = Ack(EPOCH, version, status)
            last = Ack(EPOCH, version + 100, AckStatus.RECEIVED)
            taken = receiver.ack_nowait(EPOCH, version, status)
            await within(receiver.send(last), "send() after ack_nowait()")
            await _gets(sender, [ack, last] if taken else [last], f"ack_nowait({status.name})")


@check()
async def check_subscribe(bench: Bench) -> None:
    """With a handler every message comes once and in order, to it or out of recv()."""
    messages: list[Message] = [Ack(EPOCH, version, AckStatus.RECEIVED) for version in range(1, 21)]
    seen: list[Message] = []
    complete = asyncio.Event()

    def note(message: Message) -> None:
        seen.append(message)
        if len(seen) >= len(messages):
            complete.set()

    async with bench.pair() as (sender, receiver), Tasks() as tasks:

        def handle(received: Received) -> None:
            note(received.message)
            received.release()

        async def pull() -> None:
            while True:
                note((await sender.recv()).message)

        sender.subscribe(handle)
        pulling = tasks.start(pull())
        for message in messages:
            await within(receiver.send(message), "send() to a side with a handler")
        with contextlib.suppress(TimeoutError):  # what came so far says more
            async with asyncio.timeout(_COMPLETE_SECONDS):
                await complete.wait()
        await asyncio.sleep(_SETTLE_SECONDS)  # for one that comes twice
        if pulling.done():
            error = pulling.exception()
            require(isinstance(error, AiosyncError), f"recv() ended with {error!r}")
        versions = [message.version for message in seen if isinstance(message, Ack)]
        require(seen == messages, f"sent the acks 1 to {len(messages)}, got {versions}")


CHECKS = (check_batch_nowait, check_ack_nowait, check_subscribe)
