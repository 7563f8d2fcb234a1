"""The promised API as text, one file a module. ``python -m tests.api.snapshot`` writes it.

Who changes the API on purpose writes the files anew in the same commit. Where a name is defined,
and from which private classes a class inherits its methods, does not show.
"""

from __future__ import annotations

import builtins
import enum
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
MODULES = [
    "aiosync",
    "aiosync.errors",
    "aiosync.events",
    "aiosync.integrations.asgi",
    "aiosync.integrations.ray_serve",
    "aiosync.integrations.torchrl",
    "aiosync.integrations.vllm",
    "aiosync.legacy",
    "aiosync.metrics",
    "aiosync.server",
    "aiosync.serving",
    "aiosync.strategy",
    "aiosync.sync",
    "aiosync.testing",
    "aiosync.transports",
    "aiosync.types",
]
# The rest of aiosync.transports can be imported and is not promised.
ONLY = {
    "aiosync.transports": {
        *("TLS", "Credentials", "Received", "Transport", "TransportBackend"),
    }
}
# The objects that do the work of a scheme: the names are promised, what they can do is not.
NAMES_ONLY = {"aiosync.WeightReceiver", "aiosync.WeightSender"}
# Names of `aiosync` that are described where they are defined.
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


def needs_vllm(module: str) -> bool:
    """Whether the module cannot be imported here, as vLLM has an environment of its own."""
    return module.endswith(".vllm") and importlib.util.find_spec("vllm") is None


def describe(module: str) -> str:
    """What a module promises, with a line for each name and each member of a class."""
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
    """A class, with what it has beyond the nearest promised one that it inherits from."""
    base = next((base for base in cls.__mro__[1:] if base in _promised(module)), None)
    yield f"class {name}({'' if base is None else base.__name__})"
    known = set() if base is None or base.__module__ == "builtins" else set(_members(base))
    yield from (line for line in _members(cls) if line not in known)


@functools.cache
def _promised(module: str) -> set[type]:
    """Classes that a class of this module may be said to inherit from."""
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
        value = getattr(owner, name, None)  # bound: class methods, descriptors of methods
    if inspect.isroutine(value) or (callable(value) and not inspect.isclass(value)):
        kind = "async def" if inspect.iscoroutinefunction(value) else "def"
        return f"{kind} {name}{_signature(value)}"
    return name


def _signature(value: Any) -> str:
    try:
        return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
    except (TypeError, ValueError):  # a protocol, or built in
        return "(...)"


def main() -> None:
    """Write the files."""
    for module in MODULES:
        if needs_vllm(module):
            sys.stderr.write(f"{module}: vllm is not installed, left as it is\n")
        else:
            (FOLDER / f"{module}.txt").write_text(describe(module))


if __name__ == "__main__":
    main()
