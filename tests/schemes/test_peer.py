"""The sender's side of one link, without a scheme around it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from aiosync.errors import FrameTooLarge
from aiosync.schemes._making import SnapshotMaker
from aiosync.schemes._peer import Peer
from aiosync.schemes._snapshots import PrivateStore
from aiosync.schemes._streaming import Streaming
from aiosync.schemes._tasks import TaskOwner
from aiosync.transports import TCPTransport
from aiosync.types import AckStatus
from aiosync.wire import Ack, Hello, ManifestMessage, Update
from tests.schemes._harness import PATIENCE


@pytest.mark.asyncio
async def test_an_update_keeps_its_epoch_when_another_sender_takes_over() -> None:
    """The task that writes it may begin only then; the worker must not see a mixture."""
    crashes: list[BaseException] = []
    tasks = TaskOwner(crashes.append)
    maker = SnapshotMaker(PrivateStore(), "tensordict")
    outcomes: list[Any] = []
    async with TCPTransport.pair() as (mine, theirs):
        peer = Peer(
            0,
            mine,
            epoch=7,
            hello=Hello("receiver", "policy", 1),
            streaming=Streaming(chunk_nbytes=2**17),
            tasks=tasks,
            on_outcomes=lambda _, found: outcomes.extend(found),
            on_lost=lambda _, error: crashes.append(error),
            on_fetch=lambda _: None,
        )
        peer.start()
        snapshot = await maker.take(maker.prepare({"w": torch.ones(2**18)}))  # 8 chunks
        snapshot.version = 5
        peer.offer(snapshot)
        peer.begin_epoch(8)
        snapshot.version = 1
        peer.offer(snapshot)  # as the first of the new sender
        snapshot.release()
        seen = []
        async with asyncio.timeout(PATIENCE):
            while len(seen) < 8:
                message = (await theirs.recv()).message
                if isinstance(message, Update):
                    seen.append(message.epoch)
                else:
                    assert isinstance(message, ManifestMessage)
        assert seen == [7] * 8
        peer.lose(ConnectionError("the test is over"))  # type: ignore[arg-type]
        crashes.clear()
        mine.abort()
        await tasks.aclose()
    assert not crashes
    maker.close()


@pytest.mark.asyncio
async def test_a_worker_may_send_no_payload() -> None:
    """Not even one that is small enough for the link: nothing is allocated for it."""
    lost: list[BaseException] = []
    tasks = TaskOwner(lost.append)
    async with TCPTransport.pair() as (mine, theirs):
        peer = Peer(
            0,
            mine,
            epoch=7,
            hello=Hello("receiver", "policy", 1),
            streaming=Streaming(),
            tasks=tasks,
            on_outcomes=lambda _, found: None,
            on_lost=lambda _, error: lost.append(error),
            on_fetch=lambda _: None,
        )
        peer.start()
        await theirs.send(Ack(7, 1, AckStatus.APPLIED), [bytes(2**20)])
        async with asyncio.timeout(PATIENCE):
            while not lost:
                await asyncio.sleep(0)
        assert isinstance(lost[0], FrameTooLarge)
        await tasks.aclose()
