"""Program: vLLM alone, without aiosync, on the model of the tests; it fails if vLLM fails.

On some machines vLLM's worker dies at its first token, with SIGILL. There no test of a plug-in can
say anything. With ``tiles`` in ``PYTHONPATH``, as the tests have it, that has not been seen.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tests.integrations.vllm._tools import PROMPTS, SAMPLING, make_checkpoint, make_weights

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
}


def main() -> None:
    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            model=str(make_checkpoint(Path(folder) / "model", make_weights(1))),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=8,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        sampling = SamplingParams(detokenize=False, **SAMPLING)
        for _ in range(5):
            llm.generate(prompts, sampling, use_tqdm=False)


if __name__ == "__main__":
    main()
