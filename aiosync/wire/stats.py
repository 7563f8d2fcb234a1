"""The statistics in a status, as plain values. Must never import asyncio, anyio or torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Literal, get_args, get_origin, get_type_hints

from aiosync.errors import RemoteProtocolError
from aiosync.events import SyncStats, WorkerStats

__all__ = ["stats_from", "stats_values"]

# Errors that values of a peer cause where they do not fit.
_ILLEGAL = (ValueError, TypeError, KeyError, AttributeError)
_hints = functools.cache(get_type_hints)


def stats_values(stats: Iterable[SyncStats]) -> list[dict[str, Any]]:
    """Return statistics as the plain values that travel in a status."""
    return [asdict(each) for each in stats]


def stats_from(values: Any) -> tuple[SyncStats, ...]:
    """Read statistics that :func:`stats_values` made; fields of newer releases are left out.

    Args:
        values: The values that a peer sent. The limits of the peer's header bound their size.

    Raises:
        RemoteProtocolError: A field is missing, or its value does not fit its annotation.
    """
    try:
        found: tuple[SyncStats, ...] = _read(tuple[SyncStats, ...], values)
    except _ILLEGAL as exc:
        raise RemoteProtocolError(f"illegal statistics: {str(exc)[:300]}") from exc
    return found


def _read(kind: Any, value: Any) -> Any:
    """Check a value from a peer against the annotation ``kind``, and return it as that type."""
    origin, of = get_origin(kind), get_args(kind)
    if kind in (SyncStats, WorkerStats):
        fields = _hints(kind)
        known = {name: each for name, each in value.items() if name in fields}
        return kind(**{name: _read(fields[name], each) for name, each in known.items()})
    if origin is tuple:
        if type(value) is not list:
            raise TypeError(f"a {type(value).__name__} instead of a list")
        return tuple(_read(of[0], each) for each in value)
    if origin is Mapping:
        return {_read(of[0], name): _read(of[1], each) for name, each in value.items()}
    if origin is Literal:
        if value not in of:
            raise ValueError(f"{value!r:.40} is none of {', '.join(of)}")
        return value
    return _read_plain(kind, value)


def _read_plain(kind: Any, value: Any) -> Any:
    """Check a string or a number of at least 0, and return it; an int may stand for a float."""
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} instead of a {kind.__name__}")
    if kind is not str and not 0 <= value < math.inf:
        raise ValueError(f"{value} is no count and no time")
    return value
