"""Types of the async API; checked by mypy and pyright, never run."""

from __future__ import annotations

from typing import assert_type

import aiosync


async def sender(scheme: aiosync.SharedMemWeightSyncScheme) -> None:
    scheme.init_on_sender(model_id="policy", num_workers=2)
    assert_type(await scheme.connect(timeout=1.0), None)
    assert_type(await scheme.send(), aiosync.SendReport)
    handle = scheme.send_nowait(worker_ids=0)
    assert_type(handle, aiosync.SendHandle)
    assert_type(handle.version, int)
    assert_type(await handle, aiosync.SendReport)
    assert_type(scheme.worker_versions, dict[int, int])
    assert_type(scheme.sender_transports, dict[int, aiosync.Transport])
    assert_type(scheme.receiver_transport, aiosync.Transport | None)
    await scheme.send(wait=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await scheme.receive("soon")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    scheme.timeout = "soon"  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    await scheme.send(timeout="soon")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def receiver(scheme: aiosync.MultiProcessWeightSyncScheme) -> None:
    scheme.init_on_receiver(model_id="policy", worker_idx=0)
    async with scheme as entered:
        assert_type(entered, aiosync.MultiProcessWeightSyncScheme)
        update = await scheme.receive(timeout=1.0)
        assert_type(update, aiosync.AppliedUpdate | None)
        if update is not None:
            assert_type(update.version, int)
        assert_type(await scheme.wait_for_version(3), int)
        with scheme.reading() as read:
            assert_type(read.version, int)
        async with scheme.reading() as read:
            assert_type(scheme.lag, int)
        assert_type(read.span, aiosync.VersionSpan | None)
        assert_type(scheme.span(), aiosync.VersionSpan | None)
        assert_type(scheme.last_read, aiosync.LastRead | None)
        assert_type(scheme.apply_pending(), int | None)


async def link(transport: aiosync.Transport, backend: aiosync.TransportBackend) -> None:
    received = await transport.recv(timeout=None)
    assert_type(received.nbytes, int)
    backend = transport
    await backend.ack(1, 2, aiosync.AckStatus.APPLIED)
    async with aiosync.MemoryTransport.pair() as (left, right):
        assert_type(left, aiosync.MemoryTransport)
        assert_type(right, aiosync.MemoryTransport)


async def number() -> int:
    return 1


def run_keeps_the_type() -> None:
    assert_type(aiosync.run(number()), int)
    assert_type(aiosync.run(number), int)
