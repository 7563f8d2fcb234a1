"""Program: an engine with sleep mode, whose weights are not those of the last update any more.

A backend of sleep mode takes the memory of the weights away while the engine sleeps. On the CPU
there is none, so other values in that memory stand for it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

import aiosync
from aiosync.integrations.vllm import AiosyncTrainerEngine, AiosyncTrainerInitInfo
from tests.integrations.vllm._swapping import Client, make_engine
from tests.integrations.vllm._without_copy import Model


def main(folder: Path) -> list[tuple[str, list[float]]]:
    model = Model()
    engine = make_engine(folder, model, enable_sleep_mode=True)
    info = AiosyncTrainerInitInfo(
        rank=0, address=f"unix://{folder}/s", pause=None, check="none", timeout=20.0
    )
    seen: list[tuple[str, list[float]]] = []

    def sleep_and_be_refused(woken: float) -> None:
        """Wake up with other weights; note how an update fails, and the weights after it."""
        model.bias.fill_(woken)
        model.is_broken = True
        try:
            trainer.send_weights({"bias": torch.full((4,), 9.0)})
        except aiosync.PartialSyncError as exc:
            seen.append((str(exc.failed[0]), model.bias.tolist()))
        model.is_broken = False

    with AiosyncTrainerEngine.trainer_init(info, client=Client(engine)) as trainer:
        sleep_and_be_refused(1.0)
        trainer.send_weights({"bias": torch.full((4,), 2.0)})
        seen.append(("", model.bias.tolist()))
        sleep_and_be_refused(3.0)
        sleep_and_be_refused(4.0)
    engine.shutdown()
    return seen


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        sys.stdout.write(f"SEEN {json.dumps(main(Path(made)))}\n")
