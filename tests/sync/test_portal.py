"""The thread behind the facade: when it runs, who shares it, and how calls end."""

from __future__ import annotations

import asyncio
import copy
import gc
import sys
import threading
import time
import traceback
import warnings
import weakref
from typing import Any

import pytest
import torch

import aiosync
import aiosync.sync
from aiosync.sync import _portal
from tests.sync import _tools as tools


class _Nobody:
    def forgotten(self) -> None: ...

    def abort(self) -> None: ...


def _portal_tasks() -> set[str]:
    assert _portal._portal is not None
    return {task.get_name() for task in asyncio.all_tasks(_portal._portal.loop)}


# -- the lease --------------------------------------------------------------------------------


def test_construction_and_roles_start_nothing() -> None:
    scheme = tools.SHM()
    scheme.init_on_sender(model=tools.filled(1.0), num_workers=1)
    assert scheme.version == 0
    assert tools.portal_threads() == []
    scheme.shutdown()
    assert tools.portal_threads() == []


@pytest.mark.parametrize("make", tools.SCHEMES)
def test_the_thread_is_there_from_connect_to_shutdown(make: Any) -> None:
    with tools.pair(make, tools.filled(1.0), tools.filled(0.0)) as (sender, receiver):
        (thread,) = tools.portal_threads()
        assert thread.daemon
        receiver.shutdown()
        assert tools.portal_threads() == [thread]
        sender.shutdown()
        assert not thread.is_alive()
    assert tools.portal_threads() == []


def test_several_schemes_share_it() -> None:
    with tools.pair(tools.SHM, tools.filled(1.0), tools.filled(0.0)) as (first, _):
        (thread,) = tools.portal_threads()
        with tools.pair(tools.PIPE, tools.filled(1.0), tools.filled(0.0)) as (second, _):
            assert tools.portal_threads() == [thread]
            assert first.send().acked == second.send().acked == {0}
        assert tools.portal_threads() == [thread]
        assert first.send().acked == {0}


def test_a_lease_is_given_back_once() -> None:
    first, second = _portal.lease(_Nobody()), _portal.lease(_Nobody())
    threads = [tools.in_thread(first.release) for _ in range(8)]
    for thread in threads:
        thread.join()
    first.release()
    assert not first.valid
    assert second.valid
    assert len(tools.portal_threads()) == 1
    second.abort()
    second.forgotten()
    tools.until(lambda: not tools.portal_threads())


def test_leases_from_many_threads() -> None:
    barrier = threading.Barrier(8)
    wrong = []

    def use(number: int) -> None:
        async def compute() -> int:
            await asyncio.sleep(0)
            return number

        barrier.wait()
        for _ in range(30):
            held = _portal.lease(_Nobody())
            if held.call(compute()) != number:
                wrong.append(number)
            held.release()

    threads = [tools.in_thread(lambda number=number: use(number)) for number in range(8)]
    for thread in threads:
        thread.join(tools.PATIENCE)
        assert not thread.is_alive()
    assert wrong == []
    tools.until(lambda: not tools.portal_threads())


# -- calls ------------------------------------------------------------------------------------


def test_errors_keep_type_cause_and_traceback() -> None:
    cause = KeyError("why")

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("what") from cause

    held = _portal.lease(_Nobody())
    try:
        with pytest.raises(ValueError, match="what") as caught:
            held.call(fail())
        assert caught.value.__cause__ is cause
        names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert names[-1] == "fail"
        assert names[0] == "test_errors_keep_type_cause_and_traceback"
    finally:
        held.release()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_would_end_the_loop_reaches_the_caller_instead(kind: type[BaseException]) -> None:
    async def fail() -> None:
        raise kind("from a coroutine")

    async def succeed() -> str:
        return "fine"

    held = _portal.lease(_Nobody())
    try:
        with pytest.raises(kind, match="from a coroutine"):
            held.call(fail())
        assert held.call(succeed()) == "fine"
    finally:
        held.release()


def test_an_error_leaves_no_cycle_behind() -> None:
    """What a caller's frames hold goes with the exception, not at some later collection."""

    class Marker:
        pass

    def fail() -> weakref.ref[Marker]:
        marker = Marker()
        found = weakref.ref(marker)
        try:
            tools.SHM().send()
        except aiosync.LocalProtocolError:
            return found
        raise AssertionError("it did not raise")

    gc.collect()
    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()


