"""Other names, fused and split tensors, other dtypes: what a receiver does to fit its model.

A language model has one projection for each of query, key and value in a checkpoint, and a single
fused one in an inference engine. See ``docs/topics/mapping.md``. This module must never import
asyncio or a transport.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import torch

from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.tensors.copying import copy_plain
from aiosync.tensors.dtypes import dtype_name

__all__ = ["DtypeRule", "Dtypes", "WeightMap", "check_dtypes"]

Dtypes: TypeAlias = "torch.dtype | Mapping[str, torch.dtype]"
"""A floating-point dtype for all such tensors, or name patterns to dtypes; the first that fits."""


class Pattern:
    """A name in which each ``*`` stands for any characters, dots and none included.

    Attributes:
        text: The pattern.
        stars: How many ``*`` it has.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._pieces = text.split("*")
        self.stars: int = len(self._pieces) - 1
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
        self._exact: dict[str, tuple[str, ...]] = {}
        self._renames: list[tuple[Pattern, tuple[Pattern, ...]]] = []
        if not callable(rename):
            self._add_renames(_checked_mapping(rename, "rename"))
        self._splits = [
            Split.of(fused, spec) for fused, spec in _checked_mapping(split, "split").items()
        ]
        self._merges = [
            Merge.of(fused, spec) for fused, spec in _checked_mapping(merge, "merge").items()
        ]
        listed = [drop] if isinstance(drop, str) else list(drop)
        if not all(map(is_name, listed)):
            raise ConfigError(f"drop must be name patterns, got {drop!r}")
        self._drops = list(map(Pattern, listed))
        checked = check_dtypes(dtype, "dtype")
        self._dtype = None if checked is None else DtypeRule(checked)
        self.strict: bool = strict
        """Whether a pattern that fits nothing is refused."""

    def _add_renames(self, rename: Mapping[str, Any]) -> None:
        for text, value in rename.items():
            names = _as_names(value, f"rename of {text!r}")
            pattern = Pattern(text)
            for name in names:
                check_stars(pattern, name, "rename")
            if not pattern.stars:
                self._exact[text] = names
                continue
            self._renames.append((pattern, tuple(map(Pattern, names))))

    def __repr__(self) -> str:
        counts = {
            "rename": len(self._exact) + len(self._renames) + (self._function is not None),
            "split": len(self._splits),
            "merge": len(self._merges),
            "drop": len(self._drops),
        }
        listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        return f"<WeightMap {listed or 'without patterns'}>"

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
        self._used: set[tuple[str, str]] = set()
        self._made: set[str] = set()
        self._seen = False
        self._waiting: dict[tuple[int, tuple[str, ...]], dict[int, tuple[str, torch.Tensor]]] = {}

    def _fits(self, option: str, pattern: Pattern, name: str) -> tuple[str, ...] | None:
        captured = pattern.match(name)
        if captured is not None:
            self._used.add((option, pattern.text))
        return captured

    def rename(self, name: str) -> Sequence[str]:
        mapping = self._map
        self._seen = True
        # Every pattern is tried, so that one that another one overrules is not called unused.
        if [each for each in mapping._drops if self._fits("drop", each, name) is not None]:
            return ()
        if mapping._function is not None:
            return _as_names(mapping._function(name), f"rename({name!r})")
        names: Sequence[str] | None = mapping._exact.get(name)
        if names is not None:
            self._used.add(("rename", name))
        for pattern, targets in mapping._renames:
            captured = self._fits("rename", pattern, name)
            if captured is not None and names is None:
                names = [target.fill(captured) for target in targets]
        return [name] if names is None else names

    def split(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        for spec in self._map._splits:
            captured = self._fits("split", spec.fused, name)
            if captured is not None:
                return spec.apply(name, captured, tensor)
        return ((name, tensor),)

    def merge(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for position, spec in enumerate(self._map._merges):
            found = spec.find(name)
            if found is None:
                continue
            index, captured = found
            self._used.add(("merge", spec.fused.text))
            fused = spec.fused.fill(captured)
            parts = self._waiting.setdefault((position, captured), {})
            if index in parts or fused in self._made:
                raise _twice(name)
            parts[index] = (name, tensor)
            if len(parts) == len(spec.parts):
                del self._waiting[position, captured]
                names, tensors = zip(*(parts[i] for i in range(len(parts))), strict=True)
                self._note(fused)
                yield fused, spec.apply(fused, names, tensors, self._dtype_of)
            return
        self._note(name)
        dtype = self._dtype_of(name, tensor.dtype)
        if dtype is not tensor.dtype:
            cast = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
            copy_plain(cast, tensor)
            tensor = cast
        yield name, tensor

    def _dtype_of(self, name: str, now: torch.dtype) -> torch.dtype:
        if self._map._dtype is None:
            return now
        used: set[str] = set()
        dtype = self._map._dtype.find((name,), now, used)
        self._used.update(("dtype", text) for text in used)
        return dtype

    def _note(self, name: str) -> None:
        if name in self._made:
            raise _twice(name)
        self._made.add(name)

    def finish(self) -> None:
        missing = []
        for (position, captured), parts in self._waiting.items():
            spec = self._map._merges[position]
            missing += [
                part.fill(captured) for index, part in enumerate(spec.parts) if index not in parts
            ]
        if missing:
            fused = ", ".join(
                self._map._merges[position].fused.fill(captured)
                for position, captured in self._waiting
            )
            raise ManifestMismatch(
                missing=missing,
                hint=f"They are parts of {fused}. Have the trainer send them, or correct merge.",
            )
        spare = [each for each in self._patterns() if each not in self._used]
        if spare and self._map.strict and self._seen:
            listed = ", ".join(f"{text!r} of {option}" for option, text in spare)
            raise ConfigError(
                f"these patterns of the WeightMap match no name: {listed}. Correct or remove them, "
                "or pass strict=False"
            )

    def _patterns(self) -> Iterator[tuple[str, str]]:
        mapping = self._map
        for name in mapping._exact:
            yield "rename", name
        for pattern, _ in mapping._renames:
            yield "rename", pattern.text
        for split in mapping._splits:
            yield "split", split.fused.text
        for merge in mapping._merges:
            yield "merge", merge.fused.text
        for pattern in mapping._drops:
            yield "drop", pattern.text
        for text in mapping._dtype.patterns if mapping._dtype is not None else ():
            yield "dtype", text


def _twice(name: str) -> ConfigError:
    return ConfigError(
        f"the WeightMap produces {name!r} twice: give one of the tensors another name, or drop it"
    )


def _checked_mapping(value: Any, option: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(map(is_name, value)):
        raise ConfigError(f"{option} must be a mapping with names or patterns as keys")
    return value


def _as_names(value: Any, what: str) -> tuple[str, ...]:
    names = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(map(is_name, names)):
        raise ConfigError(f"{what} must be a name, a sequence of names or None, got {value!r}")
    return tuple(names)


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
