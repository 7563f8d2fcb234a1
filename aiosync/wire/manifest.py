"""The manifest: the name, dtype, shape and place of each tensor in a payload.

This is pure bookkeeping over names and integers. A hostile encoding cannot harm the process that
decodes it. This module must never import asyncio, anyio or torch. The encoding is specified in
``docs/topics/wire-format.md``.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import msgpack

from aiosync.errors import ConfigError, RemoteProtocolError
from aiosync.types import Limits
from aiosync.wire.values import InvalidData, counted, refuse_ext

__all__ = [
    "ALIGNMENT",
    "DEFAULT_LIMITS",
    "DIGEST_NBYTES",
    "DTYPE_NBYTES",
    "MANIFEST_VERSION",
    "MAX_ALIASES",
    "NO_LIMITS",
    "LeafKind",
    "LeafSpec",
    "Manifest",
    "ManifestEntry",
    "plan_manifest",
]

DEFAULT_LIMITS = Limits(max_payload_nbytes=2**40)
"""Limits of links within one host, if none are given; ``Limits()`` is for links to other hosts."""

NO_LIMITS = Limits(*(sys.maxsize for _ in fields(Limits)))
"""Limits that allow everything, for manifests that stay in this process."""

MANIFEST_VERSION = 1
"""Version of the manifest encoding; it is the first field of an encoded manifest."""

ALIGNMENT = 64
"""Alignment in bytes: the offset of each leaf and the size of a payload are multiples of it."""

DIGEST_NBYTES = 16
"""Bytes of a manifest's digest (BLAKE2b)."""

MAX_ALIASES = 1024
"""Greatest number of aliases of one leaf."""

DTYPE_NBYTES: Mapping[str, int] = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "complex32": 4,
        "complex64": 8,
        "complex128": 16,
        "int8": 1,
        "int16": 2,
        "int32": 4,
        "int64": 8,
        "uint8": 1,
        "uint16": 2,
        "uint32": 4,
        "uint64": 8,
        "bool": 1,
    }
)
"""Every dtype that can travel, by its torch name without ``torch.``, with bytes per element."""

LeafKind: TypeAlias = Literal["param", "buffer", "transient"]
"""Kind of a leaf: a parameter (may be a view of the payload) or a buffer (always copied).

A transient buffer is not part of ``state_dict()``: either side may lack it.
"""

ManifestEntry: TypeAlias = "tuple[str, str, Sequence[int], LeafKind, Sequence[str]]"
"""Name, dtype name, shape, kind and aliases of one leaf, as :func:`plan_manifest` takes them."""

_T = TypeVar("_T")
_Steps: TypeAlias = Generator[None, None, _T]
"""Work in steps of about a millisecond each, so that it does not block an event loop for long."""

