"""Conformance checks: who may use a link when, how it ends, and what each side then sees.

This module must never import pytest or torch.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from aiosync.errors import (
    AiosyncError,
    PeerClosed,
    TransportBroken,
    TransportBusy,
    TransportClosed,
)
from aiosync.testing._registry import Bench, check
from aiosync.testing._tools import (
    EPOCH,
    KIB,
    MIB,
    Tasks,
    arrives,
    broken_or_closed,
    clog,
    deliver,
    drain,
    drain_until_error,
    expect,
    is_blocked,
    lend_after,
    pattern,
    require,
    settle,
    stays_broken,
    text_of,
    update,
    verify,
    within,
)
from aiosync.testing.cancellation import CancelOutcome, cancel_at_every_await
from aiosync.testing.leaks import assert_no_leaks
from aiosync.types import AckStatus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from aiosync.transports.base import Transport

__all__ = ["CHECKS"]


@check()
async def check_second_recv_is_busy(bench: Bench) -> None:
    """A second recv() raises TransportBusy; the first one goes on."""
    async with bench.pair() as (sender, receiver), Tasks() as tasks:
        first = tasks.start(receiver.recv())
        await is_blocked(first)
        await expect(TransportBusy, receiver.recv(), "a second recv()")
        await expect(TransportBusy, receiver.recv(timeout=0), "a second recv(timeout=0)")
        await within(sender.send(update(1), [b"for the first"]), "send()")
        await arrives(first, "the first recv()", 1, b"for the first")
        await deliver(sender, receiver, 2)


@check()
async def check_second_send_is_busy(bench: Bench) -> None:
    """A second send(), ack() or send_nowait() raises TransportBusy; the first one goes on."""
    async with bench.pair() as (sender, receiver), Tasks() as tasks:
        last, first = await clog(tasks, sender)
        await expect(TransportBusy, sender.send(update(99)), "a second send()")
        await expect(TransportBusy, sender.ack(EPOCH, 99, AckStatus.APPLIED), "ack() meanwhile")
        try:
            taken = sender.send_nowait(update(99))
        except TransportBusy:
            taken = False
        require(not taken, "send_nowait() took a message while send() is running")
        await drain(receiver, 1, last)
        await within(first, "the first send()")
        await deliver(sender, receiver, last + 1)


async def _all_closed(transport: Transport, after: str) -> None:
    await expect(TransportClosed, transport.recv(), f"recv() after {after}")
    await expect(TransportClosed, transport.recv(timeout=0), f"recv(timeout=0) after {after}")
    await expect(TransportClosed, transport.send(update(1)), f"send() after {after}")
    await expect(
        TransportClosed,
        transport.send(update(1), [b"payload"]),
        f"send() of a payload after {after}",
    )
    await expect(
        TransportClosed, transport.ack(EPOCH, 1, AckStatus.APPLIED), f"ack() after {after}"
    )
    try:
        taken = transport.send_nowait(update(1))
    except TransportClosed:
        taken = False
    require(not taken, f"send_nowait() took a message after {after}")


@check()
async def check_use_after_aclose(bench: Bench) -> None:
    """Every operation after aclose() raises TransportClosed, on both ends."""
    async with bench.pair() as (sender, receiver):
        for transport in (sender, receiver):
            await within(transport.aclose(), "aclose()")
            await _all_closed(transport, "aclose()")


@check()
async def check_use_after_abort(bench: Bench) -> None:
    """abort() is synchronous and idempotent; every operation after it raises TransportClosed."""
    async with bench.pair() as (sender, receiver):
        for transport in (sender, receiver):
            transport.abort()
            transport.abort()
            await _all_closed(transport, "abort()")
            await within(transport.aclose(), "aclose() after abort()")
            transport.abort()


@check()
async def check_aclose_is_idempotent(bench: Bench) -> None:
    """aclose() twice, and twice at the same time, is harmless."""
    async with bench.pair() as (sender, receiver):
        await within(sender.aclose(), "aclose()")
        await within(sender.aclose(), "aclose() again")
        await within(asyncio.gather(receiver.aclose(), receiver.aclose()), "two aclose() at once")
        receiver.abort()


@check()
async def check_context_manager_closes(bench: Bench) -> None:
    """``async with transport`` closes it, and hands out the transport itself."""
    async with bench.pair() as (sender, _):
        async with sender as entered:
            require(entered is sender, "__aenter__() returned something else")
        await expect(TransportClosed, sender.send(update(1)), "send() after the context")


@check()
async def check_close_wakes_recv(bench: Bench) -> None:
    """aclose() and abort() wake a blocked recv() with TransportClosed."""
    for how in ("aclose", "abort"):
        async with bench.pair() as (_, receiver), Tasks() as tasks:
            waiting = tasks.start(receiver.recv())
            await is_blocked(waiting)
            await _end(receiver, how)
            await expect(TransportClosed, waiting, f"a blocked recv() after {how}()")


@check()
async def check_close_wakes_send(bench: Bench) -> None:
    """aclose() and abort() wake a blocked send() with TransportClosed, without delay."""
    for how in ("aclose", "abort"):
        async with bench.pair() as (sender, receiver), Tasks() as tasks:
            _, blocked = await clog(tasks, sender)
            await _end(sender, how)
            await expect(TransportClosed, blocked, f"a blocked send() after {how}()")
            error = await drain_until_error(receiver)
            require(
                isinstance(error, (TransportBroken, PeerClosed)),
                f"the peer of a cut send() expected TransportBroken, got {text_of(error)}",
            )


async def _end(transport: Transport, how: str) -> None:
    if how == "abort":
        transport.abort()
    else:
        await within(transport.aclose(), "aclose()")


@check()
async def check_aclose_closes_when_cancelled(bench: Bench) -> None:
    """Cancelling aclose() at any point still leaves the link closed."""
    ends: list[tuple[Transport, Transport]] = []

    @asynccontextmanager
    async def link() -> AsyncGenerator[None, None]:
        async with bench.pair() as pair:
            ends.append(pair)
            yield

    async def look(outcome: CancelOutcome[None]) -> None:
        require(
            outcome.finished or outcome.cancelled,
            f"aclose() cancelled at await {outcome.point} raised {outcome.error!r}",
        )
        closed, peer = ends[-1]
        await expect(TransportClosed, closed.recv(), "recv() after a cancelled aclose()")
        await expect(
            (PeerClosed, TransportBroken),
            peer.recv(),
            "the peer's recv() after a cancelled aclose()",
        )

    await cancel_at_every_await(lambda: ends[-1][0].aclose(), look, around=link, may_not_wait=True)


@check()
async def check_peer_aclose_ends_recv(bench: Bench) -> None:
    """After the peer's aclose() recv() gives what was sent before, then PeerClosed every time."""
    for ends in ((0, 1), (1, 0)):
        async with bench.pair() as pair:
            sender, receiver = pair[ends[0]], pair[ends[1]]
            for version in (1, 2, 3):
                payload = pattern(100 * (version - 1), version)
                await within(sender.send(update(version), [payload]), "send()")
            await within(sender.aclose(), "aclose()")
            for version in (1, 2, 3):
                await arrives(
                    receiver.recv(),
                    "recv() of what came before aclose()",
                    version,
                    pattern(100 * (version - 1), version),
                )
            for what in ("recv()", "a second recv()"):
                await expect(PeerClosed, receiver.recv(), f"{what} after the peer's aclose()")
            await expect(PeerClosed, receiver.recv(timeout=0), "recv(timeout=0) after that")


