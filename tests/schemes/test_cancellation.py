"""Cancelling ``connect``, ``send``, ``receive`` and ``aclose`` at each of their await points."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math

import pytest

import aiosync
from aiosync.testing import assert_no_leaks, cancel_at_every_await
from tests.schemes import _harness as harness
from tests.schemes import _models as models

both = pytest.mark.parametrize("make", harness.SCHEMES)
pytestmark = [pytest.mark.asyncio, pytest.mark.slow]


class _Stage:
    """Sets up a sender and its receivers for each run, and looks for leaks after it."""

    def __init__(self, make, build=models.linear, count: int = 2) -> None:
        self.make, self.build, self.count = make, build, count

    @contextlib.asynccontextmanager
    async def connected(self):
        async with assert_no_leaks(kinds=("tasks", "fds")):
            self.source = self.build()
            self.targets = [self.build() for _ in range(self.count)]
            async with harness.crowd(self.make(), self.targets, sender={"model": self.source}) as (
                self.sender,
                self.receivers,
            ):
                yield

    @contextlib.asynccontextmanager
    async def unconnected(self):
        async with assert_no_leaks(kinds=("tasks", "fds")):
            self.source = self.build()
            self.targets = [self.build() for _ in range(self.count)]
            models.fill(self.source, 1.0)
            self.sender = self.make()
            self.receivers = [copy.copy(self.sender) for _ in self.targets]
            self.sender.init_on_sender(model=self.source, num_workers=self.count)
            for idx, receiver in enumerate(self.receivers):
                receiver.init_on_receiver(model=self.targets[idx], worker_idx=idx)
            try:
                yield
            finally:
                await self.sender.aclose()
                for receiver in self.receivers:
                    await receiver.aclose()

    async def works(self) -> None:
        models.fill(self.source, 123.0)
        report = await self.sender.send()
        assert report.acked == set(range(self.count))
        assert not report.lost
        for target, receiver in zip(self.targets, self.receivers, strict=True):
            assert models.filled(target, 123.0)
            assert receiver.version == report.version


@both
@pytest.mark.parametrize("build", [models.linear, models.medium])
async def test_send(make, build) -> None:
    stage = _Stage(make, build)

    async def check(outcome) -> None:
        assert outcome.finished or outcome.cancelled, outcome.error
        await stage.works()

    await cancel_at_every_await(
        lambda: stage.sender.send(), check, around=stage.connected, may_not_wait=True
    )


@both
async def test_send_to_a_worker_that_is_busy(make) -> None:
    stage = _Stage(make)

    async def send():
        with stage.receivers[0].reading():
            return await stage.sender.send(timeout=0.01)

    async def check(outcome) -> None:
        assert outcome.cancelled or isinstance(outcome.error, aiosync.PartialSyncError)
        await stage.works()

    await cancel_at_every_await(send, check, around=stage.connected)


@both
async def test_receive(make) -> None:
    stage = _Stage(make, count=1)

    async def receive():
        handle = stage.sender.send_nowait()
        update = await stage.receivers[0].receive()
        await handle
        return update

    async def check(outcome) -> None:
        assert outcome.finished or outcome.cancelled, outcome.error
        receiver = stage.receivers[0]
        assert await receiver.wait_for_version(2) == 2
        if outcome.finished:
            assert outcome.result.version == 2
        await stage.works()
        assert (await receiver.receive(timeout=0)).version == 3

    await cancel_at_every_await(receive, check, around=stage.connected)


@both
async def test_wait_for_version(make) -> None:
    stage = _Stage(make, count=1)

    async def wait():
        stage.sender.send_nowait()
        return await stage.receivers[0].wait_for_version(2)

    async def check(outcome) -> None:
        assert outcome.finished or outcome.cancelled, outcome.error
        await stage.works()

    await cancel_at_every_await(wait, check, around=stage.connected)


@both
@pytest.mark.parametrize("build", [models.linear, models.medium])
async def test_connect_of_the_sender(make, build) -> None:
    stage = _Stage(make, build)

    async def connect():
        stage.joining = [asyncio.ensure_future(each.connect()) for each in stage.receivers]
        await stage.sender.connect()

    async def check(outcome) -> None:
        results = await asyncio.gather(*stage.joining, return_exceptions=True)
        if outcome.finished:
            assert results == [None, None]
            await stage.works()
            return
        assert outcome.cancelled, outcome.error
        for result in results:  # it had joined already, or it learns that there is no trainer
            assert result is None or isinstance(result, aiosync.TransportError)
        with pytest.raises(aiosync.TransportClosed, match="copy.copy"):
            await stage.sender.connect()
        with pytest.raises(aiosync.TransportClosed):
            await stage.sender.send()

    await cancel_at_every_await(connect, check, around=stage.unconnected)


@both
async def test_connect_of_a_receiver(make) -> None:
    stage = _Stage(make)

    @contextlib.asynccontextmanager
    async def around():
        async with stage.unconnected():
            stage.waiting = asyncio.ensure_future(stage.sender.connect(timeout=math.inf))
            await stage.receivers[1].connect()
            yield
            await asyncio.wait([stage.waiting])

    async def check(outcome) -> None:
        if not outcome.finished:
            assert outcome.cancelled, outcome.error
            with pytest.raises(aiosync.TransportClosed, match="copy.copy"):
                await stage.receivers[0].connect()
            again = copy.copy(stage.receivers[0])
            again.init_on_receiver(model=stage.targets[0], worker_idx=0)
            await again.connect()
            stage.receivers[0] = again
        try:
            await stage.waiting
        except aiosync.PartialSyncError as exc:  # it noticed that the first attempt had gone
            assert set(exc.failed) == {0}
        await stage.works()

    await cancel_at_every_await(lambda: stage.receivers[0].connect(), check, around=around)


@both
@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_aclose(make, side) -> None:
    stage = _Stage(make)

    async def close():
        stage.sender.send_nowait()._future.add_done_callback(lambda done: done.exception())
        await (stage.sender if side == "sender" else stage.receivers[0]).aclose()

    async def check(outcome) -> None:
        assert outcome.finished or outcome.cancelled, outcome.error
        closed = stage.sender if side == "sender" else stage.receivers[0]
        with pytest.raises(aiosync.TransportClosed):
            await closed.connect()
        await closed.aclose()

    await cancel_at_every_await(close, check, around=stage.connected)


@both
async def test_a_cancelled_send_goes_on_from_its_snapshot(make) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        models.fill(source, 2.0)
        with receiver.reading():
            sending = asyncio.ensure_future(sender.send())
            await harness.until(lambda: receiver._receiver.has_staged)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            models.fill(source, 3.0)
        assert await receiver.wait_for_version(2) == 2
        assert models.filled(target, 2.0)


@both
async def test_a_worker_lost_after_a_cancelled_send_is_named_by_the_next(make) -> None:
    stage = _Stage(make, count=2)
    async with stage.connected():
        sender, receivers = stage.sender, stage.receivers
        with receivers[0].reading():  # cannot apply meanwhile
            sending = asyncio.create_task(sender.send())
            await harness.until(lambda: receivers[0]._receiver.has_staged)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            receivers[0].abort()
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await sender.send()
        assert set(caught.value.failed) == {0}
        assert set((await sender.send()).lost) == {0}


@both
async def test_every_send_has_a_deadline_of_its_own(make) -> None:
    stage = _Stage(make, count=2)  # to one of them, the second would take the first one's place
    async with stage.connected():
        with stage.receivers[0].reading(), stage.receivers[1].reading():
            patient = stage.sender.send_nowait(worker_ids=0, timeout=60)
            hasty = stage.sender.send_nowait(worker_ids=1, timeout=0.05)
            started = asyncio.get_running_loop().time()
            with pytest.raises(aiosync.PartialSyncError, match="within 0.05 s"):
                await hasty
            assert asyncio.get_running_loop().time() - started < 5
            assert not patient.done()
        async with asyncio.timeout(harness.PATIENCE):
            report = await patient
        assert report.acked == {0}


@both
@pytest.mark.parametrize("first", ["cancelled", "closed"])
@pytest.mark.parametrize("role", ["sender", "receiver"])
async def test_a_connect_that_is_cancelled_and_closed(make, role, first) -> None:
    """Who cancelled it sees that it was; ``TransportClosed`` is for who did not."""
    scheme = make()
    if role == "sender":
        scheme.init_on_sender(model=models.linear(), num_workers=1)
    else:
        scheme.init_on_receiver(model=models.linear())
    connecting = asyncio.ensure_future(scheme.connect())
    await asyncio.sleep(0.01)
    if first == "cancelled":
        connecting.cancel()
        await scheme.aclose()
    else:
        closing = asyncio.ensure_future(scheme.aclose())
        await asyncio.sleep(0)
        connecting.cancel()
        await closing
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert connecting.cancelled()
