"""Weight maps: other names, fused and split tensors, and other dtypes for a receiver's model.

A language model has one projection for each of query, key and value in a checkpoint, and a single
fused one in an inference engine. See ``docs/topics/mapping.md``. ``tensors.apply`` matches the
results with the names of a model. This module must never import asyncio or a transport.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

import torch

from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.tensors.copying import copy_tensors
from aiosync.tensors.dtypes import DTYPES

__all__ = ["DtypeRule", "Dtypes", "Pattern", "WeightMap", "check_dtypes"]

_Items: TypeAlias = "Iterator[tuple[str, torch.Tensor]]"

_Renames: TypeAlias = "dict[str, tuple[Pattern, list[Pattern]]]"
"""Patterns of ``rename``, each with the patterns of the new names, by their texts."""

_Collected: TypeAlias = "tuple[tuple[str, ...], dict[int, Any]]"
"""Text of the stars of a merge, and the names and tensors of its parts so far, by their index."""

Dtypes: TypeAlias = "torch.dtype | Mapping[str, torch.dtype]"
"""A floating-point dtype for all such tensors, or name patterns to dtypes; the first that fits."""


class Pattern:
    """A name in which each ``*`` stands for any characters, dots and none included.

    Attributes:
        text: The pattern.
        option: The option in which the user wrote it.
    """

    def __init__(self, text: str, option: str, like: Pattern | None = None) -> None:
        """Take a pattern; with ``like``, its stars stand for the same texts as those of that one.

        Raises:
            ConfigError: ``like`` has another number of stars.
        """
        self.text = text
        self.option = option
        self._pieces = text.split("*")
        if like is not None and len(like._pieces) != len(self._pieces):
            raise ConfigError(
                f"{option}: {like.text!r} and {text!r} must have the same number of *, because "
                "they correspond to each other"
            )
        self._regex = re.compile("(.*?)".join(map(re.escape, self._pieces)), re.DOTALL)

    def match(self, name: str, used: set[Pattern]) -> tuple[str, ...] | None:
        """Return the characters for each star if the whole name fits; otherwise ``None``.

        From the left on each star stands for as few characters as possible. A pattern that fits
        joins ``used``: the caller refuses those that fitted no name.
        """
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        used.add(self)
        return found.groups()

    def fill(self, captured: Sequence[str]) -> str:
        """Return the name with the given characters for each star."""
        return "".join(map("".join, zip_longest(self._pieces, captured, fillvalue="")))


_ANY = Pattern("*", "")
"""Fits every name that arrives: if it was not used, no name arrived, and no other can be used."""


def _all_names(values: Any) -> bool:
    """Return True if all values are strings, and none is empty."""
    return all(type(value) is str and value for value in values)


def check_dtypes(value: object, option: str) -> Dtypes | None:
    """Check a user's dtypes, and copy them if they are a mapping.

    Raises:
        ConfigError: The value is something else, or has a dtype that is none of floating point or
            cannot travel.
    """
    if value is None:
        return None
    listed: Mapping[Any, Any] = value if isinstance(value, Mapping) else {"*": value}
    if not (_all_names(listed) and all(map(_can_be_cast_to, listed.values()))):
        raise ConfigError(
            f"{option} must be a floating-point torch.dtype, or a mapping of name patterns to such "
            f"dtypes, got {value!r}: other tensors are not cast"
        )
    checked: Dtypes = dict(listed) if isinstance(value, Mapping) else listed["*"]
    return checked


def _can_be_cast_to(dtype: object) -> bool:
    """Return True for a dtype of floating point that can travel."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype in DTYPES


class DtypeRule:
    """Chooses the dtype of each floating-point tensor.

    Args:
        dtypes: The result of :func:`check_dtypes`.

    Attributes:
        for_all: True for a single dtype, without names.
        patterns: The patterns that have to fit some name, in order; none for a single dtype.
        used: Those that have matched a weight, of which a later update of some names may have none.
    """

    def __init__(self, dtypes: Dtypes) -> None:
        self.used: set[Pattern] = set()
        self.for_all: bool = isinstance(dtypes, torch.dtype)
        listed = {"*": dtypes} if isinstance(dtypes, torch.dtype) else dtypes
        self._dtypes = {Pattern(text, "dtype"): dtype for text, dtype in listed.items()}
        self.patterns: list[Pattern] = [] if self.for_all else list(self._dtypes)

    def find(self, names: Sequence[str], now: torch.dtype, used: set[Pattern]) -> torch.dtype:
        """Return the dtype for a tensor.

        Args:
            names: The names of the tensor; the first pattern that fits one of them counts.
            now: Its dtype, and the result if that is not of floating point or nothing fits.
            used: Gets every pattern that fits, also those that do not count.
        """
        fitting = [
            pattern
            for pattern in self._dtypes
            if any(pattern.match(name, used) is not None for name in names)
        ]
        return self._dtypes[fitting[0]] if fitting and now.is_floating_point else now


