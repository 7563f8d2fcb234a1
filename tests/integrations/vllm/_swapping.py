"""Program: an engine whose model swaps a parameter for another while it loads, and then fails."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import aiosync
from aiosync.integrations.vllm import AiosyncTrainerEngine, AiosyncTrainerInitInfo, register


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A bias stays where it is while vLLM loads the rest anew.
        self.bias = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.bias.note = "its own"  # type: ignore[attr-defined]

    def load_weights(self, weights: Any) -> None:
        torch.utils.swap_tensors(self.bias, torch.nn.Parameter(torch.ones(4)))
        raise RuntimeError("half way")


class Client:
    """Client that calls the only worker."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._engine.init_transfer_engine(self._engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        self._engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._engine.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._engine.finish_weight_update()


def make_engine(folder: Path, model: torch.nn.Module, **model_config: Any) -> Any:
    """Return the transfer engine of the only worker of an engine."""
    from vllm.distributed import init_distributed_environment
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    register()
    init_distributed_environment(1, 0, f"file://{folder}/world", 0, "gloo")
    return WeightTransferEngineFactory.create_engine(
        SimpleNamespace(backend="aiosync"),
        SimpleNamespace(
            parallel_config=SimpleNamespace(
                rank=0, world_size=1, data_parallel_index=0, data_parallel_size=1
            ),
            model_config=SimpleNamespace(dtype=torch.float32, quantization=None, **model_config),
        ),
        torch.device("cpu"),
        model,
    )


def main(folder: Path) -> dict[str, Any]:
    model = Model()
    engine = make_engine(folder, model)
    info = AiosyncTrainerInitInfo(
        rank=0, address=f"unix://{folder}/s", pause=None, check="none", timeout=20.0
    )
    refused = ""
    with AiosyncTrainerEngine.trainer_init(info, client=Client(engine)) as trainer:
        try:
            trainer.send_weights({"bias": torch.ones(4)})
        except aiosync.PartialSyncError as exc:
            refused = str(exc)
    engine.shutdown()
    return {"refused": refused, "bias": model.bias.tolist(), "attributes": vars(model.bias)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        sys.stdout.write(f"SEEN {json.dumps(main(Path(made)))}\n")
