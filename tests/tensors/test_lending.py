"""A look at what other threads are doing leaves what is theirs alone."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

from aiosync.tensors._lending import is_lent
from aiosync.tensors._tree import ModuleTree
from tests._strays import Local


def _nest(depth: int) -> None:
    variable = Local()
    if depth:
        _nest(depth - 1)
    del variable


def test_the_variables_of_other_threads_end_where_they_began() -> None:
    """Some of torch's end the process if they are destroyed in another thread."""
    tree, stop = ModuleTree(nn.Linear(4, 2)), threading.Event()

    def work() -> None:
        while not stop.is_set():
            _nest(30)

    Local.strays = 0
    interval = sys.getswitchinterval()
    thread = threading.Thread(target=work)
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        ends = time.monotonic() + 1.0
        while time.monotonic() < ends:
            assert not is_lent(tree)
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert Local.strays == 0
    assert gc.isenabled()


def test_the_same_where_python_is_told_of_it() -> None:
    """Audit hooks, as some libraries have them, cannot be removed: in a process of their own."""
    name = test_the_variables_of_other_threads_end_where_they_began.__name__
    program = (
        "import sys; sys.addaudithook(lambda event, args: None); "
        f"from {__name__} import {name} as run; run()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)


class _Waiting(nn.Module):
    """Says that its forward has begun, and waits in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.begun, self.end = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.begun.set()
        assert self.end.wait(30)
        return self.inner(x)


@pytest.mark.parametrize("collects", [True, False])
def test_a_call_in_another_thread_is_found(collects: bool) -> None:
    model, other = _Waiting(), nn.Linear(4, 2)
    trees = [ModuleTree(each) for each in (model, model.inner, other)]
    lent = {name: nn.Parameter(value.detach() + 1) for name, value in model.named_parameters()}
    args = (model, lent, (torch.zeros(4),))
    thread = threading.Thread(target=torch.func.functional_call, args=args)
    thread.start()
    try:
        assert model.begun.wait(30)
        if not collects:
            gc.disable()
        assert [is_lent(tree) for tree in trees] == [True, True, False]
        assert gc.isenabled() == collects
    finally:
        gc.enable()
        model.end.set()
        thread.join()
    assert not any(map(is_lent, trees))
