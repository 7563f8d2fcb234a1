"""vLLM plug-in: a weight transfer back-end with the name ``aiosync``.

The plug-in's entry point calls :func:`register` in every process of an engine, and
``WeightTransferConfig(backend="aiosync")`` chooses the back-end. In a trainer, the import of this
package registers it with vLLM's ``WeightTransferTrainerFactory``. The engine's side stages updates
while the engine generates; the trainer's side, :class:`AiosyncTrainerEngine`, pauses the engine
only for the switch.

The trainer's side works without vLLM. Written for vLLM 0.32; nothing else in aiosync imports it.
See ``docs/topics/vllm.md``.
"""

from __future__ import annotations

from importlib.util import find_spec

from aiosync.integrations.vllm._clients import AsyncLLMClient, HTTPClient, LLMClient
from aiosync.integrations.vllm._info import AiosyncInitInfo, AiosyncUpdateInfo
from aiosync.integrations.vllm._torchrl import (
    VLLMWeightReceiver,
    VLLMWeightSender,
    VLLMWeightSyncScheme,
    get_model_metadata,
)
from aiosync.integrations.vllm._trainer import (
    Activation,
    AiosyncTrainerEngine,
    AiosyncTrainerInitInfo,
    span_of,
)

__all__ = [
    "Activation",
    "AiosyncInitInfo",
    "AiosyncTrainerEngine",
    "AiosyncTrainerInitInfo",
    "AiosyncUpdateInfo",
    "AsyncLLMClient",
    "HTTPClient",
    "LLMClient",
    "VLLMWeightReceiver",
    "VLLMWeightSender",
    "VLLMWeightSyncScheme",
    "get_model_metadata",
    "register",
    "span_of",
]

_done = False


def register() -> None:
    """Register the engine's and the trainer's side with vLLM as ``"aiosync"``. Idempotent.

    Does nothing if vLLM is not installed.
    """
    global _done
    if _done or find_spec("vllm") is None:
        return
    _done = True
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    WeightTransferEngineFactory.register_engine(
        "aiosync", f"{__name__}._worker", "AiosyncWeightTransferEngine"
    )
    WeightTransferTrainerFactory.register_engine(
        "aiosync", f"{__name__}._trainer", "AiosyncTrainerEngine"
    )


register()
