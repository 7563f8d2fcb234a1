"""TorchRL's private names of a scheme's attributes, for the hooks of users' schemes.

Must not import torch or schemes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["alias", "register_workers"]


def alias(name: str, assign: Callable[[Any, Any], object] | None = None) -> Any:
    """Make an attribute that always has the value of another one.

    To assign ``None`` changes nothing: TorchRL's schemes assign it when they have no role.

    Args:
        name: Name of the other attribute.
        assign: Function that is called with the object and an assigned value. Without a function,
            assigned values are ignored, because the object knows the right one.
    """

    def write(owner: Any, value: Any) -> None:
        if assign is not None and value is not None:
            assign(owner, value)

    return property(operator.attrgetter(name), write)


def register_workers(scheme: Any, transports: Mapping[int, Any]) -> None:
    """Add workers with these transports, by index, to the sender of a scheme."""
    for idx, transport in transports.items():
        scheme._register_worker_sender(worker_idx=idx, transport=transport)
