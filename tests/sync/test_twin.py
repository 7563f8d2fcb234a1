"""Twins of schemes: trainers and workers of which one side is async and the other one blocks."""

from __future__ import annotations

import asyncio
import pickle
from functools import partial
from typing import Any

import pytest

import aiosync
import aiosync.sync
from tests.schemes import _models as models
from tests.sync import _tools as tools

NAMES = ["SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme", "TCPWeightSyncScheme"]


def _block(scheme: Any, *, own: bool) -> tuple[int, float]:
    """Follow a trainer without an event loop; return the version and the value of the weights."""
    worker = aiosync.sync.twin(scheme) if own else scheme
    worker.init_on_receiver(model=tools.filled(0.0))
    with worker:
        worker.connect()
        worker.wait_for_version(2, timeout=tools.PATIENCE)
        return worker.version, tools.value_at(worker)


async def _follow(scheme: Any) -> tuple[int, float]:
    scheme.init_on_receiver(model=tools.filled(0.0))
    async with scheme:
        await scheme.connect()
        await scheme.wait_for_version(2, timeout=tools.PATIENCE)
        return scheme.version, tools.value_at(scheme)


def _await(scheme: Any, *, own: bool) -> tuple[int, float]:
    return asyncio.run(_follow(aiosync.sync.twin(scheme) if own else scheme))


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("name", NAMES)
async def test_blocking_workers_of_an_async_trainer(name: str) -> None:
    source, scheme = tools.filled(1.0), getattr(aiosync, name)()
    scheme.init_on_sender(model=source, num_workers=2)
    # A worker may get the twin, or make it of the copy that it gets.
    calls = [
        asyncio.to_thread(tools.in_process, partial(_block, own=False), aiosync.sync.twin(scheme)),
        asyncio.to_thread(tools.in_process, partial(_block, own=True), scheme),
    ]
    async with asyncio.TaskGroup() as group, scheme:
        workers = [group.create_task(call) for call in calls]
        await scheme.connect()
        models.fill(source, 2.0)
        assert (await scheme.send()).acked == {0, 1}
        assert [await worker for worker in workers] == [(2, 2.0)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_async_workers_of_a_blocking_trainer(name: str) -> None:
    source, scheme = tools.filled(1.0), getattr(aiosync.sync, name)()
    scheme.init_on_sender(model=source, num_workers=2)
    found: list[tuple[int, float]] = []

    def worker(work: Any, own: bool) -> None:
        found.append(tools.in_process(partial(_await, own=own), work))

    jobs = [partial(worker, aiosync.sync.twin(scheme), False), partial(worker, scheme, True)]
    with tools.threads(*jobs), scheme:
        scheme.connect()
        models.fill(source, 2.0)
        assert scheme.send().acked == {0, 1}
        tools.until(lambda: len(found) == 2)
    assert found == [(2, 2.0)] * 2


@pytest.mark.parametrize("name", NAMES)
def test_a_pickle_of_a_twin_knows_its_own_kind(name: str) -> None:
    scheme = getattr(aiosync, name)(apply="manual", timeout=7.0)
    scheme.init_on_sender("actor", model=tools.filled(1.0))
    with_role = [scheme, aiosync.sync.twin(scheme)]
    for each, module in zip(with_role, (aiosync, aiosync.sync), strict=True):
        copied = pickle.loads(pickle.dumps(each))
        assert type(each) is type(copied) is getattr(module, name)
        assert (copied.apply, copied.timeout, copied.model_id) == ("manual", 7.0, "actor")
        assert not copied.initialized_on_sender
    back = aiosync.sync.twin(with_role[1])
    assert type(back) is type(scheme)
    assert (back.apply, back.initialized_on_sender) == ("manual", False)
    scheme.abort()


class _Own(aiosync.SharedMemWeightSyncScheme):
    """A scheme of a user, without a blocking class of its own."""


def test_a_scheme_of_a_class_of_ones_own_has_a_twin() -> None:
    blocking = pickle.loads(pickle.dumps(aiosync.sync.twin(_Own(require=2))))
    assert isinstance(blocking, aiosync.sync.WeightSyncScheme)
    assert blocking.require == 2
    assert type(aiosync.sync.twin(blocking)) is _Own


class _Derived(aiosync.DistributedWeightSyncScheme):
    """A scheme of a user over a stream."""


class _MoreDerived(_Derived):
    """A scheme that is derived from one of a user."""


class _Blocking(aiosync.sync.DistributedWeightSyncScheme, twin_of=_Derived):
    """The blocking class that the user has given to one of them."""


def test_a_twin_has_the_members_that_only_some_schemes_have() -> None:
    scheme = _MoreDerived(address="tcp://127.0.0.1:7000", reconnect=2.0)
    twin: Any = aiosync.sync.twin(scheme)
    assert type(twin) is _Blocking
    assert (twin.address, twin.reconnect, twin.reconnects) == ("tcp://127.0.0.1:7000", 2.0, 0)
    twin.reconnect = 3.0
    back: Any = aiosync.sync.twin(twin)
    assert (type(back), back.reconnect) == (_MoreDerived, 3.0)
    with pytest.raises(aiosync.ConfigError, match="reconnect"):
        twin.reconnect = -1


def test_what_is_no_scheme_has_no_twin() -> None:
    other: Any = tools.filled(1.0)
    with pytest.raises(aiosync.ConfigError, match="takes a scheme of aiosync or of aiosync.sync"):
        aiosync.sync.twin(other)
