"""Other names, fused and split tensors, other dtypes: what a receiver does to fit its model.

A language model has one projection for each of query, key and value in a checkpoint, and a single
fused one in an inference engine. See ``docs/topics/mapping.md``. This module must never import
asyncio or a transport.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

import torch

from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.tensors.copying import copy_tensors
from aiosync.tensors.layout import DTYPES

__all__ = ["DtypeRule", "Dtypes", "Pattern", "WeightMap", "check_dtypes"]

Dtypes: TypeAlias = "torch.dtype | Mapping[str, torch.dtype]"
"""A floating-point dtype for all such tensors, or name patterns to dtypes; the first that fits."""


class Pattern:
    """A name in which each ``*`` stands for any characters, dots and none included.

    Attributes:
        text: The pattern.
        option: The option in which the user wrote it.
    """

    def __init__(self, text: str, option: str, like: Pattern | None = None) -> None:
        """Take a pattern; with ``like``, one that has a star for each of that one's.

        Raises:
            ConfigError: It has another number of stars.
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

    def match(self, name: str) -> tuple[str, ...] | None:
        """What the stars stand for if the whole name fits; otherwise ``None``.

        From the left on each stands for as little as possible.
        """
        found = self._regex.fullmatch(name)
        return None if found is None else found.groups()

    def fill(self, captured: Sequence[str]) -> str:
        """The name with something for each star."""
        return "".join(map("".join, zip_longest(self._pieces, captured, fillvalue="")))


def _all_names(values: Any) -> bool:
    return all(type(value) is str and value for value in values)


def check_dtypes(value: object, option: str) -> Dtypes | None:
    """Check what somebody gave for dtypes, and copy it if it is a mapping.

    Raises:
        ConfigError: It is something else, or names a dtype that is none of floating point or
            cannot travel.
    """
    if value is None:
        return None
    listed: Mapping[Any, Any] = value if isinstance(value, Mapping) else {"*": value}
    if not _all_names(listed) or not all(
        isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype in DTYPES
        for dtype in listed.values()
    ):
        raise ConfigError(
            f"{option} must be a floating-point torch.dtype, or a mapping of name patterns to such "
            f"dtypes, got {value!r}: other tensors are not cast"
        )
    checked: Dtypes = dict(listed) if isinstance(value, Mapping) else listed["*"]
    return checked


