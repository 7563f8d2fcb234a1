"""The promised API as text, one file a module. ``python -m tests.api.snapshot`` writes it.

A commit that changes the API on purpose also has the new files. They do not show in which module a
name is defined, nor from which private classes a class inherits its methods.
"""

from __future__ import annotations

import builtins
import collections.abc
import enum
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
MODULES = [
    "aiosync",
    "aiosync.errors",
    "aiosync.events",
    "aiosync.integrations.asgi",
    "aiosync.integrations.four_phase",
    "aiosync.integrations.lora",
    "aiosync.integrations.nemo_rl",
    "aiosync.integrations.ray_serve",
    "aiosync.integrations.rllib",
    "aiosync.integrations.torchrl",
    "aiosync.integrations.transformers",
    "aiosync.integrations.trl",
    "aiosync.integrations.verl",
    "aiosync.integrations.vllm",
    "aiosync.legacy",
    "aiosync.metrics",
    "aiosync.server",
    "aiosync.serving",
    "aiosync.strategy",
    "aiosync.sync",
    "aiosync.testing",
    "aiosync.testing.sim",
    "aiosync.transports",
    "aiosync.types",
]
# The other names of aiosync.transports can be imported, but they are not promised.
ONLY = {
    "aiosync.transports": {
        *("TLS", "Credentials", "Received", "Transport", "TransportBackend"),
    }
}
# These objects do the work of a scheme. Their names are promised, their members are not.
NAMES_ONLY = {"aiosync.WeightReceiver", "aiosync.WeightSender"}
# Names of `aiosync` that these modules define are described in the files of these modules.
HOMES = [
    "aiosync.errors",
    "aiosync.events",
    "aiosync.types",
    "aiosync.strategy",
    "aiosync.transports",
]
OPERATORS = {
    *("__aenter__", "__aexit__", "__aiter__", "__anext__", "__await__", "__call__"),
    *("__contains__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__", "__next__"),
}


def lacks_framework(module: str) -> bool:
    """Return True if the module needs RLlib, verl or vLLM, and this environment lacks it."""
    needed = {"rllib": "tree", "verl": "verl", "vllm": "vllm"}.get(module.rpartition(".")[2])
    return needed is not None and importlib.util.find_spec(needed) is None


def describe(module: str) -> str:
    """Return the promises of a module, a line for each name and each member of a class."""
    return "\n".join(_lines(module)) + "\n"


def _lines(module: str) -> Iterator[str]:
    names = importlib.import_module(module).__all__
    for name in sorted(ONLY.get(module, names)):
        home = _home(module, name)
        value = getattr(importlib.import_module(module), name)
        if home is not None:
            yield f"{name}: as in {home}"
        elif f"{module}.{name}" in NAMES_ONLY:
            yield f"class {name}"
        elif inspect.isclass(value):
            yield from _class_lines(name, value, module)
        else:
            yield _member(name, value)


def _home(module: str, name: str) -> str | None:
    for home in HOMES:
        promised = ONLY.get(home) or set(importlib.import_module(home).__all__)
        if module == "aiosync" and name in promised:
            return home
    return None


def _class_lines(name: str, cls: type, module: str) -> Iterator[str]:
    """Yield a class and its members, without those of the nearest promised base class."""
    base = next((base for base in cls.__mro__[1:] if base in _promised(module)), None)
    yield f"class {name}({'' if base is None else base.__name__})"
    known = set() if base is None or base.__module__ == "builtins" else set(_members(base))
    yield from (line for line in _members(cls) if line not in known)


@functools.cache
def _promised(module: str) -> set[type]:
    """Return the classes that the text may name as a base of a class in this module."""
    found = {value for value in vars(builtins).values() if inspect.isclass(value)} - {object}
    for name in {"aiosync", *HOMES, module}:
        loaded = importlib.import_module(name)
        values = [getattr(loaded, item) for item in ONLY.get(name, loaded.__all__)]
        found |= {value for value in values if inspect.isclass(value)}
    return found


def _members(cls: type) -> Iterator[str]:
    if issubclass(cls, enum.Enum):
        yield from (f"    {member.name} = {member.value!r}" for member in cls)
        return
    if not issubclass(cls, BaseException) or "__init__" in vars(cls):
        yield f"    __init__{_signature(cls)}"
    ours = [base for base in reversed(cls.__mro__) if base.__module__.startswith("aiosync")]
    members: dict[str, Any] = {}
    for base in ours:
        members |= dict.fromkeys(vars(base).get("__annotations__", ()))
        members |= vars(base)
    for member in sorted(members):
        if not member.startswith("_") or member in OPERATORS:
            static = inspect.getattr_static(cls, member, None)
            yield f"    {_member(member, static, cls)}"


def _member(name: str, value: Any, owner: type | None = None) -> str:
    if isinstance(value, property):
        returns = inspect.signature(value.fget).return_annotation if value.fget else "Any"
        return f"{name}: {returns}{'' if value.fset is None else ' (settable)'}"
    if owner is not None and not inspect.isfunction(value) and not inspect.isdatadescriptor(value):
        # Class methods and descriptors of methods show their signature only when they are bound.
        value = getattr(owner, name, None)
    if inspect.isroutine(value) or (callable(value) and not inspect.isclass(value)):
        kind = "async def" if inspect.iscoroutinefunction(value) else "def"
        return f"{kind} {name}{_signature(value)}"
    return name


def _signature(value: Any) -> str:
    if typing.get_origin(value) is collections.abc.Callable:
        # Some versions of Python have a signature for an alias of a type, and some have none.
        return "(...)"
    try:
        return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
    except (TypeError, ValueError):
        # A protocol or a built-in has no signature.
        return "(...)"


def main() -> None:
    """Write the files."""
    for module in MODULES:
        if lacks_framework(module):
            sys.stderr.write(f"{module}: its framework is not installed, left as it is\n")
        else:
            (FOLDER / f"{module}.txt").write_text(describe(module))


if __name__ == "__main__":
    main()