_INT_MAX = 2**63 - 1
# Leaves in one step.
_STEP = 128


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One tensor of a payload.

    Attributes:
        name: Dotted name, unique in its manifest.
        dtype: A key of :data:`DTYPE_NBYTES`.
        shape: Sizes of the dimensions; ``()`` for a scalar.
        offset: Place of the first byte in the payload, a multiple of 64.
        nbytes: Bytes of the elements, in C order and little-endian, without padding.
        kind: ``"param"``, ``"buffer"`` or ``"transient"``.
        aliases: Other names of the same tensor (tied parameters). They are unique in the manifest,
            as names are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    kind: LeafKind = "param"
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """The ordered leaves of a payload. Equal manifests have equal digests.

    The constructor checks nothing: use :func:`plan_manifest` or :meth:`decode`.

    Attributes:
        leaves: The leaves in the order of their offsets.
        nbytes: Bytes of the payload: the end of the last leaf, rounded up to a multiple of
            64; 0 without leaves.
        index: Position in ``leaves`` for each name, the aliases of tied tensors included.
        digest: BLAKE2b of the canonical encoding, 16 bytes.
    """

    leaves: tuple[LeafSpec, ...]
    nbytes: int
    index: Mapping[str, int] = field(init=False, repr=False, compare=False)
    digest: bytes = field(init=False, repr=False, compare=False)
    _encoded: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Computed at once and not in a cached property: a fork while that computes in another
        # thread would copy its held lock into the child.
        _finish(self._seal())

    @classmethod
    def _in_steps(cls, leaves: tuple[LeafSpec, ...], nbytes: int) -> _Steps[Manifest]:
        """Construct a manifest in steps, where the constructor would take them all at once."""
        manifest = object.__new__(cls)
        object.__setattr__(manifest, "leaves", leaves)
        object.__setattr__(manifest, "nbytes", nbytes)
        yield from manifest._seal()
        return manifest

    def _seal(self) -> _Steps[None]:
        """Compute index, encoding and digest from the leaves and the size."""
        pack = msgpack.Packer(use_bin_type=True).pack
        parts = [pack((MANIFEST_VERSION, self.nbytes, len(self.leaves)))]
        digest = hashlib.blake2b(parts[0], digest_size=DIGEST_NBYTES)
        index: dict[str, int] = {}
        for at, x in enumerate(self.leaves):
            parts.append(pack((x.name, x.dtype, x.shape, x.offset, x.nbytes, x.kind, x.aliases)))
            digest.update(parts[-1])
            index |= dict.fromkeys((x.name, *x.aliases), at)
            if at % _STEP == _STEP - 1:
                yield
        object.__setattr__(self, "index", index)
        object.__setattr__(self, "_encoded", b"".join(parts))
        object.__setattr__(self, "digest", digest.digest())

    def encode(self) -> bytes:
        """Return the canonical encoding."""
        return self._encoded

    @classmethod
    def decode(
        cls, data: bytes | bytearray | memoryview, limits: Limits = DEFAULT_LIMITS
    ) -> Manifest:
        """Rebuild a manifest from its encoding, checking every field before it is used.

        Args:
            data: The canonical encoding. Nothing in the result refers to this memory.
            limits: Bounds on tensors, names, dimensions and payload bytes.

        Raises:
            RemoteProtocolError: The encoding is malformed, not canonical or beyond the limits, or
                the leaves do not tile the payload.
        """
        return _finish(cls.decode_in_steps(data, limits))

    @classmethod
    def decode_in_steps(
        cls, data: bytes | bytearray | memoryview, limits: Limits = DEFAULT_LIMITS
    ) -> _Steps[Manifest]:
        """Rebuild a manifest as :meth:`decode` does, in steps, so that an event loop can go on.

        Returns:
            A generator, each step of which takes about a millisecond; it returns the manifest.

        Raises:
            RemoteProtocolError: As for :meth:`decode`; raised in one of the steps.
        """
        try:
            return (yield from _decode(bytes(data), limits))
        except InvalidData as exc:
            raise RemoteProtocolError(f"invalid manifest: {exc}") from exc


