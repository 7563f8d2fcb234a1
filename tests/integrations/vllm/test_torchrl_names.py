"""TorchRL's names for updating vLLM, in its programs with another import line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import aiosync
from aiosync.integrations.vllm import (
    HTTPClient,
    VLLMWeightReceiver,
    VLLMWeightSender,
    VLLMWeightSyncScheme,
    get_model_metadata,
)
from tests.integrations.vllm._server import TOKEN, Server
from tests.integrations.vllm._tools import Weights, make_weights

pytestmark = [
    pytest.mark.slow,
    # The first test that needs an engine starts it.
    pytest.mark.timeout(400),
    # The warnings are vLLM's own.
    pytest.mark.filterwarnings("ignore"),
]

A, B = make_weights(1), make_weights(2)


def make_model(weights: Weights) -> nn.Module:
    """Return a module whose state dict has these names; each dot in them is a submodule."""
    model = nn.Module()
    for name, tensor in weights.items():
        inner = model
        *path, last = name.split(".")
        for part in path:
            if not hasattr(inner, part):
                inner.add_module(part, nn.Module())
            inner = inner.get_submodule(part)
        inner.register_parameter(last, nn.Parameter(tensor.clone()))
    return model


class Counter:
    """The part of a collector that a sender calls."""

    def __init__(self) -> None:
        self.version = 0

    def increment_version(self) -> None:
        self.version += 1


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_a_program_of_torchrl(offline: dict[str, Any], server: Server, strategy: str) -> None:
    scheme = VLLMWeightSyncScheme(
        master_address="localhost",
        gpus_per_replica=1,
        num_replicas=1,
        strategy=strategy,
        token=TOKEN,
        timeout=20.0,
    )
    model, collector = make_model(B), Counter()
    metadata = get_model_metadata(model)
    sender, receiver = scheme.create_sender(), scheme.create_receiver(server.url)
    sender.register_model(model)
    sender.register_collector(collector)
    receiver.init_all_workers_group(metadata)
    sender.init_all_workers_group(metadata, vllm_engine=server.url)
    try:
        sender.update_weights()
        assert server.tokens() == offline["fresh"]
        assert (server.label(), collector.version) == ("1", 1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(A[name])
        assert server.tokens() == offline["fresh"]
        sender.update_weights()
        assert server.tokens() == offline["schemes"]["tcp"]["after"] != offline["fresh"]
        for weights in (TensorDict.from_module(make_model(B)), make_model(A), B):
            sender.update_weights(weights)
        assert server.tokens() == offline["fresh"]
        assert (server.label(), collector.version) == ("5", 5)
        assert receiver.poll_and_apply() is False
        with pytest.raises(aiosync.ManifestMismatch, match=r"missing: lm_head\.weight"):
            sender.update_weights({name: B[name] for name in B if name != "lm_head.weight"})
        too_wide = {**B, "lm_head.weight": torch.ones(1, 1).bfloat16()}
        with pytest.raises(aiosync.PartialSyncError, match="shape"):
            sender.update_weights(too_wide)
        assert (server.tokens(), collector.version) == (offline["fresh"], 5)
    finally:
        sender.shutdown()
    sender.shutdown()
    with pytest.raises(aiosync.LocalProtocolError, match="init_all_workers_group"):
        sender.update_weights()


class Broken(Counter):
    """Collector whose version cannot be counted."""

    def increment_version(self) -> None:
        raise ValueError("no such environment")


def test_a_collector_that_cannot_count_keeps_no_other_from_it() -> None:
    # Another rank than the first takes part in an update without an engine.
    sender = VLLMWeightSyncScheme(rank=1, pause=None).create_sender()
    sender.init_all_workers_group(get_model_metadata(make_model(A)), HTTPClient("http://[::1]:9"))
    last = Counter()
    for collector in (Broken(), last):
        sender.register_collector(collector)
    with pytest.warns(RuntimeWarning, match="Broken: ValueError: no such environment"):
        sender.update_weights(A)
    assert last.version == 1
    sender.shutdown()


def test_an_engine_of_the_trainers_process(offline: dict[str, Any]) -> None:
    """The program of the offline engine passes its ``vllm.LLM``."""
    assert offline["torchrl"]["after"] == offline["schemes"]["shm"]["after"]
    assert offline["torchrl"]["back"] == offline["fresh"]


def test_metadata() -> None:
    metadata = get_model_metadata(make_model(A))
    assert metadata == {name: (tensor.dtype, tensor.shape) for name, tensor in A.items()}


def test_adapters_are_merged_in_a_copy() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.added = nn.Linear(2, 2), nn.Parameter(torch.ones(2, 2))

        def merge_and_unload(self) -> nn.Module:
            with torch.no_grad():
                self.base.weight.add_(self.added)
            return self.base

    model = Adapted()
    before = model.base.weight.clone()
    assert sorted(get_model_metadata(model)) == ["bias", "weight"]
    assert torch.equal(model.base.weight, before)


class OfTorchRL:
    """Engine with actors, like TorchRL's ``AsyncVLLM``."""

    actors: tuple[Any, ...] = ()


