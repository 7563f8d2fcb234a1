"""Access to accelerators; tests use one of their own, whose copies are deferred.

This module must never import asyncio or a transport.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from aiosync.device_memory import CudaDriver, DeviceMemory, Driver, DriverError, uuid_of
from aiosync.errors import ConfigError

__all__ = ["PINNED_NBYTES", "Accelerator", "accelerator", "use_accelerator"]

PINNED_NBYTES = 2**18
"""Number of bytes from which pinning memory pays."""

# Dtypes between which a kernel of CUDA copies many tensors at once; for all others torch raises.
_COPIED_AT_ONCE = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
_COPIED_AT_ONCE |= {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
_COPIED_AT_ONCE |= {torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128}
_COPIED_AT_ONCE |= {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}

# Flags of cudaHostRegister().
_PORTABLE, _READ_ONLY = 1, 8


class HostMemory(Protocol):
    """A block of host memory that an accelerator may register, as a flat buffer is.

    Attributes:
        address: Address of the first byte.
        nbytes: Number of bytes.
        read_only: True if nothing may write to the memory.
        block: Lives as long as the memory.
        pinned: Ends the registration when it is called, or when ``block`` goes; ``None`` if the
            memory is not registered.
    """

    address: int
    nbytes: int
    read_only: bool
    block: Any
    pinned: weakref.finalize[[int, torch.device, int], Any] | None


class Accelerator(Protocol):
    """The calls by which aiosync copies on accelerators.

    Calls queue copies on the current stream of their thread, and may return before these end.
    """

    def has(self, tensor: torch.Tensor) -> bool:
        """Return True if the memory of a tensor is on an accelerator."""

    def synchronize(self, device: torch.device) -> None:
        """Wait for all work that is queued on a device, on any stream."""

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Queue copies of tensors into others on the same device, after the work of the stream.

        All targets have one dtype, and all sources have one: before version 2.11, torch takes the
        dtype of the first target for that of all, and writes wrong values in silence.
        """

    def transfer(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue the copy of a block between device and host, after the work of the stream."""

    def mark(self, device: torch.device) -> Callable[[], object]:
        """Return a function that waits for the work that is on the device's stream now."""

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return uint8 memory of the device, with any content; ConfigError if it has none left."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return uint8 memory of the host that is pinned; RuntimeError if that is impossible."""

    def pin(self, flat: HostMemory, device: torch.device) -> None:
        """Pin a flat buffer for the device, and set its ``pinned``; on failure change nothing."""

    def driver(self, device: torch.device) -> Driver:
        """Return the driver of a device whose memory other processes can map.

        Raises:
            ConfigError: The device cannot share memory.
        """

    def find(self, kind: str, uuid: bytes) -> Driver:
        """Return the driver of this kind of the device with this UUID.

        Raises:
            ConfigError: This process has no such device.
        """

    def tensor(self, memory: DeviceMemory) -> torch.Tensor:
        """Return a block of device memory as a 1-D uint8 tensor, which keeps the block."""


class _Torch:
    """The accelerators that torch knows, on their current streams."""

    def has(self, tensor: torch.Tensor) -> bool:
        return not (tensor.is_cpu or tensor.is_meta)

    def synchronize(self, device: torch.device) -> None:
        _module_of(device).synchronize(device)

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if {targets[0].dtype, sources[0].dtype} <= _COPIED_AT_ONCE:
            torch._foreach_copy_(targets, sources)
        else:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

    def transfer(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self, device: torch.device) -> Callable[[], object]:
        stream = _module_of(device).current_stream(device)
        wait: Callable[[], object] = stream.record_event().synchronize
        return wait

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as exc:
            raise ConfigError(
                f"{device} has no memory left to copy weights through: {nbytes} bytes are needed"
            ) from exc

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def pin(self, flat: HostMemory, device: torch.device) -> None:
        if device.type != "cuda" or flat.pinned is not None:
            return
        flags = _PORTABLE | _READ_ONLY if flat.read_only else _PORTABLE
        with torch.cuda.device(device):
            status = torch.cuda.cudart().cudaHostRegister(flat.address, flat.nbytes, flags)  # type: ignore[no-untyped-call]
            if int(status):
                # The memory is not pinned, and copies stay slow. CUDA reports the error once more
                # at the next call, so that one is made here.
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=device).add_(1)
                return
        flat.pinned = weakref.finalize(flat.block, _unpin, flat.address, device, os.getpid())
        # A registration ends with the process anyway.
        flat.pinned.atexit = False

    def driver(self, device: torch.device) -> Driver:
        if device.type != "cuda" or torch.version.hip is not None:
            raise ConfigError(f"memory='device' needs an NVIDIA GPU, and the weights are {device}")
        return _cuda_driver(torch.cuda.current_device() if device.index is None else device.index)

    def find(self, kind: str, uuid: bytes) -> Driver:
        if kind == CudaDriver.kind and torch.version.hip is None:
            for index in range(torch.cuda.device_count()):
                with contextlib.suppress(DriverError):
                    if uuid_of(index) == uuid:
                        return _cuda_driver(index)
        raise ConfigError(
            f"the weights are in memory of the {kind} device {uuid.hex()}, which this process does "
            "not see: run the worker on the trainer's GPU, or use memory='host'"
        )

    def tensor(self, memory: DeviceMemory) -> torch.Tensor:
        return torch.as_tensor(_Block(memory), device=torch.device("cuda", memory.driver.index))


def _module_of(device: torch.device) -> Any:
    """Return the module of torch whose calls wait for a device."""
    # Calls and events of torch.accelerator set the thread's current device again at their end, also
    # one that this process never used: CUDA then makes a context there, of some hundred MiB, or
    # fails if another process has that GPU for itself. Those of torch.cuda leave it alone.
    return torch.cuda if device.type == "cuda" else torch.accelerator


class _Block:
    """A block of device memory, in the form that torch takes over; the tensor keeps this object."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            # torch takes no memory that is marked as read-only.
            "data": (memory.address, False),
            "version": 3,
        }


@functools.cache
def _cuda_driver(index: int) -> CudaDriver:
    """Return the driver of a CUDA device, always the same object."""
    try:
        return CudaDriver(index, torch.cuda.empty_cache)
    except DriverError as exc:
        raise ConfigError(f"memory='device' does not work here: {exc}; use memory='host'") from exc


def _unpin(address: int, device: torch.device, pid: int) -> None:
    """End the pinning of host memory, in the process that pinned it."""
    # A forked child has no pinned memory to release.
    if os.getpid() == pid:
        with torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


_chosen: Accelerator = _Torch()


def accelerator() -> Accelerator:
    """Return the object through which this process reaches accelerators."""
    return _chosen


def use_accelerator(other: Accelerator) -> None:
    """Replace the object that :func:`accelerator` returns, for tests."""
    global _chosen
    _chosen = other
