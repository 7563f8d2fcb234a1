"""Conformance checks: who may use a link when, how it and its operations end, and what is then.

Operations end by closing either side, by a cut, and by cancellation. This module must never import
pytest or torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import product
from types import NoneType
from typing import Any, TypeAlias

from aiosync.errors import (
    AiosyncError,
    PeerClosed,
    TransportBroken,
    TransportBusy,
    TransportClosed,
)
from aiosync.testing._tools import (
    ENDED,
    EPOCH,
    KIB,
    MIB,
    Bench,
    Lending,
    Link,
    arrives,
    cancel,
    check,
    clog,
    deliver,
    drain,
    ends_soon,
    expect,
    gets,
    intact_or_cut,
    is_blocked,
    pattern,
    receive_all,
    require,
    send,
    send_all,
    settle,
    stays_broken,
    update,
    verify,
    within,
)
from aiosync.testing.cancellation import CancelOutcome, cancel_at_every_await
from aiosync.transports.base import Received, Transport
from aiosync.types import AckStatus, Cancellation
from aiosync.wire import Ack

# -- one at a time ---------------------------------------------------------------------------------


@check()
async def check_second_call_is_busy(bench: Bench) -> None:
    """A second recv(), send(), ack() or send_nowait() is TransportBusy; the first one goes on."""
    ack = Ack(EPOCH, 1, AckStatus.APPLIED)
    async with bench.link() as (sender, receiver, tasks):
        last, sending = await clog(tasks, sender)
        receiving = tasks.start(gets(sender, ack))
        await is_blocked(receiving)
        for what, operation in (
            ("send()", partial(send, sender, 99)),
            ("ack()", partial(sender.ack, EPOCH, 99, AckStatus.APPLIED)),
            ("recv()", sender.recv),
            ("recv(timeout=0)", partial(sender.recv, timeout=0)),
        ):
            await expect(TransportBusy, operation(), f"a second {what}")
        with suppress(TransportBusy):
            require(not sender.send_nowait(update(99)), "send_nowait() works during a send()")
        await within(receiver.send(ack), "send() of an ack")
        await within(receiving, "the first recv()")
        await drain(receiver, last)
        await within(sending, "the first send()")
        await deliver(sender, receiver, last + 1)


# -- closing ---------------------------------------------------------------------------------------


async def _abort(transport: Transport) -> None:
    transport.abort()


async def _leave(transport: Transport) -> None:
    async with transport as entered:
        require(entered is transport, "__aenter__() returned something else")


async def _close_twice(transport: Transport) -> None:
    await asyncio.gather(transport.aclose(), transport.aclose())


_Close: TypeAlias = Callable[[Transport], Coroutine[Any, Any, None]]
_CLOSES: Mapping[str, _Close] = {"aclose()": lambda end: end.aclose(), "abort()": _abort}
_MORE: Mapping[str, _Close] = {"the context": _leave, "two aclose() at once": _close_twice}


@check()
async def check_use_after_close(bench: Bench) -> None:
    """aclose(), abort() and leaving the context, again or at once: then all is TransportClosed."""
    for how, close in {**_CLOSES, **_MORE}.items():
        async with bench.link() as (sender, receiver, _):
            for end in (sender, receiver):
                await within(close(end), how)
                for what, operation in (
                    ("recv()", end.recv),
                    ("recv(timeout=0)", partial(end.recv, timeout=0)),
                    ("send()", partial(send, end, 1)),
                    ("send() of a payload", partial(send, end, 1, b"payload")),
                    ("ack()", partial(end.ack, EPOCH, 1, AckStatus.APPLIED)),
                ):
                    await expect(TransportClosed, operation(), f"{what} after {how}")
                with suppress(TransportClosed):
                    require(not end.send_nowait(update(1)), f"send_nowait() works after {how}")
                await within(end.aclose(), f"aclose() after {how}")
                end.abort()


async def _wakes(
    bench: Bench,
    kinds: type[AiosyncError] | tuple[type[AiosyncError], ...],
    *,
    sending: bool = False,
    own: bool = False,
    closes: Mapping[str, _Close] = _CLOSES,
) -> None:
    """Check how a blocked operation ends when one of the sides ends, and what comes after it."""
    for how, close in closes.items():
        for flipped in (False, True):
            async with bench.link(flipped=flipped) as (mine, peer, tasks):
                await deliver(peer, mine, 1, b"before")
                blocked = (await clog(tasks, mine))[1] if sending else tasks.start(mine.recv())
                require(await is_blocked(blocked), f"{blocked} is not blocked")
                await within(close(mine if own else peer), how)
                what = f"a blocked {'send' if sending else 'recv'}() after {how}"
                await expect(kinds, blocked, what)
                if own:
                    await expect(ENDED, drain(peer), f"the peer of {what}")
                else:
                    await ends_soon(partial(send, mine, 99), f"send() after {what}")
                    await within(mine.aclose(), f"aclose() after {what}")


@check()
async def check_close_wakes_recv(bench: Bench) -> None:
    """aclose() and abort() wake a blocked recv() with TransportClosed."""
    await _wakes(bench, TransportClosed, own=True)


@check()
async def check_close_wakes_send(bench: Bench) -> None:
    """aclose() and abort() wake a blocked send() with TransportClosed, without delay."""
    await _wakes(bench, TransportClosed, sending=True, own=True)


@check()
async def check_peer_close_wakes_recv(bench: Bench) -> None:
    """A blocked recv() ends with PeerClosed when the peer closes or aborts between messages."""
    await _wakes(bench, PeerClosed)


@check()
async def check_peer_close_wakes_send(bench: Bench) -> None:
    """A blocked send() ends with PeerClosed or TransportBroken when the peer goes away."""
    await _wakes(bench, ENDED, sending=True)


@check("cut")
async def check_cut_between_messages(bench: Bench) -> None:
    """A link cut between messages ends both directions with PeerClosed or TransportBroken."""

    async def cut(end: Transport) -> None:
        bench.cut(end)

    await _wakes(bench, ENDED, closes={"a cut": cut})


@check()
async def check_peer_close_ends_both_ways(bench: Bench) -> None:
    """After aclose() of a peer recv() gives what it sent, then PeerClosed; send() fails, too."""
    payloads = [pattern(100 * version, version) for version in range(3)]
    for flipped, reads in product((False, True), (False, True)):
        async with bench.link(flipped=flipped) as (peer, mine, _):
            await within(send(mine, 1, b"never read"), "send()")
            await within(send_all(peer, payloads), "send() by the peer")
            await within(peer.aclose(), "aclose() with an unread message")
            if reads:
                await receive_all(mine, payloads)
                for timeout in (None, None, 0):
                    await expect(PeerClosed, mine.recv(timeout=timeout), "recv() at the end")
            await ends_soon(partial(send, mine, 2, pattern(64 * KIB)), "send() to a closed peer")
            await ends_soon(partial(mine.ack, EPOCH, 1, AckStatus.APPLIED), "ack() after that")


@check("cut")
async def check_cut_mid_message(bench: Bench) -> None:
    """A link cut in the middle of a payload is TransportBroken, and stays so."""
    payload = pattern(16 * MIB)
    async with bench.link() as (sender, receiver, tasks):
        tasks.start(send(sender, 1, payload))
        try:
            await arrives(receiver.recv(into=Lending(first=partial(bench.cut, sender))), 1, payload)
        except TransportBroken:
            await stays_broken(receiver, "a cut in mid-message")
        else:  # the whole of it was there before the cut
            await expect(ENDED, receiver.recv(), "recv() after the cut")


@check()
async def check_repr(bench: Bench) -> None:
    """repr() says something while a payload is under way and after the end, but not the payload."""
    secret = b"TOP-SECRET-WEIGHTS"
    async with bench.link() as (sender, receiver, tasks):
        await is_blocked(tasks.start(send(sender, 1, secret * 500_000)))
        shown = [repr(sender), repr(receiver)]
        for end in (receiver, sender):
            await within(end.aclose(), "aclose()")
            shown += [repr(sender), repr(receiver)]
    require(all(0 < len(text) < 2000 for text in shown), "repr() is empty or very long")
    require(
        not any("TOP-SECRET" in text or secret.hex() in text for text in shown),
        "repr() shows payload bytes",
    )


# -- cancellation ----------------------------------------------------------------------------------


def _may_break(declared: Cancellation, what: str) -> None:
    require(declared is not Cancellation.SAFE, f"{what} broke the link, but is declared SAFE")


async def _cancel_everywhere(
    bench: Bench,
    operation: Callable[[Link], Coroutine[Any, Any, Any]],
    look: Callable[[CancelOutcome[Any], Link, asyncio.Future[Any]], Awaitable[None]],
    *,
    beside: Callable[[Link], Coroutine[Any, Any, Any]] = lambda _: asyncio.sleep(0),
    ahead: int = 0,
) -> None:
    """Cancel an operation at each of its await points, each time on a new link.

    ``beside`` runs in the background and gets ``ahead`` turns of the loop before; ``look`` looks
    at the outcome, the link, and that task.
    """
    now: list[tuple[Link, asyncio.Future[Any]]] = []

    @asynccontextmanager
    async def around() -> AsyncGenerator[None, None]:
        async with bench.link() as link:
            now[:] = [(link, link[2].start(beside(link)))]
            await settle(ahead)
            yield

    async def check_and_look(outcome: CancelOutcome[Any]) -> None:
        require(outcome.finished or outcome.cancelled, f"a cancellation became {outcome.error!r}")
        await look(outcome, *now[0])

    await cancel_at_every_await(
        lambda: operation(now[0][0]),
        check_and_look,
        around=around,
        max_points=30,
        may_not_wait=True,
    )


@check()
async def check_aclose_closes_when_cancelled(bench: Bench) -> None:
    """Cancelling aclose() at any point still leaves the link closed."""

    async def look(_: CancelOutcome[None], link: Link, __: object) -> None:
        await expect(TransportClosed, link[0].recv(), "recv() after a cancelled aclose()")
        await expect(ENDED, link[1].recv(), "the peer's recv() after a cancelled aclose()")

    await _cancel_everywhere(bench, lambda link: link[0].aclose(), look)


async def _cancel_recv(bench: Bench, nbytes: int, *, ready: bool, lends: bool) -> None:
    payload = pattern(nbytes)
    lender = Lending()

    async def send_two(link: Link) -> None:
        lender.calls.clear()
        await settle(0 if ready else 3)
        await send_all(link[0], [payload, b""])

    async def look(
        outcome: CancelOutcome[Received], link: Link, sending: asyncio.Future[None]
    ) -> None:
        sender, receiver, _ = link
        what = f"recv() cancelled at await {outcome.point}, late={outcome.late}"
        try:
            if outcome.result is None:
                await arrives(receiver.recv(), 1, payload)
            else:
                verify(outcome.result, 1, payload)
                outcome.result.release()
        except TransportBroken:
            _may_break(receiver.capabilities.recv_cancellation, what)
            require(bool(lender.calls), f"{what} broke the link before it asked for memory")
            await asyncio.wait({sending}, timeout=5.0)
            await ends_soon(partial(send, sender, 3), f"the peer of {what}")
            await stays_broken(receiver, what)
        else:
            await arrives(receiver.recv(), 2)
            await within(sending, f"the sender after {what}")

    await _cancel_everywhere(
        bench,
        lambda link: link[1].recv(into=lender if lends else None),
        look,
        beside=send_two,
        ahead=10 if ready else 0,
    )


@check()
async def check_cancel_recv_loses_nothing(bench: Bench) -> None:
    """A recv() that is cancelled as a message arrives, or while one is ready, does not lose it."""
    for nbytes, ready in product((0, 100), (True, False)):
        await _cancel_recv(bench, nbytes, ready=ready, lends=False)


@check()
async def check_cancel_recv_mid_payload(bench: Bench) -> None:
    """recv() cancelled at any await of a large payload is as declared; a break reaches the peer."""
    await _cancel_recv(bench, 3 * MIB + 5, ready=False, lends=True)
    await _cancel_recv(bench, 200 * KIB, ready=True, lends=True)


@check()
async def check_cancel_blocked_send(bench: Bench) -> None:
    """Cancelling a blocked send() is as declared and tears nothing; a break reaches the peer."""
    async with bench.link() as link:
        sender, _, tasks = link
        version, blocked = await clog(tasks, sender)
        await cancel(blocked, "a blocked send()")
        if not await intact_or_cut(link, version, "a cancelled send()"):
            _may_break(sender.capabilities.send_cancellation, "a cancelled send()")


async def _cancel_send(bench: Bench, payload: bytes) -> None:
    async def collect(link: Link) -> tuple[tuple[int, ...], AiosyncError | None]:
        """Versions that come until the second one or the end of the link, and the error."""
        versions: tuple[int, ...] = ()
        try:
            while 2 not in versions:
                received = await link[1].recv()
                versions += (getattr(received.message, "version", 0),)
                verify(received, versions[-1], payload if versions[-1] == 1 else b"")
                received.release()
        except AiosyncError as exc:
            return versions, exc
        return versions, None

    async def look(
        outcome: CancelOutcome[None], link: Link, collecting: asyncio.Future[Any]
    ) -> None:
        sender = link[0]
        what = f"send() cancelled at await {outcome.point}, late={outcome.late}"
        wanted = [(1, 2)] if outcome.finished else [(1, 2), (2,)]
        allowed: dict[tuple[int, ...], type] = dict.fromkeys(wanted, NoneType)
        try:
            await within(send(sender, 2), f"send() after {what}")
        except TransportBroken:
            _may_break(sender.capabilities.send_cancellation, what)
            require(not outcome.finished and payload != b"", f"{what} broke the link")
            await stays_broken(sender, what)
            # All bytes may have been written before the cancellation came.
            allowed = {(): TransportBroken, (1,): PeerClosed}
        versions, error = await within(collecting, f"the receiver after {what}")
        require(
            isinstance(error, allowed.get(versions, ())),
            f"after {what} the receiver got updates {versions}, then {error!r}",
        )

    await _cancel_everywhere(bench, lambda link: send(link[0], 1, payload), look, beside=collect)


@check()
async def check_cancel_send(bench: Bench) -> None:
    """send() cancelled at any await sends all or nothing, or, with a payload, breaks the link."""
    for nbytes in (0, 100, 6 * MIB):
        await _cancel_send(bench, pattern(nbytes))
