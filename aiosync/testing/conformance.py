"""The published conformance suite: the duties of every transport, as a list of checks.

The suite works with any test-runner. With pytest, parametrize a test over
:data:`CONFORMANCE_CHECKS`, skip a check for which ``check.skip_reason(hooks, capabilities)`` has a
reason, and await ``check.run(factory, hooks=hooks)`` of the others; without a runner, await
:func:`check_transport`, which does the same. The checks open real links, use no mocks, and wait
for conditions rather than for time. The docstring of a check is the statement that it tests.

This module must never import pytest or torch. The contract is
:class:`aiosync.transports.base.Transport`; see ``docs/topics/transports.md``.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import pairwise, product
from types import NoneType
from typing import Any, TypeAlias

from aiosync.errors import (
    AiosyncError,
    FrameTooLarge,
    LocalProtocolError,
    ManifestMismatch,
    PeerClosed,
    ProtocolError,
    RecvTimeout,
    RemoteProtocolError,
    SendTimeout,
    TransportBroken,
    TransportBusy,
    TransportClosed,
)
from aiosync.testing._tools import (
    CLOG_NBYTES,
    ENDED,
    EPOCH,
    KIB,
    MIB,
    Bench,
    Check,
    ConformanceError,
    ConformanceReport,
    Hooks,
    Lending,
    Link,
    Tasks,
    TransportFactory,
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
    keep_trying,
    link_check,
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
from aiosync.transports.base import Received, Transport, make_ack
from aiosync.types import AckStatus, Cancellation, Capabilities, Limits
from aiosync.wire import Ack, Message, Update

__all__ = [
    "CONFORMANCE_CHECKS",
    "Check",
    "ConformanceError",
    "ConformanceReport",
    "Hooks",
    "TransportFactory",
    "check_transport",
]

# -- payloads --------------------------------------------------------------------------------------


@link_check
async def check_payloads(sender: Transport, receiver: Transport, _: Tasks) -> None:
    """Messages without payload, of one byte, and of many buffers of any type arrive, both ways."""
    data = pattern(8 * MIB + 13)
    table = memoryview(data[:4096]).cast("B", shape=[32, 128])
    floats = memoryview(data[:4096]).cast("f")
    payloads: list[list[Any]] = [[], [b""], [b"\x00"], [b"\xff"], [data]]
    few = [data[:1], b"", bytearray(data[1:70_000]), memoryview(data)[70_007:], b"", table, floats]
    payloads += [few, [data[at : at + 3] for at in range(0, 6000, 3)]]
    for version, payload in enumerate(payloads, 1):
        await deliver(sender, receiver, version, *payload)
        await deliver(receiver, sender, version, *payload)


@link_check
async def check_full_duplex(left: Transport, right: Transport, tasks: Tasks) -> None:
    """200 messages and two of 8 MiB arrive once each, in order, in both directions at once."""
    payloads = [pattern(version * 37 if version % 3 else 0, version) for version in range(200)]
    payloads += [pattern(8 * MIB, seed) for seed in (1, 2)]
    running = [
        tasks.start(move(end, payloads))
        for move in (send_all, receive_all)
        for end in (left, right)
    ]
    await within(asyncio.gather(*running), "four transfers at once")


@link_check
async def check_messages_intact(sender: Transport, receiver: Transport, _: Tasks) -> None:
    """Messages and acks arrive with all their fields; only a NACK's long error text is clipped."""
    message = Update(
        epoch=2**63 - 1,
        version=2**40,
        digest=bytes(range(16)),
        values={"steps": 7, "name": "π", "nested": {"rate": 0.5, "flags": [True, None, b"\0"]}},
        chunk=(1, 3),
        checksum=bytes(range(16)),
    )
    acks: list[tuple[AckStatus, BaseException | None]] = [
        (AckStatus.RECEIVED, None),
        (AckStatus.APPLIED, None),
        (AckStatus.NACK, KeyError("λ.weight")),
        (AckStatus.SKIPPED, None),
        (AckStatus.NACK, ValueError("é" * 200_000)),
    ]
    await within(sender.send(message), "send()")
    await gets(receiver, message)
    for status, error in acks:
        await within(receiver.ack(EPOCH, 1, status, error=error), f"ack({status.name})")
    await gets(sender, *(make_ack(EPOCH, 1, status, error) for status, error in acks[:-1]))
    clipped = (await within(sender.recv(), "recv() of the NACK with a long text")).message
    require(
        isinstance(clipped, Ack)
        and (clipped.status, clipped.error_type) == (AckStatus.NACK, "ValueError")
        and clipped.error_text.startswith("é" * 100),
        f"expected a NACK with its error's type and text, got {clipped!r:.200}",
    )


