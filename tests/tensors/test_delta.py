"""Deltas of tensors: exact for every pattern of bits, small, and safe against hostile encodings."""

from __future__ import annotations

import random
import struct
import sys
import threading
import time
import tracemalloc

import numpy as np
import pytest
import torch
import zstandard
from numpy.typing import NDArray

from aiosync.errors import ConfigError, RemoteProtocolError
from aiosync.tensors.delta import apply_delta, encode_delta
from aiosync.wire import DTYPE_NBYTES, checksum

BLOCK_NBYTES = 2 * 2**20
Bytes = NDArray[np.uint8]


def _round_trip(base: Bytes, new: Bytes, dtype: str) -> bytes:
    """Encode and apply, with guards around the result; return the encoding."""
    encoded = encode_delta(base, new, dtype)
    memory = np.full(new.nbytes + 128, 0xA5, np.uint8)
    old = base.tobytes()
    assert apply_delta(encoded, base, memory[64:-64], dtype) == checksum(new)
    assert memory[64:-64].tobytes() == new.tobytes()
    assert base.tobytes() == old
    assert (memory[:64] == 0xA5).all() and (memory[-64:] == 0xA5).all()
    assert len(encoded) <= new.nbytes + 16 + 9 * -(-new.nbytes // BLOCK_NBYTES)
    return encoded


def _random(nbytes: int, seed: int = 0) -> Bytes:
    return np.frombuffer(random.Random(seed).randbytes(nbytes), np.uint8)


def _changed(base: Bytes, share: float, most: int, itemsize: int, seed: int = 0) -> Bytes:
    """Return bytes in which a share of the elements moved by at most so many steps."""
    rng = np.random.default_rng(seed)
    elements = base.copy().view(f"u{itemsize}")
    moved = rng.random(elements.size) < share
    steps = rng.integers(1, most, elements.size, endpoint=True) * rng.choice([-1, 1], elements.size)
    elements[moved] += steps[moved].astype(elements.dtype)
    return elements.view(np.uint8)


def _weights(count: int, rate: float, seed: int = 0) -> tuple[Bytes, Bytes]:
    """Return bytes of weights in bfloat16 before and after a step like Adam's."""
    torch.manual_seed(seed)
    weights = torch.randn(count) * 0.02
    after = weights + rate * 0.23 * torch.randn(count)
    old, new = (each.bfloat16().view(torch.uint8).numpy() for each in (weights, after))
    return old, new


# -- exactness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int16"])
@pytest.mark.parametrize("step", [1, 7, 0x8000, 0xFFFF])
def test_every_pattern_of_16_bits_keeps_its_bits(dtype: str, step: int) -> None:
    """Also -0, infinities and the payloads of NaNs."""
    every = np.arange(65536, dtype=np.uint16)
    for base in (every, every[::-1].copy(), np.zeros_like(every)):
        _round_trip(base.view(np.uint8), (every + step).astype(np.uint16).view(np.uint8), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_step_across_zero_is_as_small_as_any_other(dtype: str) -> None:
    # The greatest negative number, -0, +0 and the least positive one, by their bits.
    around = np.array([0x8001, 0x8000, 0x0000, 0x0001], np.uint16)
    below, above = np.tile(around[:3], 5000), np.tile(around[1:], 5000)
    # Every step is +1.
    assert len(_round_trip(below.view(np.uint8), above.view(np.uint8), dtype)) < 100


@pytest.mark.parametrize("dtype", DTYPE_NBYTES)
@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.15, 0.5, 0.9, 1.0])
def test_every_dtype_at_every_density(dtype: str, share: float) -> None:
    itemsize = DTYPE_NBYTES[dtype] // (2 if dtype.startswith("complex") else 1)
    base = _random(48 * 1021)
    for most in (1, 200, 2 ** (8 * itemsize - 1) - 1):
        _round_trip(base, _changed(base, share, min(most, 2**62), itemsize), dtype)


@pytest.mark.parametrize("extra", [0, 2, 6, 8, 64])
@pytest.mark.parametrize("share", [0.0, 0.002, 1.0])
def test_sizes_around_a_block_and_a_word(extra: int, share: float) -> None:
    for nbytes in (extra, BLOCK_NBYTES - extra, 2 * BLOCK_NBYTES + extra):
        base = _random(nbytes)
        _round_trip(base, _changed(base, share, 3, 2), "bfloat16")


def test_one_change_at_each_end_of_a_block() -> None:
    base = _random(BLOCK_NBYTES + 64)
    for place in (0, 1, BLOCK_NBYTES - 1, BLOCK_NBYTES, BLOCK_NBYTES + 63):
        new = base.copy()
        new[place] ^= 0x80
        for dtype in ("bfloat16", "float32", "float64", "uint8"):
            assert len(_round_trip(base, new, dtype)) < 128


