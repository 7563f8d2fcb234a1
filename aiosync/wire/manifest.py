"""The manifest: which tensors a payload holds, where, and of which dtype and shape.

Pure bookkeeping over names and integers; a header that cannot hurt the reader. This module
must never import asyncio, anyio or torch. The encoding is written down in
``docs/topics/wire-format.md``.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import msgpack

from aiosync.errors import ConfigError, RemoteProtocolError
from aiosync.types import Limits
from aiosync.wire.packing import InvalidData, refuse_ext

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
"""The limits within one host, when none are given; ``Limits()`` is for links to others."""

NO_LIMITS = Limits(*(sys.maxsize for _ in fields(Limits)))
"""For what stays in this process."""

MANIFEST_VERSION = 1
"""Version of the manifest encoding, its first field."""

ALIGNMENT = 64
"""Bytes that every leaf's offset, and the size of a payload, is a multiple of."""

DIGEST_NBYTES = 16
"""Bytes of a manifest's digest (BLAKE2b)."""

MAX_ALIASES = 1024
"""Aliases that one leaf may have."""

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

LeafKind: TypeAlias = Literal["param", "buffer"]
"""Whether a leaf is a parameter (may be a view of the payload) or a buffer (always copied)."""

ManifestEntry: TypeAlias = "tuple[str, str, Sequence[int], LeafKind, Sequence[str]]"
"""Name, dtype name, shape, kind and aliases of one leaf, as :func:`plan_manifest` takes them."""

_INT_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One tensor of a payload.

    Attributes:
        name: Dotted name, unique in its manifest.
        dtype: A key of :data:`DTYPE_NBYTES`.
        shape: Sizes of the dimensions; ``()`` for a scalar.
        offset: First byte in the payload, a multiple of 64.
        nbytes: Bytes of the elements, in C order and little-endian, without padding.
        kind: ``"param"`` or ``"buffer"``.
        aliases: Other names of the same tensor (tied parameters), unique as names are.
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
    """The ordered leaves of a payload; two equal manifests have equal digests.

    The constructor checks nothing: use :func:`plan_manifest` or :meth:`decode`.

    Attributes:
        leaves: In the order of their offsets.
        nbytes: Bytes of the payload: the end of the last leaf, rounded up to a multiple of
            64; 0 without leaves.
    """

    leaves: tuple[LeafSpec, ...]
    nbytes: int
    _encoded: bytes | None = field(default=None, init=False, repr=False, compare=False)
    _digest: bytes | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def digest(self) -> bytes:
        """BLAKE2b of the canonical encoding, 16 bytes; computed once."""
        digest = self._digest
        if digest is None:
            digest = hashlib.blake2b(self.encode(), digest_size=DIGEST_NBYTES).digest()
            object.__setattr__(self, "_digest", digest)
        return digest

    def encode(self) -> bytes:
        """Return the canonical encoding; computed once.

        Raises:
            ConfigError: A field holds something that msgpack cannot express. Cannot happen
                for what :func:`plan_manifest` or :meth:`decode` returned.
        """
        encoded = self._encoded
        if encoded is None:
            try:
                encoded = _pack_manifest(self.leaves, self.nbytes)
            except (ValueError, TypeError, OverflowError) as exc:
                raise ConfigError(f"the manifest cannot be encoded: {exc}") from exc
            object.__setattr__(self, "_encoded", encoded)
        return encoded

    @classmethod
    def decode(
        cls, data: bytes | bytearray | memoryview, limits: Limits = DEFAULT_LIMITS
    ) -> Manifest:
        """Rebuild a manifest from its encoding, checking every field before it is used.

        Args:
            data: The canonical encoding. Nothing in the result refers to it.
            limits: Bounds on tensors, names, dimensions and payload bytes.

        Raises:
            RemoteProtocolError: Malformed, not canonical, beyond the limits, or the leaves do
                not tile the payload.
        """
        try:
            return _decode(bytes(data), limits)
        except InvalidData as exc:
            raise RemoteProtocolError(f"invalid manifest: {exc}") from exc


def plan_manifest(entries: Iterable[ManifestEntry], limits: Limits = DEFAULT_LIMITS) -> Manifest:
    """Lay leaves out one after the other, each on a multiple of 64 bytes.

    Args:
        entries: (name, dtype name, shape, kind, aliases) for each leaf; the order is kept.
        limits: Bounds that the receivers are expected to have.

    Raises:
        ConfigError: An unknown dtype, a name that is empty, duplicate or not encodable, or
            something beyond the limits.
    """
    leaves: list[LeafSpec] = []
    end = 0
    try:
        for name, dtype, shape, kind, aliases in entries:
            dims = tuple(int(size) for size in shape)
            nbytes = _leaf_nbytes(name, dtype, dims, limits)
            offset = _round_up(end)
            leaves.append(LeafSpec(name, dtype, dims, offset, nbytes, kind, tuple(aliases)))
            end = offset + nbytes
        manifest = Manifest(tuple(leaves), _round_up(end))
        _check(manifest.leaves, manifest.nbytes, limits)
    except InvalidData as exc:
        raise ConfigError(f"cannot plan a manifest: {exc}") from exc
    return manifest


def _show(value: object) -> str:
    """Return what a hostile value is, in few characters, without recursing into it."""
    if type(value) is int or type(value) is str:
        text = repr(value)
        return text if len(text) <= 80 else text[:80] + "..."
    return f"<{type(value).__name__}>"


