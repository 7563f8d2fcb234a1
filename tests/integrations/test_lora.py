"""LoRA adapters for a ``PeftModel``: each version under a name of its own, none mixed."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import math
import multiprocessing
import sys
import threading
import types
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import aiosync
import aiosync.sync
from aiosync.integrations.lora import PeftAdapterReceiver, VLLMAdapterReceiver
from tests.support.waiting import free_address
from tests.sync import _tools as tools

peft = pytest.importorskip("peft", reason="needs peft in this environment: `pip install peft`")

NUM_LAYERS = 3


class Base(nn.Module):
    """A model whose output tells the versions of all its adapters, if they differ."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(NUM_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in self.layers])


def adapted(**options: Any) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=r"layers\.\d+", **options)
    return peft.get_peft_model(Base(), config).eval()


@torch.no_grad()
def fill(model: Any, value: float) -> dict[str, torch.Tensor]:
    """Give every adapter this value, and return what the trainer sends."""
    for name, each in model.named_parameters():
        if "lora_" in name:
            each.fill_(value)
    weights: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(model)
    return weights


@torch.no_grad()
def outputs(model: Any, **how: Any) -> torch.Tensor:
    result: torch.Tensor = model(torch.ones(2, 8), **how)
    return result


def halves_of(model: Any) -> list[Any]:
    """Return the containers of a model's layers that have the tensors of its adapters."""
    names = ("lora_A", "lora_B")
    return [each for name, each in model.named_modules() if name.rpartition(".")[2] in names]


def tcp(**options: Any) -> aiosync.sync.WeightSyncScheme:
    return aiosync.sync.TCPWeightSyncScheme(free_address(), token="t" * 32, **options)


@pytest.fixture(params=[*tools.SCHEMES, tcp])
def linked(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any, Any, Any]]:
    """A trainer's model and scheme, a worker's scheme and its receiver of adapters."""
    trained, acting = adapted(), adapted()
    sender = request.param(timeout=tools.PATIENCE, guard="reading")
    sender.init_on_sender(num_workers=1)
    worker = copy.copy(sender)
    adapters = PeftAdapterReceiver(worker, acting, worker_idx=0)
    with sender, worker:
        tools.join(sender, worker)
        yield trained, sender, (worker, acting), adapters


def test_each_version_is_an_adapter_of_its_own(linked: Any) -> None:
    trained, sender, (worker, acting), adapters = linked
    assert adapters.newest is None
    state = torch.random.get_rng_state()
    names, before = [], None
    for version in range(1, 21):
        report = sender.send(fill(trained, float(version)))
        assert report.version == adapters.newest.version == version
        assert adapters.newest.epoch == worker.epoch
        assert torch.equal(outputs(acting), outputs(trained))
        if before is not None:
            # The version before is still there, under its name.
            with worker.reading():
                seen = outputs(acting, adapter_names=[names[-1]] * 2)
            assert torch.equal(seen, before)
        before = outputs(acting)
        names.append(adapters.newest.name)
        assert len(acting.peft_config) <= 1 + 3
    assert len(set(names)) == 20
    # The worker's random numbers are its own.
    assert torch.equal(torch.random.get_rng_state(), state)


def test_an_adapter_that_does_not_fit_changes_nothing(linked: Any) -> None:
    trained, sender, (_, acting), adapters = linked
    weights = fill(trained, 1.0)
    sender.send(weights)
    kept, before, names = adapters.newest, outputs(acting), set(acting.peft_config)
    name = next(iter(weights))
    misfits = [
        {**weights, name: torch.zeros(3, 3)},
        {**weights, "more.lora_A.weight": torch.zeros(2)},
        {each: tensor for each, tensor in weights.items() if each != name},
        dict(trained.named_parameters()),
    ]
    for misfit in misfits:
        with pytest.raises(aiosync.PartialSyncError) as caught:
            sender.send(misfit)
        assert isinstance(caught.value.failed[0], aiosync.ApplyError)
        assert adapters.newest == kept
        assert set(acting.peft_config) == names
        assert torch.equal(outputs(acting), before)
    assert sender.send(fill(trained, 2.0)).acked == {0}
    assert torch.equal(outputs(acting), outputs(trained))


