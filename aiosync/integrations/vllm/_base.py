"""The classes of vLLM that this plug-in extends, with types that hold without vLLM.

Where vLLM is not installed, as in many a trainer, what is written here stands in for them; type
checkers see nothing else. Must not import anything else of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import torch

HAS_VLLM: bool = find_spec("vllm") is not None
"""Whether vLLM is installed."""

if TYPE_CHECKING or not HAS_VLLM:
    WeightSource: TypeAlias = Iterable[tuple[str, torch.Tensor]]
    """Names and tensors of a trainer, to be iterated anew for each update, in one order."""

    class VLLMWeightSyncClient(Protocol):
        """How a trainer talks to an engine."""

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            """Have the engine reach the trainer."""

        def start_weight_update(self) -> None:
            """Begin an update."""

        def update_weights(self, update_info: dict[str, Any]) -> None:
            """Load weights."""

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            """End an update, and name the version."""

    @dataclass
    class WeightTransferInitInfo:
        """What an engine is told when a trainer comes."""

    @dataclass
    class WeightTransferUpdateInfo:
        """What an engine is told with each update."""

    @dataclass
    class TrainerInitInfo:
        """What the trainer's side is made of."""

        backend: ClassVar[str]
        rank: int = field(kw_only=True)

        @property
        def is_sender(self) -> bool:
            """Whether this rank sends."""
            return self.rank == 0

    class WeightTransferEngine:
        """The engine's side, in each of its workers."""

        init_info_cls: type[WeightTransferInitInfo]
        update_info_cls: type[WeightTransferUpdateInfo]
        supports_draft_weight_update: bool
        parallel_config: Any
        model_config: Any
        device: torch.device
        model: torch.nn.Module

        def __init__(
            self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
        ) -> None:
            raise ImportError("the engine side needs vLLM")

        def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
            """Make the update info of a dictionary."""
            return self.update_info_cls(**update_dict)

    class TrainerWeightTransferEngine:
        """The trainer's side, in each of its ranks."""

        init_info_cls: type[TrainerInitInfo]
        is_sender: bool
        client: VLLMWeightSyncClient
        source: WeightSource | None

        def __init__(
            self,
            *,
            client: VLLMWeightSyncClient,
            source: WeightSource | None = None,
            is_sender: bool = True,
        ) -> None:
            self.is_sender = is_sender
            self.client = client
            self.source = source

else:
    from vllm.distributed.weight_transfer.base import (
        TrainerInitInfo,
        TrainerWeightTransferEngine,
        VLLMWeightSyncClient,
        WeightSource,
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

__all__ = [
    "HAS_VLLM",
    "TrainerInitInfo",
    "TrainerWeightTransferEngine",
    "VLLMWeightSyncClient",
    "WeightSource",
    "WeightTransferEngine",
    "WeightTransferInitInfo",
    "WeightTransferUpdateInfo",
]
