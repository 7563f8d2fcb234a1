"""``sync=False``: ``send()`` returns without waiting, and a later call raises its failure."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch

import aiosync
import aiosync.sync
from tests.support.waiting import free_address
from tests.sync import _tools as tools


def tcp(**options: Any) -> aiosync.sync.WeightSyncScheme:
    return aiosync.sync.TCPWeightSyncScheme(free_address(), token="t" * 32, **options)


EVERY = pytest.mark.parametrize("make", [*tools.SCHEMES, tcp])
MISFIT = {"weight": torch.zeros(3, 3)}


@EVERY
def test_send_waits_for_nobody(make: Any) -> None:
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(make, source, target, sync=False, apply="manual") as (sender, receiver):
        for value in (2.0, 3.0):
            tools.fill(source, value)
            # The worker does not apply the update, and send() returns all the same.
            report = sender.send()
            assert (report.acked, report.waiting) == (set(), {0})
        # The snapshot was taken before, so this value is not sent.
        tools.fill(source, 4.0)
        with pytest.raises(aiosync.RecvTimeout):
            sender.send(max_lag=1, timeout=0.01)
        assert receiver.wait_for_version(report.version) == report.version == 3
        assert tools.value_at(receiver) == 3.0
        assert sender.wait_async().acked == {0}
        with pytest.raises(aiosync.ConfigError, match="Worker 7"):
            # A wrong argument is raised by the call itself.
            sender.send(worker_ids=7)
        assert sender.send(worker_ids=0).version == 4
        sender.sync = True
        with pytest.raises(aiosync.PartialSyncError):
            sender.send(timeout=0.1)


def test_a_send_waits_for_its_own_targets_alone() -> None:
    """A worker that only pulls is none of them, nor is one that was not named."""
    models = [tools.filled(0.0) for _ in range(3)]
    options = {"num_workers": 3, "sync": False, "apply": "manual"}
    sender, first = tools.roles(tcp, tools.filled(1.0), models[0], **options)
    second, pulls = copy.copy(sender), copy.copy(sender)
    pulls.subscribe = False
    for idx, worker in ((1, second), (2, pulls)):
        worker.init_on_receiver(model_id="policy", model=models[idx], worker_idx=idx)
    with sender, first, second, pulls:
        with tools.threads(first.connect, second.connect, pulls.connect):
            sender.connect()
        assert sender.send().waiting == {0, 1}
        first.wait_for_version(2)
        tools.until(lambda: sender.worker_versions[0] == 2)
        assert sender.send(worker_ids=[1]).waiting == {1}


@EVERY
@pytest.mark.parametrize("sync", [False, True])
def test_an_iterator_of_indices_is_read_once(make: Any, sync: bool) -> None:
    with tools.pair(make, tools.filled(1.0), tools.filled(0.0), sync=sync) as (sender, receiver):
        # Some of the sends have to wait for the loop, and others do not.
        for version in range(2, 12):
            assert sender.send(worker_ids=iter([0])).version == version
            assert receiver.wait_for_version(version) == version
            tools.value_at(receiver)
        assert sender.send(None, (idx for idx in [0])).version == 12


@EVERY
def test_a_failure_is_raised_by_the_next_call_that_sends(make: Any) -> None:
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(make, source, target, sync=False) as (sender, receiver):
        assert sender.send(MISFIT).version == 2
        tools.until(lambda: sender.stats().finished["refused"] == 1)
        with pytest.raises(aiosync.PartialSyncError, match="version 2") as caught:
            sender.send()
        assert isinstance(caught.value.failed[0], aiosync.ApplyError)
        # The call that raised the failure sent nothing.
        assert sender.version == 2
        assert sender.send().version == 3
        receiver.wait_for_version(3)
        receiver.abort()
        give_up = time.monotonic() + tools.PATIENCE
        with pytest.raises(aiosync.PartialSyncError) as caught:
            while time.monotonic() < give_up:
                sender.send()
        assert list(caught.value.failed) == [0]


def test_over_torch_distributed_it_waits_in_any_case() -> None:
    # TorchRL's does, and its DistributedSyncCollector depends on it.
    source, target = tools.filled(1.0), tools.filled(0.0)
    make = aiosync.sync.DistributedWeightSyncScheme
    with tools.pair(make, source, target, sync=False) as (sender, receiver):
        for value in (2.0, 3.0, 4.0):
            tools.fill(source, value)
            assert sender.send().acked == {0}
            assert tools.value_at(receiver) == value


def test_wait_async_raises_it_as_well() -> None:
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(tools.PIPE, source, target, sync=False) as (sender, _):
        sender.send(MISFIT)
        with pytest.raises(aiosync.PartialSyncError, match="version 2"):
            sender.wait_async()
        sender.send()
        assert sender.wait_async().acked == {0}


def test_a_scheme_that_sends_nothing_waits_for_nothing() -> None:
    scheme = aiosync.sync.NoWeightSyncScheme(sync=False)
    with scheme:
        scheme.init_on_sender(model=tools.filled(0.0))
        scheme.connect()
        assert scheme.send().version == 0