def test_random_states_of_real_numbers() -> None:
    """Shares, rates and types at random; NaN, -0 and infinities are among the elements."""
    rng = random.Random(0)
    for seed in range(60):
        torch.manual_seed(seed)
        dtype = rng.choice(["bfloat16", "float16", "float32", "float64"])
        old = torch.randn(rng.randrange(1, 5000)) * 10.0 ** rng.randrange(-8, 3)
        new = torch.where(
            torch.rand_like(old) < rng.random(),
            old + 10.0 ** rng.uniform(-9, 0) * torch.randn_like(old),
            old,
        )
        for each in (old, new):
            for value in (float("nan"), -0.0, float("inf"), -float("inf")):
                each[torch.rand_like(each) < 0.01] = value
        base, bits = (
            each.to(getattr(torch, dtype)).view(torch.uint8).numpy() for each in (old, new)
        )
        _round_trip(base, bits, dtype)


def test_memory_that_starts_at_an_odd_address() -> None:
    base = _random(2 * 70_001)
    new = _changed(base[1:-1], 0.02, 2, 2)
    _round_trip(base[1:-1], new, "float16")


# -- size and speed --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "most"), [(1e-6, 1.36), (3e-6, 1.20), (1e-5, 1.04), (1e-4, 0.76), (1e-3, 0.73)]
)
def test_bytes_for_a_change_of_weights(rate: float, most: float) -> None:
    base, new = _weights(2**20, rate)
    changes = int((base.view(np.uint16) != new.view(np.uint16)).sum())
    assert len(_round_trip(base, new, "bfloat16")) / changes < most


def test_bytes_for_a_change_where_all_are_of_one_step() -> None:
    base, new = _weights(2**20, 1e-6)
    old, fresh = base.view(np.uint16), new.view(np.uint16)
    by_one = np.abs(old.astype(np.int32) - fresh.astype(np.int32)) == 1
    new = np.where(by_one, fresh, old).view(np.uint8)
    assert len(_round_trip(base, new, "bfloat16")) / by_one.sum() < 1.3


def test_bytes_without_likeness_travel_as_they_are_and_zeros_as_nothing() -> None:
    base, new = _random(BLOCK_NBYTES), _random(BLOCK_NBYTES, 1)
    assert len(_round_trip(base, new, "bfloat16")) <= BLOCK_NBYTES + 25
    assert len(_round_trip(base, np.zeros_like(base), "bfloat16")) < 100
    assert len(_round_trip(base, base.copy(), "float32")) < 32


def test_a_known_checksum_is_not_computed_again() -> None:
    base, new = _weights(1000, 1e-3)
    assert encode_delta(base, new, "bfloat16", known=checksum(new)) == encode_delta(
        base, new, "bfloat16"
    )
    wrong = encode_delta(base, new, "bfloat16", known=bytes(16))
    with pytest.raises(RemoteProtocolError, match="another base"):
        apply_delta(wrong, base, new.copy(), "bfloat16")


@pytest.mark.parametrize("share", [0.01, 0.19, 0.9])
def test_memory_is_bounded(share: float) -> None:
    base = _random(8 * BLOCK_NBYTES)
    for dtype, itemsize in (("uint8", 1), ("bfloat16", 2)):
        new = _changed(base, share, 2, itemsize)
        out = np.empty_like(new)
        for _ in range(2):  # the first run makes the allocations that are kept
            tracemalloc.start()
            try:
                encoded = encode_delta(base, new, dtype)
                _, peak = tracemalloc.get_traced_memory()
                assert peak < 2 * len(encoded) + 64 * 2**20
                tracemalloc.reset_peak()
                apply_delta(encoded, base, out, dtype)
                _, peak = tracemalloc.get_traced_memory()
                assert peak < len(encoded) + 64 * 2**20
            finally:
                tracemalloc.stop()


@pytest.mark.slow
def test_most_of_the_work_releases_the_gil() -> None:
    """A thread that only counts goes on while others encode."""
    base, new = _weights(2**23, 1e-6)
    encode_delta(base, new, "bfloat16")
    done, gaps = threading.Event(), list[float]()

    def work() -> None:
        out = np.empty_like(new)
        for _ in range(5):
            apply_delta(encode_delta(base, new, "bfloat16"), base, out, "bfloat16")
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        while not done.is_set():
            before = time.perf_counter()
            time.sleep(0.0005)
            gaps.append(time.perf_counter() - before)
    finally:
        thread.join()
    assert sorted(gaps)[len(gaps) // 2] < 0.004


# -- faults ----------------------------------------------------------------------------------------


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="unknown dtype 'int4'; there are: float64"):
        encode_delta(b"ab", b"cd", "int4")
    with pytest.raises(ConfigError, match="a delta of 4 bytes needs as many in its base"):
        encode_delta(b"ab", b"cdef", "bfloat16")
    with pytest.raises(ConfigError, match="3 bytes are no whole number of elements of bfloat16"):
        encode_delta(b"abc", b"abd", "bfloat16")
    with pytest.raises(ConfigError, match="a delta of 4 bytes needs as many in its base"):
        apply_delta(encode_delta(b"ab", b"cd", "int16"), b"ab", bytearray(4), "int16")


def test_without_zstandard_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode_delta(b"ab", b"cd", "int16")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"pip install 'aiosync\[delta\]'"):
        encode_delta(b"ab", b"cd", "int16")
    with pytest.raises(ConfigError, match=r"pip install 'aiosync\[delta\]'"):
        apply_delta(encoded, b"ab", bytearray(2), "int16")


