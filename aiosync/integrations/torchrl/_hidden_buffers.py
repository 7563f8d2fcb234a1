"""Buffers that are in no state dict, where workers get a policy without memory.

TorchRL's collectors of processes send their workers the policy on the meta device, and leave the
rest to the scheme. With ``strategy="state_dict"`` that never sends buffers that are not
persistent. So what they are when the collector is made travels in the scheme's copies; from then
on they are each side's own, as the strategy has it. Must not import collectors.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from aiosync.errors import ConfigError
from aiosync.integrations.torchrl._policies import factories_of, find_model
from aiosync.schemes.inside import change_hooks
from aiosync.sync import NoWeightSyncScheme, WeightSyncScheme
from aiosync.sync._schemes import core_of
from aiosync.tensors import FlatBuffer, Layout, collect
from aiosync.wire import NO_LIMITS, Manifest

__all__ = ["carry_buffers", "refuse_missing_buffers"]


def carry_buffers(scheme: WeightSyncScheme, collector: Any) -> None:
    """Take along, in copies and pickles of the scheme, what its strategy never sends."""
    found = dict(_hidden(scheme, collector))
    if not found or any(buffer.is_meta for buffer in found.values()):
        return
    try:
        leaves = collect(found)
        layout = Layout.plan(leaves, NO_LIMITS)
    except ConfigError:  # of a kind that cannot travel: refuse_missing_buffers() names it
        return
    # Bytes: a tensor in a pickle holds descriptors, and is shared with who made it.
    flat = FlatBuffer(layout.nbytes)
    flat.array[:] = 0
    for view, leaf in zip(flat.views(layout), leaves.leaves, strict=True):
        view.copy_(leaf.tensor.detach())
    data = bytes(flat.memoryview())
    unpack = functools.partial(_unpack, layout.manifest, data)
    change_hooks(core_of(scheme), carried=True, prepare_model=unpack)


def refuse_missing_buffers(scheme: WeightSyncScheme, collector: Any) -> None:
    """Raise if workers wait for buffers that nothing brings them.

    Raises:
        ConfigError: The scheme was initialised before there was a collector to look into, and
            what its workers have does not come from a factory.
    """
    if change_hooks(core_of(scheme), carried=True).prepare_model is not None:
        return
    if not hasattr(collector, "procs") or factories_of(collector):
        return
    if names := sorted(name for name, _ in _hidden(scheme, collector)):
        raise ConfigError(
            "the policy has buffers that are not in its state dict, and a collector's workers get "
            f"it on the meta device: {', '.join(names)}. Make the scheme with "
            "strategy='tensordict', which sends them, or leave init_on_sender() to the collector"
        )


def _hidden(scheme: WeightSyncScheme, collector: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of each buffer of the policy that the scheme does not send."""
    if scheme.strategy_str != "state_dict" or isinstance(scheme, NoWeightSyncScheme):
        return
    policy = find_model(collector, "policy")
    if not isinstance(policy, nn.Module):
        return
    for prefix, module in policy.named_modules(remove_duplicate=False):
        for key in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(key)
            if buffer is not None:
                yield (f"{prefix}.{key}" if prefix else key), buffer


def _unpack(manifest: Manifest, data: bytes, model: Any) -> None:
    """Give a worker's model the buffers that it has without memory."""
    if not isinstance(model, nn.Module):
        return
    layout = Layout(manifest)
    flat = FlatBuffer(layout.nbytes)
    flat.memoryview()[:] = data
    lacking = {
        name for name, buffer in model.named_buffers(remove_duplicate=False) if buffer.is_meta
    }
    for leaf, view in zip(manifest.leaves, flat.views(layout), strict=True):
        if leaf.name in lacking:
            path, _, key = leaf.name.rpartition(".")
            model.get_submodule(path)._buffers[key] = view.clone()
