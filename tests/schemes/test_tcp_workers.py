"""Weights over TCP and Unix sockets into worker processes: crashes, freezes, crowds, TLS, fork."""

from __future__ import annotations

import asyncio
import os
import tempfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import aiosync
from tests._certificates import certificates
from tests.schemes import _harness as harness
from tests.schemes import _models as models

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.one_loop]

PATIENCE = harness.PATIENCE
TCP = "tcp://127.0.0.1:0"


@pytest.fixture(params=["tcp", "unix"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="aiosync-tests-") as folder:
        yield TCP if request.param == "tcp" else f"unix://{folder}/socket"


def mebibyte() -> nn.Module:
    model = nn.Module()
    model.block = nn.Parameter(torch.full((2**18,), -1.0))
    return model


def sending(
    url: str, build: Any = models.linear, num_workers: int | None = None, **options: Any
) -> tuple[aiosync.TCPWeightSyncScheme, nn.Module]:
    """A sender that is not connected, and its model, filled with 1."""
    source = build()
    models.fill(source, 1.0)
    scheme = aiosync.TCPWeightSyncScheme(url, **{"timeout": PATIENCE, **options})
    scheme.init_on_sender(model_id="policy", model=source, num_workers=num_workers)
    return scheme, source


async def values(crew: list[harness.Worker]) -> list[float]:
    """The one value that the weights of each worker have."""
    found = []
    for worker in crew:
        weights = (await worker.call(harness.weights)).values()
        [value] = {value for each in weights for value in each.flatten().tolist()}
        found.append(value)
    return found


def sent(scheme: Any, idx: int) -> int:
    return scheme._sender.peers[idx].sent_nbytes


# -- crashes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("same_idx", [True, False])
async def test_a_killed_worker_starts_again(url, same_idx) -> None:
    scheme, source = sending(url, num_workers=2)
    async with harness.workers(scheme, models.linear, 2) as crew:
        before = sent(scheme, 0)
        crew[1].kill()
        await harness.until(lambda: 1 not in scheme.worker_versions)
        models.fill(source, 2.0)
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await scheme.send()
        assert set(caught.value.failed) == {1}
        assert caught.value.acked == {0}
        one_update = sent(scheme, 0) - before
        crew.append(harness.start(scheme, models.linear))
        assert await crew[2].call(harness.join, 1 if same_idx else None) == 2
        await harness.until(lambda: scheme.worker_versions == {0: 2, 1: 2})
        assert sent(scheme, 0) - before == one_update  # its neighbour was left alone
        assert sent(scheme, 1) == one_update
        report = await scheme.send()
        assert (report.acked, dict(report.lost)) == ({0, 1}, {})
        assert await values([crew[0], crew[2]]) == [2.0, 2.0]


async def test_a_killed_trainer_is_followed_by_the_next() -> None:
    """The sender is the process that dies; the worker is here."""
    with tempfile.TemporaryDirectory(prefix="aiosync-tests-") as folder:
        url = f"unix://{folder}/socket"
        target = models.linear()
        receiver = aiosync.TCPWeightSyncScheme(url, timeout=PATIENCE)
        receiver.init_on_receiver(model_id="policy", model=target)
        crew = [harness.start(aiosync.TCPWeightSyncScheme(url), models.linear)]
        try:
            await crew[0].call(become_sender, 3.0)
            await receiver.connect()
            await crew[0].call(send, 4.0)
            assert (receiver.version, float(target.bias.detach()[0])) == (2, 4.0)
            crew[0].kill()
            crew.append(harness.start(aiosync.TCPWeightSyncScheme(url), models.linear))
            # The dead one left its socket in the file system.
            assert os.listdir(folder) == ["socket"]
            await crew[1].call(become_sender, 5.0)
            await harness.until(lambda: models.filled(target, 5.0))
            assert (receiver.version, receiver.reconnects) == (1, 1)
            assert await crew[1].call(send, 6.0) == {0}
        finally:
            await receiver.aclose()
            for worker in crew:
                worker.end()


async def become_sender(state: harness.State, value: float) -> None:
    models.fill(state.model, value)
    state.scheme.init_on_sender(model_id="policy", model=state.model)
    await state.scheme.connect()


async def send(state: harness.State, value: float) -> set[int]:
    models.fill(state.model, value)
    return set((await state.scheme.send(timeout=PATIENCE)).acked)


# -- how processes start -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
async def test_tls_and_token_travel_into_workers(method) -> None:
    scheme, source = sending(TCP, num_workers=1, token="t" * 20, tls=certificates().both)
    async with harness.workers(scheme, models.linear, method=method) as crew:
        models.fill(source, 2.0)
        assert (await scheme.send()).acked == {0}
        assert await values(crew) == [2.0]
    assert scheme.refused == {}


async def test_a_forked_worker_does_not_take_the_socket_of_the_sender_with_it(url) -> None:
    scheme, source = sending(url, num_workers=2)
    async with harness.workers(scheme, models.linear, 2, method="fork") as crew:
        await crew[0].call(harness.close)
        crew.pop(0).end()
        await harness.until(lambda: 0 not in scheme.worker_versions)
        # The address still works, and belongs to the sender alone.
        crew.append(harness.start(scheme, models.linear))
        assert await crew[1].call(harness.join, 0) == 1
        models.fill(source, 2.0)
        assert (await scheme.send()).acked == {0, 1}
        address = scheme.address
    if url == TCP:
        other = aiosync.TCPWeightSyncScheme(address)  # free again, with the children gone
        other.init_on_sender(model=source)
        await other.aclose()
    else:
        folder = os.path.dirname(url.removeprefix("unix://"))
        assert os.listdir(folder) == []


# -- many ----------------------------------------------------------------------------------------


async def join_many(state: harness.State, count: int) -> list[int]:
    """Become several receivers."""
    crowd = state.kept["crowd"] = [harness.twin(state.scheme) for _ in range(count)]
    state.kept["models"] = [models.linear() for _ in crowd]
    for scheme, model in zip(crowd, state.kept["models"], strict=True):
        scheme.init_on_receiver(model_id="policy", model=model)
    await asyncio.gather(*(scheme.connect() for scheme in crowd))
    return [scheme.worker_idx for scheme in crowd]


def all_filled(state: harness.State, value: float) -> bool:
    return all(models.filled(model, value) for model in state.kept["models"])


async def close_many(state: harness.State) -> None:
    for scheme in state.kept["crowd"]:
        await scheme.aclose()


async def test_64_receivers(url) -> None:
    scheme, source = sending(url, num_workers=64)
    async with harness.workers(scheme, None, 2, connect=False) as crew:
        for worker in crew:
            worker.post(join_many, 32)
        await scheme.connect()
        given = [idx for worker in crew for idx in await worker.answer()]
        assert sorted(given) == list(range(64))
        for version in range(2, 22):
            models.fill(source, float(version))
            report = await scheme.send()
            assert report.acked == set(range(64))
        assert len({sent(scheme, idx) for idx in range(64)}) == 1
        for worker in crew:
            assert await worker.call(all_filled, 21.0)
        for worker in crew:
            await worker.call(close_many)


def rss_nbytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_a_frozen_worker_holds_up_nobody_and_catches_up(url) -> None:
    scheme, source = sending(url, mebibyte, num_workers=3, stall_timeout=1.5)
    loop = asyncio.get_running_loop()
    async with harness.workers(scheme, mebibyte, 3) as crew:
        frozen = scheme._sender.peers[2]
        crew[2].stop()
        scheme.require = 2
        before, longest = rss_nbytes(), 0.0
        for version in range(2, 52):
            models.fill(source, float(version))
            started = loop.time()
            report = await scheme.send()
            longest = max(longest, loop.time() - started)
            assert report.acked == {0, 1}
            assert report.waiting | report.skipped.keys() | report.failed.keys() >= {2} or (
                2 in report.lost
            )
        assert longest < 1.0
        assert rss_nbytes() - before < 48 * 2**20  # of 50 MiB for each of three
        # By name it is waited for, and reported: first as late, then as dropped.
        scheme.require = "all"
        if 2 in scheme.worker_versions:
            with pytest.raises(aiosync.PartialSyncError) as caught:
                await scheme.send(timeout=0.1)
            assert isinstance(caught.value.failed[2], aiosync.AckTimeout)
            assert caught.value.acked == {0, 1}
        await harness.until(lambda: 2 not in scheme.worker_versions)
        error = scheme._sender.workers.lost[2]
        assert isinstance(error, aiosync.AckTimeout)
        assert "stall_timeout" in str(error)
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await scheme.send()
        assert set(caught.value.failed) == {2}
        models.fill(source, 99.0)
        report = await scheme.send()
        assert (report.acked, set(report.lost)) == ({0, 1}, {2})
        crew[2].cont()
        await harness.until(lambda: scheme.worker_versions.get(2) == report.version)
        assert scheme._sender.peers[2] is not frozen
        assert await values(crew) == [99.0] * 3
        assert (await scheme.send()).acked == {0, 1, 2}
        assert await crew[2].call(reconnects) == 1


def reconnects(state: harness.State) -> int:
    return state.scheme.reconnects