def test_another_base_is_found() -> None:
    for rate in (1e-6, 1e-4, 1e-2):
        base, new = _weights(5000, rate)
        encoded = encode_delta(base, new, "bfloat16")
        other = base.copy()
        other[77] ^= 1
        with pytest.raises(RemoteProtocolError, match="another base"):
            apply_delta(encoded, other, new.copy(), "bfloat16")


def _samples() -> list[tuple[Bytes, Bytes, bytes]]:
    """Return bases, results and encodings of every layout."""
    found, layouts = [], set()
    for seed, rate in enumerate((0.0, 1e-7, 1e-6, 1e-4, 1e-3, 1e-2)):
        base, new = _weights(3000, rate, seed)
        if rate == 1e-2:
            new = _random(6000, 9)
        encoded = encode_delta(base, new, "bfloat16")
        layouts.add(encoded[20])
        found.append((base, new, encoded))
    assert layouts == set(range(5))
    return found


def _hostile(base: Bytes, encoded: bytes) -> Bytes:
    """Apply an encoding that may be hostile; return the memory that it wrote to, unless refused."""
    memory = np.full(base.nbytes + 256, 0xA5, np.uint8)
    old = base.tobytes()
    try:
        apply_delta(encoded, base, memory[128:-128], "bfloat16")
    finally:
        assert (memory[:128] == 0xA5).all() and (memory[-128:] == 0xA5).all()
        assert base.tobytes() == old
    return memory[128:-128]


def test_each_cut_and_each_damaged_byte_is_refused() -> None:
    for base, new, encoded in _samples():
        for stop in {*range(60), *range(60, len(encoded), 37)} - {len(encoded)}:
            if stop < len(encoded):
                with pytest.raises(RemoteProtocolError):
                    _hostile(base, encoded[:stop])
        with pytest.raises(RemoteProtocolError):
            _hostile(base, encoded + b"\0")
        for place in {*range(60), *range(60, len(encoded), 11)}:
            if place < len(encoded):
                damaged = bytearray(encoded)
                damaged[place] ^= 1 << place % 8
                try:
                    assert _hostile(base, bytes(damaged)).tobytes() == new.tobytes()
                except RemoteProtocolError:
                    pass


def _fuzz(rng: random.Random, rounds: int) -> None:
    samples = _samples()
    for _ in range(rounds):
        base, new, encoded = rng.choice(samples)
        data = bytearray(encoded)
        for _ in range(rng.randrange(1, 5)):
            place = rng.randrange(16, len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[place] = rng.randrange(256)
            elif kind == 1:
                data[place : place + 4] = struct.pack("<I", rng.choice([0, 1, 2**31, 2**32 - 1]))
            elif kind == 2:
                del data[place : place + rng.randrange(1, 30)]
            else:
                data[place:place] = rng.randbytes(rng.randrange(1, 30))
            if len(data) < 18:
                break
        try:
            made = _hostile(base, bytes(data))
        except RemoteProtocolError:
            continue
        # The checksum of the result holds, so the result is right.
        assert made.tobytes() == new.tobytes()


def test_hostile_encodings_end_in_one_error() -> None:
    _fuzz(random.Random(1), 1500)


def _gaps(numbers: list[int], count: int) -> bytes:
    """Return an encoding of one block of gaps, of which all steps are +1."""
    body = struct.pack("<BBII", 1, 1, count, len(numbers))
    for plane in (bytes(numbers), b"", b""):
        body += struct.pack("<I", len(plane)) + plane
    return bytes(16) + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    ("numbers", "count"),
    [
        ([255] * 40, 0),  # skips beyond the end, and changes nothing
        ([100, 255, 254], 2),  # the last place is behind the end
        ([1], 2),
        ([1, 2, 3], 2),
        ([1], 2**32 - 1),
        ([1] * 400, 400),
    ],
)
def test_places_behind_the_end_are_refused(numbers: list[int], count: int) -> None:
    with pytest.raises(RemoteProtocolError, match="a delta is malformed"):
        _hostile(np.zeros(600, np.uint8), _gaps(numbers, count))


def test_a_frame_that_unpacks_to_more_is_refused_before_memory_is_taken() -> None:
    base = np.zeros(2**16, np.uint8)
    plain = zstandard.ZstdCompressor(level=1).compress(bytes(2**28))
    unknown = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(2**16))
    # The frame claims 2**62 bytes, in the eight bytes behind its magic number and descriptor.
    claims = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**62) + b"\x01\0\0"
    for frame in (plain, unknown, claims, plain[:100], b"\x28\xb5\x2f\xfd", b"\0" * 50):
        body = bytes([4]) + struct.pack("<I", len(frame)) + frame
        encoded = bytes(16) + struct.pack("<I", len(body)) + body
        tracemalloc.start()
        try:
            with pytest.raises(RemoteProtocolError, match="a delta is malformed"):
                _hostile(base, encoded)
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()


if __name__ == "__main__":
    _fuzz(random.Random(int(sys.argv[1])), int(sys.argv[2]))
