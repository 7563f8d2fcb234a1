"""NVIDIA's virtual memory API, by ctypes on the library that comes with the graphics driver.

All calls are made in the device's primary context, which torch uses, too. No GPU has seen this
module yet; ``tests/gpu`` has tried the same calls on one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p

from aiosync.device_memory.memory import DriverError

__all__ = ["CudaDriver", "uuid_of"]

_LIBRARY = "libcuda.so.1"
# Attributes of a device: virtual memory, and its export to POSIX descriptors.
_VIRTUAL_MEMORY, _POSIX_FDS = 102, 103
# Flags and kinds of the API, all of value 1: memory that stays on its device, a location on a
# device, a handle that is a descriptor. Then the flags of accesses.
_PINNED = _DEVICE = _POSIX_FD = 1
_READ, _READ_WRITE = 1, 3


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
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


class CudaDriver:
    """The driver of one NVIDIA GPU; see :class:`~aiosync.device_memory.Driver`.

    Args:
        index: Index of the GPU, of those that are visible to this process.
        empty_cache: Gives memory back that torch caches.

    Attributes:
        kind: ``"cuda"``.
        index: As given.
        uuid: The GPU's UUID.
        granularity: As for every driver.

    Raises:
        DriverError: There is no such GPU, or it cannot share memory between processes; the text
            says why.
    """

    kind: str = "cuda"

    def __init__(self, index: int, empty_cache: Callable[[], object]) -> None:
        if "microsoft" in os.uname().release.lower():
            raise DriverError("Windows' WSL2 does not share device memory between processes")
        self.uuid: bytes = uuid_of(index)
        self._library = _library()
        self.index: int = index
        self._empty_cache = empty_cache
        device, name = c_int(), ctypes.create_string_buffer(256)
        self._call("cuDeviceGet", byref(device), c_int(index))
        self._call("cuDeviceGetName", name, c_int(len(name)), device)
        if b" MIG " in name.value:
            raise DriverError(f"{name.value.decode()} is a part of a GPU (MIG)")
        for number, what in ((_VIRTUAL_MEMORY, "virtual memory"), (_POSIX_FDS, "descriptors")):
            has = c_int()
            self._call("cuDeviceGetAttribute", byref(has), c_int(number), device)
            if not has.value:
                raise DriverError(f"the GPU, or its driver, has no {what} for device memory")
        self._context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), device)
        self._location = _Location(_DEVICE, index)
        self._properties = _Properties(
            type=_PINNED, handle_types=_POSIX_FD, location=self._location
        )
        size = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(size), byref(self._properties), c_int(0))
        self.granularity: int = size.value

    def create(self, nbytes: int) -> int:
        """Allocate memory of the device; return a handle of it."""
        handle = c_uint64()
        self._call_in_context(
            "cuMemCreate", byref(handle), c_size_t(nbytes), byref(self._properties), c_uint64(0)
        )
        return handle.value

    def export(self, handle: int) -> int:
        """Return a new descriptor of memory, closed in programs that this process starts."""
        fd = c_int()
        self._call_in_context(
            "cuMemExportToShareableHandle",
            byref(fd),
            c_uint64(handle),
            c_int(_POSIX_FD),
            c_uint64(0),
        )
        os.set_inheritable(fd.value, False)
        return fd.value

    def import_fd(self, fd: int) -> int:
        """Return a handle of the memory that a descriptor stands for. The descriptor stays open."""
        handle = c_uint64()
        self._call_in_context(
            "cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), c_int(_POSIX_FD)
        )
        return handle.value

    def release(self, handle: int) -> None:
        """Give a handle of memory back. Mappings and descriptors keep the memory."""
        self._call_in_context("cuMemRelease", c_uint64(handle))

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses of the device for a mapping; return the first."""
        address, any_place = c_uint64(), c_uint64(0)
        self._call_in_context(
            "cuMemAddressReserve",
            byref(address),
            c_size_t(nbytes),
            c_size_t(0),
            any_place,
            c_uint64(0),
        )
        return address.value

    def free(self, address: int, nbytes: int) -> None:
        """Give reserved addresses back."""
        self._call_in_context("cuMemAddressFree", c_uint64(address), c_size_t(nbytes))

    def map(self, address: int, nbytes: int, handle: int, *, writable: bool) -> None:
        """Map memory at reserved addresses, to be read or, if ``writable``, written as well."""
        at, size = c_uint64(address), c_size_t(nbytes)
        self._call_in_context("cuMemMap", at, size, c_size_t(0), c_uint64(handle), c_uint64(0))
        access = _Access(self._location, _READ_WRITE if writable else _READ)
        try:
            self._call_in_context("cuMemSetAccess", at, size, byref(access), c_size_t(1))
        except DriverError:
            self.unmap(address, nbytes)
            raise

    def unmap(self, address: int, nbytes: int) -> None:
        """End a mapping of memory; no work on the device may use it any more."""
        self._call_in_context("cuMemUnmap", c_uint64(address), c_size_t(nbytes))

    def make_room(self) -> int:
        """Give memory back that torch caches; return the number of free bytes of the device."""
        self._empty_cache()
        free, total = c_size_t(), c_size_t()
        self._call_in_context("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def _call_in_context(self, name: str, *args: object) -> None:
        """Make a call in the device's context, which the calling thread need not have."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(name, *args)
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _call(self, name: str, *args: object) -> None:
        _call(self._library, name, *args)


def uuid_of(index: int) -> bytes:
    """Return the UUID of a GPU, by its index of those that are visible to this process.

    Raises:
        DriverError: There is no such GPU, or no driver that tells.
    """
    library, device, uuid = _library(), c_int(), (c_ubyte * 16)()
    _call(library, "cuDeviceGet", byref(device), c_int(index))
    _call(library, "cuDeviceGetUuid_v2", uuid, device)
    return bytes(uuid)


def _library() -> ctypes.CDLL:
    """Load the library of the graphics driver, and initialise it."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as exc:
        raise DriverError(f"there is no NVIDIA driver: {exc}") from exc
    _call(library, "cuInit", c_int(0))
    return library


def _call(library: ctypes.CDLL, name: str, *args: object) -> None:
    """Call a function of the library; raise DriverError if it is missing or fails."""
    function = getattr(library, name, None)
    if function is None:
        raise DriverError(f"{name}: this driver is too old")
    status = function(*args)
    if status:
        text = c_char_p()
        library.cuGetErrorName(status, byref(text))
        raise DriverError(f"{name}: {(text.value or b'unknown error').decode()}")
