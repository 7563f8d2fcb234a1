"""Cache owners: objects in a target that keep results made of its tensors, until told otherwise.

A locked TensorDict keeps the result of ``detach()``, and a TorchRL loss that of its own parameters.
After a flip these are tensors of an old version. This module must never import asyncio or a
transport.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from aiosync.tensors.values import is_tensordict, is_tensordict_params
from aiosync.tensors.walk import ModuleTree, is_nested

__all__ = ["erase_caches", "find_cache_owners"]


def find_cache_owners(target: Any, tree: ModuleTree | None) -> list[Any]:
    """Return the TensorDicts and TorchRL losses in a target; locked or not, they may be soon."""
    if tree is None:
        return [*_tensordicts(target)]
    # A class that is not imported yet has no objects.
    loss = getattr(sys.modules.get("torchrl.objectives.common"), "LossModule", ())
    modules = [module for module, _ in tree.modules]
    return [each for each in modules if isinstance(each, loss) or is_tensordict_params(each)]


def _tensordicts(source: Any) -> Iterator[Any]:
    """Yield the TensorDicts in a container, and the container if it is one."""
    if is_tensordict(source):
        yield source
    # The TensorDict in a TensorDictParams may be replaced, so that it is looked up when needed.
    if not is_tensordict_params(source):
        for value in filter(is_nested, source.values()):
            yield from _tensordicts(value)


def erase_caches(owners: Sequence[Any]) -> None:
    """Have objects that keep results of tensors compute them anew."""
    for owner in owners:
        # Private to both libraries: without this name nothing can be erased, and a test fails.
        owner._erase_cache()
        if is_tensordict_params(owner):
            erase_caches([*_tensordicts(owner._param_td)])
