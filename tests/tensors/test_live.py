"""Payloads as they lie in the tensors are the bytes that a copy would have."""

from __future__ import annotations

import pytest
import torch

from aiosync.tensors import FlatBuffer, Flattener, LiveBytes

KIB = 1024


def _prepared(tensors: dict[str, torch.Tensor]) -> tuple[Flattener, object]:
    flattener = Flattener("tensordict")
    return flattener, flattener.prepare(tensors)


SIZES = [(300 * KIB + 4,), (7,), (512, 1024), (0,), (), (300 * KIB, 2)]


@pytest.mark.parametrize("step", [64, 4096 + 64, 2**20, 2**24])
def test_the_pieces_are_the_copy(step: int) -> None:
    tensors = {f"t{i}": torch.rand(size) for i, size in enumerate(SIZES)}
    flattener, prepared = _prepared(tensors)
    flat = FlatBuffer(prepared.layout.nbytes)
    flattener.copy_into(prepared, flat)
    live = LiveBytes.of(prepared.layout, prepared.tensors)
    assert live is not None
    found = b""
    if step < 4096:  # every border, but not every byte of the rest
        borders = [leaf.offset for leaf in prepared.layout.manifest.leaves]
        for border in borders:
            start, stop = max(0, border - step), min(border + step, flat.nbytes)
            assert b"".join(live.views(start, stop)) == bytes(flat.memoryview()[start:stop])
        return
    for start in range(0, flat.nbytes, step):
        found += b"".join(live.views(start, min(start + step, flat.nbytes)))
    assert found == bytes(flat.memoryview())


@pytest.mark.parametrize(
    "tensors",
    [
        {f"t{i}": torch.zeros(16) for i in range(100)},  # many small ones: a copy is quicker
        {"t": torch.zeros(1024, 1024).t()[:, :512]},  # not one block
        {"t": torch.zeros(2**20, dtype=torch.complex64).conj()},
    ],
    ids=["small", "strided", "conjugated"],
)
def test_where_a_copy_is_better_there_is_none(tensors: dict[str, torch.Tensor]) -> None:
    _, prepared = _prepared(tensors)
    assert LiveBytes.of(prepared.layout, prepared.tensors) is None