def test_stopping_wakes_every_caller() -> None:
    """Whatever the loop's end finds still waiting gets an error, not silence."""
    held = _portal.lease(_Nobody())
    outcomes: list[BaseException] = []

    def wait() -> None:
        try:
            held.call(asyncio.Event().wait())
        except aiosync.TransportClosed as exc:
            outcomes.append(exc)

    threads = [tools.in_thread(wait) for _ in range(3)]
    tools.until(lambda: len(_portal_tasks()) == 3)
    held.release()
    for thread in threads:
        thread.join(tools.PATIENCE)
    assert len(outcomes) == 3
    coroutine = asyncio.sleep(0)
    with pytest.raises(aiosync.TransportClosed):
        held.call(coroutine)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, _portal.new_event_loop])
def test_stopping_twice_lets_the_clean_up_end(
    new_loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the interpreter's end: the last lease stops the portal, and so does the hook."""
    monkeypatch.setattr(_portal, "new_event_loop", new_loop)
    held = _portal.lease(_Nobody())
    portal = _portal._portal
    assert portal is not None
    cleaned: list[bool] = []

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            portal.stop(join=False)
            await asyncio.sleep(0.05)
            cleaned.append(True)

    tasks: list[asyncio.Task[None]] = []

    async def start() -> None:
        tasks.append(asyncio.create_task(slow_to_end()))
        await asyncio.sleep(0)

    held.call(start())
    portal.stop(join=False)
    held.release()
    portal.stop(join=True)
    assert cleaned == [True]
    assert portal.loop.is_closed()


def test_calls_from_several_threads_at_once() -> None:
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(tools.SHM, source, target) as (sender, receiver):
        versions: list[int] = []

        def send() -> None:
            versions.extend(sender.send().version for _ in range(25))

        threads = [tools.in_thread(send) for _ in range(4)]
        for thread in threads:
            thread.join(tools.PATIENCE)
        assert sorted(versions) == list(range(2, 102))
        assert receiver.wait_for_version(101) == 101


def test_first_calls_from_several_threads_take_one_lease() -> None:
    scheme = aiosync.sync.NoWeightSyncScheme()
    scheme.init_on_sender(num_workers=1)
    scheme.connect()
    scheme._lease.release()  # type: ignore[union-attr]
    scheme._lease = None  # as before the first call, and this scheme can be used from any loop
    barrier = threading.Barrier(6)

    def call() -> None:
        barrier.wait()
        scheme.send()

    threads = [tools.in_thread(call) for _ in range(6)]
    for thread in threads:
        thread.join(tools.PATIENCE)
    assert _portal._portal is not None
    assert len(_portal._portal.leases) == 1
    scheme.shutdown()
    assert tools.portal_threads() == []


# -- calls that fail leave nothing behind -----------------------------------------------------


@pytest.mark.parametrize("make", tools.SCHEMES)
def test_nobody_comes(make: Any) -> None:
    sender = make()
    sender.init_on_sender(model=tools.filled(1.0), num_workers=2)
    with pytest.raises(aiosync.ConnectTimeout, match=r"workers \[0, 1\] did not connect"):
        sender.connect(timeout=0.05)
    assert tools.portal_threads() == []
    with pytest.raises(aiosync.TransportClosed, match=r"copy\.copy\(scheme\)"):
        sender.send()
    assert tools.portal_threads() == []


def test_nobody_listens() -> None:
    receiver = tools.SHM()
    receiver.init_on_receiver(model=tools.filled(1.0))
    with pytest.raises(aiosync.ConnectTimeout, match="no trainer listened"):
        receiver.connect(timeout=0.05)
    assert tools.portal_threads() == []


def test_calls_before_connect() -> None:
    scheme = tools.SHM()
    scheme.init_on_sender(model=tools.filled(1.0), num_workers=1)
    for call in (scheme.send, scheme.send_async, scheme.receive):
        with pytest.raises(aiosync.LocalProtocolError):
            call()
        assert tools.portal_threads() == []
    scheme.shutdown()


def test_wrong_arguments_start_nothing() -> None:
    scheme = tools.SHM()
    with pytest.raises(TypeError, match="wait"):
        scheme.send(wait=True)  # type: ignore[call-arg]
    assert tools.portal_threads() == []


# -- inside a running loop --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "instead"),
    [
        ("connect", "await scheme.connect()"),
        ("send", "await scheme.send()"),
        ("receive", "await scheme.receive()"),
        ("wait_for_version", "await scheme.wait_for_version()"),
        ("send_async", "scheme.send_nowait()"),
        ("wait_async", "await handle"),
        ("shutdown", "await scheme.aclose()"),
    ],
)
def test_refuses_to_block_a_running_loop(method: str, instead: str) -> None:
    with tools.pair(tools.SHM, tools.filled(1.0), tools.filled(0.0)) as (sender, _):
        args = (1,) if method == "wait_for_version" else ()

        async def main() -> None:
            with pytest.raises(aiosync.LocalProtocolError) as caught:
                getattr(sender, method)(*args)
            assert f"`{instead}`" in str(caught.value)
            assert "running event loop" in str(caught.value)

        asyncio.run(main())
        assert sender.send().acked == {0}


