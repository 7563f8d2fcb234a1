"""Program: an engine of this process whose model is on the fake accelerator; prints its findings.

Usage: ``_on_device.py CHECKPOINT OTHER``. The numbers are as for ``_offline``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from tests.integrations.vllm._tools import PROMPTS, SAMPLING, make_weights
from tests.support.accelerator import deferred


def main(checkpoint: str, other: int) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    from aiosync import AiosyncError
    from aiosync.integrations.vllm import AiosyncTrainerInitInfo, LLMClient

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

    others, seen = make_weights(other), dict[str, Any]()
    with deferred() as device:
        for address in ("shm", "tcp://127.0.0.1:0"):
            info = AiosyncTrainerInitInfo(rank=0, address=address, timeout=20.0)
            trainer = WeightTransferTrainerFactory.trainer_init(info, client=LLMClient(llm))
            with trainer:
                trainer.send_weights({name: each.flip(0) for name, each in others.items()})
                flipped, before = tokens(), device.num_transfers
                try:
                    trainer.send_weights({**others, "more": others["model.norm.weight"]})
                    refused = ""
                except AiosyncError as exc:
                    refused = str(exc)
                kept = tokens() == flipped
                trainer.send_weights(others)
                seen[address.partition(":")[0]] = {
                    "after": tokens(),
                    "kept": kept,
                    "refused": refused,
                    "transfers": device.num_transfers - before,
                    "weights": len(others),
                }
    llm.llm_engine.engine_core.shutdown()
    return seen


if __name__ == "__main__":
    report = json.dumps(main(sys.argv[1], int(sys.argv[2])))
    sys.stdout.write(f"SEEN {report}\n")
