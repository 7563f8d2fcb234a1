"""The workers of one engine do the same: all of them load an update, or none does.

Must not import the trainer's side.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_world_group

from aiosync.errors import ApplyError

__all__ = ["Ranks"]

_logger = logging.getLogger(__name__)
_TEXT_NBYTES = 1024


class Ranks:
    """This worker among those of its engine.

    Args:
        parallel: vLLM's parallel configuration.
    """

    def __init__(self, parallel: Any) -> None:
        self._rank: int = parallel.rank
        self._size: int = parallel.world_size
        self._texts: list[str] = []
        self.index: int = parallel.data_parallel_index * parallel.world_size + parallel.rank
        """Over all data parallel replicas."""

    def agree(self, error: Exception | None) -> bool:
        """Whether no worker has an error. Every worker has to call it."""
        group = get_world_group()
        self._texts = []
        if group.world_size == 1:
            return error is None
        said = b"" if error is None else f"{type(error).__name__}: {error}".encode()
        mine = torch.zeros(_TEXT_NBYTES, dtype=torch.uint8)
        said = said[:_TEXT_NBYTES]
        if said:
            mine[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(group.world_size)]
        dist.all_gather(every, mine, group=group.cpu_group)
        texts = [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in every]
        self._texts = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        return not self._texts

    def report(self, error: Exception | None) -> None:
        """Raise what went wrong, on one worker of the engine.

        On the last one: an executor that asks several workers stops at the first that fails, and
        would take the answers of those after it for answers to its next question.
        """
        if self._size == 1:
            assert error is not None
            raise error
        if self._rank == self._size - 1:
            raise ApplyError("; ".join(self._texts) or str(error)) from error
        _logger.warning("not loaded: %s", "; ".join(self._texts) or error)
