"""Layouts and flat buffers: when a buffer may get new content, and how it is copied."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Barrier
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from aiosync.errors import ConfigError
from aiosync.tensors import CopyPool, FlatBuffer, Layout, LiveBytes, Target, collect
from tests.tensors._models import packed

if TYPE_CHECKING:
    from collections.abc import Callable


def test_wrap_uses_the_memory_and_lets_it_go() -> None:
    layout, source, _ = packed({"a": torch.arange(4.0)})
    with mmap.mmap(-1, 4096) as block:
        flat = FlatBuffer(block)
        block[: layout.nbytes] = bytes(source.memoryview())
        assert flat.views(layout)[0].tolist() == [0, 1, 2, 3]
        with pytest.raises(BufferError):
            block.close()
        del flat
        with memoryview(block) as view, view[8:] as part:
            with pytest.raises(ConfigError, match="multiple of 64"):
                FlatBuffer(part)


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
        lambda model: np.from_dlpack(model.weight.detach()),
        _graph,
    ],
    ids=["state_dict", "data", "numpy", "row", "view", "dlpack", "from_dlpack", "graph"],
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
    # This moves the memory of a view away from the buffer.
    model.share_memory()
    assert not flat.exclusive()
    model.double()
    assert flat.exclusive()
    flat.array[:] = 0
    assert not any(view.any() for view in flat.views(layout))


def test_a_target_that_is_detached_has_no_memory_in_common_with_the_views() -> None:
    model, flat, layout = flipped()
    kept = model.bias.detach()
    model.weight.data.share_memory_()
    Target(model).detach_(flat)
    assert not flat.exclusive()
    other = nn.Linear(3, 3)
    Target(other).apply_(layout, flat, {}, copy=False)
    flat.array[:] = 0
    assert not other.weight.any() and not kept.any()
    assert model.weight.all() and model.bias.all()
    del kept
    assert not flat.exclusive()
    del other
    assert flat.exclusive()


def test_two_first_calls_for_one_layout_make_the_views_once() -> None:
    # Each view takes some time to make, so that the second call comes meanwhile.
    layout, flat, _ = packed({f"t{i}": torch.zeros(1) for i in range(3000)})
    flat.release()
    both = Barrier(2)

    def first(_: int) -> list[torch.Tensor]:
        both.wait()
        return flat.views(layout)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(2) as pool:
            one, other = pool.map(first, range(2))
    finally:
        sys.setswitchinterval(interval)
    assert one is other
    assert flat.exclusive()


def test_views_of_many_layouts_are_not_all_kept() -> None:
    plans = [Layout.plan(collect({f"t{i}": torch.zeros(4)}).leaves) for i in range(100)]
    flat = FlatBuffer(64)
    made = [weakref.ref(flat.views(layout)[0]) for layout in plans]
    assert sum(view() is not None for view in made) < 10
    assert flat.views(plans[-1])[0] is made[-1]()


def test_a_held_view_is_noticed_under_other_layouts() -> None:
    plans = [Layout.plan(collect({f"t{i}": torch.zeros(4)}).leaves) for i in range(100)]
    flat = FlatBuffer(64)
    held = flat.views(plans[0])[0].detach()
    for layout in plans:
        flat.views(layout)
        assert not flat.exclusive()
    del held
    assert flat.exclusive()


# -- payloads as they lie in the tensors ----------------------------------------------------------


KIB = 1024


SIZES = [(300 * KIB + 4,), (7,), (512, 1024), (0,), (), (300 * KIB, 2)]


@pytest.mark.parametrize("step", [4096 + 64, 2**20, 2**24])
def test_the_pieces_are_the_copy(step: int) -> None:
    tensors = [torch.rand(size) for size in SIZES]
    layout, flat, _ = packed({f"t{i}": tensor for i, tensor in enumerate(tensors)})
    live = LiveBytes.of(layout, tensors)
    assert live is not None
    found = [live.views(at, min(at + step, flat.nbytes)) for at in range(0, flat.nbytes, step)]
    assert b"".join(b"".join(each) for each in found) == bytes(flat.memoryview())


@pytest.mark.parametrize(
    "tensors",
    [
        # Many small tensors are quicker to copy.
        [torch.zeros(16) for _ in range(100)],
        # This tensor is not one block of memory.
        [torch.zeros(1024, 1024).t()[:, :512]],
        [torch.zeros(2**20, dtype=torch.complex64).conj()],
    ],
    ids=["small", "strided", "conjugated"],
)
def test_where_a_copy_is_better_there_is_none(tensors: list[torch.Tensor]) -> None:
    leaves = collect({f"t{i}": tensor for i, tensor in enumerate(tensors)})
    assert LiveBytes.of(Layout.plan(leaves.leaves), tensors) is None


# -- the pool of threads for large copies ---------------------------------------------------------


def copies(pool: CopyPool) -> bool:
    source = np.arange(5 * 2**20, dtype=np.uint64).view(np.uint8)
    target = np.zeros_like(source)
    pool.copy([(target, source)])
    return np.array_equal(target, source)


def test_works_in_a_forked_child() -> None:
    with closing(CopyPool(2)) as pool:
        assert copies(pool)
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(not copies(pool))
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_caller_copies_alone_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def fail(item: int) -> None:
        taken.append(item)
        raise LookupError

    taken = list[int]()
    with closing(CopyPool(2)) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert copies(pool)
            with pytest.raises(LookupError):
                pool.run(fail, range(9))
        # The thread that starts now finds nothing left of that copy.
        assert copies(pool)
    assert taken == [0]
