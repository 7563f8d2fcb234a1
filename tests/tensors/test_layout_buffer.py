"""Layouts, flat buffers, and when a buffer may be given new content."""

from __future__ import annotations

import mmap
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from aiosync.errors import ConfigError
from aiosync.tensors import FlatBuffer, Layout, Target, collect, torch_dtype
from aiosync.tensors.buffer import in_flat_memory
from aiosync.wire import ALIGNMENT, DTYPE_NBYTES, Manifest
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


def test_layout_is_aligned_and_equal_for_equal_models() -> None:
    layout = Layout.plan(collect(nn.Linear(3, 5)))
    assert layout.nbytes % ALIGNMENT == 0
    assert [leaf.offset % ALIGNMENT for leaf in layout.manifest.leaves] == [0, 0]
    assert layout.digest == Layout.plan(collect(nn.Linear(3, 5))).digest
    assert layout.digest != Layout.plan(collect(nn.Linear(5, 3))).digest
    assert layout.padding() == [(60, 64), (84, 128)]


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


@pytest.mark.skipif(sys.platform != "linux", reason="needs memfd")
def test_read_only_memory_is_fine_for_reading() -> None:
    layout, source, _ = packed({"a": torch.arange(4.0)})
    with os.fdopen(os.memfd_create("test"), "wb", buffering=0) as file:
        file.write(bytes(source.memoryview()))
        with mmap.mmap(file.fileno(), layout.nbytes, prot=mmap.PROT_READ) as block:
            flat, model = FlatBuffer.wrap(block), nn.ParameterDict({"a": torch.zeros(4)})
            Target(model).apply_(layout, flat, {}, copy=False)
            assert model["a"].tolist() == [0, 1, 2, 3]
            assert flat.memoryview().readonly
            del flat, model


def test_views_do_not_depend_on_where_they_were_made() -> None:
    layout, flat, _ = packed({"a": torch.zeros(4)})
    with torch.inference_mode(), torch.device("meta"):
        fresh = FlatBuffer(flat.nbytes)
        views = fresh.views(layout)
    assert [(view.device.type, view.is_inference()) for view in views] == [("cpu", False)]


# -- exclusive ------------------------------------------------------------------------------


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
