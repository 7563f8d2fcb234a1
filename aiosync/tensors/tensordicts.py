"""Questions about TensorDicts that do not import tensordict, which takes as long as torch.

Nothing is a TensorDict before somebody has imported the library: unpickling one imports it, too.
This module must never import asyncio or a transport.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase, TensorDictParams

__all__ = [
    "is_non_tensor",
    "is_plain_tensordict",
    "is_tensor_collection",
    "is_tensordict",
    "is_tensordict_params",
]

_library: Any = None


def _loaded() -> Any:
    """The library, or ``None`` as long as nobody has imported it."""
    global _library
    if _library is None and sys.modules.get("tensordict") is not None:
        import tensordict.utils  # at once; or waits for the thread that is importing it now

        _library = tensordict
    return _library


def is_tensordict(value: Any) -> TypeGuard[TensorDictBase]:
    """Whether a value is a TensorDict of any kind, but no tensorclass."""
    library = _library or _loaded()
    return library is not None and isinstance(value, library.TensorDictBase)


def is_plain_tensordict(value: Any) -> TypeGuard[TensorDict]:
    """Whether a value is of the class ``TensorDict`` itself."""
    library = _library or _loaded()
    return library is not None and type(value) is library.TensorDict


def is_tensordict_params(value: Any) -> TypeGuard[TensorDictParams]:
    """Whether a value is a TensorDict that is a module as well."""
    library = _library or _loaded()
    return library is not None and isinstance(value, library.TensorDictParams)


def is_tensor_collection(value: Any) -> bool:
    """Whether a value is a TensorDict or a tensorclass."""
    library = _library or _loaded()
    return library is not None and bool(library.is_tensor_collection(value))


def is_non_tensor(value: Any) -> bool:
    """Whether a value is one of those that TensorDicts wrap what is not a tensor in."""
    library = _library or _loaded()
    return library is not None and bool(library.utils.is_non_tensor(value))
