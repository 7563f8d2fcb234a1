"""Models that the tests of the schemes send; worker processes can import them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def fill(model: nn.Module, value: float) -> None:
    """Set every parameter to ``value``."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def filled(model: nn.Module, value: float) -> bool:
    """Return True if every element of every parameter is ``value``."""
    return all(bool((parameter == value).all()) for parameter in model.parameters())


def holds(receiver: Any, value: float) -> bool:
    """Return True if a read of a receiver's model finds ``value`` in every parameter.

    A read has the weights that were sent before it began; outside a read the parameters may lag.
    """
    with receiver.reading():
        return filled(receiver.model, value)


def linear(value: float = -1.0) -> nn.Module:
    model = nn.Linear(4, 2)
    fill(model, value)
    return model


def wide() -> nn.Module:
    model = nn.Linear(8, 3)
    fill(model, -1.0)
    return model


def big() -> nn.Module:
    """Return a model of 64 MiB."""
    model = nn.Module()
    model.block = nn.Parameter(torch.full((16, 2**20), -1.0))
    return model


def medium() -> nn.Module:
    """Return a model of 8 MiB, more than a sender copies on its loop."""
    model = nn.Module()
    model.block = nn.Parameter(torch.full((2, 2**20), -1.0))
    return model


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


class Tied(nn.Module):
    """Model of two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))
