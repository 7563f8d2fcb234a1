"""Where a run takes place: what the machine has, and the versions of what is compared.

Must not import torch, torchrl, ray, typer or rich: versions are looked up, not imported.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform

from aiosync._cores import usable_cores
from aiosync._version import __version__
from aiosync.bench._results import Machine

__all__ = ["machine"]

_PACKAGES = ("torch", "uvloop", "torchrl", "ray")


def machine() -> Machine:
    """Look at this machine. What is not installed has no version."""
    versions = {"python": platform.python_version(), "aiosync": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Machine(
        cores=usable_cores(),
        memory_gib=_memory_gib(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions=versions,
    )


def _memory_gib() -> float:
    try:
        nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):  # a system that does not say
        return 0.0
    return round(nbytes / 2**30, 1)
