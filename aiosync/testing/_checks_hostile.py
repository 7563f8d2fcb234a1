"""Conformance checks: frames over the limits, cut frames, and bytes that are no frames.

These need hooks that reach below the transport. Offsets into the frame prefix are those of
``docs/topics/wire-format.md``. This module must never import pytest or torch.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from aiosync.errors import (
    FrameTooLarge,
    LocalProtocolError,
    PeerClosed,
    ProtocolError,
    RecvTimeout,
    RemoteProtocolError,
    TransportBroken,
    WireVersionMismatch,
)
from aiosync.testing._registry import Bench, RawPeer, check
from aiosync.testing._tools import (
    KIB,
    MIB,
    Tasks,
    cancel,
    deliver,
    expect,
    is_blocked,
    lend_into,
    lend_new,
    pattern,
    require,
    settle,
    stays_broken,
    update,
    verify,
    within,
)
from aiosync.types import Cancellation, Limits
from aiosync.wire import PREFIX_NBYTES, Message, Update, encode_frame

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiosync.transports.base import Transport

__all__ = ["CHECKS"]

_VERSION_AT = 4
_FLAGS_AT = 5
_HEADER_NBYTES_AT = 8
_PAYLOAD_NBYTES_AT = 16


def _frame(version: int, payload: bytes = b"") -> bytes:
    return encode_frame(update(version), len(payload)) + payload


def _patched(at: int, data: bytes) -> bytes:
    frame = bytearray(_frame(1, b"abc"))
    frame[at : at + len(data)] = data
    return bytes(frame)


def _never_lend(message: Message, nbytes: int) -> Sequence[Buffer]:
    raise AssertionError(f"a lender was asked for {nbytes} bytes for a refused frame")


async def _stays_refused(transport: Transport) -> None:
    await expect(RemoteProtocolError, transport.recv(), "recv() after an illegal frame")
    await expect(
        (RemoteProtocolError, TransportBroken), transport.send(update(1)), "send() after that"
    )
    await within(transport.aclose(), "aclose() after an illegal frame")


@check("limited")
async def check_limits_of_sender(bench: Bench) -> None:
    """A payload over the sender's limit is LocalProtocolError; the link stays intact."""
    async with bench.limited(Limits(max_payload_nbytes=1000), Limits()) as (sender, receiver):
        await expect(
            LocalProtocolError, sender.send(update(1), [pattern(1001)]), "send() of 1001 bytes"
        )
        with suppress(LocalProtocolError):
            require(
                not sender.send_nowait(update(1), [pattern(600), pattern(401)]),
                "send_nowait() took 1001 bytes where 1000 are allowed",
            )
        await deliver(sender, receiver, 2, pattern(1000))


@check("limited")
async def check_limits_of_receiver(bench: Bench) -> None:
    """A payload over the receiver's limit is FrameTooLarge before any memory is asked for."""
    for nbytes in (1001, 100 * KIB):
        limits = Limits(max_payload_nbytes=1000)
        async with bench.limited(Limits(), limits) as (sender, receiver), Tasks() as tasks:
            await deliver(sender, receiver, 1, pattern(1000))
            tasks.start(sender.send(update(2), [pattern(nbytes)]))
            await expect(
                FrameTooLarge, receiver.recv(into=_never_lend), f"recv() of {nbytes} bytes"
            )
            await _stays_refused(receiver)


@check("limited")
async def check_header_limit_of_receiver(bench: Bench) -> None:
    """A header over the receiver's limit is FrameTooLarge."""
    message = Update(1, 1, bytes(16), values={"text": "x" * 5000})
    limits = Limits(max_header_nbytes=4096)
    async with bench.limited(Limits(), limits) as (sender, receiver), Tasks() as tasks:
        tasks.start(sender.send(message))
        await expect(FrameTooLarge, receiver.recv(), "recv() of a header over the limit")
        await _stays_refused(receiver)


