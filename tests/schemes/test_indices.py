"""Who may have an index: a worker that started again takes over at once, a second one does not."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

import aiosync
from aiosync.schemes import _handshake
from tests.schemes import _harness as harness
from tests.schemes import _models as models

both = pytest.mark.parametrize("make", harness.SCHEMES)
pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]

TAKEN = r"worker_idx 0 is taken: process {} has it.*its own index.*end its process first"


@pytest.fixture
def no_grace(monkeypatch) -> None:
    """A taken index is refused at once."""
    monkeypatch.setattr(_handshake, "_GRACE_SECONDS", 0.01)


@pytest.fixture
def long_grace(monkeypatch) -> None:
    """To wait for it to pass shows, however busy the machine is."""
    monkeypatch.setattr(_handshake, "_GRACE_SECONDS", harness.PATIENCE)


@both
@pytest.mark.usefixtures("no_grace")
async def test_a_second_link_of_one_process_is_refused(make) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        async with harness.twin(sender) as other:
            other.init_on_receiver(model=models.linear(), worker_idx=0)
            with pytest.raises(aiosync.ConfigError, match="taken: this process itself has it"):
                await other.connect(timeout=harness.PATIENCE)
        models.fill(source, 2.0)
        assert (await sender.send()).acked == {0}
        assert models.filled(target, 2.0)
        assert receiver.version == 2


@both
@pytest.mark.slow
async def test_a_second_process_is_refused_until_the_first_has_ended(make) -> None:
    scheme, model = make(), models.linear()
    scheme.init_on_sender(model=model, num_workers=1)
    async with harness.workers(scheme, models.linear, 1) as crew:
        crew += [harness.start(scheme, models.linear) for _ in range(2)]
        with pytest.raises(aiosync.ConfigError, match=TAKEN.format(crew[0].pid)):
            await crew[1].call(harness.join, 0)
        models.fill(model, 2.0)
        assert (await scheme.send()).acked == {0}
        assert ((await crew[0].call(harness.weights))["weight"] == 2.0).all()
        crew[0].stop()  # it is alive, and may go on
        crew[2].post(harness.join, 0)
        await asyncio.sleep(0.2)
        crew[0].kill()  # while the trainer makes sure that it is not about to end
        assert await crew[2].answer() == 2
        models.fill(model, 3.0)
        assert (await scheme.send()).acked == {0}
        assert ((await crew[2].call(harness.weights))["weight"] == 3.0).all()


@both
@pytest.mark.slow
@pytest.mark.usefixtures("long_grace")
async def test_a_death_that_the_loop_has_not_noticed(make) -> None:
    scheme, model = make(), models.linear()
    scheme.init_on_sender(model=model, num_workers=1)
    async with harness.workers(scheme, models.linear, 1) as crew:
        crew.append(harness.start(scheme, models.linear))
        assert await crew[1].call(harness.version) == 0  # it is ready
        crew[1].post(harness.join, 0)
        time.sleep(0.2)  # noqa: ASYNC251 - its connection waits, while the loop is busy
        crew[0].kill()
        crew[0].process.join(harness.PATIENCE)
        started = time.monotonic()
        assert await crew[1].answer() == 1
        assert time.monotonic() - started < harness.PATIENCE / 4
        assert (await scheme.send()).acked == {0}


@both
@pytest.mark.parametrize("given", [0, None])
@pytest.mark.usefixtures("long_grace")
async def test_a_worker_that_closed_comes_back_at_once(make, given) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        for round_ in range(5):
            if round_ % 2:
                receiver.abort()
            else:
                await receiver.aclose()
            receiver = harness.twin(sender)
            receiver.init_on_receiver(model=target, worker_idx=given)
            started = time.monotonic()
            await receiver.connect(timeout=harness.PATIENCE)
            assert time.monotonic() - started < harness.PATIENCE / 4
            assert receiver.worker_idx == 0
        assert (await sender.send()).acked == {0}
        await receiver.aclose()


@both
@pytest.mark.usefixtures("no_grace")
async def test_no_index_is_left(make) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as (sender, _):
        async with harness.twin(sender) as other:
            other.init_on_receiver(model=models.linear())
            with pytest.raises(aiosync.ConfigError, match=r"1 workers, and all .*num_workers=None"):
                await other.connect(timeout=harness.PATIENCE)
        assert (await sender.send()).acked == {0}


@both
@pytest.mark.slow
@pytest.mark.usefixtures("no_grace")
async def test_two_that_come_together(make) -> None:
    scheme = make()
    receivers = [harness.twin(scheme) for _ in range(2)]
    scheme.init_on_sender(model=models.linear(), num_workers=2)
    for receiver in receivers:
        receiver.init_on_receiver(model=models.linear(), worker_idx=0)
    async with scheme, receivers[0], receivers[1]:
        results = await asyncio.gather(
            scheme.connect(timeout=0.5),
            *(receiver.connect(timeout=harness.PATIENCE) for receiver in receivers),
            return_exceptions=True,
        )
        assert isinstance(results[0], aiosync.ConnectTimeout)
        assert "refused: a worker was refused: worker_idx 0 is taken" in str(results[0])
        kinds = {type(result) for result in results[1:]}
        assert kinds == {type(None), aiosync.ConfigError}
        assert (await scheme.send()).acked == {0}


@both
@pytest.mark.slow
@pytest.mark.parametrize("given", [0, None])
async def test_one_that_ended_is_noticed_whatever_index_the_others_have(make, given) -> None:
    scheme = make()
    scheme.init_on_sender(model=models.linear(), num_workers=2)
    async with harness.workers(scheme, models.linear, 2, connect=False) as (first, second):
        # The second process has the index of the first, which never comes.
        second.post(harness.join, given)
        connecting = asyncio.create_task(
            scheme.connect(timeout=harness.PATIENCE, processes=[first.pid, second.pid])
        )
        await second.answer()
        assert not connecting.done()
        started = time.monotonic()
        first.kill()
        with pytest.raises(aiosync.PartialSyncError, match=rf"process {first.pid}.* end") as found:
            await connecting
        assert time.monotonic() - started < harness.PATIENCE / 4
        assert found.value.failed.keys() == {1}
        assert (await scheme.send(worker_ids=0)).acked == {0}


@both
@pytest.mark.slow
async def test_why_nobody_is_left_is_said(make) -> None:
    scheme = make()
    scheme.init_on_sender(model=models.linear(), num_workers=2)
    async with harness.workers(scheme, models.linear, 2, connect=False) as crew:
        connecting = asyncio.create_task(
            scheme.connect(timeout=harness.PATIENCE, processes=[worker.pid for worker in crew])
        )
        await crew[1].call(harness.join, 0)
        with pytest.raises(aiosync.ConfigError, match="taken"):
            await crew[0].call(harness.join, 0)
        crew[0].kill()
        with pytest.raises(aiosync.PartialSyncError, match="worker_idx 0 is taken"):
            await connecting


@both
async def test_only_workers_whose_links_are_given_are_expected(make) -> None:
    mine, theirs = socket.socketpair()
    sender, receiver = make(), make()
    link = sender.create_transport(mine)
    source, target = models.linear(), models.linear()
    models.fill(source, 3.0)
    sender.init_on_sender(model=source, transports={1: link})
    receiver.init_on_receiver(model=target, transport=receiver.create_transport(theirs))
    async with sender, receiver:
        await asyncio.gather(sender.connect(timeout=5), receiver.connect(timeout=5))
        assert receiver.worker_idx == 1
        assert (await sender.send()).acked == {1}
        assert sender.ready


@both
async def test_as_many_workers_as_links(make) -> None:
    mine, theirs = socket.socketpair()
    sender = make()
    link = sender.create_transport(mine)
    with pytest.raises(aiosync.ConfigError, match=r"num_workers: 2, transports: 1"):
        sender.init_on_sender(transports={0: link}, num_workers=2)
    with pytest.raises(aiosync.ConfigError, match="a key of transports must be an int"):
        sender.init_on_sender(transports={"0": link})
    assert not sender.initialized_on_sender
    link.abort()
    theirs.close()


@both
async def test_device_map_of_a_single_link(make) -> None:
    mine, theirs = socket.socketpair()
    sender, receiver = make(), make()
    link = sender.create_transport(mine)
    asked = []

    def device_map(idx, weights):
        asked.append(idx)
        return weights

    sender.init_on_sender(
        model=models.linear(), transports={1: link}, device_map_fn=device_map, num_workers=1
    )
    receiver.init_on_receiver(model=models.linear(), transport=receiver.create_transport(theirs))
    async with sender, receiver:
        await asyncio.gather(sender.connect(timeout=5), receiver.connect(timeout=5))
        assert set(asked) == {1}
