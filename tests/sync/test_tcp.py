"""The blocking schemes over TCP and process groups: the same links from threads."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import aiosync
import aiosync.sync
from tests.sync import _tools as tools

TCP = aiosync.sync.TCPWeightSyncScheme


def test_pull_waits_in_its_thread() -> None:
    source = tools.filled(1.0)
    ends = tools.roles(TCP, source, tools.filled(-1.0), num_workers=None, subscribe=False)
    with ends[0] as sender, ends[1] as puller:
        sender.connect()
        puller.connect()
        assert (puller.version, bool(puller.ready)) == (0, False)
        assert puller.pull() == puller.pull() == 1
        with pytest.raises(aiosync.RecvTimeout):
            puller.pull(min_version=2, timeout=0.05)
        found: list[int] = []
        with tools.threads(lambda: found.append(puller.pull(min_version=3))):
            for version in (2, 3):
                assert not found
                tools.fill(source, float(version))
                assert sender.send().version == version
        assert (found, tools.value_at(puller)) == ([3], 3.0)
        assert (puller.reconnects, puller.link_lost, sender.refused) == (0, None, {})


def test_ready_blocks_until_there_is_a_version() -> None:
    source = tools.filled(1.0)
    sender, receiver = tools.roles(TCP, None, tools.filled(-1.0))
    fresh = copy.copy(sender)
    assert not fresh.ready
    with pytest.raises(aiosync.LocalProtocolError):
        fresh.ready.wait(timeout=1)
    with sender, receiver:
        tools.join(sender, receiver)
        for scheme in (sender, receiver):
            assert not scheme.ready.is_set()
            with pytest.raises(aiosync.RecvTimeout):
                scheme.ready.wait(timeout=0.02)
        with tools.threads(receiver.ready.wait):
            sender.send(source)
        sender.ready.wait()
        told = (receiver.ready.is_set(), bool(sender.ready), repr(receiver.ready))
        assert told == (True, True, "<ready>")
        assert tools.value_at(receiver) == 1.0


def _pull_once(scheme: Any) -> tuple[int, float]:
    with scheme:
        scheme.init_on_receiver(model_id="policy", model=tools.filled(-1.0))
        scheme.connect()
        return scheme.pull(), tools.value_at(scheme)


@pytest.mark.slow
def test_a_spawned_worker_proves_the_token() -> None:
    sender = TCP(timeout=tools.PATIENCE, token="correct horse battery")
    sender.init_on_sender(model_id="policy", model=tools.filled(1.0))
    with sender:
        sender.connect()
        data = pickle.dumps(sender)
        assert b"correct horse" not in data
        assert pickle.loads(data).address == sender.address
        sender.reconnect = 2.0
        assert copy.copy(sender).reconnect == 2.0
        assert tools.in_process(_pull_once, sender) == (1, 1.0)
        tools.until(lambda: sender.worker_versions == {})
