"""The blocking schemes over TCP and process groups: the same links from threads."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from typing import Any

import pytest
from torch import distributed as dist

import aiosync
import aiosync.sync
from tests.schemes import _models as models
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


# -- over process groups --------------------------------------------------------------------------


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("make", [models.linear, models.medium])
def test_weights_arrive(make, shared_memory) -> None:
    source, targets = make(), [make() for _ in range(2)]
    sender = aiosync.sync.DistributedWeightSyncScheme(
        timeout=tools.PATIENCE, shared_memory=shared_memory
    )
    sender.init_on_sender(model_id="policy", model=source)
    with contextlib.ExitStack() as stack:
        stack.enter_context(sender)
        sender.connect()
        receivers = [stack.enter_context(pickle.loads(pickle.dumps(sender))) for _ in targets]
        for idx, (receiver, target) in enumerate(zip(receivers, targets, strict=True)):
            receiver.init_on_receiver(model_id="policy", model=target, worker_idx=idx)
            receiver.connect()
            assert receiver.version == 1
        for value in (2.0, 3.0):
            tools.fill(source, value)
            assert sender.send().acked == {0, 1}
            assert [tools.value_at(each) for each in receivers] == [value] * 2
        names = [t.name for t in threading.enumerate() if t.name.startswith("aiosync-gloo")]
        assert bool(names) == (make is models.medium and not shared_memory)
        assert not dist.is_initialized()
