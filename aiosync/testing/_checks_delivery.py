"""Conformance checks: what is sent arrives, whole, in order, in the right memory.

This module must never import pytest or torch.
"""

from __future__ import annotations

import array
import asyncio
import gc
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from aiosync.errors import AiosyncError, ManifestMismatch, TransportBroken
from aiosync.testing._registry import Bench, check
from aiosync.testing._tools import (
    EPOCH,
    KIB,
    MIB,
    ConformanceError,
    Tasks,
    arrives,
    deliver,
    expect,
    is_blocked,
    lend_into,
    lend_new,
    pattern,
    require,
    stays_broken,
    text_of,
    update,
    verify,
    within,
)
from aiosync.types import AckStatus
from aiosync.wire import Ack, Message, Update

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiosync.transports.base import Transport

__all__ = ["CHECKS"]


@check()
async def check_empty_payload(bench: Bench) -> None:
    """A message without payload, and one with an empty buffer, arrive as such."""
    async with bench.pair() as (sender, receiver):
        for version, payload in ((1, []), (2, [b""])):
            await within(sender.send(update(version), payload), "send() without payload")
            verify(await within(receiver.recv(), "recv() without payload"), version, b"")


@check()
async def check_one_byte_payload(bench: Bench) -> None:
    """A payload of one byte arrives, in both directions."""
    async with bench.pair() as (sender, receiver):
        await deliver(sender, receiver, 1, b"\x00")
        await deliver(receiver, sender, 2, b"\xff")


@check()
async def check_large_payload(bench: Bench) -> None:
    """A payload of 8 MiB, far more than a kernel buffer, arrives."""
    async with bench.pair() as (sender, receiver):
        await deliver(sender, receiver, 1, pattern(8 * MIB + 13))


@check()
async def check_buffer_types(bench: Bench) -> None:
    """Payloads may be bytes, bytearray and memoryview of any format."""
    data = pattern(4 * KIB)
    buffers: list[Buffer] = [
        data,
        bytearray(data),
        memoryview(data)[7:1000],
        memoryview(array.array("f", range(KIB))),
        memoryview(data).cast("B", shape=[32, 128]),
    ]
    async with bench.pair() as (sender, receiver):
        for version, buffer in enumerate(buffers, 1):
            await within(sender.send(update(version), [buffer]), f"send() of {type(buffer)}")
            await arrives(receiver.recv(), f"recv() of {type(buffer)}", version, bytes(buffer))


@check()
async def check_several_buffers(bench: Bench) -> None:
    """Many buffers of one payload, empty ones among them, are sent one after the other."""
    data = pattern(100 * KIB)
    few: list[Buffer] = [data[:1], b"", bytearray(data[1:70_000]), memoryview(data)[70_000:], b""]
    many: list[Buffer] = [data[at : at + 3] for at in range(0, 6000, 3)]
    async with bench.pair() as (sender, receiver):
        for version, buffers in ((1, few), (2, many)):
            await within(sender.send(update(version), buffers), "send() of several buffers")
            await arrives(receiver.recv(), "recv() of several buffers", version, b"".join(buffers))


@check()
async def check_order_kept(bench: Bench) -> None:
    """200 messages with and without payload arrive once each, in order."""
    async with bench.pair() as (sender, receiver), Tasks() as tasks:
        payloads = [pattern(version * 37 if version % 3 else 0, version) for version in range(200)]

        async def send_all() -> None:
            for version, payload in enumerate(payloads, 1):
                await sender.send(update(version), [payload] if payload else [])

        sending = tasks.start(send_all())
        for version, payload in enumerate(payloads, 1):
            await arrives(receiver.recv(), f"recv() of message {version} of 200", version, payload)
        await within(sending, "send() of 200 messages")


@check()
async def check_messages_intact(bench: Bench) -> None:
    """Every field of a message arrives with its value and type."""
    message = Update(
        epoch=2**63 - 1,
        version=2**40,
        digest=bytes(range(16)),
        values={"steps": 7, "name": "π", "nested": {"rate": 0.5, "flags": [True, None, b"\0"]}},
        chunk=(1, 3),
        checksum=b"\x01\x02\x03\x04",
    )
    async with bench.pair() as (sender, receiver):
        await within(sender.send(message, [b"xyz"]), "send()")
        received = await within(receiver.recv(), "recv()")
        require(received.message == message, f"sent {message!r}, received {received.message!r}")
        received.release()


