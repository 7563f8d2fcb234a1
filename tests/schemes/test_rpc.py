"""Weights over torch.distributed.rpc, between real processes."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from torch.distributed import rpc
from torch.futures import Future

import aiosync
from aiosync import RPCWeightSyncScheme
from tests.contract.suite import ANYWHERE
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.schemes import _rpc_group
from tests.schemes._driver import Driver


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with closing(Driver(_rpc_group.grouped, 3)) as driver:
        yield driver


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ANYWHERE)), ids=lambda n: ANYWHERE[n].name)
def test_contract(number: int, driver: Driver) -> None:
    driver.run(_rpc_group.contract, number, loop=("asyncio", "uvloop")[number % 2])


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_workers_that_are_told_where_to_connect(driver: Driver, loop: str) -> None:
    driver.run(_rpc_group.told_where, loop=loop)


# -- without RPC ---------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_worker_without_rpc_is_told_what_to_do() -> None:
    worker = RPCWeightSyncScheme()
    worker.init_on_receiver(model=models.linear())
    with pytest.raises(aiosync.ConfigError, match="init_rpc"):
        await worker.connect(timeout=5)
    await worker.aclose()


@pytest.mark.asyncio
@pytest.mark.slow
async def test_a_worker_is_told_again_beside_one_that_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its link was lost, so it may have restarted; another one never answers."""
    told: list[str] = []

    def call(name: str, *_: Any, **options: Any) -> Future[None]:
        told.append(name)
        answer: Future[None] = Future()
        if name == "dead":
            answer.set_exception(RuntimeError("no such worker"))
        else:
            answer.set_result(None)
        return answer

    monkeypatch.setattr(rpc, "get_worker_info", lambda: None)
    monkeypatch.setattr(rpc, "rpc_async", call)
    scheme = RPCWeightSyncScheme(timeout=harness.PATIENCE, shared_memory=False)
    scheme.init_on_sender(model=models.linear(1.0), workers=["dead", "alive"], num_workers=1)
    worker = harness.twin(scheme)
    worker.init_on_receiver(model=models.linear())
    async with scheme, worker:
        await asyncio.gather(scheme.connect(), worker.connect())
        for times in (1, 2, 3):
            await harness.until(lambda times=times: told.count("alive") == times, 10.0)
            old = scheme.sender_transports[0]
            old.abort()
            await harness.until(lambda old=old: scheme.sender_transports.get(0, old) is not old)
        assert told.count("dead") > 3


@pytest.mark.asyncio
async def test_copies_of_one_scheme_may_serve_two_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker finds the trainer of its own model, whichever told its process last."""
    told: list[str] = []

    def call(name: str, function: Any, *, args: Any, **_: Any) -> Future[None]:
        answer: Future[None] = Future()
        answer.set_result(function(*args))
        told.append(name)
        return answer

    monkeypatch.setattr(rpc, "get_worker_info", lambda: None)
    monkeypatch.setattr(rpc, "rpc_async", call)
    scheme = RPCWeightSyncScheme(timeout=harness.PATIENCE, shared_memory=False)
    trainers, workers = [copy.copy(scheme) for _ in range(2)], [copy.copy(scheme) for _ in range(2)]
    async with trainers[0], trainers[1], workers[0], workers[1]:
        connecting = list[Any]()
        for idx, model_id in enumerate(("policy", "critic")):
            source = models.linear(float(idx))
            trainers[idx].init_on_sender(model_id=model_id, model=source, workers=["worker"])
            workers[idx].init_on_receiver(model_id=model_id, model=models.linear())
            connecting.append(asyncio.create_task(trainers[idx].connect()))
        await harness.until(lambda: len(told) == 2)
        for idx, worker in enumerate(workers):
            await worker.connect(timeout=harness.PATIENCE)
            await connecting[idx]
            assert models.holds(worker, float(idx))


@pytest.mark.parametrize("workers", ["worker0", [3]])
def test_names_of_workers(workers) -> None:
    with pytest.raises(aiosync.ConfigError):
        RPCWeightSyncScheme().init_on_sender(model=models.linear(), workers=workers)
