"""Names of dtypes."""

from __future__ import annotations

import pytest
import torch

from aiosync.errors import ConfigError
from aiosync.tensors import dtype_name, torch_dtype
from aiosync.wire import DTYPE_NBYTES


@pytest.mark.parametrize("name", sorted(DTYPE_NBYTES))
def test_every_name_of_the_wire_is_a_dtype_of_the_same_size(name: str) -> None:
    dtype = torch_dtype(name)
    assert dtype_name(dtype) == name
    assert dtype.itemsize == DTYPE_NBYTES[name]


def test_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown dtype 'float12'.*bfloat16"):
        torch_dtype("float12")


def test_a_dtype_that_cannot_travel_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch\.qint8 cannot travel"):
        dtype_name(torch.qint8)