class DtypeRule:
    """Which dtype each floating-point tensor gets.

    Args:
        dtypes: What :func:`check_dtypes` returned.

    Attributes:
        for_all: Whether it is a single dtype, and no names were given.
        patterns: Those that have to fit something, in order; none for a single dtype.
    """

    def __init__(self, dtypes: Dtypes) -> None:
        self.for_all: bool = isinstance(dtypes, torch.dtype)
        listed = {"*": dtypes} if isinstance(dtypes, torch.dtype) else dtypes
        self._dtypes = {Pattern(text, "dtype"): dtype for text, dtype in listed.items()}
        self.patterns: list[Pattern] = [] if self.for_all else list(self._dtypes)

    def find(self, names: Sequence[str], now: torch.dtype, used: set[Pattern]) -> torch.dtype:
        """The dtype for a tensor.

        Args:
            names: The names of the tensor; the first pattern that fits one of them counts.
            now: Its dtype, and the result if that is not of floating point or nothing fits.
            used: Gets every pattern that fits, also those that do not count.
        """
        fitting = [
            pattern
            for pattern in self._dtypes
            if any(pattern.match(name) is not None for name in names)
        ]
        used.update(fitting)
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
        self._exact: dict[str, Pattern] = {}
        self._renames: dict[Pattern, list[Pattern]] = {}
        for text, value in _mapping({} if callable(rename) else rename, "rename"):
            pattern = Pattern(text, "rename")
            names = _names(value, f"rename of {text!r}")
            self._renames[pattern] = [Pattern(name, "rename", pattern) for name in names]
            if "*" not in text:
                self._exact[text] = pattern
        self._splits = [_Fused("split", *item) for item in _mapping(split, "split")]
        self._merges = [_Fused("merge", *item) for item in _mapping(merge, "merge")]
        self._drops = [Pattern(text, "drop") for text in _names(drop, "drop")]
        checked = check_dtypes(dtype, "dtype")
        self._dtype = None if checked is None else DtypeRule(checked)
        fused = [each.fused for each in (*self._splits, *self._merges)]
        dtypes = [] if self._dtype is None else self._dtype.patterns
        self._patterns = [*self._renames, *fused, *self._drops, *dtypes]  # each has to fit
        self._starred = [each for each in self._renames if "*" in each.text]
        self.strict: bool = strict
        """Whether a pattern that fits nothing is refused."""

    def __call__(
        self, weights: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what becomes of some weights, one tensor at a time.

        Args:
            weights: Names and tensors in any order, or a mapping of them. Only read. Tensors of
                one merge are kept until the last of them came.

        Yields:
            Names and tensors. Renamed and split tensors are views of those that came; merged and
            cast ones are new.

        Raises:
            ManifestMismatch: A merge lacks a part, or sizes, dtypes or dimensions do not fit.
            ConfigError: Two tensors get the same name, or a pattern fits nothing (``strict``).
        """
        step = _Pass(self)
        for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
            for renamed in step.rename(name):
                for part, view in step.split(renamed, tensor):
                    yield from step.merge(part, view)
        step.finish()


class _Pass:
    """One call of a map: what was made, what waits, and which patterns fitted."""

    def __init__(self, mapping: WeightMap) -> None:
        self._map = mapping
        self._used: set[Pattern] = set()
        self._made: set[str] = set()
        self._seen = False
        self._waiting: dict[str, tuple[_Fused, tuple[str, ...], dict[int, Any]]] = {}

    def _fits(self, pattern: Pattern, name: str) -> tuple[str, ...] | None:
        captured = pattern.match(name)
        if captured is not None:
            self._used.add(pattern)
        return captured

    def rename(self, name: str) -> Sequence[str]:
        mapping = self._map
        self._seen = True
        # Every pattern is tried, so that one that another one overrules is not called unused.
        if [each for each in mapping._drops if self._fits(each, name) is not None]:
            return ()
        if mapping._function is not None:
            return _names(mapping._function(name), f"rename({name!r})")
        exact = [mapping._exact[name]] if name in mapping._exact else []
        found = [
            [target.fill(captured) for target in mapping._renames[pattern]]
            for pattern in (*exact, *mapping._starred)
            if (captured := self._fits(pattern, name)) is not None
        ]
        return found[0] if found else [name]

    def split(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        for spec in self._map._splits:
            captured = self._fits(spec.fused, name)
            if captured is not None:
                return spec.split(name, captured, tensor)
        return ((name, tensor),)

    def merge(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in self._map._merges:
            for index, part in enumerate(spec.parts):
                captured = part.match(name)
                if captured is not None:
                    yield from self._take_part(spec, captured, index, name, tensor)
                    return
        self._note(name)
        dtype = self._dtype_of(name, tensor.dtype)
        if dtype is not tensor.dtype:
            cast = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
            copy_tensors([(cast, tensor)])
            tensor = cast
        yield name, tensor

    def _take_part(
        self, spec: _Fused, captured: tuple[str, ...], index: int, name: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self._used.add(spec.fused)
        fused = spec.fused.fill(captured)
        parts = self._waiting.setdefault(fused, (spec, captured, {}))[2]
        if index in parts or fused in self._made:
            raise _twice(name)
        parts[index] = (name, tensor)
        if len(parts) == len(spec.parts):
            del self._waiting[fused]
            self._note(fused)
            ordered = [parts[i] for i in range(len(parts))]
            dtype = self._dtype_of(fused, ordered[0][1].dtype)
            yield fused, spec.merge(fused, ordered, dtype)

    def _dtype_of(self, name: str, now: torch.dtype) -> torch.dtype:
        rule = self._map._dtype
        return now if rule is None else rule.find((name,), now, self._used)

    def _note(self, name: str) -> None:
        if name in self._made:
            raise _twice(name)
        self._made.add(name)

    def finish(self) -> None:
        missing = [
            part.fill(captured)
            for spec, captured, parts in self._waiting.values()
            for index, part in enumerate(spec.parts)
            if index not in parts
        ]
        if missing:
            raise ManifestMismatch(
                missing=missing,
                hint=f"They are parts of {', '.join(self._waiting)}. Have the trainer send them, "
                "or correct merge.",
            )
        spare = [each for each in self._map._patterns if each not in self._used]
        if spare and self._map.strict and self._seen:
            listed = ", ".join(f"{each.text!r} of {each.option}" for each in spare)
            raise ConfigError(
                f"these patterns of the WeightMap match no name: {listed}. Correct or remove them, "
                "or pass strict=False"
            )


def _twice(name: str) -> ConfigError:
    return ConfigError(
        f"the WeightMap produces {name!r} twice: give one of the tensors another name, or drop it"
    )


def _mapping(value: Any, option: str) -> Iterable[tuple[str, Any]]:
    if value is None:
        return ()
    if not isinstance(value, Mapping) or not _all_names(value):
        raise ConfigError(f"{option} must be a mapping with names or patterns as keys")
    return value.items()


def _names(value: Any, what: str) -> list[str]:
    names = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(names, Iterable) or not _all_names(listed := list(names)):
        raise ConfigError(f"{what} must be a name, a sequence of names or None, got {value!r}")
    return listed


class _Fused:
    """One fused tensor and its parts, in order; those of a split with their sizes."""

    def __init__(self, option: str, text: str, spec: Any) -> None:
        """Check what the user wrote."""
        has_dim = isinstance(spec, tuple) and len(spec) == 2 and type(spec[1]) is int
        parts, dim = spec if has_dim else (spec, 0)
        self.dim: int = dim
        is_right = isinstance(parts, Mapping if option == "split" else Sequence)
        names = list(parts) if is_right and not isinstance(parts, str) else []
        self.sizes: list[Any] = list(parts.values()) if isinstance(parts, Mapping) else []
        if (
            len(names) < 2
            or not _all_names(names)
            or len(set(names)) != len(names)
            or not all(type(size) is int and size >= -1 for size in self.sizes)
            or self.sizes.count(-1) > 1
        ):
            raise ConfigError(
                f"{option} of {text!r} must have two or more part patterns, each once, a split "
                f"with sizes of at least 0, or -1 once, and perhaps a dimension, got {spec!r}"
            )
        self.fused = Pattern(text, option)
        self.parts = [Pattern(name, option, self.fused) for name in names]

    def split(
        self, name: str, captured: Sequence[str], tensor: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The parts of a tensor, as views.

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
        for part, view in zip(self.parts, torch.split(tensor.detach(), sizes, dim), strict=True):
            yield part.fill(captured), view

    def merge(
        self, name: str, parts: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype
    ) -> torch.Tensor:
        """The parts as one new tensor.

        Raises:
            ManifestMismatch: They do not fit together.
        """
        first_name, first = parts[0]
        dim = _dimension(first_name, first, self.dim)
        mismatched = {
            other: f"is {_look(tensor)}, and {first_name} is {_look(first)}: they cannot be merged "
            f"into {name} along dimension {self.dim}"
            for other, tensor in parts
            if tensor.dtype is not first.dtype or _without(tensor, dim) != _without(first, dim)
        }
        if mismatched:
            raise ManifestMismatch(mismatched=mismatched, hint="Correct merge.")
        shape, sizes = list(first.shape), [tensor.shape[dim] for _, tensor in parts]
        shape[dim] = sum(sizes)
        fused = torch.empty(shape, dtype=dtype, device=first.device)
        targets = torch.split(fused, sizes, dim)
        copy_tensors(zip(targets, (tensor for _, tensor in parts), strict=True))
        return fused


def _dimension(name: str, tensor: torch.Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ManifestMismatch(
            mismatched={name: f"is {_look(tensor)}, without a dimension {dim}"},
            hint="Correct split or merge.",
        )
    return dim % tensor.dim()


def _without(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    """The number of dimensions, and all sizes but one."""
    return (tensor.dim(), *tensor.shape[:dim], *tensor.shape[dim + 1 :])


def _look(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}".removeprefix("torch.")