@check()
async def check_peer_close_wakes_recv(bench: Bench) -> None:
    """A blocked recv() ends with PeerClosed when the peer closes or aborts between messages."""
    for how in ("aclose", "abort"):
        for ends in ((0, 1), (1, 0)):
            async with bench.pair() as pair, Tasks() as tasks:
                closing, waiting = pair[ends[0]], pair[ends[1]]
                receiving = tasks.start(waiting.recv())
                await is_blocked(receiving)
                await _end(closing, how)
                await expect(PeerClosed, receiving, f"a blocked recv() after the peer's {how}()")


@check()
async def check_peer_close_ends_send(bench: Bench) -> None:
    """After the peer closed send() raises PeerClosed or TransportBroken, in both directions."""
    for ends in ((0, 1), (1, 0)):
        async with bench.pair() as pair:
            closing, sending = pair[ends[0]], pair[ends[1]]
            await within(closing.aclose(), "aclose()")
            await settle()
            payload = pattern(64 * KIB)
            await broken_or_closed(
                partial(sending.send, update(1), [payload]), "send() after the peer's aclose()"
            )
            await broken_or_closed(
                partial(sending.ack, EPOCH, 1, AckStatus.APPLIED), "ack() after the peer's aclose()"
            )


@check()
async def check_peer_close_wakes_send(bench: Bench) -> None:
    """A blocked send() ends with PeerClosed or TransportBroken when the peer goes away."""
    for how in ("aclose", "abort"):
        async with bench.pair() as (sender, receiver), Tasks() as tasks:
            _, blocked = await clog(tasks, sender)
            await _end(receiver, how)
            await expect(
                (PeerClosed, TransportBroken), blocked, f"a blocked send() after the peer's {how}()"
            )
            await expect(
                (PeerClosed, TransportBroken), sender.send(update(99)), "send() after that"
            )


