"""Whole tensors, gathered from shards on the ranks of a device mesh (DTensor, FSDP).

Does not load ``torch.distributed`` in a process that has not loaded it. This module must never
import asyncio or a transport.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from aiosync.errors import ConfigError, SyncTimeout, TransportBroken
from aiosync.protocol import validate_seconds
from aiosync.tensors.walk import ExtractAs, Place, Source, walk

__all__ = ["gather_weights"]

# A time in which no rank will come any more; process groups cannot wait for an infinite one.
_LONGEST_SECONDS = 10**8


def gather_weights(
    source: Source,
    *,
    extract_as: ExtractAs = "tensordict",
    keep: bool = True,
    device: torch.device | str | None = None,
    timeout: float | None = 120.0,
) -> dict[str, Any]:
    """Gather the weights of a sharded model, for ``send()`` on the rank that is the sender.

    Every rank of the mesh has to call it, at the same point of its program; it blocks meanwhile. In
    an async program call it with ``await asyncio.to_thread(aiosync.gather_weights, model)``.
    Modules of ``fully_shard`` are resharded first, so that the optimizer's changes are included.

    Args:
        source: A module, a TensorDict or a mapping with ``DTensor`` leaves. Without any, no rank is
            waited for.
        extract_as: Of a module, ``"tensordict"`` takes all parameters and buffers, ``"state_dict"``
            the content of its ``state_dict()``. The same on all ranks.
        keep: ``False`` on ranks that do not send: they take part, and hold one whole tensor at a
            time.
        device: Device of the result, for example ``"cpu"``, to which tensors go one by one as they
            are gathered; ``None`` leaves them on the device of the mesh.
        timeout: Seconds to wait until all ranks have called this; ``None`` leaves it to the process
            groups. After that each collective has the deadline of its process group.

    Returns:
        Tensors by dotted name, and the extra states of modules; empty without ``keep``. Tied
        tensors are one object under several names; sharded ones of a ``state_dict()`` that was
        passed are several. Tensors that were not sharded may be the model's own memory: send them
        before the next step of the optimizer.

    Raises:
        ConfigError: The source is of another type, or a ``FullyShardedDataParallel``; this process
            is not a member of the mesh; the ranks have different names, shapes or shardings; or a
            device has no memory left.
        SyncTimeout: Some rank did not call it in time. The process group can no longer be used.
        TransportBroken: A collective failed, usually because a rank has ended.
    """
    if extract_as not in ("tensordict", "state_dict"):
        raise ConfigError(f"extract_as must be 'tensordict' or 'state_dict', got {extract_as}")
    validate_seconds("timeout", timeout, endless=True, none=True)
    if isinstance(source, nn.Module):
        _reshard(source)
    found, tree = walk(source, extract_as)
    places = found.places if tree is None else _tied_as_in(tree.found.places, found.places)
    sharded = [place for place in places if _is_sharded(place.tensor)]
    if sharded:
        _meet(sharded, timeout)
    # Ranks that keep nothing take part, too: gathering is collective.
    whole = _gather_each(places, device, keep=keep)
    result: dict[str, Any] = {place.name: whole[id(place.tensor)] for place in places}
    result.update((name, place.read()) for name, place in found.values.items())
    return result if keep else {}


def _tied_as_in(own: Sequence[Place], places: Sequence[Place]) -> list[Place]:
    """Replace sharded tensors that state_dict() detached, also tied ones, by the module's own."""
    tensors = {place.name: place.tensor for place in own}
    return [
        place._replace(tensor=tensors[place.name])
        if _are_same_shards(place.tensor, tensors.get(place.name))
        else place
        for place in places
    ]


def _are_same_shards(*tensors: Any) -> bool:
    """Return True if sharded tensors are one and the same. All ranks of the mesh agree on that."""
    return all(map(_is_sharded, tensors)) and len(set(map(_shard_key, tensors))) == 1


def _shard_key(tensor: Any) -> tuple[Any, ...]:
    """Return a key that two sharded tensors share if they are the same elements in memory."""
    # The shard of this rank may be empty. It has no address then, but a storage.
    local = tensor.to_local()
    at = local.untyped_storage()._cdata, local.storage_offset()
    return (*at, tensor.shape, tensor.stride(), tensor.dtype, tensor.placements)