@check("limited")
async def check_unlent_memory_is_bounded(bench: Bench) -> None:
    """recv() allocates no more than its limit; with lent buffers larger payloads pass."""
    limits = Limits(max_buffer_nbytes=1000)
    payload = pattern(2000)
    async with bench.limited(Limits(), limits) as (sender, receiver), Tasks() as tasks:
        tasks.start(sender.send(update(1), [payload]))
        received = await within(receiver.recv(into=lend_into(bytearray(2000))), "recv(into=...)")
        verify(received, 1, payload)
    async with bench.limited(Limits(), limits) as (sender, receiver), Tasks() as tasks:
        tasks.start(sender.send(update(1), [payload]))
        if bench.capabilities(receiver).zero_copy_recv:
            # Memory that the sender wrote is not allocated by recv().
            with suppress(ProtocolError):
                verify(await within(receiver.recv(), "recv()"), 1, payload)
        else:
            await expect(ProtocolError, receiver.recv(), "recv() of 2000 bytes without a lender")


@check("raw")
async def check_raw_frames_in_any_cuts(bench: Bench) -> None:
    """Frames that arrive byte by byte, or several at once, are the same messages."""
    payload = pattern(300)
    async with bench.raw() as (peer, transport), Tasks() as tasks:
        await within(peer.write(_frame(1, payload) + _frame(2) + _frame(3, b"x")), "write()")
        for version, expected in ((1, payload), (2, b""), (3, b"x")):
            verify(await within(transport.recv(), f"recv() of frame {version}"), version, expected)

        async def trickle() -> None:
            for byte in _frame(4, payload) + _frame(5):
                await peer.write(bytes([byte]))
                await asyncio.sleep(0)

        writing = tasks.start(trickle())
        verify(await within(transport.recv(), "recv() of single bytes"), 4, payload)
        verify(await within(transport.recv(), "recv() of single bytes"), 5, b"")
        await writing


@check("raw")
async def check_raw_garbage(bench: Bench) -> None:
    """Bytes that are no frame are RemoteProtocolError, and stay so."""
    for garbage in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x80\x04\x95" + bytes(64), bytes(100)):
        async with bench.raw() as (peer, transport):
            await within(peer.write(_frame(1) + garbage), "write()")
            verify(await within(transport.recv(), "recv() of the good frame"), 1, b"")
            await expect(RemoteProtocolError, transport.recv(), f"recv() of {garbage[:8]!r}")
            await _stays_refused(transport)


@check("raw")
async def check_raw_wire_version(bench: Bench) -> None:
    """Another version of the wire format is WireVersionMismatch."""
    async with bench.raw() as (peer, transport):
        await within(peer.write(_patched(_VERSION_AT, b"\xee")), "write()")
        await expect(WireVersionMismatch, transport.recv(), "recv() of wire version 238")
        await _stays_refused(transport)


@check("raw")
async def check_raw_flags_and_checksum(bench: Bench) -> None:
    """Unknown flags and a header that was changed on its way are RemoteProtocolError."""
    header_at = PREFIX_NBYTES + 2
    changed = bytes([_frame(1, b"abc")[header_at] ^ 1])
    for frame in (_patched(_FLAGS_AT, b"\x80"), _patched(header_at, changed)):
        async with bench.raw() as (peer, transport):
            await within(peer.write(frame), "write()")
            await expect(
                RemoteProtocolError, transport.recv(into=_never_lend), "recv() of a bad frame"
            )
            await _stays_refused(transport)


@check("raw")
async def check_raw_oversize_refused_before_allocating(bench: Bench) -> None:
    """Announced sizes over the limits are FrameTooLarge, and no memory is taken for them."""
    huge = (
        _patched(_PAYLOAD_NBYTES_AT, (2**41).to_bytes(8, "little")),
        _patched(_PAYLOAD_NBYTES_AT, b"\xff" * 8),
        _patched(_HEADER_NBYTES_AT, (512 * MIB).to_bytes(4, "little")),
        _patched(_HEADER_NBYTES_AT, b"\xff" * 4),
    )
    for frame in huge:
        async with bench.raw() as (peer, transport):
            tracemalloc.start()
            try:
                await within(peer.write(frame), "write()")
                await expect(
                    FrameTooLarge, transport.recv(into=_never_lend), "recv() of a huge frame"
                )
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            require(peak < 8 * MIB, f"{peak} bytes were allocated for a frame that was refused")
            await _stays_refused(transport)


