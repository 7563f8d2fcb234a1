"""Weights over streams into worker processes: trainers that die, freezes, TLS, fork."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

import aiosync
from tests._certificates import certificates
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.support.waiting import free_address

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.one_loop]

PATIENCE = harness.PATIENCE
TCP = "tcp://127.0.0.1:0"


@pytest.fixture(params=["tcp", "unix"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="aiosync-tests-") as folder:
        yield TCP if request.param == "tcp" else f"unix://{folder}/socket"


def sending(
    url: str, build: Any = models.linear, num_workers: int | None = None, **options: Any
) -> tuple[aiosync.TCPWeightSyncScheme, nn.Module]:
    """A sender that is not connected, and its model, filled with 1."""
    source = build()
    models.fill(source, 1.0)
    scheme = aiosync.TCPWeightSyncScheme(url, **{"timeout": PATIENCE, **options})
    scheme.init_on_sender(model_id="policy", model=source, num_workers=num_workers)
    return scheme, source


@pytest.mark.parametrize("way", ["tcp", "unix", "shared memory", "group"])
async def test_a_killed_trainer_is_followed_by_the_next(way: str, tmp_path: Path) -> None:
    """Slots of both have the same names, and the first one leaves its socket in the file system."""
    address = free_address()
    options: dict[str, Any] = {"timeout": PATIENCE, "token": "a secret of sixteen"}
    if way in ("shared memory", "group"):
        options |= {"address": address, "shared_memory": way == "shared memory"}
        plain: Any = aiosync.DistributedWeightSyncScheme(**options)
    else:
        where = address if way == "tcp" else f"unix://{tmp_path}/socket"
        plain = aiosync.TCPWeightSyncScheme(where, **options)
    receiver = harness.twin(plain)
    receiver.init_on_receiver(model_id="policy", model=models.medium())
    crew: list[harness.Worker] = []
    try:
        for value in (10.0, 20.0):
            crew.append(harness.start(plain, models.medium))
            await crew[-1].call(become_sender, value)
            if not receiver.synchronized_on_receiver:
                await receiver.connect()
            await harness.until(lambda value=value: models.holds(receiver, value))  # type: ignore[misc]
            assert receiver.version == 1
            for number in (1.0, 2.0, 3.0, 4.0):
                assert await crew[-1].call(send, value + number) == {0}
                assert models.holds(receiver, value + number)
            crew[-1].kill()
        assert receiver.reconnects == 1
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


@pytest.mark.parametrize("method", ["fork", "spawn"])
async def test_tls_and_token_travel_into_workers(method: str) -> None:
    scheme, source = sending(TCP, num_workers=1, token="t" * 20, tls=certificates().both)
    async with harness.workers(scheme, models.linear, method=method) as crew:
        models.fill(source, 2.0)
        assert (await scheme.send()).acked == {0}
        assert [await each.value() for each in crew] == [2.0]
    assert scheme.refused == {}


async def test_a_forked_worker_does_not_take_the_socket_of_the_sender_with_it(url: str) -> None:
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
        assert os.listdir(os.path.dirname(url.removeprefix("unix://"))) == []
