"""Names with ``*``, and which dtype the tensors of a name get.

Private to :mod:`aiosync.tensors`. This module must never import asyncio or a transport.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from aiosync.errors import ConfigError
from aiosync.tensors.dtypes import dtype_name

__all__ = ["DtypeRule", "Dtypes", "Pattern", "check_dtypes", "is_name"]

Dtypes: TypeAlias = "torch.dtype | Mapping[str, torch.dtype]"
"""A floating-point dtype for all such tensors, or name patterns to dtypes; the first that fits."""


class Pattern:
    """A name in which each ``*`` stands for any characters, dots and none included.

    Attributes:
        text: The pattern.
        stars: How many ``*`` it has.
    """

    __slots__ = ("_pieces", "stars", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._pieces = text.split("*")
        self.stars = len(self._pieces) - 1

    def __repr__(self) -> str:
        return f"<Pattern {self.text!r}>"

    def match(self, name: str) -> tuple[str, ...] | None:
        """What the stars stand for if the whole name fits; otherwise ``None``.

        From the left on each stands for as little as possible; no backtracking, as names may
        come from far away.
        """
        first, *middle = self._pieces
        if not middle:
            return () if name == first else None
        last = middle.pop()
        position, end = len(first), len(name) - len(last)
        if position > end or not (name.startswith(first) and name.endswith(last)):
            return None
        captured = []
        for piece in middle:
            start = name.find(piece, position, end)
            if start < 0:
                return None
            captured.append(name[position:start])
            position = start + len(piece)
        return (*captured, name[position:end])

    def fill(self, captured: Sequence[str]) -> str:
        """The name with something for each star."""
        parts = [self._pieces[0]]
        for piece, text in zip(self._pieces[1:], captured, strict=True):
            parts += (text, piece)
        return "".join(parts)


def is_name(value: object) -> bool:
    """Whether a value can be a name or a pattern."""
    return type(value) is str and bool(value)


def check_dtypes(value: object, option: str) -> Dtypes | None:
    """Check what somebody gave for dtypes, and copy it if it is a mapping.

    Raises:
        ConfigError: It is something else, or names a dtype that is none of floating point or
            cannot travel.
    """
    if value is None:
        return None
    if isinstance(value, torch.dtype):
        _check_dtype(value, option)
        return value
    if not isinstance(value, Mapping) or not all(map(is_name, value)):
        raise ConfigError(
            f"{option} must be a torch.dtype, or a mapping of name patterns to dtypes, got "
            f"{value!r}"
        )
    for dtype in value.values():
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"{option} names {dtype!r}, which is not a torch.dtype")
        _check_dtype(dtype, option)
    return dict(value)


def _check_dtype(dtype: torch.dtype, option: str) -> None:
    if not dtype.is_floating_point:
        raise ConfigError(
            f"{option} must be a floating-point dtype, got {dtype}: other tensors are not cast"
        )
    dtype_name(dtype)


class DtypeRule:
    """Which dtype each floating-point tensor gets.

    Args:
        dtypes: What :func:`check_dtypes` returned.
    """

    def __init__(self, dtypes: Dtypes) -> None:
        self._for_all = dtypes if isinstance(dtypes, torch.dtype) else None
        listed = {} if isinstance(dtypes, torch.dtype) else dtypes
        self._listed = [(Pattern(text), dtype) for text, dtype in listed.items()]

    @property
    def for_all(self) -> bool:
        """Whether it is a single dtype, and no names were given."""
        return self._for_all is not None

    @property
    def patterns(self) -> list[str]:
        """The patterns, in order; none for a single dtype."""
        return [pattern.text for pattern, _ in self._listed]

    def find(self, names: Sequence[str], now: torch.dtype, used: set[str]) -> torch.dtype:
        """The dtype for a tensor.

        Args:
            names: The names of the tensor; the first pattern that fits one of them counts.
            now: Its dtype, and the result if that is not of floating point or nothing fits.
            used: Gets every pattern that fits, also those that do not count.
        """
        found = self._for_all
        for pattern, dtype in self._listed:
            if any(pattern.match(name) is not None for name in names):
                used.add(pattern.text)
                found = found or dtype
        return now if found is None or not now.is_floating_point else found