@check("raw")
async def check_raw_cut(bench: Bench) -> None:
    """A peer that ends in mid-frame is TransportBroken for good; between frames, PeerClosed."""
    payload = pattern(bench.hooks.raw_payload_nbytes)
    frame = _frame(1, payload)
    header_end = len(_frame(1))
    for end in (
        1,
        PREFIX_NBYTES - 1,
        PREFIX_NBYTES,
        header_end - 1,
        len(frame) // 2,
        len(frame) - 1,
    ):
        async with bench.raw() as (peer, transport), Tasks() as tasks:
            receiving = tasks.start(transport.recv())
            await within(peer.write(frame[:end]), "write()")
            await is_blocked(receiving, 0)
            peer.close()
            await expect(
                TransportBroken, receiving, f"recv() of {end} bytes of a frame of {len(frame)}"
            )
            await stays_broken(transport, "a cut in mid-frame")
    async with bench.raw() as (peer, transport), Tasks() as tasks:
        receiving = tasks.start(transport.recv())
        await within(peer.write(frame), "write()")
        verify(await within(receiving, "recv() of the whole frame"), 1, payload)
        peer.close()
        await expect(PeerClosed, transport.recv(), "recv() after the end between frames")


@check("raw")
async def check_raw_timeout_mid_frame(bench: Bench) -> None:
    """A deadline in mid-frame loses nothing before the payload, and never tears a payload."""
    payload = pattern(bench.hooks.raw_payload_nbytes)
    frame = _frame(1, payload)
    header_end = len(_frame(1))
    for end in (5, PREFIX_NBYTES, header_end - 1, header_end + len(payload) // 2):
        async with bench.raw() as (peer, transport), Tasks() as tasks:
            start = tasks.start(peer.write(frame[:end]))
            await settle()
            await expect(RecvTimeout, transport.recv(timeout=0.02), f"recv() of {end} bytes")
            rest = tasks.start(_write_rest(start, peer, frame[end:]))
            try:
                received = await within(transport.recv(), "recv() after RecvTimeout")
            except TransportBroken:
                require(end > header_end, "RecvTimeout before the payload broke the link")
                await stays_broken(transport, "RecvTimeout in mid-payload")
            else:
                verify(received, 1, payload)
                received.release()
            await within(rest, "write() of the rest")


async def _write_rest(start: asyncio.Task[None], peer: RawPeer, data: bytes) -> None:
    with suppress(OSError):  # the other end may refuse to go on
        await start
        await peer.write(data)


@check("raw")
async def check_raw_cancel_mid_payload(bench: Bench) -> None:
    """A recv() cancelled in the middle of a payload behaves as its class says."""
    payload = pattern(bench.hooks.raw_payload_nbytes)
    frame = _frame(1, payload)
    half = len(frame) - len(payload) // 2
    async with bench.raw() as (peer, transport), Tasks() as tasks:
        receiving = tasks.start(transport.recv(into=lend_new))
        start = tasks.start(peer.write(frame[:half]))
        require(await is_blocked(receiving), "recv() returned half a payload")
        await within(start, "write() of half a payload while recv() is waiting")
        await cancel(receiving, "recv()")
        rest = tasks.start(_write_rest(start, peer, frame[half:]))
        if bench.capabilities(transport).recv_cancellation is Cancellation.SAFE:
            verify(await within(transport.recv(), "recv() after a cancelled one"), 1, payload)
        else:
            await stays_broken(transport, "a recv() cancelled in mid-payload")
        await within(rest, "write() of the rest")


CHECKS = (
    check_limits_of_sender,
    check_limits_of_receiver,
    check_header_limit_of_receiver,
    check_unlent_memory_is_bounded,
    check_raw_frames_in_any_cuts,
    check_raw_garbage,
    check_raw_wire_version,
    check_raw_flags_and_checksum,
    check_raw_oversize_refused_before_allocating,
    check_raw_cut,
    check_raw_timeout_mid_frame,
    check_raw_cancel_mid_payload,
)
