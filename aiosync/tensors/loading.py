"""A function in the place of a model: it is handed each version, and puts it where it wants.

For engines that load weights in a way of their own. This module must never import asyncio or a
transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from aiosync.errors import ConfigError

if TYPE_CHECKING:
    from aiosync.tensors.buffer import FlatBuffer
    from aiosync.tensors.copying import CopyPool
    from aiosync.tensors.layout import Layout

__all__ = ["LoadTarget", "Loader", "named_views"]

Loader: TypeAlias = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""Takes the names and tensors of one version. The tensors are views of received memory, which is
valid and unchanged until it returns: copy what is kept, write to none. Its result is ignored."""


def named_views(layout: Layout, flat: FlatBuffer) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a version, in the order of its manifest; a tied one under each name."""
    for leaf, view in zip(layout.manifest.leaves, flat.views(layout), strict=True):
        tensor = view.detach()  # whoever keeps it is seen by FlatBuffer.exclusive()
        yield leaf.name, tensor
        for alias in leaf.aliases:
            yield alias, tensor


class LoadTarget:
    """Hands versions to a function. Used like a :class:`~aiosync.tensors.Target`.

    Attributes:
        load: The function.
    """

    def __init__(self, load: Loader) -> None:
        """Choose the function; it is not called yet.

        Raises:
            ConfigError: It cannot be called.
        """
        if not callable(load):
            raise ConfigError(f"load must be a function, got {type(load).__name__}")
        self.load = load

    def __repr__(self) -> str:
        return f"<LoadTarget {self.load!r}>"

    def check(self, layout: Layout, values: Mapping[str, Any]) -> None:
        """Raise unless the weights can be handed over. What fits is the function's to say.

        Raises:
            ConfigError: There are values that are not tensors.
        """
        if values:
            names = ", ".join(sorted(values))
            raise ConfigError(
                f"a load function takes tensors, and the update also has other values: {names}. "
                "Send without them, for example with a strategy or a dict of tensors"
            )

    def apply_(
        self,
        layout: Layout,
        flat: FlatBuffer,
        values: Mapping[str, Any],
        *,
        copy: bool,
        pool: CopyPool | None = None,
    ) -> None:
        """Call the function with the weights.

        Args:
            layout: Layout of the weights.
            flat: Buffer that holds them.
            values: Non-tensor values by name; there must be none.
            copy: Not used: the function copies.
            pool: Not used.

        Raises:
            ConfigError: There are values that are not tensors.
            Exception: Whatever the function raised. It has to put back what it changed.
        """
        self.check(layout, values)
        self.load(named_views(layout, flat))
