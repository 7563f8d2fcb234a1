"""Short notes that all processes of a Ray cluster can read: Ray's internal key-value store.

Every call blocks for a round trip to the cluster's head. Must not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from aiosync.errors import ConnectError

__all__ = ["find", "forget", "has", "put"]

_NAMESPACE = b"aiosync"


def _store() -> Any:
    return importlib.import_module("ray.experimental.internal_kv")


def put(key: bytes, value: bytes) -> None:
    """Leave a note, in the place of an older one.

    Raises:
        ConnectError: The cluster did not take it.
    """
    try:
        _store()._internal_kv_put(key, value, True, namespace=_NAMESPACE)
    except Exception as exc:  # of Ray, of many types; connect() and send() raise it
        raise ConnectError(
            f"the trainer could not be registered in the Ray cluster: {type(exc).__name__}: {exc}"
        ) from exc


def find(key: bytes) -> bytes | None:
    """What was left under a key; nothing where the cluster cannot say so now."""
    try:
        found = _store()._internal_kv_get(key, namespace=_NAMESPACE)
    except Exception:  # noqa: BLE001 - of Ray, of many types; ConnectTimeout says that none came
        return None
    return None if found is None else bytes(found)


def has(key: bytes) -> bool:
    """Whether there is something under a key; also where the cluster cannot say so now."""
    try:
        return bool(_store()._internal_kv_exists(key, namespace=_NAMESPACE))
    except Exception:  # noqa: BLE001 - of Ray, of many types; the caller looks again
        return True


def forget(key: bytes, value: bytes | None = None) -> None:
    """Take a note back, if there is one.

    Args:
        key: Of the note.
        value: Only if it still says this: somebody else may have left another one.
    """
    try:
        store = _store()
        if value is None or store._internal_kv_get(key, namespace=_NAMESPACE) == value:
            store._internal_kv_del(key, namespace=_NAMESPACE)
    except Exception:  # noqa: BLE001 - of Ray, of many types; the cluster has ended
        return
