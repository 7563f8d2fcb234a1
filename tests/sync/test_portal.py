"""The portal, the thread behind the facade: its life, its users, and how calls and programs end."""

from __future__ import annotations

import asyncio
import copy
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import aiosync
import aiosync.sync
from tests.schemes import _models as models
from tests.sync import _tools as tools


def test_the_thread_is_there_from_connect_to_shutdown_and_shared() -> None:
    source, target = tools.filled(1.0), tools.filled(0.0)
    first, other = tools.roles(tools.SHM, source, target)
    assert (first.version, tools.portal_threads()) == (0, [])
    with first, other:
        tools.join(first, other)
        [thread] = tools.portal_threads()
        assert thread.daemon
        with tools.pair(tools.PIPE, source, tools.filled(0.0)) as (second, _):
            assert tools.portal_threads() == [thread]
            assert first.send().acked == second.send().acked == {0}
        assert tools.portal_threads() == [thread]
        assert first.send().acked == {0}
        other.shutdown()
        assert thread.is_alive()
        first.shutdown()
        assert not thread.is_alive()
    assert tools.portal_threads() == []


def test_what_would_block_a_running_loop_is_refused() -> None:
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(tools.SHM, source, target, apply="manual") as (sender, receiver):

        async def main() -> None:
            for call, instead in (
                (sender.connect, "await scheme.connect()"),
                (sender.send, "await scheme.send()"),
                (receiver.receive, "await scheme.receive()"),
                (lambda: receiver.wait_for_version(1), "await scheme.wait_for_version()"),
                (sender.send_async, "scheme.send_nowait()"),
                (sender.wait_async, "await handle"),
                (sender.shutdown, "await scheme.aclose()"),
            ):
                with pytest.raises(aiosync.LocalProtocolError) as caught:
                    call()
                assert f"`{instead}`" in str(caught.value)
            # apply_pending() does not wait, so the loop's thread may call it.
            assert receiver.apply_pending() is None
            with receiver.reading():
                assert (sender.version, receiver.version, receiver.lag) == (1, 1, 0)

        asyncio.run(main())
        sender.send_async()
        assert receiver.wait_for_version(2) == 2


def test_shutdown_from_several_threads_at_once_wakes_a_blocked_receive() -> None:
    for _ in range(5):
        with tools.pair(tools.PIPE, tools.filled(1.0), tools.filled(0.0)) as (sender, receiver):
            barrier = threading.Barrier(6)

            def wait(receiver: aiosync.sync.WeightSyncScheme = receiver) -> None:
                with pytest.raises((aiosync.TransportClosed, aiosync.PeerClosed)):
                    receiver.receive()

            def shut(
                scheme: aiosync.sync.WeightSyncScheme, barrier: threading.Barrier = barrier
            ) -> None:
                barrier.wait()
                scheme.shutdown()

            with tools.threads(wait) as [waiting]:
                tools.until(lambda waiting=waiting: tools.is_asleep(waiting))
                shuts = [lambda scheme=s, shut=shut: shut(scheme) for s in (sender, receiver) * 3]
                with tools.threads(*shuts):
                    pass
            assert tools.portal_threads() == []


