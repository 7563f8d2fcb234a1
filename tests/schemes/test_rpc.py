"""Weights over torch.distributed.rpc, between real processes.

RPC keeps threads and sockets for the life of a process, so pytest's own never initialises it:
each test runs scenarios in a process of its own, which is the trainer of three workers.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import aiosync
from aiosync.schemes.rpc import RPCWeightSyncScheme
from tests.schemes import _harness as harness
from tests.schemes import _models as models

ROOT = Path(__file__).parents[2]
SECONDS = 55


def run_group(*scenarios: str) -> None:
    command = [sys.executable, "-m", "tests.schemes._rpc_scenarios", *scenarios]
    # A session of its own: its workers end with it, whatever happens.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
    assert process.returncode == 0, output


@pytest.mark.slow
def test_updates_copies_and_links() -> None:
    run_group("calm:asyncio", "many_updates:uvloop")


@pytest.mark.slow
def test_workers_on_the_trainers_host_read_shared_memory() -> None:
    run_group("on_one_host:uvloop")


@pytest.mark.slow
@pytest.mark.apart
def test_a_worker_that_is_killed_or_stands_still_in_mid_transfer() -> None:
    run_group("killed:uvloop")


# -- without RPC ---------------------------------------------------------------------------------


def test_copies_have_one_id_and_schemes_differ() -> None:
    scheme = RPCWeightSyncScheme()
    assert harness.twin(scheme)._scheme_id == scheme._scheme_id
    assert harness.twin(harness.twin(scheme))._scheme_id == scheme._scheme_id
    assert RPCWeightSyncScheme()._scheme_id != scheme._scheme_id
    assert scheme._scheme_id.encode() in pickle.dumps(scheme)


@pytest.mark.asyncio
async def test_without_rpc_both_sides_say_what_to_do() -> None:
    scheme = RPCWeightSyncScheme()
    worker = harness.twin(scheme)
    worker.init_on_receiver(model=models.linear())
    with pytest.raises(aiosync.ConfigError, match="init_rpc"):
        await worker.connect(timeout=5)
    with pytest.raises(aiosync.ConfigError, match="init_rpc"):
        scheme.create_transport(("worker0", None, None))
    with pytest.raises(aiosync.ConfigError, match="3|rref"):
        scheme.create_transport(("worker0", None))
    with pytest.raises(aiosync.ConfigError, match="WorkerInfo"):
        scheme.create_transport((None, None, None))
    await scheme.aclose()


@pytest.mark.parametrize(
    "options", [{"patience": 0}, {"reconnect": -1}, {"inline_nbytes": -1}, {"address": "x"}]
)
def test_illegal_options(options) -> None:
    with pytest.raises(aiosync.ConfigError):
        RPCWeightSyncScheme(**options)


def test_names_of_workers() -> None:
    with pytest.raises(aiosync.ConfigError, match="list of names"):
        RPCWeightSyncScheme().init_on_sender(model=models.linear(), workers="worker0")
    with pytest.raises(aiosync.ConfigError, match="WorkerInfo"):
        RPCWeightSyncScheme().init_on_sender(model=models.linear(), workers=[3])


def test_importing_aiosync_leaves_rpc_alone() -> None:
    """torch itself imports its RPC in some builds; aiosync's part of it waits until it is used."""
    code = "import sys, aiosync; assert 'aiosync.transports._rpc_flight' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=SECONDS, check=False)
    assert done.returncode == 0


# -- where a payload lands -----------------------------------------------------------------------


@pytest.fixture
def landing():
    from aiosync.transports._rpc_landing import Landing, landings

    told: list[int] = []
    made = Landing([memoryview(bytearray(60)), memoryview(bytearray(90))], 150, 64, told.append)
    made._tell = lambda: told.append(1)
    made.told = told  # type: ignore[attr-defined]
    landings[made.key] = made
    yield made
    del landings[made.key]


def test_chunks_land_in_any_order_across_buffers(landing) -> None:
    import torch

    from aiosync.transports._rpc_landing import deliver

    data = torch.arange(150, dtype=torch.uint8)
    assert deliver(landing.key, 2, data[128:]) is None
    assert deliver(landing.key, 0, data[:10], data[10:64]) is None
    assert landing.left == 64
    assert deliver(landing.key, 1, data[64:128]) is None
    assert landing.left == 0
    got = b"".join(bytes(target) for target in landing._targets)
    assert got == bytes(data.tolist())
    assert not landing.told  # the sender says that it was all


def test_what_was_not_announced_is_refused(landing) -> None:
    import torch

    from aiosync.transports._rpc_landing import deliver

    data = torch.zeros(64, dtype=torch.uint8)
    assert "await" in str(deliver(b"x" * 16, 0, data))
    wrong = [
        (0, data[:63]),
        (3, data),
        (-1, data),
        (2, data),
        ("0", data),
        (0, data.float()),
        (0, data.view(8, 8)),
        (0, b"bytes"),
        (0, torch.zeros(128, dtype=torch.uint8)[::2]),
    ]
    for index, what in wrong:
        landing._open, landing.fault = True, None
        assert deliver(landing.key, index, what) is not None
        assert landing.fault is not None
        assert landing.told.pop()
    landing._open, landing.fault = True, None
    assert deliver(landing.key, 0, data) is None
    assert deliver(landing.key, 0, data) is not None  # twice
    assert landing.left == 150 - 64


def test_nothing_lands_once_it_is_closed(landing) -> None:
    import torch

    from aiosync.transports._rpc_landing import deliver

    landing.close()
    assert "any more" in str(deliver(landing.key, 0, torch.ones(64, dtype=torch.uint8)))
    assert not any(target.any() for target in landing._targets)


# -- what workers are told -----------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_worker_waits_until_it_is_told() -> None:
    from aiosync.transports import _rpc_meeting as meeting

    waiting = [asyncio.ensure_future(meeting.wait_until_told("some id")) for _ in range(3)]
    await asyncio.sleep(0)
    waiting.pop().cancel()
    await asyncio.sleep(0)
    meeting.tell_address("another id", "tcp://127.0.0.1:1", b"t")
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting)
    await asyncio.to_thread(meeting.tell_address, "some id", "tcp://127.0.0.1:2", b"u")
    async with asyncio.timeout(harness.PATIENCE):
        await asyncio.gather(*waiting)
        await meeting.wait_until_told("some id")
    assert meeting.told("some id") == ("tcp://127.0.0.1:2", b"u")
    assert not meeting._waiting
    meeting._told.clear()
