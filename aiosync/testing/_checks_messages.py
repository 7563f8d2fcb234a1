"""Conformance checks: what is sent arrives, whole, in order, in the right memory, or is refused.

This module must never import pytest or torch.
"""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from functools import partial
from itertools import pairwise, product
from typing import Any

from aiosync.errors import (
    AiosyncError,
    FrameTooLarge,
    LocalProtocolError,
    ManifestMismatch,
    ProtocolError,
    RecvTimeout,
    RemoteProtocolError,
    SendTimeout,
    TransportBroken,
)
from aiosync.testing._tools import (
    CLOG_NBYTES,
    EPOCH,
    KIB,
    MIB,
    Bench,
    Lending,
    arrives,
    check,
    clog,
    deliver,
    drain,
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
from aiosync.transports.base import Received, Transport, make_ack
from aiosync.types import AckStatus, Limits
from aiosync.wire import Ack, Message, Update

# -- payloads --------------------------------------------------------------------------------------


async def _both_ways(bench: Bench, *payloads: list[Any]) -> None:
    async with bench.link() as (sender, receiver, _):
        for version, payload in enumerate(payloads, 1):
            await deliver(sender, receiver, version, *payload)
            await deliver(receiver, sender, version, *payload)


@check()
async def check_small_payloads(bench: Bench) -> None:
    """No payload, an empty buffer, and single bytes arrive as such, in both directions."""
    await _both_ways(bench, [], [b""], [b"\x00"], [b"\xff"])


@check()
async def check_several_buffers(bench: Bench) -> None:
    """A payload may be many buffers, empty ones among them, of any type and format; and large."""
    data = pattern(8 * MIB + 13)
    table = memoryview(data[:4096]).cast("B", shape=[32, 128])
    floats = memoryview(data[:4096]).cast("f")
    few = [data[:1], b"", bytearray(data[1:70_000]), memoryview(data)[70_007:], b"", table, floats]
    await _both_ways(bench, [data], few, [data[at : at + 3] for at in range(0, 6000, 3)])


@check()
async def check_full_duplex(bench: Bench) -> None:
    """200 messages and two of 8 MiB arrive once each, in order, in both directions at once."""
    payloads = [pattern(version * 37 if version % 3 else 0, version) for version in range(200)]
    payloads += [pattern(8 * MIB, seed) for seed in (1, 2)]
    async with bench.link() as (left, right, tasks):
        running = [
            tasks.start(move(end, payloads))
            for move in (send_all, receive_all)
            for end in (left, right)
        ]
        await within(asyncio.gather(*running), "four transfers at once")


@check()
async def check_messages_intact(bench: Bench) -> None:
    """All of a message and of an ack arrives; of the error of a NACK a long text is clipped."""
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
    async with bench.link() as (sender, receiver, _):
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


@check()
async def check_lent_buffers(bench: Bench) -> None:
    """The lender is called once, with message and size; the payload lands in what it lent."""
    payload = pattern(300 * KIB)
    async with bench.link() as (sender, receiver, _):
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


@check()
async def check_unreleased_payload_stays(bench: Bench) -> None:
    """Without a lender the payload stays until release(), which may come after aclose()."""
    first, second = pattern(64 * KIB, 1), pattern(64 * KIB, 2)
    async with bench.link() as (sender, receiver, tasks):
        await within(send(sender, 1, first), "send() of the first")
        kept = await within(receiver.recv(), "recv() of the first")
        sending = tasks.start(send(sender, 2, second))
        receiving = tasks.start(receiver.recv())
        await is_blocked(receiving)  # the transport may wait for its memory: that is backpressure
        verify(kept, 1, first)
        kept.release()
        received = await within(receiving, "recv() of the second, after the first was released")
        await within(sending, "send() of the second")
        verify(received, 2, second)
        await within(receiver.aclose(), "aclose() with an unreleased payload")
        received.release()


@check()
async def check_buffers_given_back(bench: Bench) -> None:
    """What send() and recv() were given is the caller's again, to change, once they returned."""

    async def send_and_clear(sender: Transport, buffer: bytearray) -> None:
        await send(sender, 1, buffer)
        buffer[:] = bytes(len(buffer))

    for nbytes, lends in product((100, 64 * KIB, 8 * MIB), (False, True)):
        async with bench.link() as (sender, receiver, tasks):
            sent, lent = bytearray(pattern(nbytes)), bytearray(nbytes)
            sending = tasks.start(send_and_clear(sender, sent))
            await is_blocked(sending, 0.01)  # give it the chance to return before anybody reads
            await arrives(receiver.recv(into=Lending(lent) if lends else None), 1, pattern(nbytes))
            await within(sending, "send()")
            gc.collect(1)  # of what is young
            sent.append(0)  # a BufferError here means that something still refers to the memory
            lent.append(0)


# -- backpressure and deadlines --------------------------------------------------------------------


@check()
async def check_backpressure(bench: Bench) -> None:
    """A peer that does not read makes send() wait; the other direction works; reading frees it."""
    for nbytes in (CLOG_NBYTES, 64 * KIB):
        async with bench.link() as (sender, receiver, tasks):
            last, blocked = await clog(tasks, sender, nbytes=nbytes)
            ack = Ack(EPOCH, 1, AckStatus.RECEIVED)
            await within(receiver.send(ack), "send() against the stream")
            await gets(sender, ack)
            await drain(receiver, last, nbytes=nbytes)
            await within(blocked, "a blocked send() after the peer has read everything")
            await deliver(sender, receiver, last + 1, b"after")


@check()
async def check_checkpoints(bench: Bench) -> None:
    """send(), recv() and ack() let other tasks run at least once, even when all is ready."""
    async with bench.link() as (sender, receiver, _):
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


@check()
async def check_recv_timeout(bench: Bench) -> None:
    """recv(timeout=0) takes a ready message; RecvTimeout leaves the link intact."""
    async with bench.link() as (sender, receiver, _):
        for version in (1, 2, 3):
            for timeout in (0.02, 0):
                receiving = receiver.recv(timeout=timeout)
                await expect(RecvTimeout, receiving, f"recv({timeout=}) on a silent link")
            payload = pattern(100 * (version - 1))
            await within(send(sender, version, payload), "send()")
            await settle()
            await arrives(receiver.recv(timeout=0), version, payload)


@check()
async def check_recv_timeout_loses_nothing(bench: Bench) -> None:
    """Deadlines that race with messages neither lose nor repeat one."""
    payloads = [b"x" * version if version % 2 else b"" for version in range(1, 61)]
    async with bench.link() as (sender, receiver, tasks):

        async def keep_trying() -> Received:
            while True:
                with suppress(RecvTimeout):
                    return await receiver.recv(timeout=0.0004)

        sending = tasks.start(send_all(sender, payloads, pause=0.0007))
        for version, payload in enumerate(payloads, 1):
            await arrives(keep_trying(), version, payload)
        await within(sending, "the sender")


@check()
async def check_send_timeout(bench: Bench) -> None:
    """send(timeout=0) delivers on a free link; SendTimeout on a full one tears nothing."""
    for timeout in (0.02, 0.0):
        async with bench.link() as link:
            sender, receiver, tasks = link
            for nbytes in (0, 100):
                await deliver(sender, receiver, 99, pattern(nbytes), timeout=timeout)
            version, late = await clog(tasks, sender, timeout=timeout)
            await expect(SendTimeout, late, f"send({timeout=}) on a full link")
            await intact_or_cut(link, version, "SendTimeout")


@check()
async def check_oversize_header_refused(bench: Bench) -> None:
    """A header over the limit is LocalProtocolError at the sender and leaves the link intact."""
    message = Update(epoch=EPOCH, version=1, digest=bytes(16), values={"blob": bytes(17 * MIB)})
    async with bench.link() as (sender, receiver, _):
        await expect(LocalProtocolError, sender.send(message), "send() of a 17 MiB header")
        with suppress(LocalProtocolError):
            require(not sender.send_nowait(message), "send_nowait() took a 17 MiB header")
        await deliver(sender, receiver, 2, b"after")


# -- the ways that do not wait keep the promises of those that do ----------------------------------


@check()
async def check_send_nowait(bench: Bench) -> None:
    """What send_nowait() took arrives once and in order; what it did not take left no trace."""
    payloads = {version: pattern(64 * KIB, version) for version in range(1, 1025)}
    payloads |= dict.fromkeys(range(5001, 5004), b"")  # there may be room for these
    async with bench.link() as (sender, receiver, tasks):
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


@check()
async def check_batch_nowait(bench: Bench) -> None:
    """A batch that the link took arrives whole and in order; of a refused one nothing does."""
    *batch, last = [Ack(EPOCH, version, AckStatus.RECEIVED) for version in (1, 2, 3, 4)]
    async with bench.link() as (sender, receiver, _):
        taken = receiver.send_batch_nowait(batch)
        await within(receiver.send(last), "send() after send_batch_nowait()")
        await gets(sender, *(batch if taken else []), last)


@check()
async def check_ack_nowait(bench: Bench) -> None:
    """An acknowledgement that was taken without waiting arrives as it is, a refused one not."""
    async with bench.link() as (sender, receiver, _):
        for version, status in enumerate(AckStatus, 1):
            ack, last = Ack(EPOCH, version, status), Ack(EPOCH, version + 100, AckStatus.RECEIVED)
            taken = receiver.ack_nowait(EPOCH, version, status)
            await within(receiver.send(last), "send() after ack_nowait()")
            await gets(sender, *([ack] if taken else []), last)


@check()
async def check_subscribe(bench: Bench) -> None:
    """With a handler every message comes once and in order, to it or out of recv()."""
    sent = [Ack(EPOCH, version, AckStatus.RECEIVED) for version in range(1, 21)]
    seen: list[Message] = []
    async with bench.link() as (sender, receiver, tasks):

        def handle(received: Received) -> None:
            seen.append(received.message)
            received.release()

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
        require(  # and nothing comes twice
            await is_blocked(pulling, 0.05) and seen == sent,
            f"sent {len(sent)} acks, got {seen}, {pulling}",
        )


# -- limits ----------------------------------------------------------------------------------------


async def _refuses(transport: Transport, kind: type[RemoteProtocolError], what: str) -> None:
    """Check that the next frame is refused before memory is asked for, and what follows."""
    lender = Lending()
    await expect(kind, transport.recv(into=lender), f"recv() of {what}")
    require(not lender.calls, f"a lender was asked for memory for {what}")
    await expect(RemoteProtocolError, transport.recv(), f"recv() after {what}")
    broken = (RemoteProtocolError, TransportBroken)
    await expect(broken, send(transport, 1), f"send() after {what}")
    await within(transport.aclose(), f"aclose() after {what}")


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
    """A payload over the receiver's limit is FrameTooLarge before any memory is asked for."""
    limits = Limits(), Limits(max_payload_nbytes=1000)
    for nbytes in (1001, 100 * KIB):
        async with bench.link(limits) as (sender, receiver, tasks):
            await deliver(sender, receiver, 1, pattern(1000))
            tasks.start(send(sender, 2, pattern(nbytes)))
            await _refuses(receiver, FrameTooLarge, f"a payload of {nbytes} bytes")


@check("limited")
async def check_header_limit_of_receiver(bench: Bench) -> None:
    """A header over the receiver's limit is FrameTooLarge."""
    message = Update(1, 1, bytes(16), values={"text": "x" * 5000})
    limits = Limits(), Limits(max_header_nbytes=4096)
    async with bench.link(limits) as (sender, receiver, tasks):
        tasks.start(sender.send(message))
        await _refuses(receiver, FrameTooLarge, "a header over the limit")


@check("limited")
async def check_unlent_memory_is_bounded(bench: Bench) -> None:
    """recv() allocates no more than its limit; with lent buffers larger payloads pass."""
    payload = pattern(2000)
    limits = Limits(), Limits(max_buffer_nbytes=1000)
    async with bench.link(limits) as (sender, receiver, tasks):
        await deliver(sender, receiver, 1, payload, into=Lending())
        tasks.start(send(sender, 2, payload))
        if receiver.capabilities.zero_copy_recv:
            # Memory that the sender wrote is not allocated by recv().
            with suppress(ProtocolError):
                await arrives(receiver.recv(), 2, payload)
        else:
            await expect(ProtocolError, receiver.recv(), "recv() of 2000 bytes without a lender")
