"""Makes both sides known to vLLM's factories. Must import neither of them."""

from __future__ import annotations

from aiosync.integrations.vllm._base import HAS_VLLM

__all__ = ["register"]

NAME = "aiosync"

_done = False


def register() -> None:
    """Register the engine's and the trainer's side as ``"aiosync"``. Idempotent.

    Does nothing where there is no vLLM.
    """
    global _done
    if _done or not HAS_VLLM:
        return
    _done = True
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    package = "aiosync.integrations.vllm"
    WeightTransferEngineFactory.register_engine(
        NAME, f"{package}._worker", "AiosyncWeightTransferEngine"
    )
    WeightTransferTrainerFactory.register_engine(
        NAME, f"{package}._trainer", "AiosyncTrainerEngine"
    )
