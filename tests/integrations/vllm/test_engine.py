"""The vLLM plug-in with real engines on the CPU: a tiny Llama with random weights.

The tests need vLLM. See ``conftest.py`` for the two engines.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aiosync
from aiosync import VersionSpan
from aiosync.integrations.vllm import span_of
from tests.integrations.vllm._server import TOKEN, Clients, Server
from tests.integrations.vllm._tools import VOCAB, make_speller, make_weights
from tests.support.pages import ROOT
from tests.support.waiting import free_port

if TYPE_CHECKING:
    from aiosync.integrations.vllm import AiosyncTrainerEngine

pytestmark = [
    pytest.mark.slow,
    # The first two tests start the engines.
    pytest.mark.timeout(400),
    # The warnings are vLLM's own.
    pytest.mark.filterwarnings("ignore"),
]

A, B = make_weights(1), make_weights(2)
TRAINER = """
import os, signal, sys, torch
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient
from aiosync.integrations.vllm import AiosyncTrainerEngine, AiosyncTrainerInitInfo
info = AiosyncTrainerInitInfo(rank=0, timeout=20.0)
client = HTTPVLLMWeightSyncClient(sys.argv[1], timeout=30)
AiosyncTrainerEngine.trainer_init(info, client=client)
print("joined", flush=True)
sys.stdin.read()
"""


def trainer_of(server: Server, client: Any = None, **options: Any) -> AiosyncTrainerEngine:
    from vllm.distributed.weight_transfer import (
        HTTPVLLMWeightSyncClient,
        WeightTransferTrainerFactory,
    )

    from aiosync.integrations.vllm import AiosyncTrainerEngine, AiosyncTrainerInitInfo

    info = AiosyncTrainerInitInfo(rank=0, **{"token": TOKEN, "timeout": 20.0, **options})
    client = client or HTTPVLLMWeightSyncClient(server.url, timeout=30)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client)
    assert isinstance(engine, AiosyncTrainerEngine)
    return engine


@pytest.fixture
def trainer(server: Server) -> Iterator[AiosyncTrainerEngine]:
    with trainer_of(server) as engine:
        yield engine


def test_schemes_offline(offline: dict[str, Any]) -> None:
    """In a trainer's process, each kind of link takes an update, a refusal and another update."""
    assert sorted(offline["schemes"]) == ["shm", "tcp", "unix"]
    for seen in offline["schemes"].values():
        assert seen["after"] != offline["fresh"]
        assert seen["after"] == offline["schemes"]["shm"]["after"]
        assert "ManifestMismatch" in seen["refused"] and "unexpected: more" in seen["refused"]
        assert seen["kept"] and seen["label"].startswith("2@")
        assert seen["back"] == offline["fresh"]
    assert offline["threads"] == []


def test_weights_arrive_on_an_accelerator_before_the_loader_takes_them(
    offline: dict[str, Any], on_device: dict[str, Any]
) -> None:
    """On an accelerator whose copies are late, an engine answers as one on the CPU does."""
    assert sorted(on_device) == ["shm", "tcp"]
    for seen in on_device.values():
        assert seen["after"] == offline["schemes"]["tcp"]["after"]
        assert "unexpected: more" in seen["refused"] and seen["kept"]
        # Of the trainer's it gathers one block each time; the engine's are one for each weight.
        assert seen["transfers"] == seen["weights"] + 2


def test_update_equals_fresh_engine(
    offline: dict[str, Any], server: Server, trainer: AiosyncTrainerEngine
) -> None:
    """Greedy tokens are those of an engine that started with the weights, in both directions."""
    assert server.tokens() == offline["schemes"]["tcp"]["after"]
    trainer.send_weights(B)
    assert server.tokens() == offline["fresh"]
    assert server.label() == "1" and trainer.active_version == 1
    choice = server.generate([1, 2, 3])
    span = span_of(choice)
    assert span is not None and span.runs == ((1, 32),)
    assert choice["weight_versions"][0]["version"] == f"1@{span.epoch}"
    trainer.send_weights(A)
    assert server.tokens() == offline["schemes"]["tcp"]["after"]
    assert server.label() == "2"