class OfALoop:
    """Engine with coroutine functions, like vLLM's ``AsyncLLM``."""

    async def collective_rpc(self, method: str) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (None, "pass a vllm.LLM"),
        (OfTorchRL(), 'backend="aiosync"'),
        (OfALoop(), "AsyncLLMClient"),
        ("engine.example", "not an HTTP URL"),
    ],
)
def test_engines_that_are_refused(engine: Any, says: str) -> None:
    sender = VLLMWeightSender(VLLMWeightSyncScheme())
    with pytest.raises(aiosync.ConfigError, match=says):
        sender.init_all_workers_group({}, vllm_engine=engine)


def test_arguments() -> None:
    scheme = VLLMWeightSyncScheme("127.0.0.1", 7000, 2, 3, "state_dict", "cuda:1", pause="wait")
    assert scheme.init_info.address == "tcp://127.0.0.1:7000"
    assert (scheme.init_info.num_workers, scheme.init_info.pause) == (6, "wait")
    assert VLLMWeightSyncScheme(address="shm").init_info.address == "shm"
    with pytest.raises(aiosync.ConfigError, match="strategy"):
        VLLMWeightSyncScheme(strategy="pickle")
    with pytest.raises(aiosync.ConfigError, match="num_workers"):
        VLLMWeightSyncScheme(num_replicas=0)


def test_nobody_answers() -> None:
    sender = VLLMWeightSyncScheme(timeout=5.0).create_sender()
    with pytest.raises(aiosync.LocalProtocolError, match="init_all_workers_group"):
        sender.update_weights(A)
    with pytest.raises(aiosync.ConnectError):
        sender.init_all_workers_group(get_model_metadata(make_model(A)), "http://127.0.0.1:9")
    sender.shutdown()


def test_what_a_receiver_does() -> None:
    receiver = VLLMWeightReceiver(VLLMWeightSyncScheme(), SimpleNamespace())
    receiver.apply_weights(A, inplace=True)
    assert receiver.poll_and_apply(timeout=0.1) is False


def test_a_client_is_taken_as_it_is(server: Server) -> None:
    """The workers stay connected to the client, so a second engine is refused."""
    sender = VLLMWeightSyncScheme(token=TOKEN, timeout=20.0).create_sender()
    metadata = get_model_metadata(make_model(A))
    sender.init_all_workers_group(metadata, HTTPClient(server.url))
    try:
        with pytest.raises(aiosync.LocalProtocolError, match="register_model"):
            sender.update_weights()
        with pytest.raises(aiosync.LocalProtocolError, match="already"):
            sender.init_all_workers_group(metadata, HTTPClient(server.url))
        sender.update_weights(A)
        assert server.label() == "1"
    finally:
        sender.shutdown()