def _round_up(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _pack_manifest(leaves: tuple[LeafSpec, ...], nbytes: int) -> bytes:
    pack = msgpack.Packer(use_bin_type=True).pack
    parts = [pack((MANIFEST_VERSION, nbytes, len(leaves)))]
    parts += [
        pack((leaf.name, leaf.dtype, leaf.shape, leaf.offset, leaf.nbytes, leaf.kind, leaf.aliases))
        for leaf in leaves
    ]
    return b"".join(parts)


def _decode(data: bytes, limits: Limits) -> Manifest:
    # A sequence of small arrays, not one big one: the bound on the length of an array can
    # then be small, so a chain of nested arrays that lie about their length costs nothing.
    unpacker = msgpack.Unpacker(
        use_list=False,
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
        head = next(unpacker, None)
        if type(head) is not tuple or len(head) != 3 or any(type(n) is not int for n in head):
            raise InvalidData("it does not start with [version, nbytes, leaves]")
        version, nbytes, count = head
        if version != MANIFEST_VERSION:
            raise InvalidData(f"version {version} is not supported, only {MANIFEST_VERSION}")
        if not 0 <= count <= limits.max_tensors:
            raise InvalidData(f"{count} tensors; at most {limits.max_tensors} are allowed")
        leaves: list[LeafSpec] = []
        for record in unpacker:
            if len(leaves) == count:
                raise InvalidData(f"more than the {count} leaves it announced")
            if type(record) is not tuple or len(record) != 7:
                raise InvalidData("a leaf is not an array of 7 fields")
            leaves.append(LeafSpec(*record))
    except InvalidData:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as exc:
        raise InvalidData(f"malformed msgpack: {str(exc) or type(exc).__name__}") from exc
    if len(leaves) != count:
        raise InvalidData(f"{count} leaves were announced and {len(leaves)} arrived")
    manifest = Manifest(tuple(leaves), nbytes)
    _check(manifest.leaves, nbytes, limits)
    if _pack_manifest(manifest.leaves, nbytes) != data:
        raise InvalidData("the encoding is not the canonical one")
    object.__setattr__(manifest, "_encoded", data)
    return manifest


def _leaf_nbytes(name: object, dtype: Any, shape: Any, limits: Limits) -> int:
    itemsize = DTYPE_NBYTES.get(dtype) if type(dtype) is str else None
    if itemsize is None:
        raise InvalidData(f"leaf {_show(name)} has the unknown dtype {_show(dtype)}")
    if type(shape) is not tuple or len(shape) > limits.max_ndim:
        raise InvalidData(
            f"leaf {_show(name)} has no valid shape of at most {limits.max_ndim} sizes"
        )
    bound = itemsize  # as if no size were 0: strides of an empty tensor must not overflow either
    empty = False
    for size in shape:
        if type(size) is not int or size < 0:
            raise InvalidData(f"leaf {_show(name)} has a size that is not an integer >= 0")
        if size:
            bound *= size
        else:
            empty = True
    if bound > _INT_MAX:
        raise InvalidData(f"leaf {_show(name)} is larger than 2**63 - 1 bytes")
    return 0 if empty else bound


def _check(leaves: tuple[Any, ...], nbytes: Any, limits: Limits) -> None:
    """Raise InvalidData unless everything about these leaves is as the format says."""
    if len(leaves) > limits.max_tensors:
        raise InvalidData(f"{len(leaves)} tensors; at most {limits.max_tensors} are allowed")
    names: list[str] = []
    end = 0
    for leaf in leaves:
        name, aliases = leaf.name, leaf.aliases
        expected = _leaf_nbytes(name, leaf.dtype, leaf.shape, limits)
        offset = _round_up(end)
        if type(leaf.nbytes) is not int or leaf.nbytes != expected:
            raise InvalidData(
                f"leaf {_show(name)} says {_show(leaf.nbytes)} bytes; its shape needs {expected}"
            )
        if type(leaf.offset) is not int or leaf.offset != offset:
            raise InvalidData(
                f"leaf {_show(name)} is at offset {_show(leaf.offset)}, not at {offset}"
            )
        end = offset + expected
        if type(leaf.kind) is not str or leaf.kind not in ("param", "buffer"):
            raise InvalidData(f"leaf {_show(name)} has the unknown kind {_show(leaf.kind)}")
        names.append(name)
        if aliases:
            if type(aliases) is not tuple or len(aliases) > MAX_ALIASES:
                raise InvalidData(
                    f"leaf {_show(name)} has no valid list of at most {MAX_ALIASES} names"
                )
            names += aliases
        elif aliases != ():
            raise InvalidData(f"leaf {_show(name)} has no valid list of aliases")
    if type(nbytes) is not int or nbytes != _round_up(end):
        raise InvalidData(
            f"it says {_show(nbytes)} payload bytes; its leaves need {_round_up(end)}"
        )
    if nbytes > limits.max_payload_nbytes:
        raise InvalidData(
            f"{nbytes} payload bytes; at most {limits.max_payload_nbytes} are allowed"
        )
    if len(names) > 2 * limits.max_tensors:
        raise InvalidData(f"more than {limits.max_tensors} aliases")
    _check_names(names, limits)


def _check_names(names: list[str], limits: Limits) -> None:
    for name in names:
        if type(name) is not str or not name or "\0" in name:
            raise InvalidData(
                f"{_show(name)} is not a name: it is empty, holds a NUL or is not a string"
            )
        try:
            nbytes = len(name) if name.isascii() else len(name.encode())
        except UnicodeEncodeError as exc:
            raise InvalidData(f"the name {_show(name)} is not valid Unicode") from exc
        if nbytes > limits.max_name_nbytes:
            raise InvalidData(
                f"the name {_show(name)} is longer than {limits.max_name_nbytes} bytes"
            )
    if len(set(names)) != len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise InvalidData(f"the name {_show(twice)} occurs twice")
