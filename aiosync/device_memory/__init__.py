"""Memory of a device that several processes of one host map, without torch.

:class:`DeviceMemory` is one block, which one process writes and others read. It asks a
:class:`Driver`, which has the calls that differ between kinds of devices: ``cuda`` has those of
NVIDIA's. Must not import torch, asyncio or anything else of aiosync but the errors.
"""

from __future__ import annotations

from aiosync.device_memory.cuda import CudaDriver, uuid_of
from aiosync.device_memory.memory import DeviceMemory, Driver, DriverError, file_of

__all__ = ["CudaDriver", "DeviceMemory", "Driver", "DriverError", "file_of", "uuid_of"]
