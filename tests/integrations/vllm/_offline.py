"""Program: vLLM in a trainer's own process; prints its findings as one line of JSON.

Usage: ``_offline.py CHECKPOINT START OTHER``. The numbers are seeds of weights. The engine starts
from ``CHECKPOINT``, which has the weights of ``START``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from typing import Any

import torch

from tests.integrations.vllm._tools import PROMPTS, SAMPLING, make_weights


def main(checkpoint: str, start: int, other: int) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    from aiosync import AiosyncError
    from aiosync.integrations.vllm import (
        AiosyncTrainerInitInfo,
        LLMClient,
        VLLMWeightSyncScheme,
    )

    llm = LLM(
        model=checkpoint,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=8,
        weight_transfer_config=WeightTransferConfig(backend="aiosync"),
    )
    sampling = SamplingParams(detokenize=False, **SAMPLING)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]

    def tokens() -> list[list[int]]:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    mine, others = make_weights(start), make_weights(other)
    seen: dict[str, Any] = {"fresh": tokens(), "schemes": {}}
    with tempfile.TemporaryDirectory() as folder:
        for address in (f"unix://{folder}/trainer.sock", "shm", "tcp://127.0.0.1:0"):
            info = AiosyncTrainerInitInfo(rank=0, address=address, timeout=20.0)
            trainer = WeightTransferTrainerFactory.trainer_init(info, client=LLMClient(llm))
            with trainer:
                trainer.send_weights(others)
                after = tokens()
                trainer.send_weights({**mine, "lm_head.weight": others["lm_head.weight"]})
                between = tokens()
                try:
                    trainer.send_weights({**mine, "more": mine["model.norm.weight"]})
                    refused = ""
                except AiosyncError as exc:
                    refused = str(exc)
                kept = tokens()
                label = llm.get_weight_version()
                trainer.send_weights(mine)
                seen["schemes"][address.partition(":")[0]] = {
                    "after": after,
                    "kept": kept == between != after,
                    "refused": refused,
                    "label": label,
                    "back": tokens(),
                }
    sender = VLLMWeightSyncScheme(address="shm", timeout=20.0).create_sender()
    sender.init_all_workers_group(dict.fromkeys(mine, (torch.bfloat16, torch.Size())), llm)
    sender.update_weights(others)
    seen["torchrl"] = {"after": tokens()}
    sender.update_weights(mine)
    seen["torchrl"]["back"] = tokens()
    sender.shutdown()
    llm.llm_engine.engine_core.shutdown()
    seen["threads"] = [t.name for t in threading.enumerate() if t.name.startswith("aiosync")]
    return seen


if __name__ == "__main__":
    report = json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    sys.stdout.write(f"SEEN {report}\n")