def _gather_each(
    places: Sequence[Place], device: torch.device | str | None, *, keep: bool
) -> dict[int, torch.Tensor]:
    """Gather each tensor once; return results by the tensors' ids, empty ones without ``keep``."""
    whole: dict[int, torch.Tensor] = {}
    kept = {id(place.tensor) for place in places if place.persistent}
    for place in places:
        tensor = place.tensor
        if id(tensor) not in whole:
            full = _gather(place) if _is_sharded(tensor) else tensor.detach()
            # A tied buffer is persistent if it is so under any of its names.
            place = place._replace(persistent=id(tensor) in kept)
            whole[id(tensor)] = _as_result(full, place, device) if keep else full.new_empty(0)
    return whole


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Return True for a DTensor. Before DTensor is imported there is none."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def _reshard(source: nn.Module) -> None:
    """Let modules of ``fully_shard`` take over the optimizer's changes; refuse the older FSDP."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    for module in source.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ConfigError(
                "a FullyShardedDataParallel has flat parameters, which cannot be gathered by name: "
                "use torch.distributed.fsdp.fully_shard(), or pass the state_dict() that it "
                "returns with FullStateDictConfig"
            )
        if fsdp is not None and isinstance(module, fsdp):
            module.reshard()


def _gather(place: Place) -> torch.Tensor:
    """Gather a DTensor from all ranks of its mesh, each of which makes the same call."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            full: Any = place.tensor.detach().full_tensor()
            # full_tensor() may also return a collective that was not waited for.
            whole: torch.Tensor = full if type(full) is torch.Tensor else full.wait()
    except RuntimeError as exc:
        raise _failure(f"gathering {place.name!r} from its mesh failed", exc) from exc
    return whole


def _failure(text: str, error: RuntimeError) -> ConfigError | TransportBroken:
    """Return the error for a call to a process group, or to the device of a mesh, that failed."""
    if isinstance(error, torch.OutOfMemoryError):
        return ConfigError(
            f"{text}: the device has no memory left. Pass device='cpu' to take each whole tensor "
            "away at once, and keep=False on ranks that do not send"
        )
    return TransportBroken(f"{text}: {error}")


def _as_result(full: torch.Tensor, place: Place, device: torch.device | str | None) -> torch.Tensor:
    """Return a whole tensor on the device of the result, marked if it is a buffer."""
    if device is not None:
        full = full.to(device)
    # A buffer is marked, so that the sender knows that wire_dtype= may have to leave it alone.
    return nn.Buffer(full, persistent=place.persistent) if place.kind == "buffer" else full


def _meet(picked: Sequence[Place], timeout: float | None) -> None:
    """Wait until all ranks have called this, and raise unless they gather the same weights.

    Collectives wait for each other as long as their group allows, half an hour by default. Ranks
    that gather different tensors would wait so long, or mix the tensors up.
    """
    want = hashlib.blake2b(digest_size=7)
    meshes: list[Any] = []
    first: dict[int, str] = {}
    for place in picked:
        tensor = place.tensor
        # Tied tensors are gathered once, so that all ranks have to tie the same ones.
        tied_to = first.setdefault(id(tensor), place.name)
        facts = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.placements};"
        want.update(f"{place.name} {tied_to} {facts}".encode())
        if tensor.device_mesh not in meshes:
            meshes.append(tensor.device_mesh)
    number = int.from_bytes(want.digest())
    for mesh in meshes:
        if mesh.get_coordinate() is None:
            raise ConfigError(f"this process is not a member of {mesh}: only members can gather")
        for group in mesh.get_all_groups():
            # If no rank has a higher number, and none a lower one, all have this one.
            highest = torch.tensor([number, -number], device=mesh.device_type)
            _all_highest(highest, group, timeout)
            if highest.tolist() != [number, -number]:
                raise ConfigError(
                    "the ranks of the mesh are gathering different weights: pass the same model, "
                    "sharded and tied alike, and the same extract_as on all of them"
                )


def _all_highest(values: torch.Tensor, group: Any, timeout: float | None) -> None:
    """Replace each value by the highest that any rank has; raise if a rank does not come."""
    from torch import distributed

    options: Any = distributed.AllreduceOptions()
    options.reduceOp = distributed.ReduceOp.MAX
    if timeout is not None:
        options.timeout = timedelta(seconds=min(timeout, _LONGEST_SECONDS))
    try:
        work = group.allreduce([values], options)
        if timeout is None:
            work.wait()
        else:
            work.wait(options.timeout)
        # Errors of another device are raised here.
        values.cpu()
    except RuntimeError as exc:
        if "timed out" in str(exc).lower() or "timeout" in str(exc).lower():
            raise SyncTimeout(
                f"not all {group.size()} ranks of the mesh called gather_weights() within "
                f"{timeout or 0:g} s: it is collective, every rank has to call it"
            ) from exc
        raise _failure("the ranks of the mesh could not meet", exc) from exc
