"""Names of a package that are imported when they are first used, as PEP 562 has it.

Modules that need torch take a second to import, and a command line answers sooner. Must not import
anything else of aiosync.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["lazily"]


def lazily(package: str, *homes: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: Name of the package. Its ``__all__`` lists the names that it exports, now or later.
        homes: Modules that define the names which the package does not have yet; they are tried in
            this order. Homes below the package are attributes of it, too.
    """

    def find(name: str) -> Any:
        module = sys.modules[package]
        if f"{package}.{name}" in homes:
            return importlib.import_module(f"{package}.{name}")
        for home in homes if name in module.__all__ else ():
            value = getattr(importlib.import_module(home), name, module)
            if value is not module:
                setattr(module, name, value)
                return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=module)

    def names() -> list[str]:
        module = sys.modules[package]
        return sorted({*vars(module), *module.__all__})

    return find, names