@check()
async def check_lent_buffers(bench: Bench) -> None:
    """A payload lands in the lent buffers themselves, however they divide it."""
    payload = pattern(300 * KIB)
    async with bench.pair() as (sender, receiver), Tasks() as tasks:
        for version, cuts in enumerate(((0,), (1,), (5, 100_000), (5, 5, 299 * KIB)), 1):
            edges = [0, *cuts, len(payload)]
            lent = [bytearray(after - before) for before, after in pairwise(edges)]
            sending = tasks.start(sender.send(update(version), [payload[:999], payload[999:]]))
            received = await within(receiver.recv(into=lend_into(*lent)), "recv(into=...)")
            await within(sending, "send()")
            require(
                b"".join(lent) == payload,
                f"the payload did not land in the lent buffers of {[len(b) for b in lent]} bytes",
            )
            verify(received, version, payload)
            lent[-1][-1] ^= 0xFF
            require(
                b"".join(received.payload)[-1] == lent[-1][-1],
                "Received.payload is not the memory that was lent",
            )
            received.release()
            received.release()


@check()
async def check_lender_arguments(bench: Bench) -> None:
    """The lender is called once for a payload, with its message and its size in bytes."""
    calls: list[tuple[Message, int]] = []

    def lend(message: Message, nbytes: int) -> Sequence[Buffer]:
        calls.append((message, nbytes))
        return lend_new(message, nbytes)

    async with bench.pair() as (sender, receiver):
        await within(sender.send(update(1), [b"abc", b"defg"]), "send()")
        await within(receiver.recv(into=lend), "recv(into=...)")
    require(calls == [(update(1), 7)], f"expected one call with 7 bytes, got {calls}")


@check()
async def check_lender_refusal_breaks_link(bench: Bench) -> None:
    """An AiosyncError out of the lender reaches the caller of recv() and breaks the link."""
    refusal = ManifestMismatch(missing=("layer.weight",))

    def lend(message: Message, nbytes: int) -> Sequence[Buffer]:
        raise refusal

    async with bench.pair() as (sender, receiver), Tasks() as tasks:
        tasks.start(sender.send(update(1), [pattern(MIB)]))
        error = await expect(
            (ManifestMismatch, TransportBroken), receiver.recv(into=lend), "recv() that refuses"
        )
        require(
            refusal in (error, error.__cause__, error.__context__),
            f"the lender's error is lost: got {text_of(error)} without it as the cause",
        )
        await stays_broken(receiver, "a lender that refused")


@check()
async def check_lender_of_wrong_size(bench: Bench) -> None:
    """Lent buffers of the wrong size are an AiosyncError, not a payload cut to fit."""
    for wrong in (99, 101):
        async with bench.pair() as (sender, receiver):
            await within(sender.send(update(1), [pattern(100)]), "send()")
            await expect(
                AiosyncError,
                receiver.recv(into=lend_into(bytearray(wrong))),
                f"recv() of 100 bytes with {wrong} bytes lent",
            )


@check()
async def check_unreleased_payload_stays(bench: Bench) -> None:
    """Without a lender the payload stays untouched until release(), which is idempotent."""
    first, second = pattern(64 * KIB, 1), pattern(64 * KIB, 2)
    async with bench.pair() as (sender, receiver), Tasks() as tasks:
        await within(sender.send(update(1), [first]), "send() of the first")
        kept = await within(receiver.recv(), "recv() of the first")
        sending = tasks.start(sender.send(update(2), [second]))
        receiving = tasks.start(receiver.recv())
        await is_blocked(receiving)  # the transport may wait for its memory: that is backpressure
        verify(kept, 1, first)
        kept.release()
        kept.release()
        del kept
        received = await within(receiving, "recv() of the second, after the first was released")
        await within(sending, "send() of the second")
        verify(received, 2, second)
        received.release()


@check()
async def check_release_after_aclose(bench: Bench) -> None:
    """release() after the link was closed is harmless."""
    async with bench.pair() as (sender, receiver):
        await within(sender.send(update(1), [pattern(64 * KIB)]), "send()")
        received = await within(receiver.recv(), "recv()")
        await within(receiver.aclose(), "aclose() with an unreleased payload")
        received.release()
        received.release()


@check()
async def check_payload_may_change_after_send(bench: Bench) -> None:
    """Once send() returned, changing the sender's buffers does not change what arrives."""
    for nbytes in (100, 64 * KIB, 8 * MIB):
        payload = pattern(nbytes)
        async with bench.pair() as (sender, receiver), Tasks() as tasks:
            buffer = bytearray(payload)
            await _send_then_overwrite(tasks, sender, receiver, buffer, payload)


