"""A forked child gets an error or a portal of its own, never silence."""

from __future__ import annotations

import copy
import gc
import os
import threading
import time
import traceback
from typing import Any

import pytest
import torch

import aiosync
import aiosync.sync
from aiosync.transports._segment_view import SegmentView
from tests.sync import _tools as tools


def _in_child(function: Any) -> str:
    """What a forked child says; an empty text when all is well."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        text = ""
        try:
            function()
        except BaseException:  # noqa: BLE001 - the parent shows it
            text = traceback.format_exc()
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    killer = threading.Timer(tools.PATIENCE, os.kill, (pid, 9))
    killer.start()
    try:
        with os.fdopen(read) as pipe:
            text = pipe.read()
        _, status = os.waitpid(pid, 0)
    finally:
        killer.cancel()
        killer.join()
    assert status == 0, "the child hung"
    return text


@pytest.mark.slow
@pytest.mark.parametrize("make", tools.SCHEMES)
def test_the_inherited_scheme_says_what_to_do(make: Any) -> None:
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(make, source, target) as (sender, receiver):
        sender.send()

        def child() -> None:
            for call in (
                sender.send,
                sender.send_async,
                sender.wait_async,
                sender.connect,
                receiver.receive,
                receiver.connect,
                lambda: receiver.wait_for_version(1),
            ):
                with pytest.raises(aiosync.LocalProtocolError, match="before the process forked"):
                    call()
            assert tools.portal_threads() == []
            sender.shutdown()
            receiver.abort()
            with receiver:
                pass

        assert _in_child(child) == ""
        tools.fill(source, 2.0)
        assert sender.send().acked == {0}  # the child broke nothing
        assert tools.value_of(target) == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("make", tools.SCHEMES)
def test_a_child_connects_as_a_worker(make: Any) -> None:
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(make, source, target, num_workers=None) as (sender, _):

        def child() -> None:
            mine = tools.filled(0.0)
            sender.init_on_receiver(model_id="policy", model=mine, worker_idx=1)
            with sender:
                sender.connect()
                assert (sender.version, tools.value_of(mine)) == (1, 1.0)
                assert len(tools.portal_threads()) == 1
            assert tools.portal_threads() == []

        assert _in_child(child) == ""
        tools.fill(source, 2.0)
        report = sender.send(worker_ids=0)
        assert report.acked == {0}
        assert tools.value_of(target) == 2.0


@pytest.mark.slow
def test_locks_and_sends_stay_in_the_parent() -> None:
    """Threads that the child does not have held the locks, and waited for the sends."""
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(tools.SHM, source, target, num_workers=None) as (sender, receiver):
        with receiver.reading():
            sender.send_async()
            held, over = threading.Event(), threading.Event()

            def hold() -> None:
                with sender._lock, sender._closing:
                    sender._calls += 1
                    held.set()
                    over.wait(tools.PATIENCE)
                    sender._calls -= 1

            thread = tools.in_thread(hold)
            assert held.wait(tools.PATIENCE)

            def child() -> None:
                sender.init_on_receiver(model_id="policy", model=tools.filled(0.0), worker_idx=1)
                with pytest.raises(aiosync.LocalProtocolError, match="No async send"):
                    sender.wait_async()
                with pytest.raises(aiosync.ConnectTimeout):
                    sender.connect(timeout=0.001)
                assert tools.portal_threads() == []
                sender.shutdown()

            try:
                assert _in_child(child) == ""
            finally:
                over.set()
                thread.join(tools.PATIENCE)
        assert sender.wait_async().acked == {0}


@pytest.mark.slow
def test_forwards_in_a_child_of_a_worker() -> None:
    """The guard of the parent's thread means nothing in the child, whatever it was doing."""
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(tools.SHM, source, target) as (sender, receiver):
        with receiver.reading():
            tools.fill(source, 2.0)
            sender.send_async()
            tools.until(lambda: receiver.lag == 1)

            def child() -> None:
                receiver._scheme._guard_object.leave()
                with receiver.reading():
                    assert target(torch.zeros(1, 4)).shape == (1, 2)
                assert tools.value_of(target) == 1.0

            assert _in_child(child) == ""
        assert sender.wait_async().acked == {0}


@pytest.mark.slow
def test_forks_while_the_portal_is_busy() -> None:
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(tools.SHM, source, target) as (sender, receiver):
        over = threading.Event()

        def train() -> None:
            while not over.is_set():
                sender.send()

        def child() -> None:
            target(torch.zeros(1, 4))
            with pytest.raises(aiosync.LocalProtocolError, match="before the process forked"):
                receiver.receive()
            gc.collect()
            with aiosync.sync.NoWeightSyncScheme() as scheme:
                scheme.init_on_sender(num_workers=1)
                scheme.connect()
                scheme.send()

        thread = tools.in_thread(train)
        try:
            for _ in range(5):
                assert _in_child(child) == ""
        finally:
            over.set()
            thread.join(tools.PATIENCE)
        assert sender.send().acked == {0}


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_child_that_ends_as_a_script_does(loop: str, fresh: tools.Fresh) -> None:
    """Destructors in the child leave the parent's loop alone."""
    done = fresh.script(
        f"""
import asyncio, os, sys, warnings
from aiosync.sync import _portal
from tests.sync import _tools as tools

# Python 3.12 and newer warn about threads, of which every process with torch has some.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
if {loop!r} == "asyncio":
    _portal.new_event_loop = asyncio.new_event_loop
source, target = tools.filled(1.0), tools.filled(0.0)
with tools.pair(tools.SHM, source, target) as (sender, receiver):
    pid = os.fork()
    if pid == 0:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    for _ in range(3):
        assert sender.send().acked == {{0}}
print("fine")
"""
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done
    assert done.stderr == ""


def test_a_copy_made_before_the_fork_is_not_inherited() -> None:
    """What has no role yet belongs to nobody."""
    scheme = copy.copy(tools.SHM())

    def child() -> None:
        with pytest.raises(aiosync.LocalProtocolError, match="init_on_sender"):
            scheme.send()
        scheme.init_on_receiver(model=tools.filled(0.0))
        with pytest.raises(aiosync.ConnectTimeout):
            scheme.connect(timeout=0.05)
        assert tools.portal_threads() == []

    started = time.monotonic()
    assert _in_child(child) == ""
    assert time.monotonic() - started < tools.PATIENCE


def test_a_fork_holds_up_whoever_leaves_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied for the child would be lost half-way, in the child and in the parent."""
    source, target = tools.filled(1.0), tools.filled(0.0)
    keep, forget = SegmentView.keep_held, SegmentView.forget_writes
    spans: list[tuple[float, float]] = []
    left: list[float] = []

    def slowly(view: SegmentView) -> None:
        began = time.monotonic()
        time.sleep(0.1)
        keep(view)
        spans.append((began, time.monotonic()))

    def noted(view: SegmentView, index: int) -> None:
        left.append(time.monotonic())
        forget(view, index)

    monkeypatch.setattr(SegmentView, "keep_held", slowly)
    monkeypatch.setattr(SegmentView, "forget_writes", noted)
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            sender.send()

    with tools.pair(tools.SHM, source, target) as (sender, _):
        sending = threading.Thread(target=send)
        sending.start()
        try:
            for _ in range(5):
                assert _in_child(lambda: None) == ""
                time.sleep(0.05)
        finally:
            stop.set()
            sending.join()
    assert len(spans) >= 5 and len(left) > 10
    assert not [at for at in left for began, ended in spans if began < at < ended]
