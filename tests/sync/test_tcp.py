"""The blocking TCP scheme: the same links from threads, with ``pull()`` and ``ready``."""

from __future__ import annotations

import copy
import os
import pickle
import socket
import tempfile
import threading
from typing import Any

import pytest

import aiosync
import aiosync.sync
from tests.sync import _tools as tools

TCP = aiosync.sync.TCPWeightSyncScheme


def sender_of(model: Any, **options: Any) -> TCP:
    scheme = TCP(timeout=tools.PATIENCE, **options)
    scheme.init_on_sender(model_id="policy", model=model)
    return scheme


def receiver_of(sender: TCP, model: Any, **options: Any) -> TCP:
    scheme = TCP(sender.address, timeout=tools.PATIENCE, **options)
    scheme.init_on_receiver(model_id="policy", model=model)
    return scheme


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_weights_arrive_and_late_joiners_get_the_newest(kind) -> None:
    folder = tempfile.mkdtemp(prefix="aiosync-tests-")  # tmp_path is too long for a socket
    address = "tcp://127.0.0.1:0" if kind == "tcp" else f"unix://{folder}/socket"
    source, targets = tools.filled(1.0), [tools.filled(-1.0) for _ in range(2)]
    with sender_of(source, address=address) as sender:
        sender.connect()
        with receiver_of(sender, targets[0]) as first, receiver_of(sender, targets[1]) as late:
            first.connect()
            assert tools.value_of(targets[0]) == 1.0
            tools.fill(source, 2.0)
            assert sender.send().acked == {0}
            late.connect()
            assert (first.version, late.version) == (2, 2)
            assert tools.value_of(targets[1]) == 2.0
            assert first.reconnects == first.damaged_chunks == sender.damaged_chunks == 0
            assert sender.refused == {}
    os.rmdir(folder)  # nobody left a socket there


def test_pull_waits_in_its_thread() -> None:
    source, target = tools.filled(1.0), tools.filled(-1.0)
    with sender_of(source) as sender:
        sender.connect()
        with receiver_of(sender, target, subscribe=False) as puller:
            puller.connect()
            assert (puller.version, bool(puller.ready)) == (0, False)
            assert puller.pull() == 1
            assert puller.pull() == 1
            with pytest.raises(aiosync.RecvTimeout, match="no version from 2 on"):
                puller.pull(min_version=2, timeout=0.05)
            found: list[int] = []
            thread = threading.Thread(target=lambda: found.append(puller.pull(min_version=3)))
            thread.start()
            tools.fill(source, 2.0)
            assert sender.send().version == 2
            assert not found
            tools.fill(source, 3.0)
            sender.send()
            thread.join(tools.PATIENCE)
            assert found == [3]
            assert tools.value_of(target) == 3.0


def test_ready_blocks_until_there_is_a_version() -> None:
    source, target = tools.filled(1.0), tools.filled(-1.0)
    sender = TCP(timeout=tools.PATIENCE)
    assert not sender.ready
    with pytest.raises(aiosync.LocalProtocolError):
        sender.ready.wait(timeout=1)
    sender.init_on_sender(model_id="policy", num_workers=1)
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model_id="policy", model=target)
    with sender, receiver:
        tools.join(sender, receiver)
        for scheme in (sender, receiver):
            assert not scheme.ready.is_set()
            with pytest.raises(aiosync.RecvTimeout):
                scheme.ready.wait(timeout=0.02)
        waiting = tools.in_thread(receiver.ready.wait)
        sender.send(source)
        waiting.join(tools.PATIENCE)
        assert not waiting.is_alive()
        assert receiver.ready.is_set()
        assert sender.ready
        sender.ready.wait()
        assert repr(receiver.ready) == "<ready>"
        assert tools.value_of(target) == 1.0


def test_a_lost_link_is_got_back_behind_the_back_of_the_thread() -> None:
    source, target = tools.filled(1.0), tools.filled(-1.0)
    with sender_of(source) as sender:
        sender.connect()
        with receiver_of(sender, target) as receiver:
            receiver.connect()
            link = receiver._scheme._receiver.transport
            with socket.socket(fileno=os.dup(link.channel.io.read_fd)) as sock:
                sock.shutdown(socket.SHUT_RDWR)
            tools.until(lambda: receiver.reconnects == 1 and sender.worker_versions == {0: 1})
            tools.fill(source, 2.0)
            assert sender.send().acked == {0}
            assert tools.value_of(target) == 2.0


def test_what_travels_in_a_pickle() -> None:
    with sender_of(tools.filled(1.0), token="correct horse battery") as sender:
        data = pickle.dumps(sender)
        assert b"correct horse" not in data
        other = pickle.loads(data)
        assert other.address == sender.address
        assert not other.address.endswith(":0")
        assert other.reconnect == sender.reconnect == 30.0
        sender.reconnect = 2.0
        assert copy.copy(sender).reconnect == 2.0


@pytest.mark.slow
def test_a_spawned_worker_proves_the_token() -> None:
    source = tools.filled(1.0)
    with sender_of(source, token="correct horse battery") as sender:
        sender.connect()
        assert tools.in_process(_pull_once, sender) == (1, 1.0)
        tools.until(lambda: sender.worker_versions == {})


def _pull_once(scheme: TCP) -> tuple[int, float]:
    model = tools.filled(-1.0)
    with scheme:
        scheme.init_on_receiver(model_id="policy", model=model)
        scheme.connect()
        return scheme.pull(), tools.value_of(model)
