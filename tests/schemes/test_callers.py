"""Calls of a worker's model keep no variables of their callers once these have ended."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from tests.schemes import _harness as harness

pytestmark = pytest.mark.asyncio


class Policy(nn.Linear):
    def act(self) -> torch.Tensor:
        return self(torch.ones(4))


class Headless(nn.Module):
    """A policy without forward(), whose methods are reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Policy(4, 2)

    def act(self) -> torch.Tensor:
        return self.body(torch.ones(4))


def _read(scheme: Any) -> int:
    with scheme.reading() as read:
        return int(read.version)


CALLS: dict[str, Callable[[Any, Any], object]] = {
    "act": lambda scheme, model: model.act(),
    "parameters": lambda scheme, model: list(model.parameters()),
    "state_dict": lambda scheme, model: model.state_dict(),
    "load_state_dict": lambda scheme, model: model.load_state_dict(
        copy.deepcopy(model.state_dict())
    ),
    "deepcopy": lambda scheme, model: copy.deepcopy(model),
    "pickle": lambda scheme, model: pickle.dumps(model),
    "to": lambda scheme, model: model.to(torch.float32),
    "guarded": lambda scheme, model: scheme.guarded(model.act)(),
    "apply_pending": lambda scheme, model: scheme.apply_pending(),
    "reading": lambda scheme, model: _read(scheme),
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("make", [lambda: Policy(4, 2), Headless], ids=["forward", "methods"])
async def test_a_caller_is_not_kept(
    make: Callable[[], nn.Module], call: Callable[[Any, Any], object], no_collector: None
) -> None:
    model = make()
    scheme, sender = aiosync.SharedMemWeightSyncScheme(), {"model": make()}
    async with harness.here(scheme, model, sender=sender) as (_, worker):

        def caller() -> weakref.ref[torch.Tensor]:
            rollout = torch.ones(1000)
            call(worker, model)
            return weakref.ref(rollout)

        assert caller()() is None