class WeightMap:
    """Turns the weights that a trainer sends into those that a model has.

    Pass one as ``transform=`` of ``init_on_receiver()``, or call it with names and tensors. Each
    tensor takes these steps in this order: ``drop``, ``rename``, ``split``, ``merge``, ``dtype``.
    ``drop`` and ``rename`` see the trainer's names; the patterns of each later step see the names
    that the previous step produced.

    In every pattern ``*`` stands for any characters, dots included; where a pattern makes a new
    name, each ``*`` of that name takes what the one at its place stood for. In each step the first
    pattern that matches applies. A name that no pattern matches stays as it is.

    Args:
        rename: A mapping from names or patterns to new ones, or a function from name to name. A
            sequence of names puts the tensor under each of them, ``None`` drops it. A name
            without ``*`` takes precedence over all patterns.
        split: Fused pattern -> {part pattern: size}: parts in order along dimension 0. One size
            may be -1: what the others leave. ``({...}, dim)`` splits along another dimension.
        merge: Fused pattern -> sequence of part patterns, joined in this order along dimension 0;
            ``(parts, dim)`` joins along another one. Parts may come in any order.
        drop: A pattern or several: tensors that are left out.
        dtype: A floating-point dtype for all floating-point tensors, or patterns to dtypes.
            Other tensors keep theirs.
        strict: Refuse a pattern that matches nothing. Functions are not checked.

    Raises:
        ConfigError: An option has an illegal value.

    Ownership / Threads:
        Holds nothing between two calls; several threads may call one object. Pickles, if the
        function in it does: define it at the top level of a module.
    """

    def __init__(
        self,
        *,
        rename: Mapping[str, str | Sequence[str] | None]
        | Callable[[str], str | Sequence[str] | None]
        | None = None,
        split: Mapping[str, Mapping[str, int] | tuple[Mapping[str, int], int]] | None = None,
        merge: Mapping[str, Sequence[str] | tuple[Sequence[str], int]] | None = None,
        drop: str | Iterable[str] = (),
        dtype: Dtypes | None = None,
        strict: bool = True,
    ) -> None:
        self._function = rename if callable(rename) else None
        self._renames = _parse_renames({} if callable(rename) else rename)
        self._splits = [_Fused("split", *item) for item in _mapping(split, "split")]
        self._merges = [_Fused("merge", *item) for item in _mapping(merge, "merge")]
        self._drops = [Pattern(text, "drop") for text in _names(drop, "drop")]
        self._dtypes = DtypeRule(check_dtypes(dtype, "dtype") or {})
        self.strict: bool = strict
        """True if a pattern that fits no name is refused."""

    def __call__(
        self, weights: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the results for some weights, one tensor at a time.

        Args:
            weights: Names and tensors in any order, or a mapping of them. Only read. Tensors of one
                merge are kept until the last of them arrives.

        Yields:
            Names and tensors. Renamed and split tensors are views of the given ones; merged and
            cast ones are new.

        Raises:
            ManifestMismatch: A merge lacks a part, or sizes, dtypes or dimensions do not fit.
            ConfigError: Two tensors get the same name, or a pattern fits nothing (``strict``).
        """
        used: set[Pattern] = set()
        made: set[str] = set()
        given = iter(weights.items() if isinstance(weights, Mapping) else weights)
        split = self._split(self._renamed(given, used), used)
        for name, parts, dim in self._merged(split, used, made):
            if name in made:
                raise _twice(name)
            made.add(name)
            dtype = self._dtypes.find((name,), parts[0].dtype, used)
            as_it_is = len(parts) == 1 and dtype is parts[0].dtype
            yield name, parts[0] if as_it_is else _joined(parts, dim, dtype)
        if self.strict and used:
            self._refuse_unused(used)

    def _refuse_unused(self, used: set[Pattern]) -> None:
        """Raise if a pattern matched no name, with all such patterns."""
        renames = [pattern for pattern, _ in self._renames.values()]
        fused = [each.fused for each in (*self._splits, *self._merges)]
        patterns = [*renames, *fused, *self._drops, *self._dtypes.patterns]
        spare = [f"{each.text!r} of {each.option}" for each in patterns if each not in used]
        if spare:
            raise ConfigError(
                f"these patterns of the WeightMap match no name: {', '.join(spare)}. Correct or "
                "remove them, or pass strict=False"
            )

    # Each of these steps reads the weights that the step before it yields, and tries every pattern,
    # so that a pattern that another one overrules does not count as unused.

    def _renamed(self, weights: _Items, used: set[Pattern]) -> _Items:
        """Drop and rename tensors."""
        starred = [each for text, each in self._renames.items() if "*" in text]
        for name, tensor in weights:
            # Without any name, no pattern is refused.
            used.add(_ANY)
            if [each for each in self._drops if each.match(name, used) is not None]:
                continue
            if self._function is not None:
                names = _names(self._function(name), f"rename({name!r})")
            else:
                exact = [self._renames[name]] if name in self._renames else []
                names = _rename(name, [*exact, *starred], used)
            yield from ((each, tensor) for each in names)

    def _split(self, weights: _Items, used: set[Pattern]) -> _Items:
        """Split tensors by the first pattern that matches; other tensors stay whole."""
        for name, tensor in weights:
            found = [
                (spec, captured)
                for spec in self._splits
                if (captured := spec.fused.match(name, used)) is not None
            ]
            if found:
                spec, captured = found[0]
                names = [part.fill(captured) for part in spec.parts]
                yield from zip(names, spec.split(name, tensor), strict=True)
            else:
                yield name, tensor

    def _merged(
        self, weights: _Items, used: set[Pattern], made: Container[str]
    ) -> Iterator[tuple[str, list[torch.Tensor], int]]:
        """Yield names, the tensors of which each is made, and the dimension that joins several."""
        waiting: dict[tuple[_Fused, str], _Collected] = {}
        for name, tensor in weights:
            found = self._find_part(name, used)
            if found is None:
                yield name, [tensor], 0
                continue
            spec, index, captured = found
            fused = spec.fused.fill(captured)
            parts = waiting.setdefault((spec, fused), (captured, {}))[1]
            # The caller adds each name that this yields to `made`.
            if index in parts or fused in made:
                raise _twice(name)
            parts[index] = name, tensor
            if len(parts) == len(spec.parts):
                del waiting[spec, fused]
                ordered = dict(map(parts.__getitem__, range(len(parts))))
                yield fused, list(ordered.values()), spec.check(fused, ordered)
                # The parts of a merged tensor are not kept any longer.
                del parts, ordered
        if waiting:
            raise _incomplete(waiting)

    def _find_part(
        self, name: str, used: set[Pattern]
    ) -> tuple[_Fused, int, tuple[str, ...]] | None:
        """Return the merge that takes a tensor, the index of its part, and the stars' text."""
        found = [
            (spec, index, captured)
            for spec in self._merges
            for index, part in enumerate(spec.parts)
            if (captured := part.match(name, used)) is not None
        ]
        used.update(spec.fused for spec, _, _ in found)
        return found[0] if found else None


def _parse_renames(renames: Any) -> _Renames:
    """Check the user's mapping, and turn its names into patterns."""
    parsed: _Renames = {}
    for text, value in _mapping(renames, "rename"):
        pattern = Pattern(text, "rename")
        names = _names(value, f"rename of {text!r}")
        parsed[text] = pattern, [Pattern(name, "rename", pattern) for name in names]
    return parsed


def _rename(
    name: str, renames: Iterable[tuple[Pattern, list[Pattern]]], used: set[Pattern]
) -> list[str]:
    """Return the new names by the first pattern that matches; the name itself if none does."""
    found = [
        [target.fill(captured) for target in targets]
        for pattern, targets in renames
        if (captured := pattern.match(name, used)) is not None
    ]
    return found[0] if found else [name]


def _incomplete(waiting: Mapping[tuple[_Fused, str], _Collected]) -> ManifestMismatch:
    """Return the error for merges that lack parts, with the names of these parts."""
    missing = [
        part.fill(captured)
        for (spec, _), (captured, parts) in waiting.items()
        for index, part in enumerate(spec.parts)
        if index not in parts
    ]
    return ManifestMismatch(
        missing=missing,
        hint=f"They are parts of {', '.join(fused for _, fused in waiting)}. "
        "Have the trainer send them, or correct merge.",
    )


def _twice(name: str) -> ConfigError:
    """Return the error for two tensors that get the same name."""
    return ConfigError(
        f"the WeightMap produces {name!r} twice: give one of the tensors another name, or drop it"
    )


def _mapping(value: Any, option: str) -> Iterable[tuple[str, Any]]:
    """Check that a user's option is a mapping with names as keys, or None; return its items."""
    if value is None:
        return ()
    if not isinstance(value, Mapping) or not _all_names(value):
        raise ConfigError(f"{option} must be a mapping with names or patterns as keys")
    return value.items()


def _names(value: Any, what: str) -> list[str]:
    """Check that a user gave one name, several or None, and return them as a list."""
    names = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(names, Iterable) or not _all_names(listed := list(names)):
        raise ConfigError(f"{what} must be a name, a sequence of names or None, got {value!r}")
    return listed


class _Fused:
    """One fused tensor and its parts, in order; the parts of a split with their sizes."""

    def __init__(self, option: str, text: str, spec: Any) -> None:
        """Check one entry of the user's ``split`` or ``merge``."""
        parts, self.dim = _parts_and_dim(spec)
        self.sizes: list[Any] = list(parts.values()) if isinstance(parts, Mapping) else []
        is_right = isinstance(parts, Mapping if option == "split" else Sequence)
        if not (is_right and _are_parts(parts) and _are_sizes(self.sizes)):
            raise ConfigError(
                f"{option} of {text!r} must have two or more part patterns, each once, a split "
                f"with sizes of at least 0, or -1 once, and perhaps a dimension, got {spec!r}"
            )
        self.fused = Pattern(text, option)
        self.parts = [Pattern(name, option, self.fused) for name in parts]

    def split(self, name: str, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the parts of a tensor, as views.

        Raises:
            ManifestMismatch: The sizes do not fit.
        """
        dim = _dimension(name, tensor, self.dim)
        there = tensor.shape[dim]
        left = there - sum(size for size in self.sizes if size >= 0)
        sizes = [left if size == -1 else size for size in self.sizes]
        if left < 0 or sum(sizes) != there:
            why = f"dimension {self.dim} has {there} elements, its parts add up to {sum(sizes)}"
            raise ManifestMismatch(mismatched={name: why}, hint="Correct the sizes in split.")
        return torch.split(tensor.detach(), sizes, dim)

    def check(self, fused: str, parts: Mapping[str, torch.Tensor]) -> int:
        """Check that the parts of a merge fit together; return the dimension that joins them.

        Raises:
            ManifestMismatch: They do not fit together.
        """
        first_name, first = next(iter(parts.items()))
        dim = _dimension(first_name, first, self.dim)
        mismatched = {
            name: f"is {_kind(tensor)}, and {first_name} is {_kind(first)}: they cannot be merged "
            f"into {fused} along dimension {self.dim}"
            for name, tensor in parts.items()
            if tensor.dtype is not first.dtype or _without(tensor, dim) != _without(first, dim)
        }
        if mismatched:
            raise ManifestMismatch(mismatched=mismatched, hint="Correct merge.")
        return dim


def _parts_and_dim(spec: Any) -> tuple[Any, int]:
    """Return the parts of a user's entry, and the dimension; 0 if the entry has none."""
    if isinstance(spec, tuple) and len(spec) == 2 and type(spec[1]) is int:
        return spec
    return spec, 0


def _are_parts(names: Any) -> bool:
    """Return True for two or more names, each once."""
    return not isinstance(names, str) and _all_names(names) and 2 <= len(set(names)) == len(names)


def _are_sizes(sizes: list[Any]) -> bool:
    """Return True for sizes of at least 0, or -1 once."""
    return all(type(size) is int and size >= -1 for size in sizes) and sizes.count(-1) <= 1


def _joined(parts: Sequence[torch.Tensor], dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor of this dtype with the elements of one, or of several along ``dim``."""
    first, *others = parts
    shape = list(first.shape)
    for other in others:
        shape[dim] += other.shape[dim]
    new = torch.empty(shape, dtype=dtype, device=first.device)
    sizes = [part.shape[dim] for part in parts] if others else []
    copy_tensors(zip(torch.split(new, sizes, dim) if others else [new], parts, strict=True))
    return new


def _dimension(name: str, tensor: torch.Tensor, dim: int) -> int:
    """Return the dimension without a sign; raise if the tensor does not have it."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise ManifestMismatch(
            mismatched={name: f"is {_kind(tensor)}, without a dimension {dim}"},
            hint="Correct split or merge.",
        )
    return dim % tensor.dim()


def _without(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    """Return the number of dimensions, and all sizes but that of ``dim``, which joins parts."""
    return (tensor.dim(), *tensor.shape[:dim], *tensor.shape[dim + 1 :])


def _kind(tensor: torch.Tensor) -> str:
    """Return the dtype and the shape of a tensor, for an error."""
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}".removeprefix("torch.")
