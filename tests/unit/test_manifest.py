"""Manifests: their layout and canonical encoding, and hostile ones that are refused."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given

from aiosync.errors import ConfigError, RemoteProtocolError
from aiosync.types import Limits
from aiosync.wire import (
    ALIGNMENT,
    MAX_ALIASES,
    LeafSpec,
    Manifest,
    plan_manifest,
)
from tests.unit._frames import MANIFEST, manifests

Record = list[Any]


def entry(name: str = "a", dtype: str = "float32", shape: Any = (2,), **changes: Any) -> Any:
    return (name, dtype, shape, changes.get("kind", "param"), changes.get("aliases", ()))


def encoded(records: list[Record], nbytes: int = 64, *, head: Any = None) -> bytes:
    """Encode a manifest by hand, legal or not. Independent of the code under test."""
    parts = [head if head is not None else [1, nbytes, len(records)], *records]
    return b"".join(map(msgpack.packb, parts))


def record(**changes: Any) -> Record:
    fields = {
        "name": "a",
        "dtype": "float32",
        "shape": [2],
        "offset": 0,
        "nbytes": 8,
        "kind": "param",
        "aliases": [],
    }
    return list({**fields, **changes}.values())


def refused(data: bytes, limits: Limits | None = None) -> str:
    with pytest.raises(RemoteProtocolError, match="invalid manifest") as info:
        Manifest.decode(data, limits or Limits())
    return str(info.value)


def test_leaves_are_laid_out_in_order_and_aligned() -> None:
    assert MANIFEST.leaves == (
        LeafSpec("actor.weight", "float32", (3, 5), 0, 60, "param", ("critic.weight",)),
        LeafSpec("actor.bias", "bfloat16", (7,), 64, 14),
        LeafSpec("steps", "int64", (), 128, 8, "buffer"),
        LeafSpec("empty", "float8_e4m3fn", (4, 0), 192, 0, "buffer"),
    )
    assert MANIFEST.nbytes == 192


def test_the_encoding_is_as_specified() -> None:
    manifest = plan_manifest([entry(aliases=("b",))])
    assert manifest.encode() == encoded([record(aliases=["b"])])
    assert manifest.digest == hashlib.blake2b(manifest.encode(), digest_size=16).digest()


@pytest.mark.slow
@given(manifests())
def test_round_trip(manifest: Manifest) -> None:
    decoded = Manifest.decode(manifest.encode())
    assert decoded == manifest
    assert decoded.digest == manifest.digest
    assert hash(decoded) == hash(manifest)
    end = 0
    for leaf in decoded.leaves:
        assert leaf.offset % ALIGNMENT == 0
        assert end <= leaf.offset < end + ALIGNMENT
        end = leaf.offset + leaf.nbytes
    assert end <= decoded.nbytes < end + ALIGNMENT


# -- planning -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([entry(dtype="float31")], "unknown dtype 'float31'"),
        ([entry(name="")], "not a name"),
        ([entry(name="a\0b")], "not a name"),
        ([entry(name="\ud800")], "not a name"),
        ([entry(name="x" * 1025)], "not a name"),
        ([entry(), entry()], "'a' occurs twice"),
        ([entry(aliases=("a",))], "'a' occurs twice"),
        ([entry(aliases=("b",)), entry("c", aliases=("b",))], "'b' occurs twice"),
        ([entry(aliases=[str(i) for i in range(MAX_ALIASES + 1)])], "more than 1024"),
        ([entry(aliases=("",))], "not a name"),
        ([entry(shape=(-1,))], "size"),
        ([entry(shape=(1,) * 33)], "at most 32"),
        ([entry(shape=(2**61,))], "larger than"),
        ([entry(shape=(2**40,))], "payload bytes"),
        ([entry(kind="grad")], "unknown kind"),
    ],
)
def test_what_cannot_be_planned(entries: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        plan_manifest(entries)


# -- hostile encodings ----------------------------------------------------------------------------


def test_the_hand_made_record_is_legal() -> None:
    assert Manifest.decode(encoded([record()])) == plan_manifest([entry()])


DEEP: Any = []
for _ in range(500):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": ""}, "not a name"),
        ({"name": "a\0"}, "not a name"),
        ({"name": 1}, "not a name"),
        ({"name": None}, "not a name"),
        ({"name": b"a"}, "malformed"),
        ({"name": [["a"]]}, "not a name"),
        ({"name": {}}, "not a name"),
        ({"name": "x" * 1025}, "malformed"),
        ({"dtype": "float33"}, "unknown dtype"),
        ({"dtype": ""}, "unknown dtype"),
        ({"dtype": 1}, "unknown dtype"),
        ({"dtype": DEEP}, "unknown dtype"),
        ({"shape": 2}, "shape"),
        ({"shape": None}, "shape"),
        ({"shape": [-2]}, "size"),
        ({"shape": [2.0]}, "canonical"),
        ({"shape": [True, 2]}, "canonical"),
        ({"shape": [[2]]}, "shape"),
        ({"shape": [1] * 33}, "shape"),
        ({"shape": [2**63, 2**63]}, "larger than"),
        ({"shape": [0, 2**62, 2**62], "nbytes": 0}, "larger than"),
        ({"shape": [float("inf")]}, "shape"),
        ({"shape": [float("nan")]}, "shape"),
        ({"shape": [3]}, "canonical"),
        ({"nbytes": 7}, "canonical"),
        ({"nbytes": 9}, "canonical"),
        ({"nbytes": 8.0}, "canonical"),
        ({"nbytes": -8}, "canonical"),
        ({"offset": 64}, "canonical"),
        ({"offset": 1}, "canonical"),
        ({"offset": -64}, "canonical"),
        ({"offset": False}, "canonical"),
        ({"kind": "grad"}, "unknown kind"),
        ({"kind": 0}, "unknown kind"),
        ({"kind": ["param"]}, "unknown kind"),
        ({"aliases": None}, "aliases"),
        ({"aliases": "b"}, "canonical"),
        ({"aliases": [1]}, "not a name"),
        ({"aliases": [["b"]]}, "not a name"),
        ({"aliases": [""]}, "not a name"),
        ({"aliases": ["a"]}, "twice"),
        ({"aliases": ["b", "b"]}, "twice"),
        ({"aliases": [str(i) for i in range(MAX_ALIASES + 1)]}, "malformed"),
    ],
)
def test_a_hostile_leaf_is_refused(changes: dict[str, Any], text: str) -> None:
    assert text in refused(encoded([record(**changes)]))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "malformed"),
        (b"\xc1", "malformed"),
        (b"\x90", "malformed"),
        (b"\x01", "malformed"),
        (encoded([], 0)[:-1], "malformed"),
        (encoded([], head=[2, 0, 0]), "version 2"),
        (encoded([], head=[True, 0, 0]), "canonical"),
        (encoded([], head=[1, 0]), "malformed"),
        (encoded([], head=[1, 0, -1]), "malformed"),
        (encoded([], head=[1, 0, 200_001]), "200001 tensors"),
        (encoded([], head=[1, 0, 2**64 - 1]), "tensors"),
        (encoded([], 64), "canonical"),
        (encoded([record()], 8), "canonical"),
        (encoded([record()], 128), "canonical"),
        (encoded([record()], head=[1, 64, 2]), "canonical"),
        (encoded([record(), record(name="b", offset=64)], head=[1, 64, 1]), "canonical"),
        (encoded([record()])[:-1], "canonical"),
        (encoded([record()]) + b"\0", "canonical"),
        (encoded([record()[:6]]), "malformed"),
        (encoded([[*record(), 1]]), "malformed"),
        (encoded([{}]), "malformed"),
        (encoded([record(), record(name="b", offset=0)], 128), "canonical"),
        (encoded([record(), record(name="b", offset=128)], 192), "canonical"),
        (encoded([record(), record(offset=64)], 128), "twice"),
        (encoded([record()]).replace(b"\x40", b"\xcc\x40", 1), "canonical"),
        (encoded([record()]).replace(b"\xa1a", b"\xd9\x01a"), "canonical"),
        (encoded([record()]).replace(b"\xa1a", b"\xd4\x05a"), "malformed"),
        (b"\xdd\xff\xff\xff\xff", "malformed"),
        (b"\x93\x01\x00\x01" + b"\xdc\x04\x00" * 1000, "canonical"),
    ],
)
def test_a_hostile_encoding_is_refused(data: bytes, text: str) -> None:
    assert text in refused(data)


@pytest.mark.parametrize("inner", [b"\x80" * 512, b"\x91\xc0" * 512], ids=["maps", "arrays"])
def test_nested_arrays_cost_little_more_than_a_legal_manifest(inner: bytes) -> None:
    """Each empty map, or array of one entry, takes a hundred times the limit for all of them."""
    name = b"\xdc\x02\x00" + (b"\xdc\x02\x00" + inner) * 512
    data = msgpack.packb([1, 64, 1]) + msgpack.packb(record(name=None)).replace(b"\xc0", name)
    tracemalloc.start()
    try:
        assert "more than 301 lists and maps" in refused(data, Limits(max_tensors=100))
        assert tracemalloc.get_traced_memory()[1] < 2 * len(data) + 2**20
    finally:
        tracemalloc.stop()


def test_names_are_counted_before_all_of_them_are_unpacked() -> None:
    leaf = msgpack.packb(record(aliases=["ab"] * MAX_ALIASES))
    data = msgpack.packb([1, 64, 500]) + leaf * 500
    tracemalloc.start()
    try:
        assert "aliases" in refused(data, Limits(max_tensors=1000))
        assert tracemalloc.get_traced_memory()[1] < 2 * len(data) + 2**20
    finally:
        tracemalloc.stop()


def test_limits_bound_what_is_decoded() -> None:
    data = MANIFEST.encode()
    Manifest.decode(data, Limits(max_tensors=4, max_ndim=2, max_payload_nbytes=192))
    assert "4 tensors" in refused(data, Limits(max_tensors=3))
    assert "at most 1 sizes" in refused(data, Limits(max_ndim=1))
    assert "192 payload" in refused(data, Limits(max_payload_nbytes=191))
    assert "malformed" in refused(data, Limits(max_name_nbytes=5))
    many = encoded([record(aliases=["b", "c", "d"])])
    assert "aliases" in refused(many, Limits(max_tensors=1))


def test_no_single_changed_byte_passes_unnoticed() -> None:
    data = MANIFEST.encode()
    for position in range(len(data)):
        for value in (0, 1, 0x7F, 0x80, 0xC1, 0xFF, data[position] ^ 1):
            changed = data[:position] + bytes([value]) + data[position + 1 :]
            if changed == data:
                continue
            try:
                decoded = Manifest.decode(changed)
            except RemoteProtocolError:
                continue
            assert decoded.digest != MANIFEST.digest
            assert decoded.encode() == changed


class _Waiting(tuple[LeafSpec, ...]):
    """A tuple without leaves, whose iteration waits for ``go_on``."""

    def __new__(cls) -> _Waiting:
        self = super().__new__(cls)
        self.looked, self.go_on = threading.Event(), threading.Event()
        return self

    looked: threading.Event
    go_on: threading.Event

    def __iter__(self) -> Iterator[LeafSpec]:
        self.looked.set()
        self.go_on.wait()
        return super().__iter__()


def test_a_child_needs_nothing_that_a_thread_of_its_parent_holds() -> None:
    leaves = _Waiting()
    thread = threading.Thread(target=lambda: Manifest(leaves, 0).digest)
    thread.start()
    leaves.looked.wait()
    pid = os.fork()
    if pid == 0:
        try:
            # If the child hangs, the alarm ends it.
            signal.alarm(20)
            os._exit(Manifest((), 0).digest != plan_manifest(()).digest)
        finally:
            os._exit(2)
    leaves.go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
