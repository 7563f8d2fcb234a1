"""Gathering where there is nothing to gather; ``tests/schemes/test_sharded.py`` has real ranks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from aiosync.errors import ConfigError
from aiosync.tensors import collect, gather_weights, sharded_names
from tests.tensors._models import Everything, Tied


@pytest.mark.parametrize("extract_as", ["tensordict", "state_dict"])
def test_a_module_gives_its_live_tensors(extract_as: Any) -> None:
    model = Everything(1.0, {"text": "x"})
    found = gather_weights(model, extract_as=extract_as)
    names = {leaf.name for leaf in collect(model, extract_as=extract_as).leaves}
    assert {name for name, value in found.items() if isinstance(value, torch.Tensor)} == names
    assert found["body.0.weight"].data_ptr() == model.body[0].weight.data_ptr()
    assert not found["body.0.weight"].requires_grad
    assert found["_extra_state"] == {"text": "x"}
    assert found["child._extra_state"] == {"text": "x"}


def test_what_it_gives_can_be_sent_and_stays_tied() -> None:
    found = gather_weights(Tied())
    assert found["embed.weight"] is found["head.weight"]
    [leaf] = collect(found).leaves
    assert leaf.aliases == ("head.weight",)
    model = Everything(1.0, {"text": "x"})
    assert collect(gather_weights(model)).values == collect(model).values


@pytest.mark.parametrize("source", [3, None, [torch.ones(1)]])
def test_what_cannot_be_gathered(source: Any) -> None:
    with pytest.raises(ConfigError, match="has no weights"):
        gather_weights(source)
    assert sharded_names(source) == []
    with pytest.raises(ConfigError, match="extract_as"):
        gather_weights(nn.Linear(1, 1), extract_as="other")  # type: ignore[arg-type]  # on purpose


@pytest.mark.slow
def test_nothing_of_torch_distributed_is_loaded_for_it() -> None:
    code = (
        "import sys, torch; from aiosync.tensors import *; "
        "gather_weights(torch.nn.Linear(2, 2)); sharded_names(torch.nn.Linear(2, 2)); "
        "assert 'torch.distributed.tensor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