class Chosen(torch.nn.Linear):
    """A model that calls a function in the portal once it is chosen for a receiver."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__(4, 2)
        self.then = then

    def register_forward_pre_hook(self, *args: Any, **options: Any) -> Any:
        self.then()
        return super().register_forward_pre_hook(*args, **options)


@pytest.mark.asyncio
async def test_shutdown_beside_a_call_that_ends_says_farewell() -> None:
    """A worker computes, another thread waits for an update, and a third one closes the scheme."""
    computing, free = threading.Event(), threading.Event()

    def compute(*_: object) -> None:
        computing.set()
        assert free.wait(tools.PATIENCE)

    def receive() -> None:
        assert other.receive(timeout=0.3) is None

    def work() -> None:
        target = tools.filled(0.0)
        other.init_on_receiver(model_id="policy", model=target, worker_idx=0)
        other.connect()
        target.register_forward_hook(compute)
        threads = [
            threading.Thread(target=each) for each in (lambda: target(torch.zeros(1, 4)), receive)
        ]
        for thread in threads:
            thread.start()
        assert computing.wait(tools.PATIENCE)
        threading.Timer(0.6, free.set).start()
        other.shutdown()
        for thread in threads:
            thread.join()

    scheme = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0")
    async with scheme:
        scheme.init_on_sender(model_id="policy", model=tools.filled(1.0), num_workers=1)
        other = aiosync.sync.TCPWeightSyncScheme(scheme.address)
        working = asyncio.ensure_future(asyncio.to_thread(work))
        await scheme.connect()
        await working
        report = await scheme.send()
        assert (report.left, report.lost) == ({0}, {})
    assert not tools.portal_threads()


@pytest.mark.parametrize("kind", [TimeoutError, aiosync.SyncTimeout])
def test_a_timeout_of_a_model_is_its_own(kind: type[Exception]) -> None:
    error = kind("the reads did not end")

    def fail() -> None:
        raise error

    with tools.pair(tools.SHM, tools.filled(1.0), tools.filled(0.0)) as (_, receiver):
        with pytest.raises(kind, match="the reads did not end"):
            receiver.model = Chosen(fail)


@pytest.mark.slow
def test_a_model_that_takes_long_is_waited_for_and_the_next_one_is_not() -> None:
    """A model is not chosen after its assignment has raised an error."""
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        over.wait(tools.PATIENCE)

    long, late = Chosen(hold), Chosen(lambda: None)
    with tools.pair(tools.SHM, tools.filled(1.0), tools.filled(0.0)) as (_, receiver):
        errors: list[aiosync.AiosyncError] = []

        def choose() -> None:
            try:
                receiver.model = long
            except aiosync.AiosyncError as exc:
                errors.append(exc)

        with tools.threads(choose):
            assert begun.wait(tools.PATIENCE)
            try:
                with pytest.raises(aiosync.SyncTimeout, match="did not run within 30 s"):
                    receiver.model = late
            finally:
                over.set()
        assert errors == []
        assert receiver.model is long
        # A call of the portal comes after those that were scheduled before.
        receiver.wait_for_version(1)
        assert (receiver.model is long, tools.value_at(receiver)) == (True, 1.0)


@pytest.mark.parametrize("action", ["always", "error"])
def test_a_forgotten_scheme_is_closed_and_says_so_once(
    action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda hook: texts.append(str(hook.exc_value)))
    sender, receiver = tools.roles(tools.SHM, tools.filled(1.0), tools.filled(0.0))
    tools.join(sender, receiver)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action, ResourceWarning)  # type: ignore[arg-type]
        del sender
        with pytest.raises(aiosync.PeerClosed):
            receiver.receive(timeout=tools.PATIENCE)
        del receiver
        tools.until(lambda: not tools.portal_threads())
        gc.collect()
    texts += [str(item.message) for item in caught if item.category is ResourceWarning]
    assert len(texts) == 2, texts
    assert all("`scheme.shutdown()`" in text for text in texts)


def test_a_scheme_that_was_asked_whether_it_is_ready_is_forgotten_at_once() -> None:
    """The scheme does not wait for the garbage collector, which would close it late."""
    scheme = tools.SHM()
    forgotten = weakref.ref(scheme)
    gc.disable()
    try:
        assert not scheme.ready
        del scheme
        assert forgotten() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("call", ["send", "send_async", "shutdown"])
def test_a_call_inside_of_a_send_is_refused(call: str) -> None:
    class Owner:
        def get_model(self, model_id: str) -> Any:
            if nested:
                getattr(sender, call)()
            return model

    nested, owner, model = False, Owner(), tools.filled(1.0)
    sender = tools.SHM(timeout=tools.PATIENCE)
    sender.init_on_sender(model_id="policy", context=owner, num_workers=1)
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model_id="policy", model=tools.filled(0.0), worker_idx=0)
    with sender, receiver:
        tools.join(sender, receiver)
        sender.send()
        nested = True
        with pytest.raises(aiosync.LocalProtocolError, match="inside of a send"):
            sender.send()
        nested = False
        assert sender.send().acked == {0}


@pytest.mark.parametrize(
    "make", [aiosync.SharedMemWeightSyncScheme, aiosync.NoWeightSyncScheme], ids=["shm", "none"]
)
def test_connect_without_an_asyncio_loop_says_what_to_use(make) -> None:
    scheme = make()
    scheme.init_on_sender(model_id="policy", model=models.linear())
    connecting = scheme.connect()
    with pytest.raises(aiosync.LocalProtocolError, match="asyncio event loop"):
        # Trio runs a coroutine in this way, without an asyncio loop.
        connecting.send(None)
    scheme.abort()


# -- an interpreter that ends without shutdown() --------------------------------------------------


_START = """
import atexit, sys, threading
if {loop!r} == "asyncio":
    sys.modules["uvloop"] = None
import aiosync.sync
from tests.sync import _tools as tools

{before}
sender, receiver = tools.roles(tools.{make}, tools.filled(1.0), tools.filled(0.0))
tools.join(sender, receiver)
sender.send()
{after}
print("end")
"""


def _check(fresh: tools.Fresh, text: str, *, resource_warnings: bool = False) -> str:
    done = fresh.script(text, resource_warnings=resource_warnings)
    assert (done.returncode, done.stdout) == (0, "end\n"), done
    for noise in tools.NOISE:
        assert noise not in done.stderr, done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "make"), [("uvloop", "SHM"), ("asyncio", "PIPE")])
def test_exit_without_shutdown(loop: str, make: str, fresh: tools.Fresh) -> None:
    text = _START.format(loop=loop, make=make, before="", after="")
    assert _check(fresh, text) == ""
    warned = _check(fresh, text, resource_warnings=True)
    assert warned.count("was never closed") == 2
    assert warned.count("ResourceWarning: <") == 2, warned


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_shutdown_from_atexit(when: str, fresh: tools.Fresh) -> None:
    """A function that is registered before the portal's clean-up runs after it, and vice versa."""
    lines = {"before": "", "after": ""}
    lines[when] = "atexit.register(lambda: (receiver.shutdown(), sender.shutdown()))"
    text = _START.format(loop="uvloop", make="SHM", **lines)
    stderr = _check(fresh, text, resource_warnings=True)
    assert stderr.count("was never closed") == (2 if when == "before" else 0)


