"""Forked children, in which a call raises an error or gets a portal of its own, and never hangs."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import ssl
import sys
import threading
import traceback
from typing import Any

import pytest
import torch

import aiosync
import aiosync.sync
from tests._certificates import certificates
from tests.support.waiting import free_address
from tests.sync import _tools as tools


def _in_child(function: Any) -> None:
    """Call a function in a forked child; fail if it raises an error or hangs there."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        text = "fine"
        try:
            function()
        except BaseException:  # noqa: BLE001 - the parent shows it
            text = traceback.format_exc()
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        if not select.select([pipe], [], [], tools.PATIENCE)[0]:
            os.kill(pid, signal.SIGKILL)
        text = pipe.read()
    os.waitpid(pid, 0)
    assert text == "fine", text or "the child hung"


@pytest.mark.slow
@pytest.mark.parametrize("make", tools.SCHEMES)
def test_the_inherited_scheme_says_what_to_do(make: Any) -> None:
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(make, source, target) as (sender, receiver):
        sender.send()
        # A scheme without a role does not belong to the parent, so the child may use it.
        spare = make()

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
            with pytest.raises(aiosync.LocalProtocolError, match="init_on_sender"):
                spare.send()
            spare.init_on_receiver(model=tools.filled(0.0))
            with pytest.raises(aiosync.ConnectTimeout):
                spare.connect(timeout=0.05)
            assert tools.portal_threads() == []
            sender.shutdown()
            receiver.abort()
            with receiver:
                pass

        _in_child(child)
        tools.fill(source, 2.0)
        # The child has not disturbed the parent's link.
        assert sender.send().acked == {0}
        assert tools.value_at(receiver) == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("make", tools.SCHEMES)
def test_a_child_connects_as_a_worker(make: Any) -> None:
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(make, source, target, num_workers=None) as (sender, receiver):

        def child() -> None:
            mine = tools.filled(0.0)
            sender.init_on_receiver(model_id="policy", model=mine, worker_idx=1)
            with sender:
                sender.connect()
                assert (sender.version, tools.value_at(sender)) == (1, 1.0)
                assert len(tools.portal_threads()) == 1
            assert tools.portal_threads() == []

        _in_child(child)
        tools.fill(source, 2.0)
        report = sender.send(worker_ids=0)
        assert report.acked == {0}
        assert tools.value_at(receiver) == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("make", tools.SCHEMES)
def test_a_child_has_the_index_that_its_copy_was_given(make: Any) -> None:
    scheme = make()
    scheme.worker_idx = 2

    def child() -> None:
        scheme.init_on_receiver(model_id="policy", model=tools.filled(0.0))
        assert scheme.worker_idx == 2

    _in_child(child)
    scheme.init_on_receiver(model_id="policy", model=tools.filled(0.0))

    def child_of_a_worker() -> None:
        scheme.init_on_receiver(model_id="policy", model=tools.filled(0.0))
        # The parent has that index.
        assert scheme.worker_idx is None

    _in_child(child_of_a_worker)
    scheme.shutdown()


def _client_hello() -> bytes:
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(coming, going, server_hostname="here").do_handshake()
    return going.read()


@pytest.mark.parametrize("dial", ["receiver", "both"])
def test_a_child_keeps_no_link_that_is_being_made(dial: Any) -> None:
    """If a trainer forks during a TLS handshake, the other side still sees the trainer's end."""
    files, there = certificates(), free_address()
    tls = files.listening if dial == "receiver" else files.dialling
    sender = aiosync.sync.TCPWeightSyncScheme(there, tls=tls, dial=dial, timeout=None)
    where = "127.0.0.1", int(there.rpartition(":")[2])

    def connect() -> None:
        with contextlib.suppress(aiosync.AiosyncError):
            sender.connect()

    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(where)) if dial == "both" else None
        sender.init_on_sender(model=tools.filled(1.0), num_workers=1)
        thread = tools.in_thread(connect)
        if listening is not None:
            peer, _ = listening.accept()
        else:
            peer = socket.create_connection(where)
            peer.sendall(_client_hello())
        stack.enter_context(peer)
        peer.settimeout(tools.PATIENCE)
        # These bytes show that the trainer is in the handshake.
        assert peer.recv(2**16)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(write)
            # The child outlives the trainer's scheme.
            os.read(read, 1)
            os._exit(0)
        stack.callback(os.waitpid, pid, 0)
        stack.callback(os.close, write)
        stack.callback(os.close, read)
        sender.shutdown()
        thread.join(tools.PATIENCE)
        while peer.recv(2**16):
            pass


