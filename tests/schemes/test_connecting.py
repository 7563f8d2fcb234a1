"""Several schemes between the same two sides: the order of their connect() calls, and errors."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import aiosync
import aiosync.server
import aiosync.sync
from aiosync.protocol import Inbox
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]
MODELS = ("actor", "critic", "encoder")
ANY = pytest.mark.parametrize(
    "make",
    [*harness.SCHEMES, aiosync.TCPWeightSyncScheme, aiosync.DistributedWeightSyncScheme],
)


def _both_sides(make: Callable[[], Any]) -> tuple[list[Any], list[Any]]:
    trainers = [make() for _ in MODELS]
    for model_id, trainer in zip(MODELS, trainers, strict=True):
        trainer.init_on_sender(model_id, model=models.linear(1.0), num_workers=1)
    workers = [harness.twin(trainer) for trainer in trainers]
    for model_id, worker in zip(MODELS, workers, strict=True):
        worker.init_on_receiver(model_id, model=models.linear())
    return trainers, workers


async def _one_by_one(schemes: Sequence[Any], timeout: float) -> None:
    for scheme in schemes:
        await scheme.connect(timeout=timeout)


@ANY
@pytest.mark.parametrize("who", ["trainer", "worker", "both"])
async def test_any_order(make: Any, who: str) -> None:
    """Every order works if one of the two sides connects its schemes at the same time."""
    trainers, workers = _both_sides(make)
    try:
        ways = {
            "trainer": (aiosync.connect_all(*trainers), _one_by_one(workers[::-1], 30)),
            "worker": (_one_by_one(trainers, 30), aiosync.connect_all(*workers[::-1])),
            "both": (aiosync.connect_all(*trainers), aiosync.connect_all(*workers[::-1])),
        }
        for name, ways_of_others in ways.items():
            for each in ways_of_others if name != who else ():
                each.close()
        await asyncio.wait_for(asyncio.gather(*ways[who]), harness.PATIENCE)
        for trainer in trainers:
            assert (await trainer.send()).acked == {0}
    finally:
        await asyncio.gather(*(each.aclose() for each in (*trainers, *workers)))


@ANY
async def test_opposite_orders_name_the_models(make: Any) -> None:
    trainers, workers = _both_sides(make)
    try:
        ended = await asyncio.gather(
            _one_by_one(trainers, 1.0), _one_by_one(workers[::-1], 1.0), return_exceptions=True
        )
        for error, model_id in zip(ended, ("actor", "encoder"), strict=True):
            assert isinstance(error, aiosync.ConnectTimeout)
            assert f"model '{model_id}'" in str(error)
            assert "1 s" in str(error)
            assert "0.99" not in str(error)
        assert "connect_all()" in str(ended[0])
    finally:
        await asyncio.gather(*(each.aclose() for each in (*trainers, *workers)))


async def test_one_that_fails_ends_the_others() -> None:
    trainers, workers = _both_sides(aiosync.SharedMemWeightSyncScheme)
    await workers[1].aclose()
    workers[1] = harness.twin(trainers[1])
    workers[1].init_on_receiver("another", model=models.linear())
    try:
        trainers[0].timeout = 60
        joining = asyncio.ensure_future(aiosync.connect_all(*trainers))
        with pytest.raises(aiosync.ConfigError, match="serves model 'critic'"):
            await asyncio.wait_for(aiosync.connect_all(*workers), harness.PATIENCE)
        with pytest.raises(aiosync.TransportClosed):
            await workers[1].connect()
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        for trainer in trainers:
            assert "closed" in repr(trainer) or trainer.synchronized_on_sender
    finally:
        await asyncio.gather(*(each.aclose() for each in (*trainers, *workers)))


async def test_what_others_raised_is_in_the_notes() -> None:
    trainers, workers = _both_sides(aiosync.SharedMemWeightSyncScheme)
    try:
        with pytest.raises(aiosync.ConnectTimeout) as caught:
            await aiosync.connect_all(*trainers, timeout=0.0)
        notes = "\n".join(caught.value.__notes__)
        told = f"{caught.value}\n{notes}"
        assert all(f"model '{model_id}'" in told for model_id in MODELS)
        await aiosync.connect_all()
    finally:
        await asyncio.gather(*(each.aclose() for each in (*trainers, *workers)))


async def test_blocking() -> None:
    await asyncio.to_thread(_block)


def _block() -> None:
    trainers, workers = _both_sides(aiosync.sync.SharedMemWeightSyncScheme)
    failed = list[BaseException]()

    def work() -> None:
        try:
            for worker in workers[::-1]:
                worker.connect()
        except aiosync.AiosyncError as exc:
            failed.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    aiosync.sync.connect_all(*trainers, timeout=harness.PATIENCE)
    thread.join()
    assert not failed
    # The other schemes go on.
    trainers[0].shutdown()
    for trainer in trainers[1:]:
        assert trainer.send().acked == {0}
    for each in (*trainers, *workers):
        each.shutdown()


async def test_a_blocking_call_that_fails_leaves_nothing() -> None:
    def fail() -> None:
        trainers, workers = _both_sides(aiosync.sync.TCPWeightSyncScheme)
        with pytest.raises(aiosync.ConnectTimeout):
            aiosync.sync.connect_all(*trainers, timeout=0.1)
        with pytest.raises(aiosync.TransportClosed):
            aiosync.sync.connect_all(*trainers, timeout=0.1)
        assert "aiosync-portal" not in {each.name for each in threading.enumerate()}
        for each in (*trainers, *workers):
            each.shutdown()

    await asyncio.to_thread(fail)
    trainers, workers = _both_sides(aiosync.sync.TCPWeightSyncScheme)
    with pytest.raises(aiosync.LocalProtocolError, match=r"await aiosync.connect_all\(\)"):
        aiosync.sync.connect_all(*trainers)
    for each in (*trainers, *workers):
        each.abort()


# -- mistakes of newcomers -------------------------------------------------------------------------


def _schemes(package: Any) -> list[Any]:
    names = ["SharedMem", "MultiProcess", "TCP", "No", "Distributed"]
    return [getattr(package, f"{name}WeightSyncScheme")() for name in names]


async def test_with_instead_of_async_with() -> None:
    for scheme in _schemes(aiosync):
        with pytest.raises(aiosync.LocalProtocolError, match="write `async with scheme:`"):
            with scheme:
                pass
        await scheme.aclose()
    for scheme in _schemes(aiosync.sync):
        with pytest.raises(aiosync.LocalProtocolError, match="write `with scheme:`"):
            async with scheme:
                pass


async def test_a_trainer_listens_where_a_weight_server_does() -> None:
    token = "0123456789abcdef"
    async with aiosync.server.WeightServer("tcp://127.0.0.1:0", token=token) as server:
        for package in (aiosync, aiosync.sync):
            scheme = package.TCPWeightSyncScheme(server.url, token=token)
            with pytest.raises(aiosync.ConfigError, match="dial='both'"):
                scheme.init_on_sender(model=models.linear())
    # The error also comes for an address on another host, where the server is.
    scheme = aiosync.TCPWeightSyncScheme("tcp://203.0.113.7:4711", token=token)
    with pytest.raises(aiosync.ConfigError, match="dial='both'"):
        scheme.init_on_sender(model=models.linear())


async def test_epochs_are_hexadecimal() -> None:
    inbox = Inbox()
    inbox.offer(0x0123456789ABCDEF, 1)
    with pytest.raises(aiosync.StaleVersion, match="version 1 of epoch 0123456789abcdef "):
        inbox.offer(0x0123456789ABCDEF, 1)


async def test_processes_that_are_none_are_refused_at_once() -> None:
    closed = multiprocessing.get_context("fork").Process(target=int)
    closed.start()
    closed.join()
    closed.close()
    unstarted = multiprocessing.Process(target=int)
    scheme = aiosync.SharedMemWeightSyncScheme(timeout=0.1)
    scheme.init_on_sender(model=models.linear(), num_workers=1)
    async with scheme:
        with concurrent.futures.ProcessPoolExecutor() as executor:
            several: list[Any] = [None, executor, os.getpid(), iter([os.getpid()])]
            # They have no order, which says the worker that each process becomes.
            several += [{0: os.getpid()}.values(), {os.getpid()}]
            singles = [closed, unstarted, 0, -1, 2**40, True, 1.5, None, "1"]
            for given in several + [[each] for each in singles]:
                with pytest.raises(aiosync.ConfigError, match="processes must be a list of"):
                    await scheme.connect(processes=given)
        # The scheme can still connect: it waits for the worker.
        with pytest.raises(aiosync.ConnectTimeout):
            await scheme.connect(processes=[os.getpid()])


async def test_processes_without_the_number_of_workers_are_refused() -> None:
    """connect() would return at once, and miss that one of them ends."""
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model=models.linear())
    async with scheme:
        with pytest.raises(aiosync.ConfigError, match=r"pass num_workers= to init_on_sender\(\)"):
            await scheme.connect(processes=[os.getpid()])
        # The scheme can still connect.
        await scheme.connect(processes=[])


async def test_the_process_of_a_weight_server_needs_no_number(tmp_path: Path) -> None:
    """A trainer that pushes to a server waits for one worker, which is the server."""
    url = f"unix://{tmp_path}/server"
    scheme = aiosync.TCPWeightSyncScheme(url, dial="both", timeout=0.1)
    scheme.init_on_sender(model=models.linear())
    async with scheme:
        with pytest.raises(aiosync.ConnectTimeout):
            await scheme.connect(processes=[os.getpid()])


async def test_a_list_of_schemes_is_refused() -> None:
    advice = re.escape("pass connect_all(*schemes)")
    for given in ([aiosync.SharedMemWeightSyncScheme()], None):
        with pytest.raises(aiosync.ConfigError, match=advice):
            await aiosync.connect_all(given)  # type: ignore[arg-type]
    blocking = [aiosync.sync.SharedMemWeightSyncScheme()]
    for wrong in (blocking, None, aiosync.SharedMemWeightSyncScheme()):
        with pytest.raises(aiosync.ConfigError, match="takes blocking schemes"):
            aiosync.sync.connect_all(wrong)  # type: ignore[arg-type]


async def test_transports_that_are_none_are_refused() -> None:
    for given in ({0: 3}, [3], {0: None}):
        scheme = aiosync.SharedMemWeightSyncScheme()
        with pytest.raises(aiosync.ConfigError, match="must be a mapping of worker_idx to link"):
            scheme.init_on_sender(model=models.linear(), transports=given)  # type: ignore[arg-type]