# -- memory ----------------------------------------------------------------------------------------


@link_check
async def check_lent_buffers(sender: Transport, receiver: Transport, _: Tasks) -> None:
    """The lender is called once, with message and size; the payload lands in the lent memory."""
    payload = pattern(300 * KIB)
    for version, cuts in enumerate(((0,), (1,), (5, 100_000), (5, 5, 299 * KIB)), 1):
        edges = pairwise([0, *cuts, len(payload)])
        lent = [bytearray(after - before) for before, after in edges]
        lender = Lending(*lent)
        received = await deliver(
            sender, receiver, version, payload[:999], payload[999:], into=lender
        )
        calls = [(update(version), len(payload))]
        require(lender.calls == calls, f"expected {calls} of the lender, got {lender.calls}")
        require(b"".join(lent) == payload, "the payload did not land in what was lent")
        lent[-1][-1] ^= 0xFF
        require(
            b"".join(received.payload) == b"".join(lent),
            "Received.payload is not the memory that was lent",
        )


@check()
async def check_lender_refuses(bench: Bench) -> None:
    """An AiosyncError of the lender, or a wrong size, reaches the caller and breaks the link."""
    refusal = ManifestMismatch(missing=("layer.weight",))

    def refuse() -> None:
        raise refusal

    for lender in (Lending(bytearray(MIB - 1)), Lending(bytearray(MIB + 1)), Lending(first=refuse)):
        async with bench.link() as (sender, receiver, tasks):
            tasks.start(send(sender, 1, pattern(MIB)))
            error = await expect(AiosyncError, receiver.recv(into=lender), "recv() that must fail")
            await stays_broken(receiver, "a lender that refused")
    causes = (error, error.__cause__, error.__context__)
    require(refusal in causes, f"the lender's error is lost: {error!r} without it as the cause")


@link_check
async def check_payload_stays(sender: Transport, receiver: Transport, _: Tasks) -> None:
    """Without a lender a payload stays unchanged after the next recv() and after aclose()."""
    first, second = pattern(64 * KIB, 1), pattern(64 * KIB, 2)
    await within(send(sender, 1, first), "send() of the first")
    kept = await arrives(receiver.recv(), 1, first)
    await within(send(sender, 2, second), "send() of the second")
    later = await arrives(receiver.recv(), 2, second)
    await within(receiver.aclose(), "aclose() with a payload in use")
    verify(kept, 1, first)
    verify(later, 2, second)


@check()
async def check_buffers_given_back(bench: Bench) -> None:
    """The buffers given to send() and recv() are the caller's to change once the calls returned."""

    async def send_and_clear(sender: Transport, buffer: bytearray) -> None:
        await send(sender, 1, buffer)
        buffer[:] = bytes(len(buffer))

    for nbytes, lends in product((100, 64 * KIB, 8 * MIB), (False, True)):
        async with bench.link() as (sender, receiver, tasks):
            sent, lent = bytearray(pattern(nbytes)), bytearray(nbytes)
            sending = tasks.start(send_and_clear(sender, sent))
            await is_blocked(sending, 0.01)  # send() may return before the receiver reads
            await arrives(receiver.recv(into=Lending(lent) if lends else None), 1, pattern(nbytes))
            await within(sending, "send()")
            gc.collect(1)  # reference cycles of the young generations may hold the buffers
            sent.append(0)  # a BufferError here means that a view of the memory is still alive
            lent.append(0)


# -- backpressure and deadlines --------------------------------------------------------------------


@check()
async def check_backpressure(bench: Bench) -> None:
    """send() waits for a peer that does not read, until it reads; the other direction works."""
    for nbytes in (CLOG_NBYTES, 64 * KIB):
        async with bench.link() as (sender, receiver, tasks):
            last, blocked = await clog(tasks, sender, nbytes=nbytes)
            ack = Ack(EPOCH, 1, AckStatus.RECEIVED)
            await within(receiver.send(ack), "send() against the stream")
            await gets(sender, ack)
            await drain(receiver, last, nbytes=nbytes)
            await within(blocked, "a blocked send() after the peer has read everything")
            await deliver(sender, receiver, last + 1, b"after")