def test_a_generation_across_updates_says_at_which_token_they_came(
    server: Server, trainer: AiosyncTrainerEngine
) -> None:
    """Weights spell their version, and ``keep`` freezes the requests when an update comes."""
    trainer.send_weights(make_speller(21))
    with Clients(server, 4, max_tokens=300) as clients:
        for version in (2, 3, 4):
            assert trainer.stage(make_speller(20 + version)) == version
            clients.wait_until_running()
            trainer.activate()
    assert not clients.errors
    spans = [span_of(answer) for answer in clients.answers]
    for span, answer in zip(spans, clients.answers, strict=True):
        assert span is not None
        spelled = [(token - 20, 1) for token in answer["token_ids"]]
        assert span == VersionSpan.from_runs(spelled, span.epoch)
        assert sum(count for _, count in span.runs) == 300
        assert trainer.staleness(span) == 4 - span.first
    assert any(span is not None and len(span.runs) > 1 for span in spans)


def test_without_vllms_client(offline: dict[str, Any], server: Server) -> None:
    """A trainer with other dtypes updates over HTTP, without vLLM's client."""
    from aiosync.integrations.vllm import HTTPClient

    with trainer_of(server, HTTPClient(server.url), wire_dtype="bfloat16") as trainer:
        trainer.send_weights(A)
        before = server.tokens()
        trainer.send_weights({name: tensor.float() for name, tensor in B.items()})
        assert server.tokens() == offline["fresh"] != before
        with pytest.raises(aiosync.PartialSyncError, match="missing"):
            trainer.send_weights({})
        assert server.tokens() == offline["fresh"]


def _program_of(page: str, **instead: str) -> dict[str, Any]:
    """Return the names that the Python block of a page in docs/coming-from defines."""
    text = (ROOT / "docs" / "coming-from" / page).read_text()
    program = text.partition("```python\n")[2].partition("```")[0]
    for old, new in instead.items():
        assert old in program
        program = program.replace(old, new)
    defined: dict[str, Any] = {}
    exec(program, defined)
    return defined


def test_the_object_for_trl(offline: dict[str, Any], server: Server) -> None:
    """Its methods work in the order in which TRL calls them."""
    program = _program_of("trl.md")
    transfer = program["Transfer"](server.url, "tcp://127.0.0.1:0", TOKEN)
    transfer.init_weight_transfer()
    try:
        for weights in (A, B):
            transfer.pause()
            transfer.send_weights(iter(weights.items()))
            transfer.resume()
    finally:
        transfer.destroy()
    assert server.tokens() == offline["fresh"]
    assert server.label() == "2"


def test_the_trainer_of_the_page_on_nccl(offline: dict[str, Any], server: Server) -> None:
    here = {"trainer.example": "127.0.0.1", "7000": str(free_port())}
    program = _program_of(
        "vllm-nccl.md", **{"http://engine.example:8000": server.url, "(1000)": "(2)", **here}
    )
    program["train"](SimpleNamespace(state_dict=lambda: A), TOKEN)
    assert server.tokens() == offline["schemes"]["tcp"]["after"] != offline["fresh"]
    assert server.label() == "2"


