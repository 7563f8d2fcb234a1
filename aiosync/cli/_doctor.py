"""What ``aiosync doctor`` looks at: versions and what this machine offers aiosync.

Every check is tried for real (a memfd is made and mapped, a socket pair passes a byte and a
descriptor). This module must never import typer or rich; third-party packages are looked up,
and only torch and aiosync are imported.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import mmap
import os
import platform
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Check", "examine"]

_REQUIRED = ("torch", "tensordict", "anyio", "msgpack", "numpy")
_OPTIONAL = (
    "uvloop",
    "typer",
    "rich",
    "safetensors",
    "gymnasium",
    "matplotlib",
    "torchrl",
    "ray",
    "vllm",
)


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        name: What was looked at.
        ok: Whether it is as it should be; ``None`` when it is only worth knowing.
        text: What was found, and what to do if it is not ok.
    """

    name: str
    ok: bool | None
    text: str


def examine() -> list[Check]:
    """Run every check, in the order in which to read them."""
    checks = [
        Check("python", sys.version_info >= (3, 11), f"{platform.python_version()}"),
        Check("platform", None, f"{platform.system()} {platform.release()} {platform.machine()}"),
        Check("aiosync", True, _aiosync_version()),
    ]
    for package in _REQUIRED:
        version = _installed(package)
        checks.append(Check(package, version is not None, version or f"pip install {package}"))
    checks += [
        Check(package, None, _installed(package) or "not installed (optional)")
        for package in _OPTIONAL
    ]
    checks += [
        _try("event loop", _event_loop),
        _try("cores", _cores, informative=True),
        _try("torch threads", _torch_threads, informative=True),
        _try("memfd", _memfd, fatal=sys.platform == "linux"),
        _try("/dev/shm", _dev_shm, informative=True),
        _try("unix sockets", _unix_sockets),
        _try("loopback TCP", _loopback, informative=True),
        _try("open files", _open_files, informative=True),
    ]
    return checks


def _try(
    name: str, check: Callable[[], str], *, informative: bool = False, fatal: bool = True
) -> Check:
    try:
        text = check()
    except Exception as exc:  # noqa: BLE001  # the reader of the report sees the error
        failed = None if informative or not fatal else False
        return Check(name, failed, f"{type(exc).__name__}: {exc}")
    return Check(name, None if informative else True, text)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _aiosync_version() -> str:
    from aiosync._version import __version__

    return __version__


def _event_loop() -> str:
    import aiosync

    async def name() -> str:
        loop = asyncio.get_running_loop()
        return f"{type(loop).__module__}.{type(loop).__qualname__}"

    found = aiosync.run(name())
    return found if found.startswith("uvloop") else f"{found}; uvloop is faster: pip install uvloop"


def _cores() -> str:
    from aiosync._cores import usable_cores

    return f"{usable_cores()} usable of {os.cpu_count()}"


def _torch_threads() -> str:
    import torch

    return (
        f"{torch.get_num_threads()} in this process; "
        "call torch.set_num_threads(1) in workers that share cores"
    )


def _memfd() -> str:
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    fd = os.memfd_create("aiosync-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE) as mapped:
            mapped[:4] = b"aios"
            if os.pread(fd, 4, 0) != b"aios":
                raise OSError("a mapped memfd does not show what was written to it")
    finally:
        os.close(fd)
    return "anonymous shared memory works; nothing stays behind when a process is killed"


def _dev_shm() -> str:
    stats = os.statvfs("/dev/shm")
    free = stats.f_bavail * stats.f_frsize
    return f"{free / 2**30:.1f} GiB free (not used by aiosync, but by others on this machine)"


def _unix_sockets() -> str:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        left.settimeout(5.0)
        right.settimeout(5.0)
        read_end, write_end = os.pipe()
        try:
            socket.send_fds(left, [b"x"], [write_end])
            data, received, _, _ = socket.recv_fds(right, 1, 1)
            for fd in received:
                os.close(fd)
            if data != b"x" or len(received) != 1:
                raise OSError("a descriptor sent through a socket pair did not arrive")
        finally:
            os.close(read_end)
            os.close(write_end)
    return "data and descriptors pass"


def _loopback() -> str:
    with socket.socket() as server:
        server.settimeout(5.0)
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        with socket.create_connection(server.getsockname(), timeout=5.0) as client:
            accepted, _ = server.accept()
            with accepted:
                accepted.settimeout(5.0)
                client.sendall(b"x")
                if accepted.recv(1) != b"x":
                    raise OSError("a byte sent over loopback did not arrive")
    return "connects"


def _open_files() -> str:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"limit {soft} (hard {hard})"