async def _send_then_overwrite(
    tasks: Tasks, sender: Transport, receiver: Transport, buffer: bytearray, payload: bytes
) -> None:
    async def send() -> None:
        await sender.send(update(1), [buffer])
        buffer[:] = bytes(len(buffer))

    sending = tasks.start(send())
    await is_blocked(sending, 0.01)  # give it the chance to return before anybody reads
    await arrives(receiver.recv(), "recv()", 1, payload)
    await within(sending, "send()")


@check()
async def check_buffers_given_back(bench: Bench) -> None:
    """The transport holds no buffer of its callers once send() and recv() have returned."""
    for nbytes in (100, 2 * MIB):
        async with bench.pair() as (sender, receiver), Tasks() as tasks:
            sent, lent = bytearray(pattern(nbytes)), bytearray(nbytes)
            sending = tasks.start(sender.send(update(1), [sent]))
            received = await within(receiver.recv(into=lend_into(lent)), "recv(into=...)")
            await within(sending, "send()")
            verify(received, 1, pattern(nbytes))
            received.release()
            del received, sending
            for name, buffer in (("sent", sent), ("lent", lent)):
                try:
                    buffer.append(0)
                except BufferError:
                    gc.collect()
                    try:
                        buffer.append(0)
                    except BufferError as exc:
                        raise ConformanceError(
                            f"the transport still holds the {name} buffer of {nbytes} bytes"
                        ) from exc


@check()
async def check_ack_statuses(bench: Bench) -> None:
    """Every status arrives as it was sent, a NACK with its error's type and text."""
    async with bench.pair() as (sender, receiver):
        await within(receiver.ack(EPOCH, 1, AckStatus.RECEIVED), "ack(RECEIVED)")
        await within(receiver.ack(EPOCH, 1, AckStatus.APPLIED), "ack(APPLIED)")
        await within(
            receiver.ack(EPOCH, 2, AckStatus.NACK, error=KeyError("λ.weight")), "ack(NACK)"
        )
        await within(receiver.ack(EPOCH, 3, AckStatus.SKIPPED), "ack(SKIPPED)")
        for expected in (
            Ack(EPOCH, 1, AckStatus.RECEIVED),
            Ack(EPOCH, 1, AckStatus.APPLIED),
            Ack(EPOCH, 2, AckStatus.NACK, "KeyError", str(KeyError("λ.weight"))),
            Ack(EPOCH, 3, AckStatus.SKIPPED),
        ):
            received = await within(sender.recv(), f"recv() of {expected.status.name}")
            require(received.message == expected, f"sent {expected}, got {received.message}")
            require(received.nbytes == 0, f"an ack came with {received.nbytes} payload bytes")


@check()
async def check_ack_with_long_error(bench: Bench) -> None:
    """A NACK whose error text is very long arrives, with the text clipped."""
    text = "é" * 200_000
    async with bench.pair() as (sender, receiver):
        await within(receiver.ack(EPOCH, 1, AckStatus.NACK, error=ValueError(text)), "ack(NACK)")
        message = (await within(sender.recv(), "recv() of the NACK")).message
        require(
            isinstance(message, Ack) and message.status is AckStatus.NACK,
            f"expected a NACK, got {message!r:.200}",
        )
        assert isinstance(message, Ack)
        start = message.error_text[:100]
        require(
            message.error_type == "ValueError" and start == text[:100],
            f"the NACK lost its error: type {message.error_type!r}, text {start!r}...",
        )


@check()
async def check_full_duplex(bench: Bench) -> None:
    """Both directions move 8 MiB payloads at the same time without waiting for each other."""
    payloads = [pattern(8 * MIB, seed) for seed in (1, 2)]

    async def push(transport: Transport) -> None:
        for version, payload in enumerate(payloads, 1):
            await transport.send(update(version), [payload])

    async def pull(transport: Transport) -> None:
        for version, payload in enumerate(payloads, 1):
            received = await transport.recv()
            verify(received, version, payload)
            received.release()

    async with bench.pair() as (sender, receiver), Tasks() as tasks:
        running = [
            tasks.start(run(transport)) for run in (push, pull) for transport in (sender, receiver)
        ]
        await within(asyncio.gather(*running), "four transfers of two payloads at once")


CHECKS = (
    check_empty_payload,
    check_one_byte_payload,
    check_large_payload,
    check_buffer_types,
    check_several_buffers,
    check_order_kept,
    check_messages_intact,
    check_lent_buffers,
    check_lender_arguments,
    check_lender_refusal_breaks_link,
    check_lender_of_wrong_size,
    check_unreleased_payload_stays,
    check_release_after_aclose,
    check_payload_may_change_after_send,
    check_buffers_given_back,
    check_ack_statuses,
    check_ack_with_long_error,
    check_full_duplex,
)
