"""A newcomer's first mistakes, and machines that lack something."""

from __future__ import annotations

import asyncio
import copy
import textwrap
from typing import Any

import pytest

import aiosync
import aiosync.sync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = pytest.mark.one_loop


@pytest.mark.asyncio
async def test_a_worker_that_forgot_to_connect_is_told() -> None:
    with pytest.warns(UserWarning, match="does not connect"):
        async with aiosync.MultiProcessWeightSyncScheme() as worker:
            worker.init_on_receiver(model=models.linear())


@pytest.mark.parametrize("make", harness.SCHEMES)
@pytest.mark.parametrize("closed", [False, True], ids=["stopped", "closed"])
def test_a_scheme_is_closed_when_its_own_loop_does_not_run(make: Any, closed: bool) -> None:
    source, target, scheme = models.medium(), models.medium(), make()
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
