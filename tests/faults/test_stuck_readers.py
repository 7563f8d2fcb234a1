"""Memory of versions that readers do not read, and that is freed once they read or end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import aiosync
from aiosync.sender import Snapshot, Streaming, WorkerRegistry
from aiosync.server import WeightServer
from aiosync.tensors import FlatBuffer, Flattener
from aiosync.testing import FaultProxy
from aiosync.transports.framed_link import MPTransport
from aiosync.transports.tcp import TCPTransport
from aiosync.wire import Fetch, Hello
from tests.schemes._harness import PATIENCE, until
from tests.server._tools import URL

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop, pytest.mark.slow]

NBYTES = 8 * 2**20
READERS = 16
# Payloads are read into this memory, and their content is ignored.
CHUNK = memoryview(bytearray(2**22))


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


async def drain(link: TCPTransport) -> None:
    with contextlib.suppress(aiosync.AiosyncError):
        while True:
            await link.recv(into=lambda message, nbytes: [CHUNK[:nbytes]], timeout=1)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("server", [False, True], ids=["trainer", "weight server"])
@pytest.mark.parametrize("ending", ["closed", "reset", "stalled", "read on"])
async def test_memory_goes_back(ending: str, server: bool) -> None:
    weights = {"w": torch.zeros(NBYTES // 4)}
    stall = 1.0 if ending == "stalled" else 60.0
    async with contextlib.AsyncExitStack() as stack:
        url, options = URL, {"stall_timeout": stall, "timeout": PATIENCE}
        if server:
            served = await stack.enter_async_context(WeightServer(URL, stall_timeout=stall))
            url, options = served.url, {"dial": "both", **options}
        trainer: Any = aiosync.TCPWeightSyncScheme(url, require=1, **options)
        trainer.init_on_sender(weights=weights)
        reading = {"guard": "reading", "timeout": PATIENCE}
        worker: Any = aiosync.TCPWeightSyncScheme(trainer.address, **reading)
        worker.init_on_receiver(weights={"w": torch.zeros(NBYTES // 4)})
        await stack.enter_async_context(trainer)
        await stack.enter_async_context(worker)
        await asyncio.gather(trainer.connect(), worker.connect(initial=False))
        proxy = await stack.enter_async_context(FaultProxy(trainer.address))
        for _ in range(4):
            await worker.wait_for_version((await trainer.send()).version)

        def connected() -> int:
            if server:
                return len(served.status()["models"][0]["workers"])
            return len(trainer.sender_transports)

        before, links = resident(), []
        for _ in range(READERS):
            links.append(await TCPTransport.connect(proxy.url))
            hello = Hello("receiver", "policy", os.getpid(), session=os.urandom(16))
            await links[-1].send(hello)
            await links[-1].recv()
            await worker.wait_for_version((await trainer.send()).version)
        held = resident() - before
        if ending == "reset":
            proxy.reset()
        elif ending == "read on":
            await asyncio.gather(*map(drain, links))
        if ending != "stalled":
            for link in links:
                link.abort()
        await until(lambda: connected() == 1)
        for _ in range(4):
            await worker.wait_for_version((await trainer.send()).version)
        left = resident() - before
        for link in links:
            link.abort()
    assert held > (READERS - 6) * NBYTES // (1 if ending != "stalled" else 4)
    assert left < 4 * NBYTES


async def test_readers_share_the_memory_of_updates_that_are_put_together() -> None:
    """A server puts an update of some names together with the one before, once for all."""
    weights = {"a": torch.zeros(NBYTES // 4), "b": torch.zeros(4)}
    async with WeightServer(URL) as served:
        trainer: Any = aiosync.TCPWeightSyncScheme(served.url, dial="both", timeout=PATIENCE)
        trainer.init_on_sender(weights=weights)
        async with trainer:
            await trainer.connect()
            await trainer.send()
            await trainer.send({"b": torch.ones(4)})
            before, links = resident(), []
            for _ in range(READERS):
                links.append(await TCPTransport.connect(served.url))
                session, pulls = os.urandom(16), {"subscribe": False, "strategy": "any"}
                await links[-1].send(
                    Hello("receiver", "policy", os.getpid(), session=session, **pulls)
                )
                await links[-1].send(Fetch(min_version=1))
                await links[-1].recv()
            # All have got some of the update, and none reads on.
            await asyncio.sleep(1)
            held = resident() - before
            for link in links:
                link.abort()
    assert held < READERS * NBYTES // 2


async def test_a_reader_that_takes_nothing_goes_although_another_trainer_took_over() -> None:
    """The update that it does not take is of the epoch before."""
    flat = Flattener().prepare({"w": torch.zeros(NBYTES)})

    def snapshot() -> Snapshot:
        memory = FlatBuffer(flat.layout.nbytes)
        return Snapshot(flat.layout, memory, lambda: None, version=1)

    streaming = Streaming(2**20, stall_timeout=0.3)
    registry = WorkerRegistry(
        model_id="policy",
        strategy="any",
        num_workers=None,
        on_outcome=None,
        on_crash=print,
        streaming=streaming,
    )
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    hello = Hello("receiver", "policy", os.getpid())
    registry.join(MPTransport(ours), 0, hello)
    try:
        for epoch in (registry.epoch, registry.epoch + 1):
            registry.epoch, update = epoch, snapshot()
            for link in registry.links.values():
                if link.outbox.epoch != epoch:
                    link.begin_epoch(epoch)
                link.offer(update)
            update.release()
            await asyncio.sleep(0.1)
        await until(lambda: not registry.links, 5.0)
    finally:
        registry.end()
        await registry.tasks.aclose()
        theirs.close()
