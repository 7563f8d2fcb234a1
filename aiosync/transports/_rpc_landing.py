"""The receiving half of payloads over RPC: memory that calls of the peer write to.

Must not import ``torch.distributed.rpc``, asyncio or schemes.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["ID_NBYTES", "Landing", "deliver", "landings"]

ID_NBYTES = 16
"""Length of the random number that names a payload."""

_UNKNOWN = "the receiver does not await this payload, or not any more"


class Landing:
    """Where one payload lands: lent memory that the threads of RPC write to until it is closed."""

    def __init__(
        self, buffers: list[memoryview], nbytes: int, chunk_nbytes: int, tell: Callable[[], None]
    ) -> None:
        self.key = secrets.token_bytes(ID_NBYTES)
        self.left = nbytes
        self.writing = 0
        self.fault: str | None = None  # what the peer did wrong
        self.refusal: Exception | None = None  # why the peer will not send
        self._targets = [np.frombuffer(each, np.uint8) for each in buffers]
        self._nbytes = nbytes
        self._chunk_nbytes = chunk_nbytes
        self._seen: set[int] = set()
        self._open = True
        self._tell = tell
        self._lock = threading.Lock()

    def put(self, index: int, tensors: tuple[Any, ...]) -> str | None:
        """Copy one chunk; on a thread of RPC, without the GIL. Returns why not, if not."""
        with self._lock:
            if not self._open:
                return _UNKNOWN
            fault = self._fault_of(index, tensors)
            if fault is None:
                self._seen.add(index)
                self.writing += 1
            else:
                self._open, self.fault = False, fault
        if fault is not None:
            self._tell()
            return fault
        copied = 0
        try:
            offset = index * self._chunk_nbytes
            for tensor in tensors:
                self._copy(offset + copied, tensor.numpy())
                copied += tensor.numel()
        finally:
            with self._lock:
                self.writing -= 1
                self.left -= copied
                idle = not self._open and not self.writing
            if idle:
                self._tell()
        return None

    def _fault_of(self, index: int, tensors: tuple[Any, ...]) -> str | None:
        total = 0
        for tensor in tensors:
            if (
                not isinstance(tensor, torch.Tensor)
                or tensor.dtype is not torch.uint8
                or tensor.device.type != "cpu"
                or tensor.dim() != 1
                or not tensor.is_contiguous()
            ):
                return "the peer delivered something else than flat bytes"
            total += tensor.numel()
        last = (self._nbytes - 1) // self._chunk_nbytes
        if type(index) is not int or not 0 <= index <= last or index in self._seen:
            return f"the peer delivered chunk {index!r:.20} of {last + 1} where none is awaited"
        wanted = min(self._chunk_nbytes, self._nbytes - index * self._chunk_nbytes)
        if total != wanted:
            return f"the peer delivered {total} bytes as a chunk of {wanted}"
        return None

    def _copy(self, offset: int, source: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        for target in self._targets:
            if offset < target.size:
                step = min(target.size - offset, source.size)
                np.copyto(target[offset : offset + step], source[:step])
                source = source[step:]
                offset += step
            if not source.size:
                return
            offset -= target.size

    def refused(self, error: Exception | None) -> None:
        """The peer answered whether it will send. On the loop."""
        if error is not None:
            self.refusal = error
            self._tell()

    def close(self) -> None:
        """Let nothing new in."""
        with self._lock:
            self._open = False


landings: dict[bytes, Landing] = {}
"""The payloads that this process awaits; empty while nothing is under way."""


def deliver(key: bytes, index: int, *tensors: Any) -> str | None:
    """Take one chunk of a payload. Called by RPC, on one of its threads.

    Args:
        key: Names the payload, as the receiver said it.
        index: Of the chunk.
        tensors: Its bytes in order, flat uint8.

    Returns:
        Why it was not taken; RPC would print an exception. ``None`` when it is in place.
    """
    landing = landings.get(key)
    return _UNKNOWN if landing is None else landing.put(index, tensors)
