"""An accelerator whose memory is that of the CPU, and whose copies happen when they are waited for.

A wait that is missing shows: the copy was not made yet. Models in this process are on it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import nn

from aiosync.tensors import FlatBuffer
from aiosync.tensors.accelerator import accelerator, use_accelerator


class Deferred:
    """Does what was asked of it, in order, once somebody waits.

    Attributes:
        elsewhere: What other streams have to do yet: done by :meth:`synchronize` alone, and after
            what was begun by copies.
        taken: Bytes of its memory that were asked for.
        num_transfers: How often bytes went to or from it.
        is_busy: Waits do not end before this is set; ``None`` where they end at once.
        skips: So many waits end at once all the same.
    """

    def __init__(self) -> None:
        self.elsewhere: list[Callable[[], object]] = []
        self.taken: int = 0
        self.num_transfers: int = 0
        self.is_busy: threading.Event | None = None
        self.skips: int = 0
        self._begun: deque[Callable[[], object]] = deque()
        self._lock = threading.RLock()

    def has(self, tensor: torch.Tensor) -> bool:
        return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_cpu

    def synchronize(self, device: torch.device) -> None:
        if self.skips:
            self.skips -= 1
        elif self.is_busy is not None:
            assert self.is_busy.wait(30), "nobody let the accelerator go on"
        self._do(len(self._begun))
        with self._lock:
            while self.elsewhere:
                self.elsewhere.pop(0)()

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        assert all(
            target.shape == source.shape for target, source in zip(targets, sources, strict=True)
        )
        for target, source in zip(targets, sources, strict=True):
            self._begin(target, source)

    def transfer(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.dtype is source.dtype is torch.uint8 and target.shape == source.shape
        self.num_transfers += 1
        self._begin(target, source)

    def mark(self, device: torch.device) -> Callable[[], object]:
        done = threading.Event()
        self._begun.append(done.set)

        def wait() -> None:
            with self._lock:
                while not done.is_set():
                    self._do(1)

        return wait

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        self.taken += nbytes
        return torch.full((nbytes,), 0xAB, dtype=torch.uint8)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xCD, dtype=torch.uint8)

    def pin(self, flat: FlatBuffer, device: torch.device) -> None:
        assert flat.pinnable
        if flat.pinned is None:
            flat.pinned = weakref.finalize(flat.block, lambda *_: None, 0, device, 0)

    def _begin(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target, source = target.detach(), source.detach()
        self._begun.append(lambda: target.copy_(source))

    def _do(self, count: int) -> None:
        with self._lock:
            while count and self._begun:
                self._begun.popleft()()
                count -= 1


@contextlib.contextmanager
def deferred() -> Iterator[Deferred]:
    """Have models of this process be on such an accelerator."""
    before, fake = accelerator(), Deferred()
    use_accelerator(fake)
    try:
        yield fake
    finally:
        use_accelerator(before)