def test_what_does_not_wait_may_be_used_inside_a_loop() -> None:
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(tools.SHM, source, target, apply="manual") as (sender, receiver):

        async def main() -> None:
            assert receiver.apply_pending() is None
            with receiver.reading():
                assert (sender.version, receiver.version, receiver.lag) == (1, 1, 0)

        asyncio.run(main())


# -- shutting down ----------------------------------------------------------------------------


def test_shutdown_is_idempotent() -> None:
    with tools.pair(tools.SHM, tools.filled(1.0), tools.filled(0.0)) as (sender, receiver):
        for scheme in (receiver, sender, sender, receiver):
            scheme.shutdown()
            scheme.abort()
        assert "closed" in repr(sender)


def test_shutdown_from_another_thread() -> None:
    with tools.pair(tools.SHM, tools.filled(1.0), tools.filled(0.0)) as (sender, receiver):
        for scheme in (receiver, sender):
            thread = tools.in_thread(scheme.shutdown)
            thread.join(tools.PATIENCE)
            assert not thread.is_alive()
        assert tools.portal_threads() == []


def test_shutdown_from_several_threads_at_once() -> None:
    for _ in range(10):
        with tools.pair(tools.PIPE, tools.filled(1.0), tools.filled(0.0)) as (sender, receiver):
            barrier = threading.Barrier(6)
            raised: list[BaseException] = []

            def shut(
                scheme: Any, barrier: threading.Barrier = barrier, raised: list[Any] = raised
            ) -> None:
                barrier.wait()
                try:
                    scheme.shutdown()
                except BaseException as exc:  # noqa: BLE001 - checked below
                    raised.append(exc)

            threads = [
                tools.in_thread(lambda scheme=scheme, shut=shut: shut(scheme))
                for scheme in (sender, receiver) * 3
            ]
            for thread in threads:
                thread.join(tools.PATIENCE)
                assert not thread.is_alive()
            assert raised == []
            assert tools.portal_threads() == []


def test_shutdown_wakes_a_blocked_receive() -> None:
    with tools.pair(tools.SHM, tools.filled(1.0), tools.filled(0.0)) as (_, receiver):
        outcome: list[BaseException] = []

        def wait() -> None:
            try:
                receiver.receive()
            except aiosync.AiosyncError as exc:
                outcome.append(exc)

        thread = tools.in_thread(wait)
        tools.until(lambda: receiver._calls == 1)
        receiver.shutdown()
        thread.join(tools.PATIENCE)
        assert not thread.is_alive()
        assert [type(exc) for exc in outcome] == [aiosync.TransportClosed]


def test_abort_does_not_wait() -> None:
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(tools.SHM, source, target) as (sender, receiver):
        sender.abort()
        with pytest.raises(aiosync.PeerClosed):
            receiver.receive(timeout=tools.PATIENCE)
        receiver.abort()
        tools.until(lambda: not tools.portal_threads())
        assert tools.value_of(target) == 1.0


def test_a_forgotten_scheme_says_so_once() -> None:
    sender, receiver = tools.roles(tools.SHM, tools.filled(1.0), tools.filled(0.0))
    tools.join(sender, receiver)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del sender
        with pytest.raises(aiosync.PeerClosed):
            receiver.receive(timeout=tools.PATIENCE)
        del receiver
        tools.until(lambda: not tools.portal_threads())
        gc.collect()
    texts = [str(item.message) for item in caught if item.category is ResourceWarning]
    assert len(texts) == 2, texts
    assert all("use `with scheme:` or `scheme.shutdown()`" in text for text in texts)


def test_a_forgotten_scheme_is_closed_even_where_warnings_are_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unraisable: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda hook: unraisable.append(str(hook.exc_value)))
    sender, receiver = tools.roles(tools.SHM, tools.filled(1.0), tools.filled(0.0))
    tools.join(sender, receiver)
    with receiver:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            del sender
        with pytest.raises(aiosync.PeerClosed):
            receiver.receive(timeout=tools.PATIENCE)
    assert len(unraisable) == 1
    assert "never closed" in unraisable[0]


def test_schemes_without_a_connection_go_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheme = aiosync.sync.NoWeightSyncScheme()
        scheme.init_on_sender(num_workers=1)
        scheme.connect()
        del scheme
        tools.until(lambda: not tools.portal_threads())
        copy.copy(tools.SHM()).shutdown()


# -- forwards beside updates ------------------------------------------------------------------