def _without(name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in B.items() if key != name}


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (_without("model.layers.1.mlp.up_proj.weight"), "missing: model.layers.1.mlp.up_proj"),
        ({**B, "model.layers.2.x": torch.ones(3)}, "unexpected: model.layers.2.x"),
        ({**B, "lm_head.weight": torch.ones(VOCAB, 3).bfloat16()}, "lm_head.weight: shape"),
        ({**B, "lm_head.weight": B["lm_head.weight"].float()}, "wire_dtype"),
    ],
    ids=["missing", "unexpected", "shape", "dtype"],
)
def test_mismatch_is_refused(
    server: Server, trainer: AiosyncTrainerEngine, weights: dict[str, torch.Tensor], says: str
) -> None:
    """The engine keeps its version, and the trainer gets the reason."""
    trainer.send_weights(A)
    tokens, checksums, label = server.tokens(), server.checksums(), server.label()
    with pytest.raises(aiosync.PartialSyncError) as caught:
        trainer.send_weights(weights)
    refusal = caught.value.failed[0]
    assert isinstance(refusal, aiosync.ApplyError) and refusal.remote_type == "ManifestMismatch"
    assert says in str(refusal)
    assert not server.is_paused()
    assert server.tokens() == tokens
    assert server.checksums() == checksums
    assert server.label() == label
    # The engine takes the next update.
    trainer.send_weights(B)
    assert server.tokens() != tokens


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "lm_head.weight"])
def test_failure_half_way_is_undone(server: Server, name: str) -> None:
    """If vLLM's own loader fails after most is loaded, the engine is as before, bit for bit."""
    with trainer_of(server, check="none") as trainer:
        trainer.send_weights(A)
        tokens, checksums, label = server.tokens(), server.checksums(), server.label()
        for _ in range(2):
            with pytest.raises(aiosync.PartialSyncError) as caught:
                trainer.send_weights({**B, name: torch.ones(7, 5).bfloat16()})
            refusal = caught.value.failed[0]
            assert isinstance(refusal, aiosync.ApplyError)
            # The loader itself failed, in the middle.
            assert refusal.remote_type != "ManifestMismatch"
            assert not server.is_paused()
            assert server.tokens() == tokens
            assert server.checksums() == checksums
            assert server.label() == label
        trainer.send_weights(B)
        assert server.tokens() != tokens


def test_incomplete_update_is_undone(server: Server) -> None:
    """Without a check of names, the plug-in finds parts that vLLM would leave half-loaded."""
    with trainer_of(server, check="none") as trainer:
        trainer.send_weights(A)
        tokens = server.tokens()
        with pytest.raises(aiosync.PartialSyncError, match="missing: model.norm.weight"):
            trainer.send_weights(_without("model.norm.weight"))
        assert server.tokens() == tokens


def test_dead_trainer(server: Server, tmp_path: Path) -> None:
    """A trainer is killed: updates fail in time, the engine generates, another trainer comes."""
    environment = {**os.environ, "AIOSYNC_TOKEN": TOKEN}
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, server.url],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, b"")
            assert any(line == b"joined\n" for line in lines)
        finally:
            process.send_signal(signal.SIGKILL)
    tokens, checksums = server.tokens(), server.checksums()
    assert server.post("start_weight_update").ok
    began = time.monotonic()
    reply = server.post("update_weights", {"update_info": {"version": 1, "timeout": 1.0}})
    assert reply.status_code == 500 and "the trainer is gone" in reply.text
    assert time.monotonic() - began < 10
    assert server.tokens() == tokens
    assert server.checksums() == checksums
    # The trainer might also have died here, with the engine paused.
    assert server.post("pause?mode=keep").ok
    with trainer_of(server) as successor:
        successor.send_weights(make_weights(4))
        assert not server.is_paused()
        assert server.tokens() != tokens


def test_engine_lost_the_trainers_word(server: Server) -> None:
    """A trainer whose engine was given to another one gets an error, and can take it back."""
    with trainer_of(server) as first:
        first.send_weights(A)
        tokens = server.tokens()
        with trainer_of(server) as second:
            second.send_weights(B)
        with pytest.raises(aiosync.PartialSyncError, match="rejoin"):
            first.send_weights(A)
        # rejoin() also sends the trainer's newest version.
        first.rejoin()
        assert server.tokens() == tokens
        first.send_weights(B)
        assert server.tokens() != tokens
