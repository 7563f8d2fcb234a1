"""Program: an engine without a copy of its weights, and updates that cannot be undone."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import aiosync
from aiosync.integrations.vllm import AiosyncTrainerEngine, AiosyncTrainerInitInfo
from tests.integrations.vllm._swapping import Client, make_engine


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.is_broken = False

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            self.bias.data.copy_(tensor)
        if self.is_broken:
            raise RuntimeError("half way")


class LossyClient(Client):
    """Client that loses the answer to the first update."""

    is_lossy = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        super().update_weights(update_info)
        if self.is_lossy:
            self.is_lossy = False
            raise ConnectionError("the answer was lost")


def main(folder: Path) -> dict[str, Any]:
    model = Model()
    engine = make_engine(folder, model)
    info = AiosyncTrainerInitInfo(
        rank=0, address=f"unix://{folder}/s", pause=None, check="none", timeout=20.0, rollback=False
    )
    seen: dict[str, Any] = {}
    with AiosyncTrainerEngine.trainer_init(info, client=LossyClient(engine)) as trainer:
        try:
            trainer.send_weights({"bias": torch.full((4,), 1.0)})
        except aiosync.ConnectError as exc:
            seen["lost"] = [str(exc), *getattr(exc, "__notes__", [])]
        model.is_broken = True
        try:
            trainer.send_weights({"bias": torch.full((4,), 2.0)})
        except aiosync.PartialSyncError as exc:
            seen["broken"] = str(exc.failed[0])
        model.is_broken = False
        trainer.send_weights({"bias": torch.full((4,), 3.0)})
        seen["bias"] = model.bias.tolist()
    engine.shutdown()
    return seen


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        sys.stdout.write(f"SEEN {json.dumps(main(Path(made)))}\n")
