"""Workers that receive and do not apply: the trainer hears what is replaced, and keeps nothing."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from aiosync.wire import Ack
from tests.schemes import _harness as harness
from tests.schemes import _models as models

SENDS = 2000
IN_FLIGHT = 3  # one that waits at the worker, one on the link or being applied, one answered


def _tcp(**options: Any) -> aiosync.TCPWeightSyncScheme:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    return aiosync.TCPWeightSyncScheme(f"tcp://127.0.0.1:{port}", **options)


links = pytest.mark.parametrize("make", [*harness.SCHEMES, _tcp], ids=["pipe", "shared", "tcp"])
pytestmark = pytest.mark.asyncio


def _outbox(sender: Any, idx: int = 0) -> Any:
    return sender._sender.peers[idx].outbox


async def _deliver(sender: Any, receiver: Any, idx: int = 0, **options: Any) -> Any:
    """Send, and let the loop turn until the worker has all of it and the trainer knows."""
    handle = sender.send_nowait(**options)
    async with asyncio.timeout(harness.PATIENCE):
        while receiver._receiver.inbox.newest < handle.version:
            await asyncio.sleep(0)
        while not _outbox(sender, idx).window_open:
            await asyncio.sleep(0)
    return handle


class _Reader:
    """A thread inside of ``reading()``, until it is told to leave."""

    def __init__(self, scheme: Any) -> None:
        self._scheme = scheme
        self._there, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with self._scheme.reading():
            self._there.set()
            self._leave.wait(harness.PATIENCE)

    def begin(self) -> None:
        self._thread.start()
        assert self._there.wait(harness.PATIENCE)

    def end(self) -> None:
        self._leave.set()
        self._thread.join(harness.PATIENCE)


def _check(reports: list[aiosync.SendReport], last: int) -> None:
    """Each but the last was skipped for the next one that the worker got."""
    assert reports[-1].version == last
    assert (reports[-1].acked, dict(reports[-1].skipped)) == ({0}, {})
    for report in reports[:-1]:
        assert (report.acked, report.failed) == (set(), {})
        assert report.version < report.skipped[0] <= last


# -- in one process ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("apply", ["manual", "auto"])
@links
async def test_thousands_of_updates_that_are_not_applied(make, apply: str) -> None:
    source, target = models.linear(), models.linear()
    scheme = make(apply=apply, timeout=None)
    async with harness.here(scheme, target, sender={"model": source}) as (sender, receiver):
        reader = _Reader(receiver)
        if apply == "auto":
            reader.begin()
        handles = []
        for number in range(SENDS):
            models.fill(source, float(number))
            handles.append(await _deliver(sender, receiver))
            assert len(_outbox(sender).in_flight) <= IN_FLIGHT
            assert len(sender._sender._sends) <= IN_FLIGHT
        last = handles[-1].version
        async with asyncio.timeout(harness.PATIENCE):
            reports = [await handle for handle in handles[:-1]]
        assert [dict(report.skipped) for report in reports] == [
            {0: version} for version in range(3, last + 1)
        ]
        assert _outbox(sender).in_flight == (last,)
        assert not handles[-1].done()
        assert receiver.version == 1
        if apply == "auto":
            reader.end()
            await receiver.wait_for_version(last, timeout=harness.PATIENCE)
        else:
            assert receiver.apply_pending() == last
        async with asyncio.timeout(harness.PATIENCE):
            reports.append(await handles[-1])
        _check(reports, last)
        assert models.filled(target, float(SENDS - 1))
        assert (sender._sender.skipped, _outbox(sender).stray) == (SENDS - 1, 0)
        assert (_outbox(sender).in_flight, sender._sender._sends) == ((), {})


@links
async def test_nothing_is_kept_of_sends_that_timed_out(make) -> None:
    source, target = models.linear(), models.linear()
    scheme = make(apply="manual")
    async with harness.here(scheme, target, sender={"model": source}) as (sender, receiver):
        handles = [await _deliver(sender, receiver, timeout=1.0) for _ in range(100)]
        async with asyncio.timeout(harness.PATIENCE):
            assert all([0 in (await handle).skipped for handle in handles[:-1]])
            with pytest.raises(aiosync.PartialSyncError) as info:
                await handles[-1]
        assert isinstance(info.value.failed[0], aiosync.AckTimeout)
        assert _outbox(sender).in_flight == (handles[-1].version,)  # it may still be applied
        assert sender._sender._sends == {}
        assert receiver.apply_pending() == handles[-1].version
        await harness.until(lambda: _outbox(sender).applied == handles[-1].version)
        assert _outbox(sender).in_flight == ()


class _Held(nn.Module):
    """An apply of it lasts until :attr:`go`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.begun, self.go = threading.Event(), threading.Event()

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        self.begun.set()
        assert self.go.wait(harness.PATIENCE)


@links
async def test_what_is_being_applied_is_not_skipped(make) -> None:
    source, target = _Held(), _Held()
    target.go.set()
    async with harness.here(make(apply="manual"), target, sender={"model": source}) as (
        sender,
        receiver,
    ):
        target.begun.clear()
        target.go.clear()
        first = await _deliver(sender, receiver)
        applying = asyncio.create_task(asyncio.to_thread(receiver.apply_pending))
        try:
            await harness.until(target.begun.is_set)
            second = await _deliver(sender, receiver)
            third = await _deliver(sender, receiver)
            await harness.until(second.done)
            assert _outbox(sender).in_flight == (first.version, third.version)
        finally:
            target.go.set()
        assert await applying == first.version
        assert (await first).acked == {0}
        assert (await second).skipped == {0: third.version}
        assert receiver.apply_pending() == third.version
        assert (await third).acked == {0}


