"""What owners of a model and of a scheme hang on it: relays, looks at flips, early closing."""

from __future__ import annotations

import asyncio
import copy

import pytest

import aiosync
from aiosync.schemes._tasks import TaskOwner
from aiosync.schemes.guard import Guard
from tests.schemes import _harness as harness
from tests.schemes import _models as models

both = pytest.mark.parametrize("make", harness.SCHEMES)
pytestmark = pytest.mark.asyncio


@both
async def test_an_update_is_applied_when_it_was_passed_on(make) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        passed, go_on = [], asyncio.Event()

        async def relay(epoch: int, version: int) -> None:
            assert epoch == sender._clock.epoch
            await go_on.wait()
            passed.append(version)

        receiver._relay = relay
        models.fill(source, 2.0)
        sending = asyncio.ensure_future(sender.send())
        await harness.until(lambda: models.filled(target, 2.0))
        await asyncio.sleep(0.05)
        assert not sending.done(), "the trainer was told before it was passed on"
        go_on.set()
        report = await sending
        assert passed == [report.version]


@both
async def test_what_goes_wrong_on_the_way_reaches_the_trainer(make) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):

        async def relay(epoch: int, version: int) -> None:
            raise RuntimeError(f"nobody took {version}")

        receiver._relay = relay
        with pytest.raises(aiosync.PartialSyncError, match="nobody took 2"):
            await sender.send()
        receiver._relay = None
        assert (await sender.send()).acked == {0}


@both
async def test_of_updates_that_come_meanwhile_the_newest_is_passed_on(make) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        passed, begun, go_on = [], asyncio.Event(), asyncio.Event()

        async def relay(epoch: int, version: int) -> None:
            begun.set()
            await go_on.wait()
            passed.append(version)

        receiver._relay = relay
        handles = [sender.send_nowait() for _ in range(5)]
        await begun.wait()
        await harness.until(lambda: receiver.version == handles[-1].version)
        go_on.set()
        for handle in handles:
            await handle
        assert passed[-1] == handles[-1].version
        assert len(passed) < len(handles)


async def test_a_lost_link_does_not_make_it_applied_before_it_was_passed_on() -> None:
    sender = aiosync.TCPWeightSyncScheme(token="0123456789abcdef" * 2)
    sender.init_on_sender(model=models.linear(), num_workers=1)
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model=models.linear())
    go_on = asyncio.Event()

    async def relay(epoch: int, version: int) -> None:
        if version > 1:
            await go_on.wait()
            raise RuntimeError("nobody took it")

    receiver._relay = relay
    async with sender, receiver:
        await asyncio.gather(sender.connect(), receiver.connect())
        sending = asyncio.ensure_future(sender.send())
        await harness.until(lambda: receiver.version == 2)
        receiver._receiver.transport.abort()
        with pytest.raises(aiosync.PartialSyncError):
            await sending
        await harness.until(lambda: sender.worker_versions == {0: 1})
        go_on.set()
        with pytest.raises(aiosync.PartialSyncError, match="nobody took it"):
            await sender.send()
        assert sender.worker_versions == {0: 1}


@both
async def test_a_flip_is_seen_under_the_guard(make) -> None:
    source, target = models.linear(), models.linear()
    seen = []
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):

        def flipped(epoch: int, version: int) -> None:
            seen.append((version, models.filled(target, 3.0)))

        receiver._flipped = flipped
        models.fill(source, 3.0)
        report = await sender.send()
        assert seen == [(report.version, True)]


@both
async def test_closing_ends_a_connect_that_waits(make) -> None:
    sender = make()
    sender.init_on_sender(model=models.linear(), num_workers=1)
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model=models.linear(), worker_idx=0)
    connecting = asyncio.ensure_future(receiver.connect())
    await asyncio.sleep(0.05)  # nobody answers yet
    assert not connecting.done()
    await receiver.aclose()
    with pytest.raises(aiosync.TransportClosed, match="while it connected"):
        await connecting
    # The index is free for the next one.
    other = copy.copy(sender)
    other.init_on_receiver(model=models.linear(), worker_idx=0)
    await asyncio.gather(sender.connect(), other.connect())
    assert sender.worker_versions == {0: 1}
    await other.aclose()
    await sender.aclose()


@both
async def test_copies_that_were_separated_do_not_meet_the_others(make) -> None:
    first = make()
    second = copy.copy(first)
    first.init_on_sender(model=models.linear(), num_workers=1)
    with pytest.raises(aiosync.ConfigError, match="another copy"):
        copy.copy(second).init_on_sender(model=models.linear(), num_workers=1)
    second._separate()
    second.init_on_sender(model=models.linear(), num_workers=1)
    mine, yours = copy.copy(first), copy.copy(second)
    mine.init_on_receiver(model=models.linear())
    yours.init_on_receiver(model=models.linear())
    everybody = (first, second, mine, yours)
    await asyncio.gather(*(scheme.connect() for scheme in everybody))
    assert first.worker_versions == second.worker_versions == {0: 1}
    for scheme in everybody:
        await scheme.aclose()


class Pipes:
    """A context whose pipes are its own business."""

    def __init__(self) -> None:
        self.pipes = [1, 2]
        self.num_workers = 0
        self.policy = models.linear()


async def test_the_pipes_of_a_context_are_left_alone() -> None:
    context = Pipes()
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender("policy", context)
    async with scheme:
        await scheme.connect()


async def test_before_the_next_read() -> None:
    guard, calls = Guard(), []
    guard.enter()
    guard.before_next_read = lambda: calls.append("called")
    guard.leave()
    assert calls == []
    guard.enter()
    assert calls == ["called"]
    guard.leave()
    guard.enter()
    guard.leave()
    assert calls == ["called"]


@both
@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_closing_from_another_loop_leaves_this_one_alone(make, side) -> None:
    asyncio.get_running_loop().set_debug(True)  # calls of another thread's raise then
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as pair:
        scheme = pair[side == "receiver"]
        tasks = asyncio.all_tasks()

        def elsewhere() -> None:
            with asyncio.Runner() as runner:
                runner.run(scheme.aclose())
                runner.run(scheme.aclose())

        async with asyncio.timeout(harness.PATIENCE):
            await asyncio.to_thread(elsewhere)
            with pytest.raises(aiosync.TransportClosed):
                scheme._check_open()
            await pair[side != "receiver"].aclose()
            await harness.until(lambda: asyncio.all_tasks() <= tasks)
        assert models.filled(target, -1.0)


@both
async def test_who_gives_up_closing_from_another_loop_leaves_nothing_half_closed(make) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as (_, receiver):
        began, go_on = asyncio.Event(), asyncio.Event()
        aclose = receiver._receiver.aclose

        async def slowly() -> None:
            began.set()
            await go_on.wait()
            await aclose()

        receiver._receiver.aclose = slowly

        async def cancelled() -> None:
            closing = asyncio.ensure_future(receiver.aclose())
            await asyncio.wait([closing], timeout=0.05)
            closing.cancel()
            await asyncio.wait([closing])
            assert closing.cancelled()

        await asyncio.to_thread(asyncio.run, cancelled())
        assert began.is_set()
        assert not receiver._receiver._closed
        go_on.set()
        await harness.until(lambda: receiver._receiver._closed)


async def test_tasks_are_cancelled_from_another_thread() -> None:
    asyncio.get_running_loop().set_debug(True)
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    owner = TaskOwner(lambda error: None)
    owner.start(work(), "work")
    await asyncio.sleep(0)
    await asyncio.to_thread(owner.abort)
    async with asyncio.timeout(harness.PATIENCE):
        await ended.wait()
