"""``aiosync doctor``: versions, and what this machine offers aiosync.

Every check is tried for real: a memfd is made and mapped, a socket pair passes a byte and a
descriptor. Third-party packages are looked up, and only torch and aiosync are imported.
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

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aiosync._cores import usable_cores
from aiosync._run import run
from aiosync._version import __version__

__all__ = ["doctor"]

_REQUIRED = ("torch", "tensordict", "anyio", "msgpack", "numpy")
_OPTIONAL = (
    *("uvloop", "typer", "rich", "safetensors", "gymnasium", "matplotlib"),
    *("torchrl", "ray", "vllm"),
)


def doctor() -> None:
    """Show versions and check what aiosync needs from this machine.

    Exits with status 1 if something that aiosync needs is missing.
    """
    console = Console(highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    failed = []
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    checks: list[tuple[str, bool, Callable[[], str]]] = [
        ("python", True, platform.python_version),
        ("platform", False, lambda: system),
        ("aiosync", True, lambda: __version__),
        *((package, True, _version_of(package)) for package in _REQUIRED),
        *((package, False, _version_of(package)) for package in _OPTIONAL),
        ("event loop", True, _event_loop),
        ("cores", False, lambda: f"{usable_cores()} usable of {os.cpu_count()}"),
        ("torch threads", False, _torch_threads),
        ("memfd", sys.platform == "linux", _memfd),
        ("unix sockets", True, _unix_sockets),
        ("open files", False, _open_files),
    ]
    for name, needed, check in checks:
        mark = "[green]ok[/green]" if needed else ""
        try:
            text = check()
        except Exception as exc:  # noqa: BLE001  # the reader of the report sees the error
            text = f"{type(exc).__name__}: {exc}"
            if needed:
                mark = "[red]FAILED[/red]"
                failed.append(name)
        table.add_row(mark, name, escape(text))
    console.print(table)
    if failed:
        console.print(f"Failed checks: {', '.join(failed)}.")
        raise typer.Exit(1)
    console.print("Everything that aiosync needs is available.")


def _version_of(package: str) -> Callable[[], str]:
    def look() -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package in _OPTIONAL:
                return "not installed"
            raise

    return look


def _event_loop() -> str:
    async def name() -> str:
        loop = asyncio.get_running_loop()
        return f"{type(loop).__module__}.{type(loop).__qualname__}"

    found = run(name())
    return found if found.startswith("uvloop") else f"{found}; uvloop is faster: pip install uvloop"


def _torch_threads() -> str:
    import torch

    advice = "call torch.set_num_threads(1) in workers that share cores"
    return f"{torch.get_num_threads()} in this process; {advice}"


def _memfd() -> str:
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


def _unix_sockets() -> str:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right, open(os.devnull, "rb") as file:
        right.settimeout(5.0)
        socket.send_fds(left, [b"x"], [file.fileno()])
        data, received, _, _ = socket.recv_fds(right, 1, 1)
        for fd in received:
            os.close(fd)
        if data != b"x" or len(received) != 1:
            raise OSError("a descriptor sent through a socket pair did not arrive")
    return "data and descriptors pass"


def _open_files() -> str:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"limit {soft} (hard {hard})"
