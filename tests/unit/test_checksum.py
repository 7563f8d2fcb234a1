"""Checksums: fixed values for other implementations, what they notice, no copies."""

from __future__ import annotations

import array
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiosync.wire import CHECKSUM_NBYTES, checksum, state_checksum

DIGEST = bytes(range(16))


def test_the_values_are_those_of_the_specification() -> None:
    assert checksum(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert checksum(b"abc").hex() == "06b05ab6733a618578af5f94892f3950"
    joined = DIGEST + checksum(b"abc") + checksum(b"")
    assert state_checksum(DIGEST, [checksum(b"abc"), checksum(b"")]) == checksum(joined)


def test_any_contiguous_memory_is_looked_at_as_bytes() -> None:
    items = array.array("d", [1.0, -2.0])
    expected = checksum(items.tobytes())
    assert checksum(items) == checksum(memoryview(items)) == expected
    assert checksum(bytearray(items.tobytes())) == expected
    assert checksum(memoryview(items.tobytes()).cast("B", (4, 4))) == expected


@given(st.binary(min_size=1, max_size=2000), st.data())
def test_a_flipped_bit_is_noticed(data: bytes, draw: st.DataObject) -> None:
    position = draw.draw(st.integers(0, len(data) * 8 - 1))
    damaged = bytearray(data)
    damaged[position // 8] ^= 1 << position % 8
    assert len(checksum(data)) == CHECKSUM_NBYTES
    assert checksum(damaged) != checksum(data)


@pytest.mark.parametrize(
    ("digest", "order"),
    [(bytes(16), (0, 1, 2)), (DIGEST, (1, 0, 2)), (DIGEST, (0, 1)), (DIGEST, (0, 1, 2, 2))],
)
def test_a_state_is_a_layout_and_chunks_in_order(digest: bytes, order: tuple[int, ...]) -> None:
    sums = [checksum(bytes([index])) for index in range(3)]
    state = state_checksum(DIGEST, sums)
    assert len(state) == CHECKSUM_NBYTES
    assert state_checksum(DIGEST, iter(sums)) == state
    assert state_checksum(digest, [sums[index] for index in order]) != state


def test_nothing_is_copied() -> None:
    data = bytearray(2**20)
    tracemalloc.start()
    try:
        checksum(memoryview(data))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**16
