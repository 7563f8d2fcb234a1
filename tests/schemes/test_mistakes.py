"""A newcomer's first mistakes, and machines that lack something."""

from __future__ import annotations

import asyncio
import copy
import math
import multiprocessing
import textwrap
from typing import Any

import numpy as np
import pytest
import torch

import aiosync
import aiosync.sync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = pytest.mark.one_loop
both = pytest.mark.parametrize("make", harness.SCHEMES)


@pytest.mark.asyncio
@both
async def test_two_senders_of_one_scheme(make) -> None:
    async with make() as scheme, copy.copy(scheme) as other:
        scheme.init_on_sender(model=models.linear())
        with pytest.raises(aiosync.ConfigError):
            other.init_on_sender(model=models.linear())


@pytest.mark.asyncio
async def test_a_worker_that_forgot_to_connect_is_told() -> None:
    with pytest.warns(UserWarning, match="does not connect"):
        async with aiosync.MultiProcessWeightSyncScheme() as worker:
            worker.init_on_receiver(model=models.linear())


# -- the wrong loop, thread or process -----------------------------------------------------------


@pytest.mark.asyncio
@both
async def test_used_on_another_loop(make) -> None:
    ends = harness.here(make(), models.linear(), sender={"model": models.linear()})
    async with ends as (sender, _):
        for elsewhere in (lambda: asyncio.run(sender.send()), sender.send_nowait):
            with pytest.raises(aiosync.LocalProtocolError, match="another event loop"):
                await asyncio.to_thread(elsewhere)


def _use_in_child(scheme, conn) -> None:
    async def main() -> list[str]:
        texts = []
        for call in (scheme.connect, lambda: scheme.wait_for_version(1)):
            with pytest.raises(aiosync.LocalProtocolError) as caught:
                await call()
            texts.append(str(caught.value))
        async with asyncio.timeout(2):
            await scheme.aclose()
        return texts

    conn.send(asyncio.run(main()))


def _texts_of_child(scheme) -> list[str]:
    mine, theirs = multiprocessing.Pipe()
    with mine, theirs:
        process = harness.context("fork").Process(target=_use_in_child, args=(scheme, theirs))
        process.start()
        process.join(harness.PATIENCE)
        process.close()
        assert mine.poll()
        return mine.recv()


@pytest.mark.asyncio
@both
async def test_a_scheme_in_a_forked_child(make) -> None:
    async with make() as scheme:
        scheme.init_on_sender(model=models.linear())
        assert "init_on_receiver()" in _texts_of_child(scheme)[0]
    async with harness.here(make(), models.linear(), sender={"model": models.linear()}) as ends:
        for scheme in ends:
            texts = _texts_of_child(scheme)
            assert len(texts) == 2
            assert all("before the process forked" in text for text in texts)
        assert (await ends[0].send()).acked == {0}


@both
@pytest.mark.parametrize("build", [models.linear, models.medium])
@pytest.mark.parametrize("closed", [False, True], ids=["stopped", "closed"])
def test_a_scheme_is_closed_when_its_own_loop_does_not_run(make, closed, build) -> None:
    source, target = build(), build()
    scheme = make()
    worker = copy.copy(scheme)
    scheme.init_on_sender(model=source, num_workers=1)
    worker.init_on_receiver(model=target)
    loop = asyncio.SelectorEventLoop()

    async def connect() -> None:
        await asyncio.gather(scheme.connect(), worker.connect())

    loop.run_until_complete(connect())
    if closed:
        loop.close()

    async def close() -> None:
        async with asyncio.timeout(4.5):  # it waits for no tasks that nothing runs
            for each in (worker, scheme):
                await each.aclose()

    asyncio.run(close())
    asyncio.run(close())
    assert models.filled(target, -1.0)
    if not closed:
        loop.run_until_complete(asyncio.sleep(0.01))
        assert not asyncio.all_tasks(loop)
        loop.close()


# -- timeouts --------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_timeout_of_a_call_that_is_no_number() -> None:
    scheme = aiosync.SharedMemWeightSyncScheme()
    ends = harness.here(scheme, models.linear(), sender={"model": models.linear()})
    async with ends as (sender, receiver):
        for call in (
            sender.send,
            lambda timeout: sender.send_nowait(timeout=timeout),
            lambda timeout: sender.wait_for_version(9, timeout=timeout),
            lambda timeout: sender.wait_staged(9, timeout=timeout),
            lambda timeout: receiver.wait_for_version(9, timeout=timeout),
            lambda timeout: receiver.wait_staged(9, timeout=timeout),
            lambda timeout: receiver.pull(min_version=9, timeout=timeout),
            receiver.receive,
            sender.ready.wait,
        ):
            for timeout in (math.nan, -1, np.float32("nan"), "5", True, [1], 1j):
                with pytest.raises(aiosync.ConfigError, match="timeout"):
                    await call(timeout=timeout)
        assert (sender.version, receiver.version) == (1, 1)  # nothing was sent
        for good in (None, 30, np.float32(30), np.int64(30), math.inf):
            await sender.send(timeout=good)


# -- models that take no hooks ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # torch wants torch.compile to be used
@pytest.mark.asyncio
@both
async def test_a_scripted_model_takes_no_forward_hooks(make) -> None:
    scripted = torch.jit.script(models.linear())
    with pytest.raises(aiosync.ConfigError, match="guard='reading'"):
        make().init_on_receiver(model=scripted)
    for options in ({"guard": "reading"}, {"apply": "manual"}):
        source, target = models.linear(1.0), copy.deepcopy(scripted)
        async with harness.here(make(**options), target, sender={"model": source}) as (_, receiver):
            with receiver.reading():
                assert target(torch.ones(4)).tolist() == [5.0, 5.0]
            receiver.model = copy.deepcopy(scripted)


# -- what nobody awaits, and what a machine lacks --------------------------------------------------


@pytest.mark.slow
def test_without_uvloop(fresh: Any) -> None:
    script = """
    import sys, warnings
    warnings.simplefilter("error")
    sys.modules["uvloop"] = None  # as if it were not installed
    import importlib.util
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *a: None if name == "uvloop" else find_spec(name, *a)
    import asyncio, torch, aiosync, aiosync.sync

    async def main():
        return type(asyncio.get_running_loop()).__module__

    assert aiosync.run(main).startswith("asyncio"), aiosync.run(main)
    with aiosync.sync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=torch.nn.Linear(4, 2))
        scheme.connect()
        scheme.send()
    print("good")
    """
    done = fresh.script(textwrap.dedent(script))
    assert done.stdout == "good\n", done.stderr
