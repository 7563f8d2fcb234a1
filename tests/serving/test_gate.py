"""The admission gate: when it admits requests, and how long a switch of the weights waits."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

import aiosync
from aiosync import VersionSpan, staleness
from aiosync.serving import Admission, AdmissionGate, Swap

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]

both_modes = pytest.mark.parametrize("mode", ["between_requests", "immediate"])


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def refused(entry: Admission | Swap, error: type[Exception], text: str) -> Any:
    with pytest.raises(error, match=text) as info:
        async with entry:
            pytest.fail("was let in")
    return info.value


async def admitted(gate: AdmissionGate, **options: Any) -> int:
    """Return the version of a request that ends at once."""
    async with gate.request(**options) as version:
        return version


async def entered(gate: AdmissionGate, log: list, name: str, **options) -> None:
    log.append((name, await admitted(gate, **options)))


async def switch(gate: AdmissionGate, version: int | None = None, epoch: int | None = None) -> None:
    async with gate.swap(version=version, epoch=epoch):
        pass


@both_modes
async def test_nobody_is_let_in_before_there_is_a_version(mode) -> None:
    gate = AdmissionGate(mode=mode)
    assert not gate.ready
    assert gate.version == 0
    error = await refused(gate.request(timeout=0), aiosync.AdmissionTimeout, "no complete version")
    assert error.version == 0
    assert error.retry_after > 0
    log: list = []
    waiting = [asyncio.ensure_future(entered(gate, log, name)) for name in "ab"]
    ready = asyncio.ensure_future(gate.ready.wait(timeout=10))
    await turns()
    assert gate.waiting == 2
    assert not ready.done()
    async with gate.swap() as swap:
        swap.version, swap.epoch = 7, 99
    await asyncio.gather(ready, *waiting)
    assert log == [("a", 7), ("b", 7)]
    assert gate.ready
    assert (gate.version, gate.epoch, gate.swaps) == (7, 99, 1)
    late = gate.request(epoch=5, timeout=0)
    await refused(late, aiosync.AdmissionTimeout, "^a version of epoch 0*5 was requested")
    assert (gate.running, gate.waiting) == (0, 0)


@both_modes
async def test_it_says_how_long_each_request_waited(mode) -> None:
    gate = AdmissionGate(mode=mode)
    gate.on_admission = (waits := []).append
    # A loop's timer may fire early.
    await refused(gate.request(timeout=0.03), aiosync.AdmissionTimeout, "no complete version")
    assert len(waits) == 1 and waits[0] >= 0.02
    await switch(gate)
    async with gate.request():
        assert waits[1:] == [0.0]


async def test_a_request_does_not_pay_for_whoever_is_told_of_it(caplog) -> None:
    gate = AdmissionGate(initial_version=1)
    gate.on_admission = lambda seconds: 1 / seconds
    for _ in range(2):
        async with gate.request():
            assert gate.on_admission is None
    [record] = caplog.records
    assert record.name == "aiosync"
    assert "ZeroDivisionError" in caplog.text


async def test_a_switch_waits_for_the_requests_that_run_and_new_ones_for_it() -> None:
    gate = AdmissionGate(initial_version=1)
    log: list = []
    end = asyncio.Event()

    async def long_request() -> None:
        async with gate.request() as version:
            await end.wait()
            assert gate.version == version == 1
            log.append("long request over")

    running = asyncio.ensure_future(long_request())
    await turns()

    async def switch() -> None:
        async with gate.swap():
            log.append("switched")
            # The gate admits no request during the switch.
            await turns()
            assert gate.running == 0

    switching = asyncio.ensure_future(switch())
    await turns()
    late = asyncio.ensure_future(entered(gate, log, "late"))
    await turns()
    assert log == []
    assert (gate.running, gate.waiting) == (1, 1)
    end.set()
    await asyncio.gather(running, switching, late)
    assert log == ["long request over", "switched", ("late", 2)]


async def test_a_switch_gives_up_and_lets_those_in_that_waited() -> None:
    gate = AdmissionGate(initial_version=3, swap_timeout=0.05)
    log: list = []
    running = asyncio.ensure_future(_hold(gate))
    await turns()
    switching = asyncio.ensure_future(switch(gate))
    await turns()
    late = asyncio.ensure_future(entered(gate, log, "late"))
    await turns()
    assert log == []
    with pytest.raises(aiosync.SwapTimeout, match="1 requests that were running") as info:
        await switching
    assert info.value.running == 1
    await late
    assert log == [("late", 3)]
    running.cancel()
    await asyncio.wait([running])
    await switch(gate)
    assert gate.version == 4


async def test_a_request_that_waits_has_a_deadline() -> None:
    gate = AdmissionGate(initial_version=1, timeout=0.02)
    async with gate.swap():
        await refused(gate.request(), aiosync.AdmissionTimeout, "took longer than 0.02 s")
        await refused(gate.request(timeout=0), aiosync.AdmissionTimeout, "took longer than 0 s")
        await refused(gate.swap(timeout=0), aiosync.SwapTimeout, "another switch")
    assert await admitted(gate, timeout=0) == 2
    assert (gate.running, gate.waiting) == (0, 0)


@both_modes
async def test_a_switch_that_fails_or_is_cancelled_changes_nothing(mode) -> None:
    gate = AdmissionGate(mode=mode, initial_version=1)
    with pytest.raises(KeyError):
        async with gate.swap(version=2):
            raise KeyError("no such layer")
    assert gate.version == 1
    async with gate.batch():
        switching = asyncio.ensure_future(gate.swap().__aenter__())
        await turns()
        switching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await switching
    assert await admitted(gate, timeout=0) == 1
    async with gate.swap() as swap:
        # A switch to the same version does not count.
        swap.version = 1
    assert (gate.version, gate.swaps) == (1, 0)
    with pytest.raises(aiosync.LocalProtocolError, match="at least 1"):
        async with gate.swap(version=0):
            pass
    with pytest.raises(RuntimeError, match="half"):
        async with gate.swap() as swap:
            swap.activate(5)
            raise RuntimeError("half-way, but the weights are there")
    assert gate.version == 5
    await admitted(gate, timeout=0)


async def test_a_request_that_fails_or_is_cancelled_leaves() -> None:
    gate = AdmissionGate(initial_version=1)
    with pytest.raises(KeyError):
        async with gate.request():
            raise KeyError
    task = asyncio.ensure_future(_hold(gate))
    await turns()
    assert gate.running == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gate.running == 0
    async with gate.swap():
        waiting = asyncio.ensure_future(_hold(gate))
        await turns()
        assert gate.waiting == 1
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert gate.waiting == 0


async def _hold(gate: AdmissionGate) -> None:
    async with gate.request():
        await asyncio.sleep(3600)


async def test_a_request_inside_a_request_is_a_part_of_it() -> None:
    gate = AdmissionGate(initial_version=1)
    async with gate.request():
        switching = asyncio.ensure_future(switch(gate))
        await turns()
        # The switch waits for the outer request, so the inner one must not wait for the switch.
        async with gate.request(timeout=0) as version:
            assert version == 1
            assert gate.running == 1
        async with gate.batch(timeout=0):
            pass
        await refused(
            gate.request(min_version=2, timeout=10),
            aiosync.AdmissionTimeout,
            "inside another request",
        )
        # A request in a task that this request starts is a part of it, too.
        child = asyncio.create_task(_hold(gate))
        await turns()
        await refused(gate.swap(), aiosync.LocalProtocolError, "wait for itself")
    assert gate.running == 1
    assert not switching.done()
    child.cancel()
    await switching
    assert gate.version == 2


async def test_immediate_switches_between_batches() -> None:
    gate = AdmissionGate(mode="immediate", initial_version=1)
    request = gate.request()
    async with request as first:
        assert first == 1
        async with gate.batch() as version:
            assert version == 1
            switching = asyncio.ensure_future(switch(gate))
            await turns()
            assert not switching.done()
            # A batch inside a batch is a part of it, and does not wait for the switch.
            async with gate.batch(timeout=0):
                pass
        # The switch does not wait for the end of the request.
        async with asyncio.timeout(10):
            await switching
        async with gate.batch() as version:
            assert version == 2
        assert request.versions == (1, 2)
        await switch(gate)
        # The request has computed no batch with the third version.
        assert request.versions == (1, 2)
    assert request.versions == (1, 2)
    assert (gate.running, gate.version) == (0, 3)


@both_modes
async def test_closing_wakes_everybody(mode) -> None:
    gate = AdmissionGate(mode=mode, initial_version=1)
    inside = asyncio.ensure_future(_hold_batch(gate))
    await turns()
    outside = [
        asyncio.ensure_future(entered(gate, [], "late", min_version=2)),
        asyncio.ensure_future(switch(gate)),
    ]
    await turns()
    gate.close()
    gate.close()
    for each in outside:
        with pytest.raises(aiosync.LocalProtocolError, match="closed"):
            await each
    assert not gate.ready
    await refused(gate.request(), aiosync.LocalProtocolError, "closed")
    with pytest.raises(aiosync.LocalProtocolError, match="closed"):
        await gate.ready.wait(timeout=5)
    assert gate.running == 1
    inside.cancel()
    await asyncio.wait([inside])
    assert "closed" in repr(gate)


async def _hold_batch(gate: AdmissionGate) -> None:
    async with gate.batch():
        await asyncio.sleep(3600)


async def test_nothing_is_lost_or_mixed_under_load() -> None:
    gate = AdmissionGate(initial_version=1, timeout=20)
    weights = {"a": 1, "b": 1}
    answered = 0

    async def ask() -> None:
        nonlocal answered
        for _ in range(100):
            async with gate.request() as version:
                first = weights["a"]
                await asyncio.sleep(0)
                assert first == weights["b"] == version
                answered += 1

    async def switch_without_pause() -> None:
        for _ in range(50):
            async with gate.swap() as swap:
                weights["a"] = swap.version = gate.version + 1
                await asyncio.sleep(0)
                weights["b"] = swap.version

    switches = [switch_without_pause() for _ in range(2)]
    await asyncio.gather(*switches, *(ask() for _ in range(20)))
    assert answered == 2000
    assert gate.version == 101


@pytest.mark.parametrize("swap_timeout", [5.0, None])
async def test_switches_without_a_pause_let_requests_in(swap_timeout: float | None) -> None:
    gate = AdmissionGate(initial_version=1, swap_timeout=swap_timeout)
    log: list = []
    asking = asyncio.ensure_future(entered(gate, log, "between"))
    for _ in range(20):
        await switch(gate)
    assert asking.done()
    assert log[0][1] < 20


async def test_options_and_errors() -> None:
    for options in (
        {"mode": "now"},
        {"timeout": 0},
        {"timeout": "5"},
        {"swap_timeout": -1.0},
        {"initial_version": 0},
    ):
        with pytest.raises(aiosync.ConfigError):
            AdmissionGate(**options)
    late = aiosync.AdmissionTimeout("late", version=1, min_version=2, retry_after=3.0)
    copy = pickle.loads(pickle.dumps(late))
    assert (copy.version, copy.min_version, copy.retry_after) == (1, 2, 3.0)
    assert pickle.loads(pickle.dumps(aiosync.SwapTimeout("late", running=4))).running == 4
    with pytest.raises(aiosync.RecvTimeout):
        await AdmissionGate().ready.wait(timeout=0.01)


# -- the versions that answered a request ---------------------------------------------------------


async def test_the_runs_of_a_request_are_those_of_its_tokens() -> None:
    """The span of each of many requests has the versions that made its tokens.

    The weights are their version, so that a token shows it.
    """
    gate = AdmissionGate(mode="immediate", initial_version=1)
    weights = 1
    spans: list[tuple[VersionSpan, list[int]]] = []

    async def generate(length: int) -> None:
        tokens = []
        async with (request := gate.request()):
            for _ in range(length):
                async with gate.batch():
                    await asyncio.sleep(0)
                    tokens.append(weights)
                await asyncio.sleep(0)
        spans.append((request.span, tokens))

    async def train() -> None:
        nonlocal weights
        for _ in range(40):
            async with gate.swap() as swap:
                weights = swap.version = gate.version + 1
            await turns()

    await asyncio.gather(train(), *(generate(length) for length in range(1, 30)))
    await switch(gate)
    for span, tokens in spans:
        assert span == VersionSpan.from_runs([(version, 1) for version in tokens])
        assert staleness(gate.version, span) == gate.version - min(tokens)
        mean = gate.version - sum(tokens) / len(tokens)
        assert staleness(gate.version, span, "token") == pytest.approx(mean)
    assert max(len(span.runs) for span, _ in spans) > 5


@both_modes
async def test_an_engine_counts_the_tokens_of_requests_that_it_computes_together(mode) -> None:
    gate = AdmissionGate(mode=mode, initial_version=3)
    short, long = gate.request(), gate.request()
    async with short, gate.batch():
        # This batch reads the prompt, and makes no token of the answer.
        pass
    async with long:
        switching = asyncio.ensure_future(switch(gate)) if mode == "immediate" else None
        long.count(3, 5)
        await turns()
        long.count(gate.version)
        long.count(gate.version, 4)
        if switching is not None:
            await switching
        await turns()
    expected = ((3, 5), (4, 5)) if mode == "immediate" else ((3, 10),)
    assert long.span == VersionSpan.from_runs(expected)
    assert long.versions == tuple(version for version, _ in expected)
    assert short.span == VersionSpan(3, 3, None, ((3, 1),) if mode == "immediate" else ())


async def test_versions_of_two_trainers_in_one_request_are_no_age() -> None:
    gate = AdmissionGate(mode="immediate")
    await switch(gate, 57, 0xA)
    async with (request := gate.request()):
        for version, epoch in ((1, 0xB), (2, 0xB)):
            async with gate.batch():
                pass
            await switch(gate, version, epoch)
    assert request.versions == (57, 1)
    assert staleness(60, request.span) is None
    assert staleness(60, request.span, "token") is None


# -- a server that joins --------------------------------------------------------------------------


@both_modes
async def test_nobody_is_let_in_before_the_version_that_is_required(mode) -> None:
    gate = AdmissionGate(mode=mode, initial_version=1)
    assert gate.ready and gate.waits_for == 0
    gate.require(57, 0xA)
    assert not gate.ready and gate.waits_for == 57
    await refused(
        gate.request(timeout=0), aiosync.AdmissionTimeout, "has version 1 and answers from .* 57 on"
    )
    with pytest.raises(aiosync.RecvTimeout, match="waits for version 57"):
        await gate.ready.wait(timeout=0.01)
    log: list = []
    waiting = asyncio.ensure_future(entered(gate, log, "late"))
    for version, epoch in ((56, 0xA), (99, 0xB), (58, 0xA)):
        await turns()
        assert not log
        await switch(gate, version, epoch)
    await waiting
    assert log == [("late", 58)]
    # A trainer that restarts later counts from 1 again.
    await switch(gate, 1, 0xB)
    assert gate.ready and gate.waits_for == 0
    # The gate already has the version that is required here.
    gate.require(1, 0xB)
    assert gate.ready


async def test_what_is_required_no_more_lets_in_who_waits() -> None:
    gate = AdmissionGate()
    assert gate.waits_for == 1
    gate.require(5)
    assert gate.waits_for == 5
    await switch(gate, 4)
    waiting = asyncio.ensure_future(entered(gate, log := [], "waited"))
    await turns()
    gate.require(0)
    await waiting
    assert log == [("waited", 4)]