def _torn(make: Any, forwards: int, reading: bool) -> tuple[int, int]:
    """How many of ``forwards`` saw two versions, and how many updates there were."""
    source = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(6)])
    target = copy.deepcopy(source)
    tools.fill(source, 1.0)
    options: dict[str, Any] = {"guard": "reading"} if reading else {}
    torn = updates = 0
    with tools.pair(make, source, target, **options) as (sender, receiver):
        over = threading.Event()

        def train() -> None:
            nonlocal updates
            value = 1.0
            while not over.is_set():
                value = value % 100 + 1
                tools.fill(source, value)
                sender.send()
                updates += 1

        first, last = target[0], target[-1]
        trainer = tools.in_thread(train)
        x = torch.zeros(1, 8)
        seen: list[float] = []
        first.register_forward_hook(lambda *_: seen.append(float(first.bias.detach()[0])))
        last.register_forward_pre_hook(lambda *_: seen.append(float(last.bias.detach()[0])))
        try:
            for _ in range(forwards):
                seen.clear()
                if reading:
                    with receiver.reading(), torch.no_grad():
                        target(x)
                else:
                    with torch.no_grad():
                        target(x)
                torn += seen[0] != seen[1]
        finally:
            over.set()
            trainer.join(tools.PATIENCE)
    return torn, updates


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "reading"),
    [
        pytest.param(tools.PIPE, False, id="pipe-hooks"),
        pytest.param(tools.SHM, True, id="shm-reading"),
        pytest.param(tools.PIPE, True, id="pipe-reading", marks=pytest.mark.heavy),
        pytest.param(tools.SHM, False, id="shm-hooks", marks=pytest.mark.heavy),
    ],
)
def test_no_forward_mixes_two_versions(make: Any, reading: bool) -> None:
    torn, updates = _torn(make, 5_000, reading)
    assert torn == 0
    assert updates > 20


def test_updates_arrive_while_the_main_thread_computes() -> None:
    """The portal's thread applies by itself; nobody has to call receive()."""
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(tools.SHM, source, target) as (sender, receiver):
        tools.fill(source, 2.0)
        thread = tools.in_thread(sender.send)
        deadline = time.monotonic() + tools.PATIENCE
        value = 1.0
        while value != 2.0:
            target(torch.zeros(1, 4))
            with receiver.reading():  # outside, an update may come between two parameters
                value = tools.value_of(target)
            assert time.monotonic() < deadline
        thread.join(tools.PATIENCE)


def test_a_lease_may_be_given_back_while_another_portal_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first steps of the portal's thread may collect a scheme that nobody closed."""

    class Tenant:
        def forgotten(self) -> None:
            return None

        def abort(self) -> None:
            return None

    first = _portal.lease(Tenant())
    # So that the next lease starts another one. monkeypatch would put this portal back at the end.
    _portal._portal = None
    start = threading.Thread.start
    stuck: list[bool] = []

    def start_while_another_thread_collects(thread: threading.Thread) -> None:
        if thread.name == "aiosync-portal":
            collector = threading.Thread(target=first.forgotten, daemon=True)
            start(collector)
            collector.join(5.0)
            stuck.append(collector.is_alive())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_while_another_thread_collects)
    second = _portal.lease(Tenant())
    second.release()
    assert stuck == [False]


def test_a_portal_that_failed_to_start_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may hold a lease of it by then, and even wait for it."""
    outcomes: list[BaseException] = []
    others: list[_portal.Lease] = []
    start = threading.Thread.start

    def wait() -> None:
        try:
            others[0].call(asyncio.sleep(0))
        except aiosync.TransportClosed as exc:
            outcomes.append(exc)

    def fail_while_another_thread_waits(thread: threading.Thread) -> None:
        if thread.name != "aiosync-portal":
            start(thread)
            return
        portal = _portal._portal
        assert portal is not None
        others.append(_portal.lease(_Nobody()))
        waiting.append(tools.in_thread(wait))
        tools.until(lambda: len(portal._calls) == 1)
        time.sleep(0.05)  # it has asked the loop by now
        raise RuntimeError("can't start new thread")

    waiting: list[threading.Thread] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail_while_another_thread_waits)
        with pytest.raises(RuntimeError, match="can't start"):
            _portal.lease(_Nobody())
    waiting[0].join(tools.PATIENCE)
    assert not waiting[0].is_alive()
    assert len(outcomes) == 1
    assert not others[0].valid

    held = _portal.lease(_Nobody())
    held.call(asyncio.sleep(0))
    others[0].release()
    held.call(asyncio.sleep(0))
    held.release()
    assert tools.portal_threads() == []
    assert _portal._portal is None
