"""Workers whose trainer is killed, or closes its links: their log records and their reads."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
import aiosync.sync
from aiosync.server import WeightServer
from tests.support.waiting import PATIENCE, free_address, until, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.one_loop]

SCHEMES = {
    "shared memory": lambda **_: aiosync.SharedMemWeightSyncScheme(),
    "answers": lambda **_: aiosync.SharedMemWeightSyncScheme(guard="reading"),
    "pipes": lambda **_: aiosync.MultiProcessWeightSyncScheme(strategy="state_dict"),
    "TCP": lambda **options: aiosync.TCPWeightSyncScheme(
        free_address(), token="0123456789abcdef", **options
    ),
}
all_schemes = pytest.mark.parametrize("make", SCHEMES.values(), ids=SCHEMES)
X = torch.ones(4)


def _train(scheme: Any, ends: Any) -> None:
    """Send two versions, and close the links when the test sets ``ends``."""

    async def train() -> None:
        async with scheme:
            await scheme.connect()
            await scheme.send()
            while not ends.is_set():
                await asyncio.sleep(0.01)

    scheme.init_on_sender(model=nn.Linear(4, 2), num_workers=1)
    if not isinstance(scheme, aiosync.sync.WeightSyncScheme):
        asyncio.run(train())
        return
    with scheme:
        scheme.connect()
        scheme.send()
        ends.wait()


@contextlib.contextmanager
def _trainer(scheme: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    ends = context.Event()
    process = context.Process(target=_train, args=(scheme, ends))
    process.start()

    def end(how: str) -> None:
        if how == "killed":
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        else:
            ends.set()

    try:
        yield end
    finally:
        process.kill()
        process.join(PATIENCE)


@contextlib.asynccontextmanager
async def _worker(scheme: Any, model: nn.Module, **init: Any) -> AsyncIterator[Any]:
    """A connected worker, and a function that ends its trainer."""
    worker = copy.copy(scheme)
    worker.init_on_receiver(model=model, **init)
    with _trainer(scheme) as end:
        async with worker:
            await worker.connect(timeout=PATIENCE)
            await worker.wait_for_version(2, timeout=PATIENCE)
            yield worker, end


def _read(worker: Any, model: nn.Module) -> torch.Tensor:
    with worker.reading():
        return model(X)


@all_schemes
@pytest.mark.parametrize("how", ["killed", "closed"])
@pytest.mark.asyncio
async def test_a_trainer_that_dies_is_warned_of(make: Any, how: str, caplog: Any) -> None:
    """By default the model computes on; ``on_lost="raise"`` changes that if the trainer died."""
    caplog.set_level(logging.INFO, "aiosync")
    model, scheme = nn.Linear(4, 2), make(reconnect=0.0)
    async with _worker(scheme, model) as (worker, end):
        before = _read(worker, model)
        end(how)
        await until(lambda: worker.link_lost is not None)
        with pytest.raises(aiosync.PeerClosed):
            while await worker.receive(timeout=PATIENCE) is not None:
                pass
        [record] = [each for each in caplog.records if each.phase in ("lost", "left")]
        assert (record.phase, record.levelno) == (
            ("lost", logging.WARNING) if how == "killed" else ("left", logging.INFO)
        )
        assert "the model keeps version 2" in record.getMessage()
        assert torch.equal(_read(worker, model), before)


@all_schemes
@pytest.mark.asyncio
async def test_reads_raise_once_the_trainer_is_lost(make: Any) -> None:
    model, scheme = nn.Linear(4, 2), make(reconnect=0.2)
    told: list[object] = []
    hooks = aiosync.SchemeHooks(connected=lambda: told.append("connected"), lost=told.append)
    options: Any = {"on_lost": "raise", "hooks": hooks}
    async with _worker(scheme, model, **options) as (worker, end):
        before = _read(worker, model)
        with worker.reading():
            end("killed")
            await until(lambda: len(told) == 2)
            # A read that has begun does not raise.
            assert torch.equal(model(X), before)
        for _ in range(2):
            with pytest.raises(aiosync.PeerClosed, match="the trainer is lost"):
                worker.reading().__enter__()
            with pytest.raises(aiosync.PeerClosed, match="the trainer is lost"):
                await worker.receive(timeout=0)
            if worker.guard == "forward":
                with pytest.raises(aiosync.PeerClosed, match="the trainer is lost"):
                    model(X)
        # Copies of the model are allowed all the same.
        assert set(model.state_dict()) == {"weight", "bias"}
        assert told[0] == "connected"
        assert isinstance(told[1], aiosync.AiosyncError)
    # The model of a closed worker is an ordinary module.
    assert torch.equal(model(X), before)


@pytest.mark.parametrize("bound", [{"on_lost": "raise"}, {"max_staleness": 0.2}], ids=str)
@pytest.mark.asyncio
async def test_a_block_raises_although_that_of_another_task_is_open(bound: Any) -> None:
    """A task for which an open block may wait reads on, as that block does."""
    model, scheme, ended = nn.Linear(4, 2), SCHEMES["TCP"](reconnect=0.1), asyncio.Event()

    async def read() -> None:
        async with worker.reading():
            model(X)

    async def hold() -> None:
        async with worker.reading():
            held.set()
            await ended.wait()
            await asyncio.gather(read())
            await read()

    async with _worker(scheme, model, **bound) as (worker, end):
        held = asyncio.Event()
        holder = asyncio.ensure_future(hold())
        await held.wait()
        end("killed")
        with pytest.raises(aiosync.PeerClosed):
            while await worker.receive(timeout=PATIENCE) is not None:
                pass
        await asyncio.sleep(bound.get("max_staleness", 0))
        with pytest.raises(aiosync.PeerClosed):
            await read()
        with pytest.raises(aiosync.PeerClosed):
            worker.reading().__enter__()
        ended.set()
        await holder


@all_schemes
@pytest.mark.asyncio
async def test_a_farewell_is_no_loss(make: Any) -> None:
    model, scheme = nn.Linear(4, 2), make(reconnect=0.2)
    told: list[object] = []
    options: Any = {"on_lost": "raise", "hooks": aiosync.SchemeHooks(lost=told.append)}
    async with _worker(scheme, model, **options) as (worker, end):
        before = _read(worker, model)
        end("closed")
        with pytest.raises(aiosync.PeerClosed):
            while await worker.receive(timeout=PATIENCE) is not None:
                pass
        assert torch.equal(_read(worker, model), before)
        assert not told


@pytest.mark.parametrize("has_version", [False, True], ids=["no version", "a version"])
@all_schemes
@pytest.mark.asyncio
async def test_a_farewell_counts_although_a_pull_finds_the_link_closed(
    make: Any, has_version: bool
) -> None:
    """Until the hook has ended, the messages of the trainer wait, and the farewell is the last."""
    trainer = make(reconnect=0.0)
    worker, goes_on = copy.copy(trainer), asyncio.Event()
    told: list[object] = []
    trainer.init_on_sender(model=nn.Linear(4, 2), num_workers=None)
    hooks = aiosync.SchemeHooks(connected=goes_on.wait, lost=told.append)
    worker.init_on_receiver(model=nn.Linear(4, 2), on_lost="raise", hooks=hooks)
    async with worker, trainer:
        await trainer.connect()
        if has_version:
            await trainer.send()
        await worker.connect(initial=False, timeout=PATIENCE)
        await until(lambda: bool(trainer.sender_transports))
        await asyncio.sleep(0.1)
        await trainer.aclose()
        pulling = asyncio.create_task(worker.pull(timeout=PATIENCE))
        await asyncio.sleep(0.1)
        goes_on.set()
        with contextlib.suppress(aiosync.AiosyncError):
            await pulling
        await until(lambda: worker.link_lost is not None)
        assert not told


@all_schemes
@pytest.mark.asyncio
async def test_reads_raise_when_the_weights_are_stale(make: Any, caplog: Any) -> None:
    """The reads raise although the worker goes on to dial, without a limit."""
    model, scheme = nn.Linear(4, 2), make(reconnect=None)
    async with _worker(scheme, model, max_staleness=0.5) as (worker, end):
        before = _read(worker, model)
        end("closed")
        await until(lambda: worker.link_lost is not None)
        assert torch.equal(_read(worker, model), before)
        await until(lambda: any(each.phase == "stale" for each in caplog.records))
        with pytest.raises(aiosync.PeerClosed, match="max_staleness=0.5 s"):
            _read(worker, model)
        with pytest.raises(aiosync.PeerClosed):
            await worker.receive(timeout=PATIENCE)


@pytest.mark.asyncio
async def test_reads_go_on_once_a_trainer_is_back() -> None:
    model, scheme = nn.Linear(4, 2), SCHEMES["TCP"](reconnect=None)
    told: list[object] = []
    options: Any = {"hooks": aiosync.SchemeHooks(connected=lambda: told.append(1))}
    async with _worker(scheme, model, max_staleness=0.2, **options) as (worker, end):
        first = worker.epoch
        end("killed")
        with pytest.raises(aiosync.PeerClosed):
            while await worker.receive(timeout=PATIENCE) is not None:
                pass
        with _trainer(scheme):
            await until(lambda: len(told) == 2)
            # The weights of the new trainer have come.
            await until(lambda: worker.epoch != first)
            assert worker.reconnects == 1
            assert _read(worker, model).shape == (2,)


@pytest.mark.asyncio
async def test_a_worker_that_only_pulls_reads_on_once_a_trainer_is_back() -> None:
    """The trainer sends such a worker nothing unasked; its link is of use all the same."""
    url, model = free_address(), nn.Linear(4, 2)

    async def train() -> aiosync.TCPWeightSyncScheme:
        trainer = aiosync.TCPWeightSyncScheme(url)
        trainer.init_on_sender(model=nn.Linear(4, 2), num_workers=None)
        await trainer.connect(timeout=PATIENCE)
        await trainer.send()
        return trainer

    worker = aiosync.TCPWeightSyncScheme(url, subscribe=False, reconnect=None)
    worker.init_on_receiver(model=model, max_staleness=0.3)
    trainer = await train()
    async with worker:
        await worker.connect(timeout=PATIENCE)
        await worker.pull(timeout=PATIENCE)
        trainer.abort()
        await until(lambda: worker.link_lost is not None)
        trainer = await train()
        await trainer.send()
        await until(lambda: worker.link_lost is None)
        await asyncio.sleep(0.5)
        assert _read(worker, model).shape == (2,)
        assert await worker.pull(timeout=PATIENCE) >= 2
    await trainer.aclose()


@pytest.mark.asyncio
async def test_a_weight_server_that_lost_its_weights_ends_no_staleness() -> None:
    """It has nothing that is newer, nor does it know of anything, and a pull does not change it."""
    url, token = free_address(), "a" * 32
    trainer = aiosync.TCPWeightSyncScheme(url, token=token, dial="both")
    trainer.init_on_sender(model=nn.Linear(4, 2))
    worker = aiosync.TCPWeightSyncScheme(url, token=token, reconnect=None)
    model = nn.Linear(4, 2)
    worker.init_on_receiver(model=model, max_staleness=1.0)
    async with worker:
        async with WeightServer(url, token=token), trainer:
            await trainer.connect(timeout=PATIENCE)
            await worker.connect(timeout=PATIENCE)
        await until(lambda: worker.link_lost is not None)
        async with WeightServer(url, token=token):
            await until(lambda: worker.link_lost is None)
            with pytest.raises(aiosync.PeerClosed, match="max_staleness=1 s"):
                async with asyncio.timeout(PATIENCE):
                    while await worker.pull(timeout=PATIENCE) == 1:
                        _read(worker, model)


@pytest.mark.parametrize(
    ("again", "reason"),
    [
        ({"token": "b" * 32}, "token"),
        ({"model_ids": ["value"]}, "does not serve model"),
        (None, ""),
    ],
    ids=["token", "models", "nobody"],
)
@pytest.mark.asyncio
async def test_a_worker_says_why_it_is_not_linked_again(
    again: dict[str, Any] | None, reason: str, caplog: Any
) -> None:
    """The text of ``link_lost``, of waits, and one record in the log."""
    url, token = free_address(), "a" * 32
    options: Any = {"token": token, "dial": "both"}
    near = WeightServer(url, token=token)
    trainer = aiosync.TCPWeightSyncScheme(url, **options)
    trainer.init_on_sender("policy", model=nn.Linear(4, 2))
    worker = aiosync.TCPWeightSyncScheme(url, reconnect=None, **options)
    worker.init_on_receiver("policy", model=nn.Linear(4, 2))
    async with near, worker:
        async with trainer:
            await trainer.connect(timeout=PATIENCE)
            await trainer.send()
        await worker.connect(timeout=PATIENCE)
        await near.aclose()
        async with contextlib.AsyncExitStack() as stack:
            if again is not None:
                await stack.enter_async_context(WeightServer(url, **{"token": token, **again}))
            await until(lambda: "the last attempt to dial again: " in str(worker.link_lost))
            if again is not None:
                await until(lambda: reason in str(worker.link_lost))
            with pytest.raises(
                aiosync.RecvTimeout, match="there is no link to a trainer: "
            ) as info:
                await worker.wait_for_version(9, timeout=0.5)
            assert reason in str(info.value)
            records = [each for each in caplog.records if each.levelno == logging.WARNING]
            texts = [each.getMessage() for each in records if vars(each).get("phase") == "waiting"]
            assert len(texts) == (again is not None), texts
            assert all(reason in text for text in texts)
        async with WeightServer(url, token=token):
            await until(lambda: worker.link_lost is None)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [ValueError, aiosync.RecvTimeout])
async def test_what_hooks_raise_is_raised(kind: type[Exception]) -> None:
    def refuse(*_: object) -> None:
        raise kind("no use for a trainer")

    model, scheme = nn.Linear(4, 2), SCHEMES["pipes"]()
    async with _worker(scheme, model, hooks=aiosync.SchemeHooks(lost=refuse)) as (worker, end):
        end("killed")
        with pytest.raises(kind, match="no use"):
            while await worker.receive(timeout=PATIENCE) is not None:
                pass


@pytest.mark.parametrize("seconds", [0.0, 0.1], ids=["dials no more", "dials again"])
@pytest.mark.asyncio
async def test_a_call_that_waits_raises_before_the_hook_has_ended(seconds: float) -> None:
    ended = asyncio.Event()

    async def lost(_: object) -> None:
        await ended.wait()

    model, scheme = nn.Linear(4, 2), SCHEMES["TCP"](reconnect=seconds)
    options: Any = {"on_lost": "raise", "hooks": aiosync.SchemeHooks(lost=lost)}
    async with _worker(scheme, model, **options) as (worker, end):
        waiting = asyncio.ensure_future(worker.wait_for_version(9, timeout=PATIENCE))
        await asyncio.sleep(0)
        end("killed")
        with pytest.raises(aiosync.PeerClosed, match="the trainer is lost"):
            await waiting
        ended.set()


@all_schemes
@pytest.mark.parametrize("bound", [{"on_lost": "raise"}, {"max_staleness": 0.2}], ids=str)
@pytest.mark.asyncio
async def test_a_worker_whose_tasks_are_cancelled_has_lost_its_trainer(
    make: Any, bound: Any, caplog: Any
) -> None:
    """Code that cancels every task of the loop ends the receiver; no read may go on for ever."""
    model, told, others = nn.Linear(4, 2), list[object](), asyncio.all_tasks()
    hooks = aiosync.SchemeHooks(lost=told.append)
    async with _worker(make(reconnect=None), model, hooks=hooks, **bound) as (worker, _):
        before = _read(worker, model)
        for task in asyncio.all_tasks() - others:
            task.cancel()
        await until(lambda: worker.link_lost is not None and bool(told))
        assert "was cancelled" in str(worker.link_lost)
        assert told == [worker.link_lost]
        [record] = [each for each in caplog.records if each.phase == "lost"]
        assert record.levelno == logging.WARNING
        assert "the model keeps version 2" in record.getMessage()
        await asyncio.sleep(bound.get("max_staleness", 0))
        with pytest.raises(aiosync.PeerClosed, match="was cancelled"):
            _read(worker, model)
        with pytest.raises(aiosync.PeerClosed, match="was cancelled"):
            await worker.receive(timeout=PATIENCE)
    assert torch.equal(model(X), before)


@pytest.mark.asyncio
async def test_a_worker_whose_hook_refuses_a_new_link_has_lost_its_trainer(caplog: Any) -> None:
    links, told = list[int](), list[object]()

    def connected() -> None:
        links.append(1)
        if len(links) == 2:
            raise ValueError("no use for another trainer")

    model, scheme = nn.Linear(4, 2), SCHEMES["TCP"](reconnect=None)
    hooks = aiosync.SchemeHooks(connected=connected, lost=told.append)
    async with _worker(scheme, model, hooks=hooks, on_lost="raise") as (worker, end):
        end("closed")
        with _trainer(scheme):
            await until(lambda: bool(told))
            assert told == [worker.link_lost]
            assert "ValueError: no use for another trainer" in str(worker.link_lost)
            [record] = [each for each in caplog.records if each.phase == "lost"]
            assert record.levelno == logging.WARNING
            assert "no use for another trainer" in record.getMessage()
            with pytest.raises(aiosync.PeerClosed, match="no use for another trainer"):
                _read(worker, model)
            with pytest.raises(aiosync.PeerClosed, match="no use for another trainer"):
                await worker.wait_for_version(9, timeout=PATIENCE)


@pytest.mark.parametrize("make", [aiosync.sync.SharedMemWeightSyncScheme])
def test_a_blocking_worker_raises_too(make: Any) -> None:
    model, scheme = nn.Linear(4, 2), make()
    worker = copy.copy(scheme)
    worker.init_on_receiver(model=model, on_lost="raise")
    with _trainer(scheme) as end, worker:
        worker.connect(timeout=PATIENCE)
        end("killed")
        wait_until(lambda: worker.link_lost is not None)
        with pytest.raises(aiosync.PeerClosed, match="the trainer is lost"):
            for _ in range(100):
                model(X)
                worker.receive(timeout=0.1)


@pytest.mark.parametrize(
    "options", [{"on_lost": "exit"}, {"max_staleness": 0}, {"max_staleness": "5"}], ids=str
)
def test_wrong_options_are_refused(options: Any) -> None:
    with pytest.raises(aiosync.ConfigError, match=next(iter(options))):
        aiosync.SharedMemWeightSyncScheme().init_on_receiver(model=nn.Linear(4, 2), **options)


@pytest.mark.asyncio
async def test_a_late_hook_of_the_trainer_before_refuses_nothing_of_the_next_one() -> None:
    url, started, goes_on = free_address(), asyncio.Event(), asyncio.Event()

    async def applied(epoch: int, version: int) -> None:
        if version == 5:
            started.set()
            await goes_on.wait()
            raise RuntimeError("the workers below are gone")

    def trainer(first_version: int) -> Any:
        token = "0123456789abcdef"
        scheme = aiosync.TCPWeightSyncScheme(url, token=token, first_version=first_version)
        scheme.init_on_sender(model=nn.Linear(4, 2), num_workers=1)
        return scheme

    one = trainer(4)
    worker = aiosync.TCPWeightSyncScheme(url, token="0123456789abcdef")
    hooks = aiosync.SchemeHooks(applied=applied)
    worker.init_on_receiver(model=nn.Linear(4, 2), hooks=hooks)
    async with worker:
        async with one:
            await asyncio.gather(one.connect(), worker.connect())
            handle = one.send_nowait()
            await asyncio.wait_for(started.wait(), PATIENCE)
        with contextlib.suppress(aiosync.AiosyncError):
            await handle
        async with trainer(1) as two:
            joining = asyncio.create_task(two.connect())
            await until(lambda: worker.version == 1)
            goes_on.set()
            await joining
            waiting = asyncio.create_task(worker.wait_for_version(2))
            await asyncio.sleep(0)
            await two.send()
            assert await asyncio.wait_for(waiting, PATIENCE) == 2


class _Rebuilding:
    """A context whose model cannot be had for a while."""

    def __init__(self, model: nn.Module) -> None:
        self.policy = model
        self.fails = False

    def get_model(self, model_id: str) -> nn.Module:
        if self.fails:
            raise RuntimeError("the policy is being rebuilt")
        return self.policy


@pytest.mark.asyncio
async def test_a_context_that_raises_for_a_moment_does_not_end_the_redial() -> None:
    context = _Rebuilding(nn.Linear(4, 2))
    sender = aiosync.TCPWeightSyncScheme(free_address(), token="0123456789abcdef")
    sender.init_on_sender(model_id="policy", model=nn.Linear(4, 2), num_workers=1)
    worker = copy.copy(sender)
    worker.init_on_receiver(model_id="policy", context=context)
    async with sender, worker:
        await asyncio.gather(sender.connect(), worker.connect())
        context.fails = True
        sender.sender_transports[0].abort()
        await until(lambda: worker.reconnects == 1)
        context.fails = False
        await until(lambda: bool(sender.worker_versions))
        assert (await sender.send()).acked == {0}


@pytest.mark.asyncio
async def test_what_waited_for_a_read_is_applied_although_the_link_was_replaced() -> None:
    """The read may end after the old link's memory has gone, and before the new link names it."""

    async def connected() -> None:
        if worker.reconnects:
            await asyncio.sleep(0.5)

    sender = aiosync.DistributedWeightSyncScheme(guard="reading")
    sender.init_on_sender(model_id="policy", model=nn.Linear(4, 2), num_workers=1)
    worker = copy.copy(sender)
    hooks = aiosync.SchemeHooks(connected=connected)
    worker.init_on_receiver(model_id="policy", model=nn.Linear(4, 2), hooks=hooks)
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with worker.reading():
            held.set()
            free.wait(PATIENCE)

    async with sender, worker:
        await asyncio.gather(sender.connect(), worker.connect())
        holding = asyncio.ensure_future(asyncio.to_thread(hold))
        await until(held.is_set)
        handle = sender.send_nowait()
        await until(lambda: worker.staged_version == 2)
        sender.sender_transports[0].abort()
        await until(lambda: worker.reconnects == 1)
        free.set()
        await holding
        await until(lambda: worker.version == 2)
        with contextlib.suppress(aiosync.AiosyncError):
            await handle


@pytest.mark.asyncio
async def test_a_hook_that_outlives_its_link_is_called_once() -> None:
    """The next link names the version again, as the trainer has no answer yet."""
    calls, started, goes_on = list[int](), asyncio.Event(), asyncio.Event()

    async def applied(epoch: int, version: int) -> None:
        calls.append(version)
        if version == 2:
            started.set()
            await goes_on.wait()

    sender = aiosync.DistributedWeightSyncScheme()
    sender.init_on_sender(model_id="policy", model=nn.Linear(4, 2), num_workers=1)
    worker = copy.copy(sender)
    hooks = aiosync.SchemeHooks(applied=applied)
    worker.init_on_receiver(model_id="policy", model=nn.Linear(4, 2), hooks=hooks)
    async with sender, worker:
        await asyncio.gather(sender.connect(), worker.connect())
        handle = sender.send_nowait()
        await asyncio.wait_for(started.wait(), PATIENCE)
        sender.sender_transports[0].abort()
        await until(lambda: worker.reconnects == 1 and bool(sender.worker_versions))
        await asyncio.sleep(0.2)
        goes_on.set()
        assert (await sender.send()).acked == {0}
        assert calls.count(2) == 1
        with contextlib.suppress(aiosync.AiosyncError):
            await handle
