"""The virtual clock jumps when, and only when, the loop is idle."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from aiosync.testing import VirtualClock


def test_waiting_takes_no_real_time_and_exact_virtual_time() -> None:
    clock = VirtualClock()
    started = time.monotonic()

    async def main() -> float:
        await asyncio.sleep(3600)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(120):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert clock.run(main()) == clock.time() == 3720
    assert time.monotonic() - started < 60


def test_timers_fire_in_order_and_at_their_times() -> None:
    clock = VirtualClock(start=100.0)
    fired: list[tuple[str, float]] = []

    async def at(name: str, delay: float) -> None:
        await asyncio.sleep(delay)
        fired.append((name, clock.time()))

    async def main() -> None:
        await asyncio.gather(at("late", 5), at("early", 0.25), at("middle", 1))

    clock.run(main())
    assert fired == [("early", 100.25), ("middle", 101.0), ("late", 105.0)]


def test_time_stands_still_while_callbacks_are_ready() -> None:
    clock = VirtualClock()

    async def main() -> float:
        timer = asyncio.ensure_future(asyncio.sleep(1))
        for _ in range(1000):
            await asyncio.sleep(0)
        before = clock.time()
        assert not timer.done()
        await timer
        return before

    assert clock.run(main()) == 0.0


def test_data_on_a_socket_comes_before_any_jump() -> None:
    clock = VirtualClock()

    async def main() -> tuple[bytes, float]:
        loop = asyncio.get_running_loop()
        left, right = socket.socketpair()
        with left, right:
            left.setblocking(False)
            right.setblocking(False)
            async with asyncio.timeout(1):
                receiving = asyncio.ensure_future(loop.sock_recv(right, 10))
                await asyncio.sleep(0)
                left.send(b"hello")
                return await receiving, clock.time()

    assert clock.run(main()) == (b"hello", 0.0)


def test_the_clock_does_not_jump_while_a_thread_works() -> None:
    clock = VirtualClock()
    release = threading.Event()

    async def main() -> str:
        loop = asyncio.get_running_loop()
        working = loop.run_in_executor(None, lambda: "done" if release.wait(5) else "late")
        loop.call_soon(threading.Timer(0.02, release.set).start)
        async with asyncio.timeout(3):  # virtual seconds: they would be over at once otherwise
            return await working

    assert clock.run(main()) == "done"
    assert 0 < clock.time() < 3


def test_a_deadline_on_a_stuck_thread_still_passes() -> None:
    clock = VirtualClock()
    release = threading.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        working = loop.run_in_executor(None, release.wait, 5)
        try:
            async with asyncio.timeout(0.02):
                await asyncio.shield(working)
        finally:
            release.set()
            await working

    with pytest.raises(TimeoutError):
        clock.run(main())


def test_without_timers_the_loop_waits_for_real() -> None:
    clock = VirtualClock()

    async def main() -> float:
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        threading.Timer(0.02, loop.call_soon_threadsafe, (woken.set,)).start()
        await woken.wait()
        return clock.time()

    assert clock.run(main()) == 0


def test_advance_by_hand_makes_timers_due() -> None:
    clock = VirtualClock()

    async def main() -> float:
        timer = asyncio.ensure_future(asyncio.sleep(10))
        await asyncio.sleep(0)
        clock.advance(12)
        await timer
        return clock.time()

    assert clock.run(main()) == 12


def test_late_times_still_advance() -> None:
    """Today as a float has steps far coarser than asyncio's own resolution."""
    clock = VirtualClock(start=1.8e9)

    async def main() -> None:
        due = asyncio.Event()
        asyncio.get_running_loop().call_at(clock.time(), due.set)
        await due.wait()
        for _ in range(10):
            await asyncio.sleep(0.01)

    clock.run(main())
    assert clock.time() == pytest.approx(1.8e9 + 0.1, abs=0.001)
