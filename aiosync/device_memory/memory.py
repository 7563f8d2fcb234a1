"""A block of a device's memory, from its allocation until no process maps it any more.

The process that allocates a block may write to it. A descriptor of it travels over a Unix socket;
whoever gets that maps the block to read. The descriptor and each mapping keep the memory, so that
it stays when the process that allocated it ends.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol, Self

from aiosync._interrupts import is_interrupt
from aiosync.errors import ConfigError

__all__ = ["DeviceMemory", "Driver", "DriverError", "file_of"]


class DriverError(Exception):
    """Error of a driver; the text has the name of the call and that of the error."""


class Driver(Protocol):
    """The calls that device memory makes of the driver of one device, from any thread.

    Each of them raises :class:`DriverError` if it fails.

    Attributes:
        kind: Name of the interface. Memory of one kind cannot be mapped by another.
        index: Index of the device in this process.
        uuid: 16 bytes that identify the device, in every process of the host.
        granularity: Sizes are multiples of so many bytes.
    """

    kind: str
    index: int
    uuid: bytes
    granularity: int

    def create(self, nbytes: int) -> int:
        """Allocate memory; return a handle of it."""

    def export(self, handle: int) -> int:
        """Return a new descriptor of memory."""

    def import_fd(self, fd: int) -> int:
        """Return a handle of the memory that a descriptor stands for. The descriptor stays open."""

    def release(self, handle: int) -> None:
        """Give a handle back. Mappings and descriptors keep the memory."""

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses; return the first."""

    def free(self, address: int, nbytes: int) -> None:
        """Give reserved addresses back."""

    def map(self, address: int, nbytes: int, handle: int, *, writable: bool) -> None:
        """Map memory at reserved addresses."""

    def unmap(self, address: int, nbytes: int) -> None:
        """End a mapping; no work on the device may use it any more."""

    def make_room(self) -> int:
        """Give memory back that this process caches; return the number of free bytes."""


class DeviceMemory:
    """A mapped block of a device's memory.

    It is given back once nothing refers to this object: whoever views the memory keeps it, and has
    waited for the device by then. A forked child must not touch the block.

    Args:
        driver: The device's driver.
        nbytes: Bytes of the block, a multiple of the driver's granularity.
        handle: Handle of the block; owned from now on.
        shared: True if this process writes to the block, and others map it; False for a block of
            another process, which this one only reads.

    Attributes:
        driver: As given.
        nbytes: As given.
        address: Address of the first byte on the device.
        fd: Descriptor for other processes; -1 unless the block is ``shared``.

    Raises:
        DriverError: The block cannot be mapped.
    """

    def __init__(self, driver: Driver, nbytes: int, handle: int, *, shared: bool) -> None:
        self.driver: Driver = driver
        self.nbytes: int = nbytes
        self.fd: int = -1
        with contextlib.ExitStack() as undo:
            try:
                if shared:
                    self.fd = driver.export(handle)
                    undo.callback(os.close, self.fd)
                self.address: int = driver.reserve(nbytes)
                undo.callback(driver.free, self.address, nbytes)
                driver.map(self.address, nbytes, handle, writable=shared)
                undo.callback(driver.unmap, self.address, nbytes)
            finally:
                # The mapping and the descriptor keep the memory without it.
                driver.release(handle)
            undo.pop_all()
        self._give_back = weakref.finalize(
            self, _give_back, driver, self.address, nbytes, self.fd, file_of(self.fd), os.getpid()
        )
        self._give_back.atexit = False

    def forget(self) -> None:
        """Close the descriptor in a forked child, where views may keep this object."""
        self._give_back.detach()
        _close(self.fd, file_of(self.fd))

    @classmethod
    def allocate(cls, driver: Driver, nbytes: int) -> Self:
        """Allocate a block of at least so many bytes, for this process to write.

        Raises:
            ConfigError: The device has no memory left for it, or cannot share it.
        """
        nbytes = -(-max(nbytes, 1) // driver.granularity) * driver.granularity
        free: int | None = None
        try:
            with contextlib.suppress(DriverError):
                return cls(driver, nbytes, driver.create(nbytes), shared=True)
            free = driver.make_room()
            return cls(driver, nbytes, driver.create(nbytes), shared=True)
        except DriverError as exc:
            left = "" if free is None else f", and {free} are free"
            raise ConfigError(
                f"the device gives no memory for a slot ({exc}): {nbytes} bytes are wanted{left}. "
                "Free some, or use memory='host'"
            ) from exc

    @classmethod
    def open(cls, driver: Driver, fd: int, nbytes: int) -> Self:
        """Map the block that a descriptor of another process stands for, to read.

        Args:
            driver: The driver of the device that has the block.
            fd: The descriptor, which stays open.
            nbytes: Bytes of the block.

        Raises:
            ConfigError: It cannot be mapped here.
        """
        try:
            return cls(driver, nbytes, driver.import_fd(fd), shared=False)
        except DriverError as exc:
            raise ConfigError(
                f"this process cannot map the trainer's device memory ({exc}): use memory='host'"
            ) from exc


def _give_back(
    driver: Driver,
    address: int,
    nbytes: int,
    fd: int,
    file: tuple[int, int] | None,
    pid: int,
) -> None:
    """Close the descriptor and end the mapping of a block to which nothing refers any more."""
    _close(fd, file)
    if os.getpid() == pid:  # a forked child must never call the driver
        try:
            driver.unmap(address, nbytes)
        finally:
            driver.free(address, nbytes)


def _close(fd: int, file: tuple[int, int] | None) -> None:
    """Close a descriptor if it still is one of this file."""
    # If foreign code has closed a descriptor, another file may have its number.
    if fd >= 0 and file is not None and file_of(fd) == file:
        os.close(fd)


def file_of(fd: int) -> tuple[int, int] | None:
    """Return the device and inode of a descriptor's file; ``None`` if the descriptor is closed."""
    try:
        found = os.fstat(fd)
    except OSError as exc:
        if is_interrupt(exc):
            raise
        return None
    return found.st_dev, found.st_ino
