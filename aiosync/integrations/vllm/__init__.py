"""vLLM takes weights through aiosync under the name ``aiosync``.

A plug-in of vLLM: its entry point calls :func:`register` in every process of an engine, and
``WeightTransferConfig(backend="aiosync")`` chooses it. In a trainer, importing this package does
the same for vLLM's ``WeightTransferTrainerFactory``. The engine's side stages updates while the
engine generates; the trainer's side, :class:`AiosyncTrainerEngine`, pauses it only to switch.

The trainer's side works without vLLM. Written for vLLM 0.32; nothing else in aiosync imports it.
See ``docs/topics/vllm.md``.
"""

from __future__ import annotations

from aiosync.integrations.vllm._clients import AsyncLLMClient, HTTPClient, LLMClient
from aiosync.integrations.vllm._info import (
    AiosyncInitInfo,
    AiosyncTrainerInitInfo,
    AiosyncUpdateInfo,
)
from aiosync.integrations.vllm._registration import register
from aiosync.integrations.vllm._trainer import Activation, AiosyncTrainerEngine

__all__ = [
    "Activation",
    "AiosyncInitInfo",
    "AiosyncTrainerEngine",
    "AiosyncTrainerInitInfo",
    "AiosyncUpdateInfo",
    "AsyncLLMClient",
    "HTTPClient",
    "LLMClient",
    "register",
]

register()