def test_no_read_mixes_versions(linked: Any) -> None:
    trained, sender, (worker, acting), adapters = linked
    sender.send(fill(trained, 1.0))
    expected = {1: outputs(trained)}
    for version in range(2, 40):
        fill(trained, float(version))
        expected[version] = outputs(trained)
    mixed: list[tuple[int, int]] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with worker.reading() as used:
                seen, label, held = outputs(acting), adapters.newest.version, used.version
            if label != held or not torch.equal(seen, expected[label]):
                mixed.append((label, held))

    with tools.threads(read, read):
        for version in range(2, 40):
            sender.send(fill(trained, float(version)))
        stop.set()
    assert not mixed


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("part", "step"),
    [
        ("peft", "set_peft_model_state_dict"),
        ("model", "add_adapter"),
        ("model", "set_adapter"),
        ("model", "delete_adapter"),
        ("layer", "set_adapter"),
        ("layer", "delete_adapter"),
    ],
)
def test_an_interrupted_update_is_added_again(
    linked: Any, part: str, step: str, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, sender, (worker, acting), adapters = linked
    for version in range(1, 4):
        sender.send(fill(trained, float(version)))
    owner = {"peft": peft, "model": acting, "layer": acting.base_model.model.layers[1]}[part]
    call = getattr(owner, step)

    def interrupted(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        if is_late:
            call(*args, **options)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), worker.reading():
        sender.send_async(fill(trained, 4.0))
        sender.wait_staged(4)
        monkeypatch.setattr(owner, step, interrupted)
    with worker.reading():
        assert adapters.newest.version == 4
        assert torch.equal(outputs(acting), outputs(trained))
    assert sender.wait_async().acked == {0}
    for version in range(5, 9):
        sender.send(fill(trained, float(version)))
        assert torch.equal(outputs(acting), outputs(trained))
    kept = {name.rpartition("-")[2] for name in acting.peft_config}
    assert kept == {"default", "6", "7", "8"}
    # Nothing of the other adapters is left in the layers.
    assert all(set(each) == set(acting.peft_config) for each in halves_of(acting))


def test_an_update_asks_the_hub_for_nothing(linked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads would wait for the answer."""
    trained, sender, (_, acting), _ = linked
    weights = fill(trained, 1.0)
    acting.peft_config["default"].base_model_name_or_path = "of/nobody"
    # Offline PEFT warns when it would ask, and a warning is an error here.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert sender.send(weights).acked == {0}
    assert torch.equal(outputs(acting), outputs(trained))


class Embedded(Base):
    """A model that shows its embedding layer as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(4, 8)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> None:
        return None


@contextlib.contextmanager
def receiving(model: Any) -> Iterator[tuple[Any, PeftAdapterReceiver]]:
    """Yield a trainer's scheme, and the receiver of adapters of a model."""
    sender = tcp(timeout=tools.PATIENCE, guard="reading")
    sender.init_on_sender(num_workers=1)
    worker = copy.copy(sender)
    adapters = PeftAdapterReceiver(worker, model, worker_idx=0)
    with sender, worker:
        tools.join(sender, worker)
        yield sender, adapters


@pytest.mark.parametrize("are_sent", [False, True])
@pytest.mark.parametrize("target", ["embed_tokens", r"layers\.\d+"])
def test_embedding_layers_are_taken_if_they_are_sent(target: str, are_sent: bool) -> None:
    config = peft.LoraConfig(r=2, target_modules=target)
    trained, acting = (peft.get_peft_model(Embedded(), config) for _ in range(2))
    saved = functools.partial(peft.get_peft_model_state_dict, save_embedding_layers=are_sent)
    with receiving(acting) as (sender, adapters):
        assert sender.send(saved(trained)).acked == {0}
        assert adapters.newest is not None
        taken = saved(acting, adapter_name=adapters.newest.name)
        assert all(torch.equal(each, taken[name]) for name, each in saved(trained).items())
        with pytest.raises(aiosync.PartialSyncError, match="more.lora_A"):
            sender.send({**saved(trained), "more.lora_A.weight": torch.zeros(2)})


@pytest.mark.parametrize("how", ["pissa", "pissa_niter_2", "olora", "orthogonal", "gaussian"])
def test_a_version_is_not_initialized_before_it_is_loaded(how: str) -> None:
    """PEFT would fail, or change the base weights, or draw random numbers."""
    trained, acting = adapted(init_lora_weights=how), adapted(init_lora_weights=how)
    before = {name: each.clone() for name, each in acting.state_dict().items()}
    state = torch.random.get_rng_state()
    with receiving(acting) as (sender, _):
        for version in range(1, 6):
            assert sender.send(fill(trained, float(version))).acked == {0}
            assert torch.equal(outputs(acting), outputs(trained))
    after = acting.state_dict()
    assert all(torch.equal(each, after[name]) for name, each in before.items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert acting.peft_config["default"].init_lora_weights == how


def test_an_embedding_adapter_draws_no_random_numbers() -> None:
    """The worker's random numbers are its own."""
    config = peft.LoraConfig(r=2, target_modules="embed_tokens")
    trained, acting = (peft.get_peft_model(Embedded(), config) for _ in range(2))
    with receiving(acting) as (sender, _):
        state = torch.random.get_rng_state()
        weights = peft.get_peft_model_state_dict(trained, save_embedding_layers=False)
        assert sender.send(weights).acked == {0}
        assert torch.equal(torch.random.get_rng_state(), state)


def test_what_cannot_be_used_is_refused() -> None:
    scheme = aiosync.sync.TCPWeightSyncScheme("tcp://127.0.0.1:1", token="t" * 32, guard="reading")
    with pytest.raises(aiosync.ConfigError, match="no LoRA adapter 'default'"):
        PeftAdapterReceiver(scheme, nn.Linear(1, 1))
    with pytest.raises(aiosync.ConfigError, match="no LoRA adapter 'other'"):
        PeftAdapterReceiver(scheme, adapted(), adapter="other")
    with pytest.raises(aiosync.ConfigError, match="keep must be at least 1"):
        PeftAdapterReceiver(scheme, adapted(), keep=0)
    with pytest.raises(aiosync.ConfigError, match="name must have no dot"):
        PeftAdapterReceiver(scheme, adapted(), name="policy-v1.5")
    with pytest.raises(aiosync.ConfigError, match="async add_lora"):
        VLLMAdapterReceiver(scheme, object(), {"r": 1, "lora_alpha": 1, "target_modules": ["q"]})
    with pytest.raises(aiosync.ConfigError, match="no lora_alpha, target_modules"):
        VLLMAdapterReceiver(scheme, object(), {"r": 1})
    for seconds in (0.0, -1.0, math.nan, "5"):
        with pytest.raises(aiosync.ConfigError, match="load_timeout must be positive seconds"):
            VLLMAdapterReceiver(scheme, object(), {}, load_timeout=seconds)  # type: ignore[arg-type]


# -- vLLM, with an engine that fails ---------------------------------------------------------------


class Request(NamedTuple):
    """The ``LoRARequest`` of vLLM, which need not be installed here."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class Engine:
    """An engine that keeps the names of its adapters, and fails when it is told to."""

    def __init__(self) -> None:
        self.loaded: dict[int, str] = {}
        self.fails: Exception | None = None

    async def add_lora(self, request: Request) -> bool:
        assert (Path(request.lora_path) / "adapter_model.safetensors").is_file()
        self.loaded[request.lora_int_id] = request.lora_name
        return True

    async def remove_lora(self, number: int) -> bool:
        if self.fails is not None:
            raise self.fails
        return self.loaded.pop(number, None) is not None


def count_folders(folder: Path) -> int:
    """Return the number of versions whose files are there."""
    return len(list(folder.glob("*/*")))


@contextlib.asynccontextmanager
async def loading_into(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> AsyncIterator[tuple[Any, Any]]:
    """Yield a trainer's scheme, and the receiver that keeps one old version in the engine."""
    for name in ("vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["vllm.lora.request"], "LoRARequest", Request, raising=False)
    config = {"r": 1, "lora_alpha": 1, "target_modules": ["q"]}
    sender = aiosync.TCPWeightSyncScheme(free_address(), token="t" * 32, guard="reading")
    sender.init_on_sender(num_workers=1)
    worker = copy.copy(sender)
    adapters = VLLMAdapterReceiver(
        worker, engine, config, keep=1, folder=folder, worker_idx=0, **options
    )
    async with sender, worker:
        await asyncio.gather(sender.connect(), worker.connect(initial=False))
        yield sender, adapters
    adapters.close()


@pytest.mark.asyncio
async def test_a_restarted_engine_takes_the_next_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An engine that knows none of the old adapters cannot remove them, and need not."""
    engine, weights = Engine(), {"q.lora_A.weight": torch.zeros(1, 4)}
    async with loading_into(engine, tmp_path, monkeypatch) as (sender, adapters):
        for _ in range(2):
            await sender.send(weights)
        engine.loaded.clear()
        engine.fails = KeyError(1)
        for version in (3, 4, 5):
            assert (await sender.send(weights)).acked == {0}
            assert adapters.newest.version == version
        assert len(engine.loaded) == 3 and count_folders(tmp_path) == 2


@pytest.mark.asyncio
async def test_an_engine_that_removes_nothing_any_more_refuses_one_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine, weights = Engine(), {"q.lora_A.weight": torch.zeros(1, 4)}
    async with loading_into(engine, tmp_path, monkeypatch) as (sender, adapters):
        for _ in range(2):
            await sender.send(weights)
        engine.fails = RuntimeError("unknown adapter")
        with pytest.raises(aiosync.PartialSyncError, match="unknown adapter"):
            await sender.send(weights)
        for version in (4, 5, 6):
            assert (await sender.send(weights)).acked == {0}
            assert adapters.newest.version == version
            # The files do not become more and more.
            assert count_folders(tmp_path) == 2


@pytest.mark.parametrize("load_timeout", [60.0, math.inf])
@pytest.mark.asyncio
async def test_an_adapter_that_was_not_removed_is_removed_with_the_next_version(
    load_timeout: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine, weights = Engine(), {"q.lora_A.weight": torch.zeros(1, 4)}
    options = {"load_timeout": load_timeout}
    async with loading_into(engine, tmp_path, monkeypatch, **options) as (sender, adapters):
        for _ in range(2):
            await sender.send(weights)
        engine.fails = RuntimeError("busy")
        with pytest.raises(aiosync.PartialSyncError, match="busy"):
            await sender.send(weights)
        engine.fails = None
        await sender.send(weights)
        await sender.send(weights)
        newest = adapters.newest
        assert newest is not None and newest.version == 5
        assert len(engine.loaded) == count_folders(tmp_path) == 2
    assert not count_folders(tmp_path)


@pytest.mark.asyncio
async def test_a_forked_child_deletes_no_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = {"q.lora_A.weight": torch.zeros(1, 4)}
    async with loading_into(Engine(), tmp_path, monkeypatch) as (sender, adapters):
        await sender.send(weights)
        # The end of a fork calls this, too.
        child = multiprocessing.get_context("fork").Process(target=adapters.close)
        child.start()
        child.join(tools.PATIENCE)
        assert child.exitcode == 0
        assert count_folders(tmp_path) == 1
        assert (await sender.send(weights)).acked == {0}
    assert not count_folders(tmp_path)