@pytest.mark.slow
def test_shutdown_from_atexit_after_a_large_send(fresh: tools.Fresh) -> None:
    """The thread that copied the weights has ended then."""
    text = """
import atexit, torch
from tests.sync import _tools as tools

models = [torch.nn.Linear(2048, 2048) for _ in range(2)]
sender, receiver = tools.roles(tools.SHM, *models)
tools.join(sender, receiver)
for _ in range(3):
    sender.send()
atexit.register(lambda: (sender.shutdown(), receiver.shutdown(), print("end")))
"""
    _check(fresh, text, resource_warnings=True)


@pytest.mark.slow
def test_abort_in_a_signal_handler_wakes_who_waits(fresh: tools.Fresh) -> None:
    text = """
import asyncio, os, signal, threading, torch
import aiosync, aiosync.sync

sender = aiosync.sync.SharedMemWeightSyncScheme()
sender.init_on_sender(model_id="policy", model=torch.nn.Linear(2, 2), num_workers=1)
worker = aiosync.sync.twin(sender)
worker.init_on_receiver(model_id="policy", model=torch.nn.Linear(2, 2))
hung = threading.Timer(20, os._exit, [9])
hung.daemon = True
hung.start()

async def main():
    await asyncio.gather(worker.connect(), asyncio.to_thread(sender.connect))
    signal.signal(signal.SIGTERM, lambda *_: worker.abort())
    me = threading.main_thread().ident
    threading.Timer(0.5, signal.pthread_kill, (me, signal.SIGTERM)).start()
    try:
        while True:
            await worker.receive()
    except aiosync.TransportClosed:
        print("end")

asyncio.run(main())
sender.shutdown()
"""
    _check(fresh, text)


@pytest.mark.slow
def test_abort_in_a_signal_handler_while_the_copying_thread_starts(fresh: tools.Fresh) -> None:
    text = """
import asyncio, os, signal, threading, torch
import aiosync

hung = threading.Timer(20, os._exit, [9])
hung.daemon = True
hung.start()
start = threading.Thread.start

def interrupted(thread):
    if thread.name.startswith("aiosync-snapshot"):
        signal.raise_signal(signal.SIGTERM)
    start(thread)

async def main():
    scheme = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0")
    scheme.init_on_sender(model=torch.nn.Linear(2048, 2048))
    signal.signal(signal.SIGTERM, lambda *_: scheme.abort())
    threading.Thread.start = interrupted
    try:
        await scheme.connect()
    except aiosync.TransportClosed:
        print("end")

asyncio.run(main())
assert not [each for each in threading.enumerate() if "aiosync" in each.name]
"""
    _check(fresh, text)


@pytest.mark.slow
def test_exit_while_another_thread_waits(fresh: tools.Fresh) -> None:
    after = """
def wait():
    try:
        while True:  # the update that was sent may be there already
            receiver.receive()
    except (aiosync.TransportClosed, aiosync.PeerClosed):  # whichever end is closed first
        pass

waiting = tools.in_thread(wait)
tools.until(lambda: tools.is_asleep(waiting))
"""
    _check(fresh, _START.format(loop="uvloop", make="SHM", before="", after=after))


# -- a process with hardly any descriptors left gets an error in either API ------------------------

_FEW_DESCRIPTORS = """
import os, resource
import torch
import aiosync, aiosync.sync

async def main():
    await aiosync.SharedMemWeightSyncScheme().aclose()

def blocking():
    with aiosync.sync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=torch.nn.Linear(2, 2), num_workers=None)
        scheme.connect(timeout=5.0)
        scheme.send()

def attempt(what, left):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    for _ in range(left):
        os.close(held.pop())
    try:
        what()
    except (OSError, aiosync.AiosyncError):
        pass

for what in (lambda: aiosync.run(main), blocking):
    for left in range(12):
        if not (child := os.fork()):
            attempt(what, left)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, (what, left, status)
"""


def test_hardly_any_descriptors_left(fresh: tools.Fresh) -> None:
    ended = fresh.script(_FEW_DESCRIPTORS)
    lines = [line for line in ended.stderr.splitlines() if "cpuinfo" not in line]
    assert (ended.returncode, lines) == (0, [])
