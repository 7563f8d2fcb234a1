"""A fake accelerator in the memory of the CPU, which copies only when somebody waits for it.

Code that does not wait for a copy finds that it was not made yet. The models of this process are
on this accelerator.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import nn

from aiosync.device_memory import DeviceMemory
from aiosync.errors import ConfigError
from aiosync.tensors import FlatBuffer
from aiosync.tensors.accelerator import accelerator, use_accelerator
from tests.support.fake_driver import FakeDriver


class Deferred:
    """A fake accelerator that does its work, in order, once somebody waits.

    Attributes:
        elsewhere: Work of other streams that is not done yet. Only :meth:`synchronize` does it,
            after the copies that were begun.
        taken: Number of bytes of its memory that were allocated.
        num_transfers: Number of transfers to or from it.
        is_busy: An event before which no wait ends; ``None`` if waits end at once.
        skips: Number of the next waits that do not wait for ``is_busy``.
        fake_driver: Driver of its memory.
    """

    def __init__(self) -> None:
        self.elsewhere: list[Callable[[], object]] = []
        self.taken: int = 0
        self.num_transfers: int = 0
        self.is_busy: threading.Event | None = None
        self.skips: int = 0
        self.fake_driver: FakeDriver = FakeDriver()
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
        # CUDA kernels of torch 2.6 to 2.10 write wrong values into a list of targets in two dtypes.
        assert len({each.dtype for each in targets}) == len({each.dtype for each in sources}) == 1
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

    def driver(self, device: torch.device) -> FakeDriver:
        return self.fake_driver

    def find(self, kind: str, uuid: bytes) -> FakeDriver:
        if (kind, uuid) != (FakeDriver.kind, self.fake_driver.uuid):
            raise ConfigError("this process has no such device")
        return self.fake_driver

    def tensor(self, memory: DeviceMemory) -> torch.Tensor:
        block = (ctypes.c_ubyte * memory.nbytes).from_address(memory.address)
        # The tensor keeps the array, and the array keeps the memory.
        block.memory = memory
        return torch.frombuffer(block, dtype=torch.uint8)

    def _begin(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # torch refuses it, too, but not for a detached one.
        if target.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError("copy into an inference tensor outside of inference mode")
        target, source = target.detach(), source.detach()
        self._begun.append(lambda: target.copy_(source))

    def _do(self, count: int) -> None:
        with self._lock:
            while count and self._begun:
                self._begun.popleft()()
                count -= 1


@contextlib.contextmanager
def deferred(fake: Deferred | None = None) -> Iterator[Deferred]:
    """Use a fake accelerator, or this one, for the models of this process during a block."""
    before, fake = accelerator(), fake or Deferred()
    use_accelerator(fake)
    try:
        yield fake
    finally:
        use_accelerator(before)
