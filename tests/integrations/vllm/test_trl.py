"""TRL's own synchronization, with aiosync's object in the place of TRL's, against a real engine.

TRL's trainer needs a GPU. Here only the function runs with which it synchronizes.
"""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import aiosync
from aiosync.integrations.trl import WeightTransfer
from tests.integrations.vllm._server import TOKEN, Server
from tests.integrations.vllm._tools import (
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    VOCAB,
    Weights,
    make_speller,
    make_weights,
)

pytestmark = [
    pytest.mark.slow,
    # The first test starts the engine, and imports TRL.
    pytest.mark.timeout(500),
    # The warnings are TRL's and vLLM's own.
    pytest.mark.filterwarnings("ignore"),
]


class Loop:
    """TRL's trainer without its rollouts and without its training steps."""

    def __init__(self, transfer: WeightTransfer) -> None:
        if not find_spec("trl"):
            pytest.skip("needs TRL in this environment: `pip install trl==1.16.0`")
        from accelerate import Accelerator
        from transformers import LlamaConfig, LlamaForCausalLM
        from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

        config = LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            vocab_size=VOCAB,
            tie_word_embeddings=False,
        )
        self.model = LlamaForCausalLM(config).to(torch.bfloat16)
        self.trainer: Any = object.__new__(AsyncGRPOTrainer)
        self.trainer.accelerator = Accelerator(cpu=True)
        self.trainer.model = self.model
        self.trainer.weight_transfer = transfer
        self.trainer.rollout_worker = None
        self.trainer.model_version = 0
        self.trainer._lora_sync = False  # noqa: SLF001 - __init__() needs a GPU
        self.trainer._metrics = {"train": _Anything()}  # noqa: SLF001

    def train(self, weights: Weights) -> None:
        self.model.load_state_dict(weights)

    def sync(self) -> None:
        self.trainer._sync_weight()  # noqa: SLF001 - it has no public name


class _Anything(dict[str, list[float]]):
    def __missing__(self, key: str) -> list[float]:
        return self.setdefault(key, [])


def test_twenty_updates(offline: dict[str, Any], server: Server) -> None:
    """The engine answers as a fresh one with the same weights, after each update."""
    transfer = WeightTransfer(server.url, token=TOKEN, timeout=60.0)
    loop = Loop(transfer)
    transfer.init_weight_transfer()
    expected = offline["schemes"]["tcp"]["after"], offline["fresh"]
    try:
        for number in range(1, 21):
            loop.train(make_weights(1 + number % 2))
            loop.sync()
            assert server.tokens() == expected[number % 2]
            assert server.label() == str(number) == str(loop.trainer.model_version)
            assert not server.is_paused()
    finally:
        transfer.destroy()


def test_what_the_engine_refuses(server: Server) -> None:
    """The error reaches TRL's loop, and the engine keeps its version and goes on."""
    transfer = WeightTransfer(server.url, token=TOKEN, timeout=60.0)
    loop = Loop(transfer)
    transfer.init_weight_transfer()
    try:
        loop.train(make_speller(7))
        loop.sync()
        loop.train(make_speller(8))
        loop.model.lm_head.weight = torch.nn.Parameter(torch.ones(VOCAB, 3).bfloat16())
        with pytest.raises(aiosync.PartialSyncError, match=r"lm_head\.weight: shape"):
            loop.sync()
        assert loop.trainer.model_version == 1 and server.label() == "1"
        assert not server.is_paused()
        assert {token for answer in server.tokens() for token in answer} == {7}
        loop.model.lm_head.weight = torch.nn.Parameter(torch.ones(VOCAB, HIDDEN).bfloat16())
        loop.train(make_speller(9))
        loop.sync()
        assert {token for answer in server.tokens() for token in answer} == {9}
    finally:
        transfer.destroy()


def test_methods_out_of_order() -> None:
    transfer = WeightTransfer("http://127.0.0.1:9")
    transfer.pause()
    with pytest.raises(aiosync.LocalProtocolError, match="init_weight_transfer"):
        transfer.send_weights(iter(()))
    with pytest.raises(aiosync.LocalProtocolError, match="init_weight_transfer"):
        transfer.resume()
    transfer.destroy()


def test_no_server_answers() -> None:
    transfer = WeightTransfer("http://127.0.0.1:9", timeout=10.0, activation_timeout=5.0)
    with pytest.raises(aiosync.ConnectError, match="127.0.0.1:9"):
        transfer.init_weight_transfer()
    transfer.destroy()


def test_an_option_that_there_is_not() -> None:
    with pytest.raises(aiosync.ConfigError, match="adress"):
        WeightTransfer("http://127.0.0.1:9", adress="tcp://127.0.0.1:0")


@pytest.mark.parametrize("version", ["1.15.0", "1.18.0", "2.0"])
def test_other_versions_of_trl(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(aiosync.ConfigError, match=rf"written for TRL 1.16 and 1.17, not {version}"):
        WeightTransfer("http://127.0.0.1:9")