@link_check
async def check_checkpoints(sender: Transport, receiver: Transport, _: Tasks) -> None:
    """send(), recv() and ack() let other tasks run at least once, even if they need not wait."""
    for version in range(1, 4):
        payload = [pattern(64)] if version == 2 else []
        for what, operation in (
            ("send() on a free link", partial(send, sender, version, *payload)),
            ("recv() of a ready message", receiver.recv),
            ("ack()", partial(receiver.ack, EPOCH, version, AckStatus.APPLIED)),
            ("recv(timeout=0) of a ready ack", partial(sender.recv, timeout=0)),
        ):
            ran: list[bool] = []
            asyncio.get_running_loop().call_soon(ran.append, True)
            await operation()
            require(bool(ran), f"{what} did not let the loop run: it is no checkpoint")
            await settle()


@link_check
async def check_recv_timeout(sender: Transport, receiver: Transport, _: Tasks) -> None:
    """recv(timeout=0) takes a ready message; RecvTimeout leaves the link intact."""
    for version in (1, 2, 3):
        for timeout in (0.02, 0):
            receiving = receiver.recv(timeout=timeout)
            await expect(RecvTimeout, receiving, f"recv({timeout=}) on a silent link")
        payload = pattern(100 * (version - 1))
        await within(send(sender, version, payload), "send()")
        await settle()
        await arrives(receiver.recv(timeout=0), version, payload)


@link_check
async def check_recv_timeout_loses_nothing(
    sender: Transport, receiver: Transport, tasks: Tasks
) -> None:
    """Deadlines that race with messages neither lose nor repeat one."""
    payloads = [b"x" * version if version % 2 else b"" for version in range(1, 41)]
    late = list[RecvTimeout]()
    # A transport may look for a message for 10 ms at least, so the pauses slowly pass this time.
    sending = tasks.start(send_all(sender, payloads, pause=0.0095, drift=0.00005))
    for version, payload in enumerate(payloads, 1):
        await arrives(keep_trying(receiver, 0.01, late), version, payload)
    await within(sending, "the sender")
    require(bool(late), "recv(timeout=0.01) waited longer than that for each message")


@check()
async def check_send_timeout(bench: Bench) -> None:
    """send(timeout=0) delivers on a free link; SendTimeout on a full link tears no message."""
    for timeout in (0.02, 0.0):
        async with bench.link() as link:
            sender, receiver, tasks = link
            for nbytes in (0, 100):
                await deliver(sender, receiver, 99, pattern(nbytes), timeout=timeout)
            version, late = await clog(tasks, sender, timeout=timeout)
            await expect(SendTimeout, late, f"send({timeout=}) on a full link")
            await intact_or_cut(link, version, "SendTimeout")


@link_check
async def check_oversize_header_refused(sender: Transport, receiver: Transport, _: Tasks) -> None:
    """A header over the limit is LocalProtocolError at the sender and leaves the link intact."""
    message = Update(epoch=EPOCH, version=1, digest=bytes(16), values={"blob": bytes(17 * MIB)})
    await expect(LocalProtocolError, sender.send(message), "send() of a 17 MiB header")
    with suppress(LocalProtocolError):
        require(not sender.send_nowait(message), "send_nowait() took a 17 MiB header")
    await deliver(sender, receiver, 2, b"after")


# -- calls that do not wait ------------------------------------------------------------------------


@link_check
async def check_send_nowait(sender: Transport, receiver: Transport, tasks: Tasks) -> None:
    """Messages that send_nowait() took arrive once and in order; refused ones leave no trace."""
    payloads = {version: pattern(64 * KIB, version) for version in range(1, 1025)}
    payloads |= dict.fromkeys(range(5001, 5004), b"")  # a full link may have room for these
    taken = [
        version
        for version, payload in payloads.items()
        if sender.send_nowait(update(version), [payload])
    ]
    require(len(taken) < 1024, f"send_nowait() took {len(taken)} messages unread")
    sending = tasks.start(send(sender, 9000, b"waited for"))
    for version in taken:
        await arrives(receiver.recv(), version, payloads[version])
    await arrives(receiver.recv(), 9000, b"waited for")
    await within(sending, "send() after send_nowait() returned False")
    await deliver(sender, receiver, 9001, b"last")


@link_check
async def check_batch_nowait(sender: Transport, receiver: Transport, _: Tasks) -> None:
    """A batch that the link took arrives whole and in order; a refused batch leaves no trace."""
    *batch, last = [Ack(EPOCH, version, AckStatus.RECEIVED) for version in (1, 2, 3, 4)]
    taken = receiver.send_batch_nowait(batch)
    await within(receiver.send(last), "send() after send_batch_nowait()")
    await gets(sender, *(batch if taken else []), last)


