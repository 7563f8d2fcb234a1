"""Taking tensors apart and joining them: one entry of a map's ``split`` or ``merge``.

Private to :mod:`aiosync.tensors`. This module must never import asyncio or a transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.tensors._casting import copy_plain
from aiosync.tensors._patterns import Pattern, is_name

__all__ = ["Merge", "Split", "check_stars"]


class Split(NamedTuple):
    """One fused tensor and the parts that views of it become."""

    fused: Pattern
    parts: tuple[tuple[Pattern, int], ...]
    dim: int

    @classmethod
    def of(cls, text: str, spec: Any) -> Split:
        """Check what the user wrote."""
        sizes, dim = _with_dim(spec, f"split of {text!r}")
        fused = Pattern(text)
        if not isinstance(sizes, Mapping) or len(sizes) < 2 or not all(map(is_name, sizes)):
            raise ConfigError(f"split of {text!r} must map two or more part patterns to sizes")
        values = list(sizes.values())
        if not all(type(size) is int and size >= -1 for size in values) or values.count(-1) > 1:
            raise ConfigError(
                f"split of {text!r} needs sizes of at least 0, and -1 at most once, got {values}"
            )
        for part in sizes:
            check_stars(fused, part, "split")
        return cls(fused, tuple((Pattern(part), size) for part, size in sizes.items()), dim)

    def apply(
        self, name: str, captured: Sequence[str], tensor: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The parts of a tensor, as views.

        Raises:
            ManifestMismatch: The sizes do not fit.
        """
        dim = _dimension(name, tensor, self.dim)
        sizes = [size for _, size in self.parts]
        there = tensor.shape[dim]
        left = there - sum(size for size in sizes if size >= 0)
        sizes = [left if size == -1 else size for size in sizes]
        if left < 0 or sum(sizes) != there:
            raise ManifestMismatch(
                mismatched={
                    name: f"dimension {self.dim} has {there} elements, and the parts of its split "
                    f"add up to {sum(sizes)}"
                },
                hint="Correct the sizes in split.",
            )
        for (part, _), view in zip(
            self.parts, torch.split(tensor.detach(), sizes, dim), strict=True
        ):
            yield part.fill(captured), view


class Merge(NamedTuple):
    """The parts of one fused tensor, in order."""

    fused: Pattern
    parts: tuple[Pattern, ...]
    dim: int

    @classmethod
    def of(cls, text: str, spec: Any) -> Merge:
        """Check what the user wrote."""
        parts, dim = _with_dim(spec, f"merge of {text!r}")
        fused = Pattern(text)
        valid = isinstance(parts, Sequence) and not isinstance(parts, str)
        if not valid or len(parts) < 2 or not all(map(is_name, parts)):
            raise ConfigError(f"merge of {text!r} must list two or more part patterns")
        if len(set(parts)) != len(parts):
            raise ConfigError(f"merge of {text!r} lists a part twice")
        for part in parts:
            check_stars(fused, part, "merge")
        return cls(fused, tuple(map(Pattern, parts)), dim)

    def find(self, name: str) -> tuple[int, tuple[str, ...]] | None:
        """Which part a name is, and what the stars stand for."""
        for index, part in enumerate(self.parts):
            captured = part.match(name)
            if captured is not None:
                return index, captured
        return None

    def apply(
        self,
        name: str,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        dtype_of: Callable[[str, torch.dtype], torch.dtype],
    ) -> torch.Tensor:
        """The parts as one new tensor.

        Raises:
            ManifestMismatch: They do not fit together.
        """
        first = tensors[0]
        dim = _dimension(names[0], first, self.dim)
        shape = list(first.shape)
        mismatched = {}
        for other, tensor in zip(names[1:], tensors[1:], strict=True):
            expected = [*shape[:dim], tensor.shape[dim] if dim < tensor.dim() else 0]
            expected += shape[dim + 1 :]
            if list(tensor.shape) != expected or tensor.dtype is not first.dtype:
                mismatched[other] = (
                    f"is {_look(tensor)}, and {names[0]} is {_look(first)}: they cannot be merged "
                    f"into {name} along dimension {self.dim}"
                )
        if mismatched:
            raise ManifestMismatch(mismatched=mismatched, hint="Correct merge.")
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
        fused = torch.empty(shape, dtype=dtype_of(name, first.dtype), device=first.device)
        for target, tensor in zip(
            torch.split(fused, [tensor.shape[dim] for tensor in tensors], dim), tensors, strict=True
        ):
            copy_plain(target, tensor)
        return fused


def check_stars(source: Pattern, made: str, option: str) -> None:
    """Raise unless both have the same number of stars."""
    if made.count("*") != source.stars:
        raise ConfigError(
            f"{option}: {source.text!r} and {made!r} must have the same number of *, because they "
            "correspond to each other"
        )


def _with_dim(spec: Any, what: str) -> tuple[Any, int]:
    if isinstance(spec, tuple) and len(spec) == 2 and not isinstance(spec[1], str):
        if type(spec[1]) is not int:
            raise ConfigError(f"{what}: the dimension must be an int, got {spec[1]!r}")
        return spec
    return spec, 0


def _dimension(name: str, tensor: torch.Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ManifestMismatch(
            mismatched={name: f"is {_look(tensor)}, without a dimension {dim}"},
            hint="Correct split or merge.",
        )
    return dim % tensor.dim()


def _look(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}".removeprefix("torch.")
