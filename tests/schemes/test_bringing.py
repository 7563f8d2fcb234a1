"""Weights that are elsewhere are brought into a slot, while others send or copy them."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from aiosync.errors import ConfigError, LocalProtocolError, TransportClosed
from aiosync.schemes._making import SnapshotMaker
from aiosync.schemes._peer import Peer
from aiosync.schemes._snapshots import ArenaStore, PrivateStore
from aiosync.schemes._tasks import TaskOwner
from aiosync.tensors import Flattener
from aiosync.transports import _segment
from aiosync.transports._carrier import KEPT
from aiosync.transports._segment import Arena
from aiosync.wire import Hello, Update

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiosync.schemes._snapshots import Snapshot

PATIENCE = 20.0
COUNT = 4 * 2**20  # elements: 16 MiB, which is copied in a thread

pytestmark = pytest.mark.asyncio


class Gate:
    """Holds copies up, in their thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.open = threading.Semaphore(0), threading.Event()
        self.count = 0
        copy_into = Flattener.copy_into

        def held(*args: Any, **kwargs: Any) -> None:
            self.count += 1
            self.begun.release()
            assert self.open.wait(PATIENCE)
            copy_into(*args, **kwargs)

        monkeypatch.setattr(Flattener, "copy_into", held)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=PATIENCE)


class Trainer:
    """Sends from the tensors themselves."""

    def __init__(self) -> None:
        self.arena = Arena()
        self.maker = SnapshotMaker(ArenaStore(self.arena, lambda _: False), "state_dict")
        self.weights = {"a": torch.empty(COUNT)}

    async def borrow(self, value: float) -> Snapshot:
        self.fill(value)
        snapshot = await self.maker.borrow(self.maker.prepare(self.weights))
        assert snapshot.live is not None and snapshot.slot is None
        return snapshot

    def fill(self, value: float) -> None:
        self.weights["a"].fill_(value)

    async def end_send(self, snapshot: Snapshot) -> None:
        await self.maker.copy(snapshot)
        self.fill(-1.0)  # they are the caller's again


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.maker.close()


def values(snapshot: Snapshot) -> set[float]:
    assert snapshot.slot is not None
    assert snapshot.payload().obj is not None
    return set(np.frombuffer(snapshot.slot.view[: snapshot.nbytes], np.float32)[::997].tolist())


async def bring(trainer: Trainer, snapshot: Snapshot) -> set[float]:
    await trainer.maker.bring(snapshot)
    return values(snapshot)