@link_check
async def check_subscribe(sender: Transport, receiver: Transport, tasks: Tasks) -> None:
    """With a handler every message comes once and in order, to the handler or out of recv()."""
    sent = [Ack(EPOCH, version, AckStatus.RECEIVED) for version in range(1, 21)]
    seen: list[Message] = []

    def handle(received: Received) -> None:
        seen.append(received.message)

    async def pull() -> None:
        while True:
            handle(await sender.recv())

    sender.subscribe(handle)
    pulling = tasks.start(pull())
    for ack in sent:
        await within(receiver.send(ack), "send() to a side with a handler")
    for _ in range(500):
        if len(seen) < len(sent):
            await asyncio.sleep(0.01)
    require(  # the wait makes sure that no message comes twice
        await is_blocked(pulling, 0.05) and seen == sent,
        f"sent {len(sent)} acks, got {seen}, {pulling}",
    )


# -- limits ----------------------------------------------------------------------------------------


@check("limited")
async def check_limits_of_sender(bench: Bench) -> None:
    """A payload over the sender's limit is LocalProtocolError; the link stays intact."""
    async with bench.link((Limits(max_payload_nbytes=1000), Limits())) as (sender, receiver, _):
        await expect(LocalProtocolError, send(sender, 1, pattern(1001)), "send() of 1001 bytes")
        with suppress(LocalProtocolError):
            taken = sender.send_nowait(update(1), [pattern(600), pattern(401)])
            require(not taken, "send_nowait() took 1001 bytes where 1000 are allowed")
        await deliver(sender, receiver, 2, pattern(1000))


@check("limited")
async def check_limits_of_receiver(bench: Bench) -> None:
    """A payload or header over the receiver's limit is FrameTooLarge; no lender is called."""
    header = Update(1, 1, bytes(16), values={"text": "x" * 5000})
    limits = Limits(max_payload_nbytes=1000, max_header_nbytes=4096)
    for message, nbytes in ((update(2), 1001), (update(2), 100 * KIB), (header, 0)):
        async with bench.link((Limits(), limits)) as (sender, receiver, tasks):
            await deliver(sender, receiver, 1, pattern(1000))
            tasks.start(sender.send(message, [pattern(nbytes)]))
            lender, what = Lending(), f"{message!r:.80} with {nbytes} bytes"
            await expect(FrameTooLarge, receiver.recv(into=lender), f"recv() of {what}")
            require(not lender.calls, f"a lender was asked for memory for {what}")
            await expect(RemoteProtocolError, receiver.recv(), f"recv() after {what}")
            broken = (RemoteProtocolError, TransportBroken)
            await expect(broken, send(receiver, 1), f"send() after {what}")
            await within(receiver.aclose(), f"aclose() after {what}")


@check("limited")
async def check_unlent_memory_is_bounded(bench: Bench) -> None:
    """recv() allocates no more than its limit; with lent buffers larger payloads pass."""
    payload = pattern(2000)
    limits = Limits(), Limits(max_buffer_nbytes=1000)
    async with bench.link(limits) as (sender, receiver, tasks):
        await deliver(sender, receiver, 1, payload, into=Lending())
        tasks.start(send(sender, 2, payload))
        if receiver.capabilities.zero_copy_recv:
            # The payload may pass: it lies in the sender's memory, so recv() allocates none.
            with suppress(ProtocolError):
                await arrives(receiver.recv(), 2, payload)
        else:
            await expect(ProtocolError, receiver.recv(), "recv() of 2000 bytes without a lender")


# -- one at a time ---------------------------------------------------------------------------------


@link_check
async def check_second_call_is_busy(sender: Transport, receiver: Transport, tasks: Tasks) -> None:
    """A second recv(), send(), ack() or send_nowait() is TransportBusy; the first call goes on."""
    ack = Ack(EPOCH, 1, AckStatus.APPLIED)
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
    """After aclose(), abort() or leaving the context, also twice, every call is TransportClosed."""
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
    """Check the error of a blocked operation when one side ends, and the operations after it.

    ``own`` ends the side with the blocked operation, and not its peer; ``sending`` blocks a send().
    """
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
async def check_close_wakes(bench: Bench) -> None:
    """aclose() and abort() wake a blocked recv() or send() with TransportClosed, without delay."""
    for sending in (False, True):
        await _wakes(bench, TransportClosed, sending=sending, own=True)