def _finish(steps: _Steps[_T]) -> _T:
    """Run all steps of some work, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return cast("_T", done.value)


def plan_manifest(entries: Iterable[ManifestEntry], limits: Limits = DEFAULT_LIMITS) -> Manifest:
    """Lay out leaves one after the other, each at a multiple of 64 bytes.

    Args:
        entries: (name, dtype name, shape, kind, aliases) for each leaf; the order is kept.
        limits: Bounds that the receivers are expected to have.

    Raises:
        ConfigError: A dtype is unknown, a name is empty, duplicate or not encodable, or something
            is beyond the limits.
    """
    try:
        return _finish(_lay_out(entries, limits))
    except InvalidData as exc:
        raise ConfigError(f"cannot plan a manifest: {exc}") from exc


def _lay_out(entries: Iterable[Any], limits: Limits) -> _Steps[Manifest]:
    """Check entries and lay out their leaves, in steps; raise InvalidData for an illegal one."""
    leaves: list[LeafSpec] = []
    names: list[str] = []
    end = 0
    for entry in entries:
        leaf = _check_leaf(entry, _round_up(end), limits)
        leaves.append(leaf)
        names += (leaf.name, *leaf.aliases)
        end = leaf.offset + leaf.nbytes
        if len(leaves) > limits.max_tensors or len(names) > 2 * limits.max_tensors:
            raise InvalidData(
                f"{len(leaves)} tensors with {len(names)} names; at most {limits.max_tensors} "
                "tensors and as many aliases are allowed"
            )
        if not len(leaves) % _STEP:
            yield
    if _round_up(end) > limits.max_payload_nbytes:
        raise InvalidData(
            f"{_round_up(end)} payload bytes; at most {limits.max_payload_nbytes} are allowed"
        )
    yield from _check_names(names, limits)
    return (yield from Manifest._in_steps(tuple(leaves), _round_up(end)))


def _check_leaf(entry: Any, offset: int, limits: Limits) -> LeafSpec:
    """Check all of an entry but its names; return its leaf, which begins at ``offset``."""
    name, dtype, shape, kind, aliases = entry
    where = f"leaf {_show(name)}"
    itemsize = DTYPE_NBYTES.get(dtype) if type(dtype) is str else None
    if itemsize is None:
        raise InvalidData(f"{where} has the unknown dtype {_show(dtype)}")
    if kind not in get_args(LeafKind):
        raise InvalidData(f"{where} has the unknown kind {_show(kind)}")
    try:
        dims = tuple(int(size) for size in shape)
        aliases = tuple(aliases)
    except (TypeError, ValueError, OverflowError) as exc:
        raise InvalidData(f"{where} has a shape or aliases that are none") from exc
    _check_sizes(where, itemsize, dims, limits)
    if len(aliases) > MAX_ALIASES:
        raise InvalidData(f"{where} has more than {MAX_ALIASES} aliases")
    return LeafSpec(name, dtype, dims, offset, itemsize * math.prod(dims), kind, aliases)


def _check_sizes(where: str, itemsize: int, dims: tuple[int, ...], limits: Limits) -> None:
    """Check the sizes of a tensor."""
    if len(dims) > limits.max_ndim or min(dims, default=0) < 0:
        raise InvalidData(f"{where} has no shape of at most {limits.max_ndim} sizes >= 0")
    # Sizes of 0 count as 1 here, because the strides of an empty tensor must not overflow.
    if itemsize * math.prod(size or 1 for size in dims) > _INT_MAX:
        raise InvalidData(f"{where} is larger than 2**63 - 1 bytes")


def _check_names(names: list[str], limits: Limits) -> _Steps[None]:
    """Check, in steps, that all names and aliases are legal, and none of them occurs twice."""
    seen: set[str] = set()
    for name in names:
        try:
            nbytes = len(name.encode())
        except (UnicodeEncodeError, AttributeError):
            nbytes = 0
        if not 0 < nbytes <= limits.max_name_nbytes or "\0" in name:
            raise InvalidData(
                f"{_show(name)} is not a name: valid Unicode of 1 to {limits.max_name_nbytes} "
                "bytes without NUL"
            )
        if name in seen:
            raise InvalidData(f"the name {_show(name)} occurs twice")
        seen.add(name)
        if not len(seen) % _STEP:
            yield


def _show(value: object) -> str:
    """Return a short text of a value, which may be hostile, without recursing into it."""
    if type(value) is int or type(value) is str:
        text = repr(value)
        return text if len(text) <= 80 else text[:80] + "..."
    return f"<{type(value).__name__}>"


def _round_up(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _decode(data: bytes, limits: Limits) -> _Steps[Manifest]:
    """Decode a manifest, in steps; raise InvalidData unless this is its canonical encoding."""
    # The encoding is a sequence of small arrays, not one big array. The bound on the length of an
    # array can therefore be small, and nested arrays that announce a false length cost nothing.
    # The bound on the number of arrays and maps is that of a legal encoding, which has one array in
    # front and three for each leaf: an empty map takes sixty times its bytes on the wire.
    hook = counted(1 + 3 * limits.max_tensors)
    unpacker = msgpack.Unpacker(
        use_list=False,
        list_hook=hook,
        object_hook=hook,
        ext_hook=refuse_ext,
        max_buffer_size=len(data),
        max_array_len=max(MAX_ALIASES, limits.max_ndim),
        max_map_len=0,
        max_ext_len=0,
        max_str_len=limits.max_name_nbytes,
        max_bin_len=0,
    )
    unpacker.feed(data)
    try:
        version, _, count = next(unpacker)
        if version != MANIFEST_VERSION:
            raise InvalidData(f"version {version} is not supported, only {MANIFEST_VERSION}")
        if count > limits.max_tensors:
            raise InvalidData(f"{count} tensors; at most {limits.max_tensors} are allowed")
        # Each leaf is checked before the next one is unpacked and takes memory.
        leaves = itertools.islice(unpacker, count)
        entries = (
            (name, dtype, dims, kind, also) for name, dtype, dims, _, _, kind, also in leaves
        )
        manifest = yield from _lay_out(entries, limits)
    except InvalidData:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, StopIteration) as exc:
        raise InvalidData(f"malformed: {str(exc) or type(exc).__name__}") from exc
    # This one comparison checks the offsets, sizes and counts, and that each value has its
    # canonical form.
    if manifest.encode() != data:
        raise InvalidData("it is not the canonical encoding of leaves that tile a payload")
    return manifest