@pytest.mark.parametrize("free", [True, False])
async def test_while_it_is_copied(
    trainer: Trainer, free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a slot that is free at once, and with one for which room is made."""
    if free:
        (await trainer.maker.take(trainer.maker.prepare(trainer.weights))).release()
    snapshot = await trainer.borrow(2.0)
    gate = Gate(monkeypatch)
    ending = asyncio.ensure_future(trainer.end_send(snapshot))
    await gate.reached()
    bringing = asyncio.ensure_future(bring(trainer, snapshot))
    await asyncio.sleep(0.05)
    gate.open.set()
    await ending
    assert await asyncio.gather(bringing, bring(trainer, snapshot)) == [{2.0}, {2.0}]
    assert gate.count == 1


async def test_before_it_is_copied(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy serves both."""
    snapshot = await trainer.borrow(2.0)
    gate = Gate(monkeypatch)
    both = [asyncio.ensure_future(bring(trainer, snapshot)) for _ in range(2)]
    await gate.reached()
    ending = asyncio.ensure_future(trainer.end_send(snapshot))
    await asyncio.sleep(0.05)
    gate.open.set()
    await ending
    assert snapshot.live is None
    assert await asyncio.gather(*both) == [{2.0}, {2.0}]
    assert (gate.count, trainer.arena.num_slots) == (1, 1)


async def test_after_it_was_copied(trainer: Trainer) -> None:
    snapshot = await trainer.borrow(2.0)
    await trainer.end_send(snapshot)
    assert await bring(trainer, snapshot) == {2.0}
    slot = snapshot.slot
    assert slot is not None
    snapshot.release()
    assert slot.is_free()


async def test_what_only_a_carrier_has(trainer: Trainer) -> None:
    calls = []

    async def back() -> list[memoryview]:
        calls.append(1)
        array = np.full(COUNT, 2.0, np.float32).view(np.uint8)
        return [array[:1000].data, array[1000:].data]

    snapshot = await trainer.borrow(2.0)
    snapshot.memo[KEPT] = back
    await trainer.end_send(snapshot)
    assert snapshot.never_copied
    assert await asyncio.gather(*(bring(trainer, snapshot) for _ in range(3))) == [{2.0}] * 3
    assert (len(calls), trainer.arena.num_slots) == (1, 1)


async def test_what_the_carrier_has_lost(trainer: Trainer) -> None:
    """The first who wants it finds out, for all."""
    calls = []

    async def back() -> list[memoryview]:
        calls.append(1)
        await asyncio.sleep(0.01)
        raise LocalProtocolError("it is gone")

    snapshot = await trainer.borrow(2.0)
    snapshot.memo[KEPT] = back
    await trainer.end_send(snapshot)
    found = await asyncio.gather(
        *(trainer.maker.bring(snapshot) for _ in range(3)), return_exceptions=True
    )
    assert [str(each) for each in found] == ["it is gone"] * 3
    assert len(calls) == 1
    [slot] = trainer.arena.segment.slots  # type: ignore[union-attr]
    assert slot.is_free()


class Far:
    """A link that takes the payload some time after it was given it, as those beside a stream."""

    follows_copies_above = None

    def __init__(self) -> None:
        self.found: set[float] = set()

    def send_nowait(self, message: object, payload: object = ()) -> bool:
        return not isinstance(message, Update)

    async def send(self, message: object, payload: Any = ()) -> None:
        await asyncio.sleep(0)
        self.found = {
            x for view in payload for x in np.frombuffer(view, np.float32)[::997].tolist()
        }

    class capabilities:
        cross_host = False


async def test_a_link_elsewhere_sees_no_tensors_that_were_given_back(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the same copy as send() does, and may go on first."""
    snapshot = await trainer.borrow(2.0)
    snapshot.version = 2
    crashes: list[BaseException] = []
    tasks, far = TaskOwner(crashes.append), Far()
    peer = Peer(
        0,
        far,  # type: ignore[arg-type]
        epoch=1,
        hello=Hello("receiver", "policy", 1),
        streaming=None,
        tasks=tasks,
        on_outcomes=lambda *_: None,
        on_lost=lambda *_: None,
        on_fetch=lambda _: None,
    )
    gate = Gate(monkeypatch)
    bringing = asyncio.ensure_future(bring(trainer, snapshot))
    await gate.reached()
    peer.offer(snapshot)
    await asyncio.sleep(0.05)
    ending = asyncio.ensure_future(trainer.end_send(snapshot))
    await asyncio.sleep(0.05)
    gate.open.set()
    await asyncio.gather(bringing, ending)
    async with asyncio.timeout(PATIENCE):
        while not far.found:
            await asyncio.sleep(0.01)
    assert (far.found, crashes) == ({2.0}, [])
    await tasks.aclose()


@pytest.mark.parametrize("trouble", ["no descriptor", "no memory"])
async def test_without_room_that_update_fails_and_the_next_one_works(
    trainer: Trainer, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = await trainer.borrow(2.0)
    await trainer.end_send(snapshot)

    def fails(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        name = "anonymous_file" if trouble == "no descriptor" else "take_pages"
        patch.setattr(_segment, name, fails)
        with pytest.raises(LocalProtocolError, match="Too many open files") as caught:
            await trainer.maker.bring(snapshot)
        assert caught.value.__cause__ is not None
    assert await bring(trainer, snapshot) == {2.0}


@pytest.mark.parametrize("copied", [True, False])
async def test_without_a_thread_that_update_fails_too(
    trainer: Trainer, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is room, but nobody to copy: the sender goes on."""
    (await trainer.maker.take(trainer.maker.prepare(trainer.weights))).release()
    snapshot = await trainer.borrow(2.0)
    if copied:
        await trainer.end_send(snapshot)

    def fails(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotMaker, "_start_executor", fails)
        with pytest.raises(LocalProtocolError, match="can't start new thread"):
            await trainer.maker.bring(snapshot)
    assert await bring(trainer, snapshot) == {2.0}
    assert trainer.arena.num_slots == 1


@pytest.mark.parametrize("state", ["live", "copied", "kept"])
async def test_cut_in_any_wait(
    trainer: Trainer, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes next gets the weights all the same, and no slot is lost."""
    for turns in range(12):
        snapshot = await trainer.borrow(2.0)

        async def back() -> list[memoryview]:
            await asyncio.sleep(0)
            return [np.full(COUNT, 2.0, np.float32).view(np.uint8).data]

        if state == "kept":
            snapshot.memo[KEPT] = back
        if state != "live":
            await trainer.end_send(snapshot)
        task = asyncio.ensure_future(trainer.maker.bring(snapshot))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
            raise asyncio.CancelledError  # it was quicker
        assert await bring(trainer, snapshot) == {2.0}
        await trainer.end_send(snapshot)
        assert values(snapshot) == {2.0}
        snapshot.release()
    assert trainer.arena.num_slots <= 2
    assert all(slot.is_free() for slot in trainer.arena.segment.slots)  # type: ignore[union-attr]


async def test_a_closed_sender(trainer: Trainer) -> None:
    snapshot = await trainer.borrow(2.0)
    await trainer.end_send(snapshot)
    trainer.maker.close()
    with pytest.raises(TransportClosed):
        await trainer.maker.bring(snapshot)


async def test_without_slots_nothing_is_brought() -> None:
    trainer = Trainer()
    trainer.maker = SnapshotMaker(PrivateStore(), "state_dict")
    snapshot = await trainer.borrow(2.0)
    await trainer.maker.bring(snapshot)
    assert snapshot.slot is None and snapshot.live is not None
    trainer.maker.close()


async def test_a_copy_whose_wait_is_cancelled_again_and_again(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As anyio's cancel scopes do: what waits goes on before any callback of the copy has run."""
    snapshot = await trainer.borrow(2.0)
    gate = Gate(monkeypatch)
    borrowed = []

    async def end() -> None:
        try:
            await trainer.maker.copy(snapshot)
        finally:
            borrowed.append(snapshot.live)

    ending = asyncio.ensure_future(end())
    await gate.reached()
    gate.open.set()
    async with asyncio.timeout(PATIENCE):
        while not ending.done():
            ending.cancel()
            await asyncio.sleep(0)
    assert ending.cancelled()
    assert borrowed == [None]


async def test_an_update_that_is_too_large_does_no_harm_to_smaller_ones(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, take = trainer.maker, _segment.take_pages
    small, large = {"a": torch.zeros(16)}, {"a": torch.zeros(COUNT)}

    def limited(fd: int, offset: int, nbytes: int) -> None:
        if nbytes > 2**20:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        take(fd, offset, nbytes)

    monkeypatch.setattr(_segment, "take_pages", limited)
    for _ in range(2):
        first = await maker.take(maker.prepare(small))
        with pytest.raises(
            ConfigError, match="cannot allocate shared memory for another slot of 16777216"
        ):
            await maker.take(maker.prepare(large))
        with pytest.raises(ConfigError, match="cannot allocate shared memory"):
            maker.take_nowait(maker.prepare(large))
        second = maker.take_nowait(maker.prepare(small))
        assert second.slot is not None and second.slot.segment.slot_nbytes < 2**20
        first.release()
        second.release()
    monkeypatch.undo()
    (await maker.take(maker.prepare(large))).release()
    assert trainer.arena._retired == []


async def test_two_at_once_take_the_pages_of_two_slots(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    take = _segment.take_pages

    def noted(fd: int, offset: int, nbytes: int) -> None:
        taken.append((offset, threading.current_thread()))
        take(fd, offset, nbytes)

    monkeypatch.setattr(_segment, "take_pages", noted)
    planned = trainer.maker.prepare(trainer.weights)
    both = await asyncio.gather(*(trainer.maker.take(planned) for _ in range(2)))
    assert {snapshot.slot.index for snapshot in both if snapshot.slot} == {0, 1}
    assert len({offset for offset, _ in taken}) == len(taken) == 2
    assert threading.main_thread() not in {thread for _, thread in taken}
