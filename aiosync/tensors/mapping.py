"""Other names, fused and split tensors, other dtypes: what a receiver does to fit its model.

A language model has one projection for each of query, key and value in a checkpoint, and a single
fused one in an inference engine. See ``docs/topics/mapping.md``. This module must never import
asyncio or a transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.tensors._casting import copy_plain
from aiosync.tensors._fusing import Merge, Split, check_stars
from aiosync.tensors._patterns import DtypeRule, Dtypes, Pattern, check_dtypes, is_name

__all__ = ["WeightMap"]


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


class _Rule:
    """Which dtype a tensor gets, and which patterns fitted."""

    def __init__(self, rule: DtypeRule | None, used: set[tuple[str, str]]) -> None:
        self._rule = rule
        self._used = used

    def __call__(self, name: str, now: torch.dtype) -> torch.dtype:
        if self._rule is None:
            return now
        used: set[str] = set()
        dtype = self._rule.find((name,), now, used)
        self._used.update(("dtype", text) for text in used)
        return dtype


class _Pass:
    """One call of a map: what was made, what waits, and which patterns fitted."""

    def __init__(self, mapping: WeightMap) -> None:
        self._map = mapping
        self._used: set[tuple[str, str]] = set()
        self._made: set[str] = set()
        self._seen = False
        self._waiting: dict[tuple[int, tuple[str, ...]], dict[int, tuple[str, torch.Tensor]]] = {}
        self._rule = _Rule(mapping._dtype, self._used)

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
                yield fused, spec.apply(fused, names, tensors, self._rule)
            return
        self._note(name)
        dtype = self._rule(name, tensor.dtype)
        if dtype is not tensor.dtype:
            cast = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
            copy_plain(cast, tensor)
            tensor = cast
        yield name, tensor

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
