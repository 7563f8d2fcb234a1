"""What is sent: models by the number and the sizes of their tensors. Float32 throughout.

Must not import aiosync's schemes, typer or rich.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["WORKLOADS", "Tensors", "Workload", "check", "fill"]


class Tensors(nn.Module):
    """``count`` parameters of ``numel`` elements each."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        for index in range(count):
            self.register_parameter(f"p{index}", nn.Parameter(torch.zeros(numel)))


def _mlp() -> nn.Module:
    """A policy of 1 MB: three layers, six tensors."""
    return nn.Sequential(
        nn.Linear(64, 464), nn.ReLU(), nn.Linear(464, 464), nn.ReLU(), nn.Linear(464, 16)
    )


def _layers() -> nn.Module:
    """As many tensors of 4 KiB in as many modules, as models have them."""
    return nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(1000)])


@dataclass(frozen=True, slots=True)
class Workload:
    """A model.

    Attributes:
        name: As it is shown and chosen.
        build: Makes the model; its values do not matter.
        nbytes: Bytes of all its parameters.
        num_tensors: How many parameters.
    """

    name: str
    build: Callable[[], nn.Module]
    nbytes: int
    num_tensors: int


def _workload(name: str, build: Callable[[], nn.Module]) -> Workload:
    with torch.device("meta"):
        parameters = list(build().parameters())
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return Workload(name, build, nbytes, len(parameters))


WORKLOADS = {
    workload.name: workload
    for workload in (
        _workload("4x2", lambda: nn.Linear(4, 2)),
        _workload("1MB", _mlp),
        _workload("1000x4KiB", lambda: Tensors(1000, 1024)),
        _workload("1000-layers", _layers),
        _workload("64MiB", lambda: Tensors(16, 2**20)),
        _workload("512MiB", lambda: Tensors(16, 8 * 2**20)),
    )
}
"""By name."""


def fill(model: nn.Module, value: float) -> None:
    """Give every element of every parameter that value, in place: an optimizer's step."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def check(model: nn.Module, value: float) -> None:
    """Make sure that every element has that value.

    Raises:
        AssertionError: One has not: old weights, or a mix of two versions.
    """
    for name, parameter in model.named_parameters():
        low, high = torch.aminmax(parameter.detach())
        if low != value or high != value:
            raise AssertionError(
                f"{name} has values from {float(low)} to {float(high)}, the trainer sent {value}"
            )
