"""Schemes by the back-end names that TorchRL uses.

Must not import a concrete scheme: those register themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

from aiosync.errors import ConfigError
from aiosync.schemes.base import WeightSyncScheme

__all__ = [
    "WeightSyncBackend",
    "backend_names",
    "register_weight_sync_backend",
    "scheme_class",
    "scheme_from_backend",
]

WeightSyncBackend: TypeAlias = Literal[
    "none",
    "direct",
    "shared",
    "thread",
    "process",
    "multiprocessing",
    "distributed",
    "rpc",
    "ray",
    "tcp",
]
"""Names of back-ends; :func:`register_weight_sync_backend` adds others, of which no type tells."""

_ALIASES = {"direct": "none", "thread": "shared", "multiprocessing": "process"}
_known: dict[str, type[WeightSyncScheme]] = {}
_Scheme = TypeVar("_Scheme", bound=type[WeightSyncScheme])


def register_weight_sync_backend(name: str) -> Callable[[_Scheme], _Scheme]:
    """Class decorator that makes a scheme known under a back-end name.

    Raises:
        ConfigError: Another scheme has that name.
    """

    def register(cls: _Scheme) -> _Scheme:
        if name in _ALIASES or _known.get(name, cls) is not cls:
            raise ConfigError(f"a weight-sync backend named {name!r} exists already")
        _known[name], cls._backend = cls, name
        return cls

    return register


def backend_names() -> list[str]:
    """Every name and alias, sorted."""
    return sorted({*_known, *_ALIASES})


def scheme_from_backend(backend: str, **options: Any) -> WeightSyncScheme:
    """Construct the scheme of a back-end name.

    Args:
        backend: For example ``"shared"``, ``"process"`` or ``"none"``.
        **options: For the scheme's constructor.

    Raises:
        ConfigError: There is none with that name.
    """
    return scheme_class(backend)(**options)


def scheme_class(backend: str) -> type[WeightSyncScheme]:
    """The class that a back-end name stands for.

    Raises:
        ConfigError: There is none with that name.
    """
    cls = _known.get(_ALIASES.get(backend, backend))
    if cls is None:
        raise ConfigError(
            f"Unsupported weight-sync backend {backend!r}. Expected one of {backend_names()}"
        )
    return cls
