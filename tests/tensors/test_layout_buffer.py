"""Layouts, flat buffers, when a buffer may be given new content, and how it is copied."""

from __future__ import annotations

import mmap
import os
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from aiosync.errors import ConfigError
from aiosync.tensors import (
    CopyPool,
    FlatBuffer,
    Flattener,
    Layout,
    LiveBytes,
    Target,
    torch_dtype,
)
from aiosync.tensors.buffer import in_flat_memory
from aiosync.wire import DTYPE_NBYTES, Manifest
from tests.tensors._models import bits, filled, packed

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3, 5), (2, 0, 3), (17,)]


@pytest.mark.parametrize("name", sorted(DTYPE_NBYTES))
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_and_shape_survives(name: str) -> None:
    source = {
        f"t{index}": filled(torch_dtype(name), shape, seed=index)
        for index, shape in enumerate(SHAPES)
    }
    layout, flat, _ = packed(source)
    again = Layout(Manifest.decode(layout.manifest.encode()))
    for view, tensor in zip(flat.views(again), source.values(), strict=True):
        assert view.dtype is tensor.dtype
        assert view.shape == tensor.shape
        assert bits(view) == bits(tensor)


def test_wrap_uses_the_memory_and_lets_it_go() -> None:
    layout, source, _ = packed({"a": torch.arange(4.0)})
    with mmap.mmap(-1, 4096) as block:
        flat = FlatBuffer.wrap(block)
        block[: layout.nbytes] = bytes(source.memoryview())
        assert flat.views(layout)[0].tolist() == [0, 1, 2, 3]
        with pytest.raises(BufferError):
            block.close()
        del flat
        with memoryview(block) as view, view[8:] as part:
            with pytest.raises(ConfigError, match="multiple of 64"):
                FlatBuffer.wrap(part)


def flipped() -> tuple[nn.Linear, FlatBuffer, Layout]:
    model = nn.Linear(3, 3)
    layout, flat, _ = packed(nn.Linear(3, 3))
    assert flat.exclusive()
    Target(model).apply_(layout, flat, {}, copy=False)
    return model, flat, layout


def _graph(model: nn.Linear) -> Any:
    inputs = torch.ones(1, 3, requires_grad=True)
    return (inputs @ model.weight.t()).sum()


@pytest.mark.parametrize(
    "hold",
    [
        lambda model: model.state_dict(),
        lambda model: model.weight.data,
        lambda model: model.bias.detach().numpy(),
        lambda model: model.weight[0],
        lambda model: list(model.named_parameters()) and model.weight.view(-1),
        lambda model: torch.utils.dlpack.to_dlpack(model.weight.detach()),
        _graph,
    ],
    ids=["state_dict", "data", "numpy", "row", "view", "dlpack", "graph"],
)
def test_a_held_view_is_noticed_until_it_dies(hold: Callable[[nn.Linear], Any]) -> None:
    model, flat, layout = flipped()
    held, other = hold(model), FlatBuffer(flat.nbytes)
    other.array[:] = 0
    Target(model).apply_(layout, other, {}, copy=False)
    assert not flat.exclusive() and not other.exclusive()
    del held
    assert flat.exclusive()


def test_views_that_share_memory_moved_are_made_anew() -> None:
    model, flat, layout = flipped()
    model.share_memory()  # moves the memory of a view away from the buffer
    assert not flat.exclusive()
    model.double()
    assert flat.exclusive()
    flat.array[:] = 0
    assert not any(view.any() for view in flat.views(layout))


def test_detach_gives_memory_back() -> None:
    model, flat, _ = flipped()
    before, parameter = bits(model.weight), model.weight
    Target(model).detach_(FlatBuffer(64))  # another one, which is left alone
    assert in_flat_memory(parameter)
    Target(model).detach_(flat)
    assert flat.exclusive()
    flat.array[:] = 0
    assert bits(model.weight) == before
    assert model.weight is parameter
    assert not in_flat_memory(parameter)


# -- payloads as they lie in the tensors ----------------------------------------------------------


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


# -- the pool of threads for large copies ---------------------------------------------------------


LARGE = 40 * 2**20


def blocks(nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    source = np.arange(nbytes // 8, dtype=np.uint64).view(np.uint8)
    return np.zeros(source.size, np.uint8), source


def test_the_reason_of_a_failure_reaches_the_caller() -> None:
    target, source = blocks(LARGE)
    target.flags.writeable = False
    with closing(CopyPool(2)) as pool:
        with pytest.raises(ValueError, match="read-only"):
            pool.copy([(target, source)])
        target, source = blocks(LARGE)
        pool.copy([(target, source)])
        assert np.array_equal(target, source)


def test_works_in_a_forked_child() -> None:
    with closing(CopyPool(2)) as pool:
        pool.copy([blocks(LARGE)])
        pid = os.fork()
        if pid == 0:
            target, source = blocks(LARGE)
            code = 1
            try:
                pool.copy([(target, source)])
                pool.close()
                code = 0 if np.array_equal(target, source) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