@pytest.mark.slow
def test_locks_sends_and_reads_stay_in_the_parent() -> None:
    """A child has neither the locks nor the sends of its parent's threads.

    The threads that hold the locks and wait for the sends do not exist in the child.
    """
    source, target = tools.filled(1.0), tools.filled(0.0)
    # With guard="reading" a send waits for an answer.
    options = {"num_workers": None, "guard": "reading"}
    with tools.pair(tools.SHM, source, target, **options) as (sender, receiver):

        def child() -> None:
            with receiver.reading():
                assert target(torch.zeros(1, 4)).shape == (1, 2)
                assert tools.value_of(target) == 1.0
            sender.init_on_receiver(model_id="policy", model=tools.filled(0.0), worker_idx=1)
            with pytest.raises(aiosync.LocalProtocolError, match="No async send"):
                sender.wait_async()
            with pytest.raises(aiosync.ConnectTimeout):
                sender.connect(timeout=0.001)
            assert tools.portal_threads() == []
            sender.shutdown()

        with receiver.reading():
            tools.fill(source, 2.0)
            sender.send_async()
            thread = tools.in_thread(lambda: sender.send(timeout=tools.PATIENCE))
            tools.until(lambda: tools.is_asleep(thread) and receiver.lag > 0)
            _in_child(child)
        thread.join(tools.PATIENCE)
        assert not thread.is_alive()
        assert not sender.wait_async().failed


@pytest.mark.slow
@pytest.mark.parametrize("make", [tools.SHM, tools.PIPE])
def test_a_fork_of_another_thread_splits_no_update(make: Any) -> None:
    source, target = tools.Spread(0.0), tools.Spread(-1.0)
    with tools.pair(make, source, target) as (sender, _):
        over = threading.Event()

        def train() -> None:
            value = 0.0
            while not over.is_set():
                value += 1.0
                source.fill(value)
                sender.send()

        def compute() -> None:
            while not over.is_set():
                assert len(target()) == 1

        def child() -> None:
            assert len(target()) == 1

        interval = sys.getswitchinterval()
        with tools.threads(train, compute):
            try:
                sys.setswitchinterval(1e-5)
                for _ in range(120):
                    _in_child(child)
            finally:
                sys.setswitchinterval(interval)
                over.set()


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_child_that_ends_as_a_script_does(loop: str, fresh: tools.Fresh) -> None:
    """Destructors in a child do not touch the parent's event loop."""
    done = fresh.script(
        f"""
import os, sys, warnings
from tests.sync import _tools as tools

# Python 3.12 and newer warn about threads, of which every process with torch has some.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
if {loop!r} == "asyncio":
    sys.modules["uvloop"] = None
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


# -- a signal handler that raises in the middle of a fork ------------------------------------------

_INTERRUPTED_FORKS = """
import os, signal, sys
import torch
import aiosync, aiosync.sync

class Alarm(Exception):
    pass

def ring(*_):
    raise Alarm

def count_sockets():
    links = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            links += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except OSError:
            pass
    return links

def fork(delay):
    pid = -1
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        pid = os.fork()
        if pid:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Alarm:
        pass
    finally:
        if pid:
            signal.setitimer(signal.ITIMER_REAL, 0)
    if not pid or os.getpid() != parent:
        os._exit(count_sockets())
    return os.waitstatus_to_exitcode(os.wait()[1])

parent = os.getpid()
sys.unraisablehook = lambda about: None  # Python prints what hooks raise
signal.signal(signal.SIGALRM, ring)
model, copy = (torch.nn.Linear(2048, 2048) for _ in range(2))
trainer = aiosync.sync.SharedMemWeightSyncScheme(timeout=20)
trainer.init_on_sender(model=model, num_workers=None)
trainer.connect()
worker = aiosync.sync.SharedMemWeightSyncScheme(timeout=20)
worker.__setstate__(trainer.__getstate__())
worker.init_on_receiver(model=copy)
worker.connect()
clean = fork(0)
for number in range(60):
    with torch.no_grad():
        model.weight.fill_(number)
    assert trainer.send().acked == {0}
    with worker.reading():
        assert float(copy.weight[0, 0]) == number
    assert fork(0.0001 * (number % 20 + 1)) == clean
assert trainer.send().acked == {0}
worker.shutdown()
trainer.shutdown()
"""


@pytest.mark.slow
def test_a_handler_raises_in_the_middle_of_a_fork(fresh: tools.Fresh) -> None:
    ended = fresh.script(_INTERRUPTED_FORKS)
    assert ended.returncode == 0, ended.stderr