@check()
async def check_peer_close_with_unread_messages(bench: Bench) -> None:
    """A peer that closes without having read everything still closed between messages."""
    async with bench.pair() as (sender, receiver):
        await within(sender.send(update(1), [b"never read"]), "send()")
        await within(receiver.ack(EPOCH, 1, AckStatus.RECEIVED), "ack()")
        await within(receiver.aclose(), "aclose() with an unread message")
        received = await within(sender.recv(), "recv() of what came before aclose()")
        require(
            getattr(received.message, "status", None) is AckStatus.RECEIVED,
            f"expected the ack, got {received.message!r:.200}",
        )
        await expect(PeerClosed, sender.recv(), "recv() after the peer's aclose()")


@check("cut")
async def check_cut_between_messages(bench: Bench) -> None:
    """A link cut between messages ends both directions with PeerClosed or TransportBroken."""
    async with bench.pair() as (sender, receiver), Tasks() as tasks:
        await deliver(sender, receiver, 1, b"before")
        waiting = tasks.start(receiver.recv())
        await is_blocked(waiting)
        bench.cut(sender)
        await expect((PeerClosed, TransportBroken), waiting, "a blocked recv() on a cut link")
        await broken_or_closed(lambda: receiver.send(update(2)), "send() on a cut link")
        await within(receiver.aclose(), "aclose() on a cut link")


@check("cut")
async def check_cut_mid_message(bench: Bench) -> None:
    """A link cut in the middle of a payload is TransportBroken, and stays so."""
    async with bench.pair() as (sender, receiver), Tasks() as tasks:
        tasks.start(sender.send(update(1), [pattern(16 * MIB)]))
        try:
            received = await within(
                receiver.recv(into=lend_after(partial(bench.cut, sender))), "recv() on a cut link"
            )
        except TransportBroken:
            await stays_broken(receiver, "a cut in mid-message")
        except AiosyncError as exc:
            require(False, f"recv() on a cut link expected TransportBroken, got {text_of(exc)}")
        else:  # the whole of it was there before the cut
            verify(received, 1, pattern(16 * MIB))
            received.release()
            await expect((PeerClosed, TransportBroken), receiver.recv(), "recv() after the cut")


@check()
async def check_repr(bench: Bench) -> None:
    """repr() works in every state, says something, and never shows a payload."""
    secret = b"TOP-SECRET-WEIGHTS"
    shown: list[str] = []

    def look(*things: object) -> None:
        shown.extend(map(repr, things))

    async with bench.pair() as (sender, receiver), Tasks() as tasks:
        look(sender, receiver)
        await within(sender.send(update(1), [secret * 100]), "send()")
        look(sender, receiver)
        received = await within(receiver.recv(), "recv()")
        look(received, receiver)
        received.release()
        tasks.start(sender.send(update(2), [secret * 500_000]))
        await settle()
        look(sender, receiver)
        await within(receiver.aclose(), "aclose()")
        look(receiver)
        sender.abort()
        look(sender)
    require(all(shown), "repr() is empty")
    require(
        not any("TOP-SECRET" in text or secret.hex() in text for text in shown),
        "repr() shows payload bytes",
    )
    require(all(len(text) < 2000 for text in shown), "repr() is longer than 2000 characters")


@check()
async def check_leaves_nothing(bench: Bench) -> None:
    """Traffic, an unread message and a break leave no task, fd, thread, process or memory."""
    async with assert_no_leaks(grace=0.5):
        async with bench.pair() as (sender, receiver):
            for version in (1, 2, 3):
                await deliver(sender, receiver, version, pattern(MIB, version))
                await within(receiver.ack(EPOCH, version, AckStatus.APPLIED), "ack()")
            await within(sender.send(update(4), [b"unread"]), "send()")
        async with bench.pair() as (sender, receiver), Tasks() as tasks:
            _, blocked = await clog(tasks, sender)
            blocked.cancel()
            await asyncio.wait({blocked})
        del sender, receiver, blocked, tasks


CHECKS = (
    check_second_recv_is_busy,
    check_second_send_is_busy,
    check_use_after_aclose,
    check_use_after_abort,
    check_aclose_is_idempotent,
    check_context_manager_closes,
    check_close_wakes_recv,
    check_close_wakes_send,
    check_aclose_closes_when_cancelled,
    check_peer_aclose_ends_recv,
    check_peer_close_wakes_recv,
    check_peer_close_ends_send,
    check_peer_close_wakes_send,
    check_peer_close_with_unread_messages,
    check_cut_between_messages,
    check_cut_mid_message,
    check_repr,
    check_leaves_nothing,
)