@check()
async def check_peer_close_wakes(bench: Bench) -> None:
    """When the peer ends, a blocked recv() is PeerClosed, send() is that or TransportBroken."""
    await _wakes(bench, PeerClosed)
    await _wakes(bench, ENDED, sending=True)


@check("cut")
async def check_cut_between_messages(bench: Bench) -> None:
    """A link cut between messages ends both directions with PeerClosed or TransportBroken."""

    async def cut(end: Transport) -> None:
        bench.cut(end)

    await _wakes(bench, ENDED, closes={"a cut": cut})


@check()
async def check_peer_close_ends_both_ways(bench: Bench) -> None:
    """After the peer's aclose(), recv() gives all it sent, then PeerClosed; send() fails, too."""
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
    """A link that is cut in the middle of a payload is TransportBroken, and stays so."""
    payload = pattern(16 * MIB)
    async with bench.link() as (sender, receiver, tasks):
        tasks.start(send(sender, 1, payload))
        try:
            await arrives(receiver.recv(into=Lending(first=partial(bench.cut, sender))), 1, payload)
        except TransportBroken:
            await stays_broken(receiver, "a cut in mid-message")
        else:  # the whole payload had arrived before the cut
            await expect(ENDED, receiver.recv(), "recv() after the cut")


@link_check
async def check_repr(sender: Transport, receiver: Transport, tasks: Tasks) -> None:
    """repr() works while a payload is under way and after the end, and never shows the payload."""
    await is_blocked(tasks.start(send(sender, 1, b"SECRET" * 10**6)))
    shown = [repr(sender), repr(receiver)]
    await within(sender.aclose(), "aclose()")
    shown += [repr(sender), repr(receiver)]
    require(all(0 < len(text) < 2000 for text in shown), "repr() is empty or very long")
    require("SECRET" not in "".join(shown), "repr() shows bytes of a payload")


# -- cancellation ----------------------------------------------------------------------------------


def _may_break(declared: Cancellation, what: str) -> None:
    require(declared is not Cancellation.SAFE, f"{what} broke the link, but is declared SAFE")


async def _cancel_everywhere(
    bench: Bench,
    operation: Callable[[Link], Coroutine[Any, Any, Any]],
    check_outcome: Callable[[CancelOutcome[Any], Link, asyncio.Future[Any]], Awaitable[None]],
    *,
    beside: Callable[[Link], Coroutine[Any, Any, Any]] = lambda _: asyncio.sleep(0),
    ahead: int = 0,
) -> None:
    """Cancel an operation at each of its await points, each time on a new link.

    ``beside`` runs in the background and gets ``ahead`` turns of the loop before the operation
    starts; ``check_outcome`` checks the outcome, the link, and the task of ``beside``.
    """
    now: list[tuple[Link, asyncio.Future[Any]]] = []

    @asynccontextmanager
    async def around() -> AsyncGenerator[None, None]:
        async with bench.link() as link:
            now[:] = [(link, link[2].start(beside(link)))]
            await settle(ahead)
            yield

    async def check_at_one_point(outcome: CancelOutcome[Any]) -> None:
        require(outcome.finished or outcome.cancelled, f"a cancellation became {outcome.error!r}")
        await check_outcome(outcome, *now[0])

    await cancel_at_every_await(
        lambda: operation(now[0][0]),
        check_at_one_point,
        around=around,
        max_points=30,
        may_not_wait=True,
    )


@check()
async def check_aclose_closes_when_cancelled(bench: Bench) -> None:
    """Cancelling aclose() at any point still leaves the link closed."""

    async def check_outcome(_: CancelOutcome[None], link: Link, __: object) -> None:
        await expect(TransportClosed, link[0].recv(), "recv() after a cancelled aclose()")
        await expect(ENDED, link[1].recv(), "the peer's recv() after a cancelled aclose()")

    await _cancel_everywhere(bench, lambda link: link[0].aclose(), check_outcome)


async def _cancel_recv(bench: Bench, nbytes: int, *, ready: bool, lends: bool) -> None:
    """Cancel recv() at each await; if ``ready``, the message has been sent before the call."""
    payload = pattern(nbytes)
    lender = Lending()

    async def send_two(link: Link) -> None:
        lender.calls.clear()
        await settle(0 if ready else 3)
        await send_all(link[0], [payload, b""])

    async def check_outcome(
        outcome: CancelOutcome[Received], link: Link, sending: asyncio.Future[None]
    ) -> None:
        sender, receiver, _ = link
        what = f"recv() cancelled at await {outcome.point}, late={outcome.late}"
        try:
            if outcome.result is None:
                await arrives(receiver.recv(), 1, payload)
            else:
                verify(outcome.result, 1, payload)
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
        check_outcome,
        beside=send_two,
        ahead=10 if ready else 0,
    )


