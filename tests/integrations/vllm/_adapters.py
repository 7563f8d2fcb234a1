"""Program: LoRA adapters arrive in a real ``AsyncLLM``; prints its findings as one line of JSON.

Usage: ``_adapters.py CHECKPOINT FOLDER``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import aiosync
from aiosync.integrations.lora import VLLMAdapterReceiver
from tests.integrations.vllm._tools import HIDDEN, LAYERS

RANK = 4
CONFIG: dict[str, Any] = {"r": RANK, "lora_alpha": RANK, "target_modules": {"q_proj", "o_proj"}}
NUM_VERSIONS = 22


def make_adapter(seed: int) -> dict[str, torch.Tensor]:
    """Return an adapter with the names of PEFT, large enough to change most tokens."""
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name in ("q_proj", "o_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (RANK, HIDDEN)), ("B", (HIDDEN, RANK))):
                values = torch.randn(shape, generator=random).to(torch.bfloat16)
                weights[f"{prefix}.lora_{part}.weight"] = values
    return weights


def saved(folder: Path, weights: dict[str, torch.Tensor]) -> str:
    """Save an adapter as PEFT does, and return its folder."""
    folder.mkdir()
    config = {"peft_type": "LORA", **CONFIG, "target_modules": ["q_proj", "o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")
    return str(folder)


def files_in(folder: Path) -> int:
    return len(list(folder.glob("aiosync-lora-*/*")))


class Engine:
    """An engine for adapters, and the tokens that it makes."""

    def __init__(self, checkpoint: str) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=checkpoint,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=8,
            enable_lora=True,
            max_loras=2,
            max_lora_rank=8,
        )
        self.llm = AsyncLLM.from_engine_args(arguments)
        self.num_calls = 0

    async def tokens(self, request: Any, count: int = 16) -> list[int]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": [5, 6, 7, 8]}
        self.num_calls += 1
        outputs = self.llm.generate(prompt, params, str(self.num_calls), lora_request=request)
        tokens: list[int] = []
        async for output in outputs:
            tokens = list(output.outputs[0].token_ids)
        return tokens


async def follow(engine: Engine, folder: Path) -> dict[str, Any]:
    options: Any = {"guard": "reading", "timeout": 60.0, "token": "t" * 32}
    trainer = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", **options)
    trainer.init_on_sender(num_workers=1)
    worker = aiosync.TCPWeightSyncScheme(trainer.address, **options)
    adapters = VLLMAdapterReceiver(worker, engine.llm, CONFIG, folder=folder)
    try:
        adapters.use().__enter__()
    except aiosync.LocalProtocolError as exc:
        early = str(exc)
    async with trainer, worker:
        await asyncio.gather(trainer.connect(), worker.connect())
        seen = {
            "early": early,
            **await receive(trainer, engine, adapters, folder),
            **await refuse(trainer, engine, adapters),
        }
        await trainer.send(make_adapter(51))
        seen["kept_files"] = files_in(folder)
        seen["kept_adapters"] = len(await engine.llm.list_loras())
    adapters.close()
    seen["left_files"] = files_in(folder)
    return seen


async def receive(
    trainer: aiosync.WeightSyncScheme, engine: Engine, adapters: VLLMAdapterReceiver, folder: Path
) -> dict[str, Any]:
    """Send versions while a long request of the first one runs."""
    from vllm.lora.request import LoRARequest

    seen: dict[str, Any] = {"plain": await engine.tokens(None), "versions": []}
    await trainer.send(make_adapter(1))
    with adapters.use() as first:
        seen["first"] = await engine.tokens(first.request)
        long = asyncio.create_task(engine.tokens(first.request, 400))
        for version in range(2, NUM_VERSIONS + 1):
            await trainer.send(make_adapter(version))
            with adapters.use() as adapter:
                tokens = await engine.tokens(adapter.request)
                seen["versions"].append((adapter.version, adapter.name, tokens))
        seen["long"] = await long
        # vLLM has made room for newer ones, and loads it again.
        seen["again"] = await engine.tokens(first.request)
    # The reference: adapters as vLLM loads them by itself.
    seen["fresh"] = []
    for version in range(2, NUM_VERSIONS + 1):
        request = LoRARequest(
            f"fresh-{version}", version, saved(folder / f"{version}", make_adapter(version))
        )
        seen["fresh"].append(await engine.tokens(request))
    return seen


async def refuse(
    trainer: aiosync.WeightSyncScheme, engine: Engine, adapters: VLLMAdapterReceiver
) -> dict[str, Any]:
    """Send what the engine refuses."""
    before, weights = adapters.newest, make_adapter(50)
    assert before is not None
    misfit = {name.replace("o_proj", "no_such_proj"): each for name, each in weights.items()}
    try:
        await trainer.send(misfit)
        refused = ""
    except aiosync.PartialSyncError as exc:
        refused = str(exc)
    same = adapters.newest == before
    return {"refused": refused, "same": same, "kept": await engine.tokens(before.request)}


async def main(checkpoint: str, folder: str) -> None:
    engine = Engine(checkpoint)
    try:
        sys.stdout.write(f"SEEN {json.dumps(await follow(engine, Path(folder)))}\n")
    finally:
        engine.llm.shutdown()


if __name__ == "__main__":
    aiosync.run(main(*sys.argv[1:]))
