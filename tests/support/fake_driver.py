"""A driver of device memory that is a file in the memory of the host.

It has the calls of NVIDIA's virtual memory API, with their rules: handles are given back, sizes are
multiples of a granule, addresses are reserved before memory is mapped there, and a write through a
mapping to read ends the process. Any other use of it fails.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os

from aiosync.device_memory import DriverError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_NONE, _READ, _READ_WRITE = 0, 1, 3
_SHARED, _ANYWHERE, _FIXED = 1, 0x4022, 16  # the second: private, anonymous, without swap


def _map(address: int | None, nbytes: int, access: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, nbytes, access, flags, fd, 0)
    if found in (None, 2**64 - 1):
        raise DriverError(f"mmap: {os.strerror(ctypes.get_errno())}")
    return int(found)


class FakeDriver:
    """The driver of a fake device.

    Args:
        uuid: UUID of the device.

    Attributes:
        left: Number of calls that succeed before one fails, by the name of the call.
        room: Free bytes of the device; ``None`` for no limit.
        cached: Bytes that :meth:`make_room` adds to them, once.
        handles: Descriptors of the files that handles stand for.
        mapped: Bytes of each mapping, by its address.
        reserved: Bytes of each range of addresses.
        strays: Calls in a forked child.
    """

    kind = "fake"
    index = 0
    granularity = 2**16

    def __init__(self, uuid: bytes = b"a fake device!!!") -> None:
        self.uuid = uuid
        self.left: dict[str, int] = {}
        self.room: int | None = None
        self.cached = 0
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.strays: list[str] = []
        self._pid = os.getpid()
        self._next_handle = itertools.count(1)

    def _begin(self, call: str) -> None:
        if os.getpid() != self._pid:
            self.strays.append(call)
            raise AssertionError(f"{call} in a forked child")
        self.left[call] = left = self.left.get(call, 2**30) - 1
        if left < 0:
            raise DriverError(f"{call}: FAKE_ERROR")

    def create(self, nbytes: int) -> int:
        self._begin("create")
        assert nbytes > 0 and nbytes % self.granularity == 0
        if self.room is not None:
            if nbytes > self.room:
                raise DriverError("create: FAKE_ERROR_OUT_OF_MEMORY")
            self.room -= nbytes
        fd = os.memfd_create("fake device memory", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return self._handle_of(fd)

    def _handle_of(self, fd: int) -> int:
        handle = next(self._next_handle)
        self.handles[handle] = fd
        return handle

    def export(self, handle: int) -> int:
        self._begin("export")
        return os.dup(self.handles[handle])

    def import_fd(self, fd: int) -> int:
        self._begin("import_fd")
        try:
            is_ours = "fake device memory" in os.readlink(f"/proc/self/fd/{fd}")
            if not is_ours:
                raise OSError(errno.EINVAL, "not memory of a device")
            return self._handle_of(os.dup(fd))
        except OSError as exc:
            raise DriverError(f"import_fd: {exc.strerror}") from exc

    def release(self, handle: int) -> None:
        self._begin("release")
        os.close(self.handles.pop(handle))

    def reserve(self, nbytes: int) -> int:
        self._begin("reserve")
        address = _map(None, nbytes, _NONE, _ANYWHERE, -1)
        self.reserved[address] = nbytes
        return address

    def free(self, address: int, nbytes: int) -> None:
        self._begin("free")
        assert address not in self.mapped and self.reserved.pop(address) == nbytes
        _libc.munmap(address, nbytes)

    def map(self, address: int, nbytes: int, handle: int, *, writable: bool) -> None:
        self._begin("map")
        assert self.reserved[address] == nbytes and address not in self.mapped
        fd = self.handles[handle]
        if os.fstat(fd).st_size < nbytes:
            raise DriverError("map: FAKE_ERROR_INVALID_VALUE")
        _map(address, nbytes, _READ_WRITE if writable else _READ, _SHARED | _FIXED, fd)
        self.mapped[address] = nbytes

    def unmap(self, address: int, nbytes: int) -> None:
        self._begin("unmap")
        assert self.mapped.pop(address) == nbytes
        _map(address, nbytes, _NONE, _ANYWHERE | _FIXED, -1)

    def make_room(self) -> int:
        self._begin("make_room")
        if self.room is None:
            return 2**40
        self.room, self.cached = self.room + self.cached, 0
        return self.room
