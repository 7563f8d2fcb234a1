"""Cancellation of each call at each of its await points.

This module imports neither pytest nor a private name.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import aiosync
from aiosync.testing import cancel_at_every_await
from tests.contract.bench import PATIENCE, Bench, Crew, background, large, raises, small, until
from tests.contract.failures import Picky


class Stage:
    """A sender with two workers, made anew for each run."""

    def __init__(self, bench: Bench, build: Any = small) -> None:
        self.bench, self.build = bench, build
        self.crew: Crew

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        targets = [self.build(), self.build()]
        async with self.bench.crew(self.build(1.0), targets) as self.crew:
            yield

    @contextlib.asynccontextmanager
    async def unconnected(self) -> AsyncIterator[None]:
        async with self.bench.sender(self.build(1.0), {"num_workers": 2}) as self.crew:
            for idx in range(2):
                self.crew.hire(self.build(), idx)
            yield

    async def works(self) -> None:
        report = await self.crew.send(123.0)
        assert (report.acked, report.lost) == ({0, 1}, {})
        assert await self.crew.values() == [123.0, 123.0]
        for worker in self.crew.workers:
            assert await worker.version() == report.version

    async def cancelled_or_done(self, outcome: Any) -> None:
        assert outcome.finished or outcome.cancelled, outcome.error
        await self.works()


async def check_cancel_send(bench: Bench) -> None:
    """After a send() that was cancelled at any await the next send() reaches every worker."""
    for build in (small, large):
        stage = Stage(bench, build)
        await cancel_at_every_await(
            lambda stage=stage: stage.crew.send(2.0),
            stage.cancelled_or_done,
            around=stage.connected,
            may_not_wait=True,
        )


async def check_cancelled_send_goes_on(bench: Bench) -> None:
    """A cancelled send() delivers the weights that it had copied, without later changes."""
    async with bench.crew(small(1.0), [small()], apply="manual") as crew:
        [worker] = crew.workers
        async with background(crew.send(2.0)) as [sending]:
            await worker.scheme.wait_staged(2)
            sending.cancel()
            await asyncio.wait({sending})
            assert sending.cancelled()
        crew.source.layers[0].data.fill_(9.0)
        await worker.wait(2)
        assert await worker.value() == 2.0


async def check_cancelled_send_that_failed(bench: Bench) -> None:
    """A send() that is cancelled as its result comes leaves that to be told by the next one."""
    async with bench.crew(small(1.0), [small() for _ in range(3)]) as crew:
        dead, left, _ = crew.workers
        await dead.die()
        await until(lambda: 0 not in crew.sender.worker_versions)
        await _cancelled_at_once(crew.send(2.0, worker_ids=0))
        error = await raises(aiosync.PartialSyncError, crew.send(3.0))
        assert (set(error.failed), error.acked) == ({0}, {1, 2})
        await left.leave()
        await until(lambda: 1 not in crew.sender.worker_versions)
        await _cancelled_at_once(crew.send(4.0, worker_ids=1))
        report = await crew.send(5.0)
        assert (report.acked, report.left, set(report.lost)) == ({2}, {1}, {0})


async def check_cancelled_send_that_was_refused(bench: Bench) -> None:
    """A refusal is told by the next send() if that which met it is cancelled before it tells it."""
    for leaves in (True, False):
        targets = [Picky(0.0), Picky(0.0)]
        async with bench.crew(Picky(1.0), targets, apply="manual") as crew:
            worker, sender = crew.workers[0], crew.sender
            async with background(sender.send(Picky(-2.0), timeout=PATIENCE)) as [sending]:
                await raises(aiosync.ApplyError, worker.scheme.receive(timeout=PATIENCE))
                await until(lambda sender=sender: sender.stats().refused == 1)
                await (worker.leave() if leaves else worker.die())
                await until(lambda sender=sender: 0 not in sender.worker_versions)
                sending.cancel()
                await asyncio.wait({sending})
            await _cancelled_at_once(sender.send(Picky(3.0), worker_ids=0))
            error = await raises(aiosync.PartialSyncError, sender.send(Picky(3.0), timeout=0.05))
            assert isinstance(error.failed[0], aiosync.ApplyError)
            error = await raises(aiosync.PartialSyncError, sender.send(Picky(3.0), timeout=0.05))
            assert set(error.failed) == {1}


async def check_cancelled_send_beside_one_that_told(bench: Bench) -> None:
    """A cancelled send() has nothing told again that another send() has told."""
    async with bench.crew(small(1.0), [small(), small()], apply="manual") as crew:
        whole, part = {"timeout": PATIENCE}, {"timeout": PATIENCE, "worker_ids": 0}
        async with background(crew.send(2.0, **whole)) as [one]:
            await crew.workers[0].scheme.wait_staged(2)
            # Begun once the weights of the first one are copied.
            async with background(crew.send(3.0, **part)) as [other]:
                await asyncio.sleep(0)
                await crew.workers[0].die()
                await raises(aiosync.PartialSyncError, other)
            one.cancel()
            await asyncio.wait({one})
            assert one.cancelled()
        error = await raises(aiosync.PartialSyncError, crew.send(4.0, timeout=0.05))
        assert set(error.failed) == {1}


async def check_cancelled_send_as_a_worker_is_back(bench: Bench) -> None:
    """A loss that was told is not told again after a cancelled send(), if the worker is back."""
    async with bench.crew(small(1.0), [small(), small()], apply="manual") as crew:
        dead, slow = crew.workers
        await dead.die()
        await until(lambda: 0 not in crew.sender.worker_versions)
        error = await raises(aiosync.PartialSyncError, crew.send(2.0, timeout=0.05))
        assert set(error.failed) == {0, 1}
        async with background(crew.send(3.0, timeout=PATIENCE)) as [sending]:
            await slow.scheme.wait_staged(3)
            await crew.join(small(), 0, apply="auto")
            sending.cancel()
            await asyncio.wait({sending})
            assert sending.cancelled()
        async with background(slow.wait(4)):
            report = await crew.send(4.0)
            assert (report.acked, report.lost) == ({0, 1}, {})


async def check_cancelled_send_that_still_copies(bench: Bench) -> None:
    """A failed send() that is cancelled at any await, also while it copies, has told nothing."""
    stage = Stage(bench, large)

    @contextlib.asynccontextmanager
    async def one_dead() -> AsyncIterator[None]:
        async with stage.connected():
            await stage.crew.workers[0].die()
            await until(lambda: 0 not in stage.crew.sender.worker_versions)
            yield

    async def is_told(outcome: Any) -> None:
        if outcome.cancelled:
            error = await raises(aiosync.PartialSyncError, stage.crew.send(3.0))
            assert set(error.failed) == {0}

    await cancel_at_every_await(
        lambda: stage.crew.send(2.0, worker_ids=0), is_told, around=one_dead, may_not_wait=True
    )


async def _cancelled_at_once(call: Coroutine[Any, Any, Any]) -> None:
    """Cancel a call in the turn in which it begins."""
    sending = asyncio.ensure_future(call)
    asyncio.get_running_loop().call_soon(sending.cancel)
    await asyncio.wait({sending})
    assert sending.cancelled()


async def check_cancel_receive(bench: Bench) -> None:
    """receive(), wait_for_version() and pull() lose no update when cancelled at any await."""
    for call, args in (
        ("receive", {}),
        ("wait_for_version", {"version": 2}),
        ("pull", {"min_version": 2}),
    ):
        stage = Stage(bench)

        async def receive(stage: Stage = stage, call: str = call, args: Any = args) -> Any:
            handle = stage.crew.send_nowait(2.0)
            result = await getattr(stage.crew.workers[0].scheme, call)(**args)
            await handle
            return result

        async def check(outcome: Any, stage: Stage = stage) -> None:
            worker = stage.crew.workers[0]
            await worker.wait(2)
            assert await worker.value() == 2.0
            await stage.cancelled_or_done(outcome)
            assert (await worker.scheme.receive(timeout=0)).version == 3

        await cancel_at_every_await(receive, check, around=stage.connected)


async def check_cancel_connect(bench: Bench) -> None:
    """A cancelled connect() closes the sender, and its workers learn that there is no trainer."""
    stage = Stage(bench)

    async def connect() -> None:
        stage.joining = [
            asyncio.ensure_future(each.scheme.connect()) for each in stage.crew.workers
        ]
        await stage.crew.sender.connect()

    async def check(outcome: Any) -> None:
        if outcome.finished:
            await asyncio.gather(*stage.joining)
            await stage.works()
            return
        assert outcome.cancelled, outcome.error
        await raises(aiosync.TransportClosed, stage.crew.sender.connect())
        await raises(aiosync.TransportClosed, stage.crew.sender.send())
        for worker in stage.crew.workers:
            await worker.leave()
        results = await asyncio.gather(*stage.joining, return_exceptions=True)
        assert all(each is None or isinstance(each, aiosync.TransportError) for each in results)

    await cancel_at_every_await(connect, check, around=stage.unconnected)


async def check_cancel_connect_of_a_worker(bench: Bench) -> None:
    """A cancelled connect() closes the worker, and another worker may take its index."""
    stage = Stage(bench)

    @contextlib.asynccontextmanager
    async def around() -> AsyncIterator[None]:
        async with stage.unconnected():
            waiting = stage.crew.sender.connect(timeout=math.inf)
            async with background(waiting) as [stage.waiting]:
                await stage.crew.workers[1].scheme.connect()
                yield

    async def check(outcome: Any) -> None:
        crew = stage.crew
        if not outcome.finished:
            assert outcome.cancelled, outcome.error
            first = crew.workers[0]
            await raises(aiosync.TransportClosed, first.scheme.connect())
            again = copy.copy(first.scheme)
            again.init_on_receiver(model_id="policy", model=first.model, worker_idx=0)
            first.scheme = again
            await again.connect()
        try:
            await asyncio.wait_for(stage.waiting, PATIENCE)
        except aiosync.PartialSyncError as exc:
            # The sender may have noticed the end of the worker's first attempt.
            assert set(exc.failed) == {0}
        await stage.works()

    await cancel_at_every_await(
        lambda: stage.crew.workers[0].scheme.connect(), check, around=around
    )


async def check_cancel_close(bench: Bench) -> None:
    """aclose() that is cancelled at any await closes the scheme all the same."""
    for side in ("sender", "worker"):
        stage = Stage(bench)

        def scheme(stage: Stage = stage, side: str = side) -> Any:
            return stage.crew.sender if side == "sender" else stage.crew.workers[0].scheme

        async def close(stage: Stage = stage, scheme: Any = scheme) -> None:
            sending = asyncio.ensure_future(stage.crew.send(2.0))
            sending.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.sleep(0)
            try:
                await scheme().aclose()
            finally:
                stage.sending = sending

        async def check(outcome: Any, stage: Stage = stage, scheme: Any = scheme) -> None:
            assert outcome.finished or outcome.cancelled, outcome.error
            await scheme().aclose()
            await raises(aiosync.TransportClosed, scheme().connect())

        await cancel_at_every_await(close, check, around=stage.connected)


CHECKS = (
    check_cancel_send,
    check_cancelled_send_goes_on,
    check_cancelled_send_that_failed,
    check_cancelled_send_that_was_refused,
    check_cancelled_send_beside_one_that_told,
    check_cancelled_send_as_a_worker_is_back,
    check_cancelled_send_that_still_copies,
    check_cancel_receive,
    check_cancel_connect,
    check_cancel_connect_of_a_worker,
    check_cancel_close,
)
