"""Models and small helpers for the tests of aiosync.tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from aiosync.tensors import FlatBuffer, Flattener, Layout, Target


class Tied(nn.Module):
    """An embedding tied to the output layer, as in a language model."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3, device=device)
        self.head = nn.Linear(3, 5, bias=False, device=device)
        self.head.weight = self.embed.weight


class Stateful(nn.Module):
    """A module with an extra state and nothing else."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.extra: Any = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Everything(Stateful):
    """A module with parameters, buffers of both kinds, None entries, and two extra states."""

    def __init__(self, fill: float = 0.0, extra: Any = None) -> None:
        super().__init__(extra)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))
        self.register_buffer("kept", torch.full((2,), fill))
        self.register_buffer("hidden", torch.full((2, 2), fill), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("none", None)
        self.frozen = nn.Parameter(torch.full((3,), fill), requires_grad=False)
        self.child = Stateful(extra)
        for tensor in self.parameters():
            nn.init.constant_(tensor, fill)


class Refuses(Stateful):
    """A module that writes to its own buffer, and then refuses a new extra state."""

    def __init__(self, fill: float, *, refuse: bool) -> None:
        super().__init__(fill)
        self.first = nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((3,), fill))
        self.refuse = refuse
        for tensor in self.parameters():
            nn.init.constant_(tensor, fill)

    def set_extra_state(self, state: float) -> None:
        if self.refuse and state != 1.0:
            self.extra = -1.0
            nn.init.constant_(self.scale, -1.0)
            raise RuntimeError("this state is refused")
        self.extra = state


def packed(
    source: Any, extract_as: Any = "tensordict"
) -> tuple[Layout, FlatBuffer, dict[str, Any]]:
    """Take a snapshot into a new buffer; return its layout, the buffer, and the values."""
    flattener = Flattener(extract_as)
    prepared = flattener.prepare(source)
    flat = FlatBuffer(prepared.layout.nbytes)
    prepared.copy_into(flat)
    return prepared.layout, flat, prepared.values


def send(source: Any, target: Any, *, copy: bool, strict: bool = True) -> FlatBuffer:
    """Take a snapshot of a model, and apply it to another model or through a given Target."""
    layout, flat, values = packed(source)
    receiver = target if isinstance(target, Target) else Target(target, strict=strict)
    receiver.apply_(layout, flat, values, copy=copy)
    return flat


def add_one(model: nn.Module) -> None:
    """Add 1 to each parameter and each buffer, in place."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(1)


def bits(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor, bit for bit."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def all_bits(module: nn.Module) -> dict[str, bytes]:
    """Return every parameter and buffer of a module, bit for bit, under every name."""
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: bits(tensor) for name, tensor in named}


def filled(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return a tensor of any dtype with random bits (random truth values for bool)."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = dtype.itemsize
    for size in shape:
        count *= size
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


class Labelled(torch.Tensor):
    """A subclass of a tensor without any behaviour of its own."""