@links
async def test_an_update_that_is_refused_had_replaced_another(make) -> None:
    source, target = models.linear(), models.linear()
    scheme = make(apply="manual")
    async with harness.here(scheme, target, sender={"model": source}) as (sender, receiver):
        good = await _deliver(sender, receiver)
        bad = await _deliver(sender, receiver, weights=models.wide())
        with pytest.raises(aiosync.ApplyError):
            receiver.apply_pending()
        with pytest.raises(aiosync.PartialSyncError):
            await bad
        assert (await good).skipped == {0: bad.version}
        assert _outbox(sender).in_flight == ()
        assert receiver.version == 1


@links
async def test_what_is_applied_at_once_replaces_nothing(make, monkeypatch) -> None:
    said = []
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        outgoing = receiver._receiver._outgoing
        say = outgoing.say
        monkeypatch.setattr(
            type(outgoing), "say", lambda _, message: (said.append(message), say(message))[1]
        )
        for _ in range(20):
            await sender.send()
        statuses = {each.status for each in said if isinstance(each, Ack)}
        assert statuses <= {aiosync.AckStatus.APPLIED, aiosync.AckStatus.RECEIVED}
        assert sender._sender.skipped == 0


async def test_each_worker_has_its_own_versions() -> None:
    source, targets = models.linear(), [models.linear(), models.linear()]
    scheme = aiosync.SharedMemWeightSyncScheme(apply="manual")
    async with harness.crowd(scheme, targets, sender={"model": source}) as (sender, receivers):
        handles = []
        for number in range(8):
            idx = number % 2
            handles.append(await _deliver(sender, receivers[idx], idx, worker_ids=[idx]))
        both = sender.send_nowait()
        for version, handle in enumerate(handles[:6], 2):
            assert (await handle).skipped == {version % 2: version + 2}
        assert (await handles[6]).skipped == {0: both.version}
        assert (await handles[7]).skipped == {1: both.version}
        await harness.until(lambda: all(each._receiver.has_staged for each in receivers))
        for receiver in receivers:
            await harness.until(lambda: receiver._receiver.staged_version == both.version)  # noqa: B023
            assert receiver.apply_pending() == both.version
        assert (await both).acked == {0, 1}


@pytest.mark.slow
async def test_a_lost_link_in_between() -> None:
    source, target = models.linear(), models.linear()
    scheme = _tcp(apply="manual")
    async with harness.here(scheme, target, sender={"model": source}) as (sender, receiver):
        first = await _deliver(sender, receiver)
        second = await _deliver(sender, receiver)
        assert (await first).skipped == {0: second.version}
        receiver._receiver.transport.abort()
        with pytest.raises(aiosync.PartialSyncError):
            await second  # as far as the trainer knows
        await harness.until(lambda: 0 in sender._sender.peers)
        # It has it already: the trainer offers it again, and hears that it waits.
        await harness.until(lambda: _outbox(sender).in_flight == (second.version,))
        third = await _deliver(sender, receiver)
        fourth = await _deliver(sender, receiver)
        assert (await third).skipped == {0: fourth.version}
        await harness.until(lambda: _outbox(sender).in_flight == (fourth.version,))
        assert receiver.apply_pending() == fourth.version
        assert (await fourth).acked == {0}
        assert _outbox(sender).in_flight == ()


# -- in a process of its own -------------------------------------------------------------------


def begin_to_read(state: harness.State) -> None:
    state.kept["reader"] = _Reader(state.scheme)
    state.kept["reader"].begin()


def end_to_read(state: harness.State) -> None:
    state.kept.pop("reader").end()


def apply_pending(state: harness.State) -> int | None:
    return state.scheme.apply_pending()


@pytest.mark.slow
@pytest.mark.one_loop
@pytest.mark.parametrize("apply", ["manual", "auto"])
@links
async def test_thousands_of_updates_to_a_process_that_does_not_apply(make, apply: str) -> None:
    source, scheme = models.linear(), make(apply=apply, timeout=None)
    scheme.init_on_sender(model_id="policy", model=source, num_workers=1)
    async with harness.workers(scheme, models.linear, 1) as (worker,):
        if apply == "auto":
            await worker.call(begin_to_read)
        handles, most = [], 0
        for number in range(SENDS):
            models.fill(source, float(number))
            handles.append(scheme.send_nowait())
            await asyncio.sleep(0)
            most = max(most, len(_outbox(scheme).in_flight))
        assert most <= IN_FLIGHT
        last = handles[-1].version
        async with asyncio.timeout(harness.PATIENCE):
            reports = [await handle for handle in handles[:-1]]
        assert await worker.call(harness.version) == 1
        if apply == "auto":
            await worker.call(end_to_read)
            await worker.call(harness.wait_for_version, last)
        else:
            await harness.until(lambda: scheme._sender.peers[0].received_version == last)
            assert await worker.call(apply_pending) == last
        async with asyncio.timeout(harness.PATIENCE):
            reports.append(await handles[-1])
        _check(reports, last)
        assert scheme._sender.skipped == SENDS - 1
        assert (_outbox(scheme).in_flight, scheme._sender._sends) == ((), {})
        got = await worker.call(harness.weights)
        assert (got["weight"] == SENDS - 1).all()
