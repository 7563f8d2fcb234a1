"""Forwards during continuous sends: not one mixes two versions.

40,000 in all through the async API, on both transports and both loops, and 40,000 through the
facade; ``--heavy`` makes 100,000 of every combination.

Every parameter of version v holds the number v, so a forward that returns the means of its first
and of its last layer shows at once whether they belong together.
"""

from __future__ import annotations

import asyncio
import time

import pytest

import aiosync.sync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

FORWARDS = 20_000
MANY_FORWARDS = 100_000
PIPE, SHM = harness.SCHEMES
WORKERS = 2


class _Tally:
    """Counts what one worker saw."""

    def __init__(self, scheme) -> None:
        self.scheme = scheme
        self.forwards = self.mixed = self.backwards = self.wrong = 0
        self.versions: set[float] = set()
        self._last = 0.0

    def add(self, first: float, last: float, version: float | None) -> None:
        self.forwards += 1
        self.mixed += first != last
        self.backwards += first < self._last
        self.wrong += version is not None and first != version
        self._last = first
        self.versions.add(first)

    def result(self) -> dict[str, int]:
        return {
            "forwards": self.forwards,
            "mixed": self.mixed,
            "backwards": self.backwards,
            "wrong": self.wrong,
            "versions": len(self.versions),
            "last": int(self._last),
        }


def _forwards(scheme, model, tally: _Tally, count: int) -> None:
    for number in range(count):
        if number % 4:
            tally.add(*model(), None)
        else:
            with scheme.reading():
                first, last = model()
                tally.add(first, last, scheme.version)


async def _hammer(state, count: int, where: str) -> dict[str, int]:
    tally = _Tally(state.scheme)
    if where == "thread":
        await asyncio.to_thread(_forwards, state.scheme, state.model, tally, count)
    else:
        for _ in range(count // 20):
            _forwards(state.scheme, state.model, tally, 20)
            await asyncio.sleep(0)
    return tally.result()


def _check(results: list[dict[str, int]], forwards: int) -> None:
    assert sum(result["forwards"] for result in results) == forwards
    for result in results:
        assert result["mixed"] == 0
        assert result["backwards"] == 0
        assert result["wrong"] == 0
        assert result["versions"] > 20, "hardly anything was sent meanwhile"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "where", "loop"), [(PIPE, "loop", "uvloop"), (SHM, "thread", "asyncio")]
)
def test_the_async_api(make, where, loop) -> None:
    harness.run(loop, _send_all_the_time(make, where, FORWARDS))


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("where", ["loop", "thread"])
@pytest.mark.parametrize("make", harness.SCHEMES)
def test_every_combination(make, where, loop) -> None:
    harness.run(loop, _send_all_the_time(make, where, MANY_FORWARDS))


async def _send_all_the_time(make, where, forwards: int) -> None:
    source, scheme = models.stack(), make()
    models.fill(source, 1.0)
    scheme.init_on_sender(model=source, num_workers=WORKERS)
    async with harness.workers(scheme, models.stack, WORKERS) as crew:
        hammering = [
            asyncio.ensure_future(worker.call(_hammer, forwards // WORKERS, where))
            for worker in crew
        ]
        while not all(task.done() for task in hammering):
            models.fill(source, float(scheme.version + 1))
            report = await scheme.send()
            assert report.acked == set(range(WORKERS))
        _check([task.result() for task in hammering], forwards)
        for worker in crew:
            got = await worker.call(harness.weights)
            assert all((value == scheme.version).all() for value in got.values())


def _blocking_worker(conn, scheme, count: int) -> None:
    """A classic worker: forwards on the main thread, updates from the portal's."""
    model = models.stack()
    with scheme:
        scheme.init_on_receiver(model=model)
        scheme.connect()
        conn.send("ready")
        tally = _Tally(scheme)
        _forwards(scheme, model, tally, count)
        conn.send(tally.result())
        conn.recv()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [("SharedMemWeightSyncScheme", "forkserver"), ("MultiProcessWeightSyncScheme", "forkserver")],
)
def test_the_facade(name, method) -> None:
    _send_all_the_time_blocking(name, method, FORWARDS)


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("name", ["SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme"])
def test_every_combination_of_the_facade(name, method) -> None:
    _send_all_the_time_blocking(name, method, MANY_FORWARDS)


def _send_all_the_time_blocking(name: str, method: str, forwards: int) -> None:
    source = models.stack()
    models.fill(source, 1.0)
    ctx = harness.context(method)
    crew = []
    with getattr(aiosync.sync, name)() as scheme:
        scheme.init_on_sender(model=source, num_workers=WORKERS)
        for _ in range(WORKERS):
            mine, theirs = ctx.Pipe()
            process = ctx.Process(
                target=_blocking_worker, args=(theirs, scheme, forwards // WORKERS), daemon=True
            )
            process.start()
            theirs.close()
            crew.append((process, mine))
        try:
            scheme.connect()
            for _, conn in crew:
                assert conn.recv() == "ready"
            give_up = time.monotonic() + harness.PATIENCE
            while not all(conn.poll() for _, conn in crew):
                assert time.monotonic() < give_up
                models.fill(source, float(scheme.version + 1))
                assert scheme.send().acked == set(range(WORKERS))
            _check([conn.recv() for _, conn in crew], forwards)
        finally:
            for process, conn in crew:
                conn.close()
                process.join(harness.PATIENCE)
                process.kill()
                process.join()
                process.close()