@check()
async def check_cancel_recv_loses_nothing(bench: Bench) -> None:
    """A recv() that is cancelled when a message arrives or is ready does not lose the message."""
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
    """Cancel send() of update 1 at each await; update 2 follows, unless a break is declared."""

    async def collect(link: Link) -> tuple[tuple[int, ...], AiosyncError | None]:
        """Return the versions up to version 2 or the end of the link, and the error if it ended."""
        versions: tuple[int, ...] = ()
        try:
            while 2 not in versions:
                received = await link[1].recv()
                versions += (getattr(received.message, "version", 0),)
                verify(received, versions[-1], payload if versions[-1] == 1 else b"")
        except AiosyncError as exc:
            return versions, exc
        return versions, None

    async def check_outcome(
        outcome: CancelOutcome[None], link: Link, collecting: asyncio.Future[Any]
    ) -> None:
        sender = link[0]
        what = f"send() cancelled at await {outcome.point}, late={outcome.late}"
        wanted = [(1, 2)] if outcome.finished else [(1, 2), (2,)]
        # Type of the error that may follow the versions that arrived; NoneType for no error.
        allowed: dict[tuple[int, ...], type] = dict.fromkeys(wanted, NoneType)
        try:
            await within(send(sender, 2), f"send() after {what}")
        except TransportBroken:
            _may_break(sender.capabilities.send_cancellation, what)
            require(not outcome.finished and payload != b"", f"{what} broke the link")
            await stays_broken(sender, what)
            # The receiver may have all of update 1: its bytes may have been written before the
            # cancellation came.
            allowed = {(): TransportBroken, (1,): PeerClosed}
        versions, error = await within(collecting, f"the receiver after {what}")
        require(
            isinstance(error, allowed.get(versions, ())),
            f"after {what} the receiver got updates {versions}, then {error!r}",
        )

    await _cancel_everywhere(
        bench, lambda link: send(link[0], 1, payload), check_outcome, beside=collect
    )


@check()
async def check_cancel_send(bench: Bench) -> None:
    """send() cancelled at any await sends all or nothing, or, with a payload, breaks the link."""
    for nbytes in (0, 100, 6 * MIB):
        await _cancel_send(bench, pattern(nbytes))


CONFORMANCE_CHECKS: tuple[Check, ...] = tuple(
    each for each in tuple(globals().values()) if isinstance(each, Check)
)
"""Every check of the suite, in reading order."""


async def check_transport(
    pair_factory: TransportFactory,
    *,
    capabilities: Capabilities | None = None,
    hooks: Hooks | None = None,
    checks: Iterable[Check] = CONFORMANCE_CHECKS,
) -> ConformanceReport:
    """Run the suite on one transport, on the running loop.

    Args:
        pair_factory: Makes a link; see :class:`TransportFactory`. Called many times.
        capabilities: Checks named in its ``exceptions`` are skipped; ``None`` takes the
            transport's own capabilities.
        hooks: Further abilities of the transport's author; checks without their hooks are skipped.
        checks: The checks to run.

    Returns:
        The checks that passed and those that were skipped.

    Raises:
        ConformanceError: Some checks fail; the text names them all, with their reasons. The
            error of the first one is the cause.
    """
    if capabilities is None:
        async with pair_factory() as (sender, _):
            capabilities = sender.capabilities
    passed: list[str] = []
    skipped: dict[str, str] = {}
    failed: dict[str, Exception] = {}
    for each in checks:
        if reason := each.skip_reason(hooks, capabilities):
            skipped[each.name] = reason
        else:
            try:
                await each.run(pair_factory, hooks=hooks)
                passed.append(each.name)
            except Exception as exc:  # noqa: BLE001  # raised below, with all others
                failed[each.name] = exc
    if failed:
        text = "\n".join(f"  {name}: {error!r}" for name, error in failed.items())
        raise ConformanceError(
            f"{capabilities.name}: {len(failed)} of {len(failed) + len(passed)} conformance "
            f"checks fail:\n{text}"
        ) from next(iter(failed.values()))
    return ConformanceReport(tuple(passed), skipped)
