"""CUDA's virtual memory API by ctypes: memory that other processes map from a file descriptor."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p

import torch

VMM_SUPPORTED, FD_SUPPORTED, FABRIC_SUPPORTED = 102, 103, 128
READ, READ_WRITE = 1, 3
_POSIX_FD = _DEVICE = _PINNED = 1
_DISABLE_TIMING = 2
_NOT_READY = 600


class DriverError(Exception):
    """Error of a driver call; the text has the name of the call and that of the error."""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Prop(ctypes.Structure):
    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


class Driver:
    """Calls of ``libcuda.so.1`` in torch's primary context of a device.

    Args:
        index: Index of the device.
    """

    def __init__(self, index: int = 0) -> None:
        # torch makes the context current.
        torch.zeros(1, device=f"cuda:{index}")
        self._lib = ctypes.CDLL("libcuda.so.1")
        self._device = c_int()
        self._call("cuDeviceGet", byref(self._device), c_int(index))
        self.context = c_void_p()
        self._call("cuCtxGetCurrent", byref(self.context))
        location = _Location(_DEVICE, index)
        self._prop = _Prop(type=_PINNED, handle_types=_POSIX_FD, location=location)
        self._location = location

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._lib, name)(*args)
        if status:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(status, byref(text))
            raise DriverError(f"{name}: {(text.value or b'?').decode()} ({status})")

    def attribute(self, number: int) -> int:
        """Return an attribute of the device."""
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), c_int(number), self._device)
        return value.value

    def version(self) -> int:
        """Return the CUDA version of the driver, such as 13000."""
        value = c_int()
        self._call("cuDriverGetVersion", byref(value))
        return value.value

    def granularity(self, recommended: bool = False) -> int:
        """Return the number of bytes that sizes have to be multiples of."""
        value = c_size_t()
        option = c_int(int(recommended))
        self._call("cuMemGetAllocationGranularity", byref(value), byref(self._prop), option)
        return value.value

    def free_nbytes(self) -> int:
        """Return the number of free bytes of the device."""
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def create(self, nbytes: int) -> int:
        """Allocate memory of the device; return its handle."""
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), c_size_t(nbytes), byref(self._prop), c_uint64(0))
        return handle.value

    def export(self, handle: int) -> int:
        """Return a new file descriptor for memory."""
        fd = c_int()
        self._call(
            "cuMemExportToShareableHandle",
            byref(fd),
            c_uint64(handle),
            c_int(_POSIX_FD),
            c_uint64(0),
        )
        return fd.value

    def open(self, fd: int) -> int:
        """Return a handle for memory that another process exported; the descriptor stays open."""
        handle = c_uint64()
        self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), c_int(_POSIX_FD))
        return handle.value

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses; return the first."""
        address = c_uint64()
        self._call(
            "cuMemAddressReserve",
            byref(address),
            c_size_t(nbytes),
            c_size_t(0),
            c_uint64(0),
            c_uint64(0),
        )
        return address.value

    def map(self, address: int, nbytes: int, handle: int, access: int) -> None:
        """Map memory at reserved addresses, with the given access."""
        self._call(
            "cuMemMap",
            c_uint64(address),
            c_size_t(nbytes),
            c_size_t(0),
            c_uint64(handle),
            c_uint64(0),
        )
        wanted = _Access(self._location, access)
        self._call(
            "cuMemSetAccess", c_uint64(address), c_size_t(nbytes), byref(wanted), c_size_t(1)
        )

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap memory from its addresses, which stay reserved."""
        self._call("cuMemUnmap", c_uint64(address), c_size_t(nbytes))

    def release(self, handle: int) -> None:
        """Release a handle; its memory is freed when no handle, mapping and descriptor is left."""
        self._call("cuMemRelease", c_uint64(handle))

    def unreserve(self, address: int, nbytes: int) -> None:
        """Free reserved addresses."""
        self._call("cuMemAddressFree", c_uint64(address), c_size_t(nbytes))

    def new_event(self) -> c_void_p:
        """Make an event without timing."""
        event = c_void_p()
        self._call("cuEventCreate", byref(event), c_int(_DISABLE_TIMING))
        return event

    def record_all(self, event: c_void_p) -> None:
        """Record an event after all work that is queued in the context, on every stream."""
        self._call("cuCtxRecordEvent", self.context, event)

    def is_done(self, event: c_void_p) -> bool:
        """Return True if the event has happened."""
        status = self._lib.cuEventQuery(event)
        if status not in (0, _NOT_READY):
            raise DriverError(f"cuEventQuery: {status}")
        return status == 0

    def wait(self, event: c_void_p) -> None:
        """Wait until the event has happened."""
        self._call("cuEventSynchronize", event)


class Mapping:
    """Memory of a device with an address in this process.

    Args:
        driver: Driver of this process.
        nbytes: Size, a multiple of the granularity.
        fd: Descriptor from another process; ``None`` to allocate memory.
        access: :data:`READ` or :data:`READ_WRITE`.
    """

    def __init__(
        self, driver: Driver, nbytes: int, fd: int | None = None, access: int = READ_WRITE
    ) -> None:
        self.driver, self.nbytes = driver, nbytes
        self.handle = driver.create(nbytes) if fd is None else driver.open(fd)
        self.address = driver.reserve(nbytes)
        driver.map(self.address, nbytes, self.handle, access)
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def tensor(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return all of the memory as a tensor, which keeps this object alive."""
        return torch.as_tensor(self, device="cuda").view(dtype)

    def close(self) -> None:
        """Unmap and release the memory; no tensor of it may be used any more."""
        self.driver.unmap(self.address, self.nbytes)
        self.driver.release(self.handle)
        self.driver.unreserve(self.address, self.nbytes)
